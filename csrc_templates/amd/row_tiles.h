// Tiles of keys and values of any dtype, for head dimensions that no tile has as its own: of a tile
// as wide as the next one that there is, the columns behind a row's end are zeros, and products
// leave out what they can of them.
#pragma once

#include "elements.h"
#include "tiles.h"
#include "workgroups.h"

constexpr int rounded_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Behind the end of every buffer: the hardware reads zeros.
constexpr unsigned kOutside = 1u << 31;

// How rows are reached: near ones are in reach of one buffer's offsets, far ones are not and have
// an address each, and so have those in pages, which a table names. Of wide pages, which are of a
// multiple of 16 rows, the threads of a wave have one, whose rows are near.
enum class Access { near, far, paged, wide_pages };
constexpr bool is_paged(Access access) {
  return access == Access::paged || access == Access::wide_pages;
}
constexpr int kWidePageRows = 16;

// The pages of one sequence.
struct Pages {
  Global<const int> table;
  Divisor size;   // rows of a page
  unsigned last;  // page that there is
  long stride;    // bytes between pages

  // The host has looked for pages that are not there, where it can read the table. Here they must
  // not lead outside.
  __device__ long at(unsigned place) const { return there(table[place]); }

  // For a place that all lanes have, in scalar registers.
  __device__ long at_uniform(unsigned place) const {
    using Constant = const __attribute__((address_space(4))) int*;
    return there(((Constant)(unsigned long)table)[place]);
  }

 private:
  __device__ long there(unsigned named) const { return named < last ? named : last; }
};

// The keys, or the values, of one head of a sequence from some row on.
template <Access kAccess>
struct KeyRows {
  Rows rows;    // in pages: those of page 0, the count being the sequence's
  Pages pages;  // of use in pages only, as the next one
  int first;

  __device__ KeyRows from(int row) const {
    KeyRows result = *this;
    if constexpr (is_paged(kAccess)) result.first += row;
    else result.rows = rows.from(row);
    return result;
  }

  __device__ bool has(int row) const {
    return is_paged(kAccess) ? first + row < rows.count : row < rows.count;
  }

  // In wide pages, those from a multiple of kWidePageRows on, which all lanes have.
  __device__ Rows from_in_page(int row) const {
    const int there = first + row;
    // Behind the end no page is named, and nothing is read.
    const Quotient in_page = divide(smaller(there, rows.count - 1), pages.size);
    return {rows.base + pages.at_uniform(in_page.value) * pages.stride +
                static_cast<unsigned long>(in_page.remainder) * rows.stride,
            rows.stride, rows.count - there};
  }

  __device__ Global<const char> address(int row) const {
    if constexpr (!is_paged(kAccess))
      return rows.base + static_cast<unsigned long>(row) * rows.stride;
    const Quotient in_page = divide(first + row, pages.size);
    return rows.base + pages.at(in_page.value) * pages.stride +
           static_cast<unsigned long>(in_page.remainder) * rows.stride;
  }
};

// Rows of kHdim numbers of which a tile is loaded, the first of them first.
template <int kHdim, class Element, Access kAccess>
struct TileRows {
  using Source = KeyRows<kAccess>;
  static constexpr bool kAreColumns = false;
  KeyRows<kAccess> rows;
  __amdgpu_buffer_rsrc_t buffer;

  // Of a tile of kRows rows, of which each wave loads some of kWidePageRows.
  template <int kRows>
  __device__ static TileRows of(const KeyRows<kAccess>& rows, int thread) {
    constexpr int kRowBytes = kHdim * Element::kBytes;
    TileRows result{rows};
    if constexpr (kAccess == Access::near) {
      result.buffer = buffer_of<kRows, kRowBytes>(rows.rows);
    } else if constexpr (kAccess == Access::wide_pages) {
      constexpr int kThreadsOfPage = 8 * kWidePageRows;
      const int page = __builtin_amdgcn_readfirstlane(thread / kThreadsOfPage);
      result.buffer = buffer_of<kWidePageRows, kRowBytes>(rows.from_in_page(page * kWidePageRows));
    }
    return result;
  }

  // As many numbers of a row as T has, from number `first` on, and zeros in place of those behind
  // the row's end, or of all of them where there is no such row. Where the compiler knows an `end`
  // behind which none of them is, most of a row takes no look at where it ends.
  template <class T>
  __device__ T load(int row, int first, int end = kHdim + 1) const {
    constexpr int kCount = sizeof(T) / Element::kBytes;
    if constexpr (kHdim % kCount == 0) {
      return piece<T>(row, first, end <= kHdim || first < kHdim);
    } else {
      if (end <= kHdim) return piece<T>(row, first, true);
      using Half = typename WordsOf<sizeof(T) / 2>::Type;
      const Half halves[2] = {load<Half>(row, first, end),
                              load<Half>(row, first + kCount / 2, end)};
      T result;
      __builtin_memcpy(&result, halves, sizeof result);
      return result;
    }
  }

  // Of four keys' four numbers, those of one key.
  template <class T>
  __device__ T line(int key, int column, int i) const {
    return load<T>(key + i, column);
  }

  __device__ static Source from_column(const Source& source, int column) {
    Source result = source;
    result.rows.base += column * Element::kBytes;
    return result;
  }

 private:
  template <class T>
  __device__ T piece(int row, int first, bool is_inside) const {
    constexpr int kBytes = Element::kBytes;
    if constexpr (kAccess == Access::far || kAccess == Access::paged) {
      T result = T(0);
      if (is_inside && rows.has(row))
        result = *(Global<const T>)(rows.address(row) + first * kBytes);
      return result;
    } else {
      const int row_of_buffer = kAccess == Access::near ? row : row % kWidePageRows;
      const unsigned offset =
          is_inside ? row_of_buffer * rows.rows.stride + first * kBytes : kOutside;
      if constexpr (sizeof(T) == 1) {
        return __builtin_amdgcn_raw_buffer_load_b8(buffer, offset, 0, 0);
      } else if constexpr (sizeof(T) == 2) {
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

// The values of one head of a sequence from some key on, where keys lie side by side.
template <Access kAccess>
struct KeyColumns {
  Global<const char> base;  // of the first column; in pages, of page 0
  long stride;              // bytes between columns
  Pages pages;              // of use in pages only
  int first, count;         // key, and how many there are from key 0 on

  __device__ KeyColumns from(int key) const {
    KeyColumns result = *this;
    result.first += key;
    return result;
  }

  __device__ bool has(int key) const { return first + key < count; }

  // Whether four keys, the first of which is a multiple of four, are certain to be side by side.
  __device__ bool have_whole_fours() const {
    return kAccess != Access::paged || pages.size.divisor % 4 == 0;  // wide pages have, too
  }

  template <int kBytes>
  __device__ Global<const char> address(int key, int column) const {
    Global<const char> in_page = base;
    unsigned there = first + key;
    if constexpr (is_paged(kAccess)) {
      const Quotient place = divide(there, pages.size);
      in_page += pages.at(place.value) * pages.stride;
      there = place.remainder;
    }
    return in_page + column * stride + static_cast<unsigned long>(there) * kBytes;
  }
};

// Of kHdim columns, those keys of which a tile is loaded.
template <int kHdim, class Element, Access kAccess>
struct TileColumns {
  using Source = KeyColumns<kAccess>;
  static constexpr bool kAreColumns = true;
  KeyColumns<kAccess> columns;

  template <int kKeys>
  __device__ static TileColumns of(const KeyColumns<kAccess>& columns, int) {
    return {columns};
  }

  // Of four keys' four numbers, those of one column; zeros in place of those that there are not.
  template <class T>
  __device__ T line(int key, int column, int i) const {
    T result = T(0);
    if (column + i >= kHdim) return result;
    if (columns.has(key + 3) && columns.have_whole_fours())
      return *(Global<const T>)columns.template address<Element::kBytes>(key, column + i);
    Bits<Element> numbers[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (columns.has(key + j)) numbers[j] = *one(key + j, column + i);
    __builtin_memcpy(&result, numbers, sizeof result);
    return result;
  }

  __device__ static Source from_column(const Source& source, int column) {
    Source result = source;
    result.base += column * result.stride;
    return result;
  }

 private:
  __device__ Global<const Bits<Element>> one(int key, int column) const {
    return (Global<const Bits<Element>>)columns.template address<Element::kBytes>(key, column);
  }
};

// The width of a tile in LDS, counted in 16-bit values: for kHdim numbers, and 128 bytes of a row
// at a time.
template <int kHdim, class Dtype>
constexpr int kKeyTileWidth = rounded_up(kHdim * Dtype::kBytes, 128) / 2;

// A tile of keys with any kHdim; Element is what they are in memory, Dtype what products take.
template <int kKeyCount, int kHdim, class Element, class Dtype, Access kAccess, int kThreads,
          int kBankChunks>
struct KeyRowTile : KeyTile<kKeyCount, kKeyTileWidth<kHdim, Dtype>, kThreads, kBankChunks> {
  using Base = KeyTile<kKeyCount, kKeyTileWidth<kHdim, Dtype>, kThreads, kBankChunks>;
  static constexpr int kSteps = rounded_up(kHdim, Dtype::kDepth) / Dtype::kDepth;
  using Chunk = Words<Element, kChunkValues<Dtype>>;

  struct Registers {
    Chunk chunk[Base::kLoads];
  };

  struct Source {
    TileRows<kHdim, Element, kAccess> rows;
    int thread;

    __device__ void load(Registers& to, int i) const {
      // Load i is that of 128 bytes of a row, or of their neighbours.
      const int end = ((i | 1) + 1) * 128 / Dtype::kBytes;
      to.chunk[i] =
          rows.template load<Chunk>(thread / 8, Base::column(thread, i) / Dtype::kBytes, end);
    }
  };

  __device__ static Source source(const KeyRows<kAccess>& rows, int thread) {
    return {TileRows<kHdim, Element, kAccess>::template of<kKeyCount>(rows, thread), thread};
  }

  __device__ static void store(Lds<char> tile, const Registers& from, int thread) {
    typename Base::Registers taken;
#pragma unroll
    for (int i = 0; i < Base::kLoads; ++i) taken.chunk[i] = as_taken<Element, Dtype>(from.chunk[i]);
    Base::store(tile, taken, thread);
  }
};

// A tile of 32-bit values, transposed, as ValueTile is one of 16-bit values: a lane of the first
// half of the wave has keys 0 to 3 of 8, one of the second half keys 4 to 7. These are a chunk.
template <int kKeys, int kHdim, int kThreads>
struct FloatValueTile : Tile<kHdim, kKeys / 4> {
  using Base = Tile<kHdim, kKeys / 4>;
  static constexpr int kWidth = 4, kColumns = kHdim / kWidth, kLoads = 4;
  static_assert(kKeys == 32 && kKeys / 4 * kColumns == kThreads);

  // Which keys and values a thread has: 4 * quad and on, kWidth * column and on.
  __device__ static int column_of(int thread) { return thread % kColumns; }
  __device__ static int quad_of(int thread) { return thread / kColumns; }

  // Free of conflicts for the writes of store(), where bits 2 and on of the row vary, and for reads
  // as ValueTile::place() has them; made of exclusive ors.
  __device__ static int place(int row, int chunk) {
    return Base::template place<8>(row, chunk, row % 4 ^ row / 4);
  }

  struct Registers {
    u32x4 row[4];
  };

  __device__ static void store(Lds<char> tile, const Registers& from, int thread) {
    u32x4 columns[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      columns[j] = u32x4{from.row[0][j], from.row[1][j], from.row[2][j], from.row[3][j]};
    store_columns(tile, columns, thread);
  }

  __device__ static void store_columns(Lds<char> tile, const u32x4 (&columns)[4], int thread) {
    const unsigned address = (unsigned)(tile + place(column_of(thread) * kWidth, quad_of(thread)));
#pragma unroll
    for (int j = 0; j < 4; ++j) *(Lds<u32x4>)(address ^ place(j, 0)) = columns[j];
  }

  __device__ static int first_operand(int lane) { return place(lane % 32, lane / 32); }

  // Values 32 * block and on, the 8 keys 8 * step and on; `first` is where first_operand is.
  __device__ static u32x4 operand(Lds<const char> first, int block, int step) {
    return Base::template operand<8>(first, block, step);
  }
};

// The same tile of 16-bit values, with columns that have been transposed before.
template <int kKeys, int kHdim, int kThreads, int kBankChunks>
struct HalfValueTile : ValueTile<kKeys, kHdim, kThreads, kBankChunks> {
  using Base = ValueTile<kKeys, kHdim, kThreads, kBankChunks>;
  static_assert(Base::kWidth == 4);

  __device__ static void store_columns(Lds<char> tile, const u32x2 (&columns)[4], int thread) {
    const int chunk = Base::chunk_of(thread), half = Base::half_of(thread);
    const int first = Base::place(Base::column_of(thread) * Base::kWidth, chunk) + half * 8;
    const unsigned address = (unsigned)(tile + first);
#pragma unroll
    for (int j = 0; j < 4; ++j) *(Lds<u32x2>)(address ^ Base::place(j, 0)) = columns[j];
  }
};

// What products take decides how a tile of 128 columns lies in LDS; one of 64 would have conflicts.
template <class Dtype, int kKeys, int kThreads, int kBankChunks>
struct ValueTileOf {
  using Type = HalfValueTile<kKeys, 128, kThreads, kBankChunks>;
};
template <int kKeys, int kThreads, int kBankChunks>
struct ValueTileOf<FP32, kKeys, kThreads, kBankChunks> {
  using Type = FloatValueTile<kKeys, 128, kThreads>;
};

// How values are reached: a row for each key, or with kAreColumns a column for each number of one.
template <int kHdim, class Element, Access kAccess, bool kAreColumns>
struct LinesOf {
  using Type = TileRows<kHdim, Element, kAccess>;
};
template <int kHdim, class Element, Access kAccess>
struct LinesOf<kHdim, Element, kAccess, true> {
  using Type = TileColumns<kHdim, Element, kAccess>;
};

// Columns of a tile of values, up to 128 of them. Lines is how they are reached, Element what they
// are in memory, and Dtype what products take.
template <int kKeyCount, int kHdim, class Lines, class Element, class Dtype, int kThreads,
          int kBankChunks>
struct ValueColumns : ValueTileOf<Dtype, kKeyCount, kThreads, kBankChunks>::Type {
  using Base = typename ValueTileOf<Dtype, kKeyCount, kThreads, kBankChunks>::Type;
  static_assert(kHdim <= 128);
  static constexpr int kBlocks = rounded_up(kHdim, 32) / 32;
  using Four = Words<Element, 4>;

  struct Registers {
    Four line[4];
  };

  struct Source {
    Lines lines;
    int thread;

    __device__ void load(Registers& to, int i) const {
      to.line[i] = lines.template line<Four>(Base::quad_of(thread) * 4,
                                             Base::column_of(thread) * Base::kWidth, i);
    }
  };

  __device__ static Source source(const typename Lines::Source& from, int thread) {
    return {Lines::template of<kKeyCount>(from, thread), thread};
  }

  __device__ static void store(Lds<char> tile, const Registers& from, int thread) {
    Words<Dtype, 4> taken[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) taken[i] = as_taken<Element, Dtype>(from.line[i]);
    if constexpr (Lines::kAreColumns) {
      Base::store_columns(tile, taken, thread);
    } else {
      typename Base::Registers rows;
      __builtin_memcpy(&rows, taken, sizeof rows);
      Base::store(tile, rows, thread);
    }
  }
};

// A tile of values with kHdim up to 128.
template <int kKeyCount, int kHdim, class Element, class Dtype, Access kAccess, bool kAreColumns,
          int kThreads, int kBankChunks, bool kIsWide>
struct ValueRowTile
    : ValueColumns<kKeyCount, kHdim, typename LinesOf<kHdim, Element, kAccess, kAreColumns>::Type,
                   Element, Dtype, kThreads, kBankChunks> {};

// With kHdim from 129 to 256: two tiles, one behind the other.
template <int kKeyCount, int kHdim, class Element, class Dtype, Access kAccess, bool kAreColumns,
          int kThreads, int kBankChunks>
struct ValueRowTile<kKeyCount, kHdim, Element, Dtype, kAccess, kAreColumns, kThreads, kBankChunks,
                    true> {
  static constexpr int kFirstHdim = 128;
  template <int kColumns>
  using Part = ValueRowTile<kKeyCount, kColumns, Element, Dtype, kAccess, kAreColumns, kThreads,
                            kBankChunks, false>;
  using First = Part<kFirstHdim>;
  using Second = Part<kHdim - kFirstHdim>;
  using Lines = typename LinesOf<kHdim, Element, kAccess, kAreColumns>::Type;
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

  __device__ static Source source(const typename Lines::Source& from, int thread) {
    return {First::source(from, thread),
            Second::source(Lines::from_column(from, kFirstHdim), thread)};
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
