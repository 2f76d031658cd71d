// few_rows_vectors.h in the tile unit, which multiplies rows of keys and values as they lie.
//
// Scores are sums[key][query]: a tile has pieces of 16 keys, and is multiplied with pairs of the
// queries. Outputs are sums[row][pair of columns]: there a tile has pieces of 16 values, each a row
// of pairs, and a pair counts as neighbours along the reduction. So each row of probabilities is
// there twice, before a zero for the first columns of pairs, and behind one for the second ones.
// What is not finite in a value makes NaN of the column beside it, and such sums are made anew.
#pragma once

#include <cstring>
#include <type_traits>

#include "few_rows_operands.h"
#include "in_place.h"

namespace {

constexpr int kStepTiles = 4;  // of rows: each has sums of its own
constexpr int kFewKeys = kStepTiles * kUnitRows;
constexpr int kFewKeysUnit = kUnitRows;
// Two rows of a tile for each.
constexpr int kRowsAtOnce = min(kUnitRows / 2, kLanes);
constexpr int kTileColumns = 2 * kLanes;  // of values
constexpr int kMostTileElements = 2 * max(kLanes, kUnitOperands);
constexpr int64_t kSumBytes = 4 * kLanes;

// Operands of queries, [operand][query].
struct Queries {
  static constexpr int kStride = kScoreDepth * kLanes;  // of a block of rows, for each of them

  template <class Row>
  static void load(const Row& row, int at, int rows, float* to) {
    PanelProducts<1>::pack_queries(row, at, rows, to);
  }
};

using FewRowsUnit = ProductUnit;
struct FewRowsRoom {
  KeyElement copies[kStepTiles][kUnitRows * kMostTileElements];  // of tiles that are not in place
  // [row][key]: probabilities, each of them with a zero behind it, then with a zero before it
  float factors[kStepTiles][kUnitRows * kUnitOperands];
};

// Tiles of kElements elements of each of some rows.
template <int kHdim, int kElements>
class TilesInPlace {
 public:
  TilesInPlace(const InPlace& row, int count) : row_(row), count_(count) {
    for (int first = 0; first < count; first += kUnitRows) {
      const bool is_in_place = first + kUnitRows <= count && row.lies_in_strides(first, kUnitRows);
      from_[first / kUnitRows] = is_in_place ? row(first) : nullptr;
    }
  }

  int count() const { return (count_ + kUnitRows - 1) / kUnitRows; }

  // Loads the elements from `d` on. Zeros stand behind the last row, and behind its elements.
  template <int kTile>
  void load(int tile, int d, FewRowsRoom& room) const {
    if (from_[tile] && (kHdim % kElements == 0 || d + kElements <= kHdim))
      return tile_unit::load<kTile>(from_[tile] + d, row_.rows.strides.seq * sizeof(KeyElement));
    KeyElement* copy = room.copies[tile];
    const int rows = min(count_ - tile * kUnitRows, kUnitRows);
    const int elements = min(kHdim - d, kElements);
    fill(copy, kUnitRows * kElements, KeyElement(0));
    for (int i = 0; i < rows; ++i)
      std::memcpy(copy + i * kElements, row_(tile * kUnitRows + i) + d,
                  elements * sizeof(KeyElement));
    tile_unit::load<kTile>(copy, kElements * sizeof(KeyElement));
  }

 private:
  const InPlace& row_;
  int count_;
  const KeyElement* from_[kStepTiles];
};

// Calls visit(number as a type) for the numbers below kStepTiles.
template <class Visit>
inline void for_each_sum(const Visit& visit) {
  static_assert(kStepTiles == 4, "all of them");
  visit(std::integral_constant<int, 0>{});
  visit(std::integral_constant<int, 1>{});
  visit(std::integral_constant<int, 2>{});
  visit(std::integral_constant<int, 3>{});
}

template <int kScoreStride, class Meanwhile>
__attribute__((noinline)) void multiply_in_place(int row_count, const float* queries,
                                                 const KeysInPlace& key, int count, float* scores,
                                                 FewRowsRoom& room, const Meanwhile& meanwhile) {
  constexpr int kElements = 2 * kUnitOperands;
  const TilesInPlace<kHdimQ, kElements> tiles(key, count);
  auto ask = in_turns(count, tiles.count() * kScoreDepth / kUnitOperands, meanwhile);
  for_each_sum([](auto t) { tile_unit::zero<t>(); });
  for (int d = 0; d < kHdimQ; d += kElements) {
    tile_unit::load<6>(queries + d / 2 * kLanes, kSumBytes);
    for_each_sum([&](auto t) {
      if (t >= tiles.count()) return;
      ask();
      tiles.template load<4 + t % 2>(t, d, room);
      tile_unit::add_bf16_products<t, 4 + t % 2, 6>();
    });
  }
  alignas(64) float sums[kFewKeys * kLanes];
  for_each_sum([&](auto t) { tile_unit::store<t>(sums + t * kUnitRows * kLanes, kSumBytes); });
  for (int first = 0; first < count; first += kLanes) {
    Vec block[kLanes];
    for (int i = 0; i < kLanes; ++i) block[i] = simd::load(sums + (first + i) * kLanes);
    simd::transpose(block);
    for (int r = 0; r < row_count; ++r) simd::store(scores + r * kScoreStride + first, block[r]);
  }
}

// sums[d] = the sum over `count` keys of probabilities[key] * value(key)[d]
__attribute__((noinline)) inline void sum_up_values(const float* probabilities,
                                                    const ValuesInPlace& value, int count,
                                                    float* sums) {
  for (int d = 0; d < kHdimV; d += kLanes) {
    Vec sum = simd::broadcast(0.0f);
    for (int key = 0; key < count; ++key) {
      KeyElement edge[kLanes];
      const Vec elements = KeyDtype::load(readable<kHdimV>(value(key), d, edge));
      sum = simd::mul_add(simd::broadcast(probabilities[key]), elements, sum);
    }
    simd::store(sums + d, sum);
  }
}

template <int kScoreStride, int kOutputStride, class Meanwhile>
__attribute__((noinline)) void accumulate_in_place(int row_count, float* probabilities,
                                                   const ValuesInPlace& value, int count,
                                                   const float* decay, float* outputs,
                                                   FewRowsRoom& room, const Meanwhile& meanwhile) {
  const TilesInPlace<kHdimV, kTileColumns> tiles(value, count);
  const Vec zero = simd::broadcast(0.0f);
  for (int r = 0; r < row_count; ++r) {
    float* row = probabilities + r * kScoreStride;
    fill(row + count, tiles.count() * kUnitRows - count, 0.0f);
    for (int key = 0; key < tiles.count() * kUnitRows; key += kLanes) {
      const Vec of_keys = simd::load(row + key);
      float* to = room.factors[key / kUnitRows] + r * kUnitOperands + key % kUnitRows;
      simd::store(to, simd::round_to_pairs(of_keys, zero));
      simd::store(to + kUnitRows / 2 * kUnitOperands, simd::round_to_pairs(zero, of_keys));
    }
  }

  constexpr int kBlocks = (kHdimV + kTileColumns - 1) / kTileColumns;
  auto ask = in_turns(count, kBlocks * tiles.count(), meanwhile);
  alignas(64) float of_tiles[kUnitRows * kLanes];
  float sums[kRowsAtOnce][kBlocks * kTileColumns];
  for (int first = 0; first < kHdimV; first += kStepTiles * kTileColumns) {
    for_each_sum([](auto t) { tile_unit::zero<t>(); });
    for (int tile = 0; tile < tiles.count(); ++tile) {
      tile_unit::load<4>(room.factors[tile], 4 * kUnitOperands);
      for_each_sum([&](auto t) {
        if (first + t * kTileColumns >= kHdimV) return;
        ask();
        tiles.template load<6 + t % 2>(tile, first + t * kTileColumns, room);
        tile_unit::add_bf16_products<t, 4, 6 + t % 2>();
      });
    }
    for_each_sum([&](auto t) {
      if (first + t * kTileColumns >= kHdimV) return;
      tile_unit::store<t>(of_tiles, kSumBytes);
      const float* of_second = of_tiles + kUnitRows / 2 * kLanes;
      for (int r = 0; r < row_count; ++r)
        simd::interleave(simd::load(of_tiles + r * kLanes), simd::load(of_second + r * kLanes),
                         sums[r] + first + t * kTileColumns);
    });
  }
  for (int r = 0; r < row_count; ++r) {
    Vec zeros = zero;  // or NaN
    for (int d = 0; d < kBlocks * kTileColumns; d += kLanes)
      zeros = simd::mul_add(simd::load(sums[r] + d), zero, zeros);
    if (simd::sum_lanes(zeros) != 0)
      sum_up_values(probabilities + r * kScoreStride, value, count, sums[r]);
  }
  add_to_outputs<kOutputStride>(sums, row_count, decay, outputs);
}

}  // namespace
