#pragma once

#include <pybind11/pybind11.h>

namespace npattn {

void bind_isa(pybind11::module_& m);
void bind_threads(pybind11::module_& m);
void bind_attention(pybind11::module_& m);
void bind_varlen(pybind11::module_& m);
void bind_attention_plain(pybind11::module_& m);
void bind_matmul(pybind11::module_& m);
void bind_softmax(pybind11::module_& m);
void bind_rope(pybind11::module_& m);
void bind_heads(pybind11::module_& m);
void bind_cache(pybind11::module_& m);
void bind_ceiling(pybind11::module_& m);

} // namespace npattn
