#pragma once
// Attention over the sequences of a cache, whose queries are their last tokens.

#include "ops/attention.hpp"
#include "ops/kv_store.hpp"

namespace npattn {

// The sequences in `slots` are the one leading axis of `dense`; its key axis is as long as the longest of them.
// Key and value have their shapes (sequences, Hkv, longest, ...) alone; offsets and lengths are left out.
//
// Query i of sequence b stands at p = length - counts[b] + i. It sees what the options say, of the tokens past
// p - sliding_window and of the sinks. Rows at or past counts[b] get zeros, and -inf as their lse.
struct CacheArguments {
    const AttentionArguments& dense;
    const KVStore& store;
    KVStore::Slots slots;
    const std::int64_t* counts; // (sequences), or null: all rows
};

// Whoever calls holds the store's access. T: double where the cache holds that, else float. Returns how many parts of
// the keys were computed for several sequences at once, which nothing else can tell: the bits are the same.
template <class T> std::int64_t cache_attention(const CacheArguments& arguments);

} // namespace npattn
