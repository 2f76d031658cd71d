// Backward's five products in vector registers, a register block at a time, for any dtype as
// floats. backward_products_tile_unit.h has the same names.
#pragma once

#include "tiles.h"

namespace {

// ---- Tile sizes ---------------------------------------------------------------------------------

// Rows of dQ^T: computed in whole register blocks, stored in whole vectors.
constexpr int kDqRows = round_up(kHdimQ, kBlockRows);
constexpr int kDqRowsPadded = round_up(kDqRows, kLanes);

constexpr int kDepthQ = padded_depth_of(kHdimQ);
constexpr int kDepthV = padded_depth_of(kHdimV);

// Vectors of a panel of query rows, and of the last panels of a tile.
constexpr int kPanelVectors = kBlockVectors;
constexpr int kLastPanelVectors = 1;

// Keys, and query rows as a reduction, are taken in whole blocks of so many.
constexpr int kKeyBlock = kBlockRows;
constexpr int kRowBlock = kLanes;

// Wide heads get smaller tiles: all scratch of a query tile has to stay in the L2 cache.
constexpr bool kWideHead = kHdimQ + kHdimV > 512;
constexpr int kTileRows = (kWideHead ? 2 : 8) * kPanelLanes;
constexpr int kTileKeys = round_up(kWideHead ? 64 : 128, 2 * kBlockRows);

constexpr int kKeyStride = staged_stride(max(kDepthQ, kDqRowsPadded));
constexpr int kValueStride = staged_stride(kDepthV);
constexpr int kPairStride = staged_stride(kTileRows);

// Rows of the float32 sums of dk and dv.
constexpr int kSumStrideK = round_up(kHdimQ, kLanes);
constexpr int kSumStrideV = round_up(kHdimV, kLanes);

// ---- Sums of dk and dv --------------------------------------------------------------------------

// A register block at element `d` of `keys` rows, of which not all may be there: neither all keys
// nor all elements.
template <int kHdim, int kVectors>
void add_part_of_block(const Vec (&block)[kBlockRows][kVectors], int keys, bool is_first, int d,
                       float* sums, int64_t stride) {
  constexpr int kWidth = kVectors * kLanes;
  static constexpr float kZeros[kLanes] = {};
  float values[kBlockRows * kWidth];
#pragma GCC unroll 16
  for (int r = 0; r < kBlockRows; ++r)
    for (int v = 0; v < kVectors; ++v) simd::store(values + r * kWidth + v * kLanes, block[r][v]);
  for (int r = 0; r < keys; ++r)
    for (int at = d; at < min(d + kWidth, kHdim); at += kLanes) {
      float edge[kLanes];
      float* to = sums + r * stride + at;
      const Vec added = simd::load(values + r * kWidth + at - d);
      const float* sum = is_first ? kZeros : readable<kHdim>(to - at, at, edge);
      const Vec all = simd::add(simd::load(sum), added);
      if (at + kLanes <= kHdim) {
        simd::store(to, all);
      } else {
        simd::store(edge, all);
        std::memcpy(to, edge, kHdim % kLanes * sizeof(float));
      }
    }
}

// sums[key] += pairs[key][row] * rows[row] over the rows [first_row, end_row), for the keys from
// `key` on, at most kBlockRows; the first to come writes. `panel` is rows' panel of elements at
// `d`.
template <int kHdim, int kVectors>
__attribute__((noinline)) void add_block_to_sums(const float* panel, const float* pairs,
                                                 int first_row, int end_row, int keys,
                                                 bool is_first, int d, float* sums,
                                                 int64_t stride) {
  // They were last touched by another query tile, and are far away.
  for (int r = 0; r < keys; ++r)
    for (int at = d; at < min(d + kVectors * kLanes, kHdim); at += 16)
      __builtin_prefetch(sums + r * stride + at, 1);
  Vec block[kBlockRows][kVectors];
  multiply_block<kVectors, kPairStride, 1>(panel + first_row * kVectors * kLanes, pairs + first_row,
                                           end_row - first_row, block);
  if (keys < kBlockRows || d + kVectors * kLanes > kHdim) {
    add_part_of_block<kHdim, kVectors>(block, keys, is_first, d, sums, stride);
    return;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kBlockRows; ++r)
    for (int v = 0; v < kVectors; ++v) {
      float* to = sums + r * stride + d + v * kLanes;
      simd::store(to, is_first ? block[r][v] : simd::add(simd::load(to), block[r][v]));
    }
}

// ---- The products of a query tile with a key tile -----------------------------------------------

// What the products need of a thread for as long as it computes.
struct ProductUnit {};

// Operands and results. The rows of a query tile are there twice: transposed for products along the
// head dimension, and as they are for products along the rows. `at` is the first row of a panel.
struct Products {
  float queries[kTileRows * kDepthQ];            // per panel [hdim][lane]
  float gradients[kTileRows * kDepthV];          // do, per panel [hdim][lane]
  float query_rows[kTileRows * kDepthQ];         // per panel of elements [row][lane]
  float gradient_rows[kTileRows * kDepthV];      // do, per panel of elements [row][lane]
  float dq[kTileRows * kDqRowsPadded];           // per panel [hdim][lane]
  float keys[kTileKeys * kKeyStride];            // [key][hdim]
  float values[kTileKeys * kValueStride];        // [key][hdim]
  float probabilities[kTileKeys * kPairStride];  // [key][row]
  float dscores[kTileKeys * kPairStride];        // [key][row], of the dot products

  // The rows of q and do as the operands of dK and dV; q_row(i) and dout_row(i) are where row i
  // starts.
  template <class QRow, class DoutRow>
  void load_rows(const QRow& q_row, const DoutRow& dout_row, int rows) {
    pack_rows<kHdimQ, kTileRows>(q_row, rows, query_rows);
    pack_rows<kHdimV, kTileRows>(dout_row, rows, gradient_rows);
  }

  // The same rows, from row `at` on, as the operands of the scores and of the gradients of P.
  template <int kVectors, class QRow, class DoutRow>
  void load_panel(const QRow& q_row, const DoutRow& dout_row, int rows, int at) {
    constexpr int kRows = kVectors * kLanes;
    pack_transposed<kHdimQ>(q_row, at, rows - at, kRows, queries + at * kDepthQ);
    pack_transposed<kHdimV>(dout_row, at, rows - at, kRows, gradients + at * kDepthV);
    fill(dq + at * kDqRowsPadded, kRows * kDqRowsPadded, 0.0f);
  }

  // `count` keys and values, to those of the key tile from `key` on.
  void stage(const Element* k, int64_t k_stride, const Element* v, const Strides& v_strides,
             int key, int count) {
    stage_rows<kHdimQ, kKeyStride>(rows_from(k, k_stride), count, keys + key * kKeyStride);
    float* to = values + key * kValueStride;
    if (kColumnMajorV) stage_column_major<kHdimV, kValueStride>(v, v_strides.hdim, count, to);
    else stage_rows<kHdimV, kValueStride>(rows_from(v, v_strides.seq), count, to);
  }

  // Called before and after everything else about a panel and the kKeyBlock keys from `key` on.
  template <int kVectors>
  void begin_keys(int, int) {}
  template <int kVectors>
  void end_keys(int, int) {}

  // Dot products of a panel's queries with kBlockRows keys from `key` on.
  template <int kVectors>
  inline void multiply_keys(int at, int key, Vec (&block)[kBlockRows][kVectors]) const {
    multiply_rows<kVectors, kHdimQ, kKeyStride>(queries + at * kDepthQ, keys + key * kKeyStride,
                                                block);
  }
  // The same of the rows of do with values.
  template <int kVectors>
  inline void multiply_values(int at, int key, Vec (&block)[kBlockRows][kVectors]) const {
    multiply_rows<kVectors, kHdimV, kValueStride>(gradients + at * kDepthV,
                                                  values + key * kValueStride, block);
  }

  // Where the probabilities of a panel and of the keys from `key` on belong, and the gradients of
  // their dot products. From one key to the next it is kBlockStride.
  static constexpr int kBlockStride = kPairStride;
  float* probabilities_of(int at, int key) { return probabilities + key * kPairStride + at; }
  float* dscores_of(int at, int key) { return dscores + key * kPairStride + at; }

  // dQ^T += K^T dS^T over the keys [begin, end) of the tile. The sum over the tile starts from
  // zero: short sums added up lose less to rounding than one long sum.
  template <int kVectors>
  void add_to_dq(int at, int begin, int end) {
    constexpr int kRows = kVectors * kLanes;
    for (int d = 0; d < kDqRows; d += kBlockRows) {
      Vec block[kBlockRows][kVectors];
      multiply_block<kVectors, 1, kKeyStride, kPairStride>(
          dscores_of(at, begin), keys + begin * kKeyStride + d, end - begin, block);
      float* to = dq + at * kDqRowsPadded + d * kRows;
#pragma GCC unroll 16
      for (int r = 0; r < kBlockRows; ++r)
        for (int v = 0; v < kVectors; ++v, to += kLanes)
          simd::store(to, simd::add(simd::load(to), block[r][v]));
    }
  }
  const float* dq_of(int at) const { return dq + at * kDqRowsPadded; }

  // Calls visit(add) for all parts of a row of dv or dk.
  template <class Visit>
  void for_each_part_of_dv(const Visit& visit) const {
    for_each_part<kHdimV>(gradient_rows, probabilities, visit);
  }
  template <class Visit>
  void for_each_part_of_dk(const Visit& visit) const {
    for_each_part<kHdimQ>(query_rows, dscores, visit);
  }

 private:
  // add(key, first_row, end_row, keys, is_first, sums, stride) adds the products of the rows
  // [first_row, end_row) to the sums of at most kKeyBlock keys from `key` on.
  template <int kHdim, class Visit>
  void for_each_part(const float* rows, const float* pairs, const Visit& visit) const {
    for_each_row_panel<kHdim>([&](auto vectors, int d) {
      visit([=](int key, int first_row, int end_row, int keys, bool is_first, float* sums,
                int64_t stride) {
        add_block_to_sums<kHdim, decltype(vectors)::value>(
            rows + d * kTileRows, pairs + key * kPairStride, first_row, end_row, keys, is_first, d,
            sums, stride);
      });
    });
  }
};

}  // namespace
