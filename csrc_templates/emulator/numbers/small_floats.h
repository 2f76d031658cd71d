// The floating-point formats of 4 to 8 bits: exact conversion to binary32, rounding from it.
#pragma once

#include "numbers/numeric_types.h"

namespace emulator {

// What a format's largest codes mean.
enum class SpecialCodes : u8 {
  ieee,           // the largest exponent is infinity and NaN
  nan_only,       // all ones is NaN; no infinity
  negative_zero,  // the code of -0 is the only NaN (FNUZ)
  none,           // every code is a number
};

template <u32 kExponentBits, u32 kMantissa, i32 kExponentBias, SpecialCodes kSpecials>
struct SmallFormat {
  static constexpr u32 kMantissaBits = kMantissa;
  static constexpr i32 kBias = kExponentBias;
  static constexpr u32 kBits = 1 + kExponentBits + kMantissaBits;
  static constexpr u32 kSign = 1u << (kBits - 1);
  static constexpr u32 kMagnitude = kSign - 1;
  static constexpr bool kIsFnuz = kSpecials == SpecialCodes::negative_zero;
  static constexpr bool kIsIeee = kSpecials == SpecialCodes::ieee;

  // The codes of the largest number, of what is beyond it, and of NaN. A format without infinity or
  // NaN has its largest number in their place.
  static constexpr u32 kLargest = kIsIeee ? kMagnitude - (1u << kMantissaBits)
                                          : kMagnitude - (kSpecials == SpecialCodes::nan_only);
  static constexpr u32 kInfinity = kIsFnuz                           ? kSign
                                   : kSpecials == SpecialCodes::none ? kLargest
                                                                     : kLargest + 1;
  static constexpr u32 kNan = kIsFnuz ? kSign : kIsIeee ? kMagnitude - 1 : kMagnitude;

  // Exact. Bits above the format's are ignored.
  static f32 value(u32 code) {
    const u32 magnitude = code & kMagnitude;
    const u32 sign = (code & kSign) << (32 - kBits);
    const u32 field = magnitude << (23 - kMantissaBits);
    const u32 normal = field + (static_cast<u32>(127 - kBias) << 23);
    // Denormals, as in half_to_float.
    constexpr u32 kSmallestNormal = static_cast<u32>(128 - kBias) << 23;
    const f32 shifted = bit_cast<f32>(field + kSmallestNormal);
    const u32 denormal = bit_cast<u32>(shifted - bit_cast<f32>(kSmallestNormal)) & 0x7fffffffu;
    u32 bits = field < (1u << 23) ? denormal : normal;
    constexpr u32 kQuietNan = 0x7fc00000u;
    if constexpr (kIsIeee) {
      const u32 special = magnitude > kInfinity ? kQuietNan : 0x7f800000u;
      bits = magnitude >= kInfinity ? special : bits;
    } else if constexpr (kSpecials == SpecialCodes::nan_only) {
      bits = magnitude == kNan ? kQuietNan : bits;
    } else if constexpr (kIsFnuz) {
      bits = (code & (kSign | kMagnitude)) == kNan ? kQuietNan : bits;
    }
    return bit_cast<f32>(bits | sign);
  }
};

using Fp8 = SmallFormat<4, 3, 7, SpecialCodes::nan_only>;           // E4M3; gfx950: OCP
using Bf8 = SmallFormat<5, 2, 15, SpecialCodes::ieee>;              // E5M2
using Fp8Fnuz = SmallFormat<4, 3, 8, SpecialCodes::negative_zero>;  // gfx942
using Bf8Fnuz = SmallFormat<5, 2, 16, SpecialCodes::negative_zero>;
using Fp6 = SmallFormat<2, 3, 1, SpecialCodes::none>;  // E2M3
using Bf6 = SmallFormat<3, 2, 3, SpecialCodes::none>;  // E3M2
using Fp4 = SmallFormat<2, 1, 1, SpecialCodes::none>;  // E2M1

// Types that stochastic rounding works on: mantissa bits of the source, and f16, bf16 as results.
struct HalfFormat {
  static constexpr u32 kMantissaBits = 10, kSign = 0x8000, kLargest = 0x7bff, kInfinity = 0x7c00,
                       kNan = 0x7e00;
  static constexpr i32 kBias = 15;
  static constexpr bool kIsFnuz = false;
};
struct BfloatFormat {
  static constexpr u32 kMantissaBits = 7, kSign = 0x8000, kLargest = 0x7f7f, kInfinity = 0x7f80,
                       kNan = 0x7fc0;
  static constexpr i32 kBias = 127;
  static constexpr bool kIsFnuz = false;
};

// To the nearest number, ties to even; or stochastic.
struct NearestEven {
  u32 increment(u32 mantissa, u32 dropped, u32 sticky) const {
    const u32 odd = mantissa >> dropped & 1;
    return (1u << (dropped - 1)) - 1 + (odd | sticky);
  }
};
// Adds the upper bits of `random` below the last bit that stays.
struct Stochastic {
  u32 random;
  u32 increment(u32, u32 dropped, u32) const { return random >> (32 - dropped); }
};

// Rounds to a code of the format. Overflow gives kInfinity, or kLargest if `saturates`; infinity
// stays infinity. `kSourceMantissa`: mantissa bits of the type that `value` came from, which is
// what random bits are added to.
//
// Integers only: neither the host's rounding direction nor its treatment of denormals matters.
template <class Format, u32 kSourceMantissa = 23, class Rounding>
inline u32 round_to(f32 value, Rounding rounding, bool saturates) {
  constexpr u32 kDropped = kSourceMantissa - Format::kMantissaBits;
  const u32 bits = bit_cast<u32>(value);
  const u32 magnitude = bits & 0x7fffffffu;
  const u32 leading_one = magnitude >= (1u << 23) ? 1u << 23 : 0;
  u32 mantissa = ((magnitude & 0x7fffffu) | leading_one) >> (23 - kSourceMantissa);
  // A denormal of the source has the exponent 1, too.
  const i32 exponent =
      static_cast<i32>((magnitude >> 23) + (leading_one ? 0 : 1)) - 127 + Format::kBias;
  // Denormal results lose more bits.
  const u32 lost = exponent < 1 ? static_cast<u32>(1 - exponent) : 0;
  const u32 shift = lost < 31 ? lost : 31;
  const u32 sticky = (mantissa & ((1u << shift) - 1)) != 0;
  mantissa >>= shift;
  mantissa += rounding.increment(mantissa, kDropped, sticky);
  // The leading one of a normal number, and a carry, count up the exponent.
  const u32 field = exponent < 1 ? 0 : static_cast<u32>(exponent - 1) << Format::kMantissaBits;
  u32 code = field + (mantissa >> kDropped);
  code = code > Format::kLargest ? (saturates ? Format::kLargest : Format::kInfinity) : code;
  code = magnitude == 0x7f800000u ? Format::kInfinity : code;
  code = magnitude > 0x7f800000u ? Format::kNan : code;
  const u32 sign = bits >> 31 ? Format::kSign : 0;
  const bool is_unsigned = Format::kIsFnuz && code == 0;  // FNUZ has no -0
  return is_unsigned ? 0 : code | sign;
}

// v_prng_b32: the next of a sequence of random numbers.
inline u32 next_random(u32 random) { return random << 1 ^ (random >> 31 ? 197u : 0u); }

}  // namespace emulator
