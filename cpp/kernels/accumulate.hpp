#pragma once
// O += P V, block after block of keys: the online softmax of each group of rows and the sums of values that it weighs.

#include "kernels/attention.hpp"
#include "kernels/online_softmax.hpp"

namespace npattn::NPATTN_ISA {
namespace {

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

// The same with weights that are pairs. Hidden values are 0.
#ifdef NPATTN_TILES
template <int, class T>
void weigh_visible(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t block, int begin,
                   int end, const HalfPair* weights, const std::uint8_t* visible, Start start, T* output) {
    const NoDenormals no_denormals;
    constexpr int lanes = Vec<T>::lanes, step = 2 * GROUP_DEPTH;
    const auto* numbers = reinterpret_cast<const BFloat16*>(weights);
    for (std::int64_t c = 0; c < call.value_dim; c += lanes) {
        Vec<T> sum = start == Start::zero ? zero<T>() : load<T>(output + c);
        for (int first = begin; first < end; first += step) { // even and odd keys alone, as a tile does
            Vec<T> parts[2] = {zero<T>(), zero<T>()};
            for (int j = first; j < smaller(end, first + step); ++j) {
                if (!visible[j]) continue;
                const Vec<T> v =
                    load_value<BFloat16>(call, unit, block + j, c, smaller(lanes, call.value_dim - c));
                parts[j % 2] = fma(broadcast<T>(widen(numbers[j])), v, parts[j % 2]);
            }
            sum = sum + (parts[0] + parts[1]);
        }
        store(output + c, sum);
    }
}
#else
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
#endif

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
        rows.groups[r / GROUP_ROWS].begun = false;
    }
    // Values are added while the next group's scores become weights: the one keeps the multipliers busy, the other the
    // rest of the core.
    using Weight = typename Products::Weight;
    constexpr bool OVERLAPS = requires(Exponentials<Weight, T> weights) {
        products.weigh(0, 0, 0, rows.scores, Start::zero, rows.scores, width, weights);
    };
    struct {
        int rows, begin, end;
        Start start;
        T* output;
    } waiting = {};
    const auto add_values = [&](auto& beside) {
        products.weigh(waiting.rows, waiting.begin, waiting.end, rows.scores_before, waiting.start,
                       waiting.output, width, beside);
        waiting.rows = 0;
    };
    const auto add_block = [&](Group<T>& group, std::int64_t r, std::int64_t block, std::int64_t block_end,
                               int begin, int end) {
        T* output = state.output + r * width;
        const RowState<T> first = {state.maximum + r, state.sum + r, output,
                                   state.exact_sum ? state.exact_sum + r : nullptr};
        raise_maxima(rows.scores, group.count, begin, end, units.factor, first, group.begun ? width : 0,
                     width);
        Exponentials<Weight, T> weights(rows.scores, group.count, begin, end, units.factor, first);
        const Start start = group.begun ? Start::add : Start::zero;
        group.begun = true;
        const int value_end = smaller(group.keys.high - block, block_end - block);
        if constexpr (OVERLAPS) {
            if (!guarded) {
                if (waiting.rows > 0) add_values(weights);
                weights.finish();
                waiting = {group.count, begin, value_end, start, output};
                T* const scores = rows.scores;
                rows.scores = rows.scores_before;
                rows.scores_before = scores;
                return;
            }
        }
        weights.finish();
        if constexpr (!OVERLAPS) {
            if (!guarded)
                return products.weigh(group.count, begin, value_end, rows.scores, start, output, width);
        }
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
    const auto end_block = [&] {
        if constexpr (OVERLAPS) {
            NothingBeside nothing;
            if (waiting.rows > 0) add_values(nothing);
        }
    };
    for_each_block(call, unit, units, rows, key_first, key_last, products, guarded, add_block, end_block,
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
