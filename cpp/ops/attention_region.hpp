#pragma once
// Runs the tasks of all units of a source (see attention_plan.hpp): in one parallel region, or in one after
// the other where the memory that the tasks of a unit share would pass its limit.

#include <algorithm>
#include <atomic>
#include <iterator>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "core/aligned_buffer.hpp"
#include "core/parallel.hpp"
#include "ops/attention_plan.hpp"

namespace npattn {

template <class T, class Source> class AttentionRegion {
public:
    // Takes all the memory, so that where there is too little of it nothing has been written.
    AttentionRegion(const Source& source, int threads) : source_(source) {
        source.for_each([&](const AttentionCall<T>& call, std::int64_t, std::int64_t units) {
            seconds_ += unit_seconds(call) * static_cast<double>(units);
        });
        threads_ = seconds_ < one_thread_seconds ? 1 : threads;
        std::int64_t tasks = 0, units_in_all = 0, most_tasks_of_unit = 0;
        std::size_t shared = 0, most_shared_by_unit = 0;
        source.for_each([&](const AttentionCall<T>& call, std::int64_t, std::int64_t units) {
            const UnitPlan<T> plan = plan_of(call);
            kernel_bytes_ = std::max(kernel_bytes_, plan.kernel_bytes);
            own_bytes_ = std::max(own_bytes_, plan.own_bytes);
            tasks += units * plan.tasks();
            units_in_all += units;
            shared = std::min(shared + static_cast<std::size_t>(units) * plan.shared_bytes, most_shared);
            most_tasks_of_unit = std::max(most_tasks_of_unit, plan.tasks());
            most_shared_by_unit = std::max(most_shared_by_unit, plan.shared_bytes);
        });
        tasks_.reserve(static_cast<std::size_t>(std::min(tasks, most_tasks + 2 * most_tasks_of_unit)));
        units_.reserve(static_cast<std::size_t>(std::min(units_in_all, most_tasks + 1)));
        if (shared > 0) to_come_ = std::make_unique<std::atomic<std::int64_t>[]>(units_.capacity());
        const auto workers = static_cast<std::size_t>(std::min<std::int64_t>(threads_, tasks));
        shared_begin_ = workers * (kernel_bytes_ + own_bytes_);
        memory_.emplace(shared_begin_ + std::max(shared, most_shared_by_unit));
    }

    void run() {
        source_.for_each([&](const AttentionCall<T>& call, std::int64_t first, std::int64_t units) {
            const UnitPlan<T> plan = plan_of(call);
            for (std::int64_t unit = first; unit < first + units; ++unit) add(plan, unit);
        });
        run_tasks();
    }

private:
    static constexpr double one_thread_seconds = 30e-6; // below, a second thread costs more than it brings
    static constexpr std::int64_t most_tasks = 1 << 15; // of a region; a unit's tasks are not parted
    static constexpr std::size_t most_shared = std::max(UnitPlan<T>::pack_limit, UnitPlan<T>::partial_limit);

    struct Unit {
        UnitPlan<T> plan;
        std::int64_t number;
        std::size_t shared; // where the memory that its tasks share begins
    };
    struct Task {
        std::size_t unit;         // in units_
        std::int64_t first, last; // keys to pack or to attend to; or rows
        bool packs;
    };

    UnitPlan<T> plan_of(const AttentionCall<T>& call) const {
        return UnitPlan<T>(table_, call, threads_, unit_seconds(call) / seconds_);
    }

    void add(const UnitPlan<T>& plan, std::int64_t number) {
        const bool full = shared_ > 0 && shared_ + plan.shared_bytes > plan.shared_limit;
        if (full || std::ssize(tasks_) >= most_tasks) run_tasks();
        units_.push_back({plan, number, shared_begin_ + shared_});
        shared_ += plan.shared_bytes;
        const std::size_t unit = units_.size() - 1;
        if (plan.path == Path::shared_panels) {
            // Packed while the rows of the unit before are computed, so that nobody waits.
            for (std::int64_t p = 0; p < plan.parts; ++p) add_task(unit, p, plan.pack_keys, true);
        }
        add_waiting_rows();
        if (plan.path == Path::decode) add_task(unit, 0, plan.key_range);
        if (plan.path == Path::whole) add_task(unit, 0, plan.rows);
        if (plan.path == Path::decode_ranges) {
            for (std::int64_t p = 0; p < plan.parts; ++p) add_task(unit, p, plan.key_range);
        }
        if (plan.blocks > 0) waiting_ = unit;
    }

    void add_task(std::size_t unit, std::int64_t part, std::int64_t size, bool packs = false) {
        tasks_.push_back({unit, part * size, (part + 1) * size, packs});
    }

    // The last rows first: where attention is causal they have most keys.
    void add_waiting_rows() {
        if (!waiting_) return;
        for (std::int64_t b = units_[*waiting_].plan.blocks; b-- > 0;) add_task(*waiting_, b, block_rows());
        waiting_.reset();
    }

    void run_tasks() {
        add_waiting_rows();
        if (tasks_.empty()) return;
        for (std::size_t u = 0; to_come_ && u < units_.size(); ++u) to_come_[u].store(units_[u].plan.parts);
        parallel_for(std::ssize(tasks_), threads_, [&](std::int64_t index, int thread) {
            const Task& task = tasks_[static_cast<std::size_t>(index)];
            char* memory = memory_->data() + static_cast<std::size_t>(thread) * (kernel_bytes_ + own_bytes_);
            const std::int64_t number = units_[task.unit].number;
            run_task(task, source_.call(number), source_.unit(number), memory);
        });
        tasks_.clear();
        units_.clear();
        shared_ = 0;
    }

    void run_task(const Task& task, const AttentionCall<T>& call, AttentionUnit<T> unit, char* memory) {
        const UnitPlan<T>& plan = units_[task.unit].plan;
        char* const own = memory + kernel_bytes_;
        char* const shared = memory_->data() + units_[task.unit].shared;
        switch (plan.path) {
        case Path::decode:
            attend_keys(task, call, unit, plan.partial(own), memory);
            return decode_.finish(call, unit, plan.partial(own), memory);
        case Path::decode_ranges:
            attend_keys(task, call, unit, plan.partial(shared, task.first / plan.key_range), memory);
            if (to_come_[task.unit].fetch_sub(1, std::memory_order_acq_rel) == 1)
                merge(plan, call, unit, shared, memory);
            return;
        case Path::whole:
            plan.place_panels(unit, own);
            pack_panels(kernels<T>(table_.gemm), call, unit, 0, unit.key_len);
            for (std::int64_t row = 0; row < plan.rows; row += block_rows()) {
                attend_rows(row, row + block_rows(), plan, call, unit, memory);
            }
            return;
        case Path::shared_panels:
            plan.place_panels(unit, shared);
            if (task.packs) {
                pack_panels(kernels<T>(table_.gemm), call, unit, task.first, task.last);
                to_come_[task.unit].fetch_sub(1, std::memory_order_release);
            } else if (wait_for_panels(task.unit)) {
                attend_rows(task.first, task.last, plan, call, unit, memory);
            }
            return;
        case Path::own_panels:
            return attend_rows(task.first, task.last, plan, call, unit, memory);
        }
    }

    void attend_keys(const Task& task, const AttentionCall<T>& call, const AttentionUnit<T>& unit,
                     const AttentionPartial<T>& partial, char* memory) const {
        if (call.write == Write::scores) return;
        decode_.attend(call, unit, task.first, task.last, partial, memory);
    }

    // Always from the first range to the last, whichever ended last, so that the bits are fixed.
    void merge(const UnitPlan<T>& plan, const AttentionCall<T>& call, const AttentionUnit<T>& unit,
               char* shared, char* memory) const {
        const AttentionPartial<T> first = plan.partial(shared, 0);
        for (std::int64_t r = 1; r < plan.parts; ++r)
            decode_.merge(call, unit, first, plan.partial(shared, r));
        decode_.finish(call, unit, first, memory);
    }

    void attend_rows(std::int64_t first, std::int64_t last, const UnitPlan<T>& plan,
                     const AttentionCall<T>& call, const AttentionUnit<T>& unit, char* memory) const {
        attention_.attend(call, unit, first, std::min(last, plan.rows), memory);
    }

    // False if the call was stopped instead.
    bool wait_for_panels(std::size_t unit) const {
        while (to_come_[unit].load(std::memory_order_acquire) != 0) {
            if (stop_requested()) return false;
            std::this_thread::yield();
        }
        return true;
    }

    std::int64_t block_rows() const { return attention_.rows; }

    const Source& source_;
    const KernelTable& table_ = active_table();
    const DecodeKernels<T>& decode_ = kernels<T>(table_.decode);
    const AttentionKernels<T>& attention_ = kernels<T>(table_.attention);
    int threads_;
    double seconds_ = 0;                           // of all units, on one thread
    std::size_t kernel_bytes_ = 0, own_bytes_ = 0; // scratch of a thread
    std::size_t shared_begin_;
    std::optional<CallScratch> memory_;

    // Of one region.
    std::vector<Unit> units_;
    std::vector<Task> tasks_;
    std::unique_ptr<std::atomic<std::int64_t>[]> to_come_; // parts of each unit that are not done yet
    std::optional<std::size_t> waiting_;                   // the unit whose rows are still to be added
    std::size_t shared_ = 0;                               // bytes given to units
};

} // namespace npattn
