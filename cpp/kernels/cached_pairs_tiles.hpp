#pragma once
// Both products of attention with bfloat16 queries over the pages of a cache of bfloat16, on tile registers: the pages
// hold no pairs, so that each panel of keys, and the values of its keys, become pairs in scratch; few rows meet them as
// they lie. Each sum goes on from 32 keys or head dims to the next, wherever pages and blocks begin.

#include "kernels/paged_attention.hpp"

namespace npattn::NPATTN_ISA {
namespace {

constexpr int FEW_ROWS = 4; // that meet pages faster without tile registers

// C (ROWS, VECTORS registers) = or += A B with the sums of tile registers; rows of B are not pairs. `columns`: those of
// B that there are.
template <int ROWS, int VECTORS, bool PARTIAL>
NPATTN_INLINE void few_rows_tile(const HalfPair* a, const char* b, std::ptrdiff_t b_stride,
                                 std::int64_t depth, [[maybe_unused]] int columns, Start start, char* c,
                                 std::ptrdiff_t c_stride, std::ptrdiff_t ahead) {
    constexpr int lanes = Vec<float>::lanes, step = 2 * GROUP_DEPTH;
    const auto each_sum = [&](auto body) NPATTN_BODY {
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v)
                body(r, v, c + r * c_stride + v * lanes * static_cast<std::ptrdiff_t>(sizeof(float)));
        }
    };
    do {
        Vec<float> sums[2][ROWS][VECTORS];
        each_sum([&](int r, int v, char*) NPATTN_BODY { sums[0][r][v] = sums[1][r][v] = zero<float>(); });
        const auto add = [&](Vec<float>(&parts)[ROWS][VECTORS], const Vec<float>(&x)[ROWS]) NPATTN_BODY {
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) {
                const char* const p = b + v * lanes * HALF;
                if (v % 2 == 0) __builtin_prefetch(p + ahead);
                const Vec<float> y =
                    PARTIAL ? load_first<BFloat16>(
                                  p, columns < v * lanes ? 0 : smaller(lanes, columns - v * lanes))
                            : load<BFloat16>(p);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r) parts[r][v] = fma(y, x[r], parts[r][v]);
            }
            b += b_stride;
        };
        const int count = smaller(step, depth);
        for (int d = 0; d < count; d += 2, ++a) {
            Vec<float> evens[ROWS], odds[ROWS];
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                const Vec<HalfPair> pair = broadcast(a[r * ROW_STRIDE]);
                evens[r] = even(pair);
                odds[r] = odd(pair);
            }
            add(sums[0], evens);
            if (d + 1 < count) add(sums[1], odds);
        }
        each_sum([&](int r, int v, char* p) NPATTN_BODY {
            const Vec<float> before = start == Start::zero ? zero<float>() : load<float>(p);
            store(p, before + (sums[0][r][v] + sums[1][r][v]));
        });
        start = Start::add;
        depth -= count;
    } while (depth > 0);
}

// All columns, VECTORS registers at a time as long as there are so many, then a panel; C has whole panels.
template <int ROWS, int VECTORS>
NPATTN_INLINE void few_rows_columns(const HalfPair* a, const char* b, std::ptrdiff_t b_stride,
                                    std::int64_t depth, std::int64_t columns, Start start, char* c,
                                    std::ptrdiff_t c_stride, std::ptrdiff_t ahead) {
    constexpr std::int64_t width = VECTORS * Vec<float>::lanes;
    std::int64_t column = 0;
    const auto tile_of = [&]<int COUNT, int PARTIAL>(Number<COUNT>, Number<PARTIAL>) NPATTN_BODY {
        few_rows_tile<ROWS, COUNT, PARTIAL == 1>(
            a, b + column * HALF, b_stride, depth, smaller(width, columns - column), start,
            c + column * static_cast<std::ptrdiff_t>(sizeof(float)), c_stride, ahead);
        column += COUNT * Vec<float>::lanes;
    };
    while (column + width <= columns) tile_of(Number<VECTORS>{}, Number<0>{});
    if constexpr (VECTORS > 2) {
        while (column + PANEL <= columns) tile_of(Number<2>{}, Number<0>{});
    }
    if (column < columns) tile_of(Number<2>{}, Number<1>{});
}

void few_rows_product(int rows, const HalfPair* a, const char* b, std::ptrdiff_t b_stride, std::int64_t depth,
                      std::int64_t columns, Start start, char* c, std::ptrdiff_t c_stride,
                      std::ptrdiff_t ahead) {
    with_rows<FEW_ROWS>(rows, [&](auto row_count) NPATTN_BODY {
        constexpr int row_number = decltype(row_count)::value;
        few_rows_columns<row_number, row_number == 1   ? 8
                                     : row_number == 2 ? 4
                                                       : 2>(a, b, b_stride, depth, columns, start, c,
                                                            c_stride, ahead);
    });
}

// Each panel of keys, and the values of its keys, become pairs in scratch when the first rows meet them in a block.
class PairProducts {
public:
    using Weight = HalfPair;
    static constexpr int key_depth_block = ONE_SUM;

    PairProducts(const AttentionCall<float>& call, const AttentionUnit<float>& unit, Scratch& scratch)
        : call_(call), unit_(unit), queries_(take_queries<HalfPair>(TASK_ROWS, call.head_dim, scratch)),
          keys_(scratch.take<HalfPair>(KEY_BLOCK * depths<HalfPair>(call.head_dim))),
          values_(scratch.take<HalfPair>(VALUE_PANEL * panel_count(call.value_dim))) {}

    void copy_queries(const char* const* queries, std::int64_t first, std::int64_t last) {
        few_ = last - first <= FEW_ROWS;
        gather_queries(call_, queries, first, last, TASK_ROWS, queries_);
    }

    void begin_block(std::int64_t block, std::int64_t end) {
        block_ = block;
        block_keys_ = static_cast<int>(end - block);
        key_panels_ = value_panels_ = 0;
    }

    void scores(int group, int rows, int begin, int end, float* scores) {
        if (few_) return few_scores(rows, begin, end, scores);
        const std::ptrdiff_t panel = PANEL * depths<HalfPair>(call_.head_dim);
        for (int j = begin; j < end; j += PANEL) {
            HalfPair* const keys = keys_ + j / PANEL * panel;
            if (first_time(key_panels_, j))
                pack_pairs(keys_from(j), PANEL * HALF, HALF, call_.head_dim, PANEL, 0, 1, keys, 0);
            for (std::int64_t dim = 0; dim < call_.head_dim; dim += ROW_DIMS<HalfPair>) {
                const TileOperands<HalfPair> operands = {
                    queries_at(queries_, TASK_ROWS, group * GROUP_ROWS, dim),
                    reinterpret_cast<const char*>(keys + depths<HalfPair>(dim) * PANEL),
                    PANEL * sizeof(HalfPair),
                    0, // one panel
                    depths<HalfPair>(smaller(ROW_DIMS<HalfPair>, call_.head_dim - dim)),
                    DEPTH_BLOCK,
                    reinterpret_cast<char*>(scores + j),
                    ROW_STRIDE * sizeof(float),
                    dim == 0 ? Start::zero : Start::resume,
                    nullptr};
                group_product(rows, PANEL, operands);
            }
        }
    }

    template <class Beside>
    void weigh(int rows, int begin, int end, const float* weights, Start start, float* output,
               std::int64_t width, Beside& beside) {
        if (few_) return few_weigh(rows, begin, end, weights, start, output, width);
        for (int j = begin; j < end; j += PANEL) {
            if (first_time(value_panels_, j))
                pack_pairs(values_from(j), call_.value_dim * HALF, HALF, smaller(PANEL, block_keys_ - j),
                           call_.value_dim, 0, panel_count(call_.value_dim), values_ + j / 2 * PANEL,
                           VALUE_PANEL);
        }
        const TileOperands<HalfPair> operands = {reinterpret_cast<const HalfPair*>(weights) + begin / 2,
                                                 reinterpret_cast<const char*>(values_ + begin / 2 * PANEL),
                                                 PANEL * sizeof(HalfPair),
                                                 VALUE_PANEL * sizeof(HalfPair),
                                                 depths<HalfPair>(end - begin),
                                                 DEPTH_BLOCK,
                                                 reinterpret_cast<char*>(output),
                                                 width * static_cast<std::ptrdiff_t>(sizeof(float)),
                                                 start,
                                                 nullptr};
        group_product(rows, width, operands, beside);
    }

private:
    static constexpr std::ptrdiff_t VALUE_PANEL = KEY_BLOCK / 2 * PANEL; // pairs

    const char* keys_from(int column) const {
        return panel_of<BFloat16>(unit_, call_.head_dim, block_ + column);
    }
    const char* values_from(int column) const { return value_row(call_, unit_, block_ + column); }

    // While a panel is read memory is asked for the next one, then for values, then for the next block's keys.
    void few_scores(int rows, int begin, int end, float* scores) const {
        const NoDenormals no_denormals;
        for (int j = begin; j < end; j += PANEL) {
            const char* const panel = keys_from(j);
            const char* const next = j + PANEL < end ? keys_from(j + PANEL) : values_from(begin);
            for (std::int64_t dim = 0; dim < call_.head_dim; dim += ROW_DIMS<HalfPair>) {
                few_rows_product(rows, queries_at(queries_, TASK_ROWS, 0, dim), panel + dim * PANEL * HALF,
                                 PANEL * HALF, smaller(ROW_DIMS<HalfPair>, call_.head_dim - dim), PANEL,
                                 dim == 0 ? Start::zero : Start::add, reinterpret_cast<char*>(scores + j),
                                 ROW_STRIDE * sizeof(float), next - panel);
            }
        }
    }
    void few_weigh(int rows, int begin, int end, const float* weights, Start start, float* output,
                   std::int64_t width) const {
        const NoDenormals no_denormals;
        for (int j = begin; j < end; j += PANEL, start = Start::add) {
            const char* const values = values_from(j);
            const char* const next = j + PANEL < end                      ? values_from(j + PANEL)
                                     : block_ + KEY_BLOCK < unit_.key_len ? keys_from(KEY_BLOCK)
                                                                          : values;
            few_rows_product(rows, reinterpret_cast<const HalfPair*>(weights) + j / 2, values,
                             call_.value_dim * HALF, smaller(PANEL, end - j), call_.value_dim, start,
                             reinterpret_cast<char*>(output),
                             width * static_cast<std::ptrdiff_t>(sizeof(float)), next - values);
        }
    }

    const AttentionCall<float>& call_;
    const AttentionUnit<float>& unit_;
    HalfPair *queries_, *keys_, *values_;        // of the task; of the block
    unsigned key_panels_ = 0, value_panels_ = 0; // that are there, one bit each
    std::int64_t block_ = 0;
    int block_keys_ = 0;
    bool few_ = false; // rows of the task
};

} // namespace
} // namespace npattn::NPATTN_ISA
