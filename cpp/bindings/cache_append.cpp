#include <new>

#include "bindings/cache.hpp"

namespace npattn {
namespace {

// key (sequences, kv heads, tokens, head_dim) and value (..., value_dim) are of the store's dtype and sizes.
bool tokens_fit(const Store& s, const TensorView& key, const TensorView& value, std::int64_t sequences) {
    const PageLayout& layout = s.store.layout();
    const auto fits = [&](const TensorView& t, std::int64_t width) {
        return t.dimensions == 4 && t.shape[0] == sequences && t.shape[1] == layout.kv_heads &&
               t.shape[2] == key.shape[2] && t.shape[3] == width &&
               (!layout.scaled() || width == 1 || t.count(3) == 0 ||
                t.strides[3] == static_cast<std::ptrdiff_t>(sizeof(float)));
    };
    return fits(key, layout.head_dim) && fits(value, layout.value_dim);
}

// KVStore::append of what has been checked.
std::int64_t append_checked(Store& s, KVStore::Slots slots, const TensorView& key, const TensorView& value,
                            const std::int64_t* counts, int threads) {
    try {
        return without_gil([&] { return s.store.append(slots, key, value, counts, threads); });
    } catch (const std::bad_alloc&) {
        PyErr_SetString(PyExc_MemoryError, "no memory for more tokens; the cache is as it was");
        throw py::error_already_set();
    }
}

bool distinct(const KVStore& store, KVStore::Slots slots) {
    std::vector<bool> seen(static_cast<std::size_t>(store.slots()));
    for (const std::int64_t slot : slots) {
        if (seen[static_cast<std::size_t>(slot)]) return false;
        seen[static_cast<std::size_t>(slot)] = true;
    }
    return true;
}

// A view of a plain array of this dtype; nothing of anything else.
std::optional<TensorView> plain_view(py::handle object, py::handle dtype) {
    const auto* array_type = reinterpret_cast<PyTypeObject*>(py::detail::npy_api::get().PyArray_Type_);
    if (Py_TYPE(object.ptr()) != array_type) return std::nullopt;
    if (py::detail::array_proxy(object.ptr())->descr != dtype.ptr()) return std::nullopt;
    return view(py::reinterpret_borrow<py::array>(object));
}

// Counts as a list of integers, a row of int64, or None for `rows` of each; nothing of anything else.
std::optional<std::vector<std::int64_t>> plain_counts(py::handle object, std::size_t sequences,
                                                      std::int64_t rows) {
    std::vector<std::int64_t> counts(sequences, rows);
    if (object.is_none()) return counts;
    if (PyList_CheckExact(object.ptr())) {
        if (static_cast<std::size_t>(PyList_GET_SIZE(object.ptr())) != sequences) return std::nullopt;
        for (std::size_t i = 0; i < sequences; ++i) {
            PyObject* const item = PyList_GET_ITEM(object.ptr(), static_cast<Py_ssize_t>(i));
            int overflow = 1;
            if (PyLong_CheckExact(item)) counts[i] = PyLong_AsLongLongAndOverflow(item, &overflow);
            if (overflow != 0) return std::nullopt;
        }
        return counts;
    }
    const std::optional<TensorView> row = plain_view(object, py::dtype::of<std::int64_t>());
    if (!row || row->dimensions != 1 || row->shape[0] != std::ssize(counts)) return std::nullopt;
    for (std::size_t i = 0; i < sequences; ++i)
        std::memcpy(&counts[i], row->data + static_cast<std::ptrdiff_t>(i) * row->strides[0],
                    sizeof(std::int64_t));
    return counts;
}

} // namespace

std::int64_t append(Store& s, const py::array& slots, const py::array& key, const py::array& value,
                    const py::array& counts, int threads) {
    const KVStore::Slots of = slots_of(s, slots);
    const TensorView key_view = view(key), value_view = view(value);
    require(tokens_fit(s, key_view, value_view, slots.size()), "append: wrong shape");
    require(key.dtype().equal(s.dtype) && value.dtype().equal(s.dtype), "append: wrong dtype");
    const std::int64_t* tokens =
        integers(counts, slots.size(), "append: counts are not int64 of the sequences");
    require(distinct(s.store, of), "append: a sequence twice");
    for (std::size_t i = 0; i < of.size(); ++i) {
        require(0 <= tokens[i] && tokens[i] <= key_view.shape[2], "append: counts out of range");
        require(tokens[i] == 0 || tokens[i] <= s.store.room(of[i]), "append: beyond the capacity");
    }
    return append_checked(s, of, key_view, value_view, tokens, threads);
}

bool append_plain(Store& s, py::handle sequences, py::handle key, py::handle value, py::handle counts,
                  int threads) {
    const std::optional<TensorView> keys = plain_view(key, s.dtype), values = plain_view(value, s.dtype);
    if (!keys || !values) return false;
    const HeldAccess access(s.store.access(), true);
    const auto slots = find_slots(s, sequences);
    if (!slots || !tokens_fit(s, *keys, *values, std::ssize(*slots)) || !distinct(s.store, *slots))
        return false;
    const std::int64_t rows = keys->shape[2];
    const auto tokens = plain_counts(counts, slots->size(), rows);
    if (!tokens) return false;
    for (std::size_t i = 0; i < slots->size(); ++i) {
        const std::int64_t count = (*tokens)[i];
        if (count < 0 || count > rows || (count > 0 && count > s.store.room((*slots)[i]))) return false;
    }
    return append_checked(s, *slots, *keys, *values, tokens->data(), threads) == 0;
}

} // namespace npattn
