#include "ops/matmul.hpp"

#include <memory>

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"
#include <pybind11/stl.h>

namespace npattn {
namespace {

Operand operand(const py::array& array) { return {view(array), storage_of(array)}; }

PackedPanels pack(const py::array& b, int threads) {
    require(b.ndim() == 2, "pack_matrix needs a matrix");
    const Operand matrix = operand(b);
    PackedPanels packed;
    without_gil([&] { packed = pack_matrix(matrix, threads); });
    return packed;
}

py::array unpack(const PackedPanels& packed) {
    py::array out(dtype_of(packed.storage), {packed.depth, packed.columns});
    const TensorView out_view = view(out);
    without_gil([&] { unpack_matrix(packed, out_view); });
    return out;
}

void check_product(const TensorView& a, const TensorView& out, std::int64_t depth, std::int64_t columns) {
    require(a.dimensions == out.dimensions && a.dimensions >= 2, "matmul: operands differ in dimensions");
    for (int i = 0; i < a.dimensions - 1; ++i) require(a.shape[i] == out.shape[i], "matmul: shapes differ");
    require(a.size(-1) == depth && out.size(-1) == columns, "matmul: shapes do not chain");
}

// Everything in float64, or nothing.
bool agree(Storage storage, Storage other) { return (storage == Storage::f64) == (other == Storage::f64); }

void multiply(const py::array& a, const py::array& b, const py::array& out, int threads) {
    const Operand left = operand(a), right = operand(b);
    const Operand result = {writable_view(out), storage_of(out)};
    require(right.view.dimensions >= 2, "matmul: b is not a matrix");
    check_product(left.view, result.view, right.view.size(-2), right.view.size(-1));
    require(right.view.dimensions == result.view.dimensions, "matmul: operands differ in dimensions");
    for (int i = 0; i < result.view.dimensions - 2; ++i)
        require(right.view.shape[i] == result.view.shape[i], "matmul: shapes differ");
    require(agree(left.storage, result.storage) && agree(right.storage, result.storage),
            "matmul: dtypes differ");
    without_gil([&] { matmul(left, right, result, threads); });
}

void multiply_packed(const py::array& a, const PackedPanels& packed, const OptionalArray& bias,
                     const py::array& out, int threads) {
    const Operand left = operand(a);
    const Operand result = {writable_view(out), storage_of(out)};
    check_product(left.view, result.view, packed.depth, packed.columns);
    require(agree(left.storage, result.storage) && agree(packed.storage, result.storage),
            "matmul: dtypes differ");
    if (bias) {
        require((result.storage == Storage::f64 ? holds<double>(*bias) : holds<float>(*bias)) &&
                    bias->ndim() == 1 && bias->shape(0) == packed.columns &&
                    (bias->flags() & py::array::c_style) != 0,
                "matmul: bias must be a contiguous vector, one element a column");
    }
    const void* bias_data = bias ? bias->data() : nullptr;
    without_gil([&] { matmul_packed(left, packed, bias_data, result, threads); });
}

} // namespace

void bind_matmul(py::module_& m) {
    py::class_<PackedPanels>(m, "PackedPanels")
        .def_property_readonly("shape",
                               [](const PackedPanels& p) { return py::make_tuple(p.depth, p.columns); })
        .def_property_readonly("nbytes", [](const PackedPanels& p) { return p.panels.bytes(); })
        .def("unpack", unpack);
    m.def("pack_matrix", pack, py::arg("b"), py::arg("threads"));
    m.def("matmul", multiply, py::arg("a"), py::arg("b"), py::arg("out"), py::arg("threads"));
    m.def("matmul_packed", multiply_packed, py::arg("a"), py::arg("packed"), py::arg("bias").none(true),
          py::arg("out"), py::arg("threads"));
}

} // namespace npattn
