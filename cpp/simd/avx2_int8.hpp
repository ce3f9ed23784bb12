#pragma once
// The int8 part of the SIMD contract on AVX2.

namespace npattn::NPATTN_ISA {
namespace {

template <> struct Vec<std::int32_t> {
    static constexpr int lanes = 8;
    __m256i value;
};
template <> struct Vec<Int8Quad> {
    static constexpr int lanes = 8;
    __m256i value;
};

NPATTN_INLINE __m256i load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
NPATTN_INLINE __m256i load_words_first(const void* p, int n) {
    return _mm256_castps_si256(load_first<float>(p, n).value);
}
template <> NPATTN_INLINE Vec<std::int32_t> load<std::int32_t>(const void* p) { return {load_words(p)}; }
template <> NPATTN_INLINE Vec<std::int32_t> load_first<std::int32_t>(const void* p, int n) {
    return {load_words_first(p, n)};
}
template <> NPATTN_INLINE Vec<Int8Quad> load<Int8Quad>(const void* p) { return {load_words(p)}; }
template <> NPATTN_INLINE Vec<Int8Quad> load_first<Int8Quad>(const void* p, int n) {
    return {load_words_first(p, n)};
}
NPATTN_INLINE void store(void* p, Vec<std::int32_t> a) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), a.value);
}
NPATTN_INLINE void store_first(void* p, Vec<std::int32_t> a, int n) {
    store_first(p, Vec<float>{_mm256_castsi256_ps(a.value)}, n);
}
template <> NPATTN_INLINE Vec<std::int32_t> zero<std::int32_t>() { return {_mm256_setzero_si256()}; }
NPATTN_INLINE Vec<std::int32_t> operator+(Vec<std::int32_t> a, Vec<std::int32_t> b) {
    return {_mm256_add_epi32(a.value, b.value)};
}
NPATTN_INLINE Vec<float> to_float(Vec<std::int32_t> a) { return {_mm256_cvtepi32_ps(a.value)}; }

NPATTN_INLINE __m128i round_to_bytes(Vec<float> a) {
    const __m256i whole = _mm256_cvtps_epi32(a.value);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    return _mm_packs_epi16(words, words);
}
NPATTN_INLINE void store_int8(void* p, Vec<float> a) {
    _mm_storel_epi64(static_cast<__m128i*>(p), round_to_bytes(a));
}
NPATTN_INLINE void store_int8_first(void* p, Vec<float> a, int n) {
    const __m128i bytes = round_to_bytes(a);
    std::memcpy(p, &bytes, static_cast<std::size_t>(n));
}

// Bytes 0 and 2 of each quad, then 1 and 3, as 16 bits: VPMADDUBSW would saturate.
NPATTN_INLINE Vec<std::int32_t> fma_element(Vec<Int8Quad> a, const Int8Quad* p, Vec<std::int32_t> c) {
    std::int32_t bits;
    std::memcpy(&bits, p, sizeof bits);
    const __m256i quad = _mm256_set1_epi32(bits);
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a.value, _mm256_set1_epi16(0xff)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(quad, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a.value, 8), _mm256_srai_epi16(quad, 8));
    return {_mm256_add_epi32(c.value, _mm256_add_epi32(even, odd))};
}
NPATTN_INLINE Vec<std::int32_t> mul_element(Vec<Int8Quad> a, const Int8Quad* p) {
    return fma_element(a, p, zero<std::int32_t>());
}

NPATTN_INLINE Vec<float> widen_signed(__m128i bytes) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))};
}
template <> NPATTN_INLINE Vec<float> load<Int8>(const void* p) {
    return widen_signed(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
}
template <> NPATTN_INLINE Vec<float> load_first<Int8>(const void* p, int n) {
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, p, static_cast<std::size_t>(n));
    return widen_signed(_mm_cvtsi64_si128(static_cast<long long>(bytes)));
}

} // namespace
} // namespace npattn::NPATTN_ISA
