// The sanitizer's findings: one for each kind and instruction, with a count. They are printed when
// they first occur in the process, and kept for the thread that launched the kernel.
#include <cstdio>
#include <set>
#include <tuple>

#include "checks/check.h"
#include "decode/text.h"
#include "json.h"

namespace emulator {
namespace {

constexpr std::size_t kMostFindings = 1000, kMostPrinted = 20;

// Kernel, kind, dword, and the instruction's text: another module may have a kernel of that name.
using FindingKey = std::tuple<std::string, FindingKind, u32, std::string>;

struct KnownFinding {
  Finding finding;
  std::string location;
};

// Of this thread's launches since Python last took them.
thread_local std::map<FindingKey, KnownFinding> findings_of_thread;

std::string text_of(const FindingKey& key, const KnownFinding& known) {
  const auto& [kernel, kind, dword, instruction] = key;
  const Finding& finding = known.finding;
  const u32* const id = finding.workgroup_id;
  std::string text =
      std::string(kFindingKindNames[static_cast<u32>(kind)]) + ": kernel " + kernel + ", at " +
      known.location + ": `" + instruction + "`" +
      formatted(", workgroup (%u, %u, %u), wave %u", id[0], id[1], id[2], finding.wave);
  if (finding.lane >= 0) text += ", lane " + std::to_string(finding.lane);
  text += ": " + finding.message;
  if (finding.count > 1) text += " (" + std::to_string(finding.count) + " times)";
  return text;
}

// A line on standard error for each finding that no earlier launch of the process had.
class Printer {
 public:
  explicit Printer(const std::string& kernel) : kernel_(kernel) {}
  ~Printer() {
    if (printed_ > kMostPrinted)
      std::fprintf(stderr, "jitfmha emulator: %zu more findings in kernel %s\n",
                   printed_ - kMostPrinted, kernel_.c_str());
  }
  void print(const FindingKey& key, const KnownFinding& known) {
    static std::mutex mutex;
    static std::set<FindingKey> printed;
    const std::lock_guard<std::mutex> lock(mutex);
    if (!printed.insert(key).second || ++printed_ > kMostPrinted) return;
    std::fprintf(stderr, "jitfmha emulator: %s\n", text_of(key, known).c_str());
  }

 private:
  const std::string& kernel_;
  std::size_t printed_ = 0;
};

}  // namespace

u32 dword_of(const CodeObject& code, const Instruction& inst) {
  return static_cast<u32>(&inst - code.instructions.data());
}
u32 dword_of(const Wave& wave, const Instruction& inst) {
  return dword_of(*wave.dispatch().code, inst);
}

std::string instruction_at(const CodeObject& code, u32 dword) {
  return "`" + text_of(code.instructions[dword]) + "` at " + code.location(dword);
}

std::string instruction_at(const Wave& wave, u32 dword) {
  return instruction_at(*wave.dispatch().code, dword);
}

Finding* count_finding(Wave& wave, const Instruction& inst, FindingKind kind, int lane) {
  Workgroup& workgroup = *wave.workgroup;
  Finding& finding = workgroup.observation->findings[{kind, dword_of(wave, inst)}];
  if (finding.count++) return nullptr;
  const Dispatch& dispatch = workgroup.dispatch;
  for (u32 axis = 0; axis < 3; ++axis) finding.workgroup_id[axis] = workgroup.id[axis];
  finding.workgroup =
      workgroup.id[0] + u64{dispatch.workgroups[0]} *
                            (workgroup.id[1] + u64{dispatch.workgroups[1]} * workgroup.id[2]);
  finding.wave = wave.index;
  finding.lane = lane;
  return &finding;
}

void export_findings(const Dispatch& dispatch, const Findings& findings) {
  std::map<FindingKey, KnownFinding>& all = findings_of_thread;
  Printer printer(dispatch.kernel->name);
  for (const auto& [kind_and_dword, finding] : findings) {
    const auto [kind, dword] = kind_and_dword;
    const FindingKey key{dispatch.kernel->name, kind, dword,
                         text_of(dispatch.code->instructions[dword])};
    const KnownFinding found{finding, dispatch.code->location(dword)};
    if (dispatch.options.print_findings) printer.print(key, found);
    const auto known = all.find(key);
    if (known != all.end()) known->second.finding.count += finding.count;
    else if (all.size() < kMostFindings) all.emplace(key, found);
  }
}

}  // namespace emulator

// ---- Exports ------------------------------------------------------------------------------------

// The findings of this thread's launches since the last call, at most 1000, in the order of kernel,
// kind and address: a JSON array, which stays until the next call.
EXPORT const char* jitfmha_emulator_take_findings() {
  using namespace emulator;
  thread_local std::string text;
  text = json_list(findings_of_thread, [](const auto& known) {
           const auto& [kernel, kind, dword, instruction] = known.first;
           const Finding& finding = known.second.finding;
           return json_object({{"kind", kFindingKindNames[static_cast<u32>(kind)]},
                               {"kernel", kernel},
                               {"address", known.second.location},
                               {"instruction", instruction},
                               {"workgroup", json_list(finding.workgroup_id)},
                               {"wave", finding.wave},
                               {"lane", finding.lane},
                               {"count", finding.count},
                               {"message", finding.message}});
         }).text;
  findings_of_thread.clear();
  return text.c_str();
}
