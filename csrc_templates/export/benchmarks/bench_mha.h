// What both benchmarks have in common: options, problems, random inputs and their exact results.
#pragma once

#include <jitfmha.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
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

#include "numbers.h"

namespace bench {

// ---- Options ------------------------------------------------------------------------------------

struct Option {
  const char *name, *initial, *help;
};

inline const std::vector<Option>& common_options() {
  static const std::vector<Option> options = {
      {"v", "1", "1, 2: compare with what the CPU computes; 0: do not"},
      {"mode", "0", "0: batch; 1: group"},
      {"b", "2", "batch size"},
      {"h", "8", "heads of q"},
      {"h_k", "-1", "heads of k and v; -1, 0: as many as of q"},
      {"s", "3328", "seqlen_q; groups: the average, or the length of each as 70,1,33"},
      {"s_k", "-1", "the same of k and v; -1: as q"},
      {"s_qpad", "-1",
       "groups: rows of q that a sequence has room for, or those of each as 70,33; "
       "-1: no more than it has"},
      {"s_kpad", "-1", "the same of k and v"},
      {"d", "128", "head dimension of q and k"},
      {"d_v", "-1", "head dimension of v; -1, 0: as q"},
      {"scale_s", "0", "that scores are multiplied with; 0: 1 / sqrt(d)"},
      {"scale", "0", "the same"},
      {"iperm", "1", "inputs lie as 1: b h s d, 0: b s h d"},
      {"operm", "1", "the same of outputs"},
      {"bias", "n",
       "n, 0: none; e, 1: added, one for all; e:1, one of each head; e:2, of each sequence and "
       "head; "
       "a, 2: ALiBi slopes of each head; a:1, of each sequence and head; m, m:1, m:2: as e, a "
       "boolean "
       "of each score that says whether it counts"},
      {"prec", "fp16",
       "fp16, bf16, fp32; in forward int8, or fp8 or bf8 in the form that the chip has, with "
       "outputs of bf16, or of the type behind it, as in fp8fp16, fp8bf16, fp8fp32"},
      {"mask", "0",
       "0: none; 1, t: causal, top-left; 2, b: causal, bottom-right; t:l,r and b:l,r: keys from l "
       "left to r right of that diagonal, -1 being open; xt:w, xb:w: w keys around it, or causal "
       "where w is negative; g:y,x: y rows down and x columns right of the corner"},
      {"vlayout", "r", "r: rows of v are contiguous; c: its keys are"},
      {"init", "uf",
       "ui, 0: random integers; uf, 1: random floats; ni, nf: normal ones; tf, 2: sines; uf:q, 3: "
       "floats over all the range of 8 bits, else as uf"},
      {"seed", "11939", "of random inputs; 0: another one each time"},
      {"p_drop", "0", "the probability that a probability is dropped"},
      {"drop_seed", "1", "of dropout's random numbers"},
      {"drop_offset", "0", "the same"},
      {"drop_prefs", "0", "0, 1: no meaning here: seed and offset always are on the GPU"},
      {"timer", "gpu", "gpu: events of the GPU time the launches, cpu: the host does"},
      {"kname", "0", "1: print the kernel's name"},
      {"v3_bf16_cvt", "1",
       "float32 becomes bf16 by 0, as by nothing: RTNE, 1: RTNA, 2: RTZ, where there is such a "
       "kernel, else RTNE"},
      {"is_v3_check", "0", "1: launch nothing, say whether a kernel that comes ready serves it"},
      {"json", "0", "1: write the figures to -jsonfile"},
      {"jsonfile", "bench_mha.json", "where -json writes"},
      {"device", "0", "the number of the GPU"},
      {"save", "", "a folder for all tensors, as they lie in memory"},
      {"?", "", "print this"},
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
    for (const auto& [name, variable] : {std::pair("warmup", "CK_WARMUP"), {"repeat", "CK_REPEAT"}})
      if (const char* const value = std::getenv(variable)) values_[name] = value;
    for (int i = 1; i < count; ++i) {
      const std::string text = texts[i];
      if (text == "-?") {
        asks_for_help_ = true;
        continue;
      }
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
  bool has(const std::string& name) const { return values_.count(name) > 0; }
  std::vector<std::int64_t> numbers(const std::string& name) const {
    return numbers(name, text(name));
  }
  // Those in a part of the text.
  std::vector<std::int64_t> numbers(const std::string& name, const std::string& part) const {
    std::vector<std::int64_t> found;
    std::stringstream stream(part);
    for (std::string each; std::getline(stream, each, ',');) found.push_back(number_of(name, each));
    if (found.empty()) refuse(name);
    return found;
  }
  // One of several words, as its place among these.
  std::size_t choice(const std::string& name,
                     const std::vector<std::vector<std::string>>& words) const {
    for (std::size_t i = 0; i < words.size(); ++i)
      if (std::count(words[i].begin(), words[i].end(), text(name))) return i;
    refuse(name);
  }
  bool asks_for_help() const { return asks_for_help_; }
  // In lines of 80 columns.
  std::string help() const {
    std::string lines;
    for (const Option& option : known_) {
      std::string line = std::string("  -") + option.name + "=" + option.initial + " ";
      std::stringstream words(option.help);
      for (std::string word; words >> word; line += " " + word)
        if (line.size() + 1 + word.size() > 80) {
          lines += line + "\n";
          line = "     ";
        }
      lines += line + "\n";
    }
    return lines;
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
      if (end == text.size() || text.substr(end) == ",") return value;  // as in AITER's -d=16,
    } catch (const std::logic_error&) {
    }
    refuse(name);
  }
  std::vector<Option> known_;
  std::map<std::string, std::string> values_;
  bool asks_for_help_ = false;
};

// ---- Problems -----------------------------------------------------------------------------------

struct Sequence {
  std::int64_t begin_q, begin_k, rows_q, rows_k;  // groups: in the packs
};

// Of 8-bit tensors: for each sequence and head of k, of q also for each of its own heads, and of k
// and v for each row as they lie in memory and head; of other tensors none.
struct Descales {
  std::vector<float> q, k, v;
  bool are_of_tokens = false, are_of_query_heads = false;
};

// What changes scores, as doubles: a bias as it lies in memory, and slopes of all heads.
struct Scores {
  std::vector<double> bias, slopes;
  jitfmha::DataType dtype = jitfmha::DataType::fp32;  // that they are stored in
  double softcap = 0, sink = -HUGE_VAL;
};

// How keys are kept: in a cache to which new ones are appended, in pages, or with an index that
// says which sequence of the cache each one is.
struct KeyCache {
  std::int64_t new_keys = 0, rotary_dim = 0, page_size = 0;
  bool is_interleaved = false, has_index = false;

  bool is_appended() const { return new_keys > 0 || rotary_dim > 0; }
  bool is_there() const { return is_appended() || page_size > 0 || has_index; }
};

struct Problem {
  jitfmha::MhaArgs args;  // without addresses
  jitfmha::DataType out_dtype, key_dtype;
  jitfmha::KeyType key_type = jitfmha::KeyType::as_q;
  KeyCache cache;
  Descales descales;
  Scores scores;
  std::vector<std::int64_t> pages;        // where keys lie in pages: those of each sequence
  std::vector<std::int64_t> first_pages;  // of each sequence, among these
  std::int64_t page_size = 0, pages_of_sequence = 0;  // of lists -1
  bool has_packed_pages = false;
  std::uint64_t drop_seed = 0, drop_offset = 0;
  std::vector<Sequence> sequences;
  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_k;
  std::vector<std::int32_t> cu_rooms_q, cu_rooms_k;  // where sequences begin
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

  double descale_of_query(std::int64_t n, std::int64_t head, std::int64_t key_head) const {
    if (!descales.are_of_query_heads) return descale(descales.q, n, key_head);
    return descales.q[static_cast<std::size_t>(n * args.heads_q + head)];
  }

  // The same of those of a key.
  double descale_of_key(const std::vector<float>& of, std::int64_t n, std::int64_t j,
                        std::int64_t key_head) const {
    if (!descales.are_of_tokens) return descale(of, n, key_head);
    const auto [batch, row] = key_at(n, j);
    return of[static_cast<std::size_t>((batch * rows_of_keys() + row) * args.heads_k + key_head)];
  }

  // Of a batch or page, and how many of these there are.
  std::int64_t rows_of_keys() const { return page_size ? page_size : args.seqlen_k; }
  std::int64_t packs_of_keys() const {
    return page_size ? static_cast<std::int64_t>(pages.size()) : packs();
  }

  // Where a key of a sequence is: its batch, or page, and row.
  std::pair<std::int64_t, std::int64_t> key_at(std::int64_t n, std::int64_t j) const {
    if (page_size)
      return {
          pages[static_cast<std::size_t>(first_pages[static_cast<std::size_t>(n)] + j / page_size)],
          j % page_size};
    return {is_group() ? 0 : n, sequences[static_cast<std::size_t>(n)].begin_k + j};
  }

  // Whether query i of a sequence sees key j.
  bool sees(const Sequence& of, std::int64_t i, std::int64_t j) const {
    const auto [first, end] = window(of, i);
    const bool is_sink = j < args.sink_size && j < end;
    return is_sink || (j >= first && j < end);
  }

  // The first key that query i sees, and the end of them, but for sink tokens.
  std::pair<std::int64_t, std::int64_t> window(const Sequence& of, std::int64_t i) const {
    using jitfmha::Mask;
    const Mask mask = args.mask;
    const bool is_window = mask == Mask::window_top_left || mask == Mask::window_bottom_right;
    const bool is_top_left = mask == Mask::window_top_left || mask == Mask::causal_top_left;
    const std::int64_t diagonal = i + (is_top_left ? 0 : of.rows_k - of.rows_q);
    const std::int64_t left = is_window ? args.window_left : -1;
    const std::int64_t right = is_window ? args.window_right : mask == Mask::none ? -1 : 0;
    const std::int64_t first = left < 0 ? 0 : diagonal - left;
    const std::int64_t end = right < 0 ? of.rows_k : diagonal + right + 1;
    return {std::max<std::int64_t>(first, 0), std::min(end, of.rows_k)};
  }

  // Pairs of queries and keys that see each other, of one head.
  double visible_pairs() const {
    double pairs = 0;
    for (const Sequence& each : sequences)
      for (std::int64_t i = 0; i < each.rows_q; ++i) {
        const auto [first, end] = window(each, i);
        pairs +=
            static_cast<double>(std::max<std::int64_t>(end - first, 0) +
                                std::max<std::int64_t>(0, std::min({args.sink_size, first, end})));
      }
    return pairs;
  }

  // What is added to a score.
  double added(std::int64_t n, std::int64_t head, std::int64_t i, std::int64_t j) const {
    const Sequence& of = sequences[static_cast<std::size_t>(n)];
    double sum = 0;
    if (!scores.bias.empty())
      sum += scores.bias[static_cast<std::size_t>((is_group() ? 0 : n * args.bias_batch) +
                                                  head * args.bias_head +
                                                  (of.begin_q + i) * args.bias_query + j)];
    if (!scores.slopes.empty())
      sum -= scores.slopes[static_cast<std::size_t>(head)] *
             static_cast<double>(std::abs(i + of.rows_k - of.rows_q - j));
    return sum;
  }

  // What dropout multiplies a probability with.
  double kept(std::int64_t n, std::int64_t head, std::int64_t i, std::int64_t j) const {
    return kept_share(args.dropout_p, drop_seed, drop_offset, n * args.heads_q + head, i, j);
  }
};

// Of groups: those that are given, or as many around an average.
inline std::vector<std::int64_t> lengths_of(const std::vector<std::int64_t>& given,
                                            std::int64_t count, bool vary, std::mt19937& random) {
  if (given.size() == static_cast<std::size_t>(count) && count > 1) return given;
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(count), given.at(0));
  if (!vary || count == 0) return lengths;
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

// As CK's example reads it.
inline void set_mask(const Options& options, jitfmha::MhaArgs& args) {
  using jitfmha::Mask;
  const std::string text = options.text("mask");
  const std::size_t colon = text.find(':');
  if (colon == std::string::npos) {
    args.mask = static_cast<Mask>(options.choice("mask", {{"0", "n"}, {"1", "t"}, {"2", "b"}}));
    return;
  }
  const std::string kind = text.substr(0, colon);
  const std::vector<std::int64_t> sides = options.numbers("mask", text.substr(colon + 1));
  args.mask = kind == "b" || kind == "xb" ? Mask::window_bottom_right : Mask::window_top_left;
  if ((kind == "xt" || kind == "xb") && sides.size() == 1) {
    if (sides[0] > 0) args.window_left = sides[0] / 2;
    args.window_right = sides[0] > 0 ? sides[0] - 1 - args.window_left : 0;
  } else if ((kind == "t" || kind == "b") && (sides.size() == 2 || sides.size() == 3)) {
    args.window_left = sides[0];
    args.window_right = sides[1];
    if (sides.size() == 3 && sides[0] >= 0) args.sink_size = sides[2];
  } else if (kind == "g" && sides.size() == 2 && sides[0] > 0 && sides[1] > 0) {
    args.window_left = sides[0] - 1;
    args.window_right = sides[1] - 1;
  } else {
    options.refuse("mask");
  }
}

// Draws what is added to scores, and returns its bits; a bias has the output's type, or booleans.
inline std::vector<Bits> set_scores(const Options& options, Problem& problem,
                                    std::mt19937& random) {
  jitfmha::MhaArgs& args = problem.args;
  const std::size_t kind = options.choice("bias", {{"n", "0"},
                                                   {"e", "1", "e:0", "1:0"},
                                                   {"e:1", "1:1"},
                                                   {"e:2", "1:2"},
                                                   {"a", "2", "a:0", "2:0"},
                                                   {"a:1", "2:1"},
                                                   {"m", "m:0"},
                                                   {"m:1"},
                                                   {"m:2"}});
  if (kind == 0) return {};
  std::vector<Bits> bits;
  if (kind == 4 || kind == 5) {
    args.alibi_head = 1;
    args.alibi_batch = kind == 5 ? args.heads_q : 0;
    for (std::int64_t n = 0; n < (kind == 5 ? args.batch : 1); ++n)
      for (std::int64_t head = 0; head < args.heads_q; ++head) {
        const float slope =
            std::exp2(-8 * static_cast<float>(head + 1) / static_cast<float>(args.heads_q));
        if (n == 0) problem.scores.slopes.push_back(slope);
        bits.push_back(narrowed(slope, jitfmha::DataType::fp32));
      }
    return bits;
  }
  const bool is_boolean = kind > 5;
  const std::size_t shape = is_boolean ? kind - 5 : kind;
  const jitfmha::DataType dtype = is_boolean ? jitfmha::DataType::int8 : problem.out_dtype;
  problem.scores.dtype = dtype;
  args.bias_dtype = is_boolean                         ? jitfmha::ScoreType::boolean
                    : dtype == jitfmha::DataType::bf16 ? jitfmha::ScoreType::bf16
                    : dtype == jitfmha::DataType::fp16 ? jitfmha::ScoreType::fp16
                                                       : jitfmha::ScoreType::fp32;
  const std::int64_t keys = problem.is_group() ? args.max_seqlen_k : args.seqlen_k;
  args.bias_query = keys;
  args.bias_head = shape > 1 ? args.seqlen_q * keys : 0;
  args.bias_batch = shape == 3 && !problem.is_group() ? args.heads_q * args.bias_head : 0;
  const std::int64_t heads = shape > 1 ? args.heads_q : 1, batch = args.bias_batch ? args.batch : 1;
  std::uniform_real_distribution<double> values(-1, 1);
  for (std::int64_t i = 0; i < batch * heads * args.seqlen_q * keys; ++i) {
    const double value = values(random);
    bits.push_back(is_boolean ? value > -0.5 : narrowed(value, dtype));
    problem.scores.bias.push_back(!is_boolean   ? widened(bits.back(), dtype)
                                  : bits.back() ? 0
                                                : -HUGE_VAL);
  }
  if (bits.empty()) args.bias_query = 0;
  return bits;
}

// Those of v where its keys are contiguous.
inline jitfmha::Strides column_strides(Problem& problem) {
  jitfmha::MhaArgs& args = problem.args;
  const std::int64_t heads = problem.is_input_by_head ? 1 : args.heads_k;
  args.v_column = heads * args.seqlen_k;
  jitfmha::Strides strides;
  strides.batch = args.heads_k * args.hdim_v * args.seqlen_k;
  strides.head = problem.is_input_by_head ? args.hdim_v * args.seqlen_k : args.seqlen_k;
  strides.seq = 1;
  return strides;
}

// Of forward, as CK's example reads it.
inline KeyCache cache_of(const Options& options, std::mt19937& random) {
  KeyCache cache;
  if (!options.has("s_knew")) return cache;
  cache.new_keys = options.number("s_knew");
  const std::int64_t seqlen_q = options.numbers("s")[0];
  if (cache.new_keys < 0)
    cache.new_keys = std::uniform_int_distribution<std::int64_t>(1, seqlen_q)(random);
  cache.rotary_dim = std::max<std::int64_t>(options.number("rotary_dim"), 0);
  if (cache.rotary_dim > options.number("d") || cache.rotary_dim % 2) options.refuse("rotary_dim");
  cache.is_interleaved = options.flag("rotary_interleaved");
  cache.page_size = options.number("page_block_size");
  if (cache.page_size < 0) options.refuse("page_block_size");
  cache.has_index = options.flag("cache_batch_idx");
  if (cache.has_index && cache.page_size > 0) {
    std::cerr << "a table names the pages of sequences: -cache_batch_idx is ignored\n";
    cache.has_index = false;
  }
  return cache;
}

// The form of 8 bits that the device has.
inline jitfmha::DataType native(jitfmha::DataType dtype) {
  if (is_fp8(dtype)) check(jitfmha::native_fp8(&dtype));
  if (is_bf8(dtype)) check(jitfmha::native_bf8(&dtype));
  return dtype;
}

// A type of 8 bits may have that of outputs behind it, as CK's fp8fp32 has.
inline void set_types(const Options& options, Problem& problem) {
  using jitfmha::DataType;
  const auto with_outputs = [](const std::string& name) {
    return std::vector<std::string>{name, name + "bf16", name + "fp16", name + "fp32"};
  };
  DataType& dtype = problem.args.dtype;
  dtype = static_cast<DataType>(options.choice("prec", {{"bf16"},
                                                        {"fp16"},
                                                        with_outputs("fp8"),
                                                        {},
                                                        {"fp32"},
                                                        with_outputs("int8"),
                                                        with_outputs("bf8")}));
  problem.out_dtype = problem.key_dtype = dtype;
  if (options.has("kv_prec")) {
    const std::size_t kind = options.choice("kv_prec", {{""}, {"fp8"}, {"int8"}, {"bf8"}});
    constexpr DataType kKeys[] = {DataType::fp8_e4m3fn, DataType::int8, DataType::bf8_e5m2};
    if (kind > 0 && has_8_bits(dtype)) options.refuse("kv_prec");
    problem.key_type = static_cast<jitfmha::KeyType>(kind);
    if (kind > 0) problem.key_dtype = native(kKeys[kind - 1]);
  }
  if (!has_8_bits(dtype)) return;
  const std::string text = options.text("prec");
  const auto ends_with = [&](const std::string& end) {
    return text.size() > end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
  };
  problem.out_dtype = ends_with("fp16")   ? DataType::fp16
                      : ends_with("fp32") ? DataType::fp32
                                          : DataType::bf16;
  problem.key_dtype = dtype = native(dtype);
}

inline Problem problem_of(const Options& options, std::mt19937& random) {
  Problem problem;
  jitfmha::MhaArgs& args = problem.args;
  set_types(options, problem);
  KeyCache& cache = problem.cache = cache_of(options, random);
  bool has_lengths = options.flag("mode");  // of each sequence
  if (has_lengths && cache.is_appended()) {
    std::cerr << "keys are appended to batches: -mode is ignored\n";
    has_lengths = false;
  } else if (has_lengths && cache.has_index) {
    std::cerr << "groups have no index of the cache: -cache_batch_idx is ignored\n";
    cache.has_index = false;
  }
  const auto is_given = [&](const char* name) {
    return options.has(name) && !options.text(name).empty();
  };
  // What is read from a cache has as many keys as each sequence, which only groups say.
  const bool is_group =
      has_lengths || cache.is_there() || is_given("q_eff_lens") || is_given("kv_eff_lens");
  args.mode = is_group ? jitfmha::Mode::group : jitfmha::Mode::batch;
  set_mask(options, args);
  args.bf16_cvt =
      static_cast<jitfmha::Bf16Cvt>(options.choice("v3_bf16_cvt", {{"0", ""}, {"1"}, {"2"}}));
  const auto either = [&](const char* name, std::int64_t otherwise) {
    const std::int64_t value = options.number(name);
    return value <= 0 ? otherwise : value;
  };
  args.heads_q = options.number("h");
  args.heads_k = either("h_k", args.heads_q);
  args.hdim_q = options.number("d");
  args.hdim_v = either("d_v", args.hdim_q);
  problem.is_input_by_head = options.flag("iperm");
  problem.is_output_by_head = options.flag("operm");
  double scale = options.real("scale_s");
  if (scale == 0) scale = options.real("scale");
  problem.scale = scale == 0 ? 1 / std::sqrt(static_cast<double>(args.hdim_q)) : scale;
  args.softmax_scale = static_cast<float>(problem.scale);
  args.dropout_p = options.real("p_drop");
  problem.drop_seed = static_cast<std::uint64_t>(options.number("drop_seed"));
  problem.drop_offset = static_cast<std::uint64_t>(options.number("drop_offset"));
  options.flag("drop_prefs");

  const std::vector<std::int64_t> given_q = options.numbers("s");
  const std::vector<std::int64_t> given_k = options.numbers("s_k");
  args.batch = has_lengths && given_q.size() > 1 ? static_cast<std::int64_t>(given_q.size())
                                                 : options.number("b");
  if (args.batch < 0) options.refuse("b");
  for (const auto& [name, given] : {std::pair("s", &given_q), std::pair("s_k", &given_k)})
    if (given->size() != 1 &&
        !(has_lengths && given->size() == static_cast<std::size_t>(args.batch)))
      options.refuse(name);
  const bool as_q = given_k[0] < 0;
  std::vector<std::int64_t> rows_q = lengths_of(given_q, args.batch, has_lengths, random);
  std::vector<std::int64_t> rows_k =
      as_q ? rows_q : lengths_of(given_k, args.batch, has_lengths, random);
  // Groups: how many rows a sequence has room for.
  std::vector<std::int64_t> rooms_q = rows_q, rooms_k = rows_k;
  for (const auto& [name, rows] : {std::pair("q_eff_lens", &rows_q), {"kv_eff_lens", &rows_k}}) {
    if (!is_given(name)) continue;
    const std::vector<std::int64_t> given = options.numbers(name);
    if (has_lengths || cache.is_there() || given.size() != rows->size()) options.refuse(name);
    for (std::size_t i = 0; i < given.size(); ++i) {
      if (given[i] < 0 || given[i] > (*rows)[i]) options.refuse(name);
      (*rows)[i] = given[i];
    }
  }
  if (!rows_k.empty() && cache.new_keys > rows_k[0]) options.refuse("s_knew");
  if (cache.is_appended())
    for (std::size_t i = 1; i < rows_k.size(); ++i)
      rows_k[i] = std::uniform_int_distribution<std::int64_t>(cache.new_keys, rows_k[0])(random);
  for (const auto& [name, rooms] : {std::pair("s_qpad", &rooms_q), {"s_kpad", &rooms_k}}) {
    if (!has_lengths) continue;
    const std::vector<std::int64_t> given = options.numbers(name);
    for (std::size_t i = 0; i < rooms->size(); ++i)
      (*rooms)[i] = std::max((*rooms)[i], given[std::min(i, given.size() - 1)]);
  }
  problem.cu_seqlens_q = problem.cu_seqlens_k = problem.cu_rooms_q = problem.cu_rooms_k = {0};
  for (std::size_t i = 0; i < rows_q.size(); ++i) {
    const std::int64_t begin_q = is_group ? problem.cu_rooms_q.back() : 0;
    const std::int64_t begin_k = is_group ? problem.cu_rooms_k.back() : 0;
    problem.sequences.push_back({begin_q, begin_k, rows_q[i], rows_k[i]});
    problem.cu_seqlens_q.push_back(
        static_cast<std::int32_t>(problem.cu_seqlens_q.back() + rows_q[i]));
    problem.cu_seqlens_k.push_back(
        static_cast<std::int32_t>(problem.cu_seqlens_k.back() + rows_k[i]));
    problem.cu_rooms_q.push_back(static_cast<std::int32_t>(begin_q + rooms_q[i]));
    problem.cu_rooms_k.push_back(static_cast<std::int32_t>(begin_k + rooms_k[i]));
  }
  args.seqlen_q = is_group ? problem.cu_rooms_q.back() : given_q[0];
  args.seqlen_k = is_group ? problem.cu_rooms_k.back() : as_q ? given_q[0] : given_k[0];
  if (is_group && args.batch > 0) {
    args.max_seqlen_q = *std::max_element(rows_q.begin(), rows_q.end());
    args.max_seqlen_k = *std::max_element(rows_k.begin(), rows_k.end());
  }
  const bool by_head = problem.is_input_by_head;
  args.q_strides = problem.strides(by_head, args.heads_q, args.seqlen_q, args.hdim_q);
  args.k_strides = problem.strides(by_head, args.heads_k, args.seqlen_k, args.hdim_q);
  args.v_strides = options.choice("vlayout", {{"r"}, {"c"}})
                       ? column_strides(problem)
                       : problem.strides(by_head, args.heads_k, args.seqlen_k, args.hdim_v);
  return problem;
}

// ---- Tensors ------------------------------------------------------------------------------------

// The place of a row in memory.
inline std::size_t place(const jitfmha::Strides& strides, std::int64_t batch, std::int64_t head,
                         std::int64_t row) {
  return static_cast<std::size_t>(batch * strides.batch + head * strides.head + row * strides.seq);
}

// A tensor on the host, which is read by batch, head, row and column.
struct View {
  const std::vector<double>& values;
  jitfmha::Strides strides;
  std::int64_t column_stride;

  double operator()(std::int64_t batch, std::int64_t head, std::int64_t row,
                    std::int64_t column) const {
    return values[place(strides, batch, head, row) +
                  static_cast<std::size_t>(column * column_stride)];
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
  const std::size_t kind = options.choice(
      "init", {{"ui", "0"}, {"uf", "1"}, {"nf"}, {"tf", "2"}, {"ni"}, {"uf:q", "3"}});
  const double range = kind == 5 && has_8_bits(dtype) ? largest_of(dtype) : 1;
  std::uniform_int_distribution<int> integers(-3, 3);
  std::uniform_real_distribution<double> floats(-range, range);
  std::normal_distribution<double> normal;
  std::vector<Bits> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double value = kind == 0   ? integers(random)
                         : kind == 2 ? normal(random)
                         : kind == 3 ? std::sin(static_cast<double>(i))
                         : kind == 4 ? std::nearbyint(normal(random))
                                     : floats(random);
    values[i] = narrowed(value, dtype);
  }
  return values;
}

// How packed pages lie in memory: rows and columns that a page has of a head, 0 of other tensors.
struct PackedPages {
  std::int64_t rows = 0, columns = 0;
  bool are_of_values = false;

  // In pieces of 16 bytes: of columns of keys, or of rows of values.
  template <class T>
  std::vector<T> packed(const std::vector<T>& values, jitfmha::DataType dtype) const {
    if (rows == 0) return values;
    const std::int64_t piece = 16 / static_cast<std::int64_t>(bytes_of(dtype));
    const std::int64_t count = rows * columns;
    std::vector<T> found(values.size());
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(values.size()); ++i) {
      const std::int64_t row = i % count / columns, column = i % columns;
      const std::int64_t place = are_of_values
                                     ? (row / piece * columns + column) * piece + row % piece
                                     : (column / piece * rows + row) * piece + column % piece;
      found[static_cast<std::size_t>(i - i % count + place)] = values[static_cast<std::size_t>(i)];
    }
    return found;
  }
};

// A tensor of random values, on the host and on the device. Batches lie one behind the other.
struct Drawn {
  Drawn(const Options& options, jitfmha::DataType of, const jitfmha::Strides& strides,
        std::int64_t count, std::mt19937& random, std::int64_t column_stride = 1,
        const PackedPages& in_pages = {})
      : dtype(of),
        pages(in_pages),
        bits(drawn(options, dtype, count * strides.batch, random)),
        values(widened(bits, dtype)),
        view{values, strides, column_stride},
        memory(stored(pages.packed(bits, dtype), dtype)) {}
  void save_to(const Options& options, const char* name) const {
    save(options, name, stored(bits, dtype));
  }

  jitfmha::DataType dtype;
  PackedPages pages;
  std::vector<Bits> bits;
  std::vector<double> values;
  View view;
  hip::Memory memory;
};

// What both directions read.
struct Inputs {
  Inputs(const Options& options, const Problem& problem, const std::vector<Bits>& scores,
         std::mt19937& random)
      : q(options, problem.args.dtype, problem.args.q_strides, problem.packs(), random),
        k(options, problem.key_dtype, problem.args.k_strides, problem.packs_of_keys(), random, 1,
          pages_of(problem, problem.args.hdim_q, false)),
        v(options, problem.key_dtype, problem.args.v_strides, problem.packs_of_keys(), random,
          problem.args.v_column, pages_of(problem, problem.args.hdim_v, true)),
        cu_seqlens_q(problem.cu_seqlens_q),
        cu_seqlens_k(problem.cu_seqlens_k),
        cu_rooms_q(problem.cu_rooms_q),
        cu_rooms_k(problem.cu_rooms_k),
        pages(std::vector<std::int32_t>(problem.pages.begin(), problem.pages.end())),
        rng_state(std::vector<std::uint64_t>{problem.drop_seed, problem.drop_offset}),
        scores(stored(scores, problem.scores.dtype)),
        has_gaps_of_queries(problem.cu_rooms_q != problem.cu_seqlens_q),
        has_bias(problem.args.bias_query > 0),
        has_slopes(!problem.scores.slopes.empty()) {
    q.save_to(options, "q");
    k.save_to(options, "k");
    v.save_to(options, "v");
    save(options, "scores", this->scores.content<std::uint8_t>());
    save(options, "cu_seqlens_q", problem.cu_seqlens_q);
    save(options, "cu_seqlens_k", problem.cu_seqlens_k);
    save(options, "cu_seqlens_q_padded", problem.cu_rooms_q);
    save(options, "cu_seqlens_k_padded", problem.cu_rooms_k);
    save(options, "block_table", pages.content<std::int32_t>());
  }

  std::size_t bytes() const {
    return q.memory.bytes() + k.memory.bytes() + v.memory.bytes() + scores.bytes();
  }

  void put_into(jitfmha::MhaArgs& args, const hip::Memory& workspace) const {
    args.q = q.memory.get();
    args.k = k.memory.get();
    args.v = v.memory.get();
    args.cu_seqlens_q = cu_seqlens_q.get<std::int32_t>();
    args.cu_seqlens_k = cu_seqlens_k.get<std::int32_t>();
    args.cu_seqlens_k_padded = cu_rooms_k.get<std::int32_t>();
    if (has_gaps_of_queries) args.cu_seqlens_q_padded = cu_rooms_q.get<std::int32_t>();
    args.workspace = workspace.bytes() ? workspace.get() : nullptr;
    args.workspace_bytes = workspace.bytes();
    put_scores_into(args);
  }

  // What decides about the kernel, too.
  void put_scores_into(jitfmha::MhaArgs& args) const {
    args.rng_state = rng_state.get<std::int64_t>();
    if (has_bias) args.bias = scores.get();
    if (has_slopes) args.alibi_slopes = scores.get<float>();
  }

  Drawn q, k, v;
  hip::Memory cu_seqlens_q, cu_seqlens_k, cu_rooms_q, cu_rooms_k, pages, rng_state, scores;
  bool has_gaps_of_queries, has_bias, has_slopes;

 private:
  static PackedPages pages_of(const Problem& problem, std::int64_t columns, bool are_of_values) {
    if (!problem.has_packed_pages) return {};
    return {problem.page_size, columns, are_of_values};
  }
};

// The plan of a call with the rounding that is asked for, or where no kernel has it, with RTNE.
template <class Args, class Plan>
jitfmha::MhaPlan planned(Args& args, const Plan& plan_call) {
  jitfmha::MhaPlan plan;
  jitfmha::Status status = plan_call(args, &plan);
  if (status.code == jitfmha::StatusCode::unsupported) {
    args.bf16_cvt = jitfmha::Bf16Cvt::rtne;
    status = plan_call(args, &plan);
  }
  check(status);
  return plan;
}

// Whether the program is asked for no more than that.
inline bool says_whether_ready(const Options& options, const char* flag,
                               const jitfmha::MhaPlan& plan) {
  if (!options.flag(flag)) return false;
  const bool is_ready = std::string(plan.kernel).find("_compiled_") == std::string::npos;
  std::printf("a kernel that comes ready serves it: %s (%s)\n", is_ready ? "y" : "n", plan.kernel);
  return true;
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
  const double scale = problem.scale * problem.descale_of_query(n, head, key_head);
  Row row = {std::vector<double>(static_cast<std::size_t>(of.rows_k), -HUGE_VAL), -HUGE_VAL};
  double largest = problem.scores.sink;
  for (std::int64_t j = 0; j < of.rows_k; ++j) {
    if (!problem.sees(of, i, j)) continue;
    const auto [place_k, row_k] = problem.key_at(n, j);
    double score = 0;
    for (std::int64_t d = 0; d < problem.args.hdim_q; ++d)
      score += inputs.q.view(batch, head, of.begin_q + i, d) *
               inputs.k.view(place_k, key_head, row_k, d);
    score *= scale * problem.descale_of_key(problem.descales.k, n, j, key_head);
    if (const double cap = problem.scores.softcap) score = cap * std::tanh(score / cap);
    score += problem.added(n, head, i, j);
    row.probabilities[static_cast<std::size_t>(j)] = score;
    largest = std::max(largest, score);
  }
  double sum = std::isinf(problem.scores.sink) ? 0 : std::exp(problem.scores.sink - largest);
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

// Exact results, as they lie in memory; NaN where anything may be.
struct Forward {
  std::vector<double> out, lse;
};

inline Forward forward_of(const Problem& problem, const Inputs& inputs,
                          const jitfmha::Strides& strides) {
  const jitfmha::MhaArgs& args = problem.args;
  const auto rows = static_cast<std::size_t>(problem.packs() * args.heads_q * args.seqlen_q);
  Forward forward = {std::vector<double>(rows * static_cast<std::size_t>(args.hdim_v), NAN),
                     std::vector<double>(rows, NAN)};
  for_queries(problem, [&](auto n, auto batch, auto head, auto key_head, auto i) {
    const Sequence& of = problem.sequences[static_cast<std::size_t>(n)];
    const Row row = row_of(problem, inputs, n, head, i);
    const std::size_t to = place(strides, batch, head, of.begin_q + i);
    std::fill_n(&forward.out[to], args.hdim_v, 0);
    for (std::int64_t j = 0; j < of.rows_k; ++j) {
      const double p = row.probabilities[static_cast<std::size_t>(j)] *
                       problem.kept(n, head, i, j) *
                       problem.descale_of_key(problem.descales.v, n, j, key_head);
      if (p == 0) continue;
      const auto [place_v, row_v] = problem.key_at(n, j);
      for (std::int64_t d = 0; d < args.hdim_v; ++d)
        forward.out[to + static_cast<std::size_t>(d)] +=
            p * inputs.v.view(place_v, key_head, row_v, d);
    }
    forward.lse[static_cast<std::size_t>((batch * args.heads_q + head) * args.seqlen_q +
                                         of.begin_q + i)] = row.lse;
  });
  return forward;
}

// ---- Runs ---------------------------------------------------------------------------------------

// Seconds of a launch: by events of the GPU, or by the host's clock until all are done.
template <class Launch>
double seconds_of(const Options& options, const Launch& launch) {
  const bool by_host = options.choice("timer", {{"gpu"}, {"cpu"}}) == 1 && !hip::is_emulated();
  const std::int64_t repeat = options.number("repeat");
  // By the emulator's clock every launch takes as long.
  const std::int64_t warmup = hip::is_emulated() ? 0 : options.number("warmup");
  const std::int64_t count = hip::is_emulated() ? std::min<std::int64_t>(repeat, 1) : repeat;
  if (count == 0) return 0;
  for (std::int64_t i = 0; i < warmup; ++i) launch();
  hip::synchronize();
  hip::Event begin, end;
  const auto begin_here = std::chrono::steady_clock::now();
  begin.record();
  for (std::int64_t i = 0; i < count; ++i) launch();
  end.record();
  hip::synchronize();
  const std::chrono::duration<double> here = std::chrono::steady_clock::now() - begin_here;
  return (by_host ? here.count() : end.seconds_since(begin)) / static_cast<double>(count);
}

// Launches, and prints what is known before the results are.
template <class Launch>
void run_and_time(const Options& options, const Problem& problem, const jitfmha::MhaPlan& plan,
                  std::int64_t columns, std::size_t bytes, const Launch& launch) {
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
  if (seconds == 0) return;
  const std::string device = hip::device_name(static_cast<int>(options.number("device")));
  const double operations = 2 * problem.visible_pairs() * static_cast<double>(args.heads_q) *
                            static_cast<double>(columns);
  const double tflops = operations / seconds * 1e-12;
  const double gbytes = static_cast<double>(bytes) / seconds * 1e-9;
  const bool is_known = !std::isnan(seconds);
  if (is_known) std::printf(", %.4f ms, %.2f TFLOP/s, %.2f GB/s", seconds * 1e3, tflops, gbytes);
  if (hip::is_emulated())
    std::printf(is_known ? " by the cost model of %s"
                         : ", %s is emulated, with no time: python -m jitfmha run-program has that "
                           "of the cost model",
                device.c_str());
  if (!options.flag("json")) return;
  std::ofstream file(options.text("jsonfile"));
  file << "{\"problem\": \"" << text.str() << "\", \"device\": \"" << device
       << "\", \"emulated\": " << (hip::is_emulated() ? "true" : "false");
  if (is_known)
    file << ", \"seconds\": " << seconds << ", \"tflops\": " << tflops
         << ", \"gb_per_second\": " << gbytes;
  file << "}\n";
  if (!file.flush()) throw std::runtime_error("cannot write to " + options.text("jsonfile"));
}

// A tensor that launches write.
struct Result {
  const char* name;
  const hip::Memory& memory;
  jitfmha::DataType dtype;
  double allowed;  // how far it may be from the exact one, as a share of the largest exact value
  bool is_saved = true;
};

// Prints how far a result is from the exact one, and says whether that is allowed.
inline bool compare(const Result& result, const std::vector<double>& exact) {
  const std::vector<double> values = widened(values_of(result.memory, result.dtype), result.dtype);
  double largest = 1, worst = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    if (std::isnan(exact[i]) || (std::isinf(exact[i]) && values[i] == exact[i])) continue;
    largest = std::max(largest, std::fabs(exact[i]));
    const double error = std::fabs(values[i] - exact[i]);
    worst = std::isnan(error) ? HUGE_VAL : std::max(worst, error);
  }
  std::printf(" %s %.2e,", result.name, worst);
  return worst <= result.allowed * largest;
}

// Launches, times, saves, and compares with `exact()`, which has the exact values of each result.
// The launch reads so many bytes and writes the results.
template <class Launch, class Exact>
bool run_and_compare(const Options& options, const Problem& problem, const jitfmha::MhaPlan& plan,
                     std::int64_t columns, std::size_t bytes_read, const Launch& launch,
                     const std::vector<Result>& results, const Exact& exact) {
  std::size_t bytes = bytes_read;
  for (const Result& each : results) bytes += each.memory.bytes();
  run_and_time(options, problem, plan, columns, bytes, launch);
  for (const Result& each : results)
    if (each.is_saved) save(options, each.name, each.memory.content<std::uint8_t>());
  bool is_good = true;
  if (options.number("v")) {
    std::printf(", worst errors:");
    const std::vector<std::vector<double>> all = exact();
    for (std::size_t i = 0; i < results.size(); ++i)
      is_good = compare(results[i], all.at(i)) && is_good;
    std::printf(" valid: %s", is_good ? "y" : "n");
  }
  std::printf("\n");
  return is_good;
}

// 0: done, 1: wrong or failed, 2: a usage error.
template <class Run>
int main_with(int count, char** texts, std::vector<Option> more, const Run& run) {
  try {
    const Options options(count, texts, std::move(more));
    if (options.asks_for_help()) {
      std::cout << options.help();
      return 0;
    }
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
