// VOP3-only instructions. The table is vop3.inc.
#include <cmath>
#include <limits>

#include "execution/lanes.h"
#include "numbers/float_order.h"
#include "numbers/half_arithmetic.h"

namespace emulator {
namespace {

// ---- Integers -----------------------------------------------------------------------------------

template <class T>
inline T smaller(T a, T b) {
  return a < b ? a : b;
}
template <class T>
inline T larger(T a, T b) {
  return a > b ? a : b;
}
template <class T>
inline T middle(T a, T b, T c) {
  return larger(smaller(a, b), smaller(larger(a, b), c));
}
template <i32 kLowest, i32 kHighest>
inline i32 bounded(i32 value) {
  return smaller(larger(value, kLowest), kHighest);
}

inline u16 two_bytes(i32 low, i32 high) {
  return static_cast<u16>((low & 0xff) | (high & 0xff) << 8);
}
inline u32 two_words(i32 low, i32 high) {
  return (static_cast<u32>(low) & 0xffff) | static_cast<u32>(high) << 16;
}
inline u64 joined(u32 high, u32 low) { return static_cast<u64>(high) << 32 | low; }

inline i32 signed_field(i32 value, u32 position, u32 width) {
  const u32 top = width == 0 || position + width >= 32 ? 0 : 32 - position - width;
  const i32 field = static_cast<i32>(static_cast<u32>(value) << top) >> (top + position);
  return width == 0 ? 0 : field;
}

// (a + b + carry) / 2 for each byte; the carries are the lowest bits of c's bytes.
inline u32 mean_of_bytes(u32 a, u32 b, u32 c) {
  u32 means = 0;
  for (u32 position = 0; position < 32; position += 8) {
    const u32 sum = (a >> position & 0xff) + (b >> position & 0xff) + (c >> position & 1);
    means |= sum >> 1 << position;
  }
  return means;
}

inline i64 difference(u32 a, u32 b) { return a > b ? a - b : b - a; }

inline i64 byte_differences(u32 a, u32 b) {
  i64 sum = 0;
  for (u32 position = 0; position < 32; position += 8)
    sum += difference(a >> position & 0xff, b >> position & 0xff);
  return sum;
}

// Bytes that are 0 in b do not count.
inline i64 masked_byte_differences(u32 a, u32 b) {
  i64 sum = 0;
  for (u32 position = 0; position < 32; position += 8) {
    const u32 reference = b >> position & 0xff;
    sum += reference ? difference(a >> position & 0xff, reference) : 0;
  }
  return sum;
}

// Of the dwords that begin at bytes 0, 1, 2 and 3 of a.
template <class Sum>
inline u64 four_sums(u64 a, u32 b, u64 c, Sum sum) {
  u64 sums = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u64 total = static_cast<u64>(sum(static_cast<u32>(a >> (8 * i)), b)) + (c >> (16 * i));
    sums |= (total & 0xffff) << (16 * i);
  }
  return sums;
}

void execute_mqsad(Wave& wave, const Instruction& inst) {
  if (inst.source[2].place != Place::vgpr)
    fault("v_mqsad_u32_u8 with an addend outside of the VGPRs");
  LaneBuffer data, reference;
  const Planes a = read_lanes(wave, inst, inst.source[0], data);
  const u32* const b = read_lanes(wave, inst, inst.source[1], reference).low;
  alignas(64) u32 sums[4][kLanes];
  hooks::vgpr_read(wave, inst.source[2].index, 4, wave.exec());
  for (u32 i = 0; i < 4; ++i) {
    const u32* const c = wave.vgpr[inst.source[2].index + i];
    for (u32 lane = 0; lane < kLanes; ++lane) {
      const u32 bytes = static_cast<u32>(joined(a.high[lane], a.low[lane]) >> (8 * i));
      sums[i][lane] = static_cast<u32>(masked_byte_differences(bytes, b[lane])) + c[lane];
    }
  }
  for (u32 i = 0; i < 4; ++i) write_vgpr(wave, inst.destination.index + i, sums[i], wave.exec());
}

// The carry is the 65th bit of the signed sum.
inline WithCarry<u64> multiply_add_wide(i32 a, i32 b, i64 c) {
  const u64 product = static_cast<u64>(i64{a} * b), addend = static_cast<u64>(c);
  const u64 sum = product + addend;
  const u64 overflowed = (product ^ sum) & (addend ^ sum);
  return {sum, (sum ^ overflowed) >> 63 != 0};
}

// Selectors 0 to 7 are bytes; 8 to 11 the signs of the bytes 1, 3, 5, 7; 12 is 0, the rest 0xff.
inline u32 permuted_bytes(u64 bytes, u32 selectors) {
  u32 result = 0;
  for (u32 position = 0; position < 32; position += 8) {
    const u32 selector = selectors >> position & 0xff;
    const u32 byte = static_cast<u32>(bytes >> (8 * (selector & 7))) & 0xff;
    const u32 sign = bytes >> (16 * (selector & 3) + 15) & 1 ? 0xff : 0;
    const u32 chosen = selector < 8 ? byte : selector < 12 ? sign : selector == 12 ? 0 : 0xff;
    result |= chosen << position;
  }
  return result;
}

// omod, abs and neg are the truth table: bit 4 * a + 2 * b + c of it is the result.
void execute_bitop3(Wave& wave, const Instruction& inst) {
  const u32 omod = inst.words[1] >> 27 & 3, absolute = inst.words[0] >> 8 & 7,
            negate = inst.words[1] >> 29;
  const u32 table = omod << 6 | absolute << 3 | negate;
  LaneBuffer buffers[3];
  const u32* source[3];
  for (u32 k = 0; k < 3; ++k) source[k] = read_lanes(wave, inst, inst.source[k], buffers[k]).low;
  LaneBuffer result{};
  for (u32 row = 0; row < 8; ++row) {
    if (!(table >> row & 1)) continue;
    const u32 flip[3] = {row & 4 ? 0 : ~0u, row & 2 ? 0 : ~0u, row & 1 ? 0 : ~0u};
    for (u32 lane = 0; lane < kLanes; ++lane)
      result.plane[0][lane] |=
          (source[0][lane] ^ flip[0]) & (source[1][lane] ^ flip[1]) & (source[2][lane] ^ flip[2]);
  }
  const bool is_half = inst.destination.type == OperandType::u16;
  if (is_half)
    for (u32 lane = 0; lane < kLanes; ++lane) result.plane[0][lane] &= 0xffff;
  commit(wave, inst, result.plane[0], nullptr, write_mask(wave, inst), is_half);
}

// ---- Conversions --------------------------------------------------------------------------------

template <Rounding kRounding>
inline u32 packed_halves(f32 a, f32 b, Mode mode) {
  f16 low = f16::from_bits(float_to_half_rounded<kRounding>(a));
  f16 high = f16::from_bits(float_to_half_rounded<kRounding>(b));
  low = mode.flushes_half_results() ? flush_denormal(low) : low;
  high = mode.flushes_half_results() ? flush_denormal(high) : high;
  return low.bits | static_cast<u32>(high.bits) << 16;
}

// To 0..255, rounded as MODE says: the documents only say that it is converted, gfx1201 was
// measured (AMD's rocjitsu) and GFX9 rounds to nearest in the default mode. NaN gives 0.
inline u32 float_to_u8(f32 value) {
  const f32 not_negative = value > 0.0f ? value : 0.0f;
  const f32 bounded = not_negative < 255.0f ? not_negative : 255.0f;
  return static_cast<u32>(static_cast<i32>(__builtin_nearbyintf(bounded)));
}
inline u32 with_byte(u32 word, u32 index, u32 byte) {
  const u32 position = 8 * (index & 3);
  return (word & ~(0xffu << position)) | byte << position;
}

// ---- Floating point -----------------------------------------------------------------------------

// Any larger one gives the same for a float.
inline f64 power_of_two(i32 exponent) {
  return bit_cast<f64>(static_cast<u64>(1023 + bounded<-400, 400>(exponent)) << 52);
}

struct CubeFace {
  f32 id, s, t, axis;  // axis is twice the largest coordinate
};
inline CubeFace cube_face(f32 x, f32 y, f32 z) {
  const f32 ax = __builtin_fabsf(x), ay = __builtin_fabsf(y), az = __builtin_fabsf(z);
  if (az >= ax && az >= ay)
    return z < 0.0f ? CubeFace{5, -x, -y, 2 * z} : CubeFace{4, x, -y, 2 * z};
  if (ay >= ax) return y < 0.0f ? CubeFace{3, x, -z, 2 * y} : CubeFace{2, x, z, 2 * y};
  return x < 0.0f ? CubeFace{1, z, -y, 2 * x} : CubeFace{0, -z, -y, 2 * x};
}

template <class T> struct Division;
template <> struct Division<f32> {
  static constexpr i32 kBias = 127, kMantissaBits = 23, kUnderflow = -150, kNearLargest = 96;
  static constexpr f32 kScale = 0x1p64f, kTiny = 0x1p-100f, kHuge = 0x1p100f,
                       kLargestWithNormalInverse = 0x1p126f;
};
template <> struct Division<f64> {
  static constexpr i32 kBias = 1023, kMantissaBits = 52, kUnderflow = -1075, kNearLargest = 768;
  static constexpr f64 kScale = 0x1p128, kTiny = 0x1p-1000, kHuge = 0x1p1000,
                       kLargestWithNormalInverse = 0x1p1022;
};

template <class T>
inline T magnitude(T value) {
  return bit_cast<T>(
      static_cast<typename FloatFormat<T>::Bits>(float_bits(value) & ~FloatFormat<T>::kSign));
}
template <class T>
inline bool is_zero(T value) {
  return float_bits(magnitude(value)) == 0;
}
template <class T> inline bool is_infinite(T value) {
  return float_bits(magnitude(value)) == FloatFormat<T>::kInfinity;
}

// The special cases of numerator / denominator; otherwise the quotient with the right sign.
template <class T>
T fix_quotient(T quotient, T denominator, T numerator) {
  using Format = FloatFormat<T>;
  using Bits = typename Format::Bits;
  const Bits sign = (float_bits(denominator) ^ float_bits(numerator)) & Format::kSign;
  const auto with_sign = [&](Bits bits) { return bit_cast<T>(static_cast<Bits>(bits | sign)); };
  if (is_nan(numerator)) return quiet(numerator);
  if (is_nan(denominator)) return quiet(denominator);
  if ((is_zero(numerator) && is_zero(denominator)) ||
      (is_infinite(numerator) && is_infinite(denominator)))
    return bit_cast<T>(static_cast<Bits>(Format::kSign | Format::kInfinity | Format::kQuiet));
  if (is_zero(denominator) || is_infinite(numerator)) return with_sign(Format::kInfinity);
  if (is_infinite(denominator) || is_zero(numerator)) return with_sign(0);
  if constexpr (sizeof(T) > 2) {
    // Rounded as MODE says, with the quotient's sign.
    if (biased_exponent(numerator) - biased_exponent(denominator) < Division<T>::kUnderflow)
      return with_sign(float_bits(Division<T>::kTiny)) * Division<T>::kTiny;
    // The documents ask this of the denominator, which is finite here. The steps of a division
    // whose quotient overflows end in infinity or NaN.
    if (is_infinite(quotient) || is_nan(quotient))
      return with_sign(float_bits(Division<T>::kHuge)) * Division<T>::kHuge;
  }
  return with_sign(float_bits(magnitude(quotient)));
}

// floor(log2 |numerator / denominator|).
inline i32 exponent_of_quotient(f64 numerator, f64 denominator) {
  int above, below;
  const f64 upper = std::frexp(std::fabs(numerator), &above);
  const f64 lower = std::frexp(std::fabs(denominator), &below);
  return above - below - (upper < lower);
}

// `value` is the numerator or the denominator, scaled so that the steps of the division neither
// overflow nor lose bits to denormals. The carry says that v_div_fmas has to undo it.
// Two places differ from the documents' text, which divides wrongly there: whether 1 / denominator
// is denormal is asked in the operands' type (they write double, where a float's inverse never is),
// and where the quotient is denormal too, the denominator is made smaller, not larger.
template <class T>
WithCarry<T> scale_for_division(T value, T denominator, T numerator) {
  using Limits = Division<T>;
  if (is_zero(numerator) || is_zero(denominator))
    return {std::numeric_limits<T>::quiet_NaN(), false};
  const i32 exponent = biased_exponent(numerator), other = biased_exponent(denominator);
  const bool is_finite = !is_nan(numerator) && !is_nan(denominator) && !is_infinite(numerator) &&
                         !is_infinite(denominator);
  const i32 of_quotient = is_finite ? exponent_of_quotient(numerator, denominator) : 0;
  const bool quotient_is_denormal = of_quotient < 1 - Limits::kBias &&
                                    of_quotient >= 1 - Limits::kBias - Limits::kMantissaBits - 1;
  const bool inverse_is_denormal =
      is_finite && magnitude(denominator) > Limits::kLargestWithNormalInverse;
  if (exponent - other >= Limits::kNearLargest)
    return {value == denominator ? value * Limits::kScale : value, true};
  if (other == 0) return {value * Limits::kScale, false};
  if (inverse_is_denormal && quotient_is_denormal)
    return {value == denominator ? value / Limits::kScale : value, true};
  if (inverse_is_denormal) return {value / Limits::kScale, false};
  if (quotient_is_denormal) return {value == numerator ? value * Limits::kScale : value, true};
  if (exponent <= Limits::kMantissaBits + (sizeof(T) == 8)) return {value * Limits::kScale, false};
  return {value, false};
}

// Undoes v_div_scale. Large quotients were made small by it and small ones large: the addend, the
// quotient so far, tells which. (The documents give one factor, with which quotients come out
// wrong.)
inline f32 fma_and_unscale(f32 a, f32 b, f32 c, Vcc scaled, Mode mode) {
  if (!scaled) return __builtin_fmaf(a, b, c);
  const f64 scale = biased_exponent(c) > 127 ? 0x1p64 : 0x1p-64;
  const f64 product = f64{a} * b;
  const f64 sum = mode.rounds_floats_to_nearest() ? sum_to_odd(product, c) : product + c;
  return static_cast<f32>(sum * scale);
}

inline f64 fma_and_unscale(f64 a, f64 b, f64 c, Vcc scaled, Mode mode) {
  const f64 sum = __builtin_fma(a, b, c);
  if (!scaled) return sum;
  const f64 scale = biased_exponent(c) > 1023 ? 0x1p128 : 0x1p-128;
  const f64 rounded = sum * scale;
  if (!mode.rounds_halves_and_doubles_to_nearest() || !(std::fabs(rounded) <= 0x1p-1022))
    return rounded;
  // The sum was rounded and became denormal, which rounded it again. That is wrong only if the sum
  // lies in the middle of two denormals and the exact one beside it.
  const f64 beyond = sum - rounded / scale;
  if (std::fabs(beyond) != 0x1p-1074 / scale * 0.5) return rounded;
  const f64 product = a * b, product_error = __builtin_fma(a, b, -product);
  const f64 low = c + product_error, low_part = low - c;
  const f64 low_error = (c - (low - low_part)) + (product_error - low_part);
  const f64 high = product + low, high_part = high - product;
  const f64 high_error = (product - (high - high_part)) + (low - high_part);
  const f64 error = (high - sum) + (low_error + high_error);
  if (error == 0.0 || (error > 0.0) != (beyond > 0.0)) return rounded;
  return rounded + std::copysign(0x1p-1074, beyond);
}

// 53 bits of 2/pi, as the argument reduction of sine and cosine multiplies them; `segment` counts
// them from the first that matters for numbers as large as `value`.
f64 segment_of_2_over_pi(f64 value, u32 segment) {
  // The 1201 bits of the fraction that the hardware has.
  static constexpr u64 kBits[] = {
      0xa2f9836e4e441529, 0xfc2757d1f534ddc0, 0xdb6295993c439041, 0xfe5163abdebbc561,
      0xb7246e3a424dd2e0, 0x06492eea09d1921c, 0xfe1deb1cb129a73e, 0xe88235f52ebb4484,
      0xe99c7026b45f7e41, 0x3991d639835339f4, 0x9c845f8bbdf9283b, 0x1ff897ffde05980f,
      0xef2f118b5a0a6d1f, 0x6d367ecf27cb09b7, 0x4f463f669e5fea2d, 0x7527bac7ebe5f17b,
      0x3d0739f78a5292ea, 0x6bfb5fb11f8d5d08, 0x56033046fc7b0000,
  };
  const i32 exponent = biased_exponent(value);
  const u32 shift = (segment & 31) * 53 + (exponent > 1077 ? static_cast<u32>(exponent - 1077) : 0);
  const auto word = [&](u32 index) { return index < std::size(kBits) ? kBits[index] : 0; };
  const u32 first = shift / 64, skipped = shift % 64;
  const u64 bits = word(first) << skipped | (skipped ? word(first + 1) >> (64 - skipped) : 0);
  const i32 scale = -53 - static_cast<i32>(shift) + (exponent >= 1968 ? 128 : 0);
  return std::ldexp(static_cast<f64>(bits >> 11), scale);
}

// ---- Lanes --------------------------------------------------------------------------------------

void execute_readlane(Wave& wave, const Instruction& inst) {
  LaneBuffer buffer;
  const u32 lane = read_scalar<u32>(wave, inst.source[1]) & 63;
  write_scalar<u32>(wave, inst.destination,
                    read_lanes(wave, inst, inst.source[0], buffer).low[lane]);
}

// Writes whether the lane is active or not.
void execute_writelane(Wave& wave, const Instruction& inst) {
  const u32 value = read_scalar<u32>(wave, inst.source[0]);
  const u32 lane = read_scalar<u32>(wave, inst.source[1]) & 63;
  wave.vgpr[inst.destination.index][lane] = value;
  hooks::vgpr_written(wave, inst.destination.index, 1, u64{1} << lane);
}

// Counts the mask's bits below the lane, in the lower or upper half of the lanes.
template <u32 kFirstLane>
void execute_mbcnt(Wave& wave, const Instruction& inst) {
  LaneBuffer masks, addends, counts;
  const u32* const mask = read_lanes(wave, inst, inst.source[0], masks).low;
  const u32* const add = read_lanes(wave, inst, inst.source[1], addends).low;
  for (u32 lane = 0; lane < kLanes; ++lane) {
    const u32 below = lane <= kFirstLane        ? 0
                      : lane - kFirstLane >= 32 ? ~0u
                                                : (1u << (lane - kFirstLane)) - 1;
    counts.plane[0][lane] = static_cast<u32>(__builtin_popcount(mask[lane] & below)) + add[lane];
  }
  commit(wave, inst, counts.plane[0], nullptr, write_mask(wave, inst));
}

#define VECTOR_TABLE "instructions/vop3.inc"
#define VECTOR_FORMAT VOP3
#include "instructions/vector_table.h"

}  // namespace

DefinitionSpan vop3_definitions() { return {kDefinitions, std::size(kDefinitions)}; }

}  // namespace emulator
