// Which probabilities are dropped: random bytes by the counter-based generator Philox 4x32-7
// (Salmon et al., SC 2011), which depend on the random state and on their position alone. The CPU
// draws the same ones.
//
// A counter is (key / 16, query, batch * heads + head, offset), the key of the generator is the
// seed, and the 16 bytes of the result are for 16 keys that follow each other.
#pragma once

#include "address_spaces.h"
#include "number_formats.h"

// Left alone, the compiler would make two instructions of it where a number is a scalar register.
__device__ inline unsigned xor_of(unsigned a, unsigned b, unsigned c) {
#if defined(__gfx950__)
  return __builtin_amdgcn_bitop3_b32(a, b, c, 0x96);
#else
  return a ^ b ^ c;
#endif
}

// The state of a call, which all lanes have in scalar registers.
struct RandomState {
  unsigned seed_low, seed_high, offset;

  __device__ static RandomState of(const Modifiers& m) {
    using Constant = const __attribute__((address_space(4))) unsigned*;
    const auto words = (Constant)(unsigned long)m.rng_state;
    return {words[0], words[1], words[2]};
  }

  // The same state, of which the compiler knows nothing. Left alone, it computes all rounds' keys
  // once, and has them in 14 scalar registers throughout a loop.
  __device__ RandomState fresh() const {
    RandomState result = *this;
    asm volatile("" : "+s"(result.seed_low), "+s"(result.seed_high));
    return result;
  }

  // The bytes of 16 keys that follow each other, the first of which is a multiple of 16.
  __device__ u32x4 bytes(unsigned first_key, unsigned query, unsigned line) const {
    u32x4 counter = {first_key / 16, query, line, offset};
    unsigned low = seed_low, high = seed_high;
#pragma unroll
    for (int round = 0; round < 7; ++round) {
      const unsigned long first = 0xd2511f53ul * counter.x, second = 0xcd9e8d57ul * counter.z;
      const unsigned first_high = first >> 32, second_high = second >> 32;
      counter = u32x4{xor_of(second_high, counter.y, low), static_cast<unsigned>(second),
                      xor_of(first_high, counter.w, high), static_cast<unsigned>(first)};
      low += 0x9e3779b9u;
      high += 0xbb67ae85u;
    }
    return counter;
  }
};

// What is dropped of 16 keys that follow each other, as one lane sees it.
struct Dropped {
  u32x4 bytes;
  int largest_kept;

  __device__ bool is_kept(int i) const {
    return static_cast<int>(bytes[i / 4] >> i % 4 * 8 & 0xff) <= largest_kept;
  }

  // Puts 0 in the place of dropped ones among two probabilities, as Attention::softmax asks.
  __device__ f32x2 operator()(int i, f32x2 pair) const {
    return {is_kept(i) ? pair.x : 0, is_kept(i + 1) ? pair.y : 0};
  }
};
