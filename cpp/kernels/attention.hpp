#pragma once
// The loop of attention over packed rows and key blocks, written once for packed operands (packed_attention.hpp),
// for keys and values as they lie in memory (decode.cpp) and in the pages of a cache (cached.cpp):
//
//   for each block of keys, for each group of rows:  S = Q K^T;  transform;  P = online softmax;  O += P V
//
// A packed row is (query position, head of the group), position first: row = position * group + head. The
// scores of a group never leave the L1 cache. Products provides the two products:
//
//   begin_block(block, end)                            keys [block, end) come next
//   scores(group_index, rows, begin, end, S)           columns [begin, end) of the block, PANEL-aligned
//   weigh(rows, begin, end, P, start, output, padded)  output (rows, padded) = or += P V, columns [begin, end)
//   weigh(..., padded, beside)                         or instead: the same with other work beside it, see tile.hpp
//   Weight                                             what P is made of: T, or HalfPair

#include "kernels/pairs.hpp"
#include "kernels/scores.hpp"
#include "kernels/tile_registers.hpp"

namespace npattn::NPATTN_ISA {
namespace {

template <class T> constexpr std::int64_t padded(std::int64_t elements) {
    return panel_count(elements) * PANEL;
}

// Head dims summed at a time. Scores of vectors with a common offset are large and nearly cancel in the
// softmax, so their rounding shows; the sums are kept short, shorter where keys are few and the last percent
// of speed matters less.
constexpr std::int64_t score_depth_block(std::int64_t key_len) {
    return key_len < 64 ? 16 : key_len < 128 ? 32 : 64;
}

// Hands out aligned pieces of one block of scratch; with a null base it only counts.
class Scratch {
public:
    explicit Scratch(void* base) : base_(static_cast<char*>(base)) {}
    template <class T> T* take(std::int64_t count) {
        T* piece = reinterpret_cast<T*>(base_ + used_);
        used_ += (static_cast<std::size_t>(count) * sizeof(T) + 127) / 128 * 128;
        return piece;
    }
    std::size_t used() const { return used_; }

private:
    char* base_;
    std::size_t used_ = 0;
};

// Up to GROUP_ROWS consecutive packed rows and the keys that any of them may see.
template <class T> struct Group {
    int count;
    bool begun; // its state holds something
    Row rows[GROUP_ROWS];
    KeyRange keys;

    void set(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t first,
             std::int64_t last) {
        count = smaller(GROUP_ROWS, last - first);
        keys = {unit.key_len, 0};
        for (int r = 0; r < count; ++r) {
            rows[r].position = (first + r) / call.group;
            rows[r].head = (first + r) % call.group;
            rows[r].keys = visible_keys(call, unit, rows[r].position);
            if (!rows[r].keys.empty()) keys.join(rows[r].keys);
        }
    }

    // Columns of the block [block, block_end) to compute, whole panels; false if no row sees any of them.
    bool columns(std::int64_t block, std::int64_t block_end, int& begin, int& end) const {
        const std::int64_t low = keys.low > block ? keys.low : block;
        const std::int64_t high = keys.high < block_end ? keys.high : block_end;
        if (low >= high) return false;
        begin = static_cast<int>((low - block) / PANEL * PANEL);
        end = static_cast<int>((high - block + PANEL - 1) / PANEL * PANEL);
        return true;
    }
};

// Packed rows [first, last) of a unit by groups, and the memory to work on one group and block.
template <class T> struct RowBlock {
    std::int64_t first, last;
    Group<T>* groups;
    KeyRange keys;         // that any of the rows may see
    T* scores;             // (GROUP_ROWS, ROW_STRIDE)
    T* scores_before;      // those of the group before, while they wait for its values
    std::uint8_t* visible; // (GROUP_ROWS, KEY_BLOCK)

    RowBlock(std::int64_t most_rows, Scratch& scratch) {
        groups = scratch.take<Group<T>>((most_rows + GROUP_ROWS - 1) / GROUP_ROWS);
        scores = scratch.take<T>(GROUP_ROWS * ROW_STRIDE);
        scores_before = scratch.take<T>(GROUP_ROWS * ROW_STRIDE);
        visible = scratch.take<std::uint8_t>(GROUP_ROWS * KEY_BLOCK);
    }
    void set(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t from, std::int64_t to) {
        first = from;
        last = to;
        keys = {unit.key_len, 0};
        for (std::int64_t r = first; r < last; r += GROUP_ROWS) {
            Group<T>& group = groups[(r - first) / GROUP_ROWS];
            group.set(call, unit, r, last);
            if (!group.keys.empty()) keys.join(group.keys);
        }
    }
};

// The scores of one group and block, ready for the softmax. False if every key in it is hidden from every
// row.
template <class Products, class T>
bool block_scores(const AttentionCall<T>& call, const AttentionUnit<T>& unit, const ScoreUnits<T>& units,
                  const Group<T>& group, int group_index, Products& products, std::int64_t block, int begin,
                  int end, T* scores, std::uint8_t* visible) {
    Visibility masked[GROUP_ROWS] = {};
    if (unit.mask) {
        bool some = false;
        for (int r = 0; r < group.count; ++r) {
            masked[r] = mask_visibility(call, unit, group.rows[r], block + begin, block + end);
            some |= masked[r] != Visibility::none;
        }
        if (!some) return false;
    }
    products.scores(group_index, group.count, begin, end, scores);
    for (int r = 0; r < group.count; ++r) {
        const KeyRange& keys = group.rows[r].keys;
        const bool sees_all = keys.low <= block + begin && keys.high >= block + end &&
                              (!unit.mask || masked[r] == Visibility::all);
        if (sees_all && !units.natural && !visible) continue;
        transform(call, unit, units, group.rows[r], unit.mask && masked[r] != Visibility::all, block, begin,
                  end, scores + r * ROW_STRIDE, visible ? visible + r * KEY_BLOCK : nullptr);
    }
    return true;
}

template <class T>
const char* value_row(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t key) {
    const CachePages& cache = unit.cache;
    if (!cache.pages) return unit.value + key * call.value_position;
    return cache.pages[key / cache.page_keys] + cache.value +
           key % cache.page_keys * call.value_dim * storage_bytes(call.key_storage);
}

// The panel of keys of a cache that begins with `key`, `depth` deep.
template <class S, class T>
const char* panel_of(const AttentionUnit<T>& unit, std::int64_t depth, std::int64_t key) {
    const CachePages& cache = unit.cache;
    return cache.pages[key / cache.page_keys] + cache.key +
           key % cache.page_keys * depth * static_cast<std::ptrdiff_t>(sizeof(S));
}

// The scales of a cache of int8, `offset` bytes behind the start of a page, from that of `key` on.
template <class T>
const T* scales_from(const AttentionUnit<T>& unit, std::ptrdiff_t offset, std::int64_t key) {
    const CachePages& cache = unit.cache;
    return reinterpret_cast<const T*>(cache.pages[key / cache.page_keys] + offset) + key % cache.page_keys;
}

// Asks for the share of the next unit's keys, values and queries that falls to `count` rows from `row`.
template <class T>
void prefetch_share(const AttentionCall<T>& call, const AttentionUnit<T>& next, std::int64_t row,
                    std::int64_t count) {
    const auto fetch = [](const char* rows, std::ptrdiff_t stride, std::int64_t from, std::int64_t to,
                          std::int64_t width, Storage storage) {
        constexpr std::int64_t line = 64;
        for (std::int64_t i = from; i < to; ++i) {
            for (std::int64_t byte = 0; byte < width * storage_bytes(storage); byte += line) {
                __builtin_prefetch(rows + i * stride + byte, 0, 2);
            }
        }
    };
    const std::int64_t rows = call.query_len * call.group;
    const std::int64_t from = row * next.key_len / rows;
    const std::int64_t to = (row + count) * next.key_len / rows;
    fetch(next.key, call.key_position, from, to, call.head_dim, call.key_storage);
    fetch(next.value, call.value_position, from, to, call.value_dim, call.key_storage);
    fetch(next.query, call.query_position, row / call.group, (row + count) / call.group, call.head_dim,
          call.query_storage);
}

// Calls body(group, its first row within the block of rows, block, block_end, begin, end) for every group and
// block of keys [key_first, key_last) that has something to see, with the group's scores in rows.scores, then
// end_block() for the block, and done(group, its first row) once no block of the group is left.
template <class Products, class T, class Body, class EndBlock, class Done>
void for_each_block(const AttentionCall<T>& call, const AttentionUnit<T>& unit, const ScoreUnits<T>& units,
                    RowBlock<T>& rows, std::int64_t key_first, std::int64_t key_last, Products& products,
                    bool want_visible, Body&& body, EndBlock&& end_block, Done&& done) {
    std::int64_t from = key_first > rows.keys.low ? key_first : rows.keys.low / KEY_BLOCK * KEY_BLOCK;
    const std::int64_t to = key_last < rows.keys.high ? key_last : rows.keys.high;
    for (std::int64_t block = from; block < to && !call.stop(); block += KEY_BLOCK) {
        const std::int64_t block_end = block + KEY_BLOCK < to ? block + KEY_BLOCK : to;
        bool begun = false;
        for (std::int64_t r = 0; r < rows.last - rows.first; r += GROUP_ROWS) {
            const auto index = static_cast<int>(r / GROUP_ROWS);
            Group<T>& group = rows.groups[index];
            int begin;
            int end;
            if (unit.next && block == from) prefetch_share(call, *unit.next, rows.first + r, group.count);
            if (!group.columns(block, block_end, begin, end)) continue;
            if (!begun) products.begin_block(block, block_end);
            begun = true;
            if (block_scores(call, unit, units, group, index, products, block, begin, end, rows.scores,
                             want_visible ? rows.visible : nullptr)) {
                body(group, r, block, block_end, begin, end);
            }
        }
        end_block();
        for (std::int64_t r = 0; r < rows.last - rows.first; r += GROUP_ROWS) {
            const Group<T>& group = rows.groups[r / GROUP_ROWS];
            const std::int64_t high = group.keys.high < to ? group.keys.high : to;
            if (group.keys.low < high && high > block && high <= block_end) done(group, r);
        }
    }
    for (std::int64_t r = 0; r < rows.last - rows.first; r += GROUP_ROWS) {
        const Group<T>& group = rows.groups[r / GROUP_ROWS];
        if (group.keys.high <= from || group.keys.low >= to) done(group, r);
    }
}

} // namespace
} // namespace npattn::NPATTN_ISA
