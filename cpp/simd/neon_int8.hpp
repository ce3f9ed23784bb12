#pragma once
// The int8 part of the SIMD contract on NEON.

namespace npattn::NPATTN_ISA {
namespace {

template <> struct Vec<std::int32_t> {
    static constexpr int lanes = 4;
    int32x4_t value;
};
template <> struct Vec<Int8Quad> {
    static constexpr int lanes = 4;
    uint8x16_t value;
};

template <> NPATTN_INLINE Vec<std::int32_t> zero<std::int32_t>() { return {vdupq_n_s32(0)}; }
NPATTN_INLINE Vec<std::int32_t> operator+(Vec<std::int32_t> a, Vec<std::int32_t> b) {
    return {vaddq_s32(a.value, b.value)};
}
NPATTN_INLINE Vec<float> to_float(Vec<std::int32_t> a) { return {vcvtq_f32_s32(a.value)}; }

NPATTN_INLINE void store_int8_first(void* p, Vec<float> a, int n) {
    const int16x4_t words = vmovn_s32(vcvtnq_s32_f32(a.value));
    const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
    std::memcpy(p, &bytes, static_cast<std::size_t>(n));
}
NPATTN_INLINE void store_int8(void* p, Vec<float> a) { store_int8_first(p, a, 4); }

// All products of two columns in a register each, then added in pairs, twice.
NPATTN_INLINE Vec<std::int32_t> fma_element(Vec<Int8Quad> a, const Int8Quad* p, Vec<std::int32_t> c) {
    std::uint32_t bits;
    std::memcpy(&bits, p, sizeof bits);
    const int16x4_t quad = vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(bits))));
    const int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(a.value)));
    const int16x8_t high = vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(a.value)));
    const int32x4_t pair =
        vpaddq_s32(vmull_s16(vget_low_s16(low), quad), vmull_s16(vget_high_s16(low), quad));
    const int32x4_t other =
        vpaddq_s32(vmull_s16(vget_low_s16(high), quad), vmull_s16(vget_high_s16(high), quad));
    return {vaddq_s32(c.value, vpaddq_s32(pair, other))};
}
NPATTN_INLINE Vec<std::int32_t> mul_element(Vec<Int8Quad> a, const Int8Quad* p) {
    return fma_element(a, p, zero<std::int32_t>());
}

template <> NPATTN_INLINE Vec<float> load<Int8>(const void* p) {
    std::uint32_t bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    const int16x8_t words = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(bytes)));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)))};
}

} // namespace
} // namespace npattn::NPATTN_ISA
