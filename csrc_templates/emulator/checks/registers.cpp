// Registers that nobody wrote, lane by lane, and what comes of them.
//
// Compilers copy, spill and compute with what nobody wrote and nobody uses: half of a pair, lanes
// that a branch has skipped. So a result of something undefined is undefined, also in LDS and in
// private memory, and it is reported where it matters: in an address, a branch, a matrix product or
// a store to memory that the launch was given. A finding says which instruction it began with.
#include <cstring>

#include "checks/check.h"
#include "execution/lanes.h"

namespace emulator {

// ---- What becomes of what an instruction reads --------------------------------------------------

namespace {

bool has_prefix(const Instruction& inst, const char* prefix) {
  return std::strncmp(inst.definition->mnemonic, prefix, std::strlen(prefix)) == 0;
}
bool has_part(const Instruction& inst, const char* part) {
  return std::strstr(inst.definition->mnemonic, part) != nullptr;
}

Flow flow_of_scalar(const Instruction& inst) {
  if (inst.definition->unit != Unit::salu || has_prefix(inst, "s_movrel") ||
      has_prefix(inst, "s_set"))
    return Flow::used;
  if (has_prefix(inst, "s_cselect") || has_prefix(inst, "s_cmov")) return Flow::choice;
  if (has_prefix(inst, "s_bfe_")) return Flow::field;
  if (has_part(inst, "saveexec") || has_part(inst, "wrexec")) return Flow::exec_bits;
  for (const char* name :
       {"s_mov_", "s_not_", "s_and", "s_or", "s_xor_", "s_nand_", "s_nor_", "s_xnor_"})
    if (has_prefix(inst, name)) return Flow::bits;
  return Flow::scalar;
}

Flow flow_of_vector(const Instruction& inst) {
  if (has_prefix(inst, "v_readlane") || has_prefix(inst, "v_readfirstlane")) return Flow::read_lane;
  if (has_prefix(inst, "v_writelane")) return Flow::written_lane;
  if (has_prefix(inst, "v_cmpx")) return Flow::used;
  if (has_prefix(inst, "v_cndmask")) return Flow::chosen;
  if (has_part(inst, "swap")) return Flow::exchanged;
  const bool is_pair = inst.destination.dwords == 2;
  if (is_pair && (has_prefix(inst, "v_mov_b64") || has_prefix(inst, "v_pk_"))) return Flow::halves;
  if (has_prefix(inst, "v_mad_u64") || has_prefix(inst, "v_mad_i64") ||
      has_prefix(inst, "v_lshl_add_u64") || has_prefix(inst, "v_lshlrev_b64"))
    return Flow::upwards;
  return Flow::lanes;
}

}  // namespace

Flow flow_of(const Instruction& inst) {
  switch (inst.definition->format) {
    case Format::SOP1:
    case Format::SOP2:
    case Format::SOPK:
    case Format::SOPC: return flow_of_scalar(inst);
    case Format::VOP1:
    case Format::VOP2:
    case Format::VOPC:
    case Format::VOP3:
    case Format::VOP3P: return flow_of_vector(inst);
    case Format::DS:
      if (has_prefix(inst, "ds_bpermute") || has_prefix(inst, "ds_swizzle")) return Flow::gathered;
      return has_prefix(inst, "ds_permute") ? Flow::used : Flow::stored;
    case Format::MUBUF:
    case Format::MTBUF:
    case Format::FLAT:
    case Format::GLOBAL:
    case Format::SCRATCH: return Flow::stored;
    default: return Flow::used;
  }
}

namespace {

// ---- What is undefined --------------------------------------------------------------------------

constexpr u64 bits_of(u32 index, u32 count) {
  return ((count >= 64 ? 0 : u64{1} << count) - 1) << (index % 64);
}

void set_written_scalars(RegisterState& state, u32 index, u32 count) {
  for (u32 i = index; i < index + count && i < RegisterState::kScalars; ++i)
    state.written_scalars[i / 64] |= u64{1} << (i % 64);
}

u32 undefined_bits(const RegisterState& state, u32 index) {
  return state.written_scalars[index / 64] >> (index % 64) & 1 ? 0 : state.undefined_bits[index];
}
u64 undefined_bits(const RegisterState& state, u32 index, u32 dwords) {
  const u64 upper = dwords > 1 ? undefined_bits(state, index + 1) : 0;
  return upper << 32 | undefined_bits(state, index);
}
u64 undefined_bits(const RegisterState& state, const Operand& operand) {
  return operand.place == Place::scalar ? undefined_bits(state, operand.index, operand.dwords) : 0;
}

u64 value_of(const Wave& wave, const Operand& scalar) {
  const u64 upper = scalar.dwords > 1 ? wave.scalar[scalar.index + 1] : 0;
  return upper << 32 | wave.scalar[scalar.index];
}

// v_readlane, v_readfirstlane and v_writelane have one lane of a register, whatever EXEC says.
u64 lane_that_is_meant(const Wave& wave, const Instruction& inst) {
  const Operand& select = inst.source[1];
  if (select.place == Place::none) return wave.exec() ? wave.exec() & (0 - wave.exec()) : 1;
  const u64 lane = select.place == Place::scalar ? wave.scalar[select.index] : select.constant;
  return u64{1} << (lane & 63);
}

// Lanes in which dword `dword` of a vector instruction's source is undefined.
u64 undefined_lanes(const Wave& wave, const Instruction& inst, u32 k, u32 dword) {
  const RegisterState& state = wave.observation->registers;
  const Operand& source = inst.source[k];
  switch (inst.definition->signature.sources[k].role) {
    case Role::vcc: return undefined_bits(state, kVccIndex, 2);
    case Role::lane_bit: return undefined_bits(state, source);
    default: break;
  }
  if (source.place == Place::scalar)
    return undefined_bits(state, source.index + dword) ? kAllLanes : 0;
  if (source.place != Place::vgpr) return 0;
  const u64 lanes = wave.exec() & ~state.written[source.index + dword];
  if (!inst.dpp || k != 0) return lanes;
  u64 permuted = 0;
  for (int lane = 0; lane < static_cast<int>(kLanes); ++lane) {
    const int from = dpp_source_lane(inst.dpp_control.control, lane);
    if (from >= 0) permuted |= (lanes >> from & 1) << lane;
  }
  return permuted & wave.exec();
}

u64 undefined_lanes(const Wave& wave, const Instruction& inst, u32 k) {
  u64 lanes = 0;
  for (u32 dword = 0; dword < inst.source[k].dwords; ++dword)
    lanes |= undefined_lanes(wave, inst, k, dword);
  return lanes;
}

// Lanes in which half `half` of a pair is undefined.
u64 undefined_half(const Wave& wave, const Instruction& inst, u32 half) {
  if (inst.encoding != Format::VOP3P) return undefined_lanes(wave, inst, 0, half);
  if (has_prefix(inst, "v_pk_mov"))
    return undefined_lanes(wave, inst, half, inst.op_sel >> half & 1);
  u64 lanes = 0;
  for (u32 k = 0; k < kMaxSources; ++k)
    if (inst.source[k].dwords == 2)
      lanes |= undefined_lanes(wave, inst, k, (half ? inst.op_sel_hi : inst.op_sel) >> k & 1);
  return lanes;
}

// The bits of a scalar instruction's result that are undefined. A bit that one operand of a
// conjunction or a disjunction decides is defined.
u64 undefined_result_bits(const Wave& wave, const Instruction& inst) {
  const RegisterState& state = wave.observation->registers;
  u64 undefined[2] = {}, value[2] = {};
  for (u32 k = 0; k < 2; ++k) {
    Operand source = inst.source[k];
    if (inst.definition->signature.sources[k].role == Role::exec)
      source.place = Place::scalar, source.index = kExecIndex, source.dwords = 2;
    undefined[k] = undefined_bits(state, source);
    value[k] = source.place == Place::scalar ? value_of(wave, source) : source.constant;
  }
  const u64 either = undefined[0] | undefined[1];
  const bool is_and = has_prefix(inst, "s_and") || has_prefix(inst, "s_nand");
  const bool is_or = has_prefix(inst, "s_or") || has_prefix(inst, "s_nor_");
  if (!is_and && !is_or) return either;
  // The second or the first one is negated: andn2, andn1.
  for (u32 k = 0; k < 2; ++k)
    if (has_part(inst, k ? "n2_" : "n1_")) value[k] = ~value[k];
  for (u32 k = 0; k < 2; ++k) value[k] = undefined[k] | (is_and ? value[k] : ~value[k]);
  return either & value[0] & value[1];
}

// ---- Findings -----------------------------------------------------------------------------------

u32 first_undefined(const RegisterState& state, u32 index, u32 dwords, u64 lanes) {
  u32 reg = index;
  while (reg + 1 < index + dwords && !(lanes & ~state.written[reg])) ++reg;
  return reg;
}

std::string beginning(const Wave& wave, u32 origin) {
  if (!origin) return "";
  return "; that began with " + instruction_at(wave, origin - 1);
}

void report_vgpr(Wave& wave, const Instruction& inst, u32 reg, u64 missing, u64 lanes) {
  report(wave, inst, FindingKind::uninitialized, __builtin_ctzll(missing), [&] {
    return formatted("reads %s, which nobody wrote in %d of the %d lanes that are read",
                     register_name(reg).c_str(), __builtin_popcountll(missing),
                     __builtin_popcountll(lanes)) +
           beginning(wave, wave.observation->registers.origin[reg]);
  });
}

void report_scalar(Wave& wave, const Instruction& inst, u32 index) {
  report(wave, inst, FindingKind::uninitialized, -1, [&] {
    return formatted("reads %s, which nobody wrote", scalar_name(index).c_str()) +
           beginning(wave, wave.observation->registers.origin[kFirstScalar + index]);
  });
}

void report_exec(Wave& wave, const Instruction& inst) {
  report(wave, inst, FindingKind::uninitialized, -1, [&] {
    return "gives exec what nobody wrote" + beginning(wave, wave.observation->registers.now.origin);
  });
}

// ---- Results ------------------------------------------------------------------------------------

// The instruction has read something undefined in `number`.
RegisterState& leave_unfinished(Wave& wave, u32 number) {
  RegisterState& state = wave.observation->registers;
  if (!state.now.origin) {
    const u32 origin = state.origin[number];
    state.now.origin = origin ? origin : dword_of(wave, *wave.current) + 1;
  }
  wave.observation->is_unfinished = true;
  return state;
}

void find_vector_result(Wave& wave, const Instruction& inst, RegisterState& state) {
  u64 low = 0, high = 0;
  switch (wave.observation->current->flow) {
    case Flow::halves:
      low = undefined_half(wave, inst, 0);
      high = undefined_half(wave, inst, 1);
      break;
    case Flow::upwards:
      for (u32 k = 0; k < kMaxSources; ++k) {
        const bool is_pair = inst.source[k].dwords == 2;
        low |= is_pair ? undefined_lanes(wave, inst, k, 0) : undefined_lanes(wave, inst, k);
        high |= undefined_lanes(wave, inst, k);
      }
      break;
    case Flow::chosen: {
      const Operand& mask = inst.source[2];
      const u64 chooses = mask.place == Place::scalar ? value_of(wave, mask) : mask.constant;
      low = undefined_lanes(wave, inst, 2) | (chooses & undefined_lanes(wave, inst, 1)) |
            (~chooses & undefined_lanes(wave, inst, 0));
      break;
    }
    default:
      for (u32 k = 0; k < kMaxSources; ++k) low |= undefined_lanes(wave, inst, k);
      high = low;
      break;
  }
  std::fill(std::begin(state.now.lanes), std::end(state.now.lanes), high & wave.exec());
  state.now.lanes[0] = low & wave.exec();
  state.now.mask = low & wave.exec();
}

void find_scalar_result(Wave& wave, const Instruction& inst, RegisterState& state) {
  u64 bits = kAllLanes;
  switch (wave.observation->current->flow) {
    case Flow::bits:
    case Flow::exec_bits: bits = undefined_result_bits(wave, inst); break;
    case Flow::field: {
      const Operand& where = inst.source[1];
      const u64 field = where.place == Place::scalar ? value_of(wave, where) : where.constant;
      const u32 begin = field & (inst.source[0].dwords * 32 - 1), width = field >> 16 & 0x7f;
      const u64 read = width < 64 ? (u64{1} << width) - 1 : kAllLanes;
      const u64 undefined = undefined_bits(state, inst.source[0]) >> begin & read;
      bits = undefined | undefined_bits(state, where) ? kAllLanes : 0;
      break;
    }
    case Flow::choice: {
      // s_cselect has its second source where SCC is 0, s_cmov its destination.
      const bool is_select = has_prefix(inst, "s_cselect");
      bits = undefined_bits(state, inst.source[wave.scc ? 0 : is_select ? 1 : 2]);
      break;
    }
    default: break;
  }
  state.now.bits[0] = static_cast<u32>(bits);
  state.now.bits[1] = static_cast<u32>(bits >> 32);
  state.now.scc = bits != 0;
}

// An exchange of lanes between two registers: the first one's are `shift` lanes above the other's.
void find_exchanged(const Wave& wave, const Instruction& inst, RegisterState& state) {
  const u32 shift = has_part(inst, "lane16") ? 16 : has_part(inst, "lane32") ? 32 : 0;
  const u64 of_first = shift == 0 ? kAllLanes : shift == 16 ? 0xffff0000ffff0000u : kAllLanes << 32;
  const u64 first = ~state.written[inst.destination.index];
  const u64 second = ~state.written[inst.source[0].index];
  state.now.lanes[0] = second << shift & of_first & wave.exec();
  state.now.other_lanes = (first & of_first & wave.exec()) >> shift;
}

bool is_address(const Instruction& inst, Flow flow, u32 reg) {
  const Operand& address = inst.source[0];
  const bool is_data = flow == Flow::gathered && inst.source[1].place == Place::none;
  return !is_data && address.place == Place::vgpr && reg >= address.index &&
         reg < address.index + address.dwords;
}

// What a memory operation stores, in the order in which it does.
void note_data(Wave& wave, u32 index, u32 dwords, u64 lanes) {
  const Instruction& inst = *wave.current;
  RegisterState& state = wave.observation->registers;
  const bool is_first = inst.source[1].index == index || inst.source[1].place != Place::vgpr;
  const bool is_second = inst.source[2].index == index && inst.source[2].place == Place::vgpr;
  const u32 second = inst.source[1].dwords;
  for (u32 k = 0; k < dwords; ++k) {
    const u64 missing = lanes & ~state.written[index + k];
    if (is_first) state.now.data[k] = missing;
    if (is_second) state.now.data[second + k] = missing;
  }
  // Of two stores the first one is done when the data of the second is read.
  if (!is_first)
    std::fill(std::begin(state.now.moved), std::end(state.now.moved), static_cast<u8>(4 * second));
}

void read_undefined_vgpr(Wave& wave, u32 index, u32 dwords, u64 lanes) {
  const Instruction& inst = *wave.current;
  RegisterState& state = wave.observation->registers;
  const Flow flow = wave.observation->current->flow;
  if (flow == Flow::read_lane) {
    lanes = lane_that_is_meant(wave, inst);
    if (!(lanes & ~state.written[index])) return;
  }
  const u32 reg = first_undefined(state, index, dwords, lanes);
  const u64 missing = lanes & ~state.written[reg];
  // The registers that M0 leads to are not those of the operands.
  if (flow == Flow::used || wave.indexes_vgprs) return report_vgpr(wave, inst, reg, missing, lanes);
  switch (flow) {
    case Flow::stored:
    case Flow::gathered: {
      if (is_address(inst, flow, reg)) return report_vgpr(wave, inst, reg, missing, lanes);
      note_data(wave, index, dwords, lanes);
      leave_unfinished(wave, reg);
      return;
    }
    case Flow::exchanged: find_exchanged(wave, inst, leave_unfinished(wave, reg)); return;
    case Flow::read_lane: leave_unfinished(wave, reg).now.bits[0] = ~0u; return;
    default: find_vector_result(wave, inst, leave_unfinished(wave, reg)); return;
  }
}

void read_undefined_scalar(Wave& wave, u32 index) {
  const Instruction& inst = *wave.current;
  const auto finish = [&]() -> RegisterState& {
    return leave_unfinished(wave, kFirstScalar + index);
  };
  switch (wave.observation->current->flow) {
    case Flow::scalar:
    case Flow::bits:
    case Flow::field:
    case Flow::exec_bits:
    case Flow::choice: return find_scalar_result(wave, inst, finish());
    case Flow::written_lane: {
      const Operand& lane = inst.source[1];
      if (lane.place == Place::scalar && lane.index == index) break;
      finish().now.lanes[0] = lane_that_is_meant(wave, inst);
      return;
    }
    case Flow::lanes:
    case Flow::halves:
    case Flow::upwards:
    case Flow::chosen:
      if (wave.indexes_vgprs) break;
      return find_vector_result(wave, inst, finish());
    default: break;
  }
  report_scalar(wave, inst, index);
}

// ---- Memory -------------------------------------------------------------------------------------

// A lane's access, and the place of what it moves among what the lane moves by the instruction.
struct MovedDwords {
  RegisterState& state;
  const int lane;
  const Access kind;
  const u32 first;

  MovedDwords(Wave& wave, int lane, u32 bytes, Access kind)
      : state(wave.observation->registers),
        lane(lane),
        kind(kind),
        first(state.now.moved[lane] / 4u) {
    state.now.moved[lane] = static_cast<u8>(state.now.moved[lane] + bytes);
    wave.observation->is_unfinished = true;  // so that `moved` begins anew
  }
  // Whether it stores something undefined at a byte; an atomic operation takes all of its operands.
  bool stores_undefined(u64 byte) const {
    u64 lanes = 0;
    if (kind == Access::atomic)
      for (const u64 data : state.now.data) lanes |= data;
    else if (kind == Access::store && first + byte / 4 < RegisterState::kMostData)
      lanes = state.now.data[first + byte / 4];
    return lanes >> lane & 1;
  }
  bool stores_undefined_of(u32 bytes) const {
    for (u32 byte = 0; byte < bytes; byte += 4)
      if (stores_undefined(byte)) return true;
    return false;
  }
};

// Dword k of a lane's result comes from memory that holds something undefined. Of a transposing
// load, which gives a lane's data to its neighbours, all of it is taken to.
void load_undefined(Wave& wave, int lane, u32 k) {
  RegisterState& state = wave.observation->registers;
  if (!state.now.origin) state.now.origin = dword_of(wave, *wave.current) + 1;
  if (has_part(*wave.current, "_tr_"))
    std::fill(std::begin(state.now.lanes), std::end(state.now.lanes), kAllLanes);
  else if (k < RegisterState::kMostResults) state.now.lanes[k] |= u64{1} << lane;
}

}  // namespace

void move_undefined_lds(Wave& wave, int lane, u32 offset, u32 bytes, Access kind) {
  WorkgroupObservation& workgroup = *wave.workgroup->observation;
  const MovedDwords moved(wave, lane, bytes, kind);
  if (moved.stores_undefined_of(bytes)) workgroup.undefined_lds.resize(workgroup.lds.size());
  if (workgroup.undefined_lds.empty()) return;
  for (u32 byte = 0; byte < bytes; ++byte) {
    u8& word = workgroup.undefined_lds[(offset + byte) / 4];
    const u8 bit = static_cast<u8>(1u << (offset + byte) % 4);
    if (kind != Access::store && word & bit) load_undefined(wave, lane, moved.first + byte / 4);
    if (moved.stores_undefined(byte)) word |= bit;
    else if (kind == Access::store) word = static_cast<u8>(word & ~bit);
  }
}

void hooks::scratch_access(Wave& wave, const Instruction&, int lane, u64 offset, u32 bytes,
                           Access kind) {
  RegisterState& state = wave.observation->registers;
  if (__builtin_expect(!wave.observation->is_unfinished && state.undefined_scratch.empty(), 1))
    return;
  const u32 size = wave.dispatch().scratch_bytes_per_lane;
  if (lane < 0 || offset > size || size - offset < bytes) return;
  const MovedDwords moved(wave, lane, bytes, kind);
  if (moved.stores_undefined_of(bytes)) state.undefined_scratch.resize((size + 3) / 4);
  if (state.undefined_scratch.empty()) return;
  const u64 self = u64{1} << lane;
  for (u32 byte = 0; byte < bytes; byte += 4) {
    u64& lanes = state.undefined_scratch[(offset + byte) / 4];
    if (kind != Access::store && lanes & self) load_undefined(wave, lane, moved.first + byte / 4);
    if (moved.stores_undefined(byte)) lanes |= self;
    else if (kind == Access::store && bytes - byte >= 4) lanes &= ~self;
  }
}

namespace {

// Apart from the hook, which is quick where there is nothing to do.
__attribute__((noinline)) void follow_global_access(Wave& wave, const Instruction& inst, int lane,
                                                    u64 address, u32 bytes, Access kind) {
  WaveObservation& observation = *wave.observation;
  // The first address of each lane: the dwords of a load into LDS come in order.
  if (observation.current->loads_to_lds && !observation.loaded_from[lane])
    observation.loaded_from[lane] = address;
  RegisterState& state = observation.registers;
  if (!observation.is_unfinished ||
      !MovedDwords(wave, lane, bytes, kind).stores_undefined_of(bytes))
    return;
  u32 k = 0;
  while (!(state.now.data[k] >> lane & 1)) ++k;
  report_vgpr(wave, inst, inst.source[1].index + k, state.now.data[k], wave.exec());
  std::fill(std::begin(state.now.data), std::end(state.now.data), 0);  // once an instruction
}

}  // namespace

void hooks::global_access(Wave& wave, const Instruction& inst, int lane, u64 address, u32 bytes,
                          Access kind) {
  const WaveObservation& observation = *wave.observation;
  if (__builtin_expect(observation.is_unfinished || observation.current->loads_to_lds, 0) &&
      lane >= 0)
    follow_global_access(wave, inst, lane, address, bytes, kind);
}

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
  if (__builtin_expect(missing != 0, 0)) read_undefined_vgpr(wave, index, dwords, lanes);
}

void hooks::vgpr_written(Wave& wave, u32 index, u32 dwords, u64 lanes) {
  RegisterState& state = wave.observation->registers;
  for (u32 reg = index; reg < index + dwords; ++reg) state.written[reg] |= lanes;
}

void hooks::lanes_gathered(Wave& wave, const u32 (&from)[kLanes]) {
  RegisterState& state = wave.observation->registers;
  if (__builtin_expect(!wave.observation->is_unfinished, 1)) return;
  for (u64 left = wave.exec(); left; left &= left - 1) {
    const int lane = __builtin_ctzll(left);
    state.now.lanes[0] |= (state.now.data[0] >> from[lane] & 1) << lane;
  }
}

void hooks::scalar_read(Wave& wave, u32 index, u32 dwords) {
  RegisterState& state = wave.observation->registers;
  const u64 missing = bits_of(index, dwords) & ~state.written_scalars[index / 64];
  if (__builtin_expect(missing != 0, 0))
    read_undefined_scalar(wave, index / 64 * 64 + static_cast<u32>(__builtin_ctzll(missing)));
}

void hooks::scalar_written(Wave& wave, u32 index, u32 dwords) {
  set_written_scalars(wave.observation->registers, index, dwords);
}

void finish_registers(Wave& wave, const Instruction& inst) {
  const InstructionTraits& traits = *wave.observation->current;
  RegisterState& state = wave.observation->registers;
  if (traits.reads_scc && state.undefined_scc) {
    if (traits.flow == Flow::used)
      report(wave, inst, FindingKind::uninitialized, -1,
             [] { return std::string("reads scc, which comes from what nobody wrote"); });
    std::fill(std::begin(state.now.bits), std::end(state.now.bits), ~0u);
    state.now.scc = true;
  }
  bool exec_is_undefined =
      traits.flow == Flow::exec_bits && (state.now.bits[0] | state.now.bits[1]);
  const auto leave_undefined = [&](u32 index, u32 bits) {
    exec_is_undefined |= bits && index >= kExecIndex;
    if (!bits || exec_is_undefined) return;
    state.written_scalars[index / 64] &= ~(u64{1} << (index % 64));
    state.undefined_bits[index] = bits;
    state.origin[kFirstScalar + index] = state.now.origin;
  };
  const Operand& destination = inst.destination;
  for (u32 k = 0; k < destination.dwords; ++k) {
    const u32 index = destination.index + k;
    if (destination.place == Place::vgpr && state.now.lanes[k]) {
      state.written[index] &= ~state.now.lanes[k];
      state.origin[index] = state.now.origin;
    } else if (destination.place == Place::scalar && k < 2) {
      leave_undefined(index, state.now.bits[k]);
    }
  }
  if (state.now.other_lanes) {
    state.written[inst.source[0].index] &= ~state.now.other_lanes;
    state.origin[inst.source[0].index] = state.now.origin;
  }
  if (inst.scalar_destination.place == Place::scalar)
    for (u32 k = 0; k < 2; ++k)
      leave_undefined(inst.scalar_destination.index + k,
                      static_cast<u32>(state.now.mask >> (32 * k)));
  if (exec_is_undefined) report_exec(wave, inst);
  if (traits.writes_scc) state.undefined_scc = state.now.scc;
  state.now = {};
  wave.observation->is_unfinished = state.undefined_scc;
}

}  // namespace emulator
