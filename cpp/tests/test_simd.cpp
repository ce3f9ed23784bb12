// Every operation of simd/contract.hpp against plain loops, for one ISA: compiled once per ISA, run by
// test_isa_main.cpp.

#include "simd/contract.hpp"

#include <math.h>
#include <string.h>

#include "check.hpp"
#include "guard_page.hpp"

namespace npattn::NPATTN_ISA {
namespace {

template <class T> constexpr int LANES = Vec<T>::lanes;

#ifdef NPATTN_ISA_generic
constexpr bool fused = false;
#else
constexpr bool fused = true;
#endif

template <class T> constexpr bool SINGLE = sizeof(T) == 4;
template <class T> constexpr T INF = static_cast<T>(__builtin_huge_val());
template <class T>
constexpr T LARGEST = static_cast<T>(SINGLE<T> ? 3.4028234663852886e38 : 1.7976931348623157e308);
template <class T>
constexpr T NORMAL = static_cast<T>(SINGLE<T> ? 1.1754943508222875e-38 : 2.2250738585072014e-308);
template <class T> constexpr T DENORMAL = static_cast<T>(SINGLE<T> ? 1.4e-45 : 4.9e-324);
template <class T>
constexpr T HALF_LEFT = static_cast<T>(SINGLE<T> ? 8388607.5 : 4503599627370495.5); // the last .5
template <class T> constexpr T ABOVE_1 = static_cast<T>(SINGLE<T> ? 1.00000012 : 1.0000000000000002);

// Numbers at which an operation may do something else than elsewhere.
template <class T>
constexpr T VALUES[] = {T(0.),      T(-0.),      T(1),      T(-1),       T(0.5),       T(-0.5),
                        T(1.5),     T(2.5),      T(-2.5),   T(0.3),      T(-0.7),      T(3e9),
                        T(-5e18),   T(1e-3),     INF<T>,    -INF<T>,     HALF_LEFT<T>, -HALF_LEFT<T>,
                        LARGEST<T>, -LARGEST<T>, NORMAL<T>, DENORMAL<T>, T(NAN),       ABOVE_1<T>};

// Equal, zeros of either sign being equal, or both NaN.
template <class T> bool same(T a, T b) { return a == b || (a != a && b != b); }

// simd(a, b, c) against plain(a, b, c): VALUES in all combinations of a and b, with some c.
template <class T, class Simd, class Plain> void check_lanes(const char* name, Simd simd, Plain plain) {
    constexpr int count = sizeof(VALUES<T>) / sizeof(T);
    for (int first_value = 0; first_value < count; ++first_value) {
        for (int offset = 0; offset < count; ++offset) {
            T a[LANES<T>], b[LANES<T>], c[LANES<T>], got[LANES<T>];
            for (int i = 0; i < LANES<T>; ++i) {
                a[i] = VALUES<T>[(first_value + i) % count];
                b[i] = VALUES<T>[(offset + 2 * i) % count];
                c[i] = VALUES<T>[(offset + 5 * i + first_value) % count];
            }
            store(got, simd(load<T>(a), load<T>(b), load<T>(c)));
            for (int i = 0; i < LANES<T>; ++i) {
                const T wanted = plain(a[i], b[i], c[i]);
                CHECK(same(got[i], wanted), "%s(%.17g, %.17g, %.17g) = %.17g, not %.17g", name, double(a[i]),
                      double(b[i]), double(c[i]), double(got[i]), double(wanted));
            }
        }
    }
}

float plain_fma(float a, float b, float c) { return fused ? fmaf(a, b, c) : a * b + c; }
double plain_fma(double a, double b, double c) { return fused ? ::fma(a, b, c) : a * b + c; }

template <class T> void test_arithmetic() {
    using V = Vec<T>;
    check_lanes<T>(
        "add", [](V a, V b, V) { return a + b; }, [](T a, T b, T) { return a + b; });
    check_lanes<T>(
        "subtract", [](V a, V b, V) { return a - b; }, [](T a, T b, T) { return a - b; });
    check_lanes<T>(
        "multiply", [](V a, V b, V) { return a * b; }, [](T a, T b, T) { return a * b; });
    check_lanes<T>(
        "divide", [](V a, V b, V) { return a / b; }, [](T a, T b, T) { return a / b; });
    check_lanes<T>(
        "fma", [](V a, V b, V c) { return fma(a, b, c); }, [](T a, T b, T c) { return plain_fma(a, b, c); });
    check_lanes<T>(
        "fnma", [](V a, V b, V c) { return fnma(a, b, c); },
        [](T a, T b, T c) { return plain_fma(-a, b, c); });
    check_lanes<T>(
        "max", [](V a, V b, V) { return max(a, b); }, [](T a, T b, T) { return a > b ? a : b; });
    check_lanes<T>(
        "min", [](V a, V b, V) { return min(a, b); }, [](T a, T b, T) { return a < b ? a : b; });
    check_lanes<T>(
        "round", [](V a, V, V) { return round(a); }, [](T a, T, T) { return T(nearbyint(double(a))); });
    check_lanes<T>(
        "select of less", [](V a, V b, V c) { return select(less(a, b), b, c); },
        [](T a, T b, T c) { return a < b ? b : c; });
    check_lanes<T>(
        "select of equal", [](V a, V b, V c) { return select(equal(a, b), b, c); },
        [](T a, T b, T c) { return a == b ? b : c; });
    check_lanes<T>(
        "zero", [](V, V, V) { return zero<T>(); }, [](T, T, T) { return T(0); });
}

// a * 2^n for every n that gives something else than 0 and inf, and beyond.
template <class T> void test_scale_exponent() {
    const T factors[] = {T(1), T(-1.75), T(0.6931472), T(1.4142135), T(1e-25), T(1e25), T(0), T(NAN)};
    const int limit = SINGLE<T> ? 400 : 2600;
    for (T factor : factors) {
        for (int n = -limit; n <= limit; ++n) {
            T got[LANES<T>];
            store(got, scale_exponent(broadcast<T>(factor), broadcast<T>(T(n))));
            const T wanted = SINGLE<T> ? T(ldexpf(float(factor), n)) : T(ldexp(double(factor), n));
            CHECK(same(got[0], wanted), "%.17g * 2^%d = %.17g, not %.17g", double(factor), n, double(got[0]),
                  double(wanted));
        }
        for (T n : {T(-1e30), -INF<T>}) {
            T got[LANES<T>];
            store(got, scale_exponent(broadcast<T>(factor), broadcast<T>(n)));
            const T wanted = n == -INF<T> ? T(0) : factor * T(0);
            CHECK(same(got[0], wanted), "%.17g * 2^%g = %.17g", double(factor), double(n), double(got[0]));
        }
        T got[LANES<T>];
        store(got, scale_exponent(broadcast<T>(factor), broadcast<T>(T(1e30))));
        CHECK(same(got[0], factor == 0 ? T(0) : factor * INF<T>), "%.17g * 2^1e30 = %.17g", double(factor),
              double(got[0]));
    }
}

// The masks of all patterns of true lanes.
template <class T> void test_masks() {
    constexpr std::uint8_t truths[] = {1, 2, 128, 255};
    Random random(1);
    for (std::uint32_t pattern = 0; pattern < (1u << LANES<T>); ++pattern) {
        const std::uint32_t other = random.bits() & ((1u << LANES<T>)-1);
        std::uint8_t a[LANES<T>], b[LANES<T>], got[6][LANES<T> + 1];
        for (int i = 0; i < LANES<T>; ++i) {
            a[i] = (pattern >> i) & 1 ? truths[(pattern + static_cast<std::uint32_t>(i)) % 4] : 0;
            b[i] = (other >> i) & 1;
        }
        for (auto& bytes : got) bytes[LANES<T>] = 77;
        const Mask<T> mask = load_bytes<T>(a);
        const Mask<T> second = load_bytes<T>(b);
        const int n = static_cast<int>(other) % (LANES<T> + 1);
        store_bytes(got[0], mask);
        store_bytes(got[1], both(mask, second));
        store_bytes(got[2], either(mask, second));
        store_bytes(got[3], invert(mask));
        store_bytes(got[4], load_bytes_first<T>(a, n));
        store_bytes(got[5], first<T>(n));
        T selected[LANES<T>];
        store(selected, select(mask, iota<T>(), broadcast<T>(T(-1))));
        for (int i = 0; i < LANES<T>; ++i) {
            const bool x = (pattern >> i) & 1;
            const bool y = (other >> i) & 1;
            const bool wanted[] = {x, x && y, x || y, !x, x && i < n, i < n};
            for (int k = 0; k < 6; ++k)
                CHECK(got[k][i] == wanted[k], "mask %d of %x, %x, lane %d", k, pattern, other, i);
            CHECK(selected[i] == (x ? T(i) : T(-1)), "select by %x, lane %d", pattern, i);
        }
        for (const auto& bytes : got)
            CHECK(bytes[LANES<T>] == 77, "store_bytes wrote %d bytes", LANES<T> + 1);
        CHECK(any(mask) == (pattern != 0), "any of %x", pattern);
        CHECK(all(mask) == (pattern == (1u << LANES<T>)-1), "all of %x", pattern);
        CHECK(all(invert(mask)) == (pattern == 0) && any(invert(mask)) == !all(mask), "any, all of not %x",
              pattern);
    }
}

// Memory from its end: what lies past n elements cannot be touched, and what lies before stays.
template <class T> void test_memory() {
    GuardPage page;
    T values[LANES<T>];
    store(values, iota<T>() + broadcast<T>(T(1)));
    for (int n = 0; n <= LANES<T>; ++n) {
        memset(page.begin(), 0x5a, page.size());
        char* p = page.end() - static_cast<std::size_t>(n) * sizeof(T);
        store_first(p, load<T>(values), n);
        CHECK(memcmp(p, values, static_cast<std::size_t>(n) * sizeof(T)) == 0, "store_first, n = %d", n);
        CHECK(p[-1] == 0x5a, "store_first wrote before its place, n = %d", n);
        T loaded[LANES<T>];
        store(loaded, load_first<T>(p, n));
        for (int i = 0; i < LANES<T>; ++i)
            CHECK(loaded[i] == (i < n ? values[i] : T(0)), "load_first, n = %d, lane %d", n, i);
        memset(page.begin(), 1, page.size());
        std::uint8_t bytes[LANES<T>];
        store_bytes(bytes, load_bytes_first<T>(page.end() - n, n));
        for (int i = 0; i < LANES<T>; ++i)
            CHECK(bytes[i] == (i < n), "load_bytes_first, n = %d, lane %d", n, i);

        memset(page.begin(), 0x5a, page.size());
        store_first(page.begin() + 1, load<T>(values), n); // any alignment
        for (std::size_t i = 0; i < sizeof(Vec<T>); ++i) {
            const char wanted =
                i < static_cast<std::size_t>(n) * sizeof(T) ? reinterpret_cast<char*>(values)[i] : 0x5a;
            CHECK(page.begin()[1 + i] == wanted, "store_first unaligned, n = %d, byte %zu", n, i);
        }
    }
    char* whole = page.end() - sizeof(Vec<T>);
    store(whole, load<T>(values));
    store(page.begin() + 3, load<T>(whole));
    CHECK(memcmp(page.begin() + 3, values, sizeof values) == 0, "load and store, unaligned");
    stream(whole, broadcast<T>(T(5)));
    T streamed[LANES<T>];
    store(streamed, load<T>(whole));
    for (T x : streamed) CHECK(x == T(5), "stream");
    memset(whole, 1, sizeof(Vec<T>));
    CHECK(all(load_bytes<T>(page.end() - LANES<T>)), "load_bytes at the end");
    store_bytes(page.end() - LANES<T>, first<T>(0));
    CHECK(!any(load_bytes<T>(page.end() - LANES<T>)), "store_bytes at the end");
}

template <class T> void test_across() {
    Random random(2);
    for (int round = 0; round < 100; ++round) {
        T a[LANES<T>], b[LANES<T>];
        for (int i = 0; i < LANES<T>; ++i) {
            a[i] = T(random.between(-8, 8));
            b[i] = T(random.between(-8, 8));
        }
        double sum = 0, magnitude = 0;
        T largest = a[0];
        for (T x : a) {
            sum += double(x);
            magnitude += fabs(double(x));
            if (x > largest) largest = x;
        }
        const T got = reduce_add(load<T>(a));
        const double epsilon = SINGLE<T> ? 6e-8 : 1.2e-16;
        CHECK(fabs(double(got) - sum) <= 4 * epsilon * magnitude, "reduce_add: %.17g, not %.17g", double(got),
              sum);
        CHECK(reduce_max(load<T>(a)) == largest, "reduce_max: not %.17g", double(largest));

        T both_ways[2 * LANES<T>];
        Vec<T> x = load<T>(a), y = load<T>(b);
        interleave(x, y);
        store(both_ways, x);
        store(both_ways + LANES<T>, y);
        for (int i = 0; i < LANES<T>; ++i)
            CHECK(both_ways[2 * i] == a[i] && both_ways[2 * i + 1] == b[i], "interleave, %d", i);
        deinterleave(x, y);
        store(both_ways, x);
        store(both_ways + LANES<T>, y);
        for (int i = 0; i < LANES<T>; ++i)
            CHECK(both_ways[i] == a[i] && both_ways[LANES<T> + i] == b[i], "deinterleave, %d", i);
    }
    Vec<T> rows[LANES<T>];
    for (int i = 0; i < LANES<T>; ++i) rows[i] = iota<T>() + broadcast<T>(T(100 * i));
    transpose(rows);
    for (int i = 0; i < LANES<T>; ++i) {
        T row[LANES<T>];
        store(row, rows[i]);
        for (int j = 0; j < LANES<T>; ++j)
            CHECK(row[j] == T(100 * j + i), "transpose, row %d, column %d", i, j);
    }
}

template <class T> void test_contract() {
    test_arithmetic<T>();
    test_scale_exponent<T>();
    test_masks<T>();
    test_memory<T>();
    test_across<T>();
}

} // namespace

int test_simd() {
    test_contract<float>();
    test_contract<double>();
    return verdict();
}

} // namespace npattn::NPATTN_ISA
