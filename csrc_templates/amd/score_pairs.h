// Scores as backward has them: a lane's 16 scores of a tile are those of one query with 16 keys, or
// of one key with 16 queries. What happens to a single one is in scores.h.
//
// Included after the traits.
#pragma once

#include "scores.h"

// What scores of one query head of a sequence depend on, beside their query and key.
struct HeadScores {
  Global<const char> bias;  // of query 0 and key 0
  float slope;              // ALiBi's, negative, times log2(e)
  int diagonal;             // the key that is at ALiBi's distance 0 from query 0
  int last_query;
  unsigned line;  // the number of the sequence and head among all of them

  __device__ static HeadScores of(const Modifiers& m, const Sequence& sequence, long batch,
                                  long head, int queries, unsigned line) {
    HeadScores result = {};
    result.last_query = queries - 1;
    result.line = line;
    if (kBias != Bias::none)
      result.bias = m.bias + batch * m.bias_batch + head * m.bias_head +
                    static_cast<long>(sequence.q_start) * m.bias_query;
    if (kHasAlibi) {
      result.slope = -kLog2e * m.alibi_slopes[batch * m.alibi_batch + head * m.alibi_head];
      result.diagonal = sequence.seqlen_k - sequence.seqlen_q;
    }
    return result;
  }

  __device__ float bias_of(const Modifiers& m, int query, int key) const {
    // Of pairs that are not there, those of the last query or key, whose scores nobody needs.
    const long row = smaller(query, last_query), column = smaller(key, m.bias_keys - 1);
    return value_of(*(Global<const BiasElement>)(bias + row * m.bias_query + column * m.bias_key));
  }
};

// The pairs of a lane's 16 scores; kOwnsQueries: the lane has one query, and 16 keys of a tile.
template <bool kOwnsQueries>
struct ScorePairs {
  int own, first_other, lane;

  __device__ int other(int i) const { return first_other + key_of_score(i, lane); }
  __device__ int query(int i) const { return kOwnsQueries ? own : other(i); }
  __device__ int key(int i) const { return kOwnsQueries ? other(i) : own; }

  // Logits, or dot products that a bias hides, from dot products.
  __device__ void modify(f32x16& score, const Modifiers& m, float scale,
                         const HeadScores& head) const {
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      f32x2 bias = {}, distances;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (kBias != Bias::none) bias[j] = head.bias_of(m, query(i + j), key(i + j));
        distances[j] = query(i + j) + head.diagonal - key(i + j);
      }
      const f32x2 x = logits(f32x2{score[i], score[i + 1]}, m, scale, head.slope, distances, bias);
      score[i] = x.x;
      score[i + 1] = x.y;
    }
  }

  __device__ void hide(f32x16& score, const Visibility& visibility) const {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      score[i] = visibility.sees(query(i), key(i)) ? score[i] : -kInfinity;
  }
};

// What is dropped, as lanes see it that have a key each: bytes in LDS, of 32 queries and 32 keys.
struct DroppedQueries {
  static constexpr int kBytes = 32 * 32;
  static constexpr int kRowBytes = 32;

  // Each lane draws for a query and 16 keys.
  __device__ static void draw(Lds<char> to, const Modifiers& m, unsigned line, int first_query,
                              int first_key, int lane) {
    const Global<const unsigned> state = m.rng_state;
    const unsigned keys = first_key / 16 + lane / 32;
    const u32x4 counter = {keys, static_cast<unsigned>(first_query + lane % 32), line, state[2]};
    wave_barrier();
    *(Lds<u32x4>)(to + lane % 32 * kRowBytes + lane / 32 * 16) =
        philox(counter, state[0], state[1]);
    wave_barrier();
  }

  // Of a lane's score i.
  __device__ static bool is_kept(Lds<const char> from, const Modifiers& m, int i, int lane) {
    const Lds<const unsigned char> bytes = (Lds<const unsigned char>)from;
    return bytes[key_of_score(i, lane) * kRowBytes + lane % 32] <= m.largest_kept;
  }
};
