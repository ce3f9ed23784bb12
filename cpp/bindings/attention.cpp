#include "ops/attention.hpp"

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"
#include <pybind11/stl.h>

namespace npattn {
namespace {

bool last_axis_contiguous(const TensorView& t, std::ptrdiff_t itemsize) {
    return t.size(-1) <= 1 || t.stride(-1) == itemsize || t.count(t.dimensions) == 0;
}

// The leading axes of `t` are those of the query, and `trailing` follow.
void check_shape(const TensorView& query, const TensorView& t, std::initializer_list<std::int64_t> trailing,
                 const char* what) {
    const int leading = query.dimensions - 3;
    require(t.dimensions == leading + static_cast<int>(trailing.size()), what);
    for (int i = 0; i < leading; ++i) require(t.shape[i] == query.shape[i], what);
    int axis = leading;
    for (const std::int64_t size : trailing) require(t.shape[axis++] == size, what);
}

void attend(const py::array& query, const py::array& key, const py::array& value, const OptionalArray& out,
            const OptionalArray& lse, const OptionalArray& weights, const OptionalArray& mask,
            const OptionalArray& float_mask, const OptionalArray& bias, const OptionalArray& sinks,
            const OptionalArray& alibi_slopes, const OptionalArray& query_offset,
            const OptionalArray& kv_lengths, bool causal, std::int64_t left, std::int64_t right, double scale,
            double softcap, bool want_scores, int threads) {
    AttentionArguments a;
    a.query = view(query);
    a.key = view(key);
    a.value = view(value);
    require(a.query.dimensions >= 3 && a.key.dimensions >= 3, "attention needs (..., heads, length, width)");
    const std::int64_t heads = a.query.size(-3), kv_heads = a.key.size(-3);
    const std::int64_t query_len = a.query.size(-2), key_len = a.key.size(-2);
    check_shape(a.query, a.key, {kv_heads, key_len, a.query.size(-1)}, "key: wrong shape");
    check_shape(a.query, a.value, {kv_heads, key_len, a.value.size(-1)}, "value: wrong shape");
    require(kv_heads == 0 ? heads == 0 : heads % kv_heads == 0,
            "query heads are not a multiple of key heads");

    const auto itemsize = static_cast<std::ptrdiff_t>(query.itemsize());
    for (const TensorView* t : {&a.query, &a.key, &a.value}) {
        require(last_axis_contiguous(*t, itemsize), "the last axis of an input is not contiguous");
    }
    const auto same_dtype = [&](const py::array& array) {
        require(array.dtype().equal(query.dtype()), "dtypes differ");
    };
    same_dtype(key);
    same_dtype(value);
    const auto take = [&](const OptionalArray& array, std::optional<TensorView>& into,
                          std::initializer_list<std::int64_t> trailing, const char* what) {
        if (!array) return;
        same_dtype(*array);
        into = view(*array);
        check_shape(a.query, *into, trailing, what);
    };
    take(out, a.out, {heads, query_len, a.value.size(-1)}, "out: wrong shape");
    take(lse, a.lse, {heads, query_len}, "lse: wrong shape");
    take(weights, a.weights, {heads, query_len, key_len}, "weights: wrong shape");
    take(float_mask, a.addends[0], {heads, query_len, key_len}, "attn_mask: wrong shape");
    take(bias, a.addends[1], {heads, query_len, key_len}, "bias: wrong shape");
    take(alibi_slopes, a.alibi_slopes, {heads}, "alibi_slopes: wrong shape");
    for (const OptionalArray* array : {&out, &lse, &weights}) {
        if (*array) require((*array)->writeable(), "an output array is read-only");
    }
    for (const std::optional<TensorView>* t : {&a.out, &a.weights, &a.alibi_slopes}) {
        if (*t) require(last_axis_contiguous(**t, itemsize), "the last axis is not contiguous");
    }
    require(!want_scores || a.weights, "scores need an array to go to");
    if (mask) {
        require(holds<bool>(*mask), "mask: not bool");
        a.mask = view(*mask);
        check_shape(a.query, *a.mask, {heads, query_len, key_len}, "attn_mask: wrong shape");
    }
    if (sinks) {
        same_dtype(*sinks);
        a.sinks = view(*sinks);
        require(a.sinks->dimensions == 1 && a.sinks->shape[0] == heads &&
                    last_axis_contiguous(*a.sinks, itemsize),
                "sinks: wrong shape");
    }
    const auto take_integers = [&](const OptionalArray& array, std::optional<TensorView>& into,
                                   const char* what) {
        if (!array) return;
        require(holds<std::int64_t>(*array), what);
        into = view(*array);
        check_shape(a.query, *into, {}, what);
    };
    take_integers(query_offset, a.query_offset, "query_offset: not int64 of the leading axes");
    take_integers(kv_lengths, a.kv_lengths, "kv_lengths: not int64 of the leading axes");
    if (a.kv_lengths) {
        const int leading = a.query.dimensions - 3;
        for (std::int64_t i = 0; i < a.query.count(leading); ++i) {
            std::int64_t length;
            std::memcpy(&length, a.kv_lengths->data + a.kv_lengths->offset(i, leading), sizeof length);
            require(0 <= length && length <= key_len, "kv_lengths: out of range");
        }
    }
    a.causal = causal;
    a.left = left;
    a.right = right;
    a.scale = scale;
    a.softcap = softcap;
    a.want_scores = want_scores;
    a.threads = threads;
    compute_as(query, [&]<class T>() { attention<T>(a); });
}

} // namespace

void bind_attention(py::module_& m) {
    m.def("attention", attend, py::arg("query"), py::arg("key"), py::arg("value"), py::arg("out").none(true),
          py::arg("lse").none(true), py::arg("weights").none(true), py::arg("mask").none(true),
          py::arg("float_mask").none(true), py::arg("bias").none(true), py::arg("sinks").none(true),
          py::arg("alibi_slopes").none(true), py::arg("query_offset").none(true),
          py::arg("kv_lengths").none(true), py::arg("causal"), py::arg("left"), py::arg("right"),
          py::arg("scale"), py::arg("softcap"), py::arg("want_scores"), py::arg("threads"));
}

} // namespace npattn
