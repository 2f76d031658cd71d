// Rows transposed for tile units, whose operands are pairs of rows.
#pragma once

#include "tiles.h"

namespace {

// Rows as columns: to[element][row / kOperandElements]; row(j) is where row j starts. Zeros follow
// the last one up to a multiple of kBlock rows. Each cache line of a row is read once: of rows that
// lie far apart few stay in the L1 cache.
template <class D, int kHdim, int kStride, int kBlock, class Row>
void stage_transposed_pairs(const Row& row, int count, float* to) {
  using T = typename D::Element;
  constexpr int kElements = 2 * kLanes;
  static constexpr T kZeros[kHdim] = {};
  const auto row_or_zeros = [&](int j) -> const T* { return j < count ? row(j) : kZeros; };
  for (int j = 0; j < round_up(count, kBlock); j += kOperandElements * kLanes)
    for (int at = 0; at < kHdim; at += kElements) {
      const int d = start_of_vector<kHdim, kElements>(at);
      Vec low[kLanes], high[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        T edges[2][kElements];
        const int first = j + kOperandElements * i;
        Operands::load_down_two_columns<D>(readable<kHdim>(row_or_zeros(first), d, edges[0]),
                                           readable<kHdim>(row_or_zeros(first + 1), d, edges[1]),
                                           low[i], high[i]);
      }
      const auto store = [&](Vec(&block)[kLanes], int half) {
        simd::transpose(block);
        for (int i = 0; i < kLanes; ++i) {
          const int element = d + Operands::element_of_pair<D>(half, i);
          if (kHdim % kElements == 0 || element < kHdim)
            simd::store(to + element * kStride + j / kOperandElements, block[i]);
        }
      };
      store(low, 0);
      store(high, 1);
    }
}

}  // namespace
