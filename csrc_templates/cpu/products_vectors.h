// Forward's two products in vector registers: S^T = K Q^T and O^T = V^T P^T, a register block at a
// time. products_tile_unit.h has the same names.
#pragma once

#include "tiles.h"

namespace {

// Operands along the reduction of S^T = K Q^T, and what a row of it takes in scratch.
constexpr int kScoreDepth = depth_of(kHdimQ);
constexpr int kScoreDepthPadded = padded_depth_of(kHdimQ);

// Rows of O^T: computed in whole register blocks, stored in whole vectors.
constexpr int kOutputRows = round_up(kHdimV, kBlockRows);
constexpr int kOutputRowsPadded = round_up(kOutputRows, kLanes);

// Keys are staged, multiplied and masked in whole blocks of so many.
constexpr int kKeyBlock = kBlockRows;

// Wide heads get smaller tiles: all scratch of a query tile has to stay in the L2 cache.
constexpr bool kWideHead = kHdimQ + kHdimV > 512;
constexpr int kTileRows = (kWideHead ? 2 : 8) * kPanelLanes;
// They are in whole register blocks, and in whole pieces of packed pages.
constexpr int kTileKeys = round_up(kWideHead ? 64 : 128, common_multiple(2 * kBlockRows, 16));

constexpr int64_t kWantedTiles = 64;  // of queries, where there are enough rows
// Staging keys and values takes as long as the products of so many rows.
constexpr int64_t kStagingRows = 12;
// The cache that the next keys and values are brought into.
constexpr int kLevelAhead = 1;

constexpr int kOutputBlockRows = kBlockRows;  // that are computed at once

// What the products need of a thread for as long as it computes.
struct ProductUnit {};

struct StagedKeys {
  static constexpr int kStride = staged_stride(kScoreDepthPadded);
  float operands[kTileKeys * kStride];  // [key][operand]

  // From key `at` on, a multiple of kKeyBlock; row(j) is where the j-th of them starts.
  template <class Row>
  void stage(const Row& row, int at, int count) {
    stage_rows<kHdimQ, kStride>(row, count, operands + at * kStride);
  }
};

struct StagedValues {
  static constexpr int kStride = staged_stride(kOutputRowsPadded);
  float operands[kTileKeys * kStride];  // [key / kOperandElements][hdim]

  // `hdim_stride` is 1 unless keys are contiguous.
  template <class Row>
  void stage(const Row& row, int64_t hdim_stride, int at, int count) {
    float* to = operands + at / kOperandElements * kStride;
    if constexpr (kColumnMajorV)
      stage_column_major<kHdimV, kStride>(row(0), hdim_stride, count, to);
    else stage_columns<kHdimV, kStride>(row, count, to);
  }
};

// One panel's products.
template <int kVectors>
struct PanelProducts {
  static constexpr int kRows = kVectors * kLanes;
  // Whether dots leaves its results in the panel's scores.
  static constexpr bool kStoresDots = false;

  // Packs `count` rows from row(at) on, one in each lane.
  template <class Row>
  static void pack_queries(const Row& row, int at, int count, float* to) {
    pack_transposed<kHdimQ>(row, at, count, kRows, to);
  }

  // The dot products of the queries with kBlockRows keys from `key` on.
  static void dots(const float* queries, const StagedKeys& keys, int key, float*,
                   Vec (&block)[kBlockRows][kVectors]) {
    multiply_rows<kVectors, kScoreDepth, StagedKeys::kStride>(
        queries, keys.operands + key * StagedKeys::kStride, block);
  }

  // outputs = outputs * decay + probabilities of the keys [begin, end) * values. The sum over the
  // tile starts from zero: short sums added up lose less to rounding than one long sum.
  template <class Meanwhile>
  __attribute__((noinline)) static void accumulate(const float* probabilities,
                                                   const StagedValues& values, int begin, int end,
                                                   const Vec (&decay)[kVectors], float* outputs,
                                                   const Meanwhile& meanwhile) {
    probabilities += begin / kOperandElements * kRows;
    const float* scalars = values.operands + begin / kOperandElements * StagedValues::kStride;
    for (int d = 0; d < kOutputRows; d += kBlockRows) {
      meanwhile();
      Vec block[kBlockRows][kVectors];
      multiply_block<kVectors, 1, StagedValues::kStride>(probabilities, scalars + d,
                                                         (end - begin) / kOperandElements, block);
      float* out = outputs + d * kRows;
#pragma GCC unroll 16
      for (int r = 0; r < kBlockRows; ++r)
        for (int v = 0; v < kVectors; ++v, out += kLanes)
          simd::store(out, simd::mul_add(simd::load(out), decay[v], block[r][v]));
    }
  }
};

}  // namespace
