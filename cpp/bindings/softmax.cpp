#include "ops/softmax.hpp"

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"

namespace npattn {
namespace {

const TensorView* pointer(const std::optional<TensorView>& view) { return view ? &*view : nullptr; }

bool same_shape(const TensorView& a, const TensorView& b, int axes) {
    if (a.dimensions < axes || b.dimensions < axes) return false;
    for (int i = 0; i < axes; ++i) {
        if (a.shape[i] != b.shape[i]) return false;
    }
    return true;
}

// x (..., n) -> out (..., n), or (...) for logsumexp; mask (..., n) bool, sinks (...) in the dtype computed in.
void run(SoftmaxResult result, const py::array& x, const OptionalArray& mask, const OptionalArray& sinks,
         const py::array& out, int threads) {
    const TensorView x_view = view(x), out_view = writable_view(out);
    const auto mask_view = optional_view(mask), sinks_view = optional_view(sinks);
    const int axes = x_view.dimensions, out_axes = result == SoftmaxResult::logsumexp ? axes - 1 : axes;
    require(axes >= 1 && out_view.dimensions == out_axes && same_shape(x_view, out_view, out_axes),
            "softmax: x and out differ in shape");
    require(!mask ||
                (holds<bool>(*mask) && mask_view->dimensions == axes && same_shape(x_view, *mask_view, axes)),
            "softmax: mask must be bool, of x's shape");
    require(!sinks || (sinks_view->dimensions == axes - 1 && same_shape(x_view, *sinks_view, axes - 1)),
            "softmax: sinks must have x's shape without its last axis");
    require(x.dtype().equal(out.dtype()) &&
                (!sinks || (holds<double>(x) ? holds<double>(*sinks) : holds<float>(*sinks))),
            "softmax: arrays of different dtypes");
    compute_stored_as(x, [&]<class S>() {
        softmax<S>(result, x_view, pointer(mask_view), pointer(sinks_view), out_view, threads);
    });
}

} // namespace

void bind_softmax(py::module_& m) {
    m.def("softmax",
          [](const py::array& x, const OptionalArray& mask, const OptionalArray& sinks, const py::array& out,
             int threads) { run(SoftmaxResult::softmax, x, mask, sinks, out, threads); });
    m.def("log_softmax", [](const py::array& x, const py::array& out, int threads) {
        run(SoftmaxResult::log_softmax, x, std::nullopt, std::nullopt, out, threads);
    });
    m.def("logsumexp", [](const py::array& x, const py::array& out, int threads) {
        run(SoftmaxResult::logsumexp, x, std::nullopt, std::nullopt, out, threads);
    });
}

} // namespace npattn
