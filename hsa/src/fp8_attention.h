// Attention of 8-bit queries, keys and values in the registers of one wave: what of attention.h is
// another way where products take the chip's own form of e4m3, probabilities included.
#pragma once

#include "attention.h"

typedef int i32x8 __attribute__((ext_vector_type(8)));

// The chip's own form of e4m3. Probabilities are relative to the maximum in use, and multiplied
// with 2^kOffset before they are rounded. So those from 2^-10 on have all bits that the format has,
// and scores may exceed that maximum by kHeadroom, in powers of two, before all is rescaled: with
// less room some wave of a workgroup would rescale in most tiles.
struct FP8 {
  static constexpr int kBytes = 1, kDepth = 32, kHeadroom = 4;
#if defined(__gfx950__)
  static constexpr int kOffset = 4;  // of e4m3fn, up to 448
#else
  static constexpr int kOffset = 3;  // of e4m3fnuz, up to 240
#endif

  // Two operands of 32 values of depth. gfx950 takes them at once, in half the time.
  __device__ static f32x16 multiply(const u32x4 (&a)[2], const u32x4 (&b)[2], f32x16 c) {
#if defined(__gfx950__)
    constexpr int kE4m3 = 0, kNoScales = 0;
    return __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(joined(a), joined(b), c, kE4m3, kE4m3, 0,
                                                           kNoScales, 0, kNoScales);
#else
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      c = __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(bits_as<long>(a[i].xy), bits_as<long>(b[i].xy),
                                                     c, 0, 0, 0);
      c = __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(bits_as<long>(a[i].zw), bits_as<long>(b[i].zw),
                                                     c, 0, 0, 0);
    }
    return c;
#endif
  }

  // Four numbers, rounded to nearest even, the first one lowest.
  __device__ static unsigned pack(f32x2 low, f32x2 high) {
    // What the first conversion leaves in the upper half does not matter.
    int any;
    const int four = __builtin_amdgcn_cvt_pk_fp8_f32(low.x, low.y, any, false);
    return __builtin_amdgcn_cvt_pk_fp8_f32(high.x, high.y, four, true);
  }

 private:
  __device__ static i32x8 joined(const u32x4 (&x)[2]) {
    return bits_as<i32x8>(__builtin_shufflevector(x[0], x[1], 0, 1, 2, 3, 4, 5, 6, 7));
  }
};

// `maximum` is less by FP8::kOffset than that of the scores.
template <class Keys, class Values>
struct Fp8Attention : Attention<Keys, Values, FP8, Rounding::nearest_even, FP8::kHeadroom> {
  using Base = Attention<Keys, Values, FP8, Rounding::nearest_even, FP8::kHeadroom>;
  using Base::kKeyBlocks, Base::kKeySteps, Base::kQuerySteps, Base::kValueBlocks;
  using Base::maximum, Base::scale, Base::rescales, Base::factor, Base::sum;
  using Base::query, Base::score, Base::probability, Base::output;
  static_assert(kKeySteps % 2 == 0 && kQuerySteps % 2 == 0);

  // Operands from LDS, two for a product, are read this many products ahead. A wide output leaves
  // registers for fewer.
  static constexpr int kAhead = kValueBlocks > 4 ? 2 : 3;

  // What a matrix phase multiplies with the probabilities, then with the queries.
  struct Operands {
    static constexpr int kValues = kValueBlocks * kKeySteps / 2;
    static constexpr int kEnd = kValues + kKeyBlocks * kQuerySteps / 2;
    Lds<const char> first_value, first_key;
    u32x4 ahead[kAhead][2];

    __device__ void read(int n) {
      auto& to = ahead[n % kAhead];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (n < kValues) {
          to[i] = Values::operand(first_value, n % kValueBlocks, n / kValueBlocks * 2 + i);
        } else {
          const int key = n - kValues;
          to[i] = Keys::operand(first_key, key % kKeyBlocks, key / kKeyBlocks * 2 + i);
        }
      }
    }

    // Calls multiply(n, operands) for n from kFirst to kLast - 1, and reads ahead. In this order:
    // left alone, the compiler would read each operand when it is needed, to save registers.
    template <int kFirst, int kLast, class Multiply>
    __device__ void in_turn(Multiply multiply) {
#pragma unroll
      for (int n = kFirst; n < kLast; ++n) {
        multiply(n, ahead[n % kAhead]);
        if (n + kAhead < kEnd) read(n + kAhead);
        __builtin_amdgcn_sched_barrier(0);
      }
    }
  };

  // With the first ones read: from kFirst on, which is 0 or kValues.
  template <int kFirst>
  __device__ static Operands operands(Lds<const char> values, Lds<const char> keys, int lane) {
    Operands result{values + Values::first_operand(lane), keys + Keys::first_operand(lane)};
#pragma unroll
    for (int n = kFirst; n < kFirst + kAhead && n < Operands::kEnd; ++n) result.read(n);
    return result;
  }

  // Adds a tile of values to the output, the first of which makes it.
  __device__ void multiply_values(Operands& operands, bool is_first) {
    const auto multiply = [&](int n, const u32x4(&value)[2], f32x16 c) {
      const u32x4(&of_keys)[2] = pair(probability, n / kValueBlocks);
      output[n % kValueBlocks] = FP8::multiply(value, of_keys, c);
    };
    // Rescaling is part of a branch that ends with a product, whose result takes the registers of
    // the old output. A branch with multiplications alone would cost copies of all of it.
    if (is_first) {
      operands.template in_turn<0, kValueBlocks>(
          [&](int n, const u32x4(&value)[2]) { multiply(n, value, f32x16(0)); });
    } else if (rescales) {
      operands.template in_turn<0, kValueBlocks>([&](int n, const u32x4(&value)[2]) {
        const f32x16 rescaled = output[n] * factor;
        multiply(n, value, rescaled);
        asm volatile("" ::"v"(rescaled));  // or the product would take the registers of this
      });
    } else {
      operands.template in_turn<0, kValueBlocks>(
          [&](int n, const u32x4(&value)[2]) { multiply(n, value, output[n]); });
    }
    operands.template in_turn<kValueBlocks, Operands::kValues>(
        [&](int n, const u32x4(&value)[2]) { multiply(n, value, output[n % kValueBlocks]); });
  }

  // Computes the scores of the next tile of keys, and calls also(n) after product n.
  template <class Also>
  __device__ void multiply_keys(Operands& operands, Also also) {
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block) score[block] = f32x16(0);
    operands.template in_turn<Operands::kValues, Operands::kEnd>([&](int n, const u32x4(&key)[2]) {
      const int number = n - Operands::kValues, block = number % kKeyBlocks;
      score[block] = FP8::multiply(key, pair(query, number / kKeyBlocks), score[block]);
      also(number);
    });
  }

  // Hides the keys behind `last`, which counts from the tile's first key.
  __device__ void mask(int last, int lane) {
    const int limit = last - 16 * (lane / 32);
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block)
#pragma unroll
      for (int i = 0; i < 16; ++i)
        score[block][i] = 32 * block + i <= limit ? score[block][i] : -kInfinity;
  }

  __device__ void softmax() {
    float largest = score[0][0];
#pragma unroll
    for (int i = 1; i < 16 * kKeyBlocks; ++i)
      largest = __builtin_fmaxf(largest, score[i / 16][i % 16]);
    largest = __builtin_fmaf(largest, scale, -FP8::kOffset);
    rescales = __builtin_amdgcn_ballot_w64(largest > maximum + FP8::kHeadroom);
    if (rescales) Base::rescale(largest);
    float sums[4] = {};
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float p[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          p[j] = __builtin_amdgcn_exp2f(__builtin_fmaf(score[step][4 * i + j], scale, -maximum));
          sums[j] += p[j];
        }
        probability[step][i] = FP8::pack({p[0], p[1]}, {p[2], p[3]});
      }
    }
    sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    // All of it here: the compiler would move what nobody needs yet to the matrix phase.
    asm volatile("" : "+v"(sum));
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) asm volatile("" : "+v"(probability[step]));
  }

 private:
  template <int kCount>
  __device__ static const u32x4 (&pair(const u32x4 (&of)[kCount], int i))[2] {
    return (const u32x4(&)[2])of[2 * i];
  }
};
