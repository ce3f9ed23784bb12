#pragma once
// The half precision numbers as they lie in memory, and one of them at a time to and from float. They are
// only ever stored: everything is computed in float. Plain types and functions of one unit each: kernels
// include this.

#include <cstdint>
#include <cstring>

namespace npattn {

struct Float16 { // IEEE binary16
    std::uint16_t bits;
};
struct BFloat16 { // the upper half of a float
    std::uint16_t bits;
};

// Two elements of a half type that follow one another along the depth of a product, as dot instructions take
// them.
struct HalfPair {
    std::uint16_t even, odd;
};
// Four integers of 8 bits that do: signed in a left operand; in a right one 128 is added, they are unsigned.
struct Int8Quad {
    std::uint8_t bytes[4];
};

// Elements of a row of `depth` that is kept in quads.
[[maybe_unused]] static constexpr std::int64_t int8_depth(std::int64_t depth) { return (depth + 3) / 4 * 4; }

// One of a row of integers with a common scale.
struct Int8 {
    std::int8_t value;
};

// The type of the elements of an array that several types may come in. i8: in the pages of a cache alone.
enum class Storage { f32, f64, f16, bf16, i8 };
template <class S> constexpr Storage STORAGE;
template <> constexpr Storage STORAGE<float> = Storage::f32;
template <> constexpr Storage STORAGE<double> = Storage::f64;
template <> constexpr Storage STORAGE<Float16> = Storage::f16;
template <> constexpr Storage STORAGE<BFloat16> = Storage::bf16;
template <> constexpr Storage STORAGE<Int8> = Storage::i8;
[[maybe_unused]] static constexpr int storage_bytes(Storage storage) {
    return storage == Storage::f64 ? 8 : storage == Storage::f32 ? 4 : storage == Storage::i8 ? 1 : 2;
}

// What numbers stored as S are computed in.
template <class S> struct ComputeOf { using type = S; };
template <> struct ComputeOf<Float16> { using type = float; };
template <> struct ComputeOf<BFloat16> { using type = float; };
template <> struct ComputeOf<Int8> { using type = float; };
template <class S> using Compute = typename ComputeOf<S>::type;

namespace {

[[maybe_unused]] std::uint32_t bits_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
[[maybe_unused]] float float_of_bits(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

[[maybe_unused]] float widen(float x) { return x; }
[[maybe_unused]] double widen(double x) { return x; }
[[maybe_unused]] float widen(Int8 x) { return x.value; }
[[maybe_unused]] float widen(BFloat16 x) { return float_of_bits(std::uint32_t{x.bits} << 16); }
// The magnitude's bits, moved to their place in a float, are x / 2^112, denormals included; infinities and
// NaN get the exponent of theirs.
[[maybe_unused]] float widen(Float16 x) {
    const std::uint32_t magnitude = x.bits & 0x7fffu;
    const std::uint32_t scaled = bits_of(float_of_bits(magnitude << 13) * 0x1p112f);
    const std::uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
    return float_of_bits((x.bits & 0x8000u) << 16 | scaled | special);
}

// To the nearest, ties to even; overflow is inf; a NaN stays one and is quiet.
template <class S> S narrow(Compute<S> x) { return x; }
template <> [[maybe_unused]] BFloat16 narrow<BFloat16>(float x) {
    const std::uint32_t bits = bits_of(x);
    if (x != x) return {static_cast<std::uint16_t>(bits >> 16 | 0x40u)};
    return {static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
template <> [[maybe_unused]] Float16 narrow<Float16>(float x) {
    constexpr std::uint32_t overflows = 0x477ff000; // 65520
    constexpr std::uint32_t normal = 0x38800000;    // 2^-14
    const std::uint32_t sign = bits_of(x) >> 16 & 0x8000u;
    const std::uint32_t magnitude = bits_of(x) & 0x7fffffffu;
    std::uint32_t result;
    if (x != x) {
        result = 0x7e00u | (magnitude >> 13 & 0x1ffu);
    } else if (magnitude >= overflows) {
        result = 0x7c00u;
    } else if (magnitude < normal) { // beside 0.5 a float has steps of 2^-24, those of the denormals
        result = bits_of(float_of_bits(magnitude) + 0.5f) - bits_of(0.5f);
    } else {
        result = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
    }
    return {static_cast<std::uint16_t>(sign | result)};
}

} // namespace
} // namespace npattn
