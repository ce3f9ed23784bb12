#pragma once
// Rotary position embedding of a whole tensor.

#include "core/bfloat16.hpp"
#include "core/tensor_view.hpp"

namespace npattn {

// x (..., H, L, E), or (L, E) -> out of the same shape, both stored as S, the first 2 * pairs elements of every
// row turned. cos, sin: Compute<S> (..., L, pairs) with contiguous rows broadcast against x without its head
// axis. inverse: the other way round. Any other strides and alignment; out may be x itself (the same elements in the
// same places), but not overlap otherwise.
template <class S>
void rotary_embedding(const TensorView& x, const TensorView& cos, const TensorView& sin,
                      const TensorView& out, bool interleaved, bool inverse, int threads);

} // namespace npattn
