// Group mode for AMD's forward kernels: sequences of any length, one behind the other.
#pragma once

#include "arguments.h"
#include "runtime.h"

namespace {

// The longest sequence of queries that a launch has workgroups for.
inline std::int64_t longest_of_q(const Sizes&, const Tensors& tensors) {
  return tensors.max_seqlen_q;
}

inline void set_sequences(AiterArguments& args, const Tensors& tensors) {
  args.ptr_qseq = tensors.cu_seqlens_q;
  args.ptr_kseq = tensors.cu_seqlens_k;
  args.ptr_qseq_padding = tensors.cu_seqlens_q_padded;
  args.ptr_kseq_padding = tensors.cu_seqlens_k_padded;
}

template <class Call>
Grid grid_of(const Call& call, std::int64_t tiles) {
  return {call.heads_q, call.batch, tiles};
}

}  // namespace
