#pragma once
// exp, exp2 and tanh on the SIMD contract, once for every ISA. Polynomials are minimax fits with constant
// term 1, so that exp(0) = 1 exactly; all are evaluated by Horner's rule.

#include "simd/contract.hpp"

namespace npattn::NPATTN_ISA {
namespace {

template <class T> struct Constants;
template <> struct Constants<float> {
    static constexpr float infinity = __builtin_huge_valf();
    static constexpr float largest = 3.40282347e38f;
    static constexpr float exp_is_zero = -110.f; // e^x rounds to 0 from here down
    static constexpr float log2_e = 1.44269504f;
    static constexpr float ln2_high = 0.693145751953125f, ln2_low = 1.42860682e-6f; // n * ln2_high is exact
    // 2^x on [-0.5, 0.5]; relative error 1.1e-7.
    static constexpr float exp2[] = {1.f,           0.693147004f,   0.240222424f,
                                     0.0555073358f, 0.00967151299f, 0.00132647296f};
    static constexpr float exp2_rough[] = {1.f, 0.69511679f, 0.22764499f, 0.07706704f}; // on [0, 1); 8.6e-5
    // e^x on [-ln(2)/2, ln(2)/2]; relative error 2.6e-9.
    static constexpr float exp[] = {1.f,           1.00000005f,    0.500000043f,  0.166663654f,
                                    0.0416647773f, 0.00837901113f, 0.00140612399f};
};
template <> struct Constants<double> {
    static constexpr double infinity = __builtin_huge_val();
    static constexpr double largest = 1.7976931348623157e308;
    static constexpr double exp_is_zero = -750.0;
    static constexpr double log2_e = 1.4426950408889634;
    static constexpr double ln2_high = 0.6931471803691238, ln2_low = 1.9082149292705877e-10;
    // Relative error 1.8e-17 each.
    static constexpr double exp2[] = {1.0,
                                      0.6931471805599457,
                                      0.24022650695910097,
                                      0.05550410866479039,
                                      0.009618129107607003,
                                      0.001333355815343997,
                                      0.0001540353044157185,
                                      1.5252727385189775e-05,
                                      1.3215442675452854e-06,
                                      1.0180647660573069e-07,
                                      7.072570394540799e-09,
                                      4.0780717860928705e-10};
    // 2^x on [-1/32, 1/32], less 1 and divided by x; relative error of 2^x 1.4e-17. And 2^(j / 16).
    static constexpr double exp2_near[] = {0.6931471805599457,    0.24022650695910075,
                                           0.0555041086566393,    0.009618129106919537,
                                           0.0013333781576784268, 0.00015403723980749256};
    alignas(64) static constexpr double roots[16] = {1.0,
                                                     1.0442737824274138,
                                                     1.0905077326652577,
                                                     1.1387886347566916,
                                                     1.189207115002721,
                                                     1.241857812073484,
                                                     1.2968395546510096,
                                                     1.3542555469368927,
                                                     1.4142135623730951,
                                                     1.4768261459394993,
                                                     1.5422108254079407,
                                                     1.6104903319492543,
                                                     1.681792830507429,
                                                     1.7562521603732995,
                                                     1.8340080864093424,
                                                     1.9152065613971474};
    static constexpr double exp[] = {1.0,
                                     1.0,
                                     0.5,
                                     0.16666666666666713,
                                     0.04166666666666703,
                                     0.008333333333304143,
                                     0.0013888888888699742,
                                     0.00019841269920340513,
                                     2.4801587701822085e-05,
                                     2.755721504477523e-06,
                                     2.755694117046369e-07,
                                     2.511804748956835e-08,
                                     2.102050023902511e-09};
};

// coefficients[0] + coefficients[1] x + ...
template <class T, int N> NPATTN_INLINE Vec<T> horner(const T (&coefficients)[N], Vec<T> x) {
    Vec<T> result = broadcast<T>(coefficients[N - 1]);
    for (int i = N - 2; i >= 0; --i) result = fma(result, x, broadcast<T>(coefficients[i]));
    return result;
}

// 2^x; exp2(-inf) = 0, exp2(NaN) = NaN; exp2(inf) is unspecified, no kernel asks for it.
template <class T> NPATTN_INLINE Vec<T> exp2(Vec<T> x) {
    const Vec<T> n = round(x);
    return scale_exponent(horner(Constants<T>::exp2, x - n), n);
}

#ifdef NPATTN_LOOKUP
// 2^x = 2^floor(n) 2^(n - floor(n)) 2^(x - n), n a multiple of 1/16: 13 operations instead of 15. Adding 1.5 * 2^48
// rounds to n and leaves 16 (n - floor(n)) in the lowest bits.
template <> NPATTN_INLINE Vec<double> exp2<double>(Vec<double> x) {
    const Vec<double> magic = broadcast<double>(0x1.8p48);
    const Vec<double> shifted = x + magic;
    const Vec<double> n = shifted - magic;
    const Vec<double> r = x - n;
    const Vec<double> root = lookup(Constants<double>::roots, shifted);
    return scale_by_floor(fma(root, r * horner(Constants<double>::exp2_near, r), root), n);
}
#endif

#ifdef NPATTN_DOT
// The same for what is rounded to bfloat16 next: relative error 8.6e-5.
NPATTN_INLINE Vec<float> exp2_rough(Vec<float> x) {
    return scale_by_floor(horner(Constants<float>::exp2_rough, fraction(x)), x);
}
#endif

// x = n ln(2) + r, |r| <= ln(2) / 2, with r exact to the last bits.
template <class T> NPATTN_INLINE Vec<T> reduce_by_ln2(Vec<T> x, Vec<T>& n) {
    n = round(x * broadcast<T>(Constants<T>::log2_e));
    return fnma(n, broadcast<T>(Constants<T>::ln2_low), fnma(n, broadcast<T>(Constants<T>::ln2_high), x));
}

// e^x within about one unit in the last place; exp(-inf) = 0, exp(NaN) = NaN.
template <class T> NPATTN_INLINE Vec<T> exp(Vec<T> x) {
    Vec<T> n;
    const Vec<T> r = reduce_by_ln2(max(broadcast<T>(Constants<T>::exp_is_zero), x), n);
    return scale_exponent(horner(Constants<T>::exp, r), n);
}

// tanh(x) = m / (m + 2), m = e^(2x) - 1 without cancellation; accurate relative to the result for small x
// too.
template <class T> NPATTN_INLINE Vec<T> tanh(Vec<T> x) {
    const Vec<T> bound = broadcast<T>(T(20)); // tanh(20) rounds to 1
    const Vec<T> doubled = max(broadcast<T>(T(-2)) * bound, min(bound + bound, x + x));
    Vec<T> n;
    const Vec<T> r = reduce_by_ln2(doubled, n);
    constexpr int terms = sizeof(Constants<T>::exp) / sizeof(T);
    Vec<T> series = broadcast<T>(Constants<T>::exp[terms - 1]);
    for (int i = terms - 2; i >= 1; --i) series = fma(series, r, broadcast<T>(Constants<T>::exp[i]));
    const Vec<T> power = scale_exponent(broadcast<T>(T(1)), n);
    const Vec<T> m = fma(power, series * r, power - broadcast<T>(T(1)));
    return m / (m + broadcast<T>(T(2)));
}

} // namespace
} // namespace npattn::NPATTN_ISA
