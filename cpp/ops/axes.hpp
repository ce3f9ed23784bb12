#pragma once
// The axes over which several arrays of one shape are walked together.

#include <cstdlib>
#include <utility>

#include "core/tensor_view.hpp"

namespace npattn {

template <int Operands> struct Axes {
    int count = 0;
    std::int64_t size[MAX_DIMENSIONS];
    std::ptrdiff_t stride[MAX_DIMENSIONS][Operands];

    // One more axis, inside those before it; `strides` are bytes, one an operand. An axis of one element is
    // left out.
    template <class... Strides> void add(std::int64_t elements, Strides... strides) {
        static_assert(sizeof...(Strides) == Operands);
        if (elements == 1) return;
        const std::ptrdiff_t all[Operands] = {strides...};
        size[count] = elements;
        for (int k = 0; k < Operands; ++k) stride[count][k] = all[k];
        ++count;
    }

    // Largest strides outermost, then axes merged that follow one another in every operand: fewer and longer
    // axes. The first operand decides, the others where it has equal strides.
    void simplify() {
        for (int i = 1; i < count; ++i) {
            for (int j = i; j > 0 && inner_of(j - 1, j); --j) swap_axes(j - 1, j);
        }
        int last = 0;
        for (int i = 1; i < count; ++i) {
            bool joined = true;
            for (int k = 0; k < Operands; ++k) joined = joined && stride[last][k] == stride[i][k] * size[i];
            if (joined) {
                size[last] *= size[i];
            } else {
                ++last;
                size[last] = size[i];
            }
            for (int k = 0; k < Operands; ++k) stride[last][k] = stride[i][k];
        }
        if (count > 0) count = last + 1;
    }

    // Takes the innermost axis out; one of a single element where there is none.
    std::int64_t take_innermost(std::ptrdiff_t (&strides)[Operands]) {
        for (int k = 0; k < Operands; ++k) strides[k] = count == 0 ? 0 : stride[count - 1][k];
        return count == 0 ? 1 : size[--count];
    }

    std::int64_t elements() const {
        std::int64_t product = 1;
        for (int i = 0; i < count; ++i) product *= size[i];
        return product;
    }

    // Bytes from the start of each operand to its element number `index` in row-major order.
    void offsets(std::int64_t index, std::ptrdiff_t (&bytes)[Operands]) const {
        for (int k = 0; k < Operands; ++k) bytes[k] = 0;
        for (int i = count - 1; i >= 0; --i) {
            const std::int64_t place = index % size[i];
            index /= size[i];
            for (int k = 0; k < Operands; ++k) bytes[k] += place * stride[i][k];
        }
    }

    void swap_axes(int i, int j) {
        std::swap(size[i], size[j]);
        for (int k = 0; k < Operands; ++k) std::swap(stride[i][k], stride[j][k]);
    }

private:
    bool inner_of(int i, int j) const {
        for (int k = 0; k < Operands; ++k) {
            if (std::abs(stride[i][k]) != std::abs(stride[j][k])) {
                return std::abs(stride[i][k]) < std::abs(stride[j][k]);
            }
        }
        return false;
    }
};

// Output of so many bytes and more is written past the cache.
constexpr std::int64_t STREAM_BYTES = std::int64_t{32} << 20;

} // namespace npattn
