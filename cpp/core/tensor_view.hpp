#pragma once
// A borrowed n-dimensional array: pointer, shape, strides in bytes. No ownership, any strides, any alignment.

#include <cstddef>
#include <cstdint>

namespace npattn {

constexpr int MAX_DIMENSIONS = 64; // NumPy's own limit

struct TensorView {
    char* data = nullptr;
    int dimensions = 0;
    std::int64_t shape[MAX_DIMENSIONS];
    std::ptrdiff_t strides[MAX_DIMENSIONS];

    // Axis counted from the end: -1 is the last.
    std::int64_t size(int axis) const { return shape[axis < 0 ? dimensions + axis : axis]; }
    std::ptrdiff_t stride(int axis) const { return strides[axis < 0 ? dimensions + axis : axis]; }

    // Elements in the first `axes` axes together.
    std::int64_t count(int axes) const {
        std::int64_t product = 1;
        for (int i = 0; i < axes; ++i) product *= shape[i];
        return product;
    }

    // Bytes from data to the element at row-major position `index` within the first `axes` axes.
    std::ptrdiff_t offset(std::int64_t index, int axes) const {
        std::ptrdiff_t bytes = 0;
        for (int i = axes - 1; i >= 0; --i) {
            bytes += (index % shape[i]) * strides[i];
            index /= shape[i];
        }
        return bytes;
    }
};

} // namespace npattn
