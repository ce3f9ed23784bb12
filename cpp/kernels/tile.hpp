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

// B is stored as S and converted as it is loaded. Rows of A lie ROW_STRIDE elements apart, rows of B and C b_stride
// and c_stride bytes; column j of B is element j % PANEL of a row of panel j / PANEL, panels b_panel bytes apart (PANEL
// elements where B is a plain matrix).
template <class P, class S = P, class T = Sum<P>> struct TileOperands {
    const P* a;
    const char* b;
    std::ptrdiff_t b_stride, b_panel;
    std::int64_t depth, depth_block;
    char* c;
    std::ptrdiff_t c_stride;
    Start start;
    const T* bias; // read only for Start::bias
    // AHEAD: with each row of B memory is asked for as many bytes as are read of it: for the first one `ahead` bytes
    // further on, then ahead_stride after the last ones.
    std::ptrdiff_t ahead = 0, ahead_stride = 0;
    std::ptrdiff_t a_block = 0; // where there are blocks of DEPTH_BLOCK: elements from one of A to the next
};

// Work that a tile does beside its multiply-adds, a step for every `every` rows of B: none.
struct NothingBeside {
    static constexpr int every = 0;
};

// Columns [column, column_end) of C, VECTORS registers at a time; with PARTIAL, one tile whose last vector
// has `last_lanes`. With AHEAD, B is asked for ahead of time.
template <int ROWS, int VECTORS, bool PARTIAL, bool AHEAD = false, class P, class S, class Beside,
          class T = Sum<P>>
NPATTN_NOINLINE void tile(const TileOperands<P, S>& operands, std::int64_t column, std::int64_t column_end,
                          [[maybe_unused]] int last_lanes, [[maybe_unused]] Beside& beside) {
    constexpr auto size = static_cast<std::ptrdiff_t>(sizeof(T));
    constexpr std::ptrdiff_t width = Vec<T>::lanes * size;
    static_assert(sizeof(P) == sizeof(T) && sizeof(Vec<P>) == sizeof(Vec<T>));
    const auto load_vector = [&]<class Element>(Element, const char* p, int v) {
        constexpr std::ptrdiff_t step = Vec<T>::lanes * sizeof(Element);
        if constexpr (PARTIAL) {
            if (v == VECTORS - 1) return load_first<Element>(p + v * step, last_lanes);
        }
        return load<Element>(p + v * step);
    };
    const std::ptrdiff_t c_stride = operands.c_stride; // copies: a store through char* may alias anything
    const std::ptrdiff_t b_stride = operands.b_stride;
    [[maybe_unused]] const std::ptrdiff_t ahead_stride = operands.ahead_stride;
    for (; column < column_end; column += VECTORS * Vec<T>::lanes) {
        const P* a = operands.a;
        const char* b = operands.b + column / PANEL * operands.b_panel +
                        column % PANEL * static_cast<std::ptrdiff_t>(sizeof(S));
        [[maybe_unused]] const char* ahead = b + operands.ahead;
        char* const c = operands.c + column * size;
        Start start = operands.start;
        std::int64_t left = operands.depth;
        do {
            Vec<T> sums[ROWS][VECTORS];
            const auto each_sum = [&](auto body) {
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
                    for (int v = 0; v < VECTORS; ++v) body(sums[r][v], c + r * c_stride, v);
                }
            };
            const auto step = [&](auto combine) {
                Vec<P> row[VECTORS];
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; ++v) row[v] = load_vector(S(), b, v);
                if constexpr (AHEAD) {
#pragma GCC unroll 16
                    for (int byte = 0; byte < VECTORS * Vec<T>::lanes * static_cast<int>(sizeof(S));
                         byte += 64)
                        __builtin_prefetch(ahead + byte, 0, 2);
                    ahead += ahead_stride;
                }
                const auto combine_row = [&](Vec<T>(&row_sums)[VECTORS], auto x) {
#pragma GCC unroll 8
                    for (int v = 0; v < VECTORS; ++v) combine(row_sums[v], row[v], x);
                };
                // The element of a row is read from memory once for all its multiply-adds or, in every other row,
                // by each: half the instructions, but more reads than two a cycle where multiply-adds are two.
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r += 2) combine_row(sums[r], element(a + r * ROW_STRIDE));
#pragma GCC unroll 16
                for (int r = 1; r < ROWS; r += 2) combine_row(sums[r], a + r * ROW_STRIDE);
                ++a;
                b += b_stride;
            };
            std::int64_t depth = left < operands.depth_block ? left : operands.depth_block;
            left -= depth;
            if (start == Start::resume) {
                each_sum([&](Vec<T>& sum, const char* row, int v) { sum = load_vector(T(), row, v); });
            } else if (depth >
                       0) { // the first products begin the sums: no zeros to make, and none to wait for
                step([](Vec<T>& sum, Vec<P> row, auto x) { sum = mul_element(row, x); });
                --depth;
            } else {
                each_sum([](Vec<T>& sum, const char*, int) { sum = zero<T>(); });
            }
            const auto add_step = [&] {
                step([](Vec<T>& sum, Vec<P> row, auto x) { sum = fma_element(row, x, sum); });
            };
            if constexpr (Beside::every > 0) {
                for (; depth >= Beside::every && beside.left(); depth -= Beside::every) {
#pragma GCC unroll 8
                    for (int i = 0; i < Beside::every; ++i) add_step();
                    beside.step();
                }
            }
            for (; depth > 0; --depth) add_step();
            if (start == Start::add) {
                each_sum([&](Vec<T>& sum, const char* row, int v) { sum = load_vector(T(), row, v) + sum; });
            } else if (start == Start::bias) {
                const auto* bias = reinterpret_cast<const char*>(operands.bias + column);
                each_sum([&](Vec<T>& sum, const char*, int v) { sum = sum + load_vector(T(), bias, v); });
            }
            each_sum([&](const Vec<T>& sum, char* row, int v) {
                if (PARTIAL && v == VECTORS - 1) {
                    store_first(row + v * width, sum, last_lanes);
                } else {
                    store(row + v * width, sum);
                }
            });
            start = Start::add;
        } while (left > 0);
    }
}

// Registers a row, `most` or fewer, for which ROWS rows of sums and one of B take no more than the largest tile.
template <int ROWS> constexpr int row_registers(int most) {
    while (most > 1 && (ROWS + 1) * most > (TILE_ROWS + 1) * TILE_VECTORS) most /= 2;
    return most;
}

// Columns [column, columns) of C, VECTORS registers at a time as long as there are so many, then half as many;
// nothing past the last column of B and C is touched.
template <int ROWS, int VECTORS, bool AHEAD = false, class P, class S, class Beside>
NPATTN_INLINE void column_product(const TileOperands<P, S>& operands, std::int64_t column,
                                  std::int64_t columns, Beside& beside) {
    constexpr std::int64_t width = VECTORS * Vec<P>::lanes;
    const std::int64_t end = columns - (columns - column) % width;
    if (column < end) tile<ROWS, VECTORS, false, AHEAD>(operands, column, end, Vec<P>::lanes, beside);
    NothingBeside nothing;
    if constexpr (VECTORS > 1) {
        column_product<ROWS, VECTORS / 2, AHEAD>(operands, end, columns, nothing);
    } else if (end < columns) {
        tile<ROWS, 1, true, AHEAD>(operands, end, columns, static_cast<int>(columns - end), nothing);
    }
}
template <int ROWS, int VECTORS, bool AHEAD = false, class P, class S>
NPATTN_INLINE void column_product(const TileOperands<P, S>& operands, std::int64_t column,
                                  std::int64_t columns) {
    NothingBeside nothing;
    column_product<ROWS, VECTORS, AHEAD>(operands, column, columns, nothing);
}

// C (rows, columns) from A B for rows <= MAX_ROWS.
template <int MAX_ROWS, int VECTORS, bool AHEAD = false, class P, class S>
NPATTN_INLINE void row_product(int rows, std::int64_t columns, const TileOperands<P, S>& operands) {
    with_rows<MAX_ROWS>(rows, [&](auto row_count) {
        column_product<decltype(row_count)::value, VECTORS, AHEAD>(operands, 0, columns);
    });
}

} // namespace
} // namespace npattn::NPATTN_ISA
