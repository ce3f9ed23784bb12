// Where a sleeping thread wakes up.
//
// Linux often wakes a thread on the CPU of the thread that wakes it: in a virtual machine a halted CPU does
// not count as idle. There a helper would wait behind the caller that it is to help, for milliseconds. So the
// waker first forbids its own CPU to the sleeper, who lifts the ban once awake.
#pragma once

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace npattn::detail {

// A thread of a team while it sleeps; the team's lock guards it.
class Sleeper {
public:
    Sleeper* next = nullptr;

#if defined(__linux__)
    void avoid_this_cpu() noexcept { // by the waker
        const int here = sched_getcpu();
        if (banned_ || here < 0 || here >= CPU_SETSIZE ||
            sched_getaffinity(thread_, sizeof allowed_, &allowed_) != 0 || !CPU_ISSET(here, &allowed_)) {
            return;
        }
        cpu_set_t others = allowed_;
        CPU_CLR(here, &others); // an empty set is refused, and changes nothing
        banned_ = sched_setaffinity(thread_, sizeof others, &others) == 0;
    }
    void lift_ban() noexcept { // by the sleeper
        if (banned_) {
            sched_setaffinity(0, sizeof allowed_, &allowed_);
        }
    }

private:
    const pid_t thread_ = static_cast<pid_t>(syscall(SYS_gettid));
    bool banned_ = false;
    cpu_set_t allowed_;
#else
    void avoid_this_cpu() noexcept {}
    void lift_ban() noexcept {}
#endif
};

} // namespace npattn::detail
