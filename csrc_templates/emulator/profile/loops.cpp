// The loops of the code that ran: branches back, by address.
#include <algorithm>

#include "profile/profile.h"

namespace emulator {

std::vector<Loop> find_loops(const CodeObject& code, const CountsByDword& counts) {
  std::map<u32, u32> last_of;  // several branches back to one place are one loop
  for (u32 dword = 0; dword < code.text_dwords; ++dword) {
    const Instruction& inst = code.instructions[dword];
    if (!counts[dword].taken || inst.definition->format != Format::SOPP) continue;
    const i64 target = i64{dword} + inst.dwords + inst.offset;
    if (target < 0 || target > i64{dword}) continue;
    u32& last = last_of[static_cast<u32>(target)];
    last = std::max(last, dword);
  }
  std::vector<Loop> loops;
  for (const auto& [first, last] : last_of) {
    Loop loop{first, last, kNoLoop, 1};
    for (std::size_t i = 0; i < loops.size(); ++i) {
      const Loop& outer = loops[i];
      if (outer.last < last) continue;
      // Loops come by `first`: the latest that reaches as far is the smallest.
      loop.outer = static_cast<int>(i);
      loop.depth = outer.depth + 1;
    }
    loops.push_back(loop);
  }
  return loops;
}

std::vector<int> innermost_loops(const std::vector<Loop>& loops, std::size_t dwords) {
  std::vector<int> result(dwords, kNoLoop);
  for (std::size_t i = 0; i < loops.size(); ++i)
    std::fill(result.begin() + loops[i].first, result.begin() + loops[i].last + 1,
              static_cast<int>(i));
  return result;
}

}  // namespace emulator
