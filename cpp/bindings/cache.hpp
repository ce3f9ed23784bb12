#pragma once
// The store of a cache as Python holds it.

#include <optional>
#include <vector>

#include "bindings/arrays.hpp"
#include "ops/kv_store.hpp"
#include "ops/sequence_ids.hpp"

namespace npattn {

struct Store {
    KVStore store;
    py::dtype dtype;      // of the tokens that come and go: that of the store, for int8 float32
    SequenceIds ids = {}; // of a paged cache
};

inline KVStore::Slots slots_of(const Store& s, const py::array& array) {
    const std::int64_t* slots = integers(array, array.size(), "slots: not a row of int64");
    for (py::ssize_t i = 0; i < array.size(); ++i)
        require(0 <= slots[i] && slots[i] < s.store.slots(), "slots: out of range");
    return {slots, static_cast<std::size_t>(array.size())};
}

// The sequences that a short way is for: a list of ids, or None for all of a cache without ids. Nothing where one is
// none of them.
std::optional<std::vector<std::int64_t>> find_slots(const Store& s, py::handle sequences);

// The short way for the common append, which takes the access itself: rows of plain arrays of the store's dtype (or of
// float32, where that is a half type), counts None or plain int64. False for anything else, which the general way then
// does or refuses.
bool append_plain(Store& s, py::handle sequences, py::handle key, py::handle value, py::handle counts,
                  int threads);

// The general way: KVStore::append.
std::int64_t append(Store& s, const py::array& slots, const py::array& key, const py::array& value,
                    const py::array& counts, bool may_overflow, int threads);

// The short way for the common step, which takes the access itself: the output of a C-contiguous query (sequences, Hq,
// Lq, E), of the store's dtype or float32, where all options are None; None for anything else, which the general way
// then computes or refuses.
py::object attend_plain(Store& s, py::handle sequences, py::handle query, const py::tuple& options,
                        int threads);

// -1, or the index of the first sequence that has fewer tokens than queries, or of which they see some, with at most
// `left` tokens before each, that it does not hold any more.
std::int64_t first_lost(const Store& s, const py::array& slots, const py::array& counts, std::int64_t left);

// The general way: arrays as CacheArguments says. Returns what cache_attention does.
std::int64_t attend_cached(Store& s, const py::array& slots, const py::array& query, const py::array& out,
                           const OptionalArray& lse, const OptionalArray& weights, const OptionalArray& mask,
                           const OptionalArray& float_mask, const OptionalArray& bias,
                           const OptionalArray& sinks, const OptionalArray& alibi_slopes,
                           const py::array& counts, bool causal, std::int64_t left, std::int64_t right,
                           double scale, double softcap, int threads);

} // namespace npattn
