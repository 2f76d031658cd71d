// VOP3: conversions to and from the formats of 4 to 8 bits. The table is vop3_convert.inc.
//
// Scaled conversions take 2 to the exponent of a float, an E8M0 scale: narrowing divides by it,
// widening multiplies; exponent 255 gives NaN. MODE.FP16_OVFL makes numbers that overflow fp8 and
// bf8 the largest number; infinity stays what it is. MODE's rounding does not matter.
//
// Stochastic rounding adds the upper bits of a random number below the last bit that stays, and
// cuts off; packed forms take the next number of v_prng_b32 for each element.
#include "execution/lanes.h"
#include "numbers/half_arithmetic.h"
#include "numbers/small_floats.h"

namespace emulator {
namespace {

// ---- Scales -------------------------------------------------------------------------------------

inline u32 scale_exponent(f32 scale) { return bit_cast<u32>(scale) >> 23 & 0xff; }

inline f32 nan_of_sign(f32 value) {
  return bit_cast<f32>((bit_cast<u32>(value) & 0x80000000u) | 0x7fc00000u);
}

// value / 2^(exponent - 127). What is too large for a float stays finite, and too large for the
// formats; what is too small for one is too small for them as well.
inline f32 divided(f32 value, f32 scale) {
  const u32 exponent = scale_exponent(scale);
  const f64 factor = bit_cast<f64>(static_cast<u64>(1023 + 127 - exponent) << 52);
  const f64 quotient = static_cast<f64>(value) * factor;
  const f64 not_above = quotient > 0x1p120 ? 0x1p120 : quotient;
  const f64 bounded = not_above < -0x1p120 ? -0x1p120 : not_above;
  const bool is_infinite = (bit_cast<u32>(value) & 0x7fffffffu) == 0x7f800000u;
  const f32 result = is_infinite ? value : static_cast<f32>(bounded);
  return exponent == 255 ? nan_of_sign(value) : result;
}

inline f32 multiplied(f32 value, f32 scale) {
  const u32 exponent = scale_exponent(scale);
  const f64 factor = bit_cast<f64>(static_cast<u64>(1023 - 127 + exponent) << 52);
  const f32 result = static_cast<f32>(static_cast<f64>(value) * factor);
  return exponent == 255 ? nan_of_sign(value) : result;
}

// ---- One or two elements ------------------------------------------------------------------------

inline bool saturates(Mode mode) { return mode.bits & kModeFp16Overflow; }

inline f32 lower(f16x2 pair) { return lower_half(pair); }
inline f32 upper(f16x2 pair) { return upper_half(pair); }
inline f32 lower(bf16x2 pair) { return bit_cast<f32>(pair.bits << 16); }
inline f32 upper(bf16x2 pair) { return bit_cast<f32>(pair.bits & 0xffff0000u); }

template <class T> constexpr u32 kMantissaOf = 23;
template <> constexpr u32 kMantissaOf<f16> = 10;
template <> constexpr u32 kMantissaOf<f16x2> = 10;
template <> constexpr u32 kMantissaOf<bf16> = 7;
template <> constexpr u32 kMantissaOf<bf16x2> = 7;

template <class Format> inline u32 narrow(f32 value, Mode mode) {
  return round_to<Format>(value, NearestEven{}, saturates(mode));
}
template <class Format, u32 kMantissa = 23>
inline u32 narrow_stochastic(f32 value, u32 random, Mode mode) {
  return round_to<Format, kMantissa>(value, Stochastic{random}, saturates(mode));
}

// Two codes, the first below the second.
template <class Format>
inline u32 narrow_pair(f32 a, f32 b, Mode mode) {
  return narrow<Format>(a, mode) | narrow<Format>(b, mode) << Format::kBits;
}
template <class Format> KeepHigh<u16> narrow_two(f32 a, f32 b, Mode mode) {
  return {static_cast<u16>(narrow_pair<Format>(a, b, mode))};
}
template <class Format>
inline u32 narrow_scaled(f32 a, f32 b, f32 scale, Mode mode) {
  return narrow_pair<Format>(divided(a, scale), divided(b, scale), mode);
}
template <class Format, class Pair>
inline u32 narrow_scaled(Pair pair, f32 scale, Mode mode) {
  return narrow_scaled<Format>(lower(pair), upper(pair), scale, mode);
}

template <class Format> u32 narrow_one_stochastic(f32 a, u32 random, Mode mode) {
  return narrow_stochastic<Format>(a, random, mode);
}
template <class Format, class T>
u32 narrow_scaled_stochastic(T a, u32 random, f32 scale, Mode mode) {
  return narrow_stochastic<Format, kMantissaOf<T>>(divided(a, scale), random, mode);
}
template <u32 kMantissa>
inline u32 fp4_pair_stochastic(f32 a, f32 b, u32 random, f32 scale, Mode mode) {
  const u32 first = narrow_stochastic<Fp4, kMantissa>(divided(a, scale), random, mode);
  return first | narrow_stochastic<Fp4, kMantissa>(divided(b, scale), next_random(random), mode)
                     << 4;
}
u32 fp4_of_floats_stochastic(u64 pair, u32 random, f32 scale, Mode mode) {
  const f32 a = mode.flush_source(bit_cast<f32>(static_cast<u32>(pair)));
  const f32 b = mode.flush_source(bit_cast<f32>(static_cast<u32>(pair >> 32)));
  return fp4_pair_stochastic<23>(a, b, random, scale, mode);
}
template <class Pair>
u32 fp4_of_halves_stochastic(Pair pair, u32 random, f32 scale, Mode mode) {
  return fp4_pair_stochastic<kMantissaOf<Pair>>(lower(pair), upper(pair), random, scale, mode);
}

template <class Format>
f32 widen(u32 code, f32 scale) {
  return multiplied(Format::value(code), scale);
}
template <class Format>
KeepHigh<f16> widen_to_half(u32 code, f32 scale) {
  return {f16(widen<Format>(code, scale))};
}
template <class Format>
u64 widen_to_floats(u32 codes, f32 scale, Mode mode) {
  const f32 low = mode.flush_result(widen<Format>(codes, scale));
  const f32 high = mode.flush_result(widen<Format>(codes >> Format::kBits, scale));
  return bit_cast<u32>(low) | u64{bit_cast<u32>(high)} << 32;
}
template <class Format>
f16x2 widen_to_halves(u32 codes, f32 scale) {
  const u32 low = float_to_half_rounded<Rounding::nearest_even>(widen<Format>(codes, scale));
  const u32 high =
      float_to_half_rounded<Rounding::nearest_even>(widen<Format>(codes >> Format::kBits, scale));
  return {low | high << 16};
}
template <class Format>
u32 widen_to_bfloats(u32 codes, f32 scale) {
  return float_to_bfloat(widen<Format>(codes, scale)) |
         u32{float_to_bfloat(widen<Format>(codes >> Format::kBits, scale))} << 16;
}

// ---- Executors that know op_sel -----------------------------------------------------------------

void refuse_output_modifiers(const Instruction& inst) {
  if (inst.clamp || inst.omod) fault("output modifiers of this conversion are not implemented");
}

Select byte_of(u32 index) { return static_cast<Select>(static_cast<u32>(Select::byte_0) + index); }
Select word_of(u32 index) { return static_cast<Select>(static_cast<u32>(Select::word_0) + index); }

template <auto kApply>
void execute_to_word(Wave& wave, const Instruction& inst) {
  refuse_output_modifiers(inst);
  Elementwise<kApply>::execute(wave, inst);
}

// The result is the byte that op_sel[3:2] says, and the others stay.
template <auto kApply>
void execute_to_byte(Wave& wave, const Instruction& inst) {
  refuse_output_modifiers(inst);
  Instruction byte = inst;
  byte.destination_select = byte_of(inst.op_sel >> 2 & 3);
  byte.destination_unused = 2;
  byte.has_output_modifiers = true;
  Elementwise<kApply>::execute(wave, byte);
}

template <class Format> constexpr auto& execute_pk = execute_to_word<&narrow_two<Format>>;
template <class Format>
constexpr auto& execute_unscaled_sr = execute_to_byte<&narrow_one_stochastic<Format>>;
template <class Format, class T>
constexpr auto& execute_sr = execute_to_byte<&narrow_scaled_stochastic<Format, T>>;

// The source is the part of a register that op_sel says.
template <auto kApply>
void execute_from_part(Wave& wave, const Instruction& inst, Select part) {
  Instruction selected = inst;
  selected.source[0].select = part;
  selected.source[0].direct = false;
  NearestElementwise<kApply>::execute(wave, selected);
}
template <auto kApply>
void execute_from_byte(Wave& wave, const Instruction& inst) {
  execute_from_part<kApply>(wave, inst, byte_of(inst.op_sel & 3));
}
// Pairs: clamp would be that of two numbers.
template <auto kApply>
void execute_pair_from_byte(Wave& wave, const Instruction& inst) {
  refuse_output_modifiers(inst);
  execute_from_part<kApply>(wave, inst, byte_of(inst.op_sel & 3));
}
template <auto kApply>
void execute_pair_from_word(Wave& wave, const Instruction& inst) {
  refuse_output_modifiers(inst);
  execute_from_part<kApply>(wave, inst, word_of(inst.op_sel & 1));
}

// ---- 32 elements of 6 bits ----------------------------------------------------------------------

constexpr u32 kElements = 32, kPackedDwords = 6;
using Registers = const u32 (*)[kLanes];

// Element `index` of the registers of one lane. MODE rules denormals of floats; those of the other
// types are always kept.
template <class T>
f32 element(const Wave& wave, Registers registers, u32 index, u32 lane) {
  if constexpr (std::is_same_v<T, f32>) {
    return Mode{wave.mode}.flush_source(bit_cast<f32>(registers[index][lane]));
  } else {
    const T pair{registers[index / 2][lane]};
    return index % 2 ? upper(pair) : lower(pair);
  }
}

u32 packed_code(Registers registers, u32 index, u32 lane) {
  const u32 position = 6 * index, dword = position / 32, shift = position % 32;
  const u64 high = dword + 1 < kPackedDwords ? registers[dword + 1][lane] : 0;
  return static_cast<u32>((high << 32 | registers[dword][lane]) >> shift) & 63;
}
void pack_code(u32 (*registers)[kLanes], u32 index, u32 lane, u32 code) {
  const u32 position = 6 * index, dword = position / 32, shift = position % 32;
  registers[dword][lane] |= code << shift;
  if (shift > 26) registers[dword + 1][lane] |= code >> (32 - shift);
}

Registers read_registers(Wave& wave, const Operand& operand) {
  hooks::vgpr_read(wave, operand.index, operand.dwords, wave.exec());
  return wave.vgpr + operand.index;
}
void write_registers(Wave& wave, const Operand& operand, Registers registers) {
  for (u32 i = 0; i < operand.dwords; ++i)
    write_vgpr(wave, operand.index + i, registers[i], wave.exec());
}

// Elements of kSources sources in turn.
template <class Format, class T, u32 kSources = 1>
void execute_narrow_32(Wave& wave, const Instruction& inst) {
  refuse_output_modifiers(inst);
  Registers sources[kSources];
  for (u32 k = 0; k < kSources; ++k) sources[k] = read_registers(wave, inst.source[k]);
  LaneBuffer buffer;
  const LaneSource<f32> scale(wave, inst, inst.source[kSources], buffer);
  u32 result[kPackedDwords][kLanes] = {};
  for (u32 i = 0; i < kElements; ++i) {
    for (u32 lane = 0; lane < kLanes; ++lane) {
      const f32 value = element<T>(wave, sources[i % kSources], i / kSources, lane);
      pack_code(result, i, lane, narrow<Format>(divided(value, scale[lane]), {0}));
    }
  }
  write_registers(wave, inst.destination, result);
}

template <class Format, class T> void execute_sr_32(Wave& wave, const Instruction& inst) {
  refuse_output_modifiers(inst);
  const Registers source = read_registers(wave, inst.source[0]);
  LaneBuffer buffers[2];
  const LaneSource<u32> first_random(wave, inst, inst.source[1], buffers[0]);
  const LaneSource<f32> scale(wave, inst, inst.source[2], buffers[1]);
  u32 result[kPackedDwords][kLanes] = {};
  for (u32 lane = 0; lane < kLanes; ++lane) {
    u32 random = first_random[lane];
    for (u32 i = 0; i < kElements; ++i, random = next_random(random)) {
      const f32 value = divided(element<T>(wave, source, i, lane), scale[lane]);
      pack_code(result, i, lane, narrow_stochastic<Format, kMantissaOf<T>>(value, random, {0}));
    }
  }
  write_registers(wave, inst.destination, result);
}

template <class Format, class T> void execute_widen_32(Wave& wave, const Instruction& inst) {
  refuse_output_modifiers(inst);
  const Registers source = read_registers(wave, inst.source[0]);
  LaneBuffer buffer;
  const LaneSource<f32> scale(wave, inst, inst.source[1], buffer);
  constexpr u32 kOfDword = 4 / sizeof(T);
  u32 result[kElements / kOfDword][kLanes] = {};
  for (u32 i = 0; i < kElements; ++i) {
    for (u32 lane = 0; lane < kLanes; ++lane) {
      const f32 value = widen<Format>(packed_code(source, i, lane), scale[lane]);
      u32 bits;
      if constexpr (std::is_same_v<T, f32>)
        bits = bit_cast<u32>(Mode{wave.mode}.flush_result(value));
      else if constexpr (std::is_same_v<T, bf16>) bits = float_to_bfloat(value);
      else bits = float_to_half_rounded<Rounding::nearest_even>(value);
      result[i / kOfDword][lane] |= bits << (16 * (i % kOfDword));
    }
  }
  if (std::is_same_v<T, f16> && !wave.default_float_mode)
    for (u32* plane : result) flush_denormal_results(wave, OperandType::f16x2, plane, nullptr);
  write_registers(wave, inst.destination, result);
}

#define VECTOR_TABLE "instructions/vop3_convert.inc"
#define VECTOR_FORMAT VOP3
#include "instructions/vector_table.h"

}  // namespace

DefinitionSpan vop3_convert_definitions() { return {kDefinitions, std::size(kDefinitions)}; }

}  // namespace emulator
