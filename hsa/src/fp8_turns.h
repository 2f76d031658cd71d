// Forward with 8-bit inputs, hdim 64, 128 or 256. Two groups of waves take turns as forward_turns.h
// says, but the softmax takes as long as the products, or longer. So group 1, whose softmax comes
// first between two barriers, goes before group 0 with it: its matrix phase then runs beside group
// 0's softmax.
#pragma once

#include "forward_output.h"
#include "fp8_attention.h"
#include "fp8_tiles.h"

static_assert(kGroups == 2);
// Under a mask, wide heads in such pages leave no registers for what follows from the thread.
constexpr bool kFindsAnew = kCausal && kHdimQ > 128 && (kPacked || kAreScattered<KeyLines>);
template <bool kArePacked>
struct Tiles {
  using Keys = Fp8KeyTile<kTileKeys, kHdimQ, kThreads, KeyLines, kFindsAnew>;
  using Values = Fp8ValueTile<kTileKeys, kHdimV, kThreads, KeyLines, kFindsAnew>;
};
template <>
struct Tiles<true> {
  using Keys = PackedFp8KeyTile<kTileKeys, kHdimQ, kThreads, KeyLines, kFindsAnew>;
  using Values = PackedFp8ValueTile<kTileKeys, kHdimV, kThreads, KeyLines>;
};
using Keys = Tiles<kPacked>::Keys;
using Values = Tiles<kPacked>::Values;
using Wave = Fp8Attention<Keys, Values>;

// LDS: the buffers of keys, then those of values, then room for Exchange of each wave.
constexpr int kKeysBytes = kGroups * Keys::kBytes, kValuesBytes = kGroups * Values::kBytes;
constexpr int kTilesBytes = kKeysBytes + kValuesBytes;
constexpr bool kHasRoom = true;
constexpr int kOutputExchange = kTilesBytes, kSharedBytes = kTilesBytes + kExchangeBytes;
static_assert(kSharedBytes <= kLdsBytes);

constexpr int kLoads = Values::kLoads + Keys::kLoads;
constexpr int kKeyProducts = Wave::kQuerySteps * Wave::kKeyBlocks / 2;
// As in forward_turns.h. Of wide heads a wave has no registers for that.
constexpr bool kBringsEarly = kCausal && kHdimV <= 128;

template <bool kAreFar>
__device__ inline void attend(Task task, Lds<char> lds, int thread) {
  Head& head = task.head;
  const int lane = thread % 64;
  const int wave_index = __builtin_amdgcn_readfirstlane(thread / 64);
  int group = wave_index / 4;
  const int first_row = task.tile * kTileRows + wave_index * 32;
  const Lds<char> exchange = lds + kTilesBytes + wave_index * Exchange::kBytes;
  const int tiles = take_share(task);

  Wave wave;
  wave.scale = task.scale;
  wave.maximum = kNoMaximum;
  wave.sum = 0;
  // The output is left as it is: the first tile makes it.
#pragma unroll
  for (int block = 0; block < kValueBlocks; ++block) asm volatile("" : "=v"(wave.output[block]));

  const Lds<char> keys = lds, values = lds + kKeysBytes;
  if (tiles > 0) {
    const int row = first_row + lane % 32;
    const auto key_buffer = [&](int i) { return keys + i % kGroups * Keys::kBytes; };
    const auto value_buffer = [&](int i) { return values + i % kGroups * Values::kBytes; };

    Keys::Registers first_keys, next_keys;
    Values::Registers next_values;
    // V i and K i + 1, which are on their way together.
    const TileLines lines = lines_of(task, thread);
    Values::Source value_source(lines.values);
    Keys::Source key_source(lines.keys);
    const int value_offset = Values::first_offset(head.v.stride, thread);
    const int key_offset = Keys::first_offset(head.k.stride, thread, chunk_distance(task));
    const auto advance = [&] {
      value_source.advance();
      key_source.advance();
    };
    const auto load_keys = [&](Keys::Registers& to, int i) {
      Keys::load<kAreFar>(to, key_source, key_offset, thread, i);
    };
    const auto load = [&](int n) {
      if (n < Values::kLoads)
        Values::load<kAreFar>(next_values, value_source, value_offset, thread, n);
      else if (n < kLoads) load_keys(next_keys, n - Values::kLoads);
    };
    // Where rows have places of their own, a little before they are loaded.
    const auto ask = [&](int n) {
      if (n < Values::kLoads) Values::ask(value_source, thread, n);
      else if (n < kLoads) Keys::ask(key_source, thread, n - Values::kLoads);
    };
    const auto load_all = [&] {
#pragma unroll
      for (int n = 0; n < kLoads; ++n) ask(n);
#pragma unroll
      for (int n = 0; n < kLoads; ++n) load(n);
    };
    const auto store = [&](int i) {
      Values::store(value_buffer(i), next_values, value_source.rows.count, thread);
      Keys::store(key_buffer(i + 1), next_keys, thread);
    };

    // All that the first tile needs is on its way before anything is waited for.
#pragma unroll
    for (int i = 0; i < Keys::kLoads; ++i) Keys::ask(key_source, thread, i);
#pragma unroll
    for (int i = 0; i < Keys::kLoads; ++i) load_keys(first_keys, i);
    key_source.advance();
    load_queries<kAreFar>(wave.query, head.q.from(first_row), lane);
    load_all();
    exchange_queries(wave.query, exchange, lane);
    Keys::store(key_buffer(0), first_keys, thread);
    barrier();
    if (group == 1) {
      store(0);
      advance();
      load_all();
    }
    auto operands = Wave::operands<Wave::Operands::kValues>(values, keys, lane);
    wave.multiply_keys(operands, [](int) {});
    if (group == 1) barrier();
    // What all rows of the wave see needs no mask; what none of them sees comes last.
    const int seen = kCausal ? seen_tiles(last_visible(task, first_row) + 32, tiles) : tiles;
    // As in forward_turns.h, nothing is declared in the loop.
    int i = 0, first_key, visible;
    for (;; ++i) {
      look_up_tiles(task, i, thread, key_source.rows, value_source.rows);
      first_key = i * kTileKeys;
      visible = last_visible(task, first_row) + 1;
      if (__builtin_expect(first_key + kTileKeys > visible, 0)) {
        if constexpr (kFindsAnew) {
          const int own_lane = opaque_below<kThreads>(thread) % 64;
          wave.mask(last_visible(task, first_row + own_lane % 32) - first_key, own_lane);
        } else {
          wave.mask(last_visible(task, row) - first_key, lane);
        }
      }
      wave.softmax();
      if (i + group < tiles) store(i + group);
      if (group == 0) barrier();
      __builtin_amdgcn_s_setprio(2);
      // The last products read ahead too, but others may be writing output where keys were.
      operands =
          Wave::operands<0>(value_buffer(i), i + 1 < tiles ? key_buffer(i + 1) : value_buffer(i),
                            kFindsAnew ? opaque_below<kThreads>(thread) % 64 : lane);
      advance();
      if (kBringsEarly && i + 1 == seen && i + 1 < tiles) load_all();
      wave.multiply_values(operands, i == 0);
      if (i + 1 == seen) break;
      // Two loads after each product: all at once would make the waves queue. Beside the last ones,
      // which read no operands any more, there are registers for what is loaded; for addresses of
      // rows that are far there are only behind them.
      wave.multiply_keys(operands, [&](int n) {
        constexpr int kFirst = kKeyProducts - (kLoads + 1) / 2;
        static_assert(kFirst > 0);
        if (kAreFar || n + 1 < kFirst) return;
        ask(2 * (n + 1 - kFirst));
        ask(2 * (n + 1 - kFirst) + 1);
        if (n < kFirst) return;
        load(2 * (n - kFirst));
        load(2 * (n - kFirst) + 1);
      });
      if (kAreFar) load_all();
      __builtin_amdgcn_s_setprio(0);
      if (group == 1) {
        // Before the softmax of group 0, which has all the time of the matrix phase to come.
        __builtin_amdgcn_s_setprio(1);
        barrier();
      }
    }
    __builtin_amdgcn_s_setprio(0);
    // Of tiles that are hidden from all of its rows the wave brings its share for the others.
    if constexpr (kCausal) asm volatile("" : "+s"(group));
    if (kCausal && !kBringsEarly && i + 1 < tiles) load_all();
    while (kCausal && i + 1 < tiles) {
      if (group == 1) barrier();
      ++i;
      look_up_tiles(task, i, thread, key_source.rows, value_source.rows);
      if (i + group < tiles) store(i + group);
      if (group == 0) barrier();
      if (i + 1 == tiles) break;
      advance();
      load_all();
    }
  } else {
    wave.clear_output();
  }
  if (task.workspace) {
    if (first_row < head.q.count) {
      wave.clear_blind_rows(wave.row_sum(opaque(lane)));
      split_result_of(task, task.split, wave_index).store(wave, opaque(lane));
    }
    return;
  }
  store_output<kAreFar>(wave, task, first_row, exchange, opaque(lane));
}
