// The arguments of the forward kernels: one packed struct, every field in a slot of 16 bytes.
// Strides are in bytes. The host's launcher has the same struct; both check every offset.
#pragma once

template <class T>
struct Slot {
  T value;
  char padding[16 - sizeof(T)];
};

// In the address space of global memory: loads through generic pointers would be FLAT ones, which
// occupy both wait counters.
template <class T>
using Global = __attribute__((address_space(1))) T*;

struct Arguments {
  Slot<Global<char>> ptr_o, ptr_q, ptr_k, ptr_v;
  Slot<Global<float>> ptr_lse;
  Slot<float> scalar;                     // the softmax scale
  Slot<unsigned> s_seq_len;               // gm0: queries of each sequence
  Slot<unsigned> s_Seqs, s_Ts;            // q between tokens; of one query tile
  Slot<unsigned> s_Hs, s_Bs;              // q between heads, between batches
  Slot<unsigned> s_gqa;                   // query heads of a key head
  Slot<unsigned> s_k_Seqs, s_k_Hs, s_k_Bs;
  Slot<unsigned> s_opt;                   // a scheduling hint that these kernels do not need
  Slot<unsigned> s_lse;                   // 1: write the log-sum-exp
  Slot<unsigned> s_kv_seq_len;            // gm0: keys of each sequence
  Slot<unsigned> s_qk_head_dim, s_v_head_dim;
  Slot<unsigned> s_q_head_num;
  Slot<unsigned> s_v_Seqs, s_v_Hs, s_v_Bs;
  Slot<unsigned> s_o_Seqs, s_o_Hs, s_o_Bs;
  Slot<Global<const int>> ptr_qseq, ptr_kseq;                  // gm1: ends of the sequences
  Slot<unsigned> s_lse_Hs;                                     // lse between heads
  Slot<Global<const int>> ptr_qseq_padding, ptr_kseq_padding;  // gm1: where sequences begin
  // Three slots that fp8 kernels have for the scales of q; other launchers leave them zero. Where
  // s_tiles is set, a workgroup has one query tile and never two. Where ptr_partial is set too,
  // keys are split: several workgroups attend to the same queries, each to a part of the keys, and
  // the kernel `combine` makes the output of what they leave there.
  Slot<Global<float>> ptr_partial;
  Slot<Global<const float>> ptr_k_descale, ptr_v_descale;
  Slot<unsigned> s_splits;                // parts of the keys
  Slot<unsigned> s_tiles;                 // query tiles of the longest sequence
  Slot<unsigned> s_descale_k_Bs, s_descale_k_Hs;
  Slot<unsigned> s_descale_v_Bs, s_descale_v_Hs;
};

static_assert(__builtin_offsetof(Arguments, scalar) == 80);
static_assert(__builtin_offsetof(Arguments, s_k_Seqs) == 192);
static_assert(__builtin_offsetof(Arguments, s_q_head_num) == 320);
static_assert(__builtin_offsetof(Arguments, s_lse_Hs) == 464);
static_assert(__builtin_offsetof(Arguments, s_descale_v_Hs) == 640);
static_assert(sizeof(Arguments) == 656);
