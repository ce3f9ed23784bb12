#include "bindings/bindings.hpp"

PYBIND11_MODULE(_core, m) {
    m.doc() = "The compiled core of npattn. Private: use the functions of the package.";
    m.attr("__version__") = NPATTN_VERSION;
    npattn::bind_isa(m);
    npattn::bind_threads(m);
    npattn::bind_attention(m);
    npattn::bind_varlen(m);
    npattn::bind_attention_plain(m);
    npattn::bind_matmul(m);
    npattn::bind_softmax(m);
    npattn::bind_rope(m);
    npattn::bind_heads(m);
    npattn::bind_cache(m);
    npattn::bind_ceiling(m);
}
