// Rotary position embedding of contiguous rows.

#include "dispatch/kernel_table.hpp"
#include "kernels/each_vector.hpp"

namespace npattn::NPATTN_ISA {
namespace {

// The 2 * count elements of `count` pairs lie in two vectors.
NPATTN_INLINE Whole low_part(Whole, int) { return {}; }
NPATTN_INLINE Whole high_part(Whole, int) { return {}; }
NPATTN_INLINE int low_part(int pairs, int lanes) { return 2 * pairs < lanes ? 2 * pairs : lanes; }
NPATTN_INLINE int high_part(int pairs, int lanes) { return 2 * pairs < lanes ? 0 : 2 * pairs - lanes; }

// a' = a cos - b sin, b' = b cos + a sin, with sin already signed.
template <class T> NPATTN_INLINE void turn(Vec<T>& a, Vec<T>& b, Vec<T> cos, Vec<T> sin) {
    const Vec<T> turned = fnma(b, sin, a * cos);
    b = fma(a, sin, b * cos);
    a = turned;
}

// x (rows, 2 pairs + rest), cos and sin (rows, pairs) -> y like x. x and y are stored as S; T is computed in.
template <class S, class T = Compute<S>>
void rotate(ConstRows x, ConstRows cos, ConstRows sin, std::int64_t rows, std::int64_t pairs,
            std::int64_t rest, bool interleaved, T sign, Rows y) {
    constexpr int lanes = Vec<T>::lanes;
    constexpr std::int64_t size = sizeof(S);
    constexpr std::int64_t angle = sizeof(T);
    const Vec<T> direction = broadcast<T>(sign);
    for (std::int64_t r = 0; r < rows; ++r) {
        const char* row = x.data + r * x.stride;
        const char* c = cos.data + r * cos.stride;
        const char* s = sin.data + r * sin.stride;
        char* out = y.data + r * y.stride;
        const auto halves = [&](std::int64_t i, auto part) NPATTN_BODY {
            Vec<T> a = load_part<S>(row + i * size, part);
            Vec<T> b = load_part<S>(row + (pairs + i) * size, part);
            turn(a, b, load_part<T>(c + i * angle, part), load_part<T>(s + i * angle, part) * direction);
            store_part_as<S>(out + i * size, a, part);
            store_part_as<S>(out + (pairs + i) * size, b, part);
        };
        const auto neighbours = [&](std::int64_t i, auto part) NPATTN_BODY {
            const auto low = low_part(part, lanes);
            const auto high = high_part(part, lanes);
            Vec<T> a = load_part<S>(row + 2 * i * size, low);
            Vec<T> b = load_part<S>(row + (2 * i + lanes) * size, high);
            deinterleave(a, b);
            turn(a, b, load_part<T>(c + i * angle, part), load_part<T>(s + i * angle, part) * direction);
            interleave(a, b);
            store_part_as<S>(out + 2 * i * size, a, low);
            store_part_as<S>(out + (2 * i + lanes) * size, b, high);
        };
        if (interleaved) {
            each_vector<T>(0, pairs, neighbours);
        } else {
            each_vector<T>(0, pairs, halves);
        }
        if (rest != 0 && out != row) {
            __builtin_memcpy(out + 2 * pairs * size, row + 2 * pairs * size,
                             static_cast<std::size_t>(rest * size));
        }
    }
}

} // namespace

extern const RopeTable rope_table;
const RopeTable rope_table = {{rotate<float>}, {rotate<double>}, {rotate<Float16>}, {rotate<BFloat16>}};

} // namespace npattn::NPATTN_ISA
