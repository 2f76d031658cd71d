// Which keys a query sees, and what happens to a score between Q K^T and the softmax: scale, soft
// cap, bias, ALiBi and mask, in this order. A feature stands here alone, is compiled in by a trait,
// and costs a call without it nothing.
//
// Included after Arguments, Modifiers and the traits.
#pragma once

#include "attention.h"
#include "dropout.h"
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

// tanh x within 1.3e-5 of it, relatively, which is enough for 16-bit inputs: a rational function,
// minimax up to where tanh is 1 that accurately. The same as the CPU's.
__device__ inline float tanh(float x) {
  const float clamped = __builtin_amdgcn_fmed3f(x, -6.0f, 6.0f), square = clamped * clamped;
  float above = __builtin_fmaf(0.00152285665f, square, 0.114983931f);
  above = __builtin_fmaf(above, square, 1.0f);
  float below = __builtin_fmaf(5.67476818e-05f, square, 0.0176645946f);
  below = __builtin_fmaf(below, square, 0.448282987f);
  below = __builtin_fmaf(below, square, 1.0f);
  return clamped * above * __builtin_amdgcn_rcpf(below);
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
  if constexpr (kBias == Bias::boolean) return element ? 1 : 0;
  else if constexpr (kBias == Bias::bf16) return bits_as<float>(element << 16);
  else if constexpr (kBias == Bias::fp16) return bits_as<_Float16>(element);
  else return element;
}

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

  // The bias of a lane's 16 keys of a tile; of a boolean one 1 or 0. Where keys lie side by side,
  // four are loaded at once.
  __device__ void load_bias(float (&to)[16], const Modifiers& m, int first_key, int lane) const {
    typedef BiasElement Four __attribute__((ext_vector_type(4)));
    if (m.bias_key == sizeof(BiasElement) && first_key + kTileKeys <= m.bias_keys) {
#pragma unroll
      for (int i = 0; i < 16; i += 4) {
        const Four four = *(Global<const Four>)element(m, first_key + key_of_score(i, lane));
#pragma unroll
        for (int j = 0; j < 4; ++j) to[i + j] = value_of(four[j]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int key = smaller(first_key + key_of_score(i, lane), m.bias_keys - 1);
        to[i] = value_of(*element(m, key));
      }
    }
  }

 private:
  __device__ Global<const BiasElement> element(const Modifiers& m, int key) const {
    return (Global<const BiasElement>)(bias + key * m.bias_key);
  }
};

// What a logit is where a bias does not hide it, at least: so that it is finite, and above what the
// softmax begins with.
constexpr float kLeastLogit = -1.6e38f;

// The score of a query and a key from their dot product; `scale` and ALiBi's slope have log2(e) in
// them. What is hidden by a bias becomes -inf. A boolean bias is 1 or 0.
__device__ inline float logit(float dot, const Modifiers& m, float scale, float slope, int distance,
                              float bias) {
  float x = dot;
  if (kHasSoftcap) x = m.softcap * kLog2e * tanh(x * m.scale_over_softcap);
  else if (kHasLogits) x *= scale;
  if (kHasAlibi) x = __builtin_fmaf(slope, __builtin_fabsf(static_cast<float>(distance)), x);
  if (kBias == Bias::boolean) return bias != 0 ? x : -kInfinity;
  if (kBias != Bias::none)
    return bias == -kInfinity ? bias
                              : __builtin_fmaxf(__builtin_fmaf(bias, kLog2e, x), kLeastLogit);
  return x;
}

// The scores of a row from dot products.
__device__ inline void modify(f32x16& score, const Modifiers& m, float scale, const ScoreRow& row,
                              int first_key, int lane) {
  float bias[16] = {};
  if (kBias != Bias::none) row.load_bias(bias, m, first_key, lane);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int distance = row.diagonal - first_key - key_of_score(i, lane);
    score[i] = logit(score[i], m, scale, row.slope, distance, bias[i]);
  }
}
