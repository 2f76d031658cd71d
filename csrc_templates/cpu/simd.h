// Vectors of floats. Each instruction set has them in a file of its own, simd_*.h, under the same
// names; what these have in common is here.
//
//     kBlockRows x kBlockVectors    accumulators of a register block of the matrix products
//     max(a, b), min(a, b)          the larger of both, and the smaller; `b` where `a` is NaN
//     select_between(low, x, high, a, b)
//                                   `a` in the lanes with low <= x <= high, `b` in all others
//     clamp(x, limit)               `x` where it lies between -limit and limit, the nearer of both
//                                   elsewhere; NaN stays NaN
//     divide_roughly(a, b)          a / b within 2^-14 of it, relatively
//     transpose(rows)               rows[i] lane j <-> rows[j] lane i, bit patterns untouched
//     largest_lane(a), sum_lanes(a) over all lanes
//     sum_rows(rows)                lane i is the sum of rows[i]'s lanes
//     repeat(from, parts)           the kLanes / parts floats from there on, once in each part
//     sum_parts(rows, parts, to)    to[i * parts + j] is the sum of the j-th of as many parts of
//                                   rows[i]'s lanes
//     transpose_parts(a)            where there are tile units: lanes as a matrix with rows of four
//                                   columns, or one, as many as fit, transposed
//     load_transposed(rows, block)  block[j] lane i is the j-th float from rows[i] on
//
// For x < 128: 2^x = scale_exponent(2^(c - w), w), where c = clamp_exponent(x) and
// w = round_exponent(c). It is exactly 0 from the clamp downwards, -inf included. NaN stays NaN.
//
// Where JITFMHA_FLOORS is defined, it is scale_by_floor(2^above_floor(x), x), too, with fewer
// instructions.
//
// Bits are as many unsigned integers of 32 bits, and Factors the same as they are multiplied:
//
//     multiply_wide(a, b, high, low)  the 64 bits of a * b in each lane, as their halves
//     subtract_bytes(a, b)            each byte less `b`, and 0 where that is negative
//     where_zero(bits, mask, a)       `a` in the lanes whose bits under `mask` are all 0, and 0
//                                     elsewhere
//
// A lane of two 16-bit values of memory has the first in its low half. first_bf16 and second_bf16
// give these as bf16 numbers. Where JITFMHA_BF16_PAIRS is defined, they are operands of products:
//
//     pair_mul_add(a, b, c)           c + a.first * b.first + a.second * b.second
//     round_to_pairs(first, second)   pairs (first[i], second[i]) of rounded floats
//     round_to_successive_pairs(first, second)
//                                     pairs of rounded floats that follow each other: those of
//                                     `first`, then those of `second`
//     load_pairs(first, second)       pairs (first[i], second[i]) of kLanes values each in memory
//     load_two_pairs(first, second, low, high)
//                                     the same of 2 * kLanes values: lanes i of `low` and of `high`
//                                     have those with numbers element_of_pair(0, i) and (1, i)
#pragma once

#include <type_traits>

#include "vectors.h"

namespace simd {

// Numbers of parts beside 1 are those that vectors of 32-bit lanes have of 16 bytes each, or more.
inline Vec repeat(const float* from, std::integral_constant<int, 1>) { return load(from); }
inline void sum_parts(const Vec (&rows)[kLanes], std::integral_constant<int, 1>, float* to) {
  store(to, sum_rows(rows));
}

inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }

}  // namespace simd
