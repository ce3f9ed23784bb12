// The short way for the common call: arrays that need no checks beyond a glance, and no options but causal
// and scale.

#include <cmath>
#include <utility>

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"
#include "ops/attention.hpp"

namespace npattn {
namespace {

void swap_heads(TensorView& t) {
    std::swap(t.shape[t.dimensions - 2], t.shape[t.dimensions - 3]);
    std::swap(t.strides[t.dimensions - 2], t.strides[t.dimensions - 3]);
}

// The addresses between which all elements lie.
std::pair<const char*, const char*> extent(const TensorView& t, std::ptrdiff_t itemsize) {
    const char* low = t.data;
    const char* high = t.data + itemsize;
    for (int i = 0; i < t.dimensions; ++i) {
        const std::ptrdiff_t reach = (t.shape[i] - 1) * t.strides[i];
        (reach < 0 ? low : high) += reach;
    }
    return {low, high};
}

// True if nothing that is written to `out` is read from `in`, or twice.
bool separate(const TensorView& out, const TensorView& in, std::ptrdiff_t itemsize) {
    for (int i = 0; i < out.dimensions; ++i) {
        if (out.strides[i] == 0 && out.shape[i] > 1) return false;
    }
    const auto [out_low, out_high] = extent(out, itemsize);
    const auto [in_low, in_high] = extent(in, itemsize);
    return out_high <= in_low || in_high <= out_low;
}

// The output for query, key, value (..., H, L, E) (with `swap`, (..., L, H, E)) that are plain ndarrays of
// one dtype, floating in native byte order, with equal leading axes and contiguous last axes, as many queries as keys
// where causal, in `out` unless that is None; None for anything else, which the general way then computes or
// refuses.
py::object attend_plain(py::handle query, py::handle key, py::handle value, bool causal, py::handle scale,
                        bool swap, py::handle out, int threads) {
    const auto& api = py::detail::npy_api::get();
    const auto* array_type = reinterpret_cast<PyTypeObject*>(api.PyArray_Type_);
    AttentionArguments a;
    TensorView out_view;
    const py::handle objects[] = {query, key, value, out};
    TensorView* const views[] = {&a.query, &a.key, &a.value, &out_view};
    const int count = out.is_none() ? 3 : 4;
    for (int i = 0; i < count; ++i) {
        if (Py_TYPE(objects[i].ptr()) != array_type) return py::none();
        if (py::detail::array_proxy(objects[i].ptr())->descr != py::detail::array_proxy(query.ptr())->descr)
            return py::none();
        *views[i] = view(py::reinterpret_borrow<py::array>(objects[i]));
    }
    const auto first = py::reinterpret_borrow<py::array>(query);
    Storage storage;
    if (is_bfloat16(first.dtype())) {
        storage = Storage::bf16;
    } else if (holds<float>(first) || holds<double>(first) || holds<Float16>(first)) {
        storage = storage_of(first);
    } else {
        return py::none();
    }
    a.query_storage = a.key_storage = a.out_storage = storage;
    const int dimensions = a.query.dimensions;
    for (int i = 0; i < count; ++i) {
        TensorView& t = *views[i];
        if (t.dimensions != dimensions || dimensions < 3) return py::none();
        if (t.count(dimensions) == 0 || t.stride(-1) != first.itemsize()) return py::none();
        for (int axis = 0; axis < dimensions - 3; ++axis) {
            if (t.shape[axis] != a.query.shape[axis]) return py::none();
        }
        if (swap) swap_heads(t);
    }
    const bool fits = a.key.size(-1) == a.query.size(-1) && a.key.size(-2) == a.value.size(-2) &&
                      a.key.size(-3) == a.value.size(-3) && a.query.size(-3) % a.key.size(-3) == 0 &&
                      (!causal || a.query.size(-2) == a.key.size(-2));
    if (!fits) return py::none();
    a.scale = 1 / std::sqrt(static_cast<double>(a.query.size(-1)));
    if (!scale.is_none()) {
        if (!PyFloat_CheckExact(scale.ptr())) return py::none();
        a.scale = PyFloat_AS_DOUBLE(scale.ptr());
        const double held =
            storage == Storage::f64 ? a.scale : static_cast<double>(static_cast<float>(a.scale));
        if (!std::isfinite(held) || (held == 0) != (a.scale == 0)) return py::none();
    }
    py::object result;
    if (count == 4) {
        result = py::reinterpret_borrow<py::object>(out);
        const bool shaped = out_view.size(-3) == a.query.size(-3) && out_view.size(-2) == a.query.size(-2) &&
                            out_view.size(-1) == a.value.size(-1);
        if (!shaped || !py::reinterpret_borrow<py::array>(out).writeable()) return py::none();
        for (int i = 0; i < 3; ++i) {
            if (!separate(out_view, *views[i], first.itemsize())) return py::none();
        }
    } else {
        py::array::ShapeContainer shape(first.shape(), first.shape() + dimensions);
        (*shape)[static_cast<std::size_t>(dimensions - 1)] = a.value.size(-1);
        const py::array fresh(first.dtype(), std::move(shape));
        out_view = view(fresh);
        if (swap) swap_heads(out_view);
        result = fresh;
    }
    a.out = out_view;
    a.causal = causal;
    a.threads = threads;
    without_gil([&] { storage == Storage::f64 ? attention<double>(a) : attention<float>(a); });
    return result;
}

} // namespace

void bind_attention_plain(py::module_& m) { m.def("attention_plain", attend_plain); }

} // namespace npattn
