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
// A launch that would not fill the chip splits the keys: num_splits workgroups attend to the same
// queries, each to its share of the keys. Each leaves its registers in the workspace, from which
// the kernel COMBINE then makes the output, 32 queries in each workgroup.
//
// Set by the build: DTYPE (BF16 or FP16), HDIM_Q, HDIM_V, MASK, GROUP, ROUNDING, KERNEL and
// COMBINE (symbols), TILE_ROWS, TILE_KEYS.
#include "arguments.h"
#include "number_formats.h"
#include "tiles.h"

constexpr int kHdimQ = HDIM_Q, kHdimV = HDIM_V;
constexpr int kTileRows = TILE_ROWS, kTileKeys = TILE_KEYS;
constexpr int kWaves = kTileRows / 32, kThreads = 64 * kWaves;
constexpr int kGroups = kWaves / 4;
// The diagonal of the causal mask begins in the top left corner or ends in the bottom right one.
constexpr bool kCausal = MASK != 0, kTopLeft = MASK == 1, kGroupMode = GROUP;
constexpr Rounding kRounding = Rounding::ROUNDING;
#if defined(__gfx950__)
constexpr int kBankChunks = 16;  // 64 banks
#else
constexpr int kBankChunks = 8;  // 32 banks
#endif
static_assert(kGroups == 1 || kGroups == 2);

using Keys = KeyTile<kTileKeys, kHdimQ, kThreads, kBankChunks>;
using Values = ValueTile<kTileKeys, kHdimV, kThreads, kBankChunks>;
using Exchange = RowExchange<kBankChunks>;

// LDS: the buffers of keys, then those of values, then room for Exchange of each wave. Where that
// is not to be had, queries pass through the values' buffers, and the output through the keys'.
constexpr int kKeysBytes = kGroups * Keys::kBytes, kValuesBytes = kGroups * Values::kBytes;
constexpr int kTilesBytes = kKeysBytes + kValuesBytes, kExchangeBytes = kWaves * Exchange::kBytes;
#if defined(__gfx950__)
constexpr int kLdsBytes = 160 * 1024;
#else
constexpr int kLdsBytes = 64 * 1024;
#endif
// Four waves are one a SIMD: then two workgroups share a compute unit.
constexpr bool kHasRoom = kTilesBytes + kExchangeBytes <= kLdsBytes * kGroups / 2;
constexpr int kQueryExchange = kHasRoom ? kTilesBytes : kGroups == 2 ? kKeysBytes : 0;
constexpr int kOutputExchange = kHasRoom ? kTilesBytes : 0;
constexpr int kSharedBytes = kHasRoom ? kTilesBytes + kExchangeBytes : kTilesBytes;
static_assert(kHasRoom || kExchangeBytes <= (kGroups == 2 ? kKeysBytes : kTilesBytes));
static_assert(kHasRoom || kGroups == 1 || kExchangeBytes <= kValuesBytes);

constexpr int kKeyBlocks = kTileKeys / 32, kKeySteps = kTileKeys / 16;
constexpr int kQuerySteps = kHdimQ / 16, kValueBlocks = kHdimV / 32;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_inff();
// Below every scaled score, and finite: the difference to -inf has to be -inf.
constexpr float kNoMaximum = -1.7e38f;
// As many as jitfmha/kernels/tuned/key_split.py makes at most: a buffer's offsets reach them.
constexpr int kMostSplits = 1024;
// How far scores may exceed the maximum in use, in powers of two, before all is rescaled.
constexpr float kHeadroom = 8;

// Orders LDS among the waves of the workgroup; global loads stay on their way.
__device__ inline void barrier() {
  constexpr int kLgkmcnt0 = 0xc07f;
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  // The fence alone leaves writes outstanding: LLVM relies on LDS keeping the order of all waves.
  __builtin_amdgcn_s_waitcnt(kLgkmcnt0);
  __builtin_amdgcn_sched_barrier(0);
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
  __builtin_amdgcn_sched_barrier(0);
}

// What a wave writes to LDS, other lanes of it read: in order, but the compiler has to know.
__device__ inline void wave_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront", "local");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront", "local");
}

__device__ inline int smaller(int a, int b) { return a < b ? a : b; }

__device__ inline int tiles_of(unsigned count, unsigned size) { return (count + size - 1) / size; }

// The same value, of which the compiler knows nothing. Addresses that depend on the result are
// computed where they are needed, instead of being kept in registers throughout the loop.
__device__ inline int opaque(int lane) {
  asm volatile("" : "+v"(lane));
  return lane;
}

struct Quotient {
  unsigned value, remainder;
};

// The host has divided 2^32 - 1 by the divisor: multiplied with that, the quotient is right or one
// too small.
__device__ inline Quotient divide(unsigned dividend, const Divisor& by) {
  const unsigned value = static_cast<unsigned long>(dividend) * by.reciprocal >> 32;
  const unsigned remainder = dividend - value * by.divisor;
  return remainder < by.divisor ? Quotient{value, remainder}
                                : Quotient{value + 1, remainder - by.divisor};
}

// The queries, keys and values of one sequence and head, and where results go.
struct Head {
  Rows q, k, v, o;
  Global<float> lse;  // null: not wanted
};

// Which tile of queries a workgroup has, and which share of what is to be done for it.
struct Place {
  unsigned batch, head;
  unsigned tile_rank;  // the tiles of a sequence in the order of their workgroups
  unsigned share;      // forward: of the keys; combine: of the queries
};

// Of one sequence, in rows.
struct Sequence {
  int seqlen_q, seqlen_k;
  unsigned q_start, k_start;
};

// A tile of queries of one sequence and head, and a share of its keys.
struct Task {
  Head head;
  int tile;                 // of queries
  int diagonal;             // the last key that query 0 sees under the causal mask
  int split, num_splits;    // which share of the keys, of how many
  Global<float> workspace;  // of the sequence and head, where splits leave results; null: one split
};

// Where the next tiles come from.
struct Source {
  Values::Source values;
  Keys::Source keys;
};
constexpr int kLoads = Values::kLoads + Keys::kLoads;
static_assert(kLoads <= kQuerySteps * kKeyBlocks);

struct Attention {
  u32x4 query[kQuerySteps];
  f32x16 score[kKeyBlocks];
  u32x4 probability[kKeySteps];
  f32x16 output[kValueBlocks];
  float maximum, scale;    // of the scores, times scale; scale has log2(e) in it
  unsigned long rescales;  // not 0: before more is added, the output has to be multiplied by
  float factor;
  f32x2 sum;  // of the probabilities that the lane has seen

  // Operands from LDS are read this many ahead of the products that take them.
  static constexpr int kAhead = 8 / kProductsOfOperand;

  // What a matrix phase multiplies with the probabilities, then with the queries.
  struct Operands {
    static constexpr int kValues = kKeySteps * kValueBlocks;
    static constexpr int kEnd = kValues + kQuerySteps * kKeyBlocks;
    Lds<const char> first_value, first_key;
    u32x4 ahead[kAhead];

    __device__ u32x4 read(int n) const {
      if (n < kValues) return Values::operand(first_value, n % kValueBlocks, n / kValueBlocks);
      n -= kValues;
      return Keys::operand(first_key, n % kKeyBlocks, n / kKeyBlocks);
    }

    // Calls multiply(n, operand) for n from kFirst to kLast - 1, and reads ahead. In this order:
    // left alone, the compiler would read each operand when it is needed, to save registers.
    template <int kFirst, int kLast, class Multiply>
    __device__ void in_turn(Multiply multiply) {
#pragma unroll
      for (int n = kFirst; n < kLast; ++n) {
        multiply(n, ahead[n % kAhead]);
        if (n + kAhead < kEnd) ahead[n % kAhead] = read(n + kAhead);
        __builtin_amdgcn_sched_barrier(0);
      }
    }
  };

  // With the first ones read: from kFirst on, which is 0 or kValues.
  template <int kFirst>
  __device__ static Operands operands(Lds<const char> values, Lds<const char> keys, int lane) {
    Operands result{values + Values::first_operand(lane), keys + Keys::first_operand(lane)};
#pragma unroll
    for (int n = kFirst; n < kFirst + kAhead; ++n) result.ahead[n % kAhead] = result.read(n);
    return result;
  }

  // Adds a tile of values to the output, the first of which makes it.
  __device__ void multiply_values(Operands& operands, bool is_first) {
    const auto multiply = [&](int n, u32x4 value, f32x16 c) {
      output[n % kValueBlocks] = DTYPE::multiply(value, probability[n / kValueBlocks], c);
    };
    // Rescaling is part of a branch that ends with a product, whose result takes the registers of
    // the old output. A branch with multiplications alone would cost copies of all of it.
    if (is_first) {
      operands.in_turn<0, kValueBlocks>([&](int n, u32x4 value) { multiply(n, value, f32x16(0)); });
    } else if (rescales) {
      operands.in_turn<0, kValueBlocks>([&](int n, u32x4 value) {
        const f32x16 rescaled = output[n] * factor;
        multiply(n, value, rescaled);
        asm volatile("" ::"v"(rescaled));  // or the product would take the registers of this
      });
    } else {
      operands.in_turn<0, kValueBlocks>([&](int n, u32x4 value) { multiply(n, value, output[n]); });
    }
    operands.in_turn<kValueBlocks, Operands::kValues>(
        [&](int n, u32x4 value) { multiply(n, value, output[n % kValueBlocks]); });
  }

  // Computes the scores of the next tile of keys, and calls also(n) after operand n.
  template <class Also>
  __device__ void multiply_keys(Operands& operands, Also also) {
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block) score[block] = f32x16(0);
    operands.in_turn<Operands::kValues, Operands::kEnd>([&](int n, u32x4 key) {
      multiply_key(n - Operands::kValues, key);
      also(n - Operands::kValues);
    });
  }

  __device__ void multiply_key(int n, u32x4 key) {
    score[n % kKeyBlocks] = DTYPE::multiply(key, query[n / kKeyBlocks], score[n % kKeyBlocks]);
  }

  // Hides the keys behind `last`, which counts from the tile's first key.
  __device__ void mask(int last, int lane) {
    const int limit = last - 4 * (lane / 32);
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block)
#pragma unroll
      for (int i = 0; i < 16; ++i)
        score[block][i] = 32 * block + i / 4 * 8 + i % 4 <= limit ? score[block][i] : -kInfinity;
  }

  __device__ void rescale(float largest) {
    // The other half of the wave has the query's other keys.
    const float other = bits_as<float>(__builtin_amdgcn_ds_bpermute(
        (__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0)) ^ 32) * 4,
        bits_as<int>(largest)));
    const float next = __builtin_fmaxf(maximum, __builtin_fmaxf(largest, other));
    factor = __builtin_amdgcn_exp2f(maximum - next);
    maximum = next;
    sum *= factor;
  }

  // Of the probabilities of the whole row.
  __device__ float row_sum(int lane) const {
    const float own = sum.x + sum.y;
    return own + bits_as<float>(__builtin_amdgcn_ds_bpermute((lane ^ 32) * 4, bits_as<int>(own)));
  }

  // Rows that see no key have added up zeros times hidden values, which may be NaN or infinite.
  __device__ void clear_blind_rows(float row_sum) {
    if (!__builtin_amdgcn_ballot_w64(row_sum == 0)) return;
#pragma unroll
    for (int block = 0; block < kValueBlocks; ++block)
#pragma unroll
      for (int i = 0; i < 16; ++i) output[block][i] = row_sum == 0 ? 0 : output[block][i];
  }

  // In place of softmax(), for a tile that is hidden from all rows of the wave.
  __device__ void see_nothing() {
    rescales = 0;
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) probability[step] = u32x4(0);
  }

  __device__ void softmax() {
    float largest = score[0][0];
#pragma unroll
    for (int i = 1; i < 16 * kKeyBlocks; ++i)
      largest = __builtin_fmaxf(largest, score[i / 16][i % 16]);
    largest *= scale;
    rescales = __builtin_amdgcn_ballot_w64(largest > maximum + kHeadroom);
    if (rescales) rescale(largest);
    f32x2 even = {0, 0}, odd = {0, 0};
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = step % 2 * 8 + i * 2;
        const f32x2 pair = {score[step / 2][at], score[step / 2][at + 1]};
        const f32x2 exponent = __builtin_elementwise_fma(pair, f32x2(scale), f32x2(-maximum));
        const f32x2 p = {__builtin_amdgcn_exp2f(exponent.x), __builtin_amdgcn_exp2f(exponent.y)};
        (i % 2 ? odd : even) += p;
        probability[step][i] = DTYPE::pack<kRounding>(p.x, p.y);
      }
    }
    sum += even + odd;
    // All of it here: the compiler would move what nobody needs yet to the matrix phase.
    asm volatile("" : "+v"(sum));
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) asm volatile("" : "+v"(probability[step]));
  }
};

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
    *(Lds<u32x2>)(exchange + Exchange::accumulator_place(group, lane)) = u32x2{
        DTYPE::pack<kRounding>(values.x, values.y), DTYPE::pack<kRounding>(values.z, values.w)};
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
__device__ inline void store_output(Attention& wave, const Head& head, int first_row,
                                    Lds<char> exchange, int lane) {
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

// What a split leaves in the workspace: the registers of a wave, as they are.
struct SplitResult {
  static constexpr int kQuads = 4 * kValueBlocks;
  static constexpr int kMaximum = kQuads * 4 * 64, kSum = kMaximum + 64;  // where, in floats
  static constexpr int kFloats = kSum + 64;                               // of a wave
  Global<float> base;

  __device__ static SplitResult of(const Task& task, int split, int wave_index) {
    const int index = task.tile * task.num_splits + split;
    return {task.workspace + (static_cast<unsigned long>(index) * kWaves + wave_index) * kFloats};
  }

  __device__ void store(const Attention& wave, int lane) const {
    // Four values of each lane lie together, so that lanes move whole lines.
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const f32x16& o = wave.output[i / 4];
      const int at = i % 4 * 4;
      ((Global<f32x4>)(base + i * 256))[lane] = f32x4{o[at], o[at + 1], o[at + 2], o[at + 3]};
    }
    base[kMaximum + lane] = wave.maximum;
    base[kSum + lane] = wave.sum.x + wave.sum.y;
  }
};

// What all splits of a tile left for one of its waves, as one lane sees it.
struct SplitResults {
  static constexpr int kBytes = SplitResult::kFloats * 4;  // of a split
  static constexpr int kStride = kWaves * kBytes;
  __amdgpu_buffer_rsrc_t buffer;
  int lane;

  // Lanes without a row read zeros, from behind the end.
  __device__ SplitResults(const Task& task, int wave_index, int given_lane, bool has_row)
      : lane(has_row ? given_lane : 1 << 26) {
    const Rows rows = {(Global<const char>)SplitResult::of(task, 0, wave_index).base, kStride,
                       task.num_splits};
    buffer = buffer_of<kMostSplits, kBytes>(rows);
  }

  __device__ f32x4 quad(int split, int i) const {
    const int offset = split * kStride + i * 1024 + lane * 16;
    return bits_as<f32x4>(__builtin_amdgcn_raw_buffer_load_b128(buffer, offset, 0, 0));
  }
  __device__ float maximum(int split) const { return value(split, SplitResult::kMaximum); }
  __device__ float sum(int split) const { return value(split, SplitResult::kSum); }

 private:
  __device__ float value(int split, int at) const {
    const int offset = split * kStride + at * 4 + lane * 4;
    return bits_as<float>(__builtin_amdgcn_raw_buffer_load_b32(buffer, offset, 0, 0));
  }
};

// The last key that a row sees, given the one on the diagonal. Where the diagonal ends with the
// keys, only rows behind the last one are on the other side of the end, and they do not matter.
__device__ inline int last_visible(int keys, int on_diagonal) {
  if (!kCausal) return keys - 1;
  return kTopLeft ? smaller(keys - 1, on_diagonal) : on_diagonal;
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

  Attention wave;
  wave.scale = scale;
  wave.maximum = kNoMaximum;
  wave.sum = f32x2(0);
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
    const auto source = [&](int i) {  // V i and K i+1
      return Source{Values::source(head.v.from(i * kTileKeys), thread),
                    Keys::source(head.k.from((i + 1) * kTileKeys), thread)};
    };
    const auto load = [&](const Source& from, int n) {
      if (n < Values::kLoads) return from.values.template load<kAreFar>(next_values, n);
      if (n < kLoads) return from.keys.template load<kAreFar>(next_keys, n - Values::kLoads);
    };
    const auto load_all = [&](const Source& from) {
#pragma unroll
      for (int n = 0; n < kLoads; ++n) load(from, n);
    };
    const auto store = [&](int i) {
      Values::store(value_buffer(i), next_values, thread);
      Keys::store(key_buffer(i + 1), next_keys, thread);
    };

    // All that the first tile needs is on its way before anything is waited for.
    const Keys::Source keys_0 = Keys::source(head.k, thread);
#pragma unroll
    for (int n = 0; n < Keys::kLoads; ++n) keys_0.template load<kAreFar>(first_keys, n);
    load_queries<kAreFar>(wave.query, head.q.from(first_row), lane);
    load_all(source(0));
    exchange_queries(wave.query, lds + kQueryExchange + wave_index * Exchange::kBytes, lane);
    if (!kHasRoom && kGroups == 1) barrier();
    Keys::store(key_buffer(0), first_keys, thread);
    barrier();
    if (group == 1) {
      store(0);
      load_all(source(1));
    }
    auto first_operands = Attention::operands<Attention::Operands::kValues>(values, keys, lane);
    wave.multiply_keys(first_operands, [](int) {});
    if (kGroups == 1 || group == 1) barrier();
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
      if (kGroups == 1 || group == 0) barrier();
      __builtin_amdgcn_s_setprio(1);
      // The last products read ahead too, but others may be writing output where keys were.
      const bool has_next = i + 1 < tiles || kGroups == 1;
      auto operands = Attention::operands<0>(value_buffer(i),
                                             has_next ? key_buffer(i + 1) : value_buffer(i), lane);
      wave.multiply_values(operands, i == 0);
      if (i + 1 == tiles) break;
      const Source next = source(i + 1 + group);
      // One load after every other operand: all at once would make the waves queue.
      constexpr int kEvery = kQuerySteps * kKeyBlocks >= 2 * kLoads ? 2 : 1;
      wave.multiply_keys(operands, [&](int n) {
        if (n % kEvery == 0) load(next, n / kEvery);
      });
      __builtin_amdgcn_s_setprio(0);
      if (kGroups == 1 || group == 1) barrier();
    }
    __builtin_amdgcn_s_setprio(0);
  } else {
#pragma unroll
    for (int block = 0; block < kValueBlocks; ++block) wave.output[block] = f32x16(0);
  }
  if (task.workspace) {
    if (first_row < head.q.count) {
      wave.clear_blind_rows(wave.row_sum(opaque(lane)));
      SplitResult::of(task, task.split, wave_index).store(wave, opaque(lane));
    }
    return;
  }
  if (!kHasRoom && kGroups == 1) barrier();
  store_output<kAreFar>(wave, head, first_row,
                        lds + kOutputExchange + wave_index * Exchange::kBytes, opaque(lane));
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

// gm0. Workgroups go to the XCDs, each of which has an L2 cache of its own, in turn: those whose
// numbers in x are a multiple of xcds apart are on the same one, because there are a multiple of
// xcds along x. Each XCD has consecutive heads, so that what shares keys and values meets there.
//
// x counts the heads of a group, whose tiles alternate; y counts tiles, z groups and shares.
__device__ inline Place place_in_batch(const Arguments& a, const Divisor& shares) {
  const Quotient in_x = divide(__builtin_amdgcn_workgroup_id_x(), a.xcds);
  const Quotient in_z = divide(__builtin_amdgcn_workgroup_id_z(), shares);
  const unsigned first_head = in_x.remainder * a.xcd_heads + in_x.value;
  const Quotient sequence = divide(first_head + in_z.value * a.group_heads, a.heads);
  return {sequence.value, sequence.remainder, __builtin_amdgcn_workgroup_id_y(), in_z.remainder};
}

// gm1. All workgroups are in one order, in which they go to the XCDs in turn. An XCD has one pair
// of a sequence and key head after the other, with the tiles of all query heads of a pair side by
// side. The pairs of first_heads key heads have an XCD to themselves; those of the others go to
// sets of XCDs, which take a pair's tiles in turn. The tail is the last pairs of each set together.
__device__ inline Place place_in_group(const Arguments& a, const Divisor& shares) {
  // The axes of the grid mean nothing: heads, sequences, and tiles with their shares.
  unsigned n = __builtin_amdgcn_workgroup_id_x() +
               a.heads.divisor * (__builtin_amdgcn_workgroup_id_y() +
                                  a.batch.divisor * __builtin_amdgcn_workgroup_id_z());
  const unsigned first_count =
      a.first_heads * a.batch.divisor * a.pair_tiles.divisor * shares.divisor;
  const bool is_first = n < first_count;
  if (!is_first) n -= first_count;
  const Quotient turn = divide(n, a.xcds);
  unsigned first_head = turn.remainder, head_step = a.xcds.divisor, in_list = turn.value;
  if (!is_first) {
    const Quotient xcd = divide(turn.remainder, a.xcd_sets);
    first_head = a.first_heads + xcd.remainder;
    head_step = a.xcd_sets.divisor;
    const unsigned begin = turn.value * a.set_xcds.divisor;
    unsigned place = xcd.value;
    // In every turn an XCD gets another place of its set's, or some might get long tiles only. The
    // last turn is not for all of them.
    if (begin + a.set_xcds.divisor <= a.set_tiles * shares.divisor) {
      place += turn.value + divide(turn.value, a.set_xcds).value;
      place = divide(place, a.set_xcds).remainder;
    }
    in_list = begin + place;
  }
  const Quotient tile = divide(in_list, shares);
  unsigned pair, tile_rank, head_in_pair;
  if (is_first || tile.value < a.tail_begin) {
    const Quotient of_pair = divide(tile.value, a.pair_tiles);
    const Quotient of_rank = divide(of_pair.remainder, a.gqa);
    pair = of_pair.value;
    tile_rank = of_rank.value;
    head_in_pair = of_rank.remainder;
  } else {
    const Quotient of_rank = divide(tile.value - a.tail_begin, a.tail_heads);
    const Quotient of_pair = divide(of_rank.remainder, a.gqa);
    pair = divide(a.tail_begin, a.pair_tiles).value + of_pair.value;
    tile_rank = of_rank.value;
    head_in_pair = of_pair.remainder;
  }
  const Quotient sequence = divide(pair, a.batch);
  const unsigned head_k = first_head + sequence.value * head_step;
  return {sequence.remainder, head_k * a.gqa.divisor + head_in_pair, tile_rank, tile.remainder};
}

__device__ inline Place place_of_workgroup(const Arguments& a, const Divisor& shares) {
  if constexpr (kGroupMode) return place_in_group(a, shares);
  else return place_in_batch(a, shares);
}

__device__ inline Sequence sequence_of(const Arguments& a, unsigned batch) {
  if constexpr (!kGroupMode)
    return {static_cast<int>(a.seqlen_q), static_cast<int>(a.seqlen_k), 0, 0};
  unsigned q_begin = a.cu_seqlens_q[batch], q_end = a.cu_seqlens_q[batch + 1];
  unsigned k_begin = a.cu_seqlens_k[batch], k_end = a.cu_seqlens_k[batch + 1];
  unsigned q_start = a.cu_seqlens_q_padded[batch], k_start = a.cu_seqlens_k_padded[batch];
  // One round of loads here too: what does not end at once needs all of them.
  asm("" : "+s"(q_begin), "+s"(q_end), "+s"(k_begin), "+s"(k_end), "+s"(q_start), "+s"(k_start));
  return {static_cast<int>(q_end - q_begin), static_cast<int>(k_end - k_begin), q_start, k_start};
}

// The grid and the workspace are as large as max_seqlen_q promised, whatever came since.
__device__ inline int computed_queries(const Arguments& a, const Sequence& sequence) {
  return kGroupMode ? smaller(sequence.seqlen_q, a.seqlen_q) : sequence.seqlen_q;
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
  const unsigned long batch = place.batch, head = place.head;
  const unsigned long head_k = divide(place.head, a.gqa).value;
  const unsigned long q_start = sequence.q_start, k_start = sequence.k_start;
  Task task;
  task.diagonal = kTopLeft ? 0 : sequence.seqlen_k - sequence.seqlen_q;
  task.head.q = {a.q + batch * a.q_batch + head * a.q_head + q_start * a.q_seq, a.q_seq, queries};
  task.head.k = {a.k + batch * a.k_batch + head_k * a.k_head + k_start * a.k_seq, a.k_seq,
                 sequence.seqlen_k};
  task.head.v = {a.v + batch * a.v_batch + head_k * a.v_head + k_start * a.v_seq, a.v_seq,
                 sequence.seqlen_k};
  task.head.o = {a.out + batch * a.out_batch + head * a.out_head + q_start * a.out_seq, a.out_seq,
                 queries};
  const unsigned long line = batch * a.heads.divisor + head;
  task.head.lse = nullptr;
  if (a.lse) {
    const unsigned long row = kGroupMode ? head * a.lse_head + q_start * 4 : line * a.lse_head;
    task.head.lse = (Global<float>)((Global<char>)a.lse + row);
  }
  task.tile = tile;
  task.split = place.share;
  task.num_splits = a.num_splits.divisor;
  task.workspace = a.workspace;
  if (task.workspace)
    task.workspace += line * a.query_tiles * task.num_splits * kWaves * SplitResult::kFloats;
  return task;
}

__global__ void forward(Arguments) asm(KERNEL);

// Two waves a SIMD: 256 registers each.
__global__
    __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads), amdgpu_waves_per_eu(2, 2))) void
    forward(Arguments arguments) {
  alignas(1024) __shared__ char lds[kSharedBytes];
  const Arguments a = loaded_at_once(arguments);
  const Place place = place_of_workgroup(a, a.num_splits);
  const Sequence sequence = sequence_of(a, place.batch);
  const int queries = computed_queries(a, sequence);
  const int tile = tile_of(a, place, queries);
  if (kGroupMode && (tile < 0 || tile * kTileRows >= queries)) return;
  const Task task = task_of(a, place, sequence, queries, tile);
  const int thread = opaque(__builtin_amdgcn_workitem_id_x());
  if (are_far<kTileKeys>(task.head.k) || are_far<kTileKeys>(task.head.v) ||
      are_far<32>(task.head.q) || are_far<32>(task.head.o))
    attend<true>(task, a.scale_log2, (Lds<char>)lds, thread);
  else attend<false>(task, a.scale_log2, (Lds<char>)lds, thread);
}

// Of the 32 queries that one wave of each split had, a wave here has a share of the columns, for
// all splits, of which it loads several at once.
template <bool kAreFar>
__device__ inline void combine_splits(const Task& task, int part, Lds<char> exchange, int thread) {
  constexpr int kQuads = SplitResult::kQuads / kWaves, kAtOnce = 8;
  static_assert(SplitResult::kQuads % kWaves == 0);
  const int lane = thread % 64;
  const int wave_index = __builtin_amdgcn_readfirstlane(thread / 64);
  const int first_quad = wave_index * kQuads, last_split = task.num_splits - 1;
  const int first_row = task.tile * kTileRows + part * 32;
  const bool has_row = first_row + lane % 32 < task.head.q.count;
  const SplitResults results(task, part, lane, has_row);

  float maximum = kNoMaximum, sum = 0;
  f32x4 output[kQuads];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) output[i] = f32x4(0);
  for (int first = 0; first <= last_split; first += kAtOnce) {
    float maxima[kAtOnce], sums[kAtOnce];
    f32x4 quads[kAtOnce][kQuads];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) maxima[n] = results.maximum(smaller(first + n, last_split));
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      // Behind the last split these are zeros.
      sums[n] = results.sum(first + n);
#pragma unroll
      for (int i = 0; i < kQuads; ++i) quads[n][i] = results.quad(first + n, first_quad + i);
    }
    // Left alone, the compiler would load each when it is needed, to save registers.
    __builtin_amdgcn_sched_barrier(0);
    float next = maximum;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) next = __builtin_fmaxf(next, maxima[n]);
    const float before = __builtin_amdgcn_exp2f(maximum - next);
    maximum = next;
    sum *= before;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) output[i] *= before;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const float factor = __builtin_amdgcn_exp2f(maxima[n] - maximum);
      sum += sums[n] * factor;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) output[i] += quads[n][i] * factor;
    }
  }

  // The other half of the wave has the sums of the query's other keys.
  sum += bits_as<float>(__builtin_amdgcn_ds_bpermute((lane ^ 32) * 4, bits_as<int>(sum)));
  const OutputRows<kAreFar> rows(task.head.o.from(first_row));
  const float factor = reciprocal_of(sum);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int quad = first_quad + i;
    rows.put(exchange + quad / 8 * Exchange::kBytes, quad % 8, output[i] * factor, lane);
  }
  barrier();
  for (int n = wave_index; n < kValueBlocks / 2 * Exchange::kPasses; n += kWaves) {
    const int pass = n % Exchange::kPasses, wide = n / Exchange::kPasses;
    rows.store(exchange + wide * Exchange::kBytes, pass, wide * 64, lane);
  }
  if (wave_index == 0) store_lse(task.head, first_row, maximum, sum, lane);
}

__global__ void combine(Arguments) asm(COMBINE);

// Makes the output of what the splits left. Its grid is that of the other kernel with as many
// workgroups in place of splits as that has waves: each has the 32 queries of one.
__global__ __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads))) void combine(
    Arguments arguments) {
  alignas(1024) __shared__ char lds[kValueBlocks / 2 * Exchange::kBytes];
  const Arguments a = loaded_at_once(arguments);
  const Place place = place_of_workgroup(a, Divisor{kWaves, ~0u / kWaves});
  const Sequence sequence = sequence_of(a, place.batch);
  const int queries = computed_queries(a, sequence);
  const int tile = tile_of(a, place, queries);
  if (tile < 0 || tile * kTileRows + static_cast<int>(place.share) * 32 >= queries) return;
  const Task task = task_of(a, place, sequence, queries, tile);
  const int thread = __builtin_amdgcn_workitem_id_x();
  if (are_far<32>(task.head.o)) combine_splits<true>(task, place.share, (Lds<char>)lds, thread);
  else combine_splits<false>(task, place.share, (Lds<char>)lds, thread);
}
