// parallel_for: every promise of parallel.hpp, under stress. Returns non-zero when one is broken.
#include "core/parallel.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <dirent.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool can_fork = false; // sanitizers refuse threads in a forked child, or limits of memory
#else
constexpr bool can_fork = true;
#endif

static std::atomic<int> failures{0};

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            std::fprintf(stderr, "%s:%d: failed: %.100s\n", __FILE__, __LINE__, #condition);                 \
            ++failures;                                                                                      \
        }                                                                                                    \
    } while (false)

using npattn::parallel_for;

static void sleep_ms(int duration) { std::this_thread::sleep_for(std::chrono::milliseconds(duration)); }

// Runs `tasks` tasks and checks that each ran once, in order of hand-out, on a thread index nobody else had
// meanwhile.
static void check_job(std::int64_t tasks, int threads) {
    std::vector<int> counts(static_cast<std::size_t>(tasks), 0);
    std::vector<std::atomic<int>> in_use(static_cast<std::size_t>(threads > 1 ? threads : 1));
    std::atomic<bool> sound{true};
    parallel_for(tasks, threads, [&](std::int64_t task, int thread) {
        const bool in_range = thread >= 0 && static_cast<std::size_t>(thread) < in_use.size();
        if (!in_range || in_use[static_cast<std::size_t>(thread)].fetch_add(1) != 0) {
            sound = false;
            return;
        }
        counts[static_cast<std::size_t>(task)] += 1;
        in_use[static_cast<std::size_t>(thread)].fetch_sub(1);
    });
    CHECK(sound);
    for (const int count : counts) {
        CHECK(count == 1);
    }
}

// How many threads work on one job. A loaded machine may let them join late: nobody leaves before all are there, or
// before `patience` milliseconds have passed.
template <class Wait = void (*)()>
static int threads_at_work(
    int threads, int patience = 10000, Wait wait = [] { sleep_ms(1); }) {
    std::vector<std::atomic<int>> seen(static_cast<std::size_t>(threads));
    std::atomic<int> distinct{0};
    const auto start = std::chrono::steady_clock::now();
    const auto late = [&] {
        return std::chrono::steady_clock::now() - start > std::chrono::milliseconds(patience);
    };
    parallel_for(threads * 4, threads, [&](std::int64_t, int thread) {
        distinct += 1 - seen[static_cast<std::size_t>(thread)].exchange(1);
        while (distinct < threads && !late()) {
            wait();
        }
    });
    return distinct;
}

static void test_values() {
    for (int round = 0; round < 200; ++round) {
        for (int threads = 0; threads <= 8; ++threads) {
            check_job((round * 7 + threads) % 40, threads);
        }
    }
    check_job(100000, 4);
}

static void test_earlier_task() {
    for (int round = 0; round < 300; ++round) {
        std::atomic<int> packed{0};
        std::atomic<int> right{0};
        parallel_for(12, 1 + round % 4, [&](std::int64_t task, int) {
            if (task < 4) {
                ++packed;
                return;
            }
            while (packed < 4 && !npattn::stop_requested()) {
                std::this_thread::yield();
            }
            right += packed == 4;
        });
        CHECK(right == 8);
    }
}

static void test_exceptions() {
    for (int round = 0; round < 200; ++round) {
        const int threads = 1 + round % 5;
        std::string message;
        std::atomic<int> begun{0};
        try {
            parallel_for(1000, threads, [&](std::int64_t task, int) {
                ++begun;
                if (task == 3) {
                    throw std::runtime_error("task 3");
                }
                while (task > 3 && !npattn::stop_requested()) { // ends only because task 3 fails
                    std::this_thread::yield();
                }
            });
        } catch (const std::runtime_error& error) {
            message = error.what();
        }
        CHECK(message == "task 3");
        CHECK(begun <= 4 + threads);
        CHECK(!npattn::stop_requested());
        check_job(50, threads);
    }
}

static void test_nested() {
    std::atomic<int> sum{0};
    parallel_for(20, 3, [&](std::int64_t, int) {
        const std::thread::id outer = std::this_thread::get_id();
        parallel_for(10, 3, [&](std::int64_t, int thread) {
            CHECK(std::this_thread::get_id() == outer);
            CHECK(thread == 0);
            ++sum;
        });
    });
    CHECK(sum == 200);
    std::string message;
    try {
        parallel_for(20, 3, [&](std::int64_t, int) {
            parallel_for(10, 3, [&](std::int64_t task, int) {
                if (task == 5) {
                    throw std::runtime_error("inner");
                }
            });
        });
    } catch (const std::runtime_error& error) {
        message = error.what();
    }
    CHECK(message == "inner");
}

static std::atomic<int> hook_calls{0};
static std::atomic<int> hook_answer{0};
static std::thread::id hook_thread;
static int hook() {
    ++hook_calls;
    CHECK(std::this_thread::get_id() == hook_thread);
    parallel_for(4, 2, [](std::int64_t, int) {}); // as a signal handler may
    return hook_answer;
}

static void test_signals() {
    hook_thread = std::this_thread::get_id();
    npattn::set_signal_hook(hook);
    // While the caller waits for a helper, between its tasks, and inside one that polls.
    parallel_for(2, 2, [](std::int64_t task, int) { sleep_ms(task == 0 ? 1 : 400); });
    parallel_for(80, 1, [](std::int64_t, int) { sleep_ms(5); });
    CHECK(hook_calls >= 8);
    for (int threads = 1; threads <= 3; ++threads) {
        hook_answer = 1;
        bool interrupted = false;
        const auto start = std::chrono::steady_clock::now();
        try {
            parallel_for(threads, threads, [](std::int64_t, int) {
                while (!npattn::stop_requested()) {
                    std::this_thread::yield();
                }
            });
        } catch (const npattn::Interrupted&) {
            interrupted = true;
        }
        CHECK(interrupted);
        CHECK(std::chrono::steady_clock::now() - start < std::chrono::milliseconds(500));
        hook_answer = 0;
        check_job(50, threads);
    }
    npattn::set_signal_hook(nullptr);
}

static void test_float_environment() {
#if defined(__x86_64__)
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040); // flush to zero, denormals are zero
    std::atomic<int> wrong{0};
    parallel_for(64, 3, [&](std::int64_t, int) {
        volatile float tiny = 1e-39f;
        wrong += tiny * 0.5f == 0.0f;
        sleep_ms(1);
    });
    CHECK(wrong == 0);
    CHECK(_mm_getcsr() == (before | 0x8040));
    _mm_setcsr(before);
#endif
}

#if defined(__linux__)
static int process_threads() {
    int count = -2; // . and ..
    DIR* const directory = opendir("/proc/self/task");
    while (readdir(directory) != nullptr) {
        ++count;
    }
    closedir(directory);
    return count;
}

// Runs `body` in a forked child; true if it ends by itself within 20 s and no check fails there.
template <class Body> static bool in_child(Body body) {
    const pid_t child = fork();
    if (child == 0) {
        failures = 0;
        body();
        _exit(failures == 0 ? 0 : 1);
    }
    int status = 0;
    for (int i = 0; i < 2000; ++i) {
        if (waitpid(child, &status, WNOHANG) == child) {
            return WIFEXITED(status) && WEXITSTATUS(status) == 0;
        }
        sleep_ms(10);
    }
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    return false;
}

static void test_fork() {
    check_job(100, 3);
    for (int round = 0; round < 10; ++round) {
        CHECK(in_child([] {
            check_job(100, 3);
            CHECK(threads_at_work(3) == 3);
            CHECK(process_threads() == 3);
            CHECK(in_child([] { CHECK(threads_at_work(4) == 4); }));
        }));
    }
    // While another thread computes.
    std::atomic<bool> done{false};
    std::thread busy([&] {
        while (!done) {
            check_job(200, 3);
        }
    });
    for (int round = 0; round < 20; ++round) {
        CHECK(in_child([] { check_job(100, 3); }));
    }
    done = true;
    busy.join();
}

static void test_refused_threads() {
    CHECK(in_child([] {
        // Room for a few more stacks of 8 MiB, beside those that the C library has kept.
        std::FILE* const file = std::fopen("/proc/self/statm", "r");
        unsigned long pages = 0;
        CHECK(std::fscanf(file, "%lu", &pages) == 1);
        std::fclose(file);
        const rlim_t bytes = static_cast<rlim_t>(pages) * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
        const rlimit limit{bytes + (28u << 20), bytes + (28u << 20)};
        CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
        for (int round = 0; round < 50; ++round) {
            check_job(200, 40);
        }
        const int at_work = threads_at_work(40, 500);
        std::fprintf(stderr, "40 threads asked for, %d granted\n", at_work);
        CHECK(at_work >= 1 && at_work < 40);
    }));
}

static void test_thread_bound() {
    CHECK(in_child([] {
        const int callers = 6;
        const int team = 4;
        std::atomic<int> most{0};
        std::vector<std::thread> threads;
        for (int caller = 0; caller < callers; ++caller) {
            threads.emplace_back([&] {
                for (int round = 0; round < 300; ++round) {
                    check_job(30, 1 + round % team);
                }
                const int now = process_threads();
                if (now > most) {
                    most = now;
                }
            });
        }
        for (std::thread& thread : threads) {
            thread.join();
        }
        CHECK(most <= 1 + callers + team - 1);
        CHECK(process_threads() <= team);
    }));
}

static void test_idle_team_sleeps() {
    check_job(100, 3);
    sleep_ms(30);
    rusage before{};
    getrusage(RUSAGE_SELF, &before);
    sleep_ms(300);
    rusage after{};
    getrusage(RUSAGE_SELF, &after);
    const auto microseconds = [](const rusage& usage) {
        return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000 + usage.ru_utime.tv_usec +
               usage.ru_stime.tv_usec;
    };
    CHECK(microseconds(after) - microseconds(before) < 20000);
    check_job(100, 3);
}
#endif

static void test_many_callers() {
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 6; ++caller) {
        callers.emplace_back([caller] {
            for (int round = 0; round < 500; ++round) {
                check_job(1 + (round + caller) % 30, 1 + (round + caller) % 5);
            }
        });
    }
    for (std::thread& caller : callers) {
        caller.join();
    }
}

static void test_idle_then_hot() {
    for (int round = 0; round < 40; ++round) {
        sleep_ms(round % 4 == 0 ? 5 : 0);
        for (int hot = 0; hot < 50; ++hot) {
            check_job(8, 1 + hot % 4);
        }
    }
}

// Threads that sleep are not worth waking for one short call, but for two in a row; then they are awake. A loaded
// machine may hold up any of it: each has many rounds.
static void test_warm_team() {
    const auto in_some_round = [](auto&& holds) {
        for (int round = 0; round < 1000; ++round) {
            sleep_ms(1); // nobody has asked lately
            if (holds()) return true;
        }
        return false;
    };
    CHECK(in_some_round([] { return !npattn::team_is_warm(); }));
    CHECK(in_some_round([] {
        npattn::team_is_warm();
        return npattn::team_is_warm();
    }));
    CHECK(npattn::default_threads() == 1 || in_some_round([] {
              // A short job may be over before the thread that it wakes is awake.
              threads_at_work(2, 100, std::this_thread::yield);
              return npattn::team_is_warm();
          }));
}

int main() {
    test_values();
    test_earlier_task();
    test_exceptions();
    test_nested();
    test_signals();
    test_float_environment();
    test_many_callers();
    test_idle_then_hot();
    test_warm_team();
#if defined(__linux__)
    test_idle_team_sleeps();
    if (can_fork) {
        test_fork();
        test_refused_threads();
        test_thread_bound();
    }
#endif
    std::printf("%s: %d failures\n", npattn::parallel_runtime(), failures.load());
    return failures == 0 ? 0 : 1;
}
