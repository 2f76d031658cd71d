// Wait states over all paths of a code object, without running it.
//
// A compiler sees to wait states by looking back from an instruction over the paths that lead to
// it. LLVM's `getWaitStatesSince` visits each basic block once, over the first path on which it
// comes there, although another one may be shorter: behind a branch around a few instructions it
// may leave wait states out. A run shows that only where it takes the shorter path.
//
// Each block is passed once for each past: which instructions later ones must keep away from still,
// and how long ago they were. All paths on which these are the same are one.
#include <algorithm>
#include <cstring>
#include <set>

#include "checks/check.h"
#include "decode/code_object.h"
#include "decode/decode.h"
#include "json.h"

namespace emulator {
namespace {

// What matters of a path: where an access is kept in the state, by which instruction, how long ago.
using Past = std::vector<std::array<u32, 3>>;

Past past_of(const WaitStateState& state) {
  Past past;
  u32 place = 0;
  const auto note = [&](const LastAccess& last, bool is_watched) {
    const u32 age = state.now - last.time;
    if (is_watched && age <= kLongestWait) past.push_back({place, last.dword, age});
    ++place;
  };
  for (const LastAccess& last : state.written) note(last, last.by && last.by->threatened);
  for (const LastAccess& last : state.read) note(last, last.by && last.by->produces_by_reading);
  for (const LastAccess& last : state.hardware_register) note(last, last.by);
  note(state.f64_matrix, state.f64_matrix.by);
  note(state.vskip, state.vskip.by);
  return past;
}

// Where a path goes on behind an instruction.
struct WaysOn {
  bool ends_block = false;
  bool is_known = true;  // otherwise only a run says
  std::vector<u32> dwords;
};

WaysOn ways_on_behind(const CodeObject& code, u32 dword) {
  const Instruction& inst = code.instructions[dword];
  if (!is_decoded(inst)) return {true, false, {}};
  if (inst.definition->unit != Unit::branch) return {};
  const char* const name = inst.definition->mnemonic;
  const u32 next = dword + inst.dwords, target = next + static_cast<u32>(inst.offset);
  if (!std::strncmp(name, "s_endpgm", 8)) return {true, true, {}};
  if (!std::strcmp(name, "s_branch")) return {true, true, {target}};
  for (const char* condition : {"scc", "vcc", "exec"})
    if (!std::strncmp(name, "s_cbranch_", 10) && !std::strncmp(name + 10, condition, 3))
      return {true, true, {next, target}};
  return {true, false, {}};
}

class PathChecker {
 public:
  PathChecker(const CodeObject& code, const Kernel& kernel) : code_(code), kernel_(kernel) {}

  std::map<u32, MissingWaits> missing;  // by dword: what lacks most
  std::set<u32> ends;                   // behind which paths could not be followed

  void check() {
    find_blocks();
    go_to(kernel_.entry_dword, std::make_unique<WaitStateState>());
    while (!open_.empty()) {
      auto [dword, state] = std::move(open_.back());
      open_.pop_back();
      pass_block(dword, *state);
    }
  }

 private:
  void find_blocks() {
    std::vector<u32> open{kernel_.entry_dword};
    while (!open.empty()) {
      u32 dword = open.back();
      open.pop_back();
      if (dword >= code_.text_dwords || !begins_.insert(dword).second) continue;
      WaysOn ways;
      for (; dword < code_.text_dwords && !ways.ends_block;
           dword += code_.instructions[dword].dwords) {
        ways = ways_on_behind(code_, dword);
        traits_.try_emplace(dword, traits_of(code_.instructions[dword], code_.arch));
      }
      open.insert(open.end(), ways.dwords.begin(), ways.dwords.end());
    }
  }

  void go_to(u32 dword, std::unique_ptr<WaitStateState> state) {
    if (dword < code_.text_dwords && seen_.insert({dword, past_of(*state)}).second)
      open_.push_back({dword, std::move(state)});
  }

  void pass_block(u32 dword, WaitStateState& state) {
    std::vector<MissingWaits> found;
    while (true) {
      const Instruction& inst = code_.instructions[dword];
      found.clear();
      state.pass(code_, inst, traits_.at(dword), found);
      for (const MissingWaits& each : found) note(dword, each);
      const WaysOn ways = ways_on_behind(code_, dword);
      if (!ways.is_known) ends.insert(dword);
      for (const u32 next : ways.dwords) go_to(next, std::make_unique<WaitStateState>(state));
      dword += inst.dwords;
      if (ways.ends_block || dword >= code_.text_dwords) return;
      if (begins_.count(dword)) return go_to(dword, std::make_unique<WaitStateState>(state));
    }
  }

  void note(u32 dword, const MissingWaits& found) {
    const auto [known, is_new] = missing.emplace(dword, found);
    if (!is_new && found.count() > known->second.count()) known->second = found;
  }

  const CodeObject& code_;
  const Kernel& kernel_;
  std::set<u32> begins_;  // of blocks
  std::map<u32, InstructionTraits> traits_;
  std::set<std::pair<u32, Past>> seen_;
  std::vector<std::pair<u32, std::unique_ptr<WaitStateState>>> open_;
};

// How many instructions a kernel has before a dword of it.
u32 number_of(const CodeObject& code, const Kernel& kernel, u32 dword) {
  u32 number = 0;
  for (u32 each = kernel.entry_dword; each < dword; each += code.instructions[each].dwords)
    ++number;
  return number;
}

Json json_of(const CodeObject& code, const Kernel& kernel, u32 dword, u32 missing,
             const std::string& message) {
  return json_object({{"kernel", kernel.name},
                      {"address", code.location(dword)},
                      {"number", number_of(code, kernel, dword)},
                      {"instruction", text_of(code.instructions[dword])},
                      {"missing", missing},
                      {"message", message}});
}

Json check_paths(const CodeObject& code) {
  std::vector<Json> found;
  for (const auto& kernel : code.kernels) {
    PathChecker checker(code, *kernel);
    checker.check();
    for (const auto& [dword, missing] : checker.missing)
      found.push_back(json_of(code, *kernel, dword, missing.count(), text_of(code, missing)));
    for (const u32 dword : checker.ends)
      found.push_back(json_of(code, *kernel, dword, 0, "only a run says where this goes on"));
  }
  return json_list(found);
}

}  // namespace
}  // namespace emulator

// The places of a code object where a path lacks wait states: a JSON array, or an object with the
// `error` that it cannot be read. It stays until the thread's next call.
EXPORT const char* jitfmha_emulator_check_paths(const emulator::u8* elf, std::size_t bytes) {
  using namespace emulator;
  thread_local std::string text;
  try {
    text = check_paths(*load_code_object(elf, bytes)).text;
  } catch (const CodeObjectError& error) {
    text = json_object({{"error", error.what()}}).text;
  }
  return text.c_str();
}
