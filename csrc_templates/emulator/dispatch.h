// Runs a launch: workgroups in parallel on threads, waves of a workgroup in turns on one thread.
#pragma once

#include <string>

#include "code_object.h"
#include "wave.h"

namespace emulator {

// A chip of the virtual node.
struct Device {
  const char* name;
  const char* arch_name;  // gcnArchName, with features
  Arch arch;
  u32 compute_units;
  u32 lds_bytes;    // of a compute unit, and at most of a workgroup
  u32 lds_granule;  // LDS is allocated in multiples of this
  u32 pci_chip_id;
  u32 clock_khz;
  u64 memory_bytes;
};

struct LaunchFailure {
  bool failed = false;
  std::string message;  // kernel, address, instruction, workgroup, wave, lane, and what was wrong
};

// Everything of `dispatch` is set but its packet. Returns when all workgroups have ended.
LaunchFailure run_dispatch(Dispatch& dispatch);

}  // namespace emulator
