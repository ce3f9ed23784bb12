#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "dispatch/registry.hpp"
#include <pybind11/stl.h>

namespace npattn {

void bind_isa(pybind11::module_& m) {
    m.def("isa_available", [] {
        std::vector<std::string> names;
        for (const KernelTable* table : available_tables()) names.emplace_back(table->name);
        return names;
    });
    m.def("isa_active", [] { return std::string(active_table().name); });
    m.def("isa_use", [](const std::string& name) { return use_table(name.c_str()); });
    m.def("cpu_features", [] {
        const std::uint64_t features = cpu_features();
        std::vector<std::string> names;
        if ((features & FEATURE_AVX2) != 0) names.emplace_back("avx2+fma+f16c");
        if ((features & FEATURE_AVX512) != 0) names.emplace_back("avx512f+cd+bw+dq+vl");
        if ((features & FEATURE_AVX512_BF16) != 0) names.emplace_back("avx512_bf16");
        if ((features & FEATURE_AVX512_VNNI) != 0) names.emplace_back("avx512_vnni");
        if ((features & FEATURE_AMX) != 0) names.emplace_back("amx_tile+bf16+int8");
        if ((features & FEATURE_NEON) != 0) names.emplace_back("neon");
        return names;
    });
}

} // namespace npattn
