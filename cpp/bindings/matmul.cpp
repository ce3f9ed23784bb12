#include "ops/matmul.hpp"

#include <memory>

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"
#include <pybind11/stl.h>

namespace npattn {
namespace {

struct PackedMatrix {
    PackedPanels panels;
    bool single;
};

PackedMatrix pack(const py::array& b, int threads) {
    require(b.ndim() == 2, "pack_matrix needs a matrix");
    const TensorView b_view = view(b);
    PackedMatrix packed;
    packed.single = holds<float>(b);
    compute_as(b, [&]<class T>() { packed.panels = pack_matrix<T>(b_view, threads); });
    return packed;
}

py::array unpack(const PackedMatrix& packed) {
    const auto dtype = packed.single ? py::dtype::of<float>() : py::dtype::of<double>();
    py::array out(dtype, {packed.panels.depth, packed.panels.columns});
    const TensorView out_view = view(out);
    compute_as(out, [&]<class T>() { unpack_matrix<T>(packed.panels, out_view); });
    return out;
}

void check_product(const TensorView& a, const TensorView& out, std::int64_t depth, std::int64_t columns) {
    require(a.dimensions == out.dimensions && a.dimensions >= 2, "matmul: operands differ in dimensions");
    for (int i = 0; i < a.dimensions - 1; ++i) require(a.shape[i] == out.shape[i], "matmul: shapes differ");
    require(a.size(-1) == depth && out.size(-1) == columns, "matmul: shapes do not chain");
}

void multiply(const py::array& a, const py::array& b, const py::array& out, int threads) {
    const TensorView a_view = view(a);
    const TensorView b_view = view(b);
    const TensorView out_view = writable_view(out);
    require(b_view.dimensions >= 2, "matmul: b is not a matrix");
    check_product(a_view, out_view, b_view.size(-2), b_view.size(-1));
    require(b_view.dimensions == out_view.dimensions, "matmul: operands differ in dimensions");
    for (int i = 0; i < out_view.dimensions - 2; ++i)
        require(b_view.shape[i] == out_view.shape[i], "matmul: shapes differ");
    require(a.dtype().equal(b.dtype()) && a.dtype().equal(out.dtype()), "matmul: dtypes differ");
    compute_as(out, [&]<class T>() { matmul<T>(a_view, b_view, out_view, threads); });
}

void multiply_packed(const py::array& a, const PackedMatrix& packed, const OptionalArray& bias,
                     const py::array& out, int threads) {
    const TensorView a_view = view(a);
    const TensorView out_view = writable_view(out);
    check_product(a_view, out_view, packed.panels.depth, packed.panels.columns);
    require(holds<float>(a) == packed.single && a.dtype().equal(out.dtype()), "matmul: dtypes differ");
    if (bias) {
        require(bias->dtype().equal(a.dtype()) && bias->ndim() == 1 &&
                    bias->shape(0) == packed.panels.columns && (bias->flags() & py::array::c_style) != 0,
                "matmul: bias must be a contiguous vector of the operands' dtype, one element a column");
    }
    compute_as(out, [&]<class T>() {
        matmul_packed<T>(a_view, packed.panels, bias ? static_cast<const T*>(bias->data()) : nullptr,
                         out_view, threads);
    });
}

} // namespace

void bind_matmul(py::module_& m) {
    py::class_<PackedMatrix>(m, "PackedPanels")
        .def_property_readonly(
            "shape", [](const PackedMatrix& p) { return py::make_tuple(p.panels.depth, p.panels.columns); })
        .def_property_readonly(
            "dtype",
            [](const PackedMatrix& p) { return p.single ? py::dtype::of<float>() : py::dtype::of<double>(); })
        .def_property_readonly("nbytes", [](const PackedMatrix& p) { return p.panels.panels.bytes(); })
        .def("unpack", unpack);
    m.def("pack_matrix", pack, py::arg("b"), py::arg("threads"));
    m.def("matmul", multiply, py::arg("a"), py::arg("b"), py::arg("out"), py::arg("threads"));
    m.def("matmul_packed", multiply_packed, py::arg("a"), py::arg("packed"), py::arg("bias").none(true),
          py::arg("out"), py::arg("threads"));
}

} // namespace npattn
