// What persistent workgroups do: the device lists it, so that no launch depends on lengths that the
// host does not know.
//
// A block is a tile of rows of one sequence. All work is the list of the blocks of one head, once
// for each head, and every workgroup has as much of it as the others, by what blocks are known to
// take. So where one share ends and the next one begins, a block may be cut, between two of its key
// tiles. What the parts of a block make goes to the workspace, all but the last one's, which makes
// the output of them (block_parts.h).
//
// Included after forward_tasks.h and kHasFewScalars.
#pragma once

#include "block_parts.h"

// The threads that list the work, and what LDS has room for. The host looks for that, too.
constexpr int kListThreads = 1024, kMostSequences = 1024, kMostBlocks = 8192;
constexpr int kListWaves = kListThreads / 64;
// A part of a block has so many key tiles at least, and a share takes as long as so many. A share
// that would begin nearer to a block's end begins there.
constexpr int kLeastKeyTiles = 1, kLeastShareTiles = 6, kNearKeyTiles = 1;
static_assert(kLeastShareTiles >= kLeastKeyTiles + kNearKeyTiles);  // between two cuts
// What blocks take may add up to what 32 bits hold. Longer ones count as no longer.
constexpr unsigned kMostOfBlock = ~0u / kMostBlocks;

struct ListLds {
  int first_block[kMostSequences];  // of each sequence
  int queries[kMostSequences], keys[kMostSequences];
  unsigned q_start[kMostSequences], k_start[kMostSequences];
  unsigned begin[kMostBlocks + 1];   // what all blocks before take
  unsigned char waves[kMostBlocks];  // that have rows
  unsigned of_waves[kListWaves];
};

// What each of 16 lanes has of a sum that goes on from lane to lane, and each of 64.
__device__ inline unsigned sum_up_to_lane_of_row(unsigned sum) {
  constexpr int kFromLaneBefore = 0x110, kAll = 0xf;
  sum += __builtin_amdgcn_update_dpp(0, sum, kFromLaneBefore + 1, kAll, kAll, false);
  sum += __builtin_amdgcn_update_dpp(0, sum, kFromLaneBefore + 2, kAll, kAll, false);
  sum += __builtin_amdgcn_update_dpp(0, sum, kFromLaneBefore + 4, kAll, kAll, false);
  return sum + __builtin_amdgcn_update_dpp(0, sum, kFromLaneBefore + 8, kAll, kAll, false);
}
__device__ inline unsigned sum_up_to_lane(unsigned given) {
  constexpr int kFromLane15 = 0x142, kFromLane31 = 0x143, kAll = 0xf;
  unsigned sum = sum_up_to_lane_of_row(given);
  sum += __builtin_amdgcn_update_dpp(0, sum, kFromLane15, 0xa, kAll, false);
  return sum + __builtin_amdgcn_update_dpp(0, sum, kFromLane31, 0xc, kAll, false);
}

// The sum of what the threads before this one give, and in `total` that of all. Those behind the
// first `count` give nothing: their waves leave the SIMDs to the others.
__device__ inline unsigned sum_before(unsigned given, int count, unsigned& total, Lds<ListLds> lds,
                                      int thread) {
  static_assert(kListWaves == 16);
  const int lane = thread % 64, wave = __builtin_amdgcn_readfirstlane(thread / 64);
  const int waves = tiles_of(count, 64);
  unsigned sum = 0;
  barrier();  // what was there has been read
  if (wave < waves) {
    sum = sum_up_to_lane(given);
    if (lane == 63) lds->of_waves[wave] = sum;
  }
  barrier();
  const unsigned of_waves =
      sum_up_to_lane_of_row(lane < smaller(waves, kListWaves) ? lds->of_waves[lane] : 0);
  total = __builtin_amdgcn_readlane(of_waves, kListWaves - 1);
  if (wave > 0) sum += __builtin_amdgcn_readlane(of_waves, wave - 1);
  return sum - given;
}

// The last one of `count` numbers, of which each is at least the one before, that is not above
// `most`; the first one is not.
template <class Number>
__device__ inline int last_up_to(Lds<const Number> numbers, int count, Number most) {
  int place = 0;
#pragma unroll 1
  for (int step = count > 1 ? 1 << (31 - __builtin_clz(count - 1)) : 0; step > 0; step /= 2) {
    const int next = smaller(place + step, count - 1);
    if (numbers[next] <= most) place = next;
  }
  return place;
}

// What a block of whose rows so many waves have some takes, beside its key tiles.
__device__ inline unsigned of_block(const WorkCosts& costs, int waves) {
  return costs.block + waves * costs.wave;
}

// What one of its key tiles takes.
__device__ inline unsigned of_key_tile(const WorkCosts& costs, int waves) {
  return costs.key_tile + waves * costs.wave_of_tile;
}

// What each share of all work takes: as many as `workgroups` are all of it.
__device__ inline unsigned long share_of(unsigned of_head, int heads, unsigned workgroups) {
  const unsigned long all = static_cast<unsigned long>(of_head) * heads;
  auto share = static_cast<unsigned long>(static_cast<float>(all) *
                                          __builtin_amdgcn_rcpf(static_cast<float>(workgroups)));
  while (share * workgroups < all) share += 1 + (share >> 22);  // by as much as floats may be wrong
  return share;
}

// How many shares lie between two places of a block.
__device__ inline int shares_between(unsigned begin, unsigned end, unsigned long share) {
  const unsigned distance = end - begin;
  if (share > distance) return 0;
  return distance / static_cast<unsigned>(share);
}

// Where the share of workgroup `number` begins, each of which takes `share`; `of_head` is what the
// blocks of a head take together.
__device__ inline ShareBegin begin_of(unsigned number, unsigned long share, unsigned of_head,
                                      int blocks, int heads, const WorkCosts& costs,
                                      Lds<const ListLds> lds) {
  const unsigned long at = number * share;
  if (at >= static_cast<unsigned long>(of_head) * heads) return {heads, 0, 0, 0, 0};
  int head = static_cast<float>(at) * __builtin_amdgcn_rcpf(static_cast<float>(of_head));
  // Off by what floats may be wrong.
  long in_heads = at - static_cast<unsigned long>(head) * of_head;
  for (; in_heads < 0; in_heads += of_head) --head;
  for (; in_heads >= of_head; in_heads -= of_head) ++head;
  const unsigned in_head = in_heads;
  const int block = last_up_to(static_cast<Lds<const unsigned>>(lds->begin), blocks, in_head);
  const int waves = lds->waves[block];
  const unsigned begin = lds->begin[block] + of_block(costs, waves);
  const unsigned of_tile = of_key_tile(costs, waves);
  const int tiles = (lds->begin[block + 1] - begin) / of_tile;
  const int tile = in_head < begin ? 0 : (in_head - begin) / of_tile;
  // The last tile before which a share begins that begins in this block.
  const int last_tile = tiles < 2 * kLeastKeyTiles ? tiles / 2 : tiles - kNearKeyTiles;
  if (tile > last_tile) {
    if (block + 1 < blocks) return {head, block + 1, 0, 0, 0};
    return {head + 1, 0, 0, 0, 0};
  }
  if (tile < kNearKeyTiles || tiles < 2 * kLeastKeyTiles) return {head, block, 0, 0, 0};
  const int first_cut = number - shares_between(begin + kNearKeyTiles * of_tile, in_head, share);
  const int last_cut =
      number + shares_between(in_head, begin + (last_tile + 1) * of_tile - 1, share);
  const int cut = smaller(larger(tile, kLeastKeyTiles), tiles - kLeastKeyTiles);
  return {head, block, cut, first_cut, last_cut};
}

// Lists the work, as one workgroup.
__device__ inline void list_work(const CompiledArguments& arguments, Lds<ListLds> lds, int thread) {
  const Arguments& a = arguments.attention;
  const WorkList& list = arguments.list;
  const WorkCosts& costs = list.costs;
  const int batch = a.batch.divisor, stacked = kStacksHeads ? arguments.stacked.count.divisor : 1;
  Sequence own = {};
  if (thread < batch && !kIsGroup) own = sequence_of<false>(a, 0);
  if (thread < batch && kIsGroup) {
    own.seqlen_q = a.cu_seqlens_q[thread + 1] - a.cu_seqlens_q[thread];
    own.seqlen_k = a.cu_seqlens_k[thread + 1] - a.cu_seqlens_k[thread];
    own.q_start = a.cu_seqlens_q_padded[thread];
    own.k_start = a.cu_seqlens_k_padded[thread];
  }
  clear_counts(a, list.workgroups, thread, kListThreads);  // while lengths are on their way
  const auto rows_of = [&](const Sequence& sequence) {
    return larger(computed_queries<kIsGroup>(a, sequence), 0) * stacked;
  };
  unsigned count;
  const unsigned before = sum_before(tiles_of(rows_of(own), kTileRows), batch, count, lds, thread);
  lds->first_block[thread] = before;
  lds->queries[thread] = own.seqlen_q;
  lds->keys[thread] = own.seqlen_k;
  lds->q_start[thread] = own.q_start;
  lds->k_start[thread] = own.k_start;
  barrier();
  const int blocks = count < list.most_blocks ? count : list.most_blocks;
  unsigned of_head = 0;
  for (int first = 0; first < blocks; first += kListThreads) {
    const int number = first + thread;
    unsigned units = 0;
    if (number < blocks) {
      const int n = last_up_to(static_cast<Lds<const int>>(lds->first_block), batch, number);
      const Sequence sequence = {lds->queries[n], lds->keys[n], lds->q_start[n], lds->k_start[n]};
      const int tile = number - lds->first_block[n], first_row = tile * kTileRows;
      const int end_row = smaller(first_row + kTileRows, rows_of(sequence));
      const auto query_of = [&](int row) { return Row::of(arguments.stacked, row).query; };
      const int tiles = Visibility::of(arguments.modifiers, sequence)
                            .tiles_of_queries(query_of(first_row), query_of(end_row - 1))
                            .count;
      const int waves = tiles_of(end_row - first_row, 32);
      const unsigned of_tile = of_key_tile(costs, waves);
      units = of_block(costs, waves);
      units += smaller(tiles, (kMostOfBlock - units) / of_tile) * of_tile;
      const Global<RowBlock> to = list.blocks + number;
      to->sequence = n;
      to->tile = tile;
      to->key_tiles = tiles;
      to->is_last = number + 1 == blocks;
      to->seqlen_q = sequence.seqlen_q;
      to->seqlen_k = sequence.seqlen_k;
      to->q_start = sequence.q_start;
      to->k_start = sequence.k_start;
      lds->waves[number] = waves;
    }
    unsigned of_all;
    const unsigned begin = of_head + sum_before(units, blocks - first, of_all, lds, thread);
    if (number < blocks) lds->begin[number] = begin;
    of_head += of_all;
  }
  if (thread == 0) lds->begin[blocks] = of_head;
  barrier();
  const int heads = a.heads.divisor;
  const unsigned long least = kLeastShareTiles * of_key_tile(costs, kWaves);
  unsigned long share = share_of(of_head, heads, list.workgroups);
  if (share < least) share = least;
  for (unsigned number = thread; number <= list.workgroups; number += kListThreads) {
    const ShareBegin begin = begin_of(number, share, of_head, blocks, heads, costs, lds);
    const Global<ShareBegin> to = list.shares + number;
    to->head = begin.head;
    to->block = begin.block;
    to->key_tile = begin.key_tile;
    to->first_cut = begin.first_cut;
    to->last_cut = begin.last_cut;
  }
}

__device__ inline ShareBegin fields_of(Constant<ShareBegin> share) {
  return {share->head, share->block, share->key_tile, share->first_cut, share->last_cut};
}
__device__ inline RowBlock fields_of(Constant<RowBlock> block) {
  return {block->sequence, block->tile,     block->key_tiles, block->is_last,
          block->seqlen_q, block->seqlen_k, block->q_start,   block->k_start};
}

// All fields of an entry of a list are loaded at once, and with those of others, where there are
// scalar registers for that.
template <class Entry>
__device__ inline Entry loaded(Global<const Entry> entry) {
  typedef unsigned Words __attribute__((ext_vector_type(sizeof(Entry) / 4)));
  if constexpr (kHasFewScalars) return fields_of((Constant<Entry>)entry);
  else return bits_as<Entry>(*(Constant<Words>)entry);
}

// What blocks begin with is loaded in one round, and nothing of it later.
__device__ inline void load_together(const CompiledArguments& arguments) {
  const Arguments& a = arguments.attention;
  const StackedHeads& stacked = arguments.stacked;
  const WorkList& list = arguments.list;
  asm volatile("" ::"s"(a.q), "s"(a.k), "s"(a.v), "s"(a.workspace), "s"(a.scale_log2),
               "s"(a.seqlen_q), "s"(list.shares), "s"(list.blocks));
  asm volatile("" ::"s"(a.q_seq), "s"(a.q_head), "s"(a.q_batch), "s"(a.k_seq), "s"(a.k_head),
               "s"(a.k_batch), "s"(a.v_seq), "s"(a.v_head), "s"(a.v_batch), "s"(a.gqa.divisor),
               "s"(a.gqa.reciprocal), "s"(a.heads.divisor));
  if (kStacksHeads)
    asm volatile("" ::"s"(stacked.count.divisor), "s"(stacked.count.reciprocal),
                 "s"(stacked.q_stride));
  const Modifiers& m = arguments.modifiers;
  if (kIsMasked) asm volatile("" ::"s"(m.is_bottom_right), "s"(m.window_left), "s"(m.window_right));
  if (is_paged(kAccess))
    asm volatile("" ::"s"(m.block_table), "s"(m.block_table_batch), "s"(m.k_page), "s"(m.v_page),
                 "s"(m.page_size.divisor), "s"(m.page_size.reciprocal), "s"(m.num_pages));
}

// Likewise what they end with.
__device__ inline void load_for_output(const CompiledArguments& arguments) {
  const Arguments& a = arguments.attention;
  const StackedHeads& stacked = arguments.stacked;
  asm volatile("" ::"s"(a.out), "s"(a.lse), "s"(a.workspace), "s"(a.out_seq), "s"(a.out_head),
               "s"(a.out_batch), "s"(a.lse_head));
  if (kStacksHeads)
    asm volatile("" ::"s"(stacked.count.divisor), "s"(stacked.count.reciprocal),
                 "s"(stacked.out_stride), "s"(stacked.lse_stride));
}

// What is left of a workgroup's share: from a key tile of a block on. The rest is loaded when it is
// needed, since the loop over key tiles needs the registers.
struct Share {
  // What comes behind the block, as far as that belongs to the share.
  enum class Next { nothing, block, head };

  int number, head, block, key_tile;
  bool is_done;

  __device__ static Share of_workgroup(const WorkList& list) {
    // Neighbours in the list read the same keys: they are on the same XCD.
    const Quotient in_turn = divide(__builtin_amdgcn_workgroup_id_x(), list.xcds);
    const int number = in_turn.remainder * list.xcd_workgroups + in_turn.value;
    const ShareBegin begin = loaded<ShareBegin>(list.shares + number);
    const ShareBegin end = loaded<ShareBegin>(list.shares + number + 1);
    Share share = {number, begin.head, begin.block, begin.key_tile, false};
    share.is_done = share.begins_at(end);
    return share;
  }

  // That of the block, as far as it belongs to the share.
  __device__ Task task(const CompiledArguments& arguments) const {
    const WorkList& list = arguments.list;
    const RowBlock rows = loaded<RowBlock>(list.blocks + block);
    const ShareBegin end = loaded<ShareBegin>(list.shares + number + 1);
    const ShareBegin begin = loaded<ShareBegin>(list.shares + number);
    const bool is_cut = ends_in_block(end), is_whole = key_tile == 0 && !is_cut;
    const ShareBegin cut = key_tile > 0 ? begin : end;
    const Place place = {static_cast<unsigned>(rows.sequence), static_cast<unsigned>(head),
                         static_cast<unsigned>(rows.tile),
                         is_whole ? 0u : static_cast<unsigned>(number + 1 - cut.first_cut)};
    Task task =
        task_of_tile(arguments, place, {rows.seqlen_q, rows.seqlen_k, rows.q_start, rows.k_start},
                     0, [&](int) { return rows.tile; });
    task.key_tiles = {key_tile, is_cut ? end.key_tile : rows.key_tiles};
    task.first_cut = cut.first_cut;
    task.num_splits = {static_cast<unsigned>(cut.last_cut - cut.first_cut + 2), 0};
    if (!is_whole) task.results = results_of_cut(arguments.attention, cut.first_cut);
    return task;
  }

  __device__ Next next(const WorkList& list) const {
    const ShareBegin end = loaded<ShareBegin>(list.shares + number + 1);
    const Next next = loaded<RowBlock>(list.blocks + block).is_last ? Next::head : Next::block;
    return ends_in_block(end) || behind(next).begins_at(end) ? Next::nothing : next;
  }

  // What is left behind the block.
  __device__ Share behind(Next next) const {
    if (next == Next::head) return {number, head + 1, 0, 0, false};
    return {number, head, block + 1, 0, next == Next::nothing};
  }

 private:
  __device__ bool ends_in_block(const ShareBegin& end) const {
    return head == end.head && block == end.block;
  }
  __device__ bool begins_at(const ShareBegin& end) const {
    return ends_in_block(end) && key_tile == end.key_tile;
  }
};
