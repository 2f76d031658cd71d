// Batch mode for kernels of ours: all sequences are equally long.
#pragma once

#include "arguments.h"

namespace {
namespace gm0 {

// The longest sequence of queries that a launch has workgroups for.
inline std::int64_t longest_of_q(const Sizes& sizes, const Tensors&) { return sizes.seqlen_q; }

template <class Block>
void set_sequences(Block& args, const Sizes& sizes, const Tensors&) {
  args.seqlen_q = number(sizes.seqlen_q);
}

}  // namespace gm0
}  // namespace
