// Sinks: a score without a value for each head, and first keys that are seen beside a window.
//
//   python -m jitfmha export --arch gfx942 -o mha --direction forward --dtype bf16 --hdims 32
//     --mask causal --mode gm0 --features sinks,sink_tokens
#include "plain.h"

void example() {
  using namespace plain;
  const Tensor q = random(1, 70, 2, 32), k = random(1, 70, 2, 32), v = random(1, 70, 2, 32);
  const Tensor out = ones(1, 70, 2, 32);
  Changes changes;

  // The softmax has one more term, as of a key whose value is 0.
  const hip::Memory sink(std::vector<float>{1.5f, 1.5f});
  jitfmha::MhaFwdArgs args = forward_of(q, k, v, out);
  args.mask = jitfmha::Mask::causal_bottom_right;
  args.sink = sink.get<float>();
  run(args);
  changes.score = [](Place at, double score) { return at.j <= at.i ? score : -HUGE_VAL; };
  changes.sink = 1.5;
  compare("a score without a value", out.read(), attention(q, k, v, changes));

  // Streaming: of the keys before its window a query sees the first four.
  args = forward_of(q, k, v, out);
  args.mask = jitfmha::Mask::window_bottom_right;
  args.window_left = 8, args.window_right = 0;
  args.sink_size = 4;
  run(args);
  changes.score = [](Place at, double score) {
    const bool is_seen = at.j <= at.i && (at.j < 4 || at.j >= at.i - 8);
    return is_seen ? score : -HUGE_VAL;
  };
  changes.sink = -HUGE_VAL;
  compare("sink tokens", out.read(), attention(q, k, v, changes));
}
