// Half-precision operations that are not one rounded operation of floats.
#pragma once

#include "decode/signature.h"

namespace emulator {

inline f16 lower_half(f16x2 pair) { return f16::from_bits(static_cast<u16>(pair.bits)); }
inline f16 upper_half(f16x2 pair) { return f16::from_bits(static_cast<u16>(pair.bits >> 16)); }

// The rounded sum with its last bit set where the exact one lies beside it: rounding that once
// more, to fewer bits, gives the exact sum rounded once. Needs the host to round to nearest.
inline f64 sum_to_odd(f64 a, f64 b) {
  const f64 sum = a + b;
  const f64 b_part = sum - a;
  const f64 error = (a - (sum - b_part)) + (b - b_part);
  u64 bits = bit_cast<u64>(sum);
  const bool exact = !(error != 0.0) | (sum - sum != 0.0);
  const u64 toward_zero = bits - ((error > 0.0) != (sum > 0.0));
  bits = exact ? bits : toward_zero | 1;
  return bit_cast<f64>(bits);
}

// To float, where what is lost sets the last bit.
inline f32 float_to_odd(f64 value) {
  constexpr u64 kLost = (u64{1} << 29) - 1;
  const u64 bits = bit_cast<u64>(value);
  const u64 odd = (bits & ~kLost) | (bits & kLost ? kLost + 1 : 0);
  return static_cast<f32>(bit_cast<f64>(odd));
}

// Rounded once. In the other rounding modes, rounding twice in one direction is rounding once.
inline f16 fma(f16 a, f16 b, f16 c, Mode mode) {
  const f64 product = static_cast<f64>(f32(a)) * f32(b);
  const f32 odd = float_to_odd(sum_to_odd(product, f32(c)));
  const f32 directed = static_cast<f32>(product + f32(c));
  return mode.rounds_halves_and_doubles_to_nearest() ? odd : directed;
}

inline f16 flush_denormal(f16 value) {
  return f16::from_bits(static_cast<u16>(value.bits & (value.bits & 0x7c00 ? 0xffff : 0x8000)));
}

// ---- Dot products of two halves -----------------------------------------------------------------
// They ignore MODE. Of v_dot2_f32_f16 and v_dot2c_f32_f16 LLVM says that float32 denormals of the
// addend and of the result become +0 always (SITargetLowering::performFMACombine, and pull request
// 205101 of llvm-project). gfx1100, whose dot products AMD measured for its emulator rocjitsu, does
// the same, gives +0 for -0 too, takes denormal bf16 for zeros but not denormal f16, and rounds to
// nearest.
//
// The order of the terms is that of the documents. How often CDNA rounds is not published; here
// each sum is rounded, and the products are exact, as in the chain of FMAs that LLVM folds.

inline f32 normal_or_positive_zero(f32 value) {
  return bit_cast<f32>(bit_cast<u32>(value) & 0x7f800000u ? bit_cast<u32>(value) : 0u);
}
inline f32 factor(f16 half) { return half; }
inline f32 factor(bf16 half) { return normal_or_positive_zero(half); }

template <class Half>
inline f32 dot2_onto_addend(Half a, Half b, Half c, Half d, u32 addend_bits) {
  const f32 addend = normal_or_positive_zero(bit_cast<f32>(addend_bits));
  const f32 first = __builtin_fmaf(factor(a), factor(c), addend);
  return normal_or_positive_zero(__builtin_fmaf(factor(b), factor(d), first));
}
template <class Half>
inline f32 dot2_before_addend(Half a, Half b, Half c, Half d, u32 addend_bits) {
  const f32 addend = normal_or_positive_zero(bit_cast<f32>(addend_bits));
  const f32 products = __builtin_fmaf(factor(b), factor(d), factor(a) * factor(c));
  return normal_or_positive_zero(products + addend);
}

// v_mad_f16, v_mac_f16: the product is rounded too, and denormals are zeros whatever MODE says.
inline f16 multiply_add(f16 a, f16 b, f16 c) {
  const f16 product = flush_denormal(f16(f32(flush_denormal(a)) * f32(flush_denormal(b))));
  return flush_denormal(f16(f32(product) + f32(flush_denormal(c))));
}

}  // namespace emulator
