// Tiles of 8-bit keys and values: from global memory through registers into LDS, and from there
// into operands of matrix products, whose chunks have 16 values.
#pragma once

#include "attention.h"
#include "tiles.h"

// Tiles of kRows rows of kRowBytes bytes in global memory, one after the other.
template <int kRows, int kRowBytes, class Lines>
struct TileSource {
  Lines rows;  // from the tile's first on
  int bytes;   // that the tile reaches

  __device__ explicit TileSource(Lines given) : rows(given), bytes(reach()) {}

  __device__ void advance() {
    rows = rows.from(kRows);
    bytes = reach();
    // Here, where the wave has time.
    asm volatile("" : "+s"(rows.base), "+s"(bytes));
  }

  __device__ __amdgpu_buffer_rsrc_t buffer() const {
    return __builtin_amdgcn_make_buffer_rsrc((void*)(rows.base), 0, bytes, kRawBuffer);
  }

 private:
  // Written without branches: the compiler's would take longer.
  __device__ int reach() const {
    const int count = rows.count < kRows ? rows.count : kRows;
    const int reached = (count - 1) * static_cast<int>(rows.stride) + kRowBytes;
    return reached & ~((count - 1) >> 31);
  }
};

// A tile of 8-bit keys: rows of kHdim values. The keys of every 32 rows are in the order in which a
// lane has scores one after the other: of the first 16 keys in the first half of the wave, of the
// others in the second one. So 16 values that follow each other are a chunk of the tile of values,
// and a wave loads those of one page.
//
// With kFindsAnew a thread finds out for each tile where its share goes: where there is no register
// to keep that.
template <int kKeyCount, int kHdim, int kThreads, class Lines, bool kFindsAnew>
struct Fp8KeyTile : Tile<kKeyCount, kHdim / 16> {
  using Base = Tile<kKeyCount, kHdim / 16>;
  static constexpr int kKeys = kKeyCount, kChunks = kHdim / 16, kSteps = kHdim / 32;
  // A thread loads a chunk of a row: of load 0 for the first 8 keys of every 8 * kLoads, and so on.
  static constexpr int kLoads = kKeys * kChunks / kThreads;
  using Source = TileSource<kKeys, kHdim, Lines>;

  struct Registers {
    u32x4 chunk[kLoads];
  };

  __device__ static int place(int row, int chunk) {
    return Base::template place<kChunks>(row, chunk, mix(row));
  }
  // Rows that are narrower than the banks lie side by side.
  static constexpr int kSideBySide = kChunks < kBankChunks ? kBankChunks / kChunks : 1;
  __device__ static constexpr int mix(int row) { return row / kSideBySide; }

  // Of load 0, and the row of a key, whose bits 2 to 4 change places.
  __device__ static int key_of(int thread) {
    const int number = thread / kChunks;
    return number / 8 * 8 * kLoads + number % 8;
  }
  __device__ static constexpr int row_of(int key) {
    return (key & ~28) | (key & 12) << 1 | (key & 16) >> 2;
  }

  // Where a thread's first load begins, in bytes from the tile's. How far others are from it is in
  // scalar registers: sums would take a vector register for each load throughout the loop.
  __device__ static int first_offset(unsigned stride, int thread, unsigned chunk_distance = 16) {
    return key_of(thread) * stride + thread % kChunks * chunk_distance;
  }

  // Asks where the row of load i is, where rows have places of their own.
  __device__ static void ask(Source& source, int thread, int i) {
    if constexpr (kAreScattered<Lines>) source.rows.ask(i, key_of(thread) + i * 8);
  }

  template <bool kAreFar>
  __device__ static void load(Registers& to, const Source& from, int offset, int thread, int i) {
    const int key = i * 8;
    if constexpr (kAreScattered<Lines>) {
      thread = opaque_below<kThreads>(thread);
      to.chunk[i] = from.rows.template load<u32x4>(i, thread % kChunks * 16);
    } else if constexpr (kAreFar) {
      thread = opaque_below<kThreads>(thread);
      to.chunk[i] = load_far<u32x4>(from.rows, key_of(thread) + key, thread % kChunks * 16);
    } else {
      to.chunk[i] =
          __builtin_amdgcn_raw_buffer_load_b128(from.buffer(), offset, key * from.rows.stride, 0);
    }
  }

  __device__ static void store(Lds<char> tile, const Registers& from, int thread) {
    if constexpr (kFindsAnew) thread = opaque_below<kThreads>(thread);
    constexpr int kDistance = row_of(8);
    static_assert(kLoads <= 2 && mix(kDistance) % kChunks == 0);
    const Lds<char> first = tile + place(row_of(key_of(thread)), thread % kChunks);
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      *(Lds<u32x4>)(first + i * kDistance * Base::kRowBytes) = from.chunk[i];
  }

  __device__ static int first_operand(int lane) { return place(lane % 32, lane / 32); }

  // Rows 32 * block and on, values 32 * step and on; `first` is where first_operand is.
  __device__ static u32x4 operand(Lds<const char> first, int block, int step) {
    return Base::template operand<kChunks>(first, block, step);
  }
};

// A tile of 8-bit values, transposed: rows of kKeys keys. The product takes keys in the order in
// which the accumulators of the scores hold them, which have 16 keys in a lane: these are a chunk.
template <int kKeys, int kHdim, int kThreads, class Lines, bool kFindsAnew>
struct Fp8ValueTile : Tile<kHdim, kKeys / 16> {
  using Base = Tile<kHdim, kKeys / 16>;
  static constexpr int kChunks = kKeys / 16, kBlocks = kHdim / 32, kColumns = kHdim / 4;
  // Dwords of a chunk that a thread makes, each of four keys and for four values.
  static constexpr int kDwords = kChunks * 4 * kColumns / kThreads;
  static_assert(kDwords == 1 || kDwords == 2);
  static_assert(kChunks == 4 || kChunks == 8);
  using Source = TileSource<kKeys, kHdim, Lines>;
  static constexpr int kLoads = 4 * kDwords;

  // The keys of each dword, four values of each.
  struct Registers {
    unsigned row[kLoads];
  };

  // Which values, 4 * column and on, and dwords a thread has. Threads that write at once have eight
  // columns and a whole chunk.
  static constexpr int kPieces = 4 / kDwords;
  __device__ static int column_of(int thread) {
    return thread % 8 + thread / (8 * kPieces) % (kColumns / 8) * 8;
  }
  __device__ static int dword_of(int thread) { return thread / 8 % kPieces * kDwords; }
  __device__ static int chunk_of(int thread) { return thread / (kColumns * kPieces); }
  // That of a thread's first load, which the others follow.
  __device__ static int first_key(int thread) {
    return chunk_of(thread) * 16 + dword_of(thread) * 4;
  }

  __device__ static int place(int row, int chunk) {
    return Base::template transposed_place<kBankChunks>(row, chunk);
  }

  // Where a thread's first load begins, in bytes from the tile's.
  __device__ static int first_offset(unsigned stride, int thread) {
    return first_key(thread) * stride + column_of(thread) * 4;
  }

  // Asks where the row of load i is, where rows have places of their own.
  __device__ static void ask(Source& source, int thread, int i) {
    if constexpr (kAreScattered<Lines>) source.rows.ask(i, first_key(thread) + i);
  }

  template <bool kAreFar>
  __device__ static void load(Registers& to, const Source& from, int offset, int thread, int i) {
    if constexpr (kAreScattered<Lines>) {
      thread = opaque_below<kThreads>(thread);
      to.row[i] = from.rows.template load<unsigned>(i, column_of(thread) * 4);
    } else if constexpr (kAreFar) {
      thread = opaque_below<kThreads>(thread);
      to.row[i] = load_far<unsigned>(from.rows, first_key(thread) + i, column_of(thread) * 4);
    } else {
      to.row[i] =
          __builtin_amdgcn_raw_buffer_load_b32(from.buffer(), offset, i * from.rows.stride, 0);
    }
  }

  __device__ static void store(Lds<char> tile, const Registers& from, int, int thread) {
    if constexpr (kFindsAnew) thread = opaque_below<kThreads>(thread);
    const int first = place(column_of(thread) * 4, chunk_of(thread)) + dword_of(thread) * 4;
    const unsigned address = (unsigned)(tile + first);
    unsigned keys[kDwords][4];
#pragma unroll
    for (int i = 0; i < kDwords; ++i) transpose(keys[i], from.row + 4 * i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const unsigned to = address ^ place(j, 0);
      if constexpr (kDwords == 1) *(Lds<unsigned>)to = keys[0][j];
      else *(Lds<u32x2>)to = u32x2{keys[0][j], keys[1][j]};
    }
  }

  __device__ static int first_operand(int lane) { return place(lane % 32, lane / 32); }

  // Values 32 * block and on, the 32 keys 32 * step and on; `first` is where first_operand is.
  __device__ static u32x4 operand(Lds<const char> first, int block, int step) {
    return Base::template operand<kChunks>(first, block, step);
  }

 private:
  // From four keys with four values each to four values with four keys each.
  __device__ static void transpose(unsigned (&to)[4], const unsigned* row) {
    const unsigned low[2] = {lower_bytes(row[0], row[1]), lower_bytes(row[2], row[3])};
    const unsigned high[2] = {upper_bytes(row[0], row[1]), upper_bytes(row[2], row[3])};
    to[0] = lower_halves(low[0], low[1]);
    to[1] = upper_halves(low[0], low[1]);
    to[2] = lower_halves(high[0], high[1]);
    to[3] = upper_halves(high[0], high[1]);
  }

  // Bytes 0 and 1 of both, in turn, `even`'s first; and bytes 2 and 3.
  __device__ static unsigned lower_bytes(unsigned even, unsigned odd) {
    return __builtin_amdgcn_perm(odd, even, 0x05010400);
  }
  __device__ static unsigned upper_bytes(unsigned even, unsigned odd) {
    return __builtin_amdgcn_perm(odd, even, 0x07030602);
  }
};

// Tiles in packed pages: each wave loads a block of rows that one page has, whatever is behind the
// last key of it.
template <int kRows, class Lines>
struct PackedTileSource {
  Lines rows;  // from the tile's first on

  __device__ explicit PackedTileSource(Lines given) : rows(given) {}

  __device__ void advance() {
    rows = rows.from(kRows);
    asm volatile("" : "+s"(rows.base));  // here, where the wave has time
  }
  __device__ __amdgpu_buffer_rsrc_t buffer() const { return endless_buffer(rows); }
};

// The same tile of keys. What is behind the last one is hidden by all masks.
template <int kKeyCount, int kHdim, int kThreads, class Lines, bool kFindsAnew>
struct PackedFp8KeyTile : Fp8KeyTile<kKeyCount, kHdim, kThreads, Lines, kFindsAnew> {
  using Base = Fp8KeyTile<kKeyCount, kHdim, kThreads, Lines, kFindsAnew>;
  using Source = PackedTileSource<kKeyCount, Lines>;
  using typename Base::Registers;

  __device__ static void ask(Source&, int, int) {}

  template <bool kAreFar>
  __device__ static void load(Registers& to, const Source& from, int offset, int, int i) {
    static_assert(!kAreFar);
    to.chunk[i] =
        __builtin_amdgcn_raw_buffer_load_b128(from.buffer(), offset, i * 8 * from.rows.stride, 0);
  }
};

// The same tile of values, of which a chunk of LDS lies in memory as it is.
template <int kKeys, int kHdim, int kThreads, class Lines>
struct PackedFp8ValueTile : Fp8ValueTile<kKeys, kHdim, kThreads, Lines, (kHdim > 128)> {
  static constexpr bool kFindsAnew = kHdim > 128;
  using Base = Fp8ValueTile<kKeys, kHdim, kThreads, Lines, kFindsAnew>;
  using Base::kChunks;
  using Source = PackedTileSource<kKeys, Lines>;
  // Those that have one chunk of every column, and how far its columns are apart for a thread.
  static constexpr int kThreadsOfChunk = kThreads / kChunks, kLoads = kHdim / kThreadsOfChunk;
  static_assert(kThreadsOfChunk % 64 == 0);

  struct Registers {
    u32x4 chunk[kLoads];
  };

  // All threads of a wave have the same one.
  __device__ static int chunk_of(int thread) {
    return __builtin_amdgcn_readfirstlane(thread / 64) * 64 / kThreadsOfChunk;
  }
  // Eight threads that write at once have columns that lie in different banks.
  __device__ static int column_of(int thread) {
    const int n = thread % kThreadsOfChunk;
    if constexpr (kChunks == 8) return n / 16 * 16 + n % 8 * 2 + n / 8 % 2;
    else if constexpr (kBankChunks == 8)
      return n / 32 * 32 + n / 4 % 2 * 16 + n / 8 % 4 * 4 + n % 4;
    else return n / 16 * 16 + n / 2 % 4 * 4 + n / 8 % 2 * 2 + n % 2;
  }

  __device__ static int first_offset(unsigned stride, int thread) {
    return chunk_of(thread) * 16 * stride + column_of(thread) * 16;
  }
  __device__ static void ask(Source&, int, int) {}

  template <bool kAreFar>
  __device__ static void load(Registers& to, const Source& from, int offset, int, int i) {
    static_assert(!kAreFar);
    constexpr int kDistance = kThreadsOfChunk * 16;
    to.chunk[i] = __builtin_amdgcn_raw_buffer_load_b128(from.buffer(), offset, i * kDistance, 0);
  }

  // Probabilities of keys behind the last one are 0, and what is there might be no number.
  __device__ static void store(Lds<char> tile, Registers from, int keys_left, int thread) {
    const int count = keys_left - chunk_of(thread) * 16;
    if (__builtin_expect(count < 16, 0)) {
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const int keys = count - 4 * d;
        const unsigned kept = keys <= 0 ? 0 : keys >= 4 ? ~0u : (1u << 8 * keys) - 1;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) from.chunk[i][d] &= kept;
      }
    }
    if constexpr (kFindsAnew) thread = opaque_below<kThreads>(thread);
    const Lds<char> first = tile + Base::place(column_of(thread), chunk_of(thread));
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      *(Lds<u32x4>)(first + i * kThreadsOfChunk * Base::kRowBytes) = from.chunk[i];
  }
};
