// An instruction as LLVM's assembler writes it: for messages, and for comparison with a
// disassembler.
#pragma once

#include <string>

#include "decode/instruction.h"

namespace emulator {

std::string text_of(const Instruction& inst);
// "v3", "a7", "s5", "vcc": of one that is named, both halves.
std::string register_name(u32 vgpr);
std::string scalar_name(u32 index);

}  // namespace emulator
