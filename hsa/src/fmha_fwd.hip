// Fused multi-head attention, forward: O = softmax(scale Q K^T) V, for gfx942 and gfx950.
//
// A workgroup computes kTileRows queries of one head, each wave 32 of them, over all key tiles with
// an online softmax. Everything is transposed: S^T = K Q^T and O^T = V^T P^T. So a lane holds
// scores of one query only, and P^T in the accumulator is the second product's operand as it is.
//
// With two groups of waves, the waves of a SIMD take turns: while one is in its matrix phase
// (O += V P, then the next tile's S = K Q), the other is in its softmax phase. Between two barriers
// a wave goes through both, those of the first group matrix phase first:
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
//
// A launch that would not fill the chip splits the keys: num_splits workgroups attend to the same
// queries, each to its share of the keys. Each leaves its registers in the workspace, from which
// the kernel COMBINE then makes the output, 32 queries in each workgroup.
//
// Set by the build: DTYPE (BF16 or FP16), HDIM_Q, HDIM_V, MASK, GROUP, ROUNDING, KERNEL and
// COMBINE (symbols), TILE_ROWS, TILE_KEYS.
#include "attention.h"
#include "split_results.h"
#include "workgroups.h"

constexpr int kHdimQ = HDIM_Q, kHdimV = HDIM_V;
constexpr int kTileRows = TILE_ROWS, kTileKeys = TILE_KEYS;
constexpr int kWaves = kTileRows / 32, kThreads = 64 * kWaves;
constexpr int kGroups = kWaves / 4;
// The diagonal of the causal mask begins in the top left corner or ends in the bottom right one.
constexpr bool kCausal = MASK != 0, kTopLeft = MASK == 1, kGroupMode = GROUP;
// Tiles that no row of a wave sees take no products. Of wider rows a wave has no registers for
// that, and of narrower ones products are few.
constexpr bool kSkipsHidden = kCausal && HDIM_Q == 128;
constexpr Rounding kRounding = Rounding::ROUNDING;
#if defined(__gfx950__)
constexpr int kBankChunks = 16;  // 64 banks
constexpr int kLdsBytes = 160 * 1024;
constexpr bool kReadsEarly = kGroups == 2;
#else
constexpr int kBankChunks = 8;  // 32 banks
constexpr int kLdsBytes = 64 * 1024;
constexpr bool kReadsEarly = false;
#endif
static_assert(kGroups == 1 || kGroups == 2);

// Where there is room for it, tiles are padded.
template <bool kArePadded>
struct Tiles {
  using Keys = KeyTile<kTileKeys, kHdimQ, kThreads, kBankChunks>;
  using Values = ValueTile<kTileKeys, kHdimV, kThreads, kBankChunks>;
};
template <>
struct Tiles<true> {
  using Keys = PaddedKeyTile<kTileKeys, kHdimQ, kThreads>;
  using Values = PaddedValueTile<kTileKeys, kHdimV, kThreads>;
};
using Keys = Tiles<kReadsEarly>::Keys;
using Values = Tiles<kReadsEarly>::Values;
using Exchange = RowExchange<kBankChunks>;
using Wave = Attention<Keys, Values, DTYPE, kRounding>;

// LDS: the buffers of keys, then those of values, then room for Exchange of each wave. Where that
// is not to be had, queries pass through the values' buffers, and the output through the keys'.
constexpr int kKeyBuffers = kGroups, kValueBuffers = kReadsEarly ? 3 : kGroups;
constexpr int kKeysBytes = kKeyBuffers * Keys::kBytes,
              kValuesBytes = kValueBuffers * Values::kBytes;
constexpr int kTilesBytes = kKeysBytes + kValuesBytes, kExchangeBytes = kWaves * Exchange::kBytes;
// Four waves are one a SIMD: then two workgroups share a compute unit.
constexpr bool kHasRoom = kTilesBytes + kExchangeBytes <= kLdsBytes * kGroups / 2;
constexpr int kQueryExchange = kHasRoom ? kTilesBytes : kGroups == 2 ? kKeysBytes : 0;
constexpr int kOutputExchange = kHasRoom ? kTilesBytes : 0;
constexpr int kSharedBytes = kHasRoom ? kTilesBytes + kExchangeBytes : kTilesBytes;
static_assert(kHasRoom || kExchangeBytes <= (kGroups == 2 ? kKeysBytes : kTilesBytes));
static_assert(kHasRoom || kGroups == 1 || kExchangeBytes <= kValuesBytes);
static_assert(kHasRoom || !kReadsEarly);

constexpr int kKeyBlocks = kTileKeys / 32;
constexpr int kQuerySteps = kHdimQ / 16, kValueBlocks = kHdimV / 32;

// A tile of queries of one sequence and head, and a share of its keys.
struct Task {
  Head head;
  int tile;                 // of queries
  int diagonal;             // the last key that query 0 sees under the causal mask
  int split, num_splits;    // which share of the keys, of how many
  Global<float> workspace;  // of the sequence and head, where splits leave results; null: one split
};

// Keys that are on their way together with values: of the same tile, or so many behind.
constexpr int kKeysAhead = kReadsEarly ? 0 : 1;
constexpr int kLoads = Values::kLoads + Keys::kLoads;
constexpr int kStores = Values::kStores + Keys::kStores;
static_assert(kLoads <= kQuerySteps * kKeyBlocks);

// Waits until all loads but the last kLeft are there.
template <int kLeft>
__device__ inline void wait_for_loads() {
  constexpr int kVmcnt = 0xf70 | kLeft;
  static_assert(kLeft < 16);
  __builtin_amdgcn_s_waitcnt(kVmcnt);
}

// Of the 32 rows that begin with `rows`. What is loaded for rows behind the last one does not
// matter, as nobody stores what comes of it.
template <bool kAreFar>
__device__ inline void load_queries(u32x4 (&query)[kQuerySteps], Rows rows, int lane) {
  const auto buffer = buffer_of<32, kHdimQ * 2>(rows);
#pragma unroll
  for (int n = 0; n < kQuerySteps; ++n) {
    const int pass = n % Exchange::kPasses, values = n / Exchange::kPasses * 64;
    const int row = Exchange::row_of(pass, lane);
    const int column = values * 2 + Exchange::chunk_of(lane) * 16;
    if constexpr (kAreFar) query[n] = load_far<u32x4>(rows, row, column);
    else query[n] = __builtin_amdgcn_raw_buffer_load_b128(buffer, row * rows.stride + column, 0, 0);
  }
}

// From whole rows to operands.
__device__ inline void exchange_queries(u32x4 (&query)[kQuerySteps], Lds<char> exchange, int lane) {
#pragma unroll
  for (int first = 0; first < kQuerySteps; first += Exchange::kPasses) {
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

// The 32 rows of the output that begin with `rows`, on their way from registers through LDS, where
// there are 64 values of each row together.
template <bool kAreFar>
struct OutputRows {
  Rows rows;
  __amdgpu_buffer_rsrc_t buffer;

  __device__ explicit OutputRows(Rows given) : rows(given) {
    // The stride of a single row may be anything, and has to lead behind the end.
    if (rows.count == 1) rows.stride = kHdimV * 2;
    buffer = buffer_of<32, kHdimV * 2>(rows);
  }

  // Four values of a lane, the accumulator's 4 * group and on.
  __device__ static void put(Lds<char> exchange, int group, f32x4 values, int lane) {
    *(Lds<u32x2>)(exchange + Exchange::accumulator_place(group, lane)) =
        u32x2{packed_results<DTYPE>(values.x, values.y), packed_results<DTYPE>(values.z, values.w)};
  }

  // Eight rows of the 64 values from `column` on.
  __device__ void store(Lds<const char> exchange, int pass, int column, int lane) const {
    const int row = Exchange::row_of(pass, lane), chunk = Exchange::chunk_of(lane);
    const u32x4 values =
        Exchange::unswapped(*(Lds<const u32x4>)(exchange + Exchange::place(row, chunk)), pass);
    const int offset = column * 2 + chunk * 16;
    if constexpr (!kAreFar)
      __builtin_amdgcn_raw_buffer_store_b128(values, buffer, row * rows.stride + offset, 0, 0);
    else if (row < rows.count)
      *(Global<u32x4>)(rows.base + static_cast<unsigned long>(row) * rows.stride + offset) = values;
  }
};

// What the output is multiplied with in the end. Rows that see no key are zero.
__device__ inline float reciprocal_of(float row_sum) {
  return row_sum == 0 ? 0 : __builtin_amdgcn_rcpf(row_sum);
}

__device__ inline void store_lse(const Head& head, int first_row, float maximum, float row_sum,
                                 int lane) {
  const int row = first_row + lane % 32;
  if (head.lse && lane < 32 && row < head.q.count)
    head.lse[row] = row_sum == 0 ? -kInfinity : (maximum + __builtin_amdgcn_logf(row_sum)) * kLn2;
}

template <bool kAreFar>
__device__ inline void store_output(Wave& wave, const Head& head, int first_row, Lds<char> exchange,
                                    int lane) {
  const OutputRows<kAreFar> rows(head.o.from(first_row));
  const float sum = wave.row_sum(lane);
  wave.clear_blind_rows(sum);
  const float factor = reciprocal_of(sum);
#pragma unroll
  for (int first = 0; first < kValueBlocks; first += 2) {
#pragma unroll
    for (int group = 0; group < 8; ++group) {
      const f32x16& o = wave.output[first + group / 4];
      const int i = group % 4 * 4;
      rows.put(exchange, group, f32x4{o[i], o[i + 1], o[i + 2], o[i + 3]} * factor, lane);
    }
    wave_barrier();
#pragma unroll
    for (int pass = 0; pass < Exchange::kPasses; ++pass)
      rows.store(exchange, pass, first * 32, lane);
    wave_barrier();
  }
  store_lse(head, first_row, wave.maximum, sum, lane);
}

using OwnResult = SplitResult<kValueBlocks, kWaves>;

// What a wave of a split of the task leaves.
__device__ inline OwnResult split_result_of(const Task& task, int split, int wave_index) {
  return OwnResult::of(task.workspace, task.tile * task.num_splits + split, wave_index);
}

// The last key that a row sees, given the one on the diagonal. Where the diagonal ends with the
// keys, only rows behind the last one are on the other side of the end, and they do not matter.
__device__ inline int last_visible(int keys, int on_diagonal) {
  if (!kCausal) return keys - 1;
  return kTopLeft ? smaller(keys - 1, on_diagonal) : on_diagonal;
}

// The next buffer becomes the first one, and the first one the last.
template <int kCount>
__device__ inline void rotate(Lds<char> (&buffers)[kCount]) {
  const Lds<char> first = buffers[0];
#pragma unroll
  for (int i = 0; i + 1 < kCount; ++i) buffers[i] = buffers[i + 1];
  buffers[kCount - 1] = first;
}

// kAreFar: rows are further apart than a buffer's offsets reach. The loop that is made for that is
// slower.
template <bool kAreFar>
__device__ inline void attend(Task task, float scale, Lds<char> lds, int thread) {
  Head& head = task.head;
  const int lane = thread % 64;
  const int wave_index = __builtin_amdgcn_readfirstlane(thread / 64);
  const int group = wave_index / 4;
  const int first_row = task.tile * kTileRows + wave_index * 32;
  // The last key that a row sees is its number plus this, under the causal mask.
  int diagonal = task.diagonal;

  int count = head.k.count;  // of keys that any row of the tile sees
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
    head.k = head.k.from(begin * kTileKeys);
    head.v = head.v.from(begin * kTileKeys);
    diagonal -= begin * kTileKeys;
  }

  Wave wave;
  wave.scale = scale;
  wave.maximum = kNoMaximum;
  wave.sum = 0;
  // Left as it is: it is cleared later, or the first tile makes it.
#pragma unroll
  for (int block = 0; block < kValueBlocks; ++block) asm volatile("" : "=v"(wave.output[block]));

  const Lds<char> keys = lds, values = lds + kKeysBytes;
  if (tiles > 0) {
    const int row = first_row + lane % 32;
    // Those of V i, V i + 1 and so on, and of K i, K i + 1.
    Lds<char> value_buffer[kValueBuffers], key_buffer[kKeyBuffers];
    for (int n = 0; n < kValueBuffers; ++n) value_buffer[n] = values + n * Values::kBytes;
    for (int n = 0; n < kKeyBuffers; ++n) key_buffer[n] = keys + n * Keys::kBytes;

    Values::Registers next_values;
    Keys::Registers next_keys;
    Values::Source value_source = Values::source(head.v, thread);
    Keys::Source key_source = Keys::source(head.k.from(kKeysAhead * kTileKeys), thread);
    const auto advance = [&] {
      value_source.advance_rows();
      key_source.advance_rows();
      value_source.advance_bytes();
      key_source.advance_bytes();
      value_source.advance_buffer();
      key_source.advance_buffer();
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
    // The tiles that are `later` behind V i.
    const auto store = [&](int later) {
#pragma unroll
      for (int n = 0; n < kStores; ++n)
        store_piece(value_buffer[later], key_buffer[(later + kKeysAhead) % kKeyBuffers], n);
    };

    // All that the first tile needs is on its way before anything is waited for.
    const Lds<char> exchange = lds + kQueryExchange + wave_index * Exchange::kBytes;
    if constexpr (kReadsEarly) {
      load_queries<kAreFar>(wave.query, head.q.from(first_row), lane);
      load_all();
      wave.clear_output();  // there is time until the queries are there
      exchange_queries(wave.query, exchange, lane);
      store(0);
      advance();
      load_all();
      barrier();
    } else {
      Keys::Registers first_keys;
      const Keys::Source keys_0 = Keys::source(head.k, thread);
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
        advance();
        load_all();
      }
    }
    auto first_operands = Wave::operands_from<Wave::Operands::kValues>(values + first_value_operand,
                                                                       keys + first_key_operand);
    // Of a SIMD's waves at the same priority the oldest goes first: that is one of the first group.
    // It goes ahead until it is in its matrix phase, and all products go before a softmax.
    if (kReadsEarly) __builtin_amdgcn_s_setprio(2);
    wave.multiply_keys(first_operands, [&](int n) {
      if constexpr (kReadsEarly) {
        if (n == 0) value_source.advance_rows();
        if (n == 1) key_source.advance_rows();
        if (n == 2) value_source.advance_bytes();
        if (n == 3) key_source.advance_bytes();
        constexpr int kFirstStore = kQuerySteps * kKeyBlocks - kStores - 1;
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
        wave.mask(last_visible(head.k.count, row + diagonal) - first_key, lane);
    };
    if (kReadsEarly) {
      // Before the barrier, at which the second group waits for the first one's softmax.
      mask(0, last_visible(head.k.count, first_row + diagonal) + 1);
      wave.raise_maximum();
    }
    if (kGroups == 1 || group == 1) {
      barrier();
      // The first softmax goes before the second one of the other group, which came first.
      if (kReadsEarly) __builtin_amdgcn_s_setprio(2);
    }
    int i = 0;
    for (;; ++i) {
      // What all rows of the wave see needs no mask; what none of them sees comes last.
      const int first_key = i * kTileKeys;
      const int visible = last_visible(head.k.count, first_row + diagonal) + 1;
      const bool is_hidden = kCausal && first_key >= visible + 31;
      if (kSkipsHidden && is_hidden) break;
      if (is_hidden) {
        wave.see_nothing();
      } else {
        mask(i, visible);
        wave.softmax(!kReadsEarly && i == 0, [](int, f32x2 pair) { return pair; });
      }
      if (!kReadsEarly && i + group < tiles) store(group);
      if (!kReadsEarly && (kGroups == 1 || group == 0)) barrier();
      // The last products read ahead too, but others may be writing output where keys were.
      const bool has_next = i + 1 < tiles || kGroups == 1 || kHasRoom;
      auto operands = Wave::operands_from<0>(
          value_buffer[0] + first_value_operand,
          (has_next ? key_buffer[1 % kKeyBuffers] : value_buffer[0]) + first_key_operand);
      if (kReadsEarly && group == 0) {
        wait_for_lds<Wave::kAhead>();
        barrier_after_wait();
      }
      // What else there is to do goes between the products, a little after each.
      constexpr int kSlots = Wave::Operands::kValues - kValueBlocks;
      static_assert(!kReadsEarly || (kStores + 2 <= kSlots && kSlots > 5));
      __builtin_amdgcn_s_setprio(2);
      wave.multiply_values(operands, !kReadsEarly && i == 0, [&](int n) {
        if constexpr (kReadsEarly) {
          // Not beside the first product: the compiler would wait for those before it.
          if (n == 1) wait_for_loads<Keys::kLoads>();
          if (n > 1) store_piece(value_buffer[2], key_buffer[0], n - 2);
          if (n == kSlots - 5) value_source.advance_rows();
          if (n == kSlots - 3) value_source.advance_bytes();
          if (n == kSlots - 1) value_source.advance_buffer();
        }
      });
      if (i + 1 == tiles) {
        i = tiles;
        break;
      }
      if constexpr (!kReadsEarly) advance();
      // One load after every other operand: all at once would make the waves queue.
      constexpr int kEvery = kQuerySteps * kKeyBlocks >= 2 * kLoads ? 2 : 1;
      constexpr int kLastValueLoad = (Values::kLoads - 1) * kEvery;
      wave.multiply_keys(operands, [&](int n) {
        if (kReadsEarly && n == 1) key_source.advance_rows();
        if (kReadsEarly && n == kLastValueLoad - kEvery - 1) key_source.advance_bytes();
        if (kReadsEarly && n == kLastValueLoad - 1) key_source.advance_buffer();
        if (n % kEvery == 0) load(n / kEvery);
        // Right behind the last product but one: the matrix units work on it while the barrier
        // takes its time, and then on the last one, while the other group begins. What the waves
        // wait for is there before, and for the second group the branch is not taken.
        if (kReadsEarly && n == kQuerySteps * kKeyBlocks - 3) wait_for_lds<0>();
        if (kReadsEarly && n == kQuerySteps * kKeyBlocks - 2 && __builtin_expect(group == 1, 1))
          barrier_after_wait();
      });
      __builtin_amdgcn_s_setprio(kReadsEarly);
      if (!kReadsEarly && (kGroups == 1 || group == 1)) barrier();
      rotate(value_buffer);
      rotate(key_buffer);
    }
    __builtin_amdgcn_s_setprio(0);
    if (!kReadsEarly && kSkipsHidden && i == 0) wave.clear_output();
    // Tiles that are hidden from all rows of the wave: it brings its share of them for the others.
    for (; kSkipsHidden && i < tiles; ++i) {
      if (!kReadsEarly && i + group < tiles) store(group);
      if (kGroups == 1 || group == 0) barrier();
      if (kReadsEarly) store(2);
      if (i + 1 == tiles) break;
      advance();
      load_all();
      if (kGroups == 1 || group == 1) barrier();
      rotate(value_buffer);
      rotate(key_buffer);
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
  store_output<kAreFar>(wave, head, first_row,
                        lds + kOutputExchange + wave_index * Exchange::kBytes,
                        opaque_below<64>(lane));
}

typedef unsigned u32x8 __attribute__((ext_vector_type(8)));
typedef unsigned u32x16 __attribute__((ext_vector_type(16)));

// The arguments in registers, all of them before anything else is done. Left alone, the compiler
// would load each when it is needed, and every such round is a trip to memory, which may be the
// host's.
__device__ inline Arguments loaded_at_once(const Arguments& arguments) {
  const char* const from = reinterpret_cast<const char*>(&arguments);
  Arguments result;
  char* const to = reinterpret_cast<char*>(&result);
  u32x16 first, second;
  __builtin_memcpy(&first, from, 64);
  __builtin_memcpy(&second, from + 64, 64);
  if constexpr (kGroupMode) {
    static_assert(__builtin_offsetof(Arguments, q_descale) <= 256);
    u32x16 third, fourth;
    __builtin_memcpy(&third, from + 128, 64);
    __builtin_memcpy(&fourth, from + 192, 64);
    asm("" : "+s"(first), "+s"(second), "+s"(third), "+s"(fourth));
    __builtin_memcpy(to + 128, &third, 64);
    __builtin_memcpy(to + 192, &fourth, 64);
  } else {
    u32x8 rest;
    static_assert(__builtin_offsetof(Arguments, cu_seqlens_q) <= 160);
    __builtin_memcpy(&rest, from + 128, 32);
    asm("" : "+s"(first), "+s"(second), "+s"(rest));
    __builtin_memcpy(to + 128, &rest, 32);
  }
  __builtin_memcpy(to, &first, 64);
  __builtin_memcpy(to + 64, &second, 64);
  return result;
}

// Under a causal mask the longest tiles go first: what is left for the end is short. Negative, or
// behind the last one: the sequence has no such tile, as in gm1 alone sequences differ in length.
__device__ inline int tile_of(const Arguments& a, const Place& place, int queries) {
  const int rank = place.tile_rank;
  if (!kCausal) return rank;
  return (kGroupMode ? tiles_of(queries, kTileRows) : static_cast<int>(a.query_tiles)) - 1 - rank;
}

__device__ inline Task task_of(const Arguments& a, const Place& place, const Sequence& sequence,
                               int queries, int tile) {
  unsigned head_k = divide(place.head, a.gqa).value;
  asm("" : "+s"(head_k));
  const unsigned long line = line_of(a, place);
  Task task;
  task.diagonal = kTopLeft ? 0 : sequence.seqlen_k - sequence.seqlen_q;
  task.head = head_of<kGroupMode>(a, place, head_k, sequence, line, queries);
  task.tile = tile;
  task.split = place.share;
  task.num_splits = a.num_splits.divisor;
  task.workspace = a.workspace;
  if (task.workspace)
    task.workspace +=
        line_of(a, place) * a.query_tiles * task.num_splits * kWaves * OwnResult::kFloats;
  return task;
}

__global__ void forward(Arguments) asm(KERNEL);

// Two waves a SIMD: 256 registers each.
__global__
    __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads), amdgpu_waves_per_eu(2, 2))) void
    forward(Arguments arguments) {
  alignas(1024) __shared__ char lds[kSharedBytes];
  const int thread = opaque_below<kThreads>(__builtin_amdgcn_workitem_id_x());
  const Arguments a = loaded_at_once(arguments);
  Place place = place_of_workgroup<kGroupMode>(a, a.num_splits);
  // As numbers of 32 bits: of more, products with strides would be made of more parts.
  asm("" : "+s"(place.batch), "+s"(place.head));
  const Sequence sequence = sequence_of<kGroupMode>(a, place.batch);
  const int queries = computed_queries<kGroupMode>(a, sequence);
  const int tile = tile_of(a, place, queries);
  if (kGroupMode && (tile < 0 || tile * kTileRows >= queries)) return;
  const Task task = task_of(a, place, sequence, queries, tile);
  if (are_far<kTileKeys>(task.head.k) || are_far<kTileKeys>(task.head.v) ||
      are_far<32>(task.head.q) || are_far<32>(task.head.o))
    attend<true>(task, a.scale_log2, (Lds<char>)lds, thread);
  else attend<false>(task, a.scale_log2, (Lds<char>)lds, thread);
}

// Of the 32 queries that one wave of each split had, a wave here has a share of the columns, for
// all splits, of which it loads several at once.
template <bool kAreFar>
__device__ inline void combine_splits(const Task& task, int part, Lds<char> exchange, int thread) {
  constexpr int kQuads = OwnResult::kQuads / kWaves, kAtOnce = 8;
  static_assert(OwnResult::kQuads % kWaves == 0);
  const int lane = thread % 64;
  const int wave_index = __builtin_amdgcn_readfirstlane(thread / 64);
  const int first_quad = wave_index * kQuads;
  const int first_row = task.tile * kTileRows + part * 32;
  const bool has_row = first_row + lane % 32 < task.head.q.count;
  const SplitResults<kValueBlocks, kWaves> results(split_result_of(task, 0, part), task.num_splits,
                                                   lane, has_row);
  const auto combined = CombinedSplits<kQuads, kAtOnce>::of(results, first_quad, task.num_splits);

  const float sum = combined.row_sum(lane);
  const OutputRows<kAreFar> rows(task.head.o.from(first_row));
  const float factor = reciprocal_of(sum);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int quad = first_quad + i;
    rows.put(exchange + quad / 8 * Exchange::kBytes, quad % 8, combined.output[i] * factor, lane);
  }
  barrier();
  for (int n = wave_index; n < kValueBlocks / 2 * Exchange::kPasses; n += kWaves) {
    const int pass = n % Exchange::kPasses, wide = n / Exchange::kPasses;
    rows.store(exchange + wide * Exchange::kBytes, pass, wide * 64, lane);
  }
  if (wave_index == 0) store_lse(task.head, first_row, combined.maximum, sum, lane);
}

__global__ void combine(Arguments) asm(COMBINE);

// Makes the output of what the splits left. Its grid is that of the other kernel with as many
// workgroups in place of splits as that has waves: each has the 32 queries of one.
__global__ __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads))) void combine(
    Arguments arguments) {
  alignas(1024) __shared__ char lds[kValueBlocks / 2 * Exchange::kBytes];
  const Arguments a = loaded_at_once(arguments);
  const Place place = place_of_workgroup<kGroupMode>(a, Divisor{kWaves, ~0u / kWaves});
  const Sequence sequence = sequence_of<kGroupMode>(a, place.batch);
  const int queries = computed_queries<kGroupMode>(a, sequence);
  const int tile = tile_of(a, place, queries);
  if (tile < 0 || tile * kTileRows + static_cast<int>(place.share) * 32 >= queries) return;
  const Task task = task_of(a, place, sequence, queries, tile);
  const int thread = __builtin_amdgcn_workitem_id_x();
  if (are_far<32>(task.head.o)) combine_splits<true>(task, place.share, (Lds<char>)lds, thread);
  else combine_splits<false>(task, place.share, (Lds<char>)lds, thread);
}
