// Times jitfmha::mha_fwd, and compares it with what the CPU computes. Built by build_mha.sh, or
// with an export in DIR:
//
//     g++ -std=c++17 -O2 -ffp-contract=off -IDIR/include bench_mha_fwd.cpp DIR/src/*.cpp -ldl
//
// -? prints all options.
#include <numeric>
#include <optional>

#include "appended_keys.h"
#include "bench_mha.h"

namespace {

using namespace bench;

enum class Scales : std::size_t { none, of_tensors, of_heads, of_tokens, of_query_heads };

Scales scales_of(const Options& options) {
  for (const char* const blocks : {"bs", "2", "kvbs", "3", "mx", "4"})
    if (options.text("qscale") == blocks)
      throw std::runtime_error(std::string("-qscale=") + blocks +
                               ": no kernel has scales of blocks");
  const auto kind = static_cast<Scales>(
      options.choice("qscale", {{"n", "0"}, {"pt", "1"}, {"ph"}, {"pth"}, {"pqh"}}));
  return options.choice("squant", {{"auto"}, {"0"}, {"1"}}) == 1 ? Scales::none : kind;
}

// Random ones where -qscale asks for them, or with -squant=1 those of a range of floats.
std::vector<float> drawn_descales(const Options& options, const Problem& problem,
                                  const std::string& range, std::mt19937& random) {
  const Scales kind = scales_of(options);
  const bool has_ranges = options.text("squant") == "1";
  std::uniform_real_distribution<float> scales(0.5f, 1.5f);
  std::int64_t lines = problem.args.batch;
  const bool is_of_q = range == "range_q";
  if (problem.descales.are_of_tokens && !is_of_q)
    lines = problem.packs_of_keys() * problem.rows_of_keys();
  const bool has_query_heads = problem.descales.are_of_query_heads && is_of_q;
  const auto count = static_cast<std::size_t>(
      lines * (has_query_heads ? problem.args.heads_q : problem.args.heads_k));
  float one = kind == Scales::none ? 1.0f : scales(random);
  if (has_ranges)
    one = static_cast<float>(options.real(range) /
                             largest_of(is_of_q ? problem.args.dtype : problem.key_dtype));
  std::vector<float> drawn(count, one);
  if (kind >= Scales::of_heads && !has_ranges)
    for (float& each : drawn) each = scales(random);
  return drawn;
}

// Puts keys into pages, those of all sequences in any order. Of a cache with an index each sequence
// is a page.
void set_pages(const Options& options, Problem& problem, std::mt19937& random) {
  jitfmha::MhaArgs& args = problem.args;
  const bool has_index = problem.cache.has_index;
  const std::int64_t size =
      has_index ? std::max<std::int64_t>(args.max_seqlen_k, 1) : problem.cache.page_size;
  const std::int64_t piece = 16 / static_cast<std::int64_t>(bytes_of(problem.key_dtype));
  const bool is_table_needed = size == 0 || has_index;
  problem.has_packed_pages = options.choice("kv_memory_layout", {{"linear"}, {"vectorized"}}) == 1;
  const bool are_pieces_whole = size % piece == 0 && args.hdim_q % piece == 0;
  if (problem.has_packed_pages && (is_table_needed || !are_pieces_whole))
    options.refuse("kv_memory_layout");
  const bool has_lists = options.choice("kv_lookup_table", {{"vllm"}, {"sglang"}}) == 1;
  if (has_lists && is_table_needed) options.refuse("kv_lookup_table");
  if (size == 0) return;
  problem.page_size = size;
  const std::int64_t most = std::max<std::int64_t>((args.max_seqlen_k + size - 1) / size, 1);
  problem.pages_of_sequence = has_lists ? -1 : most;
  std::int64_t count = 0;
  for (std::size_t n = 0; n < problem.sequences.size(); ++n) {
    problem.first_pages.push_back(count);
    if (has_lists) problem.cu_rooms_k[n] = static_cast<std::int32_t>(count);
    count += has_lists ? (problem.sequences[n].rows_k + size - 1) / size : most;
  }
  if (has_lists) problem.cu_rooms_k.back() = static_cast<std::int32_t>(count);
  problem.pages.resize(static_cast<std::size_t>(std::max<std::int64_t>(count, 1)));
  std::iota(problem.pages.begin(), problem.pages.end(), 0);
  std::shuffle(problem.pages.begin(), problem.pages.end(), random);
  const bool by_head = problem.is_input_by_head || problem.has_packed_pages;
  args.k_strides = problem.strides(by_head, args.heads_k, size, args.hdim_q);
  args.v_strides = problem.strides(by_head, args.heads_k, size, args.hdim_v);
  if (args.v_column != 1)
    throw std::runtime_error("no kernel has pages of v whose keys are contiguous");
}

jitfmha::Descale descale_of_queries_at(const float* scales, const Problem& problem) {
  const bool has_heads = problem.descales.are_of_query_heads;
  return {scales, has_heads ? problem.args.heads_q : problem.args.heads_k, 1, 0, has_heads};
}

// Of k and v, where tokens may have their own.
jitfmha::Descale descale_of_keys_at(const float* scales, const Problem& problem) {
  const std::int64_t heads = problem.args.heads_k;
  if (!problem.descales.are_of_tokens) return {scales, heads, 1};
  return {scales, problem.rows_of_keys() * heads, 1, heads};
}

double allowed_error(jitfmha::DataType dtype) {
  if (has_8_bits(dtype)) return 6e-2;  // of probabilities with 4 significant bits
  return dtype == jitfmha::DataType::bf16 ? 1e-2 : 2e-3;
}

// The results of splits, and what they come to together.
struct Parts {
  Parts(std::int64_t of_splits, std::int64_t rows, std::int64_t hdim_v)
      : splits(static_cast<std::size_t>(of_splits)),
        columns(static_cast<std::size_t>(hdim_v)),
        out(splits * static_cast<std::size_t>(rows) * columns * sizeof(float)),
        lse(splits * static_cast<std::size_t>(rows) * sizeof(float)),
        joined_out(out.bytes() / splits),
        joined_lse(lse.bytes() / splits) {}

  // Of splits without a tile of keys nothing was written.
  void join(const Problem& problem, const jitfmha::Strides& strides) const {
    const std::vector<float> outs = out.content<float>(), lses = lse.content<float>();
    const std::size_t rows = lses.size() / splits;
    std::vector<float> all(rows * columns, NAN), all_lse(rows, NAN);
    for_queries(problem, [&](auto n, auto batch, auto head, auto, auto i) {
      const std::int64_t query = problem.sequences[static_cast<std::size_t>(n)].begin_q + i;
      const auto row = static_cast<std::size_t>(
          (batch * problem.args.heads_q + head) * problem.args.seqlen_q + query);
      double sum = 0;
      std::vector<double> line(columns);
      for (std::size_t at = row; at < lses.size(); at += rows) {
        if (std::isnan(lses[at])) continue;
        const double weight = std::exp(static_cast<double>(lses[at]));
        sum += weight;
        for (std::size_t d = 0; d < columns; ++d) line[d] += weight * outs[at * columns + d];
      }
      all_lse[row] = static_cast<float>(std::log(sum));
      const std::size_t to = place(strides, batch, head, query);
      for (std::size_t d = 0; d < columns; ++d)
        all[to + d] = static_cast<float>(sum > 0 ? line[d] / sum : 0);
    });
    joined_out.put(all);
    joined_lse.put(all_lse);
  }

  std::size_t splits, columns;
  hip::Memory out, lse, joined_out, joined_lse;
};

bool run(const Options& options) {
  std::mt19937 random = random_of(options);
  hip::set_device(static_cast<int>(options.number("device")));
  Problem problem = problem_of(options, random);
  jitfmha::MhaFwdArgs args;
  options.flag("fwd_v3");
  options.choice("via", {{"mha_fwd"}, {"direct"}});
  if (options.flag("causal")) problem.args.mask = jitfmha::Mask::causal_bottom_right;
  if (!options.text("sink").empty()) problem.scores.sink = options.real("sink");
  set_pages(options, problem, random);
  problem.scores.softcap = options.real("logits_soft_cap");
  problem.args.logit_softcap = static_cast<float>(problem.scores.softcap);
  const std::vector<Bits> scores = set_scores(options, problem, random);
  Inputs inputs(options, problem, scores, random);
  std::optional<AppendedKeys> appended;
  if (problem.cache.is_appended() && problem.key_type != jitfmha::KeyType::as_q)
    options.refuse("kv_prec");
  if (problem.cache.is_appended()) appended.emplace(options, problem, inputs, random);
  static_cast<jitfmha::MhaArgs&>(args) = problem.args;
  args.out_dtype = problem.out_dtype;
  args.key_type = problem.key_type;
  inputs.put_scores_into(args);
  const hip::Memory sink(std::vector<float>{static_cast<float>(problem.scores.sink)});
  if (!options.text("sink").empty()) args.sink = sink.get<float>();
  args.out_strides =
      problem.strides(problem.is_output_by_head, args.heads_q, args.seqlen_q, args.hdim_v);
  const std::int64_t num_splits = options.number("num_splits");
  const std::int64_t rows = problem.packs() * args.heads_q * args.seqlen_q;
  std::optional<Parts> parts;
  if (options.flag("split_results")) {
    if (num_splits < 1 || !options.flag("lse")) options.refuse("split_results");
    parts.emplace(num_splits, rows, args.hdim_v);
    args.out_accum = parts->out.get<float>(), args.lse_accum = parts->lse.get<float>();
  }
  // Without a workspace keys are not split by any kernel, and by those that come ready only so.
  const bool has_no_workspace = num_splits == 1 && !parts;
  args.num_splits = has_no_workspace ? 0 : num_splits;
  if (problem.page_size) {
    args.block_table = inputs.pages.get<std::int32_t>();
    args.block_table_stride = problem.pages_of_sequence;
    args.has_packed_pages = problem.has_packed_pages;
    args.cu_seqlens_k_padded = inputs.cu_rooms_k.get<std::int32_t>();
    args.page_size = problem.page_size;
    args.num_pages = static_cast<std::int64_t>(problem.pages.size());
  }
  Descales& descales = problem.descales;
  const bool has_8_bit_keys = has_8_bits(problem.key_dtype);
  descales.are_of_tokens = has_8_bit_keys && scales_of(options) == Scales::of_tokens;
  descales.are_of_query_heads =
      has_8_bits(args.dtype) && scales_of(options) == Scales::of_query_heads;
  args.q_descale = descale_of_queries_at(nullptr, problem);
  args.k_descale = args.v_descale = descale_of_keys_at(nullptr, problem);
  const hip::Memory p_descale(std::vector<float>{1.0f / 127});
  if (options.flag("p_descale")) {
    if (args.dtype != jitfmha::DataType::int8) options.refuse("p_descale");
    args.p_descale.scales = p_descale.get<float>();
  }
  jitfmha::MhaPlan plan = planned(args, jitfmha::plan_mha_fwd);
  if (has_no_workspace) plan.num_splits = 1, plan.workspace_bytes = 0;
  if (says_whether_ready(options, "is_v3_check", plan)) return true;

  if (has_8_bits(args.dtype)) descales.q = drawn_descales(options, problem, "range_q", random);
  if (has_8_bit_keys) {
    descales.k = drawn_descales(options, problem, "range_k", random);
    descales.v = drawn_descales(options, problem, "range_v", random);
  }
  const hip::Memory q_descale(descales.q), k_descale(descales.k), v_descale(descales.v);
  const jitfmha::DataType out_dtype = problem.out_dtype;
  const hip::Memory device_out(static_cast<std::size_t>(rows * args.hdim_v) * bytes_of(out_dtype));
  const hip::Memory device_lse(static_cast<std::size_t>(rows) * sizeof(float));
  const hip::Memory workspace(plan.workspace_bytes);
  inputs.put_into(args, workspace);
  if (appended) args.q = appended->queries(inputs).get();
  args.out = device_out.get();
  args.lse = options.flag("lse") ? device_lse.get<float>() : nullptr;
  if (has_8_bits(args.dtype))
    args.q_descale = descale_of_queries_at(q_descale.get<float>(), problem);
  if (has_8_bit_keys) {
    args.k_descale = descale_of_keys_at(k_descale.get<float>(), problem);
    args.v_descale = descale_of_keys_at(v_descale.get<float>(), problem);
  }

  save(options, "q_descale", descales.q);
  save(options, "k_descale", descales.k);
  save(options, "v_descale", descales.v);
  std::vector<Result> results = {{"out", device_out, out_dtype, allowed_error(args.dtype)}};
  if (args.lse) results.push_back({"lse", device_lse, jitfmha::DataType::fp32, 1e-3});
  if (parts) {
    constexpr jitfmha::DataType kFloat = jitfmha::DataType::fp32;
    results.push_back({"out_accum", parts->joined_out, kFloat, allowed_error(args.dtype), false});
    results.push_back({"lse_accum", parts->joined_lse, kFloat, 1e-3, false});
  }
  if (appended) appended->add_results(inputs, results);
  return run_and_compare(
      options, problem, plan, args.hdim_q + args.hdim_v, inputs.bytes(),
      [&] {
        if (appended) appended->launch(problem, inputs);
        check(jitfmha::mha_fwd(args, nullptr));
      },
      results,
      [&] {
        if (appended) appended->apply(problem, inputs);
        Forward exact = forward_of(problem, inputs, args.out_strides);
        std::vector<std::vector<double>> all = {std::move(exact.out)};
        if (args.lse) all.push_back(std::move(exact.lse));
        if (parts) {
          parts->join(problem, args.out_strides);
          all.insert(all.end(), {all[0], all[1]});
        }
        if (appended) appended->add_exact(inputs, all);
        return all;
      });
}

}  // namespace

int main(int count, char** texts) {
  return bench::main_with(
      count, texts,
      {{"lse", "0", "1: also the log-sum-exp"},
       {"q_eff_lens", "", "batches: how many rows of q count of each sequence, as 70,33"},
       {"kv_eff_lens", "", "the same of k and v"},
       {"kv_prec", "", "of k and v beside a q of 16 bits: fp8, int8, bf8; nothing: as q"},
       {"s_knew", "0",
        "keys of -s_k that are appended to a cache, whose sequences but the first have any "
        "length; -1: any number"},
       {"logits_soft_cap", "0", "the soft cap of scores; 0: none"},
       {"causal", "0", "1: as -mask=2"},
       {"sink", "", "a score without a value that each query has; nothing: none"},
       {"via", "mha_fwd", "mha_fwd, direct: no meaning here: which function of AITER is called"},
       {"qscale", "n",
        "8 bits: scales are n, 0: 1; pt, 1: one of each tensor; ph: one of each sequence and head "
        "of k; pth: of k and v one of each token and head; pqh: of q one of each sequence and head "
        "of q; no kernel has those of blocks: bs, kvbs, mx"},
       {"p_descale", "0", "int8: 1: probabilities become int8, too, with a scale of 1/127"},
       {"squant", "auto", "8 bits: 1: scales are those of the ranges; 0: 1; auto: as -qscale says"},
       {"range_q", "16", "-squant=1: the largest float that q stands for"},
       {"range_k", "16", "the same of k"},
       {"range_v", "16", "the same of v"},
       {"range_p", "1", "no meaning here: probabilities are not scaled"},
       {"range_o", "16", "no meaning here: outputs are not scaled"},
       {"num_splits", "1", "of the keys; 0: as many as pay"},
       {"split_results", "0", "with -lse=1: 1: also the results of each split"},
       {"page_block_size", "0", "keys lie in pages of so many; 0: they do not"},
       {"kv_memory_layout", "linear",
        "of pages: linear: rows; vectorized: packed ones, of keys (pages, h_k, d / x, page, x) and "
        "of values (pages, h_k, page / x, d_v, x), x being 16 bytes"},
       {"kv_lookup_table", "vllm", "of pages: vllm: a table; sglang: lists, one behind the other"},
       {"cache_batch_idx", "0",
        "batches: 1: an index says which sequence of the cache each one is"},
       {"rotary_dim", "0", "numbers of a head of q and of new keys that are rotated; 0: none"},
       {"rotary_interleaved", "1", "1: neighbours are rotated together; 0: halves of -rotary_dim"},
       {"warmup", "10", "launches before those that are timed, or what CK_WARMUP says"},
       {"repeat", "10", "launches that are timed, or what CK_REPEAT says; 0: none"},
       {"fwd_v3", "0", "0, 1: no meaning here: the library decides which kernels are taken"}},
      run);
}
