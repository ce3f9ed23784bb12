#pragma once
// From Python objects to plain C++: views of arrays, and the frame every computing call runs in.
// Shapes and dtypes are checked in Python (npattn._check); here stands only what memory safety needs.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <optional>

#include "bindings/release_gil.hpp"
#include "core/float_environment.hpp"
#include "core/parallel.hpp"
#include "core/tensor_view.hpp"

namespace npattn {

namespace py = pybind11;

inline void require(bool condition, const char* what) {
    if (!condition) throw py::value_error(what);
}

inline TensorView view(const py::array& array) {
    TensorView v;
    v.data = const_cast<char*>(static_cast<const char*>(array.data()));
    v.dimensions = static_cast<int>(array.ndim());
    for (int i = 0; i < v.dimensions; ++i) {
        v.shape[i] = array.shape(i);
        v.strides[i] = array.strides(i);
    }
    return v;
}

inline TensorView writable_view(const py::array& array) {
    require(array.writeable(), "an output array is read-only");
    return view(array);
}

// An argument that may be None: an array, or nothing.
using OptionalArray = std::optional<py::array>;
inline std::optional<TensorView> optional_view(const OptionalArray& array) {
    if (!array) return std::nullopt;
    return view(*array);
}

template <class T> bool holds(const py::array& array) { return py::isinstance<py::array_t<T>>(array); }

// `count` numbers of int64, one behind the other.
inline const std::int64_t* integers(const py::array& array, std::int64_t count, const char* what) {
    require(holds<std::int64_t>(array) && array.ndim() == 1 && array.shape(0) == count &&
                (array.flags() & py::array::c_style),
            what);
    return static_cast<const std::int64_t*>(array.data());
}

// What body() returns, run without the GIL. Ctrl-C inside becomes the pending Python exception.
template <class Body> auto without_gil(Body&& body) {
    try {
        const ReleaseGil released;
        return body();
    } catch (const Interrupted&) {
        throw py::error_already_set();
    }
}

// Runs `compute<float>()` or `compute<double>()` by the dtype of `array`, without the GIL.
template <class Compute> void compute_as(const py::array& array, Compute&& compute) {
    const bool single = holds<float>(array);
    require(single || holds<double>(array), "expected a float32 or float64 array in native byte order");
    without_gil([&] {
        const DefaultFloatEnvironment environment; // numbers are converted here, before any task
        if (single) {
            compute.template operator()<float>();
        } else {
            compute.template operator()<double>();
        }
    });
}

} // namespace npattn
