// How the workgroups of our forward kernels for gm1 divide the work.
#pragma once

#include "forward.h"
#include "gm1.h"

namespace {
namespace gm1 {

// How they divide it among XCDs. Workgroups go to these in turn, and each has an L2 cache of its
// own, so what shares keys and values should be on the same one. A pair is a sequence and key head:
// the tiles of all its query heads follow one another on an XCD. Nobody here knows how long the
// sequences are, so each XCD gets as many key heads of every sequence as the others: whole ones
// first, and of those that are left, several XCDs, a set, share each, and take its tiles in turn.
struct Order {
  std::int64_t first_heads;  // key heads that go to single XCDs
  std::int64_t xcd_sets;     // that share the others
  std::int64_t pair_tiles;   // of a pair
  std::int64_t set_pairs;    // of a set
  std::int64_t tail_pairs;   // the last ones of these
};

// Tiles of one head that so many rows of all sequences together make at most.
template <class Call>
std::int64_t most_blocks(const Call& call, std::int64_t rows) {
  return divided_up(rows, call.ts_qo) + call.batch;
}

template <class Call>
Order order_of(const Kernel& kernel, const Call& call, const Work& work) {
  const std::int64_t xcds = kernel.xcds, heads_left = call.heads_k % xcds;
  const std::int64_t xcd_sets = heads_left ? common_divisor(heads_left, xcds) : xcds;
  const std::int64_t pair_tiles = work.gqa * work.query_tiles;
  // Under a mask a pair begins with its longest tiles. One after the other they would leave the
  // last pair's longest tile for the end, when other units have nothing left to do. So the last
  // pairs take turns, as many as keep all units at work for longer than that tile takes. Tiles have
  // half its length on average, and some sequences are short.
  constexpr std::int64_t kTailRounds = 3;
  const bool have_tail = work.is_masked && work.query_tiles > 1;
  const std::int64_t slots = call.slots / xcd_sets;
  std::int64_t tail_pairs = have_tail ? divided_up(kTailRounds * slots, pair_tiles) : 0;
  std::int64_t first_heads = heads_left ? call.heads_k - heads_left : 0;
  if (first_heads && heads_left / xcd_sets * call.batch < tail_pairs) first_heads -= xcds;
  const std::int64_t set_pairs = (call.heads_k - first_heads) / xcd_sets * call.batch;
  if (tail_pairs > set_pairs) tail_pairs = set_pairs;
  return {first_heads, xcd_sets, pair_tiles, set_pairs, tail_pairs};
}

template <class Call>
void set_order(Arguments& args, const Kernel& kernel, const Call& call, const Work& work) {
  const Order order = order_of(kernel, call, work);
  args.xcds = divisor(kernel.xcds);
  args.batch = divisor(call.batch);
  args.pair_tiles = divisor(order.pair_tiles);
  args.xcd_sets = divisor(order.xcd_sets);
  args.set_xcds = divisor(kernel.xcds / order.xcd_sets);
  args.tail_heads = divisor(order.tail_pairs * work.gqa);
  args.first_heads = number(order.first_heads);
  args.set_tiles = number(order.set_pairs * order.pair_tiles);
  args.tail_begin = number((order.set_pairs - order.tail_pairs) * order.pair_tiles);
}

// With so many workgroups for a tile of queries.
template <class Call>
Grid grid_of(const Kernel&, const Call& call, const Work& work, std::int64_t tile_workgroups) {
  return {work.heads, call.batch, work.query_tiles * tile_workgroups};
}

// Kernels number their workgroups.
inline int check_grid(const Grid& grid, const Work& work) {
  constexpr std::int64_t kMostWorkgroups = 0xffffffff;
  const std::int64_t of_sequences = grid.x * grid.y;
  if (grid.z <= kMostWorkgroups / of_sequences) return kSuccess;
  return failed(kUnusable,
                "sequences of up to %lld queries take %lld times %lld workgroups, over 4294967295: "
                "give a smaller max_seqlen_q",
                static_cast<long long>(work.seqlen_q), static_cast<long long>(grid.z),
                static_cast<long long>(of_sequences));
}

}  // namespace gm1
}  // namespace
