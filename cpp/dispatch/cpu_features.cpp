#include "dispatch/registry.hpp"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) || defined(_M_X64)
#if defined(_MSC_VER)
#include <immintrin.h>
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace npattn {
namespace {

struct Registers {
    unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf = 0) {
    Registers r;
#if defined(_MSC_VER)
    int out[4];
    __cpuidex(out, static_cast<int>(leaf), static_cast<int>(subleaf));
    r = {static_cast<unsigned>(out[0]), static_cast<unsigned>(out[1]), static_cast<unsigned>(out[2]),
         static_cast<unsigned>(out[3])};
#else
    __cpuid_count(leaf, subleaf, r.a, r.b, r.c, r.d);
#endif
    return r;
}

// The register states that the operating system saves (XCR0).
std::uint64_t saved_states() {
#if defined(_MSC_VER)
    return _xgetbv(0);
#else
    std::uint32_t low;
    std::uint32_t high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (static_cast<std::uint64_t>(high) << 32) | low;
#endif
}

// Whether this process may use the tile registers: Linux gives their 8 KiB of state to those that ask, and refuses
// small alternate signal stacks from then on. Where NPATTN_ISA names another instruction set nobody asks.
bool may_use_tiles() {
    const char* const named = std::getenv("NPATTN_ISA");
    if (named != nullptr && *named != '\0' && std::strcmp(named, "avx512amx") != 0) return false;
#if defined(__linux__)
    constexpr long request_permission = 0x1023, tile_data = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return true;
#endif
}

constexpr bool has_all(unsigned value, unsigned bits) { return (value & bits) == bits; }

} // namespace

std::uint64_t cpu_features() noexcept {
    if (cpuid(0).a < 7) return 0;
    const Registers one = cpuid(1);
    const Registers seven = cpuid(7);
    constexpr unsigned fma = 1u << 12, osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
    constexpr unsigned avx2 = 1u << 5;
    constexpr unsigned avx512f = 1u << 16, dq = 1u << 17, cd = 1u << 28, bw = 1u << 30, vl = 1u << 31;
    constexpr unsigned vnni = 1u << 11;
    constexpr unsigned bf16 = 1u << 5; // of subleaf 1
    constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24, amx_int8 = 1u << 25;
    constexpr std::uint64_t ymm_state = 0x6, zmm_state = 0xe6, tile_state = 0x60000;
    if (!has_all(one.c, fma | osxsave | avx | f16c) || !has_all(seven.b, avx2)) return 0;
    const std::uint64_t states = saved_states();
    if ((states & ymm_state) != ymm_state) return 0;
    std::uint64_t features = FEATURE_AVX2;
    if (has_all(seven.b, avx512f | dq | cd | bw | vl) && (states & zmm_state) == zmm_state) {
        features |= FEATURE_AVX512;
        if (seven.a >= 1 && has_all(cpuid(7, 1).a, bf16)) features |= FEATURE_AVX512_BF16;
        if (has_all(seven.c, vnni)) features |= FEATURE_AVX512_VNNI;
        if (has_all(seven.d, amx_bf16 | amx_tile | amx_int8) && (states & tile_state) == tile_state &&
            may_use_tiles())
            features |= FEATURE_AMX;
    }
    return features;
}

} // namespace npattn

#elif defined(__aarch64__) || defined(_M_ARM64)

namespace npattn {
std::uint64_t cpu_features() noexcept { return FEATURE_NEON; } // part of the architecture
} // namespace npattn

#else

namespace npattn {
std::uint64_t cpu_features() noexcept { return 0; }
} // namespace npattn

#endif
