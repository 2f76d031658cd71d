// The gradients of q, k and v.
//
//   python -m jitfmha export --arch gfx942 -o mha --dtype bf16 --hdims 64 --mask none --mode gm0
#include "plain.h"

void example() {
  using namespace plain;
  constexpr std::int64_t kHeads = 4, kKeyHeads = 2, kShared = kHeads / kKeyHeads;
  const Tensor q = random(1, 60, kHeads, 64), k = random(1, 80, kKeyHeads, 64);
  const Tensor v = random(1, 80, kKeyHeads, 64), out = ones(1, 60, kHeads, 64);
  const hip::Memory lse(kHeads * 60 * sizeof(float));
  jitfmha::MhaFwdArgs forward = forward_of(q, k, v, out);
  forward.lse = lse.get<float>();  // backward reads it
  run(forward);

  const Tensor dout = random(1, 60, kHeads, 64);
  const Tensor dq = ones(1, 60, kHeads, 64), dk = ones(1, 80, kKeyHeads, 64);
  const Tensor dv = ones(1, 80, kKeyHeads, 64);
  auto args = arguments<jitfmha::MhaBwdArgs>(q, k, v);
  args.out = out.memory.get(), args.out_strides = out.strides();
  args.lse = lse.get<float>();
  args.dout = dout.memory.get(), args.dout_strides = dout.strides();
  args.dq = dq.memory.get(), args.dq_strides = dq.strides();
  args.dk = dk.memory.get(), args.dk_strides = dk.strides();
  args.dv = dv.memory.get(), args.dv_strides = dv.strides();
  args.deterministic = true;  // the same bits in every run
  const jitfmha::MhaPlan plan = run(args, jitfmha::plan_mha_bwd, jitfmha::mha_bwd);
  std::printf("%s\n", plan.kernel);

  // A score's gradient is p * (dp - the row's sum of p * dp), where dp = dout * v^T.
  const Values p = probabilities(q, k);
  Values exact_dq = dq, exact_dk = dk, exact_dv = dv;
  for (Values* const each : {&exact_dq, &exact_dk, &exact_dv})
    each->numbers.assign(each->numbers.size(), 0);
  for (std::int64_t h = 0; h < kHeads; ++h)
    for (std::int64_t i = 0; i < q.seqlen; ++i) {
      std::vector<double> dp(static_cast<std::size_t>(k.seqlen), 0);
      double sum = 0;
      for (std::int64_t j = 0; j < k.seqlen; ++j) {
        double& of_key = dp[static_cast<std::size_t>(j)];
        for (std::int64_t d = 0; d < 64; ++d)
          of_key += dout.at(0, i, h, d) * v.at(0, j, h / kShared, d);
        sum += p.at(0, i, h, j) * of_key;
      }
      for (std::int64_t j = 0; j < k.seqlen; ++j) {
        const double weight = p.at(0, i, h, j);
        const double ds = weight * (dp[static_cast<std::size_t>(j)] - sum) / std::sqrt(64);
        for (std::int64_t d = 0; d < 64; ++d) {
          exact_dq.at(0, i, h, d) += ds * k.at(0, j, h / kShared, d);
          exact_dk.at(0, j, h / kShared, d) += ds * q.at(0, i, h, d);
          exact_dv.at(0, j, h / kShared, d) += weight * dout.at(0, i, h, d);
        }
      }
    }
  compare("dq", dq.read(), exact_dq);
  compare("dk", dk.read(), exact_dk);
  compare("dv", dv.read(), exact_dv);
}
