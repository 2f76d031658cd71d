// Forward's two products in the tile unit, for bf16: S^T = K Q^T and O^T = V^T P^T, with two tiles
// of keys, or of rows of O^T, times two tiles of queries. One load then feeds one product.
//
// Operands are pairs of bf16 numbers that follow each other along the reduction. K is that as it
// lies in memory, and so are the probabilities, once two keys' are rounded into one operand; V is
// transposed when it is staged.
#pragma once

#include "tile_unit.h"
#include "tiles.h"
#include "transposed_pairs.h"

namespace {

static_assert(kOperandElements == 2, "the tile unit multiplies pairs");

constexpr int kUnitRows = tile_unit::kMostRows;
constexpr int kUnitOperands = tile_unit::kMostRowBytes / 4;  // along the reduction

constexpr int kScoreDepth = round_up(depth_of(kHdimQ), kUnitOperands);
constexpr int kScoreDepthPadded = kScoreDepth;
constexpr int kOutputRows = round_up(kHdimV, kUnitRows);
constexpr int kOutputRowsPadded = kOutputRows;

// Two tiles of keys in the first product; one tile's depth in the second.
constexpr int kKeyBlock = 2 * kUnitRows;
static_assert(kKeyBlock == kOperandElements * kUnitOperands, "the same keys in both products");

// Products are so quick here that V's transposition counts, and shows in small query tiles. Wide
// heads get smaller ones: all scratch of a query tile has to stay in the L2 cache.
constexpr int kWidth = kHdimQ + kHdimV;
constexpr int kTileRows = (kWidth > 512 ? 4 : kWidth > 256 ? 8 : 16) * kPanelLanes;
constexpr int kTileKeys = kWidth > 512 ? 64 : kWidth > 256 ? 128 : 256;
constexpr int64_t kWantedTiles = 32;  // of queries, where there are enough rows
// Staging keys and values takes as long as the products of so many rows.
constexpr int64_t kStagingRows = 24;
// The cache that the next keys and values are brought into: they do not fit into L1, and would push
// operands out of it.
constexpr int kLevelAhead = 2;

constexpr int kOutputBlockRows = 2 * kUnitRows;  // that are computed at once, the last ones aside

// Tiles 0 to 3 are sums, [row][vector]; 4 and 5 have rows of K or of V^T, 6 and 7 have columns, a
// vector each.
class ProductUnit : tile_unit::Configured {
 public:
  ProductUnit() : Configured(kShapes) {}

 private:
  static constexpr int kRowBytes = tile_unit::kMostRowBytes;
  static constexpr int kVectorBytes = 4 * kLanes;
  static constexpr tile_unit::Shapes kShapes = {
      {kUnitRows, kUnitRows, kUnitRows, kUnitRows, kUnitRows, kUnitRows, kUnitOperands,
       kUnitOperands},
      {kVectorBytes, kVectorBytes, kVectorBytes, kVectorBytes, kRowBytes, kRowBytes, kVectorBytes,
       kVectorBytes}};
};

struct StagedKeys {
  static constexpr int kStride = staged_stride(kScoreDepth);
  float operands[kTileKeys * kStride];  // [key][operand]

  // From key `at` on, a multiple of kKeyBlock; row(j) is where the j-th of them starts. What is
  // left from earlier keys in the rest of the last block is masked, as no query sees keys behind
  // the last one.
  template <class Row>
  void stage(const Row& row, int at, int count) {
    stage_rows<kHdimQ, kStride>(row, count, operands + at * kStride);
  }
};

struct StagedValues {
  static constexpr int kStride = staged_stride(kTileKeys / kOperandElements);
  float operands[kOutputRows * kStride];  // [hdim][key / kOperandElements]

  // Rows are contiguous here: there is no kernel of the tile unit for values whose keys are.
  template <class Row>
  void stage(const Row& row, int64_t, int at, int count) {
    static_assert(!kColumnMajorV, "rows are contiguous");
    stage_transposed_pairs<KeyDtype, kHdimV, kStride, kKeyBlock>(row, count,
                                                                 operands + at / kOperandElements);
  }
};

// The sums over `depth` operands of kRowTiles tiles of rows, `row_stride` operands apart, times
// kVectors vectors of columns, [operand][vector][lane]; to[row][vector][lane].
template <int kRowTiles, int kVectors>
inline void multiply_tiles(const float* rows, int row_stride, const float* columns, int depth,
                           float* to) {
  constexpr bool kTwoRows = kRowTiles == 2, kTwoVectors = kVectors == 2;
  constexpr int64_t kColumnBytes = 4 * kVectors * kLanes;
  const int64_t row_bytes = 4 * row_stride;
  const float* more_rows = rows + kUnitRows * row_stride;
  tile_unit::zero<0>();
  if (kTwoVectors) tile_unit::zero<1>();
  if (kTwoRows) tile_unit::zero<2>();
  if (kTwoRows && kTwoVectors) tile_unit::zero<3>();
  for (int s = 0; s < depth; s += kUnitOperands) {
    tile_unit::load<6>(columns, kColumnBytes);
    tile_unit::load<4>(rows + s, row_bytes);
    tile_unit::add_bf16_products<0, 4, 6>();
    if (kTwoVectors) {
      tile_unit::load<7>(columns + kLanes, kColumnBytes);
      tile_unit::add_bf16_products<1, 4, 7>();
    }
    if (kTwoRows) {
      tile_unit::load<5>(more_rows + s, row_bytes);
      tile_unit::add_bf16_products<2, 5, 6>();
      if (kTwoVectors) tile_unit::add_bf16_products<3, 5, 7>();
    }
    columns += kUnitOperands * kVectors * kLanes;
  }
  float* more = to + kUnitRows * kVectors * kLanes;
  tile_unit::store<0>(to, kColumnBytes);
  if (kTwoVectors) tile_unit::store<1>(to + kLanes, kColumnBytes);
  if (kTwoRows) tile_unit::store<2>(more, kColumnBytes);
  if (kTwoRows && kTwoVectors) tile_unit::store<3>(more + kLanes, kColumnBytes);
}

// One panel's products.
template <int kVectors>
struct PanelProducts {
  static constexpr int kRows = kVectors * kLanes;
  // Whether dots leaves its results in the panel's scores.
  static constexpr bool kStoresDots = true;

  // Packs `count` rows from row(at) on, one in each lane. The rest of the last tile becomes 0, as
  // it may hold what an earlier panel of another width left.
  template <class Row>
  static void pack_queries(const Row& row, int at, int count, float* to) {
    pack_transposed<kHdimQ>(row, at, count, kRows, to);
    fill(to + padded_depth_of(kHdimQ) * kRows, (kScoreDepth - padded_depth_of(kHdimQ)) * kRows,
         0.0f);
  }

  // Queries of few operands stay in tiles, each depth's in a pair, while they are multiplied with
  // keys: it is loads that products wait for. `hold` comes before the first `multiply`.
  static constexpr bool kHoldsQueries = kScoreDepth <= 2 * kUnitOperands;
  static constexpr bool kTwoVectors = kVectors == 2, kTwoDepths = kScoreDepth > kUnitOperands;
  static constexpr int64_t kColumnBytes = 4 * kRows;

  static void hold(const float* queries) {
    if (!kHoldsQueries) return;
    const float* deep = queries + kUnitOperands * kRows;
    tile_unit::load<6>(queries, kColumnBytes);
    if (kTwoVectors) tile_unit::load<7>(queries + kLanes, kColumnBytes);
    if (kTwoDepths) tile_unit::load<2>(deep, kColumnBytes);
    if (kTwoDepths && kTwoVectors) tile_unit::load<3>(deep + kLanes, kColumnBytes);
  }

  // The dot products of the queries with kKeyBlock keys from `key` on.
  static void multiply(const float* queries, const StagedKeys& keys, int key, float* to) {
    constexpr int64_t kRowBytes = 4 * StagedKeys::kStride;
    const float* rows = keys.operands + key * StagedKeys::kStride;
    if (!kHoldsQueries)
      return multiply_tiles<2, kVectors>(rows, StagedKeys::kStride, queries, kScoreDepth, to);
    for (int i = 0; i < kKeyBlock; i += kUnitRows) {
      tile_unit::zero<0>();
      if (kTwoVectors) tile_unit::zero<1>();
      tile_unit::load<4>(rows + i * StagedKeys::kStride, kRowBytes);
      tile_unit::add_bf16_products<0, 4, 6>();
      if (kTwoVectors) tile_unit::add_bf16_products<1, 4, 7>();
      if (kTwoDepths) {
        tile_unit::load<5>(rows + i * StagedKeys::kStride + kUnitOperands, kRowBytes);
        tile_unit::add_bf16_products<0, 5, 2>();
        if (kTwoVectors) tile_unit::add_bf16_products<1, 5, 3>();
      }
      tile_unit::store<0>(to + i * kRows, kColumnBytes);
      if (kTwoVectors) tile_unit::store<1>(to + i * kRows + kLanes, kColumnBytes);
    }
  }

  // Those with kBlockRows keys, from where they are.
  static void dots(const float*, const StagedKeys&, int, const float* from,
                   Vec (&block)[kBlockRows][kVectors]) {
    for (int r = 0; r < kBlockRows; ++r)
      for (int v = 0; v < kVectors; ++v)
        block[r][v] = simd::load(from + (r * kVectors + v) * kLanes);
  }

  // outputs = outputs * decay + probabilities of the keys [begin, end) * values. The sum over the
  // tile starts from zero: short sums added up lose less to rounding than one long sum.
  template <class Meanwhile>
  static void accumulate(const float* probabilities, const StagedValues& values, int begin, int end,
                         const Vec (&decay)[kVectors], float* outputs, const Meanwhile& meanwhile) {
    probabilities += begin / kOperandElements * kRows;
    const float* rows = values.operands + begin / kOperandElements;
    const int depth = (end - begin) / kOperandElements;
    constexpr int kPairs = kOutputRows / (2 * kUnitRows);
    alignas(64) float sums[2 * kUnitRows * kRows];
    const auto add = [&](int count) {
      for (int i = 0; i < count * kUnitRows * kRows; i += kRows)
        for (int v = 0; v < kVectors; ++v) {
          float* out = outputs + i + v * kLanes;
          simd::store(out,
                      simd::mul_add(simd::load(out), decay[v], simd::load(sums + i + v * kLanes)));
        }
      outputs += count * kUnitRows * kRows;
    };
    for (int i = 0; i < kPairs; ++i, rows += 2 * kUnitRows * StagedValues::kStride) {
      meanwhile();
      multiply_tiles<2, kVectors>(rows, StagedValues::kStride, probabilities, depth, sums);
      add(2);
    }
    if (kOutputRows % (2 * kUnitRows) != 0) {
      multiply_tiles<1, kVectors>(rows, StagedValues::kStride, probabilities, depth, sums);
      add(1);
    }
  }
};

}  // namespace
