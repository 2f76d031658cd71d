// Group mode for kernels of ours: sequences of any length, one behind the other.
#pragma once

#include "arguments.h"

namespace {
namespace gm1 {

// The longest sequence of queries that a launch has workgroups for.
inline std::int64_t longest_of_q(const Sizes&, const Tensors& tensors) {
  return tensors.max_seqlen_q;
}

template <class Block>
void set_sequences(Block& args, const Sizes&, const Tensors& tensors) {
  args.seqlen_q = number(tensors.max_seqlen_q);
  args.cu_seqlens_q = tensors.cu_seqlens_q;
  args.cu_seqlens_k = tensors.cu_seqlens_k;
  args.cu_seqlens_q_padded = tensors.cu_seqlens_q_padded;
  args.cu_seqlens_k_padded = tensors.cu_seqlens_k_padded;
}

}  // namespace gm1
}  // namespace
