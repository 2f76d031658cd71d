// Which probabilities are dropped: random bytes by the counter-based generator Philox 4x32-7
// (Salmon et al., SC 2011), which depend on the random state and on their position alone. Forward
// and backward agree by them, whatever their tiles are.
//
// A counter is (key / 16, query, batch * heads_q + head, offset), the key of the generator is the
// seed, and the 16 bytes of the result are for 16 keys that follow each other.
#pragma once

#include "elements.h"

namespace {

using simd::Bits;
using simd::Factors;

constexpr int kKeysPerCounter = 16;

struct Dropout {
  uint32_t seed[2] = {};
  uint32_t offset = 0;
  uint8_t largest_kept = 0;  // a probability is kept where its byte is at most that
  float keep_scale = 1;      // what the kept ones are multiplied with

  Dropout() = default;
  Dropout(const FmhaShape& shape, const int64_t* rng_state)
      : seed{uint32_t(rng_state[0]), uint32_t(uint64_t(rng_state[0]) >> 32)},
        offset(uint32_t(rng_state[1])),
        largest_kept(uint8_t(shape.largest_kept)),
        keep_scale(shape.keep_scale) {}
};

// What is dropped of the keys of one counter, for kVectors * kLanes rows.
template <int kVectors>
struct Dropped {
  Bits excess[kVectors][4];  // bytes that are 0 where a probability is kept

  // `query` and `head` are those of the rows; head counts on from one member of the batch to the
  // next.
  void draw(const Dropout& dropout, const uint32_t* query, const uint32_t* head, int64_t key) {
    for (int v = 0; v < kVectors; ++v) {
      Factors c[4] = {simd::spread(simd::broadcast_bits(uint32_t(key / kKeysPerCounter))),
                      simd::spread(simd::load_bits(query + v * kLanes)),
                      simd::spread(simd::load_bits(head + v * kLanes)),
                      simd::spread(simd::broadcast_bits(dropout.offset))};
      philox(c, dropout.seed[0], dropout.seed[1]);
      for (int i = 0; i < 4; ++i)
        excess[v][i] = simd::subtract_bytes(simd::gather(c[i]), dropout.largest_kept);
    }
  }

  // The probabilities of vector v for `key`, with 0 for the dropped ones.
  Vec apply(int v, int64_t key, Vec probability) const {
    const int byte = int(key % kKeysPerCounter);
    return simd::where_zero(excess[v][byte / 4], 0xffu << byte % 4 * 8, probability);
  }

 private:
  static inline void philox(Factors (&c)[4], uint32_t k0, uint32_t k1) {
#pragma GCC unroll 7
    for (int round = 0; round < 7; ++round, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u) {
      Factors high0, low0, high1, low1;
      simd::multiply_wide(c[0], 0xd2511f53u, high0, low0);
      simd::multiply_wide(c[2], 0xcd9e8d57u, high1, low1);
      c[0] = simd::exclusive_or(high1, c[1], k0);
      c[1] = low1;
      c[2] = simd::exclusive_or(high0, c[3], k1);
      c[3] = low0;
    }
  }
};

}  // namespace
