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
template <class P>
constexpr std::int64_t block_depth = std::is_same_v<P, HalfPair> ? 2 * DEPTH_BLOCK : DEPTH_BLOCK;
constexpr std::int64_t block_columns = 512;   // columns of B that a thread packs for itself at a time
constexpr std::int64_t direct_columns = 4096; // of C, whose sums a thread keeps while it reads B as it lies
constexpr std::int64_t narrow_block = 524288; // elements, where it packs all depths of some columns
// Of B, packed at a time and shared by all threads.
constexpr std::int64_t wave_depth = 2048;
constexpr std::size_t wave_bytes = std::size_t{8} << 20;
constexpr std::int64_t pack_step = 8; // panels of one packing task

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// How many P hold `depth` depths.
template <class P> std::int64_t held(std::int64_t depth) {
    return std::is_same_v<P, HalfPair> ? ceil_div(depth, 2) : depth;
}

// C (rows, columns) = start + A (rows, depth) B (depth, columns), computed on operands copied to P: pointers and
// strides in bytes.
template <class P> struct Product {
    const char* a;
    std::ptrdiff_t a_row, a_depth;
    const char* b;
    std::ptrdiff_t b_depth, b_column;
    char* c;
    std::ptrdiff_t c_row;
    std::int64_t rows, depth, columns;
    Storage a_storage, b_storage, c_storage;

    // C is of a half type: its sums are kept elsewhere until they are whole, which a thread sees to for a block of C.
    bool narrows() const { return c_storage != STORAGE<Sum<P>>; }
    char* c_at(std::int64_t row, std::int64_t column) const {
        return c + row * c_row + column * storage_bytes(c_storage);
    }
    Product columns_of(std::int64_t column, std::int64_t width) const {
        Product part = *this;
        part.b += column * b_column;
        part.c = c_at(0, column);
        part.columns = width;
        return part;
    }

    double seconds() const {
        const auto m = static_cast<double>(rows), k = static_cast<double>(depth),
                   n = static_cast<double>(columns);
        return std::max(2 * m * k * n / 60e9, (m * k + k * n + m * n) * sizeof(P) / 15e9);
    }
};

// Rows of sums that are kept lie this many elements apart: not a power of two, see ROW_STRIDE.
std::int64_t sums_stride(std::int64_t width) { return width + 16; }

// Scratch of a thread for blocks of C up to `width` columns: copied rows, then sums.
template <class P>
constexpr std::size_t copy_bytes = align_up(static_cast<std::size_t>(block_rows* ROW_STRIDE) * sizeof(P));
template <class P> std::size_t row_scratch_bytes(const Product<P>& p, std::int64_t width) {
    const auto sums = static_cast<std::size_t>(std::min(p.rows, block_rows) * sums_stride(width));
    return copy_bytes<P> + (p.narrows() ? align_up(sums * sizeof(float)) : 0);
}

// B as blocks of C meet it: what multiplies copied rows (count, depths [k, k + depth)) by `width` columns of it.
// Panels that wait ready, one every `stride`; `first` is that of the first column.
template <class P> struct ReadyPanels {
    const P* first;
    std::ptrdiff_t stride;

    void multiply(const GemmKernels<P>& gemm, const P* rows, std::int64_t count, std::int64_t k,
                  std::int64_t depth, std::int64_t width, Start start, const Sum<P>* bias, char* c,
                  std::ptrdiff_t c_row) const {
        gemm.multiply(rows, first + held<P>(k) * PANEL, stride, count, held<P>(depth), width, start, bias, c,
                      c_row);
    }
};

// Pairs that no instruction multiplies.
struct WidenedPairs {
    ReadyPanels<HalfPair> pairs;
    Storage storage;

    void multiply(const GemmKernels<float>&, const float* rows, std::int64_t count, std::int64_t k,
                  std::int64_t depth, std::int64_t width, Start start, const float* bias, char* c,
                  std::ptrdiff_t c_row) const {
        active_table().gemm->multiply_pairs(storage, rows, pairs.first + held<HalfPair>(k) * PANEL,
                                            pairs.stride, count, depth, width, start, bias, c, c_row);
    }
};

// B as it lies in memory, its rows contiguous: for a few rows of A, which leave no time to pack it.
struct DirectRows {
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

// Rows [row, row + count) of C over columns [column, column + width) += A B for depths [first, last) of A, which
// begin where `columns` of B do. `fresh`: this is the first depth of the product, so C starts from bias or zero;
// where C narrows, it is the whole product.
template <class P, class Columns>
void multiply_rows(const GemmKernels<P>& gemm, const Product<P>& p, std::int64_t row, std::int64_t count,
                   std::int64_t column, std::int64_t width, std::int64_t first, std::int64_t last, bool fresh,
                   const Columns& columns, const Sum<P>* bias, char* scratch) {
    using T = Sum<P>;
    P* const rows_copy = reinterpret_cast<P*>(scratch);
    char* const sums = p.narrows() ? scratch + copy_bytes<P> : p.c_at(row, column);
    const std::ptrdiff_t sums_row =
        p.narrows() ? sums_stride(width) * static_cast<std::ptrdiff_t>(sizeof(T)) : p.c_row;
    std::int64_t k = first;
    do {
        const std::int64_t depth = std::min(block_depth<P>, last - k);
        gemm.copy_rows(p.a_storage, p.a + row * p.a_row + k * p.a_depth, p.a_row, p.a_depth, count, depth,
                       rows_copy);
        const Start start = !fresh || k > first ? Start::add : bias ? Start::bias : Start::zero;
        columns.multiply(gemm, rows_copy, count, k - first, depth, width, start,
                         bias ? bias + column : nullptr, sums, sums_row);
        k += depth;
    } while (k < last && !stop_requested());
    if constexpr (std::is_same_v<T, float>) {
        if (!p.narrows()) return;
        active_table().gemm->narrow_rows(p.c_storage, reinterpret_cast<const float*>(sums),
                                         sums_stride(width), count, width, p.c_at(row, column), p.c_row);
    }
}

// Few enough rows that they read B as it lies in memory.
template <class P> bool reads_directly(const GemmKernels<P>& gemm, const Product<P>& p) {
    return p.rows <= gemm.rows && p.rows <= 8 && p.b_column == storage_bytes(p.b_storage);
}

// What one thread does of B at a time. Packed, where C narrows, it is all depths of fewer columns.
template <class P> struct SerialBlock {
    bool direct;
    std::int64_t depth, columns;

    SerialBlock(const GemmKernels<P>& gemm, const Product<P>& p) : direct(reads_directly(gemm, p)) {
        depth = direct || p.narrows() ? p.depth : std::min(p.depth, block_depth<P>);
        const std::int64_t panels = direct        ? direct_columns / PANEL
                                    : p.narrows() ? narrow_block / PANEL / std::max(depth, block_depth<P>)
                                                  : block_columns / PANEL;
        columns = PANEL * std::clamp<std::int64_t>(panels, 1, panel_count(p.columns));
    }
    std::size_t panel_bytes() const {
        return direct ? 0 : align_up(static_cast<std::size_t>(columns * held<P>(depth)) * sizeof(P));
    }
    std::size_t bytes(const Product<P>& p) const { return panel_bytes() + row_scratch_bytes(p, columns); }
};

// One thread: packs a block of B, then passes all rows over it.
template <class P> void multiply_serial(const GemmKernels<P>& gemm, const Product<P>& p, char* scratch) {
    const Sum<P>* const no_bias = nullptr;
    const SerialBlock<P> block(gemm, p);
    if (block.direct) {
        for (std::int64_t column = 0; column < p.columns; column += block.columns) {
            const DirectRows rows = {p.b + column * p.b_column, p.b_depth, p.b_storage};
            multiply_rows(gemm, p, 0, p.rows, column, std::min(block.columns, p.columns - column), 0, p.depth,
                          true, rows, no_bias, scratch);
        }
        return;
    }
    P* const panels = reinterpret_cast<P*>(scratch);
    for (std::int64_t column = 0; column < p.columns; column += block.columns) {
        const std::int64_t width = std::min(block.columns, p.columns - column);
        std::int64_t k = 0;
        do {
            const std::int64_t depth = std::min(block.depth, p.depth - k);
            const std::ptrdiff_t stride = held<P>(depth) * PANEL;
            gemm.pack_panels(p.b_storage, p.b + k * p.b_depth + column * p.b_column, p.b_depth, p.b_column,
                             depth, width, 0, panel_count(width), panels, stride);
            for (std::int64_t row = 0; row < p.rows; row += block_rows) {
                multiply_rows(gemm, p, row, std::min(block_rows, p.rows - row), column, width, k, k + depth,
                              k == 0, ReadyPanels<P>{panels, stride}, no_bias, scratch + block.panel_bytes());
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

// Each thread on columns of its own.
template <class P, class ProductAt>
void multiply_columns(const GemmKernels<P>& gemm, const ProductAt& at, std::int64_t batches, int threads) {
    const Product<P> any = at(0); // all of one size
    const std::int64_t width =
        std::max<std::int64_t>(128, ceil_div(ceil_div(any.columns, threads), PANEL) * PANEL);
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

// All threads on one product after the other: waves of B are packed together, then blocks of C computed; a block waits for
// its panels. All memory is taken before anything is written.
template <class P, class ProductAt>
void multiply_parallel(const GemmKernels<P>& gemm, const ProductAt& at, std::int64_t batches, int threads) {
    const Product<P> any = at(0); // all of one size
    if (reads_directly(gemm, any)) return multiply_columns<P>(gemm, at, batches, threads);
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
                    while (open[static_cast<std::size_t>(c)].load(std::memory_order_acquire) != 0) {
                        if (stop_requested()) return;
                        std::this_thread::yield();
                    }
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
Product<P> product(const Operand& a, const Operand& b, const Operand& out, std::int64_t batch) {
    const int leading = out.view.dimensions - 2;
    return {a.view.data + a.view.offset(batch, leading),
            a.view.stride(-2),
            a.view.stride(-1),
            b.view.data + b.view.offset(batch, leading),
            b.view.stride(-2),
            b.view.stride(-1),
            out.view.data + out.view.offset(batch, leading),
            out.view.stride(-2),
            out.view.size(-2),
            a.view.size(-1),
            out.view.size(-1),
            a.storage,
            b.storage,
            out.storage};
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

template <class P, class PanelsAt>
void multiply_packed(const GemmKernels<P>& gemm, const Operand& a, const void* bias, const Operand& out,
                     std::int64_t batches, int threads, const PanelsAt& panels_at) {
    const Operand b = out; // only its leading axes are looked at, and none of its memory
    const Product<P> whole = product<P>(a, b, out, 0);
    if (whole.seconds() * static_cast<double>(batches) < 30e-6) threads = 1;
    const Blocks blocks(whole.rows, whole.columns, gemm.rows, threads);
    const std::size_t bytes = row_scratch_bytes(whole, blocks.columns);
    CallScratch scratch(static_cast<std::size_t>(threads) * bytes, 0, threads);
    const std::int64_t tasks = blocks.column_count * blocks.row_count; // of one batch element
    parallel_for(batches * tasks, threads, [&](std::int64_t task, int thread) {
        const Product<P> p = product<P>(a, b, out, task / tasks);
        const std::int64_t column = task / blocks.row_count % blocks.column_count * blocks.columns;
        const std::int64_t row = task % blocks.row_count * blocks.rows;
        char* const own = scratch.own() + static_cast<std::size_t>(thread) * bytes;
        multiply_rows(gemm, p, row, std::min(blocks.rows, p.rows - row), column,
                      std::min(blocks.columns, p.columns - column), 0, p.depth, true,
                      panels_at(column / PANEL), static_cast<const Sum<P>*>(bias), own);
    });
}

bool half(Storage storage) { return storage == Storage::f16 || storage == Storage::bf16; }

std::size_t panel_bytes(const PackedPanels& packed) {
    return half(packed.storage)
               ? static_cast<std::size_t>(held<HalfPair>(packed.depth) * PANEL) * sizeof(HalfPair)
               : static_cast<std::size_t>(packed.depth * PANEL * storage_bytes(packed.storage));
}

// The panels of T or HalfPair from number `panel` on.
template <class P> ReadyPanels<P> panels_from(const PackedPanels& packed, std::int64_t panel) {
    const std::ptrdiff_t stride = held<P>(packed.depth) * PANEL;
    return {packed.panels.as<P>() + panel * stride, stride};
}

} // namespace

void matmul(const Operand& a, const Operand& b, const Operand& out, int threads) {
    const KernelTable& table = active_table();
    const std::int64_t batches = out.view.count(out.view.dimensions - 2);
    if (batches * out.view.size(-2) * out.view.size(-1) == 0) return;
    if (out.storage == Storage::f64) return multiply<double>(table.gemm->f64, a, b, out, batches, threads);
    if (table.dot != nullptr && a.storage == Storage::bf16 && b.storage == Storage::bf16)
        return multiply<HalfPair>(table.dot->gemm, a, b, out, batches, threads);
    multiply<float>(table.gemm->f32, a, b, out, batches, threads);
}

PackedPanels pack_matrix(const Operand& b, int threads) {
    const GemmTable& gemm = *active_table().gemm;
    const TensorView& view = b.view;
    PackedPanels packed;
    packed.depth = view.size(0);
    packed.columns = view.size(1);
    packed.storage = b.storage;
    const std::int64_t panels = panel_count(packed.columns);
    packed.panels = AlignedBuffer(static_cast<std::size_t>(panels) * panel_bytes(packed));
    parallel_for(panels, panels * PANEL * packed.depth < 100000 ? 1 : threads, [&](std::int64_t p, int) {
        if (b.storage == Storage::f64) {
            gemm.f64.pack_panels(b.storage, view.data, view.stride(0), view.stride(1), packed.depth,
                                 packed.columns, p, p + 1, packed.panels.as<double>(), packed.depth * PANEL);
        } else if (b.storage == Storage::f32) {
            gemm.f32.pack_panels(b.storage, view.data, view.stride(0), view.stride(1), packed.depth,
                                 packed.columns, p, p + 1, packed.panels.as<float>(), packed.depth * PANEL);
        } else {
            gemm.pack_pairs(view.data, view.stride(0), view.stride(1), packed.depth, packed.columns, p, p + 1,
                            packed.panels.as<HalfPair>(), held<HalfPair>(packed.depth) * PANEL);
        }
    });
    return packed;
}

void unpack_matrix(const PackedPanels& packed, const TensorView& out) {
    const std::int64_t size = storage_bytes(packed.storage), together = half(packed.storage) ? 2 : 1;
    for (std::int64_t d = 0; d < packed.depth; ++d) {
        for (std::int64_t c = 0; c < packed.columns; ++c) {
            const std::int64_t row = d / together * PANEL + c % PANEL;
            const char* panel =
                packed.panels.as<char>() + static_cast<std::size_t>(c / PANEL) * panel_bytes(packed);
            std::memcpy(out.data + d * out.stride(0) + c * out.stride(1),
                        panel + (row * together + d % together) * size, static_cast<std::size_t>(size));
        }
    }
}

void matmul_packed(const Operand& a, const PackedPanels& packed, const void* bias, const Operand& out,
                   int threads) {
    const KernelTable& table = active_table();
    const std::int64_t batches = out.view.count(out.view.dimensions - 2);
    if (batches * out.view.size(-2) * out.view.size(-1) == 0) return;
    const auto ready = [&]<class P>(const GemmKernels<P>& gemm) {
        multiply_packed(gemm, a, bias, out, batches, threads,
                        [&](std::int64_t panel) { return panels_from<P>(packed, panel); });
    };
    if (packed.storage == Storage::f64) return ready(table.gemm->f64);
    if (packed.storage == Storage::f32) return ready(table.gemm->f32);
    if (table.dot != nullptr && a.storage == Storage::bf16 && packed.storage == Storage::bf16)
        return ready(table.dot->gemm);
    multiply_packed(table.gemm->f32, a, bias, out, batches, threads, [&](std::int64_t panel) {
        return WidenedPairs{panels_from<HalfPair>(packed, panel), packed.storage};
    });
}

} // namespace npattn
