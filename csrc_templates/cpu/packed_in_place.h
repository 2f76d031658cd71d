// Packed pages as a few rows read them: pieces of 16 bytes, where they lie, once for all rows.
//
// Both products are the same one. Of a page and head k is [hdim / x][key][x], and v is
// [key / x][hdim][x]: scores sum up over pieces of hdim times a piece of the query, and outputs
// over pieces of keys times a piece of probabilities. few_rows_packed_vectors.h and
// few_rows_packed_tile_unit.h have it.
#pragma once

#include <cstring>
#include <type_traits>

#include "few_rows_operands.h"
#include "problem.h"

namespace {

static_assert(kPackedPages, "pages are packed");
constexpr int kPiece = 16 / sizeof(KeyElement);

using Queries = QueriesInRows;
// As in few_rows_vectors.h.
constexpr int kFewKeys = min(kTileUnit ? 256 : 128, kTileKeys);
static_assert(kHdimQ % kPiece == 0, "keys are in whole pieces");
static_assert(kFewKeys % kVectorElements == 0, "operands of probabilities have room");

struct InPlace {
  KeyRows rows;
  int64_t from;

  // A head's part of the page with key `key`, and which of its keys that is.
  struct InPage {
    const KeyElement* page;
    uint32_t row;
  };
  InPage find(int key) const {
    const uint32_t at = uint32_t(from + key), page = at / rows.page_size;
    return {rows.first + element_at(rows.pages + page) * rows.strides.batch,
            at - page * rows.page_size};
  }
};

struct KeysInPlace : InPlace {
  // The first piece of a key.
  const KeyElement* operator()(int key) const {
    const InPage at = find(key);
    return at.page + at.row * kPiece;
  }
  int64_t stride() const { return int64_t(rows.page_size) * kPiece; }

  // Keys are asked for in the order in which their pieces lie in memory. Of a large page a step
  // takes some of each piece.
  const KeyElement* ahead(int key) const {
    if (rows.page_size <= uint32_t(kFewKeys)) {
      const InPage at = find(key);
      return at.page + at.row * kHdimQ;
    }
    constexpr int kRun = kFewKeys * kPiece;
    const int element = key * kHdimQ;
    return (*this)(0) + element / kRun * stride() + element % kRun;
  }
};

struct ValuesInPlace : InPlace {
  // The pieces of key `key`, which is the first one in them.
  const KeyElement* operator()(int key) const {
    const InPage at = find(key);
    return at.page + at.row * kHdimV;
  }
  const KeyElement* ahead(int key) const { return (*this)(key); }
};

// Where the pieces of some values are. Behind the last key there can be anything, also what no
// product with 0 makes 0: pieces with such keys are copied.
struct PiecesOfValues {
  const KeyElement* at[kFewKeys / kPiece];
  KeyElement last[kHdimV * kPiece];

  PiecesOfValues(const ValuesInPlace& value, int count) {
    const int whole = count / kPiece, rest = count % kPiece;
    for (int piece = 0; piece < whole; ++piece) at[piece] = value(piece * kPiece);
    if (rest == 0) return;
    const KeyElement* from = value(whole * kPiece);
    for (int i = 0; i < kHdimV * kPiece; ++i) last[i] = i % kPiece < rest ? from[i] : KeyElement(0);
    at[whole] = last;
  }
};

}  // namespace
