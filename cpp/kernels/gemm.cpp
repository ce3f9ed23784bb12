// Matrix products on packed operands: C (rows, columns) from A (rows, depth) B (depth, columns).

#include "kernels/each_vector.hpp"
#include "kernels/tile.hpp"

namespace npattn::NPATTN_ISA {
namespace {

template <class T>
void copy_rows(const char* matrix, std::ptrdiff_t row_stride, std::ptrdiff_t depth_stride, std::int64_t rows,
               std::int64_t depth, T* copy) {
    constexpr auto size = static_cast<std::ptrdiff_t>(sizeof(T));
    constexpr int lanes = Vec<T>::lanes;
    if (depth_stride == size) {
        for (std::int64_t r = 0; r < rows; ++r) {
            const char* row = matrix + r * row_stride;
            const std::ptrdiff_t next = r + 1 < rows ? row_stride : 0;
            each_vector<T>(0, depth, [&](std::int64_t d, auto part) NPATTN_BODY {
                __builtin_prefetch(row + d * size + next);
                store_part(copy + r * ROW_STRIDE + d, load_part<T>(row + d * size, part), part);
            });
        }
        return;
    }
    for (std::int64_t d = 0; d < depth; d += lanes) {
        const char* depths[lanes];
        for (int i = 0; i < lanes; ++i) depths[i] = d + i < depth ? matrix + (d + i) * depth_stride : nullptr;
        turn<lanes, T>(depths, row_stride, rows, copy + d, ROW_STRIDE);
    }
}

// A panel's part of B stays in the L1 cache while every group of rows passes over it.
template <class T>
void multiply(const T* a, const T* panels, std::ptrdiff_t panel_stride, std::int64_t rows, std::int64_t depth,
              std::int64_t columns, Start start, const T* bias, char* c, std::ptrdiff_t c_row_stride) {
    for (std::int64_t p = 0; p < panel_count(columns); ++p) {
        const std::int64_t first = p * PANEL;
        const int here = smaller(PANEL, columns - first);
        for (std::int64_t r = 0; r < rows; r += TILE_ROWS) {
            const TileOperands<T> operands = {a + r * ROW_STRIDE,
                                              reinterpret_cast<const char*>(panels + p * panel_stride),
                                              PANEL * sizeof(T),
                                              0, // one panel at a time
                                              depth,
                                              DEPTH_BLOCK,
                                              c + r * c_row_stride +
                                                  first * static_cast<std::ptrdiff_t>(sizeof(T)),
                                              c_row_stride,
                                              start,
                                              start == Start::bias ? bias + first : nullptr};
            row_product<TILE_ROWS, TILE_VECTORS>(smaller(TILE_ROWS, rows - r), here, operands);
        }
    }
}

// Streams B once, a few of its rows at a time: the sums stay in a strip of scratch that the L1 cache holds.
template <class T>
void multiply_direct(const T* a, const char* b, std::ptrdiff_t b_depth_stride, std::int64_t rows,
                     std::int64_t depth, std::int64_t columns, Start start, const T* bias, char* c,
                     std::ptrdiff_t c_row_stride) {
    constexpr std::int64_t depth_step = 8;
    constexpr std::int64_t strip_columns = 512;
    alignas(64) T strip[TILE_ROWS * strip_columns];
    for (std::int64_t first = 0; first < columns; first += strip_columns) {
        const std::int64_t width = smaller(strip_columns, columns - first);
        const std::ptrdiff_t skip = first * static_cast<std::ptrdiff_t>(sizeof(T));
        std::int64_t d = 0;
        do {
            const TileOperands<T> operands = {a + d,
                                              b + d * b_depth_stride + skip,
                                              b_depth_stride,
                                              PANEL * sizeof(T),
                                              smaller(depth_step, depth - d),
                                              depth_step,
                                              reinterpret_cast<char*>(strip),
                                              strip_columns * sizeof(T),
                                              d == 0 ? Start::zero : Start::resume,
                                              nullptr};
            row_product<TILE_ROWS, TILE_VECTORS>(static_cast<int>(rows), width, operands);
            d += depth_step;
        } while (d < depth);
        for (std::int64_t r = 0; r < rows; ++r) {
            for (std::int64_t j = 0; j < width; j += Vec<T>::lanes) {
                const int n = smaller(Vec<T>::lanes, width - j);
                char* to = c + r * c_row_stride + skip + j * static_cast<std::ptrdiff_t>(sizeof(T));
                Vec<T> sum = load_first<T>(strip + r * strip_columns + j, n);
                if (start == Start::add) sum = load_first<T>(to, n) + sum;
                if (start == Start::bias) sum = sum + load_first<T>(bias + first + j, n);
                store_first(to, sum, n);
            }
        }
    }
}

template <class T>
constexpr GemmKernels<T> gemm_kernels = {TILE_ROWS, pack_panels<T>, copy_rows<T>, multiply<T>,
                                         multiply_direct<T>};

} // namespace

extern const GemmTable gemm_table;
const GemmTable gemm_table = {gemm_kernels<float>, gemm_kernels<double>};

} // namespace npattn::NPATTN_ISA
