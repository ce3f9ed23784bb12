// Matrix products in float and double, and what moves half precision operands to and from them.

#include "kernels/gemm.hpp"
#include "kernels/dots.hpp"
#include "kernels/each_vector.hpp"
#include "kernels/pairs.hpp"

namespace npattn::NPATTN_ISA {
namespace {

// A stored as S -> copy[row][ROW_STRIDE].
template <class S, class T = Compute<S>>
void copy_rows(const char* matrix, std::ptrdiff_t row_stride, std::ptrdiff_t depth_stride, std::int64_t rows,
               std::int64_t depth, T* copy) {
    constexpr auto size = static_cast<std::ptrdiff_t>(sizeof(S));
    constexpr int lanes = Vec<T>::lanes;
    constexpr int ahead = 4; // rows: those far apart are not foreseen by the hardware
    if (depth_stride == size) {
        for (std::int64_t r = 0; r < rows; ++r) {
            const char* row = matrix + r * row_stride;
            const std::ptrdiff_t next = r + ahead < rows ? ahead * row_stride : 0;
            each_vector<T>(0, depth, [&](std::int64_t d, auto part) NPATTN_BODY {
                __builtin_prefetch(row + d * size + next);
                store_part(copy + r * ROW_STRIDE + d, load_part<S>(row + d * size, part), part);
            });
        }
        return;
    }
    for (std::int64_t d = 0; d < depth; d += lanes) {
        const char* depths[lanes];
        for (int i = 0; i < lanes; ++i) depths[i] = d + i < depth ? matrix + (d + i) * depth_stride : nullptr;
        turn<lanes, S>(depths, row_stride, rows, copy + d, ROW_STRIDE);
    }
}

template <class T>
void pack_any_panels(Storage storage, const char* matrix, std::ptrdiff_t depth_stride,
                     std::ptrdiff_t column_stride, std::int64_t depth, std::int64_t columns,
                     std::int64_t first, std::int64_t last, T* panels, std::ptrdiff_t panel_stride) {
    with_storage<T>(storage, [&]<class S>(S) {
        pack_panels<S>(matrix, depth_stride, column_stride, depth, columns, first, last, panels,
                       panel_stride);
    });
}

template <class T>
void copy_any_rows(Storage storage, const char* matrix, std::ptrdiff_t row_stride,
                   std::ptrdiff_t depth_stride, std::int64_t rows, std::int64_t depth, T* copy) {
    with_storage<T>(storage,
                    [&]<class S>(S) { copy_rows<S>(matrix, row_stride, depth_stride, rows, depth, copy); });
}

template <class T>
void multiply_direct(Storage storage, const T* a, const char* b, std::ptrdiff_t b_depth_stride,
                     std::int64_t rows, std::int64_t depth, std::int64_t columns, Start start, const T* bias,
                     char* c, std::ptrdiff_t c_row_stride) {
    with_storage<T>(storage, [&]<class S>(S) {
        if (rows == 1) // memory comes at full speed in long pieces
            return multiply_strips<S, 1, 4, 2048, 1>(pack_panels<S>, a, b, b_depth_stride, rows, depth,
                                                     columns, start, bias, c, c_row_stride);
        multiply_strips<S, 1, 8, 512>(pack_panels<S>, a, b, b_depth_stride, rows, depth, columns, start, bias,
                                      c, c_row_stride);
    });
}

template <class T>
void multiply_any_dots(Storage storage, const T* a, const char* b, std::ptrdiff_t b_column_stride,
                       std::int64_t rows, std::int64_t depth, std::int64_t columns, Start start,
                       const T* bias, char* c, std::ptrdiff_t c_row_stride) {
    with_storage<T>(storage, [&]<class S>(S) {
        multiply_dots<S>(a, b, b_column_stride, rows, depth, columns, start, bias, c, c_row_stride);
    });
}

// pairs[(depth + 1) / 2][PANEL] -> panel[depth][PANEL].
template <class S> NPATTN_INLINE void widen_panel(const HalfPair* pairs, std::int64_t depth, float* panel) {
    constexpr int lanes = Vec<float>::lanes;
    constexpr std::ptrdiff_t ahead = 1024; // bytes
    for (std::int64_t d = 0; d < depth; d += 2) {
        for (int c = 0; c < PANEL; c += lanes) {
            const auto* p = reinterpret_cast<const char*>(pairs + d / 2 * PANEL + c);
            __builtin_prefetch(p + ahead);
            Vec<float> even = load<S>(p), odd = load<S>(p + lanes * sizeof(S));
            deinterleave(even, odd);
            store(panel + d * PANEL + c, even);
            if (d + 1 < depth) store(panel + (d + 1) * PANEL + c, odd);
        }
    }
}

void multiply_pairs(Storage storage, const float* a, const HalfPair* panels, std::ptrdiff_t panel_stride,
                    std::int64_t rows, std::int64_t depth, std::int64_t columns, Start start,
                    const float* bias, char* c, std::ptrdiff_t c_row_stride) {
    const auto multiply_stored = [&]<class S>(S) {
        alignas(64) float panel[DEPTH_BLOCK * PANEL];
        for (std::int64_t p = 0; p < panel_count(columns); ++p) {
            const HalfPair* pairs = panels + p * panel_stride;
            const int here = smaller(PANEL, columns - p * PANEL);
            const float* bias_here = start == Start::bias ? bias + p * PANEL : nullptr;
            char* const c_here = c + p * PANEL * static_cast<std::ptrdiff_t>(sizeof(float));
            if (rows > TILE_ROWS) {
                widen_panel<S>(pairs, depth, panel);
                multiply(a, panel, 0, rows, depth, here, start, bias_here, c_here, c_row_stride);
                continue;
            }
            const auto widen_some = [](const char* some, std::ptrdiff_t, std::ptrdiff_t, std::int64_t depths,
                                       std::int64_t, std::int64_t, std::int64_t, float* to, std::ptrdiff_t) {
                widen_panel<S>(reinterpret_cast<const HalfPair*>(some), depths, to);
            };
            multiply_strips<S, 1, 64, PANEL>(widen_some, a, reinterpret_cast<const char*>(pairs),
                                             PANEL * sizeof(S), rows, depth, here, start, bias_here, c_here,
                                             c_row_stride);
        }
    };
    storage == Storage::f16 ? multiply_stored(Float16{}) : multiply_stored(BFloat16{});
}

void narrow_rows(Storage storage, const float* sums, std::ptrdiff_t stride, std::int64_t rows,
                 std::int64_t columns, char* c, std::ptrdiff_t c_row_stride) {
    with_storage<float>(storage, [&]<class S>(S) {
        for (std::int64_t r = 0; r < rows; ++r) {
            each_vector<float>(0, columns, [&](std::int64_t j, auto part) NPATTN_BODY {
                char* to = c + r * c_row_stride + j * static_cast<std::ptrdiff_t>(sizeof(S));
                store_part_as<S>(to, load_part<float>(sums + r * stride + j, part), part);
            });
        }
    });
}

template <class T>
constexpr GemmKernels<T> gemm_kernels = {TILE_ROWS,          BLOCK_ROWS,       1,
                                         pack_any_panels<T>, copy_any_rows<T>, multiply<T>,
                                         multiply_direct<T>, Vec<T>::lanes,    multiply_any_dots<T>};

} // namespace

extern const GemmTable gemm_table;
const GemmTable gemm_table = {gemm_kernels<float>, gemm_kernels<double>, pack_pairs, multiply_pairs,
                              narrow_rows};

} // namespace npattn::NPATTN_ISA
