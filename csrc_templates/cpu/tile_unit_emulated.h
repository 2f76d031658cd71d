// What tile_unit_amx.h does, in plain C++ and bit for bit, for processors without AMX: the kernels
// that use the tile unit are tested on any machine. What AMX refuses with a signal ends the process
// here, too: a tile that is not set up, and tiles whose shapes do not fit together.
#pragma once

#include <cstdint>
#include <cstring>

#include "tile_unit_shapes.h"

namespace tile_unit {

struct Tile {
  int rows = 0;
  int row_bytes = 0;
  uint32_t operands[kMostRows][kMostRowBytes / 4] = {};

  int columns() const { return row_bytes / 4; }
  float* sums(int row) { return reinterpret_cast<float*>(operands[row]); }
};

inline Tile* thread_tiles() {
  static thread_local Tile tiles[kTiles];
  return tiles;
}

inline void require(bool condition) {
  if (!condition) __builtin_trap();
}

template <int kTile>
inline Tile& tile() {
  static_assert(0 <= kTile && kTile < kTiles, "there is no such tile");
  Tile& it = thread_tiles()[kTile];
  require(it.rows > 0);
  return it;
}

class Configured {
 public:
  explicit Configured(const Shapes& shapes) {
    for (int i = 0; i < kTiles; ++i) {
      const int rows = shapes.rows[i], row_bytes = shapes.row_bytes[i];
      require(0 <= rows && rows <= kMostRows && 0 <= row_bytes && row_bytes <= kMostRowBytes);
      require((rows == 0) == (row_bytes == 0) && row_bytes % 4 == 0);
      thread_tiles()[i] = Tile{rows, row_bytes, {}};
    }
  }
  ~Configured() {
    for (int i = 0; i < kTiles; ++i) thread_tiles()[i] = Tile{};
  }
  Configured(const Configured&) = delete;
  Configured& operator=(const Configured&) = delete;
};

template <int kTile>
inline void zero() {
  Tile& it = tile<kTile>();
  it = Tile{it.rows, it.row_bytes, {}};
}

// What lies behind the rows and columns of the tile becomes 0.
template <int kTile>
inline void load(const void* from, int64_t stride) {
  zero<kTile>();
  Tile& it = tile<kTile>();
  for (int i = 0; i < it.rows; ++i)
    std::memcpy(it.operands[i], static_cast<const char*>(from) + i * stride, it.row_bytes);
}
template <int kTile>
inline void store(void* to, int64_t stride) {
  const Tile& it = tile<kTile>();
  for (int i = 0; i < it.rows; ++i)
    std::memcpy(static_cast<char*>(to) + i * stride, it.operands[i], it.row_bytes);
}

inline float zero_if_subnormal(float a) { return __builtin_fabsf(a) < 0x1p-126f ? a * 0.0f : a; }

// The bf16 number in the upper half of `bits`.
inline float bf16_number(uint32_t bits) {
  bits &= 0xffff0000u;
  float number;
  std::memcpy(&number, &bits, sizeof(number));
  return zero_if_subnormal(number);
}

// In the order of tile_unit_amx.h, with products that are not rounded.
template <int kSum, int kA, int kB>
inline void add_bf16_products() {
  Tile& sum = tile<kSum>();
  const Tile& a = tile<kA>();
  const Tile& b = tile<kB>();
  require(a.rows == sum.rows && a.columns() == b.rows && b.row_bytes == sum.row_bytes);
  float firsts[kMostRows][kMostRowBytes / 4], seconds[kMostRows][kMostRowBytes / 4];
  for (int k = 0; k < b.rows; ++k)
    for (int n = 0; n < b.columns(); ++n) {
      firsts[k][n] = bf16_number(b.operands[k][n] << 16);
      seconds[k][n] = bf16_number(b.operands[k][n]);
    }
  for (int m = 0; m < sum.rows; ++m) {
    float of_firsts[kMostRowBytes / 4] = {}, of_seconds[kMostRowBytes / 4] = {};
    for (int k = 0; k < b.rows; ++k) {
      const float first = bf16_number(a.operands[m][k] << 16);
      const float second = bf16_number(a.operands[m][k]);
      for (int n = 0; n < b.columns(); ++n) {
        of_firsts[n] = zero_if_subnormal(__builtin_fmaf(first, firsts[k][n], of_firsts[n]));
        of_seconds[n] = zero_if_subnormal(__builtin_fmaf(second, seconds[k][n], of_seconds[n]));
      }
    }
    for (int n = 0; n < b.columns(); ++n) {
      const float both = zero_if_subnormal(of_firsts[n] + of_seconds[n]);
      sum.sums(m)[n] = zero_if_subnormal(zero_if_subnormal(sum.sums(m)[n]) + both);
    }
  }
}

}  // namespace tile_unit
