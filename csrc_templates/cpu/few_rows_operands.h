// Operands of the products of a few rows: queries, and probabilities.
#pragma once

#include <type_traits>

#include "products.h"
#include "tiles.h"

namespace {

// Calls visit(number of rows, first row) for blocks of up to kRows rows that are done together. Of
// vectors the number is a type, as each row has registers; tiles have room for all of them.
template <int kRows, class Visit>
inline void for_each_row_block(int rows, const Visit& visit, int at = 0) {
  if constexpr (kTileUnit) {
    for (; at < rows; at += kRows) visit(min(kRows, rows - at), at);
  } else {
    for (; at + kRows <= rows; at += kRows) visit(std::integral_constant<int, kRows>{}, at);
    if constexpr (kRows > 1) for_each_row_block<kRows / 2>(rows, visit, at);
  }
}

// Operands of a query, as vectors need them.
struct QueriesInRows {
  static constexpr int kStride = padded_depth_of(kHdimQ);

  // Those of some rows from row(at) on.
  template <class Row>
  static void load(const Row& row, int at, int rows, float* to) {
    Element edge[kVectorElements];
    for (int i = 0; i < rows; ++i, to += kStride)
      for (int d = 0; d < kHdimQ; d += kVectorElements)
        simd::store(to + d / kOperandElements,
                    Operands::load_along_row<Dtype>(readable<kHdimQ>(row(at + i), d, edge)));
  }
};

// A row of probabilities becomes operands in their place, with zeros behind the last one up to a
// multiple of kUnit of them.
template <int kUnit>
inline void probabilities_to_operands(float* row, int count) {
  if (kOperandElements == 1 && kUnit == 1) return;
  const int end = round_up(round_up(count, kUnit), kVectorElements);
  fill(row + count, end - count, 0.0f);
  for (int key = 0; key < end; key += kVectorElements) {
    Vec floats[kOperandElements];
    for (int i = 0; i < kOperandElements; ++i) floats[i] = simd::load(row + key + i * kLanes);
    simd::store(row + key / kOperandElements, Operands::from_successive_floats(floats));
  }
}

// outputs = outputs * decay + sums, for the rows of a block.
template <int kOutputStride, int kMostRows, int kColumns>
inline void add_to_outputs(const float (&sums)[kMostRows][kColumns], int rows, const float* decay,
                           float* outputs) {
  for (int r = 0; r < rows; ++r)
    for (int d = 0; d < kHdimV; d += kLanes) {
      float* out = outputs + r * kOutputStride + d;
      simd::store(
          out, simd::mul_add(simd::load(out), simd::broadcast(decay[r]), simd::load(sums[r] + d)));
    }
}

// Calls visit(i) for the numbers below `all`, some at each call of what is returned, `calls` times.
template <class Visit>
inline auto in_turns(int all, int calls, const Visit& visit) {
  return [=, each = (all + calls - 1) / calls, next = 0]() mutable {
    for (const int until = min(next + each, all); next < until; ++next) visit(next);
  };
}

}  // namespace
