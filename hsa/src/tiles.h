// Tiles of keys and values: from global memory through registers into LDS, and from there into
// operands of matrix products.
#pragma once

#include "address_spaces.h"
#include "number_formats.h"

// What LDS serves at once, in chunks of 16 bytes.
#if defined(__gfx950__)
constexpr int kBankChunks = 16;  // 64 banks
#else
constexpr int kBankChunks = 8;  // 32 banks
#endif

constexpr unsigned kRawBuffer = 0x27000;  // 32-bit elements; no swizzle

// Rows of a tensor from `base` on: of one sequence and head.
struct Rows {
  Global<const char> base;
  unsigned stride;  // bytes
  int count;

  __device__ Rows from(int row) const {
    return {base + static_cast<unsigned long>(row) * stride, stride, count - row};
  }
};

// The same in pages, tile by tile, each of kRows rows: `base` is where a tile would begin if all of
// it were on the page that the wave's own rows of it are on, and `count` is from that tile on.
//
// Lane l has with which block of kBlock rows, counted from row 0 of page 0, tile first + l would
// begin: below 2^31 for every tensor that a GPU has room for, since rows are wide or blocks large.
// To ask a lane takes no time, where the table would be waited for.
template <int kRows, int kBlock>
struct PagedRows : Rows {
  Global<const char> pages;  // row 0 of page 0
  int tile, first;
  int block;

  __device__ PagedRows from(int rows) const {
    PagedRows result = *this;
    result.tile += rows / kRows;
    result.count -= rows;
    const long begin = static_cast<int>(__builtin_amdgcn_readlane(block, result.tile - first));
    result.base = pages + begin * static_cast<long>(stride * kBlock);
    return result;
  }
};

// The same in small pages, where every row of a tile has a place of its own. A wave loads rows of
// one block of kBlockRows of each tile: lane l has the place of row l % kBlockRows of tile
// first + l / kBlockRows, and others ask it.
template <int kRows>
struct ScatteredRows : Rows {
  static constexpr int kBlockRows = 16, kMostOwn = 8;
  int tile, first;
  int row;              // counted from row 0 of page 0
  int named;            // the page of a row of tiles that come later, as the table names it
  int place[kMostOwn];  // of the rows that the thread loads

  __device__ ScatteredRows from(int rows) const {
    ScatteredRows result = *this;
    result.tile += rows / kRows;
    result.count -= rows;
    return result;
  }

  // Asks for row number `n` of those that the thread loads, which is `own` in the tile.
  __device__ void ask(int n, int own) {
    const int lane = (tile - first) * kBlockRows + own % kBlockRows;
    place[n] = __builtin_amdgcn_ds_bpermute(lane * 4, row);
  }
  // What lies at an offset in it, once its place has been told.
  template <class T>
  __device__ T load(int n, int offset) const {
    const unsigned long there = static_cast<unsigned>(place[n]);
    return *(Global<const T>)(base + there * stride + offset);
  }
};

template <class Lines>
constexpr bool kAreScattered = false;
template <int kRows>
constexpr bool kAreScattered<ScatteredRows<kRows>> = true;

// Whether a tile's rows are further apart than a buffer's offsets reach.
template <int kRows>
__device__ inline bool are_far(const Rows& rows) {
  return rows.stride >= (1u << 31) / kRows;
}

// What a buffer load would give, for such rows. There is one row at least.
template <class T>
__device__ inline T load_far(const Rows& rows, int row, int offset) {
  // Computed again for each tile: registers for all addresses are not to be had.
  asm volatile("" : "+v"(row), "+v"(offset));
  // The last one is before `base` where the tile is behind the end.
  const long there = row < rows.count ? row : rows.count - 1;
  const T value = *(Global<const T>)(rows.base + there * static_cast<long>(rows.stride) + offset);
  return row < rows.count ? value : T(0);
}

// What lies at an offset in a buffer.
template <class T>
__device__ inline T load_near(__amdgpu_buffer_rsrc_t buffer, unsigned offset) {
  if constexpr (sizeof(T) == 2)
    return bits_as<T>(__builtin_amdgcn_raw_buffer_load_b16(buffer, offset, 0, 0));
  else if constexpr (sizeof(T) == 4)
    return bits_as<T>(__builtin_amdgcn_raw_buffer_load_b32(buffer, offset, 0, 0));
  else if constexpr (sizeof(T) == 8)
    return bits_as<T>(__builtin_amdgcn_raw_buffer_load_b64(buffer, offset, 0, 0));
  else return bits_as<T>(__builtin_amdgcn_raw_buffer_load_b128(buffer, offset, 0, 0));
}

// A view of kRows rows at most, of which the hardware reads those beyond the end as zeros.
template <int kRows, int kRowBytes>
__device__ inline __amdgpu_buffer_rsrc_t buffer_of(Rows rows) {
  const int count = rows.count < kRows ? rows.count : kRows;
  const int bytes = count > 0 ? (count - 1) * static_cast<int>(rows.stride) + kRowBytes : 0;
  return __builtin_amdgcn_make_buffer_rsrc((void*)(rows.base), 0, bytes, kRawBuffer);
}

// The same in two steps, in scalar registers, where they are called and without a branch: between
// matrix products there is room for one of them. First, how many bytes there are to read.
template <int kRows, int kRowBytes>
__device__ inline int bytes_at_once(const Rows& rows) {
  const int last = (rows.count < kRows ? rows.count : kRows) - 1;
  int bytes = (last * static_cast<int>(rows.stride) + kRowBytes) & ~(last >> 31);
  asm volatile("" : "+s"(bytes));
  return bytes;
}
__device__ inline __amdgpu_buffer_rsrc_t buffer_with(const Rows& rows, int bytes) {
  return __builtin_amdgcn_make_buffer_rsrc((void*)(rows.base), 0, bytes, kRawBuffer);
}

// In packed pages pieces of many rows lie between those of one: no buffer ends with its last row.
__device__ inline __amdgpu_buffer_rsrc_t endless_buffer(const Rows& rows) {
  constexpr int kAll = 0x7fffffff;
  return buffer_with(rows, kAll);
}

// Both steps.
template <int kRows, int kRowBytes>
__device__ inline __amdgpu_buffer_rsrc_t buffer_at_once(const Rows& rows) {
  return buffer_with(rows, bytes_at_once<kRows, kRowBytes>(rows));
}

// A tile in LDS: kRows rows of kChunks chunks. A chunk is 8 values, which a lane reads at once as
// half of an operand's 16 values of depth.
//
// Lanes read one chunk of consecutive rows each. The chunks of a row change places by an exclusive
// or with bits of the row's number, so that they are in different banks.
template <int kRows, int kChunks>
struct Tile {
  static constexpr int kBytes = kRows * kChunks * 16;
  static constexpr int kRowBytes = kChunks * 16;

  // `mix` changes bits of the chunk's number below kMixed, a power of two.
  template <int kMixed>
  __device__ static int place(int row, int chunk, int mix) {
    static_assert(kChunks % kMixed == 0);
    return row * kRowBytes + (chunk ^ (mix & (kMixed - 1))) * 16;
  }

  // The same of a transposed tile. Free of conflicts where bits 2 and on of the row vary, and for
  // reads, which the hardware serves in groups of rows 0-3 and 20-23, 4-7 and 16-19 and so on (with
  // 64 banks two groups at once). The amd-model benchmark counts what there is.
  //
  // All of it is made of exclusive ors, so that place(a | b, c) is place(a, c) ^ place(b, 0) for
  // numbers without common bits.
  template <int kBankChunks>
  __device__ static int transposed_place(int row, int chunk) {
    constexpr bool kHas32Banks = kBankChunks == 8;
    if constexpr (kHas32Banks && kChunks == 8)
      return place<8>(row, chunk, row ^ row / 8 % 2 * 3 ^ row / 16 % 2);
    else if constexpr (kHas32Banks)
      return place<4>(row ^ row / 4 % 2, chunk, row / 2 % 2 ^ row / 8 % 2 ^ row / 16 % 2 * 2);
    else if constexpr (kChunks == 8) return place<8>(row, chunk, row / 4 ^ row / 2 % 2 * 4);
    else return place<4>(row ^ row / 16 % 2 ^ row / 4 % 2 * 2, chunk, row / 4);
  }

  // The chunk `step` operands behind the one at `first`, `block` times 32 rows below.
  template <int kMixed>
  __device__ static u32x4 operand(Lds<const char> first, int block, int step) {
    const int chunk = 2 * step;
    const unsigned mixed = (unsigned)first ^ chunk % kMixed * 16;
    return *(Lds<const u32x4>)(mixed + chunk / kMixed * kMixed * 16 + block * 32 * kRowBytes);
  }
};

// How the numbers of tiles of 16 bits lie in memory: as products take them. Others become those on
// their way into LDS.
struct AsTaken {
  static constexpr int kBytes = 2;
  using Eight = u32x4;

  __device__ static u32x4 eight(Eight numbers) { return numbers; }
  // Number i of four rows.
  template <int kDwords>
  __device__ static u32x2 column(const unsigned (&row)[4][kDwords], int i) {
    const int d = i / 2;
    return i % 2 ? u32x2{upper_halves(row[0][d], row[1][d]), upper_halves(row[2][d], row[3][d])}
                 : u32x2{lower_halves(row[0][d], row[1][d]), lower_halves(row[2][d], row[3][d])};
  }
};

// A tile of keys: rows of kHdim values.
template <int kKeyCount, int kHdim, int kThreads, int kBankChunks, class Lines = Rows,
          class Numbers = AsTaken>
struct KeyTile : Tile<kKeyCount, kHdim / 8> {
  using Base = Tile<kKeyCount, kHdim / 8>;
  static constexpr int kKeys = kKeyCount, kSteps = kHdim / 16;
  static constexpr int kRun = 4;  // keys one after the other, of which a lane has scores
  static constexpr int kChunks = kHdim / 8;
  // Eight threads load a row, 128 bytes at a time.
  static constexpr int kLoads = kChunks / 8;
  static constexpr int kMixed = kChunks % kBankChunks == 0 ? kBankChunks : 8;
  static_assert(kThreads == 8 * kKeys);

  // Where two rows are as wide as the banks, odd rows begin with their second half.
  __device__ static int swap(int row) { return kMixed == 16 ? row % 2 : 0; }

  static constexpr int kChunkBytes = 8 * Numbers::kBytes;  // in memory
  static constexpr int kMemoryRowBytes = kHdim * Numbers::kBytes;
  using Chunk = typename Numbers::Eight;

  struct Registers {
    Chunk chunk[kLoads];
  };

  __device__ static int place(int row, int chunk) {
    // Rows of half the banks' width lie in pairs.
    return Base::template place<kMixed>(row, chunk, kMixed == kBankChunks ? row : row / 2);
  }

  // A tile on its way: load() starts one of kLoads loads.
  struct Source {
    Lines rows;
    int thread;
    int bytes;  // of the next buffer
    __amdgpu_buffer_rsrc_t buffer;
    unsigned offset[kLoads];

    template <bool kAreFar>
    __device__ void load(Registers& to, int i) const {
      if constexpr (kAreScattered<Lines>)
        to.chunk[i] = rows.template load<Chunk>(0, column(thread, i));
      else if constexpr (kAreFar)
        to.chunk[i] = load_far<Chunk>(rows, thread / 8, column(thread, i));
      else to.chunk[i] = load_near<Chunk>(buffer, offset[i]);
    }

    // On to the next tile, in three steps.
    __device__ void advance_rows() {
      rows = rows.from(kKeys);
      asm volatile("" : "+s"(rows.base), "+s"(rows.count));
    }
    __device__ void advance_bytes() {
      if constexpr (kAreScattered<Lines>) rows.ask(0, thread / 8);
      else bytes = bytes_at_once<kKeys, kMemoryRowBytes>(rows);
    }
    __device__ void advance_buffer() { buffer = buffer_with(rows, bytes); }
  };

  // In bytes, where load i of a thread begins in its row.
  __device__ static int column(int thread, int i) {
    return (thread % 8 + (i ^ swap(thread / 8)) * 8) * kChunkBytes;
  }

  __device__ static Source source(Lines rows, int thread, unsigned = 0) {
    Source result{rows, thread, 0, buffer_of<kKeys, kMemoryRowBytes>(rows)};
    for (int i = 0; i < kLoads; ++i)
      result.offset[i] = thread / 8 * rows.stride + column(thread, i);
    if constexpr (kAreScattered<Lines>) result.advance_bytes();
    return result;
  }

  __device__ static void store(Lds<char> tile, const Registers& from, int thread) {
#pragma unroll
    for (int i = 0; i < kStores; ++i) store_piece(tile + first_store(thread), from, i);
  }

  // Where a thread's share goes, in pieces: piece i is what load i has brought.
  __device__ static int first_store(int thread) {
    const int row = thread / 8;
    return place(row, thread % 8 + swap(row) * 8);
  }
  static constexpr int kStores = kLoads;
  __device__ static void store_piece(Lds<char> first, const Registers& from, int i) {
    const unsigned mixed = (unsigned)first ^ i * 8 % kMixed * 16;
    *(Lds<u32x4>)(mixed + i * 8 / kMixed * kMixed * 16) = Numbers::eight(from.chunk[i]);
  }

  __device__ static int first_operand(int lane) { return place(lane % 32, lane / 32); }

  // Rows 32 * block and on, values 16 * step and on; `first` is where first_operand is.
  __device__ static u32x4 operand(Lds<const char> first, int block, int step) {
    return Base::template operand<kMixed>(first, block, step);
  }
};

// What a load of so many bytes gives: dwords, or half of one.
template <int kBytes, class Dwords>
struct LoadedOf {
  using Type = Dwords;
};
template <class Dwords>
struct LoadedOf<2, Dwords> {
  using Type = unsigned short;
};

// A tile of values, transposed: rows of kKeys keys. The product takes keys in the order in which
// the accumulator of the scores holds them: a lane of the first half of the wave has keys 0 to 3
// and 8 to 11 of 16, one of the second half keys 4 to 7 and 12 to 15. These are a chunk.
template <int kKeys, int kHdim, int kThreads, int kBankChunks, class Lines = Rows,
          class Numbers = AsTaken>
struct ValueTile : Tile<kHdim, kKeys / 8> {
  using Base = Tile<kHdim, kKeys / 8>;
  static constexpr int kChunks = kKeys / 8, kBlocks = kHdim / 32;
  static constexpr int kWidth = kKeys / 4 * kHdim / kThreads;  // values of a row for a thread
  static_assert(kWidth == 2 || kWidth == 4);
  static_assert(kChunks == 4 || kChunks == 8);
  static constexpr int kLoadBytes = kWidth * Numbers::kBytes;
  static constexpr int kDwords = (kLoadBytes + 3) / 4;
  static constexpr int kColumns = kHdim / kWidth;
  static constexpr int kMemoryRowBytes = kHdim * Numbers::kBytes;

  // Four keys, kWidth values of each.
  struct Registers {
    unsigned row[4][kDwords];
  };

  // Which keys and values a thread has: 4 * quad and on, kWidth * column and on. Threads that write
  // at once have eight columns, both halves of a chunk, and with 64 banks two chunks.
  __device__ static int column_of(int thread) {
    return thread % 8 + thread / 32 % (kColumns / 8) * 8;
  }
  __device__ static int half_of(int thread) { return thread / 8 % 2; }
  __device__ static int chunk_of(int thread) { return thread / 16 % 2 + thread / 4 / kColumns * 2; }
  __device__ static int quad_of(int thread) {
    const int chunk = chunk_of(thread);
    return chunk / 2 * 4 + half_of(thread) * 2 + chunk % 2;
  }

  // Free of conflicts for the writes of store(), where bits 1 or 2 and on of the row vary.
  __device__ static int place(int row, int chunk) {
    return Base::template transposed_place<kBankChunks>(row, chunk);
  }

  // Column n of 64, eight of which are written at once and lie in different banks.
  __device__ static int apart(int n) {
    return kChunks == 8 ? n : n / 32 * 32 + n / 4 % 2 * 16 + n / 8 % 4 * 4 + n % 4;
  }

  static constexpr int kLoads = 4;
  typedef unsigned Dwords __attribute__((ext_vector_type(kDwords)));
  using Columns = typename LoadedOf<kLoadBytes, Dwords>::Type;

  struct Source {
    Lines rows;
    int thread;
    int bytes;  // of the next buffer
    __amdgpu_buffer_rsrc_t buffer;
    unsigned offset;

    template <bool kAreFar>
    __device__ void load(Registers& to, int i) const {
      Columns values;
      if constexpr (kAreScattered<Lines>)
        values = rows.template load<Columns>(i, column_of(thread) * kLoadBytes);
      else if constexpr (kAreFar)
        values = load_far<Columns>(rows, quad_of(thread) * 4 + i, column_of(thread) * kLoadBytes);
      else values = load_near<Columns>(buffer, offset + i * rows.stride);
      const Dwords dwords = Dwords(values);
      __builtin_memcpy(to.row[i], &dwords, sizeof dwords);
    }

    // On to the next tile, in three steps.
    __device__ void advance_rows() {
      rows = rows.from(kKeys);
      asm volatile("" : "+s"(rows.base), "+s"(rows.count));
    }
    __device__ void advance_bytes() {
      if constexpr (kAreScattered<Lines>)
        for (int i = 0; i < kLoads; ++i) rows.ask(i, quad_of(thread) * 4 + i);
      else bytes = bytes_at_once<kKeys, kMemoryRowBytes>(rows);
    }
    __device__ void advance_buffer() { buffer = buffer_with(rows, bytes); }
  };

  __device__ static Source source(Lines rows, int thread) {
    unsigned offset = quad_of(thread) * 4 * rows.stride + column_of(thread) * kLoadBytes;
    // An addition for each load is cheaper than registers for four offsets throughout the loop.
    asm volatile("" : "+v"(offset));
    Source result{rows, thread, 0, buffer_of<kKeys, kMemoryRowBytes>(rows), offset};
    if constexpr (kAreScattered<Lines>) result.advance_bytes();
    return result;
  }

  __device__ static void store(Lds<char> tile, const Registers& from, int thread) {
#pragma unroll
    for (int i = 0; i < kStores; ++i) store_piece(tile + first_store(thread), from, i);
  }

  __device__ static void clear_behind(Registers&) {}  // loads have given zeros

  // Where a thread's share goes, in pieces: one for each of its values.
  __device__ static int first_store(int thread) {
    return place(column_of(thread) * kWidth, chunk_of(thread)) + half_of(thread) * 8;
  }
  static constexpr int kStores = kWidth;
  __device__ static void store_piece(Lds<char> first, const Registers& from, int i) {
    *(Lds<u32x2>)((unsigned)first ^ place(i, 0)) = keys_of(from, i);
  }

  // Of value i, a thread's four keys.
  __device__ static u32x2 keys_of(const Registers& from, int i) {
    return Numbers::column(from.row, i);
  }

  __device__ static int first_operand(int lane) { return place(lane % 32, lane / 32); }

  // Values 32 * block and on, the 16 keys 16 * step and on; `first` is where first_operand is.
  __device__ static u32x4 operand(Lds<const char> first, int block, int step) {
    return Base::template operand<kChunks>(first, block, step);
  }
};

// The same tile of keys with a chunk of padding behind each row, which keeps rows in different
// banks, too: it takes more LDS, but all operands are at fixed distances from the first one.
template <int kKeyCount, int kHdim, int kThreads, class Lines, class Numbers>
struct PaddedKeyTile : KeyTile<kKeyCount, kHdim, kThreads, 8, Lines, Numbers> {
  using Base = KeyTile<kKeyCount, kHdim, kThreads, 8, Lines, Numbers>;
  using typename Base::Registers;
  static constexpr int kRowBytes = Base::kRowBytes + 16, kBytes = kKeyCount * kRowBytes;

  __device__ static int place(int row, int chunk) { return row * kRowBytes + chunk * 16; }

  __device__ static int first_store(int thread) { return place(thread / 8, thread % 8); }
  __device__ static void store_piece(Lds<char> first, const Registers& from, int i) {
    *(Lds<u32x4>)(first + i * 128) = Numbers::eight(from.chunk[i]);
  }

  __device__ static int first_operand(int lane) { return place(lane % 32, lane / 32); }

  __device__ static u32x4 operand(Lds<const char> first, int block, int step) {
    return *(Lds<const u32x4>)(first + block * 32 * kRowBytes + step * 32);
  }
};

// The same tile of values with padding. Rows that a thread writes are far apart, one in each of
// kWidth parts, so that those that threads write at once follow each other.
template <int kKeys, int kHdim, int kThreads, class Lines, class Numbers>
struct PaddedValueTile : ValueTile<kKeys, kHdim, kThreads, 8, Lines, Numbers> {
  using Base = ValueTile<kKeys, kHdim, kThreads, 8, Lines, Numbers>;
  using typename Base::Registers;
  static_assert(Base::kChunks == 8 && Base::kColumns == 32);
  static constexpr int kWidth = Base::kWidth, kRowBytes = Base::kRowBytes + 16;
  // With this distance the rows of all parts that are read at once are in different banks.
  static constexpr int kPartBytes = Base::kColumns * kRowBytes + 256 / kWidth;
  static constexpr int kBytes = kWidth * kPartBytes;

  __device__ static int place(int row, int chunk) {
    return row % kWidth * kPartBytes + row / kWidth * kRowBytes + chunk * 16;
  }

  __device__ static int apart(int n) {
    if constexpr (kWidth == 2) return n / 16 * 16 + n % 8 * 2 + n / 8 % 2;
    else return n / 16 * 16 + n / 2 % 4 * 4 + n / 8 % 2 * 2 + n % 2;
  }

  __device__ static int first_store(int thread) {
    return place(Base::column_of(thread) * kWidth, Base::chunk_of(thread)) +
           Base::half_of(thread) * 8;
  }
  __device__ static void store_piece(Lds<char> first, const Registers& from, int i) {
    *(Lds<u32x2>)(first + i * kPartBytes) = Base::keys_of(from, i);
  }

  __device__ static int first_operand(int lane) { return place(lane % 32, lane / 32); }

  __device__ static u32x4 operand(Lds<const char> first, int block, int step) {
    return *(Lds<const u32x4>)(first + block * 32 / kWidth * kRowBytes + step * 32);
  }
};

// A tile of keys in packed pages. Of every 16 keys a lane has scores of eight that follow each
// other, one of the first half of the wave those of the first ones. So the same of a column of
// values, which lie side by side in memory, are a chunk of their tile. What is behind the last key
// is hidden by all masks.
template <class Plain, class Lines>
struct PackedKeyTile : Plain {
  using Plain::kKeys, Plain::kLoads;
  using typename Plain::Chunk, typename Plain::Registers;
  static constexpr int kRun = 8, kPieceBytes = 16;

  struct Source {
    Lines rows;
    __amdgpu_buffer_rsrc_t buffer;
    unsigned offset[kLoads];

    template <bool kAreFar>
    __device__ void load(Registers& to, int i) const {
      static_assert(!kAreFar);
      to.chunk[i] = load_near<Chunk>(buffer, offset[i]);
    }

    // On to the next tile, in one step: nobody has to count what there is of it.
    __device__ void advance_rows() {
      rows = rows.from(kKeys);
      asm volatile("" : "+s"(rows.base));
      buffer = endless_buffer(rows);
    }
    __device__ void advance_bytes() {}
    __device__ void advance_buffer() {}
  };

  // `piece_distance` is that between the pieces of a row, in bytes.
  __device__ static Source source(Lines rows, int thread, unsigned piece_distance) {
    Source result{rows, endless_buffer(rows)};
    for (int i = 0; i < kLoads; ++i) {
      const int column = Plain::column(thread, i);
      result.offset[i] =
          thread / 8 * rows.stride + column / kPieceBytes * piece_distance + column % kPieceBytes;
    }
    return result;
  }

  // Bits 2 and 3 of a key change places.
  __device__ static int first_store(int thread) {
    const int key = thread / 8, row = (key & ~12) | (key & 4) << 1 | (key & 8) >> 1;
    return Plain::first_store(row * 8 + thread % 8);
  }
  __device__ static void store(Lds<char> tile, const Registers& from, int thread) {
#pragma unroll
    for (int i = 0; i < Plain::kStores; ++i)
      Plain::store_piece(tile + first_store(thread), from, i);
  }
};

// A tile of values in packed pages: a wave has eight keys, of which a column is a chunk of LDS.
template <class Plain, int kHdim, class Lines, class Numbers>
struct PackedValueTile : Plain {
  static constexpr int kLoads = kHdim / 64, kStores = kLoads;
  static constexpr int kPieceBytes = 16, kChunkBytes = 8 * Numbers::kBytes;
  using Chunk = typename Numbers::Eight;

  struct Registers {
    Chunk chunk[kLoads];
    int count;  // of the keys that there are from the first of them on
  };

  __device__ static int column_of(int thread) { return Plain::apart(thread % 64); }
  __device__ static int chunk_of(int thread) { return __builtin_amdgcn_readfirstlane(thread / 64); }

  struct Source {
    Lines rows;
    int first;  // key, in the tile
    __amdgpu_buffer_rsrc_t buffer;
    unsigned offset;

    template <bool kAreFar>
    __device__ void load(Registers& to, int i) const {
      static_assert(!kAreFar);
      to.chunk[i] = load_near<Chunk>(buffer, offset + i * 64 * kPieceBytes);
      to.count = rows.count - first;
    }

    __device__ void advance_rows() {
      rows = rows.from(Plain::kChunks * 8);
      asm volatile("" : "+s"(rows.base), "+s"(rows.count));
      buffer = endless_buffer(rows);
    }
    __device__ void advance_bytes() {}
    __device__ void advance_buffer() {}
  };

  __device__ static Source source(Lines rows, int thread) {
    // Keys of one chunk, or of two, are one behind the other in a column's piece.
    constexpr int kPieceKeys = kPieceBytes / Numbers::kBytes;
    const int first = chunk_of(thread) * 8;
    const unsigned offset = first / kPieceKeys * kPieceKeys * rows.stride +
                            first % kPieceKeys * Numbers::kBytes + column_of(thread) * kPieceBytes;
    return {rows, first, endless_buffer(rows), offset};
  }

  // Probabilities of keys behind the last one are 0, and what is there might be no number.
  __device__ static void clear_behind(Registers& from) {
    if (__builtin_expect(from.count >= 8, 1)) return;
    constexpr int kOfDword = 4 / Numbers::kBytes;
#pragma unroll
    for (int d = 0; d < kChunkBytes / 4; ++d) {
      const int keys = from.count - kOfDword * d;
      const unsigned kept = keys <= 0          ? 0
                            : keys >= kOfDword ? ~0u
                                               : (1u << 8 * Numbers::kBytes * keys) - 1;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) from.chunk[i][d] &= kept;
    }
  }

  __device__ static int first_store(int thread) {
    return Plain::place(column_of(thread), chunk_of(thread));
  }
  __device__ static void store_piece(Lds<char> first, const Registers& from, int i) {
    *(Lds<u32x4>)(first + Plain::place(i * 64, 0)) = Numbers::eight(from.chunk[i]);
  }
};

// A wave's way between rows in global memory and rows of its lanes: 32 rows of 64 values in LDS of
// its own. So global memory is read and written in whole lines.
struct Exchange {
  static constexpr int kBytes = 32 * 128;
  static constexpr int kPasses = 4;  // of eight rows each, eight lanes a row

  __device__ static int place(int row, int chunk) {
    const int mix = kBankChunks == 16 ? row / 2 : row;
    return row * 128 + (chunk ^ (mix & 7)) * 16;
  }

  // The row and the chunk that a lane moves from or to global memory.
  __device__ static int row_of(int pass, int lane) { return pass * 8 + lane / 8; }
  __device__ static int chunk_of(int lane) { return lane % 8; }

  // An operand's chunk: of row lane % 32, values 16 * step and on.
  __device__ static int operand_place(int step, int lane) {
    return place(lane % 32, 2 * step + lane / 32);
  }

  // Four values of an accumulator: of row lane % 32, 8 * group + 4 * (lane / 32) and on. Rows 8 to
  // 15 and 24 to 31 have the halves of their chunks swapped, for the banks.
  __device__ static int accumulator_place(int group, int lane) {
    return place(lane % 32, group) + (lane / 32 ^ lane / 8 % 2) * 8;
  }

  __device__ static u32x4 unswapped(u32x4 chunk, int pass) { return pass % 2 ? chunk.zwxy : chunk; }
};
