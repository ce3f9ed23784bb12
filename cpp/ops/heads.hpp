#pragma once
// A parallel copy between tensors of one shape and any strides: what split_heads and merge_heads are made of.

#include "core/tensor_view.hpp"

namespace npattn {

// destination = source, bit for bit, for items of 1, 2, 4, 8 or 16 bytes at any alignment. They must not
// overlap.
void copy(const TensorView& source, const TensorView& destination, int item_bytes, int threads);

} // namespace npattn
