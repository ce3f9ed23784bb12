#pragma once
// Products with weights of 8 bits: float rows are quantised on the way, each with its own scale.

#include "ops/matmul.hpp"

namespace npattn {

// B (depth, columns) = q * scales: panels[panel][depth / 4][PANEL] of quads, q + 128 each; the same for every ISA.
struct PackedInt8 {
    AlignedBuffer panels, scales;
    std::int64_t depth = 0, columns = 0;
};

// q: int8 (depth, columns), any strides, depth at most INT8_DEPTH; scales: float (columns), contiguous.
PackedInt8 pack_int8(const TensorView& q, const float* scales, int threads);

// out: int8 (depth, columns).
void unpack_int8(const PackedInt8& packed, const TensorView& out);

// out (..., rows, columns) = a (..., rows, depth) B + bias; the last axes of a and out contiguous, none of float64.
// bias: float (columns), contiguous, or null; rotation: as in matmul_packed.
void matmul_int8(const Operand& a, const PackedInt8& packed, const float* bias, const Operand& out,
                 const HeadRotation* rotation, int threads);

} // namespace npattn
