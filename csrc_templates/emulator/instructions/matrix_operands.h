// What MFMA and SMFMAC are made of: elements of every type, where they lie in the registers, and
// sums of products.
#pragma once

#include <cmath>

#include "execution/lanes.h"
#include "numbers/small_floats.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__clang__)
#define EMULATOR_UNROLL _Pragma("clang loop unroll(full)")
#else
#define EMULATOR_UNROLL _Pragma("GCC unroll 16")
#endif

namespace emulator {

// ---- Elements -----------------------------------------------------------------------------------
// `value` of an element's bits, exact: every type but float64 computes as float32. Sums of products
// of int8 stay far below 2^24. Formats of 4 to 8 bits are those of small_floats.h.

struct Float32 {
  static constexpr u32 kBits = 32;
  static f32 value(u32 bits) { return bit_cast<f32>(bits); }
};

// 10 bits of mantissa; infinity and NaN as they are.
struct Xfloat32 {
  static constexpr u32 kBits = 32;
  static f32 value(u32 bits) {
    const u32 rounded = (bits + 0xfffu + (bits >> 13 & 1)) & ~0x1fffu;
    return bit_cast<f32>((bits & 0x7f800000u) == 0x7f800000u ? bits : rounded);
  }
};

struct Float16 {
  static constexpr u32 kBits = 16;
  static f32 value(u32 bits) { return half_to_float(static_cast<u16>(bits)); }
};

struct Bfloat16 {
  static constexpr u32 kBits = 16;
  static f32 value(u32 bits) { return bit_cast<f32>(bits << 16); }
};

struct Int8 {
  static constexpr u32 kBits = 8;
  static f32 value(u32 bits) { return static_cast<f32>(static_cast<i32>(bits << 24) >> 24); }
};

// One element of each lane.
using Plane = f32[kLanes];

// Elements 0, 1, ... of each lane. They are packed from the lowest bit on, across registers where
// their size does not divide 32.
template <class T>
void unpack(Wave& wave, const Operand& operand, u32 count, Plane* planes) {
  constexpr u32 kMask = static_cast<u32>((u64{1} << T::kBits) - 1);
  hooks::vgpr_read(wave, operand.index, operand.dwords, kAllLanes);
  for (u32 element = 0; element < count; ++element) {
    const u32 position = T::kBits * element, shift = position % 32;
    const u32* const low = wave.vgpr[operand.index + position / 32];
    f32* const plane = planes[element];
    if (32 % T::kBits == 0 || shift + T::kBits <= 32) {
      for (u32 lane = 0; lane < kLanes; ++lane) plane[lane] = T::value(low[lane] >> shift & kMask);
    } else {
      const u32* const high = low + kLanes;
      for (u32 lane = 0; lane < kLanes; ++lane)
        plane[lane] = T::value((low[lane] >> shift | high[lane] << (32 - shift)) & kMask);
    }
  }
}

// Lane l gets the elements of lane source(l).
template <class Source>
void permute_lanes(u32 count, Plane* planes, Source source) {
  for (u32 element = 0; element < count; ++element) {
    Plane original;
    std::memcpy(original, planes[element], sizeof(Plane));
    for (u32 lane = 0; lane < kLanes; ++lane) planes[element][lane] = original[source(lane)];
  }
}

inline void flush_denormals(u32 count, Plane* planes) {
  for (u32 element = 0; element < count; ++element)
    for (u32 lane = 0; lane < kLanes; ++lane) {
      const u32 bits = bit_cast<u32>(planes[element][lane]);
      planes[element][lane] = bit_cast<f32>(bits & 0x7f800000u ? bits : bits & 0x80000000u);
    }
}

// ---- Layout -------------------------------------------------------------------------------------
// CDNA4 ISA, 7.1.4: kBlocks products of kSize x kSize results. Row i of A (column i of B) of a
// block is in lane i + kSize * (block + kBlocks * group); each of kGroups groups of lanes holds
// depths of its own. C and D: kHeight rows in consecutive items, then rows in the next lanes, then
// blocks.
template <u32 kSize, u32 kBlocks, u32 kHeight = 4>
struct Layout {
  static constexpr u32 kStride = kSize * kBlocks;
  static constexpr u32 kGroups = kLanes / kStride;
  static constexpr u32 kItems = kBlocks * kSize * kSize / kLanes;
  static constexpr u32 kBlocksPerItem =
      kSize * kSize >= kLanes * kHeight ? 1 : kLanes * kHeight / (kSize * kSize);
  static constexpr u32 kRowsPerItem = kLanes / kBlocksPerItem / kSize;
  static constexpr u32 kRowsPerGroup = kHeight * kRowsPerItem;  // of kHeight items
  static constexpr u32 item_of(u32 block, u32 row) {
    const u32 group = row / kRowsPerGroup + kSize / kRowsPerGroup * (block / kBlocksPerItem);
    return row % kHeight + kHeight * group;
  }
  static constexpr u32 lane_of(u32 block, u32 row) {
    return kSize * (row / kHeight % kRowsPerItem + kRowsPerItem * (block % kBlocksPerItem));
  }
};

// C on its way in and D on its way out, row after row. All of C is here before the first register
// of D is written, so that they may overlap in any way. T is f32 or i32.
template <u32 kSize, u32 kBlocks, class T>
struct alignas(64) Accumulator {
  using Where = Layout<kSize, kBlocks>;
  T rows[kBlocks][kSize][kSize];
  static constexpr std::size_t kRowBytes = sizeof(T) * kSize;

  void read(Wave& wave, const Operand& operand) {
    if (operand.place == Place::constant) {
      const T constant = bit_cast<T>(static_cast<u32>(operand.constant));
      for (T& value : reinterpret_cast<T(&)[kBlocks * kSize * kSize]>(rows)) value = constant;
      return;
    }
    hooks::vgpr_read(wave, operand.index, Where::kItems, kAllLanes);
    for (u32 block = 0; block < kBlocks; ++block)
      for (u32 row = 0; row < kSize; ++row)
        std::memcpy(rows[block][row], place_of(wave, operand, block, row), kRowBytes);
  }

  void write(Wave& wave, const Operand& operand) const {
    for (u32 block = 0; block < kBlocks; ++block)
      for (u32 row = 0; row < kSize; ++row)
        std::memcpy(place_of(wave, operand, block, row), rows[block][row], kRowBytes);
    hooks::vgpr_written(wave, operand.index, Where::kItems, kAllLanes);
  }

 private:
  static u32* place_of(Wave& wave, const Operand& operand, u32 block, u32 row) {
    return wave.vgpr[operand.index + Where::item_of(block, row)] + Where::lane_of(block, row);
  }
};

// ---- Sums of products ---------------------------------------------------------------------------

// As many float32 as the CPU multiplies at once.
#if defined(__AVX512F__)
struct F32Vector {
  static constexpr u32 kWidth = 16;
  __m512 lanes;
  static F32Vector load(const f32* from) { return {_mm512_loadu_ps(from)}; }
  static F32Vector all(f32 value) { return {_mm512_set1_ps(value)}; }
  void store(f32* to) const { _mm512_storeu_ps(to, lanes); }
  void add_product(F32Vector a, F32Vector b) { lanes = _mm512_fmadd_ps(a.lanes, b.lanes, lanes); }
};
#elif defined(__AVX2__) && defined(__FMA__)
struct F32Vector {
  static constexpr u32 kWidth = 8;
  __m256 lanes;
  static F32Vector load(const f32* from) { return {_mm256_loadu_ps(from)}; }
  static F32Vector all(f32 value) { return {_mm256_set1_ps(value)}; }
  void store(f32* to) const { _mm256_storeu_ps(to, lanes); }
  void add_product(F32Vector a, F32Vector b) { lanes = _mm256_fmadd_ps(a.lanes, b.lanes, lanes); }
};
#elif defined(__aarch64__)
struct F32Vector {
  static constexpr u32 kWidth = 4;
  float32x4_t lanes;
  static F32Vector load(const f32* from) { return {vld1q_f32(from)}; }
  static F32Vector all(f32 value) { return {vdupq_n_f32(value)}; }
  void store(f32* to) const { vst1q_f32(to, lanes); }
  void add_product(F32Vector a, F32Vector b) { lanes = vfmaq_f32(lanes, a.lanes, b.lanes); }
};
#else
struct F32Vector {
  static constexpr u32 kWidth = 1;
  f32 lanes;
  static F32Vector load(const f32* from) { return {*from}; }
  static F32Vector all(f32 value) { return {value}; }
  void store(f32* to) const { *to = lanes; }
  void add_product(F32Vector a, F32Vector b) { lanes = std::fma(a.lanes, b.lanes, lanes); }
};
#endif

// Terms of a sum: element e of A and of B, for e below `count`, in `groups` groups of lanes that
// are `stride` lanes apart.
struct Terms {
  const Plane* a;
  const Plane* b;
  u32 count, groups, stride;
};

// rows[i][j] += sum of A's lane first + i times B's lane first + j, over all groups and elements.
template <u32 kSize>
__attribute__((noinline)) void add_products(const Terms& terms, u32 first, f32 (*rows)[kSize]) {
  if constexpr (kSize < F32Vector::kWidth) {
    for (u32 group = 0; group < terms.groups; ++group)
      for (u32 element = 0; element < terms.count; ++element) {
        const f32* const a = terms.a[element] + first + terms.stride * group;
        const f32* const b = terms.b[element] + first + terms.stride * group;
        for (u32 i = 0; i < kSize; ++i)
          for (u32 j = 0; j < kSize; ++j) rows[i][j] = __builtin_fmaf(a[i], b[j], rows[i][j]);
      }
  } else {
    // A tile of eight vectors stays in the CPU's registers while the depth runs.
    constexpr u32 kVectors = kSize / F32Vector::kWidth;
    constexpr u32 kTile = kVectors >= 8 ? 1 : 8 / kVectors < kSize ? 8 / kVectors : kSize;
    for (u32 row = 0; row < kSize; row += kTile) {
      F32Vector sums[kTile][kVectors];
      EMULATOR_UNROLL
      for (u32 i = 0; i < kTile; ++i) {
        EMULATOR_UNROLL
        for (u32 v = 0; v < kVectors; ++v)
          sums[i][v] = F32Vector::load(rows[row + i] + F32Vector::kWidth * v);
      }
      for (u32 group = 0; group < terms.groups; ++group) {
        const u32 lane = first + terms.stride * group;
        for (u32 element = 0; element < terms.count; ++element) {
          const f32* const a = terms.a[element] + lane + row;
          F32Vector b[kVectors];
          EMULATOR_UNROLL
          for (u32 v = 0; v < kVectors; ++v)
            b[v] = F32Vector::load(terms.b[element] + lane + F32Vector::kWidth * v);
          EMULATOR_UNROLL
          for (u32 i = 0; i < kTile; ++i) {
            const F32Vector factor = F32Vector::all(a[i]);
            EMULATOR_UNROLL
            for (u32 v = 0; v < kVectors; ++v) sums[i][v].add_product(factor, b[v]);
          }
        }
      }
      EMULATOR_UNROLL
      for (u32 i = 0; i < kTile; ++i) {
        EMULATOR_UNROLL
        for (u32 v = 0; v < kVectors; ++v) sums[i][v].store(rows[row + i] + F32Vector::kWidth * v);
      }
    }
  }
}

}  // namespace emulator
