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
    reader.read_outputs(out, lse);
    reader.read_scores(weights, mask, float_mask, bias, alibi_slopes);
    reader.read_sinks(sinks);
    require(!want_scores || a.weights, "scores need an array to go to");
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
            require(0 <= length && length <= a.key.size(-2), "kv_lengths: out of range");
        }
    }
    reader.set_options(causal, left, right, scale, softcap, threads);
    a.want_scores = want_scores;
    reader.compute([&]<class T>() { attention<T>(a); });
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
