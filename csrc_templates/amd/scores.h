// Which keys a query sees, and what happens to a score between Q K^T and the softmax: scale, soft
// cap, bias, ALiBi and mask, in this order. A feature stands here alone, is compiled in by a trait,
// and costs a call without it nothing.
//
// Included after Arguments, Modifiers and the traits.
#pragma once

#include "attention.h"
#include "workgroups.h"

constexpr int kTileKeys = 32;
constexpr float kLog2e = 1.4426950408889634f;

__device__ inline int larger(int a, int b) { return a < b ? b : a; }

struct KeyRange {
  int begin, last;
};

// The key tiles that rows see: first those with sink tokens, then those from the window's on.
struct KeyTiles {
  int count;
  int with_sinks, skipped;  // how many tiles lie before and in the gap

  __device__ int at(int i) const { return i < with_sinks ? i : i + skipped; }
};

// The keys that each query of a sequence sees.
struct Visibility {
  int seqlen_k;
  int diagonal;  // the key that lies on the diagonal with query 0
  int left, right;
  int sink_size;  // the first keys that a window's left side does not hide

  __device__ static Visibility of(const Modifiers& m, const Sequence& sequence) {
    return {sequence.seqlen_k, m.is_bottom_right ? sequence.seqlen_k - sequence.seqlen_q : 0,
            m.window_left, m.window_right, 0};
  }

  // Without the sink tokens.
  __device__ KeyRange keys_of(int row) const {
    if (!kIsMasked) return {0, seqlen_k - 1};
    return {larger(row + diagonal - left, 0), smaller(row + diagonal + right, seqlen_k - 1)};
  }

  // The tiles that any of these rows sees.
  __device__ KeyTiles tiles_of_rows(int first_row, int last_row) const {
    const KeyRange first = keys_of(first_row), last = keys_of(last_row);
    if (last.last < 0) return {0, 0, 0};
    const int begin = first.begin / kTileKeys, end = last.last / kTileKeys + 1;
    const int with_sinks = smaller(tiles_of(sink_size, kTileKeys), end);
    const int skipped = larger(begin - with_sinks, 0);
    return {with_sinks + larger(end - with_sinks - skipped, 0), with_sinks, skipped};
  }

  // Whether none of 32 rows sees a tile, or all of them see all of it.
  __device__ bool is_hidden(int first_row, int first_key) const {
    const KeyRange first = keys_of(first_row), last = keys_of(first_row + 31);
    return kIsMasked && (first_key > last.last ||
                         (first_key + kTileKeys <= first.begin && first_key >= sink_size));
  }
  __device__ bool is_whole(int first_row, int first_key) const {
    const KeyRange first = keys_of(first_row), last = keys_of(first_row + 31);
    return first_key >= last.begin && first_key + kTileKeys - 1 <= first.last;
  }
};

// A lane's score i is that of this key of the tile.
__device__ inline int key_of_score(int i, int lane) { return i / 4 * 8 + i % 4 + 4 * (lane / 32); }

// Hides what a row does not see.
__device__ inline void hide(f32x16& score, const Visibility& visibility, int row, int first_key,
                            int lane) {
  const KeyRange seen = visibility.keys_of(row);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int key = first_key + key_of_score(i, lane);
    bool is_seen = key <= seen.last;
    if (kIsMasked) is_seen &= key >= seen.begin || key < visibility.sink_size;
    score[i] = is_seen ? score[i] : -kInfinity;
  }
}
