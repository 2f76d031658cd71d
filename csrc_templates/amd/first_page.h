// Where the pages of a sequence are named.
#pragma once

#include "workgroups.h"

// The place of the first one in the block table: in a row of it, or where sequences have lists
// instead, which is where their rows would begin if keys did not lie in pages. As rows these begin
// at 0.
__device__ inline long take_first_page(const Modifiers& m, const Place& place,
                                       Sequence& sequence) {
  const unsigned in_lists = sequence.k_start;
  sequence.k_start = 0;
  return m.block_table_batch < 0 ? in_lists : place.batch * m.block_table_batch;
}
