// What a workgroup makes of the splits of a tile (split_fours.h): some fours of a block of rows.
// Its grid is that of the other kernel with as many workgroups in place of splits as these are
// divided among (combining_workgroups in launcher/forward.h).
//
// Included after Thread, whose first_column_of(n) is that of four n of a block, row_of_block(), and
// kFew: more splits than a wave has room for at once are taken by all of them together.
#pragma once

#include "split_fours.h"

// Of more splits than kFew each wave takes every kWaves-th of two fours, of fewer all of fours of
// its own: of wide rows two, or there would be more workgroups than run at a time.
constexpr bool kAreWide = kBlockFours > 16;
constexpr int kFewOfWave = kAreWide ? 2 : 1;
constexpr int kCombinedFours = 2, kFewFours = kAreWide ? kFewOfWave * kWaves : kCombinedFours;
// The results of so many splits are on their way together, since a round of loads takes longer than
// what is made of it; but those of splits that are not there take their turn too. Of wide rows
// there is room for more workgroups in place of more.
constexpr int kMostAtOnce = kAreWide ? 8 : 16;
constexpr int of_few(int count) { return count < kFew ? count : kFew; }

// A row of all waves together, and what each wave's output of it is multiplied with.
struct RowOfWaves {
  float maximum, sum, factor[kWaves];

  __device__ static RowOfWaves of(const float (&maxima)[kWaves], const float (&sums)[kWaves]) {
    RowOfWaves row = {kNoMaximum, 0, {}};
#pragma unroll
    for (int n = 0; n < kWaves; ++n) row.maximum = __builtin_fmaxf(row.maximum, maxima[n]);
#pragma unroll
    for (int n = 0; n < kWaves; ++n) {
      row.factor[n] = __builtin_amdgcn_exp2f(maxima[n] - row.maximum);
      row.sum += sums[n] * row.factor[n];
    }
    return row;
  }
};

// What every kStep-th split left of some fours of a block, as one lane sees it.
template <int kFours, int kStep>
struct FoursOfSplits {
  __amdgpu_buffer_rsrc_t fours[kFours], rows;
  int count;      // of these splits
  int lane, row;  // where the first split's are; behind the end for lanes without a row

  __device__ static FoursOfSplits of(const SplitsOfTile& splits, int block, int first_four,
                                     int first, const Thread& thread, bool has_row) {
    constexpr int kBehindEnd = 1 << 26;
    const auto all = [&](Global<const float> from, int floats) {
      return __builtin_amdgcn_make_buffer_rsrc((void*)from, 0, splits.count * floats * 4,
                                               kRawBuffer);
    };
    FoursOfSplits result;
#pragma unroll
    for (int i = 0; i < kFours; ++i)
      result.fours[i] = all(splits.four(first_four + i), kFourFloats);
    result.rows = all(splits.rows(block), kBlockFloats);
    result.count = (splits.count + kStep - 1 - first) / kStep;
    result.lane = has_row ? first * kFourFloats * 4 + thread.lane * 16 : kBehindEnd;
    result.row = has_row ? first * kBlockFloats * 4 + thread.column * 8 : kBehindEnd;
    return result;
  }

  // Of the n-th of the splits from `first` on; behind the last one these are zeros.
  __device__ f32x4 four(int first, int n, int i) const {
    const Place place = {lane + first * kStep * kFourFloats * 4, n * kStep * kFourFloats * 4};
    return bits_as<f32x4>(
        __builtin_amdgcn_raw_buffer_load_b128(fours[i], place.near, place.far, 0));
  }
  __device__ f32x2 maximum_and_sum(int first, int n) const {
    const Place place = {row + first * kStep * kBlockFloats * 4, n * kStep * kBlockFloats * 4};
    return bits_as<f32x2>(__builtin_amdgcn_raw_buffer_load_b64(rows, place.near, place.far, 0));
  }

 private:
  // Instructions have room for some bytes.
  struct Place {
    int near, far;
    __device__ Place(int from, int bytes) : near(from + bytes % 4096), far(bytes / 4096 * 4096) {}
  };
};

// What a wave makes of splits.
template <int kFours>
struct CombinedFours {
  float maximum, sum;
  f32x4 output[kFours];

  // Calls meanwhile() once the first results are on their way.
  template <int kAtOnce, int kStep, class Meanwhile>
  __device__ void take(const FoursOfSplits<kFours, kStep>& from, Meanwhile meanwhile) {
    f32x2 rows[kAtOnce];
    f32x4 fours[kAtOnce][kFours];
    const auto load = [&](int first) __attribute__((always_inline)) {
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) rows[n] = from.maximum_and_sum(first, n);
      __builtin_amdgcn_sched_barrier(0);
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
        for (int i = 0; i < kFours; ++i) fours[n][i] = from.four(first, n, i);
      // Left alone, the compiler would load each when it is needed, to save registers.
      __builtin_amdgcn_sched_barrier(0);
    };
    load(0);
    meanwhile();
    __builtin_amdgcn_sched_barrier(0);
    add<true>(rows, fours, from.count);
    for (int first = kAtOnce; first < from.count; first += kAtOnce) {
      load(first);
      add<false>(rows, fours, from.count - first);
    }
  }

 private:
  // Of `count` splits, which may be more or fewer.
  template <bool kAreFirst, int kAtOnce>
  __device__ void add(const f32x2 (&rows)[kAtOnce], const f32x4 (&fours)[kAtOnce][kFours],
                      int count) {
    const auto maximum_of = [&](int n) { return n < count ? rows[n].x : kNoMaximum; };
    float next = kAreFirst ? rows[0].x : maximum;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) next = __builtin_fmaxf(next, maximum_of(n));
    const float before = kAreFirst ? 0 : __builtin_amdgcn_exp2f(maximum - next);
    maximum = next;
    sum = kAreFirst ? 0 : sum * before;
    float factor[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      factor[n] = __builtin_amdgcn_exp2f(maximum_of(n) - maximum);
      sum += rows[n].y * factor[n];
    }
    __builtin_amdgcn_sched_barrier(0);  // while fours are still on their way
#pragma unroll
    for (int i = 0; i < kFours; ++i) output[i] = kAreFirst ? f32x4(0) : output[i] * before;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
      for (int i = 0; i < kFours; ++i) output[i] += fours[n][i] * factor[n];
  }
};

struct CombinedByWaves {
  float maxima[kWaves][16], sums[kWaves][16];
  f32x4 fours[kWaves][kCombinedFours][64];
};

// Which fours a workgroup has, of kFours each.
struct FoursOfWorkgroup {
  Task task;
  SplitsOfTile splits;
  int block, first;  // in the block
  bool has_row;
  OutputRow to;

  template <int kFours>
  __device__ static FoursOfWorkgroup of(const CompiledArguments& arguments, const Thread& thread) {
    constexpr unsigned kThere = rounded_up(kHdimV, 64) / 16, kShares = (kThere - 1) / kFours + 1;
    constexpr Divisor kAll = {kRowBlocks * kShares, ~0u / (kRowBlocks * kShares)};
    FoursOfWorkgroup result;
    const Place place = place_of_workgroup<kIsGroup>(arguments.attention, kAll);
    result.task = task_of(arguments, place);
    result.splits = {result.task.results, static_cast<int>(result.task.num_splits.divisor)};
    result.block = place.share / kShares;
    result.first = place.share % kShares * kFours;
    result.has_row = result.task.first_row + 16 * result.block + thread.column < result.task.rows;
    return result;
  }
  __device__ bool has_rows() const { return task.first_row + 16 * block < task.rows; }
  __device__ int in_tile(int four) const { return block * kBlockFours + first + four; }

  __device__ void find_row(const CompiledArguments& arguments, const Thread& thread) {
    to = OutputRow::of(task, row_of_block(task, arguments.stacked, block, thread), 1, arguments);
    // Left alone, the compiler would find it out in the end.
    asm volatile("" : "+v"(to.to), "+v"(to.lse), "+v"(to.factor));
  }
  __device__ void store(int four, const f32x4& made, float maximum, const Thread& thread) const {
    if (!has_row) return;
    to.store(thread.first_column_of(first + four), made);
    if (first + four == 0) to.store_lse<16>(maximum, thread.lane);
  }
};

// Of few splits a wave takes all for its own fours: waves have nothing to tell each other.
__device__ inline void combine_few(const CompiledArguments& arguments, const Thread& thread) {
  auto own = FoursOfWorkgroup::of<kFewFours>(arguments, thread);
  const int first = thread.wave * kFewOfWave;
  if (!own.has_rows() || first >= kFewFours) return;
  const auto from = FoursOfSplits<kFewOfWave, 1>::of(own.splits, own.block, own.in_tile(first), 0,
                                                     thread, own.has_row);
  const auto find_row = [&]() __attribute__((always_inline)) { own.find_row(arguments, thread); };
  CombinedFours<kFewOfWave> all;
  if (own.splits.count > 12) all.take<kFew>(from, find_row);
  else if (own.splits.count > 8) all.take<of_few(12)>(from, find_row);
  else if (own.splits.count > 4) all.take<of_few(8)>(from, find_row);
  else all.take<4>(from, find_row);
  own.to.divide_by(all.sum);
#pragma unroll
  for (int i = 0; i < kFewOfWave; ++i) own.store(first + i, all.output[i], all.maximum, thread);
}

__device__ inline void combine_many(const CompiledArguments& arguments, Lds<CombinedByWaves> shared,
                                    const Thread& thread) {
  auto own = FoursOfWorkgroup::of<kCombinedFours>(arguments, thread);
  if (!own.has_rows()) return;
  static_assert(kWaves <= kFew, "each wave has splits");
  const auto from = FoursOfSplits<kCombinedFours, kWaves>::of(own.splits, own.block, own.in_tile(0),
                                                              thread.wave, thread, own.has_row);
  const auto find_row = [&]() __attribute__((always_inline)) { own.find_row(arguments, thread); };
  CombinedFours<kCombinedFours> made;
  if (own.splits.count > 8 * kWaves) made.take<kMostAtOnce>(from, find_row);
  else if (own.splits.count > 4 * kWaves) made.take<8>(from, find_row);
  else if (!kAreWide || own.splits.count > 2 * kWaves) made.take<4>(from, find_row);
  else made.take<2>(from, find_row);
#pragma unroll
  for (int i = 0; i < kCombinedFours; ++i)
    shared->fours[thread.wave][i][thread.lane] = made.output[i];
  shared->maxima[thread.wave][thread.column] = made.maximum;
  shared->sums[thread.wave][thread.column] = made.sum;
  barrier();
  if (thread.wave >= kCombinedFours) return;
  float maxima[kWaves], sums[kWaves];
  f32x4 fours[kWaves];
#pragma unroll
  for (int n = 0; n < kWaves; ++n) {
    maxima[n] = shared->maxima[n][thread.column];
    sums[n] = shared->sums[n][thread.column];
    fours[n] = shared->fours[n][thread.wave][thread.lane];
  }
  __builtin_amdgcn_sched_barrier(0);
  const RowOfWaves all = RowOfWaves::of(maxima, sums);
  own.to.divide_by(all.sum);
  f32x4 of_all = fours[0] * all.factor[0];
#pragma unroll
  for (int n = 1; n < kWaves; ++n) of_all += fours[n] * all.factor[n];
  own.store(thread.wave, of_all, all.maximum, thread);
}

__device__ inline void combine_fours(const CompiledArguments& arguments,
                                     Lds<CombinedByWaves> shared, const Thread& thread) {
  if (static_cast<int>(arguments.attention.num_splits.divisor) <= kFew)
    combine_few(arguments, thread);
  else combine_many(arguments, shared, thread);
}
