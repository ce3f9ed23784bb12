// softmax of contiguous rows, in three steps: maximum, exponentials and their sum, scale (or shift, for the
// logarithm). Elements are stored as S and computed in T.

#include "dispatch/kernel_table.hpp"
#include "kernels/each_vector.hpp"
#include "simd/math.hpp"

namespace npattn::NPATTN_ISA {
namespace {

// Element i and those after it of a row, hidden ones and those past the part as -inf.
template <class S, bool masked, class Part, class T = Compute<S>>
NPATTN_INLINE Vec<T> visible(const char* x, const char* mask, std::int64_t i, Part part) {
    const T hidden = -Constants<T>::infinity;
    const Vec<T> a = fill_rest(load_part<S>(x + i * sizeof(S), part), part, hidden);
    if constexpr (masked) return select(load_bytes_part<T>(mask + i, part), a, broadcast<T>(hidden));
    return a;
}

// x (rows, columns): maximum_r = max(maximum_r, max_c x_rc). Two vectors at a time, since one max waits for
// the other.
template <class S, bool masked, class T = Compute<S>>
void maximum_rows(ConstRows x, ConstRows mask, std::int64_t rows, std::int64_t columns, T* maximum) {
    constexpr int lanes = Vec<T>::lanes;
    for (std::int64_t r = 0; r < rows; ++r) {
        const char* row = x.data + r * x.stride;
        const char* keep = masked ? mask.data + r * mask.stride : nullptr;
        Vec<T> even = broadcast<T>(maximum[r]);
        Vec<T> odd = even;
        std::int64_t i = 0;
        for (; i + 2 * lanes <= columns; i += 2 * lanes) {
            even = max(visible<S, masked>(row, keep, i, Whole{}), even); // in this order a NaN is not taken
            odd = max(visible<S, masked>(row, keep, i + lanes, Whole{}), odd);
        }
        each_vector<T>(i, columns, [&](std::int64_t j, auto part) NPATTN_BODY {
            even = max(visible<S, masked>(row, keep, j, part), even);
        });
        maximum[r] = reduce_max(max(even, odd));
    }
}

template <class S, bool masked, class T = Compute<S>>
bool contains_nan(const char* x, const char* mask, std::int64_t columns) {
    bool found = false;
    each_vector<T>(0, columns, [&](std::int64_t i, auto part) NPATTN_BODY {
        const Vec<T> a = visible<S, masked>(x, mask, i, part);
        found = found || !all(equal(a, a));
    });
    return found;
}

// e_rc = exp(x_rc - maximum_r); sum_r + correction_r += sum_c e_rc.
// The sum is in pieces of 64 vectors, which are then added with their rounding errors kept (Neumaier): the
// error does not grow with the length.
template <class S, bool masked, bool kept, class T = Compute<S>>
void exponentials_rows(ConstRows x, ConstRows mask, std::int64_t rows, std::int64_t columns, const T* maximum,
                       Rows e, T* sum, T* correction) {
    constexpr std::int64_t piece = 64 * Vec<T>::lanes;
    static_assert(SUM_PIECE % piece == 0);
    for (std::int64_t r = 0; r < rows; ++r) {
        const char* row = x.data + r * x.stride;
        const char* keep = masked ? mask.data + r * mask.stride : nullptr;
        char* out = kept ? e.data + r * e.stride : nullptr;
        const Vec<T> top = broadcast<T>(maximum[r]);
        const bool infinite = maximum[r] == Constants<T>::infinity;
        const bool poisoned =
            infinite && contains_nan<S, masked>(row, keep, columns); // before e overwrites x
        T total = sum[r];
        T lost = correction[r];
        for (std::int64_t begin = 0; begin < columns; begin += piece) {
            Vec<T> partial = zero<T>();
            const std::int64_t end = begin + piece < columns ? begin + piece : columns;
            each_vector<T>(begin, end, [&](std::int64_t i, auto part) NPATTN_BODY {
                const Vec<T> power = exp(visible<S, masked>(row, keep, i, part) - top);
                partial = partial + power;
                if constexpr (kept) store_part(out + i * sizeof(T), power, part);
            });
            const T term = reduce_add(partial);
            const T grown = total + term;
            lost += total >= term ? (total - grown) + term : (term - grown) + total;
            total = grown;
        }
        if (infinite) { // exp(inf - inf) was NaN whatever else there is
            total = sum[r] +
                    (poisoned ? Constants<T>::infinity - Constants<T>::infinity : Constants<T>::infinity);
            lost = T(0);
        }
        sum[r] = total;
        correction[r] = lost;
    }
}

// y_rc = e_rc * factor_r.
template <class S, bool masked, class T = Compute<S>>
void scale_rows(ConstRows e, ConstRows mask, std::int64_t rows, std::int64_t columns, const T* factor,
                Rows y) {
    for (std::int64_t r = 0; r < rows; ++r) {
        const char* row = e.data + r * e.stride;
        const char* keep = masked ? mask.data + r * mask.stride : nullptr;
        char* out = y.data + r * y.stride;
        const Vec<T> f = broadcast<T>(factor[r]);
        each_vector<T>(0, columns, [&](std::int64_t i, auto part) NPATTN_BODY {
            Vec<T> a = load_part<T>(row + i * sizeof(T), part) * f;
            if constexpr (masked)
                a = select(load_bytes_part<T>(keep + i, part), a, zero<T>()); // 0 beside a NaN
            store_part_as<S>(out + i * sizeof(S), a, part);
        });
    }
}

// y_rc = (x_rc - maximum_r) - log_sum_r.
template <class S, class T = Compute<S>>
void shift(ConstRows x, std::int64_t rows, std::int64_t columns, const T* maximum, const T* log_sum, Rows y) {
    for (std::int64_t r = 0; r < rows; ++r) {
        const char* row = x.data + r * x.stride;
        char* out = y.data + r * y.stride;
        const Vec<T> top = broadcast<T>(maximum[r]);
        const Vec<T> total = broadcast<T>(log_sum[r]);
        each_vector<T>(0, columns, [&](std::int64_t i, auto part) NPATTN_BODY {
            const Vec<T> a = load_part<S>(row + i * sizeof(S), part);
            store_part_as<S>(out + i * sizeof(S), (a - top) - total, part);
        });
    }
}

template <class S, class T = Compute<S>>
void maximum(ConstRows x, ConstRows mask, std::int64_t rows, std::int64_t columns, T* result) {
    if (mask.data != nullptr) {
        maximum_rows<S, true>(x, mask, rows, columns, result);
    } else {
        maximum_rows<S, false>(x, mask, rows, columns, result);
    }
}

template <class S, class T = Compute<S>>
void exponentials(ConstRows x, ConstRows mask, std::int64_t rows, std::int64_t columns, const T* maximum,
                  Rows e, T* sum, T* correction) {
    if (mask.data != nullptr && e.data != nullptr) {
        exponentials_rows<S, true, true>(x, mask, rows, columns, maximum, e, sum, correction);
    } else if (mask.data != nullptr) {
        exponentials_rows<S, true, false>(x, mask, rows, columns, maximum, e, sum, correction);
    } else if (e.data != nullptr) {
        exponentials_rows<S, false, true>(x, mask, rows, columns, maximum, e, sum, correction);
    } else {
        exponentials_rows<S, false, false>(x, mask, rows, columns, maximum, e, sum, correction);
    }
}

template <class S, class T = Compute<S>>
void scale(ConstRows e, ConstRows mask, std::int64_t rows, std::int64_t columns, const T* factor, Rows y) {
    if (mask.data != nullptr) {
        scale_rows<S, true>(e, mask, rows, columns, factor, y);
    } else {
        scale_rows<S, false>(e, mask, rows, columns, factor, y);
    }
}

template <class S>
constexpr SoftmaxKernels<S> softmax_kernels = {maximum<S>, exponentials<S>, scale<S>, shift<S>};

} // namespace

extern const SoftmaxTable softmax_table;
const SoftmaxTable softmax_table = {softmax_kernels<float>, softmax_kernels<double>, softmax_kernels<Float16>,
                                    softmax_kernels<BFloat16>};

} // namespace npattn::NPATTN_ISA
