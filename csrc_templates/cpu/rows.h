// Rows of any number of columns: whole vectors and the rest of one, sums over a row, and stores
// that go past the caches.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <type_traits>

// Vectors of AVX-512 come with these.
#if defined(__SSE2__) && !defined(__AVX512F__)
#include <emmintrin.h>
#endif

#include "exponent.h"
#include "threads.h"

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

// Four vectors at a time: as many sums as the latency of an addition has room for.
constexpr int kSums = 4;

// kTerms sums over a row of what term(column, lanes) gives, which is 0 in lanes that do not belong
// to it: in as many lanes as there are. Parts of it are added up on their own, so that no number is
// rounded more than some 200 times.
template <int kTerms>
using Vectors = std::array<Vec, kTerms>;
template <int kTerms, class Term>
inline Vectors<kTerms> sums_of_row(int64_t columns, const Term& term) {
  constexpr int64_t kStep = kSums * kLanes, kPart = 64 * kStep;
  Vectors<kTerms> total;
  total.fill(simd::broadcast(0.0f));
  int64_t i = 0;
  while (i + kStep <= columns) {
    Vectors<kTerms> part[kSums];
    for (auto& each : part) each.fill(simd::broadcast(0.0f));
    for (const int64_t end = std::min(i + kPart, columns); i + kStep <= end; i += kStep)
      for (int j = 0; j < kSums; ++j) {
        const Vectors<kTerms> terms = term(i + j * kLanes, AllLanes{});
        for (int t = 0; t < kTerms; ++t) part[j][t] = simd::add(part[j][t], terms[t]);
      }
    for (int t = 0; t < kTerms; ++t)
      total[t] = simd::add(total[t], simd::add(simd::add(part[0][t], part[1][t]),
                                               simd::add(part[2][t], part[3][t])));
  }
  for_vectors(i, columns, [&](int64_t at, auto lanes) {
    const Vectors<kTerms> terms = term(at, lanes);
    for (int t = 0; t < kTerms; ++t) total[t] = simd::add(total[t], terms[t]);
  });
  return total;
}

// The largest of term(column, lanes), which is `least` in lanes that do not belong to the row.
template <class Term>
inline Vec largest_of_row(int64_t columns, float least, const Term& term) {
  constexpr int64_t kStep = kSums * kLanes;
  Vec most[kSums];
  for (Vec& each : most) each = simd::broadcast(least);
  int64_t i = 0;
  for (; i + kStep <= columns; i += kStep)
    for (int j = 0; j < kSums; ++j) most[j] = simd::max(term(i + j * kLanes, AllLanes{}), most[j]);
  for_vectors(i, columns,
              [&](int64_t at, auto lanes) { most[0] = simd::max(term(at, lanes), most[0]); });
  return simd::max(simd::max(most[0], most[1]), simd::max(most[2], most[3]));
}

// ---- Several rows -------------------------------------------------------------------------------

// Short rows are worked on together, as many as a vector has lanes: what has to be done once for
// each of them is done for all at once. A row's result is the same to the last bit alone.
constexpr int64_t kShortColumns = 256;

// A number of each row.
using OfRows = std::array<float, kLanes>;

// kTerms sums over each of kRows rows of term(row, column, lanes).
template <int kRows, int kTerms, class Term>
inline std::array<OfRows, kTerms> sums_of_rows(int64_t columns, const Term& term) {
  Vec parts[kTerms][kRows];
  for (int row = 0; row < kRows; ++row) {
    const Vectors<kTerms> sums =
        sums_of_row<kTerms>(columns, [&](int64_t at, auto lanes) { return term(row, at, lanes); });
    for (int t = 0; t < kTerms; ++t) parts[t][row] = sums[t];
  }
  std::array<OfRows, kTerms> result;
  for (int t = 0; t < kTerms; ++t)
    if constexpr (kRows == 1) result[t][0] = simd::sum_lanes(parts[t][0]);
    else simd::store(result[t].data(), simd::sum_rows(parts[t]));
  return result;
}

template <int kRows, class Term>
inline OfRows largest_of_rows(int64_t columns, float least, const Term& term) {
  Vec most[kRows];
  for (int row = 0; row < kRows; ++row)
    most[row] = largest_of_row(columns, least,
                               [&](int64_t at, auto lanes) { return term(row, at, lanes); });
  OfRows result;
  if constexpr (kRows == 1) {
    result[0] = simd::largest_lane(most[0]);
  } else {
    simd::transpose(most);
    for (int row = 1; row < kRows; ++row) most[0] = simd::max(most[row], most[0]);
    simd::store(result.data(), most[0]);
  }
  return result;
}

// Calls run(rows, row) for the rows from `begin` to `end`, of which it has `rows` from `row` on.
template <class Run>
inline void for_rows(int64_t begin, int64_t end, int64_t columns, const Run& run) {
  int64_t row = begin;
  if (columns <= kShortColumns)
    for (; row + kLanes <= end; row += kLanes) run(AllLanes{}, row);
  for (; row < end; ++row) run(std::integral_constant<int, 1>{}, row);
}

// What rows are normalised by: (x - mean) * factor.
struct Statistics {
  OfRows mean, factor;
};

template <int kRows>
inline Statistics statistics_of(const Element* x, int64_t stride, int64_t columns, float eps) {
  Statistics result;
  const float share = 1.0f / float(columns);
  if constexpr (kKind == Kind::rms_norm) {
    const auto [squares] = sums_of_rows<kRows, 1>(columns, [&](int row, int64_t at, auto lanes) {
      const Vec each = load_row<Dtype>(x + row * stride + at, lanes);
      return Vectors<1>{simd::mul(each, each)};
    });
    result.mean.fill(0.0f);
    for (int row = 0; row < kRows; ++row) result.factor[row] = squares[row] * share;
  } else {
    const auto away_from = [&](const Element* from, float shift, int64_t at, auto lanes) {
      const Vec each = simd::sub(load_row<Dtype>(from + at, lanes), simd::broadcast(shift));
      const Vec away = where_in_row(each, lanes, 0.0f);
      return Vectors<2>{away, simd::mul(away, away)};
    };
    // From the first number one pass is enough, as long as it lies within three standard deviations
    // of the mean. From one that is far away, most of the squares would cancel.
    for (int row = 0; row < kRows; ++row) {
      float first[kLanes];
      simd::store(first, load_row<Dtype>(x + row * stride, 1));
      result.mean[row] = first[0];
    }
    const auto [sums, squares] =
        sums_of_rows<kRows, 2>(columns, [&](int row, int64_t at, auto lanes) {
          return away_from(x + row * stride, result.mean[row], at, lanes);
        });
    bool all_are_near = true;
    for (int row = 0; row < kRows; ++row) {
      const float away = sums[row] * share, square = squares[row] * share;
      result.mean[row] += away;
      result.factor[row] = square - away * away;
      all_are_near &= away * away <= 0.9f * square;
    }
    for (int row = 0; row < kRows && !all_are_near; ++row) {
      float away = sums[row] * share;
      if (away * away <= 0.9f * squares[row] * share) continue;
      const auto [of_row, of_squares] = sums_of_row<2>(columns, [&](int64_t at, auto lanes) {
        return away_from(x + row * stride, result.mean[row], at, lanes);
      });
      away = simd::sum_lanes(of_row) * share;
      result.mean[row] += away;
      result.factor[row] = simd::sum_lanes(of_squares) * share - away * away;
    }
  }
  for (int row = 0; row < kRows; ++row)
    result.factor[row] = 1.0f / std::sqrt(std::max(result.factor[row], 0.0f) + eps);
  return result;
}

// Columns whose results are made at a time, in the first cache.
constexpr int64_t kStagedColumns = 1024;

// Copies results to where nobody reads them before they have left the caches: lines that are
// written past the caches need not be read first, which is a third of the traffic.
inline void copy_past_caches(void* to, const void* from, int64_t bytes) {
#if defined(__SSE2__)
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  const int64_t before = std::min(bytes, int64_t(-reinterpret_cast<uintptr_t>(target) % 64));
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

// Results of fewer bytes may be read again while they are in the caches.
constexpr int64_t kPastCachesBytes = int64_t(16) << 20;

// Calls make(column, lanes) for all columns, and writes what it gives as a row of D.
template <class D, class Make>
inline void write_row(typename D::Element* to, int64_t columns, bool past_caches,
                      const Make& make) {
  if (!past_caches) {
    for_vectors(0, columns,
                [&](int64_t at, auto lanes) { store_row<D>(to + at, make(at, lanes), lanes); });
    return;
  }
  alignas(64) typename D::Element staged[kStagedColumns];
  for (int64_t begin = 0; begin < columns; begin += kStagedColumns) {
    const int64_t end = std::min(begin + kStagedColumns, columns);
    for_vectors(begin, end, [&](int64_t at, auto lanes) {
      store_row<D>(staged + (at - begin), make(at, lanes), lanes);
    });
    copy_past_caches(to + begin, staged, (end - begin) * int64_t(sizeof(staged[0])));
  }
}

// As many multiplications as an element takes, with its share of the traffic.
constexpr int64_t kElementCost = 16;
// Elements of an item of work.
constexpr int64_t kItemElements = 1 << 14;

}  // namespace
