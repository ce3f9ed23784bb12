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

constexpr std::int64_t BLOCK_ELEMENTS = 8192;       // of one task: in cache from the first step to the last
constexpr std::int64_t WORK_ELEMENTS = 131072;      // of the scratch of one thread: in its L2
constexpr std::int64_t ONE_THREAD_ELEMENTS = 65536; // up to here another thread costs more than it helps
constexpr std::int64_t MOST_ROWS = 256;

enum Operand { X, OUT, MASK, SINK, OPERANDS };

// The rows of one task.
struct Slices {
    const char *x, *mask, *sinks;
    char* out;
    std::int64_t rows;
};

// A block of rows goes through the steps of the kernels together. A row that is not contiguous is gathered
// into `work`; it is gathered again for every step, in segments, where it is too long for that.
template <class T> class Softmax {
public:
    Softmax(SoftmaxResult wanted, const TensorView& x, const TensorView* mask, const TensorView* sinks,
            const TensorView& out)
        : kernel(kernels<T>(active_table().softmax)), copy(active_table().heads->copy),
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
        column_stride[OUT] = result == SoftmaxResult::logsumexp ? sizeof(T) : out.stride(-1);
        const bool single = columns == 1;
        gathers = !single && column_stride[X] != sizeof(T);
        scatters = !single && column_stride[OUT] != sizeof(T);
        gathers_mask = !single && column_stride[MASK] != 1;
        streams = result != SoftmaxResult::logsumexp && !scatters && size() * sizeof(T) > STREAM_BYTES;

        block_rows =
            std::clamp<std::int64_t>(BLOCK_ELEMENTS / std::max<std::int64_t>(columns, 1), 1, MOST_ROWS);
        // A cache line of adjacent slices is read and written whole.
        if (gathers || scatters) block_rows = std::max<std::int64_t>(block_rows, 64 / sizeof(T));
        block_rows = std::min(block_rows, rows);
        segment = columns;
        if ((gathers || scatters || streams || gathers_mask) && block_rows * columns > WORK_ELEMENTS) {
            segment = std::max(WORK_ELEMENTS / block_rows / SUM_PIECE, std::int64_t{1}) * SUM_PIECE;
        }
        // An odd number of cache lines apart: rows of a power of two would share few places of the L1 cache.
        work_stride =
            static_cast<std::ptrdiff_t>(align_up(static_cast<std::size_t>(segment) * sizeof(T)) + 64);
        mask_stride = static_cast<std::ptrdiff_t>(align_up(static_cast<std::size_t>(segment)) + 64);
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

    std::size_t state_bytes() const { return align_up(3 * static_cast<std::size_t>(block_rows) * sizeof(T)); }
    bool needs_work() const { return gathers || scatters || streams; }
    // The exponentials wait for their sum in place, in the work scratch, or (too long for it) not at all.
    bool keeps_exponentials() const { return !(scatters || streams) || segment == columns; }

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
            copy(x, row_stride[X], column_stride[X], block.work(), work_stride, sizeof(T), block.at.rows,
                 count, sizeof(T), false);
            block.x = {block.work(), work_stride};
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

    // The maximum of every row and its sink; 0 where nothing is to be seen, so that exp(-inf - 0) is 0 and
    // not NaN.
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
                                kept ? pending(block, begin) : Rows{}, sum, correction);
        });
        for (std::int64_t r = 0; r < block.at.rows; ++r) {
            sum[r] += correction[r];
            if (block.at.sinks != nullptr) sum[r] += std::exp(sink(block, r) - block.maximum()[r]);
        }
    }

    // Where values of columns from `begin` on wait to be finished: in the output, or in the work scratch.
    Rows pending(const Block& block, std::int64_t begin) const {
        if (scatters || streams) return {block.work(), work_stride};
        return {block.at.out + begin * column_stride[OUT], row_stride[OUT]};
    }
    // Where the finished ones go.
    Rows finished(const Block& block, std::int64_t begin) const {
        if (scatters) return {block.work(), work_stride};
        return {block.at.out + begin * column_stride[OUT], row_stride[OUT]};
    }
    void scatter(const Block& block, std::int64_t begin, std::int64_t count) const {
        if (!scatters) return;
        copy(block.work(), work_stride, sizeof(T), block.at.out + begin * column_stride[OUT], row_stride[OUT],
             column_stride[OUT], block.at.rows, count, sizeof(T), false);
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
            const Rows e = pending(block, begin);
            if (!keeps_exponentials()) {
                kernel.exponentials(block.x, block.mask, block.at.rows, count, block.maximum(), e, unused,
                                    unused);
            }
            kernel.scale({e.data, e.stride}, block.mask, block.at.rows, count, factor, finished(block, begin),
                         streams);
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
            kernel.shift(block.x, block.at.rows, count, block.maximum(), log_sum, finished(block, begin),
                         streams);
            scatter(block, begin, count);
        });
    }

    void write_logsumexp(const Block& block) const {
        for (std::int64_t r = 0; r < block.at.rows; ++r) {
            const double total = std::log(static_cast<double>(block.sum()[r]));
            const T value = static_cast<T>(static_cast<double>(block.maximum()[r]) + total);
            std::memcpy(block.at.out + r * row_stride[OUT], &value, sizeof value);
        }
    }

    const SoftmaxKernels<T>& kernel;
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

template <class T>
void softmax(SoftmaxResult result, const TensorView& x, const TensorView* mask, const TensorView* sinks,
             const TensorView& out, int threads) {
    const Softmax<T> plan(result, x, mask, sinks, out);
    if (plan.tasks() == 0) return;
    if (plan.size() <= ONE_THREAD_ELEMENTS) threads = 1;
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

} // namespace npattn
