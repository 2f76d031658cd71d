// What a workgroup of a compiled forward kernel has to do, and where its output goes.
//
// Included after the traits, kTileRows, kSlices, kColumns, and kResultFloats: what a split of the
// keys leaves of a tile.
#pragma once

#include "first_page.h"
#include "row_tiles.h"
#include "scores.h"
#include "workgroups.h"

// Key tiles, counted among those that rows see.
struct TileRange {
  int begin, end;
};

// A tile of rows of one sequence and head, or of the heads that are stacked there, and a share of
// the keys that they see.
struct Task {
  Head head;  // the first one where heads are stacked
  Visibility visibility;
  Sequence sequence;
  Place place;
  unsigned first_head;
  unsigned first_line;  // first_head, counted among the heads of all sequences
  int queries, rows;    // of the sequence; rows counts those of all stacked heads
  int first_row;        // of the workgroup
  float scale;          // of scores, with log2(e) in it
  int slice;            // of the columns
  Divisor num_splits;
  Global<float> results;  // of the splits of these rows; null where keys are not split
  TileRange key_tiles;    // of persistent workgroups, whose shares are no splits
  int first_cut;          // of those: that of a block in parts, which num_splits counts
};

// One of a task's rows.
struct Row {
  int number, query;
  unsigned head;  // of the stacked ones

  __device__ static Row of(const StackedHeads& stacked, int number) {
    if (!kStacksHeads) return {number, number, 0};
    const Quotient query = divide(number, stacked.count);
    return {number, static_cast<int>(query.value), query.remainder};
  }
};

// The scale of 8-bit numbers, one of a sequence's and head's; `batch` and `head` are strides in
// bytes. Without scales it is 1.
__device__ inline float descale_of(Global<const float> scales, unsigned long batch,
                                   unsigned long head) {
  return scales ? *(Global<const float>)((Global<const char>)scales + batch + head) : 1;
}

// The scale of probabilities that are integers.
__device__ inline float p_descale_of(const Arguments& a, const Modifiers& m, const Place& place) {
  const unsigned long head =
      m.p_descale_of_query_heads ? place.head : divide(place.head, a.gqa).value;
  return descale_of(m.p_descale, place.batch * m.p_descale_batch, head * m.p_descale_head);
}

// Inputs that are all 0 may have a scale of 0. Hidden scores are infinite, and times 0 they would
// be NaN.
__device__ inline float descaled(float scale, float descale) {
  constexpr float kLargest = __FLT_MAX__, kSmallest = __FLT_MIN__;
  return __builtin_amdgcn_fmed3f(scale * descale, kSmallest, kLargest);
}

// The arguments, loaded anew: what the end of a kernel alone needs takes no registers in its loop.
__device__ inline const CompiledArguments& late_arguments() {
  auto arguments = __builtin_amdgcn_kernarg_segment_ptr();
  asm volatile("" : "+s"(arguments));
  return *(const CompiledArguments*)arguments;
}

// The first column of a slice.
__device__ inline int first_column(int slice) {
  return smaller(slice * kColumns, kHdimV - kColumns);
}

// What the output is multiplied with, beside 1 / sum.
__device__ inline float output_scale(const CompiledArguments& arguments, const Place& place) {
  const Arguments& a = arguments.attention;
  const Modifiers& m = arguments.modifiers;
  float scale = kHasDropout ? m.keep_scale : 1;
  if (kHasDescales) {
    const unsigned long head = divide(place.head, a.gqa).value;
    scale *= descale_of(a.v_descale, static_cast<unsigned long>(place.batch) * a.v_descale_batch,
                        head * a.v_descale_head);
  }
  if (kHasInt8Probabilities) scale *= p_descale_of(a, m, place);
  return scale;
}

// A row of the output on its way to memory, and its lse.
struct OutputRow {
  Global<char> to;
  Global<float> lse;
  float sum, factor, excess;

  __device__ static OutputRow of(const Task& task, const Row& row, float sum,
                                 const CompiledArguments& late = late_arguments()) {
    const Head head = head_of<kIsGroup>(late.attention, task.place, 0, task.sequence,
                                        line_of(late.attention, task.place), task.queries);
    const unsigned long stacked = row.head;
    OutputRow result = {};
    result.to = (Global<char>)head.o.from(row.query).base + stacked * late.stacked.out_stride +
                first_column(task.slice) * OutElement::kBytes;
    if (head.lse && task.slice == 0)
      result.lse =
          (Global<float>)((Global<char>)head.lse + stacked * late.stacked.lse_stride) + row.query;
    result.sum = sum;
    result.excess = ScoreUnit::of(late.modifiers, 1).excess;
    result.factor = sum == 0 ? 0 : __builtin_amdgcn_rcpf(sum) * output_scale(late, task.place);
    return result;
  }

  // The row of what one split of the keys makes, as floats, and its lse, which is asked for too.
  __device__ static OutputRow of_split(const Task& task, const Row& row, float sum, long split) {
    const CompiledArguments& late = late_arguments();
    const Modifiers& m = late.modifiers;
    OutputRow result = of(task, row, sum);
    const Head head = head_of<kIsGroup>(late.attention, task.place, 0, task.sequence,
                                        line_of(late.attention, task.place), task.queries);
    const unsigned long of_head = static_cast<unsigned long>(row.head) * late.stacked.lse_stride;
    const Global<float> of_row = (Global<float>)((Global<char>)head.lse + of_head) + row.query;
    const long index = split * m.part_rows + (of_row - late.attention.lse);
    result.to = (Global<char>)(m.out_parts + index * kHdimV + first_column(task.slice));
    if (result.lse) result.lse = m.lse_parts + index;
    return result;
  }

  // Where the row of a lane goes.
  __device__ Global<char> of_lane(int lane) const {
    const auto word = [&](unsigned long address) {
      return static_cast<unsigned>(__builtin_amdgcn_ds_bpermute(lane * 4, address));
    };
    const auto address = (unsigned long)to;
    return (Global<char>)(static_cast<unsigned long>(word(address >> 32)) << 32 | word(address));
  }

  // Of a row whose sum was taken to be 1.
  __device__ void divide_by(float actual_sum) {
    sum = actual_sum;
    factor = sum == 0 ? 0 : factor * __builtin_amdgcn_rcpf(sum);
  }

  // Four values that follow each other.
  template <class Element>
  __device__ auto rounded(f32x4 o) const {
    o *= factor;
    return rounded_to<Element>(o.x, o.y, o.z, o.w);
  }
  template <class Element = OutElement>
  __device__ void store(int first, f32x4 o) const {
    const auto values = rounded<Element>(o);
    if constexpr (kColumns % 4 == 0) {
      if (first < kColumns) *(Global<Words<Element, 4>>)(to + first * Element::kBytes) = values;
    } else {
      typedef Bits<Element> Four __attribute__((ext_vector_type(4)));
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (first + j < kColumns) ((Global<Bits<Element>>)to)[first + j] = bits_as<Four>(values)[j];
    }
  }

  // Eight values of 16 columns, whose first half the lower half of the wave stores. A lane has made
  // four of each half, and lane ^ 32 the others: they exchange what they do not store, since half
  // as many stores take half as long.
  template <class Element>
  __device__ u32x4 exchanged(f32x4 low, f32x4 high, int lane) const {
    low *= factor;
    high *= factor;
    const u32x2 lows = rounded_to<Element>(low.x, low.y, low.z, low.w);
    const u32x2 highs = rounded_to<Element>(high.x, high.y, high.z, high.w);
    const bool is_high = lane >= 32;
    const u32x2 kept = is_high ? highs : lows, given = is_high ? lows : highs;
    const auto taken = [&](unsigned word) {
      return static_cast<unsigned>(__builtin_amdgcn_ds_bpermute((lane ^ 32) * 4, word));
    };
    const u32x2 other = {taken(given.x), taken(given.y)};
    const u32x2 begin = is_high ? other : kept, end = is_high ? kept : other;
    return {begin.x, begin.y, end.x, end.y};
  }
  __device__ void store_eight(int first, u32x4 values) const {
    if (first < kColumns) *(Global<u32x4>)(to + first * OutElement::kBytes) = values;
  }
  // Those of a lane alone: at once where all rows are of such, and have 16 bits.
  template <class Element = OutElement>
  __device__ void store_eight(int first, f32x4 low, f32x4 high) const {
    if constexpr (kColumns % 8 == 0 && Element::kBytes == 2) {
      low *= factor;
      high *= factor;
      const u32x2 begin = rounded_to<Element>(low.x, low.y, low.z, low.w);
      const u32x2 end = rounded_to<Element>(high.x, high.y, high.z, high.w);
      store_eight(first, u32x4{begin.x, begin.y, end.x, end.y});
    } else {
      store<Element>(first, low);
      store<Element>(first + 4, high);
    }
  }

  // The first kLanes lanes of a wave have rows of their own.
  template <int kLanes>
  __device__ void store_lse(float maximum, int lane) const {
    if (!lse || lane >= kLanes) return;
    const float of_largest = maximum - excess, of_sum = __builtin_amdgcn_logf(sum);
    const float of_row =
        kHasAddedBias ? __builtin_fmaf(of_sum, kLn2, of_largest) : (of_largest + of_sum) * kLn2;
    *lse = sum == 0 ? -kInfinity : of_row;
  }
};

__device__ inline Pages pages_of(const Modifiers& m, long stride, const Task& task) {
  return {m.block_table + first_page(m, task.place, task.sequence), m.page_size,
          static_cast<unsigned>(m.num_pages - 1), stride};
}

// Under a mask the longest tiles go first: what is left for the end is short. Negative, or behind
// the last one: the sequence has no such tile, as in gm1 alone sequences differ in length.
__device__ inline int tile_of(const Arguments& a, const Place& place, int rows) {
  const int rank = place.tile_rank;
  if (!kIsMasked) return rank;
  return (kIsGroup ? tiles_of(rows, kTileRows) : static_cast<int>(a.query_tiles)) - 1 - rank;
}

// The task of a place in its sequence, without its results; where that has no such tile, first_row
// is not below rows. `tile_of` gives the tile, knowing how many rows there are.
template <class TileOf>
__device__ inline Task task_of_tile(const CompiledArguments& arguments, const Place& place,
                                    const Sequence& sequence, int slice, TileOf tile_of) {
  const Arguments& a = arguments.attention;
  const int stacked = kStacksHeads ? arguments.stacked.count.divisor : 1;
  Sequence of_rows = sequence;  // where there are rows: keys in pages begin with page 0
  if (is_paged(kAccess)) of_rows.k_start = 0;
  const int queries = computed_queries<kIsGroup>(a, sequence), rows = queries * stacked;
  const int tile = tile_of(rows);
  const unsigned head_k = divide(place.head, a.gqa).value;
  const unsigned long line = line_of(a, place);
  return {head_of<kIsGroup>(a, place, head_k, of_rows, line, queries),
          Visibility::of(arguments.modifiers, sequence),
          sequence,
          place,
          place.head * stacked,
          static_cast<unsigned>(line) * stacked,
          queries,
          rows,
          tile < 0 ? rows : tile * kTileRows,
          a.scale_log2,
          slice,
          a.num_splits,
          nullptr,
          {},
          0};
}

// Where the splits of a task's rows leave what they make of them; null where keys are not split.
__device__ inline Global<float> results_of(const Arguments& a, const Task& task) {
  if (!a.workspace) return nullptr;
  // No memory has room for 2^32 of them.
  const unsigned line = line_of(a, task.place),
                 tile = static_cast<unsigned>(task.first_row) / kTileRows;
  const unsigned number =
      ((line * a.query_tiles + tile) * kSlices + task.slice) * a.num_splits.divisor;
  return a.workspace + static_cast<unsigned long>(number) * kResultFloats;
}

// The task of a workgroup. `given.share` counts the slices of all shares.
__device__ inline Task task_of(const CompiledArguments& arguments, const Place& given) {
  const Arguments& a = arguments.attention;
  const int slice = given.share % kSlices;
  Place place = given;
  place.share /= kSlices;
  Task task = task_of_tile(arguments, place, sequence_of<kIsGroup>(a, place.batch), slice,
                           [&](int rows) { return tile_of(a, place, rows); });
  task.results = results_of(a, task);
  return task;
}

// All slices of a split follow one another.
__device__ inline Divisor shares_of(const Arguments& a) {
  return {a.num_splits.divisor * kSlices, a.num_splits.reciprocal / kSlices};
}

__device__ inline Task task_of_workgroup(const CompiledArguments& arguments) {
  const Arguments& a = arguments.attention;
  return task_of(arguments, place_of_workgroup<kIsGroup>(a, shares_of(a)));
}

// The scales of q and k become part of the scale of scores.
__device__ inline void take_descales(Task& task, CompiledArguments& arguments) {
  const Arguments& a = arguments.attention;
  Modifiers& m = arguments.modifiers;
  const unsigned long batch = task.place.batch, head_k = divide(task.place.head, a.gqa).value;
  const unsigned long head_q = m.q_descale_of_query_heads ? task.place.head : head_k;
  const float of_scores =
      descale_of(a.q_descale, batch * a.q_descale_batch, head_q * a.q_descale_head) *
      descale_of(a.k_descale, batch * a.k_descale_batch, head_k * a.k_descale_head);
  task.scale = uniform(descaled(task.scale, of_scores));
  if (kHasSoftcap) m.scale_over_softcap = uniform(descaled(m.scale_over_softcap, of_scores));
}
