// Runs a launch: workgroups in parallel on threads, waves of a workgroup in turns on one thread.
#pragma once

#include <string>

#include "chips.h"
#include "decode/code_object.h"
#include "execution/wave.h"

namespace emulator {

struct LaunchFailure {
  bool failed = false;
  std::string message;  // kernel, address, instruction, workgroup, wave, lane, and what was wrong
};

// Everything of `dispatch` is set but its packet. Returns when all workgroups have ended.
LaunchFailure run_dispatch(Dispatch& dispatch);

}  // namespace emulator
