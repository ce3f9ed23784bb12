#include <cstring>

#include "ops/product.hpp"

namespace npattn {
namespace {

// Pairs that no instruction multiplies.
struct WidenedPairs {
    static constexpr std::int64_t blocks = 1;
    ReadyPanels<HalfPair> pairs;
    Storage storage;

    void multiply(const GemmKernels<float>&, const float* rows, std::int64_t count, std::int64_t k,
                  std::int64_t depth, std::int64_t width, Start start, const float* bias, char* c,
                  std::ptrdiff_t c_row) const {
        active_table().gemm->multiply_pairs(storage, rows, pairs.first + held<HalfPair>(k) * PANEL,
                                            pairs.stride, count, depth, width, start, bias, c, c_row);
    }
};

template <class P, class PanelsAt>
void multiply_packed(const GemmKernels<P>& gemm, const Operand& a, const void* bias, const Operand& out,
                     const HeadRotation* rotation, std::int64_t batches, int threads,
                     const PanelsAt& panels_at) {
    const Operand b = out; // only its leading axes are looked at, and none of its memory
    const Product<P> whole = product<P>(a, b, out, 0);
    if (whole.seconds() * static_cast<double>(batches) < 30e-6) threads = 1;
    const Blocks blocks(whole.rows, whole.columns, gemm.rows, gemm.block_rows, threads,
                        rotation ? rotation->width : 1);
    const std::size_t bytes = row_scratch_bytes(gemm, whole, blocks.columns);
    CallScratch scratch(static_cast<std::size_t>(threads) * bytes, 0, threads);
    const std::int64_t tasks = blocks.column_count * blocks.row_count; // of one batch element
    parallel_for(batches * tasks, threads, [&](std::int64_t task, int thread) {
        const std::int64_t batch = task / tasks;
        const Product<P> p = product<P>(a, b, out, batch);
        const std::int64_t column = task / blocks.row_count % blocks.column_count * blocks.columns;
        const std::int64_t row = task % blocks.row_count * blocks.rows;
        const std::int64_t rows = std::min(blocks.rows, p.rows - row);
        const std::int64_t columns = std::min(blocks.columns, p.columns - column);
        multiply_rows(gemm, p, row, rows, column, columns, 0, p.depth, true, panels_at(column / PANEL),
                      static_cast<const Sum<P>*>(bias),
                      scratch.own() + static_cast<std::size_t>(thread) * bytes);
        if (rotation != nullptr)
            rotate_heads(*rotation, p.c_storage, p.c_at(row, column), p.c_row, batch * p.rows + row, rows,
                         column, columns);
    });
}

bool half(Storage storage) { return storage == Storage::f16 || storage == Storage::bf16; }

std::size_t panel_bytes(const PackedPanels& packed) {
    const bool pairs = half(packed.storage);
    const std::int64_t rows = pairs ? held<HalfPair>(packed.depth) : packed.depth;
    const std::size_t row =
        PANEL * (pairs ? sizeof(HalfPair) : static_cast<std::size_t>(storage_bytes(packed.storage)));
    return bytes_product(static_cast<std::size_t>(rows), row);
}

// The panels of T or HalfPair from number `panel` on.
template <class P>
ReadyPanels<P> panels_from(const PackedPanels& packed, std::int64_t panel, std::int64_t blocks = 1) {
    const std::ptrdiff_t stride = held<P>(packed.depth) * PANEL;
    return {packed.panels.as<P>() + panel * stride, stride, blocks};
}

} // namespace

PackedPanels pack_matrix(const Operand& b, int threads) {
    const GemmTable& gemm = *active_table().gemm;
    const TensorView& view = b.view;
    PackedPanels packed;
    packed.depth = view.size(0);
    packed.columns = view.size(1);
    packed.storage = b.storage;
    const std::int64_t panels = panel_count(packed.columns);
    packed.panels = AlignedBuffer(bytes_product(static_cast<std::size_t>(panels), panel_bytes(packed)));
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
                   const HeadRotation* rotation, int threads) {
    const KernelTable& table = active_table();
    const std::int64_t batches = out.view.count(out.view.dimensions - 2);
    if (batches * out.view.size(-2) * out.view.size(-1) == 0) return;
    const auto ready = [&]<class P>(const GemmKernels<P>& gemm) {
        multiply_packed(gemm, a, bias, out, rotation, batches, threads,
                        [&](std::int64_t panel) { return panels_from<P>(packed, panel, gemm.depth_blocks); });
    };
    if (packed.storage == Storage::f64) return ready(table.gemm->f64);
    if (packed.storage == Storage::f32) return ready(table.gemm->f32);
    if (table.dot != nullptr && a.storage == Storage::bf16 && packed.storage == Storage::bf16)
        return ready(table.dot->gemm);
    multiply_packed(table.gemm->f32, a, bias, out, rotation, batches, threads, [&](std::int64_t panel) {
        return WidenedPairs{panels_from<HalfPair>(packed, panel), packed.storage};
    });
}

} // namespace npattn
