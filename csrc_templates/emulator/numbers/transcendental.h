// Base-2 exponential and logarithm, sine and cosine of full turns, in binary32: within 1 ulp, free
// of branches and of libm calls, so that loops over lanes become vector code. Polynomials: minimax
// fits of relative error, the first coefficients rounded first. The host rounds to nearest.
#pragma once

#include "numbers/numeric_types.h"

namespace emulator {

// a * b + c, fused where the host has the instruction, else as good as fused.
inline f32 mul_add(f32 a, f32 b, f32 c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return static_cast<f32>(static_cast<f64>(a) * b + c);
#endif
}

// Denormals as zeros of their sign.
inline f32 flush_denormal(f32 value) {
  const u32 bits = bit_cast<u32>(value);
  return bit_cast<f32>(bits & (bits & 0x7f800000u ? ~0u : 0x80000000u));
}

// The NaN that operations without a result give, on every host.
constexpr u32 kInvalid = 0xffc00000u;

// 2^x. Denormal results are zeros.
inline f32 exp2_of(f32 x) {
  // Beyond these the result is infinity or zero anyway; NaN passes through.
  const f32 low = x < -150.0f ? -150.0f : x;
  const f32 bounded = low > 150.0f ? 150.0f : low;
  const f32 whole = __builtin_nearbyintf(bounded);
  const f32 rest = bounded - whole;
  f32 p = 0x1.417a9cp-13f;
  p = mul_add(p, rest, 0x1.5f0948p-10f);
  p = mul_add(p, rest, 0x1.3b2dd2p-7f);
  p = mul_add(p, rest, 0x1.c6af7ap-5f);
  p = mul_add(p, rest, 0x1.ebfbdcp-3f);
  p = mul_add(p, rest, 0x1.62e43p-1f);
  const f32 mantissa = mul_add(p, rest, 1.0f);  // 0.7 to 1.42
  const i32 exponent = static_cast<i32>(x == x ? whole : 0.0f);
  // In two steps, of which the first cannot overflow and gives no denormal.
  const i32 half = exponent >> 1;
  const f32 scaled = mantissa * bit_cast<f32>(static_cast<u32>(127 + half) << 23);
  return flush_denormal(scaled * bit_cast<f32>(static_cast<u32>(127 + exponent - half) << 23));
}

// log2(x). Denormals count as zeros.
inline f32 log2_of(f32 x) {
  const u32 bits = bit_cast<u32>(x);
  // x = 2^exponent * (1 + f), 1 + f from sqrt(1/2) to sqrt(2).
  constexpr u32 kSqrtHalf = 0x3f3504f3u;
  const i32 exponent = static_cast<i32>(bits - kSqrtHalf) >> 23;
  const f32 f = bit_cast<f32>(bits - (static_cast<u32>(exponent) << 23)) - 1.0f;
  f32 p = -0x1.c3a1b8p-4f;
  p = mul_add(p, f, 0x1.7f1fcap-3f);
  p = mul_add(p, f, -0x1.87f2eep-3f);
  p = mul_add(p, f, 0x1.a2caaap-3f);
  p = mul_add(p, f, -0x1.eaa2dcp-3f);
  p = mul_add(p, f, 0x1.277f42p-2f);
  p = mul_add(p, f, -0x1.715afcp-2f);
  p = mul_add(p, f, 0x1.ec7094p-2f);
  p = mul_add(p, f, -0x1.71547p-1f);
  // f / ln 2 has two parts: its rounding would be seen near 1.
  const f32 tail = mul_add(f * f, p, f * 0x1.4ae0cp-26f);
  const f32 fraction = mul_add(f, 0x1.715476p+0f, tail);
  const f32 finite = static_cast<f32>(exponent) + fraction;
  const u32 magnitude = bits & 0x7fffffffu;
  u32 result = bit_cast<u32>(finite);
  result = bits == 0x7f800000u ? bits : result;
  result = bits >> 31 ? kInvalid : result;
  result = magnitude < (1u << 23) ? 0xff800000u : result;
  result = magnitude > 0x7f800000u ? bits | 0x400000u : result;
  return bit_cast<f32>(result);
}

// sin(2 pi x) for x from 0 to 1/4. In doubles: near 1 every rounding of a float would be seen.
inline f32 sine_of_quarter(f64 x) {
  const f64 square = x * x;
  f64 p = -0x1.bb7504p+3;
  p = p * square + 0x1.4f6aaap+5;
  p = p * square - 0x1.32ccaap+6;
  p = p * square + 0x1.466ba8p+6;
  p = p * square - 0x1.4abbcep+5;
  return static_cast<f32>(x * (p * square + 0x1.921fb54442d18p+2));
}

// sin(2 pi x) and cos(2 pi x). Denormals are zeros.
inline f32 sine_of_turns(f32 turns) {
  const f32 x = flush_denormal(turns);
  const f32 rest = x - __builtin_nearbyintf(x);  // exact; NaN for infinity
  const f32 distance = bit_cast<f32>(bit_cast<u32>(rest) & 0x7fffffffu);
  const f32 folded = distance > 0.25f ? 0.5f - distance : distance;
  const u32 sine = bit_cast<u32>(sine_of_quarter(folded)) | (bit_cast<u32>(rest) & 0x80000000u);
  const u32 magnitude = bit_cast<u32>(x) & 0x7fffffffu;
  u32 result = magnitude == 0x7f800000u ? kInvalid : sine;
  result = magnitude == 0 ? bit_cast<u32>(x) : result;  // of other whole turns it is +0
  result = magnitude > 0x7f800000u ? bit_cast<u32>(x) | 0x400000u : result;
  return flush_denormal(bit_cast<f32>(result));
}
inline f32 cosine_of_turns(f32 turns) {
  const f32 x = flush_denormal(turns);
  const f64 rest = x - __builtin_nearbyintf(x);
  const f64 from_zero = 0.25 - (rest < 0.0 ? -rest : rest);  // of the cosine
  const f32 size = sine_of_quarter(from_zero < 0.0 ? -from_zero : from_zero);
  const u32 cosine = bit_cast<u32>(from_zero < 0.0 ? -size : size);
  const u32 magnitude = bit_cast<u32>(x) & 0x7fffffffu;
  u32 result = magnitude == 0x7f800000u ? kInvalid : cosine;
  result = magnitude > 0x7f800000u ? bit_cast<u32>(x) | 0x400000u : result;
  return bit_cast<f32>(result);
}

// 1/x, 1/sqrt(x), sqrt(x), with denormals as zeros, in and out.
inline f32 reciprocal(f32 x) { return flush_denormal(1.0f / flush_denormal(x)); }
inline f32 square_root(f32 value) {
  const f32 x = flush_denormal(value);
  const f32 root = __builtin_sqrtf(x);
  return x < 0.0f ? bit_cast<f32>(kInvalid) : root;
}
inline f32 reciprocal_root(f32 value) {
  const f32 x = flush_denormal(value);
  const f32 root = 1.0f / __builtin_sqrtf(x);  // rounded twice
  const f64 estimate = root;
  const f64 error = 1.0 - estimate * estimate * static_cast<f64>(x);
  const f32 corrected = static_cast<f32>(estimate + 0.5 * estimate * error);
  const f32 result = x > 0.0f && x < __builtin_inff() ? corrected : root;
  return x < 0.0f ? bit_cast<f32>(kInvalid) : result;
}

}  // namespace emulator
