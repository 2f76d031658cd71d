// Attention in the registers of one wave as attention.h has it, for 16 rows: with products of 16
// rows and 16 columns, the softmax of 32 keys. Of a tile's scores a lane has eight of row
// `lane % 16`.
//
// Included after the traits.
#pragma once

#include "scores.h"
#include "sixteen_products.h"
#include "token_scales.h"

// The largest of what four lanes have for one row, or their sum.
template <class Combine>
__device__ inline float combined_of_row(float x, int lane, Combine combine) {
  const auto of_lane = [&](int other) {
    return bits_as<float>(__builtin_amdgcn_ds_bpermute(other * 4, bits_as<int>(x)));
  };
  // All three are on their way at once.
  const float a = of_lane(lane ^ 16), b = of_lane(lane ^ 32), c = of_lane(lane ^ 48);
  return combine(combine(x, a), combine(b, c));
}

// Which key of a tile a lane's score i is that of: the one of row 4 * (lane / 16) + i % 4 in one of
// two products. In packed pages values of eight keys lie side by side, which a lane loads at once:
// there products have keys in an order in which these are a lane's.
__device__ inline int key_of_sixteen(int i, int lane) {
  if (kAccess == Access::packed_pages) return lane / 16 * 8 + i;
  return i / 4 * 16 + lane / 16 * 4 + i % 4;
}

struct SixteenRows {
  static constexpr int kScores = 8;
  float maximum = kNoMaximum, scale, sum = 0;
  float factor = 1;  // that the output is multiplied with before more is added
  float score[kScores];
  float value_scale[kScores];  // where tokens of v have their own
  u32x4 probability;

  // A sink is one more score, of the first of the four lanes that have a row.
  __device__ void begin_with_sink(float of_sink, int lane) {
    maximum = __builtin_amdgcn_fmed3f(of_sink, kNoMaximum, -kNoMaximum);
    sum = lane < 16 ? __builtin_amdgcn_exp2f(of_sink - maximum) : 0;
  }

  // The scales of the tile's tokens, where these have their own.
  __device__ void take_scales(const TileScales& scales) {
    if constexpr (kTokenKDescales)
      for_lanes_of_row<kScores>(scales.of_key, [&](int i, float x) { score[i] *= x; });
    if constexpr (kTokenVDescales)
      for_lanes_of_row<kScores>(scales.of_value, [&](int i, float x) { value_scale[i] = x; });
  }

  // Scores from dot products.
  __device__ void modify(const ScoreUnit& unit, const ScoreRow& row, int first_key, int lane) {
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      f32x2 pair = unit.logits(f32x2{score[i], score[i + 1]});
      if (kHasAlibi) {
        const float distance = row.diagonal - first_key - key_of_sixteen(i, lane);
        pair = with_alibi(pair, row.slope, f32x2{distance, distance - 1});
      }
      score[i] = pair.x;
      score[i + 1] = pair.y;
    }
  }

  __device__ void hide(const Visibility& visibility, int query, int first_key, int lane) {
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      score[i] =
          visibility.sees(query, first_key + key_of_sixteen(i, lane)) ? score[i] : -kInfinity;
  }

  // As in Attention: later tiles take the maximum in use, unless a sum tells that one is needed.
  __device__ void take(bool is_first, int lane) {
    constexpr float kMostSum = kScores << kUsualHeadroom;
    factor = 1;
    if (is_first) raise_maximum(lane);
    float added = take_by_maximum();
    while (__builtin_expect(__builtin_amdgcn_ballot_w64(added > kMostSum) != 0, 0) &&
           raise_maximum(lane))
      added = take_by_maximum();
    sum += added;
  }

  // The same of all blocks of a wave, which take the same branches: each of these takes as long as
  // many instructions.
  template <int kBlocks>
  __device__ static void take(SixteenRows (&blocks)[kBlocks], bool is_first, int lane) {
    constexpr float kMostSum = kScores << kUsualHeadroom;
    const auto is_any_above = [](float sum) {
      return __builtin_amdgcn_ballot_w64(sum > kMostSum) != 0;
    };
#pragma unroll
    for (SixteenRows& rows : blocks) rows.factor = 1;
    if (is_first)
#pragma unroll
      for (SixteenRows& rows : blocks) rows.raise_maximum(lane);
    float added[kBlocks], largest = 0;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      added[i] = blocks[i].take_by_maximum();
      largest = __builtin_fmaxf(largest, added[i]);
    }
    if (__builtin_expect(is_any_above(largest), 0))
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
        while (__builtin_expect(is_any_above(added[i]), 0) && blocks[i].raise_maximum(lane))
          added[i] = blocks[i].take_by_maximum();
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) blocks[i].sum += added[i];
  }

 private:
  __device__ float take_by_maximum() {
    float p[kScores];
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      p[i] = __builtin_amdgcn_exp2f(__builtin_fmaf(score[i], scale, -maximum));
    float even = 0, odd = 0;
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      even += p[i];
      odd += p[i + 1];
      f32x2 taken = {p[i], p[i + 1]};
      if (kTokenVDescales) taken *= f32x2{value_scale[i], value_scale[i + 1]};
      probability[i / 2] = Dtype::template pack<kRounding>(taken.x, taken.y);
    }
    return even + odd;
  }

  __device__ bool raise_maximum(int lane) {
    float largest = score[0];
    // Left alone, the compiler would look for it in every tile.
    asm volatile("" : "+v"(largest));
#pragma unroll
    for (int i = 1; i < kScores; ++i) largest = __builtin_fmaxf(largest, score[i]);
    largest *= scale;
    // Truncated, a probability of just below 1 would lose a whole unit of its last place.
    if constexpr (kRounding == Rounding::towards_zero)
      largest = __builtin_fmaf(-4 * kScaledScoreError, __builtin_fabsf(largest), largest);
    if (!__builtin_amdgcn_ballot_w64(largest > maximum)) return false;
    const float next = combined_of_row(__builtin_fmaxf(maximum, largest), lane,
                                       [](float a, float b) { return __builtin_fmaxf(a, b); });
    const float lower = __builtin_amdgcn_exp2f(maximum - next);
    maximum = next;
    sum *= lower;
    factor *= lower;
    return true;
  }
};
