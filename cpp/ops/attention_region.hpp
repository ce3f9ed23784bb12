#pragma once
// Runs the tasks of all units of a source (see attention_plan.hpp): in one parallel region, or in one after
// the other where the memory that the tasks of a unit share would pass its limit.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
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
        threads_ = seconds_ < ONE_THREAD_SECONDS ? 1 : threads;
        std::int64_t runs = 0, units_in_all = 0, tasks = 0, most_tasks_of_unit = 0, sharing = 0;
        std::size_t partials = 0, most_partials_of_unit = 0;
        for_each_run([&](const UnitPlan<T>& plan, std::int64_t, std::int64_t units) {
            kernel_bytes_ = std::max(kernel_bytes_, plan.kernel_bytes);
            own_bytes_ = std::max(own_bytes_, plan.own_bytes);
            tasks += units * plan.tasks();
            units_in_all += units;
            ++runs;
            most_tasks_of_unit = std::max(most_tasks_of_unit, plan.tasks());
            if (plan.path == Path::shared_panels) {
                slot_bytes_ = std::max(slot_bytes_, plan.shared_bytes);
                sharing += units;
            } else {
                const std::size_t bytes = static_cast<std::size_t>(units) * plan.shared_bytes;
                partials = std::min(partials + bytes, UnitPlan<T>::partial_limit);
                most_partials_of_unit = std::max(most_partials_of_unit, plan.shared_bytes);
            }
        });
        slots_ = slots(sharing);
        in_slot_.assign(static_cast<std::size_t>(slots_), -1);
        tasks_.reserve(static_cast<std::size_t>(std::min(tasks, most_tasks + 2 * most_tasks_of_unit)));
        plans_.reserve(static_cast<std::size_t>(std::min(runs, most_tasks + 2)));
        units_.reserve(static_cast<std::size_t>(std::min(units_in_all, most_tasks + 1)));
        if (slots_ > 0 || partials > 0) to_come_ = std::make_unique<ToCome[]>(units_.capacity());
        const auto workers = static_cast<std::size_t>(std::min<std::int64_t>(threads_, tasks));
        memory_.emplace(workers * (kernel_bytes_ + own_bytes_),
                        static_cast<std::size_t>(slots_) * slot_bytes_ +
                            std::max(partials, most_partials_of_unit),
                        threads_);
    }

    void run() {
        for_each_run([&](const UnitPlan<T>& plan, std::int64_t first, std::int64_t units) {
            add(plan, first, units);
        });
        run_tasks();
    }

private:
    static constexpr std::int64_t most_tasks = 1 << 15; // of a region; a unit's tasks are not parted

    // Small, as other cores read what this one wrote a moment ago.
    struct Unit {
        std::size_t plan; // in plans_
        std::int64_t number;
        std::size_t shared;  // where the memory that its tasks share begins
        std::int64_t before; // the unit (in units_) whose panels lay there until now, or -1
    };
    // What of a unit is not done yet.
    struct ToCome {
        std::atomic<std::int64_t> parts, blocks;
    };
    // Part [0, parts) is a range of keys, to attend to or to pack; part parts + b is block b of the rows.
    struct Task {
        std::uint32_t unit; // in units_
        std::int32_t part;
    };

    // body(plan, first unit, count) for every run of units that are computed in the same way.
    template <class Body> void for_each_run(Body body) const {
        source_.for_each([&](const AttentionCall<T>& call, std::int64_t first, std::int64_t units) {
            const double share = unit_seconds(call) / seconds_;
            const UnitPlan<T> plan(table_, call, threads_, share);
            const std::int64_t tail = threads_;
            if (plan.path == Path::shared_panels && units > tail &&
                share * static_cast<double>(UnitPlan<T>::enough * threads_) <= 1) {
                // Each thread packs for itself, which is faster, but for the last units, so that all end together.
                const UnitPlan<T> one_of_many(table_, call, threads_, 0);
                if (one_of_many.path == Path::whole) {
                    body(one_of_many, first, units - tail);
                    first += units - tail;
                    units = tail;
                }
            }
            body(plan, first, units);
        });
    }

    // Units take turns in as many slots of panels as the ring of CallScratch has room for, three at least if they
    // stay under the limit: one is read while the next is packed, and the last rows of one before may be late.
    std::int64_t slots(std::int64_t units) const {
        if (units == 0) return 0;
        const std::size_t ring = static_cast<std::size_t>(threads_) * CallScratch::ring_bytes_a_thread;
        const std::size_t most = UnitPlan<T>::pack_limit / slot_bytes_;
        const std::size_t wanted = std::max<std::size_t>(3, ring / slot_bytes_);
        return std::min(static_cast<std::int64_t>(std::min(wanted, most)), units);
    }

    void add(const UnitPlan<T>& plan, std::int64_t first, std::int64_t units) {
        plans_.push_back(plan);
        for (std::int64_t number = first; number < first + units; ++number) {
            const bool shares = plan.path == Path::shared_panels;
            const bool full =
                !shares && partials_ > 0 && partials_ + plan.shared_bytes > UnitPlan<T>::partial_limit;
            if (full || std::ssize(tasks_) >= most_tasks) {
                run_tasks();
                plans_.push_back(plan);
            }
            const std::size_t slots_end = static_cast<std::size_t>(slots_) * slot_bytes_;
            Unit unit = {plans_.size() - 1, number, slots_end + partials_, -1};
            if (shares) {
                const auto slot = static_cast<std::size_t>(next_slot_++ % slots_);
                unit.shared = slot * slot_bytes_;
                unit.before = std::exchange(in_slot_[slot], std::ssize(units_));
            } else {
                partials_ += plan.shared_bytes;
            }
            units_.push_back(unit);
            // Panels are packed while the rows of the unit before are computed, so that nobody waits; not into the
            // only slot, of course.
            if (slots_ == 1) add_waiting_rows();
            if (shares) add_tasks(units_.size() - 1, 0, plan.parts);
            add_waiting_rows();
            if (plan.blocks > 0) {
                waiting_ = units_.size() - 1;
            } else {
                add_tasks(units_.size() - 1, 0, plan.tasks());
            }
        }
    }

    void add_tasks(std::size_t unit, std::int64_t first, std::int64_t last) {
        for (std::int64_t part = first; part < last; ++part) add_task(unit, part);
    }

    void add_task(std::size_t unit, std::int64_t part) {
        tasks_.push_back({static_cast<std::uint32_t>(unit), static_cast<std::int32_t>(part)});
    }

    // The last rows first: where attention is causal they have most keys.
    void add_waiting_rows() {
        if (!waiting_) return;
        const UnitPlan<T>& plan = plans_[units_[*waiting_].plan];
        for (std::int64_t b = plan.blocks; b-- > 0;) add_task(*waiting_, plan.parts + b);
        waiting_.reset();
    }

    void run_tasks() {
        add_waiting_rows();
        for (std::size_t u = 0; to_come_ && u < units_.size(); ++u) {
            to_come_[u].parts.store(plans_[units_[u].plan].parts);
            to_come_[u].blocks.store(plans_[units_[u].plan].blocks);
        }
        parallel_for(std::ssize(tasks_), threads_, [&](std::int64_t index, int thread) {
            const Task task = tasks_[static_cast<std::size_t>(index)];
            const Unit& unit = units_[task.unit];
            char* memory = memory_->own() + static_cast<std::size_t>(thread) * (kernel_bytes_ + own_bytes_);
            run_task(task, plans_[unit.plan], source_.call(unit.number), source_.unit(unit.number), memory);
        });
        tasks_.clear();
        units_.clear();
        plans_.clear();
        partials_ = 0;
        std::fill(in_slot_.begin(), in_slot_.end(), -1);
    }

    void run_task(Task task, const UnitPlan<T>& plan, const AttentionCall<T>& call, AttentionUnit<T> unit,
                  char* memory) {
        char* const own = memory + kernel_bytes_;
        AttentionUnit<T> next_unit;
        char* const shared = memory_->shared() + units_[task.unit].shared;
        ToCome* const to_come = to_come_ ? &to_come_[task.unit] : nullptr;
        switch (plan.path) {
        case Path::decode:
            attend_keys(plan, call, unit, 0, plan.partial(own), memory);
            return decode_.finish(call, unit, plan.partial(own), memory);
        case Path::decode_ranges:
            attend_keys(plan, call, unit, task.part, plan.partial(shared, task.part), memory);
            if (to_come->parts.fetch_sub(1, std::memory_order_acq_rel) == 1)
                merge(plan, call, unit, shared, memory);
            return;
        case Path::whole:
            plan.place_panels(unit, own);
            plan.kernel->pack(call, unit, 0, unit.key_len);
            // What this thread takes next if all keep pace.
            look_ahead(task.unit, static_cast<std::size_t>(threads_), unit, next_unit);
            for (std::int64_t row = 0; row < plan.rows; row += plan.block_rows) {
                attend_rows(plan, call, unit, row, memory);
            }
            return;
        case Path::shared_panels:
            plan.place_panels(unit, shared);
            if (task.part < plan.parts) {
                const std::int64_t before = units_[task.unit].before;
                if (before >= 0 && !wait_for(to_come_[static_cast<std::size_t>(before)].blocks)) return;
                const std::int64_t key = task.part * plan.pack_keys;
                const std::int64_t key_end = std::min(key + plan.pack_keys, unit.key_len);
                if (key < key_end) plan.kernel->pack(call, unit, key, key_end);
                to_come->parts.fetch_sub(1, std::memory_order_release);
                return;
            }
            if (!wait_for(to_come->parts)) return;
            look_ahead(task.unit, 2, unit, next_unit); // the next one is being packed
            attend_rows(plan, call, unit, (task.part - plan.parts) * plan.block_rows, memory);
            to_come->blocks.fetch_sub(1, std::memory_order_release);
            return;
        case Path::own_panels:
            return attend_rows(plan, call, unit, (task.part - plan.parts) * plan.block_rows, memory);
        }
    }

    // Has `unit`, number `index`, ask for the keys, values and queries of the one `distance` after it, if that is of
    // the same sizes.
    void look_ahead(std::size_t index, std::size_t distance, AttentionUnit<T>& unit,
                    AttentionUnit<T>& next) const {
        index += distance;
        if (index >= units_.size() || units_[index].plan != units_[index - distance].plan) return;
        next = source_.unit(units_[index].number);
        unit.next = &next;
    }

    void attend_keys(const UnitPlan<T>& plan, const AttentionCall<T>& call, const AttentionUnit<T>& unit,
                     std::int64_t range, const AttentionPartial<T>& partial, char* memory) const {
        if (call.write == Write::scores) return;
        const std::int64_t key = range * plan.key_range;
        decode_.attend(call, unit, key, key + plan.key_range, partial, memory);
    }

    // From the first range to the last, whichever ended last: the bits are fixed.
    void merge(const UnitPlan<T>& plan, const AttentionCall<T>& call, const AttentionUnit<T>& unit,
               char* shared, char* memory) const {
        const AttentionPartial<T> first = plan.partial(shared, 0);
        for (std::int64_t r = 1; r < plan.parts; ++r)
            decode_.merge(call, unit, first, plan.partial(shared, r));
        decode_.finish(call, unit, first, memory);
    }

    void attend_rows(const UnitPlan<T>& plan, const AttentionCall<T>& call, const AttentionUnit<T>& unit,
                     std::int64_t row, char* memory) const {
        plan.kernel->attend(call, unit, row, std::min(row + plan.block_rows, plan.rows), memory);
    }

    const Source& source_;
    const KernelTable& table_ = active_table();
    const DecodeKernels<T>& decode_ = kernels<T>(table_.decode);
    int threads_;
    double seconds_ = 0;                           // of all units, on one thread
    std::size_t kernel_bytes_ = 0, own_bytes_ = 0; // scratch of a thread
    std::size_t slot_bytes_ = 0;                   // panels of one unit
    std::int64_t slots_ = 0;
    std::optional<CallScratch> memory_;

    // Of one region.
    std::vector<UnitPlan<T>> plans_;
    std::vector<Unit> units_;
    std::vector<Task> tasks_;
    std::unique_ptr<ToCome[]> to_come_; // of each unit
    std::vector<std::int64_t> in_slot_; // the last unit of each slot, or -1
    std::int64_t next_slot_ = 0;
    std::optional<std::size_t> waiting_; // the unit whose rows are still to be added
    std::size_t partials_ = 0;           // bytes given to units
};

} // namespace npattn
