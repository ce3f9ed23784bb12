#pragma once
// The int8 part of the SIMD contract in standard C++.

namespace npattn::NPATTN_ISA {
namespace {

template <> NPATTN_INLINE Vec<std::int32_t> load_first<std::int32_t>(const void* p, int n) {
    Vec<std::int32_t> result = {};
    std::memcpy(result.value, p, static_cast<std::size_t>(n) * sizeof(std::int32_t));
    return result;
}
template <> NPATTN_INLINE Vec<std::int32_t> load<std::int32_t>(const void* p) {
    return load_first<std::int32_t>(p, 4);
}
NPATTN_INLINE Vec<float> to_float(Vec<std::int32_t> a) {
    return map<float>([&](int i) { return static_cast<float>(a.value[i]); });
}
NPATTN_INLINE void store_int8_first(void* p, Vec<float> a, int n) {
    const Vec<float> whole = round(a);
    std::int8_t bytes[4];
    for (int i = 0; i < 4; ++i) bytes[i] = static_cast<std::int8_t>(whole.value[i]);
    std::memcpy(p, bytes, static_cast<std::size_t>(n));
}
NPATTN_INLINE void store_int8(void* p, Vec<float> a) { store_int8_first(p, a, 4); }

template <> NPATTN_INLINE Vec<Int8Quad> load_first<Int8Quad>(const void* p, int n) {
    Vec<Int8Quad> result = {};
    std::memcpy(result.value, p, static_cast<std::size_t>(n) * sizeof(Int8Quad));
    return result;
}
template <> NPATTN_INLINE Vec<Int8Quad> load<Int8Quad>(const void* p) { return load_first<Int8Quad>(p, 4); }
NPATTN_INLINE Vec<std::int32_t> fma_element(Vec<Int8Quad> a, const Int8Quad* p, Vec<std::int32_t> c) {
    return map<std::int32_t>([&](int i) {
        std::int32_t sum = c.value[i];
        for (int k = 0; k < 4; ++k) sum += a.value[i].bytes[k] * static_cast<std::int8_t>(p->bytes[k]);
        return sum;
    });
}
NPATTN_INLINE Vec<std::int32_t> mul_element(Vec<Int8Quad> a, const Int8Quad* p) {
    return fma_element(a, p, zero<std::int32_t>());
}

} // namespace
} // namespace npattn::NPATTN_ISA
