// How many workgroups of a launch a compute unit has room for.
#pragma once

#include "execution/wave.h"

namespace emulator {

struct Occupancy {
  u32 vgprs, architectural_vgprs, sgprs, lds_bytes;  // as allocated: a wave's, a workgroup's
  u32 waves_of_workgroup;
  u32 by_vgprs, by_sgprs, by_lds, by_waves;  // workgroups of a compute unit that each has room for
  u32 workgroups;                            // the smallest of them
};

Occupancy occupancy_of(const Dispatch&);

}  // namespace emulator
