#pragma once
// The instruction sets of this build that this CPU can run, best last, and the one in use.

#include <span>
#include <type_traits>

#include "dispatch/kernel_table.hpp"

namespace npattn {

std::uint64_t cpu_features() noexcept; // Feature bits of the CPU and the operating system together

std::span<const KernelTable* const> available_tables() noexcept;
const KernelTable& active_table() noexcept;

// Makes the named table active for calls that start from now on; false if this CPU or build does not have it.
bool use_table(const char* name) noexcept;

// The kernels of one family for element type S: kernels<float>(active_table().gemm).
template <class S, class Table> const auto& kernels(const Table* table) noexcept {
    if constexpr (std::is_same_v<S, float>) {
        return table->f32;
    } else if constexpr (std::is_same_v<S, double>) {
        return table->f64;
    } else if constexpr (std::is_same_v<S, Float16>) {
        return table->f16;
    } else {
        static_assert(std::is_same_v<S, BFloat16>);
        return table->bf16;
    }
}

} // namespace npattn
