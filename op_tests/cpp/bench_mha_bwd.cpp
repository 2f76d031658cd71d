// Times jitfmha::mha_bwd, and compares it with what the CPU computes. Built with an export in DIR:
//
//     g++ -std=c++17 -O2 -ffp-contract=off -IDIR/include bench_mha_bwd.cpp DIR/src/*.cpp -ldl
//
// An option that is not known prints all of them.
#include "bench_mha.h"

namespace {

using namespace bench;

// The forward pass on the CPU, with results that are rounded as a GPU's are.
struct Forward {
  std::vector<Bits> out;
  std::vector<float> lse;
};

struct Inputs {
  View q, k, v, dout;
};

std::size_t place(const jitfmha::Strides& strides, std::int64_t batch, std::int64_t head,
                  std::int64_t row) {
  return static_cast<std::size_t>(batch * strides.batch + head * strides.head + row * strides.seq);
}

// Calls a function with sequence, batch, head of q, head of k, and query.
template <class Function>
void for_queries(const Problem& problem, const Function& function) {
  const jitfmha::MhaArgs& args = problem.args;
  for (std::int64_t n = 0; n < args.batch; ++n)
    for (std::int64_t head = 0; head < args.heads_q; ++head)
      for (std::int64_t i = 0; i < problem.sequences[static_cast<std::size_t>(n)].rows_q; ++i)
        function(n, problem.is_group() ? 0 : n, head, head / (args.heads_q / args.heads_k), i);
}

Forward forward_of(const Problem& problem, const Inputs& inputs, const jitfmha::Strides& strides) {
  const jitfmha::MhaArgs& args = problem.args;
  const auto rows = static_cast<std::size_t>(problem.packs() * args.heads_q * args.seqlen_q);
  Forward forward = {std::vector<Bits>(rows * static_cast<std::size_t>(args.hdim_v)),
                     std::vector<float>(rows)};
  for_queries(problem, [&](auto n, auto batch, auto head, auto key_head, auto i) {
    const Sequence& of = problem.sequences[static_cast<std::size_t>(n)];
    const Row row = row_of(problem, inputs.q, inputs.k, n, head, i);
    for (std::int64_t d = 0; d < args.hdim_v; ++d) {
      double sum = 0;
      for (std::int64_t j = 0; j < of.rows_k; ++j)
        sum += row.probabilities[static_cast<std::size_t>(j)] *
               inputs.v(batch, key_head, of.begin_k + j, d);
      forward.out[place(strides, batch, head, of.begin_q + i) + static_cast<std::size_t>(d)] =
          narrowed(sum, args.dtype);
    }
    forward.lse[static_cast<std::size_t>((batch * args.heads_q + head) * args.seqlen_q +
                                         of.begin_q + i)] = static_cast<float>(row.lse);
  });
  return forward;
}

struct Gradients {
  std::vector<double> dq, dk, dv;
};

Gradients gradients_of(const Problem& problem, const Inputs& inputs) {
  const jitfmha::MhaArgs& args = problem.args;
  Gradients sums = {std::vector<double>(inputs.q.values.size()),
                    std::vector<double>(inputs.k.values.size()),
                    std::vector<double>(inputs.v.values.size())};
  for_queries(problem, [&](auto n, auto batch, auto head, auto key_head, auto i) {
    const Sequence& of = problem.sequences[static_cast<std::size_t>(n)];
    const Row row = row_of(problem, inputs.q, inputs.k, n, head, i);
    const std::int64_t query = of.begin_q + i;
    std::vector<double> dp(row.probabilities.size());
    double delta = 0;
    for (std::int64_t j = 0; j < of.rows_k; ++j) {
      const auto at = static_cast<std::size_t>(j);
      for (std::int64_t d = 0; d < args.hdim_v; ++d)
        dp[at] += inputs.dout(batch, head, query, d) * inputs.v(batch, key_head, of.begin_k + j, d);
      delta += row.probabilities[at] * dp[at];
    }
    for (std::int64_t j = 0; j < of.rows_k; ++j) {
      const auto at = static_cast<std::size_t>(j);
      const double p = row.probabilities[at], ds = p * (dp[at] - delta) * problem.scale;
      const std::int64_t key = of.begin_k + j;
      const std::size_t q_row = place(args.q_strides, batch, head, query);
      const std::size_t k_row = place(args.k_strides, batch, key_head, key);
      const std::size_t v_row = place(args.v_strides, batch, key_head, key);
      for (std::int64_t d = 0; d < args.hdim_q; ++d) {
        sums.dq[q_row + static_cast<std::size_t>(d)] += ds * inputs.k(batch, key_head, key, d);
        sums.dk[k_row + static_cast<std::size_t>(d)] += ds * inputs.q(batch, head, query, d);
      }
      for (std::int64_t d = 0; d < args.hdim_v; ++d)
        sums.dv[v_row + static_cast<std::size_t>(d)] += p * inputs.dout(batch, head, query, d);
    }
  });
  return sums;
}

double worst_error(const char* name, const std::vector<Bits>& values,
                   const std::vector<double>& exact, jitfmha::DataType dtype, bool& is_good) {
  Comparison comparison(dtype == jitfmha::DataType::bf16 ? 2e-2 : 4e-3);
  for (std::size_t i = 0; i < values.size(); ++i)
    comparison.add(widened(values[i], dtype), exact[i]);
  is_good = is_good && comparison.is_good();
  std::printf(" %s %.2e", name, comparison.worst());
  return comparison.worst();
}

bool run(const Options& options) {
  // Which of AITER's kernels are taken, and in what these add dq up. Here the library decides.
  options.flag("bwd_v3");
  options.flag("v3_atomic_fp32");
  if (options.text("prec") == "fp8") options.refuse("prec");
  std::mt19937 random = random_of(options);
  hip::set_device(static_cast<int>(options.number("device")));
  Problem problem = problem_of(options, random);
  jitfmha::MhaBwdArgs args;
  static_cast<jitfmha::MhaArgs&>(args) = problem.args;
  args.out_strides = args.dout_strides =
      problem.strides(problem.is_output_by_head, args.heads_q, args.seqlen_q, args.hdim_v);
  args.dq_strides = args.q_strides;
  args.dk_strides = args.k_strides;
  args.dv_strides = args.v_strides;
  args.deterministic = options.flag("deterministic");
  jitfmha::MhaPlan plan;
  check(jitfmha::plan_mha_bwd(args, &plan));

  const std::vector<Bits> q =
      drawn(options, problem, args.heads_q, args.seqlen_q, args.hdim_q, random);
  const std::vector<Bits> k =
      drawn(options, problem, args.heads_k, args.seqlen_k, args.hdim_q, random);
  const std::vector<Bits> v =
      drawn(options, problem, args.heads_k, args.seqlen_k, args.hdim_v, random);
  const std::vector<Bits> dout =
      drawn(options, problem, args.heads_q, args.seqlen_q, args.hdim_v, random);
  const Inputs inputs = {{q, args.q_strides, args.dtype},
                         {k, args.k_strides, args.dtype},
                         {v, args.v_strides, args.dtype},
                         {dout, args.dout_strides, args.dtype}};
  const Forward forward = forward_of(problem, inputs, args.out_strides);
  const hip::Memory device_q(q), device_k(k), device_v(v), device_dout(dout);
  const hip::Memory device_out(forward.out), device_lse(forward.lse);
  const hip::Memory cu_seqlens_q(problem.cu_seqlens_q), cu_seqlens_k(problem.cu_seqlens_k);
  const hip::Memory dq(device_q.bytes()), dk(device_k.bytes()), dv(device_v.bytes());
  const hip::Memory workspace(plan.workspace_bytes);
  args.q = device_q.get();
  args.k = device_k.get();
  args.v = device_v.get();
  args.out = device_out.get();
  args.lse = device_lse.get<float>();
  args.dout = device_dout.get();
  args.dq = dq.get();
  args.dk = dk.get();
  args.dv = dv.get();
  args.cu_seqlens_q = cu_seqlens_q.get<std::int32_t>();
  args.cu_seqlens_k = cu_seqlens_k.get<std::int32_t>();
  args.workspace = workspace.get();
  args.workspace_bytes = workspace.bytes();

  const auto launch = [&] { check(jitfmha::mha_bwd(args, nullptr)); };
  launch();
  hip::synchronize();
  std::printf("%s", shape_of(problem).c_str());
  if (options.flag("kname")) std::printf(", %s", plan.kernel);
  const double products = static_cast<double>(3 * args.hdim_q + 2 * args.hdim_v);
  print_time(seconds_of(options, launch),
             2 * problem.visible_pairs() * static_cast<double>(args.heads_q) * products);
  save(options, "q", q);
  save(options, "k", k);
  save(options, "v", v);
  save(options, "out", forward.out);
  save(options, "lse", forward.lse);
  save(options, "dout", dout);
  save(options, "dq", dq.content<Bits>());
  save(options, "dk", dk.content<Bits>());
  save(options, "dv", dv.content<Bits>());
  bool is_good = true;
  if (options.flag("v")) {
    const Gradients exact = gradients_of(problem, inputs);
    std::printf(", worst errors:");
    worst_error("dq", dq.content<Bits>(), exact.dq, args.dtype, is_good);
    worst_error("dk", dk.content<Bits>(), exact.dk, args.dtype, is_good);
    worst_error("dv", dv.content<Bits>(), exact.dv, args.dtype, is_good);
    std::printf(", valid: %s", is_good ? "y" : "n");
  }
  std::printf("\n");
  return is_good;
}

}  // namespace

int main(int count, char** texts) {
  return bench::main_with(count, texts,
                          {{"deterministic", "0", "1: dq is added up in one order"},
                           {"bwd_v3", "1", "0 or 1: the library decides which kernels are taken"},
                           {"v3_atomic_fp32", "1", "0 or 1: dq is added up in float32"}},
                          run);
}
