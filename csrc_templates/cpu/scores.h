// What happens to a score between Q K^T and the softmax: scale, soft cap, bias, ALiBi and mask, in
// this order. All scores of forward and backward pass through here, so that a feature which changes
// scores stands in this file alone; it is compiled in by a trait, and costs a call without it
// nothing.
//
// Scores lie transposed: keys are the rows of a register block, and (query, head) rows its lanes.
//
// Functions of single numbers are the compiler's own: to read <cmath> takes it as long as to read a
// whole kernel.
#pragma once

#include <cfloat>
#include <cstring>
#include <type_traits>

#include "exponent.h"
#include "problem.h"

namespace {

// Whether scores become logits before the softmax, to which the softmax's scale does not apply any
// more. Otherwise they stay the plain dot products.
constexpr bool kHasLogits = kSoftcap || kAlibi || (kBias != Bias::none && kBias != Bias::boolean);
// A soft cap that nothing is added to becomes part of the scale: scores are what tanh gives.
constexpr bool kScalesBySoftcap =
    kSoftcap && !kAlibi && (kBias == Bias::none || kBias == Bias::boolean);
// Whether a score depends on more than its dot product and the ranges of its row.
constexpr bool kModifiesScores = kHasLogits || kBias != Bias::none;

// tanh x to the accuracy the dtype deserves, relatively: within 5e-7 for fp32, 1.3e-5 for fp16, and
// 7.5e-5 for bf16 and 8 bits. A rational function, minimax up to where tanh is 1.
inline Vec tanh(Vec x) {
  static constexpr float kNumerator[] = {1.0f, 0.133796722f, 0.00349398027f, 2.05825727e-05f,
                                         1.331781e-08f};
  static constexpr float kDenominator[] = {1.0f, 0.467129886f, 0.0258708689f, 0.000328300317f,
                                           7.76150216e-07f};
  static constexpr float kShortNumerator[] = {1.0f, 0.114983931f, 0.00152285665f};
  static constexpr float kShortDenominator[] = {1.0f, 0.448282987f, 0.0176645946f, 5.67476818e-05f};
  constexpr bool kShort = Dtype::kExpDegree < 5;

  const Vec clamped = simd::clamp(x, kShort ? 6.0f : 9.02f);
  const Vec square = simd::mul(clamped, clamped);
  const auto rational = [&](const auto& numerator, const auto& denominator) {
    const Vec above = simd::mul(clamped, polynomial(numerator, square));
    const Vec below = polynomial(denominator, square);
    return kFitsBf16<Dtype> ? simd::divide_roughly(above, below) : simd::divide(above, below);
  };
  return kShort ? rational(kShortNumerator, kShortDenominator) : rational(kNumerator, kDenominator);
}

// ---- A bias, element by element -----------------------------------------------------------------

using BiasElement = std::conditional_t<
    kBias == Bias::boolean, uint8_t,
    std::conditional_t<kBias == Bias::bf16 || kBias == Bias::fp16, uint16_t, float>>;
// So many elements of a row make a lane where they are staged for a panel.
constexpr int kStagedBias = kBias == Bias::bf16 ? 2 : 1;

template <class Element>
inline Vec load_bias(const Element* from) {
  if constexpr (kBias == Bias::boolean) return simd::load_bytes(from);
  else if constexpr (kBias == Bias::bf16) return simd::load_bf16(from);
  else if constexpr (kBias == Bias::fp16) return simd::load_fp16(from);
  else return simd::load(from);
}
static_assert(kBlockRows % kStagedBias == 0, "register blocks have whole lanes of it");
// Vectors that are staged for the keys of a tile; the last ones may reach beyond it.
template <int kTileKeys>
constexpr int kStagedBiasRows = kBias == Bias::none ? 1 : kTileKeys / kStagedBias + kLanes;
constexpr int kBiasPrefetch = 64;  // in keys

// Whether kCount keys from `key` on lie side by side in every row.
template <int kCount>
inline bool has_contiguous_bias(int64_t key_stride, int64_t key, int64_t seqlen_k) {
  return key_stride == 1 && key + kCount <= seqlen_k;
}

// Otherwise a row's bias is read from a copy, with 0 behind the last key.
template <int kCount>
inline void copy_bias(const BiasElement* row, int64_t key_stride, int64_t key, int64_t seqlen_k,
                      BiasElement (&copy)[kCount]) {
  for (int i = 0; i < kCount; ++i)
    copy[i] = key + i < seqlen_k ? element_at(row + (key + i) * key_stride) : BiasElement(0);
  // As in readable.
  __asm__("" : "+m"(copy));
}

// The bias of kLanes keys from `key` on, for the row that starts at `row`.
inline Vec bias_along_row(const BiasElement* row, int64_t key_stride, int64_t key,
                          int64_t seqlen_k) {
  if (has_contiguous_bias<kLanes>(key_stride, key, seqlen_k)) {
    // Rows lie far apart: the processor does not see by itself what comes next.
    __builtin_prefetch(row + key + kBiasPrefetch);
    return load_bias(row + key);
  }
  BiasElement copy[kLanes];
  copy_bias(row, key_stride, key, seqlen_k, copy);
  return load_bias(copy);
}

// What is staged of the keys from `key` on, for kLanes rows.
inline void load_staged_bias(const BiasElement* const* rows, int64_t key, Vec (&block)[kLanes]) {
  if constexpr (kStagedBias * sizeof(BiasElement) == sizeof(float)) {
    const void* from[kLanes];
    for (int i = 0; i < kLanes; ++i) from[i] = rows[i] + key;
    simd::load_transposed(from, block);
  } else {
    for (int i = 0; i < kLanes; ++i) block[i] = load_bias(rows[i] + key);
    simd::transpose(block);
  }
}

// The element of a key, in every lane of what was staged for it and its neighbours.
inline Vec element_of_staged_bias(Vec staged, int key) {
  if (kStagedBias == 1) return staged;
  return key % 2 == 0 ? simd::first_bf16(staged) : simd::second_bf16(staged);
}

// Asks for the bias of rows that come next, of some each time, and only as far as the L2 cache:
// rows are often a power of two apart, and compete for few sets of the L1 cache.
class BiasAhead {
 public:
  // Begins with `count` rows and their keys [begin, end), which are asked for in so many times.
  void start(const BiasElement* const* rows, int count, int64_t begin, int64_t end, int times) {
    rows_ = rows;
    last_row_ = rows + count;
    begin_ = begin;
    end_ = end;
    rows_each_time_ = (count + times - 1) / times;
  }

  __attribute__((always_inline)) void ask() {
    const BiasElement* const* const until = min(rows_ + rows_each_time_, last_row_);
    for (; rows_ < until; ++rows_)
      for (const BiasElement* at = *rows_ + begin_; at < *rows_ + end_; at += kLineElements)
        __builtin_prefetch(at, 0, 2);
  }

 private:
  static constexpr int kLineElements = 64 / sizeof(BiasElement);
  const BiasElement* const* rows_ = nullptr;
  const BiasElement* const* last_row_ = nullptr;
  int64_t begin_ = 0, end_ = 0;
  int rows_each_time_ = 0;
};

// ---- Scales of 8-bit inputs ---------------------------------------------------------------------

// What the elements of a head are multiplied with.
inline float descale_of(const Descale& descale, int64_t batch, int64_t query_head) {
  if (!descale.values) return 1.0f;
  const int64_t head = query_head / descale.group;
  return element_at(descale.values + batch * descale.batch + head * descale.head);
}

// Where the tokens of one head have scales of their own: those of `count` keys from `from` on,
// followed by zeros up to `most` of them.
inline void gather_token_descales(const RowsOfKeys<float>& scales, int64_t from, int count,
                                  int most, float* to) {
  for (int j = 0; j < count; ++j) to[j] = element_at(scales[from + j]);
  fill(to + count, most - count, 0.0f);
}

// ---- Rows ---------------------------------------------------------------------------------------

// Up to kCount rows of a query tile, as far as their scores and their dropout depend on them.
template <int kCount>
struct ModifiedRows {
  float descale[kCount];            // of q
  float p_scale[kCount];            // by which probabilities become int8
  float slope[kCount];              // ALiBi's, negative
  float diagonal[kCount];           // the key with which ALiBi's distance is 0
  const BiasElement* bias[kCount];  // of key 0
  float* dbias[kCount];             // the gradient of it, in backward where it is wanted
  uint32_t query[kCount];
  uint32_t head[kCount];  // counting on from one member of the batch to the next
};

// The rows from one of ModifiedRows on.
struct ModifiedRowsFrom {
  const float* descale;
  const float* p_scale;
  const float* slope;
  const float* diagonal;
  const BiasElement* const* bias;
  const uint32_t* query;
  const uint32_t* head;

  template <int kCount>
  ModifiedRowsFrom(const ModifiedRows<kCount>& rows, int at)
      : descale(rows.descale + at),
        p_scale(rows.p_scale + at),
        slope(rows.slope + at),
        diagonal(rows.diagonal + at),
        bias(rows.bias + at),
        query(rows.query + at),
        head(rows.head + at) {}
};

// What makes probabilities of the scores of kCount rows in backward:
// 2^((score - shift) * scale_log2 + rest).
template <int kCount>
struct Normalisations {
  float shift[kCount];
  float rest[kCount];

  // `lse` is less the shift, in units of e.
  void set(int row, float row_shift, double lse) {
    shift[row] = row_shift;
    rest[row] = float(lse * -1.4426950408889634);
  }
};

// A panel's rows beside the keys of one tile.
template <int kVectors>
struct ScoreRows {
  static constexpr int kRows = kVectors * kLanes;

  ModifiedRowsFrom rows;
  int64_t first_key;  // of the tile
  const float* bias;  // [key / kStagedBias][lane]

  // Which keys the rows see, in ascending order of the rows; relative to the key tile.
  float begin[kRows], last[kRows];

  const float* k_descales = nullptr;  // of the tile's tokens, where they have their own

  // range_of(i) are the keys that row i sees.
  template <class RangeOf>
  void set_ranges(const RangeOf& range_of) {
    for (int i = 0; i < kRows; ++i) {
      const KeyRange range = range_of(i);
      begin[i] = float(range.begin);
      last[i] = float(range.end - 1);
    }
  }
};

// Makes exponents of probabilities from dot products.
struct Scores {
  float unit;        // what a score is multiplied with to be an exponent of e
  float scale_log2;  // the same for 2
  float softmax_scale;
  float softcap;
  float scale_over_softcap;
  int64_t sink_size;  // the first keys that a window's left side does not hide
  Modifiers modifiers;
  Strides bias_strides;

  Scores(const FmhaShape& shape, const Modifiers& given)
      : Scores(shape.softmax_scale, shape, given) {}

  // The scores of 8-bit inputs, for the query heads of one key head.
  static Scores of_head(const FmhaShape& shape, const Modifiers& given, int64_t batch,
                        int64_t query_head) {
    float descale = descale_of(given.k_descale, batch, query_head);
    if (!kQueryHeadDescales) descale *= descale_of(given.q_descale, batch, query_head);
    // Inputs that are all 0 may have a scale of 0. Hidden scores are infinite, and times 0 they
    // would be NaN.
    return Scores(max(finite(shape.softmax_scale * descale), FLT_MIN), shape, given);
  }

  Scores(float softmax_scale, const FmhaShape& shape, const Modifiers& given)
      : unit(kScalesBySoftcap ? shape.logit_softcap
             : kHasLogits     ? 1.0f
                              : softmax_scale),
        // Finite, as the scale itself: infinity times the largest score's distance, 0, would be
        // NaN.
        scale_log2(finite(unit * 1.44269504f)),
        softmax_scale(softmax_scale),
        softcap(shape.logit_softcap),
        scale_over_softcap(kSoftcap ? finite(softmax_scale / softcap) : 0.0f),
        sink_size(kSinkTokens ? shape.sink_size : 0),
        modifiers(given),
        bias_strides{given.bias_batch, given.bias_query, given.bias_head, given.bias_key} {}

  static float finite(float a) { return min(a, FLT_MAX); }

  // Rows [0, count) of a query tile become those from `at` on, as far as there is room.
  template <int kCount>
  void set_rows(const QueryRows& tile, int count, ModifiedRows<kCount>& rows, int at = 0) const {
    const Sequence& seq = tile.seq;
    for (int n = 0; n < min(count, kCount - at); ++n) {
      const int i = at + n;
      const int64_t query = tile.query(n), head = tile.head(n);
      rows.query[i] = uint32_t(query);
      rows.head[i] = uint32_t(seq.index * tile.problem.shape.heads_q + head);
      if (kQueryHeadDescales) rows.descale[i] = descale_of(modifiers.q_descale, seq.index, head);
      if (kInt8Probabilities)
        rows.p_scale[i] = 1.0f / descale_of(modifiers.p_descale, seq.index, head);
      if (kAlibi) {
        rows.slope[i] = -element_at(modifiers.alibi_slopes + seq.index * modifiers.alibi_batch +
                                    head * modifiers.alibi_head);
        rows.diagonal[i] = float(query + seq.seqlen_k - seq.seqlen_q);
      }
      if (kBias != Bias::none) {
        const auto* bias = static_cast<const BiasElement*>(modifiers.bias);
        rows.bias[i] = tile.at(seq.queries_of(bias, bias_strides), bias_strides, n);
        if (modifiers.dbias)
          rows.dbias[i] = tile.at(seq.queries_of(modifiers.dbias, modifiers.dbias_strides),
                                  modifiers.dbias_strides, n);
      }
    }
  }

  // The bias of the keys [begin, end) of the tile, for a panel's rows: to[key / kStagedBias][lane].
  // `begin` is a multiple of kStagedBias.
  template <int kVectors>
  void stage_bias(const ScoreRows<kVectors>& rows, int begin, int end, int64_t seqlen_k,
                  float* to) const {
    constexpr int kKeys = kStagedBias * kLanes;
    const int64_t key_stride = bias_strides.hdim;
    to += begin / kStagedBias * kVectors * kLanes;
    for (int key = begin; key < end; key += kKeys, to += kLanes * kVectors * kLanes) {
      const int64_t first = rows.first_key + key;
      const bool is_contiguous = has_contiguous_bias<kKeys>(key_stride, first, seqlen_k);
      for (int v = 0; v < kVectors; ++v) {
        const BiasElement* const* const bias = rows.rows.bias + v * kLanes;
        Vec block[kLanes];
        if (is_contiguous) {
          load_staged_bias(bias, first, block);
        } else {
          BiasElement copies[kLanes][kKeys];
          const BiasElement* copied[kLanes];
          for (int i = 0; i < kLanes; ++i) {
            copy_bias(bias[i], key_stride, first, seqlen_k, copies[i]);
            copied[i] = copies[i];
          }
          load_staged_bias(copied, 0, block);
        }
        for (int i = 0; i < kLanes; ++i) simd::store(to + (i * kVectors + v) * kLanes, block[i]);
      }
    }
  }

  // A score from its dot product. `bias`, ALiBi's `slope` and its `distance` are read where there
  // are such things.
  inline Vec modified(Vec dot, Vec bias, Vec slope, Vec distance) const {
    Vec score = dot;
    if (kHasLogits) {
      if (kSoftcap) score = tanh(simd::mul(dot, simd::broadcast(scale_over_softcap)));
      else score = simd::mul(dot, simd::broadcast(softmax_scale));
      if (kSoftcap && !kScalesBySoftcap) score = simd::mul(score, simd::broadcast(softcap));
      if (kBias != Bias::none && kBias != Bias::boolean) score = simd::add(score, bias);
      if (kAlibi) score = simd::mul_add(slope, simd::abs(distance), score);
    }
    // Last: a soft cap would make a finite score of -inf.
    if (kBias == Bias::boolean)
      score = simd::select_between(simd::broadcast(1.0f), bias, simd::broadcast(255.0f), score,
                                   simd::broadcast(-kInfinity));
    return score;
  }

  // Dot products of kBlockRows keys from `key` on become scores. Those of hidden keys become -inf;
  // kMasked says that there may be some, and the ranges of `rows` are read only then.
  template <bool kMasked, int kVectors>
  inline void from_dots(const ScoreRows<kVectors>& rows, int key,
                        Vec (&block)[kBlockRows][kVectors]) const {
    const float sinks = kSinkTokens ? float(sink_size - rows.first_key) : 0.0f;
#pragma GCC unroll 16
    for (int r = 0; r < kBlockRows; ++r)
      for (int v = 0; v < kVectors; ++v) {
        Vec& score = block[r][v];
        if (kQueryHeadDescales)
          score = simd::mul(score, simd::load(rows.rows.descale + v * kLanes));
        if (kTokenKDescales) score = simd::mul(score, simd::broadcast(rows.k_descales[key + r]));
        if (kModifiesScores) {
          const Vec none = simd::broadcast(0.0f);
          const int staged = key / kStagedBias + r / kStagedBias;
          const Vec bias = kBias == Bias::none
                               ? none
                               : element_of_staged_bias(
                                     simd::load(rows.bias + (staged * kVectors + v) * kLanes), r);
          const Vec slope = kAlibi ? simd::load(rows.rows.slope + v * kLanes) : none;
          const Vec distance = kAlibi ? simd::sub(simd::load(rows.rows.diagonal + v * kLanes),
                                                  simd::broadcast(float(rows.first_key + key + r)))
                                      : none;
          score = modified(score, bias, slope, distance);
        }
        if (kMasked) {
          const bool is_sink = kSinkTokens && float(key + r) < sinks;
          const Vec begin =
              is_sink ? simd::broadcast(-kInfinity) : simd::load(rows.begin + v * kLanes);
          score = simd::select_between(begin, simd::broadcast(float(key + r)),
                                       simd::load(rows.last + v * kLanes), score,
                                       simd::broadcast(-kInfinity));
        }
      }
  }

  // The key tiles that rows see whose first window begins with key `begin`: first those with sink
  // tokens, then those from the window's on.
  template <int kTileKeys>
  int64_t first_tile(int64_t begin) const {
    return kSinkTokens ? 0 : begin / kTileKeys * kTileKeys;
  }
  template <int kTileKeys>
  int64_t tile_after(int64_t tile, int64_t begin) const {
    const int64_t next = tile + kTileKeys;
    if (!kSinkTokens || next < sink_size) return next;
    return max(next, begin / kTileKeys * kTileKeys);
  }

  // The sink of a head, as an exponent of e.
  float sink_of(int64_t head) const {
    return element_at(modifiers.sink + head * modifiers.sink_head);
  }

  // Does what from_dots does, for a single row and kLanes keys from `key` on, which counts from the
  // sequence's first. `k_descales` are those of these keys.
  inline Vec along_row(const ModifiedRowsFrom& rows, int64_t key, int64_t seqlen_k,
                       const float* k_descales, Vec dots) const {
    if (kQueryHeadDescales) dots = simd::mul(dots, simd::broadcast(rows.descale[0]));
    if (kTokenKDescales) dots = simd::mul(dots, simd::load(k_descales));
    if (!kModifiesScores) return dots;
    const Vec none = simd::broadcast(0.0f);
    Vec bias = none, slope = none, distance = none;
    if (kBias != Bias::none) bias = bias_along_row(rows.bias[0], bias_strides.hdim, key, seqlen_k);
    if (kAlibi) {
      float distances[kLanes];
      for (int i = 0; i < kLanes; ++i) distances[i] = rows.diagonal[0] - float(key + i);
      distance = simd::load(distances);
      slope = simd::broadcast(rows.slope[0]);
    }
    return modified(dots, bias, slope, distance);
  }

  // e^(unit * (score - shift)).
  //
  // Scores are scaled after the subtraction. Then the largest one becomes exactly 0 and its
  // probability exactly 1, whereas a scaled maximum is rounded, by more than 2^127 has room for
  // where scores are large.
  template <int kDegree = Dtype::kExpDegree>
  inline Vec probability(Vec score, Vec shift) const {
    Vec exponent = simd::mul(simd::sub(score, shift), simd::broadcast(scale_log2));
    // Many modified scores are far below the largest one. Products of their probabilities would be
    // subnormal numbers, which are slow, and do not count in any sum.
    constexpr float kLeastExponent = -100.0f;
    if (kModifiesScores && simd::kLeastExponent < kLeastExponent)
      exponent = simd::select_between(simd::broadcast(-kInfinity), exponent,
                                      simd::broadcast(kLeastExponent), simd::broadcast(-kInfinity),
                                      exponent);
    return exp2<kDegree>(exponent);
  }

  // What makes exponents of scores, scale_log2 * (score - subtracted) + added: one operation where
  // nothing is subtracted. Shifts up to a size are scaled before, which adds 2^-17 to an exponent
  // at most: all of a row's probabilities then are wrong by 5e-6 beside those by another shift.
  struct Exponents {
    Vec subtracted, added;
  };
  Vec where_small(Vec shift, Vec a, Vec b) const {
    constexpr float kSmall = 256.0f;
    return simd::select_between(simd::broadcast(-kSmall),
                                simd::mul(shift, simd::broadcast(scale_log2)),
                                simd::broadcast(kSmall), a, b);
  }
  Exponents exponents_by(Vec shift) const {
    const Vec zero = simd::broadcast(0.0f);
    const Vec scaled = simd::mul(shift, simd::broadcast(-scale_log2));
    return {where_small(shift, zero, shift), where_small(shift, scaled, zero)};
  }

  // A probability relative to its row's largest one, as an integer for int8: rounded towards zero.
  static Vec as_int8(Vec probability, Vec p_scale) {
    const Vec scaled = simd::clamp(simd::mul(probability, p_scale), 127.0f);
    const Vec nearest = simd::round_exponent(scaled);
    const Vec below = simd::sub(nearest, simd::broadcast(1.0f));
    return simd::select_between(simd::broadcast(0.0f), nearest, scaled, nearest, below);
  }

  // What to subtract from the scores of rows with these maxima. A row that has not seen a key is
  // shifted by 0: -inf - -inf would be NaN.
  static inline Vec shift_of_max(Vec max) {
    return simd::select_between(simd::broadcast(-FLT_MAX), max, simd::broadcast(kInfinity), max,
                                simd::broadcast(0.0f));
  }

  // The logarithm of what `sum` is of, relative to the largest score. In double, as the terms may
  // cancel.
  double lse_of(float max, float sum) const {
    return double(max) * unit + __builtin_log(double(sum));
  }

  // e^(unit * score - lse), by the Normalisations of its row.
  inline Vec probability_by_lse(Vec score, Vec shift, Vec rest) const {
    return exp2(simd::mul_add(simd::sub(score, shift), simd::broadcast(scale_log2), rest));
  }

  // Whether rounding to float32 has left too little of an lse: by half a unit in its last place,
  // probabilities were wrong in proportion.
  static bool is_large(float lse) {
    constexpr float kLargest = Dtype::kExpDegree == 5 ? 16.0f : 1024.0f;
    return __builtin_isfinite(lse) && __builtin_fabsf(lse) > kLargest;
  }

  // Normalises a row by its lse alone.
  template <int kCount>
  void set_lse(Normalisations<kCount>& to, int row, float lse) const {
    // A row that sees no key has an lse of -inf, and scores of -inf, which have to stay that.
    if (lse == -kInfinity) return to.set(row, 0.0f, 0.0);
    const float exact_shift = float(double(lse) / unit);
    const float shift = __builtin_isfinite(exact_shift) ? exact_shift : 0.0f;
    to.set(row, shift, lse - double(shift) * unit);
  }

  // Normalises a row whose keys here have this largest score and this sum. Where there are other
  // keys or a sink, the lse is larger than that of these keys. Where rounding explains the
  // difference, it is theirs.
  template <int kCount>
  void set_lse(Normalisations<kCount>& to, int row, float lse, float max, float sum) const {
    if (sum == 0) return;
    // All are relative to the largest score, beside which their differences may be nothing.
    const double of_keys = __builtin_log(double(sum)), of_all = lse - double(max) * unit;
    const bool are_all = of_all - of_keys <= double(FLT_EPSILON) * __builtin_fabs(lse);
    to.set(row, max, are_all ? of_keys : of_all);
  }

  // The gradient of a dot product, from that of the exponent of e, and from slope_of_dot.
  inline Vec gradient_of_dot(Vec gradient, Vec slope) const { return simd::mul(gradient, slope); }

  // By how much an exponent of e rises with its dot product.
  inline Vec slope_of_dot(Vec dot) const {
    const Vec scale = simd::broadcast(softmax_scale);
    if (!kSoftcap) return scale;
    const Vec capped = tanh(simd::mul(dot, simd::broadcast(scale_over_softcap)));
    const Vec rest =
        simd::mul_add(simd::sub(simd::broadcast(0.0f), capped), capped, simd::broadcast(1.0f));
    return simd::mul(rest, scale);
  }
};

}  // namespace
