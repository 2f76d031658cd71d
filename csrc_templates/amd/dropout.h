// Which probabilities are dropped: random bytes by the counter-based generator Philox 4x32-7
// (Salmon et al., SC 2011), which depend on the random state and on their position alone. The CPU
// draws the same ones.
//
// A counter is (key / 16, query, batch * heads + head, offset), the key of the generator is the
// seed, and the 16 bytes of the result are for 16 keys that follow each other.
#pragma once

#include "half_waves.h"
#include "number_formats.h"

__device__ inline u32x4 philox(u32x4 counter, unsigned seed_low, unsigned seed_high) {
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const unsigned long first = 0xd2511f53ul * counter.x, second = 0xcd9e8d57ul * counter.z;
    const unsigned first_high = first >> 32, second_high = second >> 32;
    counter = u32x4{second_high ^ counter.y ^ seed_low, static_cast<unsigned>(second),
                    first_high ^ counter.w ^ seed_high, static_cast<unsigned>(first)};
    seed_low += 0x9e3779b9u;
    seed_high += 0xbb67ae85u;
  }
  return counter;
}

// What is dropped of a tile of 32 keys, as one lane sees it: a word has the bytes of four keys. The
// lane has words `half` and 2 + `half` of each counter, `half` being the wave's that it is in.
struct Dropped {
  unsigned words[2][2];  // of which 16 keys; the first or the last four of the lane's eight
  unsigned largest_kept;

  // Each half of the wave draws for 16 keys, and gives the other half those that it needs.
  __device__ static Dropped draw(const Modifiers& m, unsigned line, int query, int first_key,
                                 int lane) {
    const Global<const unsigned> state = m.rng_state;
    const unsigned half = lane / 32;
    const u32x4 counter = {first_key / 16 + half, static_cast<unsigned>(query), line, state[2]};
    const u32x4 drawn = philox(counter, state[0], state[1]);
    Dropped result;
    result.largest_kept = m.largest_kept;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned even = drawn[2 * i], odd = drawn[2 * i + 1];
      exchange_halves(even, odd, lane);
      result.words[0][i] = even;
      result.words[1][i] = odd;
    }
    return result;
  }

  // Two probabilities, with 0 for the dropped ones; as Attention::softmax asks.
  __device__ f32x2 operator()(int i, f32x2 pair) const {
    const unsigned bytes = words[i / 8][i % 8 / 4] >> i % 4 * 8;
    return {(bytes & 0xff) <= largest_kept ? pair.x : 0,
            (bytes >> 8 & 0xff) <= largest_kept ? pair.y : 0};
  }
};
