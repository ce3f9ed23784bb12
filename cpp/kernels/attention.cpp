// Attention over packed keys and values: O = softmax(Q K^T) V for a block of rows. K and V come as the panels of the whole unit, or are packed here block by block when the
// unit has none.

#include "kernels/attention.hpp"

namespace npattn::NPATTN_ISA {
namespace {

constexpr int TASK_ROWS = 96; // a multiple of every ISA's TILE_ROWS

// Keys [first, last) of a unit, first a multiple of PANEL, and their values as panels; those of the values are
// `value_panel` apart.
template <class T>
void pack(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t first, std::int64_t last,
          T* keys, T* values, std::ptrdiff_t value_panel) {
    const std::int64_t count = last - first;
    with_storage<T>(call.key_storage, [&]<class S>(S) {
        pack_panels<S>(unit.key + first * call.key_position, sizeof(S), call.key_position, call.head_dim,
                       count, 0, panel_count(count), keys, PANEL * call.head_dim);
        pack_panels<S>(unit.value + first * call.value_position, call.value_position, sizeof(S), count,
                       call.value_dim, 0, panel_count(call.value_dim), values, value_panel);
    });
}

template <class T>
void pack_unit(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t first,
               std::int64_t last) {
    auto* keys = static_cast<T*>(const_cast<void*>(unit.key_panels));
    auto* values = static_cast<T*>(const_cast<void*>(unit.value_panels));
    pack(call, unit, first, last, keys + first * call.head_dim, values + first * PANEL, PANEL * unit.key_len);
}

template <class T> class PackedProducts {
public:
    static constexpr int key_depth_block = KEY_BLOCK; // keys summed at a time

    PackedProducts(const AttentionCall<T>& call, const AttentionUnit<T>& unit, Scratch& scratch)
        : call_(call), unit_(unit) {
        queries_ =
            scratch.take<T>(TASK_ROWS * ROW_STRIDE * ((call.head_dim + DEPTH_BLOCK - 1) / DEPTH_BLOCK));
        if (unit.key_panels) return;
        block_keys_ = scratch.take<T>(KEY_BLOCK * call.head_dim);
        block_values_ = scratch.take<T>(KEY_BLOCK * padded<T>(call.value_dim));
    }

    void copy_queries(std::int64_t first, std::int64_t last) {
        const Vec<T> sign = broadcast<T>(call_.scale < T(0) ? T(-1) : T(1));
        with_storage<T>(call_.query_storage, [&]<class S>(S) {
            constexpr auto size = static_cast<std::ptrdiff_t>(sizeof(S));
            for (std::int64_t r = first; r < last; ++r) {
                const char* row =
                    unit_.query + r / call_.group * call_.query_position + r % call_.group * call_.query_head;
                T* copy = queries_ + (r - first) * ROW_STRIDE;
                for (std::int64_t dim = 0; dim < call_.head_dim; dim += DEPTH_BLOCK) {
                    each_vector<T>(0, smaller(DEPTH_BLOCK, call_.head_dim - dim),
                                   [&](std::int64_t e, auto part) NPATTN_BODY {
                                       store_part(copy + e, load_part<S>(row + e * size, part) * sign, part);
                                   });
                    row += DEPTH_BLOCK * size;
                    copy += TASK_ROWS * ROW_STRIDE;
                }
            }
        });
    }

    void begin_block(std::int64_t block, std::int64_t end) {
        if (unit_.key_panels) {
            keys_ = static_cast<const T*>(unit_.key_panels) + block * call_.head_dim;
            values_ = static_cast<const T*>(unit_.value_panels) + block * PANEL;
            value_panel_ = unit_.key_len * PANEL;
            return;
        }
        value_panel_ = KEY_BLOCK * PANEL;
        pack(call_, unit_, block, end, block_keys_, block_values_, value_panel_);
        keys_ = block_keys_;
        values_ = block_values_;
    }

    void scores(int group, int rows, int begin, int end, T* scores) const {
        const std::ptrdiff_t panel = PANEL * call_.head_dim;
        for (std::int64_t dim = 0; dim < call_.head_dim; dim += DEPTH_BLOCK) {
            const TileOperands<T> operands = {
                queries_ + (dim / DEPTH_BLOCK * TASK_ROWS + group * TILE_ROWS) * ROW_STRIDE,
                reinterpret_cast<const char*>(keys_ + begin / PANEL * panel + dim * PANEL),
                PANEL * sizeof(T),
                panel * static_cast<std::ptrdiff_t>(sizeof(T)),
                smaller(DEPTH_BLOCK, call_.head_dim - dim),
                score_depth_block(call_.key_len),
                reinterpret_cast<char*>(scores + begin),
                ROW_STRIDE * sizeof(T),
                dim == 0 ? Start::zero : Start::add,
                nullptr};
            row_product<TILE_ROWS, TILE_VECTORS>(rows, end - begin, operands);
        }
    }

    // The panels and the output are padded, so the last vector may be whole.
    void weigh(int rows, int begin, int end, const T* weights, Start start, T* output,
               std::int64_t width) const {
        constexpr int lanes = Vec<T>::lanes;
        const TileOperands<T> operands = {weights + begin,
                                          reinterpret_cast<const char*>(values_ + begin * PANEL),
                                          PANEL * sizeof(T),
                                          value_panel_ * static_cast<std::ptrdiff_t>(sizeof(T)),
                                          end - begin,
                                          key_depth_block,
                                          reinterpret_cast<char*>(output),
                                          width * static_cast<std::ptrdiff_t>(sizeof(T)),
                                          start,
                                          nullptr};
        row_product<TILE_ROWS, TILE_VECTORS>(rows, (call_.value_dim + lanes - 1) / lanes * lanes, operands);
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
    task.products.copy_queries(first, last);
    if (call.write == Write::output) {
        accumulate_safely(
            call, unit, task.rows, 0, unit.key_len, task.products, task.state,
            [&](const Group<T>& group, std::int64_t r) { write_rows(call, unit, group, r, task.state); });
    }
    if (unit.weights) write_weights(call, unit, task.rows, task.products, task.state);
}

template <class T>
constexpr AttentionKernels<T> attention_kernels = {TASK_ROWS, scratch_bytes<T>, pack_unit<T>, attend<T>};

} // namespace

extern const AttentionTable attention_table;
const AttentionTable attention_table = {attention_kernels<float>, attention_kernels<double>};

} // namespace npattn::NPATTN_ISA
