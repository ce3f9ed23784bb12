// Products with weights of 8 bits: rows of A are quantised, multiplied in integers, and scaled back.

#include "kernels/each_vector.hpp"
#include "kernels/gemm.hpp"

namespace npattn::NPATTN_ISA {
namespace {

// q = round(x * 127 / max |x|) as quads of depth; scale = max |x| / 127, NaN where x is not finite; sum = the sum of q.
template <class S>
void quantise_row(const char* x, std::int64_t depth, std::ptrdiff_t block_stride, Int8Quad* quads,
                  float& scale, std::int32_t& sum) {
    constexpr auto size = static_cast<std::ptrdiff_t>(sizeof(S));
    constexpr std::int64_t block = 4 * DEPTH_BLOCK;
    Vec<float> largest = zero<float>(), spoilt = zero<float>();
    each_vector<float>(0, depth, [&](std::int64_t d, auto part) NPATTN_BODY {
        const Vec<float> a = load_part<S>(x + d * size, part);
        largest = max(largest, max(a, zero<float>() - a));
        spoilt = spoilt + a * zero<float>();
    });
    const float top = reduce_max(largest);
    const bool finite = all(equal(spoilt, spoilt));
    scale = finite ? top / 127.f : __builtin_nanf("");
    // A tiny row is enlarged first: 127 / top would overflow.
    const float enlarged = top < 0x1p-100f ? 0x1p100f : 1.f;
    const float inverse = finite && top > 0.f ? 127.f / (top * enlarged) : 0.f;
    sum = 0;
    for (std::int64_t begin = 0; begin < depth; begin += block) {
        auto* bytes = reinterpret_cast<char*>(quads + begin / block * block_stride);
        const std::int64_t end = begin + block < depth ? begin + block : depth;
        for (std::int64_t d = end; d % 4 != 0; ++d) bytes[d - begin] = 0;
        Vec<float> total = zero<float>();
        each_vector<float>(begin, end, [&](std::int64_t d, auto part) NPATTN_BODY {
            Vec<float> q = load_part<S>(x + d * size, part) * broadcast<float>(enlarged);
            q = finite ? round(q * broadcast<float>(inverse)) : zero<float>();
            total = total + q;
            store_int8_part(bytes + (d - begin), q, part);
        });
        sum += static_cast<std::int32_t>(reduce_add(total));
    }
}

void quantise_rows(Storage storage, const char* x, std::ptrdiff_t row_stride, std::int64_t rows,
                   std::int64_t depth, std::ptrdiff_t block_stride, Int8Quad* quads, float* scales,
                   std::int32_t* sums) {
    with_storage<float>(storage, [&]<class S>(S) {
        for (std::int64_t r = 0; r < rows; ++r) {
            quantise_row<S>(x + r * row_stride, depth, block_stride, quads + r * ROW_STRIDE, scales[r],
                            sums[r]);
        }
    });
}

// c_rj = (sums_rj - 128 row_sum_r) row_scale_r column_scale_j + bias_j: the 128 that was added to every weight. A power
// of 2 in a large row scale comes last: the sum times the whole of it would overflow where the column's scale is small.
void scale_rows(Storage storage, const std::int32_t* sums, std::ptrdiff_t stride, std::int64_t rows,
                std::int64_t columns, const float* row_scales, const std::int32_t* row_sums,
                const float* column_scales, const float* bias, char* c, std::ptrdiff_t c_row_stride) {
    with_storage<float>(storage, [&]<class S>(S) {
        for (std::int64_t r = 0; r < rows; ++r) {
            std::int32_t offsets[Vec<std::int32_t>::lanes];
            for (std::int32_t& offset : offsets) offset = -128 * row_sums[r];
            const Vec<std::int32_t> offset = load<std::int32_t>(offsets);
            const float power = row_scales[r] >= LARGE_SCALE ? LARGE_SCALE : 1.f;
            const Vec<float> row_scale = broadcast<float>(row_scales[r] / power);
            each_vector<float>(0, columns, [&](std::int64_t j, auto part) NPATTN_BODY {
                const Vec<float> exact =
                    to_float(load_part<std::int32_t>(sums + r * stride + j, part) + offset);
                Vec<float> y = exact * row_scale * load_part<float>(column_scales + j, part);
                y = y * broadcast<float>(power);
                if (bias != nullptr) y = y + load_part<float>(bias + j, part);
                store_part_as<S>(c + r * c_row_stride + j * static_cast<std::ptrdiff_t>(sizeof(S)), y, part);
            });
        }
    });
}

} // namespace

extern const Int8Table int8_table;
const Int8Table int8_table = {GROUP_ROWS, quantise_rows, multiply<Int8Quad>, scale_rows};

} // namespace npattn::NPATTN_ISA
