// The cost model's results as JSON, for jitfmha/emulator/profile.py.
#include "execution/hooks.h"

#if JITFMHA_EMULATOR_PROFILE

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "decode/text.h"
#include "profile/profile.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace emulator {

namespace {

constexpr const char* kUnitNames[] = {
    "salu",           "branch", "message", "waitcnt",   "barrier",    "smem",        "valu",
    "transcendental", "mfma",   "lds",     "vmem_load", "vmem_store", "vmem_atomic",
};
constexpr u32 kUnits = static_cast<u32>(std::size(kUnitNames));
static_assert(kUnits == static_cast<u32>(Unit::vmem_atomic) + 1, "a name for each unit");

constexpr const char* kStallNames[] = {
    "vmcnt",  "lgkmcnt",     "barrier", "matrix_unit", "vector_unit",
    "result", "memory_unit", "nop",     "fetch",       "other_wave",
};
static_assert(std::size(kStallNames) == kStalls, "a name for each stall");

constexpr std::size_t kMostLaunches = 1000, kMostConflicts = 10;

// Of this thread: options, and launches that Python has not taken yet.
struct Collection {
  ProfileOptions options = default_profile_options();
  std::vector<std::string> launches;
  u64 left_out = 0;
};
Collection& collection() {
  thread_local Collection instance;
  return instance;
}

// ---- JSON ---------------------------------------------------------------------------------------

class Json {
 public:
  const std::string& text() const { return text_; }

  template <class Body>
  void object(Body&& body) {
    nested('{', '}', body);
  }
  template <class Body>
  void array(Body&& body) {
    nested('[', ']', body);
  }
  void key(const char* name) {
    separate();
    text_ += '"' + std::string(name) + "\":";
    first_ = true;
  }
  template <class Integer>
  void number(Integer value) {
    separate();
    text_ += std::to_string(value);
  }
  void string(const std::string& value) {
    separate();
    text_ += '"';
    for (const char c : value) {
      char escaped[8];
      const u8 byte = static_cast<u8>(c);
      const bool is_plain = byte >= 0x20 && byte < 0x7f && c != '"' && c != '\\';
      std::snprintf(escaped, sizeof(escaped), is_plain ? "%c" : "\\u%04x", byte);
      text_ += escaped;
    }
    text_ += '"';
  }
  template <class Integer>
  void field(const char* name, Integer value) {
    key(name), number(value);
  }
  void field(const char* name, const std::string& value) { key(name), string(value); }
  void field(const char* name, const char* value) { key(name), string(value); }

 private:
  template <class Body>
  void nested(char open, char close, Body& body) {
    separate();
    text_ += open;
    first_ = true;
    body();
    text_ += close;
    first_ = false;
  }
  void separate() {
    if (!first_) text_ += ',';
    first_ = false;
  }

  std::string text_;
  bool first_ = true;
};

// ---- Parts --------------------------------------------------------------------------------------

// A row for each loop and unit: instructions of the loop, without those of loops inside.
void write_counts(Json& json, const DispatchObservation& state, const CountsByDword& counts,
                  const std::vector<int>& loop_of, std::size_t loops) {
  struct Sum : Counts {
    u64 cycles = 0;
  };
  std::vector<Sum> sums((loops + 1) * kUnits);
  for (std::size_t dword = 0; dword < counts.size(); ++dword) {
    if (!counts[dword].executed) continue;
    const Cost& cost = state.costs[dword];
    Sum& sum =
        sums[static_cast<std::size_t>(loop_of[dword] + 1) * kUnits + static_cast<u32>(cost.unit)];
    sum += counts[dword];
    if (cost.port == Cost::Port::vector) sum.cycles += counts[dword].executed * cost.cycles;
  }
  json.array([&] {
    for (std::size_t row = 0; row < sums.size(); ++row) {
      const Sum& sum = sums[row];
      if (!sum.executed) continue;
      json.object([&] {
        json.field("loop", static_cast<int>(row / kUnits) + kNoLoop);
        json.field("unit", kUnitNames[row % kUnits]);
        json.field("instructions", sum.executed);
        json.field("cycles", sum.cycles);
        json.field("lds_bytes", sum.lds_bytes);
        json.field("lds_cycles", sum.lds_cycles);
        json.field("lds_conflict_cycles", sum.lds_conflict_cycles);
        json.field("global_bytes", sum.global_bytes);
        json.field("cache_lines", sum.lines);
        json.field("scratch_bytes", sum.scratch_bytes);
      });
    }
  });
}

// The loop's code, whether it ran or not: each of its instructions as if once executed.
CountsByDword code_of(const CodeObject& code, const Loop& loop) {
  CountsByDword counts(code.instructions.size());
  for (u32 dword = loop.first; dword <= loop.last; dword += code.instructions[dword].dwords)
    counts[dword].executed = 1;
  return counts;
}

void write_loops(Json& json, const Dispatch& dispatch, const DispatchObservation& state,
                 const std::vector<Loop>& loops, const std::vector<int>& loop_of) {
  const auto iterations = [&](const CountsByDword& counts, const Loop& loop) {
    return counts[loop.first].executed;
  };
  json.array([&] {
    for (const Loop& loop : loops) {
      json.object([&] {
        json.field("first", dispatch.code->location(loop.first));
        json.field("last", dispatch.code->location(loop.last));
        json.field("depth", loop.depth);
        json.field("outer", loop.outer);
        json.field("iterations", iterations(state.total, loop));
        json.key("iterations_of_waves");
        json.array([&] {
          for (const CountsByDword& wave : state.waves) json.number(iterations(wave, loop));
        });
        json.key("code"),
            write_counts(json, state, code_of(*dispatch.code, loop), loop_of, loops.size());
      });
    }
  });
}

// The instructions that lose most to bank conflicts.
void write_conflicts(Json& json, const Dispatch& dispatch, const DispatchObservation& state) {
  std::vector<u32> dwords;
  for (u32 dword = 0; dword < state.total.size(); ++dword)
    if (state.total[dword].lds_conflict_cycles) dwords.push_back(dword);
  std::stable_sort(dwords.begin(), dwords.end(), [&](u32 a, u32 b) {
    return state.total[a].lds_conflict_cycles > state.total[b].lds_conflict_cycles;
  });
  dwords.resize(std::min(dwords.size(), kMostConflicts));
  json.array([&] {
    for (const u32 dword : dwords) {
      json.object([&] {
        json.field("address", dispatch.code->location(dword));
        json.field("instruction", text_of(dispatch.code->instructions[dword]));
        json.field("executed", state.total[dword].executed);
        json.field("lds_cycles", state.total[dword].lds_cycles);
        json.field("lds_conflict_cycles", state.total[dword].lds_conflict_cycles);
      });
    }
  });
}

void write_rates(Json& json, const Rates& rates) {
  json.object([&] {
    for (const NamedRate& rate : kNamedRates) json.field(rate.name, rates.*rate.value);
  });
}

void write_occupancy(Json& json, const Occupancy& occupancy) {
  json.object([&] {
    json.field("vgprs", occupancy.vgprs);
    json.field("architectural_vgprs", occupancy.architectural_vgprs);
    json.field("sgprs", occupancy.sgprs);
    json.field("lds_bytes", occupancy.lds_bytes);
    json.field("waves_of_workgroup", occupancy.waves_of_workgroup);
    json.field("by_vgprs", occupancy.by_vgprs);
    json.field("by_sgprs", occupancy.by_sgprs);
    json.field("by_lds", occupancy.by_lds);
    json.field("by_waves", occupancy.by_waves);
    json.field("workgroups", occupancy.workgroups);
  });
}

void write_timing(Json& json, const Timing& timing) {
  json.object([&] {
    json.field("why_not", timing.why_not);
    json.field("workgroups", timing.workgroups);
    json.field("cycles", timing.cycles);
    json.field("matrix_busy", timing.matrix_busy);
    json.field("vector_busy", timing.vector_busy);
    json.field("lds_busy", timing.lds_busy);
    json.field("l1_busy", timing.l1_busy);
    json.field("lines", timing.lines);
    json.field("l1_hits", timing.l1_hits);
    json.key("stalls");
    json.object([&] {
      for (u32 stall = 0; stall < kStalls; ++stall)
        json.field(kStallNames[stall], timing.stalls[stall]);
    });
  });
}

void write_timed(Json& json, const DispatchObservation& state) {
  std::vector<const TimedWorkgroup*> in_order;
  for (const TimedWorkgroup& timed : state.timed) in_order.push_back(&timed);
  std::sort(in_order.begin(), in_order.end(),
            [](const auto* a, const auto* b) { return a->number < b->number; });
  json.array([&] {
    for (const TimedWorkgroup* const timed : in_order) {
      json.object([&] {
        json.field("number", timed->number);
        json.key("id");
        json.array([&] {
          for (const u32 index : timed->id) json.number(index);
        });
        json.field("instructions", timed->instructions);
        json.key("timing"), write_timing(json, timed->timing);
      });
    }
  });
}

}  // namespace

void export_profile(const Dispatch& dispatch, const DispatchObservation& state) {
  const std::vector<Loop> loops = find_loops(*dispatch.code, state.total);
  const std::vector<int> loop_of = innermost_loops(loops, state.total.size());
  const u64 launched =
      u64{dispatch.workgroups[0]} * dispatch.workgroups[1] * dispatch.workgroups[2];
  const u64 workgroups =
      state.options.assumed_workgroups ? state.options.assumed_workgroups : launched;
  const auto write_three = [](Json& json, const char* name, const u32* values) {
    json.key(name);
    json.array([&] {
      for (u32 axis = 0; axis < 3; ++axis) json.number(values[axis]);
    });
  };
  Json json;
  json.object([&] {
    json.field("kernel", dispatch.kernel->name);
    json.field("device", dispatch.device->name);
    json.field("arch", dispatch.device->architecture().name);
    json.field("compute_units", dispatch.device->compute_units);
    json.field("xcds", dispatch.device->xcds);
    json.field("clock_khz", dispatch.device->clock_khz);
    write_three(json, "grid", dispatch.workgroups);
    write_three(json, "block", dispatch.workgroup_size);
    json.field("launched_workgroups", launched);
    json.field("selected_workgroups",
               state.options.run_sample_only ? static_cast<u64>(state.sample.size()) : launched);
    json.field("ended_workgroups", state.workgroups);
    json.field("workgroups", workgroups);
    json.field("looked_at", state.options.looked_at);
    json.key("rates"), write_rates(json, state.rates);
    json.key("occupancy"), write_occupancy(json, state.occupancy);
    json.key("loops"), write_loops(json, dispatch, state, loops, loop_of);
    json.key("counts"), write_counts(json, state, state.total, loop_of, loops.size());
    json.key("counts_of_waves");
    json.array([&] {
      for (const CountsByDword& wave : state.waves)
        write_counts(json, state, wave, loop_of, loops.size());
    });
    json.key("conflicts"), write_conflicts(json, dispatch, state);
    json.field("workgroups_per_unit", state.workgroups_per_unit);
    json.field("memory_bytes", dispatch.memory.bytes());
    json.key("timed"), write_timed(json, state);
  });
  Collection& all = collection();
  if (all.launches.size() < kMostLaunches) all.launches.push_back(json.text());
  else ++all.left_out;
}

ProfileOptions profile_options() { return collection().options; }

}  // namespace emulator

// ---- Exports ------------------------------------------------------------------------------------

// For this thread's later launches.
EXPORT void jitfmha_emulator_set_profile_options(const emulator::ProfileOptions* options) {
  emulator::collection().options = *options;
}

// This thread's launches since the last call, a JSON array, which stays until the next call.
EXPORT const char* jitfmha_emulator_take_profiles(emulator::u64* left_out) {
  using namespace emulator;
  thread_local std::string text;
  Collection& all = collection();
  text = "[";
  for (const std::string& launch : all.launches) text += (text.size() > 1 ? "," : "") + launch;
  text += "]";
  all.launches.clear();
  *left_out = all.left_out;
  all.left_out = 0;
  return text.c_str();
}

#endif
