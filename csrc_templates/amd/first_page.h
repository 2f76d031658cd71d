// Where the pages of a sequence are named.
#pragma once

#include "workgroups.h"

// The place of the first one in the block table: in a row of it, or where sequences have lists
// instead, which begin where their rows would if keys did not lie in pages.
__device__ inline long first_page(const Modifiers& m, const Place& place,
                                  const Sequence& sequence) {
  return m.block_table_batch < 0 ? sequence.k_start : place.batch * m.block_table_batch;
}
