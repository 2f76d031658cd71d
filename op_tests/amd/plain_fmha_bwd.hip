// The binary interfaces of the three backward kernels in the plainest form that computes gradients:
// a thread for each key of dk and dv, a thread for each query of dq, one row after the other, every
// score worked out again for each slice of columns. They read what the published kernels read of
// their arguments, so that a wrong one gives a wrong result.
//
// The build adds instances: ROW_SUMS(symbol, ...), GRADIENTS(symbol, ...) and MAKE_DQ(symbol, ...).
// Set by it: BF16 or FP16, TS (keys of a workgroup), HDIM_V (columns of v where they are not as
// many as those of q, else 0).
template <class T>
struct Slot {
  T value;
  char padding[16 - sizeof(T)];
};
using Pointer = Slot<char*>;
using Ints = Slot<const int*>;
using Uint = Slot<unsigned>;
using Int = Slot<int>;

struct RowSumArguments {
  Pointer o, dout, d;
  Uint o_head, o_batch, o_row, dout_head, dout_batch, dout_row, d_head, d_batch, d_row;
  Uint seqlen_q, head_dim;
  Ints logical_q, physical_q;
};
static_assert(sizeof(RowSumArguments) == 256);

struct GradientArguments {
  Pointer dq, dk, dv, q, k, v, dout, lse, d;
  Slot<float> scale, log2e;
  Uint seqlen_q, tile, q_head, q_batch, q_row, gqa, k_head, k_batch, k_row,
      dk_row;  // short: to here
  Uint seqlen_k, head_dim_q, head_dim_v, heads_q, v_head, v_batch, v_row;
  Uint dout_head, dout_batch, dout_row, dk_head, dk_batch, dv_head, dv_batch, dv_row, lse_head;
  Ints logical_q, logical_k, physical_q, physical_k;
  Uint dq_rows;
  Int mask_x, mask_y;
};
static_assert(sizeof(GradientArguments) == 704);

struct DqArguments {
  Pointer sums, dq;
  Uint sums_head, sums_batch, sums_row, dq_head, dq_batch, dq_row, seqlen_q, head_dim;
  Ints logical_q, physical_q;
};
static_assert(sizeof(DqArguments) == 192);

constexpr int kThreads = 256, kSlice = 16, kRowSumRows = 128, kDqRows = 64;
enum { kInFloat, kInPlace, kShuffled };

typedef unsigned short Bits;

__device__ inline float value_of(Bits bits) {
#if defined(FP16)
  return __builtin_bit_cast(_Float16, bits);
#else
  return __builtin_bit_cast(float, static_cast<unsigned>(bits) << 16);
#endif
}

// cvt: 0 to nearest even, 1 to nearest away, 2 towards zero.
__device__ inline Bits rounded(float x, int cvt) {
#if defined(FP16)
  return __builtin_bit_cast(Bits, static_cast<_Float16>(x));
#else
  unsigned bits = __builtin_bit_cast(unsigned, x);
  if (cvt == 0) bits += 0x7fff + (bits >> 16 & 1);
  if (cvt == 1) bits += 0x8000;
  return static_cast<Bits>(bits >> 16);
#endif
}

__device__ inline Bits* row_at(const Pointer& base, unsigned long offset) {
  return reinterpret_cast<Bits*>(base.value + offset);
}

__device__ inline unsigned long times(unsigned index, unsigned stride) {
  return static_cast<unsigned long>(index) * stride;
}

__device__ inline Bits* row_of(Bits* base, int i, unsigned stride) {
  return reinterpret_cast<Bits*>(reinterpret_cast<char*>(base) + times(i, stride));
}

__device__ inline float dot(const Bits* a, const Bits* b, int n) {
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += value_of(a[i]) * value_of(b[i]);
  return sum;
}

__device__ inline void add_float(float* to, float x) {
  __hip_atomic_fetch_add(to, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

__device__ inline void add_bits(Bits* to, float x) {
  Bits before = *to;
  while (!__hip_atomic_compare_exchange_strong(to, &before, rounded(value_of(before) + x, 0),
                                               __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                               __HIP_MEMORY_SCOPE_AGENT)) {
  }
}

template <bool kGroup>
__device__ void sum_rows(const RowSumArguments& a) {
  const unsigned head = __builtin_amdgcn_workgroup_id_y(),
                 batch = __builtin_amdgcn_workgroup_id_z();
  const int in_tile = __builtin_amdgcn_workitem_id_x();
  const int row = __builtin_amdgcn_workgroup_id_x() * kRowSumRows + in_tile;
  const int rows = kGroup ? a.logical_q.value[batch + 1] - a.logical_q.value[batch]
                          : static_cast<int>(a.seqlen_q.value);
  if (in_tile >= kRowSumRows || row >= rows) return;
  const unsigned first = kGroup ? a.physical_q.value[batch] : 0;
  const auto at = [&](const Pointer& base, const Uint& batches, const Uint& heads,
                      const Uint& rows) {
    return base.value + (kGroup ? 0 : times(batch, batches.value)) + times(head, heads.value) +
           times(first + row, rows.value);
  };
  const Bits* const o = reinterpret_cast<Bits*>(at(a.o, a.o_batch, a.o_head, a.o_row));
  const Bits* const dout =
      reinterpret_cast<Bits*>(at(a.dout, a.dout_batch, a.dout_head, a.dout_row));
  *reinterpret_cast<float*>(at(a.d, a.d_batch, a.d_head, a.d_row)) = dot(o, dout, a.head_dim.value);
}

// A sequence and head: where its rows are, by the block that the kernel takes.
struct Head {
  int seqlen_q, seqlen_k, hdim_q, hdim_v;
  Bits *q, *k, *v, *dout, *dk, *dv;
  const float *lse, *d;
  unsigned q_row, k_row, v_row, dout_row, dk_row, dv_row;
  int left, right;  // query i sees keys j with i - left < j < i + right
  float scale, log2e;

  // The probability, and the gradient of the scaled score.
  __device__ bool pair(int i, int j, float& p, float& ds) const {
    if (j <= i - left || j >= i + right) return false;
    const Bits* const query = row_of(q, i, q_row);
    const Bits* const key = row_of(k, j, k_row);
    p = __builtin_amdgcn_exp2f((scale * dot(query, key, hdim_q) - lse[i]) * log2e);
    const Bits* const g = row_of(dout, i, dout_row);
    const Bits* const value = row_of(v, j, v_row);
    ds = p * (dot(g, value, hdim_v) - d[i]) * scale;
    return true;
  }
};

template <bool kGroup, bool kShort, int kMask>
__device__ Head head_of(const GradientArguments& a, unsigned batch, unsigned head) {
  constexpr int kFar = 1 << 30;
  const unsigned head_k = head / a.gqa.value;
  Head h;
  h.seqlen_q = a.seqlen_q.value;
  h.seqlen_k = kShort ? a.seqlen_q.value : a.seqlen_k.value;
  unsigned first_q = 0, first_k = 0;
  if (kGroup) {
    h.seqlen_q = a.logical_q.value[batch + 1] - a.logical_q.value[batch];
    h.seqlen_k = a.logical_k.value[batch + 1] - a.logical_k.value[batch];
    first_q = a.physical_q.value[batch];
    first_k = a.physical_k.value[batch];
  }
  h.hdim_q = a.head_dim_q.value;
  h.hdim_v = HDIM_V ? HDIM_V : h.hdim_q;
  const auto at = [&](const Pointer& base, unsigned batches, unsigned which, unsigned heads,
                      unsigned first, unsigned rows) {
    return row_at(base,
                  (kGroup ? 0 : times(batch, batches)) + times(which, heads) + times(first, rows));
  };
  h.q_row = a.q_row.value;
  h.k_row = a.k_row.value;
  h.dk_row = a.dk_row.value;
  h.v_row = kShort ? a.k_row.value : a.v_row.value;
  h.dout_row = kShort ? a.q_row.value : a.dout_row.value;
  h.dv_row = kShort ? a.dk_row.value : a.dv_row.value;
  h.q = at(a.q, a.q_batch.value, head, a.q_head.value, first_q, h.q_row);
  h.k = at(a.k, a.k_batch.value, head_k, a.k_head.value, first_k, h.k_row);
  if (kShort) {
    const unsigned each_batch = a.gqa.value * a.k_batch.value;
    h.v = at(a.v, a.k_batch.value, head_k, a.k_head.value, 0, 0);
    h.dout = at(a.dout, a.q_batch.value, head, a.q_head.value, 0, 0);
    h.dk = at(a.dk, each_batch, head, a.k_head.value, 0, 0);
    h.dv = at(a.dv, each_batch, head, a.k_head.value, 0, 0);
  } else {
    h.v = at(a.v, a.v_batch.value, head_k, a.v_head.value, first_k, h.v_row);
    h.dout = at(a.dout, a.dout_batch.value, head, a.dout_head.value, first_q, h.dout_row);
    h.dk = at(a.dk, a.dk_batch.value, head, a.dk_head.value, first_k, h.dk_row);
    h.dv = at(a.dv, a.dv_batch.value, head, a.dv_head.value, first_k, h.dv_row);
  }
  const unsigned long line = kGroup ? times(head, a.lse_head.value) + first_q * 4ul
                                    : (times(batch, a.heads_q.value) + head) * h.seqlen_q * 4;
  h.lse = reinterpret_cast<const float*>(a.lse.value + line);
  h.d = reinterpret_cast<const float*>(a.d.value + line);
  h.left = kMask == 3 ? a.mask_y.value : kFar;
  h.right = kMask == 0   ? kFar
            : kMask == 3 ? a.mask_x.value
            : kMask == 1 ? 1
                         : 1 + h.seqlen_k - h.seqlen_q;
  h.scale = a.scale.value;
  h.log2e = a.log2e.value;
  return h;
}

__device__ inline void make_dk_and_dv(const Head& h, int j) {
  for (int first = 0; first < h.hdim_q || first < h.hdim_v; first += kSlice) {
    float dk[kSlice] = {}, dv[kSlice] = {};
    for (int i = 0; i < h.seqlen_q; ++i) {
      float p, ds;
      if (!h.pair(i, j, p, ds)) continue;
      const Bits* const q = row_of(h.q, i, h.q_row);
      const Bits* const g = row_of(h.dout, i, h.dout_row);
      for (int c = 0; c < kSlice; ++c) {
        if (first + c < h.hdim_q) dk[c] += ds * value_of(q[first + c]);
        if (first + c < h.hdim_v) dv[c] += p * value_of(g[first + c]);
      }
    }
    Bits* const to_dk = row_of(h.dk, j, h.dk_row);
    Bits* const to_dv = row_of(h.dv, j, h.dv_row);
    for (int c = 0; c < kSlice; ++c) {
      if (first + c < h.hdim_q) to_dk[first + c] = rounded(dk[c], 0);
      if (first + c < h.hdim_v) to_dv[first + c] = rounded(dv[c], 0);
    }
  }
}

template <bool kGroup, int kSums>
__device__ void add_to_dq(const GradientArguments& a, const Head& h, unsigned batch, unsigned head,
                          int i, int first_key, int end_key) {
  const int columns = h.hdim_q == 192 ? 192 : 128;  // of shuffled sums
  for (int first = 0; first < h.hdim_q; first += kSlice) {
    float dq[kSlice] = {};
    for (int j = first_key; j < end_key; ++j) {
      float p, ds;
      if (!h.pair(i, j, p, ds)) continue;
      const Bits* const k = row_of(h.k, j, h.k_row);
      for (int c = 0; c < kSlice; ++c)
        if (first + c < h.hdim_q) dq[c] += ds * value_of(k[first + c]);
    }
    const unsigned long line = times(batch, a.heads_q.value) + head;
    for (int c = 0; c < kSlice && first + c < h.hdim_q; ++c) {
      if (kSums == kInFloat) {
        const unsigned long row = kGroup
                                      ? head * (a.lse_head.value / 4ul) + a.physical_q.value[batch]
                                      : line * h.seqlen_q;
        add_float(reinterpret_cast<float*>(a.dq.value) + (row + i) * h.hdim_q + first + c, dq[c]);
      } else if (kSums == kInPlace) {
        const unsigned long at =
            times(batch, a.q_batch.value) + times(head, a.q_head.value) + times(i, a.q_row.value);
        add_bits(row_at(a.dq, at) + first + c, dq[c]);
      } else {
        const int rows = kGroup ? a.dq_rows.value : (h.seqlen_q + 15) / 16 * 16;
        const unsigned long row = line * rows + i;
        add_bits(row_at(a.dq, 0) + row * columns + columns - 1 - first - c, dq[c]);
      }
    }
  }
}

template <bool kGroup, bool kShort, int kMask, int kSums>
__device__ void make_gradients(const GradientArguments& a) {
  const int thread = __builtin_amdgcn_workitem_id_x();
  const unsigned head = __builtin_amdgcn_workgroup_id_y(),
                 batch = __builtin_amdgcn_workgroup_id_z();
  const int workgroup = __builtin_amdgcn_workgroup_id_x();
  const Head h = head_of<kGroup, kShort, kMask>(a, batch, head);
  // As the published kernels: the gradients of keys that no query has are left as they are.
  if (h.seqlen_q == 0) return;
  // The published kernels for windows read whole tiles of 16 rows, past the last one.
  if (kMask == 3 && thread < (h.seqlen_q + 15) / 16 * 16) {
    const float lse = h.lse[thread], d = h.d[thread];
    asm volatile("" ::"v"(lse), "v"(d));
  }
  const int tiles = (h.seqlen_k + TS - 1) / TS;
  const bool has_pairs = kMask == 1 || kMask == 2;
  if (workgroup >= (has_pairs ? (tiles + 1) / 2 : tiles)) return;
  for (int turn = 0; turn < 2; ++turn) {
    const int tile = turn ? tiles - 1 - workgroup : workgroup;
    if (turn && (!has_pairs || tile == workgroup)) break;
    const int end = (tile + 1) * TS < h.seqlen_k ? (tile + 1) * TS : h.seqlen_k;
    for (int j = tile * TS + thread; j < end; j += kThreads) make_dk_and_dv(h, j);
    for (int i = thread; i < h.seqlen_q; i += kThreads)
      add_to_dq<kGroup, kSums>(a, h, batch, head, i, tile * TS, end);
  }
}

template <bool kGroup, bool kShuffled_, int kCvt>
__device__ void make_dq(const DqArguments& a) {
  const unsigned head = __builtin_amdgcn_workgroup_id_y(),
                 batch = __builtin_amdgcn_workgroup_id_z();
  const int in_tile = __builtin_amdgcn_workitem_id_x();
  const int row = __builtin_amdgcn_workgroup_id_x() * kDqRows + in_tile;
  const int rows = kGroup ? a.logical_q.value[batch + 1] - a.logical_q.value[batch]
                          : static_cast<int>(a.seqlen_q.value);
  if (in_tile >= kDqRows || row >= rows) return;
  const unsigned first = kGroup ? a.physical_q.value[batch] : 0;
  Bits* const dq =
      row_at(a.dq, (kGroup ? 0 : times(batch, a.dq_batch.value)) + times(head, a.dq_head.value) +
                       times(first + row, a.dq_row.value));
  const int n = a.head_dim.value;
  if (kShuffled_) {
    const Bits* const sums =
        row_at(a.sums, times(batch, a.sums_batch.value) + times(head, a.sums_head.value) +
                           times(row, a.sums_row.value));
    const int columns = a.sums_row.value / 2;
    for (int c = 0; c < n; ++c) dq[c] = sums[columns - 1 - c];
    return;
  }
  // A group's rows lie one behind the other, as many of a head as there are of all sequences.
  const char* const sums =
      kGroup ? a.sums.value + times(head, a.sums_head.value) + times(first + row, n * 4)
             : a.sums.value + times(batch, a.sums_batch.value) + times(head, a.sums_head.value) +
                   times(row, a.sums_row.value);
  for (int c = 0; c < n; ++c) dq[c] = rounded(reinterpret_cast<const float*>(sums)[c], kCvt);
}

#define KERNEL(symbol, type, call)                                                               \
  extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(256, 256))) void \
  symbol(type a) {                                                                               \
    call(a);                                                                                     \
  }
#define ROW_SUMS(symbol, group) KERNEL(symbol, RowSumArguments, sum_rows<group>)
#define GRADIENTS(symbol, group, short_block, mask, sums) \
  KERNEL(symbol, GradientArguments, (make_gradients<group, short_block, mask, sums>))
#define MAKE_DQ(symbol, group, shuffled, cvt) \
  KERNEL(symbol, DqArguments, (make_dq<group, shuffled, cvt>))
