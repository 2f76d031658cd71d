"""Kernels that the emulator is timed with: instructions in a row, and a plain forward kernel."""

from __future__ import annotations

from collections.abc import Sequence

LOOP_KERNEL = "loop"
FORWARD_KERNEL = "forward"
QUERIES_OF_WORKGROUP = 128
THREADS_OF_WORKGROUP = 256

_LOOP = """
.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
.amdhsa_code_object_version 5
.text
.globl loop
.p2align 8
.type loop,@function
loop:
  s_mov_b32 s4, {times}
.Lagain:
{body}
  s_sub_u32 s4, s4, 1
  s_cmp_lg_u32 s4, 0
  s_cbranch_scc1 .Lagain
  s_endpgm
.rodata
.p2align 6
.amdhsa_kernel loop
  .amdhsa_next_free_vgpr 128
  .amdhsa_accum_offset 64
  .amdhsa_next_free_sgpr 16
.end_amdhsa_kernel
"""


def loop_source(body: Sequence[str], times: int, arch: str) -> str:
    """Assembly of a kernel that repeats instructions; it has no arguments."""
    lines = "\n".join(f"  {line}" for line in body)
    return _LOOP.format(arch=arch, times=times, body=lines)


# What softmax and addresses are made of, without a dependency from one to the next.
VALU_BODY = tuple(
    line.format(i=i)
    for i in range(8)
    for line in (
        "v_fma_f32 v{i}, v{i}, v30, v31",
        "v_mul_f32 v{i}, v{i}, v32",
        "v_add_f32 v{i}, v33, v{i}",
        "v_max_f32 v{i}, v34, v{i}",
        "v_add_u32 v4{i}, v35, v4{i}",
        "v_lshlrev_b32 v5{i}, 3, v4{i}",
        "v_and_b32 v5{i}, v36, v5{i}",
        "v_cndmask_b32 v5{i}, v5{i}, v4{i}, vcc",
    )
)
MFMA_BODY = tuple(
    f"v_mfma_f32_32x32x8_bf16 a[{16 * i}:{16 * i + 15}], v[{4 * i}:{4 * i + 1}], "
    f"v[{4 * i + 2}:{4 * i + 3}], a[{16 * i}:{16 * i + 15}]"
    for i in range(4)
)

# O = softmax(Q K^T scale) V for heads of n rows of 128 bfloat16. A workgroup of four waves takes
# 128 queries of a head, a wave 32 of them; n is a multiple of 128.
#
# Scores are computed transposed, so that a lane has those of one query, and the accumulators,
# rounded to bfloat16, are an operand of the second product as they are.
FORWARD_SOURCE = r"""
typedef float f32x16 __attribute__((ext_vector_type(16)));
typedef short bf16x4 __attribute__((ext_vector_type(4)));
typedef short bf16x8 __attribute__((ext_vector_type(8)));

constexpr int kHdim = 128, kKeys = 32, kStride = kKeys + 4;

__device__ inline void sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

__device__ inline float from_other_half(float x, int lane) {
  const int from = (lane ^ 32) * 4, bits = __builtin_bit_cast(int, x);
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute(from, bits));
}

extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(256, 256)))
void forward(const short* q, const short* k, const short* v, short* o, int n, float scale_log2e) {
  __shared__ short values[kHdim][kStride];  // transposed
  const int thread = __builtin_amdgcn_workitem_id_x(), lane = thread % 64;
  const int wave = __builtin_amdgcn_readfirstlane(thread / 64);
  const long head = (long)__builtin_amdgcn_workgroup_id_y() * n * kHdim;
  const int query = __builtin_amdgcn_workgroup_id_x() * 128 + wave * 32 + lane % 32;
  const int first = 4 * (lane / 32);  // of four depths, or of four rows of an accumulator

  bf16x4 queries[kHdim / 8];
#pragma unroll
  for (int c = 0; c < kHdim / 8; ++c)
    queries[c] = *(const bf16x4*)&q[head + (long)query * kHdim + 8 * c + first];
  f32x16 sums[kHdim / 32] = {};
  float largest = -__builtin_inff(), total = 0;

  for (int key = 0; key < n; key += kKeys) {
    sync();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = thread / 16 + 16 * i, column = thread % 16 * 8;
      const bf16x8 part = *(const bf16x8*)&v[head + (long)(key + row) * kHdim + column];
#pragma unroll
      for (int j = 0; j < 8; ++j) values[column + j][row] = part[j];
    }
    f32x16 scores = {};
#pragma unroll
    for (int c = 0; c < kHdim / 8; ++c) {
      const long at = head + (long)(key + lane % 32) * kHdim + 8 * c + first;
      const bf16x4 keys = *(const bf16x4*)&k[at];
      scores = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(keys, queries[c], scores, 0, 0, 0);
    }
    float most = scores[0];
#pragma unroll
    for (int r = 1; r < 16; ++r) most = __builtin_fmaxf(most, scores[r]);
    most = __builtin_fmaxf(most, from_other_half(most, lane)) * scale_log2e;
    most = __builtin_fmaxf(most, largest);
    const float rescale = __builtin_amdgcn_exp2f(largest - most);
    largest = most;
    float sum = 0;
    bf16x4 weights[kKeys / 8];
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const float weight = __builtin_amdgcn_exp2f(scores[r] * scale_log2e - most);
      sum += weight;
      weights[r / 4][r % 4] = __builtin_bit_cast(short, (__bf16)weight);
    }
    total = total * rescale + sum + from_other_half(sum, lane);
    sync();
#pragma unroll
    for (int block = 0; block < kHdim / 32; ++block) {
      sums[block] *= rescale;
#pragma unroll
      for (int c = 0; c < kKeys / 8; ++c) {
        const bf16x4 part = *(const bf16x4*)&values[32 * block + lane % 32][8 * c + first];
        sums[block] = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(
            part, weights[c], sums[block], 0, 0, 0);
      }
    }
  }
#pragma unroll
  for (int block = 0; block < kHdim / 32; ++block) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      bf16x4 part;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        part[j] = __builtin_bit_cast(short, (__bf16)(sums[block][4 * c + j] / total));
      *(bf16x4*)&o[head + (long)query * kHdim + 32 * block + 8 * c + first] = part;
    }
  }
}
"""
