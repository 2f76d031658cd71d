// What argument blocks have in common: numbers, and strides in bytes.
#pragma once

#include <cstring>

#include "structs.h"

namespace {

constexpr std::int64_t kFloatBytes = 4;

inline std::uint32_t number(std::int64_t value) { return static_cast<std::uint32_t>(value); }

inline std::int64_t divided_up(std::int64_t dividend, std::int64_t divisor) {
  return (dividend + divisor - 1) / divisor;
}

// A block of zeros, also between its fields.
template <class Block>
Block zeroed() {
  Block args;
  std::memset(static_cast<void*>(&args), 0, sizeof(args));
  return args;
}

// In bytes. Those of dimensions of size 1 are replaced: they may be anything, and kernels multiply
// lengths with strides to learn where a tensor ends.
struct ByteStrides {
  std::uint32_t seq, head, batch;

  ByteStrides(const Strides& given, std::int64_t batch_size, std::int64_t seqlen,
              std::int64_t heads, std::int64_t hdim, std::int64_t element_bytes)
      : seq(number((seqlen > 1 ? given.seq : hdim) * element_bytes)),
        head(number((heads > 1 ? given.head : hdim) * element_bytes)),
        batch(number((batch_size > 1 ? given.batch : 0) * element_bytes)) {}
};

struct AllStrides {
  ByteStrides q, k, v, out;

  template <class Call>
  AllStrides(const Call& call, const Sizes& sizes)
      : q(sizes.q, call.batch, sizes.seqlen_q, call.heads_q, call.hdim_q, call.q_bytes),
        k(sizes.k, call.batch, sizes.seqlen_k, call.heads_k, call.hdim_q, call.kv_bytes),
        v(sizes.v, call.batch, sizes.seqlen_k, call.heads_k, call.hdim_v, call.kv_bytes),
        out(sizes.out, call.batch, sizes.seqlen_q, call.heads_q, call.hdim_v, call.out_bytes) {}
};

}  // namespace
