#include "ops/matmul_int8.hpp"

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"
#include "dispatch/kernel_table.hpp"

namespace npattn {
namespace {

bool contiguous(const py::array& array) { return (array.flags() & py::array::c_style) != 0; }

bool rows_contiguous(const py::array& array) {
    return array.ndim() >= 2 &&
           (array.shape(array.ndim() - 1) <= 1 ||
            array.strides(array.ndim() - 1) == static_cast<py::ssize_t>(array.itemsize()));
}

// q (depth, columns) int8, scales (columns) float32.
PackedInt8 pack(const py::array& q, const py::array& scales, int threads) {
    require(q.ndim() == 2 && holds<std::int8_t>(q) && q.shape(0) <= INT8_DEPTH,
            "pack_int8: q must be an int8 matrix");
    require(scales.ndim() == 1 && holds<float>(scales) && scales.shape(0) == q.shape(1) && contiguous(scales),
            "pack_int8: scales must be contiguous float32, one a column");
    const TensorView view_of_q = view(q);
    const auto* data = static_cast<const float*>(scales.data());
    PackedInt8 packed;
    without_gil([&] { packed = pack_int8(view_of_q, data, threads); });
    return packed;
}

// (q, scales)
py::tuple unpack(const PackedInt8& packed) {
    py::array q(py::dtype::of<std::int8_t>(), {packed.depth, packed.columns});
    py::array scales(py::dtype::of<float>(), packed.columns);
    const TensorView view_of_q = view(q);
    without_gil([&] { unpack_int8(packed, view_of_q); });
    if (packed.columns > 0)
        std::memcpy(scales.mutable_data(), packed.scales.as<float>(), packed.scales.bytes());
    return py::make_tuple(q, scales);
}

void multiply(const py::array& a, const PackedInt8& packed, const OptionalArray& bias, const py::array& out,
              int threads) {
    const Operand left = {view(a), storage_of(a)}, result = {writable_view(out), storage_of(out)};
    const int axes = left.view.dimensions;
    require(rows_contiguous(a) && rows_contiguous(out) && result.view.dimensions == axes,
            "matmul: operands differ in dimensions, or rows are not contiguous");
    for (int i = 0; i < axes - 1; ++i)
        require(left.view.shape[i] == result.view.shape[i], "matmul: shapes differ");
    require(left.view.size(-1) == packed.depth && result.view.size(-1) == packed.columns,
            "matmul: shapes do not chain");
    require(left.storage != Storage::f64 && result.storage != Storage::f64,
            "matmul: int8 weights with float64");
    require(!bias || (holds<float>(*bias) && bias->ndim() == 1 && bias->shape(0) == packed.columns &&
                      contiguous(*bias)),
            "matmul: bias must be contiguous float32, one element a column");
    const auto* bias_data = bias ? static_cast<const float*>(bias->data()) : nullptr;
    without_gil([&] { matmul_int8(left, packed, bias_data, result, threads); });
}

} // namespace

void bind_matmul_int8(py::module_& m) {
    py::class_<PackedInt8>(m, "PackedInt8")
        .def_property_readonly("shape",
                               [](const PackedInt8& p) { return py::make_tuple(p.depth, p.columns); })
        .def_property_readonly("nbytes",
                               [](const PackedInt8& p) { return p.panels.bytes() + p.scales.bytes(); })
        .def("unpack", unpack);
    m.def("pack_int8", pack);
    m.def("matmul_int8", multiply, py::arg("a"), py::arg("packed"), py::arg("bias").none(true),
          py::arg("out"), py::arg("threads"));
}

} // namespace npattn
