#pragma once
// Attention over packed keys and values: O = softmax(Q K^T) V for a block of rows. K and V come as the panels of the
// whole unit, or are packed here block by block when the unit has none.

#include "kernels/accumulate.hpp"
#include "kernels/queries.hpp"
#include "kernels/results.hpp"

namespace npattn::NPATTN_ISA {
namespace {

// Keys [first, last) of a unit, first a multiple of PANEL, and their values as panels; those of the values are
// `value_panel` apart.
template <class P, class T>
void pack(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t first, std::int64_t last,
          P* keys, P* values, std::ptrdiff_t value_panel) {
    const std::int64_t count = last - first;
    const auto pack_with = [&](auto pack_one, std::ptrdiff_t size) {
        pack_one(unit.key + first * call.key_position, size, call.key_position, call.head_dim, count,
                 std::int64_t{0}, panel_count(count), keys, PANEL * depths<P>(call.head_dim));
        pack_one(unit.value + first * call.value_position, call.value_position, size, count, call.value_dim,
                 std::int64_t{0}, panel_count(call.value_dim), values, value_panel);
    };
    if constexpr (TOGETHER<P> == 2) {
        pack_with(pack_pairs, HALF);
    } else {
        with_storage<T>(call.key_storage, [&]<class S>(S) { pack_with(pack_panels<S>, sizeof(S)); });
    }
}

template <class P, class T>
void pack_unit(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t first,
               std::int64_t last) {
    auto* keys = static_cast<P*>(const_cast<void*>(unit.key_panels));
    auto* values = static_cast<P*>(const_cast<void*>(unit.value_panels));
    pack(call, unit, first, last, keys + first * depths<P>(call.head_dim), values + depths<P>(first) * PANEL,
         PANEL * depths<P>(unit.key_len));
}

// P: what queries, keys, weights and values are multiplied as.
template <class P, class T = Sum<P>> class PackedProducts {
public:
    using Weight = P;
    static constexpr int key_depth_block = KEY_BLOCK; // keys summed at a time

    PackedProducts(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t rows,
                   Scratch& scratch)
        : call_(call), unit_(unit), rows_((rows + GROUP_ROWS - 1) / GROUP_ROWS * GROUP_ROWS) {
        queries_ = take_queries<P>(rows_, call.head_dim, scratch);
        if (unit.key_panels) return;
        block_keys_ = scratch.take<P>(KEY_BLOCK * depths<P>(call.head_dim));
        block_values_ = scratch.take<P>(depths<P>(KEY_BLOCK) * padded<T>(call.value_dim));
    }

    void copy_queries(std::int64_t first, std::int64_t last) {
        gather_queries(call_, &unit_.query, first, last, rows_, queries_);
    }

    void begin_block(std::int64_t block, std::int64_t end) {
        if (unit_.key_panels) {
            keys_ = static_cast<const P*>(unit_.key_panels) + block * depths<P>(call_.head_dim);
            values_ = static_cast<const P*>(unit_.value_panels) + depths<P>(block) * PANEL;
            value_panel_ = depths<P>(unit_.key_len) * PANEL;
            return;
        }
        value_panel_ = depths<P>(KEY_BLOCK) * PANEL;
        pack(call_, unit_, block, end, block_keys_, block_values_, value_panel_);
        keys_ = block_keys_;
        values_ = block_values_;
    }

    void scores(int group, int rows, int begin, int end, T* scores) const {
        const std::ptrdiff_t panel = PANEL * depths<P>(call_.head_dim);
        for (std::int64_t dim = 0; dim < call_.head_dim; dim += ROW_DIMS<P>) {
            const TileOperands<P> operands = {
                queries_at(queries_, rows_, group * GROUP_ROWS, dim),
                reinterpret_cast<const char*>(keys_ + begin / PANEL * panel + depths<P>(dim) * PANEL),
                PANEL * sizeof(P),
                panel * static_cast<std::ptrdiff_t>(sizeof(P)),
                depths<P>(smaller(ROW_DIMS<P>, call_.head_dim - dim)),
                TOGETHER<P> == 1 ? score_depth_block(call_.key_len) : DEPTH_BLOCK,
                reinterpret_cast<char*>(scores + begin),
                ROW_STRIDE * sizeof(T),
                dim == 0 ? Start::zero : Start::add,
                nullptr};
            group_product(rows, end - begin, operands);
        }
    }

    // The panels and the output are padded, so the last vector may be whole.
    template <class Beside>
    void weigh(int rows, int begin, int end, const T* weights, Start start, T* output, std::int64_t width,
               Beside& beside) const {
        constexpr int lanes = Vec<T>::lanes;
        const TileOperands<P> operands = {
            reinterpret_cast<const P*>(weights) + begin / TOGETHER<P>,
            reinterpret_cast<const char*>(values_ + begin / TOGETHER<P> * PANEL),
            PANEL * sizeof(P),
            value_panel_ * static_cast<std::ptrdiff_t>(sizeof(P)),
            depths<P>(end - begin),
            key_depth_block,
            reinterpret_cast<char*>(output),
            width * static_cast<std::ptrdiff_t>(sizeof(T)),
            start,
            nullptr};
        const std::int64_t columns = (call_.value_dim + lanes - 1) / lanes * lanes;
        group_product(rows, columns, operands, beside);
    }

private:
    const AttentionCall<T>& call_;
    const AttentionUnit<T>& unit_;
    std::int64_t rows_; // of the task, whole groups
    P* queries_;
    P* block_keys_ = nullptr;
    P* block_values_ = nullptr;
    const P* keys_ = nullptr;   // of the current block
    const P* values_ = nullptr; // of the current block
    std::int64_t value_panel_ = 0;
};

// Scratch of a task of so many rows, in the order in which attend() takes it.
template <class P, class T = Sum<P>> struct Task {
    PackedProducts<P> products;
    RowBlock<T> rows;
    AttentionPartial<T> state;

    Task(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t count, Scratch& scratch)
        : products(call, unit, count, scratch), rows(count, scratch) {
        state.maximum = scratch.take<T>(count);
        state.sum = scratch.take<T>(count);
        state.output = scratch.take<T>(count * padded<T>(call.value_dim));
        T* const exact_sum = TOGETHER<P> == 1 ? nullptr : scratch.take<T>(count);
        state.exact_sum = unit.lse || unit.weights ? exact_sum : nullptr;
    }
};

template <class P, class T = Sum<P>>
std::size_t scratch_bytes(const AttentionCall<T>& call, std::int64_t rows) {
    Scratch counter(nullptr);
    const AttentionUnit<T> unpacked = {};
    Task<P>(call, unpacked, rows, counter);
    return counter.used();
}

template <class P, class T = Sum<P>>
void attend(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t first, std::int64_t last,
            void* memory) {
    const ProductRegisters<P> registers;
    Scratch scratch(memory);
    Task<P> task(call, unit, last - first, scratch);
    task.rows.set(call, unit, first, last);
    task.products.copy_queries(first, last);
    if (call.write == Write::output) {
        accumulate_safely(
            call, unit, task.rows, 0, unit.key_len, task.products, task.state,
            [&](const Group<T>& group, std::int64_t r) { write_rows(call, unit, group, r, task.state); });
    }
    if (unit.weights) write_weights(call, unit, task.rows, task.products, task.state);
}

template <class P, class T = Sum<P>>
constexpr AttentionKernels<T> attention_kernels = {TASK_ROWS, TOGETHER<P>, scratch_bytes<P>, pack_unit<P>,
                                                   attend<P>};

} // namespace
} // namespace npattn::NPATTN_ISA
