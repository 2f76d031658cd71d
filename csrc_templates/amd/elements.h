// Numbers as they lie in memory, and as products take them. Values of 8 bits become 16-bit ones, or
// floats beside queries that are, on their way into LDS. So do integer keys, and all keys of 8 bits
// beside queries of more: that is exact, and leaves queries and probabilities all their bits.
#pragma once

#include "number_formats.h"

// The chip's own form of e4m3. Products of keys and queries take it as it is.
struct FP8 {
  static constexpr int kBytes = 1, kDepth = 32;

  __device__ static f32x16 multiply(u32x4 a, u32x4 b, f32x16 c) {
    c = __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(bits_as<long>(a.xy), bits_as<long>(b.xy), c, 0,
                                                   0, 0);
    return __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(bits_as<long>(a.zw), bits_as<long>(b.zw), c,
                                                      0, 0, 0);
  }

  // Numbers 2 * kPair and on of four.
  template <int kPair>
  __device__ static f32x2 pair(unsigned four) {
    return __builtin_amdgcn_cvt_pk_f32_fp8(four, kPair);
  }

#if defined(__gfx950__)
  // The same as bf16, in one instruction in place of two.
  template <int kPair>
  __device__ static unsigned pair_of_bf16(unsigned four) {
    constexpr float kScale = 1;
    return bits_as<unsigned>(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(four, kScale, kPair == 1));
  }
#endif
};

// The chip's own form of e5m2. All its numbers are numbers of fp16.
struct BF8 {
  static constexpr int kBytes = 1;

  template <int kPair>
  __device__ static f32x2 pair(unsigned four) {
    return __builtin_amdgcn_cvt_pk_f32_bf8(four, kPair);
  }
};

struct INT8 {
  static constexpr int kBytes = 1;

  template <int kPair>
  __device__ static f32x2 pair(unsigned four) {
    return {static_cast<float>(static_cast<signed char>(four >> 16 * kPair)),
            static_cast<float>(static_cast<signed char>(four >> (16 * kPair + 8)))};
  }
};

// The one type or the other.
template <bool kIsFirst, class First, class Second>
struct EitherOf {
  using Type = First;
};
template <class First, class Second>
struct EitherOf<false, First, Second> {
  using Type = Second;
};
template <bool kIsFirst, class First, class Second>
using Either = typename EitherOf<kIsFirst, First, Second>::Type;

// Unsigned integers of so many bytes.
template <int kBytes>
using WordsOf = Either<(kBytes < 4), Either<kBytes == 1, unsigned char, unsigned short>,
                       Either<kBytes == 4, unsigned, Either<kBytes == 8, u32x2, u32x4>>>;

// kCount numbers of a dtype.
template <class Element, int kCount>
using Words = WordsOf<kCount * Element::kBytes>;

// How many numbers a chunk of LDS has.
template <class Dtype>
constexpr int kChunkValues = 16 / Dtype::kBytes;

// Converts four numbers, or eight that become a chunk, to what products take.
template <class Element, class Dtype, class From>
__device__ inline auto as_taken(From numbers) {
  if constexpr (Element::kBytes == Dtype::kBytes) {
    return numbers;
  } else if constexpr (sizeof(From) == 8) {
    const u32x2 first = as_taken<Element, Dtype>(numbers.x);
    const u32x2 second = as_taken<Element, Dtype>(numbers.y);
    return u32x4{first.x, first.y, second.x, second.y};
#if defined(__gfx950__)
  } else if constexpr (__is_same(Element, FP8) && __is_same(Dtype, BF16)) {
    return u32x2{FP8::pair_of_bf16<0>(numbers), FP8::pair_of_bf16<1>(numbers)};
#endif
  } else {
    const f32x2 first = Element::template pair<0>(numbers);
    const f32x2 second = Element::template pair<1>(numbers);
    if constexpr (Dtype::kBytes == 4) {
      return u32x4{bits_of(first.x), bits_of(first.y), bits_of(second.x), bits_of(second.y)};
    } else {
      constexpr Rounding kNone = Rounding::towards_zero;  // there is nothing to round
      return u32x2{Dtype::template pack<kNone>(first.x, first.y),
                   Dtype::template pack<kNone>(second.x, second.y)};
    }
  }
}

// Rounds four floats to nearest even, as results are.
template <class Dtype>
__device__ inline Words<Dtype, 4> rounded_to(float a, float b, float c, float d) {
  if constexpr (Dtype::kBytes == 4) return {bits_of(a), bits_of(b), bits_of(c), bits_of(d)};
  else return {packed_results<Dtype>(a, b), packed_results<Dtype>(c, d)};
}

// Sums of floats are made of parts, a few products each: every number more in a sum costs it a
// rounding. Forward and backward make scores alike, so that the lse fits both.
template <class Dtype>
struct PartialSums {
  static constexpr bool kHasParts = Dtype::kBytes == 4;
  static constexpr int kProducts = 4;
  f32x16 sum;

  // Behind product n of kEnd, which has been added to x: begins a new part, or leaves the sum.
  template <int kEnd>
  __device__ void add(f32x16& x, int n) {
    if (!kHasParts || (n % kProducts != kProducts - 1 && n != kEnd - 1)) return;
    sum = n < kProducts ? x : sum + x;
    x = n == kEnd - 1 ? sum : f32x16(0);
  }
};

template <class Element>
using Bits = Words<Element, 1>;
