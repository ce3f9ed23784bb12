#pragma once
// Kernels compute with the default floating-point environment (round to nearest, denormals kept, no traps)
// whatever the caller has set, and leave the caller's control bits and sticky flags as they were.

#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace npattn {

class DefaultFloatEnvironment {
public:
#if defined(__x86_64__) || defined(_M_X64)
    DefaultFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }

private:
    unsigned saved_;
#elif defined(__aarch64__)
    DefaultFloatEnvironment() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(control_));
        __asm__ volatile("mrs %0, fpsr" : "=r"(status_));
        __asm__ volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
    }
    ~DefaultFloatEnvironment() {
        __asm__ volatile("msr fpcr, %0" : : "r"(control_));
        __asm__ volatile("msr fpsr, %0" : : "r"(status_));
    }

private:
    std::uint64_t control_, status_;
#else
    DefaultFloatEnvironment() {}
    ~DefaultFloatEnvironment() {}
#endif
    DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
    DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;
};

} // namespace npattn
