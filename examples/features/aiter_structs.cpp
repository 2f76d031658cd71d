// Calls by AITER's structs, as code that was written for these fills them.
//
//   python -m jitfmha export --arch gfx942 -o mha --dtype bf16 --hdims 64 --mask causal --mode gm0
#include <jitfmha_aiter.h>

#include "plain.h"

namespace aiter = jitfmha::aiter;

// In programs with CK it is ck_tile::stream_config.
struct Stream {
  void* stream_id_ = nullptr;
};

void check_call(float milliseconds) {
  if (milliseconds < 0) throw std::runtime_error(aiter::last_status().text);
}

void example() {
  using namespace plain;
  constexpr std::int64_t kHeads = 4, kRows = 60;
  const Tensor q = random(1, kRows, kHeads, 64), k = random(1, kRows, kHeads, 64);
  const Tensor v = random(1, kRows, kHeads, 64), out = ones(1, kRows, kHeads, 64);
  const hip::Memory lse(kHeads * kRows * sizeof(float));
  Changes changes;
  changes.score = [](Place at, double score) { return at.j <= at.i ? score : -HUGE_VAL; };

  const auto fill = [&](auto& args) {
    args.data_type = "bf16";
    args.mask_type = aiter::mask_bottom_right, args.window_size_right = 0;
    args.q_ptr = q.memory.get(), args.k_ptr = k.memory.get(), args.v_ptr = v.memory.get();
    args.o_ptr = out.memory.get(), args.lse_ptr = lse.get();
    args.batch = 1, args.nhead_q = args.nhead_k = kHeads, args.hdim_q = args.hdim_v = 64;
    args.seqlen_q = args.seqlen_k = args.max_seqlen_q = kRows;
    args.stride_q = args.stride_k = args.stride_v = args.stride_o = kHeads * 64;
    args.nhead_stride_q = args.nhead_stride_k = args.nhead_stride_v = args.nhead_stride_o = 64;
  };
  aiter::mha_fwd_args forward;
  fill(forward);
  forward.scale_s = 0.125f;
  forward.has_lse = true;
  check_call(aiter::mha_fwd(forward, Stream()));
  hip::synchronize();
  compare("forward", out.read(), attention(q, k, v, changes));

  // Gradients are compared by their sums over keys: with a dout of ones a column of dv is the sum
  // of the probabilities of its key.
  const Tensor dout = ones(1, kRows, kHeads, 64), dq = ones(1, kRows, kHeads, 64);
  const Tensor dk = ones(1, kRows, kHeads, 64), dv = ones(1, kRows, kHeads, 64);
  std::unique_ptr<hip::Memory> workspace;
  aiter::mha_bwd_args backward;
  fill(backward);
  backward.scale = 0.125f;
  backward.do_ptr = dout.memory.get();
  backward.dq_ptr = dq.memory.get(), backward.dk_ptr = dk.memory.get();
  backward.dv_ptr = dv.memory.get();
  backward.stride_do = backward.stride_dq = backward.stride_dk = backward.stride_dv = kHeads * 64;
  backward.nhead_stride_do = backward.nhead_stride_dq = 64;
  backward.nhead_stride_dk = backward.nhead_stride_dv = 64;
  backward.workspace_alloc = [&](std::size_t bytes, bool) -> void* {
    workspace = std::make_unique<hip::Memory>(bytes);
    return workspace->get();
  };
  check_call(aiter::mha_bwd(backward, Stream()));
  hip::synchronize();
  const Values p = probabilities(q, k, changes);
  Values exact(1, kRows, kHeads, 64);
  for (std::int64_t h = 0; h < kHeads; ++h)
    for (std::int64_t i = 0; i < kRows; ++i)
      for (std::int64_t j = 0; j < kRows; ++j)
        for (std::int64_t d = 0; d < 64; ++d) exact.at(0, j, h, d) += p.at(0, i, h, j);
  compare("dv", dv.read(), exact);

  // What no kernel does is refused, and not done in part.
  forward.s_randval = true;
  std::printf("%.0f: ", static_cast<double>(aiter::mha_fwd(forward, Stream())));
  std::printf("%s\n", aiter::last_status().text);
}
