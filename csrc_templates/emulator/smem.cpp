// Scalar loads. The table is smem.inc. Operands: source 0 base, source 1 the SGPR offset if any.
#include <algorithm>

#include "scalar_operands.h"

namespace emulator {

namespace {

u64 offset_of(Wave& wave, const Instruction& inst) {
  const Operand& soffset = inst.source[1];
  return (soffset.place == Place::none ? 0 : read_scalar<u32>(wave, soffset)) + static_cast<i64>(inst.offset);
}

void load_dwords(Wave& wave, const Instruction& inst, u64 address) {
  const u32 dwords = inst.destination.dwords;
  const u8* const from = global_memory(wave, inst, kScalarLane, address & ~u64{3}, 4 * dwords, Access::load);
  std::memcpy(&wave.scalar[inst.destination.index], from, 4 * dwords);
  hooks::scalar_written(wave, inst.destination.index, dwords);
}

void execute_load(Wave& wave, const Instruction& inst) {
  load_dwords(wave, inst, read_scalar_pair(wave, inst.source[0].index) + offset_of(wave, inst));
}

// A buffer resource's base, stride and size; dwords beyond the size read 0.
void execute_buffer_load(Wave& wave, const Instruction& inst) {
  const u64 base = read_scalar_pair(wave, inst.source[0].index);
  const u32 records = read_scalar_register(wave, inst.source[0].index + 2);
  const u32 stride = static_cast<u32>(base >> 48 & 0x3fff);
  const u64 bytes = stride ? u64{stride} * records : records;
  const u64 offset = offset_of(wave, inst) & ~u64{3};
  for (u32 dword = 0; dword < inst.destination.dwords; ++dword) {
    u32 value = 0;
    if (offset + 4 * dword + 4 <= bytes) {
      const u64 address = ((base & 0xffffffffffff) & ~u64{3}) + offset + 4 * dword;
      std::memcpy(&value, global_memory(wave, inst, kScalarLane, address, 4, Access::load), 4);
    }
    write_scalar_register(wave, inst.destination.index + dword, value);
  }
}

void execute_cache_control(Wave&, const Instruction&) {}

// Time passes with instructions, so that runs repeat.
void execute_time(Wave& wave, const Instruction& inst) { write_scalar<u64>(wave, inst.destination, 4 * wave.executed); }

#define SMEM(OPCODE, NAME, ARCH, DWORDS, EXECUTOR) \
  {Format::SMEM, OPCODE, ARCH, #NAME, &EXECUTOR, {}, Unit::smem, {DWORDS}},
const Definition kDefinitions[] = {
#include "smem.inc"
};

}  // namespace

DefinitionSpan smem_definitions() { return {kDefinitions, std::size(kDefinitions)}; }

}  // namespace emulator
