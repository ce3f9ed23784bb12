#pragma once
// Copies of half precision matrices in pairs of depths, their 16 bits as they are.

#include "kernels/each_vector.hpp"
#include "kernels/pack.hpp"

namespace npattn::NPATTN_ISA {
namespace {

constexpr std::ptrdiff_t HALF = 2; // bytes of an element

// Elements d and d + 1 of a vector of `depth`, one at a time; past the end, 0.
NPATTN_INLINE HalfPair load_pair(const char* vector, std::ptrdiff_t depth_stride, std::int64_t d,
                                 std::int64_t depth) {
    const char* p = vector + d * depth_stride;
    return {load_one<std::uint16_t>(p),
            d + 1 < depth ? load_one<std::uint16_t>(p + depth_stride) : std::uint16_t{0}};
}

// What lies after the last depth of an odd number.
alignas(64) constexpr std::uint16_t NO_DEPTH[PANEL] = {};

// One panel of a matrix whose rows are not contiguous, of which `columns` columns are left -> panel[(depth + 1) /
// 2][PANEL].
void pack_pair_panel(const char* matrix, std::ptrdiff_t depth_stride, std::ptrdiff_t column_stride,
                     std::int64_t depth, int columns, HalfPair* panel) {
    constexpr int lanes = Vec<float>::lanes;
    std::int64_t done = 0;
    if (depth_stride == HALF) { // a pair is a word in memory
        done = depth / 2 * 2;
        turn_registers<PANEL>(depth / 2, reinterpret_cast<float*>(panel), PANEL,
                              [&](int c, std::int64_t d, int count) NPATTN_BODY {
                                  const char* p = matrix + c * column_stride + 2 * d * HALF;
                                  return c >= columns     ? zero<float>()
                                         : count == lanes ? load<float>(p)
                                                          : load_first<float>(p, count);
                              });
    }
    for (std::int64_t d = done; d < depth; d += 2) {
        for (int c = 0; c < PANEL; ++c) {
            panel[d / 2 * PANEL + c] =
                c < columns ? load_pair(matrix + c * column_stride, depth_stride, d, depth) : HalfPair{};
        }
    }
}

void pack_pairs(const char* matrix, std::ptrdiff_t depth_stride, std::ptrdiff_t column_stride,
                std::int64_t depth, std::int64_t columns, std::int64_t first, std::int64_t last,
                HalfPair* panels, std::ptrdiff_t panel_stride) {
    constexpr int lanes = Vec<float>::lanes;
    constexpr std::int64_t ahead = 8; // rows far apart are not foreseen by the hardware
    if (column_stride != HALF) {
        for (std::int64_t p = first; p < last; ++p) {
            pack_pair_panel(matrix + p * PANEL * column_stride, depth_stride, column_stride, depth,
                            smaller(PANEL, columns - p * PANEL), panels + p * panel_stride);
        }
        return;
    }
    for (std::int64_t d = 0; d < depth; d += 2) {
        const bool whole = d + 1 < depth;
        for (std::int64_t p = first; p < last; ++p) {
            const char* row = matrix + d * depth_stride + p * PANEL * HALF;
            HalfPair* const to = panels + p * panel_stride + d / 2 * PANEL;
            const int count = smaller(PANEL, columns - p * PANEL);
            for (int c = 0; c < PANEL; c += lanes) {
                const char* even = row + c * HALF;
                const char* odd = whole ? even + depth_stride : reinterpret_cast<const char*>(NO_DEPTH);
                __builtin_prefetch(even + ahead * depth_stride);
                __builtin_prefetch(even + (ahead + 1) * depth_stride);
                store(to + c, c + lanes <= count ? load_pairs(even, odd)
                              : c < count        ? load_pairs_first(even, odd, count - c)
                                                 : zero<float>());
            }
        }
    }
}

// A (rows, depth) -> copy[row][ROW_STRIDE] of (depth + 1) / 2 pairs, and zeros up to whole GROUP_DEPTH.
void copy_pairs(const char* matrix, std::ptrdiff_t row_stride, std::ptrdiff_t depth_stride, std::int64_t rows,
                std::int64_t depth, HalfPair* copy) {
    constexpr int lanes = Vec<float>::lanes;
    std::int64_t done = 0;
    if (depth_stride == HALF) {
        done = depth / 2 * 2;
        for (std::int64_t r = 0; r < rows; ++r) {
            const char* row = matrix + r * row_stride;
            each_vector<float>(0, depth / 2, [&](std::int64_t d, auto part) NPATTN_BODY {
                store_part(copy + r * ROW_STRIDE + d, load_part<float>(row + 2 * d * HALF, part), part);
            });
        }
    } else if (row_stride == HALF) {
        const auto pairs = depth / 2;
        done = depth / 2 * 2;
        for (std::int64_t d = 0; d < pairs; d += lanes) {
            turn_registers<lanes>(rows, reinterpret_cast<float*>(copy + d), ROW_STRIDE,
                                  [&](int c, std::int64_t r, int count) NPATTN_BODY {
                                      const char* p = matrix + 2 * (d + c) * depth_stride + r * HALF;
                                      return d + c >= pairs   ? zero<float>()
                                             : count == lanes ? load_pairs(p, p + depth_stride)
                                                              : load_pairs_first(p, p + depth_stride, count);
                                  });
        }
    }
    for (std::int64_t d = done; d < depth; d += 2) {
        for (std::int64_t r = 0; r < rows; ++r)
            copy[r * ROW_STRIDE + d / 2] = load_pair(matrix + r * row_stride, depth_stride, d, depth);
    }
    for (std::int64_t d = (depth + 1) / 2; d % GROUP_DEPTH != 0; ++d) {
        for (std::int64_t r = 0; r < rows; ++r) copy[r * ROW_STRIDE + d] = {};
    }
}

} // namespace
} // namespace npattn::NPATTN_ISA
