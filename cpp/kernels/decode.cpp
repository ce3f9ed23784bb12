// Attention of few rows: keys and values are read where they lie, once, and nothing is packed. The rows are
// all heads of the group (times a few query positions); long keys are cut into ranges that give partial
// results, merged by finish().

#include "kernels/results.hpp"

namespace npattn::NPATTN_ISA {
namespace {

// Rows of queries, padded with zeros to whole vectors, `stride` elements apart.
template <class T> struct QueryRows {
    const T* first;
    std::int64_t stride;
};
// Keys stored as S, `stride` bytes apart.
struct KeyRows {
    const char* first;
    std::ptrdiff_t stride;
    std::int64_t head_dim;
};

// Element i: the sum of vector i of VECTORS that lie `stride` elements apart; lanes / VECTORS elements for each are
// left to add up. The additions are the same wherever the vector lies.
template <int VECTORS, class T> NPATTN_INLINE Vec<T> add_up(const T* vectors, std::ptrdiff_t stride) {
    if constexpr (VECTORS == 1) {
        return load<T>(vectors);
    } else {
        Vec<T> a = add_up<VECTORS / 2>(vectors, stride);
        Vec<T> b = add_up<VECTORS / 2>(vectors + VECTORS / 2 * stride, stride);
        deinterleave(a, b);
        return a + b;
    }
}

// scores (ROWS, lanes) of as many keys, or of the first `count`. One key is read after the other, from its first dim to
// its last: memory comes at full speed only in the order in which it lies.
template <int ROWS, class S, class T>
NPATTN_NOINLINE void score_keys(const QueryRows<T>& queries, KeyRows keys, int count, T* scores) {
    constexpr int lanes = Vec<T>::lanes;
    constexpr auto size = static_cast<std::ptrdiff_t>(sizeof(S));
    alignas(64) T partial[lanes][ROWS][lanes]; // what is left to add up of each key and row
    for (int k = 0; k < smaller(count, lanes); ++k, keys.first += keys.stride) {
        Vec<T> sums[ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) sums[r] = zero<T>();
        each_vector<T>(0, keys.head_dim, [&](std::int64_t e, auto part) NPATTN_BODY {
            const Vec<T> key = load_part<S>(keys.first + e * size, part);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r)
                sums[r] = fma(load<T>(queries.first + r * queries.stride + e), key, sums[r]);
        });
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) store(partial[k][r], sums[r]);
    }
    for (int k = count; k < lanes; ++k) {
        for (int r = 0; r < ROWS; ++r) store(partial[k][r], zero<T>());
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) store(scores + r * ROW_STRIDE, add_up<lanes>(partial[0][r], ROWS * lanes));
}

// Keys and values are stored as S.
template <class S, class T = Compute<S>> class DirectProducts {
public:
    using Weight = T;
    static constexpr int key_depth_block = 16; // keys summed at a time

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

    // Each key is read once for all rows of the group: after the first few rows it comes from the L1 cache.
    void scores(int group, int rows, int begin, int end, T* scores) const {
        constexpr int lanes = Vec<T>::lanes;
        constexpr int row_step = TILE_ROWS >= 12 ? 4 : 2;
        for (int j = begin; j < smaller(end, count_); j += lanes) {
            const KeyRows keys = {unit_.key + (block_ + j) * call_.key_position, call_.key_position,
                                  call_.head_dim};
            for (int r = 0; r < rows; r += row_step) {
                with_rows<row_step>(smaller(row_step, rows - r), [&](auto row_count) {
                    constexpr int row_number = decltype(row_count)::value;
                    const QueryRows<T> queries = {queries_ + (group * TILE_ROWS + r) * query_stride_,
                                                  query_stride_};
                    T* const to = scores + r * ROW_STRIDE + j;
                    score_keys<row_number, S>(queries, keys, count_ - j, to);
                });
            }
        }
    }

    // So are values, a few at a time, from their first column to their last.
    void weigh(int rows, int begin, int end, const T* weights, Start start, T* output,
               std::int64_t width) const {
        constexpr int row_step = 2;
        constexpr int vectors = TILE_ROWS >= 12 ? 8 : 4;
        for (int j = begin; j < end; j += key_depth_block, start = Start::add) {
            for (int r = 0; r < rows; r += row_step) {
                const TileOperands<T, S> operands = {weights + r * ROW_STRIDE + j,
                                                     unit_.value + (block_ + j) * call_.value_position,
                                                     call_.value_position,
                                                     PANEL * sizeof(S),
                                                     smaller(key_depth_block, end - j),
                                                     key_depth_block,
                                                     reinterpret_cast<char*>(output + r * width),
                                                     width * static_cast<std::ptrdiff_t>(sizeof(T)),
                                                     start,
                                                     nullptr};
                row_product<row_step, vectors>(smaller(row_step, rows - r), call_.value_dim, operands);
            }
        }
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
