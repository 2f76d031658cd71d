// Fused multi-head attention, backward, of head dimensions above 128: the three kernels that
// fmha_bwd.hip describes, with the same products. Only the one in the middle is another.
//
// A wave has all registers of its SIMD. So it keeps dk and dv of its 32 keys, and does alone what
// two waves share there. Its vector instructions run between matrix products that do not wait for
// them:
//
//     between barriers    products                 vector unit
//     1                   S i                      the rest of dq i-1 goes to memory
//                         dP i                     P i
//                         dV i, dK i               dS i
//     2                   dQ i
//     read from LDS       1: rows and columns of Q and dO i       2: dS i
//     written to LDS      1: dS i                                 2: rows and columns i+1
//
// dq has six blocks of 32 columns, for four waves: each has a block, and shares another one with
// its neighbour. There both sum over half of the keys, for all queries. Then they exchange halves
// through LDS, so that each adds the sums of half of the queries to dq.
//
// Set by the build: what backward.h says, and KERNEL (a symbol).
constexpr int kKeys = 128;            // of a workgroup
constexpr int kDqWaves = kKeys / 32;  // of a workgroup, that add to dq
constexpr int kQueries = 32;          // of a tile

#include "backward.h"
#include "backward_tiles.h"

constexpr int kThreads = 64 * kDqWaves;
constexpr int kSteps = kHdim / 16, kBlocks = kHdim / 32;
constexpr int kStepsV = kHdimV / 16, kBlocksV = kHdimV / 32;
static_assert(kBlocks == kDqWaves + kDqWaves / 2, "two waves share a block of dq's columns");
constexpr int kHalfSteps = kKeySteps / 2;
constexpr int kOperands = 2;  // of a lane's probabilities: 8 each

// A tile of 32 queries, both ways: as rows, and as columns in tiles of 64 or 128.
template <int kColumns>
struct QueryTile {
  static constexpr int kColumnsAtOnce = kColumns % 128 == 0 ? 128 : 64;
  static constexpr int kColumnTiles = kColumns / kColumnsAtOnce;
  static constexpr int kBlocksAtOnce = kColumnsAtOnce / 32;
  using RowTile = RowTileOf<kColumns>;
  using ColumnTile = ColumnTileOf<kColumnsAtOnce>;
  static constexpr int kBytes = RowTile::kBytes + kColumnTiles * ColumnTile::kBytes;

  struct Registers {
    typename RowTile::Registers rows;
    typename ColumnTile::Registers columns[kColumnTiles];
  };

  // A tile on its way: load() starts one of kLoads loads.
  static constexpr int kLoads = RowTile::kLoads + kColumnTiles * ColumnTile::kLoads;
  struct Source {
    typename RowTile::Source rows;
    typename ColumnTile::Source columns;

    __device__ void load(Registers& to, int n) const {
      if (n < RowTile::kLoads) {
        rows.template load<false>(to.rows, n);
      } else {
        const int i = n - RowTile::kLoads, tile = i / ColumnTile::kLoads;
        typename ColumnTile::Source source = columns;
        source.offset += tile * kColumnsAtOnce * 2;
        source.template load<false>(to.columns[tile], i % ColumnTile::kLoads);
      }
    }
  };
  __device__ static Source source(const Rows& rows, int thread) {
    Source result = {RowTile::source(rows, thread), ColumnTile::source(rows, thread)};
    result.rows.buffer = result.columns.buffer = buffer_at_once<kQueries, kColumns * 2>(rows);
    return result;
  }

  // In kStores pieces.
  static constexpr int kStores = RowTile::kStores + kColumnTiles;
  __device__ static void store(Lds<char> tile, const Registers& from, int thread, int n) {
    if (n < RowTile::kStores) {
      RowTile::store_piece(tile + RowTile::first_store(thread), from.rows, n);
    } else {
      const int i = n - RowTile::kStores;
      ColumnTile::store(tile + RowTile::kBytes + i * ColumnTile::kBytes, from.columns[i], thread);
    }
  }

  // Values 16 * step and on of a lane's query.
  __device__ static u32x4 of_rows(Lds<const char> tile, int step, int lane) {
    return RowTile::operand(tile + RowTile::first_operand(lane), 0, step);
  }
  // The queries 16 * step and on of value 32 * block and on.
  __device__ static u32x4 of_columns(Lds<const char> tile, int block, int step, int lane) {
    return ColumnTile::operand(tile + RowTile::kBytes + block / kBlocksAtOnce * ColumnTile::kBytes +
                                   ColumnTile::first_operand(lane),
                               block % kBlocksAtOnce, step);
  }
};

using QTile = QueryTile<kHdim>;
using DoutTile = QueryTile<kHdimV>;

// LDS.
constexpr int kQ = 0, kDout = kQ + QTile::kBytes;
constexpr int kDscores = kDout + DoutTile::kBytes;
constexpr int kExchange = kDscores + ScoreTile::kBytes;  // of dq: 8 sums of each lane
constexpr int kSharedBytes = kExchange + kThreads * 8 * 4;

// A lane's scores of queries that do not see its key, or that are behind the last one, become those
// of nothing.
__device__ inline void hide_unseen(f32x16& score, const KeyTask& keys, int first_query,
                                   int first_row, int lane) {
  // What a lane has in common is added to what scores are compared with: so the numbers of its
  // queries are constants, and in no registers.
  const int of_lane = query_of_score(0, lane);
  const auto query_of = [](int i) { return query_of_score(i, 0); };
  const Visibility& visibility = keys.visibility;
  if (!visibility.is_whole(first_query, first_query + kQueries - 1, first_row, first_row + 31)) {
    const int row = first_row + lane % 32;
    const int diagonal = first_query + of_lane + visibility.diagonal - row;
    const bool is_there = row < visibility.seqlen_k;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int distance = diagonal + query_of(i);  // from the key to the query's diagonal
      const bool sees =
          !kIsMasked || (distance <= visibility.left && -distance <= visibility.right);
      score[i] = is_there && sees ? score[i] : -kInfinity;
    }
  }
  // Rows behind the last one are zeros only where the stride leads there: that of a single row may
  // be anything, and that of an expanded tensor is 0.
  const int queries_left = keys.task.queries - first_query;
  if (queries_left < kQueries) {
    const int of_lane_left = queries_left - of_lane;
#pragma unroll
    for (int i = 0; i < 16; ++i) score[i] = query_of(i) < of_lane_left ? score[i] : -kInfinity;
  }
}

__device__ inline void make_gradients(const KeyTask& keys, Lds<char> lds, int thread) {
  const int lane = thread % 64;
  const int wave = __builtin_amdgcn_readfirstlane(thread / 64);
  const int first_row = keys.first_key + wave * 32, row = first_row + lane % 32;
  const int key = wave * 32 + lane % 32;
  const float scale = keys.a.scale_log2;
  u32x4 own_keys[kSteps], own_values[kStepsV];
  load_own(own_keys, keys.keys().from(first_row), lane);
  load_own(own_values, keys.values().from(first_row), lane);
  // Of dq: the column with all keys, and the one with half of them; of this the queries whose sums
  // the wave adds up are the first half of what it multiplies.
  const int is_second = wave % 2, half = is_second * kHalfSteps, first_own = is_second * 16;
  const int columns[2] = {wave * 32 + lane % 32, (kDqWaves + wave / 2) * 32 + lane % 32};
  u32x4 column[kKeySteps], half_column[kHalfSteps];
  load_column(column, keys.keys().from(keys.first_key), columns[0], lane);
  load_column(half_column, keys.keys().from(keys.first_key + 16 * half), columns[1], lane);
  f32x16 dk[kBlocks], dv[kBlocksV];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) dk[block] = f32x16(0);
#pragma unroll
  for (int block = 0; block < kBlocksV; ++block) dv[block] = f32x16(0);

  // Of tiles before the first, which go nowhere.
  const auto nowhere = __builtin_amdgcn_make_buffer_rsrc(nullptr, 0, 0, kRawBuffer);
  DqTile dq = {f32x16(0), nowhere};
  f32x4 shared_dq[2];  // of queries first_own and on
  constexpr int kSums = 16 + 8;
  const auto add_dq = [&](int i) {
    if (i < 16) dq.add(i, columns[0], lane);
    else add_to_dq(dq.to, shared_dq[i / 4 % 2][i % 4], i % 8, first_own * kHdim + columns[1], lane);
  };
  const Lds<f32x4> exchange = (Lds<f32x4>)(lds + kExchange) + lane;
  const auto send = [&](int i, f32x4 sums) { exchange[wave * 128 + i * 64] = sums; };
  const auto receive = [&] {
#pragma unroll
    for (int i = 0; i < 2; ++i) shared_dq[i] += exchange[(wave ^ 1) * 128 + i * 64];
  };
#pragma unroll
  for (int i = 0; i < 2; ++i) send(i, shared_dq[i] = f32x4(0));

  QTile::Registers q_registers;
  DoutTile::Registers dout_registers;
  f32x16 lse, product;  // product: of dout and v, less delta
  const auto between_of = [&](const Walk& at) {
    return Between::of(keys.a, keys.task.batch, at.head, keys.task.sequence);
  };
  const auto load_lse = [&](const Walk& at) {
    lse = load_statistics(statistics_of(between_of(at).lse, at.first_query(), keys.task.queries), 0,
                          lane);
  };
  const auto load_delta = [&](const Walk& at) {
    product = load_statistics(
        statistics_of(between_of(at).delta, at.first_query(), keys.task.queries), 0, lane);
  };
  Walk walk = keys.walk, next_walk = walk;  // the tile at hand, the one behind it
  Rows next_q, next_dout;
  constexpr int kLoads = QTile::kLoads + DoutTile::kLoads;
  const auto loads_of_next = [&] {
    return
        [&, q = QTile::source(next_q, thread), dout = DoutTile::source(next_dout, thread)](int n) {
          if (n < QTile::kLoads) q.load(q_registers, n);
          else dout.load(dout_registers, n - QTile::kLoads);
        };
  };
  constexpr int kStores = QTile::kStores + DoutTile::kStores;
  const auto store = [&](int n) {
    if (n < QTile::kStores) QTile::store(lds + kQ, q_registers, thread, n);
    else DoutTile::store(lds + kDout, dout_registers, thread, n - QTile::kStores);
  };
  const auto look_ahead = [&] {
    next_q = settled(keys.queries_of(next_walk));
    next_dout = settled(keys.douts_of(next_walk));
  };
  if (!walk.has_ended()) {
    look_ahead();
    const auto load = loads_of_next();
#pragma unroll
    for (int n = 0; n < kLoads; ++n) load(n);
    load_lse(walk);
    load_delta(walk);
    next_walk.advance();
    look_ahead();
#pragma unroll
    for (int n = 0; n < kStores; ++n) store(n);
  }
  Turn turn;
  if constexpr (kIsDeterministic) turn = Turn::of(keys, wave);
  int tile = 0, seen = 0;  // where kernels are deterministic
  while (!walk.has_ended()) {
    barrier();
    if constexpr (kIsDeterministic) turn.wait(tile - 1, seen);
    f32x16 score = f32x16(0);
    multiply_in_turn<kSteps>([&](int n) { return QTile::of_rows(lds + kQ, n, lane); },
                             [&](int n, u32x4 q) {
                               score = Dtype::multiply(q, own_keys[n], score);
                               share<16, kSteps>(n, add_dq);
                             });
    const int first_query = walk.first_query();
    hide_unseen(score, keys, first_query, first_row, lane);
    receive();
    u32x4 probability[kOperands], dscore[kOperands];
    multiply_in_turn<kStepsV>(
        [&](int n) { return DoutTile::of_rows(lds + kDout, n, lane); },
        [&](int n, u32x4 dout) {
          product = Dtype::multiply(dout, own_values[n], product);
          share<kSums - 16, kStepsV>(n, [&](int i) { add_dq(16 + i); });
          share<8, kStepsV>(n, [&](int pair) {
            const int i = 2 * pair;
            const float first = __builtin_fmaf(score[i], scale, -lse[i]);
            const float second = __builtin_fmaf(score[i + 1], scale, -lse[i + 1]);
            probability[pair / 4][pair % 4] = Dtype::template pack<kRounding>(
                __builtin_amdgcn_exp2f(first), __builtin_amdgcn_exp2f(second));
          });
        });
    if constexpr (kIsDeterministic) seen = turn.seen();
    const auto load = loads_of_next();
    constexpr int kProductsV = kOperands * kBlocksV, kProducts = kProductsV + kOperands * kBlocks;
    multiply_in_turn<kProducts>(
        [&](int n) {
          if (n < kProductsV)
            return DoutTile::of_columns(lds + kDout, n % kBlocksV, n / kBlocksV, lane);
          n -= kProductsV;
          return QTile::of_columns(lds + kQ, n % kBlocks, n / kBlocks, lane);
        },
        [&](int n, u32x4 operand) {
          share<kLoads, kProducts>(n, load);
          if (n < kProductsV) {
            f32x16& sum = dv[n % kBlocksV];
            sum = Dtype::multiply(operand, probability[n / kBlocksV], sum);
            share<8, kProductsV>(n, [&](int pair) {
              const int i = 2 * pair;
              const f32x2 p = widened(probability[pair / 4][pair % 4]);
              const unsigned both =
                  Dtype::template pack<kRounding>(p.x * product[i], p.y * product[i + 1]);
              dscore[pair / 4][pair % 4] = both;
#pragma unroll
              for (int j = 0; j < 2; ++j) {
                const int query = query_of_score(i + j, lane);
                *(Lds<unsigned short>)(lds + kDscores + ScoreTile::place(query, key / 8) +
                                       key % 8 * 2) = both >> j * 16;
              }
            });
          } else {
            n -= kProductsV;
            f32x16& sum = dk[n % kBlocks];
            sum = Dtype::multiply(operand, dscore[n / kBlocks], sum);
          }
        });
    barrier();
    const auto rows = rows_of_dq(between_of(walk).dq, first_query, keys.task.queries);
    f32x16 sums[2] = {f32x16(0), f32x16(0)};
    const Lds<const char> dscores = lds + kDscores + ScoreTile::first_operand(lane);
    const Lds<const char> half_dscores =
        lds + kDscores + ScoreTile::first_operand(opaque(lane) ^ first_own);
    constexpr int kProductsDq = kKeySteps + kHalfSteps;
    multiply_in_turn<kProductsDq>(
        [&](int n) {
          if (n < kKeySteps) return ScoreTile::operand(dscores, 0, n);
          return ScoreTile::operand(half_dscores, 0, half + n - kKeySteps);
        },
        [&](int n, u32x4 operand) {
          if (n < kKeySteps) sums[0] = Dtype::multiply(operand, column[n], sums[0]);
          else sums[1] = Dtype::multiply(operand, half_column[n - kKeySteps], sums[1]);
          // As early as can be: what is stored leaves registers to others.
          if (n < kKeySteps) share<kStores, kKeySteps>(n, store);
        });
    // What has been stored was loaded after the last tile's sums had gone to memory.
    if constexpr (kIsDeterministic) turn.end<0>(tile++, lane);
    load_lse(next_walk);
    load_delta(next_walk);
    // Here: nobody asks for them before the next barrier, behind which they would be made.
    asm volatile("" : "+v"(sums[0]), "+v"(sums[1]));
    dq = {sums[0], rows};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int first = 4 * i, other = 8 + first;
      shared_dq[i] =
          f32x4{sums[1][first], sums[1][first + 1], sums[1][first + 2], sums[1][first + 3]};
      send(i, f32x4{sums[1][other], sums[1][other + 1], sums[1][other + 2], sums[1][other + 3]});
    }
    walk = next_walk;
    next_walk.advance();
    look_ahead();
  }
  barrier();
  receive();
  const bool has_tiles = tile > 0;
  if (kIsDeterministic && has_tiles) turn.wait(tile - 1, turn.seen());
#pragma unroll
  for (int i = 0; i < kSums; ++i) add_dq(i);
  if (kIsDeterministic && has_tiles) turn.end<0>(tile, lane);
  const GradientTensors& g = keys.a.gradients;
  const auto to = [&](Global<char> gradient, const TensorStrides& strides) {
    return rows_of(gradient, strides, keys.task.batch, keys.task.head, keys.task.sequence.k_start,
                   keys.task.sequence.seqlen_k);
  };
  store_gradient(dv, 1, to(g.dv, g.dv_strides), row, lane);
  store_gradient(dk, scale * kLn2, to(g.dk, g.dk_strides), row, lane);
}

__global__ void gradients(ReadyBackwardArguments) asm(KERNEL);

__global__
    __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads), amdgpu_waves_per_eu(1, 1))) void
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
  // The compiler has to know that it is not negative, or numbers made of it take more registers.
  const unsigned thread = opaque(__builtin_amdgcn_workitem_id_x());
  make_gradients(keys, (Lds<char>)lds, thread % kThreads);
}
