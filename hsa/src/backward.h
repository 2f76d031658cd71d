// What backward kernels share: whose rows a workgroup has, which queries see its keys, and the two
// kernels before and after the one in the middle.
//
// Set by the build: DTYPE (BF16 or FP16), HDIM_Q, HDIM_V, MASKED, GROUP, ROUNDING, DETERMINISTIC;
// ROW_SUMS and ROUND_DQ (symbols). Set before this is included, of the kernel in the middle:
// kQueries, those of a tile; kKeys and kDqWaves, a workgroup's keys, and its waves that add to dq.
#pragma once

#include "attention.h"
#include "backward_arguments.h"
#include "workgroups.h"

constexpr int kHdim = HDIM_Q, kHdimV = HDIM_V;
constexpr bool kIsMasked = MASKED, kGroupMode = GROUP, kIsDeterministic = DETERMINISTIC;
constexpr Rounding kRounding = Rounding::ROUNDING;
using Dtype = DTYPE;

constexpr float kLog2e = 1.4426950408889634f;

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
__device__ inline Task task_of(const ReadyBackwardArguments& a, unsigned tile,
                               unsigned line_of_xcd) {
  const unsigned line = __builtin_amdgcn_workgroup_id_x() * a.xcd_lines + line_of_xcd;
  const Quotient of_line = divide(line, a.line_heads);
  const Sequence sequence = sequence_of<kGroupMode>(a, of_line.value);
  return {of_line.value, of_line.remainder, tile, sequence,
          computed_queries<kGroupMode>(a, sequence)};
}
__device__ inline Task task_of(const ReadyBackwardArguments& a) {
  return task_of(a, __builtin_amdgcn_workgroup_id_y(), __builtin_amdgcn_workgroup_id_z());
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
  Global<float> delta;  // the gradient of the lse, less delta
  Global<float> dq;     // without the scale

  __device__ static Between of(const ReadyBackwardArguments& a, unsigned long batch, unsigned head,
                               const Sequence& sequence) {
    const unsigned long stride = a.lse_head;
    const unsigned long at =
        kGroupMode ? head * stride + sequence.q_start * 4ul : (batch * a.heads_q + head) * stride;
    const GradientTensors& g = a.gradients;
    return {(Global<float>)((Global<char>)g.lse_log2 + at),
            (Global<float>)((Global<char>)g.delta + at),
            (Global<float>)((Global<char>)a.dq_sums + at * kHdim)};
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

// ---- In which order dq is added up --------------------------------------------------------------

// Where kernels are deterministic, the workgroups of a key head add to each tile of dq in the order
// of their keys. All of them go through the tiles in one order, and count those that they have
// added; one adds a tile when the one before has counted it. Every wave counts for itself: what it
// adds to has nothing to do with what the other waves add to.
//
// Workgroups take their tasks in the order in which they begin, wherever the grid has them. So they
// wait only for ones that have begun, of which the first waits for nobody: whatever order they
// begin in, and however few of them are there at a time, one can always go on.
//
// Counts go past L1 (agent scope), and what a wave's s_waitcnt has waited for, L2 has added. Nobody
// loads sums in this kernel, so no cache has to be emptied for them. Source: LLVM's "User Guide for
// AMDGPU Backend", Memory Model GFX942.
struct Turns {
  Global<unsigned> tickets;  // workgroups that have begun, of each place along x
  Global<int> added;         // tiles: for each tile of keys kDqWaves of them
  unsigned words;            // of both

  __device__ static Turns of(const ReadyBackwardArguments& a) {
    const unsigned lines = a.heads_k * a.batch;
    const unsigned tiles =
        kGroupMode ? a.heads_k * group_tiles(a) : lines * tiles_of(a.seqlen_k, kKeys);
    return {a.turns, (Global<int>)(a.turns + lines), lines + tiles * kDqWaves};
  }

  // The counts of the waves of a task.
  __device__ Global<int> added_by(const ReadyBackwardArguments& a, const Task& task) const {
    const unsigned first =
        kGroupMode ? task.head * group_tiles(a) + task.sequence.k_start / kKeys + task.batch
                   : (task.batch * a.heads_k + task.head) * tiles_of(a.seqlen_k, kKeys);
    return added + (first + task.tile) * static_cast<unsigned long>(kDqWaves);
  }

  // By a workgroup of so many threads.
  __device__ void clear(unsigned threads) const {
    for (unsigned i = __builtin_amdgcn_workitem_id_x(); i < words; i += threads) tickets[i] = 0;
  }

 private:
  // Of a key head. A sequence takes one more than there are whole ones at most.
  __device__ static unsigned group_tiles(const ReadyBackwardArguments& a) {
    return a.seqlen_k / kKeys + a.batch;
  }
};

// So many lines begin together: the first tiles of each, then the second ones. Without a mask all
// workgroups of a line begin with the same tile, and under a causal one those with later keys have
// less to do, but no less to wait for. So those of a line had better begin one after the other, and
// those with most to do first. But of few lines at a time what they read and add to is in caches.
constexpr unsigned kLinesAtOnce = 8;

// The task of the workgroup that is the next one to begin.
__device__ inline Task next_task(const ReadyBackwardArguments& a, Lds<char> lds) {
  // Where there are no queries, nothing has been set to zero, and nobody adds.
  if (a.seqlen_q == 0) return task_of(a);
  const Lds<unsigned> ticket = (Lds<unsigned>)lds;
  if (__builtin_amdgcn_workitem_id_x() == 0)
    *ticket = __hip_atomic_fetch_add(Turns::of(a).tickets + __builtin_amdgcn_workgroup_id_x(), 1u,
                                     __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  barrier();
  const unsigned rank = __builtin_amdgcn_readfirstlane(*ticket);
  barrier();
  const unsigned first_line = rank / (a.tiles * kLinesAtOnce) * kLinesAtOnce;
  const unsigned in_lines = rank - first_line * a.tiles;
  const unsigned lines_here = smaller(kLinesAtOnce, a.xcd_lines - first_line);
  // The compiler would not see that they are the same for all lanes.
  const unsigned tile = __builtin_amdgcn_readfirstlane(in_lines / lines_here);
  const unsigned line = __builtin_amdgcn_readfirstlane(first_line + in_lines % lines_here);
  return task_of(a, tile, line);
}

// ---- Before and after ---------------------------------------------------------------------------

// A workgroup of these kernels has kTileRows rows.
constexpr int kTileRows = 128, kEdgeThreads = 256;

// Lanes of kChunks times 16 bytes each have a row of kColumns values together.
template <int kColumns>
struct EdgeTile {
  static constexpr int kRowLanes = kColumns % 128 == 0 ? 16 : 8;
  static constexpr int kChunks = kColumns / 8 / kRowLanes;
  static constexpr int kRowsAtOnce = kEdgeThreads / kRowLanes, kPasses = kTileRows / kRowsAtOnce;
};

// The sum over the lanes that have a row together.
template <int kRowLanes>
__device__ inline float sum_of_row(float x) {
  static_assert(kRowLanes == 8 || kRowLanes == 16);
#define ADD_LANES(dpp) \
  x += bits_as<float>(__builtin_amdgcn_update_dpp(0, bits_as<int>(x), dpp, 0xf, 0xf, false))
  ADD_LANES(0xb1);                                  // each lane's neighbour
  ADD_LANES(0x4e);                                  // the other pair of four
  ADD_LANES(0x141);                                 // eight lanes in reverse order
  if constexpr (kRowLanes == 16) ADD_LANES(0x140);  // sixteen
#undef ADD_LANES
  return x;
}

__global__ void row_sums(ReadyBackwardArguments) asm(ROW_SUMS);

__global__ __attribute__((amdgpu_flat_work_group_size(kEdgeThreads, kEdgeThreads))) void row_sums(
    ReadyBackwardArguments a) {
  const Task task = task_of(a);
  if constexpr (kIsDeterministic) {
    const bool is_first = __builtin_amdgcn_workgroup_id_x() == 0 && task.tile == 0 &&
                          __builtin_amdgcn_workgroup_id_z() == 0;
    if (is_first) Turns::of(a).clear(kEdgeThreads);
  }
  const int first_row = task.tile * kTileRows;
  if (first_row >= task.queries) return;
  const GradientTensors& g = a.gradients;
  using Tile = EdgeTile<kHdimV>;
  constexpr int kPasses = Tile::kPasses, kChunks = Tile::kChunks, kRowLanes = Tile::kRowLanes;
  const int thread = __builtin_amdgcn_workitem_id_x(), lane = thread % kRowLanes;
  const unsigned long batch = task.batch, head = task.head;
  const Rows out = {a.out + batch * a.out_batch + head * a.out_head +
                        static_cast<unsigned long>(task.sequence.q_start) * a.out_seq,
                    a.out_seq, task.queries};
  const Rows dout =
      rows_of(g.dout, g.dout_strides, batch, head, task.sequence.q_start, task.queries);
  const Between between = Between::of(a, batch, task.head, task.sequence);
  const auto row_of = [&](int pass) {
    return first_row + pass * Tile::kRowsAtOnce + thread / kRowLanes;
  };
  const auto load = [&](const Rows& rows, int pass, int chunk) {
    const unsigned long row = smaller(row_of(pass), task.queries - 1);
    return *(Global<const u32x4>)(rows.base + row * rows.stride + (chunk * kRowLanes + lane) * 16);
  };
  u32x4 o[kPasses][kChunks], d[kPasses][kChunks];
#pragma unroll
  for (int i = 0; i < kPasses * kChunks; ++i) {
    const int pass = i / kChunks, chunk = i % kChunks;
    o[pass][chunk] = load(out, pass, chunk);
    d[pass][chunk] = load(dout, pass, chunk);
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    f32x2 sums = {0, 0};
#pragma unroll
    for (int i = 0; i < 4 * kChunks; ++i)
      sums += widened(o[pass][i / 4][i % 4]) * widened(d[pass][i / 4][i % 4]);
    float delta = sum_of_row<kRowLanes>(sums.x + sums.y);
    const int row = row_of(pass);
    if (row >= task.queries) continue;
    const Global<u32x4> dq =
        (Global<u32x4>)(between.dq + static_cast<unsigned long>(row) * kHdim + lane * 4);
#pragma unroll
    for (int i = 0; i < kHdim / 4 / kRowLanes; ++i) dq[i * kRowLanes] = u32x4(0);
    if (lane != 0) continue;
    const unsigned long query = task.sequence.q_start + static_cast<unsigned long>(row);
    const TensorStrides& of_lse = g.lse_strides;
    const TensorStrides& of_dlse = g.dlse_strides;
    const float lse =
        g.lse[batch * of_lse.batch + head * of_lse.head + query * of_lse.seq] * kLog2e;
    delta = -delta;
    if (g.dlse) delta += g.dlse[batch * of_dlse.batch + head * of_dlse.head + query * of_dlse.seq];
    // They may be anything where a query sees nothing.
    const bool sees_nothing = lse == -kInfinity || lse == kInfinity;
    between.lse[row] = sees_nothing ? kInfinity : lse;
    between.delta[row] = sees_nothing ? 0 : delta;
  }
}

__global__ void round_dq(ReadyBackwardArguments) asm(ROUND_DQ);

__global__ __attribute__((amdgpu_flat_work_group_size(kEdgeThreads, kEdgeThreads))) void round_dq(
    ReadyBackwardArguments a) {
  const Task task = task_of(a);
  const int first_row = task.tile * kTileRows;
  if (first_row >= task.queries) return;
  const GradientTensors& g = a.gradients;
  using Tile = EdgeTile<kHdim>;
  constexpr int kPasses = Tile::kPasses, kChunks = Tile::kChunks, kRowLanes = Tile::kRowLanes;
  const int thread = __builtin_amdgcn_workitem_id_x(), lane = thread % kRowLanes;
  const Between between = Between::of(a, task.batch, task.head, task.sequence);
  const Rows dq =
      rows_of(g.dq, g.dq_strides, task.batch, task.head, task.sequence.q_start, task.queries);
  const float scale = a.scale_log2 * kLn2;
  const auto row_of = [&](int pass) {
    return first_row + pass * Tile::kRowsAtOnce + thread / kRowLanes;
  };
  f32x4 sums[kPasses * kChunks][2];
#pragma unroll
  for (int i = 0; i < kPasses * kChunks; ++i) {
    const unsigned long row = smaller(row_of(i / kChunks), task.queries - 1);
    const Global<const f32x4> from =
        (Global<const f32x4>)(between.dq + row * kHdim) + (i % kChunks * kRowLanes + lane) * 2;
    sums[i][0] = from[0];
    sums[i][1] = from[1];
  }
#pragma unroll
  for (int i = 0; i < kPasses * kChunks; ++i) {
    const int row = row_of(i / kChunks);
    if (row >= task.queries) continue;
    const f32x4 first = sums[i][0] * scale, second = sums[i][1] * scale;
    *(Global<u32x4>)((Global<char>)dq.base + static_cast<unsigned long>(row) * dq.stride +
                     (i % kChunks * kRowLanes + lane) * 16) =
        u32x4{packed_results<Dtype>(first.x, first.y), packed_results<Dtype>(first.z, first.w),
              packed_results<Dtype>(second.x, second.y), packed_results<Dtype>(second.z, second.w)};
  }
}

// ---- The kernel in the middle -------------------------------------------------------------------

// Which keys a query sees.
struct Visibility {
  int seqlen_k;
  int diagonal;  // the key that lies on the diagonal with query 0
  int left, right;

  __device__ static Visibility of(const ReadyBackwardArguments& a, const Sequence& sequence) {
    const Window& window = a.window;
    return {sequence.seqlen_k, window.is_bottom_right ? sequence.seqlen_k - sequence.seqlen_q : 0,
            window.left, window.right};
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

// The tiles of queries that see some of a workgroup's keys, of one query head after the other; but
// where kernels are deterministic of one tile after the other, from the last one on, with all heads
// of each. The tiles of the keys before are the same or earlier ones, so that theirs come first.
struct Walk {
  int begin, end;  // of tiles
  unsigned heads_left, head;
  int tile;
  unsigned heads;

  __device__ static Walk of(const Visibility& visibility, int queries, int first_key, int last_key,
                            unsigned first_head, unsigned heads) {
    int begin = 0, last = queries - 1;
    if (kIsMasked) {
      begin = larger(first_key - visibility.diagonal - visibility.right, 0) / kQueries;
      last = smaller(last_key - visibility.diagonal + visibility.left, last);
    }
    const int end = last < 0 ? 0 : last / kQueries + 1;
    return {begin, end, begin < end ? heads : 0, first_head, kIsDeterministic ? end - 1 : begin,
            heads};
  }

  __device__ bool has_ended() const { return heads_left == 0; }
  __device__ int first_query() const { return tile * kQueries; }

  // Behind the end it stays where it is.
  __device__ void advance() {
    if constexpr (kIsDeterministic) {
      const bool is_last = heads_left == 1, has_more = tile > begin;
      tile -= is_last && has_more;
      head += heads_left > 1 ? 1 : is_last ? 1 - heads : 0;
      heads_left = is_last && has_more ? heads : heads_left - (heads_left > 0);
    } else {
      const bool is_last = tile + 1 == end;
      tile = is_last ? begin : tile + 1;
      heads_left -= is_last && heads_left > 0;
      head += is_last && heads_left > 0;
    }
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
  const ReadyBackwardArguments& a;
  const Task& task;
  Visibility visibility;
  Walk walk;
  int first_key;  // of the workgroup

  __device__ Rows queries_of(const Walk& at) const {
    const unsigned long batch = task.batch, head = at.head, start = task.sequence.q_start;
    const Rows q = {a.q + batch * a.q_batch + head * a.q_head + start * a.q_seq, a.q_seq,
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
    const unsigned long batch = task.batch, head = task.head, start = task.sequence.k_start;
    return {a.k + batch * a.k_batch + head * a.k_head + start * a.k_seq, a.k_seq,
            task.sequence.seqlen_k};
  }
  __device__ Rows values() const {
    const unsigned long batch = task.batch, head = task.head, start = task.sequence.k_start;
    return {a.v + batch * a.v_batch + head * a.v_head + start * a.v_seq, a.v_seq,
            task.sequence.seqlen_k};
  }
};

// The query of a lane's score i, counted from the part's first one. A kernel's lanes are int or
// unsigned, here and below: what the compiler makes of one takes registers of the other kernels.
template <class Lane>
__device__ inline int query_of_score(int i, Lane lane) {
  return i / 4 * 8 + static_cast<int>(lane / 32 * 4) + i % 4;
}

// A lane has four values that follow each other in every eight of its row.
template <int kBlocks, class Lane>
__device__ inline void store_gradient(const f32x16 (&gradient)[kBlocks], float factor,
                                      const Rows& rows, int row, Lane lane) {
  if (row >= rows.count) return;
  const Global<char> to = (Global<char>)rows.base + static_cast<unsigned long>(row) * rows.stride;
#pragma unroll
  for (int group = 0; group < 4 * kBlocks; ++group) {
    const int first = 8 * group + lane / 32 * 4, i = group % 4 * 4;
    const f32x16& x = gradient[group / 4];
    *(Global<u32x2>)(to + first * 2) =
        u32x2{packed_results<Dtype>(x[i] * factor, x[i + 1] * factor),
              packed_results<Dtype>(x[i + 2] * factor, x[i + 3] * factor)};
  }
}

// Where the part goes that begins with `first_query`, as far as there are so many queries.
__device__ inline __amdgpu_buffer_rsrc_t rows_of_dq(Global<float> sums, int first_query,
                                                    int queries) {
  int rows = smaller(queries - first_query, 32);
  // Or both bounds would become one instruction, for which there are vector registers only.
  asm("" : "+s"(rows));
  rows = larger(rows, 0);
  return __builtin_amdgcn_make_buffer_rsrc(
      (void*)(sums + static_cast<unsigned long>(first_query) * kHdim), 0, rows * kHdim * 4,
      kRawBuffer);
}

// When a wave may add to dq, where kernels are deterministic.
struct Turn {
  Global<int> own;     // how many tiles it has added: one count
  Global<int> before;  // how many the same wave of the workgroup before has added
  int ahead;           // tiles that this one has before that one's first

  __device__ static Turn of(const KeyTask& keys, int wave) {
    const Global<int> own = Turns::of(keys.a).added_by(keys.a, keys.task) + wave;
    if (keys.task.tile == 0) return {own, own, 0x7fffffff};
    const Walk before = Walk::of(keys.visibility, keys.task.queries, keys.first_key - kKeys,
                                 keys.first_key - 1, 0, 1);
    return {own, own - kDqWaves, (keys.walk.end - before.end) * static_cast<int>(keys.walk.heads)};
  }

  // The tiles that the workgroup before has added.
  __device__ int seen() const {
    return __hip_atomic_load(before, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  }
  // Until that one has added what comes before tile number `tile` of this one, counted from 0;
  // `seen` is what was seen of it last.
  __device__ void wait(int tile, int seen) const {
    int uniform;
    asm volatile(
        ".Llook%=:\n\t"
        "v_readfirstlane_b32 %0, %1\n\t"
        "s_cmp_ge_i32 %0, %2\n\t"
        "s_cbranch_scc1 .Lturn%=\n\t"
        "s_sleep 1\n\t"
        "v_mov_b32_e32 %1, 0\n\t"
        "global_load_dword %1, %1, %3 sc1\n\t"
        "s_waitcnt vmcnt(0)\n\t"
        "s_branch .Llook%=\n"
        ".Lturn%=:"
        : "=&s"(uniform), "+v"(seen)
        : "s"(tile + 1 - ahead), "s"(before)
        : "memory", "scc");
  }
  // The wave has added so many tiles, and kLater values since, which may be on their way still:
  // memory operations of a wave complete in their order.
  template <int kLater>
  __device__ void end(int tiles, int lane) const {
    asm volatile("s_waitcnt vmcnt(%0)" ::"n"(kLater) : "memory");
    const auto count = __builtin_amdgcn_make_buffer_rsrc((void*)own, 0, 4, kRawBuffer);
    // By lane 0: those of the others are behind the end.
    __builtin_amdgcn_raw_buffer_store_b32(tiles, count, lane * 4, 0, kAgentScope);
  }

 private:
  static constexpr int kAgentScope = 16;  // sc1
};
