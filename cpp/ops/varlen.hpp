#pragma once
// Attention over packed sequences of different lengths.

#include "ops/attention.hpp"

namespace npattn {

// Sequence n is the queries [query_starts[n], query_starts[n + 1]) and the keys [key_starts[n], key_starts[n
// + 1]) of `packed`, which has no leading axes, no weights, masks, lengths, offsets or slopes: query (Hq, Tq,
// E), key (Hkv, Tk, E), value (Hkv, Tk, Ev), out (Hq, Tq, Ev), lse (Hq, Tq).
struct VarlenArguments {
    AttentionArguments packed;
    std::int64_t sequences;
    const std::int64_t* query_starts;       // (sequences + 1)
    const std::int64_t* key_starts;         // (sequences + 1)
    const std::int64_t* query_offset;       // (sequences), or null for zeros
    std::optional<TensorView> alibi_slopes; // (sequences, Hq), last axis contiguous
};

template <class T> void varlen_attention(const VarlenArguments& arguments);

} // namespace npattn
