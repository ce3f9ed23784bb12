#include "ops/matmul.hpp"

#include <atomic>
#include <memory>
#include <utility>

#include "ops/product.hpp"

namespace npattn {
namespace {

constexpr std::int64_t block_columns = 512;   // columns of B that a thread packs for itself at a time
constexpr std::int64_t narrow_block = 524288; // elements, where it packs all depths of some columns
// Of B, packed at a time and shared by all threads.
constexpr std::int64_t wave_depth = 2048;
constexpr std::size_t wave_bytes = std::size_t{8} << 20;
constexpr std::int64_t pack_step = 8; // panels of one packing task

// B as it lies in memory, its rows contiguous: for a few rows of A, which leave no time to pack it.
struct DirectRows {
    static constexpr std::int64_t blocks = 1;
    const char* first;
    std::ptrdiff_t stride;
    Storage storage;

    template <class P>
    void multiply(const GemmKernels<P>& gemm, const P* rows, std::int64_t count, std::int64_t k,
                  std::int64_t depth, std::int64_t width, Start start, const Sum<P>* bias, char* c,
                  std::ptrdiff_t c_row) const {
        gemm.multiply_direct(storage, rows, first + k * stride, stride, count, depth, width, start, bias, c,
                             c_row);
    }
};

// The same, its columns contiguous; as many blocks of depth at a time as there is scratch for the rows of A.
struct DirectColumns {
    const char* first;
    std::ptrdiff_t stride;
    Storage storage;
    std::int64_t blocks;

    template <class P>
    void multiply(const GemmKernels<P>& gemm, const P* rows, std::int64_t count, std::int64_t k,
                  std::int64_t depth, std::int64_t width, Start start, const Sum<P>* bias, char* c,
                  std::ptrdiff_t c_row) const {
        gemm.multiply_dots(storage, rows, first + k * storage_bytes(storage), stride, count, depth, width,
                           start, bias, c, c_row);
    }
};

enum class Reading { rows, columns, panels }; // of B: as it lies in memory, or packed

// Adding up the lanes of dot products costs as much at any depth, packing B as much for any rows.
constexpr std::int64_t dot_depth_a_row = 8, least_dot_depth = 32;

template <class P> Reading reading(const GemmKernels<P>& gemm, const Product<P>& p) {
    const std::ptrdiff_t element = storage_bytes(p.b_storage);
    if (p.b_column == element && p.rows <= std::min(gemm.rows, 8)) return Reading::rows;
    const bool deep = p.depth >= std::max(least_dot_depth, dot_depth_a_row * p.rows);
    return p.b_depth == element && p.rows <= MOST_DOT_ROWS && deep ? Reading::columns : Reading::panels;
}

// What one thread does of B at a time. Packed, where C narrows, it is all depths of fewer columns.
template <class P> struct SerialBlock {
    Reading reading;
    std::int64_t depth, columns;

    SerialBlock(const GemmKernels<P>& gemm, const Product<P>& p) : reading(npattn::reading(gemm, p)) {
        const bool direct = reading != Reading::panels;
        depth = direct || p.narrows() ? p.depth : std::min(p.depth, block_depth<P>);
        const std::int64_t panels = direct        ? Blocks::most_columns / PANEL
                                    : p.narrows() ? narrow_block / PANEL / std::max(depth, block_depth<P>)
                                                  : block_columns / PANEL;
        columns = PANEL * std::clamp<std::int64_t>(panels, 1, panel_count(p.columns));
    }
    std::size_t panel_bytes() const {
        return reading != Reading::panels
                   ? 0
                   : align_up(static_cast<std::size_t>(columns * held<P>(depth)) * sizeof(P));
    }
    std::size_t bytes(const Product<P>& p) const { return panel_bytes() + row_scratch_bytes(p, columns); }
};

// One thread: packs a block of B, then passes all rows over it.
template <class P> void multiply_serial(const GemmKernels<P>& gemm, const Product<P>& p, char* scratch) {
    const Sum<P>* const no_bias = nullptr;
    const SerialBlock<P> block(gemm, p);
    if (block.reading != Reading::panels) {
        for (std::int64_t column = 0; column < p.columns && !stop_requested(); column += block.columns) {
            const char* const first = p.b + column * p.b_column;
            const auto multiply = [&](const auto& b) {
                multiply_rows(gemm, p, 0, p.rows, column, std::min(block.columns, p.columns - column), 0,
                              p.depth, true, b, no_bias, scratch);
            };
            if (block.reading == Reading::rows) {
                multiply(DirectRows{first, p.b_depth, p.b_storage});
            } else {
                const std::int64_t blocks = std::min<std::int64_t>(gemm.dot_blocks, block_rows / p.rows);
                multiply(DirectColumns{first, p.b_column, p.b_storage, blocks});
            }
        }
        return;
    }
    P* const panels = reinterpret_cast<P*>(scratch);
    for (std::int64_t column = 0; column < p.columns && !stop_requested(); column += block.columns) {
        const std::int64_t width = std::min(block.columns, p.columns - column);
        std::int64_t k = 0;
        do {
            const std::int64_t depth = std::min(block.depth, p.depth - k);
            const std::ptrdiff_t stride = held<P>(depth) * PANEL;
            gemm.pack_panels(p.b_storage, p.b + k * p.b_depth + column * p.b_column, p.b_depth, p.b_column,
                             depth, width, 0, panel_count(width), panels, stride);
            for (std::int64_t row = 0; row < p.rows && !stop_requested(); row += block_rows) {
                multiply_rows(gemm, p, row, std::min(block_rows, p.rows - row), column, width, k, k + depth,
                              k == 0, ReadyPanels<P>{panels, stride}, no_bias, scratch + block.panel_bytes());
            }
            k += depth;
        } while (k < p.depth && !stop_requested());
    }
}

// Each thread on columns of its own: on a few ranges of them where that costs nothing, so that all end together.
template <class P, class ProductAt>
void multiply_columns(const GemmKernels<P>& gemm, const ProductAt& at, std::int64_t batches, int threads) {
    const Product<P> any = at(0); // all of one size
    const std::int64_t ranges = reading(gemm, any) == Reading::columns ? 4 * threads : threads;
    const std::int64_t width =
        std::max<std::int64_t>(128, ceil_div(ceil_div(any.columns, ranges), PANEL) * PANEL);
    const std::int64_t tasks = ceil_div(any.columns, width);
    const Product<P> widest = any.columns_of(0, std::min(width, any.columns));
    const std::size_t bytes = SerialBlock<P>(gemm, widest).bytes(widest);
    CallScratch scratch(static_cast<std::size_t>(threads) * bytes, 0, threads);
    parallel_for(batches * tasks, threads, [&](std::int64_t index, int thread) {
        const Product<P> p = at(index / tasks);
        const std::int64_t column = index % tasks * width;
        multiply_serial(gemm, p.columns_of(column, std::min(width, p.columns - column)),
                        scratch.own() + static_cast<std::size_t>(thread) * bytes);
    });
}

// All threads on one product after the other: waves of B are packed together, then blocks of C computed; a block
// waits for its panels. All memory is taken before anything is written.
template <class P, class ProductAt>
void multiply_parallel(const GemmKernels<P>& gemm, const ProductAt& at, std::int64_t batches, int threads) {
    const Product<P> any = at(0); // all of one size
    if (reading(gemm, any) != Reading::panels) return multiply_columns<P>(gemm, at, batches, threads);
    const std::int64_t most_depth = any.narrows() ? any.depth : std::min(any.depth, wave_depth);
    const std::int64_t panel = std::max<std::int64_t>(held<P>(most_depth), 1) * PANEL;
    const auto wave_panels = std::max<std::int64_t>(
        1, static_cast<std::int64_t>(wave_bytes / (static_cast<std::size_t>(panel) * sizeof(P))));
    const std::int64_t waves = ceil_div(panel_count(any.columns), wave_panels);
    const std::int64_t wave_columns = ceil_div(panel_count(any.columns), waves) * PANEL;
    const Blocks blocks(any.rows, wave_columns, gemm.rows, threads);
    const std::int64_t width = blocks.columns;
    const std::size_t row_bytes = row_scratch_bytes(any, width);
    CallScratch scratch(static_cast<std::size_t>(threads) * row_bytes,
                        static_cast<std::size_t>(wave_columns / PANEL * panel) * sizeof(P), threads);
    P* const panels = reinterpret_cast<P*>(scratch.shared());
    const std::int64_t packs_per_task = ceil_div(width / PANEL, pack_step);
    const auto open =
        std::make_unique<std::atomic<std::int64_t>[]>(static_cast<std::size_t>(blocks.column_count));
    for (std::int64_t wave = 0; wave < batches * waves; ++wave) {
        const Product<P> p = at(wave / waves);
        const std::int64_t column = wave % waves * wave_columns;
        const std::int64_t columns = std::min(wave_columns, p.columns - column);
        const std::int64_t column_tasks = ceil_div(columns, width);
        std::int64_t k = 0;
        do {
            const std::int64_t depth = std::min(most_depth, p.depth - k);
            const std::ptrdiff_t stride = held<P>(depth) * PANEL;
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
                        gemm.pack_panels(p.b_storage, p.b + k * p.b_depth + column * p.b_column, p.b_depth,
                                         p.b_column, depth, columns, first, last, panels, stride);
                        open[static_cast<std::size_t>(c)].fetch_sub(1, std::memory_order_release);
                        return;
                    }
                    const std::int64_t c = (task - packs) / blocks.row_count;
                    const std::int64_t row = (task - packs) % blocks.row_count * blocks.rows;
                    if (!wait_for(open[static_cast<std::size_t>(c)])) return;
                    multiply_rows(gemm, p, row, std::min(blocks.rows, p.rows - row), column + c * width,
                                  std::min(width, columns - c * width), k, k + depth, k == 0,
                                  ReadyPanels<P>{panels + c * width / PANEL * stride, stride},
                                  static_cast<const Sum<P>*>(nullptr),
                                  scratch.own() + static_cast<std::size_t>(thread) * row_bytes);
                });
            k += depth;
        } while (k < p.depth);
    }
}

template <class P>
void multiply(const GemmKernels<P>& gemm, const Operand& a, const Operand& b, const Operand& out,
              std::int64_t batches, int threads) {
    const auto at = [&](std::int64_t i) { return product<P>(a, b, out, i); };
    const double seconds = at(0).seconds();
    if (seconds * static_cast<double>(batches) < 30e-6) threads = 1;
    if (threads > 1 && batches < 4 * std::int64_t{threads} && seconds > 30e-6)
        return multiply_parallel<P>(gemm, at, batches, threads);
    const std::size_t bytes = SerialBlock<P>(gemm, at(0)).bytes(at(0));
    CallScratch scratch(static_cast<std::size_t>(threads) * bytes, 0, threads);
    parallel_for(batches, threads, [&](std::int64_t i, int thread) {
        multiply_serial(gemm, at(i), scratch.own() + static_cast<std::size_t>(thread) * bytes);
    });
}

Operand transposed(Operand x) {
    const int last = x.view.dimensions - 1;
    std::swap(x.view.shape[last], x.view.shape[last - 1]);
    std::swap(x.view.strides[last], x.view.strides[last - 1]);
    return x;
}

} // namespace

void matmul(const Operand& a, const Operand& b, const Operand& out, int threads) {
    const KernelTable& table = active_table();
    const std::int64_t batches = out.view.count(out.view.dimensions - 2);
    if (batches * out.view.size(-2) * out.view.size(-1) == 0) return;
    // A B = (B^T A^T)^T: a single column is computed as a single row, which reads A as it lies.
    if (out.view.size(-1) == 1 && out.view.size(-2) > 1 && a.view.stride(-1) == storage_bytes(a.storage) &&
        out.view.stride(-2) == storage_bytes(out.storage))
        return matmul(transposed(b), transposed(a), transposed(out), threads);
    if (out.storage == Storage::f64) return multiply<double>(table.gemm->f64, a, b, out, batches, threads);
    if (table.dot != nullptr && a.storage == Storage::bf16 && b.storage == Storage::bf16)
        return multiply<HalfPair>(table.dot->gemm, a, b, out, batches, threads);
    multiply<float>(table.gemm->f32, a, b, out, batches, threads);
}

} // namespace npattn
