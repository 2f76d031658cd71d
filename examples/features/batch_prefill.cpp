// Prompts whose keys lie in pages that sequences share.
//
//   python -m jitfmha export --arch gfx942 -o mha --direction forward --dtype bf16 --hdims 64
//     --mask causal --mode gm1 --features paged_keys
#include "plain.h"

void example() {
  using namespace plain;
  constexpr std::int64_t kPage = 16, kHeads = 4, kKeyHeads = 2;
  // Two requests whose first two pages are the same, as those of a system prompt are. Of the first
  // all 10 new rows come behind 35 keys; the second has 20 rows and 48 keys.
  const std::vector<std::int32_t> pages = {3, 0, 5, 3, 0, 1};
  const std::vector<std::int32_t> ends_q = {0, 10, 30}, ends_k = {0, 45, 93};
  const hip::Memory block_table(pages), cu_seqlens_q(ends_q), cu_seqlens_k(ends_k);
  const Tensor q = random(1, 30, kHeads, 64), out = ones(1, 30, kHeads, 64);
  const Tensor k = random(6, kPage, kKeyHeads, 64), v = random(6, kPage, kKeyHeads, 64);

  jitfmha::MhaFwdArgs args = forward_of(q, k, v, out);
  args.mode = jitfmha::Mode::group;
  args.mask = jitfmha::Mask::causal_bottom_right;
  args.batch = 2;
  args.seqlen_k = 93;
  args.cu_seqlens_q = cu_seqlens_q.get<std::int32_t>();
  args.cu_seqlens_k = cu_seqlens_k.get<std::int32_t>();
  args.max_seqlen_q = 20, args.max_seqlen_k = 48;
  args.block_table = block_table.get<std::int32_t>();
  args.block_table_stride = 3;
  args.page_size = kPage, args.num_pages = 6;
  run(args, jitfmha::plan_mha_fwd, jitfmha::mha_batch_prefill);

  const Values result = out.read();
  for (std::size_t n = 0; n < 2; ++n) {
    const std::int64_t keys = ends_k[n + 1] - ends_k[n], queries = ends_q[n + 1] - ends_q[n];
    const auto gathered = [&](const Values& cache) {
      Values found(1, keys, kKeyHeads, 64);
      for (std::int64_t j = 0; j < keys; ++j)
        for (std::int64_t h = 0; h < kKeyHeads; ++h)
          for (std::int64_t d = 0; d < 64; ++d)
            found.at(0, j, h, d) = cache.at(pages[n * 3 + j / kPage], j % kPage, h, d);
      return found;
    };
    Changes changes;
    changes.score = [&](Place at, double score) {
      return at.j <= at.i + keys - queries ? score : -HUGE_VAL;
    };
    const Values expected =
        attention(q.rows(ends_q[n], ends_q[n + 1]), gathered(k), gathered(v), changes);
    compare("a request", result.rows(ends_q[n], ends_q[n + 1]), expected);
  }
}
