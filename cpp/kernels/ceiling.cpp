// What the machine can do at most: multiply-adds with nothing else in the way, and reads with next to
// nothing computed. Benchmarks state every other kernel's speed as a share of these.

#include "dispatch/kernel_table.hpp"
#include "simd/contract.hpp"

namespace npattn::NPATTN_ISA {
namespace {

// The accumulators of the matrix kernels' tile: as many chains as the registers hold, more than latency x
// throughput.
constexpr int CHAINS = TILE_ROWS * TILE_VECTORS;

// chain[i] = chain[i] * factor + term, `steps` times over, for CHAINS independent chains; their sum, so that
// none is left out. With |factor| < 1 the chains converge: no overflow, no denormals. They start from
// different values, else the compiler may compute one and copy it.
template <class T> T multiply_add(std::int64_t steps, T factor, T term) {
    const Vec<T> factors = broadcast<T>(factor);
    const Vec<T> terms = broadcast<T>(term);
    Vec<T> chains[TILE_ROWS][TILE_VECTORS];
    for (int i = 0; i < TILE_ROWS; ++i) {
        for (int j = 0; j < TILE_VECTORS; ++j)
            chains[i][j] = broadcast<T>(static_cast<T>(i * TILE_VECTORS + j));
    }
    for (std::int64_t step = 0; step < steps; ++step) {
        for (int i = 0; i < TILE_ROWS; ++i) {
            for (int j = 0; j < TILE_VECTORS; ++j) chains[i][j] = fma(chains[i][j], factors, terms);
        }
    }
    Vec<T> sum = zero<T>();
    for (int i = 0; i < TILE_ROWS; ++i) {
        for (int j = 0; j < TILE_VECTORS; ++j) sum = sum + chains[i][j];
    }
    return reduce_add(sum);
}

// The sum of the floats in data (bytes): every byte is read once. The last bytes % sizeof(float) are left
// out.
float read_sum(const char* data, std::int64_t bytes) {
    constexpr int streams = 8;
    constexpr std::int64_t vector_bytes = Vec<float>::lanes * sizeof(float);
    Vec<float> sums[streams];
    for (int i = 0; i < streams; ++i) sums[i] = zero<float>();
    std::int64_t done = 0;
    for (; done + streams * vector_bytes <= bytes; done += streams * vector_bytes) {
        for (int i = 0; i < streams; ++i) sums[i] = sums[i] + load<float>(data + done + i * vector_bytes);
    }
    for (; done + vector_bytes <= bytes; done += vector_bytes) sums[0] = sums[0] + load<float>(data + done);
    const int rest = static_cast<int>((bytes - done) / static_cast<std::int64_t>(sizeof(float)));
    sums[0] = sums[0] + load_first<float>(data + done, rest);
    for (int i = 1; i < streams; ++i) sums[0] = sums[0] + sums[i];
    return reduce_add(sums[0]);
}

template <class T> constexpr CeilingKernels<T> ceiling_kernels = {2 * CHAINS* Vec<T>::lanes, multiply_add<T>};

} // namespace

extern const CeilingTable ceiling_table;
const CeilingTable ceiling_table = {ceiling_kernels<float>, ceiling_kernels<double>, read_sum};

} // namespace npattn::NPATTN_ISA
