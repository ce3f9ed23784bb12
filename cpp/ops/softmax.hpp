#pragma once
// softmax, log_softmax and logsumexp over the last axis of a tensor.

#include "core/bfloat16.hpp"
#include "core/tensor_view.hpp"

namespace npattn {

enum class SoftmaxResult { softmax, log_softmax, logsumexp };

// x (..., n) -> out (..., n), or (...) for logsumexp, both stored as S. mask: bool, of x's shape, or null; sinks:
// Compute<S> (...), or null (softmax only). Any strides and alignment; out may be x itself (the same elements in the
// same places), but not overlap otherwise.
template <class S>
void softmax(SoftmaxResult result, const TensorView& x, const TensorView* mask, const TensorView* sinks,
             const TensorView& out, int threads);

} // namespace npattn
