#pragma once
// The SIMD contract in standard C++: 4 lanes, plain loops. Runs anywhere; compilers turn most of it into
// vector code.

#include <cstring>

namespace npattn::NPATTN_ISA {
namespace {

template <class T> struct Vec {
    static constexpr int lanes = 4;
    T value[4];
};
template <class T> struct Mask { bool value[4]; };

constexpr int TILE_ROWS = 4;
constexpr int TILE_VECTORS = 2;

template <class T, class Function> NPATTN_INLINE Vec<T> map(Function function) {
    Vec<T> result;
    for (int i = 0; i < 4; ++i) result.value[i] = function(i);
    return result;
}
template <class T, class Function> NPATTN_INLINE Mask<T> map_mask(Function function) {
    Mask<T> result;
    for (int i = 0; i < 4; ++i) result.value[i] = function(i);
    return result;
}

template <class T> NPATTN_INLINE Mask<T> first(int n) {
    return map_mask<T>([&](int i) { return i < n; });
}
template <class S> NPATTN_INLINE Vec<Compute<S>> load_first(const void* p, int n) {
    S elements[4] = {};
    std::memcpy(elements, p, static_cast<std::size_t>(n) * sizeof(S));
    return map<Compute<S>>([&](int i) { return widen(elements[i]); });
}
template <class S> NPATTN_INLINE Vec<Compute<S>> load(const void* p) { return load_first<S>(p, 4); }
template <class T> NPATTN_INLINE void store_first(void* p, Vec<T> a, int n) {
    std::memcpy(p, a.value, static_cast<std::size_t>(n) * sizeof(T));
}
template <class T> NPATTN_INLINE void store(void* p, Vec<T> a) { std::memcpy(p, a.value, sizeof a.value); }
template <class T> NPATTN_INLINE void stream(void* p, Vec<T> a) { store(p, a); }
template <class S> NPATTN_INLINE void store_first_as(void* p, Vec<Compute<S>> a, int n) {
    S elements[4];
    for (int i = 0; i < 4; ++i) elements[i] = narrow<S>(a.value[i]);
    std::memcpy(p, elements, static_cast<std::size_t>(n) * sizeof(S));
}
template <class S> NPATTN_INLINE void store_as(void* p, Vec<Compute<S>> a) { store_first_as<S>(p, a, 4); }
template <class T> NPATTN_INLINE Mask<T> load_bytes_first(const void* p, int n) {
    const auto* bytes = static_cast<const std::uint8_t*>(p);
    return map_mask<T>([&](int i) { return i < n && bytes[i] != 0; });
}
template <class T> NPATTN_INLINE Mask<T> load_bytes(const void* p) { return load_bytes_first<T>(p, 4); }
template <class T> NPATTN_INLINE void store_bytes(void* p, Mask<T> m) {
    for (int i = 0; i < 4; ++i) static_cast<std::uint8_t*>(p)[i] = m.value[i];
}
NPATTN_INLINE Vec<float> load_pairs_first(const void* p, const void* q, int n) {
    std::uint16_t pairs[8] = {};
    for (int i = 0; i < 4 && i < n; ++i) {
        std::memcpy(pairs + 2 * i, static_cast<const char*>(p) + 2 * i, 2);
        std::memcpy(pairs + 2 * i + 1, static_cast<const char*>(q) + 2 * i, 2);
    }
    return load<float>(pairs);
}
NPATTN_INLINE Vec<float> load_pairs(const void* p, const void* q) { return load_pairs_first(p, q, 4); }

template <class T> NPATTN_INLINE Vec<T> broadcast(T x) { return {{x, x, x, x}}; }
template <class T> NPATTN_INLINE Vec<T> zero() { return {{T(0), T(0), T(0), T(0)}}; }
template <class T> NPATTN_INLINE Vec<T> iota() { return {{T(0), T(1), T(2), T(3)}}; }

template <class T> NPATTN_INLINE Vec<T> operator+(Vec<T> a, Vec<T> b) {
    return map<T>([&](int i) { return a.value[i] + b.value[i]; });
}
template <class T> NPATTN_INLINE Vec<T> operator-(Vec<T> a, Vec<T> b) {
    return map<T>([&](int i) { return a.value[i] - b.value[i]; });
}
template <class T> NPATTN_INLINE Vec<T> operator*(Vec<T> a, Vec<T> b) {
    return map<T>([&](int i) { return a.value[i] * b.value[i]; });
}
template <class T> NPATTN_INLINE Vec<T> operator/(Vec<T> a, Vec<T> b) {
    return map<T>([&](int i) { return a.value[i] / b.value[i]; });
}
template <class T> NPATTN_INLINE Vec<T> fma(Vec<T> a, Vec<T> b, Vec<T> c) {
    return map<T>([&](int i) { return a.value[i] * b.value[i] + c.value[i]; });
}
template <class T> NPATTN_INLINE Vec<T> fnma(Vec<T> a, Vec<T> b, Vec<T> c) {
    return map<T>([&](int i) { return c.value[i] - a.value[i] * b.value[i]; });
}
template <class T> NPATTN_INLINE Vec<T> max(Vec<T> a, Vec<T> b) {
    return map<T>([&](int i) { return a.value[i] > b.value[i] ? a.value[i] : b.value[i]; });
}
template <class T> NPATTN_INLINE Vec<T> min(Vec<T> a, Vec<T> b) {
    return map<T>([&](int i) { return a.value[i] < b.value[i] ? a.value[i] : b.value[i]; });
}

// Adding 2^(digits - 1) pushes the fraction out of the significand, rounding it; larger numbers are integers.
template <class T> NPATTN_INLINE Vec<T> round(Vec<T> a) {
    constexpr T whole = sizeof(T) == 4 ? T(8388608) : T(4503599627370496);
    return map<T>([&](int i) {
        const T x = a.value[i];
        const T shift = x < T(0) ? -whole : whole;
        return x > -whole && x < whole ? (x + shift) - shift : x;
    });
}

// 2^n for n within the exponents of normal numbers.
NPATTN_INLINE float power_of_two(float n) {
    const std::uint32_t bits = static_cast<std::uint32_t>(static_cast<std::int32_t>(n) + 127) << 23;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}
NPATTN_INLINE double power_of_two(double n) {
    const std::uint64_t bits = static_cast<std::uint64_t>(static_cast<std::int64_t>(n) + 1023) << 52;
    double result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

template <class T> NPATTN_INLINE Vec<T> scale_exponent(Vec<T> a, Vec<T> n) {
    constexpr T limit = sizeof(T) == 4 ? T(252) : T(2044);
    return map<T>([&](int i) {
        if (n.value[i] == static_cast<T>(-__builtin_huge_val())) return T(0);
        const T below = n.value[i] < limit ? n.value[i] : limit;
        const T clamped = below > -limit ? below : -limit;
        const T half = static_cast<T>(static_cast<std::int32_t>(clamped) / 2);
        return a.value[i] * power_of_two(half) * power_of_two(clamped - half);
    });
}

template <class T> NPATTN_INLINE Vec<T> fma_element(Vec<T> a, const T* p, Vec<T> c) {
    return fma(a, broadcast<T>(*p), c);
}
template <class T> NPATTN_INLINE Vec<T> mul_element(Vec<T> a, const T* p) { return a * broadcast<T>(*p); }

template <class T> NPATTN_INLINE Mask<T> less(Vec<T> a, Vec<T> b) {
    return map_mask<T>([&](int i) { return a.value[i] < b.value[i]; });
}
template <class T> NPATTN_INLINE Mask<T> equal(Vec<T> a, Vec<T> b) {
    return map_mask<T>([&](int i) { return a.value[i] == b.value[i]; });
}
template <class T> NPATTN_INLINE Mask<T> both(Mask<T> a, Mask<T> b) {
    return map_mask<T>([&](int i) { return a.value[i] && b.value[i]; });
}
template <class T> NPATTN_INLINE Mask<T> either(Mask<T> a, Mask<T> b) {
    return map_mask<T>([&](int i) { return a.value[i] || b.value[i]; });
}
template <class T> NPATTN_INLINE Mask<T> invert(Mask<T> a) {
    return map_mask<T>([&](int i) { return !a.value[i]; });
}
template <class T> NPATTN_INLINE bool any(Mask<T> a) {
    return a.value[0] || a.value[1] || a.value[2] || a.value[3];
}
template <class T> NPATTN_INLINE bool all(Mask<T> a) {
    return a.value[0] && a.value[1] && a.value[2] && a.value[3];
}
template <class T> NPATTN_INLINE Vec<T> select(Mask<T> m, Vec<T> a, Vec<T> b) {
    return map<T>([&](int i) { return m.value[i] ? a.value[i] : b.value[i]; });
}

template <class T> NPATTN_INLINE T reduce_add(Vec<T> a) {
    return (a.value[0] + a.value[2]) + (a.value[1] + a.value[3]);
}
template <class T> NPATTN_INLINE T reduce_max(Vec<T> a) {
    const T even = a.value[0] > a.value[2] ? a.value[0] : a.value[2];
    const T odd = a.value[1] > a.value[3] ? a.value[1] : a.value[3];
    return even > odd ? even : odd;
}
template <class T> NPATTN_INLINE void transpose(Vec<T>* rows) {
    for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < i; ++j) {
            const T swapped = rows[i].value[j];
            rows[i].value[j] = rows[j].value[i];
            rows[j].value[i] = swapped;
        }
    }
}
template <class T> NPATTN_INLINE Vec<T> keep(Vec<T> a) { return a; }
template <class T> NPATTN_INLINE void deinterleave(Vec<T>& a, Vec<T>& b) {
    const Vec<T> even = {{a.value[0], a.value[2], b.value[0], b.value[2]}};
    b = {{a.value[1], a.value[3], b.value[1], b.value[3]}};
    a = even;
}
template <class T> NPATTN_INLINE void interleave(Vec<T>& a, Vec<T>& b) {
    const Vec<T> low = {{a.value[0], b.value[0], a.value[1], b.value[1]}};
    b = {{a.value[2], b.value[2], a.value[3], b.value[3]}};
    a = low;
}

} // namespace
} // namespace npattn::NPATTN_ISA

#include "simd/generic_int8.hpp"
