#pragma once
// Runs the tasks of all units of a source (see attention_plan.hpp): in one parallel region, or one after the other where
// the memory that their tasks share would pass its limit.

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "core/aligned_buffer.hpp"
#include "core/parallel.hpp"
#include "ops/attention_plan.hpp"

namespace npattn {

template <class T, class Source>
class AttentionRegion {
public:
    // All memory is taken here: where there is too little of it, nothing has been written.
    AttentionRegion(const Source& source, int threads) : source_(source) {
        source.for_each([&](const AttentionCall<T>& call, std::int64_t, std::int64_t units) {
            seconds_ += unit_seconds(call) * static_cast<double>(units);
        });
        threads_ = seconds_ < one_thread_seconds ? 1 : threads;
        std::int64_t tasks = 0;
        std::int64_t most_of_a_unit = 0;
        std::size_t shared = 0;
        std::size_t most_shared = 0; // by one unit
        source.for_each([&](const AttentionCall<T>& call, std::int64_t, std::int64_t units) {
            const UnitPlan<T> plan(call, threads_, share_of_all(call));
            kernel_bytes_ = std::max(kernel_bytes_, plan.kernel_bytes);
            own_bytes_ = std::max(own_bytes_, plan.own_bytes);
            tasks += units * plan.tasks();
            most_of_a_unit = std::max(most_of_a_unit, plan.tasks());
            shared = std::min(shared + static_cast<std::size_t>(units) * plan.shared_bytes, UnitPlan<T>::pack_limit);
            most_shared = std::max(most_shared, plan.shared_bytes);
        });
        threads_ = static_cast<int>(std::min<std::int64_t>(threads_, tasks));
        tasks_.reserve(static_cast<std::size_t>(std::min(tasks, most_tasks + most_of_a_unit)));
        if (most_shared > 0) to_come_ = std::make_unique<std::atomic<std::int64_t>[]>(tasks_.capacity());
        shared_offset_ = static_cast<std::size_t>(threads_) * (kernel_bytes_ + own_bytes_);
        memory_.emplace(shared_offset_ + std::max(shared, most_shared));
    }

    void run() {
        source_.for_each([&](const AttentionCall<T>& call, std::int64_t first, std::int64_t units) {
            const UnitPlan<T> plan(call, threads_, share_of_all(call));
            for (std::int64_t unit = first; unit < first + units; ++unit) {
                const bool full = shared_ > 0 && shared_ + plan.shared_bytes > plan.shared_limit;
                if (full || tasks_.size() >= most_tasks) run_tasks();
                add(plan, unit);
            }
        });
        run_tasks();
    }
