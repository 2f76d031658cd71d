// Operands on their way to matrix products: from LDS, or from memory where rows are so wide that
// registers and LDS have no room for them.
#pragma once

#include "number_formats.h"

// Operands of products: read(n) reads one of kEnd, and a few are read ahead of the products that
// take them. The order is enforced: left alone, the compiler would read each when it is needed.
template <int kEnd, int kAhead, class Read>
struct Operands {
  Read read;
  decltype(read(0)) ahead[kAhead];

  __device__ explicit Operands(Read read) : read(read) {
#pragma unroll
    for (int n = 0; n < kAhead && n < kEnd; ++n) ahead[n] = read(n);
  }

  // Calls multiply(n, operand n) and then also(n) for n from kFirst to kLast - 1.
  template <int kFirst, int kLast, class Multiply, class Also>
  __device__ void in_turn(Multiply multiply, Also also) {
#pragma unroll
    for (int n = kFirst; n < kLast; ++n) {
      multiply(n, ahead[n % kAhead]);
      if (n + kAhead < kEnd) ahead[n % kAhead] = read(n + kAhead);
      also(n);
      __builtin_amdgcn_sched_barrier(0);
    }
  }
};

template <int kEnd, int kAhead, class Read>
__device__ inline Operands<kEnd, kAhead, Read> operands_read_by(Read read) {
  return Operands<kEnd, kAhead, Read>(read);
}

struct OperandPair {
  u32x4 other, own;
};

// Products of 32-bit numbers take long, in which loads come.
template <class Dtype>
constexpr int kStreamedAhead = Dtype::kBytes == 4 ? 4 : 8;

// What products take of rows that come from memory, through its caches, both the others and own
// ones: Other and Own give a lane's operand of a step.
template <class Dtype, class Other, class Own>
struct StreamedRows {
  static constexpr int kAhead = kStreamedAhead<Dtype>;
  Other other;
  Own own;

  __device__ OperandPair read(int step) const { return {other(step), own(step)}; }
  __device__ f32x16 multiply(int, const OperandPair& pair, f32x16 c) const {
    return Dtype::multiply(pair.other, pair.own, c);
  }
};

// The row of a tile of 32 whose score with other rows is in row lane % 32 of a product: of a row of
// KeyRowTile it is what row_of() says.
__device__ inline int row_of_product(int lane) {
  return lane % 32 / 4 % 2 * 16 + lane % 32 / 8 * 4 + lane % 4;
}
