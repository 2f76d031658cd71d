// Forward: what a workgroup has to do, and what is made of splits of the keys.
#pragma once

#include "forward_output.h"

// Under a causal mask the longest tiles go first: what is left for the end is short. Negative, or
// behind the last one: the sequence has no such tile, as in gm1 alone sequences differ in length.
__device__ inline int tile_of(const Arguments& a, const Place& place, int queries) {
  const int rank = place.tile_rank;
  if (!kCausal) return rank;
  return (kGroupMode ? tiles_of(queries, kTileRows) : static_cast<int>(a.query_tiles)) - 1 - rank;
}

// The scale of a sequence and key head; `batch` and `head` are strides in bytes. Kernels that are
// compiled for a call have none where it has none.
__device__ inline float descale_of(Global<const float> scales, unsigned long batch,
                                   unsigned long head) {
  if (PAGED && !scales) return 1;
  return *(Global<const float>)((Global<const char>)scales + batch + head);
}

// Inputs that are all 0 may have a scale of 0. Hidden scores are infinite, and times 0 they would
// be NaN.
__device__ inline float descaled(float scale, float descale) {
  constexpr float kLargest = __FLT_MAX__, kSmallest = __FLT_MIN__;
  const float result = __builtin_amdgcn_fmed3f(scale * descale, kSmallest, kLargest);
  return bits_as<float>(__builtin_amdgcn_readfirstlane(bits_as<int>(result)));
}

__device__ inline Task task_of(const Arguments& a, const Place& place, const Sequence& sequence,
                               int queries, int tile) {
  unsigned head_k = divide(place.head, a.gqa).value;
  if constexpr (!HAS_8_BITS) asm("" : "+s"(head_k));
  [[maybe_unused]] const unsigned long line = line_of(a, place), batch = place.batch, head = head_k;
  Task task;
  task.diagonal = kTopLeft ? 0 : sequence.seqlen_k - sequence.seqlen_q;
  task.head = head_of<kGroupMode>(a, place, head_k, sequence, line, queries);
  task.tile = tile;
  task.split = place.share;
  task.num_splits = a.num_splits.divisor;
  task.workspace = a.workspace;
  if (task.workspace)
    task.workspace += line * a.query_tiles * task.num_splits * kWaves * OwnResult::kFloats;
#if HAS_8_BITS || WIDENS_KEYS
  const float q = descale_of(a.q_descale, batch * a.q_descale_batch, head * a.q_descale_head);
  const float k = descale_of(a.k_descale, batch * a.k_descale_batch, head * a.k_descale_head);
  task.scale = descaled(a.scale_log2, q * k);
  task.value_scale = descale_of(a.v_descale, batch * a.v_descale_batch, head * a.v_descale_head);
#else
  task.scale = a.scale_log2;
  task.value_scale = 1;
#endif
  return task;
}

// Of the 32 queries that one wave of each split had, a wave here has a share of the columns, for
// all splits, of which it loads several at once.
template <bool kAreFar>
__device__ inline void combine_splits(const Task& task, int part, Lds<char> exchange, int thread) {
  constexpr int kQuads = OwnResult::kQuads / kWaves, kAtOnce = 8;
  static_assert(OwnResult::kQuads % kWaves == 0);
  const int lane = thread % 64;
  const int wave_index = __builtin_amdgcn_readfirstlane(thread / 64);
  const int first_quad = wave_index * kQuads;
  const int first_row = task.tile * kTileRows + part * 32;
  const bool has_row = first_row + lane % 32 < task.head.q.count;
  const SplitResults<kValueBlocks, kWaves> results(split_result_of(task, 0, part), task.num_splits,
                                                   lane, has_row);
  const auto combined = CombinedSplits<kQuads, kAtOnce>::of(results, first_quad, task.num_splits);

  const float sum = combined.row_sum(lane);
  const OutputRows<kAreFar> rows(task.head.o.from(first_row));
  const float factor = output_scale(task, sum);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int quad = first_quad + i;
    rows.put(exchange + quad / 8 * Exchange::kBytes, quad % 8, combined.output[i] * factor, lane);
  }
  barrier();
  for (int n = wave_index; n < kValueBlocks / 2 * Exchange::kPasses; n += kWaves) {
    const int pass = n % Exchange::kPasses, wide = n / Exchange::kPasses;
    rows.store(exchange + wide * Exchange::kBytes, pass, wide * 64, lane);
  }
  if (wave_index == 0) store_lse(task.head, first_row, combined.maximum, sum, lane);
}
