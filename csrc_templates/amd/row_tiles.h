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
// multiple of kWidePageRows, the threads of a wave have one, whose rows are near. In packed pages
// lie pieces of kPieceBytes: those of the same numbers of all keys of a head follow each other, and
// of values those of the same keys, a column in each. There are wide ones of these, too.
enum class Access { near, far, paged, packed_pages, wide_pages, wide_packed_pages };
constexpr bool is_paged(Access access) { return access != Access::near && access != Access::far; }
// Whether each key has an address of its own, by KeyPlaces.
constexpr bool has_key_places(Access access) {
  return access == Access::paged || access == Access::packed_pages;
}
// Whether the threads of a wave load rows of one page, by BlockPlaces.
constexpr bool has_block_places(Access access) {
  return access == Access::wide_pages || access == Access::wide_packed_pages;
}
constexpr bool has_pieces(Access access) {
  return access == Access::packed_pages || access == Access::wide_packed_pages;
}
constexpr int kPieceBytes = 16;

// The pages of one sequence.
struct Pages {
  Global<const int> table;
  Divisor size;   // rows of a page
  unsigned last;  // page that there is
  long stride;    // bytes between pages

  // The host has looked for pages that are not there, where it can read the table. Here they must
  // not lead outside.
  __device__ long at(unsigned place) const { return there(table[place]); }
  __device__ unsigned there(unsigned named) const { return named < last ? named : last; }
  // What the table names. The offset has 32 bits: of 64 the compiler shifts half of a quotient that
  // nobody wrote to where it is not needed.
  __device__ unsigned named(unsigned place) const {
    return *(Global<const unsigned>)((Global<const char>)table + place * 4u);
  }

  // The same for a place that all lanes have, in scalar registers.
  __device__ long at_uniform(unsigned place) const {
    using Constant = const __attribute__((address_space(4))) int*;
    return there(((Constant)(unsigned long)table)[place]);
  }
};

// Of each sixteen lanes, those that are eight apart exchange numbers: the last ones have in `first`
// what the first ones had in `second`, and these in `second` what the last ones had in `first`.
__device__ inline void exchange_eight_apart(u32x4& first, u32x4& second) {
  constexpr int kRotateBy8 = 0x128, kRows = 0xf, kFirstLanes = 0x3, kLastLanes = 0xc;
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    const unsigned a = first[d], b = second[d];
    first[d] = __builtin_amdgcn_update_dpp(a, b, kRotateBy8, kRows, kLastLanes, false);
    second[d] = __builtin_amdgcn_update_dpp(b, a, kRotateBy8, kRows, kFirstLanes, false);
  }
}

// The number that lane `lane` has. All lanes take part.
__device__ inline unsigned long from_lane(unsigned long x, int lane) {
  const u32x2 halves = bits_as<u32x2>(x);
  const u32x2 result = {
      static_cast<unsigned>(__builtin_amdgcn_ds_bpermute(lane * 4, static_cast<int>(halves.x))),
      static_cast<unsigned>(__builtin_amdgcn_ds_bpermute(lane * 4, static_cast<int>(halves.y)))};
  return bits_as<unsigned long>(result);
}

// Where a row is that all lanes have.
struct PagePlace {
  long page;
  unsigned row;  // in the page
};

// Where the 32 keys of a tile are in small pages: each lane has looked up key lane % 32, and others
// ask it. So the table is read once for a tile, long before its keys are.
struct KeyPlaces {
  unsigned page, row;  // as the table names it, and in the page

  // The places of the tile from `first_key` on. Keys behind the last of `count` have its place, so
  // that every place may be read.
  __device__ static KeyPlaces of(const Pages& pages, int first_key, int count, int lane) {
    const Quotient in_page = divide(smaller(first_key + lane % 32, count - 1), pages.size);
    return {pages.named(in_page.value), in_page.remainder};
  }

  // How many bytes behind the start of page 0 key number `key` of the tile lies.
  __device__ unsigned long offset_of(int key, const Pages& pages, unsigned row_stride) const {
    return offset_by(key, pages,
                     [=](unsigned row) { return static_cast<unsigned long>(row) * row_stride; });
  }
  // The same where in_page(row) is what lies before a row in its page.
  template <class InPage>
  __device__ unsigned long offset_by(int key, const Pages& pages, const InPage& in_page) const {
    return from_lane(pages.there(page) * static_cast<unsigned long>(pages.stride) + in_page(row),
                     key);
  }
};

// Where the rows of a tile are that a wave loads, in wide pages: so many bytes behind row 0 of page
// 0 the first of kWidePageRows lies.
struct BlockPlace {
  unsigned long offset = 0;
  int row = -1;  // of the tile; negative where nobody has looked
};

// The same of keys and values of many tiles, of which each lane knows one.
struct BlockPlaces {
  static constexpr int kTiles = 64;
  struct OfTile {
    BlockPlace of_keys, of_values;
  };
  unsigned long of_keys, of_values;
  int row_of_tile;

  // Of tiles that begin with `first_key`, another key in each lane, of which the wave loads rows
  // from `row_of_tile` on.
  template <class Keys>
  __device__ static BlockPlaces of(const Keys& keys, const Keys& values, int first_key,
                                   int row_of_tile) {
    // Behind the end no page is named, and nothing is read, or in packed pages the last rows.
    const int last = (keys.rows.count - 1) / kWidePageRows * kWidePageRows;
    const Quotient in_page = divide(smaller(first_key + row_of_tile, last), keys.pages.size);
    const unsigned long page = keys.pages.at(in_page.value), row = in_page.remainder;
    const auto offset_in = [&](const Keys& of) {
      unsigned long offset = page * of.pages.stride + row * of.rows.stride;
      asm volatile("" : "+v"(offset));  // waited for here, not wherever a lane is asked
      return offset;
    };
    return {offset_in(keys), offset_in(values), row_of_tile};
  }
  __device__ OfTile at(int i) const {
    const auto asked = [=](unsigned long offset) {
      const u32x2 halves = bits_as<u32x2>(offset);
      const auto half = [=](unsigned x) {
        return static_cast<unsigned>(__builtin_amdgcn_readlane(static_cast<int>(x), i % kTiles));
      };
      return BlockPlace{bits_as<unsigned long>(u32x2{half(halves.x), half(halves.y)}), row_of_tile};
    };
    return {asked(of_keys), asked(of_values)};
  }
};

// The keys, or the values, of one head of a sequence from some row on.
template <Access kAccess>
struct KeyRows {
  Rows rows;    // in pages: those of page 0, the count being the sequence's
  Pages pages;  // of use in pages only, as the next one
  int first;
  KeyPlaces places;  // of a tile from here on, in small pages
  BlockPlace block;  // the same in wide pages
  // In wide pages: bytes between rows, to find the others of four by. An opaque number takes an
  // addition for each of them, and no registers from tile to tile.
  unsigned distance = rows.stride;

  __device__ KeyRows from(int row, const KeyPlaces& places_of_tile = {}) const {
    KeyRows result = *this;
    if constexpr (is_paged(kAccess)) result.first += row;
    else result.rows = rows.from(row);
    result.places = places_of_tile;
    return result;
  }
  __device__ KeyRows from(int row, const BlockPlace& place_in_tile) const {
    KeyRows result = from(row);
    result.block = place_in_tile;
    return result;
  }

  // In wide pages: the rows that the wave loads, where it has looked.
  __device__ Rows known_block() const {
    return {rows.base + block.offset, rows.stride, rows.count - first - block.row};
  }

  // In wide pages: the rows from a multiple of kWidePageRows on, which all lanes have.
  __device__ Rows from_in_page(int row) const {
    const int there = first + row;
    // Behind the end no page is named, and nothing is read.
    const Quotient in_page = divide(smaller(there, rows.count - 1), pages.size);
    return from_in_page({pages.at_uniform(in_page.value), in_page.remainder}, there);
  }
  // The same where the page has been looked up: of row `there` of the sequence.
  __device__ Rows from_in_page(const PagePlace& place, int there) const {
    return {
        rows.base + place.page * pages.stride + static_cast<unsigned long>(place.row) * rows.stride,
        rows.stride, rows.count - there};
  }
};

// A row of a tile, of which a thread loads pieces.
template <Access kAccess>
struct TileRow {
  int number;
};
template <>
struct TileRow<Access::paged> {
  Global<const char> address;
};
template <>
struct TileRow<Access::packed_pages> : TileRow<Access::paged> {};

// Rows of kHdim numbers, the first of which are loaded as a tile.
template <int kHdim, class Element, Access kAccess>
struct TileRows {
  using Source = KeyRows<kAccess>;
  static constexpr bool kAreColumns = false;
  KeyRows<kAccess> rows;
  __amdgpu_buffer_rsrc_t buffer;

  // For a tile of kRows rows; each wave loads kWidePageRows of them at a time.
  template <int kRows>
  __device__ static TileRows of(const KeyRows<kAccess>& rows, int thread) {
    constexpr int kRowBytes = kHdim * Element::kBytes;
    TileRows result;
    result.rows = rows;
    if constexpr (kAccess == Access::near) {
      result.buffer = buffer_of<kRows, kRowBytes>(rows.rows);
    } else if constexpr (kAccess == Access::wide_pages) {
      if (rows.block.row >= 0) {
        result.buffer = buffer_at_once<kWidePageRows, kRowBytes>(rows.known_block());
        return result;
      }
      constexpr int kThreadsOfPage = 8 * kWidePageRows;
      const int page = __builtin_amdgcn_readfirstlane(thread / kThreadsOfPage);
      result.buffer = buffer_of<kWidePageRows, kRowBytes>(rows.from_in_page(page * kWidePageRows));
    } else if constexpr (kAccess == Access::wide_packed_pages) {
      result.buffer = endless_buffer(rows.known_block());
    }
    return result;
  }

  using Row = TileRow<kAccess>;
  __device__ Row row(int number) const {
    if constexpr (has_key_places(kAccess))
      return {rows.rows.base + rows.places.offset_of(number, rows.pages, rows.rows.stride)};
    else return {number};
  }

  // Loads as many numbers of a row as T has, from number `first` on. Numbers behind the row's end
  // become zeros. A row that is not there gives zeros, or where rows have addresses the numbers of
  // the last row, which nobody needs. No number lies behind `end`: where the compiler knows it,
  // most of a row is loaded without a look at where the row ends. In buffers it may be the row that
  // lies `behind` bytes further.
  template <class T>
  __device__ T load(const Row& row, int first, int end = kHdim + 1, unsigned behind = 0) const {
    constexpr int kCount = sizeof(T) / Element::kBytes;
    if constexpr (kHdim % kCount == 0) {
      return piece<T>(row, first, end <= kHdim || first < kHdim, behind);
    } else {
      if (end <= kHdim) return piece<T>(row, first, true, behind);
      using Half = WordsOf<sizeof(T) / 2>;
      const Half halves[2] = {load<Half>(row, first, end, behind),
                              load<Half>(row, first + kCount / 2, end, behind)};
      T result;
      __builtin_memcpy(&result, halves, sizeof result);
      return result;
    }
  }

  // The same where the row may end, one by one and without a branch: among products that would keep
  // the operands of all of them in registers.
  template <class T>
  __device__ T load_at_end(const Row& row, int first) const {
    constexpr int kCount = sizeof(T) / Element::kBytes;
    Bits<Element> numbers[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto number = piece<Bits<Element>>(row, smaller(first + i, kHdim - 1), true);
      numbers[i] = first + i < kHdim ? number : 0;
    }
    T result;
    __builtin_memcpy(&result, numbers, sizeof result);
    return result;
  }

  // Four keys; line() gives four numbers of one of them.
  struct Keys {
    Row row[4];
  };
  __device__ Keys four_keys(int first_key) const {
    return {row(first_key), row(first_key + 1), row(first_key + 2), row(first_key + 3)};
  }
  template <class T>
  __device__ T line(const Keys& keys, int column, int i) const {
    if constexpr (kAccess == Access::wide_pages)
      return load<T>(keys.row[0], column, kHdim + 1, i * rows.distance);
    else return load<T>(keys.row[i], column);
  }

  __device__ static Source from_column(const Source& source, int column) {
    Source result = source;
    result.rows.base += column * Element::kBytes;
    return result;
  }

 private:
  // How many bytes number `first` of a row lies behind its beginning.
  __device__ long offset_in_row(int first) const {
    const long offset = first * Element::kBytes;
    if constexpr (!has_pieces(kAccess)) return offset;
    return offset / kPieceBytes * (rows.pages.size.divisor * kPieceBytes) + offset % kPieceBytes;
  }

  template <class T>
  __device__ T piece(const Row& row, int first, bool is_inside, unsigned behind = 0) const {
    constexpr int kBytes = Element::kBytes;
    // Rows begin anywhere. If they were taken to be aligned, the end of a row would be loaded
    // together with what lies behind it.
    typedef T Unaligned __attribute__((aligned(kBytes)));
    if constexpr (has_key_places(kAccess)) {
      T result = T(0);
      if (is_inside) result = *(Global<const Unaligned>)(row.address + offset_in_row(first));
      return result;
    } else if constexpr (kAccess == Access::far) {
      // The last row is before `base` where the tile is behind the end.
      const long there = smaller(row.number, rows.rows.count - 1);
      const long stride = rows.rows.stride;
      T result = T(0);
      if (is_inside)
        result = *(Global<const Unaligned>)(rows.rows.base + there * stride + first * kBytes);
      return result;
    } else {
      const unsigned number = row.number;
      const unsigned row_of_buffer = kAccess == Access::near ? number : number % kWidePageRows;
      const unsigned offset =
          (is_inside ? row_of_buffer * rows.rows.stride + offset_in_row(first) : kOutside) + behind;
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

// Rows that are reached by an address each, wherever they lie.
template <int kHdim, class Element>
__device__ inline auto far_rows(const Rows& rows) {
  TileRows<kHdim, Element, Access::far> result;
  result.rows.rows = rows;
  return result;
}

// The values of one head of a sequence from some key on, where keys lie side by side.
template <Access kAccess>
struct KeyColumns {
  Global<const char> base;  // of the first column; in pages, of page 0
  long stride;              // bytes between columns
  Pages pages;              // of use in pages only
  int first, count;         // key, and how many there are from key 0 on
  KeyPlaces places;         // of a tile from here on, in small pages
  // In packed pages: the columns, of each of which some keys have a piece.
  unsigned column_pieces = 0;

  __device__ KeyColumns from(int key, const KeyPlaces& places_of_tile = {}) const {
    KeyColumns result = *this;
    result.first += key;
    result.places = places_of_tile;
    return result;
  }
  __device__ KeyColumns from(int key, const BlockPlace&) const { return from(key); }

  __device__ bool has(int key) const { return first + key < count; }

  // Whether four keys, the first of which is a multiple of four, are certain to be side by side.
  __device__ bool have_whole_fours() const {
    return kAccess != Access::paged || pages.size.divisor % 4 == 0;  // wide pages have, too
  }

  // A key's place in the first column.
  template <int kBytes>
  __device__ Global<const char> address(int key) const {
    if constexpr (kAccess == Access::paged) return base + places.offset_of(key, pages, kBytes);
    if constexpr (kAccess == Access::packed_pages) {
      constexpr unsigned kPieceKeys = kPieceBytes / kBytes;
      return base + places.offset_by(key, pages, [&](unsigned row) {
        return row / kPieceKeys * column_pieces * kPieceBytes + row % kPieceKeys * kBytes;
      });
    }
    Global<const char> in_page = base;
    unsigned there = first + key;
    if constexpr (kAccess == Access::wide_pages) {
      const Quotient place = divide(there, pages.size);
      in_page += pages.at(place.value) * pages.stride;
      there = place.remainder;
    }
    return in_page + static_cast<unsigned long>(there) * kBytes;
  }
};

// kHdim columns, some keys of which are loaded as a tile.
template <int kHdim, class Element, Access kAccess>
struct TileColumns {
  using Source = KeyColumns<kAccess>;
  static constexpr bool kAreColumns = true;
  KeyColumns<kAccess> columns;

  template <int kKeys>
  __device__ static TileColumns of(const KeyColumns<kAccess>& columns, int) {
    return {columns};
  }

  // Four keys; line() gives their numbers in one column. A key that is not there has zeros, or in
  // small pages the numbers of the last one.
  struct Keys {
    int first;
    Global<const char> address[kAccess == Access::paged ? 4 : 1];

    __device__ Global<const char> of(int j) const {
      return kAccess == Access::paged ? address[j] : address[0] + j * Element::kBytes;
    }
  };
  __device__ Keys four_keys(int first_key) const {
    Keys result = {first_key};
#pragma unroll
    for (int j = 0; j < static_cast<int>(sizeof result.address / sizeof *result.address); ++j)
      result.address[j] = columns.template address<Element::kBytes>(first_key + j);
    return result;
  }
  template <class T>
  __device__ T line(const Keys& keys, int column, int i) const {
    typedef T Unaligned __attribute__((aligned(Element::kBytes)));
    T result = T(0);
    if (column + i >= kHdim) return result;
    const long in_key = (column + i) * columns.stride;
    if (columns.has(keys.first + 3) && columns.have_whole_fours())
      return *(Global<const Unaligned>)(keys.of(0) + in_key);
    Bits<Element> numbers[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (kAccess == Access::paged || columns.has(keys.first + j))
        numbers[j] = *(Global<const Bits<Element>>)(keys.of(j) + in_key);
    __builtin_memcpy(&result, numbers, sizeof result);
    return result;
  }

  __device__ static Source from_column(const Source& source, int column) {
    Source result = source;
    result.base += column * result.stride;
    return result;
  }
};

// The same in wide packed pages, as rows of all columns.
struct PackedColumns {
  using Source = KeyRows<Access::wide_packed_pages>;

  __device__ static Source from_column(const Source& source, int column) {
    Source result = source;
    result.rows.base += column * kPieceBytes;
    return result;
  }
};

// The width of a tile in LDS, counted in 16-bit values: for kHdim numbers, and 128 bytes of a row
// at a time.
template <int kHdim, class Dtype>
constexpr int kKeyTileWidth = rounded_up(kHdim * Dtype::kBytes, 128) / 2;

// A tile of keys with any kHdim; Element is what they are in memory, Dtype what products take.
template <int kKeyCount, int kHdim, class Element, class Dtype, Access kAccess, int kThreads>
struct KeyRowTile : KeyTile<kKeyCount, kKeyTileWidth<kHdim, Dtype>, kThreads, kBankChunks> {
  using Base = KeyTile<kKeyCount, kKeyTileWidth<kHdim, Dtype>, kThreads, kBankChunks>;
  static constexpr int kSteps = rounded_up(kHdim, Dtype::kDepth) / Dtype::kDepth;
  using Chunk = Words<Element, kChunkValues<Dtype>>;

  struct Registers {
    Chunk chunk[Base::kLoads];
  };

  using Lines = TileRows<kHdim, Element, kAccess>;
  struct Source {
    Lines lines;
    typename Lines::Row row;
    int thread;

    __device__ void load(Registers& to, int i) const {
      // Load i is that of 128 bytes of a row, or of their neighbours.
      const int end = ((i | 1) + 1) * 128 / Dtype::kBytes;
      to.chunk[i] = lines.template load<Chunk>(row, first_of(thread, i), end);
    }
  };

  __device__ static Source source(const KeyRows<kAccess>& rows, int thread) {
    const Lines lines = Lines::template of<kKeyCount>(rows, thread);
    return {lines, lines.row(key_of(thread)), thread};
  }

  // Of pieces that follow each other a load takes the same of eight keys: no half of a line of
  // memory, as where odd rows are swapped. Threads that write at once have keys k and k + 4 then,
  // whose rows in LDS begin with other halves.
  static constexpr bool kTakesWholeLines = has_pieces(kAccess) && Base::kMixed == 16;
  __device__ static int key_of(int thread) {
    const int key = thread / 8;
    return kTakesWholeLines ? key / 8 * 8 + key % 2 * 4 + key % 8 / 2 : key;
  }
  // The first number of load i.
  __device__ static int first_of(int thread, int i) {
    return kTakesWholeLines ? (thread % 8 + i * 8) * kChunkValues<Dtype>
                            : Base::column(thread, i) / Dtype::kBytes;
  }

  // In which row of the tile a key is. The product with row 8 * a + 4 * half + b is score 4 * a + b
  // in the lanes of that half of the wave. There it is the score of key 16 * half + 4 * a + b, so
  // that each lane has those of 16 keys that follow each other.
  __device__ static int row_of(int key) { return key % 16 / 4 * 8 + key / 16 * 4 + key % 4; }

  __device__ static void store(Lds<char> tile, const Registers& from, int thread) {
    typename Base::Registers taken;
#pragma unroll
    for (int i = 0; i < Base::kLoads; ++i) taken.chunk[i] = as_taken<Element, Dtype>(from.chunk[i]);
    const int row = row_of(key_of(thread));
    const int first =
        kTakesWholeLines ? Base::place(row, thread % 8) : Base::first_store(row * 8 + thread % 8);
#pragma unroll
    for (int i = 0; i < Base::kLoads; ++i) Base::store_piece(tile + first, taken, i);
  }
};

// A tile of 32-bit values, transposed, as ValueTile is one of 16-bit values; a chunk has four keys.
// A lane of the first half of the wave takes keys 0 to 15, one of the second half keys 16 to 31.
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

  // Of value j, a thread's four keys.
  __device__ static u32x4 keys_of(const Registers& from, int j) {
    return {from.row[0][j], from.row[1][j], from.row[2][j], from.row[3][j]};
  }

  __device__ static void store(Lds<char> tile, const Registers& from, int thread) {
    u32x4 columns[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) columns[j] = keys_of(from, j);
    store_columns(tile, columns, thread);
  }

  __device__ static void store_columns(Lds<char> tile, const u32x4 (&columns)[4], int thread) {
    const unsigned address = (unsigned)(tile + place(column_of(thread) * kWidth, quad_of(thread)));
#pragma unroll
    for (int j = 0; j < 4; ++j) *(Lds<u32x4>)(address ^ place(j, 0)) = columns[j];
  }

  __device__ static int first_operand(int lane) { return place(lane % 32, lane / 32 * 4); }

  // Values 32 * block and on, keys 4 * step and on of the 16 that a lane takes; `first` is where
  // first_operand is.
  __device__ static u32x4 operand(Lds<const char> first, int block, int step) {
    return *(Lds<const u32x4>)(((unsigned)first ^ step * 16) + block * 32 * Base::kRowBytes);
  }
};

// A tile of 16-bit values, with the keys of a lane as in FloatValueTile: chunks have eight that
// follow each other, and lie in LDS in their order. Also with columns that have been transposed
// before.
template <int kKeys, int kHdim, int kThreads>
struct HalfValueTile : ValueTile<kKeys, kHdim, kThreads, kBankChunks> {
  using Base = ValueTile<kKeys, kHdim, kThreads, kBankChunks>;
  static_assert(kKeys == 32 && Base::kWidth == 4);

  __device__ static int quad_of(int thread) {
    return Base::chunk_of(thread) * 2 + Base::half_of(thread);
  }

  __device__ static int first_operand(int lane) { return Base::place(lane % 32, lane / 32 * 2); }

  // Values 32 * block and on, keys 8 * step and on of the 16 that a lane takes; `first` is where
  // first_operand is.
  __device__ static u32x4 operand(Lds<const char> first, int block, int step) {
    return *(Lds<const u32x4>)(((unsigned)first ^ step * 16) + block * 32 * Base::kRowBytes);
  }

  __device__ static void store_columns(Lds<char> tile, const u32x2 (&columns)[4], int thread) {
    const int chunk = Base::chunk_of(thread), half = Base::half_of(thread);
    const int first = Base::place(Base::column_of(thread) * Base::kWidth, chunk) + half * 8;
    const unsigned address = (unsigned)(tile + first);
#pragma unroll
    for (int j = 0; j < 4; ++j) *(Lds<u32x2>)(address ^ Base::place(j, 0)) = columns[j];
  }
};

// What products take decides how a tile of 128 columns lies in LDS; one of 64 would have conflicts.
template <class Dtype, int kKeys, int kThreads>
using ValueTileOf = Either<Dtype::kBytes == 4, FloatValueTile<kKeys, 128, kThreads>,
                           HalfValueTile<kKeys, 128, kThreads>>;

// How values are reached: a row for each key, or with kAreColumns a column for each number of one.
template <int kHdim, class Element, Access kAccess, bool kAreColumns>
using LinesOf = Either<
    kAccess == Access::wide_packed_pages, PackedColumns,
    Either<kAreColumns, TileColumns<kHdim, Element, kAccess>, TileRows<kHdim, Element, kAccess>>>;

// Columns of a tile of values, up to 128 of them. Lines is how they are reached, Element what they
// are in memory, and Dtype what products take.
template <int kKeyCount, int kHdim, class Lines, class Element, class Dtype, int kThreads>
struct ValueColumns : ValueTileOf<Dtype, kKeyCount, kThreads> {
  using Base = ValueTileOf<Dtype, kKeyCount, kThreads>;
  static_assert(kHdim <= 128);
  static constexpr int kBlocks = rounded_up(kHdim, 32) / 32;
  using Four = Words<Element, 4>;

  struct Registers {
    Four line[4];
  };

  struct Source {
    Lines lines;
    typename Lines::Keys keys;
    int thread;

    __device__ void load(Registers& to, int i) const {
      to.line[i] = lines.template line<Four>(keys, Base::column_of(thread) * Base::kWidth, i);
    }
  };

  __device__ static Source source(const typename Lines::Source& from, int thread) {
    const Lines lines = Lines::template of<kKeyCount>(from, thread);
    return {lines, lines.four_keys(Base::quad_of(thread) * 4), thread};
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

  // Stores columns that were loaded with their keys side by side as rows of a tile of keys, from
  // its column kFirst on. Products take numbers as they are in memory.
  template <class KeyRows, int kFirst>
  __device__ static void store_rows(Lds<char> tile, const Registers& from, int thread) {
    static_assert(Lines::kAreColumns && Element::kBytes == Dtype::kBytes);
    const int at = (kFirst + Base::column_of(thread) * Base::kWidth) * Dtype::kBytes;
    if (at >= KeyRows::kRowBytes) return;
    typename Base::Registers columns;
    __builtin_memcpy(&columns, from.line, sizeof columns);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = KeyRows::row_of(Base::quad_of(thread) * 4 + j);
      *(Lds<Four>)(tile + KeyRows::place(row, at / 16) + at % 16) = Base::keys_of(columns, j);
    }
  }
};

// The same of values in wide packed pages. A thread loads the pieces of 16 keys and one column,
// which become two chunks of LDS.
template <int kKeyCount, int kHdim, class Element, class Dtype, int kThreads>
struct PackedValueColumns : ValueTileOf<Dtype, kKeyCount, kThreads> {
  using Base = ValueTileOf<Dtype, kKeyCount, kThreads>;
  static constexpr int kTileColumns = 128;
  static_assert(kHdim <= kTileColumns && Dtype::kBytes == 2);
  static_assert(kKeyCount / kWidePageRows * kTileColumns == kThreads);
  static constexpr int kBlocks = rounded_up(kHdim, 32) / 32;
  static constexpr int kPieceKeys = kPieceBytes / Element::kBytes;
  static constexpr int kLoads = kWidePageRows / kPieceKeys;
  using Chunk = Words<Element, 8>;

  struct Registers {
    u32x4 piece[kLoads];
    int count;  // of the keys that there are from the first of them on
  };

  struct Source {
    __amdgpu_buffer_rsrc_t buffer;
    unsigned offset, distance;  // of the first piece, and from each to the next one
    int count;

    __device__ void load(Registers& to, int i) const {
      to.piece[i] = __builtin_amdgcn_raw_buffer_load_b128(buffer, offset, i * distance, 0);
      to.count = count;
    }
  };

  // Eight threads that write at once have columns that lie in different banks.
  __device__ static int column_of(int thread) {
    const int n = thread % kTileColumns;
    if constexpr (kBankChunks == 8) return n / 32 * 32 + n / 4 % 2 * 16 + n / 8 % 4 * 4 + n % 4;
    else return n / 16 * 16 + n / 2 % 4 * 4 + n / 8 % 2 * 2 + n % 2;
  }

  __device__ static Source source(const PackedColumns::Source& from, int thread) {
    const Rows rows = from.known_block();
    const int column = column_of(thread);
    const unsigned offset = column < kHdim ? column * kPieceBytes : kOutside;
    return {endless_buffer(rows), offset, kPieceKeys * rows.stride, rows.count};
  }

  // Probabilities of keys behind the last one are 0, and what is there might be no number.
  __device__ static void store(Lds<char> tile, Registers from, int thread) {
    if (__builtin_expect(from.count < kWidePageRows, 0)) {
#pragma unroll
      for (int d = 0; d < 4 * kLoads; ++d) {
        const int bytes = from.count * Element::kBytes - 4 * d;
        const unsigned kept = bytes <= 0 ? 0 : bytes >= 4 ? ~0u : (1u << 8 * bytes) - 1;
        from.piece[d / 4][d % 4] &= kept;
      }
    }
    Chunk chunks[2];
    __builtin_memcpy(chunks, from.piece, sizeof chunks);
    const auto first = (unsigned)(tile + Base::place(column_of(thread), thread / kTileColumns * 2));
#pragma unroll
    for (int i = 0; i < 2; ++i) *(Lds<u32x4>)(first ^ i * 16) = as_taken<Element, Dtype>(chunks[i]);
  }
};

// A tile of values with kHdim up to 128.
template <int kKeyCount, int kHdim, class Element, class Dtype, Access kAccess, bool kAreColumns,
          int kThreads, bool kIsWide = (kHdim > 128)>
struct ValueRowTile
    : Either<kAccess == Access::wide_packed_pages,
             PackedValueColumns<kKeyCount, kHdim, Element, Dtype, kThreads>,
             ValueColumns<kKeyCount, kHdim, LinesOf<kHdim, Element, kAccess, kAreColumns>, Element,
                          Dtype, kThreads>> {};

// With kHdim from 129 to 256 there are two tiles, one behind the other.
template <int kKeyCount, int kHdim, class Element, class Dtype, Access kAccess, bool kAreColumns,
          int kThreads>
struct ValueRowTile<kKeyCount, kHdim, Element, Dtype, kAccess, kAreColumns, kThreads, true> {
  static constexpr int kFirstHdim = 128;
  template <int kColumns>
  using Part = ValueRowTile<kKeyCount, kColumns, Element, Dtype, kAccess, kAreColumns, kThreads>;
  using First = Part<kFirstHdim>;
  using Second = Part<kHdim - kFirstHdim>;
  using Lines = LinesOf<kHdim, Element, kAccess, kAreColumns>;
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

  template <class KeyRows, int kFirst>
  __device__ static void store_rows(Lds<char> tile, const Registers& from, int thread) {
    First::template store_rows<KeyRows, kFirst>(tile, from.first, thread);
    Second::template store_rows<KeyRows, kFirst + kFirstHdim>(tile, from.second, thread);
  }

  __device__ static int first_operand(int lane) { return First::first_operand(lane); }

  // Both have as wide rows, so that the operands of one lie as those of the other.
  __device__ static u32x4 operand(Lds<const char> first, int block, int step) {
    return block < First::kBlocks
               ? First::operand(first, block, step)
               : Second::operand(first + First::kBytes, block - First::kBlocks, step);
  }
};

// A tile of rows that are loaded as columns, whose keys lie side by side.
template <class KeyRows, class Columns>
struct RowTileOfColumns : KeyRows {
  static constexpr int kLoads = Columns::kLoads;
  using Registers = typename Columns::Registers;
  using Source = typename Columns::Source;

  template <class From>
  __device__ static Source source(const From& from, int thread) {
    return Columns::source(from, thread);
  }
  __device__ static void store(Lds<char> tile, const Registers& from, int thread) {
    Columns::template store_rows<KeyRows, 0>(tile, from, thread);
  }
};

// In place of a tile that a kernel does not have.
struct NoTile {
  static constexpr int kBytes = 0, kLoads = 0, kBlocks = 1;
  struct Registers {};
  struct Source {
    __device__ void load(Registers&, int) const {}
  };

  template <class From>
  __device__ static Source source(const From&, int) {
    return {};
  }
  __device__ static void store(Lds<char>, const Registers&, int) {}
  __device__ static int first_operand(int) { return 0; }
  __device__ static u32x4 operand(Lds<const char>, int, int) { return u32x4(0); }
};
