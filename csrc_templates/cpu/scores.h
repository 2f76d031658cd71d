// What happens to a score between Q K^T and the softmax: scale and mask. All scores of forward and
// backward pass through here, so that a feature which changes scores stands in this file alone; it
// is compiled in by a trait, and costs a call without it nothing.
//
// Scores lie transposed: keys are the rows of a register block, and (query, head) rows its lanes.
#pragma once

#include <algorithm>

#include "problem.h"

namespace {

// 2^x to the accuracy the dtype deserves: within 1.1e-7 for fp32, 2.9e-6 for the 16-bit ones. Zero
// far below the normal numbers, and at -inf.
inline Vec exp2(Vec x) {
  // Minimax in relative error for 2^f, |f| <= 1/2, under the condition that 2^0 = 1: the factor for
  // a maximum that stays the same is applied once per key tile, and must not change anything.
  static constexpr float kDegree4[] = {1.0f, 0.693124175f, 0.240240991f, 0.0559064262f,
                                       0.00958285294f};
  static constexpr float kDegree5[] = {1.0f,          0.693147004f,   0.240222424f,
                                       0.0555073358f, 0.00967151299f, 0.00132647273f};
  constexpr int kDegree = Dtype::kExpDegree;
  constexpr const float* kCoefficients = kDegree == 5 ? kDegree5 : kDegree4;

  const Vec clamped = simd::clamp_exponent(x);
  const Vec whole = simd::round_exponent(clamped);
  const Vec fraction = simd::sub(clamped, whole);
  Vec power = simd::broadcast(kCoefficients[kDegree]);
#pragma GCC unroll 8
  for (int i = kDegree - 1; i >= 0; --i)
    power = simd::mul_add(power, fraction, simd::broadcast(kCoefficients[i]));
  return simd::scale_exponent(power, whole);
}

// A panel's rows, as far as their scores depend on them.
template <int kVectors>
struct ScoreRows {
  static constexpr int kRows = kVectors * kLanes;

  // Which keys the rows see, in ascending order of the rows; relative to the key tile.
  float begin[kRows], last[kRows];

  // range_of(i) are the keys that row i sees.
  template <class RangeOf>
  void set_ranges(const RangeOf& range_of) {
    for (int i = 0; i < kRows; ++i) {
      const KeyRange range = range_of(i);
      begin[i] = float(range.begin);
      last[i] = float(range.end - 1);
    }
  }
};

// From dot products to the exponents of probabilities.
struct Scores {
  float softmax_scale;
  float scale_log2;  // softmax_scale * log2(e)

  explicit Scores(const FmhaShape& shape)
      : softmax_scale(shape.softmax_scale),
        // Finite, as the scale itself: infinity times the largest score's distance, 0, would be
        // NaN.
        scale_log2(std::min(softmax_scale * 1.44269504f, std::numeric_limits<float>::max())) {}

  // Dot products of kBlockRows keys from `key` on become scores, which are not scaled yet. Those of
  // hidden keys become -inf; kMasked says that there may be some, and `rows` is read only then.
  template <bool kMasked, int kVectors>
  static inline void from_dots(const ScoreRows<kVectors>* rows, int key,
                               Vec (&block)[kBlockRows][kVectors]) {
    if (!kMasked) return;
#pragma GCC unroll 16
    for (int r = 0; r < kBlockRows; ++r)
      for (int v = 0; v < kVectors; ++v)
        block[r][v] = simd::select_between(
            simd::load(rows->begin + v * kLanes), simd::broadcast(float(key + r)),
            simd::load(rows->last + v * kLanes), block[r][v], simd::broadcast(-kInfinity));
  }

  // e^(softmax_scale * (score - shift)).
  //
  // Scores are scaled after the subtraction. Then the largest one becomes exactly 0 and its
  // probability exactly 1, whereas a scaled maximum is rounded, by more than 2^127 has room for
  // where scores are large.
  inline Vec probability(Vec score, Vec shift) const {
    return exp2(simd::mul(simd::sub(score, shift), simd::broadcast(scale_log2)));
  }

  // e^(softmax_scale * score - lse), for the lse as `exponent_of_lse` gives it.
  inline Vec probability_by_lse(Vec score, Vec lse_exponent) const {
    return exp2(simd::mul_add(score, simd::broadcast(scale_log2), lse_exponent));
  }

  // What to add to the exponent of 2. A row that sees no key has an lse of -inf, and scores of
  // -inf: their sum has to stay -inf.
  static float exponent_of_lse(float lse) {
    return lse == -kInfinity ? 0.0f : float(double(lse) * -1.4426950408889634);
  }

  // The gradient of a dot product, from that of the scaled score.
  inline Vec gradient_of_dot(Vec gradient) const {
    return simd::mul(gradient, simd::broadcast(softmax_scale));
  }
};

}  // namespace
