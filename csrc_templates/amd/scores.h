// Which keys a query sees, and what happens to a score between Q K^T and the softmax: scale, soft
// cap, bias, ALiBi and mask, in this order. A feature stands here alone, is compiled in by a trait,
// and costs a call without it nothing.
//
// Included after Arguments, Modifiers and the traits.
#pragma once

#include "attention.h"
#include "dropout.h"
#include "half_waves.h"
#include "workgroups.h"

constexpr int kTileKeys = 32;
constexpr float kLog2e = 1.4426950408889634f;
// Whether scores become logits before the softmax, in powers of two, to which the softmax's scale
// does not apply any more. Otherwise they stay the plain dot products.
constexpr bool kHasLogits =
    kHasSoftcap || kHasAlibi || (kBias != Bias::none && kBias != Bias::boolean);

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

  // One of several splits; they differ by one tile at most.
  __device__ KeyTiles split(int index, const Divisor& splits) const {
    const Quotient tiles = divide(count, splits);
    const int longer = tiles.remainder, least = tiles.value;
    KeyTiles result = *this;
    result.first = index * least + smaller(index, longer);
    result.count = index < longer ? least + 1 : least;
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

// A lane's score i is that of this key of the tile.
__device__ inline int key_of_score(int i, int lane) { return i / 4 * 8 + i % 4 + 4 * (lane / 32); }

// Hides what a query does not see.
__device__ inline void hide(f32x16& score, const Visibility& visibility, int query, int first_key,
                            int lane) {
#pragma unroll
  for (int i = 0; i < 16; ++i)
    score[i] = visibility.sees(query, first_key + key_of_score(i, lane)) ? score[i] : -kInfinity;
}

constexpr bool kAreFloats = Dtype::kBytes == 4;

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

// An element of a bias, as it lies in memory.
template <Bias>
struct BiasElementOf {
  using Type = unsigned short;
};
template <>
struct BiasElementOf<Bias::boolean> {
  using Type = unsigned char;
};
template <>
struct BiasElementOf<Bias::fp32> {
  using Type = float;
};
using BiasElement = BiasElementOf<kBias>::Type;

template <class Element>
__device__ inline float value_of(Element element) {
  if constexpr (kBias == Bias::boolean) return bits_as<float>(element ? -1 : 0);
  else if constexpr (kBias == Bias::bf16) return bits_as<float>(element << 16);
  else if constexpr (kBias == Bias::fp16) return bits_as<_Float16>(element);
  else return element;
}

// Elements of a lane's 16 keys of a tile.
struct TileBias {
  typedef BiasElement Four __attribute__((ext_vector_type(4)));
  // Of 16-bit elements a lane loads those of 16 keys that lie side by side, which touches half as
  // many cache lines, and exchanges eight of them with the other half of the wave.
  static constexpr bool kIsExchanged = sizeof(BiasElement) == 2;
  Four fours[4];

  // Where a lane's four keys of number i are loaded from, counted from the tile's first key.
  __device__ static int first_loaded(int i, int lane) {
    return kIsExchanged ? lane / 32 * 16 + 4 * i : key_of_score(4 * i, lane);
  }

  // Four keys of one half are two of its words.
  __device__ void exchange(int lane) {
    if constexpr (kIsExchanged) {
      u32x2 words[4];
      __builtin_memcpy(words, fours, sizeof words);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          unsigned even = words[i][j], odd = words[i + 1][j];
          exchange_halves(even, odd, lane);
          words[i][j] = even;
          words[i + 1][j] = odd;
        }
      }
      // The upper half's keys are those behind the lower half's.
      const u32x2 ordered[4] = {words[0], words[2], words[1], words[3]};
      __builtin_memcpy(fours, ordered, sizeof ordered);
    }
  }

  __device__ f32x2 two(int i) const {
    return {value_of(fours[i / 4][i % 4]), value_of(fours[i / 4][i % 4 + 1])};
  }
};

// The row of a lane, as far as its scores depend on it.
struct ScoreRow {
  Global<const char> bias;  // of key 0
  float slope;              // ALiBi's, negative, times log2(e)
  int diagonal;             // the key with which ALiBi's distance is 0

  // Of queries behind the last one, whose scores nobody needs, the last one's.
  __device__ static ScoreRow of(const Modifiers& m, long batch, long head, const Sequence& sequence,
                                int query, int queries) {
    ScoreRow result = {};
    const long row = sequence.q_start + smaller(query, queries - 1);
    if (kBias != Bias::none)
      result.bias = m.bias + batch * m.bias_batch + head * m.bias_head + row * m.bias_query;
    if (kHasAlibi) {
      result.slope = -kLog2e * m.alibi_slopes[batch * m.alibi_batch + head * m.alibi_head];
      result.diagonal = query + sequence.seqlen_k - sequence.seqlen_q;
    }
    return result;
  }

  // Where keys lie side by side, four elements are loaded at once.
  __device__ TileBias load_bias(const Modifiers& m, int first_key, int lane) const {
    TileBias result;
    if (m.bias_key == sizeof(BiasElement) && first_key + kTileKeys <= m.bias_keys) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        result.fours[i] =
            *(Global<const TileBias::Four>)element(m, first_key + TileBias::first_loaded(i, lane));
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        result.fours[i / 4][i % 4] = *element(
            m, smaller(first_key + TileBias::first_loaded(i / 4, lane) + i % 4, m.bias_keys - 1));
    }
    return result;
  }

 private:
  __device__ Global<const BiasElement> element(const Modifiers& m, int key) const {
    return (Global<const BiasElement>)(bias + key * m.bias_key);
  }
};

// What a logit is where a bias does not hide it, at least: so that it is finite, and above what the
// softmax begins with.
constexpr float kLeastLogit = -1.6e38f;

// The logit of a score with its bias; -inf where the bias is -inf. A boolean one is all bits or
// none: as conditions, those of a tile would take 32 scalar registers.
__device__ inline float biased(float sum, float score, float bias) {
  if (kBias == Bias::boolean) {
    float result;
    asm("v_bfi_b32 %0, %1, %2, %3" : "=v"(result) : "v"(bias), "v"(score), "v"(-kInfinity));
    return result;
  }
  // Above every sum but for a bias of -inf, which is the least of the three.
  return __builtin_amdgcn_fmed3f(sum, kLeastLogit, bias + __FLT_MAX__);
}

// The scores of two pairs of a query and a key from their dot products; `scale` and ALiBi's slope
// have log2(e) in them. What is hidden by a bias becomes -inf.
__device__ inline f32x2 logits(f32x2 dots, const Modifiers& m, float scale, float slope,
                               f32x2 distances, f32x2 bias) {
  f32x2 x = dots;
  if (kHasSoftcap) x = m.softcap * kLog2e * tanh(x * m.scale_over_softcap);
  else if (kHasLogits) x *= scale;
  if (kHasAlibi)
    x = {__builtin_fmaf(slope, __builtin_fabsf(distances.x), x.x),
         __builtin_fmaf(slope, __builtin_fabsf(distances.y), x.y)};
  if (kBias != Bias::none) {
    const f32x2 sum = multiply_add(bias, f32x2(kLog2e), x);
    x = {biased(sum.x, x.x, bias.x), biased(sum.y, x.y, bias.y)};
  }
  return x;
}

// The scores of a row from dot products.
__device__ inline void modify(f32x16& score, const Modifiers& m, float scale, const ScoreRow& row,
                              TileBias bias, int first_key, int lane) {
  bias.exchange(lane);
  const float distance = row.diagonal - first_key - key_of_score(0, lane);
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    // One by one, as numbers in instructions: in pairs they would take scalar registers.
    const f32x2 distances = {distance - key_of_score(i, 0), distance - key_of_score(i + 1, 0)};
    const f32x2 x =
        logits(f32x2{score[i], score[i + 1]}, m, scale, row.slope, distances, bias.two(i));
    score[i] = x.x;
    score[i + 1] = x.y;
  }
}
