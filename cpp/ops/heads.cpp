#include "ops/heads.hpp"

#include <algorithm>
#include <cstdlib>

#include "core/parallel.hpp"
#include "dispatch/registry.hpp"
#include "ops/axes.hpp"

namespace npattn {
namespace {

constexpr std::int64_t BLOCK_COLUMNS = 4096;
constexpr std::int64_t BLOCK_BYTES = 65536;        // of one task
constexpr std::int64_t BLOCK_LEAST_ROWS = 16;      // so that a transposing copy reads whole cache lines
constexpr std::int64_t ONE_THREAD_BYTES = 1048576; // up to here another thread costs more than it helps

enum Operand { DESTINATION, SOURCE, OPERANDS };

} // namespace

void copy(const TensorView& source, const TensorView& destination, int item_bytes, int threads) {
    const auto copy_piece = active_table().heads->copy;
    Axes<OPERANDS> axes;
    for (int i = 0; i < source.dimensions; ++i) {
        axes.add(source.shape[i], destination.strides[i], source.strides[i]);
    }
    axes.simplify();
    std::ptrdiff_t column_stride[OPERANDS], row_stride[OPERANDS];
    const std::int64_t columns = axes.take_innermost(column_stride);
    // Where the source is contiguous along another axis than the destination, that one makes the rows.
    if (column_stride[SOURCE] != item_bytes) {
        int nearest = axes.count - 1;
        for (int i = axes.count - 1; i >= 0; --i) {
            if (std::abs(axes.stride[i][SOURCE]) < std::abs(axes.stride[nearest][SOURCE])) nearest = i;
        }
        if (axes.count > 0) axes.swap_axes(nearest, axes.count - 1);
    }
    const std::int64_t rows = axes.take_innermost(row_stride);
    const std::int64_t bytes = axes.elements() * rows * columns * item_bytes;
    if (bytes == 0) return;

    const std::int64_t block_columns = std::min(columns, BLOCK_COLUMNS);
    const std::int64_t block_rows = std::max(BLOCK_BYTES / (block_columns * item_bytes), BLOCK_LEAST_ROWS);
    const std::int64_t across = (columns + block_columns - 1) / block_columns;
    const std::int64_t down = (rows + block_rows - 1) / block_rows;
    parallel_for(axes.elements() * down * across, bytes <= ONE_THREAD_BYTES ? 1 : threads,
                 [&](std::int64_t task, int) {
                     std::ptrdiff_t at[OPERANDS];
                     axes.offsets(task / across / down, at);
                     const std::int64_t row = task / across % down * block_rows;
                     const std::int64_t column = task % across * block_columns;
                     for (int k = 0; k < OPERANDS; ++k)
                         at[k] += row * row_stride[k] + column * column_stride[k];
                     copy_piece(source.data + at[SOURCE], row_stride[SOURCE], column_stride[SOURCE],
                                destination.data + at[DESTINATION], row_stride[DESTINATION],
                                column_stride[DESTINATION], std::min(block_rows, rows - row),
                                std::min(block_columns, columns - column), item_bytes, bytes > STREAM_BYTES);
                 });
}

} // namespace npattn
