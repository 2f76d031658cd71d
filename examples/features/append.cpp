// Decoding: new keys are rotated and appended to a cache, and attended to.
//
//   python -m jitfmha export --arch gfx942 -o mha --direction forward --dtype bf16 --hdims 64
//     --mask causal --mode gm1 --features append,paged_keys
#include "plain.h"

void example() {
  using namespace plain;
  constexpr std::int64_t kHeads = 4, kKeyHeads = 2, kHdim = 64, kRoom = 48, kHalf = kHdim / 2;
  Tensor k_cache = random(2, kRoom, kKeyHeads, kHdim), v_cache = random(2, kRoom, kKeyHeads, kHdim);
  std::vector<std::int32_t> lengths = {20, 31};
  Values cosines(1, kRoom, 1, kHalf), sines(1, kRoom, 1, kHalf);
  for (std::int64_t i = 0; i < kRoom; ++i)
    for (std::int64_t d = 0; d < kHalf; ++d) {
      const double angle = static_cast<double>(i) / std::pow(1e4, static_cast<double>(d) / kHalf);
      cosines.at(0, i, 0, d) = std::cos(angle);
      sines.at(0, i, 0, d) = std::sin(angle);
    }
  const Tensor cos(cosines, jitfmha::DataType::bf16), sin(sines, jitfmha::DataType::bf16);
  // A row of x, of one sequence, with neighbours rotated together.
  const auto rotate = [&](Values& x, std::int64_t row, std::int64_t head, std::int64_t position) {
    for (std::int64_t d = 0; d < kHalf; ++d) {
      double &a = x.at(0, row, head, 2 * d), &b = x.at(0, row, head, 2 * d + 1);
      const double even = a, odd = b;
      const double c = cos.at(0, position, 0, d), s = sin.at(0, position, 0, d);
      a = even * c - odd * s;
      b = even * s + odd * c;
    }
  };

  for (int step = 0; step < 2; ++step) {
    const Tensor q = random(2, 1, kHeads, kHdim), out = ones(2, 1, kHeads, kHdim);
    const Tensor k = random(2, 1, kKeyHeads, kHdim), v = random(2, 1, kKeyHeads, kHdim);
    const Tensor turned = ones(2, 1, kHeads, kHdim);
    const Values before = k_cache.read();
    const hip::Memory device_lengths(lengths);

    jitfmha::MhaFwdAppendkvTraits traits;
    traits.hdim_q = traits.hdim_v = kHdim;
    traits.rope_type = jitfmha::Rope::interleaved;
    jitfmha::MhaFwdAppendkvArgs append;
    append.q_ptr = q.memory.get(), append.q_out_ptr = turned.memory.get();
    append.k_ptr = k_cache.memory.get(), append.knew_ptr = k.memory.get();
    append.v_ptr = v_cache.memory.get(), append.vnew_ptr = v.memory.get();
    append.seqlen_k_ptr = device_lengths.get<std::int32_t>();
    append.seqlen_q = append.seqlen_knew = 1, append.batch = 2;
    append.hdim_q = append.hdim_v = kHdim, append.nhead_q = kHeads, append.nhead_k = kKeyHeads;
    append.rotary_cos_ptr = cos.memory.get(), append.rotary_sin_ptr = sin.memory.get();
    append.rotary_dim = kHdim, append.has_mask = true;
    append.stride_q = append.batch_stride_q = kHeads * kHdim;
    append.stride_knew = append.batch_stride_knew = kKeyHeads * kHdim;
    append.stride_vnew = append.batch_stride_vnew = kKeyHeads * kHdim;
    append.stride_k = append.stride_v = kKeyHeads * kHdim;
    append.batch_stride_k = append.batch_stride_v = kRoom * kKeyHeads * kHdim;
    append.nhead_stride_q = append.nhead_stride_k = append.nhead_stride_v = kHdim;
    append.nhead_stride_knew = append.nhead_stride_vnew = kHdim;
    check(jitfmha::mha_fwd_appendkv(traits, append, nullptr));

    // Each sequence of the cache is a page, whose keys are read as far as there are any.
    for (std::int32_t& each : lengths) ++each;
    const std::vector<std::int32_t> sequences = {0, 1}, ends_q = {0, 1, 2};
    const std::vector<std::int32_t> ends_k = {0, lengths[0], lengths[0] + lengths[1]};
    const hip::Memory table(sequences), cu_seqlens_q(ends_q), cu_seqlens_k(ends_k);
    jitfmha::MhaFwdArgs args = forward_of(turned, k_cache, v_cache, out);
    args.mode = jitfmha::Mode::group;
    args.mask = jitfmha::Mask::causal_bottom_right;
    args.seqlen_q = 2, args.seqlen_k = ends_k[2];
    args.cu_seqlens_q = cu_seqlens_q.get<std::int32_t>();
    args.cu_seqlens_k = cu_seqlens_k.get<std::int32_t>();
    args.max_seqlen_q = 1, args.max_seqlen_k = kRoom;
    args.block_table = table.get<std::int32_t>();
    args.block_table_stride = 1;
    args.page_size = kRoom, args.num_pages = 2;
    run(args);

    const Values k_now = k_cache.read(), v_now = v_cache.read(), result = out.read();
    const Values queries = turned.read();
    for (std::int64_t n = 0; n < 2; ++n) {
      const std::int64_t keys = lengths[static_cast<std::size_t>(n)];
      const auto sequence = [&](const Values& x, std::int64_t rows) {
        Values found(1, rows, x.heads, kHdim);
        for (std::int64_t i = 0; i < rows; ++i)
          for (std::int64_t h = 0; h < x.heads; ++h)
            for (std::int64_t d = 0; d < kHdim; ++d) found.at(0, i, h, d) = x.at(n, i, h, d);
        return found;
      };
      Values cached = sequence(before, keys), q_rotated = sequence(q, 1);
      for (std::int64_t h = 0; h < kKeyHeads; ++h) {
        for (std::int64_t d = 0; d < kHdim; ++d) cached.at(0, keys - 1, h, d) = k.at(n, 0, h, d);
        rotate(cached, keys - 1, h, keys - 1);
      }
      for (std::int64_t h = 0; h < kHeads; ++h) rotate(q_rotated, 0, h, keys - 1);
      compare("the cache", sequence(k_now, keys), cached);
      compare("rotated queries", sequence(queries, 1), q_rotated);
      const Values expected =
          attention(sequence(queries, 1), sequence(k_now, keys), sequence(v_now, keys));
      compare("a sequence", sequence(result, 1), expected);
    }
  }
}
