// Attention over packed keys and values: O = softmax(Q K^T) V for a block of rows. Q is packed by groups of
// TILE_ROWS rows; K and V come as the panels of the whole unit, or are packed here block by block when the
// unit has none.

#include "kernels/attention.hpp"

namespace npattn::NPATTN_ISA {
namespace {

constexpr int TASK_ROWS = 96; // a multiple of every ISA's TILE_ROWS

// Head dims summed at a time. Scores of vectors with a common offset are large and nearly cancel in the
// softmax, so their rounding shows; the sums are kept short, shorter where keys are few and the last percent
// of speed matters less.
constexpr std::int64_t score_depth_block(std::int64_t key_len) {
    return key_len < 64 ? 16 : key_len < 128 ? 32 : 64;
}

template <class T> class PackedProducts {
public:
    static constexpr int key_depth_block = KEY_BLOCK; // keys summed at a time

    PackedProducts(const AttentionCall<T>& call, const AttentionUnit<T>& unit, Scratch& scratch)
        : call_(call), unit_(unit) {
        constexpr std::int64_t slack = 64; // pack_vectors stores whole registers
        queries_ = scratch.take<T>(TASK_ROWS * call.head_dim + slack);
        if (unit.key_panels) return;
        block_keys_ = scratch.take<T>(KEY_BLOCK * call.head_dim);
        block_values_ = scratch.take<T>(KEY_BLOCK * padded<T>(call.value_dim));
    }

    void pack_queries(std::int64_t first, std::int64_t last) {
        const T sign = call_.scale < T(0) ? T(-1) : T(1);
        for (std::int64_t r = first; r < last; r += TILE_ROWS) {
            const char* rows[TILE_ROWS];
            for (int i = 0; i < TILE_ROWS; ++i) {
                rows[i] = r + i < last ? unit_.query + (r + i) / call_.group * call_.query_position +
                                             (r + i) % call_.group * call_.query_head
                                       : nullptr;
            }
            pack_vectors<TILE_ROWS, T>(rows, sizeof(T), call_.head_dim, sign,
                                       queries_ + (r - first) * call_.head_dim);
        }
    }

    void begin_block(std::int64_t block, std::int64_t end) {
        if (unit_.key_panels) {
            keys_ = unit_.key_panels + block * call_.head_dim;
            values_ = unit_.value_panels + block * PANEL;
            value_panel_ = unit_.key_len * PANEL;
            return;
        }
        const std::int64_t count = end - block;
        for (std::int64_t p = 0; p < panel_count(count); ++p) {
            pack_strip<PANEL, T>(unit_.key + block * call_.key_position, sizeof(T), call_.key_position,
                                 call_.head_dim, count, p * PANEL, block_keys_ + p * PANEL * call_.head_dim);
        }
        for (std::int64_t p = 0; p < panel_count(call_.value_dim); ++p) {
            pack_strip<PANEL, T>(unit_.value + block * call_.value_position, call_.value_position, sizeof(T),
                                 count, call_.value_dim, p * PANEL, block_values_ + p * PANEL * KEY_BLOCK);
        }
        keys_ = block_keys_;
        values_ = block_values_;
        value_panel_ = KEY_BLOCK * PANEL;
    }

    void scores(int group, int rows, int begin, int end, T* scores) const {
        const TileOperands<T> operands = {queries_ + group * TILE_ROWS * call_.head_dim,
                                          reinterpret_cast<const char*>(keys_ + begin * call_.head_dim),
                                          PANEL * sizeof(T),
                                          PANEL * call_.head_dim * static_cast<std::ptrdiff_t>(sizeof(T)),
                                          call_.head_dim,
                                          score_depth_block(call_.key_len),
                                          reinterpret_cast<char*>(scores + begin),
                                          SCORE_STRIDE * sizeof(T),
                                          Start::zero,
                                          nullptr};
        row_product<TILE_ROWS, TILE_VECTORS, 1, TILE_ROWS>(rows, end - begin, operands);
    }

    // The panels and the output are padded, so the last vector may be whole.
    void weigh(int rows, int begin, int end, const T* weights, T* output, std::int64_t width) const {
        constexpr int lanes = Vec<T>::lanes;
        const TileOperands<T> operands = {weights + begin,
                                          reinterpret_cast<const char*>(values_ + begin * PANEL),
                                          PANEL * sizeof(T),
                                          value_panel_ * static_cast<std::ptrdiff_t>(sizeof(T)),
                                          end - begin,
                                          key_depth_block,
                                          reinterpret_cast<char*>(output),
                                          width * static_cast<std::ptrdiff_t>(sizeof(T)),
                                          Start::add,
                                          nullptr};
        row_product<TILE_ROWS, TILE_VECTORS, SCORE_STRIDE, 1>(
            rows, (call_.value_dim + lanes - 1) / lanes * lanes, operands);
    }

private:
    const AttentionCall<T>& call_;
    const AttentionUnit<T>& unit_;
    T* queries_;
    T* block_keys_ = nullptr;
    T* block_values_ = nullptr;
    const T* keys_ = nullptr;   // of the current block
    const T* values_ = nullptr; // of the current block
    std::int64_t value_panel_ = 0;
};

// Scratch of one task, in the order in which attend() takes it.
template <class T> struct Task {
    PackedProducts<T> products;
    RowBlock<T> rows;
    AttentionPartial<T> state;

    Task(const AttentionCall<T>& call, const AttentionUnit<T>& unit, Scratch& scratch)
        : products(call, unit, scratch), rows(TASK_ROWS, scratch) {
        state.maximum = scratch.take<T>(TASK_ROWS);
        state.sum = scratch.take<T>(TASK_ROWS);
        state.output = scratch.take<T>(TASK_ROWS * padded<T>(call.value_dim));
    }
};

template <class T> std::size_t scratch_bytes(const AttentionCall<T>& call) {
    Scratch counter(nullptr);
    const AttentionUnit<T> unpacked = {};
    Task<T>(call, unpacked, counter);
    return counter.used();
}

template <class T>
void attend(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t first, std::int64_t last,
            void* memory) {
    Scratch scratch(memory);
    Task<T> task(call, unit, scratch);
    task.rows.set(call, unit, first, last);
    task.products.pack_queries(first, last);
    if (call.write == Write::output) {
        accumulate_safely(call, unit, task.rows, 0, unit.key_len, task.products, task.state);
        write_rows(call, unit, task.rows, task.state);
    }
    if (unit.weights) write_weights(call, unit, task.rows, task.products, task.state);
}

template <class T> constexpr AttentionKernels<T> attention_kernels = {TASK_ROWS, scratch_bytes<T>, attend<T>};

} // namespace

extern const AttentionTable attention_table;
const AttentionTable attention_table = {attention_kernels<float>, attention_kernels<double>};

} // namespace npattn::NPATTN_ISA
