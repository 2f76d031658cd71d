// A wave's halves of 32 lanes each have the same queries, and other keys.
#pragma once

#include "number_formats.h"

// Exchanges the upper half's `a` and the lower half's `b`.
__device__ inline void exchange_halves(unsigned& a, unsigned& b, int lane) {
#if defined(__gfx950__)
  const auto exchanged = __builtin_amdgcn_permlane32_swap(a, b, false, false);
  a = exchanged[0];
  b = exchanged[1];
#else
  const bool is_upper = lane >= 32;
  const unsigned given =
      __builtin_amdgcn_ds_bpermute((lane ^ 32) * 4, static_cast<int>(is_upper ? a : b));
  if (is_upper) a = given;
  else b = given;
#endif
}
