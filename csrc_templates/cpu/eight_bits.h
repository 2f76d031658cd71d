// Rounding to the results' dtype where it has 8 bits.
#pragma once

#include "elements.h"

namespace {

// The largest number of the results' dtype.
constexpr float kLargest = std::is_same<OutDtype, int8>::value           ? 127.0f
                           : std::is_same<OutDtype, fp8_e4m3fn>::value   ? 448.0f
                           : std::is_same<OutDtype, fp8_e4m3fnuz>::value ? 240.0f
                                                                         : 0.0f;

// To nearest even; what is beyond kLargest becomes that.
inline uint8_t to_fp8(float number) {
  constexpr bool kIsFnuz = std::is_same<OutDtype, fp8_e4m3fnuz>::value;
  constexpr int kBias = kIsFnuz ? 8 : 7;
  const float magnitude = min(__builtin_fabsf(number), kLargest);
  uint32_t bits, sign;
  std::memcpy(&bits, &magnitude, sizeof(bits));
  std::memcpy(&sign, &number, sizeof(sign));
  // Normal ones: round the 20 bits that go, and move the bias of the exponent.
  const uint32_t normal = (bits + 0x7ffff + (bits >> 20 & 1) - (uint32_t(127 - kBias) << 23)) >> 20;
  // Subnormal ones are multiples of 2^(-2 - kBias), as floats between kOnes and 2 kOnes are.
  constexpr float kOnes = float(1 << (21 - kBias));
  const float rounded = magnitude + kOnes;
  uint32_t subnormal, ones;
  std::memcpy(&subnormal, &rounded, sizeof(subnormal));
  std::memcpy(&ones, &kOnes, sizeof(ones));
  const bool is_subnormal = magnitude < 2.0f / float(1 << kBias);
  const uint32_t code = is_subnormal ? subnormal - ones : normal;
  if (number != number) return kIsFnuz ? 0x80 : 0x7f;
  return uint8_t(code | (kIsFnuz && code == 0 ? 0 : sign >> 24 & 0x80));
}

// NaN, which int8 does not have, is 0 there: processors convert it to 0, or to -2^31, whose last
// byte is 0, too.
inline uint8_t to_eight_bits(float number) {
  if constexpr (std::is_same<OutDtype, int8>::value)
    return uint8_t(int(__builtin_nearbyintf(min(max(number, -127.0f), 127.0f))));
  else return to_fp8(number);
}

}  // namespace
