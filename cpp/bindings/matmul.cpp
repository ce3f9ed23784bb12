#include "ops/matmul_int8.hpp"

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"
#include "dispatch/kernel_table.hpp"

namespace npattn {
namespace {

// cos, sin, the width of a head, the columns of all heads, interleaved
using RotationArguments = std::tuple<py::array, py::array, std::int64_t, std::int64_t, bool>;

Operand operand(const py::array& array) { return {view(array), storage_of(array)}; }

bool contiguous(const py::array& array) { return (array.flags() & py::array::c_style) != 0; }

// A contiguous vector of `columns` elements of T, or null for none.
template <class T> const T* vector(const OptionalArray& array, std::int64_t columns, const char* what) {
    if (!array) return nullptr;
    require(holds<T>(*array) && array->ndim() == 1 && array->shape(0) == columns && contiguous(*array), what);
    return static_cast<const T*>(array->data());
}

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

// cos and sin of what is computed in, (n, pairs), n a divisor of the rows of out; heads in the first columns of it.
std::optional<HeadRotation> rotation_of(const std::optional<RotationArguments>& given, const Operand& out) {
    if (!given) return std::nullopt;
    const auto& [cos, sin, width, columns, interleaved] = *given;
    const HeadRotation rotation = {view(cos), view(sin), width, columns, interleaved};
    const std::int64_t rows = out.view.count(out.view.dimensions - 1);
    for (const py::array& table : {cos, sin}) {
        require((out.storage == Storage::f64 ? holds<double>(table) : holds<float>(table)) &&
                    table.ndim() == 2 && table.shape(0) == cos.shape(0) && table.shape(1) == cos.shape(1) &&
                    contiguous(table),
                "matmul: cos and sin are not contiguous tables of what is computed in");
    }
    require(rows == 0 || (cos.shape(0) > 0 && rows % cos.shape(0) == 0),
            "matmul: cos and sin do not fit the rows");
    require(width > 0 && 2 * cos.shape(1) <= width && columns % width == 0 && columns <= out.view.size(-1),
            "matmul: heads do not fit the columns");
    return rotation;
}
const HeadRotation* pointer(const std::optional<HeadRotation>& rotation) {
    return rotation ? &*rotation : nullptr;
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
                     const py::array& out, int threads, const std::optional<RotationArguments>& rotation) {
    const Operand left = operand(a);
    const Operand result = {writable_view(out), storage_of(out)};
    check_product(left.view, result.view, packed.depth, packed.columns);
    require(agree(left.storage, result.storage) && agree(packed.storage, result.storage),
            "matmul: dtypes differ");
    constexpr auto what = "matmul: bias must be a contiguous vector, one element a column";
    const void* bias_data = nullptr;
    if (result.storage == Storage::f64)
        bias_data = vector<double>(bias, packed.columns, what);
    else
        bias_data = vector<float>(bias, packed.columns, what);
    const auto turned = rotation_of(rotation, result);
    without_gil([&] { matmul_packed(left, packed, bias_data, result, pointer(turned), threads); });
}

// q (depth, columns) int8, scales (columns) float32.
PackedInt8 pack_quantised(const py::array& q, const py::array& scales, int threads) {
    require(q.ndim() == 2 && holds<std::int8_t>(q) && q.shape(0) <= INT8_DEPTH,
            "pack_int8: q must be an int8 matrix");
    const TensorView view_of_q = view(q);
    const auto* data =
        vector<float>(scales, q.shape(1), "pack_int8: scales must be contiguous float32, one a column");
    PackedInt8 packed;
    without_gil([&] { packed = pack_int8(view_of_q, data, threads); });
    return packed;
}

// (q, scales)
py::tuple unpack_quantised(const PackedInt8& packed) {
    py::array q(py::dtype::of<std::int8_t>(), {packed.depth, packed.columns});
    py::array scales(py::dtype::of<float>(), packed.columns);
    const TensorView view_of_q = view(q);
    without_gil([&] { unpack_int8(packed, view_of_q); });
    if (packed.columns > 0)
        std::memcpy(scales.mutable_data(), packed.scales.as<float>(), packed.scales.bytes());
    return py::make_tuple(q, scales);
}

void multiply_quantised(const py::array& a, const PackedInt8& packed, const OptionalArray& bias,
                        const py::array& out, int threads, const std::optional<RotationArguments>& rotation) {
    const Operand left = operand(a);
    const Operand result = {writable_view(out), storage_of(out)};
    check_product(left.view, result.view, packed.depth, packed.columns);
    for (const Operand& rows : {left, result}) {
        require(rows.view.size(-1) <= 1 || rows.view.stride(-1) == storage_bytes(rows.storage) ||
                    rows.view.count(rows.view.dimensions) == 0,
                "matmul: rows are not contiguous");
        require(rows.storage != Storage::f64, "matmul: int8 weights with float64");
    }
    const auto* bias_data =
        vector<float>(bias, packed.columns, "matmul: bias must be contiguous float32, one element a column");
    const auto turned = rotation_of(rotation, result);
    without_gil([&] { matmul_int8(left, packed, bias_data, result, pointer(turned), threads); });
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
          py::arg("out"), py::arg("threads"), py::arg("rotation") = py::none());
    py::class_<PackedInt8>(m, "PackedInt8")
        .def_property_readonly("shape",
                               [](const PackedInt8& p) { return py::make_tuple(p.depth, p.columns); })
        .def_property_readonly("nbytes",
                               [](const PackedInt8& p) { return p.panels.bytes() + p.scales.bytes(); })
        .def("unpack", unpack_quantised);
    m.def("pack_int8", pack_quantised);
    m.def("matmul_int8", multiply_quantised, py::arg("a"), py::arg("packed"), py::arg("bias").none(true),
          py::arg("out"), py::arg("threads"), py::arg("rotation") = py::none());
}

} // namespace npattn
