// Group mode for AMD's backward kernels: sequences of any length, one behind the other.
#pragma once

#include "structs.h"

namespace {

inline void set_sequences(AiterBackward& pass, const AiterBackwardTensors& tensors) {
  AiterRowSumArguments& sums = pass.row_sum_arguments;
  AiterGradientArguments& gradients = pass.gradient_arguments;
  AiterDqArguments& dq = pass.dq_arguments;
  sums.ptr_qseq = gradients.ptr_qseq = dq.ptr_qseq = tensors.cu_seqlens_q;
  gradients.ptr_kseq = tensors.cu_seqlens_k;
  sums.ptr_qseq_padding = gradients.ptr_qseq_padding = dq.ptr_qseq_padding =
      tensors.cu_seqlens_q_padded;
  gradients.ptr_kseq_padding = tensors.cu_seqlens_k_padded;
}

}  // namespace
