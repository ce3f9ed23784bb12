#include "ops/heads.hpp"

#include <algorithm>
#include <atomic>
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

// All axes of a copy, those that can be merged are.
Axes<OPERANDS> axes_of(const TensorView& source, const TensorView& destination) {
    Axes<OPERANDS> axes;
    for (int i = 0; i < source.dimensions; ++i)
        axes.add(source.shape[i], destination.strides[i], source.strides[i]);
    axes.simplify();
    return axes;
}

// Rows and columns inside of `axes`, cut into pieces of about `BLOCK_BYTES`.
struct Matrices {
    Axes<OPERANDS> axes;
    std::int64_t rows, columns;
    std::ptrdiff_t row_stride[OPERANDS], column_stride[OPERANDS];

    std::int64_t elements() const { return axes.elements() * rows * columns; }

    // move(source, destination, rows, columns) of each piece; item_bytes are the source's.
    template <class Move>
    void in_pieces(const TensorView& source, const TensorView& destination, int item_bytes, int threads,
                   Move move) const {
        if (elements() == 0) return;
        const std::int64_t block_columns = std::min(columns, BLOCK_COLUMNS);
        const std::int64_t block_rows =
            std::max(BLOCK_BYTES / (block_columns * item_bytes), BLOCK_LEAST_ROWS);
        const std::int64_t across = (columns + block_columns - 1) / block_columns;
        const std::int64_t down = (rows + block_rows - 1) / block_rows;
        const bool few = elements() * item_bytes <= ONE_THREAD_BYTES;
        parallel_for(axes.elements() * down * across, few ? 1 : threads, [&](std::int64_t task, int) {
            std::ptrdiff_t at[OPERANDS];
            axes.offsets(task / across / down, at);
            const std::int64_t row = task / across % down * block_rows;
            const std::int64_t column = task % across * block_columns;
            for (int k = 0; k < OPERANDS; ++k) at[k] += row * row_stride[k] + column * column_stride[k];
            move(source.data + at[SOURCE], destination.data + at[DESTINATION],
                 std::min(block_rows, rows - row), std::min(block_columns, columns - column));
        });
    }
};

// Floats and where they go, items of so many bytes: in rows that are contiguous on both sides, else number by number.
Matrices float_rows(const TensorView& source, const TensorView& destination, int destination_bytes) {
    Matrices all = {axes_of(source, destination), 0, 0, {}, {}};
    all.columns = all.axes.take_innermost(all.column_stride);
    if (all.column_stride[SOURCE] != sizeof(float) || all.column_stride[DESTINATION] != destination_bytes) {
        all.axes.add(all.columns, all.column_stride[DESTINATION], all.column_stride[SOURCE]);
        all.columns = 1;
    }
    all.rows = all.axes.take_innermost(all.row_stride);
    return all;
}

} // namespace

void copy(const TensorView& source, const TensorView& destination, int item_bytes, int threads) {
    const auto copy_piece = active_table().heads->copy;
    Matrices all = {axes_of(source, destination), 0, 0, {}, {}};
    Axes<OPERANDS>& axes = all.axes;
    all.columns = axes.take_innermost(all.column_stride);
    // Where the source is contiguous along another axis than the destination, that one makes the rows.
    if (all.column_stride[SOURCE] != item_bytes) {
        int nearest = axes.count - 1;
        for (int i = axes.count - 1; i >= 0; --i) {
            if (std::abs(axes.stride[i][SOURCE]) < std::abs(axes.stride[nearest][SOURCE])) nearest = i;
        }
        if (axes.count > 0) axes.swap_axes(nearest, axes.count - 1);
    }
    all.rows = axes.take_innermost(all.row_stride);
    const bool past_cache = all.elements() * item_bytes >= STREAM_BYTES;
    all.in_pieces(source, destination, item_bytes, threads,
                  [&](const char* from, char* to, std::int64_t rows, std::int64_t columns) {
                      copy_piece(from, all.row_stride[SOURCE], all.column_stride[SOURCE], to,
                                 all.row_stride[DESTINATION], all.column_stride[DESTINATION], rows, columns,
                                 item_bytes, past_cache);
                  });
}

void narrow(const TensorView& source, const TensorView& destination, Storage storage, int threads) {
    const auto narrow_piece = active_table().heads->narrow;
    const Matrices all = float_rows(source, destination, storage_bytes(storage));
    all.in_pieces(source, destination, sizeof(float), threads,
                  [&](const char* from, char* to, std::int64_t rows, std::int64_t columns) {
                      narrow_piece(storage, from, all.row_stride[SOURCE], to, all.row_stride[DESTINATION],
                                   rows, columns);
                  });
}

bool overflows(const TensorView& source, Storage storage, int threads) {
    const auto piece_overflows = active_table().heads->overflows;
    const Matrices all = float_rows(source, source, sizeof(float));
    std::atomic<bool> found = false;
    all.in_pieces(source, source, sizeof(float), threads,
                  [&](const char* from, char*, std::int64_t rows, std::int64_t columns) {
                      if (piece_overflows(storage, from, all.row_stride[SOURCE], rows, columns)) found = true;
                  });
    return found;
}

} // namespace npattn
