// Times jitfmha::mha_bwd, and compares it with what the CPU computes. Built by build_mha.sh, or
// with an export in DIR:
//
//     g++ -std=c++17 -O2 -ffp-contract=off -IDIR/include bench_mha_bwd.cpp DIR/src/*.cpp -ldl
//
// -? prints all options.
#include "bench_mha.h"

namespace {

using namespace bench;

// NaN where anything may be.
struct Gradients {
  std::vector<double> dq, dk, dv;
  std::vector<double> dbias;  // of each score
  std::vector<double> dsink;  // of each head
};

// How many keys a row of the gradient of scores has.
std::int64_t keys_of(const Problem& problem) {
  return problem.is_group() ? problem.args.max_seqlen_k : problem.args.seqlen_k;
}

std::int64_t scores_of(const Problem& problem) {
  return problem.packs() * problem.args.heads_q * problem.args.seqlen_q * keys_of(problem);
}

// Zeros in all rows of all sequences, which of_sequence(it) gives as (first, how many).
template <class Rows>
std::vector<double> zeros_of(const Problem& problem, std::size_t count,
                             const jitfmha::Strides& strides, std::int64_t heads, std::int64_t hdim,
                             const Rows& of_sequence) {
  std::vector<double> values(count, NAN);
  for (std::size_t n = 0; n < problem.sequences.size(); ++n) {
    const auto [first, rows] = of_sequence(problem.sequences[n]);
    const std::int64_t batch = problem.is_group() ? 0 : static_cast<std::int64_t>(n);
    for (std::int64_t head = 0; head < heads; ++head)
      for (std::int64_t row = first; row < first + rows; ++row)
        std::fill_n(&values[place(strides, batch, head, row)], hdim, 0);
  }
  return values;
}

Gradients gradients_of(const Problem& problem, const Inputs& inputs, const View& dout,
                       const std::vector<float>& dlse) {
  const jitfmha::MhaArgs& args = problem.args;
  const auto queries = [](const Sequence& of) { return std::pair(of.begin_q, of.rows_q); };
  const auto keys_there = [](const Sequence& of) { return std::pair(of.begin_k, of.rows_k); };
  const auto zeros = [&](const Drawn& like, const jitfmha::Strides& strides, std::int64_t heads,
                         std::int64_t hdim, const auto& rows) {
    return zeros_of(problem, like.values.size(), strides, heads, hdim, rows);
  };
  Gradients sums = {zeros(inputs.q, args.q_strides, args.heads_q, args.hdim_q, queries),
                    zeros(inputs.k, args.k_strides, args.heads_k, args.hdim_q, keys_there),
                    zeros(inputs.v, args.v_strides, args.heads_k, args.hdim_v, keys_there),
                    std::vector<double>(static_cast<std::size_t>(scores_of(problem))),
                    std::vector<double>(static_cast<std::size_t>(args.heads_q))};
  const std::int64_t keys = keys_of(problem);
  for_queries(problem, [&](auto n, auto batch, auto head, auto key_head, auto i) {
    const Sequence& of = problem.sequences[static_cast<std::size_t>(n)];
    const Row row = row_of(problem, inputs, n, head, i);
    const std::int64_t query = of.begin_q + i;
    const std::int64_t line = (batch * args.heads_q + head) * args.seqlen_q + query;
    std::vector<double> dp(row.probabilities.size());
    double delta = dlse.empty() ? 0 : -dlse[static_cast<std::size_t>(line)];
    for (std::int64_t j = 0; j < of.rows_k; ++j) {
      const auto at = static_cast<std::size_t>(j);
      if (row.probabilities[at] == 0) continue;
      for (std::int64_t d = 0; d < args.hdim_v; ++d)
        dp[at] += dout(batch, head, query, d) * inputs.v.view(batch, key_head, of.begin_k + j, d);
      dp[at] *= problem.kept(n, head, i, j);
      delta += row.probabilities[at] * dp[at];
    }
    if (!std::isinf(problem.scores.sink))
      sums.dsink[static_cast<std::size_t>(head)] -= std::exp(problem.scores.sink - row.lse) * delta;
    for (std::int64_t j = 0; j < of.rows_k; ++j) {
      const auto at = static_cast<std::size_t>(j);
      if (row.probabilities[at] == 0) continue;
      const double p = row.probabilities[at] * problem.kept(n, head, i, j);
      const double of_score = row.probabilities[at] * (dp[at] - delta);
      const double ds = of_score * problem.scale;
      sums.dbias[static_cast<std::size_t>(line * keys + j)] = of_score;
      const std::int64_t key = of.begin_k + j;
      const std::size_t q_row = place(args.q_strides, batch, head, query);
      const std::size_t k_row = place(args.k_strides, batch, key_head, key);
      const std::size_t v_row = place(args.v_strides, batch, key_head, key);
      for (std::int64_t d = 0; d < args.hdim_q; ++d) {
        sums.dq[q_row + static_cast<std::size_t>(d)] += ds * inputs.k.view(batch, key_head, key, d);
        sums.dk[k_row + static_cast<std::size_t>(d)] += ds * inputs.q.view(batch, head, query, d);
      }
      for (std::int64_t d = 0; d < args.hdim_v; ++d)
        sums.dv[v_row + static_cast<std::size_t>(d * args.v_column)] +=
            p * dout(batch, head, query, d);
    }
  });
  return sums;
}

bool run(const Options& options) {
  // Which of AITER's kernels are taken, and in what these add dq up. Here the library decides.
  options.choice("bwd_v3", {{"0"}, {"1"}, {"2"}});
  options.flag("v3_atomic_fp32");
  options.flag("v3_spec");
  std::mt19937 random = random_of(options);
  hip::set_device(static_cast<int>(options.number("device")));
  Problem problem = problem_of(options, random);
  if (has_8_bits(problem.args.dtype)) options.refuse("prec");
  const std::vector<Bits> scores = set_scores(options, problem, random);
  const bool has_sink = options.flag("sink_grad");
  if (has_sink) problem.scores.sink = std::uniform_real_distribution<float>(-1, 1)(random);
  const Inputs inputs(options, problem, scores, random);
  jitfmha::MhaBwdArgs args;
  static_cast<jitfmha::MhaArgs&>(args) = problem.args;
  inputs.put_scores_into(args);
  const std::vector<float> sinks(static_cast<std::size_t>(has_sink ? args.heads_q : 0),
                                 static_cast<float>(problem.scores.sink));
  const hip::Memory sink(sinks), dsink(sinks.size() * sizeof(float));
  if (has_sink) {
    args.sink = sink.get<float>();
    args.sink_head = 1;
    args.dsink = dsink.get<float>();
  }
  args.out_strides = args.dout_strides =
      problem.strides(problem.is_output_by_head, args.heads_q, args.seqlen_q, args.hdim_v);
  args.dq_strides = args.q_strides;
  args.dk_strides = args.k_strides;
  args.dv_strides = args.v_strides;
  if (args.v_column != 1) options.refuse("vlayout");  // a gradient has rows
  args.deterministic = options.flag("deterministic");
  std::vector<float> dlse;
  if (options.flag("dlse")) {
    std::normal_distribution<float> values;
    dlse.resize(static_cast<std::size_t>(problem.packs() * args.heads_q * args.seqlen_q));
    for (float& each : dlse) each = values(random);
  }
  const hip::Memory device_dlse(dlse);
  if (!dlse.empty()) args.dlse = device_dlse.get<float>();
  const jitfmha::MhaPlan plan = planned(args, jitfmha::plan_mha_bwd);
  if (says_whether_ready(options, "is_v3_check", plan)) return true;
  if (says_whether_ready(options, "v3_api_check", plan)) return true;

  const Drawn dout(options, args.dtype, args.dout_strides, problem.packs(), random);
  dout.save_to(options, "dout");
  const Forward forward = forward_of(problem, inputs, args.out_strides);
  std::vector<Bits> out;
  for (const double each : forward.out) out.push_back(narrowed(each, args.dtype));
  const std::vector<float> lse(forward.lse.begin(), forward.lse.end());
  const hip::Memory device_out(stored(out, args.dtype)), device_lse(lse);
  const hip::Memory dq(inputs.q.memory.bytes()), dk(inputs.k.memory.bytes());
  const hip::Memory dv(inputs.v.memory.bytes()), workspace(plan.workspace_bytes);
  inputs.put_into(args, workspace);
  args.out = device_out.get();
  args.lse = device_lse.get<float>();
  args.dout = dout.memory.get();
  args.dq = dq.get();
  args.dk = dk.get();
  args.dv = dv.get();
  const bool has_dbias = options.flag("dbias") && args.bias;
  if (has_dbias && args.bias_dtype == jitfmha::ScoreType::boolean) options.refuse("dbias");
  const std::vector<float> zeros(
      static_cast<std::size_t>(has_dbias ? scores_of(problem) : 0));  // of what nobody sees
  const hip::Memory dbias(zeros);
  if (has_dbias) args.dbias = dbias.get<float>();

  save(options, "sink", sinks);
  save(options, "dlse", dlse);
  save(options, "out", stored(out, args.dtype));
  save(options, "lse", lse);
  const double allowed = args.dtype == jitfmha::DataType::bf16 ? 2e-2 : 4e-3;
  std::vector<Result> results = {{"dq", dq, args.dtype, allowed},
                                 {"dk", dk, args.dtype, allowed},
                                 {"dv", dv, args.dtype, allowed}};
  if (has_dbias) results.push_back({"dbias", dbias, jitfmha::DataType::fp32, allowed});
  if (has_sink) results.push_back({"dsink", dsink, jitfmha::DataType::fp32, allowed});
  return run_and_compare(
      options, problem, plan, 3 * args.hdim_q + 2 * args.hdim_v,
      inputs.bytes() + dout.memory.bytes() + device_out.bytes() + device_lse.bytes(),
      [&] { check(jitfmha::mha_bwd(args, nullptr)); }, results,
      [&] {
        Gradients exact = gradients_of(problem, inputs, dout.view, dlse);
        std::vector<std::vector<double>> all = {std::move(exact.dq), std::move(exact.dk),
                                                std::move(exact.dv)};
        if (has_dbias) all.push_back(std::move(exact.dbias));
        if (has_sink) all.push_back(std::move(exact.dsink));
        return all;
      });
}

}  // namespace

int main(int count, char** texts) {
  return bench::main_with(
      count, texts,
      {{"deterministic", "0", "1: dq is added up in one order"},
       {"dbias", "0", "1: also the gradient of each score, where a bias is added"},
       {"dlse", "0", "1: the log-sum-exp has a gradient, which is random"},
       {"sink_grad", "0", "1: each head has a sink, and it has a gradient"},
       {"warmup", "10", "launches before those that are timed, or what CK_WARMUP says"},
       {"repeat", "10", "launches that are timed, or what CK_REPEAT says; 0: none"},
       {"bwd_v3", "0", "0 to 2: no meaning here: the library decides which kernels are taken"},
       {"v3_atomic_fp32", "1", "0, 1: no meaning here: dq is added up in float32"},
       {"v3_spec", "0", "0, 1: no meaning here: AITER's kernels for special lengths"},
       {"v3_api_check", "0", "as -is_v3_check"}},
      run);
}
