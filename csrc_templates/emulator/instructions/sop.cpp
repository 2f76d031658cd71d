// Scalar ALU and program flow. The table is sop.inc.
#include "chips.h"
#include "decode/code_object.h"
#include "execution/scalar_operands.h"

namespace emulator {
namespace {

// ---- Semantics that do not fit in the table -----------------------------------------------------

// `width` bits from `position`; the upper bits are the field's sign where T is signed.
template <class T>
T bit_field(T value, u32 position, u32 width) {
  constexpr u32 kBits = 8 * sizeof(T);
  if (width == 0) return 0;
  if (position + width >= kBits) return static_cast<T>(value >> position);
  using Unsigned = std::make_unsigned_t<T>;
  const Unsigned top = static_cast<Unsigned>(value) << (kBits - position - width);
  return static_cast<T>(static_cast<T>(top) >> (kBits - width));
}

u32 absolute(u32 value) { return value >> 31 ? 0u - value : value; }

WithScc<u32> add_with_carry(u64 a, u32 b) { return {static_cast<u32>(a + b), (a + b) >> 32 != 0}; }

template <class T>
T reverse_bits(T value) {
  T reversed = 0;
  for (u32 bit = 0; bit < 8 * sizeof(T); ++bit)
    reversed |= (value >> bit & 1) << (8 * sizeof(T) - 1 - bit);
  return reversed;
}

// One bit for each group of four that has one.
u64 quad_mask(u64 mask) {
  u64 quads = 0;
  for (u32 quad = 0; quad < 16; ++quad)
    quads |= static_cast<u64>((mask >> (4 * quad) & 15) != 0) << quad;
  return quads;
}

template <class T>
T whole_quads(T mask) {
  T whole = 0;
  for (u32 quad = 0; quad < 2 * sizeof(T); ++quad)
    if (mask >> (4 * quad) & 15) whole |= T{15} << (4 * quad);
  return whole;
}

u64 replicate_bits(u32 value) {
  u64 replicated = 0;
  for (u32 bit = 0; bit < 32; ++bit)
    replicated |= static_cast<u64>(value >> bit & 1) * 3 << (2 * bit);
  return replicated;
}

// ---- Executor of the table's one-liners ---------------------------------------------------------

template <class T>
T read_argument(Wave& wave, const Instruction& inst, const Operand& operand) {
  if constexpr (std::is_same_v<T, Scc>) return {wave.scc};
  else if constexpr (std::is_same_v<T, Exec>) return {read_scalar_pair(wave, kExecIndex)};
  else if constexpr (std::is_same_v<T, Simm16>) return {inst.offset};
  else return read_scalar<T>(wave, operand);
}

template <class T> void write_result(Wave& wave, const Instruction& inst, T result) {
  write_scalar(wave, inst.destination, result);
}
template <class T>
void write_result(Wave& wave, const Instruction& inst, WithScc<T> result) {
  write_scalar(wave, inst.destination, result.value);
  wave.scc = result.scc;
}
void write_result(Wave& wave, const Instruction&, bool scc) { wave.scc = scc; }
void write_result(Wave& wave, const Instruction& inst, WithExec result) {
  write_scalar(wave, inst.destination, result.value);
  write_scalar_pair(wave, kExecIndex, result.exec);
  wave.scc = result.exec != 0;
}

template <auto kApply>
struct ScalarOperation;
template <class R, class... A, R (*kApply)(A...)>
struct ScalarOperation<kApply> {
  static void execute(Wave& wave, const Instruction& inst) {
    run(wave, inst, std::index_sequence_for<A...>{});
  }

 private:
  template <std::size_t... I>
  static void run(Wave& wave, const Instruction& inst, std::index_sequence<I...>) {
    write_result(wave, inst, kApply(read_argument<A>(wave, inst, inst.source[I])...));
  }
};

// ---- Program flow -------------------------------------------------------------------------------

// `pc` is past the instruction already, and `dwords` counts from there. Targets are inside of the
// code: what lies behind it in the array are instructions that fault.
void jump(Wave& wave, i64 dwords) {
  const CodeObject& code = *wave.dispatch().code;
  const i64 target = (wave.pc - code.instructions.data()) + dwords;
  if (target < 0 || target >= static_cast<i64>(code.text_dwords))
    fault("branch leaves the code object");
  wave.pc = code.instructions.data() + target;
}

void jump_to_address(Wave& wave, u64 address) {
  const CodeObject& code = *wave.dispatch().code;
  const u64 offset = address - code.text_address;
  if (address < code.text_address || offset >= u64{4} * code.text_dwords || offset % 4)
    fault("jump to 0x%llx, which is not an instruction of this code object",
          static_cast<unsigned long long>(address));
  wave.pc = code.instructions.data() + offset / 4;
}

u64 address_of_pc(const Wave& wave) {
  const CodeObject& code = *wave.dispatch().code;
  return code.text_address + 4 * static_cast<u64>(wave.pc - code.instructions.data());
}

void execute_nothing(Wave&, const Instruction&) {}
void execute_endpgm(Wave& wave, const Instruction&) { wave.state = WaveState::ended; }
void execute_branch(Wave& wave, const Instruction& inst) { jump(wave, inst.offset); }
template <bool kScc> void execute_branch_scc(Wave& wave, const Instruction& inst) {
  if (wave.scc == kScc) jump(wave, inst.offset);
}
template <bool kIsZero> void execute_branch_vcc(Wave& wave, const Instruction& inst) {
  if ((read_scalar_pair(wave, kVccIndex) == 0) == kIsZero) jump(wave, inst.offset);
}
template <bool kIsZero> void execute_branch_exec(Wave& wave, const Instruction& inst) {
  if ((wave.exec() == 0) == kIsZero) jump(wave, inst.offset);
}

void execute_getpc(Wave& wave, const Instruction& inst) {
  write_scalar<u64>(wave, inst.destination, address_of_pc(wave));
}
void execute_setpc(Wave& wave, const Instruction& inst) {
  jump_to_address(wave, read_scalar<u64>(wave, inst.source[0]));
}
void execute_swappc(Wave& wave, const Instruction& inst) {
  const u64 target = read_scalar<u64>(wave, inst.source[0]);
  write_scalar<u64>(wave, inst.destination, address_of_pc(wave));
  jump_to_address(wave, target);
}
void execute_call(Wave& wave, const Instruction& inst) {
  write_scalar<u64>(wave, inst.destination, address_of_pc(wave));
  jump(wave, inst.offset);
}

// ---- Forks --------------------------------------------------------------------------------------
// Both ways of a branch, one after the other: the way with fewer lanes first, the other one on a
// stack in SGPRs, from where s_cbranch_join takes it.

// MODE.CSP: how many ways wait, each in four SGPRs (its lanes, its address).
u32 waiting_forks(const Wave& wave) { return wave.mode >> 29; }
void set_waiting_forks(Wave& wave, u32 count) {
  wave.set_mode((wave.mode & 0x1fffffffu) | count << 29);
}

void put_aside(Wave& wave, u64 address, u64 lanes) {
  const u32 count = waiting_forks(wave);
  if (count == 7) fault("more than 7 forks without a join");
  write_scalar_pair(wave, 4 * count, lanes);
  write_scalar_pair(wave, 4 * count + 2, address);
  set_waiting_forks(wave, count + 1);
}

void fork(Wave& wave, u64 passes, u64 target) {
  const u64 exec = read_scalar_pair(wave, kExecIndex);
  const u64 taken = passes & exec, not_taken = ~passes & exec;
  if (taken == exec) return jump_to_address(wave, target);
  if (not_taken == exec) return;
  if (__builtin_popcountll(not_taken) < __builtin_popcountll(taken)) {
    put_aside(wave, target, taken);
    write_scalar_pair(wave, kExecIndex, not_taken);
  } else {
    put_aside(wave, address_of_pc(wave), not_taken);
    write_scalar_pair(wave, kExecIndex, taken);
    jump_to_address(wave, target);
  }
}

void execute_cbranch_g_fork(Wave& wave, const Instruction& inst) {
  const u64 passes = read_scalar<u64>(wave, inst.source[0]);
  fork(wave, passes, read_scalar<u64>(wave, inst.source[1]));
}
void execute_cbranch_i_fork(Wave& wave, const Instruction& inst) {
  const i64 target = static_cast<i64>(address_of_pc(wave)) + 4 * i64{inst.offset};
  fork(wave, read_scalar<u64>(wave, inst.source[0]), static_cast<u64>(target));
}
void execute_cbranch_join(Wave& wave, const Instruction& inst) {
  const u32 count = waiting_forks(wave);
  if (count == read_scalar<u32>(wave, inst.source[0])) return;
  if (count == 0) fault("a join without a fork");
  set_waiting_forks(wave, count - 1);
  write_scalar_pair(wave, kExecIndex, read_scalar_pair(wave, 4 * (count - 1)));
  jump_to_address(wave, read_scalar_pair(wave, 4 * (count - 1) + 2));
}

// ---- Waves among each other ---------------------------------------------------------------------

void execute_barrier(Wave& wave, const Instruction&) { wave.state = WaveState::at_barrier; }
void execute_sleep(Wave& wave, const Instruction&) {
  wave.yields = true;
  ++wave.workgroup->polls;
}
void execute_setprio(Wave& wave, const Instruction& inst) {
  wave.priority = static_cast<u8>(inst.offset & 3);
}

// Memory operations are complete when they return, but for loads into LDS and, in random order,
// atomic operations; the others only the hooks care about.
void execute_waitcnt(Wave& wave, const Instruction& inst) {
  const u32 field = static_cast<u32>(inst.offset), vmcnt = (field & 15) | (field >> 14 & 3) << 4;
  if (!wave.workgroup->lds_loads.empty()) wave.workgroup->land_lds_loads_of(wave, vmcnt);
  if (!wave.workgroup->late_atomics.empty()) wave.workgroup->land_atomics_of(wave, vmcnt);
  hooks::waitcnt(wave, vmcnt, field >> 8 & 15, field >> 4 & 7);
}

// The runtime's trap handler returns from 3, which is a debugger's, where there is no debugger.
void execute_trap(Wave&, const Instruction& inst) {
  constexpr i32 kDebugTrap = 3;
  const i32 number = inst.offset & 0xff;
  if (number != kDebugTrap) fault("s_trap %d: the kernel stopped itself", number);
}

// An interrupt tells the host that there is something to read in memory. Nobody on the host waits.
void execute_sendmsg(Wave&, const Instruction& inst) {
  constexpr i32 kInterrupt = 1;
  const i32 message = inst.offset & 15;
  if (message != kInterrupt) fault("message %d is not emulated", message);
}

// s_sethalt, s_setkill: the debugger's; without one a wave would wait for ever.
void execute_stop_bit(Wave&, const Instruction& inst) {
  if (inst.offset & 1) fault("the wave stops itself, and there is no debugger");
}

// ---- Indexed moves and hardware registers -------------------------------------------------------

// M0 may be negative: what counts is the register that the sum names.
u32 relative_scalar(const Wave& wave, u32 index, u32 dwords) {
  const i32 m0 = static_cast<i32>(wave.scalar[kM0]);
  const i64 relative = i64{index} + m0;
  if (relative < 0 || relative + dwords > kFlatScratch || relative % dwords)
    fault("s_movrel with %d in M0 reaches s%lld", m0, static_cast<long long>(relative));
  return static_cast<u32>(relative);
}

template <class T>
void execute_movrels(Wave& wave, const Instruction& inst) {
  Operand source = inst.source[0];
  source.index = static_cast<u16>(relative_scalar(wave, source.index, sizeof(T) / 4));
  write_scalar<T>(wave, inst.destination, read_scalar<T>(wave, source));
}

template <class T>
void execute_movreld(Wave& wave, const Instruction& inst) {
  Operand destination = inst.destination;
  destination.index = static_cast<u16>(relative_scalar(wave, destination.index, sizeof(T) / 4));
  write_scalar<T>(wave, destination, read_scalar<T>(wave, inst.source[0]));
}

// VGPR indexing: M0 holds what is added, and in bits 12 to 15 to which operands.
void write_gpr_idx(Wave& wave, u32 value, u32 mask) {
  write_scalar_register(wave, kM0, (wave.scalar[kM0] & ~mask) | (value & mask));
}
void execute_set_gpr_idx_idx(Wave& wave, const Instruction& inst) {
  write_gpr_idx(wave, read_scalar<u32>(wave, inst.source[0]), 0xff);
}
void execute_set_gpr_idx_mode(Wave& wave, const Instruction& inst) {
  write_gpr_idx(wave, static_cast<u32>(inst.offset) << 12, 0xf000);
}
void execute_set_gpr_idx_on(Wave& wave, const Instruction& inst) {
  const u32 operands = inst.words[0] >> 8 & 15;  // a number in place of the second source
  write_gpr_idx(wave, (read_scalar<u32>(wave, inst.source[0]) & 0xff) | operands << 12, 0xf0ff);
  wave.set_mode(wave.mode | kModeVgprIndexing);
}
void execute_set_gpr_idx_off(Wave& wave, const Instruction&) {
  wave.set_mode(wave.mode & ~kModeVgprIndexing);
}

// Leaves SCC as it is, unlike the comparisons of its format.
void execute_setvskip(Wave& wave, const Instruction& inst) {
  const u32 bit = read_scalar<u32>(wave, inst.source[1]) & 31;
  const bool skips = read_scalar<u32>(wave, inst.source[0]) >> bit & 1;
  wave.set_mode((wave.mode & ~u32{kModeVectorSkip}) | (skips ? u32{kModeVectorSkip} : 0));
}

enum HardwareRegister : u32 {
  kHwMode = 1,
  kHwStatus = 2,
  kHwTrapStatus = 3,
  kHwId = 4,
  kHwShMemBases = 15,
  kHwXccId = 20,
};

u32 status(const Wave& wave) {
  constexpr u32 kInWorkgroup = 1u << 11, kValid = 1u << 16;
  const bool vcc_is_zero = const_cast<Wave&>(wave).vcc() == 0;
  return kValid | (wave.workgroup->wave_count > 1 ? kInWorkgroup : 0) | (wave.scc ? 1u : 0) |
         u32{wave.priority} << 3 | (wave.exec() == 0 ? 1u << 9 : 0) | (vcc_is_zero ? 1u << 10 : 0);
}

u32 hardware_register(const Wave& wave, u32 id) {
  switch (id) {
    case kHwMode: return wave.mode;
    case kHwStatus: return status(wave);
    // Its fields that are not zero here: the slot among a SIMD's waves, and the SIMD.
    case kHwId: return wave.index / 4u | wave.index % 4u << 4;
    case kHwShMemBases: {
      const u32 private_base = kPrivateAperture >> 48, shared_base = kSharedAperture >> 48;
      return private_base | shared_base << 16;
    }
    // Workgroups go to the chiplets in turn.
    case kHwXccId: return wave.workgroup->id[0] % wave.dispatch().device->xcds;
    default: fault("hardware register %u is not emulated", id);
  }
}

struct HardwareField {
  u32 id, position, width;
  u32 mask() const { return static_cast<u32>((u64{1} << width) - 1); }
};

HardwareField hardware_field(const Instruction& inst) {
  const u32 field = static_cast<u32>(inst.offset) & 0xffff;
  return {field & 63, field >> 6 & 31, (field >> 11 & 31) + 1};
}

void execute_getreg(Wave& wave, const Instruction& inst) {
  const HardwareField field = hardware_field(inst);
  const u32 value = hardware_register(wave, field.id);
  write_scalar<u32>(wave, inst.destination, value >> field.position & field.mask());
}

// Exceptions are not recorded: clearing them is all that a kernel may do.
void write_trap_status(u32 value) {
  if (value) fault("setting exceptions by hand is not emulated");
}

void write_mode(Wave& wave, u32 value) {
  constexpr u32 kDebug = 1u << 11, kTraps = 0x1ffu << 12;
  const u32 unsupported = value & ~wave.mode & (kDebug | kTraps);
  if (unsupported) fault("MODE bits 0x%08x (traps) are not emulated", unsupported);
  wave.set_mode(value);
}

void execute_setreg(Wave& wave, const Instruction& inst) {
  const HardwareField field = hardware_field(inst);
  const bool immediate = inst.source[1].place == Place::constant;
  const u32 value = immediate ? static_cast<u32>(inst.source[1].constant)
                              : read_scalar<u32>(wave, inst.source[0]);
  const u32 mask = field.mask() << field.position;
  const u32 placed = value << field.position & mask;
  switch (field.id) {
    case kHwMode: write_mode(wave, (wave.mode & ~mask) | placed); break;
    case kHwTrapStatus: write_trap_status(placed); break;
    default: fault("writing hardware register %u is not emulated", field.id);
  }
}

// ---- The table ----------------------------------------------------------------------------------

#define SOP(FORMAT, OPCODE, NAME, ARCH, RESULT, ARGS, ...) \
  RESULT NAME##_semantics ARGS { return __VA_ARGS__; }
#define CUSTOM(...)
#include "instructions/sop.inc"
#undef SOP
#undef CUSTOM

#define SOP(FORMAT, OPCODE, NAME, ARCH, RESULT, ARGS, ...)                     \
  EMULATOR_ROW(FORMAT, OPCODE, ARCH, #NAME,                                    \
               EMULATOR_EXECUTOR(ScalarOperation<&NAME##_semantics>::execute), \
               EMULATOR_SIGNATURE(RESULT, ARGS), Unit::salu)
#define CUSTOM(FORMAT, OPCODE, NAME, ARCH, RESULT, ARGS, UNIT, ...)         \
  EMULATOR_ROW(FORMAT, OPCODE, ARCH, #NAME, EMULATOR_EXECUTOR(__VA_ARGS__), \
               EMULATOR_SIGNATURE(RESULT, ARGS), UNIT)
const Definition kDefinitions[] = {
#include "instructions/sop.inc"
};

}  // namespace

DefinitionSpan sop_definitions() { return {kDefinitions, std::size(kDefinitions)}; }

}  // namespace emulator
