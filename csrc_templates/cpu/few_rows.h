// Products of a few rows with keys and values that are read where they lie, once for all rows.
// few_rows_packed_*.h have the same names for packed pages.
//
// In panels of so few rows most lanes would be empty. Here lanes hold elements of a head: a vector
// of a key or a value meets all rows while it is in a register, and nothing is staged. What a row's
// result is does not depend on the rows beside it.
#pragma once

#include <algorithm>
#include <cstring>

#include "problem.h"
#include "products.h"
#include "tiles.h"

namespace {

// Keys that are done in a step, so few that a step of several heads fits into the cache. Their
// first one is a multiple of kFewKeysUnit.
constexpr int kFewKeys = round_up(32, kLanes);
constexpr int kFewKeysUnit = kLanes;
// Blocks of rows that fit into registers.
constexpr int kRowsAtOnce = 4;

// Scratch of the products.
struct FewRowsRoom {};
// What they need of a thread for as long as it computes.
struct FewRowsUnit {};

// Floats of a query.
constexpr int kQueryStride = round_up(kHdimQ, kLanes);
inline void load_few_query(const Element* from, float* to) {
  Element edge[kLanes];
  for (int d = 0; d < kHdimQ; d += kLanes)
    simd::store(to + d, Dtype::load(readable<kHdimQ>(from, d, edge)));
}

// Keys or values of one head from key `from` on.
struct InPlace {
  KeyRows rows;
  int64_t from;

  const KeyElement* operator()(int key) const { return rows[from + key]; }
  // What to ask for ahead of key `key` among those of a step.
  const KeyElement* ahead(int key) const { return rows[from + key]; }
};
using KeysInPlace = InPlace;
using ValuesInPlace = InPlace;

// scores[r * kScoreStride + key] = the dot product of query r with key(key), for `count` keys and
// up to a whole vector of them, where the last one is repeated. A query is kQueryStride floats from
// the one before. `meanwhile(key)` is called for each key.
template <int kRows, int kScoreStride, class Meanwhile>
__attribute__((noinline)) void multiply_in_place(const float* queries, const KeysInPlace& key,
                                                 int count, float* scores, FewRowsRoom&,
                                                 const Meanwhile& meanwhile) {
  static_assert(kLanes % kRows == 0, "a block of dot products fills a vector");
  constexpr int kKeys = kLanes / kRows;
  for (int first = 0; first < count; first += kKeys) {
    const KeyElement* keys[kKeys];
    for (int i = 0; i < kKeys; ++i) {
      keys[i] = key(std::min(first + i, count - 1));
      if (first + i < count) meanwhile(first + i);
    }
    Vec dots[kLanes];
    for (Vec& a : dots) a = simd::broadcast(0.0f);
    for (int d = 0; d < kHdimQ; d += kLanes)
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) {
        KeyElement edge[kLanes];
        const Vec elements = KeyDtype::load(readable<kHdimQ>(keys[i], d, edge));
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
          dots[r * kKeys + i] = simd::mul_add(simd::load(queries + r * kQueryStride + d), elements,
                                              dots[r * kKeys + i]);
      }
    float sums[kLanes];
    simd::store(sums, simd::sum_rows(dots));
    for (int r = 0; r < kRows; ++r)
      std::memcpy(scores + r * kScoreStride + first, sums + r * kKeys, kKeys * sizeof(float));
  }
}

// outputs[r * kOutputStride + d] = themselves * decay[r]
//     + the sum over `count` keys of probabilities[r * kScoreStride + key] * value(key)[d]
template <int kRows, int kScoreStride, int kOutputStride, class Meanwhile>
__attribute__((noinline)) void accumulate_in_place(const float* probabilities,
                                                   const ValuesInPlace& value, int count,
                                                   const float* decay, float* outputs, FewRowsRoom&,
                                                   const Meanwhile& meanwhile) {
  constexpr int kRowVectors = (kHdimV + kLanes - 1) / kLanes;
  constexpr int kVectors = std::min(std::max(kBlockRows * kBlockVectors / kRows, 1), kRowVectors);
  for (int first = 0; first < kRowVectors; first += kVectors) {
    const int vectors =
        kRowVectors % kVectors == 0 ? kVectors : std::min(kVectors, kRowVectors - first);
    Vec block[kVectors][kRows];
    for (auto& column : block)
      for (Vec& a : column) a = simd::broadcast(0.0f);
    for (int key = 0; key < count; ++key) {
      const KeyElement* row = value(key);
      if (first == 0) meanwhile(key);
#pragma GCC unroll 16
      for (int x = 0; x < kVectors; ++x)
        if (x < vectors) {
          KeyElement edge[kLanes];
          const Vec elements = KeyDtype::load(readable<kHdimV>(row, (first + x) * kLanes, edge));
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r)
            block[x][r] = simd::mul_add(simd::broadcast(probabilities[r * kScoreStride + key]),
                                        elements, block[x][r]);
        }
    }
#pragma GCC unroll 16
    for (int x = 0; x < kVectors; ++x)
      for (int r = 0; r < kRows; ++r) {
        float* out = outputs + r * kOutputStride + (first + x) * kLanes;
        if (x < vectors)
          simd::store(out, simd::mul_add(simd::load(out), simd::broadcast(decay[r]), block[x][r]));
      }
  }
}

}  // namespace
