// Powers of two of whole vectors.
#pragma once

#include "elements.h"

namespace {

// The sum of coefficients[i] * x^i.
template <int kCount>
inline Vec polynomial(const float (&coefficients)[kCount], Vec x) {
  Vec sum = simd::broadcast(coefficients[kCount - 1]);
#pragma GCC unroll 8
  for (int i = kCount - 2; i >= 0; --i)
    sum = simd::mul_add(sum, x, simd::broadcast(coefficients[i]));
  return sum;
}

// 2^x to the accuracy the dtype deserves: within 1.1e-7 for fp32, 3e-6 for the 16-bit ones, and for
// what is rounded to bf16, by up to 2^-9, with degree 3 within 8.6e-5. Zero far below the normal
// numbers, and at -inf.
template <int kDegree = Dtype::kExpDegree>
inline Vec exp2(Vec x) {
  // Minimax in relative error for 2^f, |f| <= 1/2, under the condition that 2^0 = 1: the factor for
  // a maximum that stays the same is applied once per key tile, and must not change anything.
  static constexpr float kDegree4[] = {1.0f, 0.693124175f, 0.240240991f, 0.0559064262f,
                                       0.00958285294f};
  static constexpr float kDegree5[] = {1.0f,          0.693147004f,   0.240222424f,
                                       0.0555073358f, 0.00967151299f, 0.00132647273f};

#if defined(JITFMHA_FLOORS)
  if (kDegree < 5) {
    // The same for 0 <= f <= 1.
    static constexpr float kDegree3AboveFloor[] = {1.0f, 0.695116639f, 0.22764498f, 0.0770672411f};
    static constexpr float kDegree4AboveFloor[] = {1.0f, 0.693044841f, 0.241280198f, 0.0522424728f,
                                                   0.0134266848f};
    const Vec fraction = simd::above_floor(x);
    const Vec power = kDegree == 3 ? polynomial(kDegree3AboveFloor, fraction)
                                   : polynomial(kDegree4AboveFloor, fraction);
    return simd::scale_by_floor(power, x);
  }
#endif

  const Vec clamped = simd::clamp_exponent(x);
  const Vec whole = simd::round_exponent(clamped);
  const Vec fraction = simd::sub(clamped, whole);
  const Vec power = kDegree == 5 ? polynomial(kDegree5, fraction) : polynomial(kDegree4, fraction);
  return simd::scale_exponent(power, whole);
}

}  // namespace
