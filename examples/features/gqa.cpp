// Query heads that share key heads: GQA and MQA.
//
//   python -m jitfmha export --arch gfx942 -o mha --direction forward --dtype bf16 --hdims 64
//     --mask none --mode gm0
#include "plain.h"

void example() {
  using namespace plain;
  const Tensor q = random(2, 50, 8, 64), out = ones(2, 50, 8, 64);
  // Query head h reads key head h / (8 / heads of k). Nothing is repeated in memory.
  for (const auto& [heads, name] : {std::pair(8, "MHA"), {2, "GQA"}, {1, "MQA"}}) {
    const Tensor k = random(2, 120, heads, 64), v = random(2, 120, heads, 64);
    run(forward_of(q, k, v, out));
    compare(name, out.read(), attention(q, k, v));
  }
}
