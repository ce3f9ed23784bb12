#pragma once
// Memory for scratch: aligned to a cache line pair, uninitialised, freed with its owner. std::bad_alloc on
// failure.

#include <cstddef>
#include <new>
#include <utility>

namespace npattn {

class AlignedBuffer {
public:
    static constexpr std::size_t alignment = 128;

    AlignedBuffer() = default;
    explicit AlignedBuffer(std::size_t bytes)
        : data_(bytes == 0 ? nullptr : ::operator new (bytes, std::align_val_t{alignment})), bytes_(bytes) {}
    AlignedBuffer(AlignedBuffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~AlignedBuffer() { ::operator delete (data_, std::align_val_t{alignment}); }

    template <class T> T* as() const { return static_cast<T*>(data_); }
    std::size_t bytes() const { return bytes_; }

private:
    void* data_ = nullptr;
    std::size_t bytes_ = 0;
};

// bytes rounded up so that the next piece of a shared buffer starts aligned.
constexpr std::size_t align_up(std::size_t bytes) {
    return (bytes + AlignedBuffer::alignment - 1) / AlignedBuffer::alignment * AlignedBuffer::alignment;
}

// Scratch for one call of the calling thread on `threads` threads, uninitialised. Up to 8 MiB a thread of the call stay
// with the calling thread for its next call, so that it neither allocates nor touches fresh pages; more is given back at
// the end of the scope. A call inside a call (a Python signal handler may make one) gets memory of its own.
class CallScratch {
public:
    static constexpr std::size_t kept_bytes_a_thread = std::size_t{8} << 20;

    CallScratch(std::size_t bytes, int threads)
        : borrowed_(bytes <= static_cast<std::size_t>(threads) * kept_bytes_a_thread && !kept().busy) {
        if (!borrowed_) {
            own_ = AlignedBuffer(bytes);
            data_ = own_.as<char>();
            return;
        }
        AlignedBuffer& buffer = kept().buffer;
        if (buffer.bytes() < bytes) buffer = AlignedBuffer(bytes + bytes / 4);
        data_ = buffer.as<char>();
        kept().busy = true;
    }
    ~CallScratch() {
        if (borrowed_) kept().busy = false;
    }
    CallScratch(const CallScratch&) = delete;
    CallScratch& operator=(const CallScratch&) = delete;
    char* data() const { return data_; }

private:
    struct Kept {
        AlignedBuffer buffer;
        bool busy = false;
    };
    static Kept& kept() {
        static thread_local Kept of_this_thread;
        return of_this_thread;
    }

    bool borrowed_;
    AlignedBuffer own_;
    char* data_;
};

} // namespace npattn
