#include "ops/matmul.hpp"

#include <algorithm>
#include <utility>

#include "ops/product.hpp"

namespace npattn {
namespace {

constexpr std::int64_t block_columns = 512;                 // columns of B that are packed at a time,
constexpr std::int64_t whole_bytes = std::int64_t{4} << 20; // or panels of them with all depths
constexpr std::int64_t least_columns = 128;                 // of a part that a thread computes

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

// What one thread does of B at a time. Packed, where the sums are kept, it is all depths of some columns.
template <class P> struct SerialBlock {
    Reading reading;
    std::int64_t depth, columns;

    SerialBlock(Reading how, const Product<P>& p) : reading(how) {
        const bool direct = reading != Reading::panels;
        const std::int64_t whole_panels = whole_bytes / static_cast<std::int64_t>(sizeof(P)) / PANEL /
                                          held<P>(std::max(p.depth, block_depth<P>));
        const bool whole = p.narrows() || (p.aliases() && whole_panels > 0);
        depth = direct || whole ? p.depth : std::min(p.depth, block_depth<P>);
        const std::int64_t panels = direct  ? Blocks::most_columns / PANEL
                                    : whole ? whole_panels
                                            : block_columns / PANEL;
        columns = PANEL * std::clamp<std::int64_t>(panels, 1, panel_count(p.columns));
    }
    std::size_t panel_bytes() const {
        return reading != Reading::panels
                   ? 0
                   : align_up(static_cast<std::size_t>(columns * held<P>(depth)) * sizeof(P));
    }
    std::size_t bytes(const GemmKernels<P>& gemm, const Product<P>& p) const {
        return panel_bytes() + row_scratch_bytes(gemm, p, columns);
    }
};

// One thread: packs a block of B, then passes all rows over it.
template <class P>
void multiply_serial(const GemmKernels<P>& gemm, Reading how, const Product<P>& p, char* scratch) {
    const Sum<P>* const no_bias = nullptr;
    const SerialBlock<P> block(how, p);
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
                const std::int64_t blocks = std::min<std::int64_t>(gemm.dot_blocks, gemm.block_rows / p.rows);
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
            for (std::int64_t row = 0; row < p.rows && !stop_requested(); row += gemm.block_rows) {
                multiply_rows(gemm, p, row, std::min<std::int64_t>(gemm.block_rows, p.rows - row), column,
                              width, k, k + depth, k == 0, ReadyPanels<P>{panels, stride, gemm.depth_blocks},
                              no_bias, scratch + block.panel_bytes());
            }
            k += depth;
        } while (k < p.depth && !stop_requested());
    }
}

// All threads on one product after the other, each on a part of C, for which it packs B itself: to read panels that
// another core has written costs more than to pack some twice.
template <class P, class ProductAt>
void multiply_parallel(const GemmKernels<P>& gemm, const ProductAt& at, std::int64_t batches, int threads) {
    const Product<P> any = at(0); // all of one size
    const Reading how = reading(gemm, any);
    // More parts than threads where they cost nothing, so that all end together.
    const std::int64_t ranges = how == Reading::columns ? 4 * threads : threads;
    const std::int64_t width =
        std::max(least_columns, ceil_div(ceil_div(any.columns, ranges), PANEL) * PANEL);
    const std::int64_t column_parts = ceil_div(any.columns, width);
    std::int64_t height = any.rows;
    if (how == Reading::panels)
        height = std::max<std::int64_t>(gemm.block_rows, ceil_div(any.rows, ceil_div(threads, column_parts)));
    const std::int64_t parts = column_parts * ceil_div(any.rows, height);
    const Product<P> largest = any.part(0, height, 0, width);
    const std::size_t bytes = SerialBlock<P>(how, largest).bytes(gemm, largest);
    CallScratch scratch(static_cast<std::size_t>(threads) * bytes, 0, threads);
    parallel_for(batches * parts, threads, [&](std::int64_t index, int thread) {
        const std::int64_t part = index % parts;
        const std::int64_t row = part / column_parts * height, column = part % column_parts * width;
        multiply_serial(gemm, how, at(index / parts).part(row, height, column, width),
                        scratch.own() + static_cast<std::size_t>(thread) * bytes);
    });
}

template <class P>
void multiply(const GemmKernels<P>& gemm, const Operand& a, const Operand& b, const Operand& out,
              std::int64_t batches, int threads) {
    const auto at = [&](std::int64_t i) { return product<P>(a, b, out, i); };
    const double seconds = at(0).seconds();
    if (seconds * static_cast<double>(batches) < 30e-6) threads = 1;
    if (threads > 1 && batches < 4 * std::int64_t{threads} && seconds > 30e-6)
        return multiply_parallel<P>(gemm, at, batches, threads);
    const Reading how = reading(gemm, at(0));
    const std::size_t bytes = SerialBlock<P>(how, at(0)).bytes(gemm, at(0));
    CallScratch scratch(static_cast<std::size_t>(threads) * bytes, 0, threads);
    parallel_for(batches, threads, [&](std::int64_t i, int thread) {
        multiply_serial(gemm, how, at(i), scratch.own() + static_cast<std::size_t>(thread) * bytes);
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
