// Fused multi-head attention, backward: dq, dk and dv of softmax(scale Q K^T) V, for gfx942 and
// gfx950. Three kernels run one after the other:
//
//     row_sums    of each query the lse in powers of two and delta, the sum of out * dout along its
//                 row; and zeros where dq will be added up
//     gradients   a workgroup has kKeys keys of one key head, and goes through the queries of all
//                 its query heads that see them, kQueries at a time: dk and dv, which it keeps in
//                 registers, and its share of dq, which it adds to the others' in memory
//     round_dq    dq of what has been added up
//
// So every score is computed once, with five products for a tile of queries:
//
//     S = Q K^T    dP = dO V^T    dV^T += dO^T P    dK^T += Q^T dS    dQ += dS K
//
// where P = exp(S - lse) and dS = P (dP - delta). Lanes hold a key each and queries in registers,
// so that P and dS in the accumulator are the next product's operand as they are. Only dQ, which
// sums over keys, takes dS from LDS, where lanes find a query's.
//
// Two waves share 32 keys, and a SIMD: one makes probabilities and dV, the other dS, dK and dQ. So
// one has its vector instructions while the other multiplies:
//
//     between barriers      rows                               columns
//     probability waves     S i, P i                           dV i
//     gradient waves        dQ i-1, dP i                       dS i, dK i
//     read from LDS         rows of Q and dO i, dS i-1         their columns i, P i
//     written to LDS        columns of Q and dO i, P i         rows i+1, dS i
//
// The order in which workgroups add to dq is open, and with it the last bits of it, unless kernels
// are deterministic: then they add in the order of their keys, as Turns in backward.h says.
//
// Set by the build: what backward.h says, and KERNEL (a symbol).
constexpr int kKeys = 128;            // of a workgroup
constexpr int kDqWaves = kKeys / 32;  // of a workgroup, that add to dq
// A tile has parts of 32 queries each: as many as it takes for every gradient wave to have 32
// columns of a part's dq.
constexpr int kParts = 128 / HDIM_Q, kQueries = 32 * kParts;

#include "backward.h"
#include "backward_tiles.h"

constexpr int kRoleWaves = kTileThreads / 64, kThreads = 2 * kTileThreads;

// Of a part.
using RowTile = RowTileOf<kHdim>;
using ColumnTile = ColumnTileOf<kHdim>;
// Of a tile of dq's 16 values, those before kDqEarly go to memory between the same barriers, and
// those before kDqBehindBarrier right behind the next one.
constexpr int kDqEarly = 8, kDqBehindBarrier = kDqEarly + 3;
constexpr int kSteps = kHdim / 16, kBlocks = kHdim / 32;
static_assert(kHdim == kHdimV);
static_assert(kParts * kBlocks == kRoleWaves, "a gradient wave has 32 columns of a part's dq");
constexpr int kOperands = 2 * kParts;  // of a lane's probabilities: 8 each

// LDS.
constexpr int kQRows = 0, kDoutRows = kQRows + kParts * RowTile::kBytes;
constexpr int kQColumns = kDoutRows + kParts * RowTile::kBytes;
constexpr int kDoutColumns = kQColumns + kParts * ColumnTile::kBytes;
constexpr int kProbabilities = kDoutColumns + kParts * ColumnTile::kBytes;
constexpr int kDscores = kProbabilities + kTileThreads * kOperands * 16;
constexpr int kSharedBytes = kDscores + kParts * ScoreTile::kBytes;

__device__ inline void move(unsigned& offset, unsigned bytes) { offset += bytes; }
template <int kCount>
__device__ inline void move(unsigned (&offsets)[kCount], unsigned bytes) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) offsets[i] += bytes;
}

// A tile on its way, one part after the other: load() starts one of kLoads loads.
template <class PartTile>
struct PartLoads {
  static constexpr int kLoads = kParts * PartTile::kLoads;
  typename PartTile::Source first;

  __device__ static PartLoads of(const Rows& rows, int thread) {
    PartLoads result{PartTile::source(rows, thread)};
    result.first.buffer = buffer_of<kQueries, kHdim * 2>(rows);
    return result;
  }

  __device__ void load(typename PartTile::Registers (&to)[kParts], int n) const {
    const int part = n / PartTile::kLoads;
    typename PartTile::Source source = first;
    move(source.offset, 32 * part * first.rows.stride);
    source.template load<false>(to[part], n % PartTile::kLoads);
  }
};

// The probability waves: they also bring all tiles to LDS.
__device__ inline void make_probabilities(const KeyTask& keys, Lds<char> lds, int thread) {
  const int lane = thread % 64;
  const int wave = __builtin_amdgcn_readfirstlane(thread / 64);
  const int first_row = keys.first_key + wave * 32, row = first_row + lane % 32;
  const float scale = keys.a.scale_log2;
  u32x4 own[kSteps];
  load_own(own, keys.keys().from(first_row), lane);
  f32x16 dv[kBlocks];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) dv[block] = f32x16(0);

  RowTile::Registers q_rows[kParts], dout_rows[kParts];
  ColumnTile::Registers q_columns[kParts], dout_columns[kParts];
  using RowLoads = PartLoads<RowTile>;
  using ColumnLoads = PartLoads<ColumnTile>;
  f32x16 lse[kParts];
  const auto load_lse = [&](const Walk& at) {
    const Between between = Between::of(keys.a, keys.task.batch, at.head, keys.task.sequence);
    const auto from = statistics_of(between.lse, at.first_query(), keys.task.queries);
#pragma unroll
    for (int part = 0; part < kParts; ++part) lse[part] = load_statistics(from, part, lane);
  };
  const auto store_rows = [&] {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      RowTile::store(lds + kQRows + part * RowTile::kBytes, q_rows[part], thread);
      RowTile::store(lds + kDoutRows + part * RowTile::kBytes, dout_rows[part], thread);
    }
  };
  const auto store_columns = [&] {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      ColumnTile::store(lds + kQColumns + part * ColumnTile::kBytes, q_columns[part], thread);
      ColumnTile::store(lds + kDoutColumns + part * ColumnTile::kBytes, dout_columns[part], thread);
    }
  };
  Walk walk = keys.walk, next_walk = walk;  // the tile at hand, the one behind it
  Rows next_q, next_dout;
  if (!walk.has_ended()) {
    const Rows q = keys.queries_of(walk), dout = keys.douts_of(walk);
#pragma unroll
    for (int n = 0; n < RowLoads::kLoads; ++n) {
      RowLoads::of(q, thread).load(q_rows, n);
      RowLoads::of(dout, thread).load(dout_rows, n);
    }
#pragma unroll
    for (int n = 0; n < ColumnLoads::kLoads; ++n) {
      ColumnLoads::of(q, thread).load(q_columns, n);
      ColumnLoads::of(dout, thread).load(dout_columns, n);
    }
    load_lse(walk);
    next_walk.advance();
    next_q = keys.queries_of(next_walk);
    next_dout = keys.douts_of(next_walk);
    store_rows();
  }
  while (!walk.has_ended()) {
    barrier();
    __builtin_amdgcn_s_setprio(2);
    f32x16 score[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) score[part] = f32x16(0);
    const Lds<const char> q_operands = lds + kQRows + RowTile::first_operand(lane);
    const RowLoads q_loads = RowLoads::of(next_q, thread);
    const RowLoads dout_loads = RowLoads::of(next_dout, thread);
    multiply_in_turn<kParts * kSteps>(
        [&](int n) {
          return RowTile::operand(q_operands + n / kSteps * RowTile::kBytes, 0, n % kSteps);
        },
        [&](int n, u32x4 q) {
          f32x16& sum = score[n / kSteps];
          sum = Dtype::multiply(q, own[n % kSteps], sum);
          if (n < RowLoads::kLoads) q_loads.load(q_rows, n);
          else if (n < 2 * RowLoads::kLoads) dout_loads.load(dout_rows, n - RowLoads::kLoads);
        });
    // Where both have something for the vector unit, the other's products come first.
    __builtin_amdgcn_s_setprio(0);
    const int first_query = walk.first_query();
    if (!keys.visibility.is_whole(first_query, first_query + kQueries - 1, first_row,
                                  first_row + 31)) {
#pragma unroll
      for (int i = 0; i < 16 * kParts; ++i) {
        const int query = first_query + i / 16 * 32 + query_of_score(i % 16, lane);
        const bool sees =
            row >= keys.visibility.first_key(query) && row <= keys.visibility.last_key(query);
        score[i / 16][i % 16] = sees ? score[i / 16][i % 16] : -kInfinity;
      }
    }
    // Rows behind the last one are zeros only where the stride leads there: that of a single row
    // may be anything, and that of an expanded tensor is 0.
    const int queries_left = keys.task.queries - first_query;
    if (queries_left < kQueries) {
#pragma unroll
      for (int i = 0; i < 16 * kParts; ++i) {
        const bool is_there = i / 16 * 32 + query_of_score(i % 16, lane) < queries_left;
        score[i / 16][i % 16] = is_there ? score[i / 16][i % 16] : -kInfinity;
      }
    }
    u32x4 probability[kOperands];
#pragma unroll
    for (int i = 0; i < 16 * kParts; i += 2) {
      const f32x16 &scores = score[i / 16], &lses = lse[i / 16];
      const int at = i % 16;
      const float first = __builtin_fmaf(scores[at], scale, -lses[at]);
      const float second = __builtin_fmaf(scores[at + 1], scale, -lses[at + 1]);
      probability[i / 8][i % 8 / 2] = Dtype::template pack<kRounding>(
          __builtin_amdgcn_exp2f(first), __builtin_amdgcn_exp2f(second));
    }
    const Lds<u32x4> exchange = (Lds<u32x4>)(lds + kProbabilities) + wave * 64 * kOperands + lane;
#pragma unroll
    for (int i = 0; i < kOperands; ++i) exchange[64 * i] = probability[i];
    store_columns();
    load_lse(next_walk);
    barrier();
    const Lds<const char> dout_operands = lds + kDoutColumns + ColumnTile::first_operand(lane);
    const ColumnLoads q_column_loads = ColumnLoads::of(next_q, thread);
    const ColumnLoads dout_column_loads = ColumnLoads::of(next_dout, thread);
    multiply_in_turn<kOperands * kBlocks>(
        [&](int n) {
          const int i = n / kBlocks;
          return ColumnTile::operand(dout_operands + i / 2 * ColumnTile::kBytes, n % kBlocks,
                                     i % 2);
        },
        [&](int n, u32x4 dout) {
          f32x16& sum = dv[n % kBlocks];
          sum = Dtype::multiply(dout, probability[n / kBlocks], sum);
          share<2 * ColumnLoads::kLoads, kOperands * kBlocks>(n, [&](int i) {
            if (i < ColumnLoads::kLoads) q_column_loads.load(q_columns, i);
            else dout_column_loads.load(dout_columns, i - ColumnLoads::kLoads);
          });
        });
    store_rows();
    walk = next_walk;
    next_walk.advance();
    next_q = settled(keys.queries_of(next_walk));
    next_dout = settled(keys.douts_of(next_walk));
  }
  barrier();
  const GradientTensors& g = keys.a.gradients;
  const Rows to = rows_of(g.dv, g.dv_strides, keys.task.batch, keys.task.head,
                          keys.task.sequence.k_start, keys.task.sequence.seqlen_k);
  store_gradient(dv, 1, to, row, lane);
}

// The gradient waves. A tile of dq has its products one tile late, and goes to memory between them
// and the next ones, as evenly as can be: a compute unit has only a share of what adds.
__device__ inline void make_gradients(const KeyTask& keys, Lds<char> lds, int thread) {
  const int lane = thread % 64;
  const int wave = __builtin_amdgcn_readfirstlane(thread / 64);
  const int first_row = keys.first_key + wave * 32, row = first_row + lane % 32;
  const int dq_part = wave / kBlocks, dq_column = wave % kBlocks * 32 + lane % 32;
  u32x4 own[kSteps], column[kKeySteps];
  load_own(own, keys.values().from(first_row), lane);
  load_column(column, keys.keys().from(keys.first_key), dq_column, lane);
  f32x16 dk[kBlocks];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) dk[block] = f32x16(0);

  // Of tiles before the first, which go nowhere.
  __amdgpu_buffer_rsrc_t last_rows = __builtin_amdgcn_make_buffer_rsrc(nullptr, 0, 0, kRawBuffer);
  DqTile dq = {f32x16(0), last_rows};
  const Lds<u32x4> all_dscores = (Lds<u32x4>)(lds + kDscores);
#pragma unroll
  for (int i = 0; i < kParts * ScoreTile::kBytes / 16 / kTileThreads; ++i)
    all_dscores[i * kTileThreads + thread] = u32x4(0);

  const Lds<const char> dscore_operands =
      lds + kDscores + dq_part * ScoreTile::kBytes + ScoreTile::first_operand(lane);
  const Lds<const char> dout_operands = lds + kDoutRows + RowTile::first_operand(lane);
  const Lds<const char> q_operands = lds + kQColumns + ColumnTile::first_operand(lane);
  const int key = wave * 32 + lane % 32;
  f32x16 product[kParts];  // of dout and v, less delta
  const auto load_delta = [&](const Walk& at) {
    const Between between = Between::of(keys.a, keys.task.batch, at.head, keys.task.sequence);
    const auto from = statistics_of(between.delta, at.first_query(), keys.task.queries);
#pragma unroll
    for (int part = 0; part < kParts; ++part) product[part] = load_statistics(from, part, lane);
  };
  Walk walk = keys.walk;
  if (!walk.has_ended()) load_delta(walk);
  Turn turn;
  if constexpr (kIsDeterministic) turn = Turn::of(keys, wave);
  int tile = 0, seen = 0;  // where kernels are deterministic
  __builtin_amdgcn_s_setprio(1);
  while (!walk.has_ended()) {
    barrier();
    f32x16 next_dq = f32x16(0);
    // What adds has something to do while the first operands are read.
#pragma unroll
    for (int i = kDqEarly; i < kDqBehindBarrier; ++i) dq.add(i, dq_column, lane);
    if constexpr (kIsDeterministic) {
      // Those of the tile before that one came before the last barrier.
      turn.end<kDqBehindBarrier>(larger(tile - 2, 0), lane);
      seen = turn.seen();
    }
    constexpr int kProducts = kParts * kSteps;  // the others are those of dq
    multiply_in_turn<kProducts + kKeySteps>(
        [&](int n) {
          return n < kProducts
                     ? RowTile::operand(dout_operands + n / kSteps * RowTile::kBytes, 0, n % kSteps)
                     : ScoreTile::operand(dscore_operands, 0, n - kProducts);
        },
        [&](int n, u32x4 operand) {
          share<16 - kDqBehindBarrier, kProducts + kKeySteps>(
              n, [&](int i) { dq.add(kDqBehindBarrier + i, dq_column, lane); });
          if (n < kProducts) {
            f32x16& sum = product[n / kSteps];
            sum = Dtype::multiply(operand, own[n % kSteps], sum);
          } else {
            next_dq = Dtype::multiply(operand, column[n - kProducts], next_dq);
          }
          // Here: nobody asks for it before the next barrier, behind which it would be made.
          asm volatile("" : "+v"(next_dq));
        });
    dq = {next_dq, last_rows};
    barrier();
    if constexpr (kIsDeterministic) turn.wait(tile++ - 1, seen);
    const Lds<const u32x4> exchange =
        (Lds<const u32x4>)(lds + kProbabilities) + wave * 64 * kOperands + lane;
    u32x4 probability[kOperands], dscore[kOperands];
#pragma unroll
    for (int i = 0; i < kOperands; ++i) probability[i] = exchange[64 * i];
    const auto make_pair = [&](int pair) {
      const int part = pair / 8, i = pair % 8 * 2;
      const f32x2 p = widened(probability[pair / 4][pair % 4]);
      const f32x16& of_part = product[part];
      const unsigned both = Dtype::template pack<kRounding>(p.x * of_part[i], p.y * of_part[i + 1]);
      dscore[pair / 4][pair % 4] = both;
      const Lds<char> dscores = lds + kDscores + part * ScoreTile::kBytes;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int query = query_of_score(i + j, lane);
        const Lds<char> to = dscores + ScoreTile::place(query, key / 8) + key % 8 * 2;
        *(Lds<unsigned short>)to = both >> j * 16;
      }
    };
    const Between between = Between::of(keys.a, keys.task.batch, walk.head, keys.task.sequence);
    last_rows = rows_of_dq(between.dq, walk.first_query() + 32 * dq_part, keys.task.queries);
    walk.advance();
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      dq.add(pair, dq_column, lane);
      make_pair(pair);
    }
    multiply_in_turn<kOperands * kBlocks>(
        [&](int n) {
          const int i = n / kBlocks;
          return ColumnTile::operand(q_operands + i / 2 * ColumnTile::kBytes, n % kBlocks, i % 2);
        },
        [&](int n, u32x4 q) {
          const int i = n / kBlocks;
          f32x16& sum = dk[n % kBlocks];
          sum = Dtype::multiply(q, dscore[i], sum);
          if (i + 1 < kOperands)
            share<4, kBlocks>(n % kBlocks, [&](int pair) { make_pair(4 * (i + 1) + pair); });
          if (n == (kOperands - 1) * kBlocks) load_delta(walk);  // the old one is used up
          if (n % 2 == 1) dq.add(4 + n / 2, dq_column, lane);
        });
  }
  barrier();
#pragma unroll
  for (int i = kDqEarly; i < 16; ++i) dq.add(i, dq_column, lane);
  if (!keys.walk.has_ended()) {
    dq = {f32x16(0), last_rows};
    multiply_in_turn<kKeySteps>(
        [&](int n) { return ScoreTile::operand(dscore_operands, 0, n); },
        [&](int n, u32x4 dscores) { dq.values = Dtype::multiply(dscores, column[n], dq.values); });
    if constexpr (kIsDeterministic) turn.wait(tile - 1, turn.seen());
#pragma unroll
    for (int i = 0; i < 16; ++i) dq.add(i, dq_column, lane);
    if constexpr (kIsDeterministic) turn.end<0>(tile, lane);
  }
  const GradientTensors& g = keys.a.gradients;
  const Rows to = rows_of(g.dk, g.dk_strides, keys.task.batch, keys.task.head,
                          keys.task.sequence.k_start, keys.task.sequence.seqlen_k);
  store_gradient(dk, keys.a.scale_log2 * kLn2, to, row, lane);
}

__global__ void gradients(ReadyBackwardArguments) asm(KERNEL);

__global__
    __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads), amdgpu_waves_per_eu(2, 2))) void
    gradients(ReadyBackwardArguments a) {
  alignas(1024) __shared__ char lds[kSharedBytes];
  const Task task = kIsDeterministic ? next_task(a, (Lds<char>)lds) : task_of(a);
  const int first_key = task.tile * kKeys;
  if (first_key >= task.sequence.seqlen_k) return;
  const unsigned heads = a.gqa;
  const Visibility visibility = Visibility::of(a, task.sequence);
  const int last_key = smaller(first_key + kKeys, task.sequence.seqlen_k) - 1;
  const KeyTask keys = {
      a, task, visibility,
      Walk::of(visibility, task.queries, first_key, last_key, task.head * heads, heads), first_key};
  const int thread = opaque(__builtin_amdgcn_workitem_id_x());
  if (__builtin_amdgcn_readfirstlane(thread) < kTileThreads)
    make_probabilities(keys, (Lds<char>)lds, thread);
  else make_gradients(keys, (Lds<char>)lds, thread - kTileThreads);
}
