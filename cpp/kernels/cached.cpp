// Attention over the pages of a cache: keys lie in them as panels and values as rows, so that nothing is packed.
// What is stored in 16 bits is widened as it is loaded, or, for many rows, a panel at a time; quads of int8 are so too,
// where they are not multiplied as they are (cached_int8.hpp). Pairs of bfloat16 are multiplied as they are where an
// instruction does it (cached_pairs.cpp). The scales of int8 meet the scores, and the weights before they meet the
// values: the products are those of the integers.
// Values are summed a panel of keys at a time, so that no bit depends on where pages begin.

#include "kernels/cached_int8.hpp"
#include "kernels/paged_attention.hpp"

namespace npattn::NPATTN_ISA {
namespace {

// Blocks of depths of the product of queries and a panel of keys that are summed side by side: with few rows
// there are too few sums else to keep the multipliers busy.
template <int ROWS, class T> constexpr int depth_chains() {
    constexpr int sums = ROWS * PANEL / Vec<T>::lanes;
    constexpr int wanted = 12; // 4 cycles' worth of two multipliers, and some to spare
    return TILE_ROWS * TILE_VECTORS < wanted || 2 * sums > wanted ? 1 : smaller(4, wanted / sums);
}

// CHAINS blocks of depths of S (ROWS, PANEL) = Q K^T, the last one `last_depth` deep; queries and panel start at
// the first. The additions are the tile's, in its order.
template <int ROWS, int CHAINS, class T, class S>
NPATTN_NOINLINE void chained_scores(const TileOperands<T, S>& operands, std::int64_t last_depth) {
    constexpr int lanes = Vec<T>::lanes;
    constexpr int vectors = PANEL / lanes;
    Vec<T> sums[CHAINS][ROWS][vectors];
    const auto each_sum = [&](auto body) NPATTN_BODY {
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
            for (int v = 0; v < vectors; ++v) body(r, v);
        }
    };
    const auto step = [&](int chain, std::int64_t d, auto combine) NPATTN_BODY {
        const std::int64_t depth = chain * operands.depth_block + d;
        const char* const row = operands.b + depth * operands.b_stride;
#pragma GCC unroll 16
        for (int byte = 0; byte < PANEL * static_cast<int>(sizeof(S)); byte += 64)
            __builtin_prefetch(row + operands.ahead + byte, 0, 2);
        each_sum([&](int r, int v) NPATTN_BODY {
            const Vec<T> keys = load<S>(row + v * lanes * static_cast<std::ptrdiff_t>(sizeof(S)));
            combine(sums[chain][r][v], keys, operands.a + r * ROW_STRIDE + depth);
        });
    };
    const auto begin = [](Vec<T>& sum, Vec<T> keys, const T* x) NPATTN_BODY { sum = mul_element(keys, x); };
    const auto add = [](Vec<T>& sum, Vec<T> keys, const T* x)
                         NPATTN_BODY { sum = fma_element(keys, x, sum); };
#pragma GCC unroll 8
    for (int chain = 0; chain < CHAINS; ++chain) step(chain, 0, begin);
    for (std::int64_t d = 1; d < last_depth; ++d) {
#pragma GCC unroll 8
        for (int chain = 0; chain < CHAINS; ++chain) step(chain, d, add);
    }
    for (std::int64_t d = last_depth; CHAINS > 1 && d < operands.depth_block; ++d) {
#pragma GCC unroll 8
        for (int chain = 0; chain < CHAINS - 1; ++chain) step(chain, d, add);
    }
    each_sum([&](int r, int v) NPATTN_BODY {
        char* const c =
            operands.c + r * operands.c_stride + v * lanes * static_cast<std::ptrdiff_t>(sizeof(T));
        Vec<T> sum = sums[0][r][v];
        if (operands.start == Start::add) sum = load<T>(c) + sum;
#pragma GCC unroll 8
        for (int chain = 1; chain < CHAINS; ++chain) sum = sum + sums[chain][r][v];
        store(c, sum);
    });
}

// S (ROWS, PANEL) = or += Q K^T for one panel of keys.
template <int ROWS, class T, class S> NPATTN_INLINE void panel_scores(TileOperands<T, S> operands) {
    constexpr int chains = depth_chains<ROWS, T>();
    if constexpr (chains == 1) {
        column_product<ROWS, row_registers<ROWS>(PANEL / Vec<T>::lanes), true>(operands, 0, PANEL);
    } else {
        for (std::int64_t left = operands.depth; left > 0;) {
            const std::int64_t blocks = (left + operands.depth_block - 1) / operands.depth_block;
            const int taken = smaller(chains, blocks);
            const std::int64_t depth = smaller(taken * operands.depth_block, left);
            with_rows<chains>(taken, [&](auto count) {
                chained_scores<ROWS, decltype(count)::value>(operands,
                                                             depth - (taken - 1) * operands.depth_block);
            });
            left -= depth;
            operands.a += depth;
            operands.b += depth * operands.b_stride;
            operands.start = Start::add;
        }
    }
}

// Quads (rows / 4, width) -> (rows, width).
inline void widen_quads(const char* NPATTN_RESTRICT from, std::int64_t width, std::int64_t rows,
                        float* NPATTN_RESTRICT to, std::int64_t stride) {
    for (std::int64_t r = 0; r < rows; r += 4, from += 4 * width, to += 4 * stride) {
        for (std::int64_t c = 0; c < width; ++c) {
            std::uint32_t quad;
            __builtin_memcpy(&quad, from + 4 * c, sizeof quad);
            quad ^= 0x80808080u;
            for (int i = 0; i < 4; ++i)
                to[i * stride + c] =
                    static_cast<float>(static_cast<std::int32_t>(quad << (24 - 8 * i)) >> 24);
        }
    }
}

// A panel of keys (head_dim, PANEL) or the values of its keys (PANEL, value_dim), in T.
template <class S, class T>
void widen_rows(const char* from, std::int64_t width, std::int64_t rows, T* to, std::int64_t stride) {
    constexpr auto size = static_cast<std::ptrdiff_t>(sizeof(S));
    if constexpr (sizeof(S) == sizeof(Int8)) return widen_quads(from, width, rows, to, stride);
    for (std::int64_t r = 0; r < rows; ++r) {
        each_vector<T>(0, width, [&](std::int64_t c, auto part) NPATTN_BODY {
            store_part(to + r * stride + c, load_part<S>(from + (r * width + c) * size, part), part);
        });
    }
}

// Keys and values are stored as S.
template <class S, class T = Compute<S>> class PageProducts {
public:
    using Weight = T;
    static constexpr int key_depth_block = PANEL; // keys summed at a time

    PageProducts(const AttentionCall<T>& call, const AttentionUnit<T>& unit, Scratch& scratch)
        : call_(call), unit_(unit), value_stride_(padded<T>(call.value_dim)) {
        const int shortest = score_depth_block(unit.key_len);
        depth_block_ = call.query_len * call.group > TASK_ROWS ? shortest : smaller(shortest, 32);
        queries_ = take_queries<T>(TASK_ROWS, call.head_dim, scratch);
        if constexpr (!PLAIN) {
            wide_keys_ = scratch.take<T>(KEY_BLOCK * depth());
            wide_values_ = scratch.take<T>(KEY_BLOCK * value_stride_);
        }
        if constexpr (SCALED) {
            scaled_weights_ = scratch.take<T>(GROUP_ROWS * ROW_STRIDE);
            query_powers_ = scratch.take<T>(TASK_ROWS);
        }
    }

    // Row r is row r % n of unit r / n, each unit having n rows.
    void copy_queries(const char* const* queries, std::int64_t first, std::int64_t last) {
        many_rows_ = last - first > GROUP_ROWS;
        gather_queries(call_, queries, first, last, TASK_ROWS, queries_);
        if constexpr (SCALED) {
            for (std::int64_t r = 0; r < last - first; ++r) query_powers_[r] = tame_query(r);
        }
    }

    void begin_block(std::int64_t block, std::int64_t) {
        block_ = block;
        wide_key_panels_ = wide_value_panels_ = 0;
    }

    void scores(int group, int rows, int begin, int end, T* scores) {
        streams_ = group == 0;
        for (int j = begin; j < end; j += PANEL) {
            const char* panel = key_panel(block_ + j);
            if (widens()) {
                T* const wide = wide_keys_ + j * depth();
                if (first_time(wide_key_panels_, j)) widen_rows<S>(panel, PANEL, depth(), wide, PANEL);
                score_panel<T>(group, rows, reinterpret_cast<const char*>(wide), scores + j, 0);
            } else {
                const char* next = j + PANEL < end ? key_panel(block_ + j + PANEL) : value_piece(begin);
                score_panel<S>(group, rows, panel, scores + j, distance(panel, next));
            }
            if constexpr (SCALED)
                scale_columns(rows, scores + j, scales_from(unit_, unit_.cache.key_scale, block_ + j),
                              query_powers_ + group * GROUP_ROWS, scores + j);
        }
    }

    void weigh(int rows, int begin, int end, const T* weights, Start start, T* output, std::int64_t width) {
        for (int j = begin; j < end; j += PANEL) {
            const char* piece = value_piece(j);
            const int count = smaller(PANEL, end - j);
            const Start begun = j == begin ? start : Start::add;
            const T* panel_weights = weights + j;
            if constexpr (SCALED) {
                panel_weights = scaled_weights_;
                scale_columns(rows, weights + j, scales_from(unit_, unit_.cache.value_scale, block_ + j),
                              nullptr, scaled_weights_);
            }
            if (widens()) {
                T* const wide = wide_values_ + j * value_stride_;
                if (first_time(wide_value_panels_, j))
                    widen_rows<S>(piece, call_.value_dim, PANEL, wide, value_stride_);
                weigh_panel<T>(rows, count, panel_weights, reinterpret_cast<const char*>(wide), value_stride_,
                               begun, output, width, 0);
            } else {
                const char* next = j + PANEL < end                      ? value_piece(j + PANEL)
                                   : block_ + KEY_BLOCK < unit_.key_len ? key_panel(block_ + KEY_BLOCK)
                                                                        : piece;
                weigh_panel<S>(rows, count, panel_weights, piece, call_.value_dim, begun, output, width,
                               distance(piece, next));
            }
        }
    }

private:
    static constexpr bool PLAIN = sizeof(S) == sizeof(T); // nothing to widen
    static constexpr bool SCALED = sizeof(S) == sizeof(Int8);

    bool widens() const { return SCALED || (!PLAIN && many_rows_); } // whole panels
    std::int64_t depth() const { return SCALED ? int8_depth(call_.head_dim) : call_.head_dim; } // of a panel

    const char* key_panel(std::int64_t key) const { return panel_of<S>(unit_, depth(), key); }

    // What the scores of a row are to be multiplied by. Large queries are divided by it: their sums, which no scale has
    // met yet, would overflow. Powers of 2 change no digit.
    T tame_query(std::int64_t row) {
        const auto each = [&](auto body) {
            for (std::int64_t dim = 0; dim < call_.head_dim; dim += ROW_DIMS<T>) {
                T* const query = queries_at(queries_, TASK_ROWS, row, dim);
                each_vector<T>(0, smaller(ROW_DIMS<T>, call_.head_dim - dim),
                               [&](std::int64_t d, auto part)
                                   NPATTN_BODY { body(query + d, load_part<T>(query + d, part), part); });
            }
        };
        Vec<T> largest = zero<T>();
        each([&](T*, Vec<T> q, auto) NPATTN_BODY { largest = max(max(q, zero<T>() - q), largest); });
        if (reduce_max(largest) < T(LARGE_SCALE)) return T(1);
        const Vec<T> inverse = broadcast<T>(T(1) / T(LARGE_SCALE));
        each([&](T* x, Vec<T> q, auto part) NPATTN_BODY { store_part(x, q * inverse, part); });
        return T(LARGE_SCALE);
    }

    // to_rc = from_rc * scales_c (* powers_r), (rows, PANEL), rows ROW_STRIDE apart.
    static void scale_columns(int rows, const T* from, const T* scales, const T* powers, T* to) {
        for (int r = 0; r < rows; ++r, from += ROW_STRIDE, to += ROW_STRIDE) {
            const Vec<T> power = broadcast<T>(powers ? powers[r] : T(1));
            for (int c = 0; c < PANEL; c += Vec<T>::lanes)
                store(to + c, load<T>(from + c) * load<T>(scales + c) * power);
        }
    }

    // scores (rows, PANEL) of a panel of keys that are B in memory.
    template <class B>
    void score_panel(int group, int rows, const char* panel, T* scores, std::ptrdiff_t ahead) const {
        for (std::int64_t dim = 0; dim < call_.head_dim; dim += DEPTH_BLOCK) {
            const TileOperands<T, B> operands = {queries_at(queries_, TASK_ROWS, group * GROUP_ROWS, dim),
                                                 panel + dim * PANEL * static_cast<std::ptrdiff_t>(sizeof(B)),
                                                 PANEL * sizeof(B),
                                                 PANEL * sizeof(B),
                                                 smaller(DEPTH_BLOCK, call_.head_dim - dim),
                                                 depth_block_,
                                                 reinterpret_cast<char*>(scores),
                                                 ROW_STRIDE * sizeof(T),
                                                 dim == 0 ? Start::zero : Start::add,
                                                 nullptr,
                                                 ahead,
                                                 PANEL * sizeof(B)};
            with_rows<TILE_ROWS>(rows,
                                 [&](auto row_count) { panel_scores<decltype(row_count)::value>(operands); });
        }
    }

    // The values of `count` keys of a panel, rows of B that lie `stride` elements apart.
    template <class B>
    void weigh_panel(int rows, int count, const T* weights, const char* values, std::int64_t stride,
                     Start start, T* output, std::int64_t width, std::ptrdiff_t ahead) const {
        const TileOperands<T, B> operands = {weights,
                                             values,
                                             stride * static_cast<std::ptrdiff_t>(sizeof(B)),
                                             PANEL * sizeof(B),
                                             count,
                                             key_depth_block,
                                             reinterpret_cast<char*>(output),
                                             width * static_cast<std::ptrdiff_t>(sizeof(T)),
                                             start,
                                             nullptr,
                                             ahead,
                                             stride * static_cast<std::ptrdiff_t>(sizeof(B))};
        with_rows<TILE_ROWS>(rows, [&](auto row_count) {
            constexpr int row_number = decltype(row_count)::value;
            column_product<row_number, row_registers<row_number>(8), true>(operands, 0, call_.value_dim);
        });
    }

    const char* value_piece(int begin) const { return value_row(call_, unit_, block_ + begin); }

    // While a piece is read, memory is asked for the next one, for the first group of rows that comes by.
    std::ptrdiff_t distance(const char* piece, const char* next) const {
        return streams_ ? reinterpret_cast<std::intptr_t>(next) - reinterpret_cast<std::intptr_t>(piece) : 0;
    }

    const AttentionCall<T>& call_;
    const AttentionUnit<T>& unit_;
    std::int64_t value_stride_, depth_block_;
    T* queries_;
    T* scaled_weights_ = nullptr;                          // of a panel
    T* query_powers_ = nullptr;                            // of the rows, tame_query
    T *wide_keys_ = nullptr, *wide_values_ = nullptr;      // of the block, panel by panel
    unsigned wide_key_panels_ = 0, wide_value_panels_ = 0; // that are there, one bit each
    bool many_rows_ = false;                               // several tiles: they share what is widened
    std::int64_t block_ = 0;
    bool streams_ = true;
};

template <class Products> struct Tag { using type = Products; };

// body(Tag of the products that the call takes).
template <class T, class Body> void with_products(const AttentionCall<T>& call, Body body) {
    with_key_storage<T>(call.key_storage, [&]<class S>(S) {
        if constexpr (sizeof(S) == sizeof(Int8)) {
            if (IntegerProducts::takes(call)) return body(Tag<IntegerProducts>());
        }
        body(Tag<PageProducts<S>>());
    });
}

// For any number of queries.
template <class T> std::size_t scratch_bytes(const AttentionCall<T>& call) {
    std::size_t most = 0;
    const auto count = [&](auto tag) {
        const std::size_t bytes = paged_scratch_bytes<typename decltype(tag)::type>(call);
        if (bytes > most) most = bytes;
    };
    AttentionCall<T> one = call, many = call;
    one.query_len = 1;
    many.query_len = TASK_ROWS + 1;
    with_products(one, count);
    with_products(many, count);
    return most;
}

template <class T>
void attend(const AttentionCall<T>& call, const AttentionUnit<T>& unit, const char* const* queries,
            std::int64_t first, std::int64_t last, std::int64_t key_first, std::int64_t key_last,
            const AttentionPartial<T>& partial, void* scratch) {
    with_products(call, [&](auto tag) {
        attend_pages<typename decltype(tag)::type>(call, unit, queries, first, last, key_first, key_last,
                                                   partial, scratch);
    });
}

template <class T>
void weights(const AttentionCall<T>& call, const AttentionUnit<T>& unit, std::int64_t first,
             std::int64_t last, const AttentionPartial<T>& whole, void* scratch) {
    with_products(call, [&](auto tag) {
        fill_page_weights<typename decltype(tag)::type>(call, unit, first, last, whole, scratch);
    });
}

template <class T>
constexpr CachedKernels<T> cached_kernels = {TASK_ROWS,     scratch_bytes<T>, attend<T>,
                                             merge_rows<T>, finish_rows<T>,   weights<T>};

} // namespace

extern const CachedTable cached_table;
const CachedTable cached_table = {cached_kernels<float>, cached_kernels<double>};

} // namespace npattn::NPATTN_ISA
