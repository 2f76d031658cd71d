// The sanitizer's findings: one for each kind and instruction, with a count. They are printed when
// they first occur in the process, and kept for the thread that launched the kernel.
#include "checks/check.h"

#if JITFMHA_EMULATOR_CHECK

#include <cstdarg>
#include <cstdio>
#include <iterator>
#include <set>
#include <tuple>

#include "decode/text.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

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
struct Collection {
  std::map<FindingKey, KnownFinding> findings;
  u64 left_out = 0;
};
Collection& collection() {
  thread_local Collection instance;
  return instance;
}

std::string text_of(const FindingKey& key, const KnownFinding& known) {
  const auto& [kernel, kind, dword, instruction] = key;
  const Finding& finding = known.finding;
  std::string text =
      std::string(kFindingKindNames[static_cast<u32>(kind)]) + ": kernel " + kernel + ", at " +
      known.location + ": `" + instruction + "`, workgroup (" +
      std::to_string(finding.workgroup_id[0]) + ", " + std::to_string(finding.workgroup_id[1]) +
      ", " + std::to_string(finding.workgroup_id[2]) + "), wave " + std::to_string(finding.wave);
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

std::string formatted(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  return text;
}

u32 dword_of(const Wave& wave, const Instruction& inst) {
  return static_cast<u32>(&inst - wave.dispatch().code->instructions.data());
}

std::string instruction_at(const Wave& wave, u32 dword) {
  const CodeObject& code = *wave.dispatch().code;
  return "`" + text_of(code.instructions[dword]) + "` at " + code.location(dword);
}

std::string register_name(u32 vgpr) {
  return vgpr < kFirstAccumulation ? "v" + std::to_string(vgpr)
                                   : "a" + std::to_string(vgpr - kFirstAccumulation);
}

std::string scalar_name(u32 index) {
  switch (index & ~1u) {
    case kFlatScratch: return "flat_scratch";
    case kVccIndex: return "vcc";
    case kM0: return "m0";
    case kExecIndex: return "exec";
    default: return "s" + std::to_string(index);
  }
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
  Collection& all = collection();
  Printer printer(dispatch.kernel->name);
  for (const auto& [kind_and_dword, finding] : findings) {
    const auto [kind, dword] = kind_and_dword;
    const FindingKey key{dispatch.kernel->name, kind, dword,
                         text_of(dispatch.code->instructions[dword])};
    const KnownFinding found{finding, dispatch.code->location(dword)};
    if (dispatch.options.print_findings) printer.print(key, found);
    const auto known = all.findings.find(key);
    if (known != all.findings.end()) known->second.finding.count += finding.count;
    else if (all.findings.size() >= kMostFindings) all.left_out += finding.count;
    else all.findings.emplace(key, found);
  }
}

}  // namespace emulator

// ---- Exports ------------------------------------------------------------------------------------

// Writes the findings of this thread's launches in the order of kernel, kind and address, at most
// `capacity`, and forgets what it wrote. Returns how many. `left_out`: occurrences that were too
// many to be kept.
EXPORT int jitfmha_emulator_take_findings(emulator::FindingRow* rows, int capacity,
                                          emulator::u64* left_out) {
  using namespace emulator;
  Collection& all = collection();
  int written = 0;
  for (auto it = all.findings.begin(); it != all.findings.end() && written < capacity;
       it = all.findings.erase(it)) {
    const auto& [kernel, kind, dword, instruction] = it->first;
    const KnownFinding& known = it->second;
    FindingRow& row = rows[written++];
    row = {};
    std::snprintf(row.kernel, sizeof(row.kernel), "%s", kernel.c_str());
    std::snprintf(row.address, sizeof(row.address), "%s", known.location.c_str());
    std::snprintf(row.instruction, sizeof(row.instruction), "%s", instruction.c_str());
    std::snprintf(row.message, sizeof(row.message), "%s", known.finding.message.c_str());
    row.count = known.finding.count;
    row.kind = static_cast<u32>(kind);
    for (u32 axis = 0; axis < 3; ++axis) row.workgroup[axis] = known.finding.workgroup_id[axis];
    row.wave = known.finding.wave;
    row.lane = known.finding.lane;
  }
  *left_out = all.left_out;
  if (all.findings.empty()) all.left_out = 0;
  return written;
}

#endif
