// The cost model: its definitions of the hooks. See hooks.h and profile.h.
#include "profile/profile.h"

#include <algorithm>

namespace emulator {
namespace {

// Runs on the worker's thread, so that several workgroups are timed at once and their steps need
// not be kept.
TimedWorkgroup timed_workgroup(const Workgroup& workgroup, const DispatchObservation& dispatch) {
  const WorkgroupObservation& state = *workgroup.observation;
  TimedWorkgroup result{number_of(workgroup), {}, 0, {}, {}};
  std::copy_n(workgroup.id, 3, result.id);
  for (const Counts& counts : state.total) result.instructions += counts.executed;
  if (!state.has_all_steps) {
    result.timing.why_not = "its waves executed more than " +
                            std::to_string(dispatch.options.most_steps) + " instructions";
  } else if (!dispatch.occupancy.workgroups) {
    result.timing.why_not = "a workgroup does not fit into a compute unit";
  } else {
    result.timing = time_workgroup(workgroup.dispatch, state.steps);
    for (const Steps& steps : state.steps)
      result.events.insert(result.events.end(), steps.events.begin(), steps.events.end());
  }
  return result;
}

u16 clipped(u64 value) { return static_cast<u16>(std::min<u64>(value, 0xffff)); }

void count_accesses(Wave& wave, const Instruction& inst, WaveObservation& state, Counts& counts) {
  const Rates& rates = wave.dispatch().observation->rates;
  if (!state.lds.empty()) {
    const bool is_read =
        inst.definition->format == Format::DS && inst.destination.place != Place::none;
    u64 without_conflicts = 0;
    const u64 cycles = state.lds.bank_cycles(rates, is_read, &without_conflicts);
    counts.lds_bytes += state.lds.bytes();
    counts.lds_cycles += cycles;
    counts.lds_conflict_cycles += cycles - without_conflicts;
    state.step.lds_cycles = clipped(cycles);
    state.lds.clear();
  } else if (inst.definition->unit == Unit::lds) {
    // Exchange among lanes takes the banks' crossbar without touching their memory.
    const u32 cycles = kLanes / rates.lds_read_banks;
    counts.lds_cycles += cycles;
    state.step.lds_cycles = clipped(cycles);
  }
  if (!state.global.empty()) {
    const std::vector<u64>& lines = state.global.lines(rates.line_bytes);
    counts.global_bytes += state.global.bytes();
    counts.lines += lines.size();
    state.step.lines = clipped(lines.size());
    if (state.is_timed)
      for (const u64 line : lines) state.recorded().lines.push_back(static_cast<u32>(line));
    state.global.clear();
  }
}

}  // namespace

bool has_room_for_steps(Wave& wave) {
  const WaveObservation& state = *wave.observation;
  WorkgroupObservation& workgroup = *wave.workgroup->observation;
  if (!state.is_timed || !workgroup.has_all_steps) return false;
  const u64 most = wave.dispatch().observation->options.most_steps / wave.workgroup->wave_count;
  return workgroup.has_all_steps = state.steps.steps.size() < most;
}

namespace hooks {

// ---- Beginnings and ends ------------------------------------------------------------------------

void dispatch_begin(Dispatch& dispatch) {
  dispatch.observation = new DispatchObservation;
  DispatchObservation& state = *dispatch.observation;
  const std::vector<Instruction>& instructions = dispatch.code->instructions;
  state.options = profile_options();
  state.rates = rates_of(dispatch.code->arch);
  state.occupancy = occupancy_of(dispatch);
  const u32* const grid = dispatch.workgroups;
  const u64 launched = u64{grid[0]} * grid[1] * grid[2];
  const u64 workgroups =
      state.options.assumed_workgroups ? state.options.assumed_workgroups : launched;
  // As many share a compute unit as the launch has for each, and as fit.
  const u64 units = dispatch.device->compute_units;
  const u64 workgroups_per_unit =
      std::min<u64>(state.occupancy.workgroups, (workgroups + units - 1) / units);
  state.workgroups_per_unit = static_cast<u32>(std::max<u64>(workgroups_per_unit, 1));
  state.costs.reserve(instructions.size());
  for (const Instruction& inst : instructions) state.costs.push_back(cost_of(inst, state.rates));
  state.polling_loops = polling_loops(dispatch, state.costs);
  // What a workgroup waits for is known where all are timed.
  const u64 most = state.polling_loops.empty() ? state.options.sample : launched;
  state.sample = sample_of(dispatch.workgroups, most, state.options.looked_at);
  state.total.resize(instructions.size());
  state.has_stores = std::vector<std::atomic<bool>>(dispatch.memory.ranges().size());
}

void dispatch_end(Dispatch& dispatch) {
  export_profile(dispatch, *dispatch.observation);
  delete dispatch.observation;
  dispatch.observation = nullptr;
}

void workgroup_begin(Workgroup& workgroup) {
  const DispatchObservation& dispatch = *workgroup.dispatch.observation;
  workgroup.observation = new WorkgroupObservation;
  workgroup.observation->total.resize(dispatch.total.size());
  const u64 number = number_of(workgroup);
  workgroup.observation->is_looked_at = number == dispatch.options.looked_at;
  workgroup.observation->is_timed =
      std::binary_search(dispatch.sample.begin(), dispatch.sample.end(), number);
}

void workgroup_end(Workgroup& workgroup) {
  DispatchObservation& dispatch = *workgroup.dispatch.observation;
  TimedWorkgroup timed;
  if (workgroup.observation->is_timed) timed = timed_workgroup(workgroup, dispatch);
  {
    const std::lock_guard<std::mutex> lock(dispatch.mutex);
    for (std::size_t i = 0; i < dispatch.total.size(); ++i)
      dispatch.total[i] += workgroup.observation->total[i];
    ++dispatch.workgroups;
    if (workgroup.observation->is_timed) dispatch.timed.push_back(std::move(timed));
  }
  delete workgroup.observation;
  workgroup.observation = nullptr;
}

void wave_begin(Wave& wave) {
  wave.observation = new WaveObservation;
  WaveObservation& state = *wave.observation;
  WorkgroupObservation& workgroup = *wave.workgroup->observation;
  state.is_looked_at = workgroup.is_looked_at;
  state.is_timed = workgroup.is_timed;
  if (state.is_looked_at) state.counts.resize(workgroup.total.size());
  state.counted_in = state.is_looked_at ? &state.counts : &workgroup.total;
}

// Only one workgroup is looked at, and its waves end one after the other.
void wave_end(Wave& wave) {
  WaveObservation& state = *wave.observation;
  leave_polling_loop(wave);
  if (state.is_looked_at) {
    CountsByDword& total = wave.workgroup->observation->total;
    for (std::size_t i = 0; i < total.size(); ++i) total[i] += state.counts[i];
    DispatchObservation& dispatch = *wave.dispatch().observation;
    dispatch.waves.push_back(std::move(state.counts));
  }
  if (state.is_timed) wave.workgroup->observation->steps.push_back(std::move(state.steps));
  delete wave.observation;
  wave.observation = nullptr;
}

// ---- Instructions -------------------------------------------------------------------------------

void before_instruction(Wave& wave, const Instruction& inst) {
  const u32 dword = static_cast<u32>(&inst - wave.dispatch().code->instructions.data());
  wave.observation->step = {dword, 0, 0};
  if (!wave.dispatch().observation->polling_loops.empty()) before_polling(wave, inst);
}

void after_instruction(Wave& wave, const Instruction& inst) {
  WaveObservation& state = *wave.observation;
  Counts& counts = state.counts_of_step();
  ++counts.executed;
  const Unit unit = inst.definition->unit;
  if (unit == Unit::branch) counts.taken += wave.pc != &inst + inst.dwords;
  if (unit >= Unit::smem && unit != Unit::valu && unit != Unit::transcendental &&
      unit != Unit::mfma)
    count_accesses(wave, inst, state, counts);
  if (has_room_for_steps(wave)) state.recorded().steps.push_back(state.step);
  if (!wave.dispatch().observation->polling_loops.empty()) after_polling(wave, inst);
}

// ---- Memory -------------------------------------------------------------------------------------

// Scalar loads have a cache of their own. What a launch may touch begins where a cache line does:
// allocations on a GPU do, those of the host need not.
void global_access(Wave& wave, const Instruction&, int lane, u64 address, u32 bytes,
                   Access access) {
  if (lane == kScalarLane) return;
  const Dispatch& dispatch = wave.dispatch();
  WaveObservation& state = *wave.observation;
  const bool is_allowed = dispatch.memory.contains(address, bytes, wave.memory_hit);
  if (is_allowed && wave.workgroup->observation->flags_lock.owns_lock())
    state.flag_accesses.add(address, bytes);
  if (is_allowed && wave.memory_hit) {
    address -= wave.memory_hit->begin % dispatch.observation->rates.line_bytes;
    if (access != Access::load) {
      const auto range = wave.memory_hit - dispatch.memory.ranges().data();
      dispatch.observation->has_stores[static_cast<std::size_t>(range)].store(
          true, std::memory_order_relaxed);
    }
  }
  state.global.add(lane, address, bytes);
}
// A lane's private dwords are interleaved with those of the other lanes.
void scratch_access(Wave& wave, const Instruction&, int lane, u64 offset, u32 bytes, Access) {
  WaveObservation& state = *wave.observation;
  state.counts_of_step().scratch_bytes += bytes;
  state.global.add(lane, (offset / 4 * kLanes + static_cast<u64>(lane)) * 4, bytes);
}
void lds_access(Wave& wave, const Instruction&, int lane, u64 offset, u32 bytes, Access) {
  wave.observation->lds.add(lane, offset, bytes);
}

// ---- Selection ----------------------------------------------------------------------------------

std::vector<u64> selected_workgroups(const Dispatch& dispatch) {
  const DispatchObservation& state = *dispatch.observation;
  return state.options.run_sample_only ? state.sample : std::vector<u64>{};
}

// ---- Of no interest -----------------------------------------------------------------------------

// Many are skipped in a cycle.
void instruction_skipped(Wave&, const Instruction&) {}

void vgpr_read(Wave&, u32, u32, u64) {}
void vgpr_written(Wave&, u32, u32, u64) {}
void scalar_read(Wave&, u32, u32) {}
void lanes_gathered(Wave&, const u32 (&)[kLanes]) {}
void scalar_written(Wave&, u32, u32) {}
u8* instead_of_memory(Wave&, const Instruction&, bool, const Fault&) { return nullptr; }
void waitcnt(Wave&, u32, u32, u32) {}
void barrier_arrived(Wave&) {}
void barrier_released(Workgroup&) {}

}  // namespace hooks

}  // namespace emulator
