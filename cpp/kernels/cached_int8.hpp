#pragma once
// Both products of attention over the pages of a cache of int8 in integers, for few rows: a query, and the weights of
// a row times the scales of their values, become two digits,
//
//   x = scale (128 high + low), to the nearest of 32513 steps from -max |x| to max |x|
//
// and everything from there to the sums is exact: so is every order of adding up.

#include "kernels/queries.hpp"

namespace npattn::NPATTN_ISA {
namespace {

// Rows of a unit up to which this is faster than to widen panels, with an instruction for quads and without.
#ifdef NPATTN_INT8_DOT
constexpr std::int64_t INTEGER_ROWS = TASK_ROWS;
#else
constexpr std::int64_t INTEGER_ROWS = 4;
#endif

constexpr int DIGITS = 2; // rows of digits lie one behind the other: high, low, the high ones of the next row

// A row of digits: the scale of x, and the sums of its digits.
struct DigitRow {
    float scale;
    std::int32_t sums[DIGITS];
};

// Elements [begin, end) of x, the largest of them `top`; bytes(digit, d): where the digit of x[d] goes, and
// contiguous from there those of a vector. The last quad is filled with 0. Where something is not finite the scale
// is NaN.
template <class Bytes>
NPATTN_INLINE DigitRow split_row(float* x, std::int64_t begin, std::int64_t end, float top, Bytes bytes) {
    constexpr float most = 127.f * 128.f;
    const float scale = top / most;
    if (top < 0x1p-100f) { // enlarged first: most / top would overflow
        each_vector<float>(begin, end, [&](std::int64_t d, auto part) NPATTN_BODY {
            store_part(x + d, load_part<float>(x + d, part) * broadcast<float>(0x1p100f), part);
        });
        top *= 0x1p100f;
    }
    const Vec<float> inverse = broadcast<float>(top == 0.f ? 0.f : most / top);
    for (std::int64_t d = end; d % 4 != 0; ++d) *bytes(0, d) = *bytes(1, d) = 0;
    Vec<float> sums[DIGITS] = {zero<float>(), zero<float>()};
    each_vector<float>(begin, end, [&](std::int64_t d, auto part) NPATTN_BODY {
        const Vec<float> n = load_part<float>(x + d, part) * inverse;
        const Vec<float> high = round(n * broadcast<float>(1.f / 128.f));
        const Vec<float> low = round(fnma(broadcast<float>(128.f), high, n));
        store_int8_part(bytes(0, d), high, part);
        store_int8_part(bytes(1, d), low, part);
        sums[0] = sums[0] + high;
        sums[1] = sums[1] + low;
    });
    const float high = reduce_add(sums[0]), low = reduce_add(sums[1]);
    if (high != high) return {high, {0, 0}};
    return {scale, {static_cast<std::int32_t>(high), static_cast<std::int32_t>(low)}};
}

class IntegerProducts {
public:
    using Weight = float;

    // The bits of a row depend on what this depends on.
    static bool takes(const AttentionCall<float>& call) {
        return call.query_len * call.group <= INTEGER_ROWS && call.head_dim <= INT8_DEPTH;
    }

    IntegerProducts(const AttentionCall<float>& call, const AttentionUnit<float>& unit, Scratch& scratch)
        : call_(call), unit_(unit), depth_(int8_depth(call.head_dim)),
          sums_stride_(padded<float>(call.value_dim > KEY_BLOCK ? call.value_dim : KEY_BLOCK) + 16) {
        const std::int64_t blocks = (depth_ / 4 + DEPTH_BLOCK - 1) / DEPTH_BLOCK;
        queries_ = scratch.take<Int8Quad>(blocks * DIGITS * TASK_ROWS * ROW_STRIDE);
        query_rows_ = scratch.take<DigitRow>(TASK_ROWS);
        weights_ = scratch.take<Int8Quad>(DIGITS * GROUP_ROWS * ROW_STRIDE);
        sums_ = scratch.take<std::int32_t>(DIGITS * GROUP_ROWS * sums_stride_);
        value_scales_ = scratch.take<float>(KEY_BLOCK);
        row_ = scratch.take<float>(depth_ > KEY_BLOCK ? depth_ : KEY_BLOCK);
    }

    void copy_queries(const char* const* queries, std::int64_t first, std::int64_t last) {
        with_storage<float>(call_.query_storage, [&]<class Q>(Q) {
            constexpr auto size = static_cast<std::ptrdiff_t>(sizeof(Q));
            const Vec<float> sign = broadcast<float>(call_.scale < 0.f ? -1.f : 1.f);
            const std::int64_t unit_rows = call_.query_len * call_.group;
            for (std::int64_t r = first; r < last; ++r) {
                const std::int64_t row = r % unit_rows, place = r - first;
                const char* query = queries[r / unit_rows] + row / call_.group * call_.query_position +
                                    row % call_.group * call_.query_head;
                Vec<float> largest = zero<float>();
                each_vector<float>(0, call_.head_dim, [&](std::int64_t d, auto part) NPATTN_BODY {
                    const Vec<float> q = load_part<Q>(query + d * size, part) * sign;
                    largest = max(max(q, zero<float>() - q), largest);
                    store_part(row_ + d, q, part);
                });
                char* const digits = bytes_of(query_digits(0, place));
                constexpr std::int64_t block = 4 * DEPTH_BLOCK; // columns
                query_rows_[place] = split_row(
                    row_, 0, call_.head_dim, reduce_max(largest), [=](int digit, std::int64_t d) NPATTN_BODY {
                        return digits + d / block * (DIGITS * TASK_ROWS * ROW_BYTES) + digit * ROW_BYTES +
                               d % block;
                    });
            }
        });
    }

    void begin_block(std::int64_t block, std::int64_t) { block_ = block; }

    void scores(int group, int rows, int begin, int end, float* scores) {
        constexpr int lanes = Vec<float>::lanes;
        streams_ = group == 0;
        const std::int64_t first_row = std::int64_t{group} * GROUP_ROWS;
        each_page(begin, end, [&](int j, int count, const char* page, std::int64_t slot) {
            const char* const panels = page + unit_.cache.key + slot * depth_;
            const char* const next = page + unit_.cache.value + slot * call_.value_dim;
            for (std::int64_t quad = 0; quad < depth_ / 4; quad += DEPTH_BLOCK) {
                multiply<PANEL / lanes>(
                    query_digits(quad / DEPTH_BLOCK, first_row), rows, panels + quad * QUADS, QUADS,
                    PANEL * depth_, smaller(DEPTH_BLOCK, depth_ / 4 - quad), count, quad == 0, next - panels);
            }
            const float* const key_scales = scales_at(page, unit_.cache.key_scale, slot);
            const Vec<float> largest = broadcast<float>(0x1.fffffep127f);
            for (int r = 0; r < rows; ++r) {
                const DigitRow& query = query_rows_[first_row + r];
                const Vec<float> scale = broadcast<float>(query.scale);
                each_sum(query, r, count, [&](std::int64_t c, Vec<float> sum) NPATTN_BODY {
                    // Where they overflow together, a sum of 0 stays 0.
                    const Vec<float> both = min(largest, scale * load<float>(key_scales + c));
                    store(scores + r * ROW_STRIDE + j + c, sum * both);
                });
            }
        });
    }

    void weigh(int rows, int begin, int end, const float* weights, Start start, float* output,
               std::int64_t width) {
        weigh_visible(rows, begin, end, weights, nullptr, start, output, width);
    }

    // The same without the hidden values; visible (rows, KEY_BLOCK), or null.
    void weigh_visible(int rows, int begin, int end, const float* weights, const std::uint8_t* visible,
                       Start start, float* output, std::int64_t width) {
        each_page(begin, end, [&](int j, int count, const char* page, std::int64_t slot) {
            const float* const scales = scales_at(page, unit_.cache.value_scale, slot);
            each_vector<float>(0, count, [&](std::int64_t c, auto part) NPATTN_BODY {
                store_part(value_scales_ + j + c, load_part<float>(scales + c, part), part);
            });
        });
        DigitRow weight_rows[GROUP_ROWS];
        for (int r = 0; r < rows; ++r) {
            const float top = scale_weights(weights + r * ROW_STRIDE,
                                            visible ? visible + r * KEY_BLOCK : nullptr, begin, end);
            char* const digits = bytes_of(weights_ + DIGITS * r * ROW_STRIDE);
            weight_rows[r] = split_row(row_, begin, end, top, [=](int digit, std::int64_t j) NPATTN_BODY {
                return digits + digit * ROW_BYTES + j;
            });
        }
        each_page(begin, end, [&](int j, int count, const char* page, std::int64_t slot) {
            const char* const values = page + unit_.cache.value + slot * call_.value_dim;
            multiply<8>(weights_ + j / 4, rows, values, call_.value_dim * 4, QUADS, (count + 3) / 4,
                        call_.value_dim, j == begin, next_keys(block_ + j + KEY_BLOCK, values) - values);
        });
        for (int r = 0; r < rows; ++r) {
            float* const to = output + r * width;
            const Vec<float> scale = broadcast<float>(weight_rows[r].scale);
            each_sum(weight_rows[r], r, call_.value_dim, [&](std::int64_t c, Vec<float> sum) NPATTN_BODY {
                store(to + c, fma(sum, scale, start == Start::zero ? zero<float>() : load<float>(to + c)));
            });
        }
    }

private:
    static constexpr std::ptrdiff_t QUADS = PANEL * 4;          // bytes of a row of a key panel
    static constexpr std::ptrdiff_t ROW_BYTES = ROW_STRIDE * 4; // of a row of digits

    // body(first, count, page, slot) for the columns [begin, end) of the block that lie in one page, from a slot on.
    template <class Body> NPATTN_INLINE void each_page(int begin, int end, Body body) const {
        const std::int64_t page_keys = unit_.cache.page_keys, key = block_ + begin;
        const char* const* page = unit_.cache.pages + key / page_keys;
        std::int64_t slot = key % page_keys;
        for (int count; begin < end; begin += count, ++page, slot = 0) {
            count = smaller(page_keys - slot, end - begin);
            body(begin, count, *page, slot);
        }
    }
    static const float* scales_at(const char* page, std::ptrdiff_t offset, std::int64_t slot) {
        return reinterpret_cast<const float*>(page + offset) + slot;
    }

    // The panel of keys that begins with `key`, its scales asked for; `otherwise` past the last one.
    const char* next_keys(std::int64_t key, const char* otherwise) const {
        const CachePages& cache = unit_.cache;
        if (!streams_ || key >= unit_.key_len) return otherwise;
        const char* const page = cache.pages[key / cache.page_keys];
        const std::int64_t slot = key % cache.page_keys;
        const std::int64_t bytes = smaller(KEY_BLOCK, cache.page_keys - slot) * sizeof(float);
        for (std::int64_t byte = 0; byte < bytes; byte += 64) {
            __builtin_prefetch(page + cache.key_scale + slot * sizeof(float) + byte, 0, 2);
            __builtin_prefetch(page + cache.value_scale + slot * sizeof(float) + byte, 0, 2);
        }
        return page + cache.key + slot * depth_;
    }

    Int8Quad* query_digits(std::int64_t block, std::int64_t row) const {
        return queries_ + DIGITS * (block * TASK_ROWS + row) * ROW_STRIDE;
    }
    static char* bytes_of(Int8Quad* digits) { return reinterpret_cast<char*>(digits); }

    // row_[j] = weights[j] * the scale of value j; the largest.
    float scale_weights(const float* weights, const std::uint8_t* visible, int begin, int end) const {
        Vec<float> largest = zero<float>();
        each_vector<float>(begin, end, [&](std::int64_t j, auto part) NPATTN_BODY {
            Vec<float> x = load_part<float>(weights + j, part) * load_part<float>(value_scales_ + j, part);
            if (visible) x = select(load_bytes_part<float>(visible + j, part), x, zero<float>());
            largest = max(x, largest);
            store_part(row_ + j, x, part);
        });
        return reduce_max(largest);
    }

    // sums_ (DIGITS * rows, columns) = or += digits (DIGITS * rows, depth) quads (depth, columns), whose panels lie
    // `panel` bytes apart; up to REGISTERS of them have contiguous rows.
    template <int REGISTERS>
    NPATTN_INLINE void multiply(const Int8Quad* digits, int rows, const char* quads,
                                std::ptrdiff_t quads_stride, std::ptrdiff_t panel, int depth,
                                std::int64_t columns, bool begins, std::ptrdiff_t ahead) const {
        for (int r = 0; r < DIGITS * rows; r += TILE_ROWS) {
            const TileOperands<Int8Quad> operands = {digits + r * ROW_STRIDE,
                                                     quads,
                                                     quads_stride,
                                                     panel,
                                                     depth,
                                                     DEPTH_BLOCK,
                                                     reinterpret_cast<char*>(sums_ + r * sums_stride_),
                                                     sums_stride_ *
                                                         static_cast<std::ptrdiff_t>(sizeof(std::int32_t)),
                                                     begins ? Start::zero : Start::resume,
                                                     nullptr,
                                                     streams_ && r == 0 ? ahead : 0,
                                                     quads_stride};
            with_rows<TILE_ROWS>(smaller(TILE_ROWS, DIGITS * rows - r), [&](auto row_count) {
                constexpr int row_number = decltype(row_count)::value;
                column_product<row_number, row_registers<row_number>(REGISTERS), true>(operands, 0, columns);
            });
        }
    }

    // body(c, 128 high + low) for the vectors of row r of sums_, less the 128 that quads hold too much.
    template <class Body>
    NPATTN_INLINE void each_sum(const DigitRow& row, int r, std::int64_t columns, Body body) const {
        constexpr int lanes = Vec<float>::lanes;
        Vec<std::int32_t> offsets[DIGITS];
        for (int digit = 0; digit < DIGITS; ++digit) {
            std::int32_t same[lanes];
            for (std::int32_t& offset : same) offset = -128 * row.sums[digit];
            offsets[digit] = load<std::int32_t>(same);
        }
        const std::int32_t* const high = sums_ + DIGITS * r * sums_stride_;
        const std::int32_t* const low = high + sums_stride_;
        for (std::int64_t c = 0; c < columns; c += lanes) {
            const Vec<float> sum = to_float(load<std::int32_t>(high + c) + offsets[0]);
            body(c, fma(sum, broadcast<float>(128.f), to_float(load<std::int32_t>(low + c) + offsets[1])));
        }
    }

    const AttentionCall<float>& call_;
    const AttentionUnit<float>& unit_;
    std::int64_t depth_, sums_stride_;
    Int8Quad* queries_; // [block of depths][DIGITS * row][ROW_STRIDE]
    DigitRow* query_rows_;
    Int8Quad* weights_;   // [DIGITS * row][ROW_STRIDE] of a block of keys
    std::int32_t* sums_;  // (DIGITS * GROUP_ROWS, sums_stride_)
    float* value_scales_; // of the block
    float* row_;
    std::int64_t block_ = 0;
    bool streams_ =
        true; // while keys are read memory is asked for their values, and for the next keys while those are
};

} // namespace
} // namespace npattn::NPATTN_ISA
