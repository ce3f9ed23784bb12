#include "ops/ceiling.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "core/parallel.hpp"
#include "dispatch/registry.hpp"

namespace npattn {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// What the kernels compute must go somewhere, or they need not run.
std::atomic<double> sink{0.0};

constexpr double round_seconds = 2e-3; // starting the team costs a few us

template <class T> double measure(const CeilingKernels<T>& kernel, int threads, double seconds) {
    const auto round = [&](std::int64_t steps) {
        const Clock::time_point start = Clock::now();
        parallel_for(threads, threads, [&](std::int64_t, int) {
            sink.store(kernel.multiply_add(steps, T(0.5), T(1)), std::memory_order_relaxed);
        });
        return seconds_since(start);
    };

    std::int64_t steps = 1024;
    double elapsed = round(steps);
    while (elapsed < round_seconds / 2) {
        steps *= 2;
        elapsed = round(steps);
    }

    double best = elapsed;
    const Clock::time_point start = Clock::now();
    do {
        best = std::min(best, round(steps));
    } while (seconds_since(start) < seconds);
    return static_cast<double>(steps) * kernel.step_operations * threads / best;
}

} // namespace

template <> double measure_fma_peak<float>(int threads, double seconds) {
    return measure(active_table().ceiling->f32, threads, seconds);
}
template <> double measure_fma_peak<double>(int threads, double seconds) {
    return measure(active_table().ceiling->f64, threads, seconds);
}
template <> double measure_fma_peak<BFloat16>(int threads, double seconds) {
    const DotTable* dot = active_table().dot;
    return dot != nullptr ? measure(dot->ceiling, threads, seconds)
                          : measure_fma_peak<float>(threads, seconds);
}

double measure_read_bandwidth(const char* data, std::int64_t bytes, int threads, int repeats) {
    const auto read_sum = active_table().ceiling->read_sum;
    // Several pieces a thread, so that one that is held up does not make the others wait; whole cache lines
    // each.
    const std::int64_t pieces = 4 * static_cast<std::int64_t>(threads);
    const std::int64_t piece = (bytes / pieces + 63) / 64 * 64 + 64;

    double best = 0.0;
    for (int i = 0; i < repeats; ++i) {
        const Clock::time_point start = Clock::now();
        parallel_for(pieces, threads, [&](std::int64_t task, int) {
            const std::int64_t first = std::min(task * piece, bytes);
            const std::int64_t last = std::min(first + piece, bytes);
            sink.store(read_sum(data + first, last - first), std::memory_order_relaxed);
        });
        best = std::max(best, static_cast<double>(bytes) / seconds_since(start));
    }
    return best;
}

} // namespace npattn
