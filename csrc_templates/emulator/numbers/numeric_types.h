// The number types that instructions work on, named as the ISA documents name them.
#pragma once

#include <cstdint>
#include <cstring>

namespace emulator {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i8 = std::int8_t;
using i16 = std::int16_t;
using i32 = std::int32_t;
using i64 = std::int64_t;
using f32 = float;
using f64 = double;
using b32 = u32;  // as operands whose bits are no number
using b64 = u64;

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// binary16 -> binary32. Exact, NaN payloads kept; free of branches, so that loops over lanes become
// vector code.
inline f32 half_to_float(u16 half) {
  const u32 magnitude = static_cast<u32>(half & 0x7fffu) << 13;
  const u32 sign = static_cast<u32>(half & 0x8000u) << 16;
  // Normal numbers: move the exponent bias from 15 to 127; infinity and NaN: to 255.
  const u32 normal = magnitude + ((127u - 15u) << 23);
  const u32 special = magnitude | (255u << 23);
  // Denormals: 0.mantissa * 2^-14, as (1.mantissa - 1) * 2^-14. The sign is cleared because 1 - 1
  // is -0 where the host rounds down.
  const f32 difference = bit_cast<f32>(magnitude + (113u << 23)) - bit_cast<f32>(113u << 23);
  const u32 denormal = bit_cast<u32>(difference) & 0x7fffffffu;
  const u32 bits =
      magnitude >= (31u << 23) ? special : (magnitude < (1u << 23) ? denormal : normal);
  return bit_cast<f32>(bits | sign);
}

// binary32 -> binary16 in the host's rounding mode, denormals produced, NaN made quiet; free of
// branches.
inline u16 float_to_half(f32 value) {
  const u32 bits = bit_cast<u32>(value);
  const u32 sign = (bits >> 16) & 0x8000u;
  const u32 magnitude = bits & 0x7fffffffu;
  // 1.5 * 2^13 times the power of two below the number has the number's last bit of 11, or the last
  // bit of a denormal, as its own: adding it, with the number's sign, rounds there.
  const u32 at_least_normal = magnitude > (113u << 23) ? magnitude : 113u << 23;
  const u32 bounded = at_least_normal < (143u << 23) ? at_least_normal : 143u << 23;
  const f32 shifter =
      bit_cast<f32>(((bounded & 0x7f800000u) + (13u << 23) + (1u << 22)) | (bits & 0x80000000u));
  const u32 rounded = bit_cast<u32>((value + shifter) - shifter) & 0x7fffffffu;
  const u32 normal = (rounded - ((127u - 15u) << 23)) >> 13;
  const u32 denormal = bit_cast<u32>(bit_cast<f32>(rounded) + 0.5f) - bit_cast<u32>(0.5f);
  // From 65536 on: infinity or the largest number, as the host rounds an overflow.
  const u32 overflowed = bit_cast<u32>(value * 0x1p112f) & 0x7fffffffu;
  const u32 large = overflowed == 0x7f800000u ? 0x7c00u : 0x7bffu;
  const u32 nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  u32 half = rounded < (113u << 23) ? denormal : normal;
  half = magnitude >= (143u << 23) ? large : half;
  half = magnitude > 0x7f800000u ? nan : half;
  return static_cast<u16>(half | sign);
}

enum class Rounding { nearest_even, toward_zero };

// binary32 -> binary16 in a rounding mode of the instruction's own, in integers.
template <Rounding kRounding>
inline u16 float_to_half_rounded(f32 value) {
  const u32 bits = bit_cast<u32>(value);
  const u32 sign = (bits >> 16) & 0x8000u;
  const u32 magnitude = bits & 0x7fffffffu;
  const u32 exponent = magnitude >> 23;
  const u32 significand = exponent ? (magnitude & 0x7fffffu) | 0x800000u : magnitude;
  // Bits that are dropped: 13, and more for a denormal result, in the end all of them.
  const u32 below = exponent < 113 ? 113 - (exponent ? exponent : 1) : 0;
  const u32 shift = 13 + (below < 18 ? below : 18);
  const u32 kept = significand >> shift;
  const u32 rest = significand & ((1u << shift) - 1);
  const u32 tie = 1u << (shift - 1);
  const bool up =
      kRounding == Rounding::nearest_even && (rest > tie || (rest == tie && (kept & 1)));
  // The significand's leading one adds the last 1 to the exponent.
  const u32 base = exponent < 113 ? 0 : (exponent - 113) << 10;
  u32 half = base + kept + up;
  const u32 large =
      kRounding == Rounding::nearest_even || magnitude == 0x7f800000u ? 0x7c00u : 0x7bffu;
  half = magnitude >= (143u << 23) ? large : half;
  half = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : half;
  return static_cast<u16>(half | sign);
}

// A half computes as a float and is rounded once, when it is stored.
struct f16 {
  u16 bits;
  f16() = default;
  f16(f32 value) : bits(float_to_half(value)) {}
  operator f32() const { return half_to_float(bits); }
  static f16 from_bits(u16 bits) {
    f16 half;
    half.bits = bits;
    return half;
  }
};

// Upper half of a float; to nearest even, NaN made quiet.
inline u16 float_to_bfloat(f32 value) {
  const u32 bits = bit_cast<u32>(value);
  const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const u32 quiet = (bits >> 16) | 0x40u;
  return static_cast<u16>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

struct bf16 {
  u16 bits;
  bf16() = default;
  bf16(f32 value) : bits(float_to_bfloat(value)) {}
  operator f32() const { return bit_cast<f32>(static_cast<u32>(bits) << 16); }
  static bf16 from_bits(u16 bits) {
    bf16 number;
    number.bits = bits;
    return number;
  }
};

inline i64 signed_24(i32 value) { return static_cast<i32>(static_cast<u32>(value) << 8) >> 8; }
inline i64 unsigned_24(u32 value) { return value & 0xffffff; }

// Packed pairs, and values of several registers.
// clang-format off
struct f16x2 { u32 bits; };
struct bf16x2 { u32 bits; };
struct i16x2 { u32 bits; };
struct f32x2 { u32 bits[2]; };
struct b128 { u32 dword[4]; };
struct b192 { u32 dword[6]; };
struct b512 { u32 dword[16]; };
struct b1024 { u32 dword[32]; };
// clang-format on

}  // namespace emulator
