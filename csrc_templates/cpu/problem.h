// The call: its sequences, which keys a query sees, and the rows of a query tile.
#pragma once

#include <cstring>
#include <initializer_list>

#include "elements.h"

namespace {

// One member of the batch, and where its rows start in packed tensors.
struct Sequence {
  int64_t index;
  int64_t seqlen_q, seqlen_k;
  int64_t first_q, first_k;

  // The first row of head 0 in a tensor with a row for each query, or for each key.
  template <class T>
  T* queries_of(T* tensor, const Strides& strides) const {
    return tensor + index * strides.batch + first_q * strides.seq;
  }
  template <class T>
  T* keys_of(T* tensor, const Strides& strides) const {
    return tensor + index * strides.batch + first_k * strides.seq;
  }
};

struct KeyRange {
  int64_t begin, end;
};

// What each key of one head of a sequence has: at a fixed stride, or in pages.
template <class T>
struct RowsOfKeys {
  const T* first;        // of the sequence, or of page 0
  Strides strides;       // those of the batch lie between pages
  const int32_t* pages;  // of the sequence
  uint32_t page_size;

  const T* operator[](int64_t key) const {
    if (!kPaged) return first + key * strides.seq;
    const uint32_t page = uint32_t(key) / page_size;
    return first + element_at(pages + page) * strides.batch +
           (uint32_t(key) - page * page_size) * strides.seq;
  }
};

// The keys, or the values.
using KeyRows = RowsOfKeys<KeyElement>;

// In packed pages: rows of some keys, or values, made of their pieces.
template <int kHdim, bool kOfValues, int kMostRows>
struct UnpackedRows {
  static constexpr int kPiece = 16 / sizeof(KeyElement);
  KeyElement rows[kPackedPages ? kMostRows * kHdim : 1];

  // Brings `count` keys from `from` on, and returns what finds one of them by its number from
  // there. Where pages are not packed, nothing is brought.
  auto bring(const KeyRows& keys, int64_t from, int count) {
    if constexpr (kPackedPages)
      for (int j = 0; j < count; ++j) bring_one(keys, from + j, rows + j * kHdim);
    return [&keys, from, this](int j) { return kPackedPages ? rows + j * kHdim : keys[from + j]; };
  }

 private:
  void bring_one(const KeyRows& keys, int64_t key, KeyElement* to) const {
    const uint32_t page = uint32_t(key) / keys.page_size;
    const uint32_t row = uint32_t(key) - page * keys.page_size;
    const KeyElement* of_page = keys.first + element_at(keys.pages + page) * keys.strides.batch;
    if (kOfValues) {
      of_page += row / kPiece * (kHdim * kPiece) + row % kPiece;
      for (int d = 0; d < kHdim; ++d) to[d] = of_page[d * kPiece];
    } else {
      of_page += row * kPiece;
      for (int d = 0; d < kHdim; d += kPiece)
        std::memcpy(to + d, of_page + int64_t(d) * keys.page_size,
                    min(kPiece, kHdim - d) * sizeof(KeyElement));
    }
  }
};

// The lengths of a call, without its tensors.
struct Problem {
  FmhaShape shape;
  // gm1 only: batch + 1 prefix sums of the logical lengths, and of the physical ones.
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
  const int32_t* cu_seqlens_q_padded;
  const int32_t* cu_seqlens_k_padded;
  KeyOptions keys;

  int64_t group_size() const { return shape.heads_q / shape.heads_k; }

  static int64_t length(const int32_t* cu_seqlens, int64_t b) {
    return element_at(cu_seqlens + b + 1) - element_at(cu_seqlens + b);
  }
  int64_t seqlen_q(int64_t b) const {
    return kMode == Mode::gm0 ? shape.seqlen_q : length(cu_seqlens_q, b);
  }
  int64_t seqlen_k(int64_t b) const {
    return kMode == Mode::gm0 ? shape.seqlen_k : length(cu_seqlens_k, b);
  }

  Sequence sequence(int64_t b) const {
    if (kMode == Mode::gm0) return {b, shape.seqlen_q, shape.seqlen_k, 0, 0};
    const int64_t first_k = kPaged ? 0 : element_at(cu_seqlens_k_padded + b);
    return {b, seqlen_q(b), seqlen_k(b), element_at(cu_seqlens_q_padded + b), first_k};
  }

  // The pages of a sequence: a row of the block table, or its list.
  const int32_t* pages_of(int64_t b) const {
    const bool are_lists = keys.block_table_stride < 0;
    const int64_t first =
        are_lists ? element_at(cu_seqlens_k_padded + b) : b * keys.block_table_stride;
    return keys.block_table + first;
  }

  // The rows of one kv head, in a tensor like k or v.
  template <class T>
  RowsOfKeys<T> key_rows(const Sequence& seq, int64_t kv_head, const T* tensor,
                         const Strides& strides) const {
    const T* first = kPaged ? tensor : seq.keys_of(tensor, strides);
    const int32_t* pages = kPaged ? pages_of(seq.index) : nullptr;
    return {first + kv_head * strides.head, strides, pages, uint32_t(shape.seqlen_k)};
  }

  // Whether nothing is to be said about the lengths of a packed call: they are in order, fit where
  // they lie, and leave no row of q over; with `has_all_keys` none of k and v either. Python tells
  // what is wrong, if anything is.
  bool has_plain_lengths(const Tensors& given, bool has_all_keys) const {
    if (kMode == Mode::gm0 || given.lengths_are_checked) return true;
    const bool are_lists = kPaged && keys.block_table_stride < 0;
    const auto number = [](const int32_t* from, int64_t b) -> int64_t {
      return element_at(from + b);
    };
    // Of lists differences alone have a meaning.
    bool is_plain = number(cu_seqlens_q, 0) == 0 && number(cu_seqlens_q_padded, 0) == 0 &&
                    number(cu_seqlens_k_padded, 0) >= 0 && number(cu_seqlens_k, 0) >= 0 &&
                    (are_lists || number(cu_seqlens_k, 0) + number(cu_seqlens_k_padded, 0) == 0);
    for (int64_t b = 0; b < shape.batch; ++b) {
      const auto length = [&](const int32_t* from) {
        return number(from, b + 1) - number(from, b);
      };
      const int64_t queries = length(cu_seqlens_q), count = length(cu_seqlens_k);
      int64_t room = length(cu_seqlens_k_padded);
      if (kPaged) {
        is_plain &= room >= 0;
        room = (are_lists ? room : keys.table_entries) * shape.seqlen_k;
      }
      is_plain &= queries >= 0 && queries <= given.max_seqlen_q && count >= 0 &&
                  count <= given.max_seqlen_k && length(cu_seqlens_q_padded) >= queries &&
                  room >= count;
    }
    const int64_t end_q = number(cu_seqlens_q_padded, shape.batch);
    const int64_t end_k = number(cu_seqlens_k_padded, shape.batch);
    if (!kPaged) is_plain &= end_k <= shape.seqlen_k;
    if (are_lists) is_plain &= end_k <= keys.table_entries;
    if (has_all_keys) is_plain &= number(cu_seqlens_k, shape.batch) == shape.seqlen_k;
    return is_plain && end_q <= shape.seqlen_q &&
           number(cu_seqlens_q, shape.batch) == shape.seqlen_q;
  }

  // Whether the block table names pages that are there, as far as sequences reach.
  bool names_pages() const {
    if (!kPaged) return true;
    bool is_good = true;
    for (int64_t b = 0; b < shape.batch; ++b) {
      const int32_t* pages = pages_of(b);
      const int64_t count = (seqlen_k(b) + shape.seqlen_k - 1) / shape.seqlen_k;
      for (int64_t i = 0; i < count; ++i)
        is_good &= uint32_t(element_at(pages + i)) < uint32_t(keys.num_pages);
    }
    return is_good;
  }

  // How many rows a whole lse has.
  int64_t rows_of_lse() const {
    return (kMode == Mode::gm0 ? shape.batch : 1) * shape.heads_q * shape.seqlen_q;
  }

  // The keys a query sees. Neither end ever moves back from one query to the next.
  KeyRange visible_keys(const Sequence& seq, int64_t query) const {
    if (kMask == Mask::none) return {0, seq.seqlen_k};
    const int64_t diagonal = query + (shape.bottom_right ? seq.seqlen_k - seq.seqlen_q : 0);
    const auto clamp = [&](int64_t key) { return min(max<int64_t>(key, 0), seq.seqlen_k); };
    return {clamp(diagonal - shape.window_left), clamp(diagonal + shape.window_right + 1)};
  }
};

// Strides of dimensions of size 1 can be anything, and a pointer is advanced by them once.
inline void clear_unused_strides(const FmhaShape& shape, std::initializer_list<Strides*> of_queries,
                                 std::initializer_list<Strides*> of_keys) {
  const auto clear = [&](Strides& x, int64_t seqlen, int64_t heads) {
    if (shape.batch == 1 && !kPaged) x.batch = 0;
    if (seqlen == 1) x.seq = 0;
    if (heads == 1) x.head = 0;
  };
  for (Strides* x : of_queries) clear(*x, shape.seqlen_q, shape.heads_q);
  for (Strides* x : of_keys) clear(*x, shape.seqlen_k, shape.heads_k);
}

// Up to a tile's worth of rows that share a kv head. A row is a (query, head) pair: the q heads
// sharing a kv head are put side by side, so that GQA decoding with a single query still fills the
// lanes.
struct QueryRows {
  const Problem& problem;
  const Sequence& seq;
  int64_t kv_head;
  int64_t first_row;
  int rows;

  // Row i of the tile. Rows beyond the last (vectors are filled up) count as the last one.
  int64_t row(int i) const { return first_row + min(i, rows - 1); }
  int64_t query(int i) const { return row(i) / problem.group_size(); }
  int64_t head(int i) const {
    return kv_head * problem.group_size() + row(i) % problem.group_size();
  }

  // Where row i lies in a tensor whose sequence starts at `from`.
  template <class T>
  T* at(T* from, const Strides& strides, int i) const {
    return from + query(i) * strides.seq + head(i) * strides.head;
  }

  // What finds row i, in a tensor with a row for each query.
  template <class T>
  auto rows_of(T* tensor, const Strides& strides) const {
    return [this, from = seq.queries_of(tensor, strides), &strides](int i) {
      return at(from, strides, i);
    };
  }

  KeyRange visible_keys(int i) const { return problem.visible_keys(seq, query(i)); }

  // The keys that any row sees.
  KeyRange all_visible_keys() const { return {visible_keys(0).begin, visible_keys(rows - 1).end}; }

  // Calls visit(number of vectors as a type, index of its first row) for all panels of the tile:
  // kVectors vectors of rows each, and at the end kLastVectors where those are enough.
  template <int kVectors = kBlockVectors, int kLastVectors = 1, class Visit>
  void for_each_panel(const Visit& visit) const {
    int at = 0;
    for (; at + (kVectors - kLastVectors) * kLanes < rows; at += kVectors * kLanes)
      visit(std::integral_constant<int, kVectors>{}, at);
    for (; at < rows; at += kLastVectors * kLanes)
      visit(std::integral_constant<int, kLastVectors>{}, at);
  }
};

}  // namespace
