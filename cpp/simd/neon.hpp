#pragma once
// The SIMD contract on NEON (aarch64): 4 floats or 2 doubles; a lane of a mask is all ones or all zeros.
// Memory goes through memcpy: one load or store instruction, whatever the alignment.

#include <cstring>

#include <arm_neon.h>

namespace npattn::NPATTN_ISA {
namespace {

template <class T> struct Vec;
template <class T> struct Mask;

template <> struct Vec<float> {
    static constexpr int lanes = 4;
    float32x4_t value;
};
template <> struct Vec<double> {
    static constexpr int lanes = 2;
    float64x2_t value;
};
template <> struct Mask<float> { uint32x4_t value; };
template <> struct Mask<double> { uint64x2_t value; };

constexpr int TILE_ROWS = 6;
constexpr int TILE_VECTORS = 4;

template <class S> NPATTN_INLINE Vec<Compute<S>> load(const void* p) {
    Vec<S> result;
    std::memcpy(&result.value, p, sizeof result.value);
    return result;
}
template <> NPATTN_INLINE Vec<float> load<Float16>(const void* p) {
    float16x4_t halves;
    std::memcpy(&halves, p, sizeof halves);
    return {vcvt_f32_f16(halves)};
}
template <> NPATTN_INLINE Vec<float> load<BFloat16>(const void* p) {
    uint16x4_t halves;
    std::memcpy(&halves, p, sizeof halves);
    return {vreinterpretq_f32_u32(vshll_n_u16(halves, 16))};
}
template <class S> NPATTN_INLINE Vec<Compute<S>> load_first(const void* p, int n) {
    S lanes[Vec<Compute<S>>::lanes] = {};
    std::memcpy(lanes, p, static_cast<std::size_t>(n) * sizeof(S));
    return load<S>(lanes);
}
template <class T> NPATTN_INLINE void store(void* p, Vec<T> a) { std::memcpy(p, &a.value, sizeof a.value); }
template <class T> NPATTN_INLINE void store_first(void* p, Vec<T> a, int n) {
    std::memcpy(p, &a.value, static_cast<std::size_t>(n) * sizeof(T));
}
template <class T> NPATTN_INLINE void stream(void* p, Vec<T> a) { store(p, a); }
template <class S> NPATTN_INLINE void store_as(void* p, Vec<Compute<S>> a) { store(p, a); }
template <> NPATTN_INLINE void store_as<Float16>(void* p, Vec<float> a) {
    const float16x4_t halves = vcvt_f16_f32(a.value);
    std::memcpy(p, &halves, sizeof halves);
}
template <> NPATTN_INLINE void store_as<BFloat16>(void* p, Vec<float> a) {
    const uint32x4_t bits = vreinterpretq_u32_f32(a.value);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    const uint16x4_t halves = vshrn_n_u32(vbslq_u32(vceqq_f32(a.value, a.value), rounded, quiet), 16);
    std::memcpy(p, &halves, sizeof halves);
}
template <class S> NPATTN_INLINE void store_first_as(void* p, Vec<Compute<S>> a, int n) {
    S lanes[Vec<Compute<S>>::lanes];
    store_as<S>(lanes, a);
    std::memcpy(p, lanes, static_cast<std::size_t>(n) * sizeof(S));
}
NPATTN_INLINE Vec<float> load_pairs(const void* p, const void* q) {
    uint16x4_t low, high;
    std::memcpy(&low, p, sizeof low);
    std::memcpy(&high, q, sizeof high);
    return {vreinterpretq_f32_u32(vorrq_u32(vmovl_u16(low), vshll_n_u16(high, 16)))};
}
NPATTN_INLINE Vec<float> load_pairs_first(const void* p, const void* q, int n) {
    std::uint16_t low[4] = {}, high[4] = {};
    std::memcpy(low, p, static_cast<std::size_t>(n) * 2);
    std::memcpy(high, q, static_cast<std::size_t>(n) * 2);
    return load_pairs(low, high);
}

// Lane i is byte i of `bytes` not being 0.
template <class T> NPATTN_INLINE Mask<T> widen_bytes(std::uint32_t bytes);
template <> NPATTN_INLINE Mask<float> widen_bytes<float>(std::uint32_t bytes) {
    const uint32x4_t wide = vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(bytes)))));
    return {vtstq_u32(wide, wide)};
}
template <> NPATTN_INLINE Mask<double> widen_bytes<double>(std::uint32_t bytes) {
    const uint64x2_t wide = vmovl_u32(vget_low_u32(widen_bytes<float>(bytes).value));
    return {vtstq_u64(wide, wide)};
}
template <class T> NPATTN_INLINE Mask<T> load_bytes_first(const void* p, int n) {
    std::uint32_t bytes = 0;
    std::memcpy(&bytes, p, static_cast<std::size_t>(n));
    return widen_bytes<T>(bytes);
}
template <class T> NPATTN_INLINE Mask<T> load_bytes(const void* p) {
    return load_bytes_first<T>(p, Vec<T>::lanes);
}
NPATTN_INLINE std::uint32_t narrow_to_bytes(uint32x4_t mask) {
    const uint16x4_t words = vmovn_u32(mask);
    const uint8x8_t bytes = vand_u8(vmovn_u16(vcombine_u16(words, words)), vdup_n_u8(1));
    return vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
}
NPATTN_INLINE void store_bytes(void* p, Mask<float> m) {
    const std::uint32_t bytes = narrow_to_bytes(m.value);
    std::memcpy(p, &bytes, 4);
}
NPATTN_INLINE void store_bytes(void* p, Mask<double> m) {
    const uint32x2_t pair = vmovn_u64(m.value);
    const std::uint32_t bytes = narrow_to_bytes(vcombine_u32(pair, pair));
    std::memcpy(p, &bytes, 2);
}

template <class T> NPATTN_INLINE Vec<T> broadcast(T x);
template <> NPATTN_INLINE Vec<float> broadcast<float>(float x) { return {vdupq_n_f32(x)}; }
template <> NPATTN_INLINE Vec<double> broadcast<double>(double x) { return {vdupq_n_f64(x)}; }
template <class T> NPATTN_INLINE Vec<T> zero() { return broadcast<T>(T(0)); }
template <class T> NPATTN_INLINE Vec<T> iota() {
    constexpr T indices[] = {0, 1, 2, 3};
    return load<T>(indices);
}

NPATTN_INLINE Vec<float> operator+(Vec<float> a, Vec<float> b) { return {vaddq_f32(a.value, b.value)}; }
NPATTN_INLINE Vec<double> operator+(Vec<double> a, Vec<double> b) { return {vaddq_f64(a.value, b.value)}; }
NPATTN_INLINE Vec<float> operator-(Vec<float> a, Vec<float> b) { return {vsubq_f32(a.value, b.value)}; }
NPATTN_INLINE Vec<double> operator-(Vec<double> a, Vec<double> b) { return {vsubq_f64(a.value, b.value)}; }
NPATTN_INLINE Vec<float> operator*(Vec<float> a, Vec<float> b) { return {vmulq_f32(a.value, b.value)}; }
NPATTN_INLINE Vec<double> operator*(Vec<double> a, Vec<double> b) { return {vmulq_f64(a.value, b.value)}; }
NPATTN_INLINE Vec<float> operator/(Vec<float> a, Vec<float> b) { return {vdivq_f32(a.value, b.value)}; }
NPATTN_INLINE Vec<double> operator/(Vec<double> a, Vec<double> b) { return {vdivq_f64(a.value, b.value)}; }
NPATTN_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
    return {vfmaq_f32(c.value, a.value, b.value)};
}
NPATTN_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
    return {vfmaq_f64(c.value, a.value, b.value)};
}
NPATTN_INLINE Vec<float> fnma(Vec<float> a, Vec<float> b, Vec<float> c) {
    return {vfmsq_f32(c.value, a.value, b.value)};
}
NPATTN_INLINE Vec<double> fnma(Vec<double> a, Vec<double> b, Vec<double> c) {
    return {vfmsq_f64(c.value, a.value, b.value)};
}

template <class T> NPATTN_INLINE Vec<T> fma_element(Vec<T> a, const T* p, Vec<T> c) {
    return fma(a, broadcast<T>(*p), c);
}
template <class T> NPATTN_INLINE Vec<T> mul_element(Vec<T> a, const T* p) { return a * broadcast<T>(*p); }

NPATTN_INLINE Mask<float> less(Vec<float> a, Vec<float> b) { return {vcltq_f32(a.value, b.value)}; }
NPATTN_INLINE Mask<double> less(Vec<double> a, Vec<double> b) { return {vcltq_f64(a.value, b.value)}; }
NPATTN_INLINE Mask<float> equal(Vec<float> a, Vec<float> b) { return {vceqq_f32(a.value, b.value)}; }
NPATTN_INLINE Mask<double> equal(Vec<double> a, Vec<double> b) { return {vceqq_f64(a.value, b.value)}; }
NPATTN_INLINE Mask<float> both(Mask<float> a, Mask<float> b) { return {vandq_u32(a.value, b.value)}; }
NPATTN_INLINE Mask<double> both(Mask<double> a, Mask<double> b) { return {vandq_u64(a.value, b.value)}; }
NPATTN_INLINE Mask<float> either(Mask<float> a, Mask<float> b) { return {vorrq_u32(a.value, b.value)}; }
NPATTN_INLINE Mask<double> either(Mask<double> a, Mask<double> b) { return {vorrq_u64(a.value, b.value)}; }
NPATTN_INLINE Mask<float> invert(Mask<float> a) { return {vmvnq_u32(a.value)}; }
NPATTN_INLINE Mask<double> invert(Mask<double> a) {
    return {vreinterpretq_u64_u32(vmvnq_u32(vreinterpretq_u32_u64(a.value)))};
}
NPATTN_INLINE bool any(Mask<float> a) { return vmaxvq_u32(a.value) != 0; }
NPATTN_INLINE bool any(Mask<double> a) { return vmaxvq_u32(vreinterpretq_u32_u64(a.value)) != 0; }
NPATTN_INLINE bool all(Mask<float> a) { return vminvq_u32(a.value) != 0; }
NPATTN_INLINE bool all(Mask<double> a) { return vminvq_u32(vreinterpretq_u32_u64(a.value)) != 0; }
NPATTN_INLINE Vec<float> select(Mask<float> m, Vec<float> a, Vec<float> b) {
    return {vbslq_f32(m.value, a.value, b.value)};
}
NPATTN_INLINE Vec<double> select(Mask<double> m, Vec<double> a, Vec<double> b) {
    return {vbslq_f64(m.value, a.value, b.value)};
}
template <class T> NPATTN_INLINE Mask<T> first(int n) {
    return less(iota<T>(), broadcast<T>(static_cast<T>(n)));
}

// FMAX and FMIN give NaN where either operand is NaN; the contract asks for b.
template <class T> NPATTN_INLINE Vec<T> max(Vec<T> a, Vec<T> b) { return select(less(b, a), a, b); }
template <class T> NPATTN_INLINE Vec<T> min(Vec<T> a, Vec<T> b) { return select(less(a, b), a, b); }
NPATTN_INLINE Vec<float> round(Vec<float> a) { return {vrndnq_f32(a.value)}; }
NPATTN_INLINE Vec<double> round(Vec<double> a) { return {vrndnq_f64(a.value)}; }

// 2^n does not always fit a number where a * 2^n does: multiply by 2^(n / 2) and by 2^(n - n / 2), with n
// clamped to where both are normal. Beyond that the product has overflowed or vanished, but for a NaN, which
// only n = -inf turns to 0.
NPATTN_INLINE Vec<float> scale_exponent(Vec<float> a, Vec<float> n) {
    const float32x4_t clamped = vmaxq_f32(vminq_f32(n.value, vdupq_n_f32(252)), vdupq_n_f32(-252));
    const int32x4_t whole = vcvtq_s32_f32(clamped);
    const int32x4_t half = vshrq_n_s32(whole, 1);
    const int32x4_t bias = vdupq_n_s32(127);
    const float32x4_t low = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23));
    const float32x4_t high = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vsubq_s32(whole, half), bias), 23));
    const Vec<float> scaled = {vmulq_f32(vmulq_f32(a.value, low), high)};
    return select(equal(n, broadcast<float>(-__builtin_huge_valf())), zero<float>(), scaled);
}
NPATTN_INLINE Vec<double> scale_exponent(Vec<double> a, Vec<double> n) {
    const float64x2_t clamped = vmaxq_f64(vminq_f64(n.value, vdupq_n_f64(2044)), vdupq_n_f64(-2044));
    const int64x2_t whole = vcvtq_s64_f64(clamped);
    const int64x2_t half = vshrq_n_s64(whole, 1);
    const int64x2_t bias = vdupq_n_s64(1023);
    const float64x2_t low = vreinterpretq_f64_s64(vshlq_n_s64(vaddq_s64(half, bias), 52));
    const float64x2_t high = vreinterpretq_f64_s64(vshlq_n_s64(vaddq_s64(vsubq_s64(whole, half), bias), 52));
    const Vec<double> scaled = {vmulq_f64(vmulq_f64(a.value, low), high)};
    return select(equal(n, broadcast<double>(-__builtin_huge_val())), zero<double>(), scaled);
}

// Lane i meets lane i + 2, then the two sums meet.
NPATTN_INLINE float reduce_add(Vec<float> a) {
    const float32x2_t two = vadd_f32(vget_low_f32(a.value), vget_high_f32(a.value));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
NPATTN_INLINE double reduce_add(Vec<double> a) {
    return vgetq_lane_f64(a.value, 0) + vgetq_lane_f64(a.value, 1);
}
NPATTN_INLINE float reduce_max(Vec<float> a) { return vmaxvq_f32(a.value); }
NPATTN_INLINE double reduce_max(Vec<double> a) { return vmaxvq_f64(a.value); }

template <class T> NPATTN_INLINE Vec<T> keep(Vec<T> a) {
#if !defined(_MSC_VER)
    __asm__ volatile("" : "+w"(a.value));
#endif
    return a;
}

NPATTN_INLINE void deinterleave(Vec<float>& a, Vec<float>& b) {
    const float32x4_t even = vuzp1q_f32(a.value, b.value);
    b.value = vuzp2q_f32(a.value, b.value);
    a.value = even;
}
NPATTN_INLINE void deinterleave(Vec<double>& a, Vec<double>& b) {
    const float64x2_t even = vuzp1q_f64(a.value, b.value);
    b.value = vuzp2q_f64(a.value, b.value);
    a.value = even;
}
NPATTN_INLINE void interleave(Vec<float>& a, Vec<float>& b) {
    const float32x4_t low = vzip1q_f32(a.value, b.value);
    b.value = vzip2q_f32(a.value, b.value);
    a.value = low;
}
NPATTN_INLINE void interleave(Vec<double>& a, Vec<double>& b) {
    const float64x2_t low = vzip1q_f64(a.value, b.value);
    b.value = vzip2q_f64(a.value, b.value);
    a.value = low;
}

// Interleaving rows that lie half the matrix apart, until none do.
NPATTN_INLINE void transpose(Vec<double>* rows) { interleave(rows[0], rows[1]); }
NPATTN_INLINE void transpose(Vec<float>* rows) {
    interleave(rows[0], rows[2]);
    interleave(rows[1], rows[3]);
    interleave(rows[0], rows[1]);
    interleave(rows[2], rows[3]);
}

} // namespace
} // namespace npattn::NPATTN_ISA

#include "simd/neon_int8.hpp"
