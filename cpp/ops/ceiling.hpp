#pragma once
// The ceilings of this machine, measured with the active instruction set.

#include <cstdint>

#include "core/bfloat16.hpp"

namespace npattn {

// Floating-point operations a second of `threads` threads that do multiply-adds in registers, for T = float,
// double or BFloat16 (float's where no instruction multiplies it): the best of several rounds within about
// `seconds`.
template <class T> double measure_fma_peak(int threads, double seconds);

// Bytes a second at which `threads` threads together read data (bytes, as float32: no denormals, they are
// slow to add): the best of `repeats` passes. Data that fits in a cache is read from there from the second
// pass on.
double measure_read_bandwidth(const char* data, std::int64_t bytes, int threads, int repeats);

} // namespace npattn
