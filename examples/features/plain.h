// What the C++ examples share: tensors, and attention in float64 to compare with.
//
// The line at the head of each example exports the kernels that it needs to the folder `mha`. Then:
//
//   g++ -std=c++17 -O2 -Imha/include -Imha/benchmarks examples/features/forward.cpp
//     mha/src/*.cpp -ldl -o forward
#pragma once

#include <jitfmha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "numbers.h"  // of the export: bf16 and fp8 as bits, memory of the GPU

void example();

int main() {
  try {
    example();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

namespace plain {

using bench::check;

// Numbers (batch, seqlen, heads, hdim) on the host, contiguous.
struct Values {
  std::int64_t batch, seqlen, heads, hdim;
  std::vector<double> numbers;

  Values(std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t d)
      : batch(b), seqlen(s), heads(h), hdim(d), numbers(static_cast<std::size_t>(b * s * h * d)) {}

  double& at(std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t d) {
    return numbers[static_cast<std::size_t>(((b * seqlen + s) * heads + h) * hdim + d)];
  }
  double at(std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t d) const {
    return numbers[static_cast<std::size_t>(((b * seqlen + s) * heads + h) * hdim + d)];
  }
  jitfmha::Strides strides() const { return {seqlen * heads * hdim, heads * hdim, hdim}; }
  // Rows of the first batch.
  Values rows(std::int64_t begin, std::int64_t end) const {
    Values part(1, end - begin, heads, hdim);
    for (std::int64_t i = 0; i < (end - begin) * heads * hdim; ++i)
      part.numbers[static_cast<std::size_t>(i)] =
          numbers[static_cast<std::size_t>(begin * heads * hdim + i)];
    return part;
  }
};

// The same in memory of the GPU: each number becomes what the data type has for it.
struct Tensor : Values {
  Tensor(Values values, jitfmha::DataType type)
      : Values(std::move(values)), dtype(type), memory(bytes(numbers, type)) {
    numbers = read().numbers;
  }
  Values read() const {
    Values found = *this;
    found.numbers = bench::widened(bench::values_of(memory, dtype), dtype);
    return found;
  }

  jitfmha::DataType dtype;
  hip::Memory memory;

 private:
  static std::vector<std::uint8_t> bytes(const std::vector<double>& of, jitfmha::DataType dtype) {
    std::vector<bench::Bits> bits;
    for (const double each : of) bits.push_back(bench::narrowed(each, dtype));
    return bench::stored(bits, dtype);
  }
};

inline Values normal(std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t d) {
  static std::mt19937 generator;
  std::normal_distribution<double> numbers;
  Values drawn(b, s, h, d);
  for (double& each : drawn.numbers) each = numbers(generator);
  return drawn;
}

inline Tensor random(std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t d) {
  return Tensor(normal(b, s, h, d), jitfmha::DataType::bf16);
}

// For results, which a call has to write: they are ones.
inline Tensor ones(std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t d) {
  Values values(b, s, h, d);
  for (double& each : values.numbers) each = 1;
  return Tensor(std::move(values), jitfmha::DataType::bf16);
}

// A call with these tensors, of forward or backward.
template <class Args>
Args arguments(const Tensor& q, const Tensor& k, const Tensor& v) {
  Args args;
  args.dtype = q.dtype;
  args.batch = q.batch, args.heads_q = q.heads, args.heads_k = k.heads;
  args.seqlen_q = q.seqlen, args.seqlen_k = k.seqlen;
  args.hdim_q = q.hdim, args.hdim_v = v.hdim;
  args.softmax_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(q.hdim)));
  args.q = q.memory.get(), args.k = k.memory.get(), args.v = v.memory.get();
  args.q_strides = q.strides(), args.k_strides = k.strides(), args.v_strides = v.strides();
  return args;
}

inline jitfmha::MhaFwdArgs forward_of(const Tensor& q, const Tensor& k, const Tensor& v,
                                      const Tensor& out) {
  auto args = arguments<jitfmha::MhaFwdArgs>(q, k, v);
  args.out = out.memory.get(), args.out_strides = out.strides();
  return args;
}

// Runs a call with the workspace that it takes, waits for it, and returns its plan.
template <class Args, class Plan, class Call>
jitfmha::MhaPlan run(Args args, const Plan& plan_call, const Call& call) {
  jitfmha::MhaPlan plan;
  check(plan_call(args, &plan));
  const hip::Memory workspace(plan.workspace_bytes);
  if (plan.workspace_bytes) {
    args.workspace = workspace.get();
    args.workspace_bytes = plan.workspace_bytes;
  }
  check(call(args, nullptr));
  hip::synchronize();
  return plan;
}

inline jitfmha::MhaPlan run(const jitfmha::MhaFwdArgs& args) {
  return run(args, jitfmha::plan_mha_fwd, jitfmha::mha_fwd);
}

// Where a score is: the query head reads key head `head / (heads of q / heads of k)`.
struct Place {
  std::int64_t batch, head, i, j;
};

// What an example changes about attention.
struct Changes {
  std::function<double(Place, double)> score = [](Place, double x) { return x; };  // -inf: hidden
  std::function<double(Place)> kept = [](Place) { return 1; };  // probabilities times that
  double sink = -HUGE_VAL;                                      // a score without a value
};

// Softmax over keys, as (batch, query, query head, key). A row without keys is 0. `lse` gets
// (batch, query head, query), where it is wanted.
inline Values probabilities(const Values& q, const Values& k, const Changes& changes = {},
                            std::vector<double>* lse = nullptr) {
  Values p(q.batch, q.seqlen, q.heads, k.seqlen);
  const std::int64_t shared = q.heads / k.heads;
  for (std::int64_t b = 0; b < q.batch; ++b)
    for (std::int64_t h = 0; h < q.heads; ++h)
      for (std::int64_t i = 0; i < q.seqlen; ++i) {
        double largest = changes.sink;
        for (std::int64_t j = 0; j < k.seqlen; ++j) {
          double score = 0;
          for (std::int64_t d = 0; d < q.hdim; ++d)
            score += q.at(b, i, h, d) * k.at(b, j, h / shared, d);
          score = changes.score({b, h, i, j}, score / std::sqrt(static_cast<double>(q.hdim)));
          p.at(b, i, h, j) = score;
          largest = std::max(largest, score);
        }
        double sum = std::isinf(changes.sink) ? 0 : std::exp(changes.sink - largest);
        for (std::int64_t j = 0; j < k.seqlen; ++j) {
          double& each = p.at(b, i, h, j);
          each = std::isinf(each) ? 0 : std::exp(each - largest);
          sum += each;
        }
        for (std::int64_t j = 0; sum > 0 && j < k.seqlen; ++j) p.at(b, i, h, j) /= sum;
        if (lse) lse->push_back(sum > 0 ? largest + std::log(sum) : -HUGE_VAL);
      }
  return p;
}

inline Values attention(const Values& q, const Values& k, const Values& v,
                        const Changes& changes = {}) {
  const Values p = probabilities(q, k, changes);
  Values out(q.batch, q.seqlen, q.heads, v.hdim);
  const std::int64_t shared = q.heads / k.heads;
  for (std::int64_t b = 0; b < q.batch; ++b)
    for (std::int64_t i = 0; i < q.seqlen; ++i)
      for (std::int64_t h = 0; h < q.heads; ++h)
        for (std::int64_t j = 0; j < k.seqlen; ++j) {
          const double weight = p.at(b, i, h, j) * changes.kept({b, h, i, j});
          for (std::int64_t d = 0; d < v.hdim; ++d)
            out.at(b, i, h, d) += weight * v.at(b, j, h / shared, d);
        }
  return out;
}

// Prints how far numbers are from those that were expected; ends with 1 where rounding is less.
// Probabilities and results are rounded once each, by half an eps of their data type at most.
inline void compare(const char* name, const std::vector<double>& found,
                    const std::vector<double>& expected,
                    jitfmha::DataType dtype = jitfmha::DataType::bf16) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    error += std::pow(found.at(i) - expected[i], 2);
    size += std::pow(expected[i], 2);
  }
  error = std::sqrt(error / size);
  std::printf("%-40s %7zu numbers, off by %.1e\n", name, expected.size(), error);
  if (found.size() == expected.size() &&
      error <= std::ldexp(1, -bench::format_of(dtype).mantissa_bits))
    return;
  std::printf("%s is wrong\n", name);
  std::exit(1);
}

inline void compare(const char* name, const Values& found, const Values& expected) {
  compare(name, found.numbers, expected.numbers);
}

}  // namespace plain
