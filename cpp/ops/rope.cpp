#include "ops/rope.hpp"

#include <algorithm>

#include "core/aligned_buffer.hpp"
#include "core/parallel.hpp"
#include "dispatch/registry.hpp"
#include "ops/axes.hpp"

namespace npattn {
namespace {

constexpr std::int64_t BLOCK_BYTES = 131072;         // of x in one task, with its cos and sin in L2
constexpr std::int64_t WORK_BYTES = 8192;            // of what is gathered or scattered at a time, in L1
constexpr std::int64_t ONE_THREAD_ELEMENTS = 131072; // up to here another thread costs more than it helps

enum Operand { X, OUT, COS, SIN, OPERANDS };

// Stride of a table along the axis of x that is `from_end` axes before the last: 0 along the heads, and where
// it broadcasts.
std::ptrdiff_t table_stride(const TensorView& table, int from_end) {
    if (from_end == 2) return 0;
    const int axis = table.dimensions - 1 - (from_end > 2 ? from_end - 1 : from_end);
    return axis < 0 || table.shape[axis] == 1 ? 0 : table.strides[axis];
}

} // namespace

template <class S>
void rotary_embedding(const TensorView& x, const TensorView& cos, const TensorView& sin,
                      const TensorView& out, bool interleaved, bool inverse, int threads) {
    using T = Compute<S>;
    constexpr auto item = static_cast<std::ptrdiff_t>(sizeof(S));
    const std::int64_t width = x.size(-1), pairs = cos.size(-1);
    const RopeKernels<S>& kernel = kernels<S>(active_table().rope);
    const auto copy = active_table().heads->copy;

    // A task is a block of rows. Tasks that differ only in axes which cos and sin do not have (the heads)
    // follow one another: a block of cos and sin is then read from memory once.
    Axes<OPERANDS> axes, own, shared;
    for (int i = 0; i < x.dimensions - 1; ++i) {
        const int from_end = x.dimensions - 1 - i;
        axes.add(x.shape[i], x.strides[i], out.strides[i], table_stride(cos, from_end),
                 table_stride(sin, from_end));
    }
    axes.simplify();
    for (int i = 0; i < axes.count; ++i) {
        const auto& stride = axes.stride[i];
        auto& kind = stride[COS] == 0 && stride[SIN] == 0 ? shared : own;
        kind.add(axes.size[i], stride[X], stride[OUT], stride[COS], stride[SIN]);
    }
    std::ptrdiff_t row_stride[OPERANDS];
    const std::int64_t rows = (own.count > 0 ? own : shared).take_innermost(row_stride);
    const std::int64_t bytes = std::max<std::int64_t>(width * item, 1);
    const std::int64_t block =
        std::clamp<std::int64_t>(BLOCK_BYTES / bytes, 1, std::max<std::int64_t>(rows, 1));
    const std::int64_t blocks = (rows + block - 1) / block, repeats = shared.elements();
    const std::int64_t tasks = own.elements() * blocks * repeats;
    if (tasks == 0 || width == 0) return;

    const std::ptrdiff_t x_column = x.stride(-1), out_column = out.stride(-1);
    const std::int64_t elements = own.elements() * rows * repeats * width;
    const bool gathers = width > 1 && x_column != item, strided_out = width > 1 && out_column != item;
    const bool streams = !strided_out && x.data != out.data && elements * item >= STREAM_BYTES;
    const bool scatters = strided_out || streams;
    threads = elements <= ONE_THREAD_ELEMENTS ? 1 : static_cast<int>(std::min<std::int64_t>(threads, tasks));
    // Without gathering and scattering a block is one piece.
    const bool direct = !gathers && !scatters;
    const std::int64_t piece = direct ? block : std::clamp<std::int64_t>(WORK_BYTES / bytes, 1, block);
    const std::size_t work_bytes = direct ? 0 : align_up(static_cast<std::size_t>(piece * bytes));
    const AlignedBuffer buffer(work_bytes * static_cast<std::size_t>(threads));

    parallel_for(tasks, threads, [&](std::int64_t task, int thread) {
        std::ptrdiff_t at[OPERANDS], repeat[OPERANDS];
        shared.offsets(task % repeats, repeat);
        own.offsets(task / repeats / blocks, at);
        const std::int64_t first = task / repeats % blocks * block;
        const std::int64_t count = std::min(block, rows - first);
        const Rows work = {buffer.as<char>() + static_cast<std::size_t>(thread) * work_bytes, bytes};
        for (int k = 0; k < OPERANDS; ++k) at[k] += repeat[k] + first * row_stride[k];
        for (std::int64_t done = 0; done < count; done += piece) {
            const std::int64_t some = std::min(piece, count - done);
            ConstRows source = {x.data + at[X], row_stride[X]};
            const Rows destination = {out.data + at[OUT], row_stride[OUT]};
            if (gathers) {
                copy(source.data, source.stride, x_column, work.data, work.stride, item, some, width, item,
                     false);
                source = {work.data, work.stride};
            }
            kernel.rotate(source, {cos.data + at[COS], row_stride[COS]},
                          {sin.data + at[SIN], row_stride[SIN]}, some, pairs, width - 2 * pairs, interleaved,
                          inverse ? T(-1) : T(1), scatters ? work : destination);
            if (scatters) {
                copy(work.data, work.stride, item, destination.data, destination.stride, out_column, some,
                     width, item, streams);
            }
            for (int k = 0; k < OPERANDS; ++k) at[k] += some * row_stride[k];
        }
    });
}

namespace {

template <class S>
void rotate_block(const HeadRotation& rotation, char* block, std::ptrdiff_t row_stride, std::int64_t row,
                  std::int64_t rows, std::int64_t heads) {
    const RopeKernels<S>& kernel = kernels<S>(active_table().rope);
    const TensorView &cos = rotation.cos, &sin = rotation.sin;
    const std::int64_t places = cos.size(0), pairs = cos.size(1);
    for (std::int64_t done = 0; done < rows;) {
        const std::int64_t place = (row + done) % places;
        const std::int64_t some = std::min(rows - done, places - place);
        for (std::int64_t head = 0; head < heads; ++head) {
            char* const first =
                block + done * row_stride + head * rotation.width * static_cast<std::ptrdiff_t>(sizeof(S));
            kernel.rotate({first, row_stride}, {cos.data + place * cos.stride(0), cos.stride(0)},
                          {sin.data + place * sin.stride(0), sin.stride(0)}, some, pairs,
                          rotation.width - 2 * pairs, rotation.interleaved, Compute<S>(1),
                          {first, row_stride});
        }
        done += some;
    }
}

} // namespace

void rotate_heads(const HeadRotation& rotation, Storage storage, char* block, std::ptrdiff_t row_stride,
                  std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns) {
    const std::int64_t heads = (std::min(columns, rotation.columns - column)) / rotation.width;
    const auto rotate = [&]<class S>(S) { rotate_block<S>(rotation, block, row_stride, row, rows, heads); };
    switch (storage) {
    case Storage::f64:
        return rotate(double());
    case Storage::f16:
        return rotate(Float16());
    case Storage::bf16:
        return rotate(BFloat16());
    default:
        return rotate(float());
    }
}

template void rotary_embedding<float>(const TensorView&, const TensorView&, const TensorView&,
                                      const TensorView&, bool, bool, int);
template void rotary_embedding<double>(const TensorView&, const TensorView&, const TensorView&,
                                       const TensorView&, bool, bool, int);
template void rotary_embedding<Float16>(const TensorView&, const TensorView&, const TensorView&,
                                        const TensorView&, bool, bool, int);
template void rotary_embedding<BFloat16>(const TensorView&, const TensorView&, const TensorView&,
                                         const TensorView&, bool, bool, int);

} // namespace npattn
