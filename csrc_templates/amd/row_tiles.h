// Tiles of keys and values for head dimensions that no tile has as its own: of a tile as wide as
// the next one that there is, the columns behind a row's end are zeros, and products leave out what
// they can of them.
#pragma once

#include "tiles.h"
#include "workgroups.h"

constexpr int rounded_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Behind the end of every buffer: the hardware reads zeros.
constexpr unsigned kOutside = 1u << 31;

// How rows are reached: near ones are in reach of one buffer's offsets, far ones are not and have
// an address each, and so have those in pages, which a table names.
enum class Access { near, far, paged };

// The pages of one sequence.
struct Pages {
  Global<const int> table;
  Divisor size;   // rows of a page
  unsigned last;  // page that there is
  long stride;    // bytes between pages
};

// The keys, or the values, of one head of a sequence from some row on.
template <Access kAccess>
struct KeyRows {
  Rows rows;    // in pages: those of page 0, the count being the sequence's
  Pages pages;  // of use in pages only, as the next one
  int first;

  __device__ KeyRows from(int row) const {
    KeyRows result = *this;
    if constexpr (kAccess == Access::paged) result.first += row;
    else result.rows = rows.from(row);
    return result;
  }

  __device__ bool has(int row) const {
    return kAccess == Access::paged ? first + row < rows.count : row < rows.count;
  }

  __device__ Global<const char> address(int row) const {
    if constexpr (kAccess != Access::paged)
      return rows.base + static_cast<unsigned long>(row) * rows.stride;
    const Quotient in_page = divide(first + row, pages.size);
    // The host has looked for pages that are not there, where it can read the table. Here they must
    // not lead outside.
    const unsigned named = pages.table[in_page.value];
    const long page = named < pages.last ? named : pages.last;
    return rows.base + page * pages.stride +
           static_cast<unsigned long>(in_page.remainder) * rows.stride;
  }
};

// Rows of kHdim 16-bit values of which a tile is loaded, the first of them first.
template <int kHdim, Access kAccess>
struct TileRows {
  KeyRows<kAccess> rows;
  __amdgpu_buffer_rsrc_t buffer;

  template <int kRows>
  __device__ static TileRows of(const KeyRows<kAccess>& rows) {
    TileRows result{rows};
    if constexpr (kAccess == Access::near) result.buffer = buffer_of<kRows, kHdim * 2>(rows.rows);
    return result;
  }

  // As many values of a row as T has, from number `first` on, and zeros in place of those behind
  // the row's end, or of all of them where there is no such row.
  template <class T>
  __device__ T load(int row, int first) const {
    constexpr int kCount = sizeof(T) / 2;
    if constexpr (kHdim % kCount == 0) {
      return piece<T>(row, first, first < kHdim);
    } else {
      unsigned short values[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        values[i] = piece<unsigned short>(row, first + i, first + i < kHdim);
      T result;
      __builtin_memcpy(&result, values, sizeof result);
      return result;
    }
  }

 private:
  template <class T>
  __device__ T piece(int row, int first, bool is_inside) const {
    if constexpr (kAccess != Access::near) {
      T result = T(0);
      if (is_inside && rows.has(row)) result = *(Global<const T>)(rows.address(row) + first * 2);
      return result;
    } else {
      const unsigned offset = is_inside ? row * rows.rows.stride + first * 2 : kOutside;
      if constexpr (sizeof(T) == 2) {
        return __builtin_amdgcn_raw_buffer_load_b16(buffer, offset, 0, 0);
      } else if constexpr (sizeof(T) == 4) {
        return bits_as<T>(__builtin_amdgcn_raw_buffer_load_b32(buffer, offset, 0, 0));
      } else if constexpr (sizeof(T) == 8) {
        return bits_as<T>(__builtin_amdgcn_raw_buffer_load_b64(buffer, offset, 0, 0));
      } else {
        return bits_as<T>(__builtin_amdgcn_raw_buffer_load_b128(buffer, offset, 0, 0));
      }
    }
  }
};

// A tile of keys with any kHdim up to 256.
template <int kKeyCount, int kHdim, Access kAccess, int kThreads, int kBankChunks>
struct KeyRowTile : KeyTile<kKeyCount, rounded_up(kHdim, 64), kThreads, kBankChunks> {
  using Base = KeyTile<kKeyCount, rounded_up(kHdim, 64), kThreads, kBankChunks>;
  using typename Base::Registers;
  static constexpr int kSteps = rounded_up(kHdim, 16) / 16;

  struct Source {
    TileRows<kHdim, kAccess> rows;
    int thread;

    __device__ void load(Registers& to, int i) const {
      to.chunk[i] = rows.template load<u32x4>(thread / 8, Base::column(thread, i) / 2);
    }
  };

  __device__ static Source source(const KeyRows<kAccess>& rows, int thread) {
    return {TileRows<kHdim, kAccess>::template of<kKeyCount>(rows), thread};
  }
};

// Columns of a tile of values, up to 128 of them: a tile of 64 would have conflicts in LDS.
template <int kKeys, int kHdim, Access kAccess, int kThreads, int kBankChunks>
struct ValueColumns : ValueTile<kKeys, 128, kThreads, kBankChunks> {
  using Base = ValueTile<kKeys, 128, kThreads, kBankChunks>;
  using typename Base::Columns;
  using typename Base::Registers;
  static_assert(kHdim <= 128);
  static constexpr int kBlocks = rounded_up(kHdim, 32) / 32;

  struct Source {
    TileRows<kHdim, kAccess> rows;
    int thread;

    __device__ void load(Registers& to, int i) const {
      const Columns values = rows.template load<Columns>(Base::quad_of(thread) * 4 + i,
                                                         Base::column_of(thread) * Base::kWidth);
      __builtin_memcpy(to.row[i], &values, sizeof values);
    }
  };

  __device__ static Source source(const KeyRows<kAccess>& rows, int thread) {
    return {TileRows<kHdim, kAccess>::template of<kKeys>(rows), thread};
  }
};

// A tile of values with kHdim up to 128.
template <int kKeys, int kHdim, Access kAccess, int kThreads, int kBankChunks, bool kIsWide>
struct ValueRowTile : ValueColumns<kKeys, kHdim, kAccess, kThreads, kBankChunks> {};

// With kHdim from 129 to 256: two tiles, one behind the other.
template <int kKeys, int kHdim, Access kAccess, int kThreads, int kBankChunks>
struct ValueRowTile<kKeys, kHdim, kAccess, kThreads, kBankChunks, true> {
  static constexpr int kFirstHdim = 128;
  using First = ValueColumns<kKeys, kFirstHdim, kAccess, kThreads, kBankChunks>;
  using Second = ValueColumns<kKeys, kHdim - kFirstHdim, kAccess, kThreads, kBankChunks>;
  static constexpr int kBytes = First::kBytes + Second::kBytes;
  static constexpr int kLoads = First::kLoads + Second::kLoads;
  static constexpr int kBlocks = First::kBlocks + Second::kBlocks;

  struct Registers {
    typename First::Registers first;
    typename Second::Registers second;
  };

  struct Source {
    typename First::Source first;
    typename Second::Source second;

    __device__ void load(Registers& to, int i) const {
      if (i < First::kLoads) first.load(to.first, i);
      else second.load(to.second, i - First::kLoads);
    }
  };

  __device__ static Source source(const KeyRows<kAccess>& rows, int thread) {
    KeyRows<kAccess> behind = rows;
    behind.rows.base += kFirstHdim * 2;
    return {First::source(rows, thread), Second::source(behind, thread)};
  }

  __device__ static void store(Lds<char> tile, const Registers& from, int thread) {
    First::store(tile, from.first, thread);
    Second::store(tile + First::kBytes, from.second, thread);
  }

  __device__ static int first_operand(int lane) { return First::first_operand(lane); }

  // Both have as wide rows, so that the operands of one lie as those of the other.
  __device__ static u32x4 operand(Lds<const char> first, int block, int step) {
    return block < First::kBlocks
               ? First::operand(first, block, step)
               : Second::operand(first + First::kBytes, block - First::kBlocks, step);
  }
};
