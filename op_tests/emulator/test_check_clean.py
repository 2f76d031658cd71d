"""The sanitizer finds nothing in correct kernels that a compiler made, and does not change them."""

from __future__ import annotations

import numpy as np
import pytest
from launches import launch_code

from jitfmha.emulator import Emulator
from jitfmha.emulator.findings import take_findings
from jitfmha.jit.toolchain.device_compiler import compile_hip

_SOURCE = r"""
#define THREAD __builtin_amdgcn_workitem_id_x()
#define GROUP __builtin_amdgcn_workgroup_id_x()

__device__ inline void sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

extern "C" __global__ void vector_add(const float* a, const float* b, float* out, int n) {
  const int i = GROUP * 256 + THREAD;
  if (i < n) out[i] = a[i] + b[i];
}

extern "C" __global__ void sums(const float* a, const float* b, float* out, int n) {
  __shared__ float partial[256];
  const int i = GROUP * 256 + THREAD;
  partial[THREAD] = i < n ? a[i] * b[i] : 0.0f;
  sync();
  for (int stride = 128; stride > 0; stride >>= 1) {
    if (THREAD < stride) partial[THREAD] += partial[THREAD + stride];
    sync();
  }
  if (THREAD == 0) out[GROUP] = partial[0];
}

// Within a wave, by ds_bpermute, and division: v_div_scale, v_div_fmas.
extern "C" __global__ void softmax(const float* a, const float* b, float* out, int n) {
  const float value = a[GROUP * 256 + THREAD];
  float largest = value, sum;
  for (int distance = 1; distance < 64; distance <<= 1) {
    const int from = (THREAD ^ distance) * 4;
    largest = __builtin_fmaxf(largest, __builtin_bit_cast(float,
        __builtin_amdgcn_ds_bpermute(from, __builtin_bit_cast(int, largest))));
  }
  const float weight = __builtin_amdgcn_exp2f((value - largest) * 1.44269504f);
  sum = weight;
  for (int distance = 1; distance < 64; distance <<= 1) {
    const int from = (THREAD ^ distance) * 4;
    sum += __builtin_bit_cast(float,
        __builtin_amdgcn_ds_bpermute(from, __builtin_bit_cast(int, sum)));
  }
  out[GROUP * 256 + THREAD] = weight / sum;
}

extern "C" __global__ void transpose(const float* a, const float* b, float* out, int n) {
  __shared__ float tile[32][33];
  for (int row = THREAD / 32; row < 32; row += 8)
    tile[row][THREAD % 32] = a[row * 32 + THREAD % 32];
  sync();
  for (int row = THREAD / 32; row < 32; row += 8)
    out[row * 32 + THREAD % 32] = tile[THREAD % 32][row];
}

// LDS by generic addresses: flat instructions.
__device__ __attribute__((noinline)) void put(float* where, float value) { *where = value; }
extern "C" __global__ void generic(const float* a, const float* b, float* out, int n) {
  __shared__ float values[256];
  put(THREAD % 2 ? &values[THREAD] : out + THREAD, a[THREAD]);
  sync();
  if (THREAD % 2 == 0) put(out + THREAD + 1, values[THREAD + 1]);
}

typedef float f32x16 __attribute__((ext_vector_type(16)));
typedef short bf16x4 __attribute__((ext_vector_type(4)));
typedef short bf16x8 __attribute__((ext_vector_type(8)));

// out = A B^T, 64 x 64 x n of bf16; 4 waves of 32 x 32.
extern "C" __global__ void gemm(const float* a, const float* b, float* out, int n) {
  __shared__ short tiles[2][64][40];
  const short* inputs[2] = {(const short*)a, (const short*)b};
  const int wave = THREAD / 64, lane = THREAD % 64;
  f32x16 sums = {0};
  for (int depth = 0; depth < n; depth += 32) {
    const int row = THREAD / 4, column = THREAD % 4 * 8;
    for (int i = 0; i < 2; ++i)
      *(bf16x8*)&tiles[i][row][column] = *(const bf16x8*)&inputs[i][row * n + depth + column];
    sync();
    for (int k = lane / 32 * 4; k < 32; k += 8) {
      const bf16x4 x = *(bf16x4*)&tiles[0][wave / 2 * 32 + lane % 32][k];
      const bf16x4 y = *(bf16x4*)&tiles[1][wave % 2 * 32 + lane % 32][k];
      sums = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(x, y, sums, 0, 0, 0);
    }
    sync();
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int row = wave / 2 * 32 + i / 4 * 8 + lane / 32 * 4 + i % 4;
    out[row * 64 + wave % 2 * 32 + lane % 32] = sums[i];
  }
}
"""
_KERNELS = ("vector_add", "sums", "softmax", "transpose", "generic", "gemm")


def _run(emulator: Emulator, arch: str, code: bytes, kernel: str) -> np.ndarray:
    n = 256
    rng = np.random.default_rng(0)
    if kernel == "gemm":
        a, b = rng.standard_normal((2, 64, n)).astype(np.float32)
        a, b = ((x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b))
        out = np.zeros((64, 64), np.float32)
    else:
        a, b = rng.standard_normal((2, 1024)).astype(np.float32)
        out = np.zeros(1024, np.float32)
    grid = 4 if kernel == "softmax" else 1
    launch_code(emulator, arch, code, kernel, grid, 256, a, b, out, n)
    return out


@pytest.mark.parametrize("level", ["-O1", "-O3"])
def test_nothing_is_found(emulator, check_emulator, arch, level):
    code = compile_hip(_SOURCE, arch, flags=(level,))
    take_findings(check_emulator.library)
    for kernel in _KERNELS:
        checked = _run(check_emulator, arch, code, kernel)
        assert take_findings(check_emulator.library) == [], kernel
        np.testing.assert_array_equal(checked, _run(emulator, arch, code, kernel))
        assert np.count_nonzero(checked), kernel


# Matrix instructions of all kinds, close to each other and to the instructions that wait for them.
_MIXED = r"""
#define THREAD __builtin_amdgcn_workitem_id_x()
typedef float f32x2 __attribute__((ext_vector_type(2)));
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef float f32x16 __attribute__((ext_vector_type(16)));
typedef double f64x4 __attribute__((ext_vector_type(4)));
typedef int i32x4 __attribute__((ext_vector_type(4)));
typedef _Float16 f16x2 __attribute__((ext_vector_type(2)));
typedef _Float16 f16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 f16x8 __attribute__((ext_vector_type(8)));

__device__ inline int bits(float x) { return __builtin_bit_cast(int, x); }
__device__ inline float number(int x) { return __builtin_bit_cast(float, x); }

extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(64, 64)))
void mixed(float* out, const float* in) {
  __shared__ float tile[64];
  const float x = in[THREAD];
  const f16x4 a = {(_Float16)x, (_Float16)(x + 1), (_Float16)(x * 2), (_Float16)1};
  const f16x8 wide = __builtin_shufflevector(a, a, 0, 1, 2, 3, 3, 2, 1, 0);
  const long eight = __builtin_bit_cast(long, a) & 0x3f3f3f3f3f3f3f3f;
  f32x16 large = {x};
  f32x4 small = {x, x, x, x};
  i32x4 whole = {1, 2, 3, 4};
  f64x4 exact = {x, x, x, x};
  for (int turn = 0; turn < 3; ++turn) {
    large = __builtin_amdgcn_mfma_f32_32x32x8f16(a, a, large, 0, 0, 0);
    large = __builtin_amdgcn_mfma_f32_32x32x2f32(x, x, large, 0, 0, 0);
    large = __builtin_amdgcn_smfmac_f32_32x32x16_f16(a, wide, large, 0x44444444, 0, 0);
    small = __builtin_amdgcn_mfma_f32_16x16x4f32(x, large[3], small, 0, 0, 0);
    small = __builtin_amdgcn_mfma_f32_4x4x4f16(a, a, small, 0, 0, 0);
    small = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(eight, eight, small, 0, 0, 0);
    whole = __builtin_amdgcn_mfma_i32_16x16x32_i8(eight, eight, whole, 0, 0, 0);
    exact = __builtin_amdgcn_mfma_f64_16x16x4f64(small[1], x, exact, 0, 0, 0);
    const double fma = __builtin_fma(exact[0], exact[1], 2.0);
    const float dot = __builtin_amdgcn_fdot2(f16x2{a[0], a[1]}, f16x2{a[2], a[3]}, x, false);
    small = __builtin_amdgcn_mfma_f32_16x16x4f32(dot, x, small, 0, 0, 0);
    const float moved = number(__builtin_amdgcn_update_dpp(
        0, bits(small[2] + dot), 0x111, 0xf, 0xf, true));
    const float first = number(__builtin_amdgcn_readlane(bits(large[5]), turn));
    tile[THREAD] = large[7] + moved;
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    large[1] += tile[63 - THREAD] + __builtin_amdgcn_exp2f(first) / (1 + moved * moved);
    small[0] += (float)fma / 3.0f;
    *(f32x4*)&out[256 * turn + 4 * THREAD] = small;
    __builtin_amdgcn_s_barrier();
  }
  out[768 + THREAD] = large[1] + large[9] + whole[2] + (float)exact[3];
}
"""


@pytest.mark.parametrize("level", ["-O1", "-O2", "-O3"])
def test_matrix_instructions_of_a_compiler_are_clean(emulator, check_emulator, arch, level, seed):
    code = compile_hip(_MIXED, arch, flags=(level,))
    given = np.random.default_rng(seed).uniform(-1, 1, 64).astype(np.float32)
    results = []
    take_findings(check_emulator.library)
    for each in (check_emulator, emulator):
        out = np.zeros(768 + 64, np.float32)
        launch_code(each, arch, code, "mixed", 1, 64, out, given)
        results.append(out)
    assert take_findings(check_emulator.library) == []
    np.testing.assert_array_equal(results[0], results[1])
    assert np.count_nonzero(results[0]) > 700
