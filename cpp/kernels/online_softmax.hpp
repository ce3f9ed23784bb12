#pragma once
// The online softmax: what a row knows of the keys so far, and how the scores of a block become weights.

#include "kernels/pack.hpp"
#include "simd/math.hpp"

namespace npattn::NPATTN_ISA {
namespace {

// What a row knows so far: exp(score) summed relative to `maximum`, which trails the true maximum by at most
// 2^8, so that the sums need rescaling seldom. A maximum of -inf counts as 0, so that hidden scores give
// exp(-inf - 0) = 0.
template <class T> struct RowState {
    T* maximum;
    T* sum;
    T* output;    // (padded value_dim): the weighted sum of values, not yet divided by `sum`
    T* exact_sum; // or null: see AttentionPartial
};

template <class T> NPATTN_INLINE T first_lane(Vec<T> a) {
    alignas(64) T all_lanes[Vec<T>::lanes];
    store(all_lanes, a);
    return all_lanes[0];
}

template <class T> NPATTN_INLINE T finite_or_zero(T maximum) {
    return maximum == -Constants<T>::infinity ? T(0) : maximum;
}

// The largest score of columns [begin, end), a multiple of two registers. NaN may be passed over: it shows in
// the sum.
template <class T> NPATTN_INLINE T highest_score(const T* scores, int begin, int end) {
    constexpr int lanes = Vec<T>::lanes;
    Vec<T> highest[2] = {load<T>(scores + begin), load<T>(scores + begin + lanes)};
    for (int j = begin + 2 * lanes; j < end; j += 2 * lanes) {
        highest[0] = max(load<T>(scores + j), highest[0]);
        highest[1] = max(load<T>(scores + j + lanes), highest[1]);
    }
    return reduce_max(max(highest[0], highest[1]));
}

// Moves the maximum of a row up to `highest` if that is far above it, and its sums with it: `sums` elements of
// its output.
template <class T>
NPATTN_INLINE void raise_maximum(T highest, T factor, const RowState<T>& row, std::int64_t sums) {
    const T before = *row.maximum;
    if (!((highest - before) * factor > T(8))) return;
    *row.maximum = highest;
    const Vec<T> rescale = exp2(broadcast<T>((before - highest) * factor));
    *row.sum *= first_lane(rescale);
    if (row.exact_sum) *row.exact_sum *= first_lane(rescale);
    for (std::int64_t c = 0; c < sums; c += Vec<T>::lanes) {
        store(row.output + c, load<T>(row.output + c) * rescale);
    }
}

// Moves the maxima of `count` rows of scores that lie ROW_STRIDE apart, their outputs `width`, up where that is needed;
// only the first `sums` elements of an output are to be kept. The maxima of the scores come first: each is the end of a
// chain of dependent steps, and the chains of different rows overlap.
template <class T>
void raise_maxima(const T* scores, int count, int begin, int end, T factor, const RowState<T>& first,
                  std::int64_t sums, std::int64_t width) {
    T highest[GROUP_ROWS];
    for (int r = 0; r < count; ++r) highest[r] = highest_score(scores + r * ROW_STRIDE, begin, end);
    for (int r = 0; r < count; ++r) {
        raise_maximum(highest[r], factor,
                      RowState<T>{first.maximum + r, first.sum + r, first.output + r * width,
                                  first.exact_sum ? first.exact_sum + r : nullptr},
                      sums);
    }
}

// scores[j] -> exp(score - maximum) for columns [begin, end) of those rows, a step being two vectors, so that a tile
// can take the steps between its own; finish() adds the sums to the state. W: what the weights become, T or HalfPair.
template <class W, class T = W> class Exponentials {
public:
    // Doubles without a table take more registers than sixteen and a tile's sums have.
#ifdef NPATTN_LOOKUP
    static constexpr int every = 2;
#else
    static constexpr int every = sizeof(T) == sizeof(float) ? 2 : 0;
#endif

    Exponentials(T* scores, int count, int begin, int end, T factor, const RowState<T>& first)
        : row_(scores), column_(begin), begin_(begin), end_(end), left_(count * ((end - begin) / STEP)),
          count_(count), factor_(factor), state_sums_(first.sum) {
        for (int r = 0; r < count; ++r) {
            maxima_[r] = finite_or_zero(first.maximum[r]);
            sums_[r] = zero<T>();
        }
        add_exactly(scores, count, begin, end, factor, first, W());
    }

    bool left() const { return left_ > 0; }
    NPATTN_INLINE void step() {
        step_to(W());
        --left_;
        column_ += STEP;
        if (column_ < end_) return;
        column_ = begin_;
        row_ += ROW_STRIDE;
        ++done_;
    }
    void finish() {
        while (left()) step();
        for (int r = 0; r < count_; ++r) state_sums_[r] += reduce_add(sums_[r]);
    }

private:
    static constexpr int STEP = 2 * Vec<T>::lanes;

    NPATTN_INLINE Vec<T> exponent(int vector) const {
        const Vec<T> score = load<T>(row_ + column_ + vector * Vec<T>::lanes);
        return (score - broadcast<T>(maxima_[done_])) * broadcast<T>(factor_);
    }
    NPATTN_INLINE void step_to(T) {
        const Vec<T> first = exp2(exponent(0)), second = exp2(exponent(1));
        store(row_ + column_, first);
        store(row_ + column_ + Vec<T>::lanes, second);
        sums_[done_] = sums_[done_] + (first + second);
    }
    static void add_exactly(T*, int, int, int, T, const RowState<T>&, T) {}

#ifdef NPATTN_DOT
    // Rounded to bfloat16 and then added up, so that the weights of the output add up to 1: column j goes to element j
    // of a row of bfloat16 that begins where the row of scores does.
    NPATTN_INLINE void step_to(HalfPair) {
        constexpr std::uint16_t one = 0x3f80;
        const Vec<HalfPair> weights = narrow_pairs(exp2_rough(exponent(0)), exp2_rough(exponent(1)));
        store(row_ + column_ / 2, weights);
        sums_[done_] = dot(weights, broadcast(HalfPair{one, one}), sums_[done_]);
    }
    static void add_exactly(T* scores, int count, int begin, int end, T factor, const RowState<T>& first,
                            HalfPair) {
        for (int r = 0; r < count && first.exact_sum; ++r, scores += ROW_STRIDE) {
            const Vec<T> maximum = broadcast<T>(finite_or_zero(first.maximum[r]));
            Vec<T> sum = zero<T>();
            for (int j = begin; j < end; j += Vec<T>::lanes)
                sum = sum + exp2((load<T>(scores + j) - maximum) * broadcast<T>(factor));
            first.exact_sum[r] += reduce_add(sum);
        }
    }
#endif

    T* row_;
    int column_, begin_, end_;
    int left_;     // steps
    int done_ = 0; // rows
    int count_;    // rows in all
    T factor_;
    T* state_sums_;
    T maxima_[GROUP_ROWS];
    Vec<T> sums_[GROUP_ROWS];
};

} // namespace
} // namespace npattn::NPATTN_ISA
