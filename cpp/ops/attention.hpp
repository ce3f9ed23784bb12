#pragma once
// Attention over whole tensors: plan -> parallel_for -> kernels.

#include <optional>

#include "core/bfloat16.hpp"
#include "core/tensor_view.hpp"

namespace npattn {

// Shapes as after broadcasting: every array but sinks has the same leading axes `...`. The last axis of
// query, key, value, out and weights is contiguous. Element type T unless stated; where T is float, what has a
// storage may be of a half type.
struct AttentionArguments {
    Storage query_storage, key_storage, out_storage; // of query; of key and value; of out and weights
    TensorView query;                                // (..., Hq, Lq, E)
    TensorView key;                                  // (..., Hkv, Lk, E)
    TensorView value;                                // (..., Hkv, Lk, Ev)
    std::optional<TensorView> out;                   // (..., Hq, Lq, Ev)
    std::optional<TensorView> lse;                   // (..., Hq, Lq)
    std::optional<TensorView> weights;               // (..., Hq, Lq, Lk); with want_scores: the scores
    std::optional<TensorView> mask;                  // (..., Hq, Lq, Lk) bool
    std::optional<TensorView> addends[2];            // (..., Hq, Lq, Lk): float mask, bias
    std::optional<TensorView> sinks;                 // (Hq,) contiguous
    std::optional<TensorView> alibi_slopes;          // (..., Hq), last axis contiguous
    std::optional<TensorView> query_offset;          // (...) int64
    std::optional<TensorView> kv_lengths;            // (...) int64
    bool causal = false;
    std::int64_t left = INT64_MAX, right = INT64_MAX; // window; INT64_MAX: unbounded
    double scale = 1, softcap = 0;
    bool want_scores = false;
    int threads = 1;
};

template <class T> void attention(const AttentionArguments& arguments);

} // namespace npattn
