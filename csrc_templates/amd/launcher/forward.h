// What forward kernels of ours have in common, in both modes.
#pragma once

#include "attention_arguments.h"
#include "runtime.h"

namespace {

// What a launch divides among its workgroups.
struct Work {
  std::int64_t seqlen_q;     // of the longest sequence
  std::int64_t query_tiles;  // of it
  std::int64_t heads;        // that have workgroups of their own
  std::int64_t gqa;          // of them, those of a key head
  bool is_masked;

  bool is_empty(std::int64_t batch) const { return batch * heads * query_tiles == 0; }
};

// So many query heads are rows of the same tiles.
template <class Call>
Work work_of(const Call& call, std::int64_t seqlen_q, std::int64_t tile_heads) {
  const std::int64_t heads = call.heads_q / tile_heads;
  return {seqlen_q, divided_up(seqlen_q * tile_heads, call.ts_qo), heads,
          call.heads_k ? heads / call.heads_k : 0, call.mask != 0};
}

template <class Call>
void set_forward(Arguments& args, const Call& call, const Tensors& tensors, const Work& work) {
  args.lse = tensors.lse;
  args.workspace = tensors.workspace;
  args.query_tiles = number(work.query_tiles);
  args.num_splits = divisor(tensors.num_splits);
  args.heads = divisor(work.heads);
  args.gqa = divisor(work.gqa);
  args.q_descale = tensors.q_descale;
  args.k_descale = tensors.k_descale;
  args.v_descale = tensors.v_descale;
  args.q_descale_batch = number(call.q_descale.batch * kFloatBytes);
  args.q_descale_head = number(call.q_descale.head * kFloatBytes);
  args.k_descale_batch = number(call.k_descale.batch * kFloatBytes);
  args.k_descale_head = number(call.k_descale.head * kFloatBytes);
  args.v_descale_batch = number(call.v_descale.batch * kFloatBytes);
  args.v_descale_head = number(call.v_descale.head * kFloatBytes);
}

// How many workgroups combine the splits of a tile. Each makes the output of the 32 queries that a
// wave of the other kernel has; or where all waves have the same ones, fours of a block of 16 rows
// (combine_fours.h).
template <class Call>
std::int64_t combining_workgroups(const Kernel& kernel, const Call& call, std::int64_t num_splits,
                                  std::int64_t slices) {
  const std::int64_t waves = kernel.threads / 64;
  if (call.ts_qo >= 32 * waves) return waves * slices;
  const bool are_wide = call.hdim_v > 256;
  const std::int64_t fours = num_splits <= kFewSplits && are_wide ? 2 * waves : 2;
  return call.ts_qo / 16 * divided_up(4 * divided_up(call.hdim_v, 64), fours);
}

// Starts a kernel on all splits of the keys, and where there are several the one that combines
// them. `grid_of` makes a grid with so many workgroups for a tile of queries.
template <class Call, class Block, class GridOf>
int launch_splits(const Kernel& kernel, const Call& call, const Tensors& tensors,
                  std::int64_t slices, const GridOf& grid_of, Block& args) {
  const Grid grid = grid_of(tensors.num_splits * slices);
  const int status = launch(kernel, grid, tensors.stream, args);
  if (status != kSuccess || !tensors.workspace) return status;
  const Grid of_combine = grid_of(combining_workgroups(kernel, call, tensors.num_splits, slices));
  return launch(kernel, true, of_combine, tensors.stream, &args, sizeof(args));
}

}  // namespace
