#pragma once
// From Python's arrays to AttentionArguments, checked as far as memory safety needs.

#include <initializer_list>

#include "bindings/arrays.hpp"
#include "ops/attention.hpp"

namespace npattn {

// Every array is held against the query: its leading axes, its dtype.
class AttentionReader {
public:
    AttentionArguments arguments;

    // Keys and values come from elsewhere.
    explicit AttentionReader(const py::array& query) : query_(query) {
        arguments.query = view(query);
        check_contiguous(arguments.query);
    }

    AttentionReader(const py::array& query, const py::array& key, const py::array& value)
        : AttentionReader(query) {
        AttentionArguments& a = arguments;
        a.key = view(key);
        a.value = view(value);
        require(a.query.dimensions >= 3 && a.key.dimensions >= 3 && a.value.dimensions >= 3,
                "attention needs (..., heads, length, width)");
        const std::int64_t heads = a.query.size(-3), kv_heads = a.key.size(-3), key_len = a.key.size(-2);
        check_shape(a.key, {kv_heads, key_len, a.query.size(-1)}, "key: wrong shape");
        check_shape(a.value, {kv_heads, key_len, a.value.size(-1)}, "value: wrong shape");
        require(kv_heads == 0 ? heads == 0 : heads % kv_heads == 0,
                "query heads are not a multiple of key heads");
        check_dtype(key);
        check_dtype(value);
        for (const TensorView* t : {&a.key, &a.value}) check_contiguous(*t);
    }

    // An array (..., *trailing) of the query's dtype.
    void read(const OptionalArray& array, std::optional<TensorView>& into,
              std::initializer_list<std::int64_t> trailing, const char* what) const {
        if (!array) return;
        check_dtype(*array);
        into = view(*array);
        check_shape(*into, trailing, what);
    }

    void read_outputs(const OptionalArray& out, const OptionalArray& lse) {
        AttentionArguments& a = arguments;
        const std::int64_t heads = a.query.size(-3), query_len = a.query.size(-2);
        read(out, a.out, {heads, query_len, a.value.size(-1)}, "out: wrong shape");
        read(lse, a.lse, {heads, query_len}, "lse: wrong shape");
        if (a.out) check_contiguous(*a.out);
        for (const OptionalArray* array : {&out, &lse})
            require(!*array || (*array)->writeable(), "an output array is read-only");
    }

    // What may be asked for or said of each score, once key and value are known.
    void read_scores(const OptionalArray& weights, const OptionalArray& mask, const OptionalArray& float_mask,
                     const OptionalArray& bias, const OptionalArray& alibi_slopes) {
        AttentionArguments& a = arguments;
        const std::int64_t heads = a.query.size(-3), query_len = a.query.size(-2), key_len = a.key.size(-2);
        read(weights, a.weights, {heads, query_len, key_len}, "weights: wrong shape");
        read(float_mask, a.addends[0], {heads, query_len, key_len}, "attn_mask: wrong shape");
        read(bias, a.addends[1], {heads, query_len, key_len}, "bias: wrong shape");
        read(alibi_slopes, a.alibi_slopes, {heads}, "alibi_slopes: wrong shape");
        if (a.alibi_slopes) check_contiguous(*a.alibi_slopes);
        if (a.weights) {
            require(weights->writeable(), "an output array is read-only");
            check_contiguous(*a.weights);
        }
        if (!mask) return;
        require(holds<bool>(*mask), "mask: not bool");
        a.mask = view(*mask);
        check_shape(*a.mask, {heads, query_len, key_len}, "attn_mask: wrong shape");
    }

    void read_sinks(const OptionalArray& sinks) {
        if (!sinks) return;
        check_dtype(*sinks);
        arguments.sinks = view(*sinks);
        require(sinks->ndim() == 1 && sinks->shape(0) == arguments.query.size(-3), "sinks: wrong shape");
        check_contiguous(*arguments.sinks);
    }

    void check_shape(const TensorView& t, std::initializer_list<std::int64_t> trailing,
                     const char* what) const {
        const int leading = arguments.query.dimensions - 3;
        require(t.dimensions == leading + static_cast<int>(trailing.size()), what);
        for (int i = 0; i < leading; ++i) require(t.shape[i] == arguments.query.shape[i], what);
        int axis = leading;
        for (const std::int64_t size : trailing) require(t.shape[axis++] == size, what);
    }

    void check_dtype(const py::array& array) const {
        require(array.dtype().equal(query_.dtype()), "dtypes differ");
    }

    void check_contiguous(const TensorView& t) const {
        require(t.size(-1) <= 1 || t.stride(-1) == query_.itemsize() || t.count(t.dimensions) == 0,
                "the last axis of an array is not contiguous");
    }

private:
    const py::array& query_;
};

} // namespace npattn
