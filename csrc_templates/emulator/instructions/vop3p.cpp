// VOP3P: packed math. The table is vop3p.inc.
#include "execution/lanes.h"
#include "numbers/float_order.h"
#include "numbers/half_arithmetic.h"

namespace emulator {
namespace {

// ---- Halves -------------------------------------------------------------------------------------

// The planes that the halves of a source lie in. T is the type of a half.
template <class T>
Planes read_halves(Wave& wave, const Instruction& inst, u32 index, LaneBuffer& buffer) {
  const Operand& operand = inst.source[index];
  if constexpr (sizeof(T) == 4) {
    // The documents do not say what the upper half of a constant is, and nobody uses it.
    const bool uses_upper = (inst.op_sel | inst.op_sel_hi) >> index & 1;
    if (operand.place == Place::constant && operand.constant != 0 && uses_upper)
      fault("the upper half of a constant is not implemented");
  }
  const Planes planes = read_lanes(wave, inst, operand, buffer);
  constexpr OperandType kType = packed_type(operand_type<T>);
  if (float_class(kType) == FloatClass::none || __builtin_expect(wave.default_float_mode, 1))
    return planes;
  if constexpr (kType != OperandType::f32x2)
    return flush_denormal_sources(wave, kType, planes, buffer);
  LaneBuffer upper;
  const Planes high = flush_denormal_sources(wave, OperandType::f32, {planes.high, nullptr}, upper);
  std::memcpy(buffer.plane[1], high.low, sizeof(buffer.plane[1]));
  return {flush_denormal_sources(wave, OperandType::f32, planes, buffer).low, buffer.plane[1]};
}

// One half of one source, in all lanes: the 16-bit half of a dword, or one of two registers.
template <class T>
class HalfSource {
 public:
  HalfSource(Wave&, const Instruction& inst, const Planes& planes, u32 index, bool upper) {
    const bool chooses_upper = (upper ? inst.op_sel_hi : inst.op_sel) >> index & 1;
    const bool negates = (upper ? inst.neg_hi : inst.neg_lo) >> index & 1;
    constexpr bool kIsFloat = float_class(operand_type<T>) != FloatClass::none;
    plane_ = sizeof(T) == 4 && chooses_upper ? planes.high : planes.low;
    shift_ = sizeof(T) == 2 && chooses_upper ? 16 : 0;
    flip_ = kIsFloat && negates ? 1u << (8 * sizeof(T) - 1) : 0;
  }
  T operator[](u32 lane) const {
    const u32 bits = (plane_[lane] >> shift_) ^ flip_;
    if constexpr (sizeof(T) == 2) {
      return bit_cast<T>(static_cast<u16>(bits));
    } else {
      return bit_cast<T>(bits);
    }
  }

 private:
  const u32* plane_;
  u32 shift_, flip_;
};
template <>
class HalfSource<Mode> {
 public:
  HalfSource(Wave& wave, const Instruction&, const Planes&, u32, bool) : mode_{wave.mode} {}
  Mode operator[](u32) const { return mode_; }

 private:
  Mode mode_;
};
template <>
Planes read_halves<Mode>(Wave&, const Instruction&, u32, LaneBuffer&) {
  return {};
}

// The bits of a half's result, under the instruction's clamp.
template <class R>
class HalfResult {
 public:
  using Value = R;
  HalfResult(const Wave& wave, const Instruction& inst)
      : clamps_(inst.clamp), nan_to_zero_(wave.mode & kModeDx10Clamp) {}
  u32 bits(R value) const {
    if constexpr (std::is_integral_v<R>) {
      return static_cast<std::make_unsigned_t<R>>(value);
    } else if constexpr (sizeof(R) == 2) {
      return (clamps_ ? R(clamped(value)) : value).bits;
    } else {
      return bit_cast<u32>(clamps_ ? clamped(value) : value);
    }
  }

 private:
  f32 clamped(f32 value) const {
    const f32 bounded = value > 1.0f ? 1.0f : value > 0.0f ? value : 0.0f;
    return value == value || nan_to_zero_ ? bounded : value;
  }
  bool clamps_, nan_to_zero_;
};
template <class T>
class HalfResult<Saturating<T>> {
 public:
  using Value = T;
  HalfResult(const Wave&, const Instruction& inst) {
    if (!inst.clamp) return;
    lowest_ = LaneResult<Saturating<T>>::kLowest;
    highest_ = LaneResult<Saturating<T>>::kHighest;
  }
  u32 bits(Saturating<T> result) const {
    const i64 above = result.exact < lowest_ ? lowest_ : result.exact;
    return static_cast<std::make_unsigned_t<T>>(above > highest_ ? highest_ : above);
  }

 private:
  i64 lowest_ = INT64_MIN, highest_ = INT64_MAX;
};

// The same function on both halves.
template <auto kApply>
struct Packed;
template <class R, class... A, R (*kApply)(A...)>
struct Packed<kApply> {
  static constexpr Signature kSignature = packed_signature(signature_of(kApply));
  static void execute(Wave& wave, const Instruction& inst) {
    run(wave, inst, std::index_sequence_for<A...>{});
  }

 private:
  template <std::size_t... I>
  static void run(Wave& wave, const Instruction& inst, std::index_sequence<I...>) {
    LaneBuffer buffers[sizeof...(A)];
    LaneBuffer output;
    const Planes planes[] = {read_halves<A>(wave, inst, I, buffers[I])...};
    const FloatEnvironment<float_class(kSignature)> environment(wave);
    const std::tuple<HalfSource<A>...> low{HalfSource<A>(wave, inst, planes[I], I, false)...};
    const std::tuple<HalfSource<A>...> high{HalfSource<A>(wave, inst, planes[I], I, true)...};
    const HalfResult<R> result(wave, inst);
    constexpr bool kIsDword = sizeof(typename HalfResult<R>::Value) == 2;
    u32* const first = output.plane[0];
    u32* const second = output.plane[1];
    EMULATOR_LANE_LOOP
    for (u32 lane = 0; lane < kLanes; ++lane) {
      const u32 a = result.bits(kApply(std::get<I>(low)[lane]...));
      const u32 b = result.bits(kApply(std::get<I>(high)[lane]...));
      first[lane] = kIsDword ? a | b << 16 : a;
      second[lane] = b;
    }
    if (__builtin_expect(!wave.default_float_mode, 0)) finish_denormals(wave, first, second);
    const u64 mask = write_mask(wave, inst);
    write_vgpr(wave, inst.destination.index, first, mask);
    if constexpr (!kIsDword) write_vgpr(wave, inst.destination.index + 1, second, mask);
  }
  static void finish_denormals(const Wave& wave, u32* first, u32* second) {
    if constexpr (kSignature.result.type == OperandType::f16x2) {
      if (wave.mode & kModeFp16Overflow) fault("MODE.FP16_OVFL is not emulated here");
      flush_denormal_results(wave, OperandType::f16x2, first, nullptr);
    } else if constexpr (kSignature.result.type == OperandType::f32x2) {
      flush_denormal_results(wave, OperandType::f32, first, nullptr);
      flush_denormal_results(wave, OperandType::f32, second, nullptr);
    }
  }
};

// v_pk_mov_b32: one register of each source.
void execute_pk_mov(Wave& wave, const Instruction& inst) {
  LaneBuffer buffers[2], result;
  for (u32 k = 0; k < 2; ++k) {
    const Planes planes = read_halves<f32>(wave, inst, k, buffers[k]);
    std::memcpy(result.plane[k], inst.op_sel >> k & 1 ? planes.high : planes.low,
                sizeof(result.plane[k]));
  }
  write_vgpr(wave, inst.destination.index, result.plane[0], wave.exec());
  write_vgpr(wave, inst.destination.index + 1, result.plane[1], wave.exec());
}

// ---- Mixed precision ----------------------------------------------------------------------------

// One source of v_fma_mix as floats: op_sel_hi says that it is one of two halves, neg_hi takes the
// absolute value.
void read_mixed(Wave& wave, const Instruction& inst, u32 index, f32* values) {
  LaneBuffer buffer;
  const bool is_half = inst.op_sel_hi >> index & 1;
  const u32 shift = inst.op_sel >> index & 1 ? 16 : 0;
  const u32 keep = inst.neg_hi >> index & 1 ? 0x7fffffffu : ~0u;
  const u32 flip = inst.neg_lo >> index & 1 ? 0x80000000u : 0;
  Operand operand = inst.source[index];
  const u32 field = inst.words[1] >> (9 * index) & 0x1ff;
  const bool is_float_constant = field >= 240 && field <= 248;
  if (is_half && is_float_constant)
    operand.constant = float_to_half_rounded<Rounding::nearest_even>(
        bit_cast<f32>(static_cast<u32>(operand.constant)));
  Planes planes = read_lanes(wave, inst, operand, buffer);
  if (!wave.default_float_mode)
    planes = flush_denormal_sources(wave, is_half ? OperandType::f16x2 : OperandType::f32, planes,
                                    buffer);
  if (is_half) {
    for (u32 lane = 0; lane < kLanes; ++lane) {
      const f32 value = half_to_float(static_cast<u16>(planes.low[lane] >> shift));
      values[lane] = bit_cast<f32>((bit_cast<u32>(value) & keep) ^ flip);
    }
  } else {
    for (u32 lane = 0; lane < kLanes; ++lane)
      values[lane] = bit_cast<f32>((planes.low[lane] & keep) ^ flip);
  }
}

enum class MixResult { f32, low_half, high_half };

template <MixResult kResult>
void execute_fma_mix(Wave& wave, const Instruction& inst) {
  alignas(64) f32 a[kLanes], b[kLanes], c[kLanes];
  read_mixed(wave, inst, 0, a);
  read_mixed(wave, inst, 1, b);
  read_mixed(wave, inst, 2, c);
  LaneBuffer output;
  u32* const plane = output.plane[0];
  {
    const FloatEnvironment<FloatClass::single> environment(wave);
    for (u32 lane = 0; lane < kLanes; ++lane)
      plane[lane] = bit_cast<u32>(__builtin_fmaf(a[lane], b[lane], c[lane]));
  }
  if (!wave.default_float_mode) flush_denormal_results(wave, OperandType::f32, plane, nullptr);
  if constexpr (kResult == MixResult::f32) {
    commit(wave, inst, plane, nullptr, wave.exec());
  } else {
    const FloatEnvironment<FloatClass::half_or_double> environment(wave);
    for (u32 lane = 0; lane < kLanes; ++lane)
      plane[lane] = float_to_half(bit_cast<f32>(plane[lane]));
    if (!wave.default_float_mode) flush_denormal_results(wave, OperandType::f16, plane, nullptr);
    // The other half of the destination stays.
    Instruction half = inst;
    half.destination_select = kResult == MixResult::high_half ? Select::word_1 : Select::word_0;
    half.destination_unused = 2;
    commit(wave, half, plane, nullptr, wave.exec());
  }
}

// ---- Dot products -------------------------------------------------------------------------------

// A function of both halves of two sources, and of the bits of a whole third one.
template <auto kApply>
struct DotOfHalves;
template <class R, class T, class C, R (*kApply)(T, T, T, T, C)>
struct DotOfHalves<kApply> {
  static void execute(Wave& wave, const Instruction& inst) {
    constexpr bool kIsFloat = float_class(operand_type<T>) != FloatClass::none;
    const u32 negations = kIsFloat ? (inst.neg_hi & 4u) : (inst.neg_lo | inst.neg_hi);
    if (negations) fault("neg_lo or neg_hi of this dot product is not implemented");
    // LLVM refuses to choose halves on these chips.
    if (inst.op_sel || (inst.op_sel_hi & 3) != 3)
      fault("op_sel of this dot product is not implemented");
    LaneBuffer buffers[3];
    const Planes a = read_lanes(wave, inst, inst.source[0], buffers[0]);
    const Planes b = read_lanes(wave, inst, inst.source[1], buffers[1]);
    const HalfSource<T> a_low(wave, inst, a, 0, false), a_high(wave, inst, a, 0, true);
    const HalfSource<T> b_low(wave, inst, b, 1, false), b_high(wave, inst, b, 1, true);
    const LaneSource<C> c(wave, inst, inst.source[2], buffers[2]);
    const C flip = inst.neg_lo & 4u ? C(0x80000000u) : C(0);
    const HalfResult<R> result(wave, inst);
    LaneBuffer output;
    EMULATOR_LANE_LOOP
    for (u32 lane = 0; lane < kLanes; ++lane) {
      const C addend = c[lane] ^ flip;
      output.plane[0][lane] =
          result.bits(kApply(a_low[lane], a_high[lane], b_low[lane], b_high[lane], addend));
    }
    write_vgpr(wave, inst.destination.index, output.plane[0], wave.exec());
  }
};

template <class C, class T> Saturating<C> dot2_integer(T a, T b, T c, T d, C addend) {
  return {i64{a} * c + i64{b} * d + addend};
}

// Whole dwords: neither halves nor signs to choose.
template <auto kApply>
void execute_unmodified(Wave& wave, const Instruction& inst) {
  if (inst.neg_lo | inst.neg_hi | inst.op_sel)
    fault("op_sel and neg of this dot product are not implemented");
  Elementwise<kApply>::execute(wave, inst);
}

// ---- Moves --------------------------------------------------------------------------------------

// The decoder has put the accumulation register in its place.
void execute_accvgpr_move(Wave& wave, const Instruction& inst) {
  LaneBuffer buffer;
  write_vgpr(wave, inst.destination.index, read_lanes(wave, inst, inst.source[0], buffer).low,
             wave.exec());
}

#define VECTOR_TABLE "instructions/vop3p.inc"
#define VECTOR_FORMAT VOP3P
#define VECTOR_EXECUTOR Packed
#define VECTOR_SIGNATURE(...) packed_signature(EMULATOR_SIGNATURE(__VA_ARGS__))
#include "instructions/vector_table.h"

}  // namespace

DefinitionSpan vop3p_definitions() { return {kDefinitions, std::size(kDefinitions)}; }

}  // namespace emulator
