#pragma once
// Dot products of vectors that are contiguous each: sums in the lanes of registers, added up at the end. Few rows of A
// meet the columns of B so, as they lie in memory.

#include "kernels/each_vector.hpp"
#include "kernels/tile.hpp"

namespace npattn::NPATTN_ISA {
namespace {

// Element i: the sum of vector i of VECTORS that lie `stride` vectors apart; lanes / VECTORS elements for each are
// left to add up. The additions are the same wherever the vector lies.
template <int VECTORS, class T> NPATTN_INLINE Vec<T> add_up(const Vec<T>* vectors, std::ptrdiff_t stride) {
    if constexpr (VECTORS == 1) {
        return *vectors;
    } else {
        Vec<T> a = add_up<VECTORS / 2>(vectors, stride);
        Vec<T> b = add_up<VECTORS / 2>(vectors + VECTORS / 2 * stride, stride);
        deinterleave(a, b);
        return a + b;
    }
}

// Rows and columns whose products are summed in registers together, with as many registers more as there are rows, and
// one.
constexpr int DOT_ROWS = TILE_ROWS * TILE_VECTORS >= 24 ? 4 : TILE_ROWS * TILE_VECTORS >= 12 ? 3 : 2;
constexpr int DOT_COLUMNS = TILE_ROWS * TILE_VECTORS / DOT_ROWS;

// How a column of B, stored as S, is read to meet rows of P: a register of `elements` S at a time.
template <class P, class S> struct Depths {
    static constexpr int elements = Vec<P>::lanes;
    static constexpr int together = 1; // elements in one P

    static NPATTN_INLINE Vec<P> read(const char* p, Whole) { return load<S>(p); }
    static NPATTN_INLINE Vec<P> read(const char* p, int count) { return load_first<S>(p, count); }
};
#ifdef NPATTN_DOT
template <> struct Depths<HalfPair, BFloat16> {
    static constexpr int elements = 2 * Vec<HalfPair>::lanes;
    static constexpr int together = 2;

    static NPATTN_INLINE Vec<HalfPair> read(const char* p, Whole) { return load<HalfPair>(p); }
    static NPATTN_INLINE Vec<HalfPair> read(const char* p, int count) { return load_halves(p, count); }
};
#endif

// sums[c * stride + r] = what is left to add up of row r of A and column c of B. Rows of A are copied, DEPTH_BLOCK P at
// a time, the blocks `a_block` P apart; columns of B are `b_column` bytes apart. `depth` are elements of B.
template <int ROWS, int COLUMNS, class S, class P, class T = Sum<P>>
NPATTN_NOINLINE void dot_tile(const P* a, std::ptrdiff_t a_block, const char* b, std::ptrdiff_t b_column,
                              std::int64_t depth, Vec<T>* sums, std::ptrdiff_t stride) {
    using D = Depths<P, S>;
    constexpr auto size = static_cast<std::ptrdiff_t>(sizeof(S));
    constexpr std::int64_t block = DEPTH_BLOCK * D::together;
    Vec<T> sum[ROWS][COLUMNS];
#pragma GCC unroll 32
    for (int i = 0; i < ROWS * COLUMNS; ++i) sum[i / COLUMNS][i % COLUMNS] = zero<T>();
    for (; depth > 0; depth -= block, a += a_block, b += block * size) {
        const auto step = [&](std::int64_t d, auto read_a, auto part) NPATTN_BODY {
            Vec<P> x[ROWS];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) x[r] = keep(read_a(a + r * ROW_STRIDE + d / D::together));
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; ++c) {
                const Vec<P> y = keep(D::read(b + c * b_column + d * size, part));
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) sum[r][c] = fma_element(x[r], y, sum[r][c]);
            }
        };
        const int count = smaller(depth, block);
        int d = 0;
        for (; d + D::elements <= count; d += D::elements)
            step(
                d, [](const P* p) NPATTN_BODY { return load<P>(p); }, Whole{});
        if (const int rest = count - d; rest > 0) {
            const int held = (rest + D::together - 1) / D::together;
            step(
                d, [&](const P* p) NPATTN_BODY { return load_first<P>(p, held); }, rest);
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < ROWS * COLUMNS; ++i)
        sums[i % COLUMNS * stride + i / COLUMNS] = sum[i / COLUMNS][i % COLUMNS];
}

// The same for columns [first, columns) and any number of rows: COLUMNS at a time as long as there are so many, then
// fewer. A column is read from memory once: for the rows after the first few it comes from a cache.
template <int COLUMNS, class S, class P, class T = Sum<P>>
NPATTN_INLINE void dot_columns(const P* a, const char* b, std::ptrdiff_t b_column, int rows,
                               std::int64_t depth, int first, int columns, Vec<T>* sums) {
    const int groups = (rows + DOT_ROWS - 1) / DOT_ROWS;
    const int together = (rows + groups - 1) / groups;
    int c = first;
    for (; c + COLUMNS <= columns; c += COLUMNS) {
        for (int r = 0; r < rows; r += together) {
            with_rows<DOT_ROWS>(smaller(together, rows - r), [&](auto row_count) NPATTN_BODY {
                dot_tile<decltype(row_count)::value, COLUMNS, S>(
                    a + r * ROW_STRIDE, static_cast<std::ptrdiff_t>(rows) * ROW_STRIDE, b + c * b_column,
                    b_column, depth, sums + c * rows + r, rows);
            });
        }
    }
    if constexpr (COLUMNS > 1)
        dot_columns<(COLUMNS > 4 ? 4 : COLUMNS / 2), S>(a, b, b_column, rows, depth, c, columns, sums);
}

// GemmKernels::multiply_dots for B stored as S.
template <class S, class P, class T = Sum<P>>
void multiply_dots(const P* a, const char* b, std::ptrdiff_t b_column, std::int64_t rows, std::int64_t depth,
                   std::int64_t columns, Start start, const T* bias, char* c, std::ptrdiff_t c_row) {
    constexpr int lanes = Vec<T>::lanes;
    Vec<T> sums[lanes * MOST_DOT_ROWS];
    for (std::int64_t j = 0; j < columns; j += lanes) {
        const int width = smaller(lanes, columns - j);
        for (std::int64_t i = width * rows; i < lanes * rows; ++i) sums[i] = zero<T>();
        dot_columns<DOT_COLUMNS, S>(a, b + j * b_column, b_column, static_cast<int>(rows), depth, 0, width,
                                    sums);
        for (std::int64_t r = 0; r < rows; ++r) {
            char* const to = c + r * c_row + j * static_cast<std::ptrdiff_t>(sizeof(T));
            Vec<T> sum = add_up<lanes>(sums + r, rows);
            if (start == Start::add) sum = load_first<T>(to, width) + sum;
            if (start == Start::bias) sum = sum + load_first<T>(bias + j, width);
            store_first(to, sum, width);
        }
    }
}

} // namespace
} // namespace npattn::NPATTN_ISA
