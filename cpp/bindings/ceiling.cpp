#include "ops/ceiling.hpp"

#include <cstring>
#include <string>

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"

namespace npattn {
void bind_ceiling(pybind11::module_& m) {
    // measure_fma_peak(character of a dtype, threads, seconds) -> operations a second. float16 ("e") is computed as
    // float32; bfloat16 ("E") where an instruction takes it.
    m.def("measure_fma_peak", [](const std::string& dtype_char, int threads, double seconds) {
        require(dtype_char.size() == 1 && std::strchr("fdeE", dtype_char[0]) != nullptr,
                "dtype_char must be 'f', 'd', 'e' or 'E'");
        require(threads >= 1, "threads must be at least 1");
        const auto measure = dtype_char == "d"   ? measure_fma_peak<double>
                             : dtype_char == "E" ? measure_fma_peak<BFloat16>
                                                 : measure_fma_peak<float>;
        return without_gil([&] { return measure(threads, seconds); });
    });
    // measure_read_bandwidth(C-contiguous array, threads, repeats) -> bytes a second
    m.def("measure_read_bandwidth", [](const py::array& array, int threads, int repeats) {
        require((array.flags() & py::array::c_style) != 0, "the array must be C-contiguous");
        require(threads >= 1 && repeats >= 1, "threads and repeats must be at least 1");
        const auto* data = static_cast<const char*>(array.data());
        const std::int64_t bytes = array.nbytes();
        return without_gil([&] { return measure_read_bandwidth(data, bytes, threads, repeats); });
    });
}

} // namespace npattn
