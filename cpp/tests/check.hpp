#pragma once
// What the C++ tests share. CHECK reports a failure, counts it and goes on; verdict() is main's result. Units
// with machine flags read this too: nothing here becomes a function that the linker could share.

#include <cstdint>
#include <cstdio>
#include <initializer_list>

namespace npattn {
namespace {

constexpr int SKIPPED = 77; // ctest's SKIP_RETURN_CODE

int failures = 0;

#define CHECK(condition, ...)                                                                                \
    do {                                                                                                     \
        if (!(condition) && ++failures <= 20) {                                                              \
            std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition);                                      \
            std::printf(__VA_ARGS__);                                                                        \
            std::printf("\n");                                                                               \
        }                                                                                                    \
    } while (false)

[[maybe_unused]] int verdict() {
    std::printf(failures == 0 ? "passed\n" : "%d checks failed\n", failures);
    return failures == 0 ? 0 : 1;
}

// A fixed sequence: numbers in [0, 1) with 24 random bits, exact in float and double.
class Random {
public:
    explicit Random(std::uint64_t seed) : state(seed * 2 + 1) {}
    std::uint32_t bits() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<std::uint32_t>(state >> 40);
    }
    double uniform() { return bits() / 16777216.0; }
    double between(double low, double high) { return low + (high - low) * uniform(); }

private:
    std::uint64_t state;
};

} // namespace
} // namespace npattn
