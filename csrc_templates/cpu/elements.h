// Dtypes, and the 32-bit operands of the matrix products.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "library.h"
#include "simd.h"
#include "traits.h"

namespace {

using simd::kBlockRows;
using simd::kBlockVectors;
using simd::kLanes;
using simd::Vec;

constexpr float kInfinity = __builtin_inff();

// Columns of the panels that are as wide as a register block.
constexpr int kPanelLanes = kBlockVectors * kLanes;

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// An element of a caller's tensor, which need not lie at a multiple of its size.
template <class T>
inline T element_at(const T* from) {
  T element;
  std::memcpy(&element, from, sizeof(element));
  return element;
}

struct fp32 {
  using Element = float;
  static constexpr int kExpDegree = 5;
  static Vec load(const Element* from) { return simd::load(from); }
  static void store(Element* to, Vec a) { simd::store(to, a); }
};

struct bf16 {
  using Element = uint16_t;
  static constexpr int kExpDegree = 4;
  static Vec load(const Element* from) { return simd::load_bf16(from); }
  static void store(Element* to, Vec a) { simd::store_bf16(to, a); }
};

struct fp16 {
  using Element = uint16_t;
  static constexpr int kExpDegree = 4;
  static Vec load(const Element* from) { return simd::load_fp16(from); }
  static void store(Element* to, Vec a) { simd::store_fp16(to, a); }
};

// fp8 with 4 bits of exponent and 3 of mantissa. fp16 has one bit of exponent more: its numbers
// with the same exponent and mantissa bits are the same ones but for a power of two, subnormal ones
// as well.
template <int kExponentBias, uint8_t kMagnitudeOfNan, uint8_t kNan>
struct Fp8E4m3 {
  using Element = uint8_t;
  static constexpr int kExpDegree = 4;
  static Vec load(const Element* from) {
    uint16_t halves[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const uint16_t code = from[i];
      const uint16_t half = uint16_t((code & 0x80) << 8 | (code & 0x7f) << 7);
      halves[i] = (code & kMagnitudeOfNan) == kNan ? 0x7e00 : half;
    }
    constexpr float kHalfToNumber = float(1 << (15 - kExponentBias));
    return simd::mul(simd::load_fp16(halves), simd::broadcast(kHalfToNumber));
  }
};
// The OCP's form has no infinities, and NaN in their place; AMD's older one has its only NaN where
// -0 would be.
struct fp8_e4m3fn : Fp8E4m3<7, 0x7f, 0x7f> {};
struct fp8_e4m3fnuz : Fp8E4m3<8, 0xff, 0x80> {};

// The upper half of fp16.
struct bf8_e5m2 {
  using Element = uint8_t;
  static constexpr int kExpDegree = 4;
  static Vec load(const Element* from) {
    uint16_t halves[kLanes];
    for (int i = 0; i < kLanes; ++i) halves[i] = uint16_t(from[i] << 8);
    return simd::load_fp16(halves);
  }
};
// AMD's older form has an exponent's bias of one more, numbers in place of infinities, and its only
// NaN where -0 would be. In fp16 an exponent is one less, and with the smallest ones a number is
// subnormal.
struct bf8_e5m2fnuz {
  using Element = uint8_t;
  static constexpr int kExpDegree = 4;
  static Vec load(const Element* from) {
    uint16_t halves[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int code = from[i], magnitude = code & 0x7f;
      const int half = magnitude < 8 ? magnitude << 7 : (magnitude << 8) - 0x400;
      halves[i] = code == 0x80 ? 0x7e00 : uint16_t((code & 0x80) << 8 | half);
    }
    return simd::load_fp16(halves);
  }
};

// Sums of products of integers are exact in float32, too, as none of them reaches 2^24: neither a
// dot product of 576 elements, the most there are, nor that of the int8 probabilities of a key
// tile.
struct int8 {
  using Element = int8_t;
  static constexpr int kExpDegree = 4;
  static Vec load(const Element* from) {
    float floats[kLanes];
    for (int i = 0; i < kLanes; ++i) floats[i] = float(from[i]);
    return simd::load(floats);
  }
};

// Whether every number of a dtype is one of bf16.
template <class D>
constexpr bool kFitsBf16 = std::is_same<D, bf16>::value || sizeof(typename D::Element) == 1;

using Element = Dtype::Element;
using KeyElement = KeyDtype::Element;
using OutElement = OutDtype::Element;

// One element per operand, as a float.
struct FloatOperands {
  static constexpr int kElements = 1;
  template <class D>
  static Vec load_along_row(const typename D::Element* from) {
    return D::load(from);
  }
  template <class D>
  static Vec load_down_columns(const typename D::Element* const (&rows)[1]) {
    return D::load(rows[0]);
  }
  static Vec from_floats(const Vec (&values)[1]) { return values[0]; }
  static Vec from_successive_floats(const Vec (&values)[1]) { return values[0]; }
  static Vec mul_add(Vec a, Vec b, Vec c) { return simd::mul_add(a, b, c); }
};

#if defined(JITFMHA_BF16_PAIRS)
// Two elements per operand, multiplied and summed up in float32 by one instruction.
struct Bf16Pairs {
  static constexpr int kElements = 2;
  template <class D>
  static Vec load_along_row(const typename D::Element* from) {
    if constexpr (!std::is_same<D, bf16>::value)
      return simd::round_to_successive_pairs(D::load(from), D::load(from + kLanes));
    float pairs[kLanes];
    std::memcpy(pairs, from, sizeof(pairs));
    return simd::load(pairs);
  }
  template <class D>
  static Vec load_down_columns(const typename D::Element* const (&rows)[2]) {
    if constexpr (std::is_same<D, bf16>::value) return simd::load_pairs(rows[0], rows[1]);
    else return simd::round_to_pairs(D::load(rows[0]), D::load(rows[1]));
  }
  // The same of 2 * kLanes columns: lane i of `low` is of column element_of_pair(0, i), and that of
  // `high` of element_of_pair(1, i).
  template <class D>
  static void load_down_two_columns(const typename D::Element* first,
                                    const typename D::Element* second, Vec& low, Vec& high) {
    if constexpr (std::is_same<D, bf16>::value) {
      simd::load_two_pairs(first, second, low, high);
    } else {
      low = simd::round_to_pairs(D::load(first), D::load(second));
      high = simd::round_to_pairs(D::load(first + kLanes), D::load(second + kLanes));
    }
  }
  template <class D>
  static constexpr int element_of_pair(int half, int lane) {
    return std::is_same<D, bf16>::value ? simd::element_of_pair(half, lane) : half * kLanes + lane;
  }
  static Vec from_floats(const Vec (&values)[2]) {
    return simd::round_to_pairs(values[0], values[1]);
  }
  static Vec from_successive_floats(const Vec (&values)[2]) {
    return simd::round_to_successive_pairs(values[0], values[1]);
  }
  static Vec mul_add(Vec a, Vec b, Vec c) { return simd::pair_mul_add(a, b, c); }
};

using OperandsOfDtypes =
    std::conditional_t<kFitsBf16<Dtype> && kFitsBf16<KeyDtype>, Bf16Pairs, FloatOperands>;
#else
using OperandsOfDtypes = FloatOperands;
#endif
// Backward multiplies floats whatever the dtype: its probabilities are operands of three products,
// and rounding them once more would cost accuracy where gradients cancel. In a tile unit, which is
// several times as fast, they are rounded, as torch's are.
using Operands = std::conditional_t<kDirection == Direction::forward || kTileUnit, OperandsOfDtypes,
                                    FloatOperands>;
constexpr int kOperandElements = Operands::kElements;

}  // namespace
