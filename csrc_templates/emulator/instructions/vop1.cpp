// VOP1. The table is vop1.inc.
#include <limits>

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

template <class To, class T>
inline To saturated(T value) {
  using Integer = std::conditional_t<std::is_same_v<To, u32>, i64, i32>;
  constexpr T kLowest = std::numeric_limits<To>::lowest(),
              kHighest = std::numeric_limits<To>::max();
  const T number = value == value ? value : T(0);
  const T not_below = number > kLowest ? number : kLowest;
  return static_cast<To>(static_cast<Integer>(not_below < kHighest ? not_below : kHighest));
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

// frexp: a mantissa from 1/2 to 1, and the exponent; 0 for zeros, infinities and NaN. Halves are
// normal numbers as floats.
constexpr i32 kLift = 64;  // powers of two that make a denormal normal
template <class T>
inline T lifted(T value) {
  return biased_exponent(value) == 0 ? value * T(0x1p64) : value;
}
template <class T>
inline bool has_exponent(T lifted) {  // zeros, infinities and NaN have none
  return biased_exponent(lifted) != 0 && !is_nan(lifted - lifted);
}
template <class T>
inline i32 exponent_of(T value) {
  const i32 exponent = biased_exponent(lifted(value)) - biased_exponent(T(0.5));
  return has_exponent(lifted(value)) ? exponent - (biased_exponent(value) == 0 ? kLift : 0) : 0;
}
template <class T>
inline T mantissa_of(T value) {
  const auto bits = float_bits(lifted(value)) & ~FloatFormat<T>::kInfinity;
  return has_exponent(lifted(value)) ? bit_cast<T>(bits | float_bits(T(0.5))) : value;
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
