#pragma once
// Copies of matrices in the order the register tiles read them. Loads go through the contract, so any
// alignment will do.

#include <cstddef>
#include <cstdint>

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

// WIDTH vectors of `depth` elements -> strip[depth][WIDTH]: strip[d][c] = sign * vectors[c][d], 0 where
// vectors[c] is null. The strip must have room for one register past its end.
template <int WIDTH, class T>
void pack_vectors(const char* const (&vectors)[WIDTH], std::ptrdiff_t depth_stride, std::int64_t depth,
                  T sign, T* NPATTN_RESTRICT strip) {
    constexpr int lanes = Vec<T>::lanes;
    if (depth_stride != static_cast<std::ptrdiff_t>(sizeof(T))) {
        for (std::int64_t d = 0; d < depth; ++d) {
            for (int c = 0; c < WIDTH; ++c) {
                strip[d * WIDTH + c] = vectors[c] ? sign * load_one<T>(vectors[c] + d * depth_stride) : T(0);
            }
        }
        return;
    }
    const Vec<T> signs = broadcast<T>(sign);
    for (std::int64_t d = 0; d < depth; d += lanes) {
        const int elements = smaller(lanes, depth - d);
        for (int c = 0; c < WIDTH; c += lanes) {
            Vec<T> block[lanes];
            for (int i = 0; i < lanes; ++i) {
                const char* vector = c + i < WIDTH ? vectors[c + i] : nullptr;
                const char* p = vector + d * static_cast<std::ptrdiff_t>(sizeof(T));
                block[i] = !vector ? zero<T>() : elements == lanes ? load<T>(p) : load_first<T>(p, elements);
                block[i] = block[i] * signs;
            }
            transpose(block);
            for (int i = 0; i < elements; ++i) {
                if (WIDTH - c >= lanes) {
                    store(strip + (d + i) * WIDTH + c, block[i]);
                } else {
                    store_first(strip + (d + i) * WIDTH + c, block[i], WIDTH - c);
                }
            }
        }
    }
}

// Rows of WIDTH adjacent elements, of which `columns` exist -> strip[depth][WIDTH].
template <int WIDTH, class T>
void pack_adjacent(const char* matrix, std::ptrdiff_t depth_stride, std::int64_t depth, int columns,
                   T* NPATTN_RESTRICT strip) {
    constexpr int lanes = Vec<T>::lanes;
    for (std::int64_t d = 0; d < depth; ++d) {
        const char* row = matrix + d * depth_stride;
        for (int c = 0; c < WIDTH; c += lanes) {
            const char* p = row + c * static_cast<std::ptrdiff_t>(sizeof(T));
            const Vec<T> v = c + lanes <= columns ? load<T>(p)
                             : c < columns        ? load_first<T>(p, columns - c)
                                                  : zero<T>();
            if (WIDTH - c >= lanes) {
                store(strip + d * WIDTH + c, v);
            } else {
                store_first(strip + d * WIDTH + c, v, WIDTH - c);
            }
        }
    }
}

// Columns [first, first + WIDTH) of a matrix (depth, columns) with any strides -> strip[depth][WIDTH].
template <int WIDTH, class T>
void pack_strip(const char* matrix, std::ptrdiff_t depth_stride, std::ptrdiff_t column_stride,
                std::int64_t depth, std::int64_t columns, std::int64_t first, T* strip) {
    const int here = smaller(WIDTH, columns - first);
    const char* start = matrix + first * column_stride;
    if (column_stride == static_cast<std::ptrdiff_t>(sizeof(T))) {
        pack_adjacent<WIDTH, T>(start, depth_stride, depth, here, strip);
        return;
    }
    const char* vectors[WIDTH];
    for (int c = 0; c < WIDTH; ++c) vectors[c] = c < here ? start + c * column_stride : nullptr;
    pack_vectors<WIDTH, T>(vectors, depth_stride, depth, T(1), strip);
}

} // namespace
} // namespace npattn::NPATTN_ISA
