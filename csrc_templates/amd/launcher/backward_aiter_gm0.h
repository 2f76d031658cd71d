// Batch mode for AMD's backward kernels: the lengths are among what was prepared.
#pragma once

#include "structs.h"

namespace {

inline void set_sequences(AiterBackward&, const AiterBackwardTensors&) {}

}  // namespace
