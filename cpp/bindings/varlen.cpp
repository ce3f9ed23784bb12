#include "ops/varlen.hpp"

#include "bindings/attention_arguments.hpp"
#include "bindings/bindings.hpp"

namespace npattn {
namespace {

// sequences + 1 numbers from 0 to `tokens`, none below the one before it.
const std::int64_t* starts(const py::array& array, std::int64_t sequences, std::int64_t tokens,
                           const char* what) {
    const std::int64_t* numbers = integers(array, sequences + 1, what);
    require(numbers[0] == 0 && numbers[sequences] == tokens, what);
    for (std::int64_t i = 0; i < sequences; ++i) require(numbers[i] <= numbers[i + 1], what);
    return numbers;
}

// query (Hq, Tq, E), key (Hkv, Tk, E), value (Hkv, Tk, Ev), out (Hq, Tq, Ev), lse (Hq, Tq).
void attend_packed(const py::array& query, const py::array& key, const py::array& value, const py::array& out,
                   const OptionalArray& lse, const py::array& query_starts, const py::array& key_starts,
                   const OptionalArray& query_offset, const OptionalArray& sinks,
                   const OptionalArray& alibi_slopes, bool causal, std::int64_t left, std::int64_t right,
                   double scale, double softcap, int threads) {
    AttentionReader reader(query, key, value);
    reader.read_outputs(out, lse);
    reader.read_sinks(sinks);
    AttentionArguments& packed = reader.arguments;
    require(packed.query.dimensions == 3, "packed sequences are (heads, tokens, width)");
    reader.set_options(causal, left, right, scale, softcap, threads);
    VarlenArguments a;
    a.sequences = query_starts.size() - 1;
    require(a.sequences >= 0, "query_starts: empty");
    a.query_starts = starts(query_starts, a.sequences, packed.query.size(-2), "query_starts: out of order");
    a.key_starts = starts(key_starts, a.sequences, packed.key.size(-2), "key_starts: out of order");
    a.query_offset = query_offset
                         ? integers(*query_offset, a.sequences, "query_offset: not int64 of the sequences")
                         : nullptr;
    if (alibi_slopes) {
        reader.check_dtype(*alibi_slopes);
        a.alibi_slopes = view(*alibi_slopes);
        require(alibi_slopes->ndim() == 2 && alibi_slopes->shape(0) == a.sequences &&
                    alibi_slopes->shape(1) == packed.query.size(-3),
                "alibi_slopes: wrong shape");
        reader.check_contiguous(*a.alibi_slopes);
    }
    a.packed = packed;
    reader.compute([&]<class T>() { varlen_attention<T>(a); });
}

} // namespace

void bind_varlen(py::module_& m) {
    m.def("varlen_attention", attend_packed, py::arg("query"), py::arg("key"), py::arg("value"),
          py::arg("out"), py::arg("lse").none(true), py::arg("query_starts"), py::arg("key_starts"),
          py::arg("query_offset").none(true), py::arg("sinks").none(true), py::arg("alibi_slopes").none(true),
          py::arg("causal"), py::arg("left"), py::arg("right"), py::arg("scale"), py::arg("softcap"),
          py::arg("threads"));
}

} // namespace npattn
