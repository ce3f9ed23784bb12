// Helpers as an OpenMP team that belongs to one leader thread. Called by its users directly, libgomp would
// hang in a forked child, end the process when a thread is refused, keep a pool for every calling thread, and
// renew the pool with each change of size: the leader is a thread of ours, new in every process, always opens
// the largest region so far, and probes before it grows.
#ifndef NPATTN_PARALLEL_STD

#ifndef _OPENMP
#error "compile with OpenMP (-fopenmp, /openmp), or set NPATTN_PARALLEL=std to use std::thread instead"
#endif

#include "core/parallel_team.hpp"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <omp.h>
#include <system_error>
#include <thread>
#include <vector>

namespace npattn {

int openmp_limit() noexcept { return omp_get_max_threads(); }

const char* parallel_runtime() noexcept { return "openmp"; }

namespace detail {

static void lead(Team& team) {
    omp_set_dynamic(0);
#ifdef KMP_VERSION_MAJOR
    kmp_set_blocktime(0); // LLVM's runtime; for libgomp, GOMP_SPINCOUNT is set while the module loads
#endif
    for (std::uint32_t seen = 0;;) {
        seen = team.wait_for_job(seen);
        if (team.free_seats() <= 1) { // in a later job there may be more: that one is not taken alone
            team.help(seen);
            continue;
        }
        const int size = team.helpers();
#pragma omp parallel num_threads(size)
        team.help(seen);
    }
}

// How many of `wanted` threads the system grants at one time.
static int probe_threads(int wanted) noexcept {
    std::vector<std::thread> threads;
    std::mutex mutex;
    std::condition_variable counted;
    bool leave = false;
    try {
        threads.reserve(static_cast<std::size_t>(wanted));
        while (static_cast<int>(threads.size()) < wanted) {
            threads.emplace_back([&] {
                std::unique_lock<std::mutex> lock(mutex);
                counted.wait(lock, [&] { return leave; });
            });
        }
    } catch (const std::exception&) { // system_error or bad_alloc: do with those there are
    }
    {
        const std::lock_guard<std::mutex> lock(mutex);
        leave = true;
    }
    counted.notify_all();
    for (std::thread& thread : threads) {
        thread.join();
    }
    return static_cast<int>(threads.size());
}

int add_helpers(Team& team, int present, int wanted) noexcept {
    if (present == 0) {
        if (!start_thread(lead, team)) {
            return 0;
        }
        present = 1;
    }
    return present < wanted ? present + probe_threads(wanted - present) : present;
}

int waiting_threads(int helpers) noexcept { return std::min(helpers, 1); } // the leader

} // namespace detail
} // namespace npattn

#endif
