// What persistent workgroups do: the device lists it, so that no launch depends on lengths that the
// host does not know.
//
// A block is a tile of rows of one sequence. All work is the list of the blocks of one head, once
// for each head, and every workgroup has as much of it as the others, by what blocks are known to
// take. So where one share ends and the next one begins, a block may be cut, between two of its key
// tiles. What the parts of a block make goes to the workspace, all but the last one's, which makes
// the output of them (block_parts.h).
//
// Included after forward_tasks.h.
#pragma once

#include "block_parts.h"

// The threads that list the work, and what LDS has room for. The host looks for that, too.
constexpr int kListThreads = 1024, kMostSequences = 1024, kMostBlocks = 8192;
// A part of a block has so many key tiles at least, and a share takes as long as so many. A share
// that would begin nearer to a block's end begins there.
constexpr int kLeastKeyTiles = 1, kLeastShareTiles = 6, kNearKeyTiles = 1;
static_assert(kLeastShareTiles >= kLeastKeyTiles + kNearKeyTiles);  // between two cuts
// What blocks take may add up to what 32 bits hold. Longer ones count as no longer.
constexpr unsigned kMostOfBlock = ~0u / kMostBlocks;

// As few blocks are dealt out one after the other, by the lanes of a wave, each of which tries out
// shares of another size.
constexpr int kMostDealt = 64;

struct ListLds {
  int first_block[kMostSequences];  // of each sequence
  int queries[kMostSequences], keys[kMostSequences];
  unsigned begin[kMostBlocks + 1];   // what all blocks before take
  unsigned char waves[kMostBlocks];  // that have rows
  unsigned of_waves[kListThreads / 64];
  unsigned dealt[kMostDealt];  // what `Deal` says of each block
  float dealt_share;           // what each share takes
};

// The sum of what the threads before this one give, and in `total` that of all.
__device__ inline unsigned sum_before(unsigned given, unsigned& total, Lds<ListLds> lds,
                                      int thread) {
  const int lane = thread % 64, wave = thread / 64;
  unsigned sum = given;
#pragma unroll
  for (int step = 1; step < 64; step *= 2) {
    const unsigned other = __builtin_amdgcn_ds_bpermute((lane - step) * 4, sum);
    if (lane >= step) sum += other;
  }
  barrier();  // what was there has been read
  if (lane == 63) lds->of_waves[wave] = sum;
  barrier();
  total = 0;
#pragma unroll
  for (int n = 0; n < kListThreads / 64; ++n) {
    const unsigned of_wave = lds->of_waves[n];
    if (n < wave) sum += of_wave;
    total += of_wave;
  }
  return sum - given;
}

// The last one of `count` numbers, of which each is at least the one before, that is not above
// `most`; the first one is not.
template <int kMost, class Number>
__device__ inline int last_up_to(Lds<const Number> numbers, int count, Number most) {
  int place = 0;
#pragma unroll
  for (int step = kMost / 2; step > 0; step /= 2) {
    const int next = smaller(place + step, count - 1);
    if (numbers[next] <= most) place = next;
  }
  return place;
}

// What a block of whose rows so many waves have some takes, beside its key tiles.
__device__ inline unsigned of_block(const WorkCosts& costs, int waves) {
  return costs.block + waves * costs.wave;
}

// Where the share of workgroup `number` begins, each of which takes `share`; `of_head` is what the
// blocks of a head take together.
__device__ inline ShareBegin begin_of(unsigned number, unsigned long share, unsigned of_head,
                                      int blocks, int heads, const WorkCosts& costs,
                                      Lds<const ListLds> lds) {
  const unsigned long at = number * share;
  if (at >= static_cast<unsigned long>(of_head) * heads) return {heads, 0, 0, 0, 0};
  const int head = at / of_head;
  const unsigned in_head = at - static_cast<unsigned long>(head) * of_head;
  const int block = last_up_to<kMostBlocks>(lds->begin, blocks, in_head);
  const unsigned begin = lds->begin[block] + of_block(costs, lds->waves[block]);
  const unsigned of_tile = costs.key_tile;
  const int tiles = (lds->begin[block + 1] - begin) / of_tile;
  const int tile = in_head < begin ? 0 : (in_head - begin) / of_tile;
  // The last tile before which a share begins that begins in this block.
  const int last_tile = tiles < 2 * kLeastKeyTiles ? tiles / 2 : tiles - kNearKeyTiles;
  if (tile > last_tile) {
    if (block + 1 < blocks) return {head, block + 1, 0, 0, 0};
    return {head + 1, 0, 0, 0, 0};
  }
  if (tile < kNearKeyTiles || tiles < 2 * kLeastKeyTiles) return {head, block, 0, 0, 0};
  const unsigned long first = static_cast<unsigned long>(head) * of_head + begin;
  const int first_cut = (first + kNearKeyTiles * of_tile + share - 1) / share;
  const int last_cut = (first + (last_tile + 1) * of_tile - 1) / share;
  const int cut = smaller(larger(tile, kLeastKeyTiles), tiles - kLeastKeyTiles);
  return {head, block, cut, first_cut, last_cut};
}

// How few blocks are dealt out to shares that take equally long, what it takes to begin a block
// once more included where a share begins within one: that is as long as several key tiles. Floats
// are exact, or else shares are a little larger or smaller.
struct Deal {
  float share, key_tile;

  // Where a block begins, and how many key tiles its first part has.
  struct Part {
    unsigned share;
    float tiles;

    __device__ static Part of(unsigned packed) {
      return {packed >> kTileBits, static_cast<float>(packed & ((1u << kTileBits) - 1))};
    }
    __device__ unsigned packed() const { return share << kTileBits | static_cast<unsigned>(tiles); }
    // That sorts behind all of so many shares, and before those of the next one.
    __device__ static unsigned last_of(unsigned share) { return ((share + 1) << kTileBits) - 1; }
  };

  // What the parts behind the first one have, but the last one.
  __device__ float tiles_of_part(float once) const {
    return __builtin_floorf((share - once) * __builtin_amdgcn_rcpf(key_tile));
  }
  __device__ static float parts_of(float tiles, float of_part) {
    return __builtin_floorf((tiles - 0.5f) * __builtin_amdgcn_rcpf(of_part)) + 1;
  }
  __device__ unsigned parts_behind(const Part& first, float once, float tiles) const {
    const float rest = tiles - first.tiles;
    return rest > 0 ? static_cast<unsigned>(parts_of(rest, tiles_of_part(once))) : 0;
  }

  // A block that takes `once` beside its key tiles; `number` is the share at hand, of which so much
  // is taken.
  __device__ Part next(float once, float tiles, unsigned& number, float& taken) const {
    const float room = share - taken - once;
    if (tiles * key_tile <= room) {
      taken += once + tiles * key_tile;
      return {number, tiles};
    }
    const float that_fit = __builtin_floorf(room * __builtin_amdgcn_rcpf(key_tile));
    const float first = __builtin_amdgcn_fmed3f(that_fit, 0, __builtin_fmaxf(tiles - 1, 0));
    const float rest = tiles - first, of_part = tiles_of_part(once);
    const float parts = __builtin_fmaxf(parts_of(rest, of_part), 1);
    taken = once + (rest - (parts - 1) * of_part) * key_tile;
    const Part result =
        first > 0 ? Part{number, first} : Part{number + 1, __builtin_fminf(of_part, tiles)};
    number += static_cast<unsigned>(parts);
    return result;
  }

 private:
  static constexpr int kTileBits = 22;
  static_assert(kMostOfBlock < 1u << kTileBits);
};

// Of one of the blocks that are dealt: what it takes beside its key tiles, and these.
struct DealtBlock {
  float once, tiles;

  __device__ static DealtBlock of(const WorkCosts& costs, Lds<const ListLds> lds, int block) {
    const unsigned once = of_block(costs, lds->waves[block]);
    const unsigned units = lds->begin[block + 1] - lds->begin[block] - once;
    return {static_cast<float>(once), static_cast<float>(units / costs.key_tile)};
  }
};

// Deals out `count` blocks, those of the heads that are dealt together: as one wave.
__device__ inline void deal(const WorkList& list, int blocks, int count, Lds<ListLds> lds,
                            int lane) {
  const WorkCosts& costs = list.costs;
  const unsigned of_last = of_block(costs, kTileRows / 32);
  const float all = static_cast<float>(lds->begin[blocks]) * (count / blocks);
  const float least = of_last + kLeastShareTiles * costs.key_tile;
  // The largest one has room for all, whatever is cut: lanes try out those between.
  const float step = static_cast<float>(of_last + costs.key_tile) / 64;
  const Deal deal = {__builtin_fmaxf(all / list.dealt_shares, least) + (lane + 1) * step,
                     static_cast<float>(costs.key_tile)};
  const DealtBlock own = DealtBlock::of(costs, lds, lane % blocks);
  const Lds<unsigned> tried = lds->begin + kMostDealt + 1;  // which so few blocks leave free
  static_assert(kMostDealt * 65 < kMostBlocks);
  unsigned number = 0;
  float taken = 0;
  for (int n = 0; n < count; ++n) {
    const auto of_block = [&](float x) {
      return bits_as<float>(__builtin_amdgcn_readlane(bits_as<int>(x), n));
    };
    tried[n * 64 + lane] =
        deal.next(of_block(own.once), of_block(own.tiles), number, taken).packed();
  }
  const unsigned long fit = __builtin_amdgcn_ballot_w64(number < list.dealt_shares);
  const int chosen = fit ? __builtin_ctzl(fit) : 63;
  if (lane < count) lds->dealt[lane] = tried[lane * 64 + chosen];
  if (lane == chosen) lds->dealt_share = deal.share;
}

// Where share `number` begins of those that were dealt.
__device__ inline ShareBegin begin_of_dealt(unsigned number, const WorkList& list, int blocks,
                                            int count, int heads, Lds<const ListLds> lds) {
  const int time = number / list.dealt_shares;
  const unsigned in_turn = number - time * list.dealt_shares;
  const int head = time * list.dealt_heads;
  if (head >= heads) return {heads, 0, 0, 0, 0};
  if (in_turn == 0) return {head, 0, 0, 0, 0};
  const Deal deal = {lds->dealt_share, static_cast<float>(list.costs.key_tile)};
  const Lds<const unsigned> dealt = lds->dealt;
  const int before = last_up_to<kMostDealt>(dealt, count, Deal::Part::last_of(in_turn - 1));
  const Deal::Part first = Deal::Part::of(dealt[before]);
  const int block = before % blocks;
  const DealtBlock its = DealtBlock::of(list.costs, lds, block);
  const unsigned last = first.share + deal.parts_behind(first, its.once, its.tiles);
  if (in_turn > last) {
    const int next = before + 1;
    return {head + next / blocks, next % blocks, 0, 0, 0};
  }
  const float tile = first.tiles + (in_turn - first.share - 1) * deal.tiles_of_part(its.once);
  const int first_cut = number - in_turn + first.share + 1;
  const int last_cut = number - in_turn + smaller(last, list.dealt_shares - 1);
  return {head + before / blocks, block, static_cast<int>(tile), first_cut, last_cut};
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
  }
  const auto rows_of = [&](const Sequence& sequence) {
    return larger(computed_queries<kIsGroup>(a, sequence), 0) * stacked;
  };
  unsigned count;
  const unsigned before = sum_before(tiles_of(rows_of(own), kTileRows), count, lds, thread);
  lds->first_block[thread] = before;
  lds->queries[thread] = own.seqlen_q;
  lds->keys[thread] = own.seqlen_k;
  barrier();
  const int blocks = count < list.most_blocks ? count : list.most_blocks;
  unsigned of_head = 0;
  for (int first = 0; first < blocks; first += kListThreads) {
    const int number = first + thread;
    unsigned units = 0;
    if (number < blocks) {
      const int n = last_up_to<kMostSequences>(lds->first_block, batch, number);
      const Sequence sequence = {lds->queries[n], lds->keys[n], 0, 0};
      const int tile = number - lds->first_block[n], first_row = tile * kTileRows;
      const int end_row = smaller(first_row + kTileRows, rows_of(sequence));
      const auto query_of = [&](int row) { return Row::of(arguments.stacked, row).query; };
      const int tiles = Visibility::of(arguments.modifiers, sequence)
                            .tiles_of_queries(query_of(first_row), query_of(end_row - 1))
                            .count;
      const int waves = tiles_of(end_row - first_row, 32);
      units = of_block(costs, waves);
      units += smaller(tiles, (kMostOfBlock - units) / costs.key_tile) * costs.key_tile;
      const Global<RowBlock> to = list.blocks + number;
      to->sequence = n;
      to->tile = tile;
      to->key_tiles = tiles;
      to->is_last = number + 1 == blocks;
      lds->waves[number] = waves;
    }
    unsigned of_all;
    const unsigned begin = of_head + sum_before(units, of_all, lds, thread);
    if (number < blocks) lds->begin[number] = begin;
    of_head += of_all;
  }
  if (thread == 0) lds->begin[blocks] = of_head;
  barrier();
  clear_counts(a, list.workgroups, thread, kListThreads);
  const int heads = a.heads.divisor, dealt = blocks * list.dealt_heads;
  const bool is_dealt = 0 < dealt && dealt <= kMostDealt;
  if (is_dealt) {
    if (thread < 64) deal(list, blocks, dealt, lds, thread);
    barrier();
  }
  const unsigned long all = static_cast<unsigned long>(of_head) * heads;
  const unsigned long least = kLeastShareTiles * costs.key_tile;
  unsigned long share = (all + list.workgroups - 1) / list.workgroups;
  if (share < least) share = least;
  for (unsigned number = thread; number <= list.workgroups; number += kListThreads) {
    const ShareBegin begin = is_dealt ? begin_of_dealt(number, list, blocks, dealt, heads, lds)
                                      : begin_of(number, share, of_head, blocks, heads, costs, lds);
    const Global<ShareBegin> to = list.shares + number;
    to->head = begin.head;
    to->block = begin.block;
    to->key_tile = begin.key_tile;
    to->first_cut = begin.first_cut;
    to->last_cut = begin.last_cut;
  }
}

__device__ inline ShareBegin share_begin(const WorkList& list, unsigned number) {
  const Constant<ShareBegin> begin = (Constant<ShareBegin>)list.shares + number;
  return {begin->head, begin->block, begin->key_tile, begin->first_cut, begin->last_cut};
}

__device__ inline RowBlock row_block(const WorkList& list, int number) {
  const Constant<RowBlock> block = (Constant<RowBlock>)list.blocks + number;
  return {block->sequence, block->tile, block->key_tiles, block->is_last};
}

// Part `part` of a block that so many cuts divide; cut `first` is the first one.
__device__ inline Task task_of_part(const CompiledArguments& arguments, int head,
                                    const RowBlock& block, int part) {
  const Place place = {static_cast<unsigned>(block.sequence), static_cast<unsigned>(head),
                       static_cast<unsigned>(block.tile), static_cast<unsigned>(part)};
  return task_of_tile(arguments, place, 0, [&](int) { return block.tile; });
}

// What is left of a workgroup's share: from a key tile of a block on. The rest is loaded when it is
// needed, since the loop over key tiles needs the registers.
struct Share {
  int number, head, block, key_tile;

  __device__ static Share of_workgroup(const WorkList& list) {
    // Neighbours in the list read the same keys: they are on the same XCD.
    const Quotient in_turn = divide(__builtin_amdgcn_workgroup_id_x(), list.xcds);
    const int number = in_turn.remainder * list.xcd_workgroups + in_turn.value;
    const ShareBegin begin = share_begin(list, number);
    return {number, begin.head, begin.block, begin.key_tile};
  }

  __device__ bool is_done(const WorkList& list) const {
    const ShareBegin end = share_begin(list, number + 1);
    return ends_in_block(end) && key_tile == end.key_tile;
  }

  // That of the block, as far as it belongs to the share.
  __device__ Task task(const CompiledArguments& arguments) const {
    const WorkList& list = arguments.list;
    const RowBlock rows = row_block(list, block);
    const ShareBegin end = share_begin(list, number + 1);
    const bool is_cut = ends_in_block(end), is_whole = key_tile == 0 && !is_cut;
    const ShareBegin cut = key_tile > 0 ? share_begin(list, number) : end;
    const int first_cut = cut.first_cut;
    Task task = task_of_part(arguments, head, rows, is_whole ? 0 : number + 1 - first_cut);
    task.key_tiles = {key_tile, is_cut ? end.key_tile : rows.key_tiles};
    if (is_whole) return task;
    task.first_cut = first_cut;
    task.num_splits.divisor = cut.last_cut - first_cut + 2;
    task.results = results_of_cut(arguments.attention, first_cut);
    return task;
  }

  __device__ void go_on(const WorkList& list) {
    const ShareBegin end = share_begin(list, number + 1);
    key_tile = ends_in_block(end) ? end.key_tile : 0;
    if (ends_in_block(end)) return;
    const bool is_last = row_block(list, block).is_last;
    head += is_last;
    block = is_last ? 0 : block + 1;
  }

 private:
  __device__ bool ends_in_block(const ShareBegin& end) const {
    return head == end.head && block == end.block;
  }
};
