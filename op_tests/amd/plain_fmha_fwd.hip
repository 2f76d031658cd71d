// The forward kernel's binary interface in the plainest form that computes attention: a thread a
// query, one key after the other, every score worked out again for each slice of the output. It
// reads every argument that means something, so that a wrong one gives a wrong result.
//
// Set by the build: KERNEL (the symbol), BF16, FP16 or FP8, HDIM_Q, HDIM_V, MASK, GROUP, TS_QO,
// THREADS, CVT (0 to nearest even, 1 to nearest away, 2 towards zero).
template <class T>
struct Slot {
  T value;
  char padding[16 - sizeof(T)];
};
using Pointer = Slot<char*>;
using Uint = Slot<unsigned>;

struct Arguments {
  Pointer o, q, k, v, lse;
  Slot<float> scalar;
  Uint seq_len, q_Seqs, q_Ts, q_Hs, q_Bs, gqa, k_Seqs, k_Hs, k_Bs, opt, has_lse, kv_seq_len;
  Uint qk_head_dim, v_head_dim, q_head_num, v_Seqs, v_Hs, v_Bs, o_Seqs, o_Hs, o_Bs;
  Slot<const int*> qseq, kseq;
  Uint lse_Hs;
  Slot<const int*> qseq_padding, kseq_padding;
  Pointer q_descale, k_descale, v_descale;
  Uint q_descale_Bs, q_descale_Hs, k_descale_Bs, k_descale_Hs, v_descale_Bs, v_descale_Hs;
};
static_assert(sizeof(Arguments) == 656);

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr int kSlice = 32;  // columns of the output at a time
#if defined(__gfx942__)
constexpr bool kSingleTiles = HDIM_Q == 192 && HDIM_V == 128;
#else
constexpr bool kSingleTiles = false;
#endif

#if defined(FP8)
constexpr int kInputBytes = 1;
#else
constexpr int kInputBytes = 2;
#endif

__device__ inline float load(const char* row, int i) {
#if defined(FP8)
  return __builtin_amdgcn_cvt_f32_fp8(reinterpret_cast<const unsigned char*>(row)[i], 0);
#elif defined(FP16)
  return reinterpret_cast<const _Float16*>(row)[i];
#else
  const unsigned bits = reinterpret_cast<const unsigned short*>(row)[i];
  return __builtin_bit_cast(float, bits << 16);
#endif
}

__device__ inline unsigned short rounded(float x) {
#if defined(FP16)
  return __builtin_bit_cast(unsigned short, static_cast<_Float16>(x));
#else
  unsigned bits = __builtin_bit_cast(unsigned, x);
  if (CVT == 0) bits += 0x7fff + (bits >> 16 & 1);
  if (CVT == 1) bits += 0x8000;
  return static_cast<unsigned short>(bits >> 16);
#endif
}

__device__ inline unsigned long offset(unsigned index, const Uint& stride) {
  return static_cast<unsigned long>(index) * stride.value;
}

__device__ inline float descale(const Pointer& scales, unsigned batch, const Uint& batch_stride,
                                unsigned head, const Uint& head_stride) {
#if defined(FP8)
  const char* const at = scales.value + offset(batch, batch_stride) + offset(head, head_stride);
  return *reinterpret_cast<const float*>(at);
#else
  return 1;
#endif
}

__device__ inline float score(const Arguments& a, const char* q, const char* k) {
  float sum = 0;
  for (unsigned i = 0; i < a.qk_head_dim.value; ++i) sum += load(q, i) * load(k, i);
  return sum;
}

struct Sequence {
  int seqlen_q, seqlen_k;
  unsigned first_q, first_k;  // rows of the packed tensors
};

__device__ void attend(const Arguments& a, const Sequence& s, unsigned batch, unsigned head,
                       int tile) {
  const int in_tile = __builtin_amdgcn_workitem_id_x(), row = tile * TS_QO + in_tile;
  if (in_tile >= TS_QO || row >= s.seqlen_q) return;
  const unsigned head_k = head / a.gqa.value;
  const char* const q = a.q.value + offset(batch, a.q_Bs) + offset(head, a.q_Hs) +
                        offset(s.first_q, a.q_Seqs) + offset(tile, a.q_Ts) +
                        offset(in_tile, a.q_Seqs);
  const char* const keys =
      a.k.value + offset(batch, a.k_Bs) + offset(head_k, a.k_Hs) + offset(s.first_k, a.k_Seqs);
  const char* const values =
      a.v.value + offset(batch, a.v_Bs) + offset(head_k, a.v_Hs) + offset(s.first_k, a.v_Seqs);
  char* const out =
      a.o.value + offset(batch, a.o_Bs) + offset(head, a.o_Hs) + offset(s.first_q + row, a.o_Seqs);
  const int diagonal = MASK == 1 ? row : row + s.seqlen_k - s.seqlen_q;
  const int visible = MASK == 0 || diagonal + 1 > s.seqlen_k ? s.seqlen_k : diagonal + 1;
  const float scale = a.scalar.value * kLog2e *
                      descale(a.q_descale, batch, a.q_descale_Bs, head_k, a.q_descale_Hs) *
                      descale(a.k_descale, batch, a.k_descale_Bs, head_k, a.k_descale_Hs);
  const float value_scale = descale(a.v_descale, batch, a.v_descale_Bs, head_k, a.v_descale_Hs);

  float most = -kInfinity, sum = 0;
  for (int j = 0; j < visible; ++j) {
    const float x = scale * score(a, q, keys + offset(j, a.k_Seqs));
    const float higher = __builtin_fmaxf(most, x);
    sum = sum * __builtin_amdgcn_exp2f(most - higher) + __builtin_amdgcn_exp2f(x - higher);
    most = higher;
  }
  for (unsigned first = 0; first < a.v_head_dim.value; first += kSlice) {
    float slice[kSlice] = {};
    for (int j = 0; j < visible; ++j) {
      const float x = scale * score(a, q, keys + offset(j, a.k_Seqs));
      const float p = __builtin_amdgcn_exp2f(x - most) / sum * value_scale;
      const char* const value = values + offset(j, a.v_Seqs) + first * kInputBytes;
      for (int i = 0; i < kSlice; ++i) slice[i] += p * load(value, i);
    }
    unsigned short* const to = reinterpret_cast<unsigned short*>(out) + first;
    for (int i = 0; i < kSlice; ++i) to[i] = rounded(slice[i]);
  }
  if (a.has_lse.value) {
    const unsigned line = GROUP ? head : batch * a.q_head_num.value + head;
    float* const lse = reinterpret_cast<float*>(a.lse.value + offset(line, a.lse_Hs));
    lse[s.first_q + row] = visible > 0 ? (most + __builtin_amdgcn_logf(sum)) * kLn2 : -kInfinity;
  }
}

extern "C" __attribute__((global))
__attribute__((amdgpu_flat_work_group_size(THREADS, THREADS))) void
KERNEL(Arguments a) {
  const unsigned x = __builtin_amdgcn_workgroup_id_x(), y = __builtin_amdgcn_workgroup_id_y(),
                 z = __builtin_amdgcn_workgroup_id_z();
  const unsigned head = GROUP || kSingleTiles ? x : y;
  const unsigned batch = GROUP ? y : z;
  const int group = GROUP ? z : kSingleTiles ? y : x;
  Sequence s = {static_cast<int>(a.seq_len.value), static_cast<int>(a.kv_seq_len.value), 0, 0};
  if (GROUP) {
    s.seqlen_q = a.qseq.value[batch + 1] - a.qseq.value[batch];
    s.seqlen_k = a.kseq.value[batch + 1] - a.kseq.value[batch];
    s.first_q = a.qseq_padding.value[batch];
    s.first_k = a.kseq_padding.value[batch];
  }
  const int tiles = (s.seqlen_q + TS_QO - 1) / TS_QO;
  if (MASK == 0 || kSingleTiles) {
    if (group < tiles) attend(a, s, batch, head, group);
    return;
  }
  if (group >= (tiles + 1) / 2) return;
  attend(a, s, batch, head, group);
  if (tiles - 1 - group != group) attend(a, s, batch, head, tiles - 1 - group);
}
