// Vectors of 16 floats for AVX-512 (F, BW, DQ, VL), with AVX512_BF16 dot products where they are
// compiled in.
#pragma once

#include <cstdint>
#include <type_traits>

#include "intrinsics.h"

namespace simd {

using Vec = __m512;
constexpr int kLanes = 16;

// Register block of the matrix products: kBlockRows x kBlockVectors accumulators. 16 of the 32
// registers hide the FMA latency and leave the loads well below one per FMA.
constexpr int kBlockRows = 8;
constexpr int kBlockVectors = 2;

inline Vec load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Vec a) { _mm512_storeu_ps(to, a); }
inline Vec broadcast(float a) { return _mm512_set1_ps(a); }
inline Vec mul_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }

inline Vec select_between(Vec low, Vec x, Vec high, Vec a, Vec b) {
  const __mmask16 above = _mm512_cmp_ps_mask(low, x, _CMP_LE_OQ);
  return _mm512_mask_blend_ps(_mm512_mask_cmp_ps_mask(above, x, high, _CMP_LE_OQ), b, a);
}

inline Vec clamp(Vec x, float limit) {
  return _mm512_max_ps(_mm512_set1_ps(-limit), _mm512_min_ps(_mm512_set1_ps(limit), x));
}
inline Vec abs(Vec a) { return _mm512_abs_ps(a); }
inline Vec divide_roughly(Vec a, Vec b) { return _mm512_mul_ps(a, _mm512_rcp14_ps(b)); }
// Within 2^-22: one step of Newton's, where the processor's own division takes longer.
inline Vec divide(Vec a, Vec b) {
  const Vec inverse = _mm512_rcp14_ps(b);
  const Vec quotient = _mm512_mul_ps(a, inverse);
  return _mm512_fmadd_ps(_mm512_fnmadd_ps(b, quotient, a), inverse, quotient);
}

using Bits = __m512i;
inline Bits load_bits(const uint32_t* from) { return _mm512_loadu_si512(from); }
inline Bits broadcast_bits(uint32_t a) { return _mm512_set1_epi32(int(a)); }
inline Bits exclusive_or(Bits a, Bits b, Bits c) {
  return _mm512_ternarylogic_epi32(a, b, c, 0x96);
}

// The same integers as they are multiplied: the even lanes and the odd ones, each in the low half
// of 64 bits. The high half holds anything.
struct Factors {
  Bits even, odd;
};
inline Factors spread(Bits a) { return {a, _mm512_srli_epi64(a, 32)}; }
inline Bits gather(Factors a) {
  return _mm512_mask_shuffle_epi32(a.even, 0xaaaa, a.odd, _MM_PERM_CCAA);
}
inline void multiply_wide(Factors a, uint32_t b, Factors& high, Factors& low) {
  const Bits factor = _mm512_set1_epi32(int(b));
  low = {_mm512_mul_epu32(a.even, factor), _mm512_mul_epu32(a.odd, factor)};
  high = {_mm512_shuffle_epi32(low.even, _MM_PERM_DDBB),
          _mm512_shuffle_epi32(low.odd, _MM_PERM_DDBB)};
}
inline Factors exclusive_or(Factors a, Factors b, uint32_t c) {
  return {exclusive_or(a.even, b.even, broadcast_bits(c)),
          exclusive_or(a.odd, b.odd, broadcast_bits(c))};
}

inline Bits subtract_bytes(Bits a, uint8_t b) {
  return _mm512_subs_epu8(a, _mm512_set1_epi8(char(b)));
}
inline Vec where_zero(Bits bits, uint32_t mask, Vec a) {
  return _mm512_maskz_mov_ps(_mm512_testn_epi32_mask(bits, _mm512_set1_epi32(int(mask))), a);
}

// The clamp is well above where numbers become subnormal, so that products of results are none
// either: one that is costs a hundred times as much, and masks, biases and ALiBi make many scores
// that small. They do not count in any sum.
constexpr float kLeastExponent = -100.0f;
inline Vec clamp_exponent(Vec x) { return _mm512_max_ps(_mm512_set1_ps(kLeastExponent), x); }
inline Vec round_exponent(Vec x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec scale_exponent(Vec a, Vec whole) {
  const __mmask16 counts = _mm512_cmp_ps_mask(whole, _mm512_set1_ps(kLeastExponent), _CMP_NLE_UQ);
  return _mm512_maskz_scalef_ps(counts, a, whole);
}

#define JITFMHA_FLOORS 1
inline Vec above_floor(Vec x) {
  return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
inline Vec scale_by_floor(Vec a, Vec x) {
  const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(kLeastExponent), _CMP_NLE_UQ);
  return _mm512_maskz_scalef_ps(counts, a, x);
}

inline void transpose(Vec (&rows)[kLanes]) {
  Vec t[kLanes];
  for (int i = 0; i < kLanes; i += 4) {
    const Vec ab_low = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    const Vec ab_high = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    const Vec cd_low = _mm512_unpacklo_ps(rows[i + 2], rows[i + 3]);
    const Vec cd_high = _mm512_unpackhi_ps(rows[i + 2], rows[i + 3]);
    t[i] = _mm512_shuffle_ps(ab_low, cd_low, 0x44);
    t[i + 1] = _mm512_shuffle_ps(ab_low, cd_low, 0xee);
    t[i + 2] = _mm512_shuffle_ps(ab_high, cd_high, 0x44);
    t[i + 3] = _mm512_shuffle_ps(ab_high, cd_high, 0xee);
  }
  // Every 128-bit quarter now holds a transposed 4x4 block; what is left is to
  // transpose the blocks.
  for (int i = 0; i < 4; ++i) {
    const Vec even_01 = _mm512_shuffle_f32x4(t[i], t[4 + i], 0x88);
    const Vec odd_01 = _mm512_shuffle_f32x4(t[i], t[4 + i], 0xdd);
    const Vec even_23 = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0x88);
    const Vec odd_23 = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0xdd);
    rows[i] = _mm512_shuffle_f32x4(even_01, even_23, 0x88);
    rows[4 + i] = _mm512_shuffle_f32x4(odd_01, odd_23, 0x88);
    rows[8 + i] = _mm512_shuffle_f32x4(even_01, even_23, 0xdd);
    rows[12 + i] = _mm512_shuffle_f32x4(odd_01, odd_23, 0xdd);
  }
}

// Halves of two vectors, added.
inline Vec add_wide_halves(Vec a, Vec b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
inline Vec add_blocks(Vec a, Vec b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
inline Vec add_halves(Vec a, Vec b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}
inline Vec add_neighbours(Vec a, Vec b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}
// Halves are added, then halves of these, with half as many shuffles as a transposition takes.
inline Vec sum_rows(const Vec (&rows)[kLanes]) {
  Vec blocks[4];  // 128 bits for each of the rows i, i + 4, i + 8 and i + 12
  for (int i = 0; i < 4; ++i)
    blocks[i] = add_blocks(add_wide_halves(rows[i], rows[i + 4]),
                           add_wide_halves(rows[i + 8], rows[i + 12]));
  return add_neighbours(add_halves(blocks[0], blocks[1]), add_halves(blocks[2], blocks[3]));
}
inline Vec repeat(const float* from, std::integral_constant<int, 4>) {
  return _mm512_broadcast_f32x4(_mm_loadu_ps(from));
}
inline Vec repeat(const float* from, std::integral_constant<int, 2>) {
  return _mm512_broadcast_f32x8(_mm256_loadu_ps(from));
}
inline Vec transpose_parts(Vec a) {
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_ps(in_order, a);
}
// The sums of the quarters of four rows, row by row.
inline Vec sum_quarters(Vec a, Vec b, Vec c, Vec d) {
  return transpose_parts(add_neighbours(add_halves(a, b), add_halves(c, d)));
}
inline void sum_parts(const Vec (&rows)[kLanes], std::integral_constant<int, 4>, float* to) {
  for (int i = 0; i < kLanes; i += 4)
    store(to + 4 * i, sum_quarters(rows[i], rows[i + 1], rows[i + 2], rows[i + 3]));
}
inline void sum_parts(const Vec (&rows)[kLanes], std::integral_constant<int, 2>, float* to) {
  for (int i = 0; i < kLanes; i += 8)
    store(to + 2 * i,
          sum_quarters(add_blocks(rows[i], rows[i + 1]), add_blocks(rows[i + 2], rows[i + 3]),
                       add_blocks(rows[i + 4], rows[i + 5]), add_blocks(rows[i + 6], rows[i + 7])));
}
inline float largest_lane(Vec a) { return _mm512_reduce_max_ps(a); }
inline float sum_lanes(Vec a) { return _mm512_reduce_add_ps(a); }
// With two rows in a register to begin with, a quarter of `transpose`'s shuffles is not needed.
inline void load_transposed(const void* const (&rows)[kLanes], Vec (&block)[kLanes]) {
  for (int column = 0; column < kLanes; column += 8) {
    const auto rows_i_and_4 = [&](int i) {
      const float* first = static_cast<const float*>(rows[i]) + column;
      const float* second = static_cast<const float*>(rows[i + 4]) + column;
      return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(first)),
                                _mm256_loadu_ps(second), 1);
    };
    // t[half][c] has columns c and 4 + c of rows 8 * half on, those of four rows in each quarter.
    Vec t[2][4];
    for (int half = 0; half < 2; ++half) {
      const int i = 8 * half;
      const Vec a = rows_i_and_4(i), b = rows_i_and_4(i + 1);
      const Vec c = rows_i_and_4(i + 2), d = rows_i_and_4(i + 3);
      const Vec ab_low = _mm512_unpacklo_ps(a, b), ab_high = _mm512_unpackhi_ps(a, b);
      const Vec cd_low = _mm512_unpacklo_ps(c, d), cd_high = _mm512_unpackhi_ps(c, d);
      t[half][0] = _mm512_shuffle_ps(ab_low, cd_low, 0x44);
      t[half][1] = _mm512_shuffle_ps(ab_low, cd_low, 0xee);
      t[half][2] = _mm512_shuffle_ps(ab_high, cd_high, 0x44);
      t[half][3] = _mm512_shuffle_ps(ab_high, cd_high, 0xee);
    }
    for (int c = 0; c < 4; ++c) {
      block[column + c] = _mm512_shuffle_f32x4(t[0][c], t[1][c], 0x88);
      block[column + 4 + c] = _mm512_shuffle_f32x4(t[0][c], t[1][c], 0xdd);
    }
  }
}

inline Vec load_fp16(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline void store_fp16(uint16_t* to, Vec a) {
  constexpr int kToNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(a, kToNearest));
}

inline Vec load_bytes(const uint8_t* from) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

inline Vec first_bf16(Vec pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
}
inline Vec second_bf16(Vec pairs) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi32(int(0xffff0000u))));
}

// One lane of the first, one of the second, and so on.
inline void interleave(Vec first, Vec second, float* to) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  store(to, _mm512_permutex2var_ps(first, low, second));
  store(to + kLanes, _mm512_permutex2var_ps(first, high, second));
}

inline __m512i widen(const uint16_t* from) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline Vec load_bf16(const uint16_t* from) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(widen(from), 16));
}
inline void store_bf16(uint16_t* to, Vec a) {
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i last_kept = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i half_even = _mm512_add_epi32(last_kept, _mm512_set1_epi32(0x7fff));
  const __mmask16 is_number = _mm512_cmp_ps_mask(a, a, _CMP_ORD_Q);
  const __m512i quiet_nan = _mm512_set1_epi32(0x7fc00000);
  const __m512i rounded = _mm512_mask_add_epi32(quiet_nan, is_number, bits, half_even);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

#if defined(__AVX512BF16__)
#define JITFMHA_BF16_PAIRS 1

inline Vec pair_mul_add(Vec a, Vec b, Vec c) {
  return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
inline Vec round_to_pairs(Vec first, Vec second) {
  // The conversion yields all of `first`, then all of `second`.
  alignas(64) static constexpr uint16_t kInterleave[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512bh halves = _mm512_cvtne2ps_pbh(second, first);
  return _mm512_castsi512_ps(
      _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), reinterpret_cast<__m512i>(halves)));
}
inline Vec round_to_successive_pairs(Vec first, Vec second) {
  return reinterpret_cast<Vec>(_mm512_cvtne2ps_pbh(second, first));
}
inline Vec load_pairs(const uint16_t* first, const uint16_t* second) {
  const __m512i high = _mm512_slli_epi32(widen(second), 16);
  return _mm512_castsi512_ps(_mm512_or_si512(widen(first), high));
}
inline void load_two_pairs(const uint16_t* first, const uint16_t* second, Vec& low, Vec& high) {
  const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
  low = _mm512_castsi512_ps(_mm512_unpacklo_epi16(a, b));
  high = _mm512_castsi512_ps(_mm512_unpackhi_epi16(a, b));
}
constexpr int element_of_pair(int half, int lane) { return lane / 4 * 8 + half * 4 + lane % 4; }
#endif

}  // namespace simd
