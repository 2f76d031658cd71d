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
#include "elements.h"
#include "streamed_rows.h"

// Divides kAll things among kCount places, and calls each(i) for those of place n.
template <int kAll, int kCount, class Each>
__device__ inline void share(int n, Each each) {
#pragma unroll
  for (int i = n * kAll / kCount; i < (n + 1) * kAll / kCount; ++i) each(i);
}

// Numbers of a lane's 16 others as operands.
template <class Dtype, Rounding kRounding>
struct OthersOperands {
  static constexpr int kSteps = 32 / Dtype::kDepth;
  u32x4 step[kSteps];

  // Those of others 2 * n and on.
  __device__ void set_pair(int n, f32x2 pair) {
    if constexpr (Dtype::kBytes == 4) {
      step[n / 2][n % 2 * 2] = bits_of(pair.x);
      step[n / 2][n % 2 * 2 + 1] = bits_of(pair.y);
    } else {
      step[n / 4][n % 4] = Dtype::template pack<kRounding>(pair.x, pair.y);
    }
  }
};

// One tile on its way through the products.
template <class Operands>
struct TileScores {
  f32x16 score;    // then the probability
  f32x16 product;  // dP, the gradient of the probability
  Operands probability, dscore;
};

// What the scores, or dP, are made of: a tile of the others' rows in LDS, and own rows in
// registers.
template <class Tile, class Dtype, int kSteps>
struct HeldRows {
  static constexpr int kAhead = 4;
  Lds<const char> first;
  const u32x4 (&own)[kSteps];

  __device__ HeldRows(Lds<const char> tile, const u32x4 (&own)[kSteps], int lane)
      : first(tile + Tile::first_operand(lane)), own(own) {}
  __device__ u32x4 read(int step) const { return Tile::operand(first, 0, step); }
  __device__ f32x16 multiply(int step, u32x4 other, f32x16 c) const {
    return Dtype::multiply(other, own[step], c);
  }
};

// QColumns and VColumns are tiles of the others' rows, transposed; kQSteps and kVSteps are operands
// of a row. Where own rows are held, they are in registers throughout.
template <int kQSteps, int kVSteps, class QColumns, class VColumns, class Dtype, Rounding kRounding,
          bool kMakesDq, bool kMakesDv, bool kHoldsRows>
struct WaveGradients {
  static constexpr bool kSumsParts = PartialSums<Dtype>::kHasParts;
  using Others = OthersOperands<Dtype, kRounding>;
  using Tile = TileScores<Others>;
  static constexpr int kSteps = Others::kSteps;
  static constexpr int kQBlocks = kMakesDq ? QColumns::kBlocks : 1;
  static constexpr int kVBlocks = kMakesDv ? VColumns::kBlocks : 1;

  u32x4 own_q[kHoldsRows ? kQSteps : 1], own_v[kHoldsRows && kMakesDq ? kVSteps : 1];
  f32x16 dq[kQBlocks], dv[kVBlocks];

  __device__ void clear() {
#pragma unroll
    for (int block = 0; block < kQBlocks; ++block) dq[block] = f32x16(0);
#pragma unroll
    for (int block = 0; block < kVBlocks; ++block) dv[block] = f32x16(0);
  }

  // First the scores of a tile, made of `q`, and meanwhile also(n) for n below kQSteps; then
  // modify_scores(); then dP, made of `v`, and meanwhile the probabilities: two_probabilities(i)
  // gives those of scores i and i + 1, in place of which they are kept, and two_kept(i) what
  // dropout leaves of them.
  template <class QRows, class VRows, class Also, class ModifyScores, class TwoProbabilities,
            class TwoKept>
  __device__ void multiply_rows(Tile& tile, const QRows& q, const VRows& v, Also also,
                                ModifyScores modify_scores, TwoProbabilities two_probabilities,
                                TwoKept two_kept) const {
    const auto make_pair = [&](int pair) {
      const f32x2 p = two_probabilities(2 * pair);
      tile.score[2 * pair] = p.x;
      tile.score[2 * pair + 1] = p.y;
      if constexpr (kMakesDv) tile.probability.set_pair(pair, two_kept(2 * pair));
    };
    tile.score = f32x16(0);
    tile.product = f32x16(0);
    PartialSums<Dtype> sums;
    auto rows = operands_read_by<kQSteps + (kMakesDq ? kVSteps : 0), QRows::kAhead>(
        [&](int n) { return n < kQSteps ? q.read(n) : v.read(n - kQSteps); });
    rows.template in_turn<0, kQSteps>(
        [&](int n, auto operand) {
          tile.score = q.multiply(n, operand, tile.score);
          sums.template add<kQSteps>(tile.score, n);
        },
        also);
    modify_scores();
    if constexpr (kMakesDq) {
      rows.template in_turn<kQSteps, kQSteps + kVSteps>(
          [&](int n, auto operand) {
            n -= kQSteps;
            tile.product = v.multiply(n, operand, tile.product);
            sums.template add<kVSteps>(tile.product, n);
          },
          [&](int n) { share<8, kVSteps>(n - kQSteps, make_pair); });
    } else {
      share<8, 1>(0, make_pair);
    }
  }

  // Adds the tile's part to dv, and meanwhile makes the gradients of the scores: two_dscores(i)
  // gives those of dot products i and i + 1. Then to dq; also(n) is called for n below kSums.
  static constexpr int kSums =
      (kMakesDv ? kSteps * kVBlocks : 0) + (kMakesDq ? kSteps * kQBlocks : 0);
  template <class Also, class TwoDscores>
  __device__ void add_columns(Tile& tile, Lds<const char> q_columns, Lds<const char> v_columns,
                              int lane, Also also, TwoDscores two_dscores) {
    constexpr int kOfDv = kMakesDv ? kSteps * kVBlocks : 0;
    const Lds<const char> first_q = q_columns + QColumns::first_operand(lane);
    const Lds<const char> first_v = v_columns + VColumns::first_operand(lane);
    const auto make_pair = [&](int pair) { tile.dscore.set_pair(pair, two_dscores(2 * pair)); };
    const auto block_of = [](int n, int blocks) { return kSumsParts ? n / kSteps : n % blocks; };
    const auto step_of = [](int n, int blocks) { return kSumsParts ? n % kSteps : n / blocks; };
    f32x16 of_tile;
    const auto add = [&](f32x16& sum, int step, u32x4 column, const Others& others) {
      if constexpr (kSumsParts) {
        of_tile = Dtype::multiply(column, others.step[step], step == 0 ? f32x16(0) : of_tile);
        if (step == kSteps - 1) sum += of_tile;
      } else {
        sum = Dtype::multiply(column, others.step[step], sum);
      }
    };
    auto columns = operands_read_by<kSums, 4>([&](int n) {
      if (n < kOfDv) return VColumns::operand(first_v, block_of(n, kVBlocks), step_of(n, kVBlocks));
      n -= kOfDv;
      return QColumns::operand(first_q, block_of(n, kQBlocks), step_of(n, kQBlocks));
    });
    if constexpr (kMakesDv) {
      columns.template in_turn<0, kOfDv>(
          [&](int n, u32x4 v) {
            add(dv[block_of(n, kVBlocks)], step_of(n, kVBlocks), v, tile.probability);
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
            n -= kOfDv;
            add(dq[block_of(n, kQBlocks)], step_of(n, kQBlocks), q, tile.dscore);
          },
          also);
    }
  }
};
