// The matrix kernels of every ISA that this CPU has, against plain loops in double.

#include <cmath>
#include <cstring>
#include <vector>

#include "check.hpp"
#include "dispatch/registry.hpp"
#include "guard_page.hpp"

namespace npattn {
namespace {

struct Shape {
    std::int64_t rows, depth, columns;
};

// A matrix (rows, columns) of random numbers: contiguous rows, contiguous columns, or neither and backwards.
template <class T> struct Matrix {
    enum Order { by_rows, by_columns, backwards };

    Matrix(std::int64_t rows, std::int64_t columns, Order order, Random& random)
        : elements(static_cast<std::size_t>(3 * (rows + 1) * (columns + 2))) {
        for (T& x : elements) x = static_cast<T>(random.between(-1, 1));
        constexpr std::ptrdiff_t size = sizeof(T);
        row_stride = order == by_columns ? size : (columns + 1) * size;
        column_stride = order == by_columns ? (rows + 1) * size : size;
        start = reinterpret_cast<const char*>(elements.data() + 1);
        if (order == backwards) {
            row_stride *= 2;
            column_stride *= -2;
            start -= (columns - 1) * column_stride;
        }
    }
    T at(std::int64_t row, std::int64_t column) const {
        T x;
        std::memcpy(&x, start + row * row_stride + column * column_stride, sizeof x);
        return x;
    }

    std::vector<T> elements;
    const char* start;
    std::ptrdiff_t row_stride, column_stride;
};

template <class T>
std::vector<T> copy_rows(const GemmKernels<T>& gemm, const Matrix<T>& a, const Shape& shape) {
    std::vector<T> copy(static_cast<std::size_t>(shape.rows * ROW_STRIDE), T(77));
    gemm.copy_rows(a.start, a.row_stride, a.column_stride, shape.rows, shape.depth, copy.data());
    for (std::int64_t r = 0; r < shape.rows; ++r) {
        for (std::int64_t d = 0; d < shape.depth; ++d) {
            CHECK(copy[static_cast<std::size_t>(r * ROW_STRIDE + d)] == a.at(r, d), "row %d, depth %d",
                  int(r), int(d));
        }
    }
    return copy;
}

template <class T>
std::vector<T> pack_panels(const GemmKernels<T>& gemm, const Matrix<T>& b, const Shape& shape) {
    const std::int64_t panels = panel_count(shape.columns);
    std::vector<T> packed(static_cast<std::size_t>(panels * shape.depth * PANEL), T(77));
    const std::int64_t half = panels / 2; // in two calls, as two threads would
    gemm.pack_panels(b.start, b.row_stride, b.column_stride, shape.depth, shape.columns, half, panels,
                     packed.data(), shape.depth * PANEL);
    gemm.pack_panels(b.start, b.row_stride, b.column_stride, shape.depth, shape.columns, 0, half,
                     packed.data(), shape.depth * PANEL);
    for (std::int64_t c = 0; c < panels * PANEL; ++c) {
        for (std::int64_t d = 0; d < shape.depth; ++d) {
            const std::int64_t place = (c / PANEL * shape.depth + d) * PANEL + c % PANEL;
            const T wanted = c < shape.columns ? b.at(d, c) : T(0);
            CHECK(packed[static_cast<std::size_t>(place)] == wanted, "column %d, depth %d", int(c), int(d));
        }
    }
    return packed;
}

// What C holds before a product, and what lies between its rows.
constexpr double before = 0.5;

template <class T>
void check_product(const Matrix<T>& a, const Matrix<T>& b, const Shape& shape, Start start, const T* bias,
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

template <class T>
void test_shape(const GemmKernels<T>& gemm, const Shape& shape, typename Matrix<T>::Order order) {
    Random random(4);
    const Matrix<T> a(shape.rows, shape.depth, order, random);
    const Matrix<T> b(shape.depth, shape.columns, order, random);
    const std::vector<T> rows = copy_rows(gemm, a, shape);
    const std::vector<T> panels = pack_panels(gemm, b, shape);
    std::vector<T> bias(static_cast<std::size_t>(shape.columns));
    for (T& x : bias) x = static_cast<T>(random.between(-1, 1));

    // C and the unpacked B end where memory ends.
    const std::int64_t c_columns = shape.columns + 3;
    const std::size_t c_size = static_cast<std::size_t>((shape.rows - 1) * c_columns + shape.columns);
    const std::size_t b_size = static_cast<std::size_t>(shape.depth * shape.columns);
    const GuardPage c_page(c_size * sizeof(T)), b_page(b_size * sizeof(T));
    T* const c = reinterpret_cast<T*>(c_page.end()) - c_size;
    T* const direct = reinterpret_cast<T*>(b_page.end()) - b_size;
    for (std::int64_t i = 0; i < shape.depth * shape.columns; ++i)
        direct[i] = b.at(i / shape.columns, i % shape.columns);
    constexpr std::ptrdiff_t size = sizeof(T);
    for (Start start : {Start::zero, Start::bias, Start::add}) {
        for (std::size_t i = 0; i < c_size; ++i) c[i] = T(before);
        gemm.multiply(rows.data(), panels.data(), shape.depth * PANEL, shape.rows, shape.depth, shape.columns,
                      start, bias.data(), reinterpret_cast<char*>(c), c_columns * size);
        check_product(a, b, shape, start, bias.data(), c, c_columns);
        if (shape.rows > gemm.rows) continue;
        const std::vector<T> packed_result(c, c + c_size);
        for (std::size_t i = 0; i < c_size; ++i) c[i] = T(before);
        gemm.multiply_direct(rows.data(), reinterpret_cast<const char*>(direct), shape.columns * size,
                             shape.rows, shape.depth, shape.columns, start, bias.data(),
                             reinterpret_cast<char*>(c), c_columns * size);
        CHECK(std::memcmp(packed_result.data(), c, c_size * sizeof(T)) == 0,
              "packed and direct differ: %d x %d x %d", int(shape.rows), int(shape.depth),
              int(shape.columns));
    }
}

template <class T> void test_gemm(const GemmKernels<T>& gemm) {
    const Shape shapes[] = {{1, 1, 1},   {1, 64, 32}, {2, 3, 31},  {3, 0, 5},   {4, 17, 33}, {5, 8, 64},
                            {6, 40, 70}, {7, 5, 100}, {12, 16, 9}, {13, 9, 65}, {25, 33, 7}, {3, 256, 1500}};
    for (const Shape& shape : shapes) {
        for (auto order : {Matrix<T>::by_rows, Matrix<T>::by_columns, Matrix<T>::backwards})
            test_shape(gemm, shape, order);
    }
}

} // namespace
} // namespace npattn

int main() {
    for (const npattn::KernelTable* table : npattn::available_tables()) {
        std::printf("%s\n", table->name);
        npattn::test_gemm(npattn::kernels<float>(table->gemm));
        npattn::test_gemm(npattn::kernels<double>(table->gemm));
    }
    return npattn::verdict();
}
