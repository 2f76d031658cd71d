// Scores as backward has them: a lane's 16 scores of a tile are those of one query with 16 keys, or
// of one key with 16 queries. What happens to a single one is in scores.h.
//
// Included after the traits.
#pragma once

#include "scores.h"

// What scores of one query head of a sequence depend on, beside their query and key.
struct HeadScores {
  Global<const char> bias;  // of query 0 and key 0
  float slope;              // ALiBi's of scores, negative
  int diagonal;             // the key that is at ALiBi's distance 0 from query 0
  int last_query;
  unsigned line;  // the number of the sequence and head among all of them
  ScoreUnit unit;

  __device__ static HeadScores of(const Modifiers& m, const ScoreUnit& unit,
                                  const Sequence& sequence, long batch, long head, int queries,
                                  unsigned line) {
    HeadScores result = {};
    result.last_query = queries - 1;
    result.line = line;
    result.unit = unit;
    if (kBias != Bias::none)
      result.bias = m.bias + batch * m.bias_batch + head * m.bias_head +
                    static_cast<long>(sequence.q_start) * m.bias_query;
    if (kHasAlibi) {
      result.slope = alibi_slope(m, unit, batch, head);
      result.diagonal = sequence.seqlen_k - sequence.seqlen_q;
    }
    return result;
  }

  __device__ float bias_of(const Modifiers& m, int query, int key) const {
    // Pairs that are not there, whose scores nobody needs, have the bias of the last query or key.
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

  // Scores from dot products, or from what a soft cap has made of these.
  __device__ void modify(f32x16& score, const Modifiers& m, const HeadScores& head) const {
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      f32x2 bias = {}, distances;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (kBias != Bias::none) bias[j] = head.bias_of(m, query(i + j), key(i + j));
        distances[j] = query(i + j) + head.diagonal - key(i + j);
      }
      f32x2 pair = with_bias(f32x2{score[i], score[i + 1]}, head.unit, bias);
      if (kHasAlibi) pair = with_alibi(pair, head.slope, distances);
      score[i] = pair.x;
      score[i + 1] = pair.y;
    }
  }

  __device__ void hide(f32x16& score, const Visibility& visibility) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      score[i] = visibility.sees(query(i), key(i)) ? score[i] : -kInfinity;
      // One after the other: as conditions, those of a tile would take 32 scalar registers.
      asm volatile("" : "+v"(score[i]));
    }
  }
};

// What is dropped of 32 queries and 32 keys, for lanes that have a key each: bytes in LDS.
struct DroppedQueries {
  static constexpr int kRowBytes = 32;
  static constexpr int kBytes = 33 * kRowBytes;

  // Where a query's bytes begin. Halves of a wave, which have 16 queries each, read other banks.
  __device__ static int place(int query) { return (query + query / 16) * kRowBytes; }

  // Each lane draws for a query and 16 keys.
  __device__ static void draw(Lds<char> to, const RandomState& state, unsigned line,
                              int first_query, int first_key, int lane) {
    const u32x4 bytes = state.bytes(first_key + lane / 32 * 16, first_query + lane % 32, line);
    wave_barrier();
    *(Lds<u32x4>)(to + place(lane % 32) + lane / 32 * 16) = bytes;
    wave_barrier();
  }

  // Whether the probability of a lane's score i is kept.
  __device__ static bool is_kept(Lds<const char> from, const Modifiers& m, int i, int lane) {
    const Lds<const unsigned char> bytes = (Lds<const unsigned char>)from;
    int byte = bytes[place(key_of_score(i, lane)) + lane % 32];
    // Beside a bias and the addresses of far rows, few registers are left: a score's condition is
    // found when it is needed, and not kept.
    if (kIsFar && kHasAddedBias) asm volatile("" : "+v"(byte));
    return byte <= m.largest_kept;
  }
};
