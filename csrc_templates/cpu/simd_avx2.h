// Vectors of 8 floats for AVX2 with FMA and F16C.
#pragma once

#include <cstdint>
#include <type_traits>

#include "intrinsics.h"

namespace simd {

using Vec = __m256;
constexpr int kLanes = 8;

// 12 accumulators: with two vectors of the panel and a broadcast, 15 of the 16 registers.
constexpr int kBlockRows = 6;
constexpr int kBlockVectors = 2;

inline Vec load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Vec a) { _mm256_storeu_ps(to, a); }
inline Vec broadcast(float a) { return _mm256_set1_ps(a); }
inline Vec mul_add(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }

inline Vec select_between(Vec low, Vec x, Vec high, Vec a, Vec b) {
  const Vec inside =
      _mm256_and_ps(_mm256_cmp_ps(low, x, _CMP_LE_OQ), _mm256_cmp_ps(x, high, _CMP_LE_OQ));
  return _mm256_blendv_ps(b, a, inside);
}

inline Vec clamp(Vec x, float limit) {
  return _mm256_max_ps(_mm256_set1_ps(-limit), _mm256_min_ps(_mm256_set1_ps(limit), x));
}
inline Vec abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline Vec divide(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec divide_roughly(Vec a, Vec b) { return divide(a, b); }

using Bits = __m256i;
inline Bits load_bits(const uint32_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline Bits broadcast_bits(uint32_t a) { return _mm256_set1_epi32(int(a)); }
inline Bits exclusive_or(Bits a, Bits b, Bits c) {
  return _mm256_xor_si256(_mm256_xor_si256(a, b), c);
}

// The same integers as they are multiplied: the even lanes and the odd ones, each in the low half
// of 64 bits. The high half holds anything.
struct Factors {
  Bits even, odd;
};
inline Factors spread(Bits a) { return {a, _mm256_srli_epi64(a, 32)}; }
inline Bits gather(Factors a) {
  return _mm256_blend_epi32(a.even, _mm256_slli_epi64(a.odd, 32), 0xaa);
}
inline void multiply_wide(Factors a, uint32_t b, Factors& high, Factors& low) {
  const Bits factor = _mm256_set1_epi32(int(b));
  low = {_mm256_mul_epu32(a.even, factor), _mm256_mul_epu32(a.odd, factor)};
  high = {_mm256_srli_epi64(low.even, 32), _mm256_srli_epi64(low.odd, 32)};
}
inline Factors exclusive_or(Factors a, Factors b, uint32_t c) {
  return {exclusive_or(a.even, b.even, broadcast_bits(c)),
          exclusive_or(a.odd, b.odd, broadcast_bits(c))};
}

inline Bits subtract_bytes(Bits a, uint8_t b) {
  return _mm256_subs_epu8(a, _mm256_set1_epi8(char(b)));
}
inline Vec where_zero(Bits bits, uint32_t mask, Vec a) {
  const Bits masked = _mm256_and_si256(bits, _mm256_set1_epi32(int(mask)));
  return _mm256_and_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(masked, _mm256_setzero_si256())), a);
}

constexpr float kLeastExponent = -127.0f;
inline Vec clamp_exponent(Vec x) { return _mm256_max_ps(_mm256_set1_ps(kLeastExponent), x); }
inline Vec round_exponent(Vec x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec scale_exponent(Vec a, Vec whole) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
}

inline void transpose(Vec (&rows)[kLanes]) {
  Vec t[kLanes];
  for (int i = 0; i < kLanes; i += 4) {
    const Vec ab_low = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    const Vec ab_high = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    const Vec cd_low = _mm256_unpacklo_ps(rows[i + 2], rows[i + 3]);
    const Vec cd_high = _mm256_unpackhi_ps(rows[i + 2], rows[i + 3]);
    t[i] = _mm256_shuffle_ps(ab_low, cd_low, 0x44);
    t[i + 1] = _mm256_shuffle_ps(ab_low, cd_low, 0xee);
    t[i + 2] = _mm256_shuffle_ps(ab_high, cd_high, 0x44);
    t[i + 3] = _mm256_shuffle_ps(ab_high, cd_high, 0xee);
  }
  // Either 128-bit half now holds a transposed 4x4 block; what is left is to transpose the blocks.
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2f128_ps(t[i], t[4 + i], 0x20);
    rows[4 + i] = _mm256_permute2f128_ps(t[i], t[4 + i], 0x31);
  }
}
inline Vec sum_rows(const Vec (&rows)[kLanes]) {
  const auto add_halves = [](Vec a, Vec b) {
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  };
  Vec halves[4];  // one for each of the rows i and i + 4
  for (int i = 0; i < 4; ++i) halves[i] = add_halves(rows[i], rows[i + 4]);
  return _mm256_hadd_ps(_mm256_hadd_ps(halves[0], halves[1]), _mm256_hadd_ps(halves[2], halves[3]));
}
inline Vec repeat(const float* from, std::integral_constant<int, 2>) {
  return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(from));
}
inline void sum_parts(const Vec (&rows)[kLanes], std::integral_constant<int, 2>, float* to) {
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int i = 0; i < kLanes; i += 4) {
    const Vec sums = _mm256_hadd_ps(_mm256_hadd_ps(rows[i], rows[i + 1]),
                                    _mm256_hadd_ps(rows[i + 2], rows[i + 3]));
    store(to + 2 * i, _mm256_permutevar8x32_ps(sums, in_order));
  }
}
inline float largest_lane(Vec a) {
  __m128 largest = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  largest = _mm_max_ps(largest, _mm_movehl_ps(largest, largest));
  return _mm_cvtss_f32(_mm_max_ss(largest, _mm_movehdup_ps(largest)));
}
inline float sum_lanes(Vec a) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  sum = _mm_add_ps(sum, _mm_movehdup_ps(sum));  // neighbours first, as sum_rows does
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehl_ps(sum, sum)));
}
inline void load_transposed(const void* const (&rows)[kLanes], Vec (&block)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) block[i] = load(static_cast<const float*>(rows[i]));
  transpose(block);
}

inline Vec load_fp16(const uint16_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void store_fp16(uint16_t* to, Vec a) {
  constexpr int kToNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(a, kToNearest));
}

inline Vec load_bytes(const uint8_t* from) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}

inline Vec first_bf16(Vec pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16));
}
inline Vec second_bf16(Vec pairs) {
  return _mm256_and_ps(pairs, _mm256_castsi256_ps(_mm256_set1_epi32(int(0xffff0000u))));
}

inline Vec load_bf16(const uint16_t* from) {
  const __m256i bits =
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}
inline void store_bf16(uint16_t* to, Vec a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i last_kept = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i half_even = _mm256_add_epi32(last_kept, _mm256_set1_epi32(0x7fff));
  const Vec rounded = _mm256_castsi256_ps(_mm256_add_epi32(bits, half_even));
  const Vec quiet_nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  const Vec result = _mm256_blendv_ps(rounded, quiet_nan, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(result), 16);
  // Packing works on either 128-bit half: gather both results in the lower one.
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}

}  // namespace simd
