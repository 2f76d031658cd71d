// Attention in the registers of one wave: 32 queries of one head, with an online softmax over tiles
// of keys. Everything is transposed: S^T = K Q^T and O^T = V^T P^T. So a lane holds scores of one
// query only, and P^T in the accumulator is the second product's operand as it is.
#pragma once

#include "address_spaces.h"
#include "number_formats.h"

constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_inff();
// Below every scaled score, and finite: the difference to -inf has to be -inf.
constexpr float kNoMaximum = -1.7e38f;
// How far scores may exceed the maximum in use, in powers of two, before all is rescaled.
constexpr int kUsualHeadroom = 8;
// A scaled score and the same one in an fma differ by half a unit in the last place, as a share.
constexpr float kScaledScoreError = 0x1p-24f;

// Orders LDS among the waves of the workgroup; global loads stay on their way.
__device__ inline void barrier() {
  constexpr int kLgkmcnt0 = 0xc07f;
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  // The fence alone leaves writes outstanding: LLVM relies on LDS keeping the order of all waves.
  __builtin_amdgcn_s_waitcnt(kLgkmcnt0);
  __builtin_amdgcn_sched_barrier(0);
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
  __builtin_amdgcn_sched_barrier(0);
}

// The same in two steps, between which a wave leaves LDS alone. Its last kReads reads stay on their
// way, too: nobody must write there before the next barrier.
template <int kReads>
__device__ inline void wait_for_lds() {
  constexpr int kLgkmcnt = 0xc07f | kReads << 8;
  static_assert(kReads < 15);
  // Fences for the compiler alone: those of a workgroup would wait for the reads.
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront", "local");
  __builtin_amdgcn_s_waitcnt(kLgkmcnt);
  __builtin_amdgcn_sched_barrier(0);
}
__device__ inline void barrier_after_wait() {
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront", "local");
  __builtin_amdgcn_sched_barrier(0);
}

// What a wave writes to LDS, other lanes of it read: in order, but the compiler has to know.
__device__ inline void wave_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront", "local");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront", "local");
}

// The same value, of which the compiler knows nothing. Addresses that depend on the result are
// computed where they are needed, instead of being kept in registers throughout the loop.
__device__ inline int opaque(int lane) {
  asm volatile("" : "+v"(lane));
  return lane;
}

// The same of a number from 0 to kEnd - 1, which the compiler knows: divisions are shifts then.
template <int kEnd>
__device__ inline int opaque_below(int lane) {
  const int result = opaque(lane);
  __builtin_assume(result >= 0 && result < kEnd);
  return result;
}

// ScoreDtype is what the product of keys and queries takes, Dtype that of values and probabilities.
template <class Keys, class Values, class Dtype, Rounding kRounding, int kHeadroom = kUsualHeadroom,
          class ScoreDtype = Dtype>
struct Attention {
  static constexpr int kKeyBlocks = Keys::kKeys / 32, kKeySteps = Keys::kKeys / Dtype::kDepth;
  static constexpr int kQuerySteps = Keys::kSteps, kValueBlocks = Values::kBlocks;

  u32x4 query[kQuerySteps];
  f32x16 score[kKeyBlocks];
  u32x4 probability[kKeySteps];
  f32x16 output[kValueBlocks];
  float maximum, scale;    // of the scores, times scale; scale has log2(e) in it
  unsigned long rescales;  // not 0: before more is added, the output has to be multiplied by
  float factor;
  float sum;  // of the probabilities that the lane has seen

  // Operands from LDS are read this many ahead of the products that take them.
  static constexpr int kAhead = 8 / Dtype::kProductsOfOperand;

  // What a matrix phase multiplies with the probabilities, then with the queries.
  struct Operands {
    static constexpr int kValues = kKeySteps * kValueBlocks;
    static constexpr int kEnd = kValues + kQuerySteps * kKeyBlocks;
    Lds<const char> first_value, first_key;
    u32x4 ahead[kAhead];

    __device__ u32x4 read(int n) const {
      if (n < kValues) return Values::operand(first_value, n % kValueBlocks, n / kValueBlocks);
      n -= kValues;
      return Keys::operand(first_key, n % kKeyBlocks, n / kKeyBlocks);
    }

    // Calls multiply(n, operand) for n from kFirst to kLast - 1, and reads ahead. In this order:
    // left alone, the compiler would read each operand when it is needed, to save registers.
    template <int kFirst, int kLast, class Multiply>
    __device__ void in_turn(Multiply multiply) {
#pragma unroll
      for (int n = kFirst; n < kLast; ++n) {
        multiply(n, ahead[n % kAhead]);
        if (n + kAhead < kEnd) ahead[n % kAhead] = read(n + kAhead);
        __builtin_amdgcn_sched_barrier(0);
      }
    }
  };

  // With the first ones read: from kFirst on, which is 0 or kValues.
  template <int kFirst>
  __device__ static Operands operands(Lds<const char> values, Lds<const char> keys, int lane) {
    return operands_from<kFirst>(values + Values::first_operand(lane),
                                 keys + Keys::first_operand(lane));
  }
  // The same, given where the lane's first operands are.
  template <int kFirst>
  __device__ static Operands operands_from(Lds<const char> first_value, Lds<const char> first_key) {
    Operands result{first_value, first_key};
#pragma unroll
    for (int n = kFirst; n < kFirst + kAhead && n < Operands::kEnd; ++n)
      result.ahead[n % kAhead] = result.read(n);
    return result;
  }

  // Adds a tile of values to the output, the first of which makes it, and calls also(n) after
  // operand n.
  template <class Also>
  __device__ void multiply_values(Operands& operands, bool is_first, Also also) {
    const auto multiply = [&](int n, u32x4 value, f32x16 c) {
      output[n % kValueBlocks] = Dtype::multiply(value, probability[n / kValueBlocks], c);
    };
    // Rescaling is part of a branch that ends with a product, whose result takes the registers of
    // the old output. A branch with multiplications alone would cost copies of all of it.
    if (is_first) {
      operands.template in_turn<0, kValueBlocks>([&](int n, u32x4 value) {
        multiply(n, value, f32x16(0));
        also(n);
      });
    } else if (__builtin_expect(rescales != 0, 0)) {
      operands.template in_turn<0, kValueBlocks>([&](int n, u32x4 value) {
        const f32x16 rescaled = output[n] * factor;
        multiply(n, value, rescaled);
        asm volatile("" ::"v"(rescaled));  // or the product would take the registers of this
        also(n);
      });
    } else {
      operands.template in_turn<0, kValueBlocks>([&](int n, u32x4 value) {
        multiply(n, value, output[n]);
        also(n);
      });
    }
    operands.template in_turn<kValueBlocks, Operands::kValues>([&](int n, u32x4 value) {
      multiply(n, value, output[n % kValueBlocks]);
      also(n);
    });
  }

  // Computes the scores of the next tile of keys, and calls also(n) after operand n.
  template <class Also>
  __device__ void multiply_keys(Operands& operands, Also also) {
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block) score[block] = f32x16(0);
    operands.template in_turn<Operands::kValues, Operands::kEnd>([&](int n, u32x4 key) {
      multiply_key(n - Operands::kValues, key);
      also(n - Operands::kValues);
    });
  }

  __device__ void multiply_key(int n, u32x4 key) {
    score[n % kKeyBlocks] = ScoreDtype::multiply(key, query[n / kKeyBlocks], score[n % kKeyBlocks]);
  }

  // Hides the keys behind `last`, which counts from the tile's first key.
  __device__ void mask(int last, int lane) {
    constexpr int kRun = Keys::kRun;
    const int limit = last - kRun * (lane / 32);
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block)
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int key = 32 * block + i / kRun * 2 * kRun + i % kRun;
        score[block][i] = key <= limit ? score[block][i] : -kInfinity;
      }
  }

  __device__ void rescale(float largest) {
    // The other half of the wave has the query's other keys.
    const float other = bits_as<float>(__builtin_amdgcn_ds_bpermute(
        (__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0)) ^ 32) * 4,
        bits_as<int>(largest)));
    const float next = __builtin_fmaxf(maximum, __builtin_fmaxf(largest, other));
    factor = __builtin_amdgcn_exp2f(maximum - next);
    maximum = next;
    sum *= factor;
  }

  // Of the probabilities of the whole row.
  __device__ float row_sum(int lane) const {
    return sum + bits_as<float>(__builtin_amdgcn_ds_bpermute((lane ^ 32) * 4, bits_as<int>(sum)));
  }

  // Rows that see no key have added up zeros times hidden values, which may be NaN or infinite.
  __device__ void clear_blind_rows(float row_sum) {
    if (!__builtin_amdgcn_ballot_w64(row_sum == 0)) return;
#pragma unroll
    for (int block = 0; block < kValueBlocks; ++block)
#pragma unroll
      for (int i = 0; i < 16; ++i) output[block][i] = row_sum == 0 ? 0 : output[block][i];
  }

  __device__ void clear_output() {
    // Here: the compiler would do it before it is known whether anybody has to.
    float zero = 0;
    asm volatile("" : "+v"(zero));
#pragma unroll
    for (int block = 0; block < kValueBlocks; ++block) output[block] = f32x16(zero);
  }

  // In place of softmax(), for a tile that is hidden from all rows of the wave.
  __device__ void see_nothing() {
    rescales = 0;
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) probability[step] = u32x4(0);
  }

  // Of a tile's scores; the first one begins with their maximum. Later tiles take the maximum in
  // use, and look at their scores only where probabilities came out too large: what all of them are
  // summed to tells that. Where there is no headroom, every tile looks first.
  //
  // `taken(i, pair)` gives what the product takes in place of two probabilities: those of the
  // lane's scores from number i on.
  template <class Taken>
  __device__ void softmax(bool is_first, Taken taken) {
    rescales = 0;
    if (is_first || kHeadroom == 0) raise_maximum();
    const auto probabilities = [&](int i) {
      const f32x16& scores = score[i / 16];
      return f32x2{exponential(scores[i % 16]), exponential(scores[i % 16 + 1])};
    };
    float added;
    do added = take(probabilities, taken);
    while (__builtin_expect(__builtin_amdgcn_ballot_w64(added > kMostSum) != 0, 0) &&
           raise_maximum());
    add(added);
  }

  // The same of a tile without scores: probabilities(i) gives two of them by the maximum in use,
  // those of the lane's keys from number i on. Where they come out too large nothing is added, and
  // false returned.
  template <class Probabilities, class Taken>
  __device__ bool softmax_of(Probabilities probabilities, Taken taken) {
    static_assert(kHeadroom > 0);
    rescales = 0;
    const float added = take(probabilities, taken);
    if (__builtin_expect(__builtin_amdgcn_ballot_w64(added > kMostSum) != 0, 0)) return false;
    add(added);
    return true;
  }

  // Makes the maximum in use that of the scores, where that is larger. Whether it was of any lane.
  __device__ bool raise_maximum() {
    // Here: the compiler would look before it is known whether anybody has to.
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block) asm volatile("" : "+v"(score[block]));
    float largest = score[0][0];
#pragma unroll
    for (int i = 1; i < 16 * kKeyBlocks; ++i)
      largest = __builtin_fmaxf(largest, score[i / 16][i % 16]);
    largest *= scale;
    // Truncated, a probability of just below 1 would lose a whole unit of its last place.
    if constexpr (kRounding == Rounding::towards_zero)
      largest = __builtin_fmaf(-4 * kScaledScoreError, __builtin_fabsf(largest), largest);
    const unsigned long raised = __builtin_amdgcn_ballot_w64(largest > maximum);
    if (!raised) return false;
    rescales = raised;
    rescale(largest);
    return true;
  }

 private:
  // Of a lane's probabilities, before anybody looks for a larger maximum.
  static constexpr float kMostSum = 16 * kKeyBlocks << kHeadroom;

  // Takes the probabilities of a tile for the product, and returns their sum.
  template <class Probabilities, class Taken>
  __device__ float take(Probabilities probabilities, Taken taken) {
    float even = 0, odd = 0;
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
      for (int i = 0; i < Dtype::kDepth / 4; ++i) {
        const int number = step * Dtype::kDepth / 2 + i * 2;
        f32x2 p = probabilities(number);
        even += p.x;
        odd += p.y;
        p = taken(number, p);
        if constexpr (Dtype::kBytes == 4) {
          probability[step][2 * i] = bits_of(p.x);
          probability[step][2 * i + 1] = bits_of(p.y);
        } else {
          probability[step][i] = Dtype::template pack<kRounding>(p.x, p.y);
        }
      }
    }
    return even + odd;
  }

  // Adds a tile's probabilities to the sum.
  __device__ void add(float added) {
    sum += added;
    // All of it here: the compiler would move what nobody needs yet to the matrix phase.
    asm volatile("" : "+v"(sum));
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) asm volatile("" : "+v"(probability[step]));
  }

  __device__ float exponential(float x) const {
    return __builtin_amdgcn_exp2f(__builtin_fmaf(x, scale, -maximum));
  }
};
