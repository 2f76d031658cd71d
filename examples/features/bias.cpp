// What is added to scores: a tensor, or a slope for each head (ALiBi); and keys that do not count.
//
//   python -m jitfmha export --arch gfx942 -o mha --direction forward --dtype bf16 --hdims 32
//     --mask none --mode gm0 --features bias,boolean_bias,alibi
#include "plain.h"

void example() {
  using namespace plain;
  constexpr std::int64_t kQueries = 50, kKeys = 70, kHeads = 4;
  const Tensor q = random(2, kQueries, kHeads, 32), k = random(2, kKeys, kHeads, 32);
  const Tensor v = random(2, kKeys, kHeads, 32), out = ones(2, kQueries, kHeads, 32);
  jitfmha::MhaFwdArgs args = forward_of(q, k, v, out);
  Changes changes;

  // One row of scores for each query; a stride of 0 means that heads and sequences share it.
  const Tensor bias = random(1, kQueries, 1, kKeys);
  args.bias = bias.memory.get(), args.bias_dtype = jitfmha::ScoreType::bf16;
  args.bias_query = kKeys;
  run(args);
  changes.score = [&](Place at, double score) { return score + bias.at(0, at.i, 0, at.j); };
  compare("one bias for all heads", out.read(), attention(q, k, v, changes));

  // A byte for each key of each sequence, 0 where it does not count.
  std::vector<std::uint8_t> counts(2 * kKeys, 1);
  for (std::int64_t j = 0; j < 2 * kKeys; j += 3) counts[static_cast<std::size_t>(j)] = 0;
  const hip::Memory boolean(counts);
  args.bias = boolean.get(), args.bias_dtype = jitfmha::ScoreType::boolean;
  args.bias_query = 0, args.bias_batch = kKeys;
  run(args);
  changes.score = [&](Place at, double score) {
    return counts[static_cast<std::size_t>(at.batch * kKeys + at.j)] ? score : -HUGE_VAL;
  };
  compare("keys that do not count", out.read(), attention(q, k, v, changes));

  // Slopes times the distance from the diagonal, which ends at the last key.
  const std::vector<float> slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
  const hip::Memory device_slopes(slopes);
  args = forward_of(q, k, v, out);
  args.alibi_slopes = device_slopes.get<float>(), args.alibi_head = 1;
  run(args);
  changes.score = [&](Place at, double score) {
    const std::int64_t distance = std::abs(at.i + kKeys - kQueries - at.j);
    return score - slopes[static_cast<std::size_t>(at.head)] * static_cast<double>(distance);
  };
  compare("ALiBi", out.read(), attention(q, k, v, changes));
}
