// What a split of the keys leaves where all waves have the same rows, in blocks of 16: the output
// in fours of columns that follow each other, of all lanes together, and of each row its maximum
// and its sum.
//
// Included after kBlockFours, how many fours a block has.
#pragma once

constexpr int kTileFours = kRowBlocks * kBlockFours;
constexpr int kFourFloats = 4 * 64, kBlockFloats = 2 * 16;  // of a four, and of a block's rows
constexpr int kResultFloats = kTileFours * kFourFloats + kRowBlocks * kBlockFloats;
#include "forward_tasks.h"

// What all splits of a tile leave. The same of each of them lies side by side, in steps for which
// loads need no addresses of their own.
struct SplitsOfTile {
  Global<float> results;  // null where keys are not split
  int count;

  // Of the first split.
  __device__ Global<float> four(int n) const { return results + n * count * kFourFloats; }
  __device__ Global<float> rows(int block) const {
    return four(kTileFours) + block * count * kBlockFloats;
  }
};
