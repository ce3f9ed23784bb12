#include "ops/rope.hpp"

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"

namespace npattn {
namespace {

// Broadcasts against x (..., H, L, E) without its head axis, (..., L, pairs), rows contiguous.
bool is_table(const TensorView& table, const TensorView& x, std::ptrdiff_t item_bytes) {
    const int axes = x.dimensions > 2 ? x.dimensions - 1 : x.dimensions;
    if (table.dimensions < 1 || table.dimensions > axes || 2 * table.size(-1) > x.size(-1)) return false;
    const bool has_rows = table.size(-1) > 1 && table.count(table.dimensions) > 0;
    if (has_rows && table.stride(-1) != item_bytes) return false;
    for (int back = 2; back <= table.dimensions; ++back) {
        const std::int64_t wanted = x.size(back == 2 ? -2 : -back - (x.dimensions > 2));
        if (table.size(-back) != 1 && table.size(-back) != wanted) return false;
    }
    return true;
}

} // namespace

void bind_rope(py::module_& m) {
    m.def("rotary_embedding", [](const py::array& x, const py::array& cos, const py::array& sin,
                                 const py::array& out, bool interleaved, bool inverse, int threads) {
        const TensorView x_view = view(x), cos_view = view(cos), sin_view = view(sin),
                         out_view = writable_view(out);
        require(x_view.dimensions >= 2 && out_view.dimensions == x_view.dimensions,
                "rotary_embedding: x and out differ");
        for (int i = 0; i < x_view.dimensions; ++i) {
            require(x_view.shape[i] == out_view.shape[i], "rotary_embedding: x and out differ in shape");
        }
        require(is_table(cos_view, x_view, cos.itemsize()) && is_table(sin_view, x_view, sin.itemsize()) &&
                    cos_view.size(-1) == sin_view.size(-1),
                "rotary_embedding: cos and sin do not fit x");
        const bool wide = holds<double>(x);
        require(x.dtype().equal(out.dtype()) && (wide ? holds<double>(cos) : holds<float>(cos)) &&
                    cos.dtype().equal(sin.dtype()),
                "rotary_embedding: arrays of different dtypes");
        compute_stored_as(x, [&]<class S>() {
            rotary_embedding<S>(x_view, cos_view, sin_view, out_view, interleaved, inverse, threads);
        });
    });
}

} // namespace npattn
