#include "ops/softmax.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/aligned_buffer.hpp"
#include "core/parallel.hpp"
#include "dispatch/registry.hpp"
#include "ops/axes.hpp"

namespace npattn {
namespace {

constexpr std::int64_t BLOCK_ELEMENTS = 8192;  // of one task: in cache from the first step to the last
constexpr std::int64_t WORK_ELEMENTS = 131072; // of the scratch of one thread: in its L2
constexpr std::int64_t LONGEST_SEGMENT = 1024 * SUM_PIECE; // between two looks at the stop flag
constexpr std::int64_t ONE_THREAD_ELEMENTS = 65536; // up to here another thread costs more than it helps
constexpr std::int64_t MOST_ROWS = 256;

enum Operand { X, OUT, MASK, SINK, OPERANDS };

// The rows of one task.
struct Slices {
    const char *x, *mask, *sinks;
    char* out;
    std::int64_t rows;
};

// A block of rows goes through the steps of the kernels together. Rows that are not contiguous are gathered
// into the work scratch; where they are too long for it, in segments, again for every step. Elements are stored
// as S; a row of the work scratch has room for T: what is gathered lies at its end, what is made at its start.
template <class S> class Softmax {
    using T = Compute<S>;
    static constexpr bool converts = sizeof(S) != sizeof(T);

public:
    Softmax(SoftmaxResult wanted, const TensorView& x, const TensorView* mask, const TensorView* sinks,
            const TensorView& out, int threads)
        : kernel(kernels<S>(active_table().softmax)), copy(active_table().heads->copy),
          result(wanted), start{x.data, mask != nullptr ? mask->data : nullptr,
                                sinks != nullptr ? sinks->data : nullptr, out.data, 0},
          columns(x.size(-1)) {
        for (int i = 0; i < x.dimensions - 1; ++i) {
            axes.add(x.shape[i], x.strides[i], out.strides[i], mask != nullptr ? mask->strides[i] : 0,
                     sinks != nullptr ? sinks->strides[i] : 0);
        }
        axes.simplify();
        rows = axes.take_innermost(row_stride);
        column_stride[X] = x.stride(-1);
        column_stride[MASK] = mask != nullptr ? mask->stride(-1) : 1;
        column_stride[OUT] = result == SoftmaxResult::logsumexp ? sizeof(S) : out.stride(-1);
        const bool single = columns == 1;
        gathers = !single && column_stride[X] != sizeof(S);
        gathers_mask = !single && column_stride[MASK] != 1;
        const bool strided_out = !single && column_stride[OUT] != sizeof(S);
        streams = result != SoftmaxResult::logsumexp && !strided_out && size() * sizeof(S) >= STREAM_BYTES;
        scatters = strided_out || streams;

        block_rows =
            std::clamp<std::int64_t>(BLOCK_ELEMENTS / std::max<std::int64_t>(columns, 1), 1, MOST_ROWS);
        // A cache line of adjacent slices is read and written whole.
        if (gathers || strided_out) block_rows = std::max(block_rows, adjacent_slices(threads));
        block_rows = std::min(block_rows, rows);
        segment = std::min(columns, LONGEST_SEGMENT);
        if ((needs_work() || gathers_mask) && block_rows * columns > WORK_ELEMENTS) {
            segment = std::max(WORK_ELEMENTS / block_rows / SUM_PIECE, std::int64_t{1}) * SUM_PIECE;
        }
        work_stride = gathers || strided_out ? odd_stride(segment * sizeof(T)) : segment * sizeof(T);
        mask_stride = odd_stride(segment);
    }

    std::int64_t size() const { return axes.elements() * rows * columns; }
    std::int64_t blocks() const { return (rows + block_rows - 1) / block_rows; }
    std::int64_t tasks() const { return rows == 0 ? 0 : axes.elements() * blocks(); }

    std::size_t scratch_bytes() const {
        const auto count = static_cast<std::size_t>(block_rows);
        return state_bytes() + align_up(needs_work() ? count * static_cast<std::size_t>(work_stride) : 0) +
               align_up(gathers_mask ? count * static_cast<std::size_t>(mask_stride) : 0);
    }

    void run(std::int64_t task, char* scratch) const {
        Block block = {slices(task), scratch, state_bytes(), block_rows,
                       state_bytes() +
                           (needs_work() ? align_up(static_cast<std::size_t>(block_rows * work_stride)) : 0)};
        find_maximum(block);
        add_exponentials(block);
        if (result == SoftmaxResult::softmax) {
            write_softmax(block);
        } else if (result == SoftmaxResult::log_softmax) {
            write_log_softmax(block);
        } else {
            write_logsumexp(block);
        }
    }

private:
    struct Block {
        Slices at;
        char* scratch;
        std::size_t work_offset;
        std::int64_t most_rows;
        std::size_t mask_offset;
        std::int64_t fetched = -1; // the segment that x and mask hold
        ConstRows x{}, mask{};

        char* work() const { return scratch + work_offset; }
        T* maximum() const { return reinterpret_cast<T*>(scratch); }
        T* sum() const { return maximum() + most_rows; }
        T* correction() const { return maximum() + 2 * most_rows; }
    };

    // How many slices that lie side by side in memory to take together: several cache lines, where their work
    // fits in the scratch and all threads still have some blocks.
    std::int64_t adjacent_slices(int threads) const {
        constexpr std::int64_t line = 64 / sizeof(S);
        for (std::int64_t slices = 4 * line; slices > line; slices /= 2) {
            const std::int64_t count = axes.elements() * ((rows + slices - 1) / slices);
            if (slices * columns <= WORK_ELEMENTS && count >= 4 * threads) return slices;
        }
        return line;
    }

    // An odd number of cache lines: rows a power of two apart would share few places of the L1 cache.
    static std::ptrdiff_t odd_stride(std::int64_t bytes) {
        return static_cast<std::ptrdiff_t>(align_up(static_cast<std::size_t>(bytes)) + 64);
    }

    std::size_t state_bytes() const { return align_up(3 * static_cast<std::size_t>(block_rows) * sizeof(T)); }
    bool needs_work() const { return gathers || scatters || (converts && result == SoftmaxResult::softmax); }
    // The exponentials wait for their sum in the output, in the work scratch, or (too long for it) not at
    // all.
    bool keeps_exponentials() const { return !(scatters || converts) || segment == columns; }

    Slices slices(std::int64_t task) const {
        std::ptrdiff_t offset[OPERANDS];
        axes.offsets(task / blocks(), offset);
        const std::int64_t first = task % blocks() * block_rows;
        for (int k = 0; k < OPERANDS; ++k) offset[k] += first * row_stride[k];
        return {start.x + offset[X], start.mask == nullptr ? nullptr : start.mask + offset[MASK],
                start.sinks == nullptr ? nullptr : start.sinks + offset[SINK], start.out + offset[OUT],
                std::min(block_rows, rows - first)};
    }

    template <class Step> void each_segment(Step step) const {
        for (std::int64_t begin = 0; begin < columns; begin += segment) {
            if (begin > 0 && stop_requested()) return; // parallel_for will throw
            step(begin, std::min(segment, columns - begin));
        }
    }

    // Columns [begin, begin + count) of x and mask as contiguous rows.
    void fetch(Block& block, std::int64_t begin, std::int64_t count) const {
        if (block.fetched == begin) return;
        block.fetched = begin;
        const char* x = block.at.x + begin * column_stride[X];
        block.x = {x, row_stride[X]};
        if (gathers) {
            char* gathered = block.work() + segment * static_cast<std::ptrdiff_t>(sizeof(T) - sizeof(S));
            copy(x, row_stride[X], column_stride[X], gathered, work_stride, sizeof(S), block.at.rows, count,
                 sizeof(S), false);
            block.x = {gathered, work_stride};
        }
        if (block.at.mask == nullptr) return;
        const char* mask = block.at.mask + begin * column_stride[MASK];
        block.mask = {mask, row_stride[MASK]};
        if (gathers_mask) {
            char* bytes = block.scratch + block.mask_offset;
            copy(mask, row_stride[MASK], column_stride[MASK], bytes, mask_stride, 1, block.at.rows, count, 1,
                 false);
            block.mask = {bytes, mask_stride};
        }
    }

    T sink(const Block& block, std::int64_t row) const {
        T value = -std::numeric_limits<T>::infinity();
        if (block.at.sinks != nullptr)
            std::memcpy(&value, block.at.sinks + row * row_stride[SINK], sizeof value);
        return value;
    }

    // The maximum of every row and its sink; 0 where nothing is to be seen: exp(-inf - 0) is 0, not NaN.
    void find_maximum(Block& block) const {
        T* maximum = block.maximum();
        for (std::int64_t r = 0; r < block.at.rows; ++r) {
            const T logit = sink(block, r); // a NaN shows in the sum
            maximum[r] = std::isnan(logit) ? -std::numeric_limits<T>::infinity() : logit;
        }
        each_segment([&](std::int64_t begin, std::int64_t count) {
            fetch(block, begin, count);
            kernel.maximum(block.x, block.mask, block.at.rows, count, maximum);
        });
        for (std::int64_t r = 0; r < block.at.rows; ++r) {
            if (maximum[r] == -std::numeric_limits<T>::infinity()) maximum[r] = T(0);
        }
    }

    // sum = the denominator of every row; the exponentials are left where write_softmax looks for them.
    void add_exponentials(Block& block) const {
        T *sum = block.sum(), *correction = block.correction();
        std::fill_n(sum, block.at.rows, T(0));
        std::fill_n(correction, block.at.rows, T(0));
        const bool kept = result == SoftmaxResult::softmax && keeps_exponentials();
        each_segment([&](std::int64_t begin, std::int64_t count) {
            fetch(block, begin, count);
            kernel.exponentials(block.x, block.mask, block.at.rows, count, block.maximum(),
                                kept ? exponentials(block, begin) : Rows{}, sum, correction);
        });
        for (std::int64_t r = 0; r < block.at.rows; ++r) {
            sum[r] += correction[r];
            if (block.at.sinks != nullptr) sum[r] += std::exp(sink(block, r) - block.maximum()[r]);
        }
    }

    // Where the results of columns from `begin` on are made: in the output itself, or to be scattered there.
    Rows made(const Block& block, std::int64_t begin) const {
        if (scatters) return {block.work(), work_stride};
        return {block.at.out + begin * column_stride[OUT], row_stride[OUT]};
    }
    // And their exponentials: there too, unless they need more room.
    Rows exponentials(const Block& block, std::int64_t begin) const {
        return converts ? Rows{block.work(), work_stride} : made(block, begin);
    }
    void scatter(const Block& block, std::int64_t begin, std::int64_t count) const {
        if (!scatters) return;
        copy(block.work(), work_stride, sizeof(S), block.at.out + begin * column_stride[OUT], row_stride[OUT],
             column_stride[OUT], block.at.rows, count, sizeof(S), streams);
    }

    void write_softmax(Block& block) const {
        T *factor = block.sum(), *unused = block.correction();
        constexpr T infinity = std::numeric_limits<T>::infinity();
        for (std::int64_t r = 0; r < block.at.rows; ++r) {
            const T sum = factor[r];
            factor[r] = sum == T(0)      ? T(0)
                        : sum < infinity ? T(1) / sum
                                         : std::numeric_limits<T>::quiet_NaN();
        }
        each_segment([&](std::int64_t begin, std::int64_t count) {
            fetch(block, begin, count);
            const Rows e = exponentials(block, begin);
            if (!keeps_exponentials()) {
                kernel.exponentials(block.x, block.mask, block.at.rows, count, block.maximum(), e, unused,
                                    unused);
            }
            kernel.scale({e.data, e.stride}, block.mask, block.at.rows, count, factor, made(block, begin));
            scatter(block, begin, count);
        });
    }

    void write_log_softmax(Block& block) const {
        T* log_sum = block.sum();
        for (std::int64_t r = 0; r < block.at.rows; ++r) {
            log_sum[r] =
                log_sum[r] == T(0) ? T(0) : static_cast<T>(std::log(static_cast<double>(log_sum[r])));
        }
        each_segment([&](std::int64_t begin, std::int64_t count) {
            fetch(block, begin, count);
            kernel.shift(block.x, block.at.rows, count, block.maximum(), log_sum, made(block, begin));
            scatter(block, begin, count);
        });
    }

    void write_logsumexp(const Block& block) const {
        for (std::int64_t r = 0; r < block.at.rows; ++r) {
            const double total = std::log(static_cast<double>(block.sum()[r]));
            const S value = narrow<S>(static_cast<T>(static_cast<double>(block.maximum()[r]) + total));
            std::memcpy(block.at.out + r * row_stride[OUT], &value, sizeof value);
        }
    }

    const SoftmaxKernels<S>& kernel;
    decltype(HeadsTable::copy) copy;
    SoftmaxResult result;
    Slices start;
    std::int64_t columns, rows = 1, block_rows = 1, segment = 0;
    Axes<OPERANDS> axes;
    std::ptrdiff_t row_stride[OPERANDS] = {}, column_stride[OPERANDS] = {};
    std::ptrdiff_t work_stride = 0, mask_stride = 0;
    bool gathers = false, scatters = false, gathers_mask = false, streams = false;
};

} // namespace

template <class S>
void softmax(SoftmaxResult result, const TensorView& x, const TensorView* mask, const TensorView* sinks,
             const TensorView& out, int threads) {
    const Softmax<S> plan(result, x, mask, sinks, out, threads);
    if (plan.tasks() == 0) return;
    threads = plan.size() <= ONE_THREAD_ELEMENTS
                  ? 1
                  : static_cast<int>(std::min<std::int64_t>(threads, plan.tasks()));
    const std::size_t scratch = align_up(plan.scratch_bytes());
    const AlignedBuffer buffer(scratch * static_cast<std::size_t>(threads));
    parallel_for(plan.tasks(), threads, [&](std::int64_t task, int thread) {
        plan.run(task, buffer.as<char>() + static_cast<std::size_t>(thread) * scratch);
    });
}

template void softmax<float>(SoftmaxResult, const TensorView&, const TensorView*, const TensorView*,
                             const TensorView&, int);
template void softmax<double>(SoftmaxResult, const TensorView&, const TensorView*, const TensorView*,
                              const TensorView&, int);
template void softmax<Float16>(SoftmaxResult, const TensorView&, const TensorView*, const TensorView*,
                               const TensorView&, int);
template void softmax<BFloat16>(SoftmaxResult, const TensorView&, const TensorView*, const TensorView*,
                                const TensorView&, int);

} // namespace npattn
