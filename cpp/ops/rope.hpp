#pragma once
// Rotary position embedding of a whole tensor, and of the heads in a block of a matrix that was just computed.

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

// Heads of `width` elements lie side by side in the first `columns` columns of a matrix; row r of it is turned by row
// r % n of cos and sin (n, pairs), of what is computed in and with contiguous rows.
struct HeadRotation {
    TensorView cos, sin;
    std::int64_t width = 1, columns = 0;
    bool interleaved = false;
};

// Turns in place the heads of a block (rows, columns) that begins in row `row` and column `column` of the matrix, both
// ends of the block being those of heads, or of the matrix.
void rotate_heads(const HeadRotation& rotation, Storage storage, char* block, std::ptrdiff_t row_stride,
                  std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns);

} // namespace npattn
