// What follows a product: scales, a bias and an activation, of float32.
//
// Included after the shared structs.
#pragma once

#include "elements.h"

enum class Activation { none, relu, gelu, silu };

struct INT32 {
  static constexpr int kBytes = 4;
};

template <Activation kActivation>
__device__ inline float activated(float x) {
  constexpr float kLog2e = 1.44269504f;
  if constexpr (kActivation == Activation::relu) return __builtin_fmaxf(x, 0);
  if constexpr (kActivation == Activation::silu)
    return x * __builtin_amdgcn_rcpf(1 + __builtin_amdgcn_exp2f(-x * kLog2e));
  if constexpr (kActivation == Activation::gelu) {
    // erf by Abramowitz and Stegun, 7.1.26.
    const float z = __builtin_fabsf(x) * 0.707106781f;
    const float t = __builtin_amdgcn_rcpf(1 + 0.3275911f * z);
    const float series =
        t * (0.254829592f +
             t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    const float erf = 1 - series * __builtin_amdgcn_exp2f(-z * z * kLog2e);
    return 0.5f * x * (1 + __builtin_copysignf(erf, x));
  }
  return x;
}

__device__ inline float number(const Vector& of, long batch, long i) {
  return static_cast<Global<const float>>(of.at)[batch * of.batch + i * of.stride];
}
