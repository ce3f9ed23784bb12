// Attention in pairs of bfloat16 over packed keys and values.

#include "kernels/packed_attention.hpp"

namespace npattn::NPATTN_ISA {

extern const AttentionKernels<float> attention_pairs_table;
const AttentionKernels<float> attention_pairs_table = attention_kernels<HalfPair>;

} // namespace npattn::NPATTN_ISA
