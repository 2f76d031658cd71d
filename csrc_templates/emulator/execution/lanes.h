// The operand layer of vector instructions: an instruction's semantics for one lane becomes a loop
// over 64 lanes that the compiler turns into vector code.
//
// A register is a plane of 64 dwords. A source is read where it lies when it is a plain VGPR
// (`Operand::direct`); everything else (scalars, constants, SDWA, DPP, neg, abs, op_sel) is brought
// into a buffer first, out of line, so that the loops exist once for each instruction.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#include "execution/float_mode.h"
#include "execution/hooks.h"
#include "execution/scalar_operands.h"
#include "execution/wave.h"

// Lanes do not depend on each other: a result may overwrite its own source, lane by lane.
#if defined(__clang__)
#define EMULATOR_LANE_LOOP _Pragma("clang loop vectorize(assume_safety)")
#else
#define EMULATOR_LANE_LOOP _Pragma("GCC ivdep")
#endif

namespace emulator {

struct alignas(64) LaneBuffer {
  u32 plane[2][kLanes];
};

struct Planes {
  const u32* low;
  const u32* high;  // of 64-bit operands
};

// The result of an instruction on its way to the registers, and its carry or comparison mask.
struct alignas(64) ResultBuffer {
  u32 plane[2][kLanes];
  u32 mask[kLanes];  // zero or not
};

Planes materialize(Wave&, const Instruction&, const Operand&, LaneBuffer&);

inline Planes read_lanes(Wave& wave, const Instruction& inst, const Operand& operand,
                         LaneBuffer& buffer) {
  if (__builtin_expect(operand.direct, 1)) {
    hooks::vgpr_read(wave, operand.index, operand.dwords, wave.exec());
    return {wave.vgpr[operand.index], wave.vgpr[operand.index + (operand.dwords > 1)]};
  }
  return materialize(wave, inst, operand, buffer);
}

// Under a MODE that flushes denormal sources: planes with zeros for them; else the planes as they
// are.
Planes flush_denormal_sources(const Wave&, OperandType, Planes, LaneBuffer&);
// The same for results, in place.
void flush_denormal_results(const Wave&, OperandType, u32* low, u32* high);

// The lane that DPP's `control` makes lane `lane` read; -1 where there is none.
int dpp_source_lane(u32 control, int lane);
// Lanes whose result is kept under DPP's masks; a subset of EXEC.
u64 dpp_write_mask(const Wave&, const Dpp&);

inline u64 write_mask(const Wave& wave, const Instruction& inst) {
  return __builtin_expect(inst.dpp, 0) ? dpp_write_mask(wave, inst.dpp_control) : wave.exec();
}

// Writes planes to the destination: output modifiers, SDWA's and op_sel's parts, masked lanes.
// `keep_high`: a 16-bit result leaves the other half alone. Changes `low` and `high` in place.
void commit(Wave&, const Instruction&, u32* low, u32* high, u64 mask, bool keep_high = false);
// A bit for each lane whose dword is not zero.
u64 pack_mask(const u32* plane);
// 0 or ~0 for each lane.
void expand_mask(u64 mask, u32* plane);
// Lanes of `plane` that are in the mask go to register `index`.
void write_vgpr(Wave&, u32 index, const u32* plane, u64 mask);

// A loop that writes a plane straight into its register.
inline bool writes_in_place(const Wave& wave, const Instruction& inst) {
  return wave.exec() == kAllLanes && !inst.has_output_modifiers && !inst.dpp;
}

// ---- One lane of a source -----------------------------------------------------------------------

template <class T>
struct LaneSource {
  static_assert(operand_type<T> != OperandType::none, "not a type of a vector source");
  const u32* low;
  const u32* high;

  LaneSource(Wave& wave, const Instruction& inst, const Operand& operand, LaneBuffer& buffer) {
    Planes planes = read_lanes(wave, inst, operand, buffer);
    if constexpr (float_class(operand_type<T>) != FloatClass::none) {
      if (__builtin_expect(!wave.default_float_mode, 0))
        planes = flush_denormal_sources(wave, operand_type<T>, planes, buffer);
    }
    low = planes.low;
    high = planes.high;
  }
  T operator[](u32 lane) const {
    if constexpr (sizeof(T) == 8) {
      return bit_cast<T>(static_cast<u64>(high[lane]) << 32 | low[lane]);
    } else if constexpr (sizeof(T) == 2) {
      return bit_cast<T>(static_cast<u16>(low[lane]));
    } else {
      return reinterpret_cast<const T*>(low)[lane];
    }
  }
};

template <class T>
struct LaneSource<Old<T>> : LaneSource<T> {
  using LaneSource<T>::LaneSource;
  Old<T> operator[](u32 lane) const { return {LaneSource<T>::operator[](lane)}; }
};

template <class T>
struct LaneSource<Literal<T>> {
  T value;
  LaneSource(Wave& wave, const Instruction&, const Operand& operand, LaneBuffer&) {
    u32 bits = static_cast<u32>(operand.constant);
    constexpr u32 kExponent = sizeof(T) == 2 ? 0x7c00 : 0x7f800000;
    constexpr u32 kSign = sizeof(T) == 2 ? 0x8000 : 0x80000000;
    constexpr u32 kKeepsDenormals = sizeof(T) == 2 ? 1u << 6 : 1u << 4;  // of MODE
    if (!(wave.mode & kKeepsDenormals) && !(bits & kExponent)) bits &= kSign;
    if constexpr (sizeof(T) == 2) {
      value = bit_cast<T>(static_cast<u16>(bits));
    } else {
      value = bit_cast<T>(bits);
    }
  }
  Literal<T> operator[](u32) const { return {value}; }
};

// A bit of each lane, by the operand's mask or by VCC.
template <class T>
struct LaneBits {
  const u32* low;
  LaneBits(Wave& wave, const Instruction&, const Operand& operand, LaneBuffer& buffer)
      : low(buffer.plane[0]) {
    expand_mask(std::is_same_v<T, Vcc> ? read_scalar_pair(wave, kVccIndex)
                                       : read_scalar_bits(wave, operand),
                buffer.plane[0]);
  }
  T operator[](u32 lane) const { return {low[lane]}; }
};
// clang-format off
template <> struct LaneSource<LaneBit> : LaneBits<LaneBit> { using LaneBits::LaneBits; };
template <> struct LaneSource<Vcc> : LaneBits<Vcc> { using LaneBits::LaneBits; };
// clang-format on

template <>
struct LaneSource<Mode> {
  const Mode value;
  LaneSource(Wave& wave, const Instruction&, const Operand&, LaneBuffer&) : value{wave.mode} {}
  Mode operator[](u32) const { return value; }
};

// ---- The results of all lanes -------------------------------------------------------------------
// Holds pointers only: its address never escapes, so that the loop keeps them in registers.

template <class T>
inline void flush_results(const Wave& wave, u32* low, u32* high) {
  constexpr OperandType kType = result_of<T>.type;
  if constexpr (float_class(kType) != FloatClass::none)
    if (__builtin_expect(!wave.default_float_mode, 0))
      flush_denormal_results(wave, kType, low, high);
}

enum Buffered { kBuffered };  // a result that goes to the buffer first, whatever the registers

template <class T>
struct LaneResult {
  static_assert(sizeof(T) == 4 || sizeof(T) == 2, "specialised below");
  u32* const out;

  LaneResult(Wave& wave, const Instruction& inst, ResultBuffer& buffer)
      : out(writes_in_place(wave, inst) ? wave.vgpr[inst.destination.index] : buffer.plane[0]) {}
  LaneResult(Wave&, const Instruction&, ResultBuffer& buffer, Buffered) : out(buffer.plane[0]) {}
  void put(u32 lane, T value) const {
    if constexpr (sizeof(T) == 2) {
      out[lane] = bit_cast<u16>(value);
    } else {
      reinterpret_cast<T*>(out)[lane] = value;
    }
  }
  void finish(Wave& wave, const Instruction& inst, ResultBuffer& buffer) const {
    flush_results<T>(wave, out, nullptr);
    if (out != buffer.plane[0]) {
      hooks::vgpr_written(wave, inst.destination.index, 1, kAllLanes);
    } else {
      commit(wave, inst, buffer.plane[0], nullptr, write_mask(wave, inst));
    }
  }
};

// 64-bit results may overlap one half of a source, so they never go straight to the registers.
template <class T>
struct LaneResult64 {
  u32* const low;
  u32* const high;

  LaneResult64(Wave&, const Instruction&, ResultBuffer& buffer)
      : low(buffer.plane[0]), high(buffer.plane[1]) {}
  void put(u32 lane, T value) const {
    const u64 bits = bit_cast<u64>(value);
    low[lane] = static_cast<u32>(bits);
    high[lane] = static_cast<u32>(bits >> 32);
  }
  void finish(Wave& wave, const Instruction& inst, ResultBuffer& buffer) const {
    flush_results<T>(wave, low, high);
    commit(wave, inst, buffer.plane[0], buffer.plane[1], write_mask(wave, inst));
  }
};
// clang-format off
template <> struct LaneResult<u64> : LaneResult64<u64> { using LaneResult64::LaneResult64; };
template <> struct LaneResult<i64> : LaneResult64<i64> { using LaneResult64::LaneResult64; };
template <> struct LaneResult<f64> : LaneResult64<f64> { using LaneResult64::LaneResult64; };
// clang-format on

template <class T>
struct LaneResult<Saturating<T>> : LaneResult<T> {
  static constexpr i64 kLowest = std::is_signed_v<T> ? -(i64{1} << (8 * sizeof(T) - 1)) : 0;
  static constexpr i64 kHighest =
      std::is_signed_v<T> ? (i64{1} << (8 * sizeof(T) - 1)) - 1 : (i64{1} << (8 * sizeof(T))) - 1;
  using LaneResult<T>::LaneResult;
  void put(u32 lane, Saturating<T> result) const {
    LaneResult<T>::put(lane, static_cast<T>(result.exact));
  }
  void put_saturated(u32 lane, Saturating<T> result) const {
    const i64 bounded = result.exact < kLowest    ? kLowest
                        : result.exact > kHighest ? kHighest
                                                  : result.exact;
    LaneResult<T>::put(lane, static_cast<T>(bounded));
  }
};

// The 16 bits are in the lower half of `plane[0]` first.
template <class T>
struct LaneResult<KeepHigh<T>> : LaneResult<T> {
  LaneResult(Wave& wave, const Instruction& inst, ResultBuffer& buffer)
      : LaneResult<T>(wave, inst, buffer, kBuffered) {}
  void put(u32 lane, KeepHigh<T> result) const { LaneResult<T>::put(lane, result.value); }
  template <class S> void put_saturated(u32 lane, KeepHigh<S> result) const {
    LaneResult<T>::put_saturated(lane, result.value);
  }
  void finish(Wave& wave, const Instruction& inst, ResultBuffer& buffer) const {
    flush_results<T>(wave, buffer.plane[0], nullptr);
    commit(wave, inst, buffer.plane[0], nullptr, write_mask(wave, inst), true);
  }
};

// The mask of a comparison; lanes outside of EXEC give 0.
template <>
struct LaneResult<bool> {
  u32* const out;
  LaneResult(Wave&, const Instruction&, ResultBuffer& buffer) : out(buffer.mask) {}
  void put(u32 lane, bool value) const { out[lane] = value; }
  void finish(Wave& wave, const Instruction& inst, ResultBuffer& buffer) const {
    const u64 mask = pack_mask(buffer.mask) & write_mask(wave, inst);
    write_scalar_pair(wave, inst.scalar_destination.index, mask);
  }
};

// A value and a mask: v_add_co, v_div_scale.
template <class T>
struct LaneResult<WithCarry<T>> {
  const LaneResult<T> value;
  const LaneResult<bool> carry;
  LaneResult(Wave& wave, const Instruction& inst, ResultBuffer& buffer)
      : value(wave, inst, buffer), carry(wave, inst, buffer) {}
  void put(u32 lane, WithCarry<T> result) const {
    value.put(lane, result.value);
    carry.put(lane, result.carry);
  }
  void put_saturated(u32 lane, WithCarry<T> result) const {
    value.put_saturated(lane, result.value);
    carry.put(lane, result.carry);
  }
  void finish(Wave& wave, const Instruction& inst, ResultBuffer& buffer) const {
    value.finish(wave, inst, buffer);
    carry.finish(wave, inst, buffer);
  }
};

// ---- The executor -------------------------------------------------------------------------------

template <auto kApply>
struct Elementwise;

template <class R, class... A, R (*kApply)(A...)>
struct Elementwise<kApply> {
  static constexpr Signature kSignature = signature_of(kApply);

  static void execute(Wave& wave, const Instruction& inst) {
    run(wave, inst, std::index_sequence_for<A...>{});
  }

 private:
  template <std::size_t... I>
  static void run(Wave& wave, const Instruction& inst, std::index_sequence<I...>) {
    LaneBuffer buffers[sizeof...(A) + 1];
    const std::tuple<LaneSource<A>...> sources{
        LaneSource<A>(wave, inst, inst.source[I], buffers[I])...};
    const FloatEnvironment<float_class(kSignature)> environment(wave);
    ResultBuffer output;
    const LaneResult<R> result(wave, inst, output);
    if constexpr (kSaturates<R>) {
      if (inst.clamp) {
        for (u32 lane = 0; lane < kLanes; ++lane)
          result.put_saturated(lane, kApply(std::get<I>(sources)[lane]...));
        result.finish(wave, inst, output);
        return;
      }
    }
    EMULATOR_LANE_LOOP
    for (u32 lane = 0; lane < kLanes; ++lane)
      result.put(lane, kApply(std::get<I>(sources)[lane]...));
    result.finish(wave, inst, output);
  }
};

// Instructions that round to nearest whatever MODE says; the transcendental ones are
// approximations.
template <auto kApply>
struct NearestElementwise {
  static constexpr Signature kSignature = Elementwise<kApply>::kSignature;
  static void execute(Wave& wave, const Instruction& inst) {
    const u32 mode = wave.mode;
    wave.mode &= ~static_cast<u32>(kModeRound32 | kModeRound16And64);
    Elementwise<kApply>::execute(wave, inst);
    wave.mode = mode;
  }
};

}  // namespace emulator
