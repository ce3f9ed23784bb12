// The half precision loads and stores of the SIMD contract against arithmetic in double, for one ISA:
// compiled once per ISA, run by test_isa_main.cpp.

#include "simd/contract.hpp"

#include <math.h>
#include <string.h>

#include "check.hpp"
#include "guard_page.hpp"

namespace npattn::NPATTN_ISA {
namespace {

constexpr int LANES = Vec<float>::lanes;

struct Format {
    const char* name;
    int digits, lowest_exponent; // of the fraction; of the normal numbers
    double largest;
};
template <class S> constexpr Format FORMAT{};
template <> constexpr Format FORMAT<Float16> = {"float16", 10, -14, 65504.0};
template <> constexpr Format FORMAT<BFloat16> = {"bfloat16", 7, -126, 0x1.fep127};

// The number that bits stand for, by the definition of the format.
double number(std::uint16_t bits, const Format& format) {
    const int fields = 15 - format.digits; // exponent bits
    const int exponent = (bits >> format.digits) & ((1 << fields) - 1);
    const int fraction = bits & ((1 << format.digits) - 1);
    const double sign = (bits & 0x8000) != 0 ? -1 : 1;
    if (exponent == (1 << fields) - 1) return fraction != 0 ? NAN : sign * HUGE_VAL;
    if (exponent == 0) return sign * ldexp(fraction, format.lowest_exponent - format.digits);
    return sign * ldexp(1 + ldexp(fraction, -format.digits), format.lowest_exponent + exponent - 1);
}

// The number of the format nearest to x, ties to even.
double rounded(double x, const Format& format) {
    if (x != x || x == 0 || isinf(x)) return x;
    const int exponent = ilogb(x) < format.lowest_exponent ? format.lowest_exponent : ilogb(x);
    const double nearest = ldexp(nearbyint(ldexp(x, format.digits - exponent)), exponent - format.digits);
    return fabs(nearest) > format.largest ? copysign(HUGE_VAL, x) : nearest;
}

bool same(double a, double b) { return a == b ? signbit(a) == signbit(b) : a != a && b != b; }

template <class S> void test_widening() {
    const Format format = FORMAT<S>;
    for (int first_bits = 0; first_bits < 65536; first_bits += LANES) {
        std::uint16_t bits[LANES];
        for (int i = 0; i < LANES; ++i) bits[i] = static_cast<std::uint16_t>(first_bits + i);
        float got[LANES];
        store(got, load<S>(bits));
        for (int i = 0; i < LANES; ++i) {
            S stored;
            memcpy(&stored, bits + i, sizeof stored);
            const double wanted = number(bits[i], format);
            CHECK(same(double(got[i]), wanted), "%s %04x widened to %g, not %g", format.name, bits[i],
                  double(got[i]), wanted);
            CHECK(same(double(widen(stored)), wanted), "%s %04x alone widened to %g, not %g", format.name,
                  bits[i], double(widen(stored)), wanted);
        }
    }
}

template <class S> void check_rounding(const float (&x)[LANES]) {
    const Format format = FORMAT<S>;
    const int quiet = 1 << (format.digits - 1);
    std::uint16_t got[LANES];
    store_as<S>(got, load<float>(x));
    for (int i = 0; i < LANES; ++i) {
        const double wanted = rounded(double(x[i]), format);
        const S alone = narrow<S>(x[i]);
        for (std::uint16_t bits : {got[i], alone.bits}) {
            CHECK(same(number(bits, format), wanted), "%a rounded to %s %04x, not %a", double(x[i]),
                  format.name, bits, wanted);
            CHECK(wanted == wanted || (bits & quiet) != 0, "NaN %08x stored as %s %04x, not quiet",
                  bits_of(x[i]), format.name, bits);
        }
    }
}

// Every sign and exponent, with fractions at and beside every tie.
template <class S> void test_rounding() {
    Random random(5);
    float x[LANES];
    int count = 0;
    const auto add = [&](std::uint32_t sign_exponent, std::uint32_t fraction) {
        x[count++] = float_of_bits(sign_exponent << 23 | (fraction & 0x7fffffu));
        if (count == LANES) check_rounding<S>(x), count = 0;
    };
    for (std::uint32_t sign_exponent = 0; sign_exponent < 512; ++sign_exponent) {
        for (std::uint32_t place = 0; place < 23; ++place) {
            const std::uint32_t tie = 1u << place;
            for (std::uint32_t above : {0u, 2 * tie, 0x7fffffu - (2 * tie - 1), random.bits() & -(2 * tie)}) {
                for (std::uint32_t low : {tie, tie - 1, tie + 1, 0u}) add(sign_exponent, above | low);
            }
        }
        for (int i = 0; i < 200; ++i) add(sign_exponent, random.bits());
        add(sign_exponent, 0x7fffffu);
    }
    while (count != 0) add(0, 0);
}

// The first n elements alone are read and written, up to where memory ends.
template <class S> void test_parts() {
    GuardPage page;
    float values[LANES];
    store(values, iota<float>() + broadcast<float>(1.f));
    S stored[LANES];
    for (int i = 0; i < LANES; ++i) stored[i] = narrow<S>(values[i]);
    for (int n = 0; n <= LANES; ++n) {
        const std::size_t bytes = static_cast<std::size_t>(n) * sizeof(S);
        memset(page.begin(), 0x5a, page.size());
        char* p = page.end() - bytes;
        store_first_as<S>(p, load<float>(values), n);
        CHECK(memcmp(p, stored, bytes) == 0, "store_first_as, n = %d", n);
        CHECK(p[-1] == 0x5a, "store_first_as wrote before its place, n = %d", n);
        float loaded[LANES];
        store(loaded, load_first<S>(p, n));
        for (int i = 0; i < LANES; ++i)
            CHECK(loaded[i] == (i < n ? values[i] : 0.f), "load_first, n = %d, lane %d", n, i);
        memset(page.begin(), 0x5a, page.size());
        store_first_as<S>(page.begin() + 1, load<float>(values), n); // any alignment
        CHECK(memcmp(page.begin() + 1, stored, bytes) == 0 && page.begin()[1 + bytes] == 0x5a,
              "store_first_as unaligned, n = %d", n);
    }
    char* whole = page.end() - LANES * sizeof(S);
    store_as<S>(whole, load<float>(values));
    float loaded[LANES];
    store(loaded, load<S>(whole));
    CHECK(memcmp(loaded, values, sizeof values) == 0, "load and store_as at the end");
}

// Any 16 bits, two by two.
void test_pairs() {
    GuardPage page, other;
    for (int n = 0; n <= LANES; ++n) {
        const std::size_t bytes = 2 * static_cast<std::size_t>(n);
        char *p = page.end() - bytes, *q = other.end() - bytes;
        std::uint16_t wanted[2 * LANES] = {}, got[2 * LANES];
        for (int i = 0; i < n; ++i) {
            wanted[2 * i] = static_cast<std::uint16_t>(0x7f81 + 300 * i);
            wanted[2 * i + 1] = static_cast<std::uint16_t>(0xffa0 - i);
            memcpy(p + 2 * i, wanted + 2 * i, 2);
            memcpy(q + 2 * i, wanted + 2 * i + 1, 2);
        }
        store(got, load_pairs_first(p, q, n));
        CHECK(memcmp(got, wanted, sizeof got) == 0, "load_pairs_first, n = %d", n);
        if (n == LANES) store(got, load_pairs(p, q));
        CHECK(memcmp(got, wanted, sizeof got) == 0, "load_pairs");
    }
}

// float and double go through the same names.
template <class T> void test_plain() {
    T values[Vec<T>::lanes], got[Vec<T>::lanes] = {};
    store(values, iota<T>());
    store_as<T>(got, load<T>(values));
    CHECK(memcmp(values, got, sizeof values) == 0, "store_as of %d bytes", int(sizeof(T)));
    store_first_as<T>(got, broadcast<T>(T(7)), 1);
    CHECK(got[0] == T(7) && got[1] == T(1), "store_first_as of %d bytes", int(sizeof(T)));
}

#ifdef NPATTN_DOT
// Products exact, each of the two sums rounded; a denormal, given or made, is 0.
void test_dot() {
    Random random(6);
    const auto bfloat = [](std::uint16_t bits) { return double(widen(BFloat16{bits})); };
    for (int round = 0; round < 1000; ++round) {
        HalfPair a[LANES], b;
        float c[LANES], got[LANES], product[LANES];
        const auto some = [&] { return narrow<BFloat16>(static_cast<float>(random.between(-8, 8))).bits; };
        for (int i = 0; i < LANES; ++i)
            a[i] = {some(), some()}, c[i] = static_cast<float>(random.between(-8, 8));
        b = {some(), some()};
        store(got, fma_element(load<HalfPair>(a), &b, load<float>(c)));
        store(product, mul_element(load_first<HalfPair>(a, LANES - 1), &b));
        for (int i = 0; i < LANES; ++i) {
            const double even = bfloat(a[i].even) * bfloat(b.even);
            const double odd = bfloat(a[i].odd) * bfloat(b.odd);
            const double allowed = 6e-8 * (2 * (fabs(even) + fabs(odd)) + 2 * fabs(double(c[i])));
            CHECK(fabs(double(got[i]) - (c[i] + even + odd)) <= allowed, "dot: %.9g, not %.9g",
                  double(got[i]), c[i] + even + odd);
            const double wanted = i == LANES - 1 ? 0 : even + odd;
            CHECK(fabs(double(product[i]) - wanted) <= allowed, "dot from 0: %.9g, not %.9g",
                  double(product[i]), wanted);
        }
    }
    const HalfPair small = {narrow<BFloat16>(1e-39f).bits, 0}, tiny = {narrow<BFloat16>(0x1p-64f).bits, 0};
    const HalfPair one = {narrow<BFloat16>(1.f).bits, 0};
    const HalfPair factors[][2] = {{small, one}, {one, small}, {tiny, tiny}};
    for (const auto& factor : factors) {
        float got[LANES];
        HalfPair lanes[LANES];
        for (HalfPair& lane : lanes) lane = factor[0];
        store(got, mul_element(load<HalfPair>(lanes), &factor[1]));
        CHECK(got[0] == 0.f, "dot of denormals: %g", double(got[0]));
    }
    std::uint16_t rows[2][2 * LANES];
    for (int i = 0; i < 2 * LANES; ++i) {
        rows[0][i] = static_cast<std::uint16_t>(i);
        rows[1][i] = static_cast<std::uint16_t>(1000 + i);
    }
    Vec<HalfPair> first = load<HalfPair>(rows[0]), second = load<HalfPair>(rows[1]);
    pair_rows(first, second);
    HalfPair pairs[2 * LANES];
    store(pairs, first);
    store(pairs + LANES, second);
    for (int i = 0; i < 2 * LANES; ++i)
        CHECK(pairs[i].even == i && pairs[i].odd == 1000 + i, "pair %d: %d, %d", i, pairs[i].even,
              pairs[i].odd);
}
#endif

template <class S> void test_storage() {
    test_widening<S>();
    test_rounding<S>();
    test_parts<S>();
}

#ifdef NPATTN_TILES
// C + (the sum of even products + the sum of odd ones), each in order; a denormal, given or made, is 0.
void test_tiles() {
    constexpr int side = 16;
    Random random(9);
    HalfPair a[side][side], b[side][side];
    float c[side][side], got[side][side];
    const auto some = [&] { return narrow<BFloat16>(static_cast<float>(random.between(-8, 8))).bits; };
    const TileRegisters registers;
    for (int round = 0; round < 20; ++round) {
        for (int i = 0; i < side; ++i) {
            for (int j = 0; j < side; ++j) {
                a[i][j] = {some(), some()}, b[i][j] = {some(), some()};
                c[i][j] = static_cast<float>(random.between(-100, 100));
            }
        }
        tile_load<0>(c, sizeof c[0]);
        tile_load<4>(a, sizeof a[0]);
        tile_load<6>(b, sizeof b[0]);
        tile_dot<0, 4, 6>(HalfPair());
        tile_store<0>(got, sizeof got[0]);
        for (int i = 0; i < side; ++i) {
            Vec<float> evens = zero<float>(), odds = zero<float>();
            for (int k = 0; k < side; ++k) {
                const Vec<HalfPair> x = broadcast(a[i][k]), y = load<HalfPair>(b[k]);
                evens = fma(even(x), even(y), evens);
                odds = fma(odd(x), odd(y), odds);
            }
            float wanted[side];
            store(wanted, load<float>(c[i]) + (evens + odds));
            for (int j = 0; j < side; ++j)
                CHECK(got[i][j] == wanted[j], "tile of pairs: %.9g, not %.9g", double(got[i][j]),
                      double(wanted[j]));
        }
    }
    const std::uint16_t small = narrow<BFloat16>(1e-39f).bits, tiny = narrow<BFloat16>(0x1p-64f).bits;
    const std::uint16_t one = narrow<BFloat16>(1.f).bits;
    const NoDenormals no_denormals;
    const std::uint16_t factors[][2] = {{small, one}, {one, small}, {tiny, tiny}};
    for (const auto& factor : factors) {
        for (int i = 0; i < side * side; ++i) {
            a[i / side][i % side] = {factor[0], factor[0]};
            b[i / side][i % side] = {factor[1], factor[1]};
        }
        tile_load<4>(a, sizeof a[0]);
        tile_load<6>(b, sizeof b[0]);
        tile_zero<0>();
        tile_dot<0, 4, 6>(HalfPair());
        tile_store<0>(got, sizeof got[0]);
        CHECK(got[0][0] == 0.f && got[15][15] == 0.f, "tile of denormals: %g", double(got[0][0]));
        store(got[0], fma(even(broadcast(a[0][0])), odd(broadcast(b[0][0])), zero<float>()));
        CHECK(got[0][0] == 0.f, "product of denormals: %g", double(got[0][0]));
    }
}
#endif

} // namespace

int test_half() {
    test_storage<Float16>();
    test_storage<BFloat16>();
    test_pairs();
    test_plain<float>();
    test_plain<double>();
#ifdef NPATTN_DOT
    test_dot();
#endif
#ifdef NPATTN_TILES
    test_tiles();
#endif
    return verdict();
}

} // namespace npattn::NPATTN_ISA
