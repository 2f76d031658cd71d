// The tile unit of Intel's AMX: eight tiles of up to 16 rows of 64 bytes each, which belong to the
// thread, and the product of two of them added to a third. tile_unit_emulated.h has the same names.
//
// Whoever compiles this in has asked the operating system for the tiles' state before. Tiles are
// template parameters, and the instructions are written out, as GCC's intrinsics turn the text of
// their arguments into the register's name.
#pragma once

#include <cstdint>

#include "tile_unit_shapes.h"

namespace tile_unit {

// As long as it lives the tiles of the calling thread have these shapes; they start as zeros. What
// others in the thread had set up before is lost: torch sets its tiles up anew whenever it uses
// them. Released tiles cost the operating system no time when it changes threads.
class Configured {
 public:
  explicit Configured(const Shapes& shapes) {
    struct alignas(64) {
      uint8_t palette = 1;
      uint8_t start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } state;
    static_assert(sizeof(state) == 64, "as the instruction has it");
    for (int i = 0; i < kTiles; ++i) {
      state.rows[i] = uint8_t(shapes.rows[i]);
      state.row_bytes[i] = uint16_t(shapes.row_bytes[i]);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(state));
  }
  ~Configured() { __asm__ volatile("tilerelease" : :); }
  Configured(const Configured&) = delete;
  Configured& operator=(const Configured&) = delete;
};

template <int kTile>
inline void zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

// Rows lie `stride` bytes apart.
template <int kTile>
inline void load(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2"
                   :
                   : "r"(from), "r"(stride), "i"(kTile)
                   : "memory");
}
template <int kTile>
inline void store(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)"
                   :
                   : "r"(to), "r"(stride), "i"(kTile)
                   : "memory");
}

// For bf16 pairs, the first of each in its low half, and float32 sums:
//
//   sum[m][n] += sum over k of a[m][k].first * b[k][n].first + a[m][k].second * b[k][n].second
//
// Subnormal numbers count as 0 and become 0. The products of all first elements are added up in the
// order of k, those of all second ones too; then both sums are added, and the result to sum[m][n].
template <int kSum, int kA, int kB>
inline void add_bf16_products() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
}

}  // namespace tile_unit
