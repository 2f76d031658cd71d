// Vectors of 4 floats in GCC's and Clang's portable vector types: baseline x86-64, or
// anything else.
#pragma once

#include <cstdint>
#include <cstring>

namespace simd {

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IntVec __attribute__((vector_size(16)));
typedef uint32_t BitVec __attribute__((vector_size(16)));
typedef uint8_t ByteVec __attribute__((vector_size(16)));
constexpr int kLanes = 4;

// 8 accumulators: where there is no FMA, 16 registers have to hold the products, too.
constexpr int kBlockRows = 4;
constexpr int kBlockVectors = 2;

inline Vec load(const float* from) {
  Vec a;
  std::memcpy(&a, from, sizeof(a));
  return a;
}
inline void store(float* to, Vec a) { std::memcpy(to, &a, sizeof(a)); }
inline Vec broadcast(float a) { return Vec{a, a, a, a}; }
inline Vec mul_add(Vec a, Vec b, Vec c) { return a * b + c; }

inline BitVec bits_of(Vec a) { return (BitVec)a; }
inline Vec from_bits(BitVec bits) { return (Vec)bits; }

// Comparisons are all ones in the lanes where they hold.
inline Vec select(IntVec condition, Vec a, Vec b) {
  return (Vec)(((IntVec)a & condition) | ((IntVec)b & ~condition));
}

inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }
inline Vec min(Vec a, Vec b) { return select(a < b, a, b); }

inline Vec select_between(Vec low, Vec x, Vec high, Vec a, Vec b) {
  return select((low <= x) & (x <= high), a, b);
}

inline Vec clamp(Vec x, float limit) {
  const Vec below = select(x > broadcast(limit), broadcast(limit), x);
  return select(below < broadcast(-limit), broadcast(-limit), below);
}
inline Vec abs(Vec a) { return from_bits(bits_of(a) & 0x7fffffffu); }
inline Vec divide(Vec a, Vec b) { return a / b; }
inline Vec divide_roughly(Vec a, Vec b) { return divide(a, b); }

using Bits = BitVec;
inline Bits load_bits(const uint32_t* from) {
  Bits a;
  std::memcpy(&a, from, sizeof(a));
  return a;
}
inline Bits broadcast_bits(uint32_t a) { return Bits{a, a, a, a}; }
inline Bits exclusive_or(Bits a, Bits b, uint32_t c) { return a ^ b ^ c; }

using Factors = Bits;
inline Factors spread(Bits a) { return a; }
inline Bits gather(Factors a) { return a; }
inline void multiply_wide(Bits a, uint32_t b, Bits& high, Bits& low) {
  for (int i = 0; i < kLanes; ++i) {
    const uint64_t product = uint64_t(a[i]) * b;
    high[i] = uint32_t(product >> 32);
    low[i] = uint32_t(product);
  }
}
inline Bits subtract_bytes(Bits a, uint8_t b) {
  ByteVec bytes = (ByteVec)a;
  const ByteVec other = ByteVec{} + b;
  bytes = (bytes - other) & (ByteVec)(bytes > other);
  return (Bits)bytes;
}
inline Vec where_zero(Bits bits, uint32_t mask, Vec a) {
  return select((IntVec)((bits & mask) == 0u), a, broadcast(0.0f));
}

constexpr float kLeastExponent = -127.0f;
inline Vec clamp_exponent(Vec x) {
  const Vec lowest = broadcast(kLeastExponent);
  const Vec highest = broadcast(128.0f);  // 2^128 becomes infinite
  return select(lowest > x, lowest, select(x > highest, highest, x));
}
// Adding 1.5 * 2^23 leaves no bits for a fraction, and the integer in the low bits.
constexpr float kIntegerBits = 12582912.0f;
inline Vec round_exponent(Vec x) { return (x + kIntegerBits) - kIntegerBits; }
inline Vec scale_exponent(Vec a, Vec whole) {
  return a * from_bits(bits_of(whole + (kIntegerBits + 127.0f)) << 23);
}

inline void transpose(Vec (&rows)[kLanes]) {
  Vec t[kLanes];
  for (int i = 0; i < kLanes; ++i) t[i] = Vec{rows[0][i], rows[1][i], rows[2][i], rows[3][i]};
  for (int i = 0; i < kLanes; ++i) rows[i] = t[i];
}
inline float sum_lanes(Vec a) { return (a[0] + a[1]) + (a[2] + a[3]); }
inline Vec sum_rows(const Vec (&rows)[kLanes]) {
  return Vec{sum_lanes(rows[0]), sum_lanes(rows[1]), sum_lanes(rows[2]), sum_lanes(rows[3])};
}
inline Vec transpose_parts(Vec a) { return a; }
inline float largest_lane(Vec a) {
  const float first = a[0] < a[1] ? a[1] : a[0], second = a[2] < a[3] ? a[3] : a[2];
  return first < second ? second : first;
}
inline void load_transposed(const void* const (&rows)[kLanes], Vec (&block)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) block[i] = load(static_cast<const float*>(rows[i]));
  transpose(block);
}

inline BitVec widen(const uint16_t* from) { return BitVec{from[0], from[1], from[2], from[3]}; }
inline void narrow(uint16_t* to, BitVec bits) {
  for (int i = 0; i < kLanes; ++i) to[i] = uint16_t(bits[i]);
}

inline Vec load_bytes(const uint8_t* from) {
  return Vec{0.0f + from[0], 0.0f + from[1], 0.0f + from[2], 0.0f + from[3]};
}

inline Vec first_bf16(Vec pairs) { return from_bits(bits_of(pairs) << 16); }
inline Vec second_bf16(Vec pairs) { return from_bits(bits_of(pairs) & 0xffff0000u); }

// One lane of the first, one of the second, and so on.
inline void interleave(Vec first, Vec second, float* to) {
  for (int lane = 0; lane < kLanes; ++lane) {
    to[2 * lane] = first[lane];
    to[2 * lane + 1] = second[lane];
  }
}

inline Vec load_bf16(const uint16_t* from) { return from_bits(widen(from) << 16); }
inline void store_bf16(uint16_t* to, Vec a) {
  const BitVec bits = bits_of(a);
  const Vec rounded = from_bits(bits + 0x7fffu + ((bits >> 16) & 1u));
  const Vec quiet_nan = from_bits(BitVec{} + 0x7fc00000u);
  narrow(to, bits_of(select(a == a, rounded, quiet_nan)) >> 16);
}

// fp16 has 5 bits of exponent biased by 15, and 10 of mantissa; float has 8, biased by 127, and 23.
// Moved into place, a half is too small by 2^112, which a product puts right for subnormals, too.
inline Vec load_fp16(const uint16_t* from) {
  const BitVec half = widen(from);
  const BitVec sign = (half & 0x8000u) << 16;
  const BitVec magnitude = bits_of(from_bits((half & 0x7fffu) << 13) * 0x1p112f);
  const BitVec not_finite = (BitVec)((half & 0x7c00u) == 0x7c00u) & 0x7f800000u;
  return from_bits(magnitude | not_finite | sign);
}
inline void store_fp16(uint16_t* to, Vec a) {
  const BitVec sign = (bits_of(a) >> 16) & 0x8000u;
  const Vec magnitude = from_bits(bits_of(a) & 0x7fffffffu);
  // Normal halves: round the 13 bits that go to nearest even, and move the bias.
  const BitVec bits = bits_of(magnitude);
  const BitVec normal = (bits + 0xfffu + ((bits >> 13) & 1u) - (112u << 23)) >> 13;
  // Subnormal ones are multiples of 2^-24, as are all floats from 1/2 to 1 when rounded.
  const BitVec subnormal = bits_of(magnitude + 0.5f) - bits_of(broadcast(0.5f));
  const BitVec is_subnormal = (BitVec)(magnitude < broadcast(0x1p-14f));
  const BitVec is_infinite = (BitVec)(magnitude >= broadcast(65520.0f));
  const BitVec is_nan = (BitVec)(a != a);
  BitVec half = (subnormal & is_subnormal) | (normal & ~is_subnormal);
  half = (half & ~is_infinite) | (is_infinite & 0x7c00u);
  half = (half & ~is_nan) | (is_nan & 0x7e00u);
  narrow(to, half | sign);
}

#if defined(JITFMHA_BF16_PAIRS)
inline Vec pair_mul_add(Vec a, Vec b, Vec c) {
  return mul_add(second_bf16(a), second_bf16(b), mul_add(first_bf16(a), first_bf16(b), c));
}
inline Vec round_to_pairs(Vec first, Vec second) {
  uint16_t firsts[kLanes], seconds[kLanes];
  store_bf16(firsts, first);
  store_bf16(seconds, second);
  return from_bits(widen(firsts) | widen(seconds) << 16);
}
inline Vec round_to_successive_pairs(Vec first, Vec second) {
  uint16_t rounded[2 * kLanes];
  store_bf16(rounded, first);
  store_bf16(rounded + kLanes, second);
  Vec pairs;
  std::memcpy(&pairs, rounded, sizeof(pairs));
  return pairs;
}
inline Vec load_pairs(const uint16_t* first, const uint16_t* second) {
  return from_bits(widen(first) | widen(second) << 16);
}
inline void load_two_pairs(const uint16_t* first, const uint16_t* second, Vec& low, Vec& high) {
  low = load_pairs(first, second);
  high = load_pairs(first + kLanes, second + kLanes);
}
constexpr int element_of_pair(int half, int lane) { return half * kLanes + lane; }
#endif

}  // namespace simd
