// Backward's five products in the tile unit, for bf16: a square of two by two tiles at a time, for
// which one load feeds one product. backward_products_vectors.h has the same names.
//
// Operands are pairs of bf16 numbers that follow each other along the reduction. K and V are that
// as they lie in memory, for the scores and for the gradients of P. P and dS are rounded to bf16
// when they are complete, to pairs of queries for dV and dK, and dS to pairs of keys for dQ, too.
#pragma once

#include "tile_unit.h"
#include "tiles.h"
#include "transposed_pairs.h"

namespace {

static_assert(kOperandElements == 2, "the tile unit multiplies pairs");
static_assert(!kColumnMajorV, "values are staged by rows");

// ---- Tile sizes ---------------------------------------------------------------------------------

// Rows and columns of a square, and elements of a reduction, come in this number.
constexpr int kSquare = 2 * tile_unit::kMostRows;
constexpr int kTileOperands = tile_unit::kMostRowBytes / 4;
static_assert(kSquare == kOperandElements * kTileOperands, "a reduction takes whole tiles");

constexpr int kDqRows = round_up(kHdimQ, kSquare);
constexpr int kDvRows = round_up(kHdimV, kSquare);

constexpr int kDepthQ = kDqRows / kOperandElements;
constexpr int kDepthV = kDvRows / kOperandElements;

// A panel of query rows is as wide as a square.
constexpr int kPanelVectors = kSquare / kLanes;
constexpr int kLastPanelVectors = kPanelVectors;

constexpr int kKeyBlock = kSquare;
constexpr int kRowBlock = kSquare;

// Wide heads get smaller tiles: all scratch of a query tile has to stay in the L2 cache.
constexpr bool kWideHead = kHdimQ + kHdimV > 512;
constexpr int kTileRows = (kWideHead ? 2 : 8) * kSquare;
constexpr int kTileKeys = kWideHead ? 64 : 128;

// Rows of the float32 sums of dk and dv.
constexpr int kSumStrideK = kDqRows;
constexpr int kSumStrideV = kDvRows;

static_assert(kSquare % kBlockRows == 0 && kPanelVectors % 2 == 0,
              "a square is whole register blocks, and whole pairs of vectors");

// ---- A square -----------------------------------------------------------------------------------

// Tiles 0 to 3 are sums, 4 and 5 have rows of one operand, 6 and 7 columns of the other.
class ProductUnit : tile_unit::Configured {
 public:
  ProductUnit() : Configured(kShapes) {}

 private:
  static constexpr int kRows = tile_unit::kMostRows, kBytes = tile_unit::kMostRowBytes;
  static constexpr tile_unit::Shapes kShapes = {
      {kRows, kRows, kRows, kRows, kRows, kRows, kRows, kRows},
      {kBytes, kBytes, kBytes, kBytes, kBytes, kBytes, kBytes, kBytes}};
};

// sums[row][column] += rows[row][operand] * columns[operand][column] for a square of sums, over
// `depth` operands, a multiple of kTileOperands; or = where the sums start from zero. Strides are
// in floats and operands; columns lie kSquare apart.
inline void multiply_square(const float* rows, int row_stride, const float* columns, int depth,
                            bool from_zero, float* sums, int64_t sum_stride) {
  constexpr int kRows = tile_unit::kMostRows;
  constexpr int64_t kColumnBytes = 4 * kSquare;
  const int64_t row_bytes = 4 * row_stride, sum_bytes = 4 * sum_stride;
  const float* more_rows = rows + kRows * row_stride;
  float* more_sums = sums + kRows * sum_stride;
  if (from_zero) {
    tile_unit::zero<0>();
    tile_unit::zero<1>();
    tile_unit::zero<2>();
    tile_unit::zero<3>();
  } else {
    tile_unit::load<0>(sums, sum_bytes);
    tile_unit::load<1>(sums + kTileOperands, sum_bytes);
    tile_unit::load<2>(more_sums, sum_bytes);
    tile_unit::load<3>(more_sums + kTileOperands, sum_bytes);
  }
  for (int s = 0; s < depth; s += kTileOperands) {
    tile_unit::load<6>(columns + s * kSquare, kColumnBytes);
    tile_unit::load<4>(rows + s, row_bytes);
    tile_unit::add_bf16_products<0, 4, 6>();
    tile_unit::load<7>(columns + s * kSquare + kTileOperands, kColumnBytes);
    tile_unit::add_bf16_products<1, 4, 7>();
    tile_unit::load<5>(more_rows + s, row_bytes);
    tile_unit::add_bf16_products<2, 5, 6>();
    tile_unit::add_bf16_products<3, 5, 7>();
  }
  tile_unit::store<0>(sums, sum_bytes);
  tile_unit::store<1>(sums + kTileOperands, sum_bytes);
  tile_unit::store<2>(more_sums, sum_bytes);
  tile_unit::store<3>(more_sums + kTileOperands, sum_bytes);
}

// ---- Staging ------------------------------------------------------------------------------------

// Pairs of rows for the panels of kSquare elements that kHdim elements make: per panel
// to[row / 2][element], with room for kMostRows rows. row(i) is where row i starts; zeros follow
// the last one up to a whole square.
template <int kHdim, int kMostRows, class Row>
void pack_row_pairs(const Row& row, int count, float* to) {
  static constexpr Element kZeros[kHdim] = {};
  for (int i = 0; i < round_up(count, kSquare); i += kOperandElements) {
    const Element* first = i < count ? row(i) : kZeros;
    const Element* second = i + 1 < count ? row(i + 1) : kZeros;
    for (int d = 0; d < kHdim; d += kLanes) {
      Element edges[2][kLanes];
      float* panel = to + d / kSquare * kSquare * (kMostRows / kOperandElements);
      simd::store(panel + i / kOperandElements * kSquare + d % kSquare,
                  Operands::load_down_columns<Dtype>(
                      {readable<kHdim>(first, d, edges[0]), readable<kHdim>(second, d, edges[1])}));
    }
  }
}

// stage_rows, with zeros up to a whole square.
template <int kHdim, int kStride>
void stage_square_rows(const Element* from, int64_t row_stride, int count, float* to) {
  stage_rows<kHdim, kStride>(rows_from(from, row_stride), count, to);
  const int staged = round_up(count, kBlockRows);
  std::memset(to + staged * kStride, 0,
              (round_up(count, kSquare) - staged) * kStride * sizeof(float));
}

// ---- The products of a query tile with a key tile -----------------------------------------------

// Operands and results. `at` is the first row of a panel. Padding that is never written is zero.
struct Products {
  static constexpr int kKeyStride = staged_stride(kDepthQ);
  static constexpr int kValueStride = staged_stride(kDepthV);
  static constexpr int kTransposedStride = staged_stride(kTileKeys / kOperandElements);
  static constexpr int kPairStride = staged_stride(kTileRows / kOperandElements);
  static constexpr int kRowPairs = kTileRows / kOperandElements;
  static constexpr int kKeyPairs = kTileKeys / kOperandElements;

  float queries[kTileRows * kDepthQ];         // per panel [hdim / 2][row]
  float gradients[kTileRows * kDepthV];       // do, per panel [hdim / 2][row]
  float query_pairs[kRowPairs * kDqRows];     // per panel of elements [row / 2][element]
  float gradient_pairs[kRowPairs * kDvRows];  // do, per panel of elements [row / 2][element]
  float dq[kTileRows * kDqRows];              // per panel [hdim][row]
  float keys[kTileKeys * kKeyStride];         // [key][hdim / 2]
  float values[kTileKeys * kValueStride];     // [key][hdim / 2]
  float keys_transposed[kDqRows * kTransposedStride];  // [hdim][key / 2]
  float probabilities[kTileKeys * kPairStride];        // [key][row / 2]
  float dscores[kTileKeys * kPairStride];              // [key][row / 2], of the dot products
  float dscore_pairs[kKeyPairs * kSquare];             // [key / 2][row], of one panel
  // Of one panel and kSquare keys: dot products, and what becomes of them.
  float square_of_keys[kSquare * kSquare];    // [key][row]
  float square_of_values[kSquare * kSquare];  // [key][row]

  // The rows of q and do as the operands of dK and dV; q_row(i) and dout_row(i) are where row i
  // starts.
  template <class QRow, class DoutRow>
  void load_rows(const QRow& q_row, const DoutRow& dout_row, int rows) {
    pack_row_pairs<kHdimQ, kTileRows>(q_row, rows, query_pairs);
    pack_row_pairs<kHdimV, kTileRows>(dout_row, rows, gradient_pairs);
  }

  // The same rows, from row `at` on, as the operands of the scores and of the gradients of P.
  template <int kVectors, class QRow, class DoutRow>
  void load_panel(const QRow& q_row, const DoutRow& dout_row, int rows, int at) {
    pack_transposed<kHdimQ>(q_row, at, rows - at, kSquare, queries + at * kDepthQ);
    pack_transposed<kHdimV>(dout_row, at, rows - at, kSquare, gradients + at * kDepthV);
    fill(dq + at * kDqRows, kSquare * kDqRows, 0.0f);
  }

  // `count` keys and values, to those of the key tile from `key` on.
  void stage(const Element* k, int64_t k_stride, const Element* v, const Strides& v_strides,
             int key, int count) {
    stage_square_rows<kHdimQ, kKeyStride>(k, k_stride, count, keys + key * kKeyStride);
    stage_square_rows<kHdimV, kValueStride>(v, v_strides.seq, count, values + key * kValueStride);
    stage_transposed_pairs<Dtype, kHdimQ, kTransposedStride, kSquare>(
        rows_from(k, k_stride), count, keys_transposed + key / kOperandElements);
  }

  // Called before everything else about a panel and the kSquare keys from `key` on.
  template <int kVectors>
  void begin_keys(int at, int key) {
    multiply_square(keys + key * kKeyStride, kKeyStride, queries + at * kDepthQ, kDepthQ, true,
                    square_of_keys, kSquare);
    multiply_square(values + key * kValueStride, kValueStride, gradients + at * kDepthV, kDepthV,
                    true, square_of_values, kSquare);
  }

  // Dot products of a panel's queries with kBlockRows keys from `key` on.
  template <int kVectors>
  inline void multiply_keys(int, int key, Vec (&block)[kBlockRows][kVectors]) const {
    load_block(square_of_keys, key, block);
  }
  // The same of the rows of do with values.
  template <int kVectors>
  inline void multiply_values(int, int key, Vec (&block)[kBlockRows][kVectors]) const {
    load_block(square_of_values, key, block);
  }

  // Where the probabilities of a panel and of the keys from `key` on belong, and the gradients of
  // their dot products. From one key to the next it is kBlockStride.
  static constexpr int kBlockStride = kSquare;
  float* probabilities_of(int, int key) { return square_of_keys + key % kSquare * kSquare; }
  float* dscores_of(int, int key) { return square_of_values + key % kSquare * kSquare; }

  // Called after everything about a panel and the kSquare keys from `key` on: rounds to bf16.
  template <int kVectors>
  void end_keys(int at, int key) {
    const int first_pair = key * kPairStride + at / kOperandElements;
    round_rows<kVectors>(square_of_keys, probabilities + first_pair);
    round_rows<kVectors>(square_of_values, dscores + first_pair);
    float* to = dscore_pairs + key / kOperandElements * kSquare;
    for (int r = 0; r < kSquare; r += kOperandElements, to += kSquare)
      for (int i = 0; i < kSquare; i += kLanes) {
        const float* from = square_of_values + r * kSquare + i;
        simd::store(to + i, simd::round_to_pairs(simd::load(from), simd::load(from + kSquare)));
      }
  }

  // dQ^T += K^T dS^T over the keys [begin, end) of the tile.
  template <int kVectors>
  void add_to_dq(int at, int begin, int end) {
    for (int d = 0; d < kDqRows; d += kSquare)
      multiply_square(keys_transposed + d * kTransposedStride + begin / kOperandElements,
                      kTransposedStride, dscore_pairs + begin / kOperandElements * kSquare,
                      (end - begin) / kOperandElements, false, dq + at * kDqRows + d * kSquare,
                      kSquare);
  }
  const float* dq_of(int at) const { return dq + at * kDqRows; }

  // Calls visit(add) for all parts of a row of dv or dk.
  template <class Visit>
  void for_each_part_of_dv(const Visit& visit) const {
    for_each_part<kDvRows>(gradient_pairs, probabilities, visit);
  }
  template <class Visit>
  void for_each_part_of_dk(const Visit& visit) const {
    for_each_part<kDqRows>(query_pairs, dscores, visit);
  }

 private:
  template <int kVectors>
  static void load_block(const float* square, int key, Vec (&block)[kBlockRows][kVectors]) {
    for (int r = 0; r < kBlockRows; ++r)
      for (int v = 0; v < kVectors; ++v)
        block[r][v] = simd::load(square + (key % kSquare + r) * kSquare + v * kLanes);
  }

  template <int kVectors>
  static void round_rows(const float* square, float* to) {
    for (int r = 0; r < kSquare; ++r, square += kSquare, to += kPairStride)
      for (int v = 0; v < kVectors; v += 2)
        simd::store(to + v / 2 * kLanes,
                    simd::round_to_successive_pairs(simd::load(square + v * kLanes),
                                                    simd::load(square + (v + 1) * kLanes)));
  }

  // add(key, first_row, end_row, keys, is_first, sums, stride) adds the products of the rows
  // [first_row, end_row) to the sums of kSquare keys from `key` on.
  template <int kElements, class Visit>
  static void for_each_part(const float* rows, const float* pairs, const Visit& visit) {
    for (int d = 0; d < kElements; d += kSquare)
      visit([=](int key, int first_row, int end_row, int, bool is_first, float* sums,
                int64_t stride) {
        const int first_pair = first_row / kOperandElements;
        const int depth = round_up(end_row - first_row, kSquare) / kOperandElements;
        multiply_square(pairs + key * kPairStride + first_pair, kPairStride,
                        rows + d * kRowPairs + first_pair * kSquare, depth, is_first, sums + d,
                        stride);
      });
  }
};

}  // namespace
