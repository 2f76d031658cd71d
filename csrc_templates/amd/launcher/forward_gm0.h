// How the workgroups of our forward kernels for gm0 divide the work.
#pragma once

#include "forward.h"
#include "gm0.h"

namespace {
namespace gm0 {

// How they divide it among XCDs. Workgroups go to these in turn, and each has an L2 cache of its
// own, so what shares keys and values should be on the same one. Every XCD has as many heads as the
// others, or where that does not work out, every few XCDs together.
struct Order {
  std::int64_t xcds;         // or groups of XCDs
  std::int64_t xcd_heads;    // heads of an XCD, of all sequences together
  std::int64_t group_heads;  // how many of them alternate
};

// Tiles of one head of all sequences, each of which has so many rows.
template <class Call>
std::int64_t most_blocks(const Call& call, std::int64_t rows) {
  return call.batch * divided_up(rows, call.ts_qo);
}

inline Order order_of(const Kernel& kernel, std::int64_t batch, const Work& work) {
  const std::int64_t heads = work.heads, all_heads = batch * heads;
  const std::int64_t xcds = common_divisor(all_heads, kernel.xcds);
  const std::int64_t xcd_heads = all_heads / xcds;
  // One head after the other, so that few keys and values are in use. But under a mask the longest
  // tiles of several heads go first, or each head would end with short ones. And groups lie along
  // z, of which there are no more than this.
  constexpr std::int64_t kMostGroups = 65535;
  if (!work.is_masked && xcd_heads <= kMostGroups) return {xcds, xcd_heads, 1};
  return {xcds, xcd_heads, heads % xcds == 0 ? heads / xcds : common_divisor(xcd_heads, heads)};
}

template <class Call>
void set_order(Arguments& args, const Kernel& kernel, const Call& call, const Work& work) {
  const Order order = order_of(kernel, call.batch, work);
  args.xcds = divisor(order.xcds);
  args.xcd_heads = number(order.xcd_heads);
  args.group_heads = number(order.group_heads);
}

// With so many workgroups for a tile of queries.
template <class Call>
Grid grid_of(const Kernel& kernel, const Call& call, const Work& work,
             std::int64_t tile_workgroups) {
  const Order order = order_of(kernel, call.batch, work);
  return {order.xcds * order.group_heads, work.query_tiles,
          order.xcd_heads / order.group_heads * tile_workgroups};
}

// Each axis has room for what is along it.
inline int check_grid(const Grid&, const Work&) { return kSuccess; }

}  // namespace gm0
}  // namespace
