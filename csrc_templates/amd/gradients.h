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

// Operands from LDS: read(n) reads one of kEnd, and a few are read ahead of the products that take
// them. The order is enforced: left alone, the compiler would read each when it is needed.
template <int kEnd, class Read>
struct Operands {
  static constexpr int kAhead = 4;
  Read read;
  u32x4 ahead[kAhead];

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

template <int kEnd, class Read>
__device__ inline Operands<kEnd, Read> operands(Read read) {
  return Operands<kEnd, Read>(read);
}

// Divides kAll things among kCount places, and calls each(i) for those of place n.
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

  // First the scores of a tile, and meanwhile also(n) for n below kQSteps; then modify_scores();
  // then dP, and meanwhile the probabilities: two_probabilities(i) gives those of scores i and
  // i + 1, in place of which they are kept, and two_kept(i) what dropout leaves of them.
  template <class Also, class ModifyScores, class TwoProbabilities, class TwoKept>
  __device__ void multiply_rows(TileScores& tile, Lds<const char> q_rows, Lds<const char> v_rows,
                                int lane, Also also, ModifyScores modify_scores,
                                TwoProbabilities two_probabilities, TwoKept two_kept) const {
    const Lds<const char> first_q = q_rows + QRows::first_operand(lane);
    const Lds<const char> first_v = v_rows + VRows::first_operand(lane);
    const auto make_pair = [&](int pair) {
      const f32x2 p = two_probabilities(2 * pair);
      tile.score[2 * pair] = p.x;
      tile.score[2 * pair + 1] = p.y;
      if constexpr (kMakesDv) {
        const f32x2 kept = two_kept(2 * pair);
        tile.probability[pair / 4][pair % 4] = Dtype::template pack<kRounding>(kept.x, kept.y);
      }
    };
    tile.score = f32x16(0);
    tile.product = f32x16(0);
    auto rows = operands<kQSteps + (kMakesDq ? kVSteps : 0)>([&](int n) {
      return n < kQSteps ? QRows::operand(first_q, 0, n) : VRows::operand(first_v, 0, n - kQSteps);
    });
    rows.template in_turn<0, kQSteps>(
        [&](int n, u32x4 q) { tile.score = Dtype::multiply(q, own_q[n], tile.score); }, also);
    modify_scores();
    if constexpr (kMakesDq) {
      rows.template in_turn<kQSteps, kQSteps + kVSteps>(
          [&](int n, u32x4 v) {
            tile.product = Dtype::multiply(v, own_v[n - kQSteps], tile.product);
          },
          [&](int n) { share<8, kVSteps>(n - kQSteps, make_pair); });
    } else {
      share<8, 1>(0, make_pair);
    }
  }

  // Adds the tile's part to dv, and meanwhile makes the gradients of the scores: two_dscores(i)
  // gives those of dot products i and i + 1. Then to dq; also(n) is called for n below kSums.
  static constexpr int kSums = (kMakesDv ? 2 * kVBlocks : 0) + (kMakesDq ? 2 * kQBlocks : 0);
  template <class Also, class TwoDscores>
  __device__ void add_columns(TileScores& tile, Lds<const char> q_columns,
                              Lds<const char> v_columns, int lane, Also also,
                              TwoDscores two_dscores) {
    constexpr int kOfDv = kMakesDv ? 2 * kVBlocks : 0;
    const Lds<const char> first_q = q_columns + QColumns::first_operand(lane);
    const Lds<const char> first_v = v_columns + VColumns::first_operand(lane);
    const auto make_pair = [&](int pair) {
      const f32x2 ds = two_dscores(2 * pair);
      tile.dscore[pair / 4][pair % 4] = Dtype::template pack<kRounding>(ds.x, ds.y);
    };
    auto columns = operands<kSums>([&](int n) {
      if (n < kOfDv) return VColumns::operand(first_v, n % kVBlocks, n / kVBlocks);
      n -= kOfDv;
      return QColumns::operand(first_q, n % kQBlocks, n / kQBlocks);
    });
    if constexpr (kMakesDv) {
      columns.template in_turn<0, kOfDv>(
          [&](int n, u32x4 v) {
            f32x16& sum = dv[n % kVBlocks];
            sum = Dtype::multiply(v, tile.probability[n / kVBlocks], sum);
          },
          [&](int n) {
            also(n);
            if constexpr (kMakesDq) share<8, kOfDv>(n, make_pair);
          });
    } else {
      share<8, 1>(0, make_pair);
    }
    if constexpr (kMakesDq) {
      columns.template in_turn<kOfDv, kSums>(
          [&](int n, u32x4 q) {
            f32x16& sum = dq[(n - kOfDv) % kQBlocks];
            sum = Dtype::multiply(q, tile.dscore[(n - kOfDv) / kQBlocks], sum);
          },
          also);
    }
  }
};
