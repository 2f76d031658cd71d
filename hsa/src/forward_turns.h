// Forward with 16-bit inputs: the waves of a SIMD take turns.
//
// While one is in its matrix phase (O += V P, then the next tile's S = K Q), the other is in its
// softmax phase. Between two barriers a wave goes through both, those of the first group matrix
// phase first:
//
//     between barriers    -1                    0                    1
//     group 0             S0, softmax 0         O0 S1, softmax 1     O1 S2, softmax 2
//     group 1             S0                    softmax 0, O0 S1     softmax 1, O1 S2
//     read from LDS       K0                    V0 K1                V1 K2
//     written to LDS      V0 K1                 V1 K2                V2 K3
//
// So K and V have two buffers each. A wave writes its share in its softmax phase, and group 1,
// which has none at first, before it begins.
//
// LDS of gfx950 has room for a third buffer of values (kReadsEarly). There the tiles are written a
// turn earlier, V i + 2 and K i + 2 between the products of V i: so a matrix phase needs nothing
// that the barrier before it has brought, reads its first operands before it, and goes on right
// behind that of the other group.
#pragma once

#include "forward_output.h"
#include "tiles.h"

#if WIDENS_KEYS
// Keys and values of 8 bits, which become what products take.
struct KeyNumbers {
  static constexpr int kBytes = KEY_ELEMENT::kBytes;
  using Eight = u32x2;

  __device__ static u32x4 eight(Eight numbers) { return as_taken<KEY_ELEMENT, DTYPE>(numbers); }
  // Numbers that become neighbours are that before they become wide.
  __device__ static u32x2 column(const unsigned (&row)[4][1], int i) {
    const auto of = [=](unsigned even, unsigned odd) {
      const unsigned four = __builtin_amdgcn_perm(odd, even, i < 2 ? 0x05010400 : 0x07030602);
      return as_taken<KEY_ELEMENT, DTYPE>(four)[i % 2];
    };
    return {of(row[0][0], row[1][0]), of(row[2][0], row[3][0])};
  }
};
#else
using KeyNumbers = AsTaken;
#endif

// Where LDS has room for a third buffer of values, tiles are padded.
constexpr bool kReadsEarly = kBankChunks == 16 && kGroups == 2;
template <bool kArePadded>
struct Tiles {
  using Keys = KeyTile<kTileKeys, kHdimQ, kThreads, kBankChunks, KeyLines, KeyNumbers>;
  using Values = ValueTile<kTileKeys, kHdimV, kThreads, kBankChunks, KeyLines, KeyNumbers>;
};
template <>
struct Tiles<true> {
  using Keys = PaddedKeyTile<kTileKeys, kHdimQ, kThreads, KeyLines, KeyNumbers>;
  using Values = PaddedValueTile<kTileKeys, kHdimV, kThreads, KeyLines, KeyNumbers>;
};
template <bool kArePacked, class Plain>
struct TilesInPages : Plain {};
template <class Plain>
struct TilesInPages<true, Plain> {
  using Keys = PackedKeyTile<typename Plain::Keys, KeyLines>;
  using Values = PackedValueTile<typename Plain::Values, kHdimV, KeyLines, KeyNumbers>;
};
using Keys = TilesInPages<kPacked, Tiles<kReadsEarly>>::Keys;
using Values = TilesInPages<kPacked, Tiles<kReadsEarly>>::Values;
using Wave = Attention<Keys, Values, DTYPE, Rounding::ROUNDING>;

// LDS: the buffers of keys, then those of values, then room for Exchange of each wave. Where that
// is not to be had, queries pass through the values' buffers, and the output through the keys'.
constexpr int kKeyBuffers = kGroups, kValueBuffers = kReadsEarly ? 3 : kGroups;
constexpr int kKeysBytes = kKeyBuffers * Keys::kBytes,
              kValuesBytes = kValueBuffers * Values::kBytes;
constexpr int kTilesBytes = kKeysBytes + kValuesBytes;
constexpr bool kHasRoom = kTilesBytes + kExchangeBytes <= kLdsBytes * kGroups / 2;
constexpr int kQueryExchange = kHasRoom ? kTilesBytes : kGroups == 2 ? kKeysBytes : 0;
constexpr int kOutputExchange = kHasRoom ? kTilesBytes : 0;
constexpr int kSharedBytes = kHasRoom ? kTilesBytes + kExchangeBytes : kTilesBytes;
static_assert(kHasRoom || kExchangeBytes <= (kGroups == 2 ? kKeysBytes : kTilesBytes));
static_assert(kHasRoom || kGroups == 1 || kExchangeBytes <= kValuesBytes);
static_assert(kHasRoom || !kReadsEarly);

// The products of a tile's scores.
constexpr int kKeyProducts = Wave::kQuerySteps * Wave::kKeyBlocks;
// Keys that are on their way together with values: of the same tile, or so many behind.
constexpr int kKeysAhead = kReadsEarly ? 0 : 1;
constexpr int kLoads = Values::kLoads + Keys::kLoads;
constexpr int kStores = Values::kStores + Keys::kStores;
static_assert(kLoads <= kKeyProducts);
// Rows that have places of their own are asked for long before they are loaded.
constexpr bool kAsksEarly = !kReadsEarly && kAreScattered<KeyLines>;
// What a wave brings of tiles that are hidden from its rows begins beside its last products.
constexpr bool kBringsEarly = kCausal && !kReadsEarly && !kAsksEarly;

// The next buffer becomes the first one, and the first one the last.
template <int kCount>
__device__ inline void rotate(Lds<char> (&buffers)[kCount]) {
  const Lds<char> first = buffers[0];
#pragma unroll
  for (int i = 0; i + 1 < kCount; ++i) buffers[i] = buffers[i + 1];
  buffers[kCount - 1] = first;
}

// Waits until all loads but the last kLeft are there.
template <int kLeft>
__device__ inline void wait_for_loads() {
  constexpr int kVmcnt = 0xf70 | kLeft;
  static_assert(kLeft < 16);
  __builtin_amdgcn_s_waitcnt(kVmcnt);
}

// Attends to a task. Where rows are further apart than a buffer's offsets reach (kAreFar), the loop
// is slower. This is one function, since the compiler makes other code of what is split.
template <bool kAreFar>
__device__ inline void attend(Task task, Lds<char> lds, int thread) {
  Head& head = task.head;
  const int lane = thread % 64;
  const int wave_index = __builtin_amdgcn_readfirstlane(thread / 64);
  int group = wave_index / 4;
  const int first_row = task.tile * kTileRows + wave_index * 32;
  const int tiles = take_share(task);
  Wave wave;
  wave.scale = task.scale;
  wave.maximum = kNoMaximum;
  wave.sum = 0;
  // The output is left as it is: it is cleared later, or the first tile makes it.
#pragma unroll
  for (int block = 0; block < kValueBlocks; ++block) asm volatile("" : "=v"(wave.output[block]));
  const Lds<char> keys = lds, values = lds + kKeysBytes;
  if (tiles > 0) {
    const int row = first_row + lane % 32;
    // The buffers of V i, V i + 1 and so on, and of K i, K i + 1.
    Lds<char> value_buffer[kValueBuffers], key_buffer[kKeyBuffers];
    for (int n = 0; n < kValueBuffers; ++n) value_buffer[n] = values + n * Values::kBytes;
    for (int n = 0; n < kKeyBuffers; ++n) key_buffer[n] = keys + n * Keys::kBytes;

    Values::Registers next_values;
    Keys::Registers next_keys;
    const TileLines lines = lines_of(task, thread);
    Values::Source value_source = Values::source(lines.values, thread);
    Keys::Source key_source =
        Keys::source(lines.keys.from(kKeysAhead * kTileKeys), thread, chunk_distance(task));
    const auto advance = [&](auto&... sources) {
      (sources.advance_rows(), ...);
      (sources.advance_bytes(), ...);
      (sources.advance_buffer(), ...);
    };
    const auto load = [&](int n) {
      if (n < Values::kLoads) return value_source.load<kAreFar>(next_values, n);
      if (n < kLoads) return key_source.load<kAreFar>(next_keys, n - Values::kLoads);
    };
    const auto load_all = [&] {
#pragma unroll
      for (int n = 0; n < kLoads; ++n) load(n);
    };
    // Kept in registers: the compiler would put them together again for each tile.
    const int first_value_store = opaque(Values::first_store(thread));
    const int first_key_store = opaque(Keys::first_store(thread));
    const int first_value_operand = opaque(Values::first_operand(lane));
    const int first_key_operand = opaque(Keys::first_operand(lane));
    const auto store_piece = [&](Lds<char> to_values, Lds<char> to_keys, int n) {
      if (n < Values::kStores)
        return Values::store_piece(to_values + first_value_store, next_values, n);
      if (n < kStores)
        return Keys::store_piece(to_keys + first_key_store, next_keys, n - Values::kStores);
    };
    // Stores the tiles that are `later` behind V i.
    const auto store = [&](int later) {
      Values::clear_behind(next_values);
#pragma unroll
      for (int n = 0; n < kStores; ++n)
        store_piece(value_buffer[later], key_buffer[(later + kKeysAhead) % kKeyBuffers], n);
    };

    // What the first tile needs is all on its way before anything is waited for.
    const Lds<char> exchange = lds + kQueryExchange + wave_index * Exchange::kBytes;
    if constexpr (kReadsEarly) {
      load_queries<kAreFar>(wave.query, head.q.from(first_row), lane);
      load_all();
      wave.clear_output();  // there is time until the queries are there
      exchange_queries(wave.query, exchange, lane);
      store(0);
      advance(value_source, key_source);
      load_all();
      barrier();
    } else {
      Keys::Registers first_keys;
      const Keys::Source keys_0 = Keys::source(lines.keys, thread, chunk_distance(task));
#pragma unroll
      for (int n = 0; n < Keys::kLoads; ++n) keys_0.template load<kAreFar>(first_keys, n);
      load_queries<kAreFar>(wave.query, head.q.from(first_row), lane);
      load_all();
      exchange_queries(wave.query, exchange, lane);
      if (!kHasRoom && kGroups == 1) barrier();
      Keys::store(key_buffer[0], first_keys, thread);
      barrier();
      if (group == 1) {
        store(0);
        advance(value_source, key_source);
        load_all();
      }
    }
    auto operands = Wave::operands_from<Wave::Operands::kValues>(values + first_value_operand,
                                                                 keys + first_key_operand);
    // Of a SIMD's waves at the same priority the oldest goes first: that is one of the first group.
    // It goes ahead until it is in its matrix phase, and all products go before a softmax.
    if (kReadsEarly) __builtin_amdgcn_s_setprio(2);
    if (kReadsEarly) Values::clear_behind(next_values);
    wave.multiply_keys(operands, [&](int n) {
      if constexpr (kReadsEarly) {
        if (n == 0) value_source.advance_rows();
        if (n == 1) key_source.advance_rows();
        if (n == 2) value_source.advance_bytes();
        if (n == 3) key_source.advance_bytes();
        constexpr int kFirstStore = kKeyProducts - kStores - 1;
        static_assert(kFirstStore >= 4);
        if (n >= kFirstStore)
          store_piece(value_buffer[1], key_buffer[1 % kKeyBuffers], n - kFirstStore);
      }
    });
    if constexpr (kReadsEarly) {
      __builtin_amdgcn_s_setprio(1);
      value_source.advance_buffer();
      key_source.advance_buffer();
      load_all();
    }
    // Hides from the rows of the wave what they do not see of tile i.
    const auto mask = [&](int i, int visible) {
      const int first_key = i * kTileKeys;
      if (__builtin_expect(first_key + kTileKeys > visible, 0))
        wave.mask(last_visible(task, row) - first_key, lane);
    };
    if (kReadsEarly) {
      // Before the barrier, at which the second group waits for the first one's softmax.
      mask(0, last_visible(task, first_row) + 1);
      wave.raise_maximum();
    }
    if (kGroups == 1 || group == 1) {
      barrier();
      // The first softmax goes before the second one of the other group, which came first.
      if (kReadsEarly) __builtin_amdgcn_s_setprio(2);
    }
    // What all rows of the wave see needs no mask; what none of them sees comes last.
    const int visible = last_visible(task, first_row) + 1;
    const int seen = kCausal ? seen_tiles(visible + 31, tiles) : tiles;
    // What else there is to do goes between the products, a little after each.
    constexpr int kSlots = Wave::Operands::kValues - kValueBlocks;
    static_assert(!kReadsEarly || (kStores + 2 <= kSlots && kSlots > 5));
    // One load after every other operand: all at once would make the waves queue.
    constexpr int kEvery = kKeyProducts >= 2 * kLoads ? 2 : 1;
    constexpr int kLastValueLoad = (Values::kLoads - 1) * kEvery;
    // Nothing is declared in the loop: what ends with its turns would be ended in one place for
    // `break`, too, and the loop would always go there.
    int i = 0;
    bool has_next;
    for (;; ++i) {
      look_up_tiles(task, i, thread, key_source.rows, value_source.rows);
      mask(i, visible);
      wave.softmax(!kReadsEarly && i == 0, [](int, f32x2 pair) { return pair; });
      if (kReadsEarly) Values::clear_behind(next_values);
      if (!kReadsEarly && i + group < tiles) store(group);
      if (!kReadsEarly && (kGroups == 1 || group == 0)) barrier();
      // The last products read ahead too, but others may be writing output where keys were.
      has_next = i + 1 < tiles || kGroups == 1 || kHasRoom;
      operands = Wave::operands_from<0>(
          value_buffer[0] + first_value_operand,
          (has_next ? key_buffer[1 % kKeyBuffers] : value_buffer[0]) + first_key_operand);
      if (kReadsEarly && group == 0) {
        wait_for_lds<Wave::kAhead>();
        barrier_after_wait();
      }
      if (kBringsEarly && i + 1 == seen && i + 1 < tiles) {
        advance(value_source, key_source);
        load_all();
      }
      __builtin_amdgcn_s_setprio(2);
      wave.multiply_values(operands, !kReadsEarly && i == 0, [&](int operand) {
        const int n = operand - kValueBlocks;
        if constexpr (kReadsEarly) {
          // Not beside the first product: the compiler would wait for those before it.
          if (n == 1) wait_for_loads<Keys::kLoads>();
          if (n > 1) store_piece(value_buffer[2], key_buffer[0], n - 2);
          if (n == kSlots - 5) value_source.advance_rows();
          if (n == kSlots - 3) value_source.advance_bytes();
          if (n == kSlots - 1) value_source.advance_buffer();
        }
        if constexpr (kAsksEarly) {
          if (n == 0) advance(value_source, key_source);
        }
      });
      if (i + 1 == seen) break;
      if constexpr (!kReadsEarly && !kAsksEarly) advance(value_source, key_source);
      wave.multiply_keys(operands, [&](int n) {
        if (kReadsEarly && n == 1) key_source.advance_rows();
        if (kReadsEarly && n == kLastValueLoad - kEvery - 1) key_source.advance_bytes();
        if (kReadsEarly && n == kLastValueLoad - 1) key_source.advance_buffer();
        if (n % kEvery == 0) load(n / kEvery);
        // Right behind the last product but one: the matrix units work on it while the barrier
        // takes its time, and then on the last one, while the other group begins. What the waves
        // wait for is there before, and for the second group the branch is not taken.
        if (kReadsEarly && n == kKeyProducts - 3) wait_for_lds<0>();
        if (kReadsEarly && n == kKeyProducts - 2 && __builtin_expect(group == 1, 1))
          barrier_after_wait();
      });
      __builtin_amdgcn_s_setprio(kReadsEarly);
      if (!kReadsEarly && (kGroups == 1 || group == 1)) barrier();
      rotate(value_buffer);
      rotate(key_buffer);
    }
    __builtin_amdgcn_s_setprio(0);
    // Of tiles that are hidden from all of its rows the wave brings its share for the others. What
    // this begins with is new to the compiler, or it would make the loop fit for both.
    if constexpr (kCausal) asm volatile("" : "+s"(kGroups == 1 ? i : group));
    if (kCausal && !kBringsEarly && i + 1 < tiles) {
      if constexpr (kReadsEarly) advance(key_source);
      load_all();
    }
    while (kCausal && i + 1 < tiles) {
      if (kGroups == 1 || group == 1) barrier();
      rotate(value_buffer);
      rotate(key_buffer);
      ++i;
      look_up_tiles(task, i, thread, key_source.rows, value_source.rows);
      if (!kReadsEarly && i + group < tiles) store(group);
      if (kGroups == 1 || group == 0) barrier();
      if (i + 1 == tiles) break;
      if (kReadsEarly) store(2);
      advance(value_source, key_source);
      load_all();
    }
  } else {
    wave.clear_output();
  }
  if (task.workspace) {
    if (first_row < head.q.count) {
      wave.clear_blind_rows(wave.row_sum(opaque_below<64>(lane)));
      split_result_of(task, task.split, wave_index).store(wave, opaque_below<64>(lane));
    }
    return;
  }
  if (!kHasRoom && kGroups == 1) barrier();
  store_output<kAreFar>(wave, task, first_row,
                        lds + kOutputExchange + wave_index * Exchange::kBytes,
                        opaque_below<64>(lane));
}
