#pragma once
// The loop of attention over packed rows and key blocks, written once for packed operands (attention.cpp),
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
//   Weight                                             what P is made of: T, or HalfPair

#include "kernels/pairs.hpp"
#include "kernels/scores.hpp"
#include "kernels/tile.hpp"

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

// Up to TILE_ROWS consecutive packed rows and the keys that any of them may see.
template <class T> struct Group {
    int count;
    bool begun; // its state holds something
    Row rows[TILE_ROWS];
    KeyRange keys;

    void set(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t first,
             std::int64_t last) {
        count = smaller(TILE_ROWS, last - first);
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
    T* scores;             // (TILE_ROWS, ROW_STRIDE)
    std::uint8_t* visible; // (TILE_ROWS, KEY_BLOCK)

    RowBlock(std::int64_t most_rows, Scratch& scratch) {
        groups = scratch.take<Group<T>>((most_rows + TILE_ROWS - 1) / TILE_ROWS);
        scores = scratch.take<T>(TILE_ROWS * ROW_STRIDE);
        visible = scratch.take<std::uint8_t>(TILE_ROWS * KEY_BLOCK);
    }
    void set(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t from, std::int64_t to) {
        first = from;
        last = to;
        keys = {unit.key_len, 0};
        for (std::int64_t r = first; r < last; r += TILE_ROWS) {
            Group<T>& group = groups[(r - first) / TILE_ROWS];
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
    Visibility masked[TILE_ROWS] = {};
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

// `count` elements of the values of a key, from `column` on.
template <class S, class T>
Vec<T> load_value(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t key,
                  std::int64_t column, int count) {
    if constexpr (sizeof(S) == sizeof(Int8)) {
        T elements[Vec<T>::lanes] = {};
        const auto* quads = reinterpret_cast<const Int8Quad*>(value_row(call, unit, key / 4 * 4)) + column;
        for (int i = 0; i < count; ++i) elements[i] = static_cast<T>(quads[i].bytes[key % 4] - 128);
        return load<T>(elements);
    } else {
        return load_first<S>(value_row(call, unit, key) + column * static_cast<std::ptrdiff_t>(sizeof(S)),
                             count);
    }
}

// output = or += P V for one row, reading the values of its visible keys only. The additions are the tile's, in
// its order.
template <int KEY_DEPTH_BLOCK, class T>
void weigh_visible(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t block, int begin,
                   int end, const T* scores, const std::uint8_t* visible, Start start, T* output) {
    constexpr int lanes = Vec<T>::lanes;
    with_key_storage<T>(call.key_storage, [&]<class S>(S) {
        for (std::int64_t c = 0; c < call.value_dim; c += lanes) {
            if (start == Start::zero) store(output + c, zero<T>());
            for (int first = begin; first < end; first += KEY_DEPTH_BLOCK) {
                Vec<T> sum = zero<T>();
                for (int j = first; j < smaller(end, first + KEY_DEPTH_BLOCK); ++j) {
                    if (!visible[j]) continue;
                    const Vec<T> v =
                        load_value<S>(call, unit, block + j, c, smaller(lanes, call.value_dim - c));
                    T weight = scores[j];
                    if constexpr (sizeof(S) == sizeof(Int8))
                        weight *= *scales_from(unit, unit.cache.value_scale, block + j);
                    sum = fma(broadcast<T>(weight), v, sum);
                }
                store(output + c, load<T>(output + c) + sum);
            }
        }
    });
}

#ifdef NPATTN_DOT
constexpr int ONE_SUM = 0; // for KEY_DEPTH_BLOCK: the sums go on from block to block, wherever they are cut

// The same with weights that are pairs, and the values in pairs as the tile has them: the hidden one of two is 0.
template <int KEY_DEPTH_BLOCK, class T>
void weigh_visible(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t block, int begin,
                   int end, const HalfPair* weights, const std::uint8_t* visible, Start start, T* output) {
    constexpr int lanes = Vec<T>::lanes;
    for (std::int64_t c = 0; c < call.value_dim; c += lanes) {
        const int count = smaller(lanes, call.value_dim - c);
        const Vec<T> before = start == Start::zero ? zero<T>() : load<T>(output + c);
        const auto value = [&](int j) {
            return j < end && visible[j] ? value_row(call, unit, block + j) + c * HALF
                                         : reinterpret_cast<const char*>(NO_DEPTH);
        };
        Vec<T> sum = KEY_DEPTH_BLOCK == ONE_SUM ? before : zero<T>();
        for (int j = begin; j < end; j += 2) {
            const Vec<T> pairs = load_pairs_first(value(j), value(j + 1), count);
            sum = fma_element(as_pairs(pairs), weights + j / 2, sum);
        }
        store(output + c, KEY_DEPTH_BLOCK == ONE_SUM || start == Start::zero ? sum : before + sum);
    }
}
#endif

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
// block of keys [key_first, key_last) that has something to see, with the group's scores in rows.scores, and
// done(group, its first row) once no block of the group is left.
template <class Products, class T, class Body, class Done>
void for_each_block(const AttentionCall<T>& call, const AttentionUnit<T>& unit, const ScoreUnits<T>& units,
                    RowBlock<T>& rows, std::int64_t key_first, std::int64_t key_last, Products& products,
                    bool want_visible, Body&& body, Done&& done) {
    std::int64_t from = key_first > rows.keys.low ? key_first : rows.keys.low / KEY_BLOCK * KEY_BLOCK;
    const std::int64_t to = key_last < rows.keys.high ? key_last : rows.keys.high;
    for (std::int64_t block = from; block < to && !call.stop(); block += KEY_BLOCK) {
        const std::int64_t block_end = block + KEY_BLOCK < to ? block + KEY_BLOCK : to;
        bool begun = false;
        for (std::int64_t r = 0; r < rows.last - rows.first; r += TILE_ROWS) {
            const auto index = static_cast<int>(r / TILE_ROWS);
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
            if (block_end >= group.keys.high || block_end == to) done(group, r);
        }
    }
    for (std::int64_t r = 0; r < rows.last - rows.first; r += TILE_ROWS) {
        Group<T>& group = rows.groups[r / TILE_ROWS];
        if (group.keys.high <= from || group.keys.low >= to) done(group, r);
    }
}

// The rows over keys [key_first, key_last), key_first a multiple of KEY_BLOCK, into `state`, which holds one
// entry a row; done(group, its first row) follows each group's last key. With `guarded`, hidden values are not
// even multiplied by zero.
template <class Products, class T, class Done>
void accumulate_rows(const AttentionCall<T>& call, const AttentionUnit<T>& unit, RowBlock<T>& rows,
                     std::int64_t key_first, std::int64_t key_last, Products& products,
                     const AttentionPartial<T>& state, bool guarded, Done&& done) {
    const ScoreUnits<T> units(call, unit);
    const std::int64_t width = padded<T>(call.value_dim);
    for (std::int64_t r = 0; r < rows.last - rows.first; ++r) {
        const T sink = unit.sinks && key_first == 0 ? unit.sinks[(rows.first + r) % call.group]
                                                    : -Constants<T>::infinity;
        state.maximum[r] = sink;
        state.sum[r] = sink == -Constants<T>::infinity ? T(0) : sink - sink + T(1);
        if (state.exact_sum) state.exact_sum[r] = state.sum[r];
        rows.groups[r / TILE_ROWS].begun = false;
    }
    const auto add_block = [&](Group<T>& group, std::int64_t r, std::int64_t block, std::int64_t block_end,
                               int begin, int end) {
        T* output = state.output + r * width;
        const RowState<T> first = {state.maximum + r, state.sum + r, output,
                                   state.exact_sum ? state.exact_sum + r : nullptr};
        softmax_block<typename Products::Weight>(rows.scores, group.count, begin, end, units.factor, first,
                                                 group.begun ? width : 0, width);
        const Start start = group.begun ? Start::add : Start::zero;
        group.begun = true;
        const int value_end = smaller(group.keys.high - block, block_end - block);
        if (!guarded) return products.weigh(group.count, begin, value_end, rows.scores, start, output, width);
        if constexpr (requires { &Products::weigh_visible; }) {
            products.weigh_visible(group.count, begin, value_end, rows.scores, rows.visible, start, output,
                                   width);
        } else {
            for (int i = 0; i < group.count; ++i) {
                weigh_visible<Products::key_depth_block>(
                    call, unit, block, begin, value_end,
                    reinterpret_cast<const typename Products::Weight*>(rows.scores + i * ROW_STRIDE),
                    rows.visible + i * KEY_BLOCK, start, output + i * width);
            }
        }
    };
    for_each_block(call, unit, units, rows, key_first, key_last, products, guarded, add_block,
                   [&](const Group<T>& group, std::int64_t r) {
                       T* output = state.output + r * width;
                       for (std::int64_t c = 0; !group.begun && c < group.count * width; ++c)
                           output[c] = T(0);
                       done(group, r);
                   });
}

// Accumulates; should a hidden value have been NaN or infinite, accumulates again without touching hidden
// values. write(group, its first row) comes once for each group, or twice.
template <class Products, class T, class Write>
void accumulate_safely(const AttentionCall<T>& call, const AttentionUnit<T>& unit, RowBlock<T>& rows,
                       std::int64_t key_first, std::int64_t key_last, Products& products,
                       const AttentionPartial<T>& state, Write&& write) {
    const bool may_hide = unit.mask || unit.addends[0] || unit.addends[1] || call.causal ||
                          call.left != UNBOUNDED || call.right != UNBOUNDED;
    const std::int64_t width = padded<T>(call.value_dim);
    bool all_finite = true;
    accumulate_rows(call, unit, rows, key_first, key_last, products, state, false,
                    [&](const Group<T>& group, std::int64_t r) {
                        write(group, r);
                        if (!may_hide) return;
                        Mask<T> finite = first<T>(Vec<T>::lanes);
                        for (std::int64_t i = r; i < r + group.count; ++i) {
                            each_vector<T>(0, call.value_dim, [&](std::int64_t c, auto part) NPATTN_BODY {
                                const Vec<T> x = load_part<T>(state.output + i * width + c, part);
                                finite = both(finite, equal(x - x, zero<T>()));
                            });
                        }
                        all_finite &= all(finite);
                    });
    if (!all_finite) accumulate_rows(call, unit, rows, key_first, key_last, products, state, true, write);
}

} // namespace
} // namespace npattn::NPATTN_ISA
