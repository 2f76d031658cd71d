// Gradients in the registers of one wave: those of 32 rows of its own, queries or keys, against
// tiles of 32 rows of the others. Everything is transposed, as in forward: a lane has one row of
// its own and 16 others, and probabilities in the accumulator are the next product's operand as
// they are. With `q` for rows of q or k, which make the scores, and `v` for those of dout or v:
//
//     S  = others' q x own q         dP = others' v x own v
//     dq += others' q^T x dS         dv += others' v^T x P
//
// where dq is the own rows' gradient, and dv that of own keys alone.
#pragma once

#include "attention.h"

// Calls multiply(n, operand n) and then also(n) for n below kCount, and reads operands ahead. In
// this order: left alone, the compiler would read each operand when it is needed.
template <int kCount, class Read, class Multiply, class Also>
__device__ inline void in_turn(Read read, Multiply multiply, Also also) {
  constexpr int kAhead = 8 / kProductsOfOperand;
  u32x4 ahead[kAhead];
#pragma unroll
  for (int n = 0; n < kAhead && n < kCount; ++n) ahead[n] = read(n);
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    multiply(n, ahead[n % kAhead]);
    if (n + kAhead < kCount) ahead[n % kAhead] = read(n + kAhead);
    also(n);
    __builtin_amdgcn_sched_barrier(0);
  }
}

// The part of kAll things that goes with number n of kCount: calls each(i) for them.
template <int kAll, int kCount, class Each>
__device__ inline void share(int n, Each each) {
#pragma unroll
  for (int i = n * kAll / kCount; i < (n + 1) * kAll / kCount; ++i) each(i);
}

// One tile on its way through the products.
struct TileScores {
  f32x16 score;                     // then the probability
  f32x16 product;                   // dP, the gradient of the probability
  u32x4 probability[2], dscore[2];  // operands of 16 others each
};

// QRows and VRows are tiles of the others' rows, QColumns and VColumns the same transposed.
template <class QRows, class VRows, class QColumns, class VColumns, class Dtype, Rounding kRounding,
          bool kMakesDq, bool kMakesDv>
struct WaveGradients {
  static constexpr int kQSteps = QRows::kSteps, kVSteps = kMakesDq ? VRows::kSteps : 1;
  static constexpr int kQBlocks = kMakesDq ? QColumns::kBlocks : 1;
  static constexpr int kVBlocks = kMakesDv ? VColumns::kBlocks : 1;

  u32x4 own_q[kQSteps], own_v[kVSteps];
  f32x16 dq[kQBlocks], dv[kVBlocks];

  __device__ void clear() {
#pragma unroll
    for (int block = 0; block < kQBlocks; ++block) dq[block] = f32x16(0);
#pragma unroll
    for (int block = 0; block < kVBlocks; ++block) dv[block] = f32x16(0);
  }

  // The scores of a tile; also(n) is called for n below kQSteps.
  template <class Also>
  __device__ void multiply_q(TileScores& tile, Lds<const char> q_rows, int lane, Also also) const {
    const Lds<const char> first = q_rows + QRows::first_operand(lane);
    f32x16& score = tile.score;
    score = f32x16(0);
    in_turn<kQSteps>([&](int n) { return QRows::operand(first, 0, n); },
                     [&](int n, u32x4 q) { score = Dtype::multiply(q, own_q[n], score); }, also);
  }

  // The gradients of the probabilities, and meanwhile pairs of these: two_probabilities(i) gives
  // those of scores i and i + 1, in place of which they are kept.
  template <class TwoProbabilities>
  __device__ void multiply_v(TileScores& tile, Lds<const char> v_rows, int lane,
                             TwoProbabilities two_probabilities) const {
    const auto make = [&](int pair) {
      const f32x2 p = two_probabilities(2 * pair);
      tile.score[2 * pair] = p.x;
      tile.score[2 * pair + 1] = p.y;
    };
    if constexpr (kMakesDq) {
      const Lds<const char> first = v_rows + VRows::first_operand(lane);
      f32x16& product = tile.product;
      product = f32x16(0);
      in_turn<kVSteps>([&](int n) { return VRows::operand(first, 0, n); },
                       [&](int n, u32x4 v) { product = Dtype::multiply(v, own_v[n], product); },
                       [&](int n) { share<8, kVSteps>(n, make); });
    } else {
      share<8, 1>(0, make);
    }
  }

  // Adds to dv, and meanwhile makes the gradients of the scores: two_kept(i) gives what is left of
  // probabilities i and i + 1, two_dscores(i) the gradients of their dot products.
  template <class TwoKept, class TwoDscores>
  __device__ void add_to_dv(TileScores& tile, Lds<const char> v_columns, int lane, TwoKept two_kept,
                            TwoDscores two_dscores) {
    const auto make = [&](int pair) {
      const f32x2 ds = two_dscores(2 * pair);
      tile.dscore[pair / 4][pair % 4] = Dtype::template pack<kRounding>(ds.x, ds.y);
    };
    if constexpr (kMakesDv) {
#pragma unroll
      for (int pair = 0; pair < 8; ++pair) {
        const f32x2 p = two_kept(2 * pair);
        tile.probability[pair / 4][pair % 4] = Dtype::template pack<kRounding>(p.x, p.y);
      }
      const Lds<const char> first = v_columns + VColumns::first_operand(lane);
      constexpr int kCount = 2 * kVBlocks;
      in_turn<kCount>([&](int n) { return VColumns::operand(first, n % kVBlocks, n / kVBlocks); },
                      [&](int n, u32x4 v) {
                        dv[n % kVBlocks] =
                            Dtype::multiply(v, tile.probability[n / kVBlocks], dv[n % kVBlocks]);
                      },
                      [&](int n) {
                        if constexpr (kMakesDq) share<8, kCount>(n, make);
                      });
    } else {
      share<8, 1>(0, make);
    }
  }

  __device__ void add_to_dq(const TileScores& tile, Lds<const char> q_columns, int lane) {
    if constexpr (kMakesDq) {
      const Lds<const char> first = q_columns + QColumns::first_operand(lane);
      in_turn<2 * kQBlocks>(
          [&](int n) { return QColumns::operand(first, n % kQBlocks, n / kQBlocks); },
          [&](int n, u32x4 q) {
            dq[n % kQBlocks] = Dtype::multiply(q, tile.dscore[n / kQBlocks], dq[n % kQBlocks]);
          },
          [](int) {});
    }
  }
};
