// The int8 part of the SIMD contract against plain loops, for one ISA: compiled once per ISA, run by
// test_isa_main.cpp.

#include "simd/contract.hpp"

#include <math.h>
#include <string.h>

#include "check.hpp"
#include "guard_page.hpp"

namespace npattn::NPATTN_ISA {
namespace {

using Sums = Vec<std::int32_t>;
constexpr int LANES = Sums::lanes;
static_assert(LANES == Vec<float>::lanes && LANES == Vec<Int8Quad>::lanes);

// Every product of extremes, then random ones; sums near the limits of 32 bits.
void test_products() {
    Random random(8);
    const int unsigned_ends[] = {0, 1, 128, 255}, signed_ends[] = {-128, -127, -1, 0, 127};
    for (int round = 0; round < 2000; ++round) {
        Int8Quad a[LANES], b;
        std::int32_t c[LANES], got[LANES], product[LANES];
        for (int k = 0; k < 4; ++k) {
            const int ends = signed_ends[random.bits() % 5];
            b.bytes[k] = static_cast<std::uint8_t>(round % 2 == 0 ? ends : int(random.bits()));
        }
        for (int i = 0; i < LANES; ++i) {
            for (int k = 0; k < 4; ++k) {
                const int ends = unsigned_ends[random.bits() % 4];
                a[i].bytes[k] = static_cast<std::uint8_t>(round % 2 == 0 ? ends : int(random.bits()));
            }
            c[i] = static_cast<std::int32_t>(random.between(-2e9, 2e9));
        }
        const int n = static_cast<int>(random.bits()) % (LANES + 1);
        store(got, fma_element(load<Int8Quad>(a), &b, load<std::int32_t>(c)));
        store(product, mul_element(load_first<Int8Quad>(a, n), &b));
        for (int i = 0; i < LANES; ++i) {
            std::int32_t sum = 0;
            for (int k = 0; k < 4; ++k) sum += a[i].bytes[k] * static_cast<std::int8_t>(b.bytes[k]);
            CHECK(got[i] == c[i] + sum, "%d + %d is not %d", c[i], sum, got[i]);
            CHECK(product[i] == (i < n ? sum : 0), "%d is not %d, lane %d of %d", sum, product[i], i, n);
        }
    }
}

#ifdef NPATTN_TILES
// Signed rows of A, unsigned ones of B, random bits and extremes; sums wrap, as integers do.
void test_tiles() {
    constexpr int side = 16;
    Random random(10);
    Int8Quad a[side][side], b[side][side];
    std::int32_t c[side][side], got[side][side];
    const TileRegisters registers;
    for (int round = 0; round < 20; ++round) {
        for (int i = 0; i < side; ++i) {
            for (int j = 0; j < side; ++j) {
                for (int k = 0; k < 4; ++k) {
                    a[i][j].bytes[k] = static_cast<std::uint8_t>(round % 2 == 0 ? 0x80u : random.bits());
                    b[i][j].bytes[k] = static_cast<std::uint8_t>(round % 2 == 0 ? 0xffu : random.bits());
                }
                c[i][j] = static_cast<std::int32_t>(random.between(-1e9, 1e9));
            }
        }
        tile_load<1>(c, sizeof c[0]);
        tile_load<5>(a, sizeof a[0]);
        tile_load<7>(b, sizeof b[0]);
        tile_dot<1, 5, 7>(Int8Quad());
        tile_store<1>(got, sizeof got[0]);
        for (int i = 0; i < side; ++i) {
            for (int j = 0; j < side; ++j) {
                std::int32_t wanted = c[i][j];
                for (int k = 0; k < 4 * side; ++k)
                    wanted += static_cast<std::int8_t>(a[i][k / 4].bytes[k % 4]) * b[k / 4][j].bytes[k % 4];
                CHECK(got[i][j] == wanted, "tile of quads: %d, not %d", got[i][j], wanted);
            }
        }
    }
}
#endif

void test_sums() {
    GuardPage page;
    std::int32_t values[LANES], got[LANES];
    for (int i = 0; i < LANES; ++i) values[i] = (1 << 24) * i - 7;
    store(got, load<std::int32_t>(values) + load<std::int32_t>(values));
    float floats[LANES];
    store(floats, to_float(load<std::int32_t>(values)));
    for (int i = 0; i < LANES; ++i) {
        CHECK(got[i] == 2 * values[i], "lane %d: %d", i, got[i]);
        CHECK(floats[i] == static_cast<float>(values[i]), "lane %d: %g", i, double(floats[i]));
    }
    store(got, zero<std::int32_t>());
    for (std::int32_t x : got) CHECK(x == 0, "zero");
    for (int n = 0; n <= LANES; ++n) {
        const std::size_t bytes = static_cast<std::size_t>(n) * sizeof(std::int32_t);
        memset(page.begin(), 0x5a, page.size());
        char* p = page.end() - bytes;
        store_first(p, load<std::int32_t>(values), n);
        CHECK(memcmp(p, values, bytes) == 0 && p[-1] == 0x5a, "store_first, n = %d", n);
        store(got, load_first<std::int32_t>(p, n));
        for (int i = 0; i < LANES; ++i)
            CHECK(got[i] == (i < n ? values[i] : 0), "load_first, n = %d, lane %d", n, i);
    }
}

// Rounded to the nearest, ties to even; the first n bytes alone are written.
void test_rounding() {
    GuardPage page;
    for (int first_value = -127 * 4; first_value <= 127 * 4 - LANES; ++first_value) {
        float x[LANES];
        std::int8_t wanted[LANES];
        for (int i = 0; i < LANES; ++i) {
            x[i] = static_cast<float>(first_value + i) / 4;
            wanted[i] = static_cast<std::int8_t>(nearbyintf(x[i]));
        }
        const int n = (first_value + 127 * 4) % (LANES + 1);
        memset(page.begin(), 0x5a, page.size());
        char* p = page.end() - n;
        store_int8_first(p, load<float>(x), n);
        CHECK(memcmp(p, wanted, static_cast<std::size_t>(n)) == 0 && p[-1] == 0x5a, "store_int8_first of %d",
              n);
        p = page.end() - LANES;
        store_int8(p, load<float>(x));
        CHECK(memcmp(p, wanted, LANES) == 0 && p[-1] == 0x5a, "store_int8 from %g", double(x[0]));
    }
}

// Every byte in every lane; the first n bytes alone are read, wherever they lie.
void test_loads() {
    GuardPage page;
    float got[LANES];
    for (int first_value = 0; first_value < 256; ++first_value) {
        char* const p = page.end() - LANES;
        for (int i = 0; i < LANES; ++i) p[i] = static_cast<char>(first_value + 37 * i);
        store(got, load<Int8>(p));
        for (int i = 0; i < LANES; ++i) {
            const float wanted = static_cast<float>(static_cast<std::int8_t>(p[i]));
            CHECK(got[i] == wanted, "byte %02x widened to %g", static_cast<unsigned char>(p[i]),
                  double(got[i]));
        }
        const int n = first_value % (LANES + 1);
        char* const last = page.end() - n;
        store(got, load_first<Int8>(last, n));
        for (int i = 0; i < LANES; ++i) {
            const float wanted = i < n ? static_cast<float>(static_cast<std::int8_t>(last[i])) : 0.f;
            CHECK(got[i] == wanted, "load_first, n = %d, lane %d: %g", n, i, double(got[i]));
        }
    }
}

} // namespace

int test_int8() {
#ifdef NPATTN_TILES
    test_tiles();
#endif
    test_products();
    test_sums();
    test_rounding();
    test_loads();
    return verdict();
}

} // namespace npattn::NPATTN_ISA
