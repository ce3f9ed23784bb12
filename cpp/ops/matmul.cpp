#include "ops/matmul.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>

#include "core/parallel.hpp"
#include "dispatch/registry.hpp"

namespace npattn {
namespace {

constexpr std::int64_t block_rows = 96; // rows of A packed at a time: a multiple of every ISA's tile
// A panel's part of B, 32 KiB of floats, stays in L1 while rows pass.
constexpr std::int64_t block_depth = DEPTH_BLOCK;
constexpr std::int64_t block_columns = 512; // columns of B that a thread packs for itself at a time
// Of B, packed at a time and shared by all threads.
constexpr std::int64_t wave_depth = 2048;
constexpr std::size_t wave_bytes = std::size_t{8} << 20;
constexpr std::int64_t pack_step = 8; // panels of one packing task

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// C (rows, columns) = start + A (rows, depth) B (depth, columns): pointers and strides in bytes.
template <class T> struct Product {
    const char* a;
    std::ptrdiff_t a_row, a_depth;
    const char* b;
    std::ptrdiff_t b_depth, b_column;
    char* c;
    std::ptrdiff_t c_row;
    std::int64_t rows, depth, columns;

    double seconds() const {
        const auto m = static_cast<double>(rows), k = static_cast<double>(depth),
                   n = static_cast<double>(columns);
        return std::max(2 * m * k * n / 60e9, (m * k + k * n + m * n) * sizeof(T) / 15e9);
    }
};

template <class T>
constexpr std::size_t row_scratch_bytes = align_up(static_cast<std::size_t>(block_rows* ROW_STRIDE) *
                                                   sizeof(T));

// Rows [row, row + count) of C over columns [column, column + width) += A panels, for depth [first, last) of
// A; `panels` is the panel of `column` at depth `first`. `fresh`: this is the first depth of the product, so
// C starts from bias or zero.
template <class T>
void multiply_rows(const GemmKernels<T>& gemm, const Product<T>& p, std::int64_t row, std::int64_t count,
                   std::int64_t column, std::int64_t width, std::int64_t first, std::int64_t last, bool fresh,
                   const T* panels, std::ptrdiff_t panel_stride, const T* bias, T* rows_copy) {
    char* c = p.c + row * p.c_row + column * static_cast<std::ptrdiff_t>(sizeof(T));
    std::int64_t k = first;
    do {
        const std::int64_t depth = std::min(block_depth, last - k);
        gemm.copy_rows(p.a + row * p.a_row + k * p.a_depth, p.a_row, p.a_depth, count, depth, rows_copy);
        const Start start = !fresh || k > first ? Start::add : bias ? Start::bias : Start::zero;
        gemm.multiply(rows_copy, panels + (k - first) * PANEL, panel_stride, count, depth, width, start,
                      bias ? bias + column : nullptr, c, p.c_row);
        k += depth;
    } while (k < last && !stop_requested());
}

// One thread, B as it lies in memory: for a few rows, which leave no time to pack it.
template <class T>
void multiply_few(const GemmKernels<T>& gemm, const Product<T>& p, std::int64_t column, std::int64_t width,
                  T* rows_copy) {
    std::int64_t k = 0;
    do {
        const std::int64_t depth = std::min(block_depth, p.depth - k);
        gemm.copy_rows(p.a + k * p.a_depth, p.a_row, p.a_depth, p.rows, depth, rows_copy);
        const std::ptrdiff_t skip = column * static_cast<std::ptrdiff_t>(sizeof(T));
        gemm.multiply_direct(rows_copy, p.b + k * p.b_depth + skip, p.b_depth, p.rows, depth, width,
                             k == 0 ? Start::zero : Start::add, nullptr, p.c + skip, p.c_row);
        k += depth;
    } while (k < p.depth && !stop_requested());
}

template <class T> bool few_rows(const GemmKernels<T>& gemm, const Product<T>& p) {
    return p.rows <= gemm.rows && p.rows <= 8 && p.b_column == static_cast<std::ptrdiff_t>(sizeof(T));
}

template <class T> std::size_t serial_scratch_bytes(const Product<T>& p) {
    const std::int64_t columns = panel_count(std::min(p.columns, block_columns)) * PANEL;
    return row_scratch_bytes<T> +
           align_up(static_cast<std::size_t>(columns * std::min(p.depth, block_depth)) * sizeof(T));
}

// One thread: packs a block of B, then passes all rows over it.
template <class T> void multiply_serial(const GemmKernels<T>& gemm, const Product<T>& p, char* scratch) {
    T* rows_copy = reinterpret_cast<T*>(scratch);
    if (few_rows(gemm, p)) return multiply_few(gemm, p, 0, p.columns, rows_copy);
    T* panels = reinterpret_cast<T*>(scratch + row_scratch_bytes<T>);
    for (std::int64_t column = 0; column < p.columns; column += block_columns) {
        const std::int64_t width = std::min(block_columns, p.columns - column);
        std::int64_t k = 0;
        do {
            const std::int64_t depth = std::min(block_depth, p.depth - k);
            gemm.pack_panels(p.b + k * p.b_depth + column * p.b_column, p.b_depth, p.b_column, depth, width,
                             0, panel_count(width), panels, depth * PANEL);
            for (std::int64_t row = 0; row < p.rows; row += block_rows) {
                multiply_rows(gemm, p, row, std::min(block_rows, p.rows - row), column, width, k, k + depth,
                              k == 0, panels, depth * PANEL, static_cast<const T*>(nullptr), rows_copy);
            }
            k += depth;
        } while (k < p.depth && !stop_requested());
    }
}

// How C is cut into blocks, a task each, of nearly equal rows and columns: enough tasks to end together, but few
// enough that A is not copied too often.
struct Blocks {
    static constexpr std::int64_t tasks_a_thread = 24;

    std::int64_t rows, columns; // of one block, whole tiles and panels; the last ones have less
    std::int64_t row_count, column_count;

    Blocks(std::int64_t all_rows, std::int64_t all_columns, int tile_rows, int threads) {
        rows = ceil_div(ceil_div(all_rows, ceil_div(all_rows, block_rows)), tile_rows) * tile_rows;
        row_count = ceil_div(all_rows, rows);
        const std::int64_t columns_wanted =
            threads == 1 ? 1 : ceil_div(tasks_a_thread * std::int64_t{threads}, row_count);
        columns = PANEL * std::max<std::int64_t>(4, ceil_div(panel_count(all_columns), columns_wanted));
        column_count = ceil_div(all_columns, columns);
    }
};

template <class T, class ProductAt>
void multiply_few_parallel(const GemmKernels<T>& gemm, const ProductAt& at, std::int64_t batches,
                           int threads) {
    const Product<T> any = at(0); // all of one size
    const std::int64_t width =
        std::max<std::int64_t>(128, ceil_div(ceil_div(any.columns, threads), PANEL) * PANEL);
    const std::int64_t tasks = ceil_div(any.columns, width);
    const std::size_t bytes = row_scratch_bytes<T>;
    CallScratch scratch(static_cast<std::size_t>(threads) * bytes, 0, threads);
    parallel_for(batches * tasks, threads, [&](std::int64_t index, int thread) {
        const Product<T> p = at(index / tasks);
        const std::int64_t task = index % tasks;
        multiply_few(gemm, p, task * width, std::min(width, p.columns - task * width),
                     reinterpret_cast<T*>(scratch.own() + static_cast<std::size_t>(thread) * bytes));
    });
}

// All threads on one product after the other: waves of B are packed together, then blocks of C computed; a block waits for
// its panels. All memory is taken before anything is written.
template <class T, class ProductAt>
void multiply_parallel(const GemmKernels<T>& gemm, const ProductAt& at, std::int64_t batches, int threads) {
    const Product<T> any = at(0); // all of one size
    if (few_rows(gemm, any)) return multiply_few_parallel<T>(gemm, at, batches, threads);
    const std::size_t row_bytes = row_scratch_bytes<T>;
    const std::int64_t depths = std::min(any.depth, wave_depth);
    const auto wave_panels = static_cast<std::int64_t>(
        wave_bytes / (static_cast<std::size_t>(std::max<std::int64_t>(depths, 1) * PANEL) * sizeof(T)));
    const std::int64_t waves = ceil_div(panel_count(any.columns), wave_panels);
    const std::int64_t wave_columns = ceil_div(panel_count(any.columns), waves) * PANEL;
    CallScratch scratch(static_cast<std::size_t>(threads) * row_bytes,
                        static_cast<std::size_t>(wave_columns * depths) * sizeof(T), threads);
    T* const panels = reinterpret_cast<T*>(scratch.shared());
    const Blocks blocks(any.rows, wave_columns, gemm.rows, threads);
    const std::int64_t width = blocks.columns;
    const std::int64_t packs_per_task = ceil_div(width / PANEL, pack_step);
    const auto open =
        std::make_unique<std::atomic<std::int64_t>[]>(static_cast<std::size_t>(blocks.column_count));
    for (std::int64_t wave = 0; wave < batches * waves; ++wave) {
        const Product<T> p = at(wave / waves);
        const std::int64_t column = wave % waves * wave_columns;
        const std::int64_t columns = std::min(wave_columns, p.columns - column);
        const std::int64_t column_tasks = ceil_div(columns, width);
        std::int64_t k = 0;
        do {
            const std::int64_t depth = std::min(wave_depth, p.depth - k);
            for (std::int64_t c = 0; c < column_tasks; ++c)
                open[static_cast<std::size_t>(c)].store(packs_per_task);
            const std::int64_t packs = column_tasks * packs_per_task;
            parallel_for(
                packs + column_tasks * blocks.row_count, threads, [&](std::int64_t task, int thread) {
                    if (task < packs) {
                        const std::int64_t c = task / packs_per_task;
                        const std::int64_t first = c * width / PANEL + task % packs_per_task * pack_step;
                        const std::int64_t last =
                            std::min({first + pack_step, (c + 1) * width / PANEL, panel_count(columns)});
                        gemm.pack_panels(p.b + k * p.b_depth + column * p.b_column, p.b_depth, p.b_column,
                                         depth, columns, first, last, panels, depth * PANEL);
                        open[static_cast<std::size_t>(c)].fetch_sub(1, std::memory_order_release);
                        return;
                    }
                    const std::int64_t c = (task - packs) / blocks.row_count;
                    const std::int64_t row = (task - packs) % blocks.row_count * blocks.rows;
                    while (open[static_cast<std::size_t>(c)].load(std::memory_order_acquire) != 0) {
                        if (stop_requested()) return;
                        std::this_thread::yield();
                    }
                    multiply_rows(
                        gemm, p, row, std::min(blocks.rows, p.rows - row), column + c * width,
                        std::min(width, columns - c * width), k, k + depth, k == 0,
                        panels + c * width * depth, depth * PANEL, static_cast<const T*>(nullptr),
                        reinterpret_cast<T*>(scratch.own() + static_cast<std::size_t>(thread) * row_bytes));
                });
            k += depth;
        } while (k < p.depth);
    }
}

template <class T>
Product<T> product(const TensorView& a, const TensorView& b, const TensorView& out, std::int64_t batch) {
    const int leading = out.dimensions - 2;
    return {a.data + a.offset(batch, leading),
            a.stride(-2),
            a.stride(-1),
            b.data + b.offset(batch, leading),
            b.stride(-2),
            b.stride(-1),
            out.data + out.offset(batch, leading),
            out.stride(-2),
            out.size(-2),
            a.size(-1),
            out.size(-1)};
}

} // namespace

template <class T> void matmul(const TensorView& a, const TensorView& b, const TensorView& out, int threads) {
    const auto& gemm = kernels<T>(active_table().gemm);
    const std::int64_t batches = out.count(out.dimensions - 2);
    if (batches * out.size(-2) * out.size(-1) == 0) return;
    const double seconds = product<T>(a, b, out, 0).seconds();
    if (seconds * static_cast<double>(batches) < 30e-6) threads = 1;
    if (threads > 1 && batches < 4 * std::int64_t{threads} && seconds > 30e-6) {
        const auto at = [&](std::int64_t i) { return product<T>(a, b, out, i); };
        return multiply_parallel<T>(gemm, at, batches, threads);
    }
    const std::size_t bytes = serial_scratch_bytes(product<T>(a, b, out, 0));
    CallScratch scratch(static_cast<std::size_t>(threads) * bytes, 0, threads);
    parallel_for(batches, threads, [&](std::int64_t i, int thread) {
        multiply_serial(gemm, product<T>(a, b, out, i),
                        scratch.own() + static_cast<std::size_t>(thread) * bytes);
    });
}

template <class T> PackedPanels pack_matrix(const TensorView& b, int threads) {
    const auto& gemm = kernels<T>(active_table().gemm);
    PackedPanels packed;
    packed.depth = b.size(0);
    packed.columns = b.size(1);
    const std::int64_t panels = panel_count(packed.columns);
    packed.panels = AlignedBuffer(static_cast<std::size_t>(panels * PANEL * packed.depth) * sizeof(T));
    parallel_for(panels, panels * PANEL * packed.depth < 100000 ? 1 : threads, [&](std::int64_t p, int) {
        gemm.pack_panels(b.data, b.stride(0), b.stride(1), packed.depth, packed.columns, p, p + 1,
                         packed.panels.as<T>(), PANEL * packed.depth);
    });
    return packed;
}

template <class T> void unpack_matrix(const PackedPanels& packed, const TensorView& out) {
    for (std::int64_t d = 0; d < packed.depth; ++d) {
        for (std::int64_t c = 0; c < packed.columns; ++c) {
            const T* element = packed.panels.as<T>() + (c / PANEL * packed.depth + d) * PANEL + c % PANEL;
            std::memcpy(out.data + d * out.stride(0) + c * out.stride(1), element, sizeof(T));
        }
    }
}

template <class T>
void matmul_packed(const TensorView& a, const PackedPanels& packed, const T* bias, const TensorView& out,
                   int threads) {
    const auto& gemm = kernels<T>(active_table().gemm);
    const std::int64_t batches = out.count(out.dimensions - 2);
    if (batches * out.size(-2) * out.size(-1) == 0) return;
    TensorView b = out; // only its leading axes are looked at, and none of its memory
    const Product<T> whole = product<T>(a, b, out, 0);
    if (whole.seconds() * static_cast<double>(batches) < 30e-6) threads = 1;
    const Blocks blocks(whole.rows, whole.columns, gemm.rows, threads);
    const std::size_t bytes = row_scratch_bytes<T>;
    CallScratch scratch(static_cast<std::size_t>(threads) * bytes, 0, threads);
    const std::int64_t tasks = blocks.column_count * blocks.row_count; // of one batch element
    parallel_for(batches * tasks, threads, [&](std::int64_t task, int thread) {
        const Product<T> p = product<T>(a, b, out, task / tasks);
        const std::int64_t column = task / blocks.row_count % blocks.column_count * blocks.columns;
        const std::int64_t row = task % blocks.row_count * blocks.rows;
        multiply_rows(gemm, p, row, std::min(blocks.rows, p.rows - row), column,
                      std::min(blocks.columns, p.columns - column), 0, p.depth, true,
                      packed.panels.as<T>() + column * p.depth, p.depth * PANEL, bias,
                      reinterpret_cast<T*>(scratch.own() + static_cast<std::size_t>(thread) * bytes));
    });
}

template PackedPanels pack_matrix<float>(const TensorView&, int);
template PackedPanels pack_matrix<double>(const TensorView&, int);
template void unpack_matrix<float>(const PackedPanels&, const TensorView&);
template void unpack_matrix<double>(const PackedPanels&, const TensorView&);
template void matmul<float>(const TensorView&, const TensorView&, const TensorView&, int);
template void matmul<double>(const TensorView&, const TensorView&, const TensorView&, int);
template void matmul_packed<float>(const TensorView&, const PackedPanels&, const float*, const TensorView&,
                                   int);
template void matmul_packed<double>(const TensorView&, const PackedPanels&, const double*, const TensorView&,
                                    int);

} // namespace npattn
