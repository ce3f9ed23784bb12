#include "ops/matmul_int8.hpp"

#include <cstring>

#include "ops/product.hpp"

namespace npattn {
namespace {

constexpr int block_rows = 96;                              // of C at a time
constexpr std::int64_t chunk_bytes = std::int64_t{4} << 20; // of quantised rows at a time

std::int64_t quads_of(std::int64_t depth) { return ceil_div(depth, 4); }

// Element (d, c) of panels.
std::uint8_t& element(const PackedInt8& packed, std::int64_t d, std::int64_t c) {
    Int8Quad* const panel = packed.panels.as<Int8Quad>() + c / PANEL * quads_of(packed.depth) * PANEL;
    return panel[d / 4 * PANEL + c % PANEL].bytes[d % 4];
}

} // namespace

PackedInt8 pack_int8(const TensorView& q, const float* scales, int threads) {
    PackedInt8 packed;
    packed.depth = q.size(0);
    packed.columns = q.size(1);
    const std::int64_t panels = panel_count(packed.columns), panel = quads_of(packed.depth) * PANEL;
    packed.panels = AlignedBuffer(static_cast<std::size_t>(panels * panel) * sizeof(Int8Quad));
    packed.scales = AlignedBuffer(static_cast<std::size_t>(packed.columns) * sizeof(float));
    if (packed.columns > 0) std::memcpy(packed.scales.as<float>(), scales, packed.scales.bytes());
    parallel_for(panels, panels * panel < 50000 ? 1 : threads, [&](std::int64_t p, int) {
        std::memset(packed.panels.as<Int8Quad>() + p * panel, 0,
                    static_cast<std::size_t>(panel) * sizeof(Int8Quad));
        for (std::int64_t d = 0; d < packed.depth; ++d) {
            for (std::int64_t c = p * PANEL; c < std::min((p + 1) * PANEL, packed.columns); ++c) {
                std::uint8_t bits;
                std::memcpy(&bits, q.data + d * q.stride(0) + c * q.stride(1), 1);
                element(packed, d, c) = static_cast<std::uint8_t>(bits ^ 0x80u);
            }
        }
    });
    return packed;
}

void unpack_int8(const PackedInt8& packed, const TensorView& out) {
    for (std::int64_t d = 0; d < packed.depth; ++d) {
        for (std::int64_t c = 0; c < packed.columns; ++c) {
            const auto bits = static_cast<std::uint8_t>(element(packed, d, c) ^ 0x80u);
            std::memcpy(out.data + d * out.stride(0) + c * out.stride(1), &bits, 1);
        }
    }
}

// Chunks of rows: quantised by all threads, then multiplied block by block.
void matmul_int8(const Operand& a, const PackedInt8& packed, const float* bias, const Operand& out,
                 const HeadRotation* rotation, int threads) {
    const Int8Table& int8 = *active_table().int8;
    const std::int64_t batches = out.view.count(out.view.dimensions - 2);
    if (batches * out.view.size(-2) * out.view.size(-1) == 0) return;
    const Operand b = out; // only its leading axes are looked at, and none of its memory
    const auto at = [&](std::int64_t i) { return product<float>(a, b, out, i); };
    const Product<float> any = at(0);
    if (any.seconds() / 4 * static_cast<double>(batches) < 30e-6) threads = 1;

    const std::int64_t depth = quads_of(any.depth), blocks = ceil_div(depth, std::int64_t{DEPTH_BLOCK});
    const std::int64_t row_bytes =
        std::max<std::int64_t>(blocks, 1) * ROW_STRIDE * std::int64_t{sizeof(Int8Quad)};
    const std::int64_t most = std::max<std::int64_t>(chunk_bytes / row_bytes / block_rows, 1) * block_rows;
    const std::int64_t chunk = ceil_div(std::min(any.rows, most), int8.rows) * int8.rows; // whole groups
    const Blocks cut(chunk, any.columns, int8.rows, block_rows, threads, rotation ? rotation->width : 1);
    const std::ptrdiff_t block_stride = chunk * ROW_STRIDE, stride = sums_stride(cut.columns);
    const std::size_t own = align_up(static_cast<std::size_t>(cut.rows * stride) * sizeof(std::int32_t));
    const std::size_t state = align_up(static_cast<std::size_t>(chunk) * sizeof(float));
    CallScratch scratch(own * static_cast<std::size_t>(threads),
                        2 * state + static_cast<std::size_t>(chunk * row_bytes), threads);
    auto* const scales = reinterpret_cast<float*>(scratch.shared());
    auto* const sums = reinterpret_cast<std::int32_t*>(scratch.shared() + state);
    auto* const quads = reinterpret_cast<Int8Quad*>(scratch.shared() + 2 * state);
    constexpr std::int64_t rows_a_task = 8;

    const std::int64_t chunks = ceil_div(any.rows, chunk);
    for (std::int64_t index = 0; index < batches * chunks; ++index) {
        const Product<float> p = at(index / chunks);
        const std::int64_t top = index % chunks * chunk, rows = std::min(chunk, p.rows - top);
        parallel_for(ceil_div(rows, rows_a_task), rows * p.depth < 50000 ? 1 : threads,
                     [&](std::int64_t task, int) {
                         const std::int64_t row = task * rows_a_task;
                         int8.quantise_rows(p.a_storage, p.a + (top + row) * p.a_row, p.a_row,
                                            std::min(rows_a_task, rows - row), p.depth, block_stride,
                                            quads + row * ROW_STRIDE, scales + row, sums + row);
                     });
        parallel_for(cut.row_count * cut.column_count, threads, [&](std::int64_t task, int thread) {
            const std::int64_t row = task % cut.row_count * cut.rows,
                               column = task / cut.row_count * cut.columns;
            const std::int64_t count = std::min(cut.rows, rows - row);
            const std::int64_t width = std::min(cut.columns, p.columns - column);
            if (count <= 0) return; // the last chunk has fewer rows
            auto* const block_sums =
                reinterpret_cast<std::int32_t*>(scratch.own() + static_cast<std::size_t>(thread) * own);
            const Int8Quad* const panels = packed.panels.as<Int8Quad>() + column * depth;
            std::int64_t k = 0;
            do {
                int8.multiply(quads + k / DEPTH_BLOCK * block_stride + row * ROW_STRIDE, panels + k * PANEL,
                              depth * PANEL, count, std::min<std::int64_t>(DEPTH_BLOCK, depth - k), width,
                              k == 0 ? Start::zero : Start::add, nullptr, reinterpret_cast<char*>(block_sums),
                              stride * static_cast<std::ptrdiff_t>(sizeof(std::int32_t)));
                k += DEPTH_BLOCK;
            } while (k < depth && !stop_requested());
            int8.scale_rows(p.c_storage, block_sums, stride, count, width, scales + row, sums + row,
                            packed.scales.as<float>() + column, bias ? bias + column : nullptr,
                            p.c_at(top + row, column), p.c_row);
            if (rotation != nullptr)
                rotate_heads(*rotation, p.c_storage, p.c_at(top + row, column), p.c_row,
                             index / chunks * p.rows + top + row, count, column, width);
        });
    }
}

} // namespace npattn
