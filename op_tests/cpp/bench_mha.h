// What both benchmarks have in common: options, problems, random inputs and their exact results.
#pragma once

#include <jitfmha.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <limits>
#include <map>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "hip.h"

namespace bench {

// ---- Options ------------------------------------------------------------------------------------

struct Option {
  const char *name, *initial, *help;
};

inline const std::vector<Option>& common_options() {
  static const std::vector<Option> options = {
      {"b", "2", "batch size"},
      {"h", "8", "heads of q"},
      {"h_k", "-1", "heads of k and v; -1: as many as of q"},
      {"s", "3328", "seqlen_q; groups: the average, or the length of each as 70,1,33"},
      {"s_k", "-1", "the same of k and v; -1: as q"},
      {"d", "128", "head dimension of q and k"},
      {"d_v", "-1", "head dimension of v; -1: as q"},
      {"scale", "0", "that scores are multiplied with; 0: 1 / sqrt(d)"},
      {"iperm", "1", "inputs lie as 1: b h s d, 0: b s h d"},
      {"operm", "1", "the same of outputs"},
      {"prec", "fp16", "fp16, bf16, or fp8 in the form that the chip has, with bf16 outputs"},
      {"mask", "0", "0: none; 1, t: causal, top-left; 2, b: causal, bottom-right"},
      {"mode", "0", "0: batch; 1: group"},
      {"init", "uf", "ui, 0: random integers; uf, 1: random floats; nf: normal ones; tf, 2: sines"},
      {"seed", "11939", "of random inputs; 0: another one each time"},
      {"v", "1", "1: compare with what the CPU computes"},
      {"kname", "0", "1: print the kernel's name"},
      {"v3_bf16_cvt", "0", "float32 becomes bf16 by 0: RTNE, 1: RTNA, 2: RTZ"},
      {"warmup", "5", "launches before those that are timed"},
      {"repeat", "20", "launches that are timed; 0: none"},
      {"device", "0", "the number of the GPU"},
      {"save", "", "a folder for all tensors, as they lie in memory"},
  };
  return options;
}

class UsageError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Arguments as -name=value.
class Options {
 public:
  Options(int count, char** texts, std::vector<Option> more) : known_(common_options()) {
    known_.insert(known_.end(), more.begin(), more.end());
    for (const Option& option : known_) values_[option.name] = option.initial;
    for (int i = 1; i < count; ++i) {
      const std::string text = texts[i];
      const std::size_t sign = text.find('=');
      const std::string name = text.substr(1, sign == std::string::npos ? sign : sign - 1);
      if (text[0] != '-' || sign == std::string::npos || !values_.count(name))
        throw UsageError(text + " is no option; they are\n" + help());
      values_[name] = text.substr(sign + 1);
    }
  }

  const std::string& text(const std::string& name) const { return values_.at(name); }
  double real(const std::string& name) const {
    return parsed<double>(name, text(name),
                          [](const auto& x, auto* end) { return std::stod(x, end); });
  }
  std::int64_t number(const std::string& name) const { return number_of(name, text(name)); }
  bool flag(const std::string& name) const {
    if (text(name) != "0" && text(name) != "1") refuse(name);
    return text(name) == "1";
  }
  std::vector<std::int64_t> numbers(const std::string& name) const {
    std::vector<std::int64_t> found;
    std::stringstream stream(text(name));
    for (std::string each; std::getline(stream, each, ',');) found.push_back(number_of(name, each));
    return found;
  }
  // One of several words, as its place among these.
  std::size_t choice(const std::string& name,
                     const std::vector<std::vector<std::string>>& words) const {
    for (std::size_t i = 0; i < words.size(); ++i)
      if (std::count(words[i].begin(), words[i].end(), text(name))) return i;
    refuse(name);
  }
  [[noreturn]] void refuse(const std::string& name) const {
    throw UsageError("-" + name + "=" + text(name) + " is not served; options are\n" + help());
  }

 private:
  std::int64_t number_of(const std::string& name, const std::string& text) const {
    return parsed<std::int64_t>(name, text,
                                [](const auto& x, auto* end) { return std::stoll(x, end); });
  }
  template <class Number, class Parse>
  Number parsed(const std::string& name, const std::string& text, const Parse& parse) const {
    std::size_t end = 0;
    try {
      const Number value = parse(text, &end);
      if (end == text.size()) return value;
    } catch (const std::logic_error&) {
    }
    refuse(name);
  }
  std::string help() const {
    std::string lines;
    for (const Option& option : known_)
      lines += std::string("  -") + option.name + "=" + option.initial + "  " + option.help + "\n";
    return lines;
  }

  std::vector<Option> known_;
  std::map<std::string, std::string> values_;
};

// ---- Numbers ------------------------------------------------------------------------------------

using Bits = std::uint16_t;  // of fp8 the lower 8

inline bool is_fp8(jitfmha::DataType dtype) {
  return dtype == jitfmha::DataType::fp8_e4m3fnuz || dtype == jitfmha::DataType::fp8_e4m3fn;
}

inline jitfmha::DataType output_dtype(jitfmha::DataType dtype) {
  return is_fp8(dtype) ? jitfmha::DataType::bf16 : dtype;
}

inline const char* name_of(jitfmha::DataType dtype) {
  constexpr const char* kNames[] = {"bf16", "fp16", "fp8_e4m3fnuz", "fp8_e4m3fn"};
  return kNames[static_cast<int>(dtype)];
}

// The bits of a mantissa lie below those of the exponent.
struct Format {
  int mantissa_bits, bias, sign_bit;
};

inline Format format_of(jitfmha::DataType dtype) {
  switch (dtype) {
    case jitfmha::DataType::bf16: return {7, 127, 15};
    case jitfmha::DataType::fp16: return {10, 15, 15};
    case jitfmha::DataType::fp8_e4m3fnuz: return {3, 8, 7};
    case jitfmha::DataType::fp8_e4m3fn: return {3, 7, 7};
    case jitfmha::DataType::fp32:
    case jitfmha::DataType::int8: break;  // -prec has neither
  }
  return {};
}

// To nearest even; what is drawn is finite and in the range of all types.
inline Bits narrowed(double value, jitfmha::DataType dtype) {
  const auto [mantissa_bits, bias, sign_bit] = format_of(dtype);
  int exponent = 0;
  std::frexp(value, &exponent);
  const int field = std::max(exponent - 1 + bias, 1);  // 1 also of subnormal numbers
  const double steps = std::nearbyint(std::ldexp(std::fabs(value), mantissa_bits + bias - field));
  if (steps == 0) return 0;  // where there is no -0, its bits are a NaN
  const int bits = ((field - 1) << mantissa_bits) + static_cast<int>(steps);
  return static_cast<Bits>((value < 0) << sign_bit | bits);
}

inline double widened(Bits bits, jitfmha::DataType dtype) {
  const auto [mantissa_bits, bias, sign_bit] = format_of(dtype);
  const int one = 1 << mantissa_bits, last_field = (1 << (sign_bit - mantissa_bits)) - 1;
  const int field = bits >> mantissa_bits & last_field, mantissa = bits & (one - 1);
  const double sign = bits >> sign_bit & 1 ? -1 : 1;
  if (field == last_field && !is_fp8(dtype)) return mantissa ? std::nan("") : sign * HUGE_VAL;
  return sign *
         std::ldexp(field ? mantissa + one : mantissa, std::max(field, 1) - bias - mantissa_bits);
}

inline void check(const jitfmha::Status& status) {
  if (!status) throw std::runtime_error(status.text);
}

// ---- Problems -----------------------------------------------------------------------------------

struct Sequence {
  std::int64_t begin_q, begin_k, rows_q, rows_k;  // groups: in the packs
};

// Of fp8 tensors: for each sequence and head of k; of other tensors none.
struct Descales {
  std::vector<float> q, k, v;
};

struct Problem {
  jitfmha::MhaArgs args;  // without addresses
  Descales descales;
  std::vector<Sequence> sequences;
  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_k;
  bool is_input_by_head, is_output_by_head;
  double scale;

  bool is_group() const { return args.mode == jitfmha::Mode::group; }
  std::int64_t packs() const { return is_group() ? 1 : args.batch; }

  // Of a tensor with as many heads, rows and columns.
  jitfmha::Strides strides(bool is_by_head, std::int64_t heads, std::int64_t rows,
                           std::int64_t columns) const {
    jitfmha::Strides strides;
    strides.batch = heads * rows * columns;
    strides.head = is_by_head ? rows * columns : columns;
    strides.seq = is_by_head ? columns : heads * columns;
    return strides;
  }

  // What the values of a tensor are multiplied with.
  double descale(const std::vector<float>& of, std::int64_t n, std::int64_t key_head) const {
    return of.empty() ? 1 : of[static_cast<std::size_t>(n * args.heads_k + key_head)];
  }

  // Whether query i of a sequence sees key j.
  bool sees(const Sequence& of, std::int64_t i, std::int64_t j) const {
    if (args.mask == jitfmha::Mask::none) return true;
    return j <= i + (args.mask == jitfmha::Mask::causal_top_left ? 0 : of.rows_k - of.rows_q);
  }

  // Pairs of queries and keys that see each other, of one head.
  double visible_pairs() const {
    double pairs = 0;
    for (const Sequence& each : sequences)
      for (std::int64_t i = 0; i < each.rows_q; ++i) {
        const std::int64_t diagonal =
            i + 1 + (args.mask == jitfmha::Mask::causal_top_left ? 0 : each.rows_k - each.rows_q);
        pairs += static_cast<double>(args.mask == jitfmha::Mask::none
                                         ? each.rows_k
                                         : std::clamp<std::int64_t>(diagonal, 0, each.rows_k));
      }
    return pairs;
  }
};

// Of groups: those that are given, or as many around an average.
inline std::vector<std::int64_t> lengths_of(const std::vector<std::int64_t>& given,
                                            std::int64_t count, bool vary, std::mt19937& random) {
  if (given.size() == static_cast<std::size_t>(count) && count > 1) return given;
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(count), given.at(0));
  if (!vary) return lengths;
  std::uniform_int_distribution<std::size_t> any(0, lengths.size() - 1);
  std::uniform_int_distribution<std::int64_t> part(0, given[0] / 2);
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const std::int64_t moved = std::min(part(random), lengths[i] - 1);
    if (moved <= 0) continue;
    lengths[i] -= moved;
    lengths[any(random)] += moved;
  }
  return lengths;
}

inline Problem problem_of(const Options& options, std::mt19937& random) {
  Problem problem;
  jitfmha::MhaArgs& args = problem.args;
  args.dtype =
      static_cast<jitfmha::DataType>(options.choice("prec", {{"bf16"}, {"fp16"}, {"fp8"}}));
  if (is_fp8(args.dtype)) check(jitfmha::native_fp8(&args.dtype));
  args.mode = static_cast<jitfmha::Mode>(options.flag("mode"));
  args.mask =
      static_cast<jitfmha::Mask>(options.choice("mask", {{"0", "n"}, {"1", "t"}, {"2", "b"}}));
  args.bf16_cvt =
      static_cast<jitfmha::Bf16Cvt>(options.choice("v3_bf16_cvt", {{"0"}, {"1"}, {"2"}}));
  const auto either = [&](const char* name, std::int64_t otherwise) {
    const std::int64_t value = options.number(name);
    return value < 0 ? otherwise : value;
  };
  args.heads_q = options.number("h");
  args.heads_k = either("h_k", args.heads_q);
  args.hdim_q = options.number("d");
  args.hdim_v = either("d_v", args.hdim_q);
  problem.is_input_by_head = options.flag("iperm");
  problem.is_output_by_head = options.flag("operm");
  const double scale = options.real("scale");
  problem.scale = scale == 0 ? 1 / std::sqrt(static_cast<double>(args.hdim_q)) : scale;
  args.softmax_scale = static_cast<float>(problem.scale);

  const std::vector<std::int64_t> given_q = options.numbers("s");
  const std::vector<std::int64_t> given_k = options.numbers("s_k");
  const bool is_group = problem.is_group();
  args.batch = is_group && given_q.size() > 1 ? static_cast<std::int64_t>(given_q.size())
                                              : options.number("b");
  if (args.batch < 1) options.refuse("b");
  for (const auto& [name, given] : {std::pair("s", &given_q), std::pair("s_k", &given_k)})
    if (given->size() != 1 && !(is_group && given->size() == static_cast<std::size_t>(args.batch)))
      options.refuse(name);
  const bool as_q = given_k[0] < 0;
  const std::vector<std::int64_t> rows_q = lengths_of(given_q, args.batch, is_group, random);
  const std::vector<std::int64_t> rows_k =
      as_q ? rows_q : lengths_of(given_k, args.batch, is_group, random);
  problem.cu_seqlens_q = problem.cu_seqlens_k = {0};
  for (std::size_t i = 0; i < rows_q.size(); ++i) {
    const std::int64_t begin_q = is_group ? problem.cu_seqlens_q.back() : 0;
    const std::int64_t begin_k = is_group ? problem.cu_seqlens_k.back() : 0;
    problem.sequences.push_back({begin_q, begin_k, rows_q[i], rows_k[i]});
    problem.cu_seqlens_q.push_back(static_cast<std::int32_t>(begin_q + rows_q[i]));
    problem.cu_seqlens_k.push_back(static_cast<std::int32_t>(begin_k + rows_k[i]));
  }
  args.seqlen_q = is_group ? problem.cu_seqlens_q.back() : given_q[0];
  args.seqlen_k = is_group ? problem.cu_seqlens_k.back() : as_q ? given_q[0] : given_k[0];
  if (is_group) {
    args.max_seqlen_q = *std::max_element(rows_q.begin(), rows_q.end());
    args.max_seqlen_k = *std::max_element(rows_k.begin(), rows_k.end());
  }
  const bool by_head = problem.is_input_by_head;
  args.q_strides = problem.strides(by_head, args.heads_q, args.seqlen_q, args.hdim_q);
  args.k_strides = problem.strides(by_head, args.heads_k, args.seqlen_k, args.hdim_q);
  args.v_strides = problem.strides(by_head, args.heads_k, args.seqlen_k, args.hdim_v);
  return problem;
}

// ---- Tensors ------------------------------------------------------------------------------------

// The values of a tensor as they lie in memory.
inline std::vector<std::uint8_t> stored(const std::vector<Bits>& values, jitfmha::DataType dtype) {
  if (is_fp8(dtype)) return {values.begin(), values.end()};
  std::vector<std::uint8_t> bytes(values.size() * sizeof(Bits));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// The place of a row in memory.
inline std::size_t place(const jitfmha::Strides& strides, std::int64_t batch, std::int64_t head,
                         std::int64_t row) {
  return static_cast<std::size_t>(batch * strides.batch + head * strides.head + row * strides.seq);
}

// A tensor on the host, as doubles that are read by batch, head, row and column.
struct View {
  const std::vector<Bits>& values;
  jitfmha::Strides strides;
  jitfmha::DataType dtype;

  double operator()(std::int64_t batch, std::int64_t head, std::int64_t row,
                    std::int64_t column) const {
    const std::size_t at = place(strides, batch, head, row) + static_cast<std::size_t>(column);
    return widened(values[at], dtype);
  }
};

template <class T>
void save(const Options& options, const char* name, const std::vector<T>& values) {
  if (options.text("save").empty()) return;
  std::ofstream file(options.text("save") + "/" + name + ".bin", std::ios::binary);
  file.write(reinterpret_cast<const char*>(values.data()),
             static_cast<std::streamsize>(values.size() * sizeof(T)));
  if (!file.flush()) throw std::runtime_error("cannot write to " + options.text("save"));
}

inline std::vector<Bits> drawn(const Options& options, jitfmha::DataType dtype, std::int64_t count,
                               std::mt19937& random) {
  const std::size_t kind = options.choice("init", {{"ui", "0"}, {"uf", "1"}, {"nf"}, {"tf", "2"}});
  std::uniform_int_distribution<int> integers(-3, 3);
  std::uniform_real_distribution<double> floats(-1, 1);
  std::normal_distribution<double> normal;
  std::vector<Bits> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double value = kind == 0   ? integers(random)
                         : kind == 1 ? floats(random)
                         : kind == 2 ? normal(random)
                                     : std::sin(static_cast<double>(i));
    values[i] = narrowed(value, dtype);
  }
  return values;
}

// A tensor of random values, on the host and on the device. Batches lie one behind the other.
struct Drawn {
  Drawn(const Options& options, const Problem& problem, const jitfmha::Strides& strides,
        std::mt19937& random)
      : values(drawn(options, problem.args.dtype, problem.packs() * strides.batch, random)),
        view{values, strides, problem.args.dtype},
        memory(stored(values, problem.args.dtype)) {}
  void save_to(const Options& options, const char* name) const {
    save(options, name, stored(values, view.dtype));
  }

  std::vector<Bits> values;
  View view;
  hip::Memory memory;
};

// What both directions read.
struct Inputs {
  Inputs(const Options& options, const Problem& problem, std::mt19937& random)
      : q(options, problem, problem.args.q_strides, random),
        k(options, problem, problem.args.k_strides, random),
        v(options, problem, problem.args.v_strides, random),
        cu_seqlens_q(problem.cu_seqlens_q),
        cu_seqlens_k(problem.cu_seqlens_k) {
    q.save_to(options, "q");
    k.save_to(options, "k");
    v.save_to(options, "v");
  }

  void put_into(jitfmha::MhaArgs& args, const hip::Memory& workspace) const {
    args.q = q.memory.get();
    args.k = k.memory.get();
    args.v = v.memory.get();
    args.cu_seqlens_q = cu_seqlens_q.get<std::int32_t>();
    args.cu_seqlens_k = cu_seqlens_k.get<std::int32_t>();
    args.workspace = workspace.get();
    args.workspace_bytes = workspace.bytes();
  }

  Drawn q, k, v;
  hip::Memory cu_seqlens_q, cu_seqlens_k;
};

// How far results are from exact ones; a share of the largest exact value is allowed.
class Comparison {
 public:
  void add(const char* name, const std::vector<double>& values, const std::vector<double>& exact,
           double allowed) {
    double largest = 1, worst = 0;
    for (std::size_t i = 0; i < exact.size(); ++i) {
      if (std::isinf(exact[i]) && values[i] == exact[i]) continue;
      largest = std::max(largest, std::fabs(exact[i]));
      const double error = std::fabs(values[i] - exact[i]);
      worst = std::isnan(error) ? HUGE_VAL : std::max(worst, error);
    }
    is_good_ = is_good_ && worst <= allowed * largest;
    std::printf("%s %s %.2e", is_first_ ? ", worst errors:" : ",", name, worst);
    is_first_ = false;
  }
  bool is_good() const { return is_good_; }

 private:
  bool is_good_ = true, is_first_ = true;
};

inline std::vector<double> widened(const std::vector<Bits>& values, jitfmha::DataType dtype) {
  std::vector<double> wide;
  for (const Bits each : values) wide.push_back(widened(each, dtype));
  return wide;
}

// The probabilities of one query, and its log-sum-exp.
struct Row {
  std::vector<double> probabilities;
  double lse;
};

inline Row row_of(const Problem& problem, const Inputs& inputs, std::int64_t n, std::int64_t head,
                  std::int64_t i) {
  const Sequence& of = problem.sequences[static_cast<std::size_t>(n)];
  const std::int64_t batch = problem.is_group() ? 0 : n;
  const std::int64_t key_head = head / (problem.args.heads_q / problem.args.heads_k);
  const double scale = problem.scale * problem.descale(problem.descales.q, n, key_head) *
                       problem.descale(problem.descales.k, n, key_head);
  Row row = {std::vector<double>(static_cast<std::size_t>(of.rows_k), -HUGE_VAL), -HUGE_VAL};
  double largest = -HUGE_VAL, sum = 0;
  for (std::int64_t j = 0; j < of.rows_k; ++j) {
    if (!problem.sees(of, i, j)) continue;
    double score = 0;
    for (std::int64_t d = 0; d < problem.args.hdim_q; ++d)
      score += inputs.q.view(batch, head, of.begin_q + i, d) *
               inputs.k.view(batch, key_head, of.begin_k + j, d);
    row.probabilities[static_cast<std::size_t>(j)] = score * scale;
    largest = std::max(largest, score * scale);
  }
  for (double& each : row.probabilities) {
    each = std::isinf(each) ? 0 : std::exp(each - largest);
    sum += each;
  }
  if (sum > 0) {
    for (double& each : row.probabilities) each /= sum;
    row.lse = largest + std::log(sum);
  }
  return row;
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

// Exact results, as they lie in memory.
struct Forward {
  std::vector<double> out, lse;
};

inline Forward forward_of(const Problem& problem, const Inputs& inputs,
                          const jitfmha::Strides& strides) {
  const jitfmha::MhaArgs& args = problem.args;
  const auto rows = static_cast<std::size_t>(problem.packs() * args.heads_q * args.seqlen_q);
  Forward forward = {std::vector<double>(rows * static_cast<std::size_t>(args.hdim_v)),
                     std::vector<double>(rows)};
  for_queries(problem, [&](auto n, auto batch, auto head, auto key_head, auto i) {
    const Sequence& of = problem.sequences[static_cast<std::size_t>(n)];
    const Row row = row_of(problem, inputs, n, head, i);
    const std::size_t to = place(strides, batch, head, of.begin_q + i);
    for (std::int64_t d = 0; d < args.hdim_v; ++d) {
      double sum = 0;
      for (std::int64_t j = 0; j < of.rows_k; ++j)
        sum += row.probabilities[static_cast<std::size_t>(j)] *
               inputs.v.view(batch, key_head, of.begin_k + j, d);
      forward.out[to + static_cast<std::size_t>(d)] =
          sum * problem.descale(problem.descales.v, n, key_head);
    }
    forward.lse[static_cast<std::size_t>((batch * args.heads_q + head) * args.seqlen_q +
                                         of.begin_q + i)] = row.lse;
  });
  return forward;
}

// ---- Runs ---------------------------------------------------------------------------------------

// Seconds of a launch, those of the host included where they are longer.
template <class Launch>
double seconds_of(const Options& options, const Launch& launch) {
  const std::int64_t repeat = options.number("repeat");
  if (repeat == 0) return 0;
  for (std::int64_t i = 0; i < options.number("warmup"); ++i) launch();
  hip::synchronize();
  const auto begin = std::chrono::steady_clock::now();
  for (std::int64_t i = 0; i < repeat; ++i) launch();
  hip::synchronize();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  return taken.count() / static_cast<double>(repeat);
}

// Launches, and prints what is known before the results are.
template <class Launch>
void run_and_time(const Options& options, const Problem& problem, const jitfmha::MhaPlan& plan,
                  std::int64_t columns, const Launch& launch) {
  const jitfmha::MhaArgs& args = problem.args;
  launch();
  hip::synchronize();
  std::ostringstream text;
  text << name_of(args.dtype) << ", " << (problem.is_group() ? "group" : "batch") << ", b "
       << args.batch << ", h " << args.heads_q << "/" << args.heads_k << ", s " << args.seqlen_q
       << "/" << args.seqlen_k << ", d " << args.hdim_q << "/" << args.hdim_v << ", mask "
       << static_cast<int>(args.mask) << ", splits " << plan.num_splits;
  if (options.flag("kname")) text << ", " << plan.kernel;
  std::printf("%s", text.str().c_str());
  const double seconds = seconds_of(options, launch);
  const double operations = 2 * problem.visible_pairs() * static_cast<double>(args.heads_q) *
                            static_cast<double>(columns);
  if (seconds > 0)
    std::printf(", %.4f ms, %.2f TFLOP/s", seconds * 1e3, operations / seconds * 1e-12);
}

// 0: done, 1: wrong or failed, 2: a usage error.
template <class Run>
int main_with(int count, char** texts, std::vector<Option> more, const Run& run) {
  try {
    const Options options(count, texts, std::move(more));
    return run(options) ? 0 : 1;
  } catch (const UsageError& error) {
    std::cerr << texts[0] << ": " << error.what();
    return 2;
  } catch (const std::exception& error) {
    std::cerr << texts[0] << ": " << error.what() << "\n";
    return 1;
  }
}

inline std::mt19937 random_of(const Options& options) {
  const std::int64_t seed = options.number("seed");
  return std::mt19937(seed ? static_cast<unsigned>(seed) : std::random_device()());
}

}  // namespace bench
