// Minimum, maximum and median of floating-point numbers, and their classes: what vector
// instructions do with NaN and with the two zeros. The ISA documents: V_MIN_F32, V_MAX_F32,
// V_MED3_F32, V_CMP_CLASS_F32.
#pragma once

#include <limits>
#include <type_traits>

#include "decode/signature.h"

namespace emulator {

template <class T> struct FloatFormat;
template <> struct FloatFormat<f16> {
  using Bits = u16;
  static constexpr Bits kSign = 0x8000, kInfinity = 0x7c00, kQuiet = 0x0200;
};
template <> struct FloatFormat<f32> {
  using Bits = u32;
  static constexpr Bits kSign = 0x80000000, kInfinity = 0x7f800000, kQuiet = 0x00400000;
};
template <> struct FloatFormat<f64> {
  using Bits = u64;
  static constexpr Bits kSign = u64{1} << 63, kInfinity = u64{0x7ff} << 52, kQuiet = u64{1} << 51;
};

template <class T>
inline typename FloatFormat<T>::Bits float_bits(T value) {
  return bit_cast<typename FloatFormat<T>::Bits>(value);
}

// The field of the exponent.
template <class T>
inline i32 biased_exponent(T value) {
  constexpr u32 kMantissaBits = sizeof(T) == 8 ? 52 : sizeof(T) == 4 ? 23 : 10;
  return static_cast<i32>((float_bits(value) & FloatFormat<T>::kInfinity) >> kMantissaBits);
}

template <class T>
inline bool is_nan(T value) {
  using Format = FloatFormat<T>;
  return static_cast<typename Format::Bits>(float_bits(value) & ~Format::kSign) > Format::kInfinity;
}

template <class T>
inline bool is_signaling_nan(T value) {
  return is_nan(value) && !(float_bits(value) & FloatFormat<T>::kQuiet);
}

template <class T>
inline T quiet(T nan) {
  using Format = FloatFormat<T>;
  return bit_cast<T>(static_cast<typename Format::Bits>(float_bits(nan) | Format::kQuiet));
}

// [-1, 1] or [0, 1] to the whole range, rounded as the host does; NaN gives 0. Exact in doubles.
template <class To>
inline To normalized(f32 value) {
  constexpr f32 kLowest = std::is_signed_v<To> ? -1.0f : 0.0f;
  const f32 number = value == value ? value : 0.0f;
  const f32 not_below = number > kLowest ? number : kLowest;
  const f64 bounded = not_below < 1.0f ? not_below : 1.0f;
  return static_cast<To>(
      static_cast<i32>(__builtin_nearbyint(bounded * std::numeric_limits<To>::max())));
}

// Numbers as integers in the order of the numbers, -0 below +0.
inline i32 order_key(f16 value) {
  const i32 bits = static_cast<i16>(value.bits);
  return bits ^ (bits >> 31 & 0x7fff);
}
inline i32 order_key(f32 value) {
  const i32 bits = bit_cast<i32>(value);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
inline i64 order_key(f64 value) {
  const i64 bits = bit_cast<i64>(value);
  return bits ^ (bits >> 63 & 0x7fffffffffffffff);
}

// A number wins against a NaN. In IEEE mode a signaling NaN wins, and becomes quiet. Integer
// comparisons of one width, so that loops over lanes become vector code.
template <class T>
inline T settle_nan(T ordered, T first, T second, Mode mode) {
  using Format = FloatFormat<T>;
  using Word = std::conditional_t<sizeof(T) == 8, u64, u32>;
  constexpr Word kMagnitude = Format::kSign - 1, kInfinity = Format::kInfinity,
                 kQuiet = Format::kQuiet;
  const Word a = float_bits(first), b = float_bits(second);
  // Outside of IEEE mode all NaN count as quiet ones.
  const Word quiet_anyway = mode.ieee() ? 0 : kQuiet;
  const Word a_beyond = ((a | quiet_anyway) & kMagnitude) - kInfinity - 1;
  const Word b_beyond = ((b | quiet_anyway) & kMagnitude) - kInfinity - 1;
  Word result = float_bits(ordered);
  result = (b & kMagnitude) > kInfinity ? a : result;
  result = (a & kMagnitude) > kInfinity ? b : result;
  // Signaling NaN lie between infinity and the first quiet one.
  result = b_beyond < kQuiet - 1 ? b | kQuiet : result;
  result = a_beyond < kQuiet - 1 ? a | kQuiet : result;
  return bit_cast<T>(static_cast<typename Format::Bits>(result));
}

template <class T>
inline T minimum(T a, T b, Mode mode) {
  return settle_nan(order_key(a) < order_key(b) ? a : b, a, b, mode);
}
template <class T>
inline T maximum(T a, T b, Mode mode) {
  return settle_nan(order_key(a) > order_key(b) ? a : b, a, b, mode);
}

template <class T>
inline T minimum3(T a, T b, T c, Mode mode) {
  return minimum(minimum(a, b, mode), c, mode);
}
template <class T>
inline T maximum3(T a, T b, T c, Mode mode) {
  return maximum(maximum(a, b, mode), c, mode);
}

template <class T>
inline T median(T a, T b, T c, Mode mode) {
  const T largest = maximum3(a, b, c, mode);
  T result = maximum(a, b, mode);
  result = largest == b ? maximum(a, c, mode) : result;
  result = largest == a ? maximum(b, c, mode) : result;
  const T without_nan = minimum3(a, b, c, mode);
  result = is_nan(a) ? without_nan : result;
  result = is_nan(b) ? without_nan : result;
  return is_nan(c) ? without_nan : result;
}

// IEEE 754-2019's minimum and maximum: a NaN wins.
template <class T>
inline T minimum_or_nan(T a, T b) {
  const T number = order_key(a) < order_key(b) ? a : b;
  return is_nan(a) ? quiet(a) : is_nan(b) ? quiet(b) : number;
}
template <class T>
inline T maximum_or_nan(T a, T b) {
  const T number = order_key(a) > order_key(b) ? a : b;
  return is_nan(a) ? quiet(a) : is_nan(b) ? quiet(b) : number;
}

// The bit that v_cmp_class asks for: 0 signaling, 1 quiet NaN; 2 -infinity, 3 -normal, 4 -denormal,
// 5 -0, 6 +0, 7 +denormal, 8 +normal, 9 +infinity.
template <class T>
inline u32 float_class_bit(T value) {
  using Format = FloatFormat<T>;
  const bool negative = float_bits(value) & Format::kSign;
  const auto magnitude = static_cast<typename Format::Bits>(float_bits(value) & ~Format::kSign);
  const u32 rank = magnitude == 0                         ? 0
                   : (magnitude & Format::kInfinity) == 0 ? 1
                   : magnitude < Format::kInfinity        ? 2
                                                          : 3;
  const u32 number = negative ? 5 - rank : 6 + rank;
  return is_nan(value) ? (is_signaling_nan(value) ? 0 : 1) : number;
}

}  // namespace emulator
