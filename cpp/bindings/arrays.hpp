#pragma once
// From Python objects to plain C++: views of arrays, and the frame every computing call runs in.
// Shapes and dtypes are checked in Python (npattn._check); here stands only what memory safety needs.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <optional>
#include <string_view>

#include "bindings/release_gil.hpp"
#include "core/bfloat16.hpp"
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

// The elements of `array` are T, in native byte order. Arrays of bfloat16 come as their bits, uint16.
template <class T> bool holds(const py::array& array) { return py::isinstance<py::array_t<T>>(array); }
template <> inline bool holds<Float16>(const py::array& array) {
    const py::dtype dtype = array.dtype();
    return dtype.kind() == 'f' && dtype.itemsize() == sizeof(Float16) && dtype.byteorder() == '=';
}
template <> inline bool holds<BFloat16>(const py::array& array) { return holds<std::uint16_t>(array); }

// The same of ml_dtypes' own dtype, by its name.
inline bool is_bfloat16(const py::dtype& dtype) {
    const auto* scalar =
        reinterpret_cast<PyTypeObject*>(py::detail::array_descriptor_proxy(dtype.ptr())->typeobj);
    const std::string_view name = scalar->tp_name;
    return dtype.itemsize() == sizeof(BFloat16) && name.substr(name.rfind('.') + 1) == "bfloat16";
}

inline py::dtype dtype_of(Storage storage) {
    return storage == Storage::f32   ? py::dtype::of<float>()
           : storage == Storage::f64 ? py::dtype::of<double>()
           : storage == Storage::f16 ? py::dtype("e")
           : storage == Storage::i8  ? py::dtype::of<std::int8_t>()
                                     : py::dtype::of<std::uint16_t>();
}
inline Storage storage_of(const py::dtype& dtype) {
    for (const Storage storage : {Storage::f32, Storage::f64, Storage::f16, Storage::i8}) {
        if (dtype.equal(dtype_of(storage))) return storage;
    }
    require(is_bfloat16(dtype), "expected a floating dtype or int8, in native byte order");
    return Storage::bf16;
}
inline Storage storage_of(const py::array& array) {
    if (holds<float>(array)) return Storage::f32;
    if (holds<double>(array)) return Storage::f64;
    if (holds<Float16>(array)) return Storage::f16;
    require(holds<BFloat16>(array), "expected a floating array in native byte order");
    return Storage::bf16;
}

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
        const DefaultFloatEnvironment environment; // numbers are converted here, before any task
        return body();
    } catch (const Interrupted&) {
        throw py::error_already_set();
    }
}

// Runs `compute<Element>()` for the one of Elements that `array` holds, without the GIL.
template <class... Elements, class Compute> void compute_for(const py::array& array, Compute&& compute) {
    int held = -1, index = 0;
    ((held < 0 && holds<Elements>(array) ? static_cast<void>(held = index) : static_cast<void>(0), ++index),
     ...);
    require(held >= 0, "expected a floating array in native byte order");
    without_gil([&] {
        index = 0;
        ((index++ == held ? compute.template operator()<Elements>() : static_cast<void>(0)), ...);
    });
}
// For the kernels that read and write the half types too.
template <class Compute> void compute_stored_as(const py::array& array, Compute&& compute) {
    compute_for<float, double, Float16, BFloat16>(array, compute);
}

} // namespace npattn
