// Tiles of the matrix products: how tensor rows are packed, and the product of one register block.
#pragma once

#include <cstring>

#include "elements.h"

namespace {

// Operands of a row of `hdim` elements, and what they take in scratch.
constexpr int depth_of(int hdim) { return (hdim + kOperandElements - 1) / kOperandElements; }
constexpr int padded_depth_of(int hdim) { return round_up(depth_of(hdim), kLanes); }

// Longer dot products are sums of parts of this length, which lose less to rounding.
constexpr int kDotLength = 128;

// Stride of staged rows: an odd number of cache lines, lest the rows of a block compete for a few
// sets of the L1 cache.
constexpr int staged_stride(int operands) { return round_up(operands, 16) | 16; }

// ---- Staging: tensor rows to padded rows of operands --------------------------------------------

constexpr int kVectorElements = kLanes * kOperandElements;

// Where to read kCount elements of a row from `d` on. The end of a row is read from a zero-padded
// copy in `edge`, as the memory behind it may not be ours to read.
template <int kHdim, class T, int kCount>
inline const T* readable(const T* row, int d, T (&edge)[kCount]) {
  if (kHdim % kCount == 0 || d + kCount <= kHdim) return row + d;
  std::memset(edge, 0, sizeof(edge));
  std::memcpy(edge, row + d, kHdim % kCount * sizeof(T));
  // GCC 12 loses this copy at -O3 where it unswitches the loop around it, unless somebody looks.
  __asm__("" : "+m"(edge));
  return edge;
}

// Asks for a row ahead of its use, to be brought into the cache of a level. The empty statement is
// an effect: GCC believes that a prefetch has none, and drops calls of functions that do nothing
// else.
template <int kHdim, int kLevel = 1, class T>
inline void prefetch_row(const T* row) {
  constexpr int kLineElements = 64 / sizeof(T);
  for (int d = 0; d < kHdim; d += kLineElements) __builtin_prefetch(row + d, 0, 4 - kLevel);
  __asm__ volatile("");
}

// Stores a vector to an output's row of kHdim elements from `d` on, as far as the row goes.
template <int kHdim>
inline void store_to_row(OutElement* row, int d, Vec a) {
  if (kHdim % kLanes == 0 || d + kLanes <= kHdim) {
    OutDtype::store(row + d, a);
  } else {
    OutElement edge[kLanes];
    OutDtype::store(edge, a);
    std::memcpy(row + d, edge, kHdim % kLanes * sizeof(OutElement));
  }
}

// Transposes `count` rows from row(at) on, one lane each, to to[operand][lane]. Lanes without a row
// repeat the last one.
template <int kHdim, class Row>
__attribute__((noinline)) void pack_transposed(const Row& row, int at, int count, int lanes,
                                               float* to) {
  for (int first = 0; first < lanes; first += kLanes) {
    const Element* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) rows[i] = row(at + min(first + i, count - 1));
    for (int i = first + kLanes; i < min(first + 2 * kLanes, count); ++i)
      prefetch_row<kHdim>(row(at + i));
    for (int s = 0; s < padded_depth_of(kHdim); s += kLanes) {
      Vec block[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        Element edge[kVectorElements];
        block[i] =
            Operands::load_along_row<Dtype>(readable<kHdim>(rows[i], s * kOperandElements, edge));
      }
      simd::transpose(block);
      for (int i = 0; i < kLanes; ++i) simd::store(to + (s + i) * lanes + first, block[i]);
    }
  }
}

// Calls visit(number of vectors as a type, element that it starts at) for each panel of a row of
// kHdim elements: kPanelLanes of them, and at the end a single vector where that is enough.
template <int kHdim, class Visit>
void for_each_row_panel(const Visit& visit) {
  int d = 0;
  for (; d + kPanelLanes - kLanes < kHdim; d += kPanelLanes)
    visit(std::integral_constant<int, kBlockVectors>{}, d);
  // Not compiled where there are none.
  constexpr int kRest = kHdim % kPanelLanes;
  if constexpr (0 < kRest && kRest <= kPanelLanes - kLanes)
    for (; d < kHdim; d += kLanes) visit(std::integral_constant<int, 1>{}, d);
}

// Cuts `count` rows, whose elements become lanes, into panels: per panel to[row][lane], with room
// for kMostRows rows.
template <int kHdim, int kMostRows, class Row>
void pack_rows(const Row& row, int count, float* to) {
  for (int i = 0; i < count; ++i) {
    const Element* from = row(i);
    for_each_row_panel<kHdim>([&](auto vectors, int first) {
      constexpr int kWidth = decltype(vectors)::value * kLanes;
      for (int d = first; d < first + kWidth; d += kLanes) {
        Element edge[kLanes];
        simd::store(
            to + first * kMostRows + i * kWidth + d - first,
            d < kHdim ? Dtype::load(readable<kHdim>(from, d, edge)) : simd::broadcast(0.0f));
      }
    });
  }
}

// row(j), for rows that lie `stride` elements apart.
template <class T>
inline auto rows_from(const T* first, int64_t stride) {
  return [=](int64_t j) { return first + j * stride; };
}

// Where the vector of kCount elements at `d` of a row begins. The last one ends with the row, and
// may have some of those of the one before; but shorter rows, and those that end within an operand,
// have it behind that one.
template <int kHdim, int kCount>
constexpr int start_of_vector(int d) {
  constexpr bool kEndsWithRow = kHdim >= kCount && kHdim % kOperandElements == 0;
  return kEndsWithRow ? min(d, kHdim - kCount) : d;
}

// Rows of keys or values as they are, kStride operands apart, followed by zeros up to a whole
// register block; row(j) is where row j starts. What is behind a row is zero already.
template <int kHdim, int kStride, class Row>
void stage_rows(const Row& row, int count, float* to) {
  for (int j = 0; j < count; ++j, to += kStride) {
    const KeyElement* from = row(j);
    for (int at = 0; at < kHdim; at += kVectorElements) {
      const int d = start_of_vector<kHdim, kVectorElements>(at);
      KeyElement edge[kVectorElements];
      simd::store(to + d / kOperandElements,
                  Operands::load_along_row<KeyDtype>(readable<kHdim>(from, d, edge)));
    }
  }
  std::memset(to, 0, (round_up(count, kBlockRows) - count) * kStride * sizeof(float));
}

// Does as stage_rows, with operands that reach down the columns: to[row / kOperandElements][hdim].
template <int kHdim, int kStride, class Row>
void stage_columns(const Row& row, int count, float* to) {
  static constexpr KeyElement kZeros[kHdim] = {};
  for (int j = 0; j < round_up(count, kBlockRows); j += kOperandElements, to += kStride) {
    const KeyElement* rows[kOperandElements];
    for (int i = 0; i < kOperandElements; ++i) rows[i] = j + i < count ? row(j + i) : kZeros;
    for (int at = 0; at < kHdim; at += kLanes) {
      const int d = start_of_vector<kHdim, kLanes>(at);
      KeyElement edges[kOperandElements][kLanes];
      const KeyElement* columns[kOperandElements];
      for (int i = 0; i < kOperandElements; ++i) columns[i] = readable<kHdim>(rows[i], d, edges[i]);
      simd::store(to + d, Operands::load_down_columns<KeyDtype>(columns));
    }
  }
}

// As stage_columns, from values whose keys are contiguous: elements lie `hdim_stride` apart, and
// those of `count` keys follow each other.
template <int kHdim, int kStride>
void stage_column_major(const KeyElement* from, int64_t hdim_stride, int count, float* to) {
  const int rows = round_up(count, kBlockRows) / kOperandElements;
  for (int d = 0; d < kHdim; d += kLanes)
    for (int row = 0; row < rows; row += kLanes) {
      const int key = row * kOperandElements;
      const int readable_keys = min(max(count - key, 0), kVectorElements);
      Vec block[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const KeyElement* keys = from + min(d + i, kHdim - 1) * hdim_stride + key;
        KeyElement edge[kVectorElements] = {};
        if (readable_keys < kVectorElements) {
          std::memcpy(edge, keys, readable_keys * sizeof(KeyElement));
          // As in readable.
          __asm__("" : "+m"(edge));
          keys = edge;
        }
        block[i] = Operands::load_along_row<KeyDtype>(keys);
      }
      simd::transpose(block);
      for (int i = 0; i < min(kLanes, rows - row); ++i)
        simd::store(to + (row + i) * kStride + d, block[i]);
    }
}

// ---- Products -----------------------------------------------------------------------------------

// block[r][lane] = sum over s < depth of
//     panel[s * kPanelStride + lane] * scalars[r * kRowStride + s * kDepthStride]
template <int kVectors, int kRowStride, int kDepthStride, int kPanelStride = kVectors * kLanes>
inline void multiply_block(const float* panel, const float* scalars, int depth,
                           Vec (&block)[kBlockRows][kVectors]) {
  // Sums of its own stay in registers: for all that the compiler knows of a function that it does
  // not inline, `block` may lie where the operands do.
  Vec sums[kBlockRows][kVectors];
  for (auto& row : sums)
    for (Vec& a : row) a = simd::broadcast(0.0f);
  for (int s = 0; s < depth; ++s) {
    Vec lanes[kVectors];
    for (int v = 0; v < kVectors; ++v) lanes[v] = simd::load(panel + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kBlockRows; ++r) {
      const Vec scalar = simd::broadcast(scalars[r * kRowStride]);
      for (int v = 0; v < kVectors; ++v)
        sums[r][v] = Operands::mul_add(lanes[v], scalar, sums[r][v]);
    }
    panel += kPanelStride;
    scalars += kDepthStride;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kBlockRows; ++r)
    for (int v = 0; v < kVectors; ++v) block[r][v] = sums[r][v];
}

// block[r][lane] = the dot product of column `lane` of a panel with row r of `rows`, of kDepth
// operands each.
template <int kVectors, int kDepth, int kRowStride>
inline void multiply_rows(const float* panel, const float* rows,
                          Vec (&block)[kBlockRows][kVectors]) {
  multiply_block<kVectors, kRowStride, 1>(panel, rows, min(kDepth, kDotLength), block);
  for (int s = kDotLength; s < kDepth; s += kDotLength) {
    Vec part[kBlockRows][kVectors];
    multiply_block<kVectors, kRowStride, 1>(panel + s * kVectors * kLanes, rows + s,
                                            min(kDepth - s, kDotLength), part);
    for (int r = 0; r < kBlockRows; ++r)
      for (int v = 0; v < kVectors; ++v) block[r][v] = simd::add(block[r][v], part[r][v]);
  }
}

}  // namespace
