// Batch mode for AMD's forward kernels: all sequences are equally long.
#pragma once

#include "arguments.h"
#include "runtime.h"

namespace {

// The longest sequence of queries that a launch has workgroups for.
inline std::int64_t longest_of_q(const Sizes& sizes, const Tensors&) { return sizes.seqlen_q; }

inline void set_sequences(AiterArguments&, const Tensors&) {}

template <class Call>
Grid grid_of(const Call& call, std::int64_t tiles) {
  if (call.has_heads_first) return {call.heads_q, tiles, call.batch};
  return {tiles, call.heads_q, call.batch};
}

}  // namespace
