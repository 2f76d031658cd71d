// Operands of the products of a few rows: queries, and probabilities.
#pragma once

#include <algorithm>
#include <type_traits>

#include "products.h"
#include "tiles.h"

namespace {

// Pairs of bf16 numbers where they are quicker than floats. Where there are tile units, products of
// pairs in vectors have half the rate of those of floats, and packed pages are for the tiles.
using FewOperands = std::conditional_t<kTileUnit && !kPackedPages, FloatOperands, Operands>;
constexpr int kFewVectorElements = kLanes * FewOperands::kElements;

// Operands of a query.
constexpr int kQueryStride =
    round_up((kHdimQ + FewOperands::kElements - 1) / FewOperands::kElements, kLanes);
inline void load_few_query(const Element* from, float* to) {
  Element edge[kFewVectorElements];
  for (int d = 0; d < kHdimQ; d += kFewVectorElements)
    simd::store(to + d / FewOperands::kElements,
                FewOperands::load_along_row<Dtype>(readable<kHdimQ>(from, d, edge)));
}

// A row of probabilities becomes operands in their place, with zeros behind the last one up to a
// multiple of kUnit of them.
template <int kUnit>
inline void probabilities_to_operands(float* row, int count) {
  if (FewOperands::kElements == 1 && kUnit == 1) return;
  const int end = round_up(round_up(count, kUnit), kFewVectorElements);
  std::fill(row + count, row + end, 0.0f);
  for (int key = 0; key < end; key += kFewVectorElements) {
    Vec floats[FewOperands::kElements];
    for (int i = 0; i < FewOperands::kElements; ++i) floats[i] = simd::load(row + key + i * kLanes);
    simd::store(row + key / FewOperands::kElements, FewOperands::from_successive_floats(floats));
  }
}

}  // namespace
