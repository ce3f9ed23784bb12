// Attention in float and double over packed keys and values.

#include "kernels/packed_attention.hpp"

namespace npattn::NPATTN_ISA {

extern const AttentionTable attention_table;
const AttentionTable attention_table = {attention_kernels<float>, attention_kernels<double>};

} // namespace npattn::NPATTN_ISA
