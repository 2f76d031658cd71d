// Dtypes, and the 32-bit operands of the matrix products.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "simd.h"
#include "traits.h"

namespace {

using simd::kBlockRows;
using simd::kBlockVectors;
using simd::kLanes;
using simd::Vec;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Columns of the panels that are as wide as a register block.
constexpr int kPanelLanes = kBlockVectors * kLanes;

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

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

using Element = Dtype::Element;

// One element per operand, as a float.
struct FloatOperands {
  static constexpr int kElements = 1;
  static Vec load_along_row(const Element* from) { return Dtype::load(from); }
  static Vec load_down_columns(const Element* const (&rows)[1]) { return Dtype::load(rows[0]); }
  static Vec from_floats(const Vec (&values)[1]) { return values[0]; }
  static Vec mul_add(Vec a, Vec b, Vec c) { return simd::mul_add(a, b, c); }
};

template <class>
struct OperandsOf {
  using type = FloatOperands;
};

#if defined(JITFMHA_BF16_PAIRS)
// Two elements per operand, multiplied and summed up in float32 by one instruction.
struct Bf16Pairs {
  static constexpr int kElements = 2;
  static Vec load_along_row(const uint16_t* from) {
    float pairs[kLanes];
    std::memcpy(pairs, from, sizeof(pairs));
    return simd::load(pairs);
  }
  static Vec load_down_columns(const uint16_t* const (&rows)[2]) {
    return simd::load_pairs(rows[0], rows[1]);
  }
  static Vec from_floats(const Vec (&values)[2]) {
    return simd::round_to_pairs(values[0], values[1]);
  }
  static Vec mul_add(Vec a, Vec b, Vec c) { return simd::pair_mul_add(a, b, c); }
};

template <>
struct OperandsOf<bf16> {
  using type = Bf16Pairs;
};
#endif
// Backward multiplies floats whatever the dtype: its probabilities are operands of three products,
// and rounding them once more would cost accuracy where gradients cancel. In a tile unit, which is
// several times as fast, they are rounded, as torch's are.
using Operands = std::conditional_t<kDirection == Direction::forward || kTileUnit,
                                    OperandsOf<Dtype>::type, FloatOperands>;
constexpr int kOperandElements = Operands::kElements;

}  // namespace
