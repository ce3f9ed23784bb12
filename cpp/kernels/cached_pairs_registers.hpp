#pragma once
// Both products of attention with bfloat16 queries over the pages of a cache of bfloat16, in pairs. The pages hold no
// pairs: two rows that follow one another, depths of keys or keys of values, become pairs in registers. Each sum goes
// on from pair to pair, wherever pages and blocks begin.

#include "kernels/paged_attention.hpp"

namespace npattn::NPATTN_ISA {
namespace {

// Columns [column, column_end) of C (ROWS, columns) = or resumes A B, PANELS of them at a time; `depth` are rows of B,
// which lie as those of a tile do. C has whole panels; with PARTIAL, a single one of which B has `last_columns`.
template <int ROWS, int PANELS, bool PARTIAL>
NPATTN_NOINLINE void pairing_tile(const TileOperands<HalfPair, BFloat16>& operands, std::int64_t column,
                                  std::int64_t column_end, [[maybe_unused]] int last_columns) {
    constexpr int lanes = Vec<float>::lanes;
    constexpr std::ptrdiff_t width = lanes * sizeof(float);
    static_assert(PANEL == 2 * lanes && (!PARTIAL || PANELS == 1));
    const std::ptrdiff_t b_stride = operands.b_stride, b_panel = operands.b_panel,
                         c_stride = operands.c_stride;
    const std::ptrdiff_t ahead = operands.ahead;
    for (; column < column_end; column += PANELS * PANEL) {
        const HalfPair* a = operands.a;
        const char* b = operands.b + column / PANEL * b_panel;
        char* const c = operands.c + column * static_cast<std::ptrdiff_t>(sizeof(float));
        Vec<float> sums[ROWS][2 * PANELS];
        const auto each_sum = [&](auto body) NPATTN_BODY {
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
                for (int v = 0; v < 2 * PANELS; ++v) body(sums[r][v], c + r * c_stride + v * width);
            }
        };
        if (operands.start == Start::resume) {
            each_sum([](Vec<float>& sum, const char* row) NPATTN_BODY { sum = load<float>(row); });
        } else {
            each_sum([](Vec<float>& sum, const char*) NPATTN_BODY { sum = zero<float>(); });
        }
        for (std::int64_t left = operands.depth; left > 0; left -= 2) {
            const char* odd = b + b_stride;
            std::ptrdiff_t odd_panel = b_panel;
            if (left == 1) odd = reinterpret_cast<const char*>(NO_DEPTH), odd_panel = 0;
            Vec<HalfPair> pairs[2 * PANELS];
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; ++p) {
                const char* const even_row = b + p * b_panel;
                const char* const odd_row = odd + p * odd_panel;
                __builtin_prefetch(even_row + ahead);
                __builtin_prefetch(even_row + b_stride + ahead);
                if constexpr (PARTIAL) {
                    const int first = smaller(last_columns, lanes);
                    pairs[0] = as_pairs(load_pairs_first(even_row, odd_row, first));
                    pairs[1] = as_pairs(load_pairs_first(even_row + lanes * HALF, odd_row + lanes * HALF,
                                                         last_columns - first));
                } else {
                    pairs[2 * p] = load<HalfPair>(even_row);
                    pairs[2 * p + 1] = load<HalfPair>(odd_row);
                    pair_rows(pairs[2 * p], pairs[2 * p + 1]);
                }
            }
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                const Vec<HalfPair> x = element(a + r * ROW_STRIDE);
#pragma GCC unroll 8
                for (int v = 0; v < 2 * PANELS; ++v) sums[r][v] = fma_element(pairs[v], x, sums[r][v]);
            }
            ++a;
            b += 2 * b_stride;
        }
        each_sum([](const Vec<float>& sum, char* row) NPATTN_BODY { store(row, sum); });
    }
}

// All columns, PANELS at a time as long as there are so many, then half as many.
template <int ROWS, int PANELS>
NPATTN_INLINE void pairing_columns(const TileOperands<HalfPair, BFloat16>& operands, std::int64_t column,
                                   std::int64_t columns) {
    const std::int64_t end = columns - (columns - column) % (PANELS * PANEL);
    if (column < end) pairing_tile<ROWS, PANELS, false>(operands, column, end, PANEL);
    if constexpr (PANELS > 1) {
        pairing_columns<ROWS, PANELS / 2>(operands, end, columns);
    } else if (end < columns) {
        pairing_tile<ROWS, 1, true>(operands, end, columns, static_cast<int>(columns - end));
    }
}

// MOST panels at a time, or as many as there are registers for.
template <int MOST>
NPATTN_INLINE void pairing_product(int rows, std::int64_t columns,
                                   const TileOperands<HalfPair, BFloat16>& operands) {
    with_rows<TILE_ROWS>(rows, [&](auto row_count) {
        constexpr int row_number = decltype(row_count)::value;
        pairing_columns<row_number, (row_registers<row_number>(2 * MOST) + 1) / 2>(operands, 0, columns);
    });
}

class PairProducts {
public:
    using Weight = HalfPair;
    static constexpr int key_depth_block = ONE_SUM;

    PairProducts(const AttentionCall<float>& call, const AttentionUnit<float>& unit, Scratch& scratch)
        : call_(call), unit_(unit), queries_(take_queries<HalfPair>(TASK_ROWS, call.head_dim, scratch)) {}

    void copy_queries(const char* const* queries, std::int64_t first, std::int64_t last) {
        gather_queries(call_, queries, first, last, TASK_ROWS, queries_);
    }

    void begin_block(std::int64_t block, std::int64_t) { block_ = block; }

    // While a page's keys are read memory is asked for the next page's, then for values, then for the next block's keys.
    void scores(int group, int rows, int begin, int end, float* scores) {
        streams_ = group == 0;
        each_page(begin, end, [&](int j, int count) {
            const char* const panels = keys_from(j);
            const char* const next = j + count < end ? keys_from(j + count) : values_from(begin);
            for (std::int64_t dim = 0; dim < call_.head_dim; dim += ROW_DIMS<HalfPair>) {
                pairing_product<1>(rows, count, // panels side by side would not be read in the order they lie
                                   {queries_at(queries_, TASK_ROWS, group * GROUP_ROWS, dim),
                                    panels + dim * PANEL * HALF, PANEL * HALF, PANEL * HALF * call_.head_dim,
                                    smaller(ROW_DIMS<HalfPair>, call_.head_dim - dim), DEPTH_BLOCK,
                                    reinterpret_cast<char*>(scores + j), ROW_STRIDE * sizeof(float),
                                    dim == 0 ? Start::zero : Start::resume, nullptr, distance(panels, next)});
            }
        });
    }

    void weigh(int rows, int begin, int end, const float* weights, Start start, float* output,
               std::int64_t width) const {
        each_page(begin, end, [&](int j, int count) {
            const char* const values = values_from(j);
            const char* const next = j + count < end                      ? values_from(j + count)
                                     : block_ + KEY_BLOCK < unit_.key_len ? keys_from(KEY_BLOCK)
                                                                          : values;
            pairing_product<4>(rows, call_.value_dim,
                               {reinterpret_cast<const HalfPair*>(weights) + j / 2, values,
                                call_.value_dim * HALF, PANEL * HALF, count, DEPTH_BLOCK,
                                reinterpret_cast<char*>(output),
                                width * static_cast<std::ptrdiff_t>(sizeof(float)),
                                start == Start::zero && j == begin ? start : Start::resume, nullptr,
                                distance(values, next)});
        });
    }

private:
    const char* keys_from(int column) const {
        return panel_of<BFloat16>(unit_, call_.head_dim, block_ + column);
    }
    const char* values_from(int column) const { return value_row(call_, unit_, block_ + column); }

    std::ptrdiff_t distance(const char* from, const char* next) const { return streams_ ? next - from : 0; }

    // body(first, count) for the columns [begin, end) of the block that lie in one page.
    template <class Body> NPATTN_INLINE void each_page(int begin, int end, Body body) const {
        const std::int64_t page_keys = unit_.cache.page_keys;
        for (int count; begin < end; begin += count) {
            count = smaller(page_keys - (block_ + begin) % page_keys, end - begin);
            body(begin, count);
        }
    }

    const AttentionCall<float>& call_;
    const AttentionUnit<float>& unit_;
    HalfPair* queries_;
    std::int64_t block_ = 0;
    bool streams_ = true; // for the first group of rows that comes by
};

} // namespace
} // namespace npattn::NPATTN_ISA
