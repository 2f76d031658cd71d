// 8 bits: queries, keys and values with scales, and 16-bit queries over a cache of 8 bits.
//
//   python -m jitfmha export --arch gfx942 -o mha --direction forward --dtype bf16 fp8 --hdims 128
//     --mask none --mode gm0 --kv-dtype fp8
#include "plain.h"

namespace {

using namespace plain;

// A tensor of 8 bits, and the scale that makes floats of them again.
struct Quantized {
  explicit Quantized(const Values& exact, jitfmha::DataType fp8)
      : scale(largest(exact) / static_cast<float>(bench::largest_of(fp8))),
        bits(times(exact, 1 / scale), fp8),
        values(times(bits, scale)),
        device_scale(std::vector<float>{scale}) {}

  static float largest(const Values& of) {
    double found = 0;
    for (const double each : of.numbers) found = std::max(found, std::fabs(each));
    return static_cast<float>(found);
  }
  static Values times(Values values, double factor) {
    for (double& each : values.numbers) each *= factor;
    return values;
  }

  float scale;
  Tensor bits;
  Values values;
  hip::Memory device_scale;
};

}  // namespace

void example() {
  jitfmha::DataType fp8;  // e4m3fnuz on gfx942, e4m3fn on gfx950
  check(jitfmha::native_fp8(&fp8));
  const Values exact_q = normal(1, 128, 4, 128);
  const Quantized q(exact_q, fp8), k(normal(1, 128, 4, 128), fp8), v(normal(1, 128, 4, 128), fp8);
  const Tensor out = ones(1, 128, 4, 128);  // bf16

  jitfmha::MhaFwdArgs args = forward_of(q.bits, k.bits, v.bits, out);
  args.q_descale = {q.device_scale.get<float>()};
  args.k_descale = {k.device_scale.get<float>()};
  args.v_descale = {v.device_scale.get<float>()};
  run(args);
  compare(bench::name_of(fp8), out.read().numbers, attention(q.values, k.values, v.values).numbers,
          fp8);

  // A cache of half the bytes; the queries, and what probabilities are rounded to, keep theirs.
  const Tensor q16(exact_q, jitfmha::DataType::bf16);
  args = forward_of(q16, k.bits, v.bits, out);
  args.key_type = jitfmha::KeyType::fp8;
  args.k_descale = {k.device_scale.get<float>()};
  args.v_descale = {v.device_scale.get<float>()};
  run(args);
  compare("bf16 queries over it", out.read(), attention(q16, k.values, v.values));
}
