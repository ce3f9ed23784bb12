// exp, exp2 and tanh of simd/math.hpp against long double, for one ISA: compiled once per ISA, run by
// test_isa_main.cpp.

#include "simd/math.hpp"

#include <math.h>

#include "check.hpp"

namespace npattn::NPATTN_ISA {
namespace {

template <class T> constexpr int LANES = Vec<T>::lanes;

template <class T>
constexpr T SMALLEST_NORMAL = sizeof(T) == 4 ? T(1.17549435e-38) : T(2.2250738585072014e-308);
template <class T>
constexpr T SMALLEST = sizeof(T) == 4 ? T(1.4e-45) : T(4.9e-324); // the step between denormal numbers

// The largest relative error of simd against exact on [low, high], printed and bounded. Results below the
// normal numbers may be off by one step more.
template <class T, class Simd>
void sweep(const char* name, Simd simd, long double (*exact)(long double), double low, double high,
           double bound) {
    Random random(3);
    long double worst = 0;
    T worst_at = 0;
    constexpr int samples = 100000;
    for (int k = 0; k < samples; k += LANES<T>) {
        T x[LANES<T>], got[LANES<T>];
        for (int i = 0; i < LANES<T>; ++i)
            x[i] = T(low + (high - low) * (k + i + random.uniform()) / samples);
        store(got, simd(load<T>(x)));
        for (int i = 0; i < LANES<T>; ++i) {
            const long double wanted = exact(x[i]);
            const long double error = fabsl(got[i] - wanted);
            if (fabsl(wanted) < SMALLEST_NORMAL<T>) {
                CHECK(error <= SMALLEST<T> + bound * fabsl(wanted), "%s(%.17g) = %.17g, not %.17Lg", name,
                      double(x[i]), double(got[i]), wanted);
            } else if (error > worst * fabsl(wanted)) {
                worst = error / fabsl(wanted);
                worst_at = x[i];
            }
        }
    }
    std::printf("%-5s %-6s [%g, %g]: largest relative error %.2Le at %.9g\n", name,
                sizeof(T) == 4 ? "float" : "double", low, high, worst, double(worst_at));
    CHECK(worst <= bound, "%s: the bound is %g", name, bound);
}

// simd(x) = wanted, NaN being equal to NaN, in every lane.
template <class T, class Simd> void check_at(const char* name, Simd simd, double x, double wanted) {
    T got[LANES<T>];
    store(got, simd(broadcast<T>(T(x))));
    for (T y : got)
        CHECK(y == T(wanted) || (wanted != wanted && y != y), "%s(%g) = %.17g, not %g", name, x, double(y),
              wanted);
}

template <class T> void test_functions() {
    const auto simd_exp2 = [](Vec<T> x) { return exp2(x); };
    const auto simd_exp = [](Vec<T> x) { return exp(x); };
    const auto simd_tanh = [](Vec<T> x) { return tanh(x); };
    constexpr bool single = sizeof(T) == 4;
    constexpr double infinity = __builtin_huge_val();
    const double nan = __builtin_nan("");

    // To below the smallest denormal and up to overflow.
    const double exponents = single ? 126 : 1022;
    const double digits = single ? 26 : 55;
    sweep<T>("exp2", simd_exp2, exp2l, -1, 1, single ? 2.5e-7 : 3e-16);
    sweep<T>("exp2", simd_exp2, exp2l, -exponents - digits, exponents + 1.9, single ? 2.5e-7 : 3e-16);
    sweep<T>("exp", simd_exp, expl, -1, 1, single ? 1.5e-7 : 3e-16);
    sweep<T>("exp", simd_exp, expl, (-exponents - digits) * 0.69, (exponents + 1.9) * 0.69,
             single ? 1.5e-7 : 3e-16);
    sweep<T>("tanh", simd_tanh, tanhl, -25, 25, single ? 3e-7 : 6e-16);
    sweep<T>("tanh", simd_tanh, tanhl, -1, 1, single ? 3e-7 : 6e-16);
    sweep<T>("tanh", simd_tanh, tanhl, -1e-3, 1e-3, single ? 3e-7 : 6e-16);

    for (int n = -int(exponents + digits); n <= int(exponents); ++n)
        check_at<T>("exp2", simd_exp2, n, double(exp2l(n)));
    for (double hidden : {-infinity, -1e30, -5000.}) {
        check_at<T>("exp2", simd_exp2, hidden, 0);
        check_at<T>("exp", simd_exp, hidden, 0);
    }
    for (double zero : {0., -0.}) {
        check_at<T>("exp2", simd_exp2, zero, 1);
        check_at<T>("exp", simd_exp, zero, 1);
        check_at<T>("tanh", simd_tanh, zero, 0);
    }
    check_at<T>("exp2", simd_exp2, 5000, infinity);
    check_at<T>("exp", simd_exp, 5000, infinity);
    check_at<T>("exp2", simd_exp2, nan, nan);
    check_at<T>("exp", simd_exp, nan, nan);
    check_at<T>("tanh", simd_tanh, nan, nan);
    for (double large : {25., 1e30, infinity}) {
        check_at<T>("tanh", simd_tanh, large, 1);
        check_at<T>("tanh", simd_tanh, -large, -1);
    }
}

} // namespace

int test_math() {
    test_functions<float>();
    test_functions<double>();
    return verdict();
}

} // namespace npattn::NPATTN_ISA
