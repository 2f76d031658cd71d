// An instruction as LLVM's assembler writes it: for messages, and for comparison with a
// disassembler.
#pragma once

#include <string>

#include "decode/instruction.h"

namespace emulator {

std::string text_of(const Instruction& inst);

}  // namespace emulator
