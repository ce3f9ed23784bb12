#pragma once
// Products of a group of rows: those of tile.hpp or, where the CPU multiplies tiles of matrices, of its tile registers:
// C (rows, columns) = A (rows, depth) B (depth, columns), 32 rows by a panel at a time, four tiles of C to two of A and
// two of B. The products of sixteen P of depth are added up and then added to C; an element of C has the same bits
// wherever rows and columns are cut.

#include "kernels/tile.hpp"

namespace npattn::NPATTN_ISA {
namespace {

struct NoRegisters {
    NoRegisters() {} // its objects are for their lives alone
};

#ifdef NPATTN_TILES

constexpr int SIDE = 16; // rows of a tile, and elements of 32 bits in one

// Whether products of P use tile registers.
template <class P> constexpr bool IN_TILES = false;
template <> constexpr bool IN_TILES<HalfPair> = true;
template <> constexpr bool IN_TILES<Int8Quad> = true;

// What lives while they do.
template <bool TILES> struct RegistersOf { using type = NoRegisters; };
template <> struct RegistersOf<true> { using type = TileRegisters; };
template <class P> using ProductRegisters = typename RegistersOf<IN_TILES<P>>::type;

// Steps of work beside that go with four products of tiles.
constexpr int BESIDE_STEPS = 4;

// One panel, whole in B and C. The tiles of C are 0 to 3, row by row; A's are 4 and 5, B's 6 and 7.
template <int ROW_TILES, bool AHEAD, class P, class Beside>
NPATTN_INLINE void tiles_of_panel(const TileOperands<P>& operands, const char* b, char* c,
                                  std::ptrdiff_t c_stride, Start start, const Sum<P>* bias, Beside& beside) {
    constexpr std::ptrdiff_t width = SIDE * sizeof(P), a_stride = ROW_STRIDE * sizeof(P);
    const auto each_tile = [](auto body) NPATTN_BODY {
        body(Number<0>{}, Number<0>{}, Number<0>{});
        body(Number<1>{}, Number<0>{}, Number<1>{});
        if constexpr (ROW_TILES == 2) {
            body(Number<2>{}, Number<1>{}, Number<0>{});
            body(Number<3>{}, Number<1>{}, Number<1>{});
        }
    };
    each_tile([&](auto number, auto row, auto column) NPATTN_BODY {
        constexpr int n = decltype(number)::value, i = decltype(row)::value, j = decltype(column)::value;
        if (start == Start::zero) return tile_zero<n>();
        if (start == Start::bias) return tile_load<n>(bias + j * SIDE, 0);
        tile_load<n>(c + i * SIDE * c_stride + j * width, c_stride);
    });
    const auto multiply_add = [&](const char* a, const char* rows, std::ptrdiff_t stride) NPATTN_BODY {
        tile_load<4>(a, a_stride);
        tile_load<6>(rows, stride);
        tile_load<7>(rows + width, stride);
        if constexpr (ROW_TILES == 2) tile_load<5>(a + SIDE * a_stride, a_stride);
        tile_dot<0, 4, 6>(P());
        tile_dot<1, 4, 7>(P());
        if constexpr (ROW_TILES == 2) {
            tile_dot<2, 5, 6>(P());
            tile_dot<3, 5, 7>(P());
        }
    };
    const char* a = reinterpret_cast<const char*>(operands.a);
    [[maybe_unused]] const char* ahead = b + operands.ahead;
    std::int64_t depth = operands.depth, block = DEPTH_BLOCK; // what is left of them
    const auto begin_step = [&]() NPATTN_BODY {
        if (block == 0) {
            a += (operands.a_block - DEPTH_BLOCK) * static_cast<std::ptrdiff_t>(sizeof(P));
            block = DEPTH_BLOCK;
        }
        block -= SIDE;
    };
    for (; depth >= SIDE; depth -= SIDE, a += width, b += SIDE * operands.b_stride) {
        begin_step();
        if constexpr (AHEAD) {
            for (std::ptrdiff_t byte = 0; byte < SIDE * operands.ahead_stride; byte += 64)
                __builtin_prefetch(ahead + byte, 0, 2);
            ahead += SIDE * operands.ahead_stride;
        }
        multiply_add(a, b, operands.b_stride);
        if constexpr (Beside::every > 0) {
            for (int step = 0; step < BESIDE_STEPS && beside.left(); ++step) beside.step();
        }
    }
    if (depth > 0) { // B goes on with zeros here, and A does where 0 times anything may not be 0
        constexpr std::ptrdiff_t row_bytes = PANEL * sizeof(P);
        alignas(64) char rest[SIDE * row_bytes] = {};
        for (std::int64_t d = 0; d < depth; ++d)
            __builtin_memcpy(rest + d * row_bytes, b + d * operands.b_stride, row_bytes);
        begin_step();
        multiply_add(a, rest, row_bytes);
    }
    each_tile([&](auto number, auto row, auto column) NPATTN_BODY {
        constexpr int n = decltype(number)::value, i = decltype(row)::value, j = decltype(column)::value;
        tile_store<n>(c + i * SIDE * c_stride + j * width, c_stride);
    });
}

// At most 32 rows; B is packed. A is copied with room for whole tiles: what lies in rows past `rows` does not matter,
// past the depth there are zeros where P is not integers. Sums go on from block to block of depth: Start::add is resume.
template <bool AHEAD, class P, class Beside, class T = Sum<P>>
NPATTN_NOINLINE void tile_product(int rows, std::int64_t columns, const TileOperands<P>& operands,
                                  Beside& beside) {
    alignas(64) T block[2 * SIDE * PANEL]; // of C where it has no whole tiles
    for (std::int64_t column = 0; column < columns; column += PANEL) {
        const char* const b = operands.b + column / PANEL * operands.b_panel;
        char* const c = operands.c + column * static_cast<std::ptrdiff_t>(sizeof(T));
        const int here = smaller(PANEL, columns - column);
        const auto multiply_panel = [&](char* to, std::ptrdiff_t stride, const T* bias) NPATTN_BODY {
            if (rows > SIDE) {
                tiles_of_panel<2, AHEAD>(operands, b, to, stride, operands.start, bias, beside);
            } else {
                tiles_of_panel<1, AHEAD>(operands, b, to, stride, operands.start, bias, beside);
            }
        };
        const T* const bias = operands.start == Start::bias ? operands.bias + column : nullptr;
        if (rows % SIDE == 0 && here == PANEL) {
            multiply_panel(c, operands.c_stride, bias);
            continue;
        }
        const auto copy_rows = [&](auto copy) NPATTN_BODY {
            for (int r = 0; r < rows; ++r) copy(block + r * PANEL, c + r * operands.c_stride);
        };
        const std::size_t bytes = static_cast<std::size_t>(here) * sizeof(T);
        alignas(64) T bias_here[PANEL];
        if (bias != nullptr) __builtin_memcpy(bias_here, bias, bytes);
        if (operands.start == Start::add || operands.start == Start::resume)
            copy_rows([&](T* row, const char* from) { __builtin_memcpy(row, from, bytes); });
        multiply_panel(reinterpret_cast<char*>(block), PANEL * sizeof(T), bias_here);
        copy_rows([&](const T* row, char* to) { __builtin_memcpy(to, row, bytes); });
    }
}

#else

template <class P> constexpr bool IN_TILES = false;
template <class P> using ProductRegisters = NoRegisters;

#endif

// C (rows, columns) from A B for rows <= GROUP_ROWS, within the life of ProductRegisters<P>; of other work beside it as
// much is done as fits.
template <bool AHEAD = false, class P, class S, class Beside>
NPATTN_INLINE void group_product(int rows, std::int64_t columns, const TileOperands<P, S>& operands,
                                 Beside& beside) {
    if constexpr (IN_TILES<P>) {
        tile_product<AHEAD>(rows, columns, operands, beside);
    } else if (Beside::every == 0 || rows < TILE_ROWS) {
        row_product<TILE_ROWS, TILE_VECTORS, AHEAD>(rows, columns, operands);
    } else {
        column_product<TILE_ROWS, TILE_VECTORS, AHEAD>(operands, 0, columns, beside);
    }
}
template <bool AHEAD = false, class P, class S>
NPATTN_INLINE void group_product(int rows, std::int64_t columns, const TileOperands<P, S>& operands) {
    NothingBeside nothing;
    group_product<AHEAD>(rows, columns, operands, nothing);
}

} // namespace
} // namespace npattn::NPATTN_ISA
