#include "ops/heads.hpp"

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"

namespace npattn {
namespace {

// destination = source; the same shape and item size, no overlap, any dtype that holds no references.
void copy_array(const py::array& source, const py::array& destination, int threads) {
    const TensorView from = view(source), to = writable_view(destination);
    const auto bytes = static_cast<int>(source.itemsize());
    require(bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16, "copy: unknown item size");
    require(!source.dtype().attr("hasobject").cast<bool>(), "copy: the items hold references");
    require(source.itemsize() == destination.itemsize() && from.dimensions == to.dimensions,
            "copy: arrays differ");
    for (int i = 0; i < from.dimensions; ++i) require(from.shape[i] == to.shape[i], "copy: shapes differ");
    without_gil([&] { copy(from, to, bytes, threads); });
}

// destination (float16, or bfloat16 as its bits) = source (float32), rounded; the same shape, no overlap.
void narrow_array(const py::array& source, const py::array& destination, int threads) {
    const TensorView from = view(source), to = writable_view(destination);
    const Storage storage = storage_of(destination);
    require(holds<float>(source) && storage_bytes(storage) == 2, "narrow: not from float32 to a half type");
    require(from.dimensions == to.dimensions, "narrow: arrays differ");
    for (int i = 0; i < from.dimensions; ++i) require(from.shape[i] == to.shape[i], "narrow: shapes differ");
    without_gil([&] { narrow(from, to, storage, threads); });
}

} // namespace

void bind_heads(py::module_& m) {
    m.def("copy", &copy_array);
    m.def("narrow", &narrow_array);
}

} // namespace npattn
