// Exports for tests: the decoder's view of a code object, and the instruction tables.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>

#include "chips.h"
#include "decode/decode.h"
#include "decode/text.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace emulator;

// Enumerators by name. Switches without a default, so that compilers report a forgotten one.
#define NAME(ENUM, ENUMERATOR) \
  case ENUM::ENUMERATOR: return #ENUMERATOR;

// clang-format off
const char* name_of(Format format) {
  switch (format) {
    NAME(Format, SOP1) NAME(Format, SOP2) NAME(Format, SOPK) NAME(Format, SOPC) NAME(Format, SOPP)
    NAME(Format, SMEM) NAME(Format, VOP1) NAME(Format, VOP2) NAME(Format, VOPC) NAME(Format, VOP3)
    NAME(Format, VOP3P) NAME(Format, MFMA) NAME(Format, MFMA_SCALE) NAME(Format, DS)
    NAME(Format, MUBUF) NAME(Format, FLAT) NAME(Format, GLOBAL) NAME(Format, SCRATCH)
    NAME(Format, MTBUF)
    NAME(Format, count)
  }
  return "";
}

const char* name_of(Unit unit) {
  switch (unit) {
    NAME(Unit, salu) NAME(Unit, branch) NAME(Unit, message) NAME(Unit, waitcnt)
    NAME(Unit, barrier) NAME(Unit, smem) NAME(Unit, valu) NAME(Unit, transcendental)
    NAME(Unit, mfma) NAME(Unit, lds) NAME(Unit, vmem_load) NAME(Unit, vmem_store)
    NAME(Unit, vmem_atomic)
  }
  return "";
}

const char* name_of(OperandType type) {
  switch (type) {
    NAME(OperandType, none) NAME(OperandType, u16) NAME(OperandType, i16) NAME(OperandType, f16)
    NAME(OperandType, bf16) NAME(OperandType, b32) NAME(OperandType, i32) NAME(OperandType, f32)
    NAME(OperandType, b64) NAME(OperandType, i64) NAME(OperandType, f64) NAME(OperandType, f16x2)
    NAME(OperandType, bf16x2) NAME(OperandType, i16x2) NAME(OperandType, f32x2)
    NAME(OperandType, lane_mask) NAME(OperandType, registers) NAME(OperandType, b128)
    NAME(OperandType, b192) NAME(OperandType, b512) NAME(OperandType, b1024)
  }
  return "";
}

const char* name_of(Role role) {
  switch (role) {
    NAME(Role, source) NAME(Role, old) NAME(Role, literal) NAME(Role, lane_bit) NAME(Role, vcc)
    NAME(Role, scc) NAME(Role, exec) NAME(Role, simm16) NAME(Role, destination)
    NAME(Role, scalar_destination) NAME(Role, lane_mask) NAME(Role, with_carry) NAME(Role, none)
    NAME(Role, mode)
  }
  return "";
}
// clang-format on
#undef NAME

std::string description(const Parameter& parameter) {
  return std::string(" ") + name_of(parameter.type) + ":" + name_of(parameter.role);
}

}  // namespace

// Writes the text of the instruction at `words` and returns its length in dwords; 0 where it is not
// known, or nothing known is called `arch_name`.
EXPORT int jitfmha_emulator_disassemble(const char* arch_name, const u32* words, int available,
                                        char* text, int text_bytes) {
  const auto known =
      std::find_if(std::begin(kArchitectures), std::end(kArchitectures),
                   [&](const Architecture& each) { return !std::strcmp(each.name, arch_name); });
  if (known == std::end(kArchitectures)) return 0;
  const Instruction inst = decode_instruction(known->arch, words, static_cast<u32>(available));
  std::snprintf(text, static_cast<std::size_t>(text_bytes), "%s", text_of(inst).c_str());
  return is_decoded(inst) ? inst.dwords : 0;
}

// Writes a row of the instruction tables as words between blanks; false past the last row:
//   mnemonic format opcode chips unit registers(3) passes result sources(...)
// Result and sources are type:role.
EXPORT bool jitfmha_emulator_definition(int index, char* text, int text_bytes) {
  static const std::vector<const Definition*> rows = all_definitions();
  if (index < 0 || index >= static_cast<int>(rows.size())) return false;
  const Definition& row = *rows[static_cast<std::size_t>(index)];
  std::string chips;
  for (const Architecture& each : kArchitectures)
    if (row.arch & each.arch) chips += (chips.empty() ? "" : ",") + std::string(each.name);
  std::string line = std::string(row.mnemonic) + " " + name_of(row.format) + " " +
                     std::to_string(row.opcode) + " " + chips + " " + name_of(row.unit);
  for (const u8 count : row.registers) line += " " + std::to_string(count);
  line += " " + std::to_string(row.passes) + description(row.signature.result);
  for (const Parameter& source : row.signature.sources)
    if (source.role != Role::none) line += description(source);
  std::snprintf(text, static_cast<std::size_t>(text_bytes), "%s", line.c_str());
  return true;
}
