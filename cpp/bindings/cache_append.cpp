#include <new>

#include "bindings/cache.hpp"

namespace npattn {
namespace {

// Key (sequences, kv heads, tokens, head_dim) and value (..., value_dim).
struct Tokens {
    TensorView key, value;
    Storage storage;
};

// They are of the store's sizes; contiguous, if they are to be rounded.
bool tokens_fit(const Store& s, const Tokens& tokens, std::int64_t sequences) {
    const PageLayout& layout = s.store.layout();
    const auto fits = [&](const TensorView& t, std::int64_t width) {
        return t.dimensions == 4 && t.shape[0] == sequences && t.shape[1] == layout.kv_heads &&
               t.shape[2] == tokens.key.shape[2] && t.shape[3] == width &&
               (tokens.storage == layout.storage || width == 1 || t.count(3) == 0 ||
                t.strides[3] == static_cast<std::ptrdiff_t>(sizeof(float)));
    };
    return fits(tokens.key, layout.head_dim) && fits(tokens.value, layout.value_dim);
}

// What tokens of the store's dtype are stored as; and whether it takes floats too.
Storage own_storage(const PageLayout& layout) { return layout.scaled() ? Storage::f32 : layout.storage; }
bool takes_floats(const PageLayout& layout) { return storage_bytes(layout.storage) == 2; }

// KVStore::append of what has been checked.
std::int64_t append_checked(Store& s, KVStore::Slots slots, const Tokens& tokens, const std::int64_t* counts,
                            bool may_overflow, int threads) {
    try {
        return without_gil([&] {
            return s.store.append(slots, tokens.key, tokens.value, tokens.storage, counts, may_overflow,
                                  threads);
        });
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

// Plain arrays of the store's dtype, or of float32 where it takes them; nothing of anything else.
std::optional<Tokens> plain_tokens(const Store& s, py::handle key, py::handle value) {
    const auto of = [&](const py::dtype& dtype, Storage storage) -> std::optional<Tokens> {
        const std::optional<TensorView> keys = plain_view(key, dtype), values = plain_view(value, dtype);
        if (!keys || !values) return std::nullopt;
        return Tokens{*keys, *values, storage};
    };
    const PageLayout& layout = s.store.layout();
    std::optional<Tokens> tokens = of(s.dtype, own_storage(layout));
    if (!tokens && takes_floats(layout)) tokens = of(py::dtype::of<float>(), Storage::f32);
    return tokens;
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
                    const py::array& counts, bool may_overflow, int threads) {
    const KVStore::Slots of = slots_of(s, slots);
    const bool own = key.dtype().equal(s.dtype) && value.dtype().equal(s.dtype);
    require(own || (takes_floats(s.store.layout()) && holds<float>(key) && holds<float>(value)),
            "append: wrong dtype");
    const Tokens tokens = {view(key), view(value), own ? own_storage(s.store.layout()) : Storage::f32};
    require(tokens_fit(s, tokens, slots.size()), "append: wrong shape");
    const std::int64_t* real =
        integers(counts, slots.size(), "append: counts are not int64 of the sequences");
    require(distinct(s.store, of), "append: a sequence twice");
    for (std::size_t i = 0; i < of.size(); ++i) {
        require(0 <= real[i] && real[i] <= tokens.key.shape[2], "append: counts out of range");
        require(real[i] == 0 || real[i] <= s.store.room(of[i]), "append: beyond the capacity");
    }
    return append_checked(s, of, tokens, real, may_overflow, threads);
}

bool append_plain(Store& s, py::handle sequences, py::handle key, py::handle value, py::handle counts,
                  int threads) {
    const std::optional<Tokens> tokens = plain_tokens(s, key, value);
    if (!tokens) return false;
    const HeldAccess access(s.store.access(), true);
    const auto slots = find_slots(s, sequences);
    if (!slots || !tokens_fit(s, *tokens, std::ssize(*slots)) || !distinct(s.store, *slots)) return false;
    const std::int64_t rows = tokens->key.shape[2];
    const auto real = plain_counts(counts, slots->size(), rows);
    if (!real) return false;
    for (std::size_t i = 0; i < slots->size(); ++i) {
        const std::int64_t count = (*real)[i];
        if (count < 0 || count > rows || (count > 0 && count > s.store.room((*slots)[i]))) return false;
    }
    return append_checked(s, *slots, *tokens, real->data(), false, threads) == 0;
}

} // namespace npattn
