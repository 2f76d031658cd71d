// Where a thread and a workgroup have chunks of rows, and what the workgroups of a row find out
// together.
#pragma once

#include "row_chunks.h"

// Which chunks a thread has: every kRowLanes-th of its row, or of the workgroup's share of it.
// Where rows are no whole chunks the last one begins earlier, and has some numbers that the one
// before has, too.
struct Place {
  long first_row;
  int rows;  // of the workgroup, fewer than kRows at the end
  int row, lane, chunks, columns, share;

  // Of kRows rows from `first` on, or of those before `end`.
  __device__ Place(long first, long end, long columns_of_row, int share_of_row)
      : first_row(first), share(share_of_row) {
    rows = end - first < kRows ? static_cast<int>(end - first) : kRows;
    const int thread = __builtin_amdgcn_workitem_id_x();
    row = thread / kRowLanes;
    lane = thread % kRowLanes;
    columns = static_cast<int>(columns_of_row);
    chunks = (columns + kWidth - 1) / kWidth;
  }

  __device__ int chunk(int i) const { return lane + (i + share * kHeld) * kRowLanes; }
  // One column or another, and no difference: bounds are compared with what is left of an address
  // without its constant part, which must not be negative.
  __device__ int first_of(int i) const {
    const int first = chunk(i) * kWidth, last = columns - kWidth;
    return kIsRagged && first > last ? last : first;
  }
  // How many numbers of a chunk the one before has, too.
  __device__ int shared_of(int i) const { return chunk(i) * kWidth - first_of(i); }
  // Of these zeros, so that each number counts once.
  __device__ Floats once(int i, Floats a) const {
#pragma unroll
    for (int j = 0; kIsRagged && j < kWidth - 1; ++j) a[j] = j < shared_of(i) ? 0 : a[j];
    return a;
  }

  // All but the last chunk, unless shares of a row have fewer.
  __device__ bool has(int i) const { return (kShares == 1 && i < kHeld - 1) || chunk(i) < chunks; }
  // Numbers of a share.
  __device__ int count(int of) const {
    constexpr int kOfShare = kHeld * kRowLanes * kWidth;
    const int left = columns - of * kOfShare;
    return left < kOfShare ? left : kOfShare;
  }
  __device__ float part() const { return __builtin_amdgcn_rcpf(static_cast<float>(count(share))); }
  __device__ float count_of_wave(int wave) const {
    int numbers = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int left = columns - ((i + share * kHeld) * kRowLanes + wave * 64) * kWidth;
      numbers += left < 0 ? 0 : left < kWaveLanes * kWidth ? left : kWaveLanes * kWidth;
    }
    return static_cast<float>(numbers);
  }
  __device__ unsigned column(int i) const { return has(i) ? first_of(i) : kNowhere; }
  // In the buffer of the workgroup's rows. Those that there are not lie behind its end.
  __device__ unsigned offset(int i, long stride) const {
    const unsigned at = static_cast<unsigned>(row) * static_cast<unsigned>(stride);
    return has(i) ? at + first_of(i) : kNowhere;
  }
  // The workgroup's rows of a tensor.
  template <class E, class T>
  __device__ __amdgpu_buffer_rsrc_t rows_of(Global<T> base, long stride) const {
    const long begin = first_row * stride * E::kBytes;
    const int count = rows > 0 ? (rows - 1) * static_cast<int>(stride) + columns : 0;
    return __builtin_amdgcn_make_buffer_rsrc((void*)((Global<const char>)base + begin), 0,
                                             count * E::kBytes, kRawBuffer);
  }
};

// Floats of what stays as it came. With kAgain those that the last pass over the row made are not
// kept.
template <class E, bool kAgain>
__device__ inline Floats widened(Numbers<E>& from) {
  if constexpr (kAgain) take_as_new(from);
  return floats_of<E>(from);
}

// A weight or a bias, which is on its way with the first row.
struct Weights {
  Numbers<Weight> held[kHeld];

  __device__ Weights(Global<const void> at, const Place& place) {
    const __amdgpu_buffer_rsrc_t all =
        __builtin_amdgcn_make_buffer_rsrc((void*)at, 0, place.columns * Weight::kBytes, kRawBuffer);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i] = load_numbers<Weight>(all, place.column(i));
  }
  // Waited for in a loop, they would hold up what has been stored there, too.
  __device__ void wait() {
#pragma unroll
    for (auto& numbers : held) take_as_new(numbers);
  }
  template <bool kAgain>
  __device__ Floats at(int i) {
    return widened<Weight, kAgain>(held[i]);
  }
};

// The sums of each term(i, numbers of its chunk ...) over what the wave has of a row.
template <class Row, class... Terms>
__device__ inline void sum(Row& row, float* to, const Terms&... terms) {
  Sums totals[sizeof...(Terms)] = {};
  row.for_chunks([&](int i, auto... numbers) {
    Sums* total = totals;
    const auto add = [&](Floats term) {
      const Sums more = with(*total, row.place.once(i, term));
      *total = row.place.has(i) ? more : *total;
      ++total;
    };
    (add(terms(i, numbers...)), ...);
  });
#pragma unroll
  for (const Sums& total : totals) *to++ = over_wave(sum_of(total), added);
}

// ---- What the workgroups of a row find out together ---------------------------------------------

// A number and a mark that it is there; zeros before the launch.
using Word = unsigned long;

// Which block of rows a workgroup has, and which share of them. They are numbered by when they
// begin: so those of a block begin one after the other, and none waits for one that has no room
// before it ends itself.
struct Work {
  long block;
  int share;

  __device__ explicit Work(Global<void> words) {
    unsigned number = __builtin_amdgcn_workgroup_id_x();
    if constexpr (kShares > 1) {
      __shared__ unsigned own;
      if (__builtin_amdgcn_workitem_id_x() == 0)
        own = static_cast<unsigned>(__hip_atomic_fetch_add(
            static_cast<Global<Word>>(words), 1ul, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT));
      wait_for_waves();
      number = __builtin_amdgcn_readfirstlane(own);
    }
    block = number / kShares;
    share = number % kShares;
  }
};

constexpr int lanes_for(int count) { return count > 1 ? 2 * lanes_for((count + 1) / 2) : 1; }
constexpr int kShareLanes = lanes_for(kShares);

// Puts in place of the numbers x those of all workgroups of the row, of a share in every
// kShareLanes-th lane, by kCount * kShares words; false where a row has one workgroup, or there is
// none.
template <int kCount>
__device__ inline bool over_shares(Global<Word> words, const Place& place, float* x) {
  if (kShares == 1 || place.row >= place.rows) return false;
  static_assert(kShares == 1 ||
                (kRowLanes >= 64 && kCount * kShareLanes <= 64 && kShareLanes <= 16));
  constexpr Word kIsThere = 1ul << 32;
  if (place.lane == 0) {
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      __hip_atomic_store(words + n * kShares + place.share, kIsThere | bits_of(x[n]),
                         __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  }
  const int of = place.lane % kShareLanes, n = place.lane % 64 / kShareLanes;
  words += (n < kCount ? n : 0) * kShares + (of < kShares ? of : 0);
  Word word;
  do word = __hip_atomic_load(words, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  while (!(word & kIsThere));
#pragma unroll
  for (int m = 0; m < kCount; ++m)
    x[m] = bits_as<float>(
        __builtin_amdgcn_ds_bpermute((m * kShareLanes + of) * 4, static_cast<int>(word)));
  return true;
}

// What lanes have to do with the parts of a row: one in every kLanes-th of them, with so many
// numbers, or none.
template <int kLanes>
struct Parts {
  float count;

  __device__ float sum(float x) const { return over_lanes<kLanes>(count > 0 ? x : 0, added); }
  template <class Larger>
  __device__ float largest(float x, const Larger& larger) const {
    return over_lanes<kLanes>(x, larger);
  }
};

// Those that waves have of a workgroup's share of a row, and those that workgroups have of it. Only
// means ask of how many numbers they are: other sums of no numbers are 0.
__device__ inline Parts<kWavesOfRow> waves_of(const Place& place) {
  return {kKind == Kind::layer_norm ? place.count_of_wave(place.lane % kWavesOfRow) : 1};
}
__device__ inline Parts<kShareLanes> shares_of(const Place& place) {
  const int share = place.lane % kShareLanes;
  return {share < kShares ? static_cast<float>(place.count(share)) : 0};
}
