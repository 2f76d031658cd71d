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
// Whether decoding gave an instruction that can be executed.
bool is_decoded(const Instruction&);

}  // namespace emulator
