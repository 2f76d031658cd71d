// The cost model's results as JSON, for jitfmha/emulator/profile.py.
#include <algorithm>
#include <iterator>
#include <set>

#include "decode/text.h"
#include "execution/clock.h"
#include "json.h"
#include "profile/profile.h"

namespace emulator {
namespace {

constexpr u32 kUnits = static_cast<u32>(Unit::vmem_atomic) + 1;

constexpr const char* kStallNames[] = {
    "vmcnt",  "lgkmcnt",     "barrier", "matrix_unit", "vector_unit",
    "result", "memory_unit", "nop",     "fetch",       "other_wave",
};
static_assert(std::size(kStallNames) == kStalls, "a name for each stall");

constexpr std::size_t kMostLaunches = 1000, kMostConflicts = 10;

// Of this thread: options, and launches that Python has not taken yet.
thread_local ProfileOptions options_of_thread = default_profile_options();
thread_local std::vector<Json> launches_of_thread;

// A row for each loop and unit: instructions of the loop, without those of loops inside.
Json json_of_counts(const DispatchObservation& state, const CountsByDword& counts,
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
  std::vector<Json> rows;
  for (std::size_t row = 0; row < sums.size(); ++row) {
    const Sum& sum = sums[row];
    if (!sum.executed) continue;
    rows.push_back(json_object({{"loop", static_cast<int>(row / kUnits) + kNoLoop},
                                {"unit", name_of(static_cast<Unit>(row % kUnits))},
                                {"instructions", sum.executed},
                                {"cycles", sum.cycles},
                                {"lds_bytes", sum.lds_bytes},
                                {"lds_cycles", sum.lds_cycles},
                                {"lds_conflict_cycles", sum.lds_conflict_cycles},
                                {"global_bytes", sum.global_bytes},
                                {"cache_lines", sum.lines},
                                {"scratch_bytes", sum.scratch_bytes}}));
  }
  return json_list(rows);
}

// The loop's code, whether it ran or not: each of its instructions as if once executed.
CountsByDword code_of(const CodeObject& code, const Loop& loop) {
  CountsByDword counts(code.instructions.size());
  for (u32 dword = loop.first; dword <= loop.last; dword += code.instructions[dword].dwords)
    counts[dword].executed = 1;
  return counts;
}

// The instructions that lose most to bank conflicts.
Json json_of_conflicts(const CodeObject& code, const CountsByDword& total) {
  std::vector<u32> dwords;
  for (u32 dword = 0; dword < total.size(); ++dword)
    if (total[dword].lds_conflict_cycles) dwords.push_back(dword);
  std::stable_sort(dwords.begin(), dwords.end(), [&](u32 a, u32 b) {
    return total[a].lds_conflict_cycles > total[b].lds_conflict_cycles;
  });
  dwords.resize(std::min(dwords.size(), kMostConflicts));
  return json_list(dwords, [&](u32 dword) {
    return json_object({{"address", code.location(dword)},
                        {"instruction", text_of(code.instructions[dword])},
                        {"executed", total[dword].executed},
                        {"lds_cycles", total[dword].lds_cycles},
                        {"lds_conflict_cycles", total[dword].lds_conflict_cycles}});
  });
}

Json json_of(const Occupancy& room) {
  return json_object({{"vgprs", room.vgprs},
                      {"architectural_vgprs", room.architectural_vgprs},
                      {"sgprs", room.sgprs},
                      {"lds_bytes", room.lds_bytes},
                      {"waves_of_workgroup", room.waves_of_workgroup},
                      {"by_vgprs", room.by_vgprs},
                      {"by_sgprs", room.by_sgprs},
                      {"by_lds", room.by_lds},
                      {"by_waves", room.by_waves},
                      {"workgroups", room.workgroups}});
}

// The stores that each poll of a workgroup that found something had to wait for, by event.
std::vector<std::vector<u64>> awaited_by(const TimedWorkgroup& timed, const Flags& flags) {
  std::vector<std::vector<u64>> awaited;
  for (const Event& event : timed.events)
    awaited.push_back(event.kind == Event::Kind::poll
                          ? flags.awaited(event.flag, event.number, timed.number)
                          : std::vector<u64>{});
  return awaited;
}

// Those events that somebody waits at or for, in the order of their time.
Json json_of_events(const TimedWorkgroup& timed, const std::vector<std::vector<u64>>& awaited,
                    const std::set<u64>& awaited_by_any) {
  const auto is_of = [&](std::size_t i, Event::Kind kind) { return timed.events[i].kind == kind; };
  const std::vector<u64>& cycles = timed.timing.event_cycles;
  std::set<u64> looks;  // that a wait came after
  for (std::size_t i = 0; i < cycles.size(); ++i)
    if (!awaited[i].empty()) looks.insert(timed.events[i].look);
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < cycles.size(); ++i) {
    const u64 number = timed.events[i].number;
    if (is_of(i, Event::Kind::poll)    ? !awaited[i].empty()
        : is_of(i, Event::Kind::store) ? awaited_by_any.count(number) != 0
                                       : looks.count(number) != 0)
      order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return cycles[a] < cycles[b]; });
  return json_list(order, [&](std::size_t i) {
    const Event& event = timed.events[i];
    const u64 look = is_of(i, Event::Kind::look) ? event.number : event.look;
    return json_object(
        {{"cycles", cycles[i]},
         {"store", is_of(i, Event::Kind::store) ? static_cast<i64>(event.number) : -1},
         {"waits_for", json_list(awaited[i])},
         {"look", look == kNoLook ? -1 : static_cast<i64>(look)},
         {"poll_cycles", event.poll_cycles}});
  });
}

Json json_of(const TimedWorkgroup& timed, const Json& events) {
  const Timing& timing = timed.timing;
  std::string stalls;
  for (u32 stall = 0; stall < kStalls; ++stall)
    stalls += (stall ? "," : "") + JsonField(kStallNames[stall], timing.stalls[stall]).text;
  const Json of_timing = json_object({{"why_not", timing.why_not},
                                      {"workgroups", timing.workgroups},
                                      {"cycles", timing.cycles},
                                      {"matrix_busy", timing.matrix_busy},
                                      {"vector_busy", timing.vector_busy},
                                      {"lds_busy", timing.lds_busy},
                                      {"l1_busy", timing.l1_busy},
                                      {"lines", timing.lines},
                                      {"l1_hits", timing.l1_hits},
                                      {"lines_at_ends", timing.lines_at_ends},
                                      {"stalls", Json{"{" + stalls + "}"}}});
  return json_object({{"number", timed.number},
                      {"id", json_list(timed.id)},
                      {"instructions", timed.instructions},
                      {"events", events},
                      {"timing", of_timing}});
}

Json json_of_timed(const DispatchObservation& state) {
  std::vector<std::vector<std::vector<u64>>> awaited;
  std::set<u64> awaited_by_any;
  for (const TimedWorkgroup& timed : state.timed) {
    awaited.push_back(awaited_by(timed, state.flags));
    for (const std::vector<u64>& stores : awaited.back())
      awaited_by_any.insert(stores.begin(), stores.end());
  }
  std::vector<Json> rows;
  for (std::size_t i = 0; i < state.timed.size(); ++i)
    rows.push_back(
        json_of(state.timed[i], json_of_events(state.timed[i], awaited[i], awaited_by_any)));
  return json_list(rows);
}

}  // namespace

void export_profile(const Dispatch& dispatch, DispatchObservation& state) {
  if (launches_of_thread.size() >= kMostLaunches && !clock_runs()) return;
  const CodeObject& code = *dispatch.code;
  const std::vector<Loop> loops = find_loops(code, state.total);
  const std::vector<int> loop_of = innermost_loops(loops, state.total.size());
  const auto counts = [&](const CountsByDword& of) {
    return json_of_counts(state, of, loop_of, loops.size());
  };
  const u64 launched =
      u64{dispatch.workgroups[0]} * dispatch.workgroups[1] * dispatch.workgroups[2];
  const u64 assumed = state.options.assumed_workgroups;
  std::sort(state.timed.begin(), state.timed.end(),
            [](const auto& a, const auto& b) { return a.number < b.number; });
  const Json of_loops = json_list(loops, [&](const Loop& loop) {
    const auto iterations = [&](const CountsByDword& of) { return of[loop.first].executed; };
    return json_object({{"first", code.location(loop.first)},
                        {"last", code.location(loop.last)},
                        {"depth", loop.depth},
                        {"outer", loop.outer},
                        {"iterations", iterations(state.total)},
                        {"iterations_of_waves", json_list(state.waves, iterations)},
                        {"code", counts(code_of(code, loop))}});
  });
  const Json profile = json_object(
      {{"kernel", dispatch.kernel->name},
       {"device", dispatch.device->name},
       {"grid", json_list(dispatch.workgroups)},
       {"block", json_list(dispatch.workgroup_size)},
       {"launched_workgroups", launched},
       {"selected_workgroups", state.options.run_sample_only ? state.sample.size() : launched},
       {"ended_workgroups", state.workgroups},
       {"workgroups", assumed ? assumed : launched},
       {"looked_at", state.options.looked_at},
       {"occupancy", json_of(state.occupancy)},
       {"loops", of_loops},
       {"counts", counts(state.total)},
       {"counts_of_waves", json_list(state.waves, counts)},
       {"conflicts", json_of_conflicts(code, state.total)},
       {"workgroups_per_unit", state.workgroups_per_unit},
       {"memory_bytes", dispatch.memory.bytes()},
       {"timed", json_of_timed(state)}});
  if (clock_runs()) put_clock_forward(profile.text);
  else launches_of_thread.push_back(profile);
}

ProfileOptions profile_options() { return options_of_thread; }

}  // namespace emulator

// ---- Exports ------------------------------------------------------------------------------------

// For this thread's later launches.
EXPORT void jitfmha_emulator_set_profile_options(const emulator::ProfileOptions* options) {
  emulator::options_of_thread = *options;
}

// This thread's launches since the last call, a JSON array, which stays until the next call.
EXPORT const char* jitfmha_emulator_take_profiles() {
  using namespace emulator;
  thread_local std::string text;
  text = json_list(launches_of_thread).text;
  launches_of_thread.clear();
  return text.c_str();
}
