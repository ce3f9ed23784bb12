// What multiplies bfloat16 pairs as they are: compiled only for the ISAs with a dot product.

#include "kernels/dots.hpp"
#include "kernels/gemm.hpp"
#include "kernels/pairs.hpp"

namespace npattn::NPATTN_ISA {
namespace {

void pack_panels(Storage, const char* matrix, std::ptrdiff_t depth_stride, std::ptrdiff_t column_stride,
                 std::int64_t depth, std::int64_t columns, std::int64_t first, std::int64_t last,
                 HalfPair* panels, std::ptrdiff_t panel_stride) {
    pack_pairs(matrix, depth_stride, column_stride, depth, columns, first, last, panels, panel_stride);
}

void copy_rows(Storage, const char* matrix, std::ptrdiff_t row_stride, std::ptrdiff_t depth_stride,
               std::int64_t rows, std::int64_t depth, HalfPair* copy) {
    copy_pairs(matrix, row_stride, depth_stride, rows, depth, copy);
}

void multiply_direct(Storage, const HalfPair* a, const char* b, std::ptrdiff_t b_depth_stride,
                     std::int64_t rows, std::int64_t depth, std::int64_t columns, Start start,
                     const float* bias, char* c, std::ptrdiff_t c_row_stride) {
#ifdef NPATTN_TILES
    constexpr std::int64_t step = 4 * GROUP_DEPTH, strip = 128; // pairs, columns: they stay in L1
    alignas(64) HalfPair panels[step * strip];
    const ProductRegisters<HalfPair> registers;
    for (std::int64_t first = 0; first < columns; first += strip) {
        const std::int64_t width = smaller(strip, columns - first);
        Start from = start;
        for (std::int64_t d = 0; d == 0 || d < depth; d += 2 * step, from = Start::add) {
            const std::int64_t depths = smaller(2 * step, depth - d);
            pack_pairs(b + d * b_depth_stride + first * HALF, b_depth_stride, HALF, depths, width, 0,
                       panel_count(width), panels, step * PANEL);
            const TileOperands<HalfPair> operands = {a + d / 2,
                                                     reinterpret_cast<const char*>(panels),
                                                     PANEL * sizeof(HalfPair),
                                                     step * PANEL * sizeof(HalfPair),
                                                     (depths + 1) / 2,
                                                     DEPTH_BLOCK,
                                                     c + first * static_cast<std::ptrdiff_t>(sizeof(float)),
                                                     c_row_stride,
                                                     from,
                                                     from == Start::bias ? bias + first : nullptr};
            group_product(static_cast<int>(rows), width, operands);
        }
    }
#else
    multiply_strips<BFloat16, 2, 8, 512>(pack_pairs, a, b, b_depth_stride, rows, depth, columns, start, bias,
                                         c, c_row_stride);
#endif
}

void multiply_dots(Storage, const HalfPair* a, const char* b, std::ptrdiff_t b_column_stride,
                   std::int64_t rows, std::int64_t depth, std::int64_t columns, Start start,
                   const float* bias, char* c, std::ptrdiff_t c_row_stride) {
    multiply_dots<BFloat16>(a, b, b_column_stride, rows, depth, columns, start, bias, c, c_row_stride);
}

// For the ceiling: sums[i] = sums[i] + factor * term + term * term, `steps` times over; then their sum.
#ifdef NPATTN_TILES

constexpr int STEP_OPERATIONS = 4 * 2 * SIDE * SIDE * 2 * SIDE;

float multiply_add(std::int64_t steps, float factor, float term) {
    const HalfPair factors = {narrow<BFloat16>(factor).bits, narrow<BFloat16>(term).bits};
    const HalfPair terms = {narrow<BFloat16>(term).bits, narrow<BFloat16>(term).bits};
    HalfPair a[SIDE], b[SIDE];
    for (int i = 0; i < SIDE; ++i) a[i] = factors, b[i] = terms;
    const ProductRegisters<HalfPair> registers;
    tile_load<4>(a, 0);
    tile_load<5>(a, 0);
    tile_load<6>(b, 0);
    tile_load<7>(b, 0);
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (std::int64_t step = 0; step < steps; ++step) {
        tile_dot<0, 4, 6>(HalfPair());
        tile_dot<1, 4, 7>(HalfPair());
        tile_dot<2, 5, 6>(HalfPair());
        tile_dot<3, 5, 7>(HalfPair());
    }
    float sums[SIDE * SIDE];
    tile_store<0>(sums, SIDE * sizeof(float));
    return sums[0];
}

#else

constexpr int CHAINS = TILE_ROWS * TILE_VECTORS; // as in ceiling.cpp
constexpr int STEP_OPERATIONS = 4 * CHAINS * Vec<float>::lanes;

float multiply_add(std::int64_t steps, float factor, float term) {
    const HalfPair factors = {narrow<BFloat16>(factor).bits, narrow<BFloat16>(term).bits};
    const HalfPair terms = {narrow<BFloat16>(term).bits, narrow<BFloat16>(term).bits};
    HalfPair lanes[Vec<float>::lanes];
    for (HalfPair& lane : lanes) lane = factors;
    const Vec<HalfPair> row = load<HalfPair>(lanes);
    Vec<float> chains[CHAINS];
    const auto each_chain = [&](auto body) { // unrolled, or the chains lie in memory
#pragma GCC unroll 32
        for (int i = 0; i < CHAINS; ++i) body(i);
    };
    each_chain([&](int i) { chains[i] = broadcast<float>(static_cast<float>(i)); });
    for (std::int64_t step = 0; step < steps; ++step)
        each_chain([&](int i) { chains[i] = fma_element(row, &terms, chains[i]); });
    Vec<float> sum = zero<float>();
    each_chain([&](int i) { sum = sum + chains[i]; });
    return reduce_add(sum);
}

#endif

} // namespace

extern const DotTable dot_table;
const DotTable dot_table = {{GROUP_ROWS, BLOCK_ROWS, DEPTH_BLOCKS, pack_panels, copy_rows, multiply<HalfPair>,
                             multiply_direct, Vec<float>::lanes, multiply_dots},
                            {STEP_OPERATIONS, multiply_add}};

} // namespace npattn::NPATTN_ISA
