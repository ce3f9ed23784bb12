#pragma once
// What becomes of the state of rows once their keys are done: merged, written as output and lse, or with a second
// pass over the keys as weights.

#include "kernels/attention.hpp"
#include "kernels/online_softmax.hpp"

namespace npattn::NPATTN_ISA {
namespace {

// The sum of a row's weights before they are rounded.
template <class T> NPATTN_INLINE T weight_sum(const AttentionPartial<T>& state, std::int64_t row) {
    return state.exact_sum ? state.exact_sum[row] : state.sum[row];
}

// (m, s, o), (m', s', o') -> M = max(m, m'), s 2^(m - M) + s' 2^(m' - M), o likewise; an empty part changes
// nothing.
template <class T>
void merge_rows(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t rows,
                const AttentionPartial<T>& into, const AttentionPartial<T>& part) {
    constexpr int lanes = Vec<T>::lanes;
    const Vec<T> factor = broadcast<T>(ScoreUnits<T>(call, unit).factor);
    const std::int64_t width = padded<T>(call.value_dim);
    for (std::int64_t r = 0; r < rows; ++r) {
        if (part.maximum[r] == -Constants<T>::infinity && part.sum[r] == T(0)) continue;
        const T before = into.maximum[r];
        const T maximum = before > part.maximum[r] ? before : part.maximum[r];
        const Vec<T> base = broadcast<T>(finite_or_zero(maximum));
        const Vec<T> keep = exp2((broadcast<T>(before) - base) * factor);
        const Vec<T> add = exp2((broadcast<T>(part.maximum[r]) - base) * factor);
        into.maximum[r] = maximum;
        into.sum[r] = into.sum[r] * first_lane(keep) + part.sum[r] * first_lane(add);
        if (into.exact_sum)
            into.exact_sum[r] = into.exact_sum[r] * first_lane(keep) + part.exact_sum[r] * first_lane(add);
        for (std::int64_t c = r * width; c < (r + 1) * width; c += lanes) {
            store(into.output + c, fma(load<T>(part.output + c), add, load<T>(into.output + c) * keep));
        }
    }
}

// Divides by the sums and writes output and lse of a group, whose first row in `state` is r.
template <class T>
void write_rows(const AttentionCall<T>& call, const AttentionUnit<T>& unit, const Group<T>& group,
                std::int64_t r, const AttentionPartial<T>& state) {
    const ScoreUnits<T> units(call, unit);
    const std::int64_t width = padded<T>(call.value_dim);
    for (int i = 0; i < group.count; ++i, ++r) {
        const Row& row = group.rows[i];
        const T sum = state.sum[r];
        if (unit.out) {
            const T* from = state.output + r * width;
            char* to = unit.out + row.position * call.out_position + row.head * call.out_head;
            const Mask<T> seen = first<T>(sum == T(0) ? 0 : Vec<T>::lanes);
            const Vec<T> inverse = broadcast<T>(T(1) / sum);
            const bool sink = unit.sinks != nullptr; // a sum for rows that see nothing: theirs is 0, not -0
            with_storage<T>(call.out_storage, [&]<class S>(S) {
                each_vector<T>(0, call.value_dim, [&](std::int64_t c, auto part) NPATTN_BODY {
                    Vec<T> o = select(seen, load<T>(from + c) * inverse, zero<T>());
                    if (sink) o = o + zero<T>();
                    store_part_as<S>(to + c * static_cast<std::ptrdiff_t>(sizeof(S)), o, part);
                });
            });
        }
        if (unit.lse) {
            const T maximum = finite_or_zero(state.maximum[r]);
            const T log_sum = static_cast<T>(__builtin_log(static_cast<double>(weight_sum(state, r))));
            const T lse = sum == T(0) ? -Constants<T>::infinity : maximum * units.to_nats + log_sum;
            store_one(unit.lse + row.position * call.lse_position + row.head * call.lse_head, lse);
        }
    }
}

// Writes the first `count` elements of a vector as the outputs are stored.
template <class T>
NPATTN_INLINE void write_first(const AttentionCall<T>& call, char* to, Vec<T> x, std::int64_t count) {
    with_storage<T>(call.out_storage,
                    [&]<class S>(S) { store_first_as<S>(to, x, smaller(Vec<T>::lanes, count)); });
}

// Where the weights of a row go, or its scores.
template <class T>
char* weights_of(const AttentionCall<T>& call, const AttentionUnit<T>& unit, const Row& row) {
    return unit.weights + row.position * call.weights_position + row.head * call.weights_head;
}

// A second pass over the keys: weights exp(score - maximum) / sum of the rows, or the scores themselves, at all
// keys of the blocks in which a group sees any.
template <class Products, class T>
void fill_weights(const AttentionCall<T>& call, const AttentionUnit<T>& unit, RowBlock<T>& rows,
                  Products& products, const AttentionPartial<T>& state) {
    constexpr int lanes = Vec<T>::lanes;
    const std::ptrdiff_t size = storage_bytes(call.out_storage);
    const ScoreUnits<T> units(call, unit);
    const bool want_scores = call.write == Write::scores;
    const Vec<T> hidden = broadcast<T>(-Constants<T>::infinity);
    bool poisoned = false; // a row is NaN: what is hidden in it must be told from what scores -inf
    for (std::int64_t r = 0; r < rows.last - rows.first && !want_scores; ++r) {
        poisoned |= state.sum[r] != state.sum[r];
    }
    for_each_block(
        call, unit, units, rows, 0, unit.key_len, products, poisoned,
        [&](const Group<T>& group, std::int64_t r, std::int64_t block, std::int64_t block_end, int begin,
            int end) {
            end = smaller(end, block_end - block);
            for (int i = 0; i < group.count; ++i) {
                const Vec<T> sum = broadcast<T>(want_scores ? T(1) : weight_sum(state, r + i));
                const Vec<T> maximum =
                    broadcast<T>(want_scores ? T(0) : finite_or_zero(state.maximum[r + i]));
                char* to = weights_of(call, unit, group.rows[i]) + block * size;
                for (int j = begin; j < end; j += lanes) {
                    const Vec<T> s = load<T>(rows.scores + i * ROW_STRIDE + j);
                    const Vec<T> weight = exp2((s - maximum) * broadcast<T>(units.factor)) / sum;
                    const int n = smaller(lanes, end - j);
                    const Mask<T> is_hidden =
                        poisoned ? invert(load_bytes_first<T>(rows.visible + i * KEY_BLOCK + j, n))
                                 : equal(s, hidden);
                    write_first(call, to + j * size, want_scores ? s : select(is_hidden, zero<T>(), weight),
                                n);
                }
            }
        },
        [] {}, [](const Group<T>&, std::int64_t) {});
}

// The same, and what hidden keys have at all the others.
template <class Products, class T>
void write_weights(const AttentionCall<T>& call, const AttentionUnit<T>& unit, RowBlock<T>& rows,
                   Products& products, const AttentionPartial<T>& state) {
    constexpr int lanes = Vec<T>::lanes;
    const Vec<T> background = broadcast<T>(call.write == Write::scores ? -Constants<T>::infinity : T(0));
    for (std::int64_t r = 0; r < rows.last - rows.first; ++r) {
        char* to = weights_of(call, unit, rows.groups[r / GROUP_ROWS].rows[r % GROUP_ROWS]);
        for (std::int64_t j = 0; j < call.key_len; j += lanes) {
            write_first(call, to + j * storage_bytes(call.out_storage), background, call.key_len - j);
        }
    }
    fill_weights(call, unit, rows, products, state);
}

} // namespace
} // namespace npattn::NPATTN_ISA
