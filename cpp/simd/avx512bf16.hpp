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
