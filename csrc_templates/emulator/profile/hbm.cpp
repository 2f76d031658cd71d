// What a workgroup brings in from HBM, and the clock by which that is so many cycles.
//
// All units that are at work share what the chip streams; the launch's last round has as many at
// work as the others have on average, because fewer of them get more each. HBM has a clock of its
// own: in cycles of the compute units it is quicker where these are slowed down by matrix work. How
// busy the matrix units are follows from the replay, so it is made again where they are.
#include <algorithm>

#include "profile/profile.h"

namespace emulator {
namespace {

// A second replay at a clock that is as good as the peak would tell nothing.
constexpr double kSlower = 0.99;

const ChipRates& rates_of(const Device& device) { return kChipRates[&device - kDevices]; }

u64 launched_workgroups(const Dispatch& dispatch) {
  return u64{dispatch.workgroups[0]} * dispatch.workgroups[1] * dispatch.workgroups[2];
}

// Compute units that are at work, on average over the rounds of the launch.
double units_at_work(const Dispatch& dispatch) {
  const DispatchObservation& state = *dispatch.observation;
  const u64 workgroups = state.options.assumed_workgroups ? state.options.assumed_workgroups
                                                          : launched_workgroups(dispatch);
  const u64 slots = u64{dispatch.device->compute_units} * state.workgroups_per_unit;
  const u64 rounds = (workgroups + slots - 1) / slots;
  return static_cast<double>(workgroups) /
         static_cast<double>(std::max<u64>(rounds, 1) * state.workgroups_per_unit);
}

std::vector<Hbm::Part> parts_of(const Dispatch& dispatch, const std::vector<Steps>& waves) {
  const u64 line_bytes = dispatch.observation->rates.line_bytes;
  std::vector<u32> lines;
  for (const Steps& steps : waves)
    lines.insert(lines.end(), steps.lines.begin(), steps.lines.end());
  std::sort(lines.begin(), lines.end());
  lines.erase(std::unique(lines.begin(), lines.end()), lines.end());
  std::vector<Hbm::Part> parts;
  const std::vector<Range>& ranges = dispatch.memory.ranges();
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const Range& range = ranges[i];
    // As if the range began where a line does: see global_access.
    const u32 first = static_cast<u32>(range.begin / line_bytes);
    const u32 count = static_cast<u32>((range.end - range.begin + line_bytes - 1) / line_bytes);
    const auto touched =
        std::count_if(lines.begin(), lines.end(), [&](u32 line) { return line - first < count; });
    if (!touched) continue;
    const double asked =
        static_cast<double>(touched) * static_cast<double>(launched_workgroups(dispatch));
    parts.push_back({first, count, std::min(1.0, count / asked),
                     dispatch.observation->has_stores[i].load(std::memory_order_relaxed)});
  }
  return parts;
}

}  // namespace

Timing time_workgroup(const Dispatch& dispatch, const std::vector<Steps>& waves) {
  const DispatchObservation& state = *dispatch.observation;
  const ChipRates& chip = rates_of(*dispatch.device);
  std::vector<const Steps*> steps;
  for (const Steps& of_wave : waves) steps.push_back(&of_wave);
  const double units = units_at_work(dispatch);
  Hbm hbm{parts_of(dispatch, waves), dispatch.memory.ranges().empty() ? 1.0 : 0.0, 0};
  const auto timed_at = [&](double hz) {
    hbm.line_cycles = state.rates.line_bytes * units * hz / chip.streaming;
    return time_workgroups(state.costs, state.rates, hbm, steps, state.workgroups_per_unit);
  };
  const double peak = dispatch.device->clock_khz * 1e3;
  const Timing at_peak = timed_at(peak);
  if (!at_peak.is_known || !at_peak.cycles) return at_peak;
  const double busy = static_cast<double>(at_peak.matrix_busy) /
                      static_cast<double>(kSimds * at_peak.cycles) * units /
                      dispatch.device->compute_units;
  const double cycle = chip.cycle + chip.cycle_of_matrix_work * busy;
  return cycle * peak * kSlower > 1 ? timed_at(1 / cycle) : at_peak;
}

}  // namespace emulator
