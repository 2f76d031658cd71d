// What an instruction occupies, and the room that a kernel's waves take.
#include <algorithm>
#include <cstring>

#include "profile/profile.h"

namespace emulator {

Rates rates_of(Arch arch) { return kRates[&architecture_of(arch) - kArchitectures]; }

namespace {

Cost::Port port_of(Unit unit) {
  switch (unit) {
    case Unit::valu:
    case Unit::transcendental:
    case Unit::mfma: return Cost::Port::vector;
    case Unit::lds:
    case Unit::vmem_load:
    case Unit::vmem_store:
    case Unit::vmem_atomic: return Cost::Port::memory;
    case Unit::salu:
    case Unit::smem:
    case Unit::branch:
    case Unit::message: return Cost::Port::scalar;
    case Unit::waitcnt:
    case Unit::barrier: return Cost::Port::none;
  }
  return Cost::Port::none;
}

bool is_named(const Instruction& inst, const char* mnemonic) {
  return std::strcmp(inst.definition->mnemonic, mnemonic) == 0;
}

bool is_packed_float32(const Instruction& inst) {
  return is_named(inst, "v_pk_fma_f32") || is_named(inst, "v_pk_mul_f32") ||
         is_named(inst, "v_pk_add_f32") || is_named(inst, "v_pk_mov_b32");
}

Cost::Range vgprs_of(const Operand& operand) {
  if (operand.place != Place::vgpr) return {};
  const u32 room = operand.index < kVgprs ? kVgprs - operand.index : 0;
  return {operand.index, static_cast<u16>(std::min<u32>(operand.dwords, room))};
}

}  // namespace

Cost cost_of(const Instruction& inst, const Rates& rates) {
  Cost cost{};
  if (!inst.definition) return cost;
  const Unit unit = inst.definition->unit;
  cost.unit = unit;
  cost.port = port_of(unit);
  cost.is_packed = unit == Unit::valu && is_packed_float32(inst);
  cost.sees_other_units = sees_other_units(inst);
  cost.cycles = static_cast<u16>(unit == Unit::mfma ? mfma_passes(inst) * rates.matrix_pass
                                 : unit == Unit::transcendental ? rates.transcendental
                                                                : rates.valu);
  const u32 field = static_cast<u32>(inst.offset);
  if (is_named(inst, "s_nop"))
    cost.port = Cost::Port::none,
    cost.wait_cycles = static_cast<u16>(((field & 15) + 1) * rates.issue);
  if (is_named(inst, "s_setprio"))
    cost.port = Cost::Port::none, cost.priority = static_cast<i8>(field & 3);
  if (is_named(inst, "s_sleep"))
    cost.port = Cost::Port::none, cost.wait_cycles = static_cast<u16>(64 * (field & 127));
  if (is_named(inst, "s_waitcnt")) {
    cost.vm_count = static_cast<u16>((field & 15) | (field >> 14 & 3) << 4);
    cost.lgkm_count = static_cast<u16>(field >> 8 & 15);
    if (cost.vm_count == 63) cost.vm_count = 0xffff;
    if (cost.lgkm_count == 15) cost.lgkm_count = 0xffff;
  }
  const bool is_matrix = unit == Unit::mfma;
  for (u32 k = 0, count = 0; k < kMaxSources && count < 4; ++k) {
    if (is_matrix && k == 2) continue;
    const Cost::Range range = vgprs_of(inst.source[k]);
    if (range.count) cost.reads[count++] = range;
  }
  if (is_matrix) cost.matrix_c = vgprs_of(inst.source[2]);
  cost.write = vgprs_of(inst.destination);
  return cost;
}

}  // namespace emulator
