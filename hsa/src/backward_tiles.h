// Tiles of queries and of what they share with keys, for the kernel in the middle of a backward
// pass: 32 queries, and lanes that hold a key each.
#pragma once

#include "backward.h"

// All of those that bring a tile to LDS.
constexpr int kTileThreads = 2 * kKeys;
constexpr int kKeySteps = kKeys / 16;

// A part's columns, with places of their own: free of conflicts for what ValueTile reads and
// writes, and for writes where a thread has two columns only, so that bits 1 to 3 of the row vary.
template <int kColumns>
struct ColumnTileOf : ValueTile<32, kColumns, kTileThreads, kBankChunks> {
  using Values = ValueTile<32, kColumns, kTileThreads, kBankChunks>;
  using typename Values::Base, typename Values::Registers;
  using Values::chunk_of, Values::column_of, Values::half_of, Values::kWidth;

  __device__ static int place(int row, int chunk) {
    if constexpr (kBankChunks == 8)
      return Base::template place<4>(row ^ row / 4 % 2, chunk,
                                     row / 2 % 2 ^ row / 8 % 2 * 2 ^ row / 16 % 2 * 3);
    else
      return Base::template place<4>(row ^ row / 8 % 2, chunk,
                                     row / 2 % 2 ^ row / 16 % 2 ^ row / 4 % 2 * 2);
  }

  __device__ static void store(Lds<char> tile, const Registers& from, int thread) {
    const unsigned first = (unsigned)(tile + place(column_of(thread) * kWidth, chunk_of(thread)) +
                                      half_of(thread) * 8);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const auto pair = [&](int i) {
        const unsigned low = from.row[i][j / 2], high = from.row[i + 1][j / 2];
        return j % 2 ? upper_halves(low, high) : lower_halves(low, high);
      };
      *(Lds<u32x2>)(first ^ place(j, 0)) = u32x2{pair(0), pair(2)};
    }
  }

  __device__ static int first_operand(int lane) { return place(lane % 32, lane / 32); }
};

template <int kColumns>
using RowTileOf = KeyTile<32, kColumns, kTileThreads, kBankChunks>;
using ScoreTile = KeyTile<32, kKeys, kTileThreads, kBankChunks>;

// Operands of the 32 rows that begin with `rows`; those behind the last one are zeros.
template <int kSteps>
__device__ inline void load_own(u32x4 (&to)[kSteps], const Rows& rows, int lane) {
  const auto buffer = buffer_of<32, kSteps * 32>(rows);
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    to[step] = __builtin_amdgcn_raw_buffer_load_b128(
        buffer, lane % 32 * rows.stride + 32 * step + lane / 32 * 16, 0, 0);
}

// Of a lane's column, keys in the order in which ScoreTile has them.
template <int kSteps>
__device__ inline void load_column(u32x4 (&to)[kSteps], const Rows& keys, int column, int lane) {
  const auto buffer = buffer_of<16 * kSteps, kHdim * 2>(keys);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    unsigned short values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int key = 16 * step + lane / 32 * 8 + i;
      values[i] =
          __builtin_amdgcn_raw_buffer_load_b16(buffer, key * keys.stride + column * 2, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) to[step][i] = values[2 * i] | values[2 * i + 1] << 16;
  }
}

// A number of each of the tile's queries that begin with `first_query`, and zeros behind the last
// one: what is there has no probabilities.
__device__ inline __amdgpu_buffer_rsrc_t statistics_of(Global<float> of_queries, int first_query,
                                                       int queries) {
  return __builtin_amdgcn_make_buffer_rsrc((void*)(of_queries + first_query), 0,
                                           larger(queries - first_query, 0) * 4, kRawBuffer);
}

// Those of a lane's 16 queries of a part.
__device__ inline f32x16 load_statistics(__amdgpu_buffer_rsrc_t from, int part, int lane) {
  f32x16 result;
#pragma unroll
  for (int quad = 0; quad < 4; ++quad) {
    const f32x4 four = bits_as<f32x4>(__builtin_amdgcn_raw_buffer_load_b128(
        from, lane / 32 * 16 + (32 * part + 8 * quad) * 4, 0, 0));
#pragma unroll
    for (int i = 0; i < 4; ++i) result[4 * quad + i] = four[i];
  }
  return result;
}

// Adds value i of each lane to the part of dq that has its rows in `to`, as many as there are:
// `column` is the lane's, or with a multiple of kHdim that of a later row.
__device__ inline void add_to_dq(__amdgpu_buffer_rsrc_t to, float value, int i, int column,
                                 int lane) {
  __builtin_amdgcn_raw_ptr_buffer_atomic_fadd_f32(
      value, to, (query_of_score(0, lane) * kHdim + column) * 4 + i % 4 * kHdim * 4,
      i / 4 * 8 * kHdim * 4, 0);
}

// A wave's 32 columns of a part of dq, on their way to memory.
struct DqTile {
  f32x16 values;
  __amdgpu_buffer_rsrc_t to;  // its rows, as many as there are

  // Adds value i of each lane.
  __device__ void add(int i, int column, int lane) const {
    add_to_dq(to, values[i], i, column, lane);
  }
};
