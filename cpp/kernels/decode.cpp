// Attention of few rows: keys and values are read where they lie, once, and nothing is packed. The rows are
// all heads of the group (times a few query positions); long keys are cut into ranges that give partial
// results, merged by finish().

#include "kernels/accumulate.hpp"
#include "kernels/dots.hpp"
#include "kernels/results.hpp"

namespace npattn::NPATTN_ISA {
namespace {

// Registers that hold queries, or sums of values, while keys or values stream by: of two rows, or of one that is too
// wide for two to fit.
constexpr int STREAM_REGISTERS = TILE_ROWS * TILE_VECTORS >= 24 ? 16 : 8;
constexpr int STREAM_ROWS = 2;
template <class T> constexpr int stream_rows(std::int64_t width) {
    return width > STREAM_REGISTERS / STREAM_ROWS * Vec<T>::lanes ? 1 : STREAM_ROWS;
}

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

// Dims [e, e + VECTORS registers) of the products of ROWS queries with `count` keys: partial[k][r] = or += what is then
// left to add up of query r and key k. The last register has `last_lanes`.
template <int ROWS, int VECTORS, class S, class T>
NPATTN_INLINE void multiply_keys(const QueryRows<T>& queries, const KeyRows& keys, int count, std::int64_t e,
                                 int last_lanes, Vec<T> (*partial)[ROWS]) {
    constexpr int lanes = Vec<T>::lanes;
    constexpr auto size = static_cast<std::ptrdiff_t>(sizeof(S));
    Vec<T> query[ROWS][VECTORS];
#pragma GCC unroll 32
    for (int i = 0; i < ROWS * VECTORS; ++i) {
        const int r = i / VECTORS, v = i % VECTORS;
        query[r][v] = load<T>(queries.first + r * queries.stride + e + v * lanes);
    }
    const auto multiply = [&](auto load_last) NPATTN_BODY {
        const char* key = keys.first + e * size;
        for (int k = 0; k < count; ++k, key += keys.stride) {
            Vec<T> sums[ROWS];
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) sums[r] = e == 0 ? zero<T>() : partial[k][r];
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) {
                Vec<T> x =
                    v == VECTORS - 1 ? load_last(key + v * lanes * size) : load<S>(key + v * lanes * size);
                if constexpr (ROWS > 1) x = keep(x);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r) sums[r] = fma(query[r][v], x, sums[r]);
            }
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) partial[k][r] = sums[r];
        }
    };
    if (last_lanes == lanes) {
        multiply([](const char* p) NPATTN_BODY { return load<S>(p); });
    } else {
        multiply([&](const char* p) NPATTN_BODY { return load_first<S>(p, last_lanes); });
    }
}

// scores (ROWS, lanes) of as many keys, or of the first `count`. As many dims as registers hold of the queries are
// walked at a time, and all of a key before the next one: memory comes at full speed only in the order in which it
// lies.
template <int ROWS, class S, class T>
NPATTN_NOINLINE void score_keys(const QueryRows<T>& queries, const KeyRows& keys, int count, T* scores) {
    constexpr int lanes = Vec<T>::lanes;
    Vec<T> partial[lanes][ROWS];
    for (int k = count; k < lanes; ++k) {
        for (int r = 0; r < ROWS; ++r) partial[k][r] = zero<T>();
    }
    constexpr int most = STREAM_REGISTERS / ROWS;
    const int together = keys.head_dim <= most * lanes ? smaller(count, lanes) : 1;
    for (int k = 0; k < smaller(count, lanes); k += together) {
        const KeyRows rows = {keys.first + k * keys.stride, keys.stride, keys.head_dim};
        for (std::int64_t e = 0; e < keys.head_dim; e += most * lanes) {
            const int dims = smaller(most * lanes, keys.head_dim - e);
            with_rows<most>((dims + lanes - 1) / lanes, [&](auto vector_count) NPATTN_BODY {
                constexpr int vectors = decltype(vector_count)::value;
                multiply_keys<ROWS, vectors, S>(queries, rows, together, e, dims - (vectors - 1) * lanes,
                                                partial + k);
            });
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) store(scores + r * ROW_STRIDE, add_up<lanes>(partial[0] + r, ROWS));
}

// Rows of values stored as S, `stride` bytes apart.
struct ValueRows {
    const char* first;
    std::ptrdiff_t stride;
    std::int64_t value_dim;
};

// Columns [c, value_dim) of sums (ROWS, value_dim) = or += P V for `count` keys, VECTORS registers at a time as long
// as there are so many, then half as many. Rows of P lie ROW_STRIDE elements apart, sums `width`.
template <int ROWS, int VECTORS, class S, class T>
NPATTN_INLINE void add_values(const T* weights, const ValueRows& values, int count, bool begin,
                              std::int64_t c, T* sums, std::int64_t width) {
    constexpr int lanes = Vec<T>::lanes;
    constexpr auto size = static_cast<std::ptrdiff_t>(sizeof(S));
    const auto add = [&](auto load_vector) NPATTN_BODY {
        Vec<T> sum[ROWS][VECTORS];
        const auto each_sum = [&](auto body) NPATTN_BODY {
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
                for (int v = 0; v < VECTORS; ++v) body(sum[r][v], sums + r * width + c + v * lanes);
            }
        };
        if (begin) {
            each_sum([](Vec<T>& x, T*) NPATTN_BODY { x = zero<T>(); });
        } else {
            each_sum([](Vec<T>& x, T* from) NPATTN_BODY { x = load<T>(from); });
        }
        const char* value = values.first + c * size;
        for (int k = 0; k < count; ++k, value += values.stride) {
            Vec<T> weight[ROWS];
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) weight[r] = broadcast<T>(weights[r * ROW_STRIDE + k]);
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) {
                Vec<T> x = load_vector(value + v * lanes * size);
                if constexpr (ROWS > 1) x = keep(x);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r) sum[r][v] = fma(weight[r], x, sum[r][v]);
            }
        }
        each_sum([](Vec<T>& x, T* to) NPATTN_BODY { store(to, x); });
    };
    for (; c + VECTORS * lanes <= values.value_dim; c += VECTORS * lanes)
        add([](const char* p) NPATTN_BODY { return load<S>(p); });
    if constexpr (VECTORS > 1) {
        add_values<ROWS, VECTORS / 2, S>(weights, values, count, begin, c, sums, width);
    } else if (c < values.value_dim) {
        add([&](const char* p)
                NPATTN_BODY { return load_first<S>(p, static_cast<int>(values.value_dim - c)); });
    }
}

template <int ROWS, class S, class T>
NPATTN_NOINLINE void weigh_values(const T* weights, const ValueRows& values, int count, bool begin, T* sums,
                                  std::int64_t width) {
    add_values<ROWS, STREAM_REGISTERS / ROWS, S>(weights, values, count, begin, 0, sums, width);
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
        sums_ = scratch.take<T>(GROUP_ROWS * padded<T>(call.value_dim));
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
        const int row_step = stream_rows<T>(call_.head_dim);
        for (int j = begin; j < smaller(end, count_); j += lanes) {
            const KeyRows keys = {unit_.key + (block_ + j) * call_.key_position, call_.key_position,
                                  call_.head_dim};
            for (int r = 0; r < rows; r += row_step) {
                with_rows<STREAM_ROWS>(smaller(row_step, rows - r), [&](auto row_count) {
                    constexpr int row_number = decltype(row_count)::value;
                    const QueryRows<T> queries = {queries_ + (group * GROUP_ROWS + r) * query_stride_,
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
        constexpr int lanes = Vec<T>::lanes;
        const int row_step = stream_rows<T>(call_.value_dim);
        const int together = rows <= row_step ? key_depth_block : 16;
        for (; begin < end; begin += key_depth_block, start = Start::add) {
            const int block_end = smaller(end, begin + key_depth_block);
            T* const sums = start == Start::zero ? output : sums_;
            for (int j = begin; j < block_end; j += together) {
                const ValueRows values = {unit_.value + (block_ + j) * call_.value_position,
                                          call_.value_position, call_.value_dim};
                for (int r = 0; r < rows; r += row_step) {
                    with_rows<STREAM_ROWS>(smaller(row_step, rows - r), [&](auto row_count) {
                        weigh_values<decltype(row_count)::value, S>(weights + r * ROW_STRIDE + j, values,
                                                                    smaller(together, block_end - j),
                                                                    j == begin, sums + r * width, width);
                    });
                }
            }
            for (std::int64_t c = 0; start == Start::add && c < rows * width; c += lanes)
                store(output + c, load<T>(output + c) + load<T>(sums + c));
        }
    }

private:
    const AttentionCall<T>& call_;
    const AttentionUnit<T>& unit_;
    std::int64_t query_stride_;
    T* queries_;
    T* sums_; // of weighed values (GROUP_ROWS, padded value_dim)
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
        for (std::int64_t r = 0; call.write == Write::output && r < rows; r += GROUP_ROWS) {
            write_rows(call, unit, task.rows.groups[r / GROUP_ROWS], r, whole);
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
