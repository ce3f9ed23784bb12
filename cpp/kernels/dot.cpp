// What multiplies bfloat16 pairs as they are: compiled only for the ISAs with a dot product.

#include "dispatch/kernel_table.hpp"
#include "simd/contract.hpp"

namespace npattn::NPATTN_ISA {
namespace {

constexpr int CHAINS = TILE_ROWS * TILE_VECTORS; // as in ceiling.cpp

// chain[i] = chain[i] + factor * term + term * term, `steps` times over, and the sum of the chains.
float multiply_add(std::int64_t steps, float factor, float term) {
    const BFloat16Pair factors = {narrow<BFloat16>(factor), narrow<BFloat16>(term)};
    const BFloat16Pair terms = {narrow<BFloat16>(term), narrow<BFloat16>(term)};
    BFloat16Pair lanes[Vec<float>::lanes];
    for (BFloat16Pair& lane : lanes) lane = factors;
    const Vec<BFloat16Pair> row = load<BFloat16Pair>(lanes);
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
const DotTable dot_table = {{4 * CHAINS * Vec<float>::lanes, multiply_add}};

} // namespace npattn::NPATTN_ISA
