// What tile_unit_amx.h and tile_unit_emulated.h have in common.
#pragma once

namespace tile_unit {

constexpr int kTiles = 8;
constexpr int kMostRows = 16;
constexpr int kMostRowBytes = 64;

// What the tiles have of that. A tile of 0 rows is not used.
struct Shapes {
  int rows[kTiles];
  int row_bytes[kTiles];
};

}  // namespace tile_unit
