#include <algorithm>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/cache.hpp"
#include "dispatch/kernel_table.hpp"

namespace npattn {
namespace {

using SharedStore = std::shared_ptr<Store>;

constexpr std::int64_t MOST_SEQUENCES = std::int64_t{1} << 48; // more than memory can be

// `with store.reading():` and `with store.writing():` are how Python holds the access over several calls; all
// that a store does is called inside, but what takes the access itself.
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

// `with store.changing() as lengths:` is the access of a writer and the lengths before; what the block appends is taken
// back if it fails. Where a sliding window has let go what the last token before it would see, the tokens stay.
class StoreChange {
public:
    explicit StoreChange(SharedStore store) : store_(std::move(store)) {}
    py::array enter() {
        KVStore& store = store_->store;
        held_.emplace(store.access(), true);
        before_.clear();
        for (std::int64_t slot = 0; slot < store.slots(); ++slot) before_.push_back(store.length(slot));
        return py::array_t<std::int64_t>(std::ssize(before_), before_.data());
    }
    void exit(bool failed) {
        KVStore& store = store_->store;
        bool may = failed;
        for (std::int64_t slot = 0; may && slot < store.slots(); ++slot)
            may = store.may_crop(slot, before_[static_cast<std::size_t>(slot)]);
        for (std::int64_t slot = 0; may && slot < store.slots(); ++slot)
            store.crop(slot, before_[static_cast<std::size_t>(slot)]);
        held_.reset();
    }

private:
    SharedStore store_;
    std::optional<HeldAccess> held_;
    std::vector<std::int64_t> before_;
};

// -1, or the index of the first sequence that has not so many tokens, or has let go some that the last one kept would
// see; then nothing has changed.
std::int64_t crop(Store& s, const py::array& slots, const py::array& lengths) {
    const KVStore::Slots of = slots_of(s, slots);
    const std::int64_t* kept =
        integers(lengths, slots.size(), "crop: lengths are not int64 of the sequences");
    for (std::size_t i = 0; i < of.size(); ++i)
        if (!s.store.may_crop(of[i], kept[i])) return static_cast<std::int64_t>(i);
    for (std::size_t i = 0; i < of.size(); ++i) s.store.crop(of[i], kept[i]);
    return -1;
}

void reorder(Store& s, const py::array& indices) {
    const KVStore::Slots of = slots_of(s, indices);
    require(indices.size() == s.store.slots(), "reorder: not one index a sequence");
    s.store.reorder(of);
}

// ---- sequences by id

std::int64_t find_slot(const Store& s, py::handle id) {
    int overflow = 0;
    const std::int64_t number = PyLong_AsLongLongAndOverflow(id.ptr(), &overflow);
    if (number == -1 && PyErr_Occurred()) throw py::error_already_set();
    return overflow == 0 ? s.ids.slot(number) : -1;
}

std::int64_t slot_of(const Store& s, py::handle id) {
    const std::int64_t slot = find_slot(s, id);
    if (slot >= 0) return slot;
    const bool never = py::bool_(id < py::int_(0) || id >= py::int_(s.ids.next()));
    throw py::key_error("no sequence " + std::string(py::str(id)) + ": it was " +
                        (never ? "never added" : "freed"));
}

py::array slots_of_ids(const Store& s, const py::list& ids) {
    py::array_t<std::int64_t> slots(static_cast<py::ssize_t>(ids.size()));
    std::transform(ids.begin(), ids.end(), slots.mutable_data(),
                   [&](py::handle id) { return slot_of(s, id); });
    return slots;
}

// Takes the access itself, as does remove_sequence: id and slot come and go together. The id is appended to `added`, as
// an interrupt may come before the caller has what is returned.
void add_sequence(Store& s, py::handle prefix, py::list added) {
    const HeldAccess access(s.store.access(), true);
    const std::int64_t source = prefix.is_none() ? -1 : slot_of(s, prefix);
    added.append(s.ids.next());
    try {
        s.ids.add([&] { return s.store.fork(source); });
    } catch (...) {
        added.attr("clear")();
        throw;
    }
}

void remove_sequence(Store& s, py::handle id) {
    const HeldAccess access(s.store.access(), true);
    s.store.remove(slot_of(s, id));
    s.ids.remove(py::cast<std::int64_t>(id));
}

std::vector<std::int64_t> list_ids(const Store& s) {
    std::vector<std::int64_t> ids;
    for (const auto& [id, slot] : s.ids.slots()) ids.push_back(id);
    return ids;
}

// Of a store that was restored: its slots are those of these sequences, in order.
void name_slots(Store& s, const std::vector<std::int64_t>& ids, std::int64_t next) {
    require(std::ssize(ids) == s.store.slots(), "restore: not one id a sequence");
    for (std::size_t i = 0; i < ids.size(); ++i) {
        require((i == 0 || ids[i - 1] < ids[i]) && 0 <= ids[i] && ids[i] < next, "restore: wrong ids");
        s.ids.set(ids[i], static_cast<std::int64_t>(i));
    }
    s.ids.set_next(next);
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
    KVStore store = without_gil([&] {
        return KVStore(layout, settings, contents, k.shape[0], {k.data, key_factors},
                       {v.data, value_factors});
    });
    return SharedStore(new Store{std::move(store), token_dtype(layout, keys.dtype())});
}

} // namespace

std::optional<std::vector<std::int64_t>> find_slots(const Store& s, py::handle sequences) {
    std::vector<std::int64_t> slots;
    if (sequences.is_none()) {
        slots.resize(static_cast<std::size_t>(s.store.slots()));
        std::iota(slots.begin(), slots.end(), 0);
        return slots;
    }
    const auto ids = py::reinterpret_borrow<py::list>(sequences);
    slots.reserve(ids.size());
    for (const py::handle id : ids) {
        slots.push_back(find_slot(s, id));
        if (slots.back() < 0) return std::nullopt;
    }
    return slots;
}

void bind_cache(py::module_& m) {
    py::class_<StoreAccess>(m, "StoreAccess")
        .def("__enter__", &StoreAccess::enter)
        .def("__exit__", [](StoreAccess& access, const py::args&) { access.exit(); });
    py::class_<StoreChange>(m, "StoreChange")
        .def("__enter__", &StoreChange::enter)
        .def("__exit__",
             [](StoreChange& change, py::handle error, const py::args&) { change.exit(!error.is_none()); });
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
        .def("changing", [](SharedStore s) { return std::make_unique<StoreChange>(std::move(s)); })
        .def_property_readonly("nbytes", [](const Store& s) { return s.store.bytes(); })
        .def_property_readonly("pages", [](const Store& s) { return s.store.pool().pages(); })
        .def_property_readonly("free_pages", [](const Store& s) { return s.store.pool().free_pages(); })
        .def("append_plain", append_plain)
        .def("append", append)
        .def("attend_plain", attend_plain)
        .def("first_lost", first_lost)
        .def("attend", attend_cached)
        .def("lengths", [](const Store& s, const py::array& a) { return numbers_of(s, a, &KVStore::length); })
        .def("firsts",
             [](const Store& s, const py::array& a) { return numbers_of(s, a, &KVStore::first_held); })
        .def("room", [](const Store& s, const py::array& a) { return numbers_of(s, a, &KVStore::room); })
        .def("crop", crop)
        .def("reorder", reorder)
        .def("add_sequence", add_sequence)
        .def("remove_sequence", remove_sequence)
        .def("slots_of", slots_of_ids)
        .def("ids", list_ids)
        .def("next_id", [](const Store& s) { return s.ids.next(); })
        .def("name_slots", name_slots)
        .def("copy",
             [](const Store& s) {
                 KVStore store = without_gil([&] { return KVStore(s.store); });
                 return SharedStore(new Store{std::move(store), s.dtype, s.ids});
             })
        .def("keys",
             [](const Store& s, const py::array& a, int threads) { return gather(s, Side::key, a, threads); })
        .def("values", [](const Store& s, const py::array& a,
                          int threads) { return gather(s, Side::value, a, threads); })
        .def("dump", dump);
}

} // namespace npattn
