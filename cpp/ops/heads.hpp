#pragma once
// Parallel copies between tensors of one shape and any strides: what split_heads and merge_heads are made of; and
// from float to the half types.

#include "core/bfloat16.hpp"
#include "core/tensor_view.hpp"

namespace npattn {

// destination = source, bit for bit, for items of 1, 2, 4, 8 or 16 bytes at any alignment. They must not
// overlap.
void copy(const TensorView& source, const TensorView& destination, int item_bytes, int threads);

// destination = source, floats rounded to a half type (store_as in simd/contract.hpp): overflow is inf, NaN stays.
void narrow(const TensorView& source, const TensorView& destination, Storage storage, int threads);

// Whether that makes finite floats infinite.
bool overflows(const TensorView& source, Storage storage, int threads);

} // namespace npattn
