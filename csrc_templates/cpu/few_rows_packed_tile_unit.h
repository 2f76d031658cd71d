// few_rows_tile_unit.h for packed pages. A tile has the same piece of 64 keys, or columns,
// as it lies in memory: four to a row. What it is multiplied with has a block of four columns for
// each row of factors, and in these the factors once for each of the four pieces, on a diagonal:
// three quarters are zeros, and the unit still is quicker than memory. So what is not finite in a
// key makes NaN of the scores of up to three others. Behind the last key there can be anything, and
// zeros take its place.
#pragma once

#include <cstring>

#include "packed_in_place.h"

namespace {

constexpr int kPieceOperands = 4;
constexpr int kRowPieces = kUnitOperands / kPieceOperands;  // of a tile
constexpr int kTilePieces = kUnitRows * kRowPieces;
constexpr int kBlockPieces = 2 * kTilePieces;  // of two tiles, which are done together
constexpr int kTileFloats = kUnitRows * kLanes;

constexpr int kRowsAtOnce = kLanes / kRowPieces;
constexpr int kFewKeysUnit = kTilePieces;
static_assert(kTileKeys % kFewKeysUnit == 0 && kFewKeys % kFewKeysUnit == 0, "units fill steps");

using FewRowsUnit = ProductUnit;
struct FewRowsRoom {
  // What pieces are multiplied with: a tile for each, [operand][lane]. All but the diagonals stays
  // 0.
  float factors[round_up(max(kHdimQ, kFewKeys) / kPiece, kLanes)][kUnitOperands * kLanes];
  KeyElement copies[4][kTilePieces * kPiece];  // of tiles that do not lie in one piece
};

// Rows of factors, `stride` operands apart, to tiles for `pieces` pieces.
inline void spread_factors(const float* rows, int row_count, int stride, int pieces,
                           FewRowsRoom& room) {
  for (int first = 0; first < pieces * kPieceOperands; first += kLanes) {
    Vec block[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const int r = lane % kRowsAtOnce;
      block[lane] = r < row_count ? simd::load(rows + r * stride + first) : simd::broadcast(0.0f);
    }
    simd::transpose(block);
    for (int n = 0; n < kLanes; ++n) {
      float of_rows[kLanes];
      simd::store(of_rows, block[n]);
      float* to = room.factors[(first + n) / kPieceOperands] + n % kPieceOperands * kLanes;
      for (int i = 0; i < kRowPieces; ++i, to += kPieceOperands * kLanes + kRowsAtOnce)
        std::memcpy(to, of_rows, kRowsAtOnce * sizeof(float));
    }
  }
}

// Sums over `pieces` of them, of one tile or two: to[r * kStride + i] is that of piece i of the
// tiles, with the factors of row r. tile(piece, t, copy) is where the piece of tile t lies, or
// `copy`, which has it then. `meanwhile()` is called for each piece.
template <int kStride, class Tile, class Meanwhile>
inline void multiply_pieces(int row_count, int pieces, bool has_two, const Tile& tile, float* to,
                            FewRowsRoom& room, Meanwhile& meanwhile) {
  constexpr int64_t kColumnBytes = 4 * kLanes, kRowBytes = 16 * kRowPieces;
  tile_unit::zero<0>();
  tile_unit::zero<1>();
  tile_unit::zero<2>();
  tile_unit::zero<3>();
  for (int piece = 0; piece < pieces; piece += 2) {
    meanwhile();
    tile_unit::load<6>(room.factors[piece], kColumnBytes);
    tile_unit::load<4>(tile(piece, 0, room.copies[0]), kRowBytes);
    tile_unit::add_bf16_products<0, 4, 6>();
    if (has_two) {
      tile_unit::load<5>(tile(piece, 1, room.copies[1]), kRowBytes);
      tile_unit::add_bf16_products<1, 5, 6>();
    }
    if (piece + 1 == pieces) break;
    meanwhile();
    tile_unit::load<7>(room.factors[piece + 1], kColumnBytes);
    tile_unit::load<4>(tile(piece + 1, 0, room.copies[2]), kRowBytes);
    tile_unit::add_bf16_products<2, 4, 7>();
    if (has_two) {
      tile_unit::load<5>(tile(piece + 1, 1, room.copies[3]), kRowBytes);
      tile_unit::add_bf16_products<3, 5, 7>();
    }
  }
  alignas(64) float even[2 * kTileFloats], odd[2 * kTileFloats];
  tile_unit::store<0>(even, kColumnBytes);
  tile_unit::store<1>(even + kTileFloats, kColumnBytes);
  tile_unit::store<2>(odd, kColumnBytes);
  tile_unit::store<3>(odd + kTileFloats, kColumnBytes);
  for (int row = 0; row < (has_two ? 2 : 1) * kUnitRows; ++row) {
    float sums[kLanes];
    simd::store(sums, simd::transpose_parts(simd::add(simd::load(even + row * kLanes),
                                                      simd::load(odd + row * kLanes))));
    for (int r = 0; r < row_count; ++r)
      std::memcpy(to + r * kStride + row * kRowPieces, sums + r * kRowPieces,
                  kRowPieces * sizeof(float));
  }
}

template <int kScoreStride, class Meanwhile>
__attribute__((noinline)) void multiply_in_place(int row_count, const float* queries,
                                                 const KeysInPlace& key, int count, float* scores,
                                                 FewRowsRoom& room, const Meanwhile& meanwhile) {
  constexpr int kPieces = kHdimQ / kPiece, kRuns = kTilePieces / kPiece;
  spread_factors(queries, row_count, Queries::kStride, kPieces, room);
  const int64_t stride = key.stride();
  const bool has_whole_tiles = key.rows.page_size % kTilePieces == 0;
  auto ask = in_turns(count, (count + kBlockPieces - 1) / kBlockPieces * kPieces, meanwhile);
  for (int first = 0; first < count; first += kBlockPieces) {
    // Runs of keys lie in one page each. Where there are none any more, the last one is repeated.
    const int last = (count - 1) / kPiece * kPiece;
    const KeyElement* runs[2 * kRuns];
    for (int i = 0; i < 2 * kRuns; ++i) runs[i] = key(min(first + i * kPiece, last));
    const auto tile = [&](int piece, int t, KeyElement* copy) -> const KeyElement* {
      const KeyElement* const* of_tile = runs + t * kRuns;
      const int keys = min(count - first - t * kTilePieces, kTilePieces);
      if (has_whole_tiles && keys == kTilePieces) return of_tile[0] + piece * stride;
      for (int i = 0; i < kRuns; ++i)
        std::memcpy(copy + i * kPiece * kPiece, of_tile[i] + piece * stride,
                    kPiece * kPiece * sizeof(KeyElement));
      fill(copy + keys * kPiece, (kTilePieces - keys) * kPiece, KeyElement(0));
      return copy;
    };
    multiply_pieces<kScoreStride>(row_count, kPieces, first + kTilePieces < count, tile,
                                  scores + first, room, ask);
  }
}

template <int kScoreStride, int kOutputStride, class Meanwhile>
__attribute__((noinline)) void accumulate_in_place(int row_count, float* probabilities,
                                                   const ValuesInPlace& value, int count,
                                                   const float* decay, float* outputs,
                                                   FewRowsRoom& room, const Meanwhile& meanwhile) {
  const int pieces = (count + kPiece - 1) / kPiece;
  for (int r = 0; r < row_count; ++r)
    probabilities_to_operands<kPiece>(probabilities + r * kScoreStride, count);
  spread_factors(probabilities, row_count, kScoreStride, pieces, room);
  const PiecesOfValues values(value, count);
  constexpr int kBlocks = (kHdimV + kBlockPieces - 1) / kBlockPieces;
  auto ask = in_turns(count, kBlocks * pieces, meanwhile);
  float sums[kRowsAtOnce][kBlocks * kBlockPieces];
  for (int first = 0; first < kHdimV; first += kBlockPieces) {
    const auto tile = [&](int piece, int t, KeyElement* copy) -> const KeyElement* {
      const int column = first + t * kTilePieces;
      const KeyElement* from = values.at[piece] + column * kPiece;
      if (kHdimV % kTilePieces == 0 || column + kTilePieces <= kHdimV) return from;
      std::memcpy(copy, from, kHdimV % kTilePieces * kPiece * sizeof(KeyElement));
      return copy;
    };
    multiply_pieces<kBlocks * kBlockPieces>(row_count, pieces, first + kTilePieces < kHdimV, tile,
                                            sums[0] + first, room, ask);
  }
  add_to_outputs<kOutputStride>(sums, row_count, decay, outputs);
}

}  // namespace
