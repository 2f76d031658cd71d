// Fused multi-head attention, backward, for gfx950 and head dimensions of 128: the same three
// kernels as in fmha_bwd.hip, with workgroups of twice as many keys. So half as many of them add to
// dq, which is what bounds that kernel here.
//
// A wave has 32 of the workgroup's 256 keys, and makes all of the five products for them, of a tile
// of 64 queries in two parts of 32:
//
//     S = Q K^T    dP = dO V^T    dV^T += dO^T P    dK^T += Q^T dS    dQ += dS K
//
// Lanes hold a key each and queries in registers, so that P and dS in the accumulator are the next
// product's operand as they are. dQ sums over the keys of all waves, which leave dS in LDS for it:
// a wave has 32 columns of a part's dq.
//
// What a product sums over may be rows or columns of its operand in LDS: gfx950 reads both, so that
// every tile is there once. Tiles come from global memory to LDS without passing through registers.
//
//     between barriers   products                  on its way to LDS
//     first part         S, dP, dV, dK of part 0   part 1 of this tile
//     second part        S, dP, dV, dK of part 1   part 0 of the next tile
//     dq                 dQ of both                part 1 of the next tile
//
// The two waves of a SIMD do the same, but one has priority, so that the other multiplies while the
// first makes probabilities.
//
// With a mask a workgroup has two blocks of keys, as far from the first as from the last one: of a
// causal one all workgroups take as long, then. In deterministic kernels it has one: a second one
// would have to wait for workgroups that may not have begun.
//
// Registers of a wave, of 256: 128 for dk and dv, 32 for V, 16 for dq on its way to memory, 32 for
// S and dP, 16 for P and dS, up to 24 for operands that are read ahead, and addresses. K stays in
// LDS.
//
// Set by the build: what backward.h says, and KERNEL (a symbol).
constexpr int kQueries = 64;  // of a tile
constexpr int kKeys = 256;    // of a workgroup, at a time
constexpr int kWaves = kKeys / 32, kDqWaves = kWaves;

#include "backward.h"

constexpr int kThreads = 64 * kWaves, kParts = kQueries / 32;
constexpr int kSteps = kHdim / 16, kBlocks = kHdim / 32, kKeySteps = kKeys / 16;
static_assert(kHdim == 128);
static_assert(kParts * kBlocks == kWaves, "a wave has 32 columns of a part's dq");

// Reads four values of a column: of 16 lanes, lane i gets column i of four rows, for which it gives
// the address of values 4 * (i % 4) and on of row i / 4.
__device__ inline u32x2 read_columns(Lds<const char> from) {
  return bits_as<u32x2>(__builtin_amdgcn_ds_read_tr16_b64_v4i16((Lds<s16x4>)from));
}

__device__ inline u32x4 joined(u32x2 low, u32x2 high) { return {low.x, low.y, high.x, high.y}; }

__device__ inline Lds<const char> flipped(Lds<const char> address, unsigned bits) {
  return (Lds<const char>)((unsigned)address ^ bits);
}

// 32 rows of 128 values in LDS. The 16 chunks of a row, of 8 values each, change places by an
// exclusive or with bits of the row's number: those of 16 rows are in different banks, and so are
// 64 bytes of each of four rows.
struct RowTile {
  static constexpr int kRowBytes = kHdim * 2, kBytes = 32 * kRowBytes;

  __device__ static unsigned mix_of(unsigned row) { return row % 4 * 4 + row / 4 % 4; }
  __device__ static unsigned place(unsigned row, unsigned chunk) {
    return row * kRowBytes + (chunk ^ mix_of(row)) * 16;
  }

  // An operand of rows: a lane has values 16 * step + 8 * (lane / 32) and on of one row.
  __device__ static unsigned first_row(unsigned lane) { return place(lane % 32, lane / 32); }
  __device__ static u32x4 rows(Lds<const char> first, int tile, int step) {
    return *(Lds<const u32x4>)(flipped(first, 32 * step) + tile);
  }

  // An operand of columns: a lane has one of the block's 32 columns, of 16 rows those in which the
  // accumulator holds its values.
  __device__ static unsigned first_column(unsigned lane) {
    return place(lane / 32 * 4 + lane % 16 / 4, lane / 16 % 2 * 2 + lane % 4 / 2) + lane % 2 * 8;
  }
  __device__ static u32x4 columns(Lds<const char> first, int tile, int block, int step) {
    const Lds<const char> low = flipped(first, 64 * block), high = flipped(first, 64 * block + 32);
    const int rows = tile + 16 * step * kRowBytes;
    return joined(read_columns(low + rows), read_columns(high + rows + 8 * kRowBytes));
  }

  // Starts to load four of `rows` to LDS. Lanes write one after the other, so that each loads what
  // belongs to its place: at `offset`, from offset_of().
  __device__ static unsigned offset_of(unsigned stride, unsigned first, unsigned lane) {
    const unsigned row = first + lane / 16;
    return row * stride + (lane % 16 ^ mix_of(row)) * 16;
  }
};

// Gradients of a part's scores, a row of 32 queries for each key. What a lane writes at once, four
// queries, changes places in the row, so that those of 16 keys are in different banks.
struct ScoreTile {
  static constexpr int kRowBytes = 64, kBytes = kKeys * kRowBytes;

  __device__ static unsigned place(unsigned key, unsigned quad) {
    return key * kRowBytes + (quad ^ key / 2 % 8) * 8;
  }

  // Queries of a lane's scores 4 * i and on, of its key.
  __device__ static unsigned first_write(unsigned key, unsigned lane) {
    return place(key, lane / 32);
  }
  __device__ static void write(Lds<char> first, int i, u32x2 scores) {
    *(Lds<u32x2>)((unsigned)first ^ 16 * i) = scores;
  }

  // A lane has a query, of 16 keys those that RowTile::columns() gives.
  __device__ static unsigned first_column(unsigned lane) {
    return place(lane / 32 * 4 + lane % 16 / 4, lane / 16 % 2 * 4 + lane % 4);
  }
  __device__ static u32x4 columns(Lds<const char> first, int step) {
    return joined(read_columns(first + 16 * step * kRowBytes),
                  read_columns(flipped(first, 32) + (16 * step + 8) * kRowBytes));
  }
};

// LDS.
constexpr int kStatisticsBytes = 256;  // of a wave's load, of which the first half is used
constexpr int kQRows = 0, kDoutRows = kQRows + kParts * RowTile::kBytes;
constexpr int kDscores = kDoutRows + kParts * RowTile::kBytes;
constexpr int kLse = kDscores + kParts * ScoreTile::kBytes;
constexpr int kDelta = kLse + kParts * kStatisticsBytes;
constexpr int kKeyRows = kDelta + kParts * kStatisticsBytes;
constexpr int kSharedBytes = kKeyRows + kKeys * RowTile::kRowBytes;

// A buffer in scalar registers, as instructions want it that the compiler does not know of.
typedef u32x4 Buffer;
__device__ inline Buffer raw_buffer(Global<const void> base, int bytes) {
  const unsigned long address = (unsigned long)base;
  return {static_cast<unsigned>(address), static_cast<unsigned>(address >> 32),
          static_cast<unsigned>(bytes), kRawBuffer};
}

// Of 32 rows at most.
__device__ inline Buffer raw_buffer(const Rows& rows) {
  const int count = smaller(rows.count, 32);
  const int bytes = (count - 1) * static_cast<int>(rows.stride) + RowTile::kRowBytes;
  return raw_buffer(rows.base, count > 0 ? bytes : 0);
}

// Loads to LDS, of each lane, and one after the other. The compiler would have every read of LDS
// wait for them; wait_for_loads() does it where it is time.
#define LOAD_TO_LDS(instruction, to, from, offset)           \
  asm volatile("s_mov_b32 m0, %0\n\ts_nop 0\n\t" instruction \
               " %1, %2, 0 offen lds" ::"s"((unsigned)(to)), \
               "v"(offset), "s"(from)                        \
               : "memory")
__device__ inline void load_chunks(Lds<char> to, const Buffer& from, unsigned offset) {
  LOAD_TO_LDS("buffer_load_dwordx4", to, from, offset);
}
__device__ inline void load_dwords(Lds<char> to, const Buffer& from, unsigned offset) {
  LOAD_TO_LDS("buffer_load_dword", to, from, offset);
}
#undef LOAD_TO_LDS

// Until of what goes to or from global memory only the last kLater are left.
template <int kLater>
__device__ inline void wait_for_loads() {
  asm volatile("s_waitcnt vmcnt(%0)" ::"i"(kLater) : "memory");
}

// A number of each of a lane's 16 queries of a part, or of four of them.
__device__ inline f32x4 read_quad(Lds<const char> from, int quad, unsigned lane) {
  return *(Lds<const f32x4>)(from + lane / 32 * 16 + quad * 32);
}
__device__ inline f32x16 read_statistics(Lds<const char> from, unsigned lane) {
  f32x16 result;
#pragma unroll
  for (int quad = 0; quad < 4; ++quad) {
    const f32x4 four = read_quad(from, quad, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) result[4 * quad + i] = four[i];
  }
  return result;
}

// Of a tile of dq's 16 values, a wave adds half during each part.
constexpr int kDqOfPart = 16 / kParts;
// What a wave loads of a part, but for its statistics, which two waves load before the rest.
constexpr int kLoadsOfPart = 2;

// Operands that are read for a product: one, or both.
struct Pair {
  u32x4 first, second;
};

// Products of kEnd operands, which read(n) reads from LDS, a few of them ahead.
template <int kEnd, class Read>
struct Products {
  static constexpr int kAhead = 3;
  Read read;
  Pair ahead[kAhead];

  // Calls multiply(n, operands) for n from kFirst to kLast - 1. In this order: left alone, the
  // compiler would read each when it is needed.
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

// With the first ones read.
template <int kEnd, class Read>
__device__ inline Products<kEnd, Read> products_of(Read read) {
  Products<kEnd, Read> result = {read};
#pragma unroll
  for (int n = 0; n < result.kAhead; ++n) result.ahead[n] = read(n);
  return result;
}

// Rows of all query heads of a sequence. What of them is the same for all tiles is computed once:
// the compiler would keep its terms, for which there are not enough scalar registers.
struct QueryRows {
  Global<const char> base;  // of head 0
  unsigned stride;
  unsigned long head_stride;

  __device__ static QueryRows of(const Rows& first, unsigned long head_stride) {
    Global<const char> base = first.base;
    asm volatile("" : "+s"(base));
    return {base, first.stride, head_stride};
  }

  // Of `count` rows those of a part of the tile, which has none behind the end.
  __device__ Rows of_part(const Walk& at, int part, int count) const {
    const Rows rows = {base + at.head * head_stride, stride, count};
    return rows.from(at.has_ended() ? count : at.first_query() + 32 * part);
  }
};

struct Wave {
  const KeyTask& keys;
  Lds<char> lds;
  unsigned lane;
  int number;     // of the wave
  int first_row;  // of its keys
  QueryRows queries, douts;
  Global<float> statistics;  // lse or delta of head 0, whichever the wave loads
  Global<float> dq_sums;     // of head 0
  unsigned head_statistics;  // how many
  u32x4 values[kSteps];
  f32x16 dk[kBlocks], dv[kBlocks];
  // Its 32 columns of a part of dq, on their way to memory: to as many rows as there are.
  f32x16 dq;
  __amdgpu_buffer_rsrc_t dq_rows;

  // Starts to load the wave's share of a part of the tile.
  __device__ void load_part(const Walk& at, int part) const {
    const int first_query = at.first_query() + 32 * part;
    if (number < 2) {
      const Global<float> from = statistics + static_cast<unsigned long>(at.head) * head_statistics;
      const int left = at.has_ended() ? 0 : larger(keys.task.queries - first_query, 0);
      load_dwords(lds + (number == 0 ? kLse : kDelta) + part * kStatisticsBytes,
                  raw_buffer(from + first_query, left * 4), opaque(lane) * 4);
    }
    const int row = 4 * number;
    const Lds<char> to = lds + part * RowTile::kBytes + row * RowTile::kRowBytes;
    const Rows q = queries.of_part(at, part, keys.task.queries);
    const Rows dout = douts.of_part(at, part, keys.task.queries);
    const unsigned own_lane = opaque(lane);
    load_chunks(to + kQRows, raw_buffer(q), RowTile::offset_of(q.stride, row, own_lane));
    load_chunks(to + kDoutRows, raw_buffer(dout), RowTile::offset_of(dout.stride, row, own_lane));
  }

  // Adds value i of each lane to dq, of which value 0 is at `offset`.
  __device__ void add_dq(int i, int offset) const {
    __builtin_amdgcn_raw_ptr_buffer_atomic_fadd_f32(dq[i], dq_rows, offset + i % 4 * kHdim * 4,
                                                    i / 4 * 8 * kHdim * 4, 0);
  }

  // Of what is hidden, the scores become -inf.
  __device__ void hide(f32x16& score, int first_query) const {
    const unsigned own_lane = opaque(lane);
    const int row = first_row + own_lane % 32;
    if (!keys.visibility.is_whole(first_query, first_query + 31, first_row, first_row + 31)) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int query = first_query + query_of_score(i, own_lane);
        const bool sees =
            row >= keys.visibility.first_key(query) && row <= keys.visibility.last_key(query);
        score[i] = sees ? score[i] : -kInfinity;
      }
    }
    // Rows behind the last one are zeros only where the stride leads there: that of a single row
    // may be anything, and that of an expanded tensor is 0.
    const int queries_left = keys.task.queries - first_query;
    if (queries_left < 32) {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        score[i] = query_of_score(i, own_lane) < queries_left ? score[i] : -kInfinity;
    }
  }

  // All products of a part but dQ, one behind the other, so that operands are read ahead of all.
  template <int kPart>
  __device__ void multiply_part(const Walk& at) {
    constexpr int kQ = kQRows + kPart * RowTile::kBytes;
    constexpr int kDout = kDoutRows + kPart * RowTile::kBytes;
    // Which products are where.
    constexpr int kDp = kSteps, kDv = 2 * kSteps, kDk = 3 * kSteps, kEnd = 4 * kSteps;
    const float scale = keys.a.scale_log2;
    const unsigned own_lane = opaque(lane);
    const Lds<const char> rows = lds + RowTile::first_row(own_lane);
    const Lds<const char> key_rows = rows + (kKeyRows + 32 * number * RowTile::kRowBytes);
    const Lds<const char> columns = lds + RowTile::first_column(own_lane);
    const Lds<char> to = lds + (kDscores + kPart * ScoreTile::kBytes) +
                         ScoreTile::first_write(32 * number + own_lane % 32, own_lane);
    const auto read_lse = [&](int quad) {
      return read_quad(lds + kLse + kPart * kStatisticsBytes, quad, own_lane);
    };
    const int offset = dq_offset();
    const auto send_dq = [&](int n) {
      share<kDqOfPart, kEnd>(n, [&](int i) { add_dq(kPart * kDqOfPart + i, offset); });
    };
    auto products = products_of<kEnd>([&](int n) -> Pair {
      const int step = n % kSteps, block = step / 2;
      if (n < kDp) return {RowTile::rows(rows, kQ, n), RowTile::rows(key_rows, 0, n)};
      if (n < kDv) return {RowTile::rows(rows, kDout, step)};
      return {RowTile::columns(columns, n < kDk ? kDout : kQ, block, step % 2)};
    });
    f32x16 score = f32x16(0);
    products.template in_turn<0, kDp>([&](int n, const Pair& operands) {
      send_dq(n);
      score = Dtype::multiply(operands.first, operands.second, score);
    });
    f32x4 lse[4] = {read_lse(0)};
    f32x16 product = read_statistics(lds + kDelta + kPart * kStatisticsBytes, own_lane);
    hide(score, at.first_query() + 32 * kPart);
    u32x4 probability[2], dscore[2];
    // Probabilities take the place of the scores.
    products.template in_turn<kDp, kDv>([&](int n, const Pair& operands) {
      const int step = n - kDp, i = 2 * step, quad = step / 2;
      send_dq(n);
      product = Dtype::multiply(operands.first, values[step], product);
      if (step % 2 == 0 && quad < 3) lse[quad + 1] = read_lse(quad + 1);
#pragma unroll
      for (int j = i; j < i + 2; ++j)
        score[j] = __builtin_amdgcn_exp2f(__builtin_fmaf(score[j], scale, -lse[quad][j % 4]));
      probability[step / 4][step % 4] = Dtype::template pack<kRounding>(score[i], score[i + 1]);
    });
    products.template in_turn<kDv, kDk>([&](int n, const Pair& operands) {
      const int step = n - kDv, i = 2 * step;
      send_dq(n);
      f32x16& sum = dv[step / 2];
      sum = Dtype::multiply(operands.first, probability[step % 2], sum);
      u32x4& dscores = dscore[step / 4];
      dscores[step % 4] =
          Dtype::template pack<kRounding>(score[i] * product[i], score[i + 1] * product[i + 1]);
      if (step % 2 == 1)
        ScoreTile::write(to, step / 2, u32x2{dscores[step % 4 - 1], dscores[step % 4]});
    });
    products.template in_turn<kDk, kEnd>([&](int n, const Pair& operands) {
      const int step = n - kDk;
      send_dq(n);
      f32x16& sum = dk[step / 2];
      sum = Dtype::multiply(operands.first, dscore[step % 2], sum);
    });
  }

  // The wave's share of the tile's dq, of what all waves have left in LDS.
  __device__ void multiply_dscores(const Walk& at) {
    const Global<float> of_head =
        dq_sums + static_cast<unsigned long>(at.head) * head_statistics * kHdim;
    dq_rows = rows_of_dq(of_head, at.first_query() + 32 * dq_part(), keys.task.queries);
    f32x16 sums = f32x16(0);
    const unsigned own_lane = opaque(lane);
    const Lds<const char> dscores =
        lds + (kDscores + dq_part() * ScoreTile::kBytes) + ScoreTile::first_column(own_lane);
    const Lds<const char> columns =
        flipped(lds + kKeyRows + RowTile::first_column(own_lane), 2 * dq_column());
    auto products = products_of<kKeySteps>([&](int n) -> Pair {
      return {ScoreTile::columns(dscores, n), RowTile::columns(columns, 0, 0, n)};
    });
    products.template in_turn<0, kKeySteps>([&](int n, const Pair& operands) {
      sums = Dtype::multiply(operands.first, operands.second, sums);
    });
    dq = sums;
  }

  __device__ int dq_part() const { return number / kBlocks; }
  __device__ int dq_column() const { return number % kBlocks * 32; }
  __device__ int dq_offset() const {
    const unsigned own_lane = opaque(lane);
    const int row = query_of_score(0, own_lane), column = dq_column() + own_lane % 32;
    return opaque((row * kHdim + column) * 4);
  }

  __device__ static Wave of(const KeyTask& keys, Lds<char> lds, unsigned thread) {
    const int number = __builtin_amdgcn_readfirstlane(thread / 64);
    const unsigned lane = thread % 64;
    Wave result = {keys, lds, lane, number, keys.first_key + 32 * number};
    const Task& task = keys.task;
    Walk of_all = {};  // the first tile of head 0
    of_all.heads_left = 1;
    result.queries = QueryRows::of(keys.queries_of(of_all), keys.a.q_head);
    result.douts = QueryRows::of(keys.douts_of(of_all), keys.a.gradients.dout_strides.head);
    const Between between = Between::of(keys.a, task.batch, 0, task.sequence);
    result.statistics = number == 0 ? between.lse : between.delta;
    result.dq_sums = between.dq;
    result.head_statistics = keys.a.lse_head / 4;
    asm volatile("" : "+s"(result.statistics), "+s"(result.dq_sums));
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) result.dk[block] = result.dv[block] = f32x16(0);
    // Of a tile before the first, which goes nowhere.
    result.dq = f32x16(0);
    result.dq_rows = rows_of_dq(between.dq, task.queries, task.queries);
    return result;
  }

  __device__ void load_own() {
    const Rows own = keys.keys().from(first_row);
    const Buffer buffer = raw_buffer(own);
#pragma unroll
    for (int row = 0; row < 32; row += 4)
      load_chunks(lds + kKeyRows + (32 * number + row) * RowTile::kRowBytes, buffer,
                  RowTile::offset_of(own.stride, row, lane));
    const Rows own_values = keys.values().from(first_row);
    const auto from = buffer_of<32, kHdim * 2>(own_values);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      values[step] = __builtin_amdgcn_raw_buffer_load_b128(
          from, lane % 32 * own_values.stride + 32 * step + lane / 32 * 16, 0, 0);
  }
};

// The arguments once more: what is read by this is not kept from before.
__device__ inline ReadyBackwardArguments read_again() {
  using Constant = const ReadyBackwardArguments __attribute__((address_space(4)));
  Constant* arguments = (Constant*)__builtin_amdgcn_kernarg_segment_ptr();
  asm volatile("" : "+s"(arguments));
  return *(const ReadyBackwardArguments*)arguments;
}

// Makes dk and dv of the keys from `first_key` on, and adds their share to dq.
__device__ inline void differentiate(Task task, int first_key, Lds<char> lds, unsigned thread) {
  const ReadyBackwardArguments a = read_again();
  // Nor is what is computed with these.
  Sequence& sequence = task.sequence;
  asm volatile("" : "+s"(sequence.seqlen_q), "+s"(sequence.seqlen_k), "+s"(task.queries));
  asm volatile("" : "+s"(sequence.q_start), "+s"(sequence.k_start));
  const unsigned heads = a.gqa;
  const Visibility visibility = Visibility::of(a, task.sequence);
  const int last_key = smaller(first_key + kKeys, task.sequence.seqlen_k) - 1;
  const KeyTask keys = {
      a, task, visibility,
      Walk::of(visibility, task.queries, first_key, last_key, task.head * heads, heads), first_key};
  Wave wave = Wave::of(keys, lds, thread);
  Walk walk = keys.walk, next_walk = walk;  // the tile at hand, the one behind it
  Turn turn;
  if constexpr (kIsDeterministic) turn = Turn::of(keys, wave.number);
  int tile = 0, seen = 0;  // where kernels are deterministic
  if (!walk.has_ended()) {
    wave.load_own();
    wave.load_part(walk, 0);
    wave.load_part(walk, 1);
    next_walk.advance();
    wait_for_loads<0>();
    // The compiler waits here, too, and not in the loop.
#pragma unroll
    for (int step = 0; step < kSteps; ++step) asm volatile("" : "+v"(wave.values[step]));
  }
  while (!walk.has_ended()) {
    wait_for_loads<kDqOfPart + kLoadsOfPart>();
    barrier();
    if constexpr (kIsDeterministic) turn.wait(tile - 1, seen);
    wave.multiply_part<0>(walk);
    wait_for_loads<kDqOfPart>();
    if constexpr (kIsDeterministic) {
      // Those before the last one: all of them have been waited for.
      turn.end<kDqOfPart>(larger(tile - 1, 0), opaque(wave.lane));
      seen = turn.seen();
      ++tile;
    }
    barrier();
    wave.load_part(next_walk, 0);
    wave.multiply_part<1>(walk);
    barrier();
    wave.load_part(next_walk, 1);
    wave.multiply_dscores(walk);
    walk = next_walk;
    next_walk.advance();
  }
  const bool has_tiles = tile > 0;
  if (kIsDeterministic && has_tiles) turn.wait(tile - 1, turn.seen());
  const int offset = wave.dq_offset();
#pragma unroll
  for (int i = 0; i < 16; ++i) wave.add_dq(i, offset);
  if (kIsDeterministic && has_tiles) turn.end<0>(tile, opaque(wave.lane));
  const ReadyBackwardArguments again = read_again();
  const GradientTensors& g = again.gradients;
  const auto to = [&](Global<const char> tensor, const TensorStrides& strides) {
    return rows_of(tensor, strides, task.batch, task.head, task.sequence.k_start,
                   task.sequence.seqlen_k);
  };
  const unsigned lane = opaque(wave.lane);
  const int row = wave.first_row + lane % 32;
  store_gradient(wave.dk, again.scale_log2 * kLn2, to(g.dk, g.dk_strides), row, lane);
  store_gradient(wave.dv, 1, to(g.dv, g.dv_strides), row, lane);
}

__global__ void gradients(ReadyBackwardArguments) asm(KERNEL);

__global__
    __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads), amdgpu_waves_per_eu(2, 2))) void
    gradients(ReadyBackwardArguments a) {
  alignas(1024) __shared__ char lds[kSharedBytes];
  const Task task = kIsDeterministic ? next_task(a, (Lds<char>)lds) : task_of(a);
  const int blocks = tiles_of(task.sequence.seqlen_k, kKeys);
  int block = task.tile;
  const int last_block = kIsMasked && !kIsDeterministic ? blocks - 1 - block : block;
  if (block > last_block || block >= blocks) return;
  const unsigned thread = __builtin_amdgcn_workitem_id_x();
  if (__builtin_amdgcn_readfirstlane(thread) < kThreads / 2) __builtin_amdgcn_s_setprio(1);
  while (true) {
    differentiate(task, block * kKeys, (Lds<char>)lds, opaque(thread));
    if (block == last_block) return;
    block = last_block;
    barrier();
  }
}
