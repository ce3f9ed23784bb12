#pragma once
// How attention is computed: units become tasks, tasks run in one parallel region, or in a few where the
// memory that tasks share would not fit. A unit is one (batch element or sequence, kv head). Dense calls and
// packed sequences differ in their source of units alone:
//
//   call(unit) -> AttentionCall<T>, by value or reference     unit(unit) -> AttentionUnit<T>
//   for_each(body): body(call, first unit, count) for every run of units of the same sizes, longest first

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "core/aligned_buffer.hpp"
#include "dispatch/registry.hpp"

namespace npattn {

constexpr double ONE_THREAD_SECONDS = 30e-6; // below, a second thread costs more than it brings

// Seconds that a unit takes one thread, roughly: the longer of computing and of reading keys and values.
template <class T> double unit_seconds(const AttentionCall<T>& call) {
    const auto rows = static_cast<double>(call.query_len * call.group);
    const auto keys = static_cast<double>(call.key_len);
    const auto width = static_cast<double>(call.head_dim + call.value_dim);
    const double window = static_cast<double>(call.left) + static_cast<double>(call.right) + 1;
    const double seen = std::min(call.causal ? keys / 2 : keys, window);
    return std::max(rows * seen * width * 2 / 60e9, keys * width * storage_bytes(call.key_storage) / 15e9);
}

// The numbers 0 to count - 1, those that take longest first. seconds_of(number) -> double
template <class SecondsOf>
std::vector<std::int64_t> longest_first(std::int64_t count, SecondsOf&& seconds_of) {
    std::vector<std::int64_t> order(static_cast<std::size_t>(count));
    std::vector<double> seconds(order.size());
    std::iota(order.begin(), order.end(), std::int64_t{0});
    std::transform(order.begin(), order.end(), seconds.begin(), seconds_of);
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t x, std::int64_t y) {
        return seconds[static_cast<std::size_t>(x)] > seconds[static_cast<std::size_t>(y)];
    });
    return order;
}

// How a partial result of `rows` packed rows lies in memory: maxima, sums, the exact ones of these where they are
// wanted, then outputs of `width` elements.
template <class T> struct PartialLayout {
    std::int64_t rows = 0, width = 0;
    bool exact_sums = false;

    PartialLayout() = default;
    PartialLayout(std::int64_t count, std::int64_t value_dim, bool with_exact_sums = false)
        : rows(count), width(panel_count(value_dim) * PANEL), exact_sums(with_exact_sums) {}

    std::size_t bytes() const { return output_offset() + elements(rows * width); }

    // The partial result at `memory`, from row `first` on.
    AttentionPartial<T> at(char* memory, std::int64_t first = 0) const {
        const auto part = [&](std::size_t offset) { return reinterpret_cast<T*>(memory + offset); };
        return {part(0) + first, part(state_bytes()) + first, part(output_offset()) + first * width,
                exact_sums ? part(2 * state_bytes()) + first : nullptr};
    }

private:
    static std::size_t elements(std::int64_t count) {
        return align_up(static_cast<std::size_t>(count) * sizeof(T));
    }
    std::size_t state_bytes() const { return elements(rows); }
    std::size_t output_offset() const { return (exact_sums ? 3 : 2) * state_bytes(); }
};

enum class Path {
    decode,        // few rows, few keys: one task reads keys and values where they lie
    decode_ranges, // few rows: a task is a range of keys; the last of the unit's tasks to end merges them
                   // all, in order
    whole,         // a short unit of many: one task packs its keys and values and computes all its rows
    shared_panels, // a task is a block of rows; keys and values are packed once, by tasks of their own
    own_panels,    // a task is a block of rows; it packs keys and values for itself, block by block
};

// Whether a call of many rows, or over a cache, multiplies pairs of bfloat16: then its weights are rounded.
template <class T> bool multiplies_pairs(const KernelTable& table, const AttentionCall<T>& call) {
    return table.dot != nullptr && call.query_storage == Storage::bf16 && call.key_storage == Storage::bf16;
}

// The kernels for packed keys and values of a call's storage.
template <class T>
const AttentionKernels<T>& attention_kernels(const KernelTable& table, const AttentionCall<T>& call) {
    if constexpr (sizeof(T) == sizeof(float)) {
        if (multiplies_pairs(table, call)) return *table.attention_pairs;
    }
    return kernels<T>(table.attention);
}

// The kernels for the pages of a cache.
template <class T>
const CachedKernels<T>& cached_kernels(const KernelTable& table, const AttentionCall<T>& call) {
    if constexpr (sizeof(T) == sizeof(float)) {
        if (multiplies_pairs(table, call)) return *table.cached_pairs;
    }
    return kernels<T>(table.cached);
}

// The path of units of these sizes and the memory they need. Whether a unit decodes depends on its sizes
// alone, and the other paths agree in every bit, so a unit's bits do not depend on what else is in the call.
template <class T> struct UnitPlan {
    static constexpr std::int64_t few_rows = 16;        // fewer packed rows than this: the decode kernels
    static constexpr std::int64_t few_rows_of_one = 64; // the same for a single query position
    static constexpr std::int64_t pack_keys = 512;      // keys of one packing task
    static constexpr std::int64_t most_ranges = 1024;   // of a unit: each has a partial result
    static constexpr std::int64_t far_blocks = 8;       // most rows, in blocks, that panels from memory meet
    static constexpr std::int64_t whole_tiles = 12;     // rows: a multiple of every ISA's tile
    static constexpr std::int64_t plenty = 16;          // units a thread from which they need not be split
    static constexpr std::int64_t enough = 4;           // units a thread from which only the last ones are
    static constexpr std::size_t pack_limit = std::size_t{64} << 20;
    static constexpr std::size_t cached_limit = std::size_t{8} << 20;
    static constexpr std::size_t partial_limit = std::size_t{16} << 20;
    static constexpr std::size_t unit_limit = std::size_t{1} << 20;

    Path path;
    const AttentionKernels<T>* kernel; // of all paths but those of decode
    std::int64_t rows;
    std::int64_t key_range = 512;  // keys of a decode task: whole key blocks of the kernels
    std::int64_t parts = 0;        // key ranges or packing tasks
    std::int64_t blocks = 0;       // blocks of rows
    std::int64_t block_rows = 0;   // of one of them
    std::size_t kernel_bytes;      // scratch of the kernel
    std::size_t own_bytes = 0;     // of a thread, beside it: a partial result or panels
    std::size_t shared_bytes = 0;  // of the unit's tasks together
    PartialLayout<T> partial_rows; // of the decode paths
    std::int64_t key_elements = 0; // of the panels of keys

    // `share_of_all`: the part of the whole call's work that one of these units is.
    UnitPlan(const KernelTable& table, const AttentionCall<T>& call, int threads, double share_of_all)
        : kernel(&attention_kernels(table, call)), rows(call.query_len * call.group) {
        if (rows < few_rows || (call.query_len == 1 && rows <= few_rows_of_one)) {
            plan_decode(kernels<T>(table.decode), call);
        } else {
            plan_packed(call, threads, share_of_all);
        }
    }

    std::int64_t tasks() const { return std::max<std::int64_t>(parts + blocks, 1); }

    AttentionPartial<T> partial(char* memory, std::int64_t index = 0) const {
        return partial_rows.at(memory + static_cast<std::size_t>(index) * partial_rows.bytes());
    }

    void place_panels(AttentionUnit<T>& unit, char* memory) const {
        unit.key_panels = memory;
        unit.value_panels = memory + static_cast<std::size_t>(key_elements) * sizeof(T);
    }

private:
    void plan_decode(const DecodeKernels<T>& decode, const AttentionCall<T>& call) {
        key_range *= 1 + call.key_len / (key_range * most_ranges);
        const std::int64_t ranges = std::max<std::int64_t>(1, (call.key_len + key_range - 1) / key_range);
        kernel_bytes = align_up(decode.scratch_bytes(call));
        partial_rows = PartialLayout<T>(rows, call.value_dim);
        path = ranges == 1 ? Path::decode : Path::decode_ranges;
        if (path == Path::decode) {
            own_bytes = partial_rows.bytes();
        } else {
            parts = ranges;
            shared_bytes = static_cast<std::size_t>(ranges) * partial_rows.bytes();
        }
    }

    void plan_packed(const AttentionCall<T>& call, int threads, double share_of_all) {
        const auto depth = [&](std::int64_t elements) {
            return (elements + kernel->together - 1) / kernel->together;
        };
        std::size_t panel_bytes = pack_limit + 1;
        const double elements =
            static_cast<double>(call.key_len) * static_cast<double>(call.head_dim + call.value_dim);
        if (elements <
            static_cast<double>(pack_limit)) { // sizes that are no memory's may be larger than 64 bits
            key_elements = panel_count(call.key_len) * PANEL * depth(call.head_dim);
            const std::int64_t value_elements = panel_count(call.value_dim) * PANEL * depth(call.key_len);
            panel_bytes = align_up(static_cast<std::size_t>(key_elements + value_elements) * sizeof(T));
        }
        block_rows = kernel->rows;
        if (panel_bytes <= unit_limit &&
            (threads == 1 || share_of_all * static_cast<double>(plenty * threads) <= 1)) {
            path = Path::whole;
            own_bytes = panel_bytes;
            kernel_bytes = align_up(kernel->scratch_bytes(call, block_rows));
            return;
        }
        // The only block of the only unit, or of one of few, is cut, so that all threads have a part in it; a small one
        // is not where each would pack for itself.
        if (rows <= block_rows && (panel_bytes <= pack_limit || 2 * rows > block_rows) &&
            share_of_all * static_cast<double>(threads) > 1)
            block_rows = (rows + threads - 1) / threads;
        // Panels that the caches do not hold come from memory for every task, or are packed by it: they meet more rows
        // then, in tasks of like sizes, which end together.
        if (panel_bytes > cached_limit) {
            const std::int64_t most = far_blocks * kernel->rows;
            const std::int64_t tasks = ((rows + most - 1) / most + threads - 1) / threads * threads;
            const std::int64_t wanted = (rows + tasks - 1) / tasks;
            block_rows = std::max(block_rows, (wanted + whole_tiles - 1) / whole_tiles * whole_tiles);
        }
        kernel_bytes = align_up(kernel->scratch_bytes(call, block_rows));
        blocks = (rows + block_rows - 1) / block_rows;
        path = panel_bytes <= pack_limit && blocks > 1 ? Path::shared_panels : Path::own_panels;
        if (path == Path::shared_panels) {
            parts = (call.key_len + pack_keys - 1) / pack_keys;
            shared_bytes = panel_bytes;
        }
    }
};

} // namespace npattn
