// Times jitfmha::mha_fwd, and compares it with what the CPU computes. Built with an export in DIR:
//
//     g++ -std=c++17 -O2 -ffp-contract=off -IDIR/include bench_mha_fwd.cpp DIR/src/*.cpp -ldl
//
// An option that is not known prints all of them.
#include "bench_mha.h"

namespace {

using namespace bench;

// Random ones where -qscale asks for them.
std::vector<float> drawn_descales(const Options& options, const Problem& problem,
                                  std::mt19937& random) {
  const std::size_t kind = options.choice("qscale", {{"n", "0"}, {"pt", "1"}, {"ph"}});
  std::uniform_real_distribution<float> scales(0.5f, 1.5f);
  const auto count = static_cast<std::size_t>(problem.args.batch * problem.args.heads_k);
  std::vector<float> drawn(count, kind == 0 ? 1.0f : scales(random));
  if (kind == 2)
    for (float& each : drawn) each = scales(random);
  return drawn;
}

jitfmha::Descale descale_at(const hip::Memory& scales, const Problem& problem) {
  return {scales.get<float>(), problem.args.heads_k, 1};
}

double allowed_error(jitfmha::DataType dtype) {
  if (is_fp8(dtype)) return 6e-2;  // of probabilities with 4 significant bits
  return dtype == jitfmha::DataType::bf16 ? 1e-2 : 2e-3;
}

bool run(const Options& options) {
  std::mt19937 random = random_of(options);
  hip::set_device(static_cast<int>(options.number("device")));
  Problem problem = problem_of(options, random);
  jitfmha::MhaFwdArgs args;
  static_cast<jitfmha::MhaArgs&>(args) = problem.args;
  args.out_strides =
      problem.strides(problem.is_output_by_head, args.heads_q, args.seqlen_q, args.hdim_v);
  jitfmha::MhaPlan plan;
  check(jitfmha::plan_mha_fwd(args, &plan));

  const Inputs inputs(options, problem, random);
  Descales& descales = problem.descales;
  if (is_fp8(args.dtype))
    for (std::vector<float>* const each : {&descales.q, &descales.k, &descales.v})
      *each = drawn_descales(options, problem, random);
  const hip::Memory q_descale(descales.q), k_descale(descales.k), v_descale(descales.v);
  const std::int64_t rows = problem.packs() * args.heads_q * args.seqlen_q;
  const hip::Memory device_out(static_cast<std::size_t>(rows * args.hdim_v) * sizeof(Bits));
  const hip::Memory device_lse(static_cast<std::size_t>(rows) * sizeof(float));
  const hip::Memory workspace(plan.workspace_bytes);
  inputs.put_into(args, workspace);
  args.out = device_out.get();
  args.lse = options.flag("lse") ? device_lse.get<float>() : nullptr;
  if (is_fp8(args.dtype)) {
    args.q_descale = descale_at(q_descale, problem);
    args.k_descale = descale_at(k_descale, problem);
    args.v_descale = descale_at(v_descale, problem);
  }

  run_and_time(options, problem, plan, args.hdim_q + args.hdim_v,
               [&] { check(jitfmha::mha_fwd(args, nullptr)); });
  const std::vector<Bits> out = device_out.content<Bits>();
  const std::vector<float> lse = device_lse.content<float>();
  save(options, "q_descale", descales.q);
  save(options, "k_descale", descales.k);
  save(options, "v_descale", descales.v);
  save(options, "out", out);
  save(options, "lse", lse);
  Comparison comparison;
  if (options.flag("v")) {
    const Forward exact = forward_of(problem, inputs, args.out_strides);
    comparison.add("out", widened(out, output_dtype(args.dtype)), exact.out,
                   allowed_error(args.dtype));
    if (options.flag("lse")) comparison.add("lse", {lse.begin(), lse.end()}, exact.lse, 1e-3);
    std::printf(", valid: %s", comparison.is_good() ? "y" : "n");
  }
  std::printf("\n");
  return comparison.is_good();
}

}  // namespace

int main(int count, char** texts) {
  return bench::main_with(count, texts,
                          {{"lse", "0", "1: also the log-sum-exp"},
                           {"qscale", "pt",
                            "fp8: scales are n, 0: 1; pt, 1: one of each tensor; ph: one of each "
                            "sequence and head of k"}},
                          run);
}
