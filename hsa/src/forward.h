// Forward: which queries and keys a workgroup has, and the way of its queries into registers.
//
// Set by the build: what fmha_fwd.hip says.
#pragma once

#include "attention.h"
#include "workgroups.h"

constexpr int kHdimQ = HDIM_Q, kHdimV = HDIM_V;
constexpr int kTileRows = TILE_ROWS, kTileKeys = TILE_KEYS;
constexpr int kWaves = kTileRows / 32, kThreads = 64 * kWaves;
// Groups of waves that take turns. With one group, two workgroups share a compute unit.
constexpr int kGroups = kWaves / 4;
static_assert(kGroups == 1 || kGroups == 2);
// The diagonal of the causal mask begins in the top left corner or ends in the bottom right one.
constexpr bool kCausal = MASK != 0, kTopLeft = MASK == 1, kGroupMode = GROUP;
#if defined(__gfx950__)
constexpr int kLdsBytes = 160 * 1024;
#else
constexpr int kLdsBytes = 64 * 1024;
#endif
constexpr int kExchangeBytes = kWaves * Exchange::kBytes;

#if PAGED
// The pages of one sequence's keys and values.
struct KeyPages {
  Global<const int> table;
  Divisor size;             // rows of a page
  unsigned last;            // page that there is
  unsigned distance;        // from a page to the next one, in rows: of keys as of values
  unsigned value_distance;  // in packed pages, whose rows are others; both are in kPageRows rows
};
// Whether pages hold pieces of 16 bytes: those of the same numbers of all keys, or of a column of
// values those of some keys.
constexpr bool kPacked = PACKED;
constexpr int kKeyBytes = HAS_8_BITS || WIDENS_KEYS ? 1 : 2;
// A wave loads rows of one such block of each tile, whose keys are on one page. In packed pages a
// column of values has a piece of them.
constexpr int kPageRows = kPacked ? 16 / kKeyBytes : 16;
#if SCATTERED
using KeyLines = ScatteredRows<kTileKeys>;
#else
using KeyLines = PagedRows<kTileKeys, kPacked ? kPageRows : 1>;
#endif
#else
using KeyLines = Rows;
constexpr bool kPacked = false;
#endif

// A tile of queries of one sequence and head, and a share of its keys.
struct Task {
  Head head;
  int tile;                 // of queries
  int diagonal;             // the last key that query 0 sees under the causal mask
  int split, num_splits;    // which share of the keys, of how many
  Global<float> workspace;  // of the sequence and head, where splits leave results; null: one split
  float scale;              // of scores, with log2(e) in it
  float value_scale;        // what the output is multiplied with
#if PAGED
  KeyPages pages;
  int first_key;  // of the share
#endif
};

// Leaves this split's share of the keys that any row of the tile sees. Returns its tiles.
__device__ inline int take_share(Task& task) {
  Head& head = task.head;
  int diagonal = task.diagonal;
  int count = head.k.count;
  if (kCausal) {
    int rows = (task.tile + 1) * kTileRows;
    // The last row of all sees the last key, if the diagonal ends there.
    if (kTopLeft) rows = smaller(rows, head.q.count);
    count = smaller(count, rows + diagonal);
  }
  int tiles = count > 0 ? tiles_of(count, kTileKeys) : 0;
  if (task.workspace) {
    const int begin = tiles * task.split / task.num_splits;
    tiles = tiles * (task.split + 1) / task.num_splits - begin;
#if PAGED
    task.first_key = begin * kTileKeys;
    head.k.count -= task.first_key;
    head.v.count -= task.first_key;
#else
    head.k = head.k.from(begin * kTileKeys);
    head.v = head.v.from(begin * kTileKeys);
#endif
    diagonal -= begin * kTileKeys;
  }
  task.diagonal = diagonal;
  return tiles;
}

// The last key that a row sees. Where the diagonal ends with the keys, only rows behind the last
// one are on the other side of the end, and they do not matter.
__device__ inline int last_visible(const Task& task, int row) {
  const int keys = task.head.k.count, on_diagonal = row + task.diagonal;
  if (!kCausal) return keys - 1;
  return kTopLeft ? smaller(keys - 1, on_diagonal) : on_diagonal;
}

// Of so many tiles, those with which a wave computes whose rows see so many keys: one at least,
// which begins the output.
__device__ inline int seen_tiles(int keys, int tiles) {
  return keys > kTileKeys ? smaller(tiles_of(keys, kTileKeys), tiles) : 1;
}

// The keys and values that a wave goes through.
struct TileLines {
  KeyLines keys, values;
};

#if PAGED
// Bytes between the chunks of a row.
__device__ inline unsigned chunk_distance(const Task& task) {
  return kPacked ? task.pages.size.divisor * 16 : 16;
}

// The first one of a wave, in the tile.
__device__ inline int first_row_of_wave(int thread) {
  return __builtin_amdgcn_readfirstlane(thread / 64) * (kTileKeys / kWaves) / kPageRows * kPageRows;
}

#if SCATTERED
static_assert(KeyLines::kBlockRows == kPageRows);
// Of the tiles of which lanes know, the last ones are for loads ahead.
constexpr int kLookedUp = 2;

// Of the row that a lane knows of where it knows of tiles from `first` on: which page of the
// sequence it is on, and where there.
__device__ inline Quotient place_in_pages(const Task& task, int first, int thread) {
  thread =
      opaque_below<kThreads>(thread);  // or what follows from it would take registers throughout
  const int lane = thread % 64;
  const int key =
      (first + lane / kPageRows) * kTileKeys + first_row_of_wave(thread) + lane % kPageRows;
  // Keys behind the last one have its place, so that every place may be read.
  return divide(task.first_key + smaller(key, task.head.k.count - 1), task.pages.size);
}

// Asks the table for the pages of the tiles from `first` on.
__device__ inline void ask_table(const Task& task, int first, int thread, KeyLines& keys) {
  keys.named = task.pages.table[place_in_pages(task, first, thread).value];
}

// Sees that lanes know of the tiles from `first` on, which the table has been asked for. The place
// in the page is found once more: nobody has a register to keep it.
__device__ inline void look_up(const Task& task, int first, int thread, KeyLines& keys,
                               KeyLines& values) {
  const KeyPages& pages = task.pages;
  const unsigned named = keys.named;
  const unsigned page = named < pages.last ? named : pages.last;
  keys.first = values.first = first;
  keys.row = values.row = page * pages.distance + place_in_pages(task, first, thread).remainder;
}

__device__ inline TileLines lines_of(const Task& task, int thread) {
  TileLines result = {{task.head.k}, {task.head.v}};
  ask_table(task, 0, thread, result.keys);
  look_up(task, 0, thread, result.keys, result.values);
  ask_table(task, 1, thread, result.keys);
  return result;
}

// Sees that lanes know where the rows are that loads of tile `i + 1` and behind it are for.
__device__ inline void look_up_tiles(const Task& task, int i, int thread, KeyLines& keys,
                                     KeyLines& values) {
  if (i % kLookedUp) return;
  look_up(task, i + 1, thread, keys, values);
  ask_table(task, i + 1 + kLookedUp, thread, keys);
}
#else
// Of the 64 tiles of which lanes know, the last ones are for loads ahead.
constexpr int kLookedUp = 48;

// Sees that lanes know where the tiles from `first` on are.
__device__ inline void look_up(const Task& task, int first, int thread, KeyLines& keys,
                               KeyLines& values) {
  const KeyPages& pages = task.pages;
  const Head& head = task.head;
  const int wave_row = first_row_of_wave(thread);
  const int key = (first + thread % 64) * kTileKeys + wave_row;
  // Behind the end no page is named, and nothing is loaded.
  const Quotient in_page = divide(task.first_key + smaller(key, head.k.count - 1), pages.size);
  const unsigned named = pages.table[in_page.value];
  const unsigned page = named < pages.last ? named : pages.last;
  // In packed pages, loads behind the end are of the block that has the last key.
  constexpr int kBlock = kPacked ? kPageRows : 1;
  const auto block_by = [&](unsigned distance) {
    int block = page * distance + in_page.remainder / kBlock - wave_row / kBlock;
    asm volatile("" : "+v"(block));  // waited for here, not wherever a lane is asked
    return block;
  };
  keys.first = values.first = first;
  keys.block = block_by(pages.distance);
  values.block = kPacked ? block_by(pages.value_distance) : keys.block;
}

__device__ inline TileLines lines_of(const Task& task, int thread) {
  const Head& head = task.head;
  TileLines result;
  result.keys = {head.k, head.k.base, 0};
  result.values = {head.v, head.v.base, 0};
  look_up(task, 0, thread, result.keys, result.values);
  return {result.keys.from(0), result.values.from(0)};
}

// The same of those that loads of tile `i` and behind it are for, where lanes would soon not know.
__device__ inline void look_up_tiles(const Task& task, int i, int thread, KeyLines& keys,
                                     KeyLines& values) {
  if (i % kLookedUp == kLookedUp - 1) look_up(task, i, thread, keys, values);
}
#endif
#else
__device__ inline unsigned chunk_distance(const Task&) { return 16; }

__device__ inline TileLines lines_of(const Task& task, int) { return {task.head.k, task.head.v}; }

__device__ inline void look_up_tiles(const Task&, int, int, KeyLines&, KeyLines&) {}
#endif

// Loads the 32 queries that begin with `rows`. What is loaded for rows behind the last one does not
// matter, as nobody stores what comes of it.
template <bool kAreFar, int kSteps>
__device__ inline void load_queries(u32x4 (&query)[kSteps], Rows rows, int lane) {
  const auto buffer = buffer_of<32, kSteps * 32>(rows);
#pragma unroll
  for (int n = 0; n < kSteps; ++n) {
    const int row = Exchange::row_of(n % Exchange::kPasses, lane);
    const int column = n / Exchange::kPasses * 128 + Exchange::chunk_of(lane) * 16;
    if constexpr (kAreFar) query[n] = load_far<u32x4>(rows, row, column);
    else query[n] = __builtin_amdgcn_raw_buffer_load_b128(buffer, row * rows.stride + column, 0, 0);
  }
}

// Makes operands of the whole rows that were loaded.
template <int kSteps>
__device__ inline void exchange_queries(u32x4 (&query)[kSteps], Lds<char> exchange, int lane) {
#pragma unroll
  for (int first = 0; first < kSteps; first += Exchange::kPasses) {
#pragma unroll
    for (int pass = 0; pass < Exchange::kPasses; ++pass)
      *(Lds<u32x4>)(exchange + Exchange::place(Exchange::row_of(pass, lane),
                                               Exchange::chunk_of(lane))) = query[first + pass];
    wave_barrier();
#pragma unroll
    for (int step = 0; step < Exchange::kPasses; ++step)
      query[first + step] = *(Lds<const u32x4>)(exchange + Exchange::operand_place(step, lane));
    wave_barrier();
  }
}

// The same of rows of 64 bytes, of which a wave loads 16 at a time. They lie in pairs in LDS.
template <bool kAreFar>
__device__ inline void load_queries(u32x4 (&query)[2], Rows rows, int lane) {
  const auto buffer = buffer_of<32, 64>(rows);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int row = n * 16 + lane / 4, column = lane % 4 * 16;
    if constexpr (kAreFar) query[n] = load_far<u32x4>(rows, row, column);
    else query[n] = __builtin_amdgcn_raw_buffer_load_b128(buffer, row * rows.stride + column, 0, 0);
  }
}
__device__ inline void exchange_queries(u32x4 (&query)[2], Lds<char> exchange, int lane) {
  const auto place = [=](int row, int chunk) {
    return exchange + Exchange::place(row / 2, row % 2 * 4 + chunk);
  };
#pragma unroll
  for (int n = 0; n < 2; ++n) *(Lds<u32x4>)place(n * 16 + lane / 4, lane % 4) = query[n];
  wave_barrier();
#pragma unroll
  for (int step = 0; step < 2; ++step)
    query[step] = *(Lds<const u32x4>)place(lane % 32, 2 * step + lane / 32);
  wave_barrier();
}
