// Many calls: which kernel each gets, with which tile, into how many splits its keys go.
//
//   python -m jitfmha export --arch gfx942 -o mha --direction forward --dtype bf16 --hdims 64,128
#include "plain.h"

void example() {
  using namespace plain;
  std::printf("hdim   queries      keys  tile  splits  kernel\n");
  for (const std::int64_t hdim : {64, 128})
    for (const std::int64_t queries : {1, 1000, 100000})
      for (const std::int64_t keys : {100, 100000}) {
        // Plans read no pointer, so that nothing is allocated. They ask for lengths and strides.
        jitfmha::MhaFwdArgs args;
        args.batch = 1, args.heads_q = 16, args.heads_k = 4;
        args.seqlen_q = queries, args.seqlen_k = keys;
        args.hdim_q = args.hdim_v = hdim;
        args.softmax_scale = 0.1f;
        args.q_strides = args.out_strides = {queries * 16 * hdim, 16 * hdim, hdim};
        args.k_strides = args.v_strides = {keys * 4 * hdim, 4 * hdim, hdim};
        jitfmha::MhaPlan plan;
        check(jitfmha::plan_mha_fwd(args, &plan));
        std::printf("%4d %9d %9d %5d %7d  %s\n", static_cast<int>(hdim), static_cast<int>(queries),
                    static_cast<int>(keys), static_cast<int>(plan.tile_q),
                    static_cast<int>(plan.num_splits), plan.kernel);
      }

  // Lengths around the sides of a tile give what they should.
  for (const std::int64_t seqlen : {1, 127, 128, 129}) {
    const Tensor q = random(1, seqlen, 4, 64), k = random(1, seqlen, 2, 64);
    const Tensor v = random(1, seqlen, 2, 64), out = ones(1, seqlen, 4, 64);
    run(forward_of(q, k, v, out));
    compare("a length near a tile's", out.read(), attention(q, k, v));
  }
}
