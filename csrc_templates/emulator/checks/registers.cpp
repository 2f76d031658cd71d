// Reads of registers that nobody wrote, lane by lane.
#include "checks/check.h"
#include "execution/lanes.h"

namespace emulator {
namespace {

constexpr u64 bits_of(u32 index, u32 count) {
  return ((count >= 64 ? 0 : u64{1} << count) - 1) << (index % 64);
}

void set_written_scalars(RegisterState& state, u32 index, u32 count) {
  for (u32 i = index; i < index + count && i < 128; ++i)
    state.written_scalars[i / 64] |= u64{1} << (i % 64);
}

// v_readlane, v_readfirstlane and v_writelane have one lane of a register, whatever EXEC says.
u64 lane_that_is_meant(const Wave& wave, const Instruction& inst) {
  const Operand& select = inst.source[1];
  if (select.place == Place::none) return wave.exec() ? wave.exec() & (0 - wave.exec()) : 1;
  const u64 lane = select.place == Place::scalar ? wave.scalar[select.index] : select.constant;
  return u64{1} << (lane & 63);
}

// Scalars are spilled to lanes of a register, and registers to accumulation registers, and come
// back, whether they are defined or not. What is not stays so, and is reported where it is used.
void leave_undefined(RegisterState& state, u64 lanes) {
  state.undefined_result[0] = lanes;
  state.has_undefined_result = true;
}

// Compilers leave half of a pair undefined where it does not matter: packed float math on an odd
// number of elements, 64-bit multiplication for the low half alone; and 64-bit moves may move what
// is not defined at all. What follows from it in the result is then undefined too, and reported
// where it is read.
bool flows_into_result(Wave& wave, const Instruction& inst, u32 index, const u64 (&missing)[2]) {
  const InstructionTraits& traits = *wave.observation->current;
  RegisterState& state = wave.observation->registers;
  u64 result[2] = {0, 0};
  if (traits.high_half_flows_up) {
    if (missing[0]) return false;
    result[1] = missing[1];
  } else if (traits.halves_are_independent) {
    const bool is_move = inst.encoding == Format::VOP1;
    if (missing[0] & missing[1] && !is_move) return false;
    for (u32 k = 0; k < kMaxSources; ++k) {
      if (inst.source[k].place != Place::vgpr || inst.source[k].index != index) continue;
      const bool is_packed = inst.encoding == Format::VOP3P;
      result[0] |= missing[is_packed ? inst.op_sel >> k & 1 : 0];
      result[1] |= missing[is_packed ? inst.op_sel_hi >> k & 1 : 1];
    }
  } else {
    return false;
  }
  for (u32 half = 0; half < 2; ++half) state.undefined_result[half] |= result[half];
  state.has_undefined_result = true;
  return true;
}

void report_unwritten(Wave& wave, u32 index, u32 dwords, u64 lanes) {
  const Instruction& inst = *wave.current;
  RegisterState& state = wave.observation->registers;
  if (wave.observation->current->reads_one_lane) lanes = lane_that_is_meant(wave, inst);
  if (wave.observation->current->moves_one_lane) {
    if (lanes & ~state.written[index]) leave_undefined(state, kAllLanes);
    return;
  }
  if (wave.observation->current->moves_accumulation)
    return leave_undefined(state, lanes & ~state.written[index]);
  if (dwords == 2) {
    const u64 missing[2] = {lanes & ~state.written[index], lanes & ~state.written[index + 1]};
    if (flows_into_result(wave, inst, index, missing)) return;
  }
  for (u32 reg = index; reg < index + dwords; ++reg) {
    const u64 missing = lanes & ~state.written[reg];
    if (!missing) continue;
    report(wave, inst, FindingKind::uninitialized, __builtin_ctzll(missing), [&] {
      return formatted("reads %s, which nobody wrote in %d of the %d lanes that are read",
                       register_name(reg).c_str(), __builtin_popcountll(missing),
                       __builtin_popcountll(lanes));
    });
    return;
  }
}

}  // namespace

// What the hardware sets before the first instruction.
void begin_registers(Wave& wave) {
  RegisterState& state = wave.observation->registers;
  const KernelDescriptor& descriptor = wave.dispatch().kernel->descriptor;
  u32 scalars = descriptor.user_sgprs() + descriptor.enables_workgroup_info();
  for (u32 axis = 0; axis < 3; ++axis) scalars += descriptor.enables_workgroup_id(axis);
  set_written_scalars(state, 0, scalars);
  set_written_scalars(state, kFlatScratch, kVccIndex - kFlatScratch);
  set_written_scalars(state, kTtmp0, kM0 - kTtmp0);
  set_written_scalars(state, kExecIndex, 2);
  state.written[0] = wave.exec();
}

void hooks::vgpr_read(Wave& wave, u32 index, u32 dwords, u64 lanes) {
  const RegisterState& state = wave.observation->registers;
  u64 missing = 0;
  for (u32 reg = index; reg < index + dwords; ++reg) missing |= lanes & ~state.written[reg];
  if (__builtin_expect(missing != 0, 0)) report_unwritten(wave, index, dwords, lanes);
}

void hooks::vgpr_written(Wave& wave, u32 index, u32 dwords, u64 lanes) {
  RegisterState& state = wave.observation->registers;
  for (u32 reg = index; reg < index + dwords; ++reg) state.written[reg] |= lanes;
}

void hooks::scalar_read(Wave& wave, u32 index, u32 dwords) {
  RegisterState& state = wave.observation->registers;
  const u64 wanted = bits_of(index, dwords);
  const u64 missing = wanted & ~state.written_scalars[index / 64];
  if (__builtin_expect(missing == 0, 1)) return;
  const Instruction& inst = *wave.current;
  // Pairs of which not all is defined are moved; that is reported where it is used.
  const bool is_scalar_move = inst.encoding == Format::SOP1 && missing != wanted;
  const bool is_vector_move =
      inst.encoding == Format::VOP1 && wave.observation->current->halves_are_independent;
  if ((is_scalar_move || is_vector_move) && inst.destination.dwords == 2 &&
      inst.source[0].index == index) {
    const u64 result = is_vector_move ? wave.exec() : kAllLanes;
    for (u32 half = 0; half < 2; ++half)
      state.undefined_result[half] = missing >> (index % 64 + half) & 1 ? result : 0;
    state.has_undefined_result = true;
    return;
  }
  const Operand& select = inst.source[1];
  const bool is_select = select.place == Place::scalar && select.index == index;
  if (wave.observation->current->moves_one_lane && !is_select) {
    leave_undefined(state, lane_that_is_meant(wave, inst));
    return;
  }
  const u32 first = index / 64 * 64 + static_cast<u32>(__builtin_ctzll(missing));
  report(wave, inst, FindingKind::uninitialized, -1,
         [&] { return formatted("reads %s, which nobody wrote", scalar_name(first).c_str()); });
}

void hooks::scalar_written(Wave& wave, u32 index, u32 dwords) {
  set_written_scalars(wave.observation->registers, index, dwords);
}

void finish_registers(Wave& wave, const Instruction& inst) {
  RegisterState& state = wave.observation->registers;
  const u32 index = inst.destination.index;
  for (u32 half = 0; half < 2; ++half) {
    if (inst.destination.place == Place::vgpr) {
      state.written[index + half] &= ~state.undefined_result[half];
    } else if (inst.destination.place == Place::scalar && state.undefined_result[half]) {
      state.written_scalars[(index + half) / 64] &= ~(u64{1} << ((index + half) % 64));
    }
    state.undefined_result[half] = 0;
  }
  state.has_undefined_result = false;
}

}  // namespace emulator
