// A soft cap: scores become cap * tanh(score / cap).
//
//   python -m jitfmha export --arch gfx942 -o mha --direction forward --dtype bf16 --hdims 64
//     --mask none --mode gm0 --features softcap
#include "plain.h"

void example() {
  using namespace plain;
  const Tensor q = random(2, 60, 4, 64), k = random(2, 90, 4, 64), v = random(2, 90, 4, 64);
  const Tensor out = ones(2, 60, 4, 64);
  for (const float cap : {1.0f, 30.0f}) {
    jitfmha::MhaFwdArgs args = forward_of(q, k, v, out);
    args.logit_softcap = cap;
    run(args);
    Changes changes;
    changes.score = [&](Place, double score) { return cap * std::tanh(score / cap); };
    compare(cap == 1 ? "capped at 1" : "capped at 30", out.read(), attention(q, k, v, changes));
  }
}
