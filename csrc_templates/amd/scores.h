// Which keys a query sees, and what happens to a score between Q K^T and the softmax: scale, soft
// cap, ALiBi, bias and mask, in this order. A feature stands here alone, is compiled in by a trait,
// and costs a call without it nothing.
//
// Included after Arguments, Modifiers and the traits, of which kTileKeys is one.
#pragma once

#include "attention.h"
#include "dropout.h"
#include "elements.h"
#include "workgroups.h"

constexpr float kLog2e = 1.4426950408889634f;
constexpr bool kHasAddedBias = kBias != Bias::none && kBias != Bias::boolean;
constexpr bool kModifiesScores = kHasSoftcap || kHasAlibi || kBias != Bias::none;

__device__ inline int larger(int a, int b) { return a < b ? b : a; }

struct KeyRange {
  int begin, last;
};

// The key tiles that rows see: first those with sink tokens, then those from the window's on.
struct KeyTiles {
  int count;
  int with_sinks, skipped;  // how many tiles lie before and in the gap
  int first;                // of those that are seen, where a split begins

  __device__ int at(int i) const {
    const int n = first + i;
    return kHasSinkTokens && n < with_sinks ? n : n + skipped;
  }

  // The tiles of one of several splits, whose counts differ by one tile at most.
  __device__ KeyTiles split(int index, const Divisor& splits) const {
    const Quotient tiles = divide(count, splits);
    const int longer = tiles.remainder, least = tiles.value;
    KeyTiles result = *this;
    result.first = index * least + smaller(index, longer);
    result.count = index < longer ? least + 1 : least;
    return result;
  }

  // Those from one to another.
  __device__ KeyTiles part(int begin, int end) const {
    KeyTiles result = *this;
    result.first = begin;
    result.count = end - begin;
    return result;
  }
};

// The keys that each query of a sequence sees.
struct Visibility {
  int seqlen_k;
  int diagonal;  // the key that lies on the diagonal with query 0
  int left, right;
  int sink_size;  // the first keys that a window's left side does not hide

  __device__ static Visibility of(const Modifiers& m, const Sequence& sequence) {
    const int from_corner = sequence.seqlen_k - sequence.seqlen_q;
    return {sequence.seqlen_k, m.is_bottom_right ? from_corner : 0, m.window_left, m.window_right,
            kHasSinkTokens ? m.sink_size : 0};
  }

  // Without the sink tokens.
  __device__ KeyRange keys_of(int query) const {
    if (!kIsMasked) return {0, seqlen_k - 1};
    return {larger(query + diagonal - left, 0), smaller(query + diagonal + right, seqlen_k - 1)};
  }

  __device__ bool sees(int query, int key) const {
    const KeyRange seen = keys_of(query);
    bool is_seen = key <= seen.last;
    if (kIsMasked) is_seen &= key >= seen.begin || key < sink_size;
    return is_seen;
  }

  // The tiles that any of these queries sees.
  __device__ KeyTiles tiles_of_queries(int first_query, int last_query) const {
    const KeyRange first = keys_of(first_query), last = keys_of(last_query);
    if (last.last < 0) return {0, 0, 0, 0};
    const int begin = first.begin / kTileKeys, end = last.last / kTileKeys + 1;
    const int with_sinks = smaller(tiles_of(sink_size, kTileKeys), end);
    const int skipped = larger(begin - with_sinks, 0);
    return {with_sinks + larger(end - with_sinks - skipped, 0), with_sinks, skipped, 0};
  }

  // Whether none of these queries sees a tile, or all of them see all of it.
  __device__ bool is_hidden(int first_query, int last_query, int first_key) const {
    const KeyRange first = keys_of(first_query), last = keys_of(last_query);
    return kIsMasked && (first_key > last.last ||
                         (first_key + kTileKeys <= first.begin && first_key >= sink_size));
  }
  __device__ bool is_whole(int first_query, int last_query, int first_key) const {
    const KeyRange first = keys_of(first_query), last = keys_of(last_query);
    return first_key >= last.begin && first_key + kTileKeys - 1 <= first.last;
  }
};

// A lane's score i is that of this key of the tile (KeyRowTile::row_of).
__device__ inline int key_of_score(int i, int lane) { return lane / 32 * 16 + i; }

// Hides what a query does not see.
__device__ inline void hide(f32x16& score, const Visibility& visibility, int query, int first_key,
                            int lane) {
  // It is made here: few tiles need it, and it would take a register in all of them.
  float hidden = -kInfinity;
  asm volatile("" : "+v"(hidden));
#pragma unroll
  for (int i = 0; i < 16; ++i)
    score[i] = visibility.sees(query, first_key + key_of_score(i, lane)) ? score[i] : hidden;
}

constexpr bool kAreFloats = Dtype::kBytes == 4;

// A number that all lanes have, in a scalar register.
__device__ inline float uniform(float x) {
  return bits_as<float>(__builtin_amdgcn_readfirstlane(bits_as<int>(x)));
}

// Two numbers are multiplied and added at once.
__device__ inline f32x2 multiply_add(f32x2 a, f32x2 b, f32x2 c) {
  return __builtin_elementwise_fma(a, b, c);
}

template <int kTerms>
__device__ inline f32x2 polynomial(const float (&factors)[kTerms], f32x2 x) {
  f32x2 result = f32x2(factors[kTerms - 1]);
#pragma unroll
  for (int i = kTerms - 2; i >= 0; --i) result = multiply_add(result, x, f32x2(factors[i]));
  return result;
}

// tanh x, relatively within 1.3e-5 of it, which is enough for 16-bit inputs, and for fp32 within
// 5e-7: a rational function, minimax up to where tanh is 1 that accurately. The same as the CPU's.
__device__ inline f32x2 tanh(f32x2 x) {
  constexpr float kShortAbove[] = {1.0f, 0.114983931f, 0.00152285665f};
  constexpr float kShortBelow[] = {1.0f, 0.448282987f, 0.0176645946f, 5.67476818e-05f};
  constexpr float kAbove[] = {1.0f, 0.133796722f, 0.00349398027f, 2.05825727e-05f, 1.331781e-08f};
  constexpr float kBelow[] = {1.0f, 0.467129886f, 0.0258708689f, 0.000328300317f, 7.76150216e-07f};
  constexpr float kEnd = kAreFloats ? 9.02f : 6.0f;
  const f32x2 clamped = {__builtin_amdgcn_fmed3f(x.x, -kEnd, kEnd),
                         __builtin_amdgcn_fmed3f(x.y, -kEnd, kEnd)};
  const f32x2 square = clamped * clamped;
  const f32x2 above =
      clamped * (kAreFloats ? polynomial(kAbove, square) : polynomial(kShortAbove, square));
  const f32x2 below = kAreFloats ? polynomial(kBelow, square) : polynomial(kShortBelow, square);
  return above * f32x2{__builtin_amdgcn_rcpf(below.x), __builtin_amdgcn_rcpf(below.y)};
}

// The logistic function of two numbers, to which -log2(e) has been multiplied.
__device__ inline f32x2 logistic(f32x2 x) {
  const f32x2 below = f32x2{__builtin_amdgcn_exp2f(x.x), __builtin_amdgcn_exp2f(x.y)} + 1.0f;
  return {__builtin_amdgcn_rcpf(below.x), __builtin_amdgcn_rcpf(below.y)};
}

// A soft cap makes scores of tanh x = 2 logistic(2 x) - 1: of the logistic function, which takes
// the fewest instructions. It is wrong by 1e-7, which is too much for fp32 and for caps far above
// the logits: there scores are made of tanh itself.
constexpr bool kCapsByLogistic = kHasSoftcap && !kHasLargeSoftcap && !kAreFloats;

// Two scores with a soft cap, from dot products times ScoreUnit::cap_factor.
__device__ inline f32x2 capped(f32x2 x) { return kCapsByLogistic ? logistic(x) : tanh(x); }

// The derivative of tanh where it has made these scores.
__device__ inline f32x2 cap_slopes(f32x2 scores) {
  return kCapsByLogistic ? 4.0f * multiply_add(-scores, scores, scores)
                         : multiply_add(-scores, scores, f32x2(1));
}

// Maxima of scores are in powers of two. But where a bias is added, they are in units of the bias,
// as scores are then: a bias may be so large that it has no float32 form in other units, or that
// rounding to these would set scores apart which it has made equal.
constexpr float kUnitOfMaxima = kHasAddedBias ? kLog2e : 1;  // in powers of two
// It lies below every finite score, and is finite itself: the difference to -inf has to be -inf.
constexpr float kLeastMaximum = kHasAddedBias ? -__FLT_MAX__ : kNoMaximum;

// The unit of scores. It is that of dot products, or of what a soft cap makes of them, so that
// these are scores as they are. But an added bias decides the unit.
struct ScoreUnit {
  float log2;        // a score of 1, in powers of two
  float excess;      // of scores over logits, in the unit of maxima
  float cap_factor;  // what a dot product is multiplied with before it is capped
  float factor;      // what it, or what is capped, is multiplied with to be a score

  __device__ static ScoreUnit of(const Modifiers& m, float scale) {
    ScoreUnit result = {scale, 0, m.scale_over_softcap, 1};
    if (kHasSoftcap) result.log2 = m.logit_softcap * kLog2e;
    if (kCapsByLogistic) {
      result.excess = result.log2;
      result.log2 *= 2;
      result.cap_factor = __builtin_fmaxf(result.cap_factor * (-2 * kLog2e), -__FLT_MAX__);
    }
    // So that ALiBi in these units stays finite. Dot products as large as to notice are not.
    constexpr float kLeast = 1e-33f;
    if (kHasAlibi) result.log2 = __builtin_fmaxf(result.log2, kLeast);
    if (kHasAddedBias) {
      result.factor = result.log2 * kLn2;
      result.excess *= kLn2;
      result.log2 = kLog2e;
    }
    return {uniform(result.log2), uniform(result.excess), uniform(result.cap_factor),
            uniform(result.factor)};
  }

  // Two dot products, as a soft cap leaves them.
  __device__ f32x2 logits(f32x2 dots) const {
    return kHasSoftcap ? capped(dots * cap_factor) : dots;
  }
};

// An element of a bias, as it lies in memory.
using BiasElement = Either<kBias == Bias::boolean, unsigned char,
                           Either<kBias == Bias::fp32, float, unsigned short>>;

template <class Element>
__device__ inline float value_of(Element element) {
  if constexpr (kBias == Bias::boolean) return bits_as<float>(element ? -1 : 0);
  else if constexpr (kBias == Bias::bf16) return bits_as<float>(element << 16);
  else if constexpr (kBias == Bias::fp16) return bits_as<_Float16>(element);
  else return element;
}

// Elements of a lane's 16 keys of a tile.
struct TileBias {
  static constexpr int kKeys = 16;
  typedef BiasElement Elements __attribute__((ext_vector_type(kKeys)));
  Elements elements;

  __device__ f32x2 two(int i) const { return {value_of(elements[i]), value_of(elements[i + 1])}; }
};

// ALiBi's slope of scores, which is negative.
__device__ inline float alibi_slope(const Modifiers& m, const ScoreUnit& unit, long batch,
                                    long head) {
  return m.alibi_slopes[batch * m.alibi_batch + head * m.alibi_head] *
         (-kLog2e * __builtin_amdgcn_rcpf(unit.log2));
}

// Two scores with ALiBi.
__device__ inline f32x2 with_alibi(f32x2 scores, float slope, f32x2 distances) {
  scores.x = __builtin_fmaf(slope, __builtin_fabsf(distances.x), scores.x);
  // Each is computed by itself: instructions for pairs cannot take absolute values.
  asm("" : "+v"(scores.x), "+v"(scores.y));
  scores.y = __builtin_fmaf(slope, __builtin_fabsf(distances.y), scores.y);
  return scores;
}

// A score where a boolean bias does not hide it, which is all bits or none. The compiler must not
// know: as conditions, those of a tile would take 32 scalar registers.
__device__ inline float shown(float score, float bias) {
  asm("" : "+v"(bias));
  return bits_as<float>((bits_of(bias) & bits_of(score)) | (~bits_of(bias) & bits_of(-kInfinity)));
}

// Two scores from what dot products or a soft cap have made, and from their bias.
__device__ inline f32x2 with_bias(f32x2 x, const ScoreUnit& unit, f32x2 bias) {
  if (kBias == Bias::none) return x;
  if (kBias == Bias::boolean) return {shown(x.x, bias.x), shown(x.y, bias.y)};
  return multiply_add(x, f32x2(unit.factor), bias);
}

// Up to this number of units of a bias, rounding to powers of two is too little to notice in a
// probability.
constexpr float kMostModerate = 1024;

__device__ inline bool is_moderate(float x) { return __builtin_fabsf(x) <= kMostModerate; }

// Whether the maxima of all rows of a wave are.
__device__ inline bool are_moderate(float maximum) {
  return !__builtin_amdgcn_ballot_w64(!is_moderate(maximum));
}

// The powers of e of two numbers.
__device__ inline f32x2 exponentials(f32x2 x) {
  x *= kLog2e;
  return {__builtin_amdgcn_exp2f(x.x), __builtin_amdgcn_exp2f(x.y)};
}

// The row of a lane, as far as its scores depend on it.
struct ScoreRow {
  float slope;   // ALiBi's of scores, negative
  int diagonal;  // the key with which ALiBi's distance is 0

  __device__ static ScoreRow of(const Modifiers& m, const ScoreUnit& unit, long batch, long head,
                                const Sequence& sequence, int query) {
    if (!kHasAlibi) return {};
    return {alibi_slope(m, unit, batch, head), query + sequence.seqlen_k - sequence.seqlen_q};
  }

  // ALiBi's, of the first two scores of a tile.
  __device__ f32x2 distances(int first_key, int lane) const {
    const float distance = diagonal - first_key - key_of_score(0, lane);
    return {distance, distance - 1};
  }
};

// The scores of a row from dot products.
__device__ inline void modify(f32x16& score, const ScoreUnit& unit, const ScoreRow& row,
                              const TileBias& bias, int first_key, int lane) {
  f32x2 distances = row.distances(first_key, lane);
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    f32x2 pair = with_bias(unit.logits(f32x2{score[i], score[i + 1]}), unit, bias.two(i));
    if (kHasAlibi) pair = with_alibi(pair, row.slope, distances);
    score[i] = pair.x;
    score[i + 1] = pair.y;
    distances -= 2.0f;
  }
}
