// Vectors of 4 floats for AArch64.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace simd {

using Vec = float32x4_t;
constexpr int kLanes = 4;

// 16 of the 32 registers are accumulators.
constexpr int kBlockRows = 8;
constexpr int kBlockVectors = 2;

inline Vec load(const float* from) { return vld1q_f32(from); }
inline void store(float* to, Vec a) { vst1q_f32(to, a); }
inline Vec broadcast(float a) { return vdupq_n_f32(a); }
inline Vec mul_add(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }

inline Vec max(Vec a, Vec b) { return vmaxnmq_f32(a, b); }
inline Vec min(Vec a, Vec b) { return vminnmq_f32(a, b); }

inline Vec select_between(Vec low, Vec x, Vec high, Vec a, Vec b) {
  return vbslq_f32(vandq_u32(vcleq_f32(low, x), vcleq_f32(x, high)), a, b);
}

inline Vec clamp(Vec x, float limit) {
  return vmaxq_f32(vminq_f32(x, vdupq_n_f32(limit)), vdupq_n_f32(-limit));
}
inline Vec abs(Vec a) { return vabsq_f32(a); }
inline Vec divide(Vec a, Vec b) { return vdivq_f32(a, b); }
inline Vec divide_roughly(Vec a, Vec b) { return divide(a, b); }

using Bits = uint32x4_t;
inline Bits load_bits(const uint32_t* from) { return vld1q_u32(from); }
inline Bits broadcast_bits(uint32_t a) { return vdupq_n_u32(a); }
inline Bits exclusive_or(Bits a, Bits b, uint32_t c) {
  return veorq_u32(veorq_u32(a, b), vdupq_n_u32(c));
}

using Factors = Bits;
inline Factors spread(Bits a) { return a; }
inline Bits gather(Factors a) { return a; }
inline void multiply_wide(Bits a, uint32_t b, Bits& high, Bits& low) {
  const Bits first = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(a), b));
  const Bits last = vreinterpretq_u32_u64(vmull_n_u32(vget_high_u32(a), b));
  high = vuzp2q_u32(first, last);
  low = vuzp1q_u32(first, last);
}
inline Bits subtract_bytes(Bits a, uint8_t b) {
  return vreinterpretq_u32_u8(vqsubq_u8(vreinterpretq_u8_u32(a), vdupq_n_u8(b)));
}
inline Vec where_zero(Bits bits, uint32_t mask, Vec a) {
  const uint32x4_t is_set = vtstq_u32(bits, vdupq_n_u32(mask));
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a), is_set));
}

constexpr float kLeastExponent = -127.0f;
inline Vec clamp_exponent(Vec x) { return vmaxq_f32(x, vdupq_n_f32(kLeastExponent)); }
inline Vec round_exponent(Vec x) { return vrndnq_f32(x); }
inline Vec scale_exponent(Vec a, Vec whole) {
  const int32x4_t biased = vaddq_s32(vcvtnq_s32_f32(whole), vdupq_n_s32(127));
  return vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32(biased, 23)));
}

inline void transpose(Vec (&rows)[kLanes]) {
  const Vec even_01 = vtrn1q_f32(rows[0], rows[1]), odd_01 = vtrn2q_f32(rows[0], rows[1]);
  const Vec even_23 = vtrn1q_f32(rows[2], rows[3]), odd_23 = vtrn2q_f32(rows[2], rows[3]);
  rows[0] = vcombine_f32(vget_low_f32(even_01), vget_low_f32(even_23));
  rows[1] = vcombine_f32(vget_low_f32(odd_01), vget_low_f32(odd_23));
  rows[2] = vcombine_f32(vget_high_f32(even_01), vget_high_f32(even_23));
  rows[3] = vcombine_f32(vget_high_f32(odd_01), vget_high_f32(odd_23));
}
inline Vec sum_rows(const Vec (&rows)[kLanes]) {
  return vpaddq_f32(vpaddq_f32(rows[0], rows[1]), vpaddq_f32(rows[2], rows[3]));
}
inline float largest_lane(Vec a) { return vmaxvq_f32(a); }
inline float sum_lanes(Vec a) { return vaddvq_f32(a); }
inline void load_transposed(const void* const (&rows)[kLanes], Vec (&block)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) block[i] = load(static_cast<const float*>(rows[i]));
  transpose(block);
}

inline Vec load_fp16(const uint16_t* from) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}
inline void store_fp16(uint16_t* to, Vec a) { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(a))); }

inline Vec load_bytes(const uint8_t* from) {
  return Vec{0.0f + from[0], 0.0f + from[1], 0.0f + from[2], 0.0f + from[3]};
}

inline Vec first_bf16(Vec pairs) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(pairs), 16));
}
inline Vec second_bf16(Vec pairs) {
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(pairs), vdupq_n_u32(0xffff0000u)));
}

inline Vec load_bf16(const uint16_t* from) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from), 16));
}
inline void store_bf16(uint16_t* to, Vec a) {
  const uint32x4_t bits = vreinterpretq_u32_f32(a);
  const uint32x4_t last_kept = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(last_kept, vdupq_n_u32(0x7fff)));
  const uint32x4_t is_number = vceqq_f32(a, a);
  vst1_u16(to, vshrn_n_u32(vbslq_u32(is_number, rounded, vdupq_n_u32(0x7fc00000)), 16));
}

}  // namespace simd
