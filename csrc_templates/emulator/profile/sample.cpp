// Which workgroups of a launch are timed, and in large launches the only ones that run.
//
// What a workgroup does depends on its place in the grid: with a causal mask on its query tile, in
// a batch of sequences on their lengths. So the sample has a line along each axis of the grid,
// through workgroup (0, 0, 0), from which estimate.py predicts the others as a sum of one term for
// each axis; and workgroups anywhere in the grid, which show how good that is. Steps on a line are
// uneven: every second tile may be one that rows fill in part.
#include <algorithm>
#include <set>

#include "profile/profile.h"

namespace emulator {
namespace {

// The fractions that the golden ratio leaves lie evenly, and in step with no grid.
double fraction(u64 i) {
  const double x = static_cast<double>(i) * 0.6180339887498949;
  return x - static_cast<double>(static_cast<u64>(x));
}

}  // namespace

u64 number_of(const Workgroup& workgroup) {
  const u32* const workgroups = workgroup.dispatch.workgroups;
  return workgroup.id[0] +
         u64{workgroups[0]} * (workgroup.id[1] + u64{workgroups[1]} * workgroup.id[2]);
}

std::vector<u64> sample_of(const u32 (&workgroups)[3], u64 most, u64 looked_at) {
  const u64 total = u64{workgroups[0]} * workgroups[1] * workgroups[2];
  std::set<u64> sample;
  if (looked_at < total) sample.insert(looked_at);
  if (total <= most) {
    for (u64 number = 0; number < total; ++number) sample.insert(number);
    return {sample.begin(), sample.end()};
  }
  sample.insert(0);
  // A quarter is for anywhere; axes share the rest, the shortest first, which need least.
  u64 for_axes = most - most / 4;
  u32 axes[3] = {0, 1, 2};
  std::sort(axes, axes + 3, [&](u32 a, u32 b) { return workgroups[a] < workgroups[b]; });
  for (u32 i = 0; i < 3; ++i) {
    const u32 axis = axes[i], length = workgroups[axis];
    const u64 stride = axis == 0   ? 1
                       : axis == 1 ? workgroups[0]
                                   : u64{workgroups[0]} * workgroups[1];
    const u64 share = std::min<u64>(length - 1, for_axes / (3 - i));
    u64 behind = 1;
    for (u64 k = 1; k <= share; ++k) {
      const u64 last = k * (length - 1) / share;
      const double room = static_cast<double>(last + 1 - behind);
      const u64 index = k == share ? last : behind + static_cast<u64>(fraction(k) * room);
      sample.insert(index * stride);
      behind = last + 1;
    }
    for_axes -= share;
  }
  for (u64 i = 1; i < 4 * most && sample.size() < most; ++i)
    sample.insert(static_cast<u64>(fraction(i) * static_cast<double>(total)));
  return {sample.begin(), sample.end()};
}

}  // namespace emulator
