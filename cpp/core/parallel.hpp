// One way to use several threads: parallel_for. Everything that knows about threads is behind it
// (parallel_team.hpp says how).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace npattn {

// Thrown by parallel_for in the calling thread when the signal hook asked to stop. Not a std::exception: the
// binding layer leaves the Python exception that the hook has set pending.
struct Interrupted {};

namespace detail {
using TaskFunction = void (*)(void* context, std::int64_t task, int thread);
void run_tasks(std::int64_t tasks, int threads, TaskFunction function, void* context);
} // namespace detail

// Calls body(task, thread) once for every task in [0, tasks), on at most `threads` threads, the caller among them.
//
// - Tasks are handed out in increasing order: when task t starts, every task below t has started, each on a thread
//   of its own or finished. So a task may wait for an earlier one, as long as it polls stop_requested() meanwhile.
// - `thread` is in [0, threads) and no two threads at work on this call share it; the caller's is 0.
// - It runs in the caller alone where threads <= 1 or tasks <= 1, inside another parallel_for, and while another
//   caller has the team. Threads that the system refuses are done without.
// - The first exception of a task is rethrown here; tasks not yet started are then left out. Throws Interrupted when
//   the signal hook says so.
// - Tasks run in the default floating-point environment; the caller's comes back unchanged.
template <class Body> void parallel_for(std::int64_t tasks, int threads, Body&& body) {
    using Callable = std::remove_reference_t<Body>;
    detail::run_tasks(
        tasks, threads,
        [](void* context, std::int64_t task, int thread) {
            (*static_cast<Callable*>(context))(task, thread);
        },
        const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

// For calls so short that waking a thread that sleeps costs more than it brings: true while threads are awake, and
// where the last such question was asked so lately that waking them now serves calls to come.
bool team_is_warm() noexcept;

// True once the job this thread works on was interrupted or one of its tasks threw. Long tasks poll it (a few
// ns) and return early. On the calling thread it is also where signals are looked at.
bool stop_requested() noexcept;

// Waits inside a task until earlier tasks have counted `to_come` down to 0, and sees what they wrote before. False if
// the job is stopped meanwhile.
bool wait_for(const std::atomic<std::int64_t>& to_come) noexcept;

// `hook` returns non-zero when the caller must stop. It is called on the calling thread, at most 50 ms apart:
// while the caller waits, between its tasks, and in its calls of stop_requested(). nullptr: none.
void set_signal_hook(int (*hook)()) noexcept;

// The CPUs that this thread may run on (its affinity where the system has one).
int default_threads() noexcept;

// The number of threads that OpenMP would use for a region of the calling thread; 0 without OpenMP.
int openmp_limit() noexcept;

// "openmp" or "std".
const char* parallel_runtime() noexcept;

} // namespace npattn
