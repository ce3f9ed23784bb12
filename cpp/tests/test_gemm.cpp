// The matrix kernels of every ISA that this CPU has, for every way operands are stored, against plain loops in
// double.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "check.hpp"
#include "dispatch/registry.hpp"
#include "guard_page.hpp"

namespace npattn {
namespace {

struct Shape {
    std::int64_t rows, depth, columns;
};

// A matrix (rows, columns) of random numbers stored as S: contiguous rows, contiguous columns, or neither and
// backwards. It ends where memory ends.
enum class Order { by_rows, by_columns, backwards };

template <class S> struct Matrix {
    Matrix(std::int64_t rows, std::int64_t columns, Order order, Random& random, std::int64_t padding = 1)
        : memory(static_cast<std::size_t>(2 * (rows + 1) * (columns + padding) + 1) * sizeof(S)) {
        constexpr std::ptrdiff_t size = sizeof(S);
        row_stride = order == Order::by_columns ? size : (columns + padding) * size;
        column_stride = order == Order::by_columns ? (rows + padding) * size : size;
        if (order == Order::backwards) {
            row_stride *= 2;
            column_stride *= -2;
        }
        start = memory.end() - size;
        if (rows > 0) start -= (rows - 1) * row_stride;
        if (columns > 0 && column_stride > 0) start -= (columns - 1) * column_stride;
        for (std::int64_t r = 0; r < rows; ++r) {
            for (std::int64_t c = 0; c < columns; ++c) {
                const S x = narrow<S>(static_cast<Compute<S>>(random.between(-1, 1)));
                std::memcpy(start + r * row_stride + c * column_stride, &x, sizeof x);
            }
        }
    }
    Compute<S> at(std::int64_t row, std::int64_t column) const {
        S x;
        std::memcpy(&x, start + row * row_stride + column * column_stride, sizeof x);
        return widen(x);
    }

    GuardPage memory;
    char* start;
    std::ptrdiff_t row_stride, column_stride;
};

// How operands of a product are copied: P, from elements S.
template <class S, class P> constexpr std::int64_t held(std::int64_t depth) {
    return sizeof(P) == 2 * sizeof(S) && !std::is_same_v<P, float> ? (depth + 1) / 2 : depth;
}

// Element d of copied ones that lie `stride` P apart.
template <class S, class P> Compute<S> copied(const P* first, std::ptrdiff_t stride, std::int64_t d) {
    if constexpr (std::is_same_v<P, HalfPair>) {
        const HalfPair& pair = first[d / 2 * stride];
        return widen(S{d % 2 == 0 ? pair.even : pair.odd});
    } else {
        return first[d * stride];
    }
}

template <class S, class P>
std::vector<P> copy_rows(const GemmKernels<P>& gemm, const Matrix<S>& a, const Shape& shape) {
    const std::int64_t block = DEPTH_BLOCK * (std::is_same_v<P, HalfPair> ? 2 : 1);
    const std::int64_t blocks = std::max<std::int64_t>((shape.depth + block - 1) / block, 1);
    const std::int64_t room = (shape.rows + gemm.rows - 1) / gemm.rows * gemm.rows - shape.rows;
    std::vector<P> copy(static_cast<std::size_t>((blocks * shape.rows + room) * ROW_STRIDE));
    std::memset(static_cast<void*>(copy.data()), 0xff, copy.size() * sizeof(P)); // NaN
    for (std::int64_t i = 0; i < blocks; ++i) {
        P* const first = copy.data() + i * shape.rows * ROW_STRIDE;
        const std::int64_t depth = std::min(block, shape.depth - i * block);
        gemm.copy_rows(STORAGE<S>, a.start + i * block * a.column_stride, a.row_stride, a.column_stride,
                       shape.rows, depth, first);
        for (std::int64_t r = 0; r < shape.rows; ++r) {
            for (std::int64_t d = 0; d < depth; ++d) {
                CHECK((copied<S, P>(first + r * ROW_STRIDE, 1, d) == a.at(r, i * block + d)),
                      "row %d, depth %d", int(r), int(i * block + d));
            }
        }
    }
    return copy;
}

// pack(first, last, panels, stride) packs some panels.
template <class S, class P, class Pack>
std::vector<P> pack_panels(const Matrix<S>& b, const Shape& shape, Pack pack) {
    const std::int64_t panels = panel_count(shape.columns), depth = held<S, P>(shape.depth);
    std::vector<P> packed(static_cast<std::size_t>(panels * depth * PANEL));
    std::memset(static_cast<void*>(packed.data()), 0x55, packed.size() * sizeof(P));
    const std::int64_t half = panels / 2; // in two calls, as two threads would
    pack(half, panels, packed.data(), depth * PANEL);
    pack(std::int64_t{0}, half, packed.data(), depth * PANEL);
    const std::int64_t even_depth = std::is_same_v<P, HalfPair> ? 2 * depth : depth;
    for (std::int64_t c = 0; c < panels * PANEL; ++c) {
        const P* column = packed.data() + c / PANEL * depth * PANEL + c % PANEL;
        for (std::int64_t d = 0; d < even_depth; ++d) {
            const Compute<S> wanted = c < shape.columns && d < shape.depth ? b.at(d, c) : Compute<S>(0);
            CHECK((copied<S, P>(column, PANEL, d) == wanted), "column %d, depth %d", int(c), int(d));
        }
    }
    return packed;
}

// What C holds before a product, and what lies between its rows.
constexpr double before = 0.5;

template <class S, class R, class T>
void check_product(const Matrix<S>& a, const Matrix<R>& b, const Shape& shape, Start start, const T* bias,
                   const T* c, std::int64_t c_columns) {
    const double epsilon = sizeof(T) == 4 ? 6e-8 : 1.2e-16;
    for (std::int64_t r = 0; r < shape.rows; ++r) {
        for (std::int64_t j = 0; j < shape.columns; ++j) {
            double wanted = start == Start::zero ? 0 : start == Start::bias ? double(bias[j]) : before;
            double magnitude = std::fabs(wanted);
            for (std::int64_t d = 0; d < shape.depth; ++d) {
                const double term = double(a.at(r, d)) * double(b.at(d, j));
                wanted += term;
                magnitude += std::fabs(term);
            }
            const double error = std::fabs(double(c[r * c_columns + j]) - wanted);
            CHECK(error <= epsilon * magnitude * double(shape.depth + 2),
                  "C[%d, %d] of %d x %d x %d is off by %g", int(r), int(j), int(shape.rows), int(shape.depth),
                  int(shape.columns), error);
        }
        for (std::int64_t j = shape.columns; j < c_columns && r + 1 < shape.rows; ++j) {
            CHECK(c[r * c_columns + j] == T(before), "written between rows %d and %d", int(r), int(r) + 1);
        }
    }
}

// C of a shape, ending where memory ends, and its bias.
template <class T> struct Result {
    Result(const Shape& shape, Random& random)
        : columns(shape.columns + 3),
          size(static_cast<std::size_t>((shape.rows - 1) * columns + shape.columns)), page(size * sizeof(T)),
          c(reinterpret_cast<T*>(page.end()) - size), bias(static_cast<std::size_t>(shape.columns)) {
        for (T& x : bias) x = static_cast<T>(random.between(-1, 1));
    }
    char* clear() {
        for (std::size_t i = 0; i < size; ++i) c[i] = T(before);
        return reinterpret_cast<char*>(c);
    }
    std::ptrdiff_t row_bytes() const { return columns * static_cast<std::ptrdiff_t>(sizeof(T)); }

    std::int64_t columns;
    std::size_t size;
    GuardPage page;
    T* c;
    std::vector<T> bias;
};

constexpr Start STARTS[] = {Start::zero, Start::bias, Start::add};

// A stored as S and B as R, both copied to P.
template <class S, class R, class P>
void test_shape(const GemmKernels<P>& gemm, const Shape& shape, Order order) {
    Random random(4);
    const Matrix<S> a(shape.rows, shape.depth, order, random);
    const Matrix<R> b(shape.depth, shape.columns, order, random);
    const Matrix<R> direct(shape.depth, shape.columns, Order::by_rows, random, 0); // ends where memory ends
    const std::vector<P> rows = copy_rows(gemm, a, shape);
    const auto pack = [&](std::int64_t first, std::int64_t last, P* panels, std::ptrdiff_t stride) {
        gemm.pack_panels(STORAGE<R>, b.start, b.row_stride, b.column_stride, shape.depth, shape.columns,
                         first, last, panels, stride);
    };
    const std::vector<P> panels = pack_panels<R, P>(b, shape, pack);
    const std::int64_t depth = held<R, P>(shape.depth);
    Result<Sum<P>> result(shape, random);
    for (Start start : STARTS) {
        gemm.multiply(rows.data(), panels.data(), depth * PANEL, shape.rows, depth, shape.columns, start,
                      result.bias.data(), result.clear(), result.row_bytes());
        check_product(a, b, shape, start, result.bias.data(), result.c, result.columns);
        if (shape.rows > gemm.rows || depth > DEPTH_BLOCK || order != Order::by_rows) continue;
        const std::vector<Sum<P>> packed_result(result.c, result.c + result.size);
        gemm.multiply_direct(STORAGE<R>, rows.data(), b.start, b.row_stride, shape.rows, shape.depth,
                             shape.columns, start, result.bias.data(), result.clear(), result.row_bytes());
        CHECK(std::memcmp(packed_result.data(), result.c, result.size * sizeof(Sum<P>)) == 0,
              "packed and direct differ: %d x %d x %d", int(shape.rows), int(shape.depth),
              int(shape.columns));
        gemm.multiply_direct(STORAGE<R>, rows.data(), direct.start, direct.row_stride, shape.rows,
                             shape.depth, shape.columns, start, result.bias.data(), result.clear(),
                             result.row_bytes());
        check_product(a, direct, shape, start, result.bias.data(), result.c, result.columns);
    }
}

// Few rows of A, copied a block of depth after the other, times columns of B that end where memory ends. A column has
// the same bits wherever it stands.
template <class S, class R, class P> void test_dots(const GemmKernels<P>& gemm, const Shape& shape) {
    Random random(7);
    const Matrix<S> a(shape.rows, shape.depth, Order::by_rows, random);
    const Matrix<R> b(shape.depth, shape.columns, Order::by_columns, random, 0);
    const std::int64_t block = DEPTH_BLOCK * (std::is_same_v<P, HalfPair> ? 2 : 1);
    const std::int64_t blocks = (shape.depth + block - 1) / block;
    std::vector<P> rows(static_cast<std::size_t>(blocks * shape.rows * ROW_STRIDE));
    std::memset(static_cast<void*>(rows.data()), 0xff, rows.size() * sizeof(P)); // NaN
    for (std::int64_t i = 0; i < blocks; ++i) {
        gemm.copy_rows(STORAGE<S>, a.start + i * block * a.column_stride, a.row_stride, a.column_stride,
                       shape.rows, std::min(block, shape.depth - i * block),
                       rows.data() + i * shape.rows * ROW_STRIDE);
    }
    Result<Sum<P>> result(shape, random);
    const std::int64_t last = shape.columns - 1;
    Result<Sum<P>> alone({shape.rows, shape.depth, 1}, random);
    for (Start start : STARTS) {
        gemm.multiply_dots(STORAGE<R>, rows.data(), b.start, b.column_stride, shape.rows, shape.depth,
                           shape.columns, start, result.bias.data(), result.clear(), result.row_bytes());
        check_product(a, b, shape, start, result.bias.data(), result.c, result.columns);
        gemm.multiply_dots(STORAGE<R>, rows.data(), b.start + last * b.column_stride, b.column_stride,
                           shape.rows, shape.depth, 1, start, result.bias.data() + last, alone.clear(),
                           alone.row_bytes());
        for (std::int64_t r = 0; r < shape.rows; ++r)
            CHECK(alone.c[r * alone.columns] == result.c[r * result.columns + last], "row %d of %d x %d x %d",
                  int(r), int(shape.rows), int(shape.depth), int(shape.columns));
    }
}

// Panels of pairs, widened on their way, give the bits of panels that were widened before.
template <class R> void test_pairs(const GemmTable& gemm, const Shape& shape, Order order) {
    Random random(5);
    const Matrix<float> a(shape.rows, shape.depth, order, random);
    const Matrix<R> b(shape.depth, shape.columns, order, random);
    const std::vector<float> rows = copy_rows(gemm.f32, a, shape);
    const auto pack = [&](std::int64_t first, std::int64_t last, HalfPair* panels, std::ptrdiff_t stride) {
        gemm.pack_pairs(b.start, b.row_stride, b.column_stride, shape.depth, shape.columns, first, last,
                        panels, stride);
    };
    const std::vector<HalfPair> pairs = pack_panels<R, HalfPair>(b, shape, pack);
    const auto wide = [&](std::int64_t first, std::int64_t last, float* panels, std::ptrdiff_t stride) {
        gemm.f32.pack_panels(STORAGE<R>, b.start, b.row_stride, b.column_stride, shape.depth, shape.columns,
                             first, last, panels, stride);
    };
    const std::vector<float> panels = pack_panels<R, float>(b, shape, wide);
    Result<float> result(shape, random);
    for (Start start : STARTS) {
        gemm.f32.multiply(rows.data(), panels.data(), shape.depth * PANEL, shape.rows, shape.depth,
                          shape.columns, start, result.bias.data(), result.clear(), result.row_bytes());
        const std::vector<float> wanted(result.c, result.c + result.size);
        gemm.multiply_pairs(STORAGE<R>, rows.data(), pairs.data(), (shape.depth + 1) / 2 * PANEL, shape.rows,
                            shape.depth, shape.columns, start, result.bias.data(), result.clear(),
                            result.row_bytes());
        CHECK(std::memcmp(wanted.data(), result.c, result.size * sizeof(float)) == 0,
              "pairs and widened panels differ: %d x %d x %d", int(shape.rows), int(shape.depth),
              int(shape.columns));
    }
}

// Sums are rounded to C and nothing beside it is touched.
template <class S> void test_narrow_rows(const GemmTable& gemm) {
    Random random(6);
    for (std::int64_t columns : {1, 7, 16, 33, 100}) {
        constexpr std::int64_t rows = 5;
        const std::int64_t stride = columns + 2, c_stride = columns + 3;
        std::vector<float> sums(static_cast<std::size_t>(rows * stride));
        for (float& x : sums) x = static_cast<float>(random.between(-1e5, 1e5));
        const std::size_t size = static_cast<std::size_t>((rows - 1) * c_stride + columns);
        const GuardPage page(size * sizeof(S));
        std::memset(page.begin(), 0x5a, page.size());
        S* const c = reinterpret_cast<S*>(page.end()) - size;
        gemm.narrow_rows(STORAGE<S>, sums.data(), stride, rows, columns, reinterpret_cast<char*>(c),
                         c_stride * static_cast<std::ptrdiff_t>(sizeof(S)));
        for (std::int64_t i = 0; i < static_cast<std::int64_t>(size); ++i) {
            const std::int64_t r = i / c_stride, j = i % c_stride;
            const std::uint16_t wanted = j < columns
                                             ? narrow<S>(sums[static_cast<std::size_t>(r * stride + j)]).bits
                                             : std::uint16_t{0x5a5a};
            CHECK(c[i].bits == wanted, "row %d, column %d of %d", int(r), int(j), int(columns));
        }
    }
}

void test_table(const KernelTable& table) {
    const Shape shapes[] = {{1, 1, 1},   {1, 64, 32}, {2, 3, 31},  {3, 0, 5},   {4, 17, 33}, {5, 8, 64},
                            {6, 40, 70}, {7, 5, 100}, {12, 16, 9}, {13, 9, 65}, {25, 33, 7}, {3, 256, 1500}};
    for (const Shape& shape : shapes) {
        for (auto order : {Order::by_rows, Order::by_columns, Order::backwards}) {
            test_shape<float, float>(table.gemm->f32, shape, order);
            test_shape<double, double>(table.gemm->f64, shape, order);
            test_shape<Float16, Float16>(table.gemm->f32, shape, order);
            test_shape<BFloat16, BFloat16>(table.gemm->f32, shape, order);
            test_shape<float, BFloat16>(table.gemm->f32, shape, order);
            test_shape<Float16, float>(table.gemm->f32, shape, order);
            if (table.dot != nullptr) test_shape<BFloat16, BFloat16>(table.dot->gemm, shape, order);
            test_pairs<Float16>(*table.gemm, shape, order);
            test_pairs<BFloat16>(*table.gemm, shape, order);
        }
    }
    // Several groups of rows and blocks of depth at a time, each with a rest.
    const Shape large[] = {{31, 33, 33},  {32, 32, 64},   {33, 63, 95},
                           {40, 513, 40}, {65, 1030, 33}, {96, 1024, 96}};
    for (const Shape& shape : large) {
        if (table.dot == nullptr) break;
        const std::int64_t most = 2 * DEPTH_BLOCK * table.dot->gemm.depth_blocks;
        if (shape.depth <= most) test_shape<BFloat16, BFloat16>(table.dot->gemm, shape, Order::by_rows);
    }
    const Shape few_rows[] = {{1, 0, 5},    {1, 1, 1},    {2, 2, 2},    {3, 3, 3},    {4, 7, 4},
                              {5, 15, 5},   {6, 16, 6},   {7, 17, 7},   {8, 31, 15},  {9, 32, 16},
                              {12, 33, 17}, {16, 255, 6}, {1, 256, 7},  {2, 257, 31}, {3, 600, 33},
                              {4, 511, 8},  {31, 513, 9}, {32, 700, 13}};
    for (const Shape& shape : few_rows) {
        test_dots<float, float>(table.gemm->f32, shape);
        test_dots<double, double>(table.gemm->f64, shape);
        test_dots<float, Float16>(table.gemm->f32, shape);
        test_dots<BFloat16, BFloat16>(table.gemm->f32, shape);
        if (table.dot != nullptr) test_dots<BFloat16, BFloat16>(table.dot->gemm, shape);
    }
    test_narrow_rows<Float16>(*table.gemm);
    test_narrow_rows<BFloat16>(*table.gemm);
}

} // namespace
} // namespace npattn

int main() {
    for (const npattn::KernelTable* table : npattn::available_tables()) {
        std::printf("%s\n", table->name);
        npattn::test_table(*table);
    }
    return npattn::verdict();
}
