#pragma once
// Memory for scratch: aligned to a cache line pair, uninitialised, freed with its owner. std::bad_alloc on
// failure.

#include <algorithm>
#include <cstddef>
#include <limits>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace npattn {

// a b; std::bad_alloc where that is more than memory can be.
inline std::size_t bytes_product(std::size_t a, std::size_t b) {
    constexpr std::size_t most = std::numeric_limits<std::ptrdiff_t>::max() / 2;
    if (b != 0 && a > most / b) throw std::bad_alloc();
    return a * b;
}

class AlignedBuffer {
public:
    static constexpr std::size_t alignment = 128;

    AlignedBuffer() = default;
    explicit AlignedBuffer(std::size_t bytes) : bytes_(bytes) {
        if (bytes == 0) return;
        data_ = ::operator new (bytes, std::align_val_t{alignment_of(bytes)});
#if defined(__linux__)
        if (bytes >= huge_page) ::madvise(data_, bytes / huge_page * huge_page, MADV_HUGEPAGE);
#endif
    }
    AlignedBuffer(AlignedBuffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~AlignedBuffer() { ::operator delete (data_, std::align_val_t{alignment_of(bytes_)}); }

    template <class T> T* as() const { return static_cast<T*>(data_); }
    std::size_t bytes() const { return bytes_; }

private:
    // Whole huge pages, where the system has them, save the kernels most of their address translations.
    static constexpr std::size_t huge_page = std::size_t{2} << 20;
    static constexpr std::size_t alignment_of(std::size_t bytes) {
        return bytes >= huge_page ? huge_page : alignment;
    }

    void* data_ = nullptr;
    std::size_t bytes_ = 0;
};

// bytes rounded up so that the next piece of a shared buffer starts aligned.
constexpr std::size_t align_up(std::size_t bytes) {
    return (bytes + AlignedBuffer::alignment - 1) / AlignedBuffer::alignment * AlignedBuffer::alignment;
}

// Scratch for one call of the calling thread on `threads` threads, uninitialised: `own` bytes that each stay
// with one thread, and `shared` bytes that some threads write and others read. Up to 8 MiB a thread of the call
// stay with the calling thread for its next calls, so that they neither allocate nor touch fresh pages; more is
// given back at the end of the scope. A call inside a call (a Python signal handler may make one) gets memory of
// its own.
//
// Shared memory moves round a ring from call to call: to write a cache line that another core has read lately
// costs ten times as much as one that its cache has forgotten.
class CallScratch {
public:
    static constexpr std::size_t kept_bytes_a_thread = std::size_t{8} << 20;
    static constexpr std::size_t ring_bytes_a_thread = std::size_t{4} << 20;

    CallScratch(std::size_t own, std::size_t shared, int threads) : borrowed_(fits(own, shared, threads)) {
        if (!borrowed_) {
            memory_ = AlignedBuffer(align_up(own) + shared);
            own_ = memory_.as<char>();
            shared_ = own_ + align_up(own);
            return;
        }
        Kept& kept = of_this_thread();
        if (kept.own.bytes() < own) kept.own = AlignedBuffer(own);
        if (shared > 0) {
            const std::size_t ring =
                threads > 1 ? static_cast<std::size_t>(threads) * ring_bytes_a_thread : 0;
            if (kept.ring.bytes() < std::max(ring, shared)) kept.ring = AlignedBuffer(std::max(ring, shared));
            if (kept.place + shared > kept.ring.bytes()) kept.place = 0;
            shared_ = kept.ring.as<char>() + kept.place;
            if (threads > 1) kept.place += align_up(shared);
        }
        own_ = kept.own.as<char>();
        kept.busy = true;
    }
    ~CallScratch() {
        if (borrowed_) of_this_thread().busy = false;
    }
    CallScratch(const CallScratch&) = delete;
    CallScratch& operator=(const CallScratch&) = delete;
    char* own() const { return own_; }
    char* shared() const { return shared_; }

private:
    struct Kept {
        AlignedBuffer own, ring;
        std::size_t place = 0; // where in the ring the next call begins
        bool busy = false;
    };
    static Kept& of_this_thread() {
        static thread_local Kept kept;
        return kept;
    }
    static bool fits(std::size_t own, std::size_t shared, int threads) {
        const std::size_t ring = static_cast<std::size_t>(threads) * ring_bytes_a_thread;
        const std::size_t most = static_cast<std::size_t>(threads) * kept_bytes_a_thread;
        return own <= most && std::max(shared, shared > 0 && threads > 1 ? ring : 0) <= most - own &&
               !of_this_thread().busy;
    }

    bool borrowed_;
    AlignedBuffer memory_;
    char* own_ = nullptr;
    char* shared_ = nullptr;
};

} // namespace npattn
