#pragma once
// Matrix products on copied operands: C (rows, columns) from A (rows, depth) B (depth, columns).

#include "kernels/tile.hpp"

namespace npattn::NPATTN_ISA {
namespace {

// A panel's part of B stays in the L1 cache while every group of rows passes over it.
template <class P, class T = Sum<P>>
void multiply(const P* a, const P* panels, std::ptrdiff_t panel_stride, std::int64_t rows, std::int64_t depth,
              std::int64_t columns, Start start, const T* bias, char* c, std::ptrdiff_t c_row_stride) {
    for (std::int64_t p = 0; p < panel_count(columns); ++p) {
        const std::int64_t first = p * PANEL;
        const int here = smaller(PANEL, columns - first);
        for (std::int64_t r = 0; r < rows; r += TILE_ROWS) {
            const TileOperands<P> operands = {a + r * ROW_STRIDE,
                                              reinterpret_cast<const char*>(panels + p * panel_stride),
                                              PANEL * sizeof(P),
                                              0, // one panel at a time
                                              depth,
                                              DEPTH_BLOCK,
                                              c + r * c_row_stride +
                                                  first * static_cast<std::ptrdiff_t>(sizeof(T)),
                                              c_row_stride,
                                              start,
                                              start == Start::bias ? bias + first : nullptr};
            row_product<TILE_ROWS, TILE_VECTORS>(smaller(TILE_ROWS, rows - r), here, operands);
        }
    }
}

} // namespace
} // namespace npattn::NPATTN_ISA
