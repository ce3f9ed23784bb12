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

NPATTN_INLINE int smaller(std::int64_t a, std::int64_t b) { return static_cast<int>(a < b ? a : b); }

// WIDTH vectors of `depth` elements, turned: turned[d * stride + c] = vectors[c][d], 0 where vectors[c] is null.
template <int WIDTH, class T>
void turn(const char* const (&vectors)[WIDTH], std::ptrdiff_t depth_stride, std::int64_t depth,
          T* NPATTN_RESTRICT turned, std::int64_t stride) {
    constexpr int lanes = Vec<T>::lanes;
    if (depth_stride != static_cast<std::ptrdiff_t>(sizeof(T))) {
        for (std::int64_t d = 0; d < depth; ++d) {
            for (int c = 0; c < WIDTH; ++c) {
                turned[d * stride + c] = vectors[c] ? load_one<T>(vectors[c] + d * depth_stride) : T(0);
            }
        }
        return;
    }
    for (std::int64_t d = 0; d < depth; d += lanes) {
        const int elements = smaller(lanes, depth - d);
        for (int c = 0; c < WIDTH; c += lanes) {
            Vec<T> block[lanes];
            for (int i = 0; i < lanes; ++i) {
                const char* vector = c + i < WIDTH ? vectors[c + i] : nullptr;
                const char* p = vector + d * static_cast<std::ptrdiff_t>(sizeof(T));
                block[i] = !vector ? zero<T>() : elements == lanes ? load<T>(p) : load_first<T>(p, elements);
            }
            transpose(block);
            for (int i = 0; i < elements; ++i) store(turned + (d + i) * stride + c, block[i]);
        }
    }
}

// Panels `first` to `last` of a matrix (depth, columns) with any strides; panel p is
// panels[p * panel_stride][depth][PANEL], zeros past the last column.
template <class T>
void pack_panels(const char* matrix, std::ptrdiff_t depth_stride, std::ptrdiff_t column_stride,
                 std::int64_t depth, std::int64_t columns, std::int64_t first, std::int64_t last, T* panels,
                 std::ptrdiff_t panel_stride) {
    constexpr int lanes = Vec<T>::lanes;
    if (column_stride != static_cast<std::ptrdiff_t>(sizeof(T))) {
        for (std::int64_t p = first; p < last; ++p) {
            const char* vectors[PANEL];
            for (int c = 0; c < PANEL; ++c) {
                vectors[c] = p * PANEL + c < columns ? matrix + (p * PANEL + c) * column_stride : nullptr;
            }
            turn<PANEL, T>(vectors, depth_stride, depth, panels + p * panel_stride, PANEL);
        }
        return;
    }
    constexpr std::int64_t ahead = 4; // rows far apart are not foreseen by the hardware
    for (std::int64_t d = 0; d < depth; ++d) {
        const char* row = matrix + d * depth_stride;
        const std::ptrdiff_t next = d + ahead < depth ? ahead * depth_stride : 0;
        for (std::int64_t c = first * PANEL; c < last * PANEL; c += lanes) {
            const char* p = row + c * column_stride;
            __builtin_prefetch(p + next);
            const Vec<T> v = c + lanes <= columns ? load<T>(p)
                             : c < columns        ? load_first<T>(p, smaller(lanes, columns - c))
                                                  : zero<T>();
            store(panels + c / PANEL * panel_stride + d * PANEL + c % PANEL, v);
        }
    }
}

} // namespace
} // namespace npattn::NPATTN_ISA
