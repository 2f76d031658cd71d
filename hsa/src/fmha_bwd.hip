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
// The order in which workgroups add to dq is open, and with it the last bits of it.
//
// Set by the build: DTYPE (BF16 or FP16), HDIM, MASKED, GROUP, ROUNDING; KERNEL, ROW_SUMS and
// ROUND_DQ (symbols).
#include "attention.h"
#include "backward_arguments.h"
#include "workgroups.h"

constexpr int kHdim = HDIM;
constexpr bool kIsMasked = MASKED, kGroupMode = GROUP;
constexpr Rounding kRounding = Rounding::ROUNDING;
using Dtype = DTYPE;
constexpr int kKeys = 128, kQueries = 32;  // of a workgroup; of a tile
constexpr int kRoleWaves = kKeys / 32, kRoleThreads = 64 * kRoleWaves;
constexpr int kThreads = 2 * kRoleThreads;
#if defined(__gfx950__)
constexpr int kBankChunks = 16;  // 64 banks
#else
constexpr int kBankChunks = 8;  // 32 banks
#endif

using RowTile = KeyTile<kQueries, kHdim, kRoleThreads, kBankChunks>;
using ColumnTile = ValueTile<kQueries, kHdim, kRoleThreads, kBankChunks>;
using ScoreTile = KeyTile<kQueries, kKeys, kRoleThreads, kBankChunks>;
constexpr int kDqEarly = 8;  // values of a tile of dq that go to memory between the same barriers
constexpr int kSteps = kHdim / 16, kBlocks = kHdim / 32, kKeySteps = kKeys / 16;
static_assert(kBlocks == kRoleWaves, "a gradient wave has 32 columns of dq");

// LDS.
constexpr int kQRows = 0, kDoutRows = kQRows + RowTile::kBytes;
constexpr int kQColumns = kDoutRows + RowTile::kBytes;
constexpr int kDoutColumns = kQColumns + ColumnTile::kBytes;
constexpr int kProbabilities = kDoutColumns + ColumnTile::kBytes;
constexpr int kProbabilityBytes = 32;  // of a lane
constexpr int kDscores = kProbabilities + kRoleThreads * kProbabilityBytes;
constexpr int kStatistics = kDscores + ScoreTile::kBytes;
// The lse and delta of a tile, and of the next one.
constexpr int kStatisticBytes = 2 * kQueries * 4;
constexpr int kSharedBytes = kStatistics + 2 * kStatisticBytes;

constexpr float kLog2e = 1.4426950408889634f;

constexpr unsigned kRawBuffer = 0x27000;  // 32-bit elements; no swizzle

__device__ inline int larger(int a, int b) { return a > b ? a : b; }

// ---- What a workgroup has to do -----------------------------------------------------------------

// Rows of its own, and what they belong to.
struct Task {
  unsigned batch, head;  // of its own: a query head or a key head
  unsigned tile;
  Sequence sequence;
  int queries;  // that are computed
};

// Workgroups go to the XCDs in turn, and there are as many along x as XCDs or groups of them. So an
// XCD, which has an L2 cache of its own, takes one head after the other, with all of its tiles: z
// counts the heads of an XCD and y the tiles.
__device__ inline Task task_of(const BackwardArguments& a) {
  const unsigned line =
      __builtin_amdgcn_workgroup_id_x() * a.xcd_lines + __builtin_amdgcn_workgroup_id_z();
  const Quotient of_line = divide(line, a.line_heads);
  const Sequence sequence = sequence_of<kGroupMode>(a.attention, of_line.value);
  return {of_line.value, of_line.remainder, __builtin_amdgcn_workgroup_id_y(), sequence,
          computed_queries<kGroupMode>(a.attention, sequence)};
}

__device__ inline Rows rows_of(Global<const char> tensor, const TensorStrides& strides,
                               unsigned long batch, unsigned long head, unsigned long start,
                               int count) {
  return {tensor + batch * strides.batch + head * strides.head + start * strides.seq,
          static_cast<unsigned>(strides.seq), count};
}

// Of the queries of one sequence and head, what the kernels leave for each other.
struct Between {
  Global<float> lse;    // that of scores, in powers of two; infinite where a query sees nothing
  Global<float> delta;  // less the gradient of the lse
  Global<float> dq;     // without the scale

  __device__ static Between of(const BackwardArguments& a, unsigned long batch, unsigned head,
                               const Sequence& sequence) {
    const unsigned long stride = a.attention.lse_head;
    const unsigned long at = kGroupMode ? head * stride + sequence.q_start * 4ul
                                        : (batch * a.attention.heads.divisor + head) * stride;
    const GradientTensors& g = a.gradients;
    return {(Global<float>)((Global<char>)g.lse_log2 + at),
            (Global<float>)((Global<char>)g.delta + at),
            (Global<float>)((Global<char>)g.dq_sums + at * kHdim)};
  }
};

__device__ inline f32x2 widened(unsigned pair) {
  if constexpr (__is_same(Dtype, BF16)) {
    return {bits_as<float>(pair << 16), bits_as<float>(pair & 0xffff0000)};
  } else {
    const f16x2 halves = bits_as<f16x2>(pair);
    return {halves.x, halves.y};
  }
}

// ---- Before and after ---------------------------------------------------------------------------

// Lanes of 16 bytes each have a row together, and a workgroup of these kernels kTileRows rows.
constexpr int kRowLanes = kHdim / 8, kTileRows = 128, kEdgeThreads = 256;
constexpr int kRowsAtOnce = kEdgeThreads / kRowLanes, kPasses = kTileRows / kRowsAtOnce;

// The sum over the lanes that have a row together.
__device__ inline float sum_of_row(float x) {
  static_assert(kRowLanes == 16);
#define ADD_ROTATED(lanes) \
  x += bits_as<float>(     \
      __builtin_amdgcn_update_dpp(0, bits_as<int>(x), 0x120 | lanes, 0xf, 0xf, false))
  ADD_ROTATED(8);
  ADD_ROTATED(4);
  ADD_ROTATED(2);
  ADD_ROTATED(1);
#undef ADD_ROTATED
  return x;
}

__global__ void row_sums(BackwardArguments) asm(ROW_SUMS);

__global__ __attribute__((amdgpu_flat_work_group_size(kEdgeThreads, kEdgeThreads))) void row_sums(
    BackwardArguments a) {
  const Task task = task_of(a);
  const int first_row = task.tile * kTileRows;
  if (first_row >= task.queries) return;
  const GradientTensors& g = a.gradients;
  const int thread = __builtin_amdgcn_workitem_id_x(), lane = thread % kRowLanes;
  const unsigned long batch = task.batch, head = task.head;
  const Arguments& f = a.attention;
  const Rows out = {f.out + batch * f.out_batch + head * f.out_head +
                        static_cast<unsigned long>(task.sequence.q_start) * f.out_seq,
                    f.out_seq, task.queries};
  const Rows dout =
      rows_of(g.dout, g.dout_strides, batch, head, task.sequence.q_start, task.queries);
  const Between between = Between::of(a, batch, task.head, task.sequence);
  const auto row_of = [&](int pass) { return first_row + pass * kRowsAtOnce + thread / kRowLanes; };
  const auto load = [&](const Rows& rows, int pass) {
    const unsigned long row = smaller(row_of(pass), task.queries - 1);
    return *(Global<const u32x4>)(rows.base + row * rows.stride + lane * 16);
  };
  u32x4 o[kPasses], d[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    o[pass] = load(out, pass);
    d[pass] = load(dout, pass);
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    f32x2 sums = {0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) sums += widened(o[pass][i]) * widened(d[pass][i]);
    float delta = sum_of_row(sums.x + sums.y);
    const int row = row_of(pass);
    if (row >= task.queries) continue;
    const Global<u32x4> dq =
        (Global<u32x4>)(between.dq + static_cast<unsigned long>(row) * kHdim + lane * 4);
    dq[0] = u32x4(0);
    dq[kRowLanes] = u32x4(0);
    if (lane != 0) continue;
    const unsigned long query = task.sequence.q_start + static_cast<unsigned long>(row);
    const TensorStrides& of_lse = g.lse_strides;
    const TensorStrides& of_dlse = g.dlse_strides;
    const float lse =
        g.lse[batch * of_lse.batch + head * of_lse.head + query * of_lse.seq] * kLog2e;
    if (g.dlse) delta -= g.dlse[batch * of_dlse.batch + head * of_dlse.head + query * of_dlse.seq];
    // They may be anything where a query sees nothing.
    const bool sees_nothing = lse == -kInfinity || lse == kInfinity;
    between.lse[row] = sees_nothing ? kInfinity : lse;
    between.delta[row] = sees_nothing ? 0 : delta;
  }
}

__global__ void round_dq(BackwardArguments) asm(ROUND_DQ);

__global__ __attribute__((amdgpu_flat_work_group_size(kEdgeThreads, kEdgeThreads))) void round_dq(
    BackwardArguments a) {
  const Task task = task_of(a);
  const int first_row = task.tile * kTileRows;
  if (first_row >= task.queries) return;
  const GradientTensors& g = a.gradients;
  const int thread = __builtin_amdgcn_workitem_id_x(), lane = thread % kRowLanes;
  const Between between = Between::of(a, task.batch, task.head, task.sequence);
  const Rows dq =
      rows_of(g.dq, g.dq_strides, task.batch, task.head, task.sequence.q_start, task.queries);
  const float scale = a.attention.scale_log2 * kLn2;
  const auto row_of = [&](int pass) { return first_row + pass * kRowsAtOnce + thread / kRowLanes; };
  f32x4 sums[kPasses][2];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const unsigned long row = smaller(row_of(pass), task.queries - 1);
    const Global<const f32x4> from = (Global<const f32x4>)(between.dq + row * kHdim + lane * 8);
    sums[pass][0] = from[0];
    sums[pass][1] = from[1];
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = row_of(pass);
    if (row >= task.queries) continue;
    const f32x4 first = sums[pass][0] * scale, second = sums[pass][1] * scale;
    *(Global<u32x4>)((Global<char>)dq.base + static_cast<unsigned long>(row) * dq.stride +
                     lane * 16) = u32x4{Dtype::template pack<kRounding>(first.x, first.y),
                                        Dtype::template pack<kRounding>(first.z, first.w),
                                        Dtype::template pack<kRounding>(second.x, second.y),
                                        Dtype::template pack<kRounding>(second.z, second.w)};
  }
}

// ---- The gradients ------------------------------------------------------------------------------

// Which keys a query sees.
struct Visibility {
  int seqlen_k;
  int diagonal;  // the key that lies on the diagonal with query 0
  int left, right;

  __device__ static Visibility of(const BackwardArguments& a, const Sequence& sequence) {
    const Modifiers& m = a.modifiers;
    return {sequence.seqlen_k, m.is_bottom_right ? sequence.seqlen_k - sequence.seqlen_q : 0,
            m.window_left, m.window_right};
  }

  __device__ int first_key(int query) const {
    return kIsMasked ? larger(query + diagonal - left, 0) : 0;
  }
  __device__ int last_key(int query) const {
    return kIsMasked ? smaller(query + diagonal + right, seqlen_k - 1) : seqlen_k - 1;
  }
  // Whether each of these queries sees all of these keys.
  __device__ bool is_whole(int first_query, int last_query, int first, int last) const {
    return first >= first_key(last_query) && last <= last_key(first_query);
  }
};

// The tiles of queries that see some of a workgroup's keys, of one query head after the other.
struct Walk {
  int begin, end;  // of tiles
  unsigned heads_left, head;
  int tile;

  __device__ static Walk of(const Visibility& visibility, int queries, int first_key, int last_key,
                            unsigned first_head, unsigned heads) {
    int begin = 0, last = queries - 1;
    if (kIsMasked) {
      begin = larger(first_key - visibility.diagonal - visibility.right, 0) / kQueries;
      last = smaller(last_key - visibility.diagonal + visibility.left, last);
    }
    const int end = last < 0 ? 0 : last / kQueries + 1;
    return {begin, end, begin < end ? heads : 0, first_head, begin};
  }

  __device__ bool has_ended() const { return heads_left == 0; }
  __device__ int first_query() const { return tile * kQueries; }

  // Behind the end it stays where it is.
  __device__ void advance() {
    const bool is_last = tile + 1 == end;
    tile = is_last ? begin : tile + 1;
    heads_left -= is_last && heads_left > 0;
    head += is_last && heads_left > 0;
    // The compiler would not see that it is the same for all lanes.
    tile = __builtin_amdgcn_readfirstlane(tile);
    head = __builtin_amdgcn_readfirstlane(head);
    heads_left = __builtin_amdgcn_readfirstlane(heads_left);
  }
};

// Computed here and now, not where the compiler would like to: behind a barrier, for instance,
// where all wait for it.
__device__ inline Rows settled(Rows rows) {
  asm volatile("" : "+s"(rows.base), "+s"(rows.count));
  return rows;
}

// Operands from LDS, kEnd of them by read(n), a few of which are read ahead of the products that
// take them. In this order: left alone, the compiler would read each when it is needed.
template <int kEnd, class Read, class Multiply>
__device__ inline void multiply_in_turn(Read read, Multiply multiply) {
  constexpr int kAhead = kEnd < 3 ? kEnd : 3;
  u32x4 ahead[kAhead];
#pragma unroll
  for (int n = 0; n < kAhead; ++n) ahead[n] = read(n);
#pragma unroll
  for (int n = 0; n < kEnd; ++n) {
    multiply(n, ahead[n % kAhead]);
    if (n + kAhead < kEnd) ahead[n % kAhead] = read(n + kAhead);
    __builtin_amdgcn_sched_barrier(0);
  }
}

// The part of kAll things that goes with number n of kCount: calls each(i) for them.
template <int kAll, int kCount, class Each>
__device__ inline void share(int n, Each each) {
#pragma unroll
  for (int i = n * kAll / kCount; i < (n + 1) * kAll / kCount; ++i) each(i);
}

// The keys of a workgroup and what there is to do with them.
struct KeyTask {
  const BackwardArguments& a;
  const Task& task;
  Visibility visibility;
  Walk walk;
  int first_key;  // of the workgroup

  __device__ Rows queries_of(const Walk& at) const {
    const Arguments& f = a.attention;
    const unsigned long batch = task.batch, head = at.head, start = task.sequence.q_start;
    const Rows q = {f.q + batch * f.q_batch + head * f.q_head + start * f.q_seq, f.q_seq,
                    task.queries};
    return q.from(at.has_ended() ? task.queries : at.first_query());
  }
  __device__ Rows douts_of(const Walk& at) const {
    const GradientTensors& g = a.gradients;
    const Rows dout =
        rows_of(g.dout, g.dout_strides, task.batch, at.head, task.sequence.q_start, task.queries);
    return dout.from(at.has_ended() ? task.queries : at.first_query());
  }
  __device__ Rows keys() const {
    const Arguments& f = a.attention;
    const unsigned long batch = task.batch, head = task.head, start = task.sequence.k_start;
    return {f.k + batch * f.k_batch + head * f.k_head + start * f.k_seq, f.k_seq,
            task.sequence.seqlen_k};
  }
  __device__ Rows values() const {
    const Arguments& f = a.attention;
    const unsigned long batch = task.batch, head = task.head, start = task.sequence.k_start;
    return {f.v + batch * f.v_batch + head * f.v_head + start * f.v_seq, f.v_seq,
            task.sequence.seqlen_k};
  }
};

// Operands of the 32 rows that begin with `rows`; those behind the last one are zeros.
__device__ inline void load_own(u32x4 (&to)[kSteps], const Rows& rows, int lane) {
  const auto buffer = buffer_of<32, kHdim * 2>(rows);
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    to[step] = __builtin_amdgcn_raw_buffer_load_b128(
        buffer, lane % 32 * rows.stride + 32 * step + lane / 32 * 16, 0, 0);
}

// Of a lane's column, the keys in the order in which ScoreTile has them.
__device__ inline void load_column(u32x4 (&to)[kKeySteps], const Rows& keys, int column, int lane) {
  const auto buffer = buffer_of<kKeys, kHdim * 2>(keys);
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    unsigned short values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int key = 16 * step + lane / 32 * 8 + i;
      values[i] =
          __builtin_amdgcn_raw_buffer_load_b16(buffer, key * keys.stride + column * 2, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) to[step][i] = values[2 * i] | values[2 * i + 1] << 16;
  }
}

// A lane has four values that follow each other in every eight of its row.
__device__ inline void store_gradient(const f32x16 (&gradient)[kBlocks], float factor,
                                      const Rows& rows, int row, int lane) {
  if (row >= rows.count) return;
  const Global<char> to = (Global<char>)rows.base + static_cast<unsigned long>(row) * rows.stride;
#pragma unroll
  for (int group = 0; group < 4 * kBlocks; ++group) {
    const int first = 8 * group + lane / 32 * 4, i = group % 4 * 4;
    const f32x16& x = gradient[group / 4];
    *(Global<u32x2>)(to + first * 2) =
        u32x2{Dtype::template pack<kRounding>(x[i] * factor, x[i + 1] * factor),
              Dtype::template pack<kRounding>(x[i + 2] * factor, x[i + 3] * factor)};
  }
}

// Those of a lane's 16 queries of a tile.
__device__ inline f32x16 statistics_of(Lds<const char> from, int lane) {
  f32x16 result;
#pragma unroll
  for (int quad = 0; quad < 4; ++quad) {
    const f32x4 four = *(Lds<const f32x4>)(from + (8 * quad + lane / 32 * 4) * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) result[4 * quad + i] = four[i];
  }
  return result;
}

// The query of a lane's score i, counted from the tile's first one.
__device__ inline int query_of_score(int i, int lane) { return i / 4 * 8 + lane / 32 * 4 + i % 4; }

// The probability waves: they also bring all tiles to LDS.
__device__ inline void make_probabilities(const KeyTask& keys, Lds<char> lds, int thread) {
  const int lane = thread % 64;
  const int wave = __builtin_amdgcn_readfirstlane(thread / 64);
  const int first_row = keys.first_key + wave * 32, row = first_row + lane % 32;
  const float scale = keys.a.attention.scale_log2;
  u32x4 own[kSteps];
  load_own(own, keys.keys().from(first_row), lane);
  f32x16 dv[kBlocks];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) dv[block] = f32x16(0);

  RowTile::Registers q_rows, dout_rows;
  ColumnTile::Registers q_columns, dout_columns;
  // The lse and delta of a tile, by 64 threads; behind the last query those of a query that sees
  // nothing.
  const bool has_lse = thread % 64 < kQueries;
  const auto load_statistic = [&](const Walk& at) {
    const Between between = Between::of(keys.a, keys.task.batch, at.head, keys.task.sequence);
    const int query = smaller(at.first_query() + thread % kQueries, keys.task.queries - 1);
    return (has_lse ? between.lse : between.delta)[query];
  };
  const auto store_statistic = [&](float statistic, const Walk& at, int buffer) {
    const int query = at.first_query() + thread % kQueries;
    if (query >= keys.task.queries) statistic = has_lse ? kInfinity : 0;
    if (thread < 64)
      ((Lds<float>)(lds + kStatistics + buffer))[thread] = has_lse ? statistic : -statistic;
  };
  const auto store_rows = [&] {
    RowTile::store(lds + kQRows, q_rows, thread);
    RowTile::store(lds + kDoutRows, dout_rows, thread);
  };
  const auto store_columns = [&] {
    ColumnTile::store(lds + kQColumns, q_columns, thread);
    ColumnTile::store(lds + kDoutColumns, dout_columns, thread);
  };
  Walk walk = keys.walk, next_walk = walk;  // the tile at hand, the one behind it
  float next_statistic = 0;
  Rows next_q, next_dout;
  f32x16 lse;
  int buffer = 0;
  if (!walk.has_ended()) {
    const Rows q = keys.queries_of(walk), dout = keys.douts_of(walk);
#pragma unroll
    for (int n = 0; n < RowTile::kLoads; ++n) {
      RowTile::source(q, thread).load<false>(q_rows, n);
      RowTile::source(dout, thread).load<false>(dout_rows, n);
    }
#pragma unroll
    for (int n = 0; n < ColumnTile::kLoads; ++n) {
      ColumnTile::source(q, thread).load<false>(q_columns, n);
      ColumnTile::source(dout, thread).load<false>(dout_columns, n);
    }
    const float statistic = load_statistic(walk);
    next_walk.advance();
    next_statistic = load_statistic(next_walk);
    next_q = keys.queries_of(next_walk);
    next_dout = keys.douts_of(next_walk);
    store_rows();
    store_statistic(statistic, walk, 0);
    barrier();
    lse = statistics_of(lds + kStatistics, lane);
  }
  while (!walk.has_ended()) {
    barrier();
    __builtin_amdgcn_s_setprio(2);
    f32x16 score = f32x16(0);
    const Lds<const char> q_operands = lds + kQRows + RowTile::first_operand(lane);
    const RowTile::Source q_source = RowTile::source(next_q, thread);
    const RowTile::Source dout_source = RowTile::source(next_dout, thread);
    multiply_in_turn<kSteps>([&](int n) { return RowTile::operand(q_operands, 0, n); },
                             [&](int n, u32x4 q) {
                               score = Dtype::multiply(q, own[n], score);
                               if (n < RowTile::kLoads) q_source.load<false>(q_rows, n);
                               else if (n < 2 * RowTile::kLoads)
                                 dout_source.load<false>(dout_rows, n - RowTile::kLoads);
                             });
    // Where both have something for the vector unit, the other's products come first.
    __builtin_amdgcn_s_setprio(0);
    const int first_query = walk.first_query();
    if (!keys.visibility.is_whole(first_query, first_query + kQueries - 1, first_row,
                                  first_row + 31)) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int query = first_query + query_of_score(i, lane);
        const bool sees =
            row >= keys.visibility.first_key(query) && row <= keys.visibility.last_key(query);
        score[i] = sees ? score[i] : -kInfinity;
      }
    }
    u32x4 probability[2];
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      const float first = __builtin_fmaf(score[i], scale, -lse[i]);
      const float second = __builtin_fmaf(score[i + 1], scale, -lse[i + 1]);
      probability[i / 8][i % 8 / 2] = Dtype::template pack<kRounding>(
          __builtin_amdgcn_exp2f(first), __builtin_amdgcn_exp2f(second));
    }
    const Lds<u32x4> exchange = (Lds<u32x4>)(lds + kProbabilities) + wave * 128 + lane;
    exchange[0] = probability[0];
    exchange[64] = probability[1];
    buffer ^= kStatisticBytes;
    store_statistic(next_statistic, next_walk, buffer);
    store_columns();
    barrier();
    const Lds<const char> dout_operands = lds + kDoutColumns + ColumnTile::first_operand(lane);
    const ColumnTile::Source q_column_source = ColumnTile::source(next_q, thread);
    const ColumnTile::Source dout_column_source = ColumnTile::source(next_dout, thread);
    multiply_in_turn<2 * kBlocks>(
        [&](int n) { return ColumnTile::operand(dout_operands, n % kBlocks, n / kBlocks); },
        [&](int n, u32x4 dout) {
          f32x16& sum = dv[n % kBlocks];
          sum = Dtype::multiply(dout, probability[n / kBlocks], sum);
          if (n < ColumnTile::kLoads) q_column_source.load<false>(q_columns, n);
          else if (n < 2 * ColumnTile::kLoads)
            dout_column_source.load<false>(dout_columns, n - ColumnTile::kLoads);
        });
    store_rows();
    lse = statistics_of(lds + kStatistics + buffer, lane);
    walk = next_walk;
    next_walk.advance();
    next_statistic = load_statistic(next_walk);
    next_q = settled(keys.queries_of(next_walk));
    next_dout = settled(keys.douts_of(next_walk));
  }
  barrier();
  const GradientTensors& g = keys.a.gradients;
  const Rows to = rows_of(g.dv, g.dv_strides, keys.task.batch, keys.task.head,
                          keys.task.sequence.k_start, keys.task.sequence.seqlen_k);
  store_gradient(dv, 1, to, row, lane);
}

// A wave's 32 columns of a tile of dq, on their way to memory.
struct DqTile {
  f32x16 values;
  __amdgpu_buffer_rsrc_t to;  // its rows, as many as there are

  // Adds value i of each lane.
  __device__ void add(int i, int column, int lane) const {
    __builtin_amdgcn_raw_ptr_buffer_atomic_fadd_f32(
        values[i], to, (query_of_score(0, lane) * kHdim + column) * 4 + i % 4 * kHdim * 4,
        i / 4 * 8 * kHdim * 4, 0);
  }
};

// Where the tile goes that begins with `first_query`, as far as there are so many queries.
__device__ inline __amdgpu_buffer_rsrc_t dq_rows(Global<float> sums, int first_query, int queries) {
  const int rows = smaller(queries - first_query, kQueries);
  return __builtin_amdgcn_make_buffer_rsrc(
      (void*)(sums + static_cast<unsigned long>(first_query) * kHdim), 0, rows * kHdim * 4,
      kRawBuffer);
}

// The gradient waves. A tile of dq has its products one tile late, and goes to memory between them
// and the next ones, as evenly as can be: a compute unit has only a share of what adds.
__device__ inline void make_gradients(const KeyTask& keys, Lds<char> lds, int thread) {
  const int lane = thread % 64;
  const int wave = __builtin_amdgcn_readfirstlane(thread / 64);
  const int first_row = keys.first_key + wave * 32, row = first_row + lane % 32;
  const int dq_column = wave * 32 + lane % 32;
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
  for (int i = 0; i < ScoreTile::kBytes / 16 / kRoleThreads; ++i)
    all_dscores[i * kRoleThreads + thread] = u32x4(0);

  const Lds<const char> dscore_operands = lds + kDscores + ScoreTile::first_operand(lane);
  const Lds<const char> dout_operands = lds + kDoutRows + RowTile::first_operand(lane);
  const Lds<const char> q_operands = lds + kQColumns + ColumnTile::first_operand(lane);
  const auto statistics = [&](int buffer) {
    return statistics_of(lds + kStatistics + buffer + kQueries * 4, lane);
  };
  const int key = wave * 32 + lane % 32;
  int buffer = 0;
  f32x16 product;  // of dout and v, less delta
  Walk walk = keys.walk;
  if (!walk.has_ended()) {
    barrier();
    product = statistics(0);
  }
  __builtin_amdgcn_s_setprio(1);
  while (!walk.has_ended()) {
    barrier();
    f32x16 next_dq = f32x16(0);
    multiply_in_turn<kSteps + kKeySteps>(
        [&](int n) {
          return n < kSteps ? RowTile::operand(dout_operands, 0, n)
                            : ScoreTile::operand(dscore_operands, 0, n - kSteps);
        },
        [&](int n, u32x4 operand) {
          if (n < kSteps) product = Dtype::multiply(operand, own[n], product);
          else next_dq = Dtype::multiply(operand, column[n - kSteps], next_dq);
          // Here: nobody asks for it before the next barrier, behind which it would be made.
          asm volatile("" : "+v"(next_dq));
          share<16 - kDqEarly, kSteps + kKeySteps>(
              n, [&](int i) { dq.add(kDqEarly + i, dq_column, lane); });
        });
    dq = {next_dq, last_rows};
    barrier();
    const Lds<const u32x4> exchange = (Lds<const u32x4>)(lds + kProbabilities) + wave * 128 + lane;
    const u32x4 probability[2] = {exchange[0], exchange[64]};
    u32x4 dscore[2];
    const auto make_pair = [&](int pair) {
      const int i = 2 * pair;
      const f32x2 p = widened(probability[i / 8][i % 8 / 2]);
      const unsigned both = Dtype::template pack<kRounding>(p.x * product[i], p.y * product[i + 1]);
      dscore[i / 8][i % 8 / 2] = both;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int query = query_of_score(i + j, lane);
        const Lds<char> to = lds + kDscores + ScoreTile::place(query, key / 8) + key % 8 * 2;
        *(Lds<unsigned short>)to = both >> j * 16;
      }
    };
    buffer ^= kStatisticBytes;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      make_pair(pair);
      dq.add(pair, dq_column, lane);
    }
    multiply_in_turn<2 * kBlocks>(
        [&](int n) { return ColumnTile::operand(q_operands, n % kBlocks, n / kBlocks); },
        [&](int n, u32x4 q) {
          f32x16& sum = dk[n % kBlocks];
          sum = Dtype::multiply(q, dscore[n / kBlocks], sum);
          if (n < 4) make_pair(4 + n);
          if (n % 2 == 1) dq.add(4 + n / 2, dq_column, lane);
        });
    product = statistics(buffer);
    const Between between = Between::of(keys.a, keys.task.batch, walk.head, keys.task.sequence);
    last_rows = dq_rows(between.dq, walk.first_query(), keys.task.queries);
    walk.advance();
  }
  barrier();
#pragma unroll
  for (int i = kDqEarly; i < 16; ++i) dq.add(i, dq_column, lane);
  if (!keys.walk.has_ended()) {
    dq = {f32x16(0), last_rows};
    multiply_in_turn<kKeySteps>(
        [&](int n) { return ScoreTile::operand(dscore_operands, 0, n); },
        [&](int n, u32x4 dscores) { dq.values = Dtype::multiply(dscores, column[n], dq.values); });
#pragma unroll
    for (int i = 0; i < 16; ++i) dq.add(i, dq_column, lane);
  }
  const GradientTensors& g = keys.a.gradients;
  const Rows to = rows_of(g.dk, g.dk_strides, keys.task.batch, keys.task.head,
                          keys.task.sequence.k_start, keys.task.sequence.seqlen_k);
  store_gradient(dk, keys.a.attention.scale_log2 * kLn2, to, row, lane);
}

__global__ void gradients(BackwardArguments) asm(KERNEL);

__global__
    __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads), amdgpu_waves_per_eu(2, 2))) void
    gradients(BackwardArguments a) {
  alignas(1024) __shared__ char lds[kSharedBytes];
  const Task task = task_of(a);
  const int first_key = task.tile * kKeys;
  if (first_key >= task.sequence.seqlen_k) return;
  const unsigned heads = a.attention.gqa.divisor;
  const Visibility visibility = Visibility::of(a, task.sequence);
  const int last_key = smaller(first_key + kKeys, task.sequence.seqlen_k) - 1;
  const KeyTask keys = {
      a, task, visibility,
      Walk::of(visibility, task.queries, first_key, last_key, task.head * heads, heads), first_key};
  const int thread = opaque(__builtin_amdgcn_workitem_id_x());
  if (__builtin_amdgcn_readfirstlane(thread) < kRoleThreads)
    make_probabilities(keys, (Lds<char>)lds, thread);
  else make_gradients(keys, (Lds<char>)lds, thread - kRoleThreads);
}
