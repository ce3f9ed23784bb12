#include "ops/attention.hpp"

#include "bindings/attention_arguments.hpp"
#include "bindings/bindings.hpp"

namespace npattn {
namespace {

void attend(const py::array& query, const py::array& key, const py::array& value, const OptionalArray& out,
            const OptionalArray& lse, const OptionalArray& weights, const OptionalArray& mask,
            const OptionalArray& float_mask, const OptionalArray& bias, const OptionalArray& sinks,
            const OptionalArray& alibi_slopes, const OptionalArray& query_offset,
            const OptionalArray& kv_lengths, bool causal, std::int64_t left, std::int64_t right, double scale,
            double softcap, bool want_scores, int threads) {
    AttentionReader reader(query, key, value);
    AttentionArguments& a = reader.arguments;
    const std::int64_t heads = a.query.size(-3), query_len = a.query.size(-2), key_len = a.key.size(-2);
    reader.read_outputs(out, lse);
    reader.read(weights, a.weights, {heads, query_len, key_len}, "weights: wrong shape");
    reader.read(float_mask, a.addends[0], {heads, query_len, key_len}, "attn_mask: wrong shape");
    reader.read(bias, a.addends[1], {heads, query_len, key_len}, "bias: wrong shape");
    reader.read(alibi_slopes, a.alibi_slopes, {heads}, "alibi_slopes: wrong shape");
    reader.read_sinks(sinks);
    if (a.alibi_slopes) reader.check_contiguous(*a.alibi_slopes);
    if (a.weights) {
        require(weights->writeable(), "an output array is read-only");
        reader.check_contiguous(*a.weights);
    }
    require(!want_scores || a.weights, "scores need an array to go to");
    if (mask) {
        require(holds<bool>(*mask), "mask: not bool");
        a.mask = view(*mask);
        reader.check_shape(*a.mask, {heads, query_len, key_len}, "attn_mask: wrong shape");
    }
    const auto read_integers = [&](const OptionalArray& array, std::optional<TensorView>& into,
                                   const char* what) {
        if (!array) return;
        require(holds<std::int64_t>(*array), what);
        into = view(*array);
        reader.check_shape(*into, {}, what);
    };
    read_integers(query_offset, a.query_offset, "query_offset: not int64 of the leading axes");
    read_integers(kv_lengths, a.kv_lengths, "kv_lengths: not int64 of the leading axes");
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
