#pragma once
// Who is using a store: many readers or one writer. Nobody waits: who comes second is told so.

#include <atomic>
#include <cstdint>
#include <stdexcept>

#include "core/process.hpp"

namespace npattn {

struct AccessConflict : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Access {
public:
    struct Hold {
        std::uint32_t process;
        bool exclusive;
    };

    // In a forked child, those who were reading in its parent are not there any more. Whoever was writing there may
    // have left the store half changed: it is lost to the child, unless the writer is the thread that forked.
    Hold acquire(bool exclusive) {
        const std::uint32_t here = process_number();
        std::uint64_t before = state_.load();
        std::uint32_t readers;
        do {
            const bool of_parent = process_of(before) != here;
            if (holders(before) == WRITER) {
                throw AccessConflict(of_parent ? "the cache was being changed when this process was forked"
                                               : "the cache is being changed by another call");
            }
            readers = of_parent ? 0 : holders(before);
            if (exclusive && readers > 0) throw AccessConflict("the cache is being read by another call");
        } while (!state_.compare_exchange_weak(before, state(here, exclusive ? WRITER : readers + 1)));
        return {here, exclusive};
    }

    // Nothing where the process is another one and has counted anew since the hold began.
    void release(const Hold& hold) noexcept {
        std::uint64_t before = state_.load();
        do {
            if (process_of(before) != hold.process) return;
        } while (!state_.compare_exchange_weak(
            before, state(hold.process, hold.exclusive ? 0 : holders(before) - 1)));
    }

private:
    static constexpr std::uint32_t WRITER = UINT32_MAX;

    // The process that counts, and its readers or WRITER.
    static std::uint64_t state(std::uint32_t process, std::uint32_t holders) {
        return std::uint64_t{process} << 32 | holders;
    }
    static std::uint32_t process_of(std::uint64_t state) { return static_cast<std::uint32_t>(state >> 32); }
    static std::uint32_t holders(std::uint64_t state) { return static_cast<std::uint32_t>(state); }

    std::atomic<std::uint64_t> state_ = 0;
};

class HeldAccess {
public:
    HeldAccess(Access& access, bool exclusive) : access_(access), hold_(access.acquire(exclusive)) {}
    ~HeldAccess() { access_.release(hold_); }
    HeldAccess(const HeldAccess&) = delete;
    HeldAccess& operator=(const HeldAccess&) = delete;

private:
    Access& access_;
    Access::Hold hold_;
};

} // namespace npattn
