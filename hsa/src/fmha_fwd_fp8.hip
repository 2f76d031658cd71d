// Fused multi-head attention of 8-bit inputs, forward: O = softmax(scale Q K^T) V with the chip's
// own form of e4m3 for Q, K, V and probabilities, and bf16 for O. For gfx942 and gfx950, and a head
// dimension of 128.
//
// Two groups of four waves take turns as fmha_fwd.hip describes it, the keys may be split as there,
// and the kernel COMBINE makes the output of the splits. Other than there
//
// * the scales of queries and keys are part of that of scores, and the scale of values part of what
//   the output is multiplied with in the end;
// * probabilities are rounded to four significant bits (fp8_attention.h), and their sum is not;
// * the softmax takes longer than the products. So group 1, whose softmax comes first between two
//   barriers, goes before group 0 with it: its matrix phase then runs beside group 0's softmax.
//
// Set by the build: MASK, GROUP, KERNEL and COMBINE (symbols), TILE_ROWS, TILE_KEYS.
#include "fp8_attention.h"
#include "fp8_tiles.h"
#include "split_results.h"
#include "workgroups.h"

constexpr int kHdim = 128;
constexpr int kTileRows = TILE_ROWS, kTileKeys = TILE_KEYS;
constexpr int kWaves = kTileRows / 32, kThreads = 64 * kWaves;
constexpr int kGroups = 2;
static_assert(kWaves == 4 * kGroups);
// The diagonal of the causal mask begins in the top left corner or ends in the bottom right one.
constexpr bool kCausal = MASK != 0, kTopLeft = MASK == 1, kGroupMode = GROUP;
#if defined(__gfx950__)
constexpr int kBankChunks = 16;  // 64 banks
#else
constexpr int kBankChunks = 8;  // 32 banks
#endif

using Keys = Fp8KeyTile<kTileKeys, kThreads, kBankChunks>;
using Values = Fp8ValueTile<kTileKeys, kHdim, kThreads, kBankChunks>;
using Exchange = RowExchange<kBankChunks>;
using Wave = Fp8Attention<Keys, Values>;

// LDS: the buffers of keys, then those of values, then room for Exchange of each wave.
constexpr int kKeysBytes = kGroups * Keys::kBytes, kValuesBytes = kGroups * Values::kBytes;
constexpr int kTilesBytes = kKeysBytes + kValuesBytes;
constexpr int kLdsBytes = kTilesBytes + kWaves * Exchange::kBytes;
#if defined(__gfx950__)
static_assert(kLdsBytes <= 160 * 1024);
#else
static_assert(kLdsBytes <= 64 * 1024);
#endif

constexpr int kKeyBlocks = kTileKeys / 32;
constexpr int kQuerySteps = Wave::kQuerySteps, kValueBlocks = kHdim / 32;
static_assert(kQuerySteps == Exchange::kPasses);

// A tile of queries of one sequence and head, and a share of its keys.
struct Task {
  Head head;
  int tile;                 // of queries
  int diagonal;             // the last key that query 0 sees under the causal mask
  int split, num_splits;    // which share of the keys, of how many
  Global<float> workspace;  // of the sequence and head, where splits leave results; null: one split
  float scale;              // of scores, with log2(e) in it
  float value_scale;
};

constexpr int kLoads = Values::kLoads + Keys::kLoads;

// Of the 32 rows that begin with `rows`. What is loaded for rows behind the last one does not
// matter, as nobody stores what comes of it.
template <bool kAreFar>
__device__ inline void load_queries(u32x4 (&query)[kQuerySteps], Rows rows, int lane) {
  const auto buffer = buffer_of<32, kHdim>(rows);
#pragma unroll
  for (int pass = 0; pass < kQuerySteps; ++pass) {
    const int row = Exchange::row_of(pass, lane), column = Exchange::chunk_of(lane) * 16;
    if constexpr (kAreFar) query[pass] = load_far<u32x4>(rows, row, column);
    else
      query[pass] = __builtin_amdgcn_raw_buffer_load_b128(buffer, row * rows.stride + column, 0, 0);
  }
}

// From whole rows to operands.
__device__ inline void exchange_queries(u32x4 (&query)[kQuerySteps], Lds<char> exchange, int lane) {
#pragma unroll
  for (int pass = 0; pass < kQuerySteps; ++pass)
    *(Lds<u32x4>)(exchange + Exchange::place(Exchange::row_of(pass, lane),
                                             Exchange::chunk_of(lane))) = query[pass];
  wave_barrier();
#pragma unroll
  for (int step = 0; step < kQuerySteps; ++step)
    query[step] = *(Lds<const u32x4>)(exchange + Exchange::operand_place(step, lane));
  wave_barrier();
}

// The 32 rows of the output that begin with `rows`, on their way from registers through LDS, where
// there are 64 values of each row together.
template <bool kAreFar>
struct OutputRows {
  Rows rows;
  __amdgpu_buffer_rsrc_t buffer;

  __device__ explicit OutputRows(Rows given) : rows(given) {
    // The stride of a single row may be anything, and has to lead behind the end.
    if (rows.count == 1) rows.stride = kHdim * 2;
    buffer = buffer_of<32, kHdim * 2>(rows);
  }

  // Four values of a lane, the accumulator's 4 * group and on.
  __device__ static void put(Lds<char> exchange, int group, f32x4 values, int lane) {
    *(Lds<u32x2>)(exchange + Exchange::accumulator_place(group, lane)) =
        u32x2{packed_results<BF16>(values.x, values.y), packed_results<BF16>(values.z, values.w)};
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
__device__ inline float output_scale(const Task& task, float row_sum) {
  return row_sum == 0 ? 0 : __builtin_amdgcn_rcpf(row_sum) * task.value_scale;
}

__device__ inline void store_lse(const Head& head, int first_row, float maximum, float row_sum,
                                 int lane) {
  const int row = first_row + lane % 32;
  if (head.lse && lane < 32 && row < head.q.count)
    head.lse[row] = row_sum == 0 ? -kInfinity : (maximum + __builtin_amdgcn_logf(row_sum)) * kLn2;
}

template <bool kAreFar>
__device__ inline void store_output(Wave& wave, const Task& task, int first_row, Lds<char> exchange,
                                    int lane) {
  const OutputRows<kAreFar> rows(task.head.o.from(first_row));
  const float sum = wave.row_sum(lane);
  wave.clear_blind_rows(sum);
  const float factor = output_scale(task, sum);
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
  store_lse(task.head, first_row, wave.maximum, sum, lane);
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

// kAreFar: rows are further apart than a buffer's offsets reach. The loop that is made for that is
// slower.
template <bool kAreFar>
__device__ inline void attend(Task task, Lds<char> lds, int thread) {
  Head& head = task.head;
  const int lane = thread % 64;
  const int wave_index = __builtin_amdgcn_readfirstlane(thread / 64);
  const int group = wave_index / 4;
  const int first_row = task.tile * kTileRows + wave_index * 32;
  const Lds<char> exchange = lds + kTilesBytes + wave_index * Exchange::kBytes;
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
  wave.scale = task.scale;
  wave.maximum = kNoMaximum;
  wave.sum = 0;
  // Left as it is: the first tile makes it.
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
    Values::Source value_source(head.v);
    Keys::Source key_source(head.k);
    const int value_offset = Values::first_offset(head.v.stride, thread);
    const int key_offset = Keys::first_offset(head.k.stride, thread);
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
    const auto load_all = [&] {
#pragma unroll
      for (int n = 0; n < kLoads; ++n) load(n);
    };
    const auto store = [&](int i) {
      Values::store(value_buffer(i), next_values, thread);
      Keys::store(key_buffer(i + 1), next_keys, thread);
    };

    // All that the first tile needs is on its way before anything is waited for.
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
    auto first_operands = Wave::operands<Wave::Operands::kValues>(values, keys, lane);
    wave.multiply_keys(first_operands, [](int) {});
    if (group == 1) barrier();
    for (int i = 0;; ++i) {
      // What all rows of the wave see needs no mask.
      const int first_key = i * kTileKeys;
      const int visible = last_visible(head.k.count, first_row + diagonal) + 1;
      if (kCausal && first_key >= visible + 31) {
        wave.see_nothing();
      } else {
        if (__builtin_expect(first_key + kTileKeys > visible, 0)) {
          wave.mask(last_visible(head.k.count, row + diagonal) - first_key, lane);
        }
        wave.softmax();
      }
      if (i + group < tiles) store(i + group);
      if (group == 0) barrier();
      __builtin_amdgcn_s_setprio(2);
      // The last products read ahead too, but others may be writing output where keys were.
      auto operands = Wave::operands<0>(value_buffer(i),
                                        i + 1 < tiles ? key_buffer(i + 1) : value_buffer(i), lane);
      advance();
      wave.multiply_values(operands, i == 0);
      if (i + 1 == tiles) break;
      // Two loads after each product: all at once would make the waves queue.
      wave.multiply_keys(operands, [&](int n) {
        load(2 * n);
        load(2 * n + 1);
      });
      __builtin_amdgcn_s_setprio(0);
      if (group == 1) {
        // Before the softmax of group 0, which has all the time of the matrix phase to come.
        __builtin_amdgcn_s_setprio(1);
        barrier();
      }
    }
    __builtin_amdgcn_s_setprio(0);
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

typedef unsigned u32x8 __attribute__((ext_vector_type(8)));
typedef unsigned u32x16 __attribute__((ext_vector_type(16)));

// The arguments in registers, all of them before anything else is done. Left alone, the compiler
// would load each when it is needed, and every such round is a trip to memory, which may be the
// host's.
__device__ inline Arguments loaded_at_once(const Arguments& arguments) {
  const char* const from = reinterpret_cast<const char*>(&arguments);
  constexpr int kDescales = __builtin_offsetof(Arguments, q_descale);
  static_assert(kDescales == 248 && sizeof(Arguments) == kDescales + 48);
  Arguments result;
  char* const to = reinterpret_cast<char*>(&result);
  u32x16 first, second;
  u32x8 pointers;
  u32x4 strides;
  __builtin_memcpy(&first, from, 64);
  __builtin_memcpy(&second, from + 64, 64);
  __builtin_memcpy(&pointers, from + kDescales, 32);
  __builtin_memcpy(&strides, from + kDescales + 32, 16);
  if constexpr (kGroupMode) {
    u32x16 third;
    u32x8 fourth;
    u32x4 fifth;
    __builtin_memcpy(&third, from + 128, 64);
    __builtin_memcpy(&fourth, from + 192, 32);
    __builtin_memcpy(&fifth, from + 224, 16);
    u32x2 sixth;
    __builtin_memcpy(&sixth, from + 240, 8);
    asm("" : "+s"(first), "+s"(second), "+s"(third), "+s"(fourth), "+s"(fifth), "+s"(sixth));
    asm("" : "+s"(pointers), "+s"(strides));
    __builtin_memcpy(to + 128, &third, 64);
    __builtin_memcpy(to + 192, &fourth, 32);
    __builtin_memcpy(to + 224, &fifth, 16);
    __builtin_memcpy(to + 240, &sixth, 8);
  } else {
    u32x8 rest;
    static_assert(__builtin_offsetof(Arguments, cu_seqlens_q) <= 160);
    __builtin_memcpy(&rest, from + 128, 32);
    asm("" : "+s"(first), "+s"(second), "+s"(rest), "+s"(pointers), "+s"(strides));
    __builtin_memcpy(to + 128, &rest, 32);
  }
  __builtin_memcpy(to, &first, 64);
  __builtin_memcpy(to + 64, &second, 64);
  __builtin_memcpy(to + kDescales, &pointers, 32);
  __builtin_memcpy(to + kDescales + 32, &strides, 16);
  return result;
}

// Under a causal mask the longest tiles go first: what is left for the end is short. Negative, or
// behind the last one: the sequence has no such tile, as in gm1 alone sequences differ in length.
__device__ inline int tile_of(const Arguments& a, const Place& place, int queries) {
  const int rank = place.tile_rank;
  if (!kCausal) return rank;
  return (kGroupMode ? tiles_of(queries, kTileRows) : static_cast<int>(a.query_tiles)) - 1 - rank;
}

// The scale of a sequence and key head; `batch` and `head` are strides in bytes.
__device__ inline float descale_of(Global<const float> scales, unsigned long batch,
                                   unsigned long head) {
  return *(Global<const float>)((Global<const char>)scales + batch + head);
}

// Inputs that are all 0 may have a scale of 0. Hidden scores are infinite, and times 0 they would
// be NaN.
__device__ inline float descaled(float scale, float descale) {
  constexpr float kLargest = __FLT_MAX__, kSmallest = __FLT_MIN__;
  const float result = __builtin_amdgcn_fmed3f(scale * descale, kSmallest, kLargest);
  return bits_as<float>(__builtin_amdgcn_readfirstlane(bits_as<int>(result)));
}

__device__ inline Task task_of(const Arguments& a, const Place& place, const Sequence& sequence,
                               int queries, int tile) {
  const unsigned head_k = divide(place.head, a.gqa).value;
  const unsigned long line = line_of(a, place), batch = place.batch, head = head_k;
  Task task;
  task.diagonal = kTopLeft ? 0 : sequence.seqlen_k - sequence.seqlen_q;
  task.head = head_of<kGroupMode>(a, place, head_k, sequence, line, queries);
  task.tile = tile;
  task.split = place.share;
  task.num_splits = a.num_splits.divisor;
  task.workspace = a.workspace;
  if (task.workspace)
    task.workspace += line * a.query_tiles * task.num_splits * kWaves * OwnResult::kFloats;
  const float q = descale_of(a.q_descale, batch * a.q_descale_batch, head * a.q_descale_head);
  const float k = descale_of(a.k_descale, batch * a.k_descale_batch, head * a.k_descale_head);
  task.scale = descaled(a.scale_log2, q * k);
  task.value_scale = descale_of(a.v_descale, batch * a.v_descale_batch, head * a.v_descale_head);
  return task;
}

__global__ void forward(Arguments) asm(KERNEL);

// Two waves a SIMD: 256 registers each.
__global__
    __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads), amdgpu_waves_per_eu(2, 2))) void
    forward(Arguments arguments) {
  alignas(1024) __shared__ char lds[kLdsBytes];
  const Arguments a = loaded_at_once(arguments);
  const Place place = place_of_workgroup<kGroupMode>(a, a.num_splits);
  const Sequence sequence = sequence_of<kGroupMode>(a, place.batch);
  const int queries = computed_queries<kGroupMode>(a, sequence);
  const int tile = tile_of(a, place, queries);
  if (kGroupMode && (tile < 0 || tile * kTileRows >= queries)) return;
  const Task task = task_of(a, place, sequence, queries, tile);
  const int thread = opaque(__builtin_amdgcn_workitem_id_x());
  if (are_far<kTileKeys>(task.head.k) || are_far<kTileKeys>(task.head.v) ||
      are_far<32>(task.head.q) || are_far<32>(task.head.o))
    attend<true>(task, (Lds<char>)lds, thread);
  else attend<false>(task, (Lds<char>)lds, thread);
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
  const float factor = output_scale(task, sum);
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
