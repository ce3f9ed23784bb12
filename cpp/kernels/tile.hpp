#pragma once
// The register tile under every matrix product: C (ROWS, VECTORS registers) = A (ROWS, depth) B (depth, ...),
// stored over or added to C. Depth is summed one element after the other, so an element of C has the same
// bits however rows and columns are cut into tiles. Long sums are cut at fixed depths (`depth_block`) and
// their parts added, which keeps errors small.

#include "dispatch/kernel_table.hpp"
#include "kernels/pack.hpp"

#if defined(_MSC_VER)
#define NPATTN_NOINLINE __declspec(noinline)
#else
#define NPATTN_NOINLINE __attribute__((noinline))
#endif

namespace npattn::NPATTN_ISA {
namespace {

template <int N> struct Number { static constexpr int value = N; };

// Calls body(Number<rows>{}) for 1 <= rows <= MAX.
template <int MAX, class Body> NPATTN_INLINE void with_rows(int rows, Body&& body) {
    if constexpr (MAX > 1) {
        if (rows < MAX) return with_rows<MAX - 1>(rows, body);
    }
    body(Number<MAX>{});
}

// Cuts `columns` into tiles: body(Number<vectors>{}, first column, lanes of the last vector). The last tile
// may be partial.
template <class T, int VECTORS, class Body>
NPATTN_INLINE void for_columns(std::int64_t columns, Body&& body) {
    constexpr int lanes = Vec<T>::lanes;
    std::int64_t c = 0;
    for (; c + VECTORS * lanes <= columns; c += VECTORS * lanes) body(Number<VECTORS>{}, c, lanes);
    if constexpr (VECTORS > 1) {
        for (; c < columns; c += lanes) body(Number<1>{}, c, smaller(lanes, columns - c));
    } else if (c < columns) {
        body(Number<1>{}, c, static_cast<int>(columns - c));
    }
}

// A element (r, d) is a[r * ROW + d * DEPTH]; rows of B and C lie b_stride and c_stride bytes apart.
template <class T> struct TileOperands {
    const T* a;
    const char* b;
    std::ptrdiff_t b_stride;
    std::int64_t depth, depth_block;
    char* c;
    std::ptrdiff_t c_stride;
    Start start;
    const T* bias; // of the tile's first column; read only for Start::bias
};

template <int ROWS, int VECTORS, int ROW, int DEPTH, bool PARTIAL, class T>
NPATTN_NOINLINE void tile(const TileOperands<T>& operands, [[maybe_unused]] int last_lanes) {
    constexpr std::ptrdiff_t width = Vec<T>::lanes * sizeof(T);
    const auto load_vector = [&](const char* p, int v) {
        if constexpr (PARTIAL) {
            if (v == VECTORS - 1) return load_first<T>(p + v * width, last_lanes);
        }
        return load<T>(p + v * width);
    };
    char* const c = operands.c; // copies: a store through char* may alias anything
    const std::ptrdiff_t c_stride = operands.c_stride;
    const T* a = operands.a;
    const char* b = operands.b;
    const std::ptrdiff_t b_stride = operands.b_stride;
    Start start = operands.start;
    std::int64_t left = operands.depth;
    do {
        Vec<T> sums[ROWS][VECTORS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) {
                sums[r][v] = start == Start::resume ? load_vector(c + r * c_stride, v) : zero<T>();
            }
        }
        const std::int64_t depth = left < operands.depth_block ? left : operands.depth_block;
        left -= depth;
        for (std::int64_t d = depth; d > 0; --d) {
            Vec<T> row[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) row[v] = load_vector(b, v);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                const Vec<T> x = broadcast<T>(a[r * ROW]);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; ++v) sums[r][v] = fma(x, row[v], sums[r][v]);
            }
            a += DEPTH;
            b += b_stride;
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) {
                char* p = c + r * c_stride + v * width;
                if (start == Start::add) sums[r][v] = load_vector(c + r * c_stride, v) + sums[r][v];
                if (start == Start::bias) {
                    sums[r][v] = sums[r][v] + load_vector(reinterpret_cast<const char*>(operands.bias), v);
                }
                if (PARTIAL && v == VECTORS - 1) {
                    store_first(p, sums[r][v], last_lanes);
                } else {
                    store(p, sums[r][v]);
                }
            }
        }
        start = Start::add;
    } while (left > 0);
}

// C (rows, columns) from A B for rows <= MAX_ROWS; B and C rows hold `columns` elements, none past them is
// touched.
template <int MAX_ROWS, int VECTORS, int ROW, int DEPTH, class T>
NPATTN_INLINE void row_product(int rows, std::int64_t columns, const TileOperands<T>& operands) {
    with_rows<MAX_ROWS>(rows, [&](auto row_count) {
        for_columns<T, VECTORS>(columns, [&](auto vectors, std::int64_t c, int last_lanes) {
            TileOperands<T> here = operands;
            here.b += c * static_cast<std::ptrdiff_t>(sizeof(T));
            here.c += c * static_cast<std::ptrdiff_t>(sizeof(T));
            if (operands.start == Start::bias) here.bias += c;
            if (last_lanes == Vec<T>::lanes) {
                tile<decltype(row_count)::value, decltype(vectors)::value, ROW, DEPTH, false>(here,
                                                                                              last_lanes);
            } else {
                tile<decltype(row_count)::value, 1, ROW, DEPTH, true>(here, last_lanes);
            }
        });
    });
}

} // namespace
} // namespace npattn::NPATTN_ISA
