// Products of a few rows with keys and values that are read where they lie, once for all rows.
// few_rows_tile_unit.h has the same names, and few_rows_packed_*.h for packed pages.
//
// In panels of so few rows most lanes would be empty. Here lanes hold elements of a head: a vector
// of a key or a value meets all rows while it is in a register, and nothing is staged. What a row's
// result is does not depend on the rows beside it.
#pragma once

#include <cstring>
#include <type_traits>

#include "few_rows_operands.h"
#include "in_place.h"

namespace {

// Keys that are done in a step, so few that a step of several heads fits into the cache. Their
// first one is a multiple of kFewKeysUnit.
constexpr int kFewKeys = round_up(32, kVectorElements);
constexpr int kFewKeysUnit = kLanes;
using Queries = QueriesInRows;
// Blocks of rows that fit into registers.
constexpr int kRowsAtOnce = 4;

// Scratch of the products.
struct FewRowsRoom {};
// What they need of a thread for as long as it computes.
struct FewRowsUnit {};

// scores[r * kScoreStride + key] = the dot product of query r with key(key), for `count` keys and
// up to a whole vector of them, where the last one is repeated. `meanwhile(key)` is called for each
// key.
template <int kScoreStride, int kRows, class Meanwhile>
__attribute__((noinline)) void multiply_in_place(std::integral_constant<int, kRows>,
                                                 const float* queries, const KeysInPlace& key,
                                                 int count, float* scores, FewRowsRoom&,
                                                 const Meanwhile& meanwhile) {
  static_assert(kLanes % kRows == 0, "a block of dot products fills a vector");
  constexpr int kKeys = kLanes / kRows;
  for (int first = 0; first < count; first += kKeys) {
    const KeyElement* keys[kKeys];
    for (int i = 0; i < kKeys; ++i) {
      keys[i] = key(min(first + i, count - 1));
      if (first + i < count) meanwhile(first + i);
    }
    Vec dots[kLanes];
    for (Vec& a : dots) a = simd::broadcast(0.0f);
    for (int d = 0; d < kHdimQ; d += kVectorElements)
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) {
        KeyElement edge[kVectorElements];
        const Vec elements = Operands::load_along_row<KeyDtype>(readable<kHdimQ>(keys[i], d, edge));
        const float* query = queries + d / kOperandElements;
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
          dots[r * kKeys + i] = Operands::mul_add(simd::load(query + r * Queries::kStride),
                                                  elements, dots[r * kKeys + i]);
      }
    float sums[kLanes];
    simd::store(sums, simd::sum_rows(dots));
    for (int r = 0; r < kRows; ++r)
      std::memcpy(scores + r * kScoreStride + first, sums + r * kKeys, kKeys * sizeof(float));
  }
}

// outputs[r * kOutputStride + d] = themselves * decay[r]
//     + the sum over `count` keys of probabilities[r * kScoreStride + key] * value(key)[d]
// Probabilities become operands in their place.
template <int kScoreStride, int kOutputStride, int kRows, class Meanwhile>
__attribute__((noinline)) void accumulate_in_place(std::integral_constant<int, kRows>,
                                                   float* probabilities, const ValuesInPlace& value,
                                                   int count, const float* decay, float* outputs,
                                                   FewRowsRoom&, const Meanwhile& meanwhile) {
  constexpr int kTogether = kOperandElements;
  static constexpr KeyElement kZeros[kHdimV] = {};
  for (int r = 0; r < kRows; ++r)
    probabilities_to_operands<kTogether>(probabilities + r * kScoreStride, count);
  constexpr int kRowVectors = (kHdimV + kLanes - 1) / kLanes;
  constexpr int kVectors = min(max(kBlockRows * kBlockVectors / kRows, 1), kRowVectors);
  for (int first = 0; first < kRowVectors; first += kVectors) {
    const int vectors = kRowVectors % kVectors == 0 ? kVectors : min(kVectors, kRowVectors - first);
    Vec block[kVectors][kRows];
#pragma GCC unroll 16
    for (int x = 0; x < kVectors; ++x)
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) block[x][r] = simd::broadcast(0.0f);
    for (int key = 0; key < count; key += kTogether) {
      const KeyElement* rows[kTogether];
#pragma GCC unroll 2
      for (int i = 0; i < kTogether; ++i) {
        const bool is_there = i == 0 || key + i < count;
        rows[i] = is_there ? value(key + i) : kZeros;
        if (first == 0 && is_there) meanwhile(key + i);
      }
#pragma GCC unroll 16
      for (int x = 0; x < kVectors; ++x)
        if (x < vectors) {
          KeyElement edges[kTogether][kLanes];
          const KeyElement* columns[kTogether];
#pragma GCC unroll 2
          for (int i = 0; i < kTogether; ++i)
            columns[i] = readable<kHdimV>(rows[i], (first + x) * kLanes, edges[i]);
          const Vec elements = Operands::load_down_columns<KeyDtype>(columns);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const float probability = probabilities[r * kScoreStride + key / kTogether];
            block[x][r] = Operands::mul_add(simd::broadcast(probability), elements, block[x][r]);
          }
        }
    }
#pragma GCC unroll 16
    for (int x = 0; x < kVectors; ++x)
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        float* out = outputs + r * kOutputStride + (first + x) * kLanes;
        if (x < vectors)
          simd::store(out, simd::mul_add(simd::load(out), simd::broadcast(decay[r]), block[x][r]));
      }
  }
}

}  // namespace
