#pragma once
// Matrix products on copied operands: C (rows, columns) from A (rows, depth) B (depth, columns).

#include "kernels/tile_registers.hpp"

namespace npattn::NPATTN_ISA {
namespace {

// Rows of A that are copied at a time, and blocks of their depth: they stay in the L2 cache.
constexpr int BLOCK_ROWS = GROUP_DEPTH > 1 ? 192 : 96, DEPTH_BLOCKS = GROUP_DEPTH > 1 ? 4 : 1;

// A panel's part of B stays in the L1 cache (that of several blocks of depth in L2) while every group of rows passes over
// it, and each group asks for its share of the next one: packed long ago, it may come from far away.
template <class P, class T = Sum<P>>
void multiply(const P* a, const P* panels, std::ptrdiff_t panel_stride, std::int64_t rows, std::int64_t depth,
              std::int64_t columns, Start start, const T* bias, char* c, std::ptrdiff_t c_row_stride) {
    constexpr auto size = static_cast<std::ptrdiff_t>(sizeof(P));
    const ProductRegisters<P> registers;
    const std::int64_t panels_in_all = panel_count(columns);
    const std::int64_t a_block = rows * ROW_STRIDE; // from a block of depths of a row to the next
    // Bytes of a panel that a group of rows asks for with each depth.
    const std::ptrdiff_t share = PANEL * size * GROUP_ROWS / (rows < GROUP_ROWS ? GROUP_ROWS : rows);
    for (std::int64_t p = 0; p < panels_in_all; ++p) {
        const std::int64_t first = p * PANEL;
        // The one after the last: the next depths of the first.
        const std::ptrdiff_t next = p + 1 < panels_in_all ? panel_stride : depth * PANEL - p * panel_stride;
        const int here = smaller(PANEL, columns - first);
        for (std::int64_t r = 0; r < rows; r += GROUP_ROWS) {
            const TileOperands<P> operands = {a + r * ROW_STRIDE,
                                              reinterpret_cast<const char*>(panels + p * panel_stride),
                                              PANEL * size,
                                              0, // one panel at a time
                                              depth,
                                              DEPTH_BLOCK,
                                              c + r * c_row_stride +
                                                  first * static_cast<std::ptrdiff_t>(sizeof(T)),
                                              c_row_stride,
                                              start,
                                              start == Start::bias ? bias + first : nullptr,
                                              next * size + r / GROUP_ROWS * depth * share,
                                              share,
                                              a_block};
            group_product<true>(smaller(GROUP_ROWS, rows - r), here, operands);
        }
    }
}

// The same for few rows of A, ROWS at most, which leave no time to prepare B: streams B once, STEP depths (of P) by
// STRIP columns at a time, copied by `pack` to P, TOGETHER depths in one, where they are not P already. The sums stay
// in a strip of scratch that the L1 cache holds. B (depth, columns) has rows of contiguous S.
template <class S, int TOGETHER, int STEP, int STRIP, int ROWS = TILE_ROWS, class Pack, class P,
          class T = Sum<P>>
NPATTN_INLINE void multiply_strips(Pack pack, const P* a, const char* b, std::ptrdiff_t b_depth_stride,
                                   std::int64_t rows, std::int64_t depth, std::int64_t columns, Start start,
                                   const T* bias, char* c, std::ptrdiff_t c_row_stride) {
    constexpr auto size = static_cast<std::ptrdiff_t>(sizeof(T));
    constexpr std::ptrdiff_t element = sizeof(S);
    constexpr bool copies = sizeof(S) != sizeof(P);
    constexpr std::int64_t step = STEP, strip_columns = STRIP;
    constexpr bool ahead =
        ROWS == 1 && !copies; // little to do for each line: the lines of the next steps are asked for
    constexpr int vectors = ahead ? 2 * TILE_VECTORS : TILE_VECTORS; // in panels no more than one
    alignas(64) T strip[ROWS * strip_columns];
    alignas(64) P panels[copies ? step * strip_columns : 1];
    for (std::int64_t first = 0; first < columns; first += strip_columns) {
        const std::int64_t width = smaller(strip_columns, columns - first);
        std::int64_t d = 0;
        do {
            const char* rows_of_b = b + d * b_depth_stride + first * element;
            const std::int64_t depths = smaller(step * TOGETHER, depth - d);
            if constexpr (copies) {
                pack(rows_of_b, b_depth_stride, element, depths, width, 0, panel_count(width), panels,
                     step * PANEL);
            }
            const TileOperands<P> operands = {a + d / TOGETHER,
                                              copies ? reinterpret_cast<const char*>(panels) : rows_of_b,
                                              copies ? PANEL * size : b_depth_stride,
                                              copies ? step * PANEL * size : PANEL * size,
                                              (depths + TOGETHER - 1) / TOGETHER,
                                              step,
                                              reinterpret_cast<char*>(strip),
                                              strip_columns * size,
                                              d == 0 ? Start::zero : Start::resume,
                                              nullptr,
                                              2 * step * b_depth_stride,
                                              b_depth_stride};
            if constexpr (ahead) {
                column_product<1, vectors, true>(operands, 0, width);
            } else {
                row_product<ROWS, vectors>(static_cast<int>(rows), width, operands);
            }
            d += step * TOGETHER;
        } while (d < depth);
        for (std::int64_t r = 0; r < rows; ++r) {
            for (std::int64_t j = 0; j < width; j += Vec<T>::lanes) {
                const int n = smaller(Vec<T>::lanes, width - j);
                char* to = c + r * c_row_stride + (first + j) * size;
                Vec<T> sum = load_first<T>(strip + r * strip_columns + j, n);
                if (start == Start::add) sum = load_first<T>(to, n) + sum;
                if (start == Start::bias) sum = sum + load_first<T>(bias + first + j, n);
                store_first(to, sum, n);
            }
        }
    }
}

} // namespace
} // namespace npattn::NPATTN_ISA
