#include "ops/attention.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "core/aligned_buffer.hpp"
#include "core/parallel.hpp"
#include "dispatch/registry.hpp"

namespace npattn {
namespace {

constexpr std::int64_t few_rows = 16;        // fewer packed rows than this: the decode kernels
constexpr std::int64_t few_rows_of_one = 64; // the same for a single query position
constexpr std::int64_t key_range = 512;      // keys of one decode task: a multiple of the kernels' key block
constexpr std::int64_t pack_keys = 512;      // keys of one packing task
constexpr std::size_t pack_limit = std::size_t{64} << 20;
constexpr std::size_t partial_limit = std::size_t{16} << 20;
constexpr std::size_t unit_limit = std::size_t{1} << 20;

// A call as the kernels see it, and the way from a unit's number to its pointers.
template <class T> class Problem {
public:
    explicit Problem(const AttentionArguments& a) : a_(a), leading_(a.query.dimensions - 3) {
        heads_ = a.query.size(-3);
        kv_heads_ = a.key.size(-3);
        units_ = a.query.count(leading_) * kv_heads_;
        call.query_len = a.query.size(-2);
        call.key_len = a.key.size(-2);
        call.head_dim = a.query.size(-1);
        call.value_dim = a.value.size(-1);
        call.group = kv_heads_ == 0 ? 1 : heads_ / kv_heads_;
        call.scale = static_cast<T>(a.scale);
        call.softcap = static_cast<T>(a.softcap);
        call.causal = a.causal;
        call.left = a.left;
        call.right = a.right;
        call.write = a.want_scores ? Write::scores : Write::output;
        call.stop = stop_requested;
        call.query_position = a.query.stride(-2);
        call.query_head = a.query.stride(-3);
        call.key_position = a.key.stride(-2);
        call.value_position = a.value.stride(-2);
        if (a.out) call.out_position = a.out->stride(-2), call.out_head = a.out->stride(-3);
        if (a.lse) call.lse_position = a.lse->stride(-1), call.lse_head = a.lse->stride(-2);
        if (a.weights)
            call.weights_position = a.weights->stride(-2), call.weights_head = a.weights->stride(-3);
        if (a.mask) {
            call.mask_position = a.mask->stride(-2);
            call.mask_head = a.mask->stride(-3);
            call.mask_key = a.mask->stride(-1);
        }
        for (int i = 0; i < 2; ++i) {
            if (!a.addends[i]) continue;
            call.addend_position[i] = a.addends[i]->stride(-2);
            call.addend_head[i] = a.addends[i]->stride(-3);
            call.addend_key[i] = a.addends[i]->stride(-1);
        }
    }

    AttentionUnit<T> unit(std::int64_t number) const {
        const std::int64_t batch = number / kv_heads_;
        const std::int64_t kv_head = number % kv_heads_;
        const std::int64_t head = kv_head * call.group;
        const auto at = [&](const TensorView& t, std::int64_t h, int head_axis) {
            return t.data + t.offset(batch, leading_) + h * t.stride(head_axis);
        };
        const auto maybe_at = [&](const std::optional<TensorView>& t, int head_axis) -> char* {
            return t ? at(*t, head, head_axis) : nullptr;
        };
        AttentionUnit<T> u = {};
        u.query = at(a_.query, head, -3);
        u.key = at(a_.key, kv_head, -3);
        u.value = at(a_.value, kv_head, -3);
        u.out = maybe_at(a_.out, -3);
        u.lse = maybe_at(a_.lse, -2);
        u.weights = maybe_at(a_.weights, -3);
        u.mask = maybe_at(a_.mask, -3);
        u.addends[0] = maybe_at(a_.addends[0], -3);
        u.addends[1] = maybe_at(a_.addends[1], -3);
        u.slopes = reinterpret_cast<const T*>(maybe_at(a_.alibi_slopes, -1));
        if (a_.sinks) u.sinks = reinterpret_cast<const T*>(a_.sinks->data) + head;
        u.key_len = integer(a_.kv_lengths, batch, call.key_len);
        u.query_offset = integer(a_.query_offset, batch, 0);
        return u;
    }

    std::int64_t units() const { return units_; }
    std::int64_t rows() const { return call.query_len * call.group; }

    AttentionCall<T> call = {};

private:
    std::int64_t integer(const std::optional<TensorView>& values, std::int64_t batch,
                         std::int64_t otherwise) const {
        if (!values) return otherwise;
        std::int64_t value;
        std::memcpy(&value, values->data + values->offset(batch, leading_), sizeof value);
        return value;
    }

    const AttentionArguments& a_;
    int leading_;
    std::int64_t heads_, kv_heads_, units_;
};

// Below about 30 us of work a second thread costs more than it brings.
template <class T> int useful_threads(const Problem<T>& problem, int threads) {
    const auto& call = problem.call;
    const double pairs =
        static_cast<double>(problem.rows()) * static_cast<double>(call.key_len) * (call.causal ? 0.5 : 1);
    const double width = static_cast<double>(call.head_dim + call.value_dim);
    const double units = static_cast<double>(problem.units());
    const double seconds_computing = units * pairs * width * 2 / 60e9;
    const double seconds_reading = units * static_cast<double>(call.key_len) * width * sizeof(T) / 15e9;
    return std::max(seconds_computing, seconds_reading) < 30e-6 ? 1 : threads;
}

// Few rows: a task is a range of keys of a unit; the last of a unit's tasks to end merges them all, in order.
template <class T> void decode(const Problem<T>& problem, int threads) {
    const auto& kernel = kernels<T>(active_table().decode);
    const AttentionCall<T>& call = problem.call;
    const std::int64_t rows = problem.rows();
    const std::int64_t ranges = std::max<std::int64_t>(1, (call.key_len + key_range - 1) / key_range);
    const std::int64_t width = panel_count(call.value_dim) * PANEL;
    const std::size_t state_bytes = align_up(static_cast<std::size_t>(rows) * sizeof(T));
    const std::size_t output_bytes = align_up(static_cast<std::size_t>(rows * width) * sizeof(T));
    const std::size_t partial_bytes = 2 * state_bytes + output_bytes;
    const std::size_t task_bytes = align_up(kernel.scratch_bytes(call));
    const auto wave = std::clamp<std::int64_t>(
        static_cast<std::int64_t>(partial_limit / (partial_bytes * static_cast<std::size_t>(ranges))), 1,
        problem.units());
    // A unit of one range is finished by its only task: a partial result a thread is enough.
    const std::int64_t slots = ranges == 1 ? threads : wave * ranges;
    const std::int64_t stride = ranges == 1 ? problem.units() : wave;
    CallScratch scratch(static_cast<std::size_t>(slots) * partial_bytes +
                        static_cast<std::size_t>(threads) * task_bytes);
    char* const task_scratch = scratch.data() + static_cast<std::size_t>(slots) * partial_bytes;
    const auto partial = [&](std::int64_t slot) {
        char* p = scratch.data() + static_cast<std::size_t>(slot) * partial_bytes;
        return AttentionPartial<T>{reinterpret_cast<T*>(p), reinterpret_cast<T*>(p + state_bytes),
                                   reinterpret_cast<T*>(p + 2 * state_bytes)};
    };
    std::unique_ptr<std::atomic<std::int64_t>[]> open; // ranges of each unit of the wave still to come
    if (ranges > 1) open = std::make_unique<std::atomic<std::int64_t>[]>(static_cast<std::size_t>(wave));
    for (std::int64_t base = 0; base < problem.units(); base += stride) {
        const std::int64_t count = std::min(stride, problem.units() - base);
        for (std::int64_t i = 0; i < count && open; ++i) open[static_cast<std::size_t>(i)].store(ranges);
        parallel_for(count * ranges, threads, [&](std::int64_t task, int thread) {
            const std::int64_t i = task / ranges;
            const std::int64_t range = task % ranges;
            const AttentionUnit<T> unit = problem.unit(base + i);
            char* memory = task_scratch + static_cast<std::size_t>(thread) * task_bytes;
            const AttentionPartial<T> mine = partial(ranges == 1 ? thread : task);
            if (call.write == Write::output) {
                kernel.attend(call, unit, range * key_range, (range + 1) * key_range, mine, memory);
            }
            if (ranges == 1) {
                kernel.finish(call, unit, mine, memory);
            } else if (open[static_cast<std::size_t>(i)].fetch_sub(1, std::memory_order_acq_rel) == 1) {
                const AttentionPartial<T> first = partial(i * ranges);
                for (std::int64_t r = 1; r < ranges; ++r)
                    kernel.merge(call, unit, first, partial(i * ranges + r));
                kernel.finish(call, unit, first, memory);
            }
        });
    }
}

template <class T> struct Panels {
    std::int64_t key_elements, value_elements; // of one unit
    explicit Panels(const AttentionCall<T>& call)
        : key_elements(panel_count(call.key_len) * PANEL * call.head_dim),
          value_elements(panel_count(call.value_dim) * PANEL * call.key_len) {}
    std::size_t bytes() const {
        return align_up(static_cast<std::size_t>(key_elements + value_elements) * sizeof(T));
    }

    // Packs keys [first, last) of the unit; first is a multiple of PANEL.
    void pack(const AttentionCall<T>& call, AttentionUnit<T>& unit, std::int64_t first,
              std::int64_t last) const {
        const auto& gemm = kernels<T>(active_table().gemm);
        last = std::min(last, unit.key_len);
        if (first >= last) return;
        gemm.pack_panels(unit.key, sizeof(T), call.key_position, call.head_dim, unit.key_len, first / PANEL,
                         panel_count(last), const_cast<T*>(unit.key_panels));
        for (std::int64_t p = 0; p < panel_count(call.value_dim); ++p) {
            gemm.pack_panels(unit.value + first * call.value_position +
                                 p * PANEL * static_cast<std::ptrdiff_t>(sizeof(T)),
                             call.value_position, sizeof(T), last - first,
                             std::min<std::int64_t>(PANEL, call.value_dim - p * PANEL), 0, 1,
                             const_cast<T*>(unit.value_panels) + (p * unit.key_len + first) * PANEL);
        }
    }

    void place(AttentionUnit<T>& unit, char* memory) const {
        unit.key_panels = reinterpret_cast<T*>(memory);
        unit.value_panels = unit.key_panels + key_elements;
    }
};

// Many short units: a task packs one whole unit into its thread's scratch and computes all its rows.
template <class T> void attend_units(const Problem<T>& problem, const Panels<T>& panels, int threads) {
    const auto& kernel = kernels<T>(active_table().attention);
    const AttentionCall<T>& call = problem.call;
    const std::size_t task_bytes = align_up(kernel.scratch_bytes(call));
    const std::size_t thread_bytes = task_bytes + panels.bytes();
    CallScratch scratch(static_cast<std::size_t>(threads) * thread_bytes);
    parallel_for(problem.units(), threads, [&](std::int64_t number, int thread) {
        char* memory = scratch.data() + static_cast<std::size_t>(thread) * thread_bytes;
        AttentionUnit<T> unit = problem.unit(number);
        panels.place(unit, memory + task_bytes);
        panels.pack(call, unit, 0, unit.key_len);
        for (std::int64_t row = 0; row < problem.rows(); row += kernel.rows) {
            kernel.attend(call, unit, row, std::min(row + kernel.rows, problem.rows()), memory);
        }
    });
}

// Long units: tasks are blocks of rows, the ones with most keys first; the panels are packed by tasks of
// their own, a unit ahead, and shared. Units whose panels would not fit are packed by every task for itself,
// block by block.
template <class T>
void attend_blocks(const Problem<T>& problem, const Panels<T>& panels, bool share, int threads) {
    struct Task {
        std::int64_t unit, first, last;
        bool pack;
    };
    const auto& kernel = kernels<T>(active_table().attention);
    const AttentionCall<T>& call = problem.call;
    const std::int64_t units = problem.units();
    const std::int64_t rows = problem.rows();
    const std::size_t unit_bytes = share ? panels.bytes() : 0;
    const std::int64_t wave =
        share ? std::clamp<std::int64_t>(
                    static_cast<std::int64_t>(pack_limit / std::max<std::size_t>(unit_bytes, 1)), 1, units)
              : units;
    const std::size_t task_bytes = align_up(kernel.scratch_bytes(call));
    CallScratch scratch(static_cast<std::size_t>(threads) * task_bytes +
                        static_cast<std::size_t>(share ? wave : 0) * unit_bytes);
    char* const packed = scratch.data() + static_cast<std::size_t>(threads) * task_bytes;
    const std::int64_t packs = share ? (call.key_len + pack_keys - 1) / pack_keys : 0;
    const auto open = std::make_unique<std::atomic<std::int64_t>[]>(
        static_cast<std::size_t>(wave)); // packing tasks to come

    std::vector<Task> tasks;
    const auto add_packs = [&](std::int64_t unit) {
        for (std::int64_t p = 0; p < packs; ++p)
            tasks.push_back({unit, p * pack_keys, (p + 1) * pack_keys, true});
    };
    const auto add_rows = [&](std::int64_t unit) {
        for (std::int64_t last = rows; last > 0;) {
            const std::int64_t first = (last - 1) / kernel.rows * kernel.rows;
            tasks.push_back({unit, first, last, false});
            last = first;
        }
    };
    for (std::int64_t base = 0; base < units; base += wave) {
        const std::int64_t count = std::min(wave, units - base);
        tasks.clear();
        add_packs(0);
        for (std::int64_t u = 0; u < count; ++u) {
            if (u + 1 < count) add_packs(u + 1);
            add_rows(u);
        }
        for (std::int64_t u = 0; u < count; ++u) open[static_cast<std::size_t>(u)].store(packs);
        parallel_for(static_cast<std::int64_t>(tasks.size()), threads, [&](std::int64_t index, int thread) {
            const Task& task = tasks[static_cast<std::size_t>(index)];
            std::atomic<std::int64_t>& to_come = open[static_cast<std::size_t>(task.unit)];
            AttentionUnit<T> unit = problem.unit(base + task.unit);
            if (share) panels.place(unit, packed + static_cast<std::size_t>(task.unit) * unit_bytes);
            if (task.pack) {
                panels.pack(call, unit, task.first, task.last);
                to_come.fetch_sub(1, std::memory_order_release);
                return;
            }
            while (to_come.load(std::memory_order_acquire) != 0) {
                if (stop_requested()) return;
                std::this_thread::yield();
            }
            kernel.attend(call, unit, task.first, task.last,
                          scratch.data() + static_cast<std::size_t>(thread) * task_bytes);
        });
    }
}

} // namespace

template <class T> void attention(const AttentionArguments& arguments) {
    const Problem<T> problem(arguments);
    const std::int64_t rows = problem.rows();
    if (problem.units() == 0 || rows == 0) return;
    const int threads = useful_threads(problem, arguments.threads);
    if (rows < few_rows || (problem.call.query_len == 1 && rows <= few_rows_of_one)) {
        decode(problem, threads);
        return;
    }
    const Panels<T> panels(problem.call);
    if (panels.bytes() <= unit_limit && (threads == 1 || problem.units() >= 16 * std::int64_t{threads})) {
        attend_units(problem, panels, threads);
        return;
    }
    const bool share = panels.bytes() <= pack_limit && rows > kernels<T>(active_table().attention).rows;
    attend_blocks(problem, panels, share, threads);
}

template void attention<float>(const AttentionArguments& arguments);
template void attention<double>(const AttentionArguments& arguments);

} // namespace npattn
