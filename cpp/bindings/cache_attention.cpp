#include "ops/cache_attention.hpp"

#include <algorithm>
#include <cmath>

#include "bindings/attention_arguments.hpp"
#include "bindings/cache.hpp"

namespace npattn {
namespace {

// The shapes of what the cache holds, as far as the sequences are concerned.
void describe(const KVStore& store, KVStore::Slots slots, AttentionArguments& a) {
    const PageLayout& layout = store.layout();
    std::int64_t longest = 0;
    for (const std::int64_t slot : slots) longest = std::max(longest, store.length(slot));
    const auto shape = [&](TensorView& t, std::int64_t width) {
        t.dimensions = 4;
        const std::int64_t sizes[] = {static_cast<std::int64_t>(slots.size()), layout.kv_heads, longest,
                                      width};
        std::copy(sizes, sizes + 4, t.shape);
        std::fill(t.strides, t.strides + 4, 0);
    };
    shape(a.key, layout.head_dim);
    shape(a.value, layout.value_dim);
}

bool fits(const TensorView& query, const PageLayout& layout, std::int64_t sequences) {
    return query.dimensions == 4 && query.shape[0] == sequences && query.shape[1] % layout.kv_heads == 0 &&
           query.shape[3] == layout.head_dim;
}

// What the last `queries` tokens of the sequence see, of at most `left` tokens before each, is still held.
bool holds_all(const KVStore& store, std::int64_t slot, std::int64_t queries, std::int64_t left) {
    const StoreSettings& settings = store.settings();
    const std::int64_t place = store.length(slot) - queries;
    if (place < 0) return false;
    if (settings.sliding_window == 0 || queries == 0) return true;
    const std::int64_t start = place - std::min(left, settings.sliding_window - 1);
    return store.first_held(slot) <= std::max(start, settings.sink_tokens);
}

std::int64_t compute(const CacheArguments& arguments) {
    const bool wide = arguments.dense.key_storage == Storage::f64;
    return wide ? cache_attention<double>(arguments) : cache_attention<float>(arguments);
}

} // namespace

py::object attend_plain(Store& s, py::handle sequences, py::handle query, const py::tuple& options,
                        int threads) {
    for (const py::handle option : options)
        if (!option.is_none()) return py::none();
    const auto& api = py::detail::npy_api::get();
    if (Py_TYPE(query.ptr()) != reinterpret_cast<PyTypeObject*>(api.PyArray_Type_)) return py::none();
    const auto array = py::reinterpret_borrow<py::array>(query);
    const Storage stored = s.store.layout().storage;
    const bool like_cache = py::detail::array_proxy(query.ptr())->descr == s.dtype.ptr();
    if (!like_cache && (stored == Storage::f64 || !holds<float>(array))) return py::none();
    if (!(array.flags() & py::array::c_style)) return py::none();
    const HeldAccess access(s.store.access(), false);
    const PageLayout& layout = s.store.layout();
    AttentionArguments a;
    a.key_storage = stored;
    a.query_storage = a.out_storage = like_cache && stored != Storage::i8 ? stored : Storage::f32;
    a.query = view(array);
    const auto slots = find_slots(s, sequences);
    if (!slots || !fits(a.query, layout, std::ssize(*slots))) return py::none();
    const KVStore::Slots of = *slots;
    for (const std::int64_t slot : of) {
        if (!holds_all(s.store, slot, a.query.shape[2], a.left)) return py::none();
    }
    describe(s.store, of, a);
    const py::array out(array.dtype(),
                        {a.query.shape[0], a.query.shape[1], a.query.shape[2], layout.value_dim});
    a.out = view(out);
    a.causal = true;
    a.scale = 1 / std::sqrt(static_cast<double>(layout.head_dim));
    a.threads = threads;
    const CacheArguments arguments = {a, s.store, of, nullptr};
    without_gil([&] { compute(arguments); });
    return out;
}

std::int64_t first_lost(const Store& s, const py::array& slots, const py::array& counts, std::int64_t left) {
    const KVStore::Slots of = slots_of(s, slots);
    const std::int64_t* queries =
        integers(counts, slots.size(), "attend: counts are not int64 of the sequences");
    for (std::size_t i = 0; i < of.size(); ++i)
        if (!holds_all(s.store, of[i], queries[i], left)) return static_cast<std::int64_t>(i);
    return -1;
}

std::int64_t attend_cached(Store& s, const py::array& slots, const py::array& query, const py::array& out,
                           const OptionalArray& lse, const OptionalArray& weights, const OptionalArray& mask,
                           const OptionalArray& float_mask, const OptionalArray& bias,
                           const OptionalArray& sinks, const OptionalArray& alibi_slopes,
                           const py::array& counts, bool causal, std::int64_t left, std::int64_t right,
                           double scale, double softcap, int threads) {
    const KVStore::Slots of = slots_of(s, slots);
    const PageLayout& layout = s.store.layout();
    AttentionReader reader(query);
    AttentionArguments& a = reader.arguments;
    a.key_storage = layout.storage;
    require(fits(a.query, layout, slots.size()) &&
                (a.query_storage == Storage::f64) == (a.key_storage == Storage::f64),
            "query: wrong shape or dtype");
    describe(s.store, of, a);
    reader.read_outputs(out, lse);
    reader.read_scores(weights, mask, float_mask, bias, alibi_slopes);
    reader.read_sinks(sinks);
    reader.set_options(causal, left, right, scale, softcap, threads);
    const std::int64_t* real =
        integers(counts, slots.size(), "attend: counts are not int64 of the sequences");
    for (std::size_t i = 0; i < of.size(); ++i) {
        require(0 <= real[i] && real[i] <= a.query.shape[2], "attend: counts out of range");
        const bool placed = s.store.settings().sliding_window > 0;
        require(!placed || holds_all(s.store, of[i], real[i], left),
                "attend: tokens that are not held any more");
    }
    const CacheArguments arguments = {a, s.store, of, real};
    return without_gil([&] { return compute(arguments); });
}

} // namespace npattn
