// A decoded instruction, and the table row that it was decoded by.
#pragma once

#include <cstddef>
#include <iterator>
#include <vector>

#include "decode/signature.h"

namespace emulator {

struct Wave;
struct Instruction;

// Bits, so that a table row can name more than one.
enum Arch : u8 { kGfx942 = 1, kGfx950 = 2, kBoth = 3 };
// The names that tables use.
constexpr Arch BOTH = kBoth, GFX942 = kGfx942, GFX950 = kGfx950;

// clang-format off
#define EMULATOR_FORMATS(X) \
  X(SOP1) X(SOP2) X(SOPK) X(SOPC) X(SOPP) X(SMEM) X(VOP1) X(VOP2) X(VOPC) X(VOP3) X(VOP3P) \
  X(MFMA)       /* opcodes of VOP3P; registers and modifiers of their own */ \
  X(MFMA_SCALE) /* gfx950: an MFMA with scales, 16 bytes; opcode of its second half */ \
  X(DS) X(MUBUF) X(FLAT) X(GLOBAL) X(SCRATCH) \
  X(MTBUF)      /* fields of MUBUF, and a data format */ \
  X(count)
EMULATOR_ENUM(Format, EMULATOR_FORMATS)

// What an instruction occupies, for the cost model, and which counter of s_waitcnt it raises.
#define EMULATOR_UNITS(X) \
  X(salu) X(branch) X(message) X(waitcnt) X(barrier) /* scalar; nothing to wait for */ \
  X(smem)                                            /* lgkmcnt */ \
  X(valu) X(transcendental) X(mfma)                  /* from here on: vector instructions */ \
  X(lds)                                             /* lgkmcnt */ \
  X(vmem_load) X(vmem_store) X(vmem_atomic)          /* vmcnt; FLAT segment: lgkmcnt too */
EMULATOR_ENUM(Unit, EMULATOR_UNITS)
// clang-format on

using Execute = void (*)(Wave&, const Instruction&);

// One row of an instruction table.
struct Definition {
  Format format;
  u16 opcode;  // as the named format counts; VOP1/2/C rows also serve their VOP3 form
  Arch arch;
  const char* mnemonic;  // without _e32, _e64, _sdwa, _dpp
  Execute execute;
  Signature signature;  // formats SOP*, VOP*; empty elsewhere
  Unit unit;
  // Registers of the operands where no signature says it; 0 where there is no operand.
  //   MFMA: A, B, C/D; A and B 0: the format in CBSZ and BLGP says.   DS: data0, data1, result.
  //   MUBUF, FLAT, GLOBAL, SCRATCH: data, result.   SMEM: result, data.
  u8 registers[3] = {0, 0, 0};
  u8 passes = 0;  // MFMA: passes of 4 cycles; mfma_passes() knows better for f8f6f4
};

#define EMULATOR_ROW(FORMAT, OPCODE, ARCH, NAME, ...) \
  {Format::FORMAT, OPCODE, ARCH, NAME, __VA_ARGS__},
// What executes a row. decoder/rows.cpp has rows without it, which decoding does not need.
#define EMULATOR_EXECUTOR(...) &__VA_ARGS__
// Of semantics with this result and these parameters.
#define EMULATOR_SIGNATURE(RESULT, ARGS) signature_of(static_cast<RESULT(*) ARGS>(nullptr))

// What MODE.VSKIP skips.
inline bool is_vector(const Definition& row) { return row.unit >= Unit::valu; }

enum class Place : u8 {
  none,
  vgpr,      // index 0-255 architectural, 256-511 accumulation
  scalar,    // index as encoded: 0-101 SGPRs, 102 flat_scratch, 104 xnack_mask, 106 vcc,
             // 108-123 ttmp, 124 m0, 126 exec
  constant,  // inline constant or literal, already in the operand's type
  vccz,
  execz,
  scc,
};

enum Modifier : u8 { kNegate = 1, kAbsolute = 2, kSignExtend = 4 };

// SDWA's selections. op_sel uses word_0 and word_1.
enum class Select : u8 { byte_0, byte_1, byte_2, byte_3, word_0, word_1, dword };

// Source fields that read an aperture of generic addresses.
enum ApertureField : u16 { kSharedBase = 235, kSharedLimit, kPrivateBase, kPrivateLimit };

struct Operand {
  u64 constant = 0;
  u16 index = 0;  // register; of a constant that is an aperture, its field
  Place place = Place::none;
  OperandType type = OperandType::none;
  u8 dwords = 0;
  u8 modifiers = 0;
  Select select = Select::dword;
  bool direct = false;  // a VGPR without modifiers, selection or DPP: read it where it is
};

struct Dpp {
  u16 control;
  u8 row_mask, bank_mask;
  bool bound_control;  // invalid lanes read 0 instead of keeping their result
};

// Operands by format:
//   SOP*, VOP*   source[k] is the k-th parameter of the signature.
//   SMEM         source: base, SGPR offset, data. destination: data.
//   DS           source: address, data0, data1.
//   MUBUF        source: vaddr (0, 1 or 2 registers), data, resource, soffset. destination: data.
//   FLAT...      source: vaddr, data, saddr (place none where off).
//   MFMA         source: A, B, C, and for MFMA_SCALE the scales of A and B.
struct Instruction {
  Execute execute;
  const Definition* definition;
  Operand destination;
  Operand scalar_destination;  // carry-out, comparison, VOP3B sdst
  Operand source[kMaxSources];
  i32 offset = 0;     // simm16, or the byte offset of memory formats (DS: offset0 | offset1 << 8)
  u32 words[4] = {};  // the encoding
  u8 dwords = 1;      // its length
  Format encoding;    // differs from definition->format for the VOP3 form of VOP1/2/C

  bool has_output_modifiers = false;  // clamp, omod, dst_sel or op_sel to the upper half
  bool clamp = false;
  u8 omod = 0;  // 0 none, 1 *2, 2 *4, 3 /2
  bool sdwa = false;
  bool dpp = false;
  Select destination_select = Select::dword;
  u8 destination_unused = 0;  // SDWA: 0 pad with zeros, 1 sign extend, 2 preserve
  Dpp dpp_control{};
  u8 op_sel = 0, op_sel_hi = 0, neg_lo = 0, neg_hi = 0;  // VOP3P, one bit a source
  u8 cbsz = 0, abid = 0, blgp = 0;                       // MFMA; op_sel, op_sel_hi of MFMA_SCALE
  u8 cache_policy = 0;                                   // memory: sc0 | nt << 1 | sc1 << 2
  bool to_lds = false, offen = false, idxen = false;     // MUBUF; FLAT: to_lds
};

// f8f6f4 takes half of its row's passes where neither A nor B has elements of 8 bits.
inline u32 mfma_passes(const Instruction& inst) {
  const Definition& row = *inst.definition;
  const bool is_short = row.registers[0] == 0 && inst.cbsz > 1 && inst.blgp > 1;
  return is_short ? row.passes / 2u : row.passes;
}

// Whether it sees what other compute units have stored, as all do by which workgroups wait for each
// other: loads with sc1 go past the unit's own cache, and atomic operations with sc0 return what L2
// had.
inline bool sees_other_units(const Instruction& inst) {
  constexpr u8 kSc0 = 1, kSc1 = 4;
  const Unit unit = inst.definition->unit;
  return (unit == Unit::vmem_load && inst.cache_policy & kSc1) ||
         (unit == Unit::vmem_atomic && inst.cache_policy & kSc0);
}

// Of rows that stand for instructions that are decoded but not emulated: faults.
void execute_unsupported(Wave&, const Instruction&);

struct DefinitionSpan {
  const Definition* begin;
  std::size_t count;
};

// One for each file of semantics.
DefinitionSpan sop_definitions();
DefinitionSpan smem_definitions();
DefinitionSpan vop1_definitions();
DefinitionSpan vop2_definitions();
DefinitionSpan vopc_definitions();
DefinitionSpan vop3_definitions();
DefinitionSpan vop3_convert_definitions();
DefinitionSpan vop3p_definitions();
DefinitionSpan mfma_definitions();
DefinitionSpan lds_definitions();
DefinitionSpan buffer_definitions();
DefinitionSpan flat_definitions();

}  // namespace emulator
