#pragma once
// The int8 part of the SIMD contract on AVX-512, with VNNI where it is compiled for that.

namespace npattn::NPATTN_ISA {
namespace {

template <> struct Vec<std::int32_t> {
    static constexpr int lanes = 16;
    __m512i value;
};
template <> struct Vec<Int8Quad> {
    static constexpr int lanes = 16;
    __m512i value;
};

template <> NPATTN_INLINE Vec<std::int32_t> load<std::int32_t>(const void* p) {
    return {_mm512_loadu_si512(p)};
}
template <> NPATTN_INLINE Vec<std::int32_t> load_first<std::int32_t>(const void* p, int n) {
    return {_mm512_maskz_loadu_epi32(first<float>(n).value, p)};
}
template <> NPATTN_INLINE Vec<Int8Quad> load<Int8Quad>(const void* p) { return {_mm512_loadu_si512(p)}; }
template <> NPATTN_INLINE Vec<Int8Quad> load_first<Int8Quad>(const void* p, int n) {
    return {_mm512_maskz_loadu_epi32(first<float>(n).value, p)};
}
NPATTN_INLINE void store(void* p, Vec<std::int32_t> a) { _mm512_storeu_si512(p, a.value); }
NPATTN_INLINE void store_first(void* p, Vec<std::int32_t> a, int n) {
    _mm512_mask_storeu_epi32(p, first<float>(n).value, a.value);
}
template <> NPATTN_INLINE Vec<std::int32_t> zero<std::int32_t>() { return {_mm512_setzero_si512()}; }
NPATTN_INLINE Vec<std::int32_t> operator+(Vec<std::int32_t> a, Vec<std::int32_t> b) {
    return {_mm512_add_epi32(a.value, b.value)};
}
NPATTN_INLINE Vec<float> to_float(Vec<std::int32_t> a) { return {_mm512_cvtepi32_ps(a.value)}; }

NPATTN_INLINE __m128i round_to_bytes(Vec<float> a) {
    return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.value));
}
NPATTN_INLINE void store_int8(void* p, Vec<float> a) {
    _mm_storeu_si128(static_cast<__m128i*>(p), round_to_bytes(a));
}
NPATTN_INLINE void store_int8_first(void* p, Vec<float> a, int n) {
    _mm_mask_storeu_epi8(p, first<float>(n).value, round_to_bytes(a));
}

#if defined(__AVX512VNNI__) && !defined(_MSC_VER)
#define NPATTN_INT8_DOT
NPATTN_INLINE Vec<std::int32_t> fma_element(Vec<Int8Quad> a, const Int8Quad* p, Vec<std::int32_t> c) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(c.value) : "v"(a.value), "m"(*p));
    return c;
}
NPATTN_INLINE Vec<Int8Quad> element(const Int8Quad* p) {
    std::int32_t bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return {_mm512_set1_epi32(bits)};
}
NPATTN_INLINE Vec<std::int32_t> fma_element(Vec<Int8Quad> a, Vec<Int8Quad> x, Vec<std::int32_t> c) {
    return {_mm512_dpbusd_epi32(c.value, a.value, x.value)};
}
NPATTN_INLINE Vec<std::int32_t> mul_element(Vec<Int8Quad> a, Vec<Int8Quad> x) {
    return fma_element(a, x, zero<std::int32_t>());
}
#else
// Bytes 0 and 2 of each quad, then 1 and 3, as 16 bits: VPMADDUBSW would saturate.
NPATTN_INLINE Vec<std::int32_t> fma_element(Vec<Int8Quad> a, const Int8Quad* p, Vec<std::int32_t> c) {
    std::int32_t bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    const __m512i quad = _mm512_set1_epi32(bits);
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(a.value, _mm512_set1_epi16(0xff)),
                                           _mm512_srai_epi16(_mm512_slli_epi16(quad, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(a.value, 8), _mm512_srai_epi16(quad, 8));
    return {_mm512_add_epi32(c.value, _mm512_add_epi32(even, odd))};
}
#endif
NPATTN_INLINE Vec<std::int32_t> mul_element(Vec<Int8Quad> a, const Int8Quad* p) {
    return fma_element(a, p, zero<std::int32_t>());
}

NPATTN_INLINE Vec<float> widen_signed(__m128i bytes) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
template <> NPATTN_INLINE Vec<float> load<Int8>(const void* p) {
    return widen_signed(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
template <> NPATTN_INLINE Vec<float> load_first<Int8>(const void* p, int n) {
    return widen_signed(_mm_maskz_loadu_epi8(first<float>(n).value, p));
}

} // namespace
} // namespace npattn::NPATTN_ISA
