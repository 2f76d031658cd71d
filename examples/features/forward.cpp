// Attention over a batch, and over packed sequences of different lengths.
//
//   python -m jitfmha export --arch gfx942 -o mha --direction forward --dtype bf16 --hdims 64
#include "plain.h"

void example() {
  using namespace plain;
  // Batches: tensors (batch, seqlen, heads, hdim). Heads are contiguous here, but need not be: the
  // strides of the arguments say where the rows lie.
  const Tensor q = random(2, 100, 4, 64), k = random(2, 100, 4, 64), v = random(2, 100, 4, 64);
  const Tensor out = ones(2, 100, 4, 64);
  const hip::Memory lse(2 * 4 * 100 * sizeof(float));
  jitfmha::MhaFwdArgs args = forward_of(q, k, v, out);
  args.lse = lse.get<float>();
  const jitfmha::MhaPlan plan = run(args);
  std::printf("%s, tiles of %lld queries\n", plan.kernel, static_cast<long long>(plan.tile_q));
  compare("batch", out.read(), attention(q, k, v));
  std::vector<double> expected;
  probabilities(q, k, {}, &expected);
  const std::vector<float> found = lse.content<float>();
  compare("log-sum-exp", {found.begin(), found.end()}, expected);

  // Groups: the sequences lie one after the other, and prefix sums say where. The batch of the
  // tensors is 1, and that of the arguments says how many sequences there are.
  const Tensor rows_q = random(1, 100, 4, 64), rows_k = random(1, 100, 4, 64);
  const Tensor rows_v = random(1, 100, 4, 64), rows_out = ones(1, 100, 4, 64);
  const std::vector<std::int32_t> ends = {0, 37, 38, 100};
  const hip::Memory cu_seqlens(ends);
  args = forward_of(rows_q, rows_k, rows_v, rows_out);
  args.mode = jitfmha::Mode::group;
  args.batch = 3;
  args.cu_seqlens_q = args.cu_seqlens_k = cu_seqlens.get<std::int32_t>();
  args.max_seqlen_q = args.max_seqlen_k = 62;
  run(args);
  const Values result = rows_out.read();
  for (std::size_t n = 0; n < 3; ++n) {
    const auto rows = [&](const Values& x) { return x.rows(ends[n], ends[n + 1]); };
    compare("a sequence", rows(result), attention(rows(rows_q), rows(rows_k), rows(rows_v)));
  }
}
