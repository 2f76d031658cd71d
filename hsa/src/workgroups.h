// What a workgroup has to do: which tile of queries, of which sequence and head.
#pragma once

#include "arguments.h"
#include "tiles.h"

__device__ inline int smaller(int a, int b) { return a < b ? a : b; }

__device__ inline int tiles_of(unsigned count, unsigned size) { return (count + size - 1) / size; }

struct Quotient {
  unsigned value, remainder;
};

// The host has divided 2^32 - 1 by the divisor: multiplied with that, the quotient is right or one
// too small.
__device__ inline Quotient divide(unsigned dividend, const Divisor& by) {
  const unsigned value = static_cast<unsigned long>(dividend) * by.reciprocal >> 32;
  const unsigned remainder = dividend - value * by.divisor;
  return remainder < by.divisor ? Quotient{value, remainder}
                                : Quotient{value + 1, remainder - by.divisor};
}

// The queries, keys and values of one sequence and head, and where results go.
struct Head {
  Rows q, k, v, o;
  Global<float> lse;  // null: not wanted
};

// Which tile of queries a workgroup has, and which share of what is to be done for it.
struct Place {
  unsigned batch, head;
  unsigned tile_rank;  // the tiles of a sequence in the order of their workgroups
  unsigned share;      // forward: of the keys; combine: of the queries
};

// Of one sequence, in rows.
struct Sequence {
  int seqlen_q, seqlen_k;
  unsigned q_start, k_start;
};

// gm0. Workgroups go to the XCDs, each of which has an L2 cache of its own, in turn: those whose
// numbers in x are a multiple of xcds apart are on the same one, because there are a multiple of
// xcds along x. Each XCD has consecutive heads, so that what shares keys and values meets there.
//
// x counts the heads of a group, whose tiles alternate; y counts tiles, z groups and shares.
__device__ inline Place place_in_batch(const Arguments& a, const Divisor& shares) {
  const Quotient in_x = divide(__builtin_amdgcn_workgroup_id_x(), a.xcds);
  const Quotient in_z = divide(__builtin_amdgcn_workgroup_id_z(), shares);
  const unsigned first_head = in_x.remainder * a.xcd_heads + in_x.value;
  const Quotient sequence = divide(first_head + in_z.value * a.group_heads, a.heads);
  return {sequence.value, sequence.remainder, __builtin_amdgcn_workgroup_id_y(), in_z.remainder};
}

// gm1. All workgroups are in one order, in which they go to the XCDs in turn. An XCD has one pair
// of a sequence and key head after the other, with the tiles of all query heads of a pair side by
// side. The pairs of first_heads key heads have an XCD to themselves; those of the others go to
// sets of XCDs, which take a pair's tiles in turn. The tail is the last pairs of each set together.
__device__ inline Place place_in_group(const Arguments& a, const Divisor& shares) {
  // The axes of the grid mean nothing: heads, sequences, and tiles with their shares.
  unsigned n = __builtin_amdgcn_workgroup_id_x() +
               a.heads.divisor * (__builtin_amdgcn_workgroup_id_y() +
                                  a.batch.divisor * __builtin_amdgcn_workgroup_id_z());
  const unsigned first_count =
      a.first_heads * a.batch.divisor * a.pair_tiles.divisor * shares.divisor;
  const bool is_first = n < first_count;
  if (!is_first) n -= first_count;
  const Quotient turn = divide(n, a.xcds);
  unsigned first_head = turn.remainder, head_step = a.xcds.divisor, in_list = turn.value;
  if (!is_first) {
    const Quotient xcd = divide(turn.remainder, a.xcd_sets);
    first_head = a.first_heads + xcd.remainder;
    head_step = a.xcd_sets.divisor;
    const unsigned begin = turn.value * a.set_xcds.divisor;
    unsigned place = xcd.value;
    // In every turn an XCD gets another place of its set's, or some might get long tiles only. The
    // last turn is not for all of them.
    if (begin + a.set_xcds.divisor <= a.set_tiles * shares.divisor) {
      place += turn.value + divide(turn.value, a.set_xcds).value;
      place = divide(place, a.set_xcds).remainder;
    }
    in_list = begin + place;
  }
  const Quotient tile = divide(in_list, shares);
  unsigned pair, tile_rank, head_in_pair;
  if (is_first || tile.value < a.tail_begin) {
    const Quotient of_pair = divide(tile.value, a.pair_tiles);
    const Quotient of_rank = divide(of_pair.remainder, a.gqa);
    pair = of_pair.value;
    tile_rank = of_rank.value;
    head_in_pair = of_rank.remainder;
  } else {
    const Quotient of_rank = divide(tile.value - a.tail_begin, a.tail_heads);
    const Quotient of_pair = divide(of_rank.remainder, a.gqa);
    pair = divide(a.tail_begin, a.pair_tiles).value + of_pair.value;
    tile_rank = of_rank.value;
    head_in_pair = of_pair.remainder;
  }
  const Quotient sequence = divide(pair, a.batch);
  const unsigned head_k = first_head + sequence.value * head_step;
  return {sequence.remainder, head_k * a.gqa.divisor + head_in_pair, tile_rank, tile.remainder};
}

template <bool kGroupMode>
__device__ inline Place place_of_workgroup(const Arguments& a, const Divisor& shares) {
  if constexpr (kGroupMode) return place_in_group(a, shares);
  else return place_in_batch(a, shares);
}

// Of any arguments that have lengths.
template <bool kGroupMode, class Lengths>
__device__ inline Sequence sequence_of(const Lengths& a, unsigned batch) {
  if constexpr (!kGroupMode)
    return {static_cast<int>(a.seqlen_q), static_cast<int>(a.seqlen_k), 0, 0};
  const Constant<int> sums_q = (Constant<int>)a.cu_seqlens_q;
  const Constant<int> sums_k = (Constant<int>)a.cu_seqlens_k;
  unsigned q_begin = sums_q[batch], q_end = sums_q[batch + 1];
  unsigned k_begin = sums_k[batch], k_end = sums_k[batch + 1];
  unsigned q_start = ((Constant<int>)a.cu_seqlens_q_padded)[batch];
  unsigned k_start = ((Constant<int>)a.cu_seqlens_k_padded)[batch];
  // One round of loads here too: what does not end at once needs all of them.
  asm("" : "+s"(q_begin), "+s"(q_end), "+s"(k_begin), "+s"(k_end), "+s"(q_start), "+s"(k_start));
  return {static_cast<int>(q_end - q_begin), static_cast<int>(k_end - k_begin), q_start, k_start};
}

// The grid and the workspace are as large as max_seqlen_q promised, whatever came since.
template <bool kGroupMode, class Lengths>
__device__ inline int computed_queries(const Lengths& a, const Sequence& sequence) {
  return kGroupMode ? smaller(sequence.seqlen_q, a.seqlen_q) : sequence.seqlen_q;
}

// The number of a sequence and head among all of them.
__device__ inline unsigned long line_of(const Arguments& a, const Place& place) {
  return static_cast<unsigned long>(place.batch) * a.heads.divisor + place.head;
}

// The rows that a workgroup computes with, as far as they are computed; `line` is line_of(place).
template <bool kGroupMode>
__device__ inline Head head_of(const Arguments& a, const Place& place, unsigned long head_k,
                               const Sequence& sequence, unsigned long line, int queries) {
  const unsigned long batch = place.batch, head = place.head;
  const unsigned long q_start = sequence.q_start, k_start = sequence.k_start;
  Head result;
  result.q = {a.q + batch * a.q_batch + head * a.q_head + q_start * a.q_seq, a.q_seq, queries};
  result.k = {a.k + batch * a.k_batch + head_k * a.k_head + k_start * a.k_seq, a.k_seq,
              sequence.seqlen_k};
  result.v = {a.v + batch * a.v_batch + head_k * a.v_head + k_start * a.v_seq, a.v_seq,
              sequence.seqlen_k};
  result.o = {a.out + batch * a.out_batch + head * a.out_head + q_start * a.out_seq, a.out_seq,
              queries};
  result.lse = nullptr;
  if (a.lse) {
    const unsigned long row = kGroupMode ? head * a.lse_head + q_start * 4 : line * a.lse_head;
    result.lse = (Global<float>)((Global<char>)a.lse + row);
  }
  return result;
}
