// Keys and values that are appended to caches, and the rotation of keys and queries: random ones,
// the call of the library, and what it leaves as the CPU computes it.
#pragma once

#include "bench_mha.h"

namespace bench {

// Cosines or sines, on the host and on the device.
struct Table {
  template <class Function>
  Table(const std::vector<double>& angles, jitfmha::DataType dtype, const Function& function)
      : bits(rounded(angles, dtype, function)),
        values(widened(bits, dtype)),
        memory(stored(bits, dtype)) {}

  std::vector<Bits> bits;
  std::vector<double> values;
  hip::Memory memory;

 private:
  template <class Function>
  static std::vector<Bits> rounded(const std::vector<double>& angles, jitfmha::DataType dtype,
                                   const Function& function) {
    std::vector<Bits> bits;
    for (const double angle : angles) bits.push_back(narrowed(function(angle), dtype));
    return bits;
  }
};

class AppendedKeys {
 public:
  AppendedKeys(const Options& options, const Problem& problem, const Inputs& inputs,
               std::mt19937& random)
      : cache_(problem.cache),
        knew_(options, problem.args.dtype, strides(problem, problem.args.hdim_q),
              problem.args.batch, random),
        vnew_(options, problem.args.dtype, strides(problem, problem.args.hdim_v),
              problem.args.batch, random),
        most_pages_(most_pages(problem)),
        table_(table_of(problem)),
        lengths_(lengths_before(problem)),
        device_lengths_(lengths_),
        q_(inputs.q.memory.bytes()),
        angles_(drawn_angles(problem, random)),
        cos_(angles_, problem.args.dtype, [](double x) { return std::cos(x); }),
        sin_(angles_, problem.args.dtype, [](double x) { return std::sin(x); }) {
    knew_.save_to(options, "knew");
    vnew_.save_to(options, "vnew");
    save(options, "rotary_cos", cos_.memory.content<std::uint8_t>());
    save(options, "rotary_sin", sin_.memory.content<std::uint8_t>());
    save(options, "cache_seqlens", lengths_);
  }

  // Queries as attention reads them.
  const hip::Memory& queries(const Inputs& inputs) const {
    return rotates() ? q_ : inputs.q.memory;
  }

  void launch(const Problem& problem, const Inputs& inputs) const {
    const jitfmha::MhaArgs& of = problem.args;
    jitfmha::MhaFwdAppendkvTraits traits;
    jitfmha::MhaFwdAppendkvArgs args;
    traits.hdim_q = args.hdim_q = of.hdim_q;
    traits.hdim_v = args.hdim_v = of.hdim_v;
    traits.data_type = of.dtype;
    traits.is_v_rowmajor = of.v_column == 1;
    if (rotates())
      traits.rope_type =
          cache_.is_interleaved ? jitfmha::Rope::interleaved : jitfmha::Rope::half_rotated;
    args.q_ptr = inputs.q.memory.get();
    args.q_out_ptr = q_.get();
    args.k_ptr = inputs.k.memory.get();
    args.v_ptr = inputs.v.memory.get();
    args.knew_ptr = knew_.memory.get();
    args.vnew_ptr = vnew_.memory.get();
    args.seqlen_k_ptr = device_lengths_.get<std::int32_t>();
    args.seqlen_q = of.max_seqlen_q;
    args.seqlen_knew = cache_.new_keys;
    args.batch = of.batch;
    args.nhead_q = of.heads_q;
    args.nhead_k = of.heads_k;
    args.rotary_cos_ptr = cos_.memory.get();
    args.rotary_sin_ptr = sin_.memory.get();
    args.rotary_dim = cache_.rotary_dim;
    args.has_mask = has_mask(problem);
    if (cache_.has_index) {
      args.cache_batch_idx = inputs.pages.get<std::int32_t>();
    } else if (problem.page_size) {
      args.block_table_ptr = table_.get<std::int32_t>();
      args.batch_stride_block_table = most_pages_;
      args.has_packed_pages = problem.has_packed_pages;
      args.page_block_size = problem.page_size;
    }
    const std::int64_t room = problem.cu_rooms_k[1];
    const auto between = [&](const jitfmha::Strides& cache) {
      return problem.page_size ? cache.batch : room * cache.seq;
    };
    args.stride_q = of.q_strides.seq, args.nhead_stride_q = of.q_strides.head;
    args.batch_stride_q = of.max_seqlen_q * of.q_strides.seq;
    args.stride_k = of.k_strides.seq, args.nhead_stride_k = of.k_strides.head;
    args.batch_stride_k = between(of.k_strides);
    args.stride_v = of.v_strides.seq, args.nhead_stride_v = of.v_strides.head;
    args.batch_stride_v = between(of.v_strides);
    args.stride_knew = knew_.view.strides.seq, args.nhead_stride_knew = knew_.view.strides.head;
    args.batch_stride_knew = knew_.view.strides.batch;
    args.stride_vnew = vnew_.view.strides.seq, args.nhead_stride_vnew = vnew_.view.strides.head;
    args.batch_stride_vnew = vnew_.view.strides.batch;
    check(jitfmha::mha_fwd_appendkv(traits, args, nullptr));
  }

  // Does on the host what a launch does.
  void apply(const Problem& problem, Inputs& inputs) const {
    const jitfmha::MhaArgs& args = problem.args;
    for (std::int64_t n = 0; n < args.batch; ++n) {
      const std::int64_t length = lengths_[static_cast<std::size_t>(n)];
      for (std::int64_t j = 0; j < cache_.new_keys; ++j) {
        const auto [batch, row] = problem.key_at(n, length + j);
        for (std::int64_t head = 0; head < args.heads_k; ++head) {
          const std::size_t to_k = place(args.k_strides, batch, head, row);
          const std::size_t to_v = place(args.v_strides, batch, head, row);
          for (std::int64_t d = 0; d < args.hdim_q; ++d)
            inputs.k.values[to_k + static_cast<std::size_t>(d)] = knew_.view(n, head, j, d);
          for (std::int64_t d = 0; d < args.hdim_v; ++d)
            inputs.v.values[to_v + static_cast<std::size_t>(d)] = vnew_.view(n, head, j, d);
          rotate(inputs.k, to_k, length + j);
        }
      }
      const Sequence& of = problem.sequences[static_cast<std::size_t>(n)];
      for (std::int64_t i = 0; i < of.rows_q; ++i)
        for (std::int64_t head = 0; head < args.heads_q; ++head)
          rotate(inputs.q, place(args.q_strides, 0, head, of.begin_q + i),
                 length + (has_mask(problem) ? i : 0));
    }
  }

  // The tensors that launches write.
  void add_results(const Inputs& inputs, std::vector<Result>& results) const {
    const jitfmha::DataType dtype = inputs.q.dtype;
    // Two units of the last place, as float32 may be rounded to another neighbour.
    const double allowed = has_8_bits(dtype) ? 0 : std::ldexp(2, -format_of(dtype).mantissa_bits);
    if (rotates()) results.push_back({"q_rotated", q_, dtype, allowed});
    results.push_back({"k_appended", inputs.k.memory, dtype, allowed});
    results.push_back({"v_appended", inputs.v.memory, dtype, 0});
  }
  // What they hold, behind apply().
  void add_exact(const Inputs& inputs, std::vector<std::vector<double>>& exact) const {
    if (rotates()) exact.push_back(inputs.q.values);
    for (const Drawn* const each : {&inputs.k, &inputs.v})
      exact.push_back(each->pages.packed(each->values, each->dtype));
  }

 private:
  static jitfmha::Strides strides(const Problem& problem, std::int64_t hdim) {
    return problem.strides(problem.is_input_by_head, problem.args.heads_k, problem.cache.new_keys,
                           hdim);
  }
  static std::int64_t most_pages(const Problem& problem) {
    const std::int64_t size = std::max<std::int64_t>(problem.page_size, 1);
    return std::max<std::int64_t>((problem.args.max_seqlen_k + size - 1) / size, 1);
  }
  // The pages of each sequence, which attention may read as lists.
  static std::vector<std::int32_t> table_of(const Problem& problem) {
    std::vector<std::int32_t> table;
    for (const std::int64_t first : problem.first_pages)
      for (std::int64_t i = first; i < first + most_pages(problem); ++i)
        table.push_back(static_cast<std::int32_t>(problem.pages[static_cast<std::size_t>(
            std::min(i, static_cast<std::int64_t>(problem.pages.size()) - 1))]));
    return table;
  }
  static std::vector<double> drawn_angles(const Problem& problem, std::mt19937& random) {
    std::uniform_real_distribution<double> angle(0, 6.283185307179586);
    const std::int64_t positions = problem.args.max_seqlen_k + problem.args.max_seqlen_q;
    std::vector<double> angles;
    for (std::int64_t i = 0; i < positions * (problem.cache.rotary_dim / 2); ++i)
      angles.push_back(angle(random));
    return angles;
  }
  static std::vector<std::int32_t> lengths_before(const Problem& problem) {
    std::vector<std::int32_t> lengths;
    for (const Sequence& each : problem.sequences)
      lengths.push_back(static_cast<std::int32_t>(each.rows_k - problem.cache.new_keys));
    return lengths;
  }
  static bool has_mask(const Problem& problem) { return problem.args.mask != jitfmha::Mask::none; }
  bool rotates() const { return cache_.rotary_dim > 0; }

  void rotate(Drawn& tensor, std::size_t at, std::int64_t position) const {
    const auto half = static_cast<std::size_t>(cache_.rotary_dim / 2);
    const auto rounded = [&](double x) { return widened(narrowed(x, tensor.dtype), tensor.dtype); };
    for (std::size_t i = 0; i < half; ++i) {
      const std::size_t angle = static_cast<std::size_t>(position) * half + i;
      double& a = tensor.values[at + (cache_.is_interleaved ? 2 * i : i)];
      double& b = tensor.values[at + (cache_.is_interleaved ? 2 * i + 1 : i + half)];
      const double x = a, y = b;
      a = rounded(x * cos_.values[angle] - y * sin_.values[angle]);
      b = rounded(x * sin_.values[angle] + y * cos_.values[angle]);
    }
  }

  KeyCache cache_;
  Drawn knew_, vnew_;
  std::int64_t most_pages_;
  hip::Memory table_;
  std::vector<std::int32_t> lengths_;  // of what the caches hold before
  hip::Memory device_lengths_, q_;
  std::vector<double> angles_;  // of all positions
  Table cos_, sin_;
};

}  // namespace bench
