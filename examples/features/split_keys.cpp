// Few queries, many keys: parts of the keys go to different workgroups, and are combined.
//
//   python -m jitfmha export --arch gfx942 -o mha --direction forward --dtype bf16 --hdims 64
//     --mask none --mode gm0 --features plain,split_results
#include "plain.h"

void example() {
  using namespace plain;
  constexpr std::int64_t kHeads = 2, kSplits = 3;
  const Tensor q = random(1, 1, kHeads, 64), k = random(1, 1000, 1, 64), v = random(1, 1000, 1, 64);
  const Tensor out = ones(1, 1, kHeads, 64);
  const Values expected = attention(q, k, v);
  jitfmha::MhaFwdArgs args = forward_of(q, k, v, out);

  // By itself a call takes as many splits as pay, where it has a workspace for them.
  jitfmha::MhaPlan plan = run(args);
  std::printf("%lld splits, a workspace of %zu bytes\n", static_cast<long long>(plan.num_splits),
              plan.workspace_bytes);
  compare("as many splits as pay", out.read(), expected);

  args.num_splits = kSplits;
  run(args, jitfmha::plan_mha_fwd, jitfmha::mha_fwd_splitkv);
  compare("three", out.read(), expected);

  // What each split found, as parts of keys on several devices are combined: a split counts by how
  // much of the sum of exponentials it has.
  const hip::Memory lse(kHeads * sizeof(float)), part_lse(kSplits * kHeads * sizeof(float));
  const hip::Memory parts(kSplits * kHeads * 64 * sizeof(float));
  args.lse = lse.get<float>();
  args.out_accum = parts.get<float>(), args.lse_accum = part_lse.get<float>();
  run(args, jitfmha::plan_mha_fwd, jitfmha::mha_fwd_splitkv);
  const auto all = lse.content<float>(), of_parts = part_lse.content<float>();
  const auto results = parts.content<float>();
  Values combined(1, 1, kHeads, 64);
  for (std::int64_t split = 0; split < kSplits; ++split)
    for (std::int64_t h = 0; h < kHeads; ++h)
      for (std::int64_t d = 0; d < 64; ++d) {
        const auto part = static_cast<std::size_t>(split * kHeads + h);
        combined.at(0, 0, h, d) += std::exp(of_parts[part] - all[static_cast<std::size_t>(h)]) *
                                   results[part * 64 + static_cast<std::size_t>(d)];
      }
  compare("their results, combined here", combined, expected);
}
