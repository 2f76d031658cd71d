// A wave's tiles of the bias: from global memory through registers into LDS of the wave's own, and
// from there to the lanes that have the scores. So global memory is read in rows of a tile, not in
// 16 bytes of 32 rows, each of which is another cache line.
//
// Included after scores.h.
#pragma once

#include "scores.h"

// Where the bias of a wave's 32 rows is.
struct BiasRows {
  Global<const char> base;  // of the sequence's first query and the first stacked head
  long head, query, key;    // strides in bytes
  int last_query, keys;
  // The end of the tiles whose elements can be loaded side by side. There are such tiles where 32
  // bits reach all rows from the base and keys lie side by side.
  int whole_end;

  // The wave sees keys before `end`, which is a multiple of a tile's keys.
  __device__ static BiasRows of(const Modifiers& m, const Sequence& sequence, long batch, long head,
                                int queries, int stacked_heads, int end) {
    const Global<const char> base = m.bias + batch * m.bias_batch + head * m.bias_head +
                                    static_cast<long>(sequence.q_start) * m.bias_query;
    const long last = (stacked_heads - 1) * m.bias_head + (queries - 1) * m.bias_query;
    const bool are_near = m.bias_key == sizeof(BiasElement) && last < 1l << 31;
    const int whole = are_near ? m.bias_keys / kTileKeys * kTileKeys : 0;
    return {base,        m.bias_head, m.bias_query,       m.bias_key,
            queries - 1, m.bias_keys, smaller(whole, end)};
  }

  // The offset of a row in bytes; a Word is long, or unsigned where rows are near. Queries behind
  // the last one, whose scores nobody needs, have the offset of the last one.
  template <class Word, class Row>
  __device__ Word offset_of(const Row& row) const {
    return row.head * static_cast<Word>(head) +
           smaller(row.query, last_query) * static_cast<Word>(query);
  }

  __device__ bool have_whole(int first_key) const { return first_key < whole_end; }
};

// Lanes load 16 bytes each of whole tiles, as they lie in LDS; of others each lane copies what it
// needs. Without room in LDS it loads that when it needs it: beside products that wide it takes
// little. row_of(number) gives a row of the tile: the `query`, and the `head` of stacked ones.
template <bool kIsInLds, class RowOf>
struct BiasTiles {
  static constexpr int kRowBytes = kTileKeys * sizeof(BiasElement), kBytes = 32 * kRowBytes;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kLoads = 32 * kChunks / 64, kRowsOfLoad = 64 / kChunks;
  // How many offsets of loads are kept: beside a mask there are few registers, and on gfx950
  // kernels of three waves would spill a second one.
#if defined(__gfx950__)
  static constexpr int kKept = 1;
#else
  static constexpr int kKept = kIsMasked || kLoads == 1 ? 1 : 2;
#endif
  typedef BiasElement Own __attribute__((ext_vector_type(4)));

  BiasRows rows;
  RowOf row_of;
  Lds<char> tile;
  u32x4 chunk[kLoads];     // of the tile on its way
  unsigned offset[kKept];  // of the first loads, where rows are near

  __device__ BiasTiles(const BiasRows& rows, RowOf row_of, Lds<char> tile, int lane)
      : rows(rows), row_of(row_of), tile(tile) {
#pragma unroll
    for (int n = 0; n < kKept; ++n) offset[n] = offset_of_load(n, lane);
  }

  // Starts to load a share of a tile, if it is one of those that are whole; others are left to
  // store().
  __device__ void load(int first_key, int lane, int share, int shares) {
    if (!kIsInLds) return;
    const int begin = share * kLoads / shares, end = (share + 1) * kLoads / shares;
    // The old chunks are of no use, and with this have taken no registers until here.
#pragma unroll
    for (int n = begin; n < end; ++n) asm volatile("" : "=v"(chunk[n]));
    if (begin == end || !rows.have_whole(first_key)) return;
    typedef u32x4 Unaligned __attribute__((aligned(sizeof(BiasElement))));
    const Global<const char> from = rows.base + first_key * static_cast<long>(sizeof(BiasElement));
#pragma unroll
    for (int n = begin; n < end; ++n) {
      const unsigned there =
          n < kKept ? fresh(offset[n]) : opaque(offset_of_load(n, opaque(lane) % 64u));
      chunk[n] = *(Global<const Unaligned>)(from + there);
    }
  }

  // Stores the same tile to LDS, if there is such a tile.
  __device__ void store(int first_key, bool is_there, int lane) const {
    if (!kIsInLds) return;
    if (rows.have_whole(first_key)) {
      const Lds<char> to = tile + fresh(lane) * 16;
#pragma unroll
      for (int n = 0; n < kLoads; ++n) *(Lds<u32x4>)(to + n * 1024) = chunk[n];
    } else if (is_there) {
      copy_own(first_key, opaque(lane));
    }
    wave_barrier();
  }

  // Reads what a lane needs of a tile that is stored.
  __device__ TileBias read(int first_key, int lane) const {
    if constexpr (!kIsInLds) return load_own(first_key, lane);
    u32x4 own[kLoads];
    const int first = fresh(own_place(0, lane));
#pragma unroll
    for (int n = 0; n < kLoads; ++n) own[n] = *(Lds<const u32x4>)(tile + (first ^ n * 16));
    TileBias result;
    __builtin_memcpy(&result, own, sizeof result);
    wave_barrier();
    return result;
  }

 private:
  // A number that addresses are made of. Beside a mask each tile makes them anew, so that they take
  // no registers from tile to tile.
  __device__ static int fresh(int x) { return kIsMasked ? opaque(x) : x; }

  __device__ unsigned offset_of_load(int n, unsigned lane) const {
    const int in_tile = n * kRowsOfLoad + lane / kChunks;
    return rows.template offset_of<unsigned>(row_of(in_tile)) + mixed(in_tile, lane % kChunks) * 16;
  }

  // The chunk in whose place one of a row is: so that reads are free of bank conflicts, as
  // ValueTile::place() has them.
  __device__ static int mixed(unsigned row, unsigned chunk) {
    constexpr int kRowsOfBanks = kBankChunks / kChunks;
    return chunk ^ row / kRowsOfBanks % kChunks;
  }
  __device__ static int own_place(int n, int lane) {
    return lane % 32 * kRowBytes + mixed(lane % 32, lane / 32 * kLoads + n) * 16;
  }

  // Loads four elements of the keys that a lane needs.
  __device__ Own four(Global<const char> row, int first_key, int first, int lane) const {
    Own result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = smaller(first_key + key_of_score(first + i, lane), rows.keys - 1);
      result[i] = *(Global<const BiasElement>)(row + key * rows.key);
    }
    return result;
  }
  __device__ Global<const char> own_row(int lane) const {
    return rows.base + rows.template offset_of<long>(row_of(lane % 32));
  }

  __device__ TileBias load_own(int first_key, int lane) const {
    const Global<const char> row = own_row(lane);
    TileBias result;
#pragma unroll
    for (int first = 0; first < TileBias::kKeys; first += 4) {
      const Own own = four(row, first_key, first, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) result.elements[first + i] = own[i];
    }
    return result;
  }

  // It copies four at a time, as there are no registers for all of them.
  __device__ void copy_own(int first_key, int lane) const {
    constexpr int kChunkKeys = 16 / sizeof(BiasElement);
    const Global<const char> row = own_row(lane);
#pragma unroll 1
    for (int first = 0; first < TileBias::kKeys; first += 4) {
      const int to = own_place(first / kChunkKeys, lane) +
                     first % kChunkKeys * static_cast<int>(sizeof(BiasElement));
      *(Lds<Own>)(tile + to) = four(row, first_key, first, lane);
    }
  }
};
