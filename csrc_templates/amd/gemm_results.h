// What follows a product: scales, a bias and an activation, of float32.
//
// Included after the shared structs.
#pragma once

#include "elements.h"

enum class Activation { none, relu, gelu, silu };

struct INT32 {
  static constexpr int kBytes = 4;
};

__device__ inline float power_of_two(float x) { return __builtin_amdgcn_exp2f(x); }
__device__ inline f32x2 power_of_two(f32x2 x) { return {power_of_two(x.x), power_of_two(x.y)}; }
__device__ inline float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }
__device__ inline f32x2 reciprocal(f32x2 x) { return {reciprocal(x.x), reciprocal(x.y)}; }

// Of one number, or of two.
template <Activation kActivation, class X>
__device__ inline X activated(X x) {
  constexpr float kLog2e = 1.44269504f;
  if constexpr (kActivation == Activation::relu) return x < 0 ? X(0) : x;
  if constexpr (kActivation == Activation::silu)
    return x * reciprocal(1 + power_of_two(x * -kLog2e));
  if constexpr (kActivation == Activation::gelu) {
    // x Phi(x) = max(x, 0) - z Phi(-z), with z = |x|. The binary logarithm of Phi(-z) is a
    // polynomial on [0, 6], fitted so that z Phi(-z) is at most 1e-7 off; beyond it is less.
    const X size = __builtin_elementwise_abs(x), z = __builtin_elementwise_min(size, X(6));
    const X logarithm =
        -0.999993086f +
        z * (-1.15120173f +
             z * (-0.45877099f +
                  z * (-0.0534120984f +
                       z * (0.00808071345f + z * (-0.000769218721f + z * 3.30926882e-05f)))));
    return 0.5f * x + 0.5f * size - z * power_of_two(logarithm);
  }
  return x;
}

__device__ inline float number(const Vector& of, long batch, long i) {
  return static_cast<Global<const float>>(of.at)[batch * of.batch + i * of.stride];
}
