// parallel_for: jobs and their tasks, errors, signals.
#include "core/float_environment.hpp"
#include "core/parallel_team.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#include <time.h>
#endif
namespace npattn {
namespace detail {
namespace {

std::atomic<int (*)()> signal_hook{nullptr};

struct Place {
    Job* job = nullptr;
    bool is_caller = false;
};
thread_local Place place; // where this thread works now

} // namespace

std::int64_t milliseconds() noexcept {
#ifdef CLOCK_MONOTONIC_COARSE
    timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1000 + now.tv_nsec / 1000000;
#else
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
#endif
}

Job::Job(std::int64_t tasks, TaskFunction function, void* context) noexcept
    : function_(function), context_(context), tasks_(tasks), signals_checked_(milliseconds()) {}

void Job::work(int thread, bool is_caller) noexcept {
    const DefaultFloatEnvironment environment;
    place = {this, is_caller};
    try {
        while (!stop_requested()) {
            const std::int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
            if (task >= tasks_) {
                break;
            }
            function_(context_, task, thread);
        }
    } catch (...) {
        fail(std::current_exception());
    }
    place = {};
}

void Job::check_signals() noexcept {
    const std::int64_t now = milliseconds();
    if (now - signals_checked_ < signal_period) {
        return;
    }
    signals_checked_ = now;
    const auto hook = signal_hook.load(std::memory_order_relaxed);
    if (hook == nullptr) {
        return;
    }
    // A Python signal handler may call this library (that is a job of its own) and may fork.
    const Place here = place;
    place = {};
    const bool stop = hook() != 0;
    place = here;
    if (stop) {
        fail(std::make_exception_ptr(Interrupted{}));
    } else if (team != nullptr && !team->of_this_process()) {
        fail(std::make_exception_ptr(std::runtime_error(
            "a signal handler forked during a computation; it cannot go on in the child")));
    }
}

void Job::fail(std::exception_ptr error) noexcept {
    if (!failed_.exchange(true)) {
        error_ = std::move(error);
    }
    stop_.store(true, std::memory_order_relaxed);
}

void Job::rethrow() const {
    if (error_) {
        std::rethrow_exception(error_);
    }
}

void run_tasks(std::int64_t tasks, int threads, TaskFunction function, void* context) {
    if (place.job != nullptr) { // inside a task
        for (std::int64_t task = 0; task < tasks; ++task) {
            if (stop_requested()) {
                throw Interrupted{}; // the outer job has its error already; this only unwinds the task
            }
            function(context, task, 0);
        }
        return;
    }
    Job job(tasks, function, context);
    threads = static_cast<int>(std::min<std::int64_t>(threads, tasks));
    Team* const team = threads > 1 ? Team::acquire() : nullptr;
    if (team == nullptr) {
        job.work(0, true);
    } else {
        team->run(job, threads);
        team->release();
    }
    job.rethrow();
}

} // namespace detail

bool stop_requested() noexcept {
    const detail::Place here = detail::place;
    if (here.job == nullptr) {
        return false;
    }
    if (here.is_caller) {
        here.job->check_signals();
    }
    return here.job->stopped();
}

bool wait_for(const std::atomic<std::int64_t>& to_come) noexcept {
    while (to_come.load(std::memory_order_acquire) != 0) {
        if (stop_requested()) return false;
        std::this_thread::yield();
    }
    return true;
}

void set_signal_hook(int (*hook)()) noexcept { detail::signal_hook.store(hook, std::memory_order_relaxed); }

int default_threads() noexcept {
#if defined(__linux__)
    for (int limit = 1024; limit <= 1 << 20; limit *= 2) { // the kernel refuses a set smaller than its own
        cpu_set_t* const set = CPU_ALLOC(limit);
        if (set == nullptr) {
            break;
        }
        const std::size_t size = CPU_ALLOC_SIZE(limit);
        const int count = sched_getaffinity(0, size, set) == 0 ? CPU_COUNT_S(size, set) : 0;
        CPU_FREE(set);
        if (count > 0) {
            return count;
        }
    }
#endif
    return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

} // namespace npattn
