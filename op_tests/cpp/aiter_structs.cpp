// AITER's structs, filled member by member in its order, and what becomes of them.
#include <jitfmha_aiter.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace aiter = jitfmha::aiter;

namespace {

void expect(bool holds, const char* what, int line) {
  if (holds) return;
  std::printf("line %d: %s\n", line, what);
  std::exit(1);
}
#define EXPECT(condition) expect(static_cast<bool>(condition), #condition, __LINE__)

// Somewhere; no two are the same.
void* at(std::uintptr_t number) { return reinterpret_cast<void*>(number << 4); }

bool is(const void* pointer, std::uintptr_t number) { return pointer == at(number); }

bool are(const jitfmha::Strides& strides, int batch, int seq, int head) {
  return strides.batch == batch && strides.seq == seq && strides.head == head;
}

const aiter::DropSeedOffset kSeed = std::pair<const void*, const void*>(at(40), at(40));
const aiter::DropSeedOffset kSeedAndOffset =
    std::pair<const void*, const void*>(at(40), static_cast<char*>(at(40)) + 8);

aiter::mha_fwd_args forward() {
  return {false,  false,  1,      "fp16",  true,    2,      true,   1,       true,
          at(1),  at(2),  at(3),  at(4),   at(5),   at(6),  at(7),  at(8),   at(9),
          at(10), at(11), at(12), nullptr, nullptr, at(13), at(14), nullptr, nullptr,
          at(15), 11,     12,     3,       14,      15,     16,     8,       4,
          0.5f,   2.5f,   17,     18,      19,      20,     21,     22,      23,
          24,     25,     26,     27,      11,      29,     30,     31,      32,
          33,     34,     35,     36,      37,      38,     39,     40,      41,
          42,     5,      0,      7,       2,       0,      0.25,   false,   kSeedAndOffset,
          0,      0};
}

void test_forward() {
  jitfmha::MhaFwdArgs to;
  aiter::mha_fwd_args args = forward();
  EXPECT(aiter::converted(args, &to));
  EXPECT(to.dtype == jitfmha::DataType::fp16 && to.mode == jitfmha::Mode::group);
  EXPECT(to.bf16_cvt == jitfmha::Bf16Cvt::rtna);
  EXPECT(is(to.q, 1) && is(to.k, 2) && is(to.v, 3) && is(to.lse, 9) && is(to.out, 10));
  EXPECT(is(to.alibi_slopes, 4) && !to.bias && to.alibi_batch == 20 && to.alibi_head == 1);
  EXPECT(is(to.cu_seqlens_q_padded, 11) && is(to.cu_seqlens_k_padded, 12));
  EXPECT(is(to.cu_seqlens_q, 13) && is(to.cu_seqlens_k, 14));
  EXPECT(is(to.sink, 15) && to.sink_head == 1 && to.sink_size == 7);
  EXPECT(to.seqlen_q == 11 && to.seqlen_k == 12 && to.batch == 3 && to.max_seqlen_q == 14);
  EXPECT(to.hdim_q == 15 && to.hdim_v == 16 && to.heads_q == 8 && to.heads_k == 4);
  EXPECT(to.softmax_scale == 0.5f && to.logit_softcap == 2.5f);
  EXPECT(are(to.q_strides, 33, 17, 23) && are(to.k_strides, 34, 18, 24));
  EXPECT(are(to.v_strides, 35, 19, 25) && are(to.out_strides, 39, 22, 29));
  EXPECT(is(to.q_descale.scales, 5) && to.q_descale.batch == 40 && to.q_descale.head == 30);
  EXPECT(is(to.k_descale.scales, 6) && to.k_descale.batch == 41 && to.k_descale.head == 31);
  EXPECT(is(to.v_descale.scales, 7) && to.v_descale.batch == 42 && to.v_descale.head == 32);
  EXPECT(to.mask == jitfmha::Mask::window_bottom_right);
  EXPECT(to.window_left == 5 && to.window_right == 0);
  EXPECT(to.dropout_p == 0.25 && is(to.rng_state, 40));
  args.bias_type = aiter::elementwise_bias;
  EXPECT(aiter::converted(args, &to));
  EXPECT(is(to.bias, 4) && to.bias_dtype == jitfmha::ScoreType::fp16 && !to.alibi_slopes);
  EXPECT(to.bias_query == 20 && to.bias_head == 26 && to.bias_batch == 36);
  args.has_lse = args.has_sink = false;
  EXPECT(aiter::converted(args, &to) && !to.lse && !to.sink);
  args.qscale_type = aiter::no_scale;
  EXPECT(aiter::converted(args, &to) && !to.q_descale.scales && !to.v_descale.scales);
  args.cu_seqlen_q_ptr = args.cu_seqlen_k_ptr = nullptr;
  EXPECT(aiter::converted(args, &to) && is(to.cu_seqlens_q, 11) && !to.cu_seqlens_q_padded);
}

void test_masks() {
  using jitfmha::Mask;
  const auto mask_of = [](int type, int left, int right) {
    aiter::mha_fwd_args args = forward();
    jitfmha::MhaFwdArgs to;
    args.mask_type = type, args.window_size_left = left, args.window_size_right = right;
    EXPECT(aiter::converted(args, &to));
    return to.mask;
  };
  EXPECT(mask_of(0, 3, 4) == Mask::none && mask_of(2, -1, -1) == Mask::none);
  EXPECT(mask_of(1, -1, 0) == Mask::causal_top_left);
  EXPECT(mask_of(2, -1, 0) == Mask::causal_bottom_right);
  EXPECT(mask_of(1, -1, 1) == Mask::window_top_left && mask_of(1, 0, 0) == Mask::window_top_left);
  EXPECT(mask_of(3, 2, 2) == Mask::window_bottom_right);
}

template <class Change>
void expect_refused(const char* text, const Change& change) {
  aiter::mha_fwd_args args = forward();
  jitfmha::MhaFwdArgs to;
  change(args);
  const jitfmha::Status status = aiter::converted(args, &to);
  EXPECT(!status);
  expect(std::string(status.text).find(text) != std::string::npos, status.text, __LINE__);
}

void test_refusals() {
  using Args = aiter::mha_fwd_args;
  expect_refused("v3_api_check", [](Args& args) { args.v3_api_check = true; });
  expect_refused("s_randval", [](Args& args) { args.s_randval = true; });
  expect_refused("qscale_type", [](Args& args) { args.qscale_type = 2; });
  expect_refused("data_type", [](Args& args) { args.data_type = "fp4"; });
  expect_refused("mask_type", [](Args& args) { args.mask_type = 4; });
  expect_refused("bias_type", [](Args& args) { args.bias_type = 3; });
  expect_refused("bias_ptr is null", [](Args& args) { args.bias_ptr = nullptr; });
  expect_refused("sink_ptr is null", [](Args& args) { args.sink_ptr = nullptr; });
  expect_refused("lse_ptr is null", [](Args& args) { args.lse_ptr = nullptr; });
  expect_refused("lse is not contiguous", [](Args& args) { args.nhead_stride_lse = 12; });
  expect_refused("of each sequence", [](Args& args) { args.seqlen_k_ptr = at(1); });
  expect_refused("in batch mode", [](Args& args) { args.is_group_mode = false; });
  expect_refused("has numbers", [](Args& args) {
    args.drop_seed_offset = std::pair<std::uint64_t, std::uint64_t>(1, 2);
  });
  expect_refused("behind the seed", [](Args& args) { args.drop_seed_offset = kSeed; });
}

void test_splitkv() {
  aiter::mha_fwd_splitkv_args args = {
      at(1),   at(2),  at(3),  at(4),   at(5),  at(6), at(7), at(8), at(9), 9,  16, false,
      nullptr, at(10), at(11), nullptr, at(12), 11,    12,    3,     14,    15, 16, 8,
      4,       6,      0.5f,   1,       1,      2.5f,  17,    18,    19,    20, 21, 22,
      23,      24,     25,     26,      11,     28,    29,    30,    31,    32, 33, 34,
      35,      36,     37,     38,      39,     40,    -1,    0,     0,     2};
  args.num_total_pages = 50, args.max_seqlen_k = 51;
  jitfmha::MhaFwdArgs to;
  EXPECT(aiter::converted(args, "bf16", true, 2, 0, true, true, &to));
  EXPECT(is(to.lse, 7) && is(to.out, 8) && is(to.block_table, 9) && to.block_table_stride == 9);
  EXPECT(to.page_size == 16 && to.num_pages == 50 && to.max_seqlen_k == 51);
  EXPECT(is(to.cu_seqlens_q, 10) && is(to.cu_seqlens_k, 11) && is(to.sink, 12));
  EXPECT(to.softmax_scale == 0.5f && to.logit_softcap == 2.5f && to.num_splits == 0);
  EXPECT(are(to.q_strides, 31, 17, 23) && are(to.out_strides, 38, 22, 30));
  EXPECT(to.mask == jitfmha::Mask::causal_bottom_right);
  args.workspace_ptr = at(60), args.workspace_bytes = 61;
  EXPECT(aiter::converted(args, "bf16", true, 2, 0, true, true, &to));
  EXPECT(to.num_splits == 6 && is(to.workspace, 60) && to.workspace_bytes == 61);
  args.is_gappy = true;
  EXPECT(!aiter::converted(args, "bf16", true, 2, 0, true, true, &to));
}

constexpr auto kPacked = aiter::VECTORIZED_LAYOUT;
constexpr auto kTable = aiter::VLLM_BLOCK_TABLE_2D;

aiter::mha_batch_prefill_args batch_prefill() {
  return {at(1),  at(2),  at(3),   at(4),  at(5),   at(6),  at(7),   nullptr, at(9), at(10),
          at(11), at(12), 11,      12,     3,       14,     15,      16,      8,     4,
          50,     16,     kPacked, kTable, nullptr, at(13), nullptr, nullptr, 9,     0.5f,
          1,      1,      2.5f,    17,     18,      19,     20,      21,      22,    23,
          24,     25,     26,      27,     11,      29,     30,      31,      32,    33,
          34,     35,     36,      -1,     0,       0,      2,       0.25,    false, kSeedAndOffset,
          0,      0};
}

void test_batch_prefill() {
  aiter::mha_batch_prefill_args args = batch_prefill();
  args.seqstart_k_ptr = at(14);
  jitfmha::MhaFwdArgs to;
  EXPECT(aiter::converted(args, "bf16", true, 2, 0, true, 1, &to));
  EXPECT(is(to.block_table, 13) && to.block_table_stride == 9 && to.has_packed_pages);
  EXPECT(to.page_size == 16 && to.num_pages == 50 && is(to.cu_seqlens_k, 14));
  EXPECT(is(to.q_descale.scales, 5) && is(to.lse, 9) && is(to.out, 10) && is(to.sink, 12));
  EXPECT(are(to.q_strides, 30, 17, 23) && are(to.out_strides, 36, 22, 29));
  EXPECT(to.dropout_p == 0.25 && is(to.rng_state, 40));
  EXPECT(!to.cu_seqlens_k_padded);
  EXPECT(aiter::converted(args, "bf16", true, 2, 0, true, 0, &to) && !to.q_descale.scales);
  args.kv_lookup_table = aiter::SGLANG_PAGE_TABLE_1D;
  EXPECT(!aiter::converted(args, "bf16", true, 2, 0, true, 0, &to));
  args.kv_indptr = at(20);
  EXPECT(aiter::converted(args, "bf16", true, 2, 0, true, 0, &to));
  EXPECT(is(to.block_table, 13) && to.block_table_stride == -1);
  EXPECT(is(to.cu_seqlens_k, 14) && is(to.cu_seqlens_k_padded, 20));
  args.seqstart_k_ptr = nullptr;
  EXPECT(!aiter::converted(args, "bf16", true, 2, 0, true, 0, &to));
  args.page_block_size = 1;
  EXPECT(aiter::converted(args, "bf16", true, 2, 0, true, 0, &to) && is(to.cu_seqlens_k, 20));
}

aiter::mha_bwd_args backward() {
  return {false,
          true,
          2,
          false,
          15,
          16,
          "bf16",
          true,
          1,
          1,
          true,
          true,
          false,
          true,
          at(1),
          at(2),
          at(3),
          at(4),
          at(5),
          at(6),
          at(7),
          at(8),
          nullptr,
          at(9),
          at(10),
          at(11),
          at(12),
          at(13),
          at(14),
          at(15),
          at(16),
          nullptr,
          nullptr,
          nullptr,
          nullptr,
          11,
          12,
          3,
          14,
          13,
          8,
          4,
          0.5f,
          17,
          18,
          19,
          20,
          21,
          22,
          23,
          24,
          25,
          26,
          27,
          28,
          29,
          30,
          31,
          32,
          33,
          34,
          11,
          36,
          37,
          38,
          39,
          40,
          41,
          42,
          43,
          44,
          45,
          46,
          47,
          48,
          49,
          50,
          51,
          -1,
          0,
          0.25,
          0.75,
          kSeedAndOffset};
}

void test_backward() {
  aiter::mha_bwd_args args = backward();
  jitfmha::MhaBwdArgs to;
  EXPECT(aiter::converted(args, &to));
  EXPECT(to.dtype == jitfmha::DataType::bf16 && to.bf16_cvt == jitfmha::Bf16Cvt::rtz);
  EXPECT(to.hdim_q == 15 && to.hdim_v == 16 && to.deterministic);
  EXPECT(to.mask == jitfmha::Mask::causal_top_left && is(to.bias, 4));
  EXPECT(is(to.out, 5) && is(to.lse, 6) && is(to.dout, 7));
  EXPECT(is(to.dq, 9) && is(to.dk, 10) && is(to.dv, 11) && is(to.dbias, 12));
  EXPECT(is(to.sink, 13) && is(to.dsink, 14));
  EXPECT(is(to.cu_seqlens_q, 15) && is(to.cu_seqlens_k, 16) && !to.cu_seqlens_q_padded);
  EXPECT(to.seqlen_q == 11 && to.seqlen_k == 12 && to.batch == 3);
  EXPECT(to.max_seqlen_q == 14 && to.max_seqlen_k == 13);
  EXPECT(to.heads_q == 8 && to.heads_k == 4 && to.softmax_scale == 0.5f);
  EXPECT(are(to.q_strides, 40, 17, 28) && are(to.k_strides, 41, 18, 29));
  EXPECT(are(to.v_strides, 42, 19, 30) && are(to.out_strides, 44, 21, 32));
  EXPECT(to.bias_query == 20 && to.bias_head == 31 && to.bias_batch == 43);
  EXPECT(are(to.dout_strides, 46, 23, 34) && are(to.dq_strides, 48, 24, 36));
  EXPECT(are(to.dk_strides, 49, 25, 37) && are(to.dv_strides, 50, 26, 38));
  EXPECT(to.dropout_p == 0.25 && is(to.rng_state, 40));
  args.has_dbias = args.has_dropout = false;
  EXPECT(aiter::converted(args, &to) && !to.dbias && to.dropout_p == 0);
  args.is_store_randval = true;
  EXPECT(!aiter::converted(args, &to));
}

}  // namespace

int main() {
  test_forward();
  test_masks();
  test_refusals();
  test_splitkv();
  test_batch_prefill();
  test_backward();
}
