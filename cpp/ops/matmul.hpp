#pragma once
// Matrix products over whole tensors: plan -> parallel_for -> kernels. Depth is summed in order on every
// path, so the bits of an element do not depend on the path, the threads or the rest of the call.

#include <optional>

#include "core/aligned_buffer.hpp"
#include "core/bfloat16.hpp"
#include "core/tensor_view.hpp"
#include "ops/rope.hpp"

namespace npattn {

// An array and what its elements are.
struct Operand {
    TensorView view;
    Storage storage;
};

// B (depth, columns) packed once into panels (dispatch/kernel_table.hpp), the half types in pairs: the same for
// every ISA.
struct PackedPanels {
    AlignedBuffer panels;
    std::int64_t depth = 0, columns = 0;
    Storage storage = Storage::f32;
};

// b (depth, columns), any strides.
PackedPanels pack_matrix(const Operand& b, int threads);

// out (depth, columns) of the same elements.
void unpack_matrix(const PackedPanels& packed, const TensorView& out);

// out (..., rows, columns) = a (..., rows, depth) b (..., depth, columns); same leading axes, the last axis
// of out contiguous. All are float64, or none is; float16 and bfloat16 are multiplied and summed in float, and
// out is rounded once.
void matmul(const Operand& a, const Operand& b, const Operand& out, int threads);

// out (..., rows, columns) = a (..., rows, depth) packed + bias; bias (columns), contiguous and aligned, of what
// is computed in, or null; then heads are turned where a rotation of the rows of out, leading axes and all, says so.
void matmul_packed(const Operand& a, const PackedPanels& packed, const void* bias, const Operand& out,
                   const HeadRotation* rotation, int threads);

} // namespace npattn
