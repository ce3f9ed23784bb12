#pragma once
// Copies of matrices in the order the register tiles read them. Loads go through the contract, so any
// alignment will do.

#include <cstddef>
#include <cstdint>

#include "dispatch/kernel_table.hpp"
#include "simd/contract.hpp"

namespace npattn::NPATTN_ISA {
namespace {

template <class T> NPATTN_INLINE T load_one(const char* p) {
    T x;
    __builtin_memcpy(&x, p, sizeof(T));
    return x;
}
template <class T> NPATTN_INLINE void store_one(char* p, T x) { __builtin_memcpy(p, &x, sizeof(T)); }

NPATTN_INLINE constexpr int smaller(std::int64_t a, std::int64_t b) {
    return static_cast<int>(a < b ? a : b);
}

// WIDTH vectors of `depth` elements, turned: turned[d * stride + c] = element d of vector c, which
// load_vector(c, d, count) gives with the count - 1 after it.
template <int WIDTH, class T, class Load>
NPATTN_INLINE void turn_registers(std::int64_t depth, T* NPATTN_RESTRICT turned, std::int64_t stride,
                                  Load load_vector) {
    constexpr int lanes = Vec<T>::lanes;
    for (std::int64_t d = 0; d < depth; d += lanes) {
        const int count = smaller(lanes, depth - d);
        for (int c = 0; c < WIDTH; c += lanes) {
            Vec<T> block[lanes];
            for (int i = 0; i < lanes; ++i) block[i] = load_vector(c + i, d, count);
            transpose(block);
            for (int i = 0; i < count; ++i) store(turned + (d + i) * stride + c, block[i]);
        }
    }
}

// The same of vectors stored as S, 0 where vectors[c] is null.
template <int WIDTH, class S, class T = Compute<S>>
void turn(const char* const (&vectors)[WIDTH], std::ptrdiff_t depth_stride, std::int64_t depth,
          T* NPATTN_RESTRICT turned, std::int64_t stride) {
    if (depth_stride != static_cast<std::ptrdiff_t>(sizeof(S))) {
        for (std::int64_t d = 0; d < depth; ++d) {
            for (int c = 0; c < WIDTH; ++c) {
                turned[d * stride + c] =
                    vectors[c] ? widen(load_one<S>(vectors[c] + d * depth_stride)) : T(0);
            }
        }
        return;
    }
    turn_registers<WIDTH, T>(depth, turned, stride, [&](int c, std::int64_t d, int count) {
        const char* vector = c < WIDTH ? vectors[c] : nullptr;
        const char* p = vector + d * static_cast<std::ptrdiff_t>(sizeof(S));
        return !vector ? zero<T>() : count == Vec<T>::lanes ? load<S>(p) : load_first<S>(p, count);
    });
}

// Panels `first` to `last` of a matrix (depth, columns) with any strides; panel p is
// panels[p * panel_stride][depth][PANEL], zeros past the last column.
template <class S, class T = Compute<S>>
void pack_panels(const char* matrix, std::ptrdiff_t depth_stride, std::ptrdiff_t column_stride,
                 std::int64_t depth, std::int64_t columns, std::int64_t first, std::int64_t last, T* panels,
                 std::ptrdiff_t panel_stride) {
    constexpr int lanes = Vec<T>::lanes;
    if (column_stride != static_cast<std::ptrdiff_t>(sizeof(S))) {
        for (std::int64_t p = first; p < last; ++p) {
            const char* vectors[PANEL];
            for (int c = 0; c < PANEL; ++c) {
                vectors[c] = p * PANEL + c < columns ? matrix + (p * PANEL + c) * column_stride : nullptr;
            }
            turn<PANEL, S>(vectors, depth_stride, depth, panels + p * panel_stride, PANEL);
        }
        return;
    }
    constexpr std::ptrdiff_t size = sizeof(S);
    // Rows far apart are not foreseen by the hardware. Past the last row: what comes after it, if anything.
    const std::ptrdiff_t next = 4 * depth_stride;
    for (std::int64_t d = 0; d < depth; ++d) {
        for (std::int64_t p = first; p < last; ++p) {
            const char* row = matrix + d * depth_stride + p * PANEL * size;
            T* const to = panels + p * panel_stride + d * PANEL;
            const int count = smaller(PANEL, columns - p * PANEL);
            for (int c = 0; c < PANEL; c += lanes) {
                const char* from = row + c * size;
                __builtin_prefetch(from + next);
                const Vec<T> v = c + lanes <= count ? load<S>(from)
                                 : c < count        ? load_first<S>(from, count - c)
                                                    : zero<T>();
                store(to + c, v);
            }
        }
    }
}

} // namespace
} // namespace npattn::NPATTN_ISA
