// The short way for the common call: arrays that need no checks beyond a glance, and no options but causal
// and scale.

#include <cmath>

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"
#include "ops/attention.hpp"

namespace npattn {
namespace {

// The output for query, key, value (..., H, L, E) (with `swap`, (..., L, H, E)) that are plain ndarrays of
// one dtype, float32 or float64, with equal leading axes and contiguous last axes, as many queries as keys
// where causal; None for anything else, which the general way then computes or refuses.
py::object attend_plain(py::handle query_object, py::handle key_object, py::handle value_object, bool causal,
                        py::handle scale, bool swap, int threads) {
    const auto& api = py::detail::npy_api::get();
    for (const py::handle object : {query_object, key_object, value_object}) {
        if (Py_TYPE(object.ptr()) != reinterpret_cast<PyTypeObject*>(api.PyArray_Type_)) return py::none();
    }
    const auto query = py::reinterpret_borrow<py::array>(query_object);
    const auto key = py::reinterpret_borrow<py::array>(key_object);
    const auto value = py::reinterpret_borrow<py::array>(value_object);
    const auto* dtype = py::detail::array_proxy(query.ptr())->descr;
    for (const py::array* array : {&key, &value}) {
        if (py::detail::array_proxy(array->ptr())->descr != dtype) return py::none();
    }
    if (!holds<float>(query) && !holds<double>(query)) return py::none();

    AttentionArguments a;
    a.query = view(query);
    a.key = view(key);
    a.value = view(value);
    const int dimensions = a.query.dimensions;
    if (dimensions < 3 || a.key.dimensions != dimensions || a.value.dimensions != dimensions)
        return py::none();
    for (TensorView* t : {&a.query, &a.key, &a.value}) {
        if (t->count(dimensions) == 0 || t->stride(-1) != query.itemsize()) return py::none();
        if (!swap) continue;
        std::swap(t->shape[dimensions - 2], t->shape[dimensions - 3]);
        std::swap(t->strides[dimensions - 2], t->strides[dimensions - 3]);
    }
    for (int i = 0; i < dimensions - 3; ++i) {
        if (a.key.shape[i] != a.query.shape[i] || a.value.shape[i] != a.query.shape[i]) return py::none();
    }
    const bool fits = a.key.size(-1) == a.query.size(-1) && a.key.size(-2) == a.value.size(-2) &&
                      a.key.size(-3) == a.value.size(-3) && a.query.size(-3) % a.key.size(-3) == 0 &&
                      (!causal || a.query.size(-2) == a.key.size(-2));
    if (!fits) return py::none();
    a.scale = 1 / std::sqrt(static_cast<double>(a.query.size(-1)));
    if (!scale.is_none()) {
        if (!PyFloat_CheckExact(scale.ptr())) return py::none();
        a.scale = PyFloat_AS_DOUBLE(scale.ptr());
        if (!std::isfinite(a.scale)) return py::none();
    }
    py::array::ShapeContainer shape(query.shape(), query.shape() + dimensions);
    (*shape)[static_cast<std::size_t>(dimensions - 1)] = a.value.size(-1);
    py::array out(query.dtype(), std::move(shape));
    a.out = view(out);
    if (swap) {
        std::swap(a.out->shape[dimensions - 2], a.out->shape[dimensions - 3]);
        std::swap(a.out->strides[dimensions - 2], a.out->strides[dimensions - 3]);
    }
    a.causal = causal;
    a.threads = threads;
    compute_as(query, [&]<class T>() { attention<T>(a); });
    return out;
}

} // namespace

void bind_attention_plain(py::module_& m) { m.def("attention_plain", attend_plain); }

} // namespace npattn
