#pragma once
// Walks a row a vector at a time. The tail runs the same body as the full vectors: what it is given as `part`
// decides how it loads and stores.

#include "simd/contract.hpp"

#if defined(_MSC_VER)
#define NPATTN_BODY [[msvc::forceinline]]
#else
#define NPATTN_BODY __attribute__((always_inline))
#endif

namespace npattn::NPATTN_ISA {
namespace {

// body(S{}) for the S that is computed in T and stored as `storage`.
template <class T, class Body> NPATTN_INLINE void with_storage(Storage storage, Body body) {
    if constexpr (sizeof(T) == sizeof(float)) {
        if (storage == Storage::f16) return body(Float16{});
        if (storage == Storage::bf16) return body(BFloat16{});
    }
    body(T{});
}

// The same for keys and values, which a cache may hold as integers.
template <class T, class Body> NPATTN_INLINE void with_key_storage(Storage storage, Body body) {
    if constexpr (sizeof(T) == sizeof(float)) {
        if (storage == Storage::i8) return body(Int8{});
    }
    with_storage<T>(storage, body);
}

struct Whole {}; // a full vector; the other kind of part is an int: that many elements

// S: what lies in memory, float, double or a half precision type.
template <class S> NPATTN_INLINE Vec<Compute<S>> load_part(const void* p, Whole) { return load<S>(p); }
template <class S> NPATTN_INLINE Vec<Compute<S>> load_part(const void* p, int count) {
    return load_first<S>(p, count);
}

template <class T> NPATTN_INLINE void store_part(void* p, Vec<T> a, Whole) { store(p, a); }
template <class T> NPATTN_INLINE void store_part(void* p, Vec<T> a, int count) { store_first(p, a, count); }
template <class S> NPATTN_INLINE void store_part_as(void* p, Vec<Compute<S>> a, Whole) { store_as<S>(p, a); }
template <class S> NPATTN_INLINE void store_part_as(void* p, Vec<Compute<S>> a, int count) {
    store_first_as<S>(p, a, count);
}

NPATTN_INLINE void store_int8_part(void* p, Vec<float> a, Whole) { store_int8(p, a); }
NPATTN_INLINE void store_int8_part(void* p, Vec<float> a, int count) { store_int8_first(p, a, count); }

NPATTN_INLINE Vec<float> load_pairs_part(const void* p, const void* q, Whole) { return load_pairs(p, q); }
NPATTN_INLINE Vec<float> load_pairs_part(const void* p, const void* q, int count) {
    return load_pairs_first(p, q, count);
}

// a in the lanes of the part, `fill` in the others.
template <class T> NPATTN_INLINE Vec<T> fill_rest(Vec<T> a, Whole, T) { return a; }
template <class T> NPATTN_INLINE Vec<T> fill_rest(Vec<T> a, int count, T fill) {
    return select(first<T>(count), a, broadcast<T>(fill));
}

template <class T> NPATTN_INLINE Mask<T> load_bytes_part(const void* p, Whole) { return load_bytes<T>(p); }
template <class T> NPATTN_INLINE Mask<T> load_bytes_part(const void* p, int count) {
    return load_bytes_first<T>(p, count);
}

// The lanes of the part.
template <class T> NPATTN_INLINE Mask<T> lanes_of(Whole) { return first<T>(Vec<T>::lanes); }
template <class T> NPATTN_INLINE Mask<T> lanes_of(int count) { return first<T>(count); }

// body(i, part) for the elements [begin, end), i the first of the part.
template <class T, class Body>
NPATTN_INLINE void each_vector(std::int64_t begin, std::int64_t end, Body body) {
    std::int64_t i = begin;
    for (; i + Vec<T>::lanes <= end; i += Vec<T>::lanes) body(i, Whole{});
    if (i < end) body(i, static_cast<int>(end - i));
}

} // namespace
} // namespace npattn::NPATTN_ISA
