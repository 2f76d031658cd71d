// few_rows_vectors.h for packed pages. A vector has pieces that follow each other in
// memory, the same piece of some keys, or columns; the sums of its parts come last.
#pragma once

#include <cstring>
#include <type_traits>

#include "packed_in_place.h"

namespace {

// A vector has some pieces, or some of the elements of one.
constexpr int kVectorPieces = max(kVectorElements / kPiece, 1);
constexpr int kPieceVectors = max(kPiece / kVectorElements, 1);
using VectorPieces = std::integral_constant<int, kVectorPieces>;

constexpr int kRowsAtOnce = 4;
constexpr int kFewKeysUnit = max(kLanes, kPiece);
static_assert(kTileKeys % kFewKeysUnit == 0 && kFewKeys % kFewKeysUnit == 0, "units fill steps");
static_assert(kFewKeys % (kLanes * kVectorPieces) == 0, "sums of scores have room");

struct FewRowsRoom {};
// What they need of a thread for as long as it computes.
struct FewRowsUnit {};

// Sums over `pieces` of them: sums[r][i][j] is that of part j of vector i, with the factors of row
// r. load(piece, i, n) is the n-th vector of elements there, and `meanwhile()` is called for each
// piece.
template <int kRows, class Load, class Meanwhile>
inline void multiply_pieces(const float* factors, int factor_stride, int pieces, int vectors,
                            const Load& load, float* sums, Meanwhile& meanwhile) {
  static_assert(kLanes % kRows == 0, "a block of dot products fills a vector");
  constexpr int kVectors = kLanes / kRows;
  Vec dots[kLanes];
  for (Vec& a : dots) a = simd::broadcast(0.0f);
  for (int piece = 0; piece < pieces; ++piece) {
    meanwhile();
#pragma GCC unroll 4
    for (int n = 0; n < kPieceVectors; ++n) {
      Vec of_rows[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
        of_rows[r] = simd::repeat(factors + r * factor_stride, VectorPieces{});
      factors += kLanes / kVectorPieces;
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i)
        if (i < vectors) {
          const Vec elements = load(piece, i, n);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r)
            dots[r * kVectors + i] =
                Operands::mul_add(elements, of_rows[r], dots[r * kVectors + i]);
        }
    }
  }
  simd::sum_parts(dots, VectorPieces{}, sums);
}

template <int kScoreStride, int kRows, class Meanwhile>
__attribute__((noinline)) void multiply_in_place(std::integral_constant<int, kRows>,
                                                 const float* queries, const KeysInPlace& key,
                                                 int count, float* scores, FewRowsRoom&,
                                                 const Meanwhile& meanwhile) {
  constexpr int kVectors = kLanes / kRows, kKeys = kVectors * kVectorPieces;
  const int64_t stride = key.stride();
  auto ask = in_turns(count, (count + kKeys - 1) / kKeys * (kHdimQ / kPiece), meanwhile);
  for (int first = 0; first < count; first += kKeys) {
    // A vector's keys lie in one page. Where there are none any more, the last ones are repeated.
    const int last = (count - 1) / kVectorPieces * kVectorPieces;
    const KeyElement* keys[kVectors];
    for (int i = 0; i < kVectors; ++i) keys[i] = key(min(first + i * kVectorPieces, last));
    const auto load = [&](int piece, int i, int n) {
      return Operands::load_along_row<KeyDtype>(keys[i] + piece * stride + n * kVectorElements);
    };
    float sums[kLanes * kVectorPieces];
    multiply_pieces<kRows>(queries, Queries::kStride, kHdimQ / kPiece, kVectors, load, sums, ask);
    for (int r = 0; r < kRows; ++r)
      std::memcpy(scores + r * kScoreStride + first, sums + r * kKeys, kKeys * sizeof(float));
  }
}

template <int kScoreStride, int kOutputStride, int kRows, class Meanwhile>
__attribute__((noinline)) void accumulate_in_place(std::integral_constant<int, kRows>,
                                                   float* probabilities, const ValuesInPlace& value,
                                                   int count, const float* decay, float* outputs,
                                                   FewRowsRoom&, const Meanwhile& meanwhile) {
  const int pieces = (count + kPiece - 1) / kPiece;
  for (int r = 0; r < kRows; ++r)
    probabilities_to_operands<kPiece>(probabilities + r * kScoreStride, count);
  const PiecesOfValues values(value, count);
  constexpr int kVectors = kLanes / kRows, kColumns = kVectors * kVectorPieces;
  constexpr int kBlocks = (kHdimV + kColumns - 1) / kColumns;
  auto ask = in_turns(count, kBlocks * pieces, meanwhile);
  float sums[kRows][round_up(kHdimV, max(kLanes, kColumns))];
  for (auto& row : sums) fill(row + kHdimV, int(sizeof(row) / sizeof(float)) - kHdimV, 0.0f);
  for (int first = 0; first < kHdimV; first += kColumns) {
    const int columns = kHdimV % kColumns == 0 ? kColumns : min(kColumns, kHdimV - first);
    const auto load = [&](int piece, int i, int n) {
      const KeyElement* from = values.at[piece] + (first + i * kVectorPieces) * kPiece;
      KeyElement edge[kVectorElements];
      if (kHdimV % kVectorPieces != 0 && first + (i + 1) * kVectorPieces > kHdimV)
        from = readable<kHdimV % kVectorPieces * kPiece>(from, 0, edge);
      return Operands::load_along_row<KeyDtype>(from + n * kVectorElements);
    };
    float block[kLanes * kVectorPieces];
    multiply_pieces<kRows>(probabilities, kScoreStride, pieces,
                           (columns + kVectorPieces - 1) / kVectorPieces, load, block, ask);
    for (int r = 0; r < kRows; ++r)
      std::memcpy(sums[r] + first, block + r * kColumns, kColumns * sizeof(float));
  }
  add_to_outputs<kOutputStride>(sums, kRows, decay, outputs);
}

}  // namespace
