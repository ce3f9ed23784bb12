// Inside parallel_for: a job, and the team of helper threads that joins it.
//
// The caller opens its job with one seat for each helper it wants, works on it itself, closes it when no task
// is left, and waits only for the helpers that took a seat. A helper that wakes up late, or that the system
// refused, therefore delays nobody. parallel_std.cpp and parallel_openmp.cpp differ only in where the helpers
// come from.
#pragma once

#include "core/parallel.hpp"
#include "core/parallel_sleeper.hpp"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>

namespace npattn::detail {

class Team;

constexpr std::int64_t signal_period = 40; // milliseconds between two looks at signals

// A coarse clock: a few ns to read, off by some milliseconds at most.
std::int64_t milliseconds() noexcept;

// The tasks of one parallel_for. It lives on the caller's stack, longer than any helper has a seat.
class Job {
public:
    Job(std::int64_t tasks, TaskFunction function, void* context) noexcept;

    void work(int thread, bool is_caller) noexcept; // runs tasks until none is left or the job is stopped
    void check_signals() noexcept;                  // caller only; asks the hook when it is due
    void fail(std::exception_ptr error) noexcept;   // the first error is kept
    bool stopped() const noexcept { return stop_.load(std::memory_order_relaxed); }
    void rethrow() const; // once all threads have left

    Team* team = nullptr;

private:
    const TaskFunction function_;
    void* const context_;
    const std::int64_t tasks_;
    std::int64_t signals_checked_; // milliseconds
    std::exception_ptr error_;
    std::atomic<bool> failed_{false};
    alignas(64) std::atomic<bool> stop_{false};
    alignas(64) std::atomic<std::int64_t> next_{0};
};

// The helpers of this process. Never destroyed: they may look at it until the process ends.
class Team {
public:
    static Team* acquire();                // nullptr while another caller has it
    bool of_this_process() const noexcept; // false in a child forked while it was in use
    void release() noexcept { busy_.store(false, std::memory_order_release); }
    void run(Job& job, int threads) noexcept; // by the caller that acquired it

    // For the helpers:
    std::uint32_t
    wait_for_job(std::uint32_t seen) noexcept; // sleeps until the job's number is another one than `seen`
    void help(std::uint32_t job) noexcept;     // works on the job of that number, if it has a free seat
    int free_seats() const noexcept {
        return static_cast<int>(gate_.load(std::memory_order_relaxed) & 0xffffffffu);
    }
    bool is_awake() const noexcept; // a helper would take a job without being woken
    int helpers() const noexcept { return helpers_.load(std::memory_order_relaxed); }

private:
    int gather(int wanted) noexcept;
    void wake(int wanted) noexcept;
    void wait_for_helpers(Job& job, int joined) noexcept;
    std::uint32_t job_number() const noexcept { return static_cast<std::uint32_t>(gate_.load() >> 32); }

    // The number of the job in the upper half, its free seats in the lower: a seat of a job that is over
    // cannot be taken.
    alignas(64) std::atomic<std::uint64_t> gate_{0};
    alignas(64) std::atomic<int> finished_{0}; // helpers that took a seat and are done
    std::atomic<bool> caller_sleeps_{false};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> busy_{false};
    std::atomic<int> helpers_{0};
    std::atomic<bool> spin_{true}; // there is a CPU for each thread of the last job
    const int cpus_ = default_threads();
    Job* job_ = nullptr; // this and threads_: written while the gate is closed
    int threads_ = 0;
    std::int64_t refused_ = -1; // when the system last refused a thread (milliseconds), or -1
    std::mutex mutex_;
    Sleeper* sleeping_ = nullptr; // a list, under the lock
    std::condition_variable opened_;
    std::condition_variable left_;
};

// Starts a thread that handles no signals (Python's main thread is to get them). False if the system refuses.
bool start_thread(void (*function)(Team&), Team& team) noexcept;

// Raises the number of helpers of `team` from `present` to `wanted`; returns how many there are. One for each
// runtime.
int add_helpers(Team& team, int present, int wanted) noexcept;

// How many of `helpers` threads sleep in wait_for_job; the others follow them. One for each runtime.
int waiting_threads(int helpers) noexcept;

} // namespace npattn::detail
