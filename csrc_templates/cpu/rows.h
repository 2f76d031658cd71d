// Rows of any number of columns: whole vectors and the rest of one, sums over a row, and stores
// that go past the caches.
#pragma once

#include <cfloat>
#include <cstring>
#include <type_traits>

#include "exponent.h"
#include "threads.h"

// Vectors may have come with declarations of these.
#if defined(__SSE2__) && !defined(JITFMHA_INTRINSIC)
#include <emmintrin.h>
#endif

namespace {

using Weight = KeyDtype;

// How many lanes of a vector belong to a row: all of them, or fewer of the last one.
using AllLanes = std::integral_constant<int, kLanes>;

#if defined(__AVX512BW__) && defined(__AVX512VL__)
inline __mmask16 first_lanes(int count) { return __mmask16((1u << count) - 1); }
#endif

// 0 in lanes that do not belong to the row.
template <class D>
inline Vec load_row(const typename D::Element* from, AllLanes) {
  return D::load(from);
}
template <class D>
inline Vec load_row(const typename D::Element* from, int lanes) {
  alignas(64) typename D::Element rest[kLanes] = {};
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (sizeof(rest[0]) == 4) return _mm512_maskz_loadu_ps(first_lanes(lanes), from);
  _mm256_store_si256(reinterpret_cast<__m256i*>(rest),
                     _mm256_maskz_loadu_epi16(first_lanes(lanes), from));
#else
  std::memcpy(rest, from, size_t(lanes) * sizeof(rest[0]));
#endif
  return D::load(rest);
}
template <class D>
inline void store_row(typename D::Element* to, Vec a, AllLanes) {
  D::store(to, a);
}
template <class D>
inline void store_row(typename D::Element* to, Vec a, int lanes) {
  alignas(64) typename D::Element all[kLanes];
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (sizeof(all[0]) == 4) return _mm512_mask_storeu_ps(to, first_lanes(lanes), a);
  D::store(all, a);
  _mm256_mask_storeu_epi16(to, first_lanes(lanes),
                           _mm256_load_si256(reinterpret_cast<const __m256i*>(all)));
#else
  D::store(all, a);
  std::memcpy(to, all, size_t(lanes) * sizeof(all[0]));
#endif
}

// `a` in lanes of the row, and `rest` in the others.
inline Vec where_in_row(Vec a, AllLanes, float) { return a; }
inline Vec where_in_row(Vec a, int lanes, float rest) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return _mm512_mask_blend_ps(first_lanes(lanes), simd::broadcast(rest), a);
#else
  static constexpr float kNumbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return simd::select_between(simd::broadcast(0.0f), simd::load(kNumbers),
                              simd::broadcast(float(lanes - 1)), a, simd::broadcast(rest));
#endif
}

// Calls visit(column, lanes) for the vectors of the columns from `begin` to `end`.
template <class Visit>
inline void for_vectors(int64_t begin, int64_t end, const Visit& visit) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) visit(i, AllLanes{});
  if (i < end) visit(i, int(end - i));
}

template <class T, int kCount>
struct Several {
  T of[kCount];
  T& operator[](int i) { return of[i]; }
  const T& operator[](int i) const { return of[i]; }
};
// A vector of each of kTerms sums. As an argument of Several its type would lose its attributes.
template <int kTerms>
struct Vectors {
  Vec of[kTerms];
  Vec& operator[](int i) { return of[i]; }
  const Vec& operator[](int i) const { return of[i]; }
};

// What join(joined, term) makes of `nothing` and all that term(column, lanes) gives over a row, in
// as many lanes as there are; in lanes that do not belong to the row a term is `nothing`. Parts are
// joined on their own, so that no number of a sum is rounded more than some 200 times.
template <int kTerms, class Term, class Join>
inline Vectors<kTerms> joined_row(int64_t columns, float nothing, const Term& term,
                                  const Join& join) {
  // As many vectors at a time as the latency of an addition has room for, and registers.
  constexpr int kAtOnce = kTerms > 2 ? 2 : 4;
  constexpr int64_t kStep = kAtOnce * kLanes, kPart = 64 * kStep;
  const auto add = [&](Vectors<kTerms>& to, const Vectors<kTerms>& terms) {
    for (int t = 0; t < kTerms; ++t) to[t] = join(to[t], terms[t]);
  };
  Vectors<kTerms> total, part[kAtOnce];
  fill(total.of, kTerms, simd::broadcast(nothing));
  int64_t i = 0;
  while (i + kStep <= columns) {
    for (auto& each : part) fill(each.of, kTerms, simd::broadcast(nothing));
    for (const int64_t end = min(i + kPart, columns); i + kStep <= end; i += kStep)
      for (int j = 0; j < kAtOnce; ++j) add(part[j], term(i + j * kLanes, AllLanes{}));
    for (int j = 2; j < kAtOnce; ++j) add(part[j - 2], part[j]);
    add(part[0], part[1]);
    add(total, part[0]);
  }
  for_vectors(i, columns, [&](int64_t at, auto lanes) { add(total, term(at, lanes)); });
  return total;
}
template <int kTerms, class Term>
inline Vectors<kTerms> sums_of_row(int64_t columns, const Term& term) {
  return joined_row<kTerms>(columns, 0.0f, term, [](Vec a, Vec b) { return simd::add(a, b); });
}
template <class Term>
inline float largest_of_row(int64_t columns, float least, const Term& term) {
  const auto terms = [&](int64_t at, auto lanes) { return Vectors<1>{term(at, lanes)}; };
  const auto larger = [](Vec most, Vec a) { return simd::max(a, most); };
  return simd::largest_lane(joined_row<1>(columns, least, terms, larger)[0]);
}

// ---- Several rows -------------------------------------------------------------------------------

// Rows are worked on together, at most as many as a vector has lanes: what has to be done once for
// each of them is done for all at once. A row's result is the same to the last bit alone.
using OfRows = Several<float, kLanes>;

// Rows of so many numbers lie in the first cache, or in the second one.
constexpr int64_t kNearNumbers = 1 << 12, kFarNumbers = 1 << 15;

// Calls run(row, rows) for the rows from `begin` to `end`, of which it has `rows` from `row` on.
template <class Run>
inline void for_rows(int64_t begin, int64_t end, int64_t columns, int64_t numbers, const Run& run) {
  const int64_t at_once = min<int64_t>(max<int64_t>(numbers / columns, 1), kLanes);
  for (; begin < end; begin += at_once) run(begin, int(min(at_once, end - begin)));
}

// kTerms sums over each row of what term_of(row) gives.
template <int kTerms, class TermOf>
inline Several<OfRows, kTerms> sums_of_rows(int rows, int64_t columns, const TermOf& term_of) {
  Several<OfRows, kTerms> result;
  Vec parts[kTerms][kLanes];
  for (int row = 0; row < kLanes; ++row) {
    Vectors<kTerms> sums;
    if (row < rows) sums = sums_of_row<kTerms>(columns, term_of(row));
    else fill(sums.of, kTerms, simd::broadcast(0.0f));
    for (int t = 0; t < kTerms; ++t)
      if (rows == 1) result[t][0] = simd::sum_lanes(sums[t]);
      else parts[t][row] = sums[t];
    if (rows == 1) return result;
  }
  for (int t = 0; t < kTerms; ++t) simd::store(result[t].of, simd::sum_rows(parts[t]));
  return result;
}

// What rows are normalised by: (x - mean) * factor. And for gradients the sums of g and of
// g (x - mean), where g_of(row) gives g(column, lanes).
struct Statistics {
  OfRows mean, factor, sum, product;
};

template <bool kHasG, class GOf>
inline Statistics statistics_of(int rows, const Element* x, int64_t stride, int64_t columns,
                                float eps, const GOf& g_of) {
  constexpr bool kHasMean = kKind == Kind::layer_norm;
  constexpr int kTerms = (kHasG + 1) * (kHasMean + 1), kAway = kHasG + 1;
  const float share = 1.0f / float(columns);
  Statistics result;
  const auto term_of = [&](int row) {
    return [from = x + row * stride, shift = simd::broadcast(result.mean[row]), g = g_of(row)](
               int64_t at, auto lanes) {
      Vec away = load_row<Dtype>(from + at, lanes);
      if constexpr (kHasMean) away = where_in_row(simd::sub(away, shift), lanes, 0.0f);
      Vectors<kTerms> terms;
      terms[0] = simd::mul(away, away);
      if constexpr (kHasMean) terms[kAway] = away;
      if constexpr (kHasG) {
        const Vec of_g = g(at, lanes);
        terms[1] = simd::mul(of_g, away);
        if constexpr (kHasMean) terms[3] = of_g;
      }
      return terms;
    };
  };
  // What a row's sums say: whether they are good enough. From the first number one pass is, as long
  // as it lies within three standard deviations of the mean. From one that is far away, most of the
  // squares would cancel, or overflow.
  const auto finish = [&](int row, const auto& sum) {
    float square = sum(0) * share, away = 0.0f;
    if constexpr (kHasMean) away = sum(kAway) * share;
    const bool is_near = away * away <= 0.9f * square && away * away < kInfinity;
    result.mean[row] += away;
    if (square < kInfinity) square -= away * away;
    const float factor = result.factor[row] = 1.0f / __builtin_sqrtf(max(square, 0.0f) + eps);
    if constexpr (kHasG) {
      result.sum[row] = kHasMean ? sum(kTerms - 1) : 0.0f;
      result.product[row] = factor == 0.0f ? 0.0f : sum(1) - away * result.sum[row];
    }
    return is_near || !kHasMean;
  };
  for (int row = 0; row < rows; ++row) {
    float first[kLanes];
    simd::store(first, load_row<Dtype>(x + row * stride, 1));
    result.mean[row] = kHasMean ? first[0] : 0.0f;
  }
  const auto sums = sums_of_rows<kTerms>(rows, columns, term_of);
  for (int row = 0; row < rows; ++row) {
    bool is_near = finish(row, [&](int t) { return sums[t][row]; });
    for (int more = 0; more < 2 && !is_near; ++more) {
      if (!(__builtin_fabsf(result.mean[row]) < kInfinity)) result.mean[row] = 0.0f;
      const auto again = sums_of_row<kTerms>(columns, term_of(row));
      is_near = finish(row, [&](int t) { return simd::sum_lanes(again[t]); });
    }
  }
  return result;
}

// Columns whose results are made at a time, of one row after the other: their weights stay in the
// first cache.
constexpr int64_t kStagedColumns = 1024;

// Copies results to where nobody reads them before they have left the caches: lines that are
// written past the caches need not be read first, which is a third of the traffic.
inline void copy_past_caches(void* to, const void* from, int64_t bytes) {
#if defined(__SSE2__)
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  const int64_t before = min(bytes, int64_t(-reinterpret_cast<uintptr_t>(target) % 64));
  std::memcpy(target, source, size_t(before));
  int64_t i = before;
  for (; i + 64 <= bytes; i += 64)
    for (int j = 0; j < 64; j += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + i + j),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i + j)));
  std::memcpy(target + i, source + i, size_t(bytes - i));
#else
  std::memcpy(to, from, size_t(bytes));
#endif
}
// Behind the last of them: other threads may look at the results then.
inline void finish_past_caches() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Results of fewer bytes, for each thread of rows, may be read again while they are in the caches.
constexpr int64_t kPastCachesBytes = int64_t(16) << 20;

// Writes what make_of(row) gives for (column, lanes) as rows of D.
template <class D, class MakeOf>
inline void write_rows(typename D::Element* to, int rows, int64_t columns, bool past_caches,
                       const MakeOf& make_of) {
  alignas(64) typename D::Element staged[kStagedColumns];
  for (int64_t begin = 0; begin < columns; begin += kStagedColumns) {
    const int64_t end = min(begin + kStagedColumns, columns);
    for (int row = 0; row < rows; ++row) {
      auto* const own = to + row * columns + begin;
      auto* const made = past_caches ? staged : own;
      const auto make = make_of(row);
      for_vectors(begin, end, [&](int64_t at, auto lanes) {
        store_row<D>(made + (at - begin), make(at, lanes), lanes);
      });
      if (past_caches) copy_past_caches(own, staged, (end - begin) * int64_t(sizeof(staged[0])));
    }
  }
}

// As many multiplications as an element takes, with its share of the traffic.
constexpr int64_t kElementCost = 16;
// Elements of an item of work, at least.
constexpr int64_t kItemElements = 1 << 14;

}  // namespace
