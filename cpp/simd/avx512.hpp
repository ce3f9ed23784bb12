#pragma once
// The SIMD contract on AVX-512 F, CD, BW, DQ, VL: 16 floats or 8 doubles, masks in mask registers.

#include <immintrin.h>

#define NPATTN_LOOKUP

namespace npattn::NPATTN_ISA {
namespace {

template <class T> struct Vec;
template <class T> struct Mask;

template <> struct Vec<float> {
    static constexpr int lanes = 16;
    __m512 value;
};
template <> struct Vec<double> {
    static constexpr int lanes = 8;
    __m512d value;
};
template <> struct Mask<float> { __mmask16 value; };
template <> struct Mask<double> { __mmask8 value; };

constexpr int TILE_ROWS = 12;
constexpr int TILE_VECTORS = 2;

template <class T> NPATTN_INLINE Mask<T> first(int n) {
    return {static_cast<decltype(Mask<T>::value)>((1u << n) - 1u)};
}

template <class S> NPATTN_INLINE Vec<Compute<S>> load(const void* p);
template <> NPATTN_INLINE Vec<float> load<float>(const void* p) { return {_mm512_loadu_ps(p)}; }
template <> NPATTN_INLINE Vec<double> load<double>(const void* p) { return {_mm512_loadu_pd(p)}; }

template <class S> NPATTN_INLINE Vec<Compute<S>> load_first(const void* p, int n);
template <> NPATTN_INLINE Vec<float> load_first<float>(const void* p, int n) {
    return {_mm512_maskz_loadu_ps(first<float>(n).value, p)};
}
template <> NPATTN_INLINE Vec<double> load_first<double>(const void* p, int n) {
    return {_mm512_maskz_loadu_pd(first<double>(n).value, p)};
}

NPATTN_INLINE void store(void* p, Vec<float> a) { _mm512_storeu_ps(p, a.value); }
NPATTN_INLINE void store(void* p, Vec<double> a) { _mm512_storeu_pd(p, a.value); }
NPATTN_INLINE void store_first(void* p, Vec<float> a, int n) {
    _mm512_mask_storeu_ps(p, first<float>(n).value, a.value);
}
NPATTN_INLINE void store_first(void* p, Vec<double> a, int n) {
    _mm512_mask_storeu_pd(p, first<double>(n).value, a.value);
}
NPATTN_INLINE void stream(void* p, Vec<float> a) { _mm512_stream_ps(static_cast<float*>(p), a.value); }
NPATTN_INLINE void stream(void* p, Vec<double> a) { _mm512_stream_pd(static_cast<double*>(p), a.value); }

NPATTN_INLINE Vec<float> widen_halves(__m256i halves, Float16) { return {_mm512_cvtph_ps(halves)}; }
NPATTN_INLINE Vec<float> widen_halves(__m256i halves, BFloat16) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
NPATTN_INLINE __m256i narrow_halves(Vec<float> a, Float16) {
    return _mm512_cvtps_ph(a.value, _MM_FROUND_TO_NEAREST_INT);
}
// Not VCVTNEPS2BF16 of AVX512_BF16, which takes denormals for 0.
NPATTN_INLINE __m256i narrow_halves(Vec<float> a, BFloat16) {
    const __m512i bits = _mm512_castps_si512(a.value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a.value, a.value, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(quiet, 16));
}
template <class S> NPATTN_INLINE Vec<Compute<S>> load(const void* p) {
    return widen_halves(_mm256_loadu_si256(static_cast<const __m256i*>(p)), S{});
}
template <class S> NPATTN_INLINE Vec<Compute<S>> load_first(const void* p, int n) {
    return widen_halves(_mm256_maskz_loadu_epi16(first<float>(n).value, p), S{});
}
template <class S> NPATTN_INLINE void store_as(void* p, Vec<Compute<S>> a) {
    if constexpr (sizeof(S) == 2) {
        _mm256_storeu_si256(static_cast<__m256i*>(p), narrow_halves(a, S{}));
    } else {
        store(p, a);
    }
}
template <class S> NPATTN_INLINE void store_first_as(void* p, Vec<Compute<S>> a, int n) {
    if constexpr (sizeof(S) == 2) {
        _mm256_mask_storeu_epi16(p, first<float>(n).value, narrow_halves(a, S{}));
    } else {
        store_first(p, a, n);
    }
}
NPATTN_INLINE Vec<float> zip_halves(__m256i low, __m256i high) {
    return {_mm512_castsi512_ps(
        _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16)))};
}
NPATTN_INLINE Vec<float> load_pairs(const void* p, const void* q) {
    return zip_halves(_mm256_loadu_si256(static_cast<const __m256i*>(p)),
                      _mm256_loadu_si256(static_cast<const __m256i*>(q)));
}
NPATTN_INLINE Vec<float> load_pairs_first(const void* p, const void* q, int n) {
    const __mmask16 lanes = first<float>(n).value;
    return zip_halves(_mm256_maskz_loadu_epi16(lanes, p), _mm256_maskz_loadu_epi16(lanes, q));
}

template <class T> NPATTN_INLINE Mask<T> load_bytes_first(const void* p, int n) {
    const __m128i bytes = _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << n) - 1u), p);
    return {static_cast<decltype(Mask<T>::value)>(_mm_test_epi8_mask(bytes, bytes))};
}
template <class T> NPATTN_INLINE Mask<T> load_bytes(const void* p) {
    return load_bytes_first<T>(p, Vec<T>::lanes);
}
template <class T> NPATTN_INLINE void store_bytes(void* p, Mask<T> m) {
    _mm_mask_storeu_epi8(p, static_cast<__mmask16>((1u << Vec<T>::lanes) - 1u),
                         _mm_maskz_set1_epi8(m.value, 1));
}

template <class T> NPATTN_INLINE Vec<T> broadcast(T x);
template <> NPATTN_INLINE Vec<float> broadcast<float>(float x) { return {_mm512_set1_ps(x)}; }
template <> NPATTN_INLINE Vec<double> broadcast<double>(double x) { return {_mm512_set1_pd(x)}; }
template <class T> NPATTN_INLINE Vec<T> zero() { return broadcast<T>(T(0)); }
template <class T> NPATTN_INLINE Vec<T> iota();
template <> NPATTN_INLINE Vec<float> iota<float>() {
    return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}
template <> NPATTN_INLINE Vec<double> iota<double>() { return {_mm512_setr_pd(0, 1, 2, 3, 4, 5, 6, 7)}; }

NPATTN_INLINE Vec<float> operator+(Vec<float> a, Vec<float> b) { return {_mm512_add_ps(a.value, b.value)}; }
NPATTN_INLINE Vec<double> operator+(Vec<double> a, Vec<double> b) {
    return {_mm512_add_pd(a.value, b.value)};
}
NPATTN_INLINE Vec<float> operator-(Vec<float> a, Vec<float> b) { return {_mm512_sub_ps(a.value, b.value)}; }
NPATTN_INLINE Vec<double> operator-(Vec<double> a, Vec<double> b) {
    return {_mm512_sub_pd(a.value, b.value)};
}
NPATTN_INLINE Vec<float> operator*(Vec<float> a, Vec<float> b) { return {_mm512_mul_ps(a.value, b.value)}; }
NPATTN_INLINE Vec<double> operator*(Vec<double> a, Vec<double> b) {
    return {_mm512_mul_pd(a.value, b.value)};
}
NPATTN_INLINE Vec<float> operator/(Vec<float> a, Vec<float> b) { return {_mm512_div_ps(a.value, b.value)}; }
NPATTN_INLINE Vec<double> operator/(Vec<double> a, Vec<double> b) {
    return {_mm512_div_pd(a.value, b.value)};
}
NPATTN_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
    return {_mm512_fmadd_ps(a.value, b.value, c.value)};
}
NPATTN_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
    return {_mm512_fmadd_pd(a.value, b.value, c.value)};
}
NPATTN_INLINE Vec<float> fnma(Vec<float> a, Vec<float> b, Vec<float> c) {
    return {_mm512_fnmadd_ps(a.value, b.value, c.value)};
}
NPATTN_INLINE Vec<double> fnma(Vec<double> a, Vec<double> b, Vec<double> c) {
    return {_mm512_fnmadd_pd(a.value, b.value, c.value)};
}
NPATTN_INLINE Vec<float> max(Vec<float> a, Vec<float> b) { return {_mm512_max_ps(a.value, b.value)}; }
NPATTN_INLINE Vec<double> max(Vec<double> a, Vec<double> b) { return {_mm512_max_pd(a.value, b.value)}; }
NPATTN_INLINE Vec<float> min(Vec<float> a, Vec<float> b) { return {_mm512_min_ps(a.value, b.value)}; }
NPATTN_INLINE Vec<double> min(Vec<double> a, Vec<double> b) { return {_mm512_min_pd(a.value, b.value)}; }
NPATTN_INLINE Vec<float> round(Vec<float> a) { return {_mm512_roundscale_ps(a.value, 8)}; }
NPATTN_INLINE Vec<double> round(Vec<double> a) { return {_mm512_roundscale_pd(a.value, 8)}; }
NPATTN_INLINE Vec<float> scale_exponent(Vec<float> a, Vec<float> n) {
    return {_mm512_scalef_ps(a.value, n.value)};
}
NPATTN_INLINE Vec<double> scale_exponent(Vec<double> a, Vec<double> n) {
    return {_mm512_scalef_pd(a.value, n.value)};
}
NPATTN_INLINE Vec<double> lookup(const double* table, Vec<double> a) {
    return {_mm512_permutex2var_pd(_mm512_load_pd(table), _mm512_castpd_si512(a.value),
                                   _mm512_load_pd(table + 8))};
}
NPATTN_INLINE Vec<double> scale_by_floor(Vec<double> a, Vec<double> n) {
    return {_mm512_scalef_pd(a.value, n.value)};
}

// With the element as an embedded broadcast, which compilers do not choose where it is used twice: half the
// instructions.
NPATTN_INLINE Vec<float> fma_element(Vec<float> a, const float* p, Vec<float> c) {
#if defined(_MSC_VER)
    return fma(a, broadcast<float>(*p), c);
#else
    __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(c.value) : "v"(a.value), "m"(*p));
    return c;
#endif
}
NPATTN_INLINE Vec<double> fma_element(Vec<double> a, const double* p, Vec<double> c) {
#if defined(_MSC_VER)
    return fma(a, broadcast<double>(*p), c);
#else
    __asm__("vfmadd231pd %2%{1to8%}, %1, %0" : "+v"(c.value) : "v"(a.value), "m"(*p));
    return c;
#endif
}
NPATTN_INLINE Vec<float> mul_element(Vec<float> a, const float* p) {
#if defined(_MSC_VER)
    return a * broadcast<float>(*p);
#else
    Vec<float> product;
    __asm__("vmulps %2%{1to16%}, %1, %0" : "=v"(product.value) : "v"(a.value), "m"(*p));
    return product;
#endif
}
NPATTN_INLINE Vec<double> mul_element(Vec<double> a, const double* p) {
#if defined(_MSC_VER)
    return a * broadcast<double>(*p);
#else
    Vec<double> product;
    __asm__("vmulpd %2%{1to8%}, %1, %0" : "=v"(product.value) : "v"(a.value), "m"(*p));
    return product;
#endif
}

NPATTN_INLINE Mask<float> less(Vec<float> a, Vec<float> b) {
    return {_mm512_cmp_ps_mask(a.value, b.value, _CMP_LT_OQ)};
}
NPATTN_INLINE Mask<double> less(Vec<double> a, Vec<double> b) {
    return {_mm512_cmp_pd_mask(a.value, b.value, _CMP_LT_OQ)};
}
NPATTN_INLINE Mask<float> equal(Vec<float> a, Vec<float> b) {
    return {_mm512_cmp_ps_mask(a.value, b.value, _CMP_EQ_OQ)};
}
NPATTN_INLINE Mask<double> equal(Vec<double> a, Vec<double> b) {
    return {_mm512_cmp_pd_mask(a.value, b.value, _CMP_EQ_OQ)};
}
template <class T> NPATTN_INLINE Mask<T> both(Mask<T> a, Mask<T> b) {
    return {static_cast<decltype(Mask<T>::value)>(a.value & b.value)};
}
template <class T> NPATTN_INLINE Mask<T> either(Mask<T> a, Mask<T> b) {
    return {static_cast<decltype(Mask<T>::value)>(a.value | b.value)};
}
template <class T> NPATTN_INLINE Mask<T> invert(Mask<T> a) {
    return {static_cast<decltype(Mask<T>::value)>(~a.value)};
}
template <class T> NPATTN_INLINE bool any(Mask<T> a) { return a.value != 0; }
template <class T> NPATTN_INLINE bool all(Mask<T> a) { return a.value == first<T>(Vec<T>::lanes).value; }
NPATTN_INLINE Vec<float> select(Mask<float> m, Vec<float> a, Vec<float> b) {
    return {_mm512_mask_blend_ps(m.value, b.value, a.value)};
}
NPATTN_INLINE Vec<double> select(Mask<double> m, Vec<double> a, Vec<double> b) {
    return {_mm512_mask_blend_pd(m.value, b.value, a.value)};
}

NPATTN_INLINE float reduce_add(Vec<float> a) { return _mm512_reduce_add_ps(a.value); }
NPATTN_INLINE double reduce_add(Vec<double> a) { return _mm512_reduce_add_pd(a.value); }
NPATTN_INLINE float reduce_max(Vec<float> a) { return _mm512_reduce_max_ps(a.value); }
NPATTN_INLINE double reduce_max(Vec<double> a) { return _mm512_reduce_max_pd(a.value); }

// 8 x 8 doubles: pairs, then 128-bit lanes twice.
NPATTN_INLINE void transpose(Vec<double>* rows) {
    __m512d pairs[8];
    __m512d fours[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm512_unpacklo_pd(rows[i].value, rows[i + 1].value);
        pairs[i + 1] = _mm512_unpackhi_pd(rows[i].value, rows[i + 1].value);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; ++j) {
            fours[i + j] = _mm512_shuffle_f64x2(pairs[i + j], pairs[i + j + 2], 0x88);
            fours[i + j + 2] = _mm512_shuffle_f64x2(pairs[i + j], pairs[i + j + 2], 0xdd);
        }
    }
    for (int j = 0; j < 4; ++j) {
        const int column = (j & 1) + (j & 2);
        rows[column].value = _mm512_shuffle_f64x2(fours[j], fours[j + 4], 0x88);
        rows[column + 4].value = _mm512_shuffle_f64x2(fours[j], fours[j + 4], 0xdd);
    }
}

// 16 x 16 floats: pairs, quads within 128-bit lanes, then 128-bit lanes twice.
NPATTN_INLINE void transpose(Vec<float>* rows) {
    __m512 pairs[16];
    __m512 quads[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_ps(rows[i].value, rows[i + 1].value);
        pairs[i + 1] = _mm512_unpackhi_ps(rows[i].value, rows[i + 1].value);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; ++j) {
            const __m512d low = _mm512_castps_pd(pairs[i + j]);
            const __m512d high = _mm512_castps_pd(pairs[i + j + 2]);
            quads[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            quads[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    }
    // quads[4 * g + c] holds, in its 128-bit lane l, column 4 * l + c of rows 4 * g .. 4 * g + 3.
    for (int c = 0; c < 4; ++c) {
        const __m512 even_01 = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0x88);
        const __m512 odd_01 = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0xdd);
        const __m512 even_23 = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0x88);
        const __m512 odd_23 = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0xdd);
        rows[c].value = _mm512_shuffle_f32x4(even_01, even_23, 0x88);
        rows[8 + c].value = _mm512_shuffle_f32x4(even_01, even_23, 0xdd);
        rows[4 + c].value = _mm512_shuffle_f32x4(odd_01, odd_23, 0x88);
        rows[12 + c].value = _mm512_shuffle_f32x4(odd_01, odd_23, 0xdd);
    }
}

template <class T> NPATTN_INLINE Vec<T> keep(Vec<T> a) {
#if !defined(_MSC_VER)
    __asm__ volatile("" : "+v"(a.value));
#endif
    return a;
}

NPATTN_INLINE void deinterleave(Vec<float>& a, Vec<float>& b) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const __m512 evens = _mm512_permutex2var_ps(a.value, even, b.value);
    b.value = _mm512_permutex2var_ps(a.value, odd, b.value);
    a.value = evens;
}
NPATTN_INLINE void deinterleave(Vec<double>& a, Vec<double>& b) {
    const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
    const __m512i odd = _mm512_add_epi64(even, _mm512_set1_epi64(1));
    const __m512d evens = _mm512_permutex2var_pd(a.value, even, b.value);
    b.value = _mm512_permutex2var_pd(a.value, odd, b.value);
    a.value = evens;
}
NPATTN_INLINE void interleave(Vec<float>& a, Vec<float>& b) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const __m512 lows = _mm512_permutex2var_ps(a.value, low, b.value);
    b.value = _mm512_permutex2var_ps(a.value, high, b.value);
    a.value = lows;
}
NPATTN_INLINE void interleave(Vec<double>& a, Vec<double>& b) {
    const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    const __m512i high = _mm512_add_epi64(low, _mm512_set1_epi64(4));
    const __m512d lows = _mm512_permutex2var_pd(a.value, low, b.value);
    b.value = _mm512_permutex2var_pd(a.value, high, b.value);
    a.value = lows;
}

} // namespace
} // namespace npattn::NPATTN_ISA

#include "simd/avx512_int8.hpp"
