// VOP1. The table is vop1.inc.
#include "execution/lanes.h"
#include "numbers/float_order.h"
#include "numbers/small_floats.h"
#include "numbers/transcendental.h"

namespace emulator {

namespace {

// ---- Executors ----------------------------------------------------------------------------------

void execute_nothing(Wave&, const Instruction&) {}

// The first active lane; lane 0 where none is.
void execute_readfirstlane(Wave& wave, const Instruction& inst) {
  const u32 lane = wave.exec() ? static_cast<u32>(__builtin_ctzll(wave.exec())) : 0;
  LaneBuffer buffer;
  write_scalar<u32>(wave, inst.destination,
                    read_lanes(wave, inst, inst.source[0], buffer).low[lane]);
}

// Exchanges two registers' lanes: lane l of the first with lane partner(l) of the second.
template <class Partner>
void exchange_lanes(Wave& wave, const Instruction& inst, u64 lanes_of_first, Partner partner) {
  if (inst.source[0].place != Place::vgpr) fault("a swap needs two vector registers");
  const u32 first = inst.destination.index, second = inst.source[0].index;
  u64 written_first = 0, written_second = 0;
  LaneBuffer result;
  std::memcpy(result.plane[0], wave.vgpr[first], sizeof(result.plane[0]));
  std::memcpy(result.plane[1], wave.vgpr[second], sizeof(result.plane[1]));
  for (u32 lane = 0; lane < kLanes; ++lane) {
    if (!(lanes_of_first >> lane & 1)) continue;
    const u32 other = partner(lane);
    const bool active = wave.exec() >> lane & 1;
    if (active != (wave.exec() >> other & 1))
      fault("a swap between lanes %u and %u, of which one is inactive, is not implemented", lane,
            other);
    if (!active) continue;
    result.plane[0][lane] = wave.vgpr[second][other];
    result.plane[1][other] = wave.vgpr[first][lane];
    written_first |= u64{1} << lane;
    written_second |= u64{1} << other;
  }
  if (first == second && written_first != written_second) {
    // Both halves of the exchange lie in one register.
    for (u32 lane = 0; lane < kLanes; ++lane)
      if (written_second >> lane & 1) result.plane[0][lane] = result.plane[1][lane];
    written_first |= written_second;
  }
  hooks::vgpr_read(wave, first, 1, written_first);
  hooks::vgpr_read(wave, second, 1, written_second);
  write_vgpr(wave, second, result.plane[1], written_second);
  write_vgpr(wave, first, result.plane[0], written_first);
}

void execute_swap(Wave& wave, const Instruction& inst) {
  exchange_lanes(wave, inst, kAllLanes, [](u32 lane) { return lane; });
}
// Odd rows of kRow lanes of the first register with even rows of the second.
template <u32 kRow>
void execute_permlane_swap(Wave& wave, const Instruction& inst) {
  constexpr u64 kOddRows = kRow == 16 ? 0xffff0000ffff0000u : 0xffffffff00000000u;
  exchange_lanes(wave, inst, kOddRows, [](u32 lane) { return lane - kRow; });
}

template <class Format> constexpr auto& execute_widen = Elementwise<&Format::value>::execute;

// Two numbers of 8 bits to two registers.
template <class Format>
void execute_widen_pair(Wave& wave, const Instruction& inst) {
  if (inst.clamp || inst.omod) fault("output modifiers of a packed conversion are not implemented");
  LaneBuffer buffer, result;
  const u32* const source = read_lanes(wave, inst, inst.source[0], buffer).low;
  EMULATOR_LANE_LOOP
  for (u32 lane = 0; lane < kLanes; ++lane) {
    result.plane[0][lane] = bit_cast<u32>(Format::value(source[lane]));
    result.plane[1][lane] = bit_cast<u32>(Format::value(source[lane] >> 8));
  }
  commit(wave, inst, result.plane[0], result.plane[1], write_mask(wave, inst));
}

// ---- Conversions to integers: truncated, saturated; NaN gives 0 ---------------------------------

inline u32 float_to_u32(f32 value) {
  const f32 bounded = value < 4294967296.0f ? value : 0.0f;
  const u32 converted = static_cast<u32>(static_cast<i64>(bounded > 0.0f ? bounded : 0.0f));
  return value >= 4294967296.0f ? 0xffffffffu : converted;
}
inline i32 float_to_i32(f32 value) {
  const f32 bounded = value >= -2147483648.0f && value < 2147483648.0f ? value : 0.0f;
  const i32 converted = static_cast<i32>(bounded);
  return value >= 2147483648.0f   ? 0x7fffffff
         : value < -2147483648.0f ? i32(0x80000000u)
                                  : converted;
}
inline u32 double_to_u32(f64 value) {
  const f64 not_negative = value > 0.0 ? value : 0.0;  // also for NaN
  return static_cast<u32>(
      static_cast<i64>(not_negative < 4294967295.0 ? not_negative : 4294967295.0));
}
inline i32 double_to_i32(f64 value) {
  const f64 number = value == value ? value : 0.0;
  const f64 not_below = number > -2147483648.0 ? number : -2147483648.0;
  return static_cast<i32>(not_below < 2147483647.0 ? not_below : 2147483647.0);
}
inline u16 half_to_u16(f32 value) {
  const f32 not_negative = value > 0.0f ? value : 0.0f;
  return static_cast<u16>(static_cast<i32>(not_negative < 65535.0f ? not_negative : 65535.0f));
}
inline i16 half_to_i16(f32 value) {
  const f32 number = value == value ? value : 0.0f;
  const f32 not_below = number > -32768.0f ? number : -32768.0f;
  return static_cast<i16>(static_cast<i32>(not_below < 32767.0f ? not_below : 32767.0f));
}
// [-1, 1] or [0, 1] to the whole range, to nearest.
inline i16 normalized_i16(f32 value) {
  const f32 number = value == value ? value : 0.0f;
  const f32 bounded = number > 1.0f ? 1.0f : number < -1.0f ? -1.0f : number;
  return static_cast<i16>(
      static_cast<i32>(__builtin_nearbyint(static_cast<f64>(bounded) * 32767.0)));
}
inline u16 normalized_u16(f32 value) {
  const f32 bounded = value > 1.0f ? 1.0f : value > 0.0f ? value : 0.0f;
  return static_cast<u16>(
      static_cast<i32>(__builtin_nearbyint(static_cast<f64>(bounded) * 65535.0)));
}
inline u32 saturated_u8(u32 value) {
  const i32 number = static_cast<i16>(value);
  return static_cast<u32>(number < 0 ? 0 : number > 255 ? 255 : number);
}

// Keeps denormals where MODE keeps those of floats, but flushes those of doubles.
inline f64 float_to_double(f32 value) {
  const u32 bits = bit_cast<u32>(value);
  const f64 denormal = static_cast<i32>(bits & 0x7fffff) * 0x1p-149;
  const bool is_denormal = (bits & 0x7f800000u) == 0;
  return is_denormal ? (bits >> 31 ? -denormal : denormal) : static_cast<f64>(value);
}

// A denormal is as good as any number that is too small: MODE may flush those of floats only.
inline f32 double_to_float(f64 value) {
  const u64 bits = bit_cast<u64>(value);
  const bool is_denormal = (bits & 0x7ff0000000000000u) == 0 && bits << 1 != 0;
  return static_cast<f32>(is_denormal ? bit_cast<f64>(bits | u64{1} << 52) : value);
}

// A 4-bit integer in sixteenths.
inline f32 sixteenths(u32 value) {
  return static_cast<f32>(static_cast<i32>(value << 28) >> 28) * 0.0625f;
}

// ---- Parts of numbers ---------------------------------------------------------------------------

// It has the value's sign, even where it is zero: compilers for hosts without an instruction for it
// subtract 0 from +0, which is -0 where MODE rounds down.
inline f32 floor_of(f32 value) { return __builtin_copysignf(__builtin_floorf(value), value); }
inline f64 floor_of(f64 value) { return __builtin_copysign(__builtin_floor(value), value); }

// value - floor(value), never 1: `largest` is the number below it.
template <class T>
inline T fraction(T value, T floor, T largest) {
  const T rest = value - floor;
  return rest > largest ? largest : rest;
}
inline f32 fraction(f32 value) { return fraction(value, floor_of(value), 0x1.fffffep-1f); }
inline f64 fraction(f64 value) { return fraction(value, floor_of(value), 0x1.fffffffffffffp-1); }
inline f32 half_fraction(f32 value) { return fraction(value, floor_of(value), 0x1.ffcp-1f); }

// frexp: a mantissa from 1/2 to 1, and the exponent; 0 for zeros, infinities and NaN.
inline i32 exponent_of(f64 value) {
  const bool is_denormal = (bit_cast<u64>(value) >> 52 & 0x7ff) == 0;
  const f64 normal = is_denormal ? value * 0x1p54 : value;
  const i32 field = static_cast<i32>(bit_cast<u64>(normal) >> 52 & 0x7ff);
  const bool has_none = field == 0 || field == 0x7ff;
  return has_none ? 0 : field - 1022 - (is_denormal ? 54 : 0);
}
inline f64 mantissa_of(f64 value) {
  const bool is_denormal = (bit_cast<u64>(value) >> 52 & 0x7ff) == 0;
  const u64 bits = bit_cast<u64>(is_denormal ? value * 0x1p54 : value);
  const u64 field = bits >> 52 & 0x7ff;
  const bool has_none = field == 0 || field == 0x7ff;
  return has_none ? value : bit_cast<f64>((bits & 0x800fffffffffffffu) | u64{1022} << 52);
}
// Floats and halves are normal numbers as doubles.
inline i32 exponent_of(f32 value) {
  const u32 bits = bit_cast<u32>(value);
  const bool is_denormal = (bits & 0x7f800000u) == 0;
  const f32 normal = is_denormal ? static_cast<f32>(static_cast<i32>(bits & 0x7fffff)) : value;
  const i32 field = static_cast<i32>(bit_cast<u32>(normal) >> 23 & 0xff);
  const bool has_none = field == 0 || field == 0xff;
  return has_none ? 0 : field - 126 - (is_denormal ? 149 : 0);
}
inline f32 mantissa_of(f32 value) {
  const u32 bits = bit_cast<u32>(value);
  const bool is_denormal = (bits & 0x7f800000u) == 0;
  const u32 normal =
      is_denormal ? bit_cast<u32>(static_cast<f32>(static_cast<i32>(bits & 0x7fffff))) : bits;
  const u32 field = normal >> 23 & 0xff;
  const bool has_none = field == 0 || field == 0xff;
  return has_none ? value : bit_cast<f32>((bits & 0x80000000u) | (normal & 0x7fffff) | 126u << 23);
}

// ---- Bits ---------------------------------------------------------------------------------------

inline u32 reversed(u32 bits) {
  bits = (bits >> 1 & 0x55555555u) | (bits & 0x55555555u) << 1;
  bits = (bits >> 2 & 0x33333333u) | (bits & 0x33333333u) << 2;
  bits = (bits >> 4 & 0x0f0f0f0fu) | (bits & 0x0f0f0f0fu) << 4;
  return __builtin_bswap32(bits);
}
inline u32 leading_zeros(u32 bits) { return bits ? static_cast<u32>(__builtin_clz(bits)) : ~0u; }
inline u32 trailing_zeros(u32 bits) { return bits ? static_cast<u32>(__builtin_ctz(bits)) : ~0u; }

#define VECTOR_TABLE "instructions/vop1.inc"
#define VECTOR_FORMAT VOP1
#include "instructions/vector_table.h"

}  // namespace

DefinitionSpan vop1_definitions() { return {kDefinitions, std::size(kDefinitions)}; }

}  // namespace emulator
