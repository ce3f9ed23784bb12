#pragma once
// What the matrix products share: blocks of C, the ways B is met, and one block's sums over all depths. Part of the
// units that include it.

#include <algorithm>
#include <cstring>
#include <numeric>
#include <type_traits>

#include "core/parallel.hpp"
#include "dispatch/registry.hpp"
#include "ops/matmul.hpp"

namespace npattn {
namespace {

// A panel's part of B, 32 KiB of floats, stays in L1 while rows pass.
template <class P>
constexpr std::int64_t block_depth = std::is_same_v<P, HalfPair> ? 2 * DEPTH_BLOCK : DEPTH_BLOCK;

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// How many P hold `depth` depths.
template <class P> std::int64_t held(std::int64_t depth) {
    return std::is_same_v<P, HalfPair> ? ceil_div(depth, 2) : depth;
}

// C (rows, columns) = start + A (rows, depth) B (depth, columns), computed on operands copied to P: pointers and
// strides in bytes.
template <class P> struct Product {
    const char* a;
    std::ptrdiff_t a_row, a_depth;
    const char* b;
    std::ptrdiff_t b_depth, b_column;
    char* c;
    std::ptrdiff_t c_row;
    std::int64_t rows, depth, columns;
    Storage a_storage, b_storage, c_storage;

    // C is of a half type: its sums are kept elsewhere until they are whole, which a thread sees to for a block of C.
    bool narrows() const { return c_storage != STORAGE<Sum<P>>; }
    // The sums of a whole product had better be kept elsewhere too: they would be added to C several times, and its
    // rows fall on the same few sets of the L1 cache.
    bool aliases() const { return rows > 8 && depth > block_depth<P> && c_row % 2048 == 0; }
    char* c_at(std::int64_t row, std::int64_t column) const {
        return c + row * c_row + column * storage_bytes(c_storage);
    }
    // Up to `count` rows from `row` on, and up to `width` columns.
    Product part(std::int64_t row, std::int64_t count, std::int64_t column, std::int64_t width) const {
        Product of = *this;
        of.a += row * a_row;
        of.b += column * b_column;
        of.c = c_at(row, column);
        of.rows = std::min(count, rows - row);
        of.columns = std::min(width, columns - column);
        return of;
    }

    double seconds() const {
        const auto m = static_cast<double>(rows), k = static_cast<double>(depth),
                   n = static_cast<double>(columns);
        return std::max(2 * m * k * n / 60e9, (m * k + k * n + m * n) * sizeof(P) / 15e9);
    }
};

template <class P>
Product<P> product(const Operand& a, const Operand& b, const Operand& out, std::int64_t batch) {
    const int leading = out.view.dimensions - 2;
    return {a.view.data + a.view.offset(batch, leading),
            a.view.stride(-2),
            a.view.stride(-1),
            b.view.data + b.view.offset(batch, leading),
            b.view.stride(-2),
            b.view.stride(-1),
            out.view.data + out.view.offset(batch, leading),
            out.view.stride(-2),
            out.view.size(-2),
            a.view.size(-1),
            out.view.size(-1),
            a.storage,
            b.storage,
            out.storage};
}

// Rows of sums that are kept lie this many elements apart: not a power of two, see ROW_STRIDE.
constexpr std::int64_t sums_stride(std::int64_t width) { return width + 16; }

// Scratch of a thread for blocks of C up to `width` columns: copied rows, then sums.
template <class P> std::size_t copy_bytes(const GemmKernels<P>& gemm, const Product<P>& p) {
    const std::int64_t blocks =
        std::clamp<std::int64_t>(ceil_div(p.depth, block_depth<P>), 1, gemm.depth_blocks);
    return align_up(static_cast<std::size_t>(gemm.block_rows * blocks * ROW_STRIDE) * sizeof(P));
}
template <class P>
std::size_t row_scratch_bytes(const GemmKernels<P>& gemm, const Product<P>& p, std::int64_t width) {
    const auto sums =
        static_cast<std::size_t>(std::min<std::int64_t>(p.rows, gemm.block_rows) * sums_stride(width));
    return copy_bytes(gemm, p) + (p.narrows() || p.aliases() ? align_up(sums * sizeof(Sum<P>)) : 0);
}

// B as blocks of C meet it: what multiplies copied rows (count, depths [k, k + depth)) by `width` columns of it,
// `blocks` of depth at a time.
// Panels that wait ready, one every `stride`; `first` is that of the first column.
template <class P> struct ReadyPanels {
    const P* first;
    std::ptrdiff_t stride;
    std::int64_t blocks;

    void multiply(const GemmKernels<P>& gemm, const P* rows, std::int64_t count, std::int64_t k,
                  std::int64_t depth, std::int64_t width, Start start, const Sum<P>* bias, char* c,
                  std::ptrdiff_t c_row) const {
        gemm.multiply(rows, first + held<P>(k) * PANEL, stride, count, held<P>(depth), width, start, bias, c,
                      c_row);
    }
};

// Rows [row, row + count) of C over columns [column, column + width) += A B for depths [first, last) of A, which
// begin where `columns` of B do. `fresh`: this is the first depth of the product, so C starts from bias or zero;
// where C narrows, it is the whole product.
template <class P, class Columns>
void multiply_rows(const GemmKernels<P>& gemm, const Product<P>& p, std::int64_t row, std::int64_t count,
                   std::int64_t column, std::int64_t width, std::int64_t first, std::int64_t last, bool fresh,
                   const Columns& columns, const Sum<P>* bias, char* scratch) {
    using T = Sum<P>;
    P* const rows_copy = reinterpret_cast<P*>(scratch);
    const bool kept = p.narrows() || (p.aliases() && fresh && last == p.depth);
    char* const sums = kept ? scratch + copy_bytes(gemm, p) : p.c_at(row, column);
    const std::ptrdiff_t sums_row =
        kept ? sums_stride(width) * static_cast<std::ptrdiff_t>(sizeof(T)) : p.c_row;
    std::int64_t k = first;
    do {
        const std::int64_t depth = std::min(columns.blocks * block_depth<P>, last - k);
        for (std::int64_t d = 0; d < depth; d += block_depth<P>) {
            gemm.copy_rows(p.a_storage, p.a + row * p.a_row + (k + d) * p.a_depth, p.a_row, p.a_depth, count,
                           std::min(block_depth<P>, depth - d),
                           rows_copy + d / block_depth<P> * count * ROW_STRIDE);
        }
        const Start start = !fresh || k > first ? Start::add : bias ? Start::bias : Start::zero;
        columns.multiply(gemm, rows_copy, count, k - first, depth, width, start,
                         bias ? bias + column : nullptr, sums, sums_row);
        k += depth;
    } while (k < last && !stop_requested());
    if (!kept) return;
    if (!p.narrows()) {
        for (std::int64_t r = 0; r < count; ++r)
            std::memcpy(p.c_at(row + r, column), sums + r * sums_row,
                        static_cast<std::size_t>(width) * sizeof(T));
        return;
    }
    if constexpr (std::is_same_v<T, float>) {
        active_table().gemm->narrow_rows(p.c_storage, reinterpret_cast<const float*>(sums),
                                         sums_stride(width), count, width, p.c_at(row, column), p.c_row);
    }
}

// How C is cut into blocks, a task each, of nearly equal rows and columns: enough tasks to end together, but few
// enough that A is not copied too often. `unit` columns, as the heads of a rotation are wide, stay together.
struct Blocks {
    static constexpr std::int64_t tasks_a_thread = 16;
    static constexpr std::int64_t most_columns = 4096; // whose sums a thread may keep

    std::int64_t rows, columns; // of one block, whole tiles and panels; the last ones have less
    std::int64_t row_count, column_count;

    Blocks(std::int64_t all_rows, std::int64_t all_columns, int tile_rows, int block_rows, int threads,
           std::int64_t unit = 1) {
        rows =
            ceil_div(ceil_div(all_rows, ceil_div(all_rows, std::int64_t{block_rows})), tile_rows) * tile_rows;
        row_count = ceil_div(all_rows, rows);
        const std::int64_t columns_wanted =
            std::max(ceil_div(all_columns, most_columns),
                     threads == 1 ? 1 : ceil_div(tasks_a_thread * std::int64_t{threads}, row_count));
        const std::int64_t step = std::lcm(PANEL, unit);
        columns =
            step * ceil_div(std::max<std::int64_t>(4 * PANEL, ceil_div(all_columns, columns_wanted)), step);
        column_count = ceil_div(all_columns, columns);
    }
};

} // namespace
} // namespace npattn
