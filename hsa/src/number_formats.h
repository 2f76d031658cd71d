// The formats that matrix products take: the products, and rounding float32 to 16 bits.
#pragma once

typedef float f32x2 __attribute__((ext_vector_type(2)));
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef float f32x16 __attribute__((ext_vector_type(16)));
typedef unsigned u32x2 __attribute__((ext_vector_type(2)));
typedef unsigned u32x4 __attribute__((ext_vector_type(4)));
typedef short s16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 f16x2 __attribute__((ext_vector_type(2)));
typedef _Float16 f16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 f16x8 __attribute__((ext_vector_type(8)));
typedef __bf16 bf16x2 __attribute__((ext_vector_type(2)));
typedef __bf16 bf16x8 __attribute__((ext_vector_type(8)));

enum class Rounding { nearest_even, nearest_away, towards_zero };

template <class To, class From>
__device__ inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

__device__ inline unsigned bits_of(float x) { return bits_as<unsigned>(x); }

// The upper halves of two dwords, `low`'s below.
__device__ inline unsigned upper_halves(unsigned low, unsigned high) {
  return __builtin_amdgcn_perm(high, low, 0x07060302);
}

__device__ inline unsigned lower_halves(unsigned low, unsigned high) {
  return __builtin_amdgcn_perm(high, low, 0x05040100);
}

// Operands of kDepth values of depth for 32 rows or columns, half of them in the lanes of each half
// of the wave.
struct SixteenBits {
  static constexpr int kBytes = 2, kDepth = 16;
  // gfx942 takes them in two products of depth 8, the halves of all lanes first.
#if defined(__gfx950__)
  static constexpr int kProductsOfOperand = 1;
#else
  static constexpr int kProductsOfOperand = 2;
#endif
};

struct BF16 : SixteenBits {
  __device__ static f32x16 multiply(u32x4 a, u32x4 b, f32x16 c) {
#if defined(__gfx950__)
    return __builtin_amdgcn_mfma_f32_32x32x16_bf16(bits_as<bf16x8>(a), bits_as<bf16x8>(b), c, 0, 0,
                                                   0);
#else
    c = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(bits_as<s16x4>(a.xy), bits_as<s16x4>(b.xy), c, 0,
                                                 0, 0);
    return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(bits_as<s16x4>(a.zw), bits_as<s16x4>(b.zw), c,
                                                    0, 0, 0);
#endif
  }

  // Two numbers, `low` in the lower half.
  template <Rounding kRounding>
  __device__ static unsigned pack(float low, float high) {
#if defined(__gfx950__)
    return bits_as<unsigned>(__builtin_convertvector(f32x2{low, high}, bf16x2));
#else
    return upper_halves(rounded<kRounding>(low), rounded<kRounding>(high));
#endif
  }

 private:
  // The upper half is the result. A NaN stays one: those that arise here are quiet.
  template <Rounding kRounding>
  __device__ static unsigned rounded(float x) {
    if (kRounding == Rounding::nearest_even) return bits_of(x) + 0x7fff + (bits_of(x) >> 16 & 1);
    if (kRounding == Rounding::nearest_away) return bits_of(x) + 0x8000;
    return bits_of(x);
  }
};

struct FP16 : SixteenBits {
  __device__ static f32x16 multiply(u32x4 a, u32x4 b, f32x16 c) {
#if defined(__gfx950__)
    return __builtin_amdgcn_mfma_f32_32x32x16_f16(bits_as<f16x8>(a), bits_as<f16x8>(b), c, 0, 0, 0);
#else
    c = __builtin_amdgcn_mfma_f32_32x32x8f16(bits_as<f16x4>(a.xy), bits_as<f16x4>(b.xy), c, 0, 0,
                                             0);
    return __builtin_amdgcn_mfma_f32_32x32x8f16(bits_as<f16x4>(a.zw), bits_as<f16x4>(b.zw), c, 0, 0,
                                                0);
#endif
  }

  template <Rounding>
  __device__ static unsigned pack(float low, float high) {
    return bits_as<unsigned>(__builtin_convertvector(f32x2{low, high}, f16x2));
  }
};

struct FP32 {
  static constexpr int kBytes = 4, kDepth = 8, kProductsOfOperand = 4;

  __device__ static f32x16 multiply(u32x4 a, u32x4 b, f32x16 c) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      c = __builtin_amdgcn_mfma_f32_32x32x2f32(bits_as<float>(a[i]), bits_as<float>(b[i]), c, 0, 0,
                                               0);
    return c;
  }
};

// Two results as they are written: to nearest even, however the operands of products are rounded.
template <class Dtype>
__device__ inline unsigned packed_results(float low, float high) {
  return Dtype::template pack<Rounding::nearest_even>(low, high);
}
