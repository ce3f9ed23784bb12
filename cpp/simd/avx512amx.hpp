#pragma once
// The SIMD contract on AVX-512 with AMX: that with AVX512_BF16, and tile registers.

#include "simd/avx512bf16.hpp"

#define NPATTN_TILES

namespace npattn::NPATTN_ISA {
namespace {

class TileRegisters {
public:
    TileRegisters() {
        alignas(64) static constexpr struct {
            std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
            std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } all_whole;
        static_assert(sizeof all_whole == 64);
        __asm__ volatile("ldtilecfg %0" : : "m"(all_whole));
    }
    ~TileRegisters() { __asm__ volatile("tilerelease"); }
    TileRegisters(const TileRegisters&) = delete;
    TileRegisters& operator=(const TileRegisters&) = delete;
};

class NoDenormals {
public:
    NoDenormals() { _mm_setcsr(before_ | 0x8040); } // flush to zero, denormals are zero
    ~NoDenormals() { _mm_setcsr(before_); }
    NoDenormals(const NoDenormals&) = delete;
    NoDenormals& operator=(const NoDenormals&) = delete;

private:
    const unsigned before_ = _mm_getcsr();
};
NPATTN_INLINE Vec<float> even(Vec<HalfPair> a) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(a.value, 16))};
}
NPATTN_INLINE Vec<float> odd(Vec<HalfPair> a) {
    return {_mm512_castsi512_ps(_mm512_and_si512(a.value, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}

// The compiler does not know these registers: they are written by number.
template <int N> NPATTN_INLINE void tile_zero() { __asm__ volatile("tilezero %%tmm%c0" : : "i"(N)); }
template <int N> NPATTN_INLINE void tile_load(const void* p, std::ptrdiff_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(N) : "memory");
}
template <int N> NPATTN_INLINE void tile_store(void* p, std::ptrdiff_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(N) : "memory");
}
template <int C, int A, int B> NPATTN_INLINE void tile_dot(HalfPair) {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B> NPATTN_INLINE void tile_dot(Int8Quad) {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

} // namespace
} // namespace npattn::NPATTN_ISA
