// Attention with bfloat16 queries over the pages of a cache of bfloat16.

#include "simd/contract.hpp"

#ifdef NPATTN_TILES
#include "kernels/cached_pairs_tiles.hpp"
#else
#include "kernels/cached_pairs_registers.hpp"
#endif

namespace npattn::NPATTN_ISA {

extern const CachedKernels<float> cached_pairs_table;
const CachedKernels<float> cached_pairs_table = {
    TASK_ROWS,          paged_scratch_bytes<PairProducts>, attend_pages<PairProducts>, merge_rows<float>,
    finish_rows<float>, fill_page_weights<PairProducts>};

} // namespace npattn::NPATTN_ISA
