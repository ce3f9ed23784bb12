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
    multiply_strips<BFloat16, 2, 8, 512>(pack_pairs, a, b, b_depth_stride, rows, depth, columns, start, bias,
                                         c, c_row_stride);
}

void multiply_dots(Storage, const HalfPair* a, const char* b, std::ptrdiff_t b_column_stride,
                   std::int64_t rows, std::int64_t depth, std::int64_t columns, Start start,
                   const float* bias, char* c, std::ptrdiff_t c_row_stride) {
    multiply_dots<BFloat16>(a, b, b_column_stride, rows, depth, columns, start, bias, c, c_row_stride);
}

constexpr int CHAINS = TILE_ROWS * TILE_VECTORS; // as in ceiling.cpp

// chain[i] = chain[i] + factor * term + term * term, `steps` times over, and the sum of the chains.
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

} // namespace

extern const DotTable dot_table;
const DotTable dot_table = {{TILE_ROWS, pack_panels, copy_rows, multiply<HalfPair>, multiply_direct,
                             Vec<float>::lanes, multiply_dots},
                            {4 * CHAINS * Vec<float>::lanes, multiply_add}};

} // namespace npattn::NPATTN_ISA
