#pragma once
// Tokens as a cache of int8 keeps them: integers, and a scale for each token and head.

#include <cstdint>

#include "core/aligned_buffer.hpp"
#include "core/parallel.hpp"
#include "ops/page_copy.hpp"

namespace npattn {

// x (sequences, kv heads, tokens, width), floats in contiguous rows: x = integers * scale, to the nearest
// (Int8Table::quantise_rows).
class Quantised {
public:
    Quantised(const TensorView& x, int threads)
        : integers_(x), row_bytes_((x.shape[3] + 3) / 4 * 4), rows_(x.count(3)),
          memory_(static_cast<std::size_t>(rows_) * (static_cast<std::size_t>(row_bytes_) + sizeof(float))) {
        integers_.data = memory_.as<char>() + rows_ * static_cast<std::ptrdiff_t>(sizeof(float));
        integers_.strides[3] = 1;
        integers_.strides[2] = row_bytes_;
        for (int axis = 1; axis >= 0; --axis)
            integers_.strides[axis] = integers_.strides[axis + 1] * x.shape[axis + 1];
        const auto quantise = active_table().int8->quantise_rows;
        const std::int64_t tokens = x.shape[2];
        const std::int64_t heads = tokens == 0 ? 0 : rows_ / tokens;
        constexpr std::int64_t piece = 64; // tokens of a task
        const std::int64_t pieces = (tokens + piece - 1) / piece;
        const bool few = rows_ * row_bytes_ * static_cast<std::int64_t>(sizeof(float)) <= PARALLEL_BYTES;
        parallel_for(heads * pieces, few ? 1 : threads, [&](std::int64_t task, int) {
            const std::int64_t head = task / pieces, first = task % pieces * piece;
            const char* row = x.data + x.offset(head, 2) + first * x.strides[2];
            for (std::int64_t r = head * tokens + first; r < head * tokens + std::min(tokens, first + piece);
                 ++r, row += x.strides[2]) {
                std::int32_t sum; // of no use here
                quantise(Storage::f32, row, 0, 1, x.shape[3], DEPTH_BLOCK,
                         reinterpret_cast<Int8Quad*>(integers_.data + r * row_bytes_), scales() + r, &sum);
            }
        });
    }

    const TensorView& integers() const { return integers_; }
    float* scales() const { return memory_.as<float>(); } // (sequences, kv heads, tokens)

private:
    TensorView integers_;
    std::int64_t row_bytes_, rows_;
    AlignedBuffer memory_;
};

} // namespace npattn
