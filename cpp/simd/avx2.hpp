#pragma once
// The SIMD contract on AVX2 and FMA: 8 floats or 4 doubles; a lane of a mask is all ones or all zeros.

#include <cstring>

#include <immintrin.h>

namespace npattn::NPATTN_ISA {
namespace {

template <class T> struct Vec;
template <class T> struct Mask;

template <> struct Vec<float> {
    static constexpr int lanes = 8;
    __m256 value;
};
template <> struct Vec<double> {
    static constexpr int lanes = 4;
    __m256d value;
};
template <> struct Mask<float> { __m256 value; };
template <> struct Mask<double> { __m256d value; };

constexpr int TILE_ROWS = 6;
constexpr int TILE_VECTORS = 2;

template <class T> NPATTN_INLINE Mask<T> first(int n);
template <> NPATTN_INLINE Mask<float> first<float>(int n) {
    const __m256i indices = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), indices))};
}
template <> NPATTN_INLINE Mask<double> first<double>(int n) {
    const __m256i indices = _mm256_setr_epi64x(0, 1, 2, 3);
    return {_mm256_castsi256_pd(_mm256_cmpgt_epi64(_mm256_set1_epi64x(n), indices))};
}

template <class S> NPATTN_INLINE Vec<Compute<S>> load(const void* p);
template <> NPATTN_INLINE Vec<float> load<float>(const void* p) {
    return {_mm256_loadu_ps(static_cast<const float*>(p))};
}
template <> NPATTN_INLINE Vec<double> load<double>(const void* p) {
    return {_mm256_loadu_pd(static_cast<const double*>(p))};
}

template <class S> NPATTN_INLINE Vec<Compute<S>> load_first(const void* p, int n);
template <> NPATTN_INLINE Vec<float> load_first<float>(const void* p, int n) {
    return {_mm256_maskload_ps(static_cast<const float*>(p), _mm256_castps_si256(first<float>(n).value))};
}
template <> NPATTN_INLINE Vec<double> load_first<double>(const void* p, int n) {
    return {_mm256_maskload_pd(static_cast<const double*>(p), _mm256_castpd_si256(first<double>(n).value))};
}

NPATTN_INLINE void store(void* p, Vec<float> a) { _mm256_storeu_ps(static_cast<float*>(p), a.value); }
NPATTN_INLINE void store(void* p, Vec<double> a) { _mm256_storeu_pd(static_cast<double*>(p), a.value); }
NPATTN_INLINE void store_first(void* p, Vec<float> a, int n) {
    _mm256_maskstore_ps(static_cast<float*>(p), _mm256_castps_si256(first<float>(n).value), a.value);
}
NPATTN_INLINE void store_first(void* p, Vec<double> a, int n) {
    _mm256_maskstore_pd(static_cast<double*>(p), _mm256_castpd_si256(first<double>(n).value), a.value);
}
NPATTN_INLINE void stream(void* p, Vec<float> a) { _mm256_stream_ps(static_cast<float*>(p), a.value); }
NPATTN_INLINE void stream(void* p, Vec<double> a) { _mm256_stream_pd(static_cast<double*>(p), a.value); }

NPATTN_INLINE Vec<float> widen_halves(__m128i halves, Float16) { return {_mm256_cvtph_ps(halves)}; }
NPATTN_INLINE Vec<float> widen_halves(__m128i halves, BFloat16) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16))};
}
NPATTN_INLINE __m128i narrow_halves(Vec<float> a, Float16) {
    return _mm256_cvtps_ph(a.value, _MM_FROUND_TO_NEAREST_INT);
}
NPATTN_INLINE __m128i narrow_halves(Vec<float> a, BFloat16) {
    const __m256i bits = _mm256_castps_si256(a.value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.value, a.value, _CMP_UNORD_Q));
    const __m256i upper = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
}
template <class S> NPATTN_INLINE Vec<Compute<S>> load(const void* p) {
    return widen_halves(_mm_loadu_si128(static_cast<const __m128i*>(p)), S{});
}
template <class S> NPATTN_INLINE Vec<Compute<S>> load_first(const void* p, int n) {
    __m128i halves = _mm_setzero_si128();
    std::memcpy(&halves, p, static_cast<std::size_t>(n) * sizeof(S));
    return widen_halves(halves, S{});
}
template <class S> NPATTN_INLINE void store_first_as(void* p, Vec<Compute<S>> a, int n) {
    if constexpr (sizeof(S) == 2) {
        const __m128i halves = narrow_halves(a, S{});
        std::memcpy(p, &halves, static_cast<std::size_t>(n) * sizeof(S));
    } else {
        store_first(p, a, n);
    }
}
template <class S> NPATTN_INLINE void store_as(void* p, Vec<Compute<S>> a) {
    if constexpr (sizeof(S) == 2) {
        _mm_storeu_si128(static_cast<__m128i*>(p), narrow_halves(a, S{}));
    } else {
        store(p, a);
    }
}
NPATTN_INLINE Vec<float> zip_halves(__m128i low, __m128i high) {
    return {_mm256_castsi256_ps(
        _mm256_or_si256(_mm256_cvtepu16_epi32(low), _mm256_slli_epi32(_mm256_cvtepu16_epi32(high), 16)))};
}
NPATTN_INLINE Vec<float> load_pairs(const void* p, const void* q) {
    return zip_halves(_mm_loadu_si128(static_cast<const __m128i*>(p)),
                      _mm_loadu_si128(static_cast<const __m128i*>(q)));
}
NPATTN_INLINE Vec<float> load_pairs_first(const void* p, const void* q, int n) {
    __m128i low = _mm_setzero_si128(), high = _mm_setzero_si128();
    std::memcpy(&low, p, static_cast<std::size_t>(n) * 2);
    std::memcpy(&high, q, static_cast<std::size_t>(n) * 2);
    return zip_halves(low, high);
}

// Lane i is byte i of `bytes` not being 0.
template <class T> NPATTN_INLINE Mask<T> widen_bytes(std::uint64_t bytes);
template <> NPATTN_INLINE Mask<float> widen_bytes<float>(std::uint64_t bytes) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(bytes)));
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(wide, _mm256_setzero_si256()))};
}
template <> NPATTN_INLINE Mask<double> widen_bytes<double>(std::uint64_t bytes) {
    const __m256i wide = _mm256_cvtepu8_epi64(_mm_cvtsi64_si128(static_cast<long long>(bytes)));
    return {_mm256_castsi256_pd(_mm256_cmpgt_epi64(wide, _mm256_setzero_si256()))};
}
template <class T> NPATTN_INLINE Mask<T> load_bytes_first(const void* p, int n) {
    std::uint64_t bytes = 0;
    for (int i = 0; i < n; ++i) {
        bytes |= static_cast<std::uint64_t>(static_cast<const std::uint8_t*>(p)[i]) << (8 * i);
    }
    return widen_bytes<T>(bytes);
}
template <class T> NPATTN_INLINE Mask<T> load_bytes(const void* p) {
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, p, Vec<T>::lanes);
    return widen_bytes<T>(bytes);
}
// Saturating packs keep lanes of all ones all ones.
NPATTN_INLINE void store_bytes(void* p, Mask<float> m) {
    const __m256i wide = _mm256_castps_si256(m.value);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    const __m128i bytes = _mm_and_si128(_mm_packs_epi16(words, words), _mm_set1_epi8(1));
    _mm_storel_epi64(static_cast<__m128i*>(p), bytes);
}
NPATTN_INLINE void store_bytes(void* p, Mask<double> m) {
    const __m256i wide = _mm256_castpd_si256(m.value);
    const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    const __m128i words = _mm_packs_epi32(pairs, pairs);
    const __m128i bytes = _mm_and_si128(_mm_packs_epi16(words, words), _mm_set1_epi8(1));
    const int four = _mm_cvtsi128_si32(bytes);
    std::memcpy(p, &four, sizeof four);
}

template <class T> NPATTN_INLINE Vec<T> broadcast(T x);
template <> NPATTN_INLINE Vec<float> broadcast<float>(float x) { return {_mm256_set1_ps(x)}; }
template <> NPATTN_INLINE Vec<double> broadcast<double>(double x) { return {_mm256_set1_pd(x)}; }
template <class T> NPATTN_INLINE Vec<T> zero() { return broadcast<T>(T(0)); }
template <class T> NPATTN_INLINE Vec<T> iota();
template <> NPATTN_INLINE Vec<float> iota<float>() { return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7)}; }
template <> NPATTN_INLINE Vec<double> iota<double>() { return {_mm256_setr_pd(0, 1, 2, 3)}; }

NPATTN_INLINE Vec<float> operator+(Vec<float> a, Vec<float> b) { return {_mm256_add_ps(a.value, b.value)}; }
NPATTN_INLINE Vec<double> operator+(Vec<double> a, Vec<double> b) {
    return {_mm256_add_pd(a.value, b.value)};
}
NPATTN_INLINE Vec<float> operator-(Vec<float> a, Vec<float> b) { return {_mm256_sub_ps(a.value, b.value)}; }
NPATTN_INLINE Vec<double> operator-(Vec<double> a, Vec<double> b) {
    return {_mm256_sub_pd(a.value, b.value)};
}
NPATTN_INLINE Vec<float> operator*(Vec<float> a, Vec<float> b) { return {_mm256_mul_ps(a.value, b.value)}; }
NPATTN_INLINE Vec<double> operator*(Vec<double> a, Vec<double> b) {
    return {_mm256_mul_pd(a.value, b.value)};
}
NPATTN_INLINE Vec<float> operator/(Vec<float> a, Vec<float> b) { return {_mm256_div_ps(a.value, b.value)}; }
NPATTN_INLINE Vec<double> operator/(Vec<double> a, Vec<double> b) {
    return {_mm256_div_pd(a.value, b.value)};
}
NPATTN_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
    return {_mm256_fmadd_ps(a.value, b.value, c.value)};
}
NPATTN_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
    return {_mm256_fmadd_pd(a.value, b.value, c.value)};
}
NPATTN_INLINE Vec<float> fnma(Vec<float> a, Vec<float> b, Vec<float> c) {
    return {_mm256_fnmadd_ps(a.value, b.value, c.value)};
}
NPATTN_INLINE Vec<double> fnma(Vec<double> a, Vec<double> b, Vec<double> c) {
    return {_mm256_fnmadd_pd(a.value, b.value, c.value)};
}
NPATTN_INLINE Vec<float> max(Vec<float> a, Vec<float> b) { return {_mm256_max_ps(a.value, b.value)}; }
NPATTN_INLINE Vec<double> max(Vec<double> a, Vec<double> b) { return {_mm256_max_pd(a.value, b.value)}; }
NPATTN_INLINE Vec<float> min(Vec<float> a, Vec<float> b) { return {_mm256_min_ps(a.value, b.value)}; }
NPATTN_INLINE Vec<double> min(Vec<double> a, Vec<double> b) { return {_mm256_min_pd(a.value, b.value)}; }
NPATTN_INLINE Vec<float> round(Vec<float> a) { return {_mm256_round_ps(a.value, 8)}; }
NPATTN_INLINE Vec<double> round(Vec<double> a) { return {_mm256_round_pd(a.value, 8)}; }

// 2^n does not always fit a number where a * 2^n does: multiply by 2^(n / 2) and by 2^(n - n / 2), with n
// clamped to where both are normal. Beyond that the product has overflowed or vanished, but for a NaN, which
// only n = -inf turns to 0.
NPATTN_INLINE Vec<float> scale_exponent(Vec<float> a, Vec<float> n) {
    const __m256 clamped = _mm256_max_ps(_mm256_min_ps(n.value, _mm256_set1_ps(252)), _mm256_set1_ps(-252));
    const __m256i whole = _mm256_cvtps_epi32(clamped);
    const __m256i half = _mm256_srai_epi32(whole, 1);
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256i low = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    const __m256i high = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
    const __m256 scaled =
        _mm256_mul_ps(_mm256_mul_ps(a.value, _mm256_castsi256_ps(low)), _mm256_castsi256_ps(high));
    const __m256 gone = _mm256_cmp_ps(n.value, _mm256_set1_ps(-__builtin_huge_valf()), _CMP_EQ_OQ);
    return {_mm256_andnot_ps(gone, scaled)};
}
NPATTN_INLINE Vec<double> scale_exponent(Vec<double> a, Vec<double> n) {
    const __m256d clamped =
        _mm256_max_pd(_mm256_min_pd(n.value, _mm256_set1_pd(2044)), _mm256_set1_pd(-2044));
    const __m128i whole = _mm256_cvtpd_epi32(clamped);
    const __m128i half = _mm_srai_epi32(whole, 1);
    const __m128i bias = _mm_set1_epi32(1023);
    const __m256i low = _mm256_slli_epi64(_mm256_cvtepi32_epi64(_mm_add_epi32(half, bias)), 52);
    const __m128i rest = _mm_sub_epi32(whole, half);
    const __m256i high = _mm256_slli_epi64(_mm256_cvtepi32_epi64(_mm_add_epi32(rest, bias)), 52);
    const __m256d scaled =
        _mm256_mul_pd(_mm256_mul_pd(a.value, _mm256_castsi256_pd(low)), _mm256_castsi256_pd(high));
    const __m256d gone = _mm256_cmp_pd(n.value, _mm256_set1_pd(-__builtin_huge_val()), _CMP_EQ_OQ);
    return {_mm256_andnot_pd(gone, scaled)};
}

template <class T> NPATTN_INLINE Vec<T> fma_element(Vec<T> a, const T* p, Vec<T> c) {
    return fma(a, broadcast<T>(*p), c);
}
template <class T> NPATTN_INLINE Vec<T> mul_element(Vec<T> a, const T* p) { return a * broadcast<T>(*p); }

NPATTN_INLINE Mask<float> less(Vec<float> a, Vec<float> b) {
    return {_mm256_cmp_ps(a.value, b.value, _CMP_LT_OQ)};
}
NPATTN_INLINE Mask<double> less(Vec<double> a, Vec<double> b) {
    return {_mm256_cmp_pd(a.value, b.value, _CMP_LT_OQ)};
}
NPATTN_INLINE Mask<float> equal(Vec<float> a, Vec<float> b) {
    return {_mm256_cmp_ps(a.value, b.value, _CMP_EQ_OQ)};
}
NPATTN_INLINE Mask<double> equal(Vec<double> a, Vec<double> b) {
    return {_mm256_cmp_pd(a.value, b.value, _CMP_EQ_OQ)};
}
NPATTN_INLINE Mask<float> both(Mask<float> a, Mask<float> b) { return {_mm256_and_ps(a.value, b.value)}; }
NPATTN_INLINE Mask<double> both(Mask<double> a, Mask<double> b) { return {_mm256_and_pd(a.value, b.value)}; }
NPATTN_INLINE Mask<float> either(Mask<float> a, Mask<float> b) { return {_mm256_or_ps(a.value, b.value)}; }
NPATTN_INLINE Mask<double> either(Mask<double> a, Mask<double> b) { return {_mm256_or_pd(a.value, b.value)}; }
NPATTN_INLINE Mask<float> invert(Mask<float> a) { return {_mm256_xor_ps(a.value, first<float>(8).value)}; }
NPATTN_INLINE Mask<double> invert(Mask<double> a) { return {_mm256_xor_pd(a.value, first<double>(4).value)}; }
NPATTN_INLINE bool any(Mask<float> a) { return _mm256_movemask_ps(a.value) != 0; }
NPATTN_INLINE bool any(Mask<double> a) { return _mm256_movemask_pd(a.value) != 0; }
NPATTN_INLINE bool all(Mask<float> a) { return _mm256_movemask_ps(a.value) == 0xff; }
NPATTN_INLINE bool all(Mask<double> a) { return _mm256_movemask_pd(a.value) == 0xf; }
NPATTN_INLINE Vec<float> select(Mask<float> m, Vec<float> a, Vec<float> b) {
    return {_mm256_blendv_ps(b.value, a.value, m.value)};
}
NPATTN_INLINE Vec<double> select(Mask<double> m, Vec<double> a, Vec<double> b) {
    return {_mm256_blendv_pd(b.value, a.value, m.value)};
}

// Halves, quarters, then the last two: lane i meets lane i + 4, then i + 2, then i + 1.
NPATTN_INLINE float reduce_add(Vec<float> a) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a.value), _mm256_extractf128_ps(a.value, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
NPATTN_INLINE double reduce_add(Vec<double> a) {
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(a.value), _mm256_extractf128_pd(a.value, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
NPATTN_INLINE float reduce_max(Vec<float> a) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a.value), _mm256_extractf128_ps(a.value, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
NPATTN_INLINE double reduce_max(Vec<double> a) {
    const __m128d two = _mm_max_pd(_mm256_castpd256_pd128(a.value), _mm256_extractf128_pd(a.value, 1));
    return _mm_cvtsd_f64(_mm_max_sd(two, _mm_unpackhi_pd(two, two)));
}

// 4 x 4 doubles: pairs, then 128-bit halves.
NPATTN_INLINE void transpose(Vec<double>* rows) {
    __m256d pairs[4];
    for (int i = 0; i < 4; i += 2) {
        pairs[i] = _mm256_unpacklo_pd(rows[i].value, rows[i + 1].value);
        pairs[i + 1] = _mm256_unpackhi_pd(rows[i].value, rows[i + 1].value);
    }
    for (int c = 0; c < 2; ++c) {
        rows[c].value = _mm256_permute2f128_pd(pairs[c], pairs[c + 2], 0x20);
        rows[c + 2].value = _mm256_permute2f128_pd(pairs[c], pairs[c + 2], 0x31);
    }
}

// 8 x 8 floats: pairs, quads within 128-bit halves, then the halves.
NPATTN_INLINE void transpose(Vec<float>* rows) {
    __m256 pairs[8];
    __m256 quads[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(rows[i].value, rows[i + 1].value);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i].value, rows[i + 1].value);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; ++j) {
            quads[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
            quads[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
        }
    }
    // quads[4 * g + c] holds, in its 128-bit half h, column 4 * h + c of rows 4 * g .. 4 * g + 3.
    for (int c = 0; c < 4; ++c) {
        rows[c].value = _mm256_permute2f128_ps(quads[c], quads[c + 4], 0x20);
        rows[c + 4].value = _mm256_permute2f128_ps(quads[c], quads[c + 4], 0x31);
    }
}

// 0xd8 swaps the two middle 64-bit quarters: the shuffles before it work within 128-bit halves.
template <class T> NPATTN_INLINE Vec<T> keep(Vec<T> a) {
#if !defined(_MSC_VER)
    __asm__ volatile("" : "+x"(a.value));
#endif
    return a;
}

NPATTN_INLINE void deinterleave(Vec<float>& a, Vec<float>& b) {
    const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(a.value, b.value, 0x88));
    const __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(a.value, b.value, 0xdd));
    a.value = _mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xd8));
    b.value = _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xd8));
}
NPATTN_INLINE void deinterleave(Vec<double>& a, Vec<double>& b) {
    const __m256d even = _mm256_unpacklo_pd(a.value, b.value);
    const __m256d odd = _mm256_unpackhi_pd(a.value, b.value);
    a.value = _mm256_permute4x64_pd(even, 0xd8);
    b.value = _mm256_permute4x64_pd(odd, 0xd8);
}
NPATTN_INLINE void interleave(Vec<float>& a, Vec<float>& b) {
    const __m256 low = _mm256_unpacklo_ps(a.value, b.value);
    const __m256 high = _mm256_unpackhi_ps(a.value, b.value);
    a.value = _mm256_permute2f128_ps(low, high, 0x20);
    b.value = _mm256_permute2f128_ps(low, high, 0x31);
}
NPATTN_INLINE void interleave(Vec<double>& a, Vec<double>& b) {
    const __m256d low = _mm256_unpacklo_pd(a.value, b.value);
    const __m256d high = _mm256_unpackhi_pd(a.value, b.value);
    a.value = _mm256_permute2f128_pd(low, high, 0x20);
    b.value = _mm256_permute2f128_pd(low, high, 0x31);
}

} // namespace
} // namespace npattn::NPATTN_ISA

#include "simd/avx2_int8.hpp"
