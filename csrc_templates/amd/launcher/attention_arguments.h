// What kernels of ours are told of the tensors of attention, forward and backward.
#pragma once

#include "arguments.h"

namespace {

inline Divisor divisor(std::int64_t value) {
  return {number(value), value == 0 ? 0 : 0xffffffffu / number(value)};
}

// The greatest one: std::gcd, whose header takes some compilers longer than all of this.
inline std::int64_t common_divisor(std::int64_t a, std::int64_t b) {
  return b == 0 ? a : common_divisor(b, a % b);
}

template <class Block, class Call>
void set_attention(Block& args, const Call& call, const Sizes& sizes, const Tensors& tensors) {
  constexpr float kLog2e = 1.4426950408889634f;
  const AllStrides strides(call, sizes);
  args.q = tensors.q;
  args.k = tensors.k;
  args.v = tensors.v;
  args.out = tensors.out;
  args.scale_log2 = call.softmax_scale * kLog2e;
  args.seqlen_k = number(sizes.seqlen_k);
  args.q_seq = strides.q.seq;
  args.q_head = strides.q.head;
  args.q_batch = strides.q.batch;
  args.k_seq = strides.k.seq;
  args.k_head = strides.k.head;
  args.k_batch = strides.k.batch;
  args.v_seq = strides.v.seq;
  args.v_head = strides.v.head;
  args.v_batch = strides.v.batch;
  args.out_seq = strides.out.seq;
  args.out_head = strides.out.head;
  args.out_batch = strides.out.batch;
  args.lse_head = number(sizes.seqlen_q * kFloatBytes);
}

}  // namespace
