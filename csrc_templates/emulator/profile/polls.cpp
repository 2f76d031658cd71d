// Which store was the first that ended a wait. A flag may have been stored to again before the wave
// that waits for it looks here, as a counter is that goes on while others wait; on the chip the
// wave would not have waited for that. So when a wave leaves its loop, the instructions between its
// poll and the way out are executed again with each value that the flag has had.
#include <algorithm>
#include <cstring>

#include "profile/profile.h"

namespace emulator {
namespace {

constexpr u32 kScalars = 128;

// All that the loop may change.
std::vector<u32> registers_of(const Wave& wave, const PollingLoop& loop) {
  std::vector<u32> registers(wave.scalar, wave.scalar + kScalars);
  for (const u16 vgpr : loop.vgprs)
    registers.insert(registers.end(), wave.vgpr[vgpr], wave.vgpr[vgpr] + kLanes);
  registers.push_back(wave.scc);
  return registers;
}

void set_registers(Wave& wave, const PollingLoop& loop, const std::vector<u32>& registers) {
  const u32* from = registers.data();
  std::copy_n(from, kScalars, wave.scalar);
  from += kScalars;
  for (const u16 vgpr : loop.vgprs) {
    std::copy_n(from, kLanes, wave.vgpr[vgpr]);
    from += kLanes;
  }
  wave.scc = *from;
}

// Whether the wave leaves the loop without another poll.
bool leaves(Wave& wave, const Polled& polled, u32 value) {
  const PollingLoop& loop = *polled.loop;
  const Instruction* const code = wave.dispatch().code->instructions.data();
  set_registers(wave, loop, polled.registers);
  std::fill_n(wave.vgpr[loop.polled], kLanes, value);
  wave.pc = polled.next;
  // One without inner loops does not come back to an instruction before it has polled again.
  for (u32 left = loop.last - loop.first + 1; left; --left) {
    const Instruction& inst = *wave.pc;
    const i64 dword = &inst - code;
    if (dword < loop.first || dword > loop.last) return true;
    if (sees_other_units(inst)) return false;
    wave.current = &inst;
    wave.pc += inst.dwords;
    if (inst.definition->unit != Unit::waitcnt && inst.definition->unit != Unit::barrier)
      inst.execute(wave, inst);
  }
  return false;
}

}  // namespace

Polled polled_by(const Wave& wave, const PollingLoop& loop, u64 flag, u64 seen, u32 value) {
  return {&loop, wave.pc, flag, seen, value, registers_of(wave, loop)};
}

u64 stores_that_end(Wave& wave, const Flags& flags, const Polled& polled, u64 known) {
  const PollingLoop& loop = *polled.loop;
  const std::vector<u32> registers = registers_of(wave, loop);
  const Instruction *const pc = wave.pc, *const current = wave.current;
  const WaveState state = wave.state;
  const bool yields = wave.yields;
  u64 stores = kUnknown;
  try {
    for (u64 count = known; count <= polled.seen && stores == kUnknown; ++count)
      if (leaves(wave, polled, flags.value_after(polled.flag, count))) stores = count;
  } catch (const Fault&) {
    // It reads what is not there any more.
  }
  set_registers(wave, loop, registers);
  wave.pc = pc, wave.current = current;
  wave.state = state, wave.yields = yields;
  return stores;
}

}  // namespace emulator
