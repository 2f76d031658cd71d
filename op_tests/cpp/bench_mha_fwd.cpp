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

struct Results {
  std::vector<Bits> out;
  std::vector<float> lse;
};

bool is_right(const Options& options, const Problem& problem, const View& q, const View& k,
              const View& v, const View& out, const std::vector<float>& lse) {
  const jitfmha::MhaArgs& args = problem.args;
  Comparison of_out(allowed_error(args.dtype)), of_lse(1e-3);
  for (std::int64_t n = 0; n < args.batch; ++n) {
    const Sequence& of = problem.sequences[static_cast<std::size_t>(n)];
    const std::int64_t batch = problem.is_group() ? 0 : n;
    for (std::int64_t head = 0; head < args.heads_q; ++head)
      for (std::int64_t i = 0; i < of.rows_q; ++i) {
        const Row row = row_of(problem, q, k, n, head, i);
        const std::int64_t key_head = head / (args.heads_q / args.heads_k);
        for (std::int64_t d = 0; d < args.hdim_v; ++d) {
          double exact = 0;
          for (std::int64_t j = 0; j < of.rows_k; ++j)
            exact += row.probabilities[static_cast<std::size_t>(j)] *
                     v(batch, key_head, of.begin_k + j, d);
          of_out.add(out(batch, head, of.begin_q + i, d),
                     exact * problem.descale(problem.descales.v, n, key_head));
        }
        if (options.flag("lse"))
          of_lse.add(lse[static_cast<std::size_t>((batch * args.heads_q + head) * args.seqlen_q +
                                                  of.begin_q + i)],
                     row.lse);
      }
  }
  const bool is_good = of_out.is_good() && of_lse.is_good();
  std::printf(", valid: %s (worst errors: out %.2e, lse %.2e)", is_good ? "y" : "n", of_out.worst(),
              of_lse.worst());
  return is_good;
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

  const std::vector<Bits> q =
      drawn(options, problem, args.heads_q, args.seqlen_q, args.hdim_q, random);
  const std::vector<Bits> k =
      drawn(options, problem, args.heads_k, args.seqlen_k, args.hdim_q, random);
  const std::vector<Bits> v =
      drawn(options, problem, args.heads_k, args.seqlen_k, args.hdim_v, random);
  Descales& descales = problem.descales;
  if (is_fp8(args.dtype))
    for (std::vector<float>* const each : {&descales.q, &descales.k, &descales.v})
      *each = drawn_descales(options, problem, random);
  const hip::Memory device_q(stored(q, args.dtype)), device_k(stored(k, args.dtype));
  const hip::Memory device_v(stored(v, args.dtype));
  const hip::Memory q_descale(descales.q), k_descale(descales.k), v_descale(descales.v);
  const hip::Memory cu_seqlens_q(problem.cu_seqlens_q), cu_seqlens_k(problem.cu_seqlens_k);
  const std::int64_t rows = problem.packs() * args.heads_q * args.seqlen_q;
  const hip::Memory device_out(static_cast<std::size_t>(rows * args.hdim_v) * sizeof(Bits));
  const hip::Memory device_lse(static_cast<std::size_t>(rows) * sizeof(float));
  const hip::Memory workspace(plan.workspace_bytes);
  args.q = device_q.get();
  args.k = device_k.get();
  args.v = device_v.get();
  args.out = device_out.get();
  args.lse = options.flag("lse") ? device_lse.get<float>() : nullptr;
  args.cu_seqlens_q = cu_seqlens_q.get<std::int32_t>();
  args.cu_seqlens_k = cu_seqlens_k.get<std::int32_t>();
  if (is_fp8(args.dtype)) {
    args.q_descale = descale_at(q_descale, problem);
    args.k_descale = descale_at(k_descale, problem);
    args.v_descale = descale_at(v_descale, problem);
  }
  args.workspace = workspace.get();
  args.workspace_bytes = workspace.bytes();

  const auto launch = [&] { check(jitfmha::mha_fwd(args, nullptr)); };
  launch();
  hip::synchronize();
  const Results results = {device_out.content<Bits>(), device_lse.content<float>()};
  std::printf("%s, splits %lld", shape_of(problem).c_str(),
              static_cast<long long>(plan.num_splits));
  if (options.flag("kname")) std::printf(", %s", plan.kernel);
  const double products = static_cast<double>(args.hdim_q + args.hdim_v);
  print_time(seconds_of(options, launch),
             2 * problem.visible_pairs() * static_cast<double>(args.heads_q) * products);
  save(options, "q", stored(q, args.dtype));
  save(options, "k", stored(k, args.dtype));
  save(options, "v", stored(v, args.dtype));
  save(options, "q_descale", descales.q);
  save(options, "k_descale", descales.k);
  save(options, "v_descale", descales.v);
  save(options, "out", results.out);
  save(options, "lse", results.lse);
  bool is_good = true;
  if (options.flag("v"))
    is_good = is_right(options, problem, {q, args.q_strides, args.dtype},
                       {k, args.k_strides, args.dtype}, {v, args.v_strides, args.dtype},
                       {results.out, args.out_strides, output_dtype(args.dtype)}, results.lse);
  std::printf("\n");
  return is_good;
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
