#pragma once
// Matrix products over whole tensors: plan -> parallel_for -> kernels. Depth is summed in order on every
// path, so the bits of an element do not depend on the path, the threads or the rest of the call.

#include <optional>

#include "core/aligned_buffer.hpp"
#include "core/tensor_view.hpp"

namespace npattn {

// B (depth, columns) packed once into panels (dispatch/kernel_table.hpp): the same for every ISA.
struct PackedPanels {
    AlignedBuffer panels;
    std::int64_t depth = 0, columns = 0;
};

// b (depth, columns), any strides.
template <class T> PackedPanels pack_matrix(const TensorView& b, int threads);

template <class T> void unpack_matrix(const PackedPanels& packed, const TensorView& out);

// out (..., rows, columns) = a (..., rows, depth) b (..., depth, columns); same leading axes, the last axis
// of out contiguous.
template <class T> void matmul(const TensorView& a, const TensorView& b, const TensorView& out, int threads);

// out (..., rows, columns) = a (..., rows, depth) packed + bias; bias (columns), contiguous and aligned, or
// null.
template <class T>
void matmul_packed(const TensorView& a, const PackedPanels& packed, const T* bias, const TensorView& out,
                   int threads);

} // namespace npattn
