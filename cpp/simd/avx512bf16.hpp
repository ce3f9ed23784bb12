#pragma once
// The SIMD contract on AVX-512 with AVX512_BF16: that of AVX-512, and the dot product.

#include "simd/avx512.hpp"

#define NPATTN_DOT

namespace npattn::NPATTN_ISA {
namespace {

template <> struct Vec<HalfPair> {
    static constexpr int lanes = 16;
    __m512i value;
};
template <> NPATTN_INLINE Vec<HalfPair> load<HalfPair>(const void* p) { return {_mm512_loadu_si512(p)}; }
template <> NPATTN_INLINE Vec<HalfPair> load_first<HalfPair>(const void* p, int n) {
    return {_mm512_maskz_loadu_epi32(first<float>(n).value, p)};
}
NPATTN_INLINE Vec<HalfPair> load_halves(const void* p, int n) {
    return {_mm512_maskz_loadu_epi16((1u << n) - 1u, p)};
}

NPATTN_INLINE void store(void* p, Vec<HalfPair> a) { _mm512_storeu_si512(p, a.value); }
NPATTN_INLINE Vec<HalfPair> broadcast(HalfPair pair) {
    return {_mm512_set1_epi32(static_cast<int>(static_cast<unsigned>(pair.odd) << 16 | pair.even))};
}
NPATTN_INLINE Vec<HalfPair> narrow_pairs(Vec<float> a, Vec<float> b) {
    return {(__m512i)_mm512_cvtne2ps_pbh(b.value, a.value)};
}
NPATTN_INLINE void pair_rows(Vec<HalfPair>& a, Vec<HalfPair>& b) {
    const __m512i one =
        _mm512_set1_epi32(0x00010001); // a row's item of each pair, and the next row's behind it
    const __m512i firsts = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i low = _mm512_add_epi32(_mm512_mullo_epi32(firsts, one), _mm512_set1_epi32(32 << 16));
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(0x00100010));
    const __m512i pairs = _mm512_permutex2var_epi16(a.value, low, b.value);
    b.value = _mm512_permutex2var_epi16(a.value, high, b.value);
    a.value = pairs;
}
NPATTN_INLINE Vec<HalfPair> as_pairs(Vec<float> bits) { return {_mm512_castps_si512(bits.value)}; }
NPATTN_INLINE Vec<float> dot(Vec<HalfPair> a, Vec<HalfPair> b, Vec<float> c) {
    return {_mm512_dpbf16_ps(c.value, (__m512bh)a.value, (__m512bh)b.value)};
}
NPATTN_INLINE Vec<float> fraction(Vec<float> a) {
    return {_mm512_reduce_ps(a.value, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
}
NPATTN_INLINE Vec<float> scale_by_floor(Vec<float> a, Vec<float> n) { return scale_exponent(a, n); }

// The pair as an embedded broadcast, as in avx512.hpp.
NPATTN_INLINE Vec<float> fma_element(Vec<HalfPair> a, const HalfPair* p, Vec<float> c) {
    __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(c.value) : "v"(a.value), "m"(*p));
    return c;
}
NPATTN_INLINE Vec<float> mul_element(Vec<HalfPair> a, const HalfPair* p) {
    return fma_element(a, p, zero<float>());
}

} // namespace
} // namespace npattn::NPATTN_ISA
