#pragma once
// From Python's arrays to AttentionArguments, checked as far as memory safety needs.

#include <initializer_list>

#include "bindings/arrays.hpp"
#include "ops/attention.hpp"

namespace npattn {

// Every array is held against the query, its leading axes, and what is computed in: double where query, key and
// value are, else float.
class AttentionReader {
public:
    AttentionArguments arguments;

    // Keys and values come from elsewhere; they have the query's dtype unless said otherwise.
    explicit AttentionReader(const py::array& query) {
        AttentionArguments& a = arguments;
        a.query = view(query);
        a.query_storage = a.key_storage = storage_of(query);
        a.out_storage = computed_in();
        check_contiguous(a.query, a.query_storage);
    }

    AttentionReader(const py::array& query, const py::array& key, const py::array& value)
        : AttentionReader(query) {
        AttentionArguments& a = arguments;
        a.key_storage = storage_of(key);
        require(storage_of(value) == a.key_storage, "dtypes of key and value differ");
        require(fits(a.key_storage), "dtypes of query and key differ");
        a.key = view(key);
        a.value = view(value);
        require(a.query.dimensions >= 3 && a.key.dimensions >= 3 && a.value.dimensions >= 3,
                "attention needs (..., heads, length, width)");
        const std::int64_t heads = a.query.size(-3), kv_heads = a.key.size(-3), key_len = a.key.size(-2);
        check_shape(a.key, {kv_heads, key_len, a.query.size(-1)}, "key: wrong shape");
        check_shape(a.value, {kv_heads, key_len, a.value.size(-1)}, "value: wrong shape");
        require(kv_heads == 0 ? heads == 0 : heads % kv_heads == 0,
                "query heads are not a multiple of key heads");
        for (const TensorView* t : {&a.key, &a.value}) check_contiguous(*t, a.key_storage);
    }

    // Runs `compute<T>()` for the T computed in, without the GIL.
    template <class Compute> void compute(Compute&& body) const {
        without_gil([&] {
            computed_in() == Storage::f64 ? body.template operator()<double>()
                                          : body.template operator()<float>();
        });
    }

    // An array (..., *trailing) of what is computed in.
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
        read_rows(out, a.out, a.value.size(-1), "out: wrong shape");
        read(lse, a.lse, {heads, query_len}, "lse: wrong shape");
        require(!lse || lse->writeable(), "an output array is read-only");
    }

    // The output or the weights (..., Hq, Lq, width), which may be of a half type.
    void read_rows(const OptionalArray& array, std::optional<TensorView>& into, std::int64_t width,
                   const char* what) {
        if (!array) return;
        AttentionArguments& a = arguments;
        const Storage storage = storage_of(*array);
        require(fits(storage) && (!has_rows_ || storage == a.out_storage), "dtypes differ");
        has_rows_ = true;
        a.out_storage = storage;
        into = writable_view(*array);
        check_shape(*into, {a.query.size(-3), a.query.size(-2), width}, what);
        check_contiguous(*into, storage);
    }

    // What may be asked for or said of each score, once key and value are known.
    void read_scores(const OptionalArray& weights, const OptionalArray& mask, const OptionalArray& float_mask,
                     const OptionalArray& bias, const OptionalArray& alibi_slopes) {
        AttentionArguments& a = arguments;
        const std::int64_t heads = a.query.size(-3), query_len = a.query.size(-2), key_len = a.key.size(-2);
        read_rows(weights, a.weights, key_len, "weights: wrong shape");
        read(float_mask, a.addends[0], {heads, query_len, key_len}, "attn_mask: wrong shape");
        read(bias, a.addends[1], {heads, query_len, key_len}, "bias: wrong shape");
        read(alibi_slopes, a.alibi_slopes, {heads}, "alibi_slopes: wrong shape");
        if (a.alibi_slopes) check_contiguous(*a.alibi_slopes);
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
        check_contiguous(*arguments.sinks, computed_in());
    }

    void set_options(bool causal, std::int64_t left, std::int64_t right, double scale, double softcap,
                     int threads) {
        AttentionArguments& a = arguments;
        a.causal = causal;
        a.left = left;
        a.right = right;
        a.scale = scale;
        a.softcap = softcap;
        a.threads = threads;
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
        require(storage_of(array) == computed_in(), "dtypes differ");
    }

    void check_contiguous(const TensorView& t) const { check_contiguous(t, computed_in()); }

private:
    Storage computed_in() const {
        return arguments.query_storage == Storage::f64 ? Storage::f64 : Storage::f32;
    }
    bool fits(Storage storage) const { return (storage == Storage::f64) == (computed_in() == Storage::f64); }

    static void check_contiguous(const TensorView& t, Storage storage) {
        require(t.size(-1) <= 1 || t.stride(-1) == storage_bytes(storage) || t.count(t.dimensions) == 0,
                "the last axis of an array is not contiguous");
    }

    bool has_rows_ = false; // out or weights
};

} // namespace npattn
