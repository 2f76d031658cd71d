// From the bits of an instruction to an `Instruction`.
#pragma once

#include "decode/instruction.h"

namespace emulator {

// `available`: dwords up to the end of the code. What cannot be decoded becomes an instruction that
// faults with its dwords when it is executed.
Instruction decode_instruction(Arch arch, const u32* words, u32 available);
// Every row of every table.
std::vector<const Definition*> all_definitions();
// Stands behind the last instruction.
Instruction end_of_code();
// The bits of source fields 240 to 248 in an operand: 0.5 -0.5 1 -1 2 -2 4 -4 1/(2 pi).
constexpr u32 kFirstInlineFloat = 240, kLastInlineFloat = 248;
u64 inline_float(u32 field, OperandType type);
// Whether decoding gave an instruction that can be executed.
bool is_decoded(const Instruction&);

}  // namespace emulator
