#pragma once
// The SIMD contract: every operation a kernel may use. One header per ISA implements it, in
// `namespace npattn::NPATTN_ISA { namespace { ... } }`, for T = float and double. Kernels see nothing else.
//
//   Vec<T>                 a register; Vec<T>::lanes elements; member `value`
//   Mask<T>                one bool a lane
//
// memory                   any alignment; p is `const void*` or `void*` to elements of T
//   load<T>(p)             lanes elements
//   load_first<T>(p, n)    the first n elements (0 <= n <= lanes), 0 in the other lanes; memory past n is not touched
//   store(p, a)  store_first(p, a, n)
//   stream(p, a)           store past the cache; p aligned to the register size
//   load_bytes<T>(p)       Mask: byte i of lanes is not 0        load_bytes_first<T>(p, n): lanes >= n are false
//   store_bytes(p, m)      lanes bytes, 0 or 1
//   Half precision (core/bfloat16.hpp) is converted on its way, S = Float16 and BFloat16 as well as T:
//   load<S>(p)  load_first<S>(p, n)             Vec<Compute<S>>
//   store_as<S>(p, a)  store_first_as<S>(p, a, n)   to the nearest, ties to even; overflow is inf, NaN quiet
//   Items of 16 bits, whatever they are, in pairs as the bits of floats:
//   load_pairs(p, q)  load_pairs_first(p, q, n)     Vec<float>: the bits of p[i], then those of q[i]
//
//   keep(a)                a, from a register: what was loaded is not loaded again, and in the order of the calls
//
// making                   zero<T>()  broadcast<T>(x)  iota<T>() = 0, 1, 2, ...
// arithmetic               a + b  a - b  a * b  a / b
//   fma(a, b, c) = a * b + c   fnma(a, b, c) = c - a * b   with one rounding (generic: two)
//   fma_element(a, p, c) = a * *p + c   mul_element(a, p) = a * *p   with one element of aligned memory for all lanes
//   element(p)             *p in all lanes, to take the place of p in the two above
//   max(a, b)  min(a, b)   b where either is NaN
//   round(a)               to the nearest integer, ties to even
//   scale_exponent(a, n)   a * 2^n for integral n of any size and |a| near 1; overflow is inf, underflow 0 or a
//                          denormal; n = -inf gives 0 even where a is NaN (so exp2(-inf) is 0), else NaN stays;
//                          n = NaN is unspecified
// masks                    first<T>(n): lanes below n     less(a, b)  equal(a, b): false where either is NaN
//   both(a, b)  either(a, b)  invert(a)  any(a)  all(a)
//   select(m, a, b)        a where m, else b
// across                   reduce_add(a)  reduce_max(a): scalars; the order of the additions is fixed
//   transpose(rows)        Vec<T> rows[lanes] in place: element j of row i <-> element i of row j
//   deinterleave(a, b)     in place: (a0 a1 .. b0 b1 ..) -> a = even elements, b = odd elements
//   interleave(a, b)       in place: its inverse
//
// dot                      where NPATTN_DOT is defined: pairs of bfloat16, their products exact, each sum rounded;
//                          denormals are taken for 0, results too
//   Vec<HalfPair>          as many pairs as floats   load<HalfPair>(p)  load_first<HalfPair>(p, n)  load_halves(p, n)
//   fma_element(a, p, c)   Vec<float> c + a.even * p->even + a.odd * p->odd   mul_element(a, p): with c = 0
//   dot(a, b, c)           the same with pairs b lane by lane        broadcast(pair)   store(p, a)
//   pair_rows(a, b)        in place: items of 16 bits of a row and of the next, twice as many as pairs -> a = the pairs
//                          of their first halves, b = of their second halves
//   as_pairs(a)            the pairs whose bits load_pairs gives        load_halves: of n < 2 lanes items, then 0
//   narrow_pairs(a, b)     the floats of a, then those of b, to the nearest bfloat16; NaN is quiet, denormals are 0
//   fraction(a)            a - floor(a), 0 of -inf      scale_by_floor(a, n)   a * 2^floor(n); of n as scale_exponent
//
// tiles                    where NPATTN_TILES is defined: registers of 16 rows of 64 bytes, numbers 0 to 7
//   TileRegisters          the thread has them while one lives (making one takes 0.1 us); a kernel makes it
//   tile_zero<N>()  tile_load<N>(p, stride)  tile_store<N>(p, stride)     rows `stride` bytes apart
//   tile_dot<C, A, B>(P())     C (16, 16) of Sum<P> + A (16, 16) B (16, 16); P: HalfPair as in dot, the sum of the
//                          products added up before they meet C, those of even items and those of odd ones each in
//                          order; Int8Quad, signed in A, unsigned in B
//   NoDenormals            while one lives, other instructions take denormals for 0 too
//   even(a)  odd(a)        Vec<float> of the items of pairs
//
// lookup                   where NPATTN_LOOKUP is defined: for double
//   lookup(table, a)       element k of 16 aligned ones, k the lowest four bits of a
//   scale_by_floor(a, n)   as in dot
//
// int8                     exact, for T = std::int32_t (in <isa>_int8.hpp, which the header of the ISA ends with)
//   Vec<std::int32_t>      as many as floats   load  load_first  store  store_first  zero  a + b   to_float(a)
//   store_int8(p, a)  store_int8_first(p, a, n)     Vec<float> a, rounded to the nearest, -127 to 127
//   load<Int8>(p)  load_first<Int8>(p, n)           Vec<float> of signed bytes
//   Vec<Int8Quad>          as many quads as floats   load<Int8Quad>(p)  load_first<Int8Quad>(p, n)
//   fma_element(a, p, c)   Vec<std::int32_t> c + the sum of a.bytes[i] (unsigned) * p->bytes[i] (signed)
//   mul_element(a, p)      with c = 0
//   NPATTN_INT8_DOT        is defined where one instruction does it
//
// Each header also defines the register tile of the matrix kernels for its register file:
//   TILE_ROWS              rows of the largest tile
//   TILE_VECTORS           vectors a row

#include <cstddef>
#include <cstdint>

#include "core/bfloat16.hpp"

#if defined(_MSC_VER)
#define NPATTN_INLINE __forceinline
#define NPATTN_RESTRICT __restrict
#else
#define NPATTN_INLINE inline __attribute__((always_inline))
#define NPATTN_RESTRICT __restrict__
#endif

#if defined(NPATTN_ISA_avx512amx)
#include "simd/avx512amx.hpp"
#elif defined(NPATTN_ISA_avx512bf16)
#include "simd/avx512bf16.hpp"
#elif defined(NPATTN_ISA_avx512)
#include "simd/avx512.hpp"
#elif defined(NPATTN_ISA_avx2)
#include "simd/avx2.hpp"
#elif defined(NPATTN_ISA_neon)
#include "simd/neon.hpp"
#elif defined(NPATTN_ISA_generic)
#include "simd/generic.hpp"
#else
#error "compile this file through npattn_add_isa (cmake/isa.cmake)"
#endif

namespace npattn::NPATTN_ISA {
namespace {

template <class T> NPATTN_INLINE Vec<T> element(const T* p) { return broadcast<T>(*p); }
template <class T> NPATTN_INLINE Vec<T> fma_element(Vec<T> a, Vec<T> x, Vec<T> c) { return fma(a, x, c); }
template <class T> NPATTN_INLINE Vec<T> mul_element(Vec<T> a, Vec<T> x) { return a * x; }
#ifdef NPATTN_DOT
NPATTN_INLINE Vec<HalfPair> element(const HalfPair* p) { return broadcast(*p); }
NPATTN_INLINE Vec<float> fma_element(Vec<HalfPair> a, Vec<HalfPair> x, Vec<float> c) { return dot(a, x, c); }
NPATTN_INLINE Vec<float> mul_element(Vec<HalfPair> a, Vec<HalfPair> x) { return dot(a, x, zero<float>()); }
#endif

// Rows that products take at a time, and depths: copies of A have room for a multiple of these, pairs with zeros past
// their depth.
#ifdef NPATTN_TILES
constexpr int GROUP_ROWS = 32, GROUP_DEPTH = 16;
#else
constexpr int GROUP_ROWS = TILE_ROWS, GROUP_DEPTH = 1;
#endif
#ifndef NPATTN_INT8_DOT
NPATTN_INLINE const Int8Quad* element(const Int8Quad* p) { return p; }
#endif

} // namespace
} // namespace npattn::NPATTN_ISA
