// Products of 16 rows and 16 columns of numbers that products take as they are.
#pragma once

#include "elements.h"

// Adds a product of 16 rows and 16 columns: of each a chunk is in four lanes, a part of the depth
// in each.
template <class Operand>
__device__ inline f32x4 multiply(u32x4 a, u32x4 b, f32x4 c) {
  if constexpr (Operand::kBytes == 1) {
    c = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(bits_as<long>(a.xy), bits_as<long>(b.xy), c, 0,
                                                   0, 0);
    return __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(bits_as<long>(a.zw), bits_as<long>(b.zw), c,
                                                      0, 0, 0);
  } else if constexpr (__is_same(Operand, BF16)) {
#if defined(__gfx950__)
    return __builtin_amdgcn_mfma_f32_16x16x32_bf16(bits_as<bf16x8>(a), bits_as<bf16x8>(b), c, 0, 0,
                                                   0);
#else
    c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(bits_as<s16x4>(a.xy), bits_as<s16x4>(b.xy), c, 0,
                                                  0, 0);
    return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(bits_as<s16x4>(a.zw), bits_as<s16x4>(b.zw), c,
                                                     0, 0, 0);
#endif
  } else {
#if defined(__gfx950__)
    return __builtin_amdgcn_mfma_f32_16x16x32_f16(bits_as<f16x8>(a), bits_as<f16x8>(b), c, 0, 0, 0);
#else
    c = __builtin_amdgcn_mfma_f32_16x16x16f16(bits_as<f16x4>(a.xy), bits_as<f16x4>(b.xy), c, 0, 0,
                                              0);
    return __builtin_amdgcn_mfma_f32_16x16x16f16(bits_as<f16x4>(a.zw), bits_as<f16x4>(b.zw), c, 0,
                                                 0, 0);
#endif
  }
}
