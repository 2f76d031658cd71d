// Dropout that can be repeated: the same seed and offset drop the same probabilities.
//
//   python -m jitfmha export --arch gfx942 -o mha --direction forward --dtype bf16 --hdims 32
//     --mask causal --mode gm0 --features dropout
#include "plain.h"

void example() {
  using namespace plain;
  constexpr double kP = 0.25;
  constexpr std::int64_t kSeed = 5, kOffset = 7;
  const Tensor q = random(2, 80, 4, 32), k = random(2, 80, 4, 32), v = random(2, 80, 4, 32);
  const Tensor out = ones(2, 80, 4, 32);
  const hip::Memory rng_state(std::vector<std::int64_t>{kSeed, kOffset});
  jitfmha::MhaFwdArgs args = forward_of(q, k, v, out);
  args.mask = jitfmha::Mask::causal_bottom_right;
  args.dropout_p = kP;
  args.rng_state = rng_state.get<std::int64_t>();
  run(args);
  const Values first = out.read();

  // Which ones are dropped depends on these two and on the place alone, not on the device.
  Changes changes;
  changes.score = [](Place at, double score) { return at.j <= at.i ? score : -HUGE_VAL; };
  std::int64_t kept = 0;
  changes.kept = [&](Place at) {
    const double share =
        bench::kept_share(kP, kSeed, kOffset, at.batch * q.heads + at.head, at.i, at.j);
    kept += share > 0;
    return share;
  };
  const Values expected = attention(q, k, v, changes);
  std::printf("%.1f%% of the probabilities are kept\n",
              100 * static_cast<double>(kept) / (2 * 4 * 80 * 80));
  compare("dropout", first, expected);

  run(args);
  std::printf("%s\n", out.read().numbers == first.numbers ? "the same again" : "another result");
}
