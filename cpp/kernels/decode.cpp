// Attention of few rows: keys and values are read where they lie, once, and nothing is packed. The rows are
// all heads of the group (times a few query positions); long keys are cut into ranges that give partial
// results, merged by finish().

#include "kernels/results.hpp"

namespace npattn::NPATTN_ISA {
namespace {

// Dot products of ROWS queries with KEYS keys, stored as S, along head_dim, in vectors; queries are padded with
// zeros to whole vectors.
template <int ROWS, int KEYS, class S, class T>
NPATTN_NOINLINE void dot(const T* queries, std::int64_t query_stride, const char* keys,
                         std::ptrdiff_t key_stride, std::int64_t head_dim, T* scores) {
    constexpr int lanes = Vec<T>::lanes;
    Vec<T> sums[ROWS][KEYS];
    for (int r = 0; r < ROWS; ++r) {
        for (int k = 0; k < KEYS; ++k) sums[r][k] = zero<T>();
    }
    const auto step = [&](std::int64_t e, auto load_key) {
        Vec<T> key[KEYS];
        for (int k = 0; k < KEYS; ++k) {
            key[k] = load_key(keys + k * key_stride + e * static_cast<std::ptrdiff_t>(sizeof(S)));
        }
        for (int r = 0; r < ROWS; ++r) {
            const Vec<T> query = load<T>(queries + r * query_stride + e);
            for (int k = 0; k < KEYS; ++k) sums[r][k] = fma(query, key[k], sums[r][k]);
        }
    };
    std::int64_t e = 0;
    for (; e + lanes <= head_dim; e += lanes) step(e, [](const char* p) { return load<S>(p); });
    if (e < head_dim)
        step(e, [&](const char* p) { return load_first<S>(p, static_cast<int>(head_dim - e)); });
    for (int r = 0; r < ROWS; ++r) {
        for (int k = 0; k < KEYS; ++k) scores[r * ROW_STRIDE + k] = reduce_add(sums[r][k]);
    }
}

// Keys and values are stored as S.
template <class S, class T = Compute<S>> class DirectProducts {
public:
    using Weight = T;
    static constexpr int key_depth_block = 64; // keys summed at a time

    DirectProducts(const AttentionCall<T>& call, const AttentionUnit<T>& unit, Scratch& scratch)
        : call_(call), unit_(unit),
          query_stride_((call.head_dim + Vec<T>::lanes - 1) / Vec<T>::lanes * Vec<T>::lanes) {
        queries_ = scratch.take<T>(call.query_len * call.group * query_stride_);
    }

    void copy_queries() {
        constexpr int lanes = Vec<T>::lanes;
        const Vec<T> sign = broadcast<T>(call_.scale < T(0) ? T(-1) : T(1));
        with_storage<T>(call_.query_storage, [&]<class Q>(Q) {
            for (std::int64_t r = 0; r < call_.query_len * call_.group; ++r) {
                const char* row =
                    unit_.query + r / call_.group * call_.query_position + r % call_.group * call_.query_head;
                for (std::int64_t e = 0; e < call_.head_dim; e += lanes) {
                    const Vec<T> q = load_first<Q>(row + e * static_cast<std::ptrdiff_t>(sizeof(Q)),
                                                   smaller(lanes, call_.head_dim - e));
                    store(queries_ + r * query_stride_ + e, q * sign);
                }
            }
        });
    }

    void begin_block(std::int64_t block, std::int64_t end) {
        block_ = block;
        count_ = static_cast<int>(end - block);
    }

    void scores(int group, int rows, int begin, int end, T* scores) const {
        constexpr int row_step = TILE_ROWS >= 12 ? 4 : 2;
        constexpr int key_step = 4;
        const int to = end < count_ ? end : count_;
        for (int r = 0; r < rows; r += row_step) {
            with_rows<row_step>(smaller(row_step, rows - r), [&](auto row_count) {
                constexpr int row_number = decltype(row_count)::value;
                const T* queries = queries_ + (group * TILE_ROWS + r) * query_stride_;
                const char* key = unit_.key + (block_ + begin) * call_.key_position;
                T* row = scores + r * ROW_STRIDE;
                int j = begin;
                for (; j + key_step <= to; j += key_step, key += key_step * call_.key_position) {
                    dot<row_number, key_step, S>(queries, query_stride_, key, call_.key_position,
                                                 call_.head_dim, row + j);
                }
                for (; j < to; ++j, key += call_.key_position) {
                    dot<row_number, 1, S>(queries, query_stride_, key, call_.key_position, call_.head_dim,
                                          row + j);
                }
            });
        }
    }

    void weigh(int rows, int begin, int end, const T* weights, Start start, T* output,
               std::int64_t width) const {
        const TileOperands<T, S> operands = {weights + begin,
                                             unit_.value + (block_ + begin) * call_.value_position,
                                             call_.value_position,
                                             PANEL * sizeof(S),
                                             end - begin,
                                             key_depth_block,
                                             reinterpret_cast<char*>(output),
                                             width * static_cast<std::ptrdiff_t>(sizeof(T)),
                                             start,
                                             nullptr};
        row_product<TILE_ROWS, TILE_VECTORS>(rows, call_.value_dim, operands);
    }

private:
    const AttentionCall<T>& call_;
    const AttentionUnit<T>& unit_;
    std::int64_t query_stride_;
    T* queries_;
    std::int64_t block_ = 0;
    int count_ = 0;
};

template <class S, class T = Compute<S>> struct Task {
    DirectProducts<S> products;
    RowBlock<T> rows;

    Task(const AttentionCall<T>& call, const AttentionUnit<T>& unit, Scratch& scratch)
        : products(call, unit, scratch), rows(call.query_len * call.group, scratch) {}
};

template <class T> std::size_t scratch_bytes(const AttentionCall<T>& call) {
    Scratch counter(nullptr);
    const AttentionUnit<T> none = {};
    Task<T>(call, none, counter); // the same for every storage
    return counter.used();
}

template <class T>
void attend(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t first, std::int64_t last,
            const AttentionPartial<T>& partial, void* memory) {
    with_storage<T>(call.key_storage, [&]<class S>(S) {
        Scratch scratch(memory);
        Task<S> task(call, unit, scratch);
        task.rows.set(call, unit, 0, call.query_len * call.group);
        task.products.copy_queries();
        accumulate_safely(call, unit, task.rows, first, last, task.products, partial,
                          [](const Group<T>&, std::int64_t) {});
    });
}

template <class T>
void merge(const AttentionCall<T>& call, const AttentionUnit<T>& unit, const AttentionPartial<T>& into,
           const AttentionPartial<T>& part) {
    merge_rows(call, unit, call.query_len * call.group, into, part);
}

template <class T>
void finish(const AttentionCall<T>& call, const AttentionUnit<T>& unit, const AttentionPartial<T>& whole,
            void* memory) {
    with_storage<T>(call.key_storage, [&]<class S>(S) {
        Scratch scratch(memory);
        Task<S> task(call, unit, scratch);
        task.rows.set(call, unit, 0, call.query_len * call.group);
        const std::int64_t rows = call.query_len * call.group;
        for (std::int64_t r = 0; call.write == Write::output && r < rows; r += TILE_ROWS) {
            write_rows(call, unit, task.rows.groups[r / TILE_ROWS], r, whole);
        }
        if (!unit.weights) return;
        task.products.copy_queries();
        write_weights(call, unit, task.rows, task.products, whole);
    });
}

template <class T>
constexpr DecodeKernels<T> decode_kernels = {scratch_bytes<T>, attend<T>, merge<T>, finish<T>};

} // namespace

extern const DecodeTable decode_table;
const DecodeTable decode_table = {decode_kernels<float>, decode_kernels<double>};

} // namespace npattn::NPATTN_ISA
