#include <algorithm>
#include <memory>
#include <new>

#include "bindings/bindings.hpp"
#include "bindings/cache.hpp"
#include "dispatch/kernel_table.hpp"

namespace npattn {
namespace {

using SharedStore = std::shared_ptr<Store>;

constexpr std::int64_t MOST_SEQUENCES = std::int64_t{1} << 48; // more than memory can be

// `with store.reading():` and `with store.writing():` are how Python holds the access over several calls; all
// that a store does but append_plain and attend_plain is called inside.
class StoreAccess {
public:
    StoreAccess(SharedStore store, bool exclusive) : store_(std::move(store)), exclusive_(exclusive) {}
    void enter() { held_.emplace(store_->store.access(), exclusive_); }
    void exit() { held_.reset(); }

private:
    SharedStore store_;
    bool exclusive_;
    std::optional<HeldAccess> held_;
};

PageLayout page_layout(std::int64_t kv_heads, std::int64_t head_dim, std::int64_t value_dim,
                       std::int64_t page_keys, const py::dtype& dtype) {
    require(kv_heads > 0 && head_dim > 0 && value_dim > 0 && page_keys > 0 && page_keys % PANEL == 0,
            "cache: sizes out of range");
    return PageLayout(kv_heads, head_dim, value_dim, page_keys, storage_of(dtype));
}

py::dtype token_dtype(const PageLayout& layout, const py::dtype& dtype) {
    return layout.scaled() ? py::dtype::of<float>() : dtype;
}

StoreSettings store_settings(std::int64_t fixed_pages, std::int64_t capacity, std::int64_t sliding_window,
                             std::int64_t sink_tokens) {
    require(fixed_pages >= 0 && capacity >= 0 && sliding_window >= 0 && sink_tokens >= 0,
            "cache: settings out of range");
    return {fixed_pages, capacity, sliding_window, sink_tokens};
}

SharedStore make_store(std::int64_t sequences, std::int64_t kv_heads, std::int64_t head_dim,
                       std::int64_t value_dim, std::int64_t page_keys, const py::dtype& dtype,
                       std::int64_t fixed_pages, std::int64_t capacity, std::int64_t sliding_window,
                       std::int64_t sink_tokens) {
    require(sequences >= 0, "cache: sizes out of range");
    if (sequences > MOST_SEQUENCES) throw std::bad_alloc();
    const PageLayout layout = page_layout(kv_heads, head_dim, value_dim, page_keys, dtype);
    const StoreSettings settings = store_settings(fixed_pages, capacity, sliding_window, sink_tokens);
    return SharedStore(new Store{KVStore(layout, settings, sequences), token_dtype(layout, dtype)});
}

// One number a slot.
template <class Number> py::array numbers_of(const Store& s, const py::array& array, Number number) {
    const KVStore::Slots slots = slots_of(s, array);
    py::array_t<std::int64_t> numbers(array.size());
    std::transform(slots.begin(), slots.end(), numbers.mutable_data(),
                   [&](std::int64_t slot) { return (s.store.*number)(slot); });
    return numbers;
}

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

// 0, or the number of pages that are needed and not free; then nothing has changed.
std::int64_t append(Store& s, const py::array& slots, const py::array& key, const py::array& value,
                    const py::array& counts, int threads) {
    const KVStore::Slots of = slots_of(s, slots);
    const TensorView key_view = view(key), value_view = view(value);
    require(tokens_fit(s, key_view, value_view, slots.size()), "append: wrong shape");
    require(key.dtype().equal(s.dtype) && value.dtype().equal(s.dtype), "append: wrong dtype");
    const std::int64_t* tokens =
        integers(counts, slots.size(), "append: counts are not int64 of the sequences");
    std::vector<bool> seen(static_cast<std::size_t>(s.store.slots()));
    for (std::size_t i = 0; i < of.size(); ++i) {
        const auto slot = static_cast<std::size_t>(of[i]);
        require(!seen[slot], "append: a sequence twice");
        seen[slot] = true;
        require(0 <= tokens[i] && tokens[i] <= key_view.shape[2], "append: counts out of range");
        require(tokens[i] == 0 || tokens[i] <= s.store.room(of[i]), "append: beyond the capacity");
    }
    return append_checked(s, of, key_view, value_view, tokens, threads);
}

// The short way for the common call: all rows of plain arrays of the store's dtype to all sequences. False
// for anything else, which the general way then does or refuses.
bool append_plain(Store& s, py::handle key, py::handle value, int threads) {
    const auto* array_type = reinterpret_cast<PyTypeObject*>(py::detail::npy_api::get().PyArray_Type_);
    TensorView views[2];
    const py::handle objects[] = {key, value};
    for (int i = 0; i < 2; ++i) {
        if (Py_TYPE(objects[i].ptr()) != array_type) return false;
        if (py::detail::array_proxy(objects[i].ptr())->descr != s.dtype.ptr()) return false;
        views[i] = view(py::reinterpret_borrow<py::array>(objects[i]));
    }
    const HeldAccess access(s.store.access(), true);
    if (!tokens_fit(s, views[0], views[1], s.store.slots())) return false;
    std::vector<std::int64_t> slots(static_cast<std::size_t>(s.store.slots()));
    for (std::size_t i = 0; i < slots.size(); ++i) {
        slots[i] = static_cast<std::int64_t>(i);
        if (views[0].shape[2] > s.store.room(slots[i])) return false;
    }
    return append_checked(s, slots, views[0], views[1], nullptr, threads) == 0;
}

void crop(Store& s, const py::array& slots, const py::array& lengths) {
    const KVStore::Slots of = slots_of(s, slots);
    const std::int64_t* kept =
        integers(lengths, slots.size(), "crop: lengths are not int64 of the sequences");
    for (std::size_t i = 0; i < of.size(); ++i)
        require(0 <= kept[i] && kept[i] <= s.store.length(of[i]), "crop: lengths out of range");
    for (std::size_t i = 0; i < of.size(); ++i) s.store.crop(of[i], kept[i]);
}

void reorder(Store& s, const py::array& indices) {
    const KVStore::Slots of = slots_of(s, indices);
    require(indices.size() == s.store.slots(), "reorder: not one index a sequence");
    s.store.reorder(of);
}

std::int64_t fork(Store& s, std::int64_t from) {
    require(-1 <= from && from < s.store.slots(), "fork: no such slot");
    return s.store.fork(from);
}

void remove(Store& s, std::int64_t slot) {
    require(0 <= slot && slot < s.store.slots(), "remove: no such slot");
    s.store.remove(slot);
}

// Keys or values in plain order, zero: the system zeroes large arrays page by page as they are written.
struct PlainArrays {
    py::array items;      // (count, kv heads, length, width)
    OptionalArray scales; // (count, kv heads, length) of int8

    PlainArrays(const Store& s, std::int64_t count, std::int64_t length, Side side) {
        const PageLayout& layout = s.store.layout();
        const py::object zeros = py::module_::import("numpy").attr("zeros");
        items = zeros(py::make_tuple(count, layout.kv_heads, length, layout.width(side)),
                      layout.scaled() ? dtype_of(Storage::i8) : s.dtype);
        if (layout.scaled()) scales = zeros(py::make_tuple(count, layout.kv_heads, length), s.dtype);
    }
    PlainSide side() const {
        return {view(items).data, scales ? reinterpret_cast<float*>(view(*scales).data) : nullptr};
    }
};

// Of int8: the numbers that integers and scales stand for.
py::array gather(const Store& s, Side side, const py::array& slots, int threads) {
    const KVStore::Slots of = slots_of(s, slots);
    std::int64_t length = 0;
    for (const std::int64_t slot : of) length = std::max(length, s.store.length(slot));
    const PlainArrays plain(s, slots.size(), length, side);
    without_gil([&] { s.store.gather(of, side, length, plain.side(), threads); });
    if (!plain.scales) return plain.items;
    const py::object scales =
        plain.scales->attr("reshape")(slots.size(), s.store.layout().kv_heads, length, 1);
    return plain.items * scales;
}

// (keys, values, tables, lengths, firsts) of the sequences and, of int8, the scales of both, for `restore`.
py::tuple dump(const Store& s, const py::array& slots, int threads) {
    std::vector<std::int64_t> pages;
    const KVStore::Contents contents = s.store.contents(slots_of(s, slots), pages);
    const auto gathered = [&](Side side) {
        PlainArrays plain(s, static_cast<std::int64_t>(pages.size()), s.store.layout().page_keys, side);
        without_gil([&] { s.store.gather_pages(contents, pages, side, plain.side(), threads); });
        return plain;
    };
    const PlainArrays keys = gathered(Side::key), values = gathered(Side::value);
    py::tuple told =
        py::make_tuple(keys.items, values.items, contents.tables, contents.lengths, contents.firsts);
    if (keys.scales) told = told + py::make_tuple(*keys.scales, *values.scales);
    return told;
}

// Every page that a query may still see is there, every other number is one of `pages`.
bool whole(const KVStore::Contents& contents, const PageLayout& layout, const StoreSettings& settings,
           std::int64_t pages) {
    const std::size_t sequences = contents.tables.size();
    if (contents.lengths.size() != sequences || contents.firsts.size() != sequences) return false;
    for (std::size_t i = 0; i < sequences; ++i) {
        const std::vector<std::int64_t>& table = contents.tables[i];
        const std::int64_t length = contents.lengths[i], first = contents.firsts[i];
        if (length < 0 || first < 0 || first > length) return false;
        if (static_cast<std::int64_t>(table.size()) != layout.pages(length)) return false;
        for (std::size_t page = 0; page < table.size(); ++page) {
            const std::int64_t origin = static_cast<std::int64_t>(page) * layout.page_keys;
            const bool left_behind = origin >= settings.sink_tokens && origin + layout.page_keys <= first;
            if (table[page] >= pages || table[page] < (left_behind ? -1 : 0)) return false;
        }
    }
    return true;
}

SharedStore restore(const py::array& keys, const py::array& values, const KVStore::Contents& contents,
                    std::int64_t fixed_pages, std::int64_t capacity, std::int64_t sliding_window,
                    std::int64_t sink_tokens, const OptionalArray& key_scales,
                    const OptionalArray& value_scales) {
    const TensorView k = view(keys), v = view(values);
    require(k.dimensions == 4 && v.dimensions == 4 && keys.dtype().equal(values.dtype()) &&
                (keys.flags() & values.flags() & py::array::c_style) != 0 &&
                std::equal(k.shape, k.shape + 3, v.shape),
            "restore: wrong arrays");
    const PageLayout layout = page_layout(k.shape[1], k.shape[3], v.shape[3], k.shape[2], keys.dtype());
    const StoreSettings settings = store_settings(fixed_pages, capacity, sliding_window, sink_tokens);
    require((fixed_pages == 0 || k.shape[0] <= fixed_pages) && whole(contents, layout, settings, k.shape[0]),
            "restore: the pages do not make up the sequences");
    const auto scales = [&](const OptionalArray& array) -> float* {
        if (!layout.scaled()) return nullptr;
        require(array && holds<float>(*array) && (array->flags() & py::array::c_style) &&
                    array->ndim() == 3 && std::equal(k.shape, k.shape + 3, array->shape()),
                "restore: wrong scales");
        return reinterpret_cast<float*>(view(*array).data);
    };
    float *const key_factors = scales(key_scales), *const value_factors = scales(value_scales);
    return SharedStore(new Store{
        KVStore(layout, settings, contents, k.shape[0], {k.data, key_factors}, {v.data, value_factors}),
        token_dtype(layout, keys.dtype())});
}

} // namespace

void bind_cache(py::module_& m) {
    py::class_<StoreAccess>(m, "StoreAccess")
        .def("__enter__", &StoreAccess::enter)
        .def("__exit__", [](StoreAccess& access, const py::args&) { access.exit(); });
    py::class_<Store, SharedStore>(m, "KVStore")
        .def(py::init(&make_store), py::arg("sequences"), py::arg("kv_heads"), py::arg("head_dim"),
             py::arg("value_dim"), py::arg("page_keys"), py::arg("dtype"), py::arg("fixed_pages"),
             py::arg("capacity"), py::arg("sliding_window"), py::arg("sink_tokens"))
        .def_static(
            "restore",
            [](const py::array& keys, const py::array& values, std::vector<std::vector<std::int64_t>> tables,
               std::vector<std::int64_t> lengths, std::vector<std::int64_t> firsts, std::int64_t fixed_pages,
               std::int64_t capacity, std::int64_t sliding_window, std::int64_t sink_tokens,
               const OptionalArray& key_scales, const OptionalArray& value_scales) {
                return restore(keys, values, {std::move(tables), std::move(lengths), std::move(firsts)},
                               fixed_pages, capacity, sliding_window, sink_tokens, key_scales, value_scales);
            },
            py::arg("keys"), py::arg("values"), py::arg("tables"), py::arg("lengths"), py::arg("firsts"),
            py::arg("fixed_pages"), py::arg("capacity"), py::arg("sliding_window"), py::arg("sink_tokens"),
            py::arg("key_scales") = py::none(), py::arg("value_scales") = py::none())
        .def("reading", [](SharedStore s) { return std::make_unique<StoreAccess>(std::move(s), false); })
        .def("writing", [](SharedStore s) { return std::make_unique<StoreAccess>(std::move(s), true); })
        .def_property_readonly("nbytes", [](const Store& s) { return s.store.pool().bytes(); })
        .def_property_readonly("free_pages", [](const Store& s) { return s.store.pool().free_pages(); })
        .def("append_plain", append_plain)
        .def("append", append)
        .def("attend_plain", attend_plain)
        .def("attend", attend_cached)
        .def("lengths", [](const Store& s, const py::array& a) { return numbers_of(s, a, &KVStore::length); })
        .def("firsts",
             [](const Store& s, const py::array& a) { return numbers_of(s, a, &KVStore::first_held); })
        .def("room", [](const Store& s, const py::array& a) { return numbers_of(s, a, &KVStore::room); })
        .def("crop", crop)
        .def("reorder", reorder)
        .def("fork", fork)
        .def("remove", remove)
        .def("copy", [](const Store& s) { return SharedStore(new Store(s)); })
        .def("keys",
             [](const Store& s, const py::array& a, int threads) { return gather(s, Side::key, a, threads); })
        .def("values", [](const Store& s, const py::array& a,
                          int threads) { return gather(s, Side::value, a, threads); })
        .def("dump", dump);
}

} // namespace npattn
