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
alignas(64) constexpr std::uint16_t NO_DEPTH[Vec<float>::lanes] = {};

// One panel of a matrix of which `columns` columns are left -> panel[(depth + 1) / 2][PANEL].
void pack_pair_panel(const char* matrix, std::ptrdiff_t depth_stride, std::ptrdiff_t column_stride,
                     std::int64_t depth, int columns, HalfPair* panel) {
    constexpr int lanes = Vec<float>::lanes;
    auto* words = reinterpret_cast<char*>(panel);
    constexpr std::ptrdiff_t word_row = PANEL * sizeof(HalfPair);
    if (column_stride == HALF) {
        for (std::int64_t d = 0; d < depth; d += 2) {
            const char* row = matrix + d * depth_stride;
            for (int c = 0; c < PANEL; c += lanes) {
                const char* p = row + c * HALF;
                const char* q = d + 1 < depth ? p + depth_stride : reinterpret_cast<const char*>(NO_DEPTH);
                const int count = columns - c;
                const Vec<float> pairs = count >= lanes ? load_pairs(p, q)
                                         : count > 0    ? load_pairs_first(p, q, count)
                                                        : zero<float>();
                store(words + d / 2 * word_row + c * sizeof(HalfPair), pairs);
            }
        }
        return;
    }
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
            const HalfPair pair =
                c < columns ? load_pair(matrix + c * column_stride, depth_stride, d, depth) : HalfPair{};
            store_one(words + d / 2 * word_row + c * static_cast<std::ptrdiff_t>(sizeof(HalfPair)), pair);
        }
    }
}

void pack_pairs(const char* matrix, std::ptrdiff_t depth_stride, std::ptrdiff_t column_stride,
                std::int64_t depth, std::int64_t columns, std::int64_t first, std::int64_t last,
                HalfPair* panels, std::ptrdiff_t panel_stride) {
    for (std::int64_t p = first; p < last; ++p) {
        pack_pair_panel(matrix + p * PANEL * column_stride, depth_stride, column_stride, depth,
                        smaller(PANEL, columns - p * PANEL), panels + p * panel_stride);
    }
}

} // namespace
} // namespace npattn::NPATTN_ISA
