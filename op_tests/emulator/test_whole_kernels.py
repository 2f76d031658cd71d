"""HIP programs, compiled by clang, against NumPy; the sanitizer finds nothing in them."""

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
from launches import launch_code

from jitfmha.emulator import EmulatorError, take_findings
from jitfmha.jit.toolchain.device_compiler import compile_hip

_PRELUDE = """
__device__ inline unsigned thread() { return __builtin_amdgcn_workitem_id_x(); }
__device__ inline unsigned group() { return __builtin_amdgcn_workgroup_id_x(); }
__device__ inline void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
__device__ inline int bits(float x) { return __builtin_bit_cast(int, x); }
__device__ inline float number(int x) { return __builtin_bit_cast(float, x); }
"""

_VECTOR_ADD = """
extern "C" __global__ void add(const float* a, const float* b, float* c, int n) {
  const int i = group() * __builtin_amdgcn_workgroup_size_x() + thread();
  if (i < n) c[i] = a[i] + b[i];
}
"""


_compiled = cache(compile_hip)


@pytest.fixture(params=["emulator -O3", "check_emulator -O1", "check_emulator -O3"])
def launched(request: pytest.FixtureRequest, arch: str) -> Iterator[Callable[..., None]]:
    """Compiles a program, and launches its kernel as `launch_code` does."""
    variant, level = request.param.split()
    emulator = request.getfixturevalue(variant)
    if variant == "check_emulator":
        take_findings(emulator.library)

    def launch(source: str, *launch: object) -> None:
        code = _compiled(_PRELUDE + source, arch, flags=(level,))
        launch_code(emulator, arch, code, *launch)

    yield launch
    if variant == "check_emulator":
        assert take_findings(emulator.library) == []


@pytest.mark.parametrize("version", [4, 5, 6])
def test_vector_add(emulator, arch, version):
    code = compile_hip(_PRELUDE + _VECTOR_ADD, arch, code_object_version=version)
    n = 1000
    a, b = np.random.default_rng(0).standard_normal((2, n)).astype(np.float32)
    c = np.zeros(n, np.float32)
    launch_code(emulator, arch, code, "add", 4, 256, a, b, c, n)
    np.testing.assert_array_equal(c, a + b)


def test_access_outside_of_the_given_memory_is_an_error(emulator, arch):
    code, a = compile_hip(_PRELUDE + _VECTOR_ADD, arch), np.zeros(64, np.float32)
    with pytest.raises(EmulatorError, match=r"kernel add, at add.*lane 0: load of 4 bytes at 0x"):
        launch_code(emulator, arch, code, "add", 2, 64, a, a, a, 65)


# ---- Reduction: shuffles, LDS across the waves, one atomic for each workgroup --------------------

_REDUCTION = """
extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(256, 256)))
void sum(const float* values, float* total, float* largest, int n) {
  __shared__ float sums[4], maxima[4];
  float s = 0.0f, m = -__builtin_inff();
  for (int i = 256 * group() + thread(); i < n; i += 256 * 3) {
    s += values[i];
    m = __builtin_fmaxf(m, values[i]);
  }
  const unsigned lane = thread() % 64, wave = thread() / 64;
  for (int step = 32; step; step /= 2) {
    const int from = 4 * (lane ^ step);
    s += number(__builtin_amdgcn_ds_bpermute(from, bits(s)));
    m = __builtin_fmaxf(m, number(__builtin_amdgcn_ds_bpermute(from, bits(m))));
  }
  if (lane == 0) sums[wave] = s, maxima[wave] = m;
  barrier();
  if (thread() == 0) {
    for (int w = 1; w < 4; ++w) s += sums[w], m = __builtin_fmaxf(m, maxima[w]);
    __hip_atomic_fetch_add(total, s, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    largest[group()] = m;
  }
}
"""


def test_reduction(launched, seed):
    random = np.random.default_rng(seed)
    n = int(random.integers(1000, 5000))
    values = random.integers(-1000, 1000, n).astype(np.float32)  # sums are exact in any order
    total, largest = np.zeros(1, np.float32), np.zeros(3, np.float32)
    launched(_REDUCTION, "sum", 3, 256, values, total, largest, n)
    assert total[0] == values.sum(dtype=np.float64)
    padded = np.pad(values, (0, -n % 768), constant_values=-np.inf).reshape(-1, 3, 256)
    np.testing.assert_array_equal(largest, padded.max(axis=(0, 2)))


# ---- Transpose through LDS, with ragged edges ----------------------------------------------------

_TRANSPOSE = """
template <class T>
__device__ inline void transpose(const T* from, T* to, int rows, int columns) {
  __shared__ T tile[32][33];
  const int x = thread() % 32, y = thread() / 32;
  const int row = 32 * __builtin_amdgcn_workgroup_id_y(), column = 32 * group();
  for (int i = y; i < 32; i += 8)
    if (row + i < rows && column + x < columns) tile[i][x] = from[(row + i) * columns + column + x];
  barrier();
  for (int i = y; i < 32; i += 8)
    if (column + i < columns && row + x < rows) to[(column + i) * rows + row + x] = tile[x][i];
}
#define TRANSPOSE(NAME, T)                                                        \\
  extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(256, 256)))    \\
  void NAME(const T* from, T* to, int rows, int columns) { transpose(from, to, rows, columns); }
TRANSPOSE(transpose1, unsigned char)
TRANSPOSE(transpose2, unsigned short)
TRANSPOSE(transpose4, unsigned)
TRANSPOSE(transpose8, unsigned long)
"""


def test_transpose(launched, seed):
    random = np.random.default_rng(seed)
    for size in (1, 2, 4, 8):
        rows, columns = (int(n) for n in random.integers(1, 100, 2))
        matrix = random.integers(2 ** (8 * size - 1), size=(rows, columns)).astype(f"u{size}")
        result = np.zeros((columns, rows), matrix.dtype)
        grid = -(-columns // 32), -(-rows // 32)
        sizes = (rows, columns)
        launched(_TRANSPOSE, f"transpose{size}", grid, 256, matrix, result, *sizes)
        np.testing.assert_array_equal(result, matrix.T)


# ---- Matrix product: A through LDS, B from memory in operand layout ------------------------------

_GEMM = """
typedef float f32x16 __attribute__((ext_vector_type(16)));
#if defined(__gfx950__)
constexpr int kDepth = 16;
typedef _Float16 f16s __attribute__((ext_vector_type(8)));
__device__ inline f32x16 mfma(f16s a, f16s b, f32x16 c) {
  return __builtin_amdgcn_mfma_f32_32x32x16_f16(a, b, c, 0, 0, 0);
}
#else
constexpr int kDepth = 8;
typedef _Float16 f16s __attribute__((ext_vector_type(4)));
__device__ inline f32x16 mfma(f16s a, f16s b, f32x16 c) {
  return __builtin_amdgcn_mfma_f32_32x32x8f16(a, b, c, 0, 0, 0);
}
#endif

// C (m x n) = A (m x k) B (k x n) + C; a workgroup of two waves makes 32 rows and 64 columns.
extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(128, 128)))
void gemm(const _Float16* a, const _Float16* b, float* c, int n, int k) {
  __shared__ _Float16 rows[32][kDepth + 2];
  const int lane = thread() % 64, wave = thread() / 64;
  const int row = 32 * group();
  const int column = 64 * __builtin_amdgcn_workgroup_id_y() + 32 * wave + lane % 32;
  float* const results = c + (row + 4 * (lane / 32)) * n + column;
  const int first = kDepth / 2 * (lane / 32);
  f32x16 sums;
  for (int r = 0; r < 16; ++r) sums[r] = results[(8 * (r / 4) + r % 4) * n];
  for (int depth = 0; depth < k; depth += kDepth) {
    for (int i = thread(); i < 32 * kDepth; i += 128)
      rows[i / kDepth][i % kDepth] = a[(row + i / kDepth) * k + depth + i % kDepth];
    barrier();
    f16s left = {}, right = {};
    for (int i = 0; i < kDepth / 2; ++i) {
      left[i] = rows[lane % 32][first + i];
      right[i] = b[(depth + first + i) * n + column];
    }
    sums = mfma(left, right, sums);
    barrier();
  }
  for (int r = 0; r < 16; ++r) results[(8 * (r / 4) + r % 4) * n] = sums[r];
}
"""


def test_matrix_product(launched, seed):
    random = np.random.default_rng(seed)
    m, n, k = 96, 128, 80
    a = random.standard_normal((m, k)).astype(np.float16)
    b = random.standard_normal((k, n)).astype(np.float16)
    c = random.standard_normal((m, n)).astype(np.float32)
    exact = a.astype(np.float64) @ b.astype(np.float64) + c
    bound = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64) + np.abs(c)
    launched(_GEMM, "gemm", (m // 32, n // 64), 128, a, b, c, n, k)
    assert np.all(np.abs(c - exact) <= bound * (k + 2) * 2.0**-24)


# ---- Atomics -------------------------------------------------------------------------------------

_ATOMICS = """
#define AGENT __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT
#define WORKGROUP __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP
extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(256, 256)))
void histogram(const int* values, unsigned* counts, int* extremes, unsigned long* sum,
               float* largest, unsigned* reduced, int n) {
  __shared__ unsigned local[64];
  if (thread() < 64) local[thread()] = 0;
  barrier();
  const int i = 256 * group() + thread();
  if (i < n) {
    const int value = values[i];
    __hip_atomic_fetch_add(&local[value & 63], 1u, WORKGROUP);
    __hip_atomic_fetch_min(&extremes[0], value, AGENT);
    __hip_atomic_fetch_max(&extremes[1], value, AGENT);
    __hip_atomic_fetch_add(sum, (unsigned long)value, AGENT);
    __hip_atomic_fetch_xor(&reduced[0], (unsigned)value, AGENT);
    __hip_atomic_fetch_or(&reduced[1], (unsigned)value, AGENT);
    __hip_atomic_fetch_and(&reduced[2], (unsigned)value, AGENT);
    // The largest of floats, by compare and exchange.
    unsigned* const word = (unsigned*)largest;
    unsigned seen = __hip_atomic_load(word, AGENT);
    const unsigned mine = __builtin_bit_cast(unsigned, (float)value);
    while (__builtin_bit_cast(float, seen) < (float)value &&
           !__hip_atomic_compare_exchange_strong(word, &seen, mine, __ATOMIC_RELAXED, AGENT)) {}
  }
  barrier();
  if (thread() < 64) __hip_atomic_fetch_add(&counts[thread()], local[thread()], AGENT);
}
"""


def test_atomics(launched, seed):
    random = np.random.default_rng(seed)
    n = int(random.integers(1000, 3000))
    values = random.integers(-(2**20), 2**20, n).astype(np.int32)
    counts, sum_ = np.zeros(64, np.uint32), np.zeros(1, np.int64)
    extremes = np.array([2**31 - 1, -(2**31)], np.int32)
    largest, bits = np.array([-1e30], np.float32), np.array([0, 0, 0xFFFFFFFF], np.uint32)
    arrays = (values, counts, extremes, sum_, largest, bits)
    launched(_ATOMICS, "histogram", -(-n // 256), 256, *arrays, n)
    np.testing.assert_array_equal(counts, np.bincount(values & 63, minlength=64))
    assert extremes.tolist() == [values.min(), values.max()]
    assert sum_[0] == values.sum(dtype=np.int64)
    assert largest[0] == np.float32(values.max())
    bitwise = (np.bitwise_xor, np.bitwise_or, np.bitwise_and)
    reduced = [ufunc.reduce(values.view(np.uint32)) for ufunc in bitwise]
    np.testing.assert_array_equal(bits, reduced)


# ---- Softmax of a wave, division, stores by generic addresses ------------------------------------

_SOFTMAX = """
extern "C" __global__ void softmax(const float* in, float* out) {
  const float value = in[group() * 256 + thread()];
  float largest = value;
  for (int distance = 1; distance < 64; distance <<= 1) {
    const int from = (thread() ^ distance) * 4;
    largest = __builtin_fmaxf(largest, number(__builtin_amdgcn_ds_bpermute(from, bits(largest))));
  }
  const float weight = __builtin_amdgcn_exp2f((value - largest) * 1.44269504f);
  float sum = weight;
  for (int distance = 1; distance < 64; distance <<= 1)
    sum += number(__builtin_amdgcn_ds_bpermute((thread() ^ distance) * 4, bits(sum)));
  out[group() * 256 + thread()] = weight / sum;
}

// To LDS and to memory by generic addresses: flat instructions.
__device__ __attribute__((noinline)) void put(float* where, float value) { *where = value; }
extern "C" __global__ void generic(const float* in, float* out) {
  __shared__ float values[256];
  put(thread() % 2 ? &values[thread()] : out + thread(), in[thread()]);
  barrier();
  if (thread() % 2 == 0) put(out + thread() + 1, values[thread() + 1]);
}
"""


def test_softmax(launched, seed):
    given = np.random.default_rng(seed).standard_normal(1024).astype(np.float32)
    out = np.zeros_like(given)
    launched(_SOFTMAX, "softmax", 4, 256, given, out)
    weights = np.exp(given.reshape(16, 64).astype(np.float64))
    expected = weights / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out.reshape(16, 64), expected, rtol=1e-5)


def test_generic_addresses(launched, seed):
    given = np.random.default_rng(seed).standard_normal(256).astype(np.float32)
    out = np.zeros_like(given)
    launched(_SOFTMAX, "generic", 1, 256, given, out)
    np.testing.assert_array_equal(out, given)


# ---- Hazards -------------------------------------------------------------------------------------

# Matrix instructions of all kinds, close to each other and to the instructions that wait for them.
_MIXED = """
typedef float f32x2 __attribute__((ext_vector_type(2)));
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef float f32x16 __attribute__((ext_vector_type(16)));
typedef double f64x4 __attribute__((ext_vector_type(4)));
typedef int i32x4 __attribute__((ext_vector_type(4)));
typedef _Float16 f16x2 __attribute__((ext_vector_type(2)));
typedef _Float16 f16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 f16x8 __attribute__((ext_vector_type(8)));

extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(64, 64)))
void mixed(float* out, const float* in) {
  __shared__ float tile[64];
  const float x = in[thread()];
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
    tile[thread()] = large[7] + moved;
    barrier();
    large[1] += tile[63 - thread()] + __builtin_amdgcn_exp2f(first) / (1 + moved * moved);
    small[0] += (float)fma / 3.0f;
    *(f32x4*)&out[256 * turn + 4 * thread()] = small;
    __builtin_amdgcn_s_barrier();
  }
  out[768 + thread()] = large[1] + large[9] + whole[2] + (float)exact[3];
}
"""


@pytest.mark.parametrize("level", ["-O1", "-O2", "-O3"])
def test_matrix_instructions_of_a_compiler_are_clean(emulator, check_emulator, arch, level, seed):
    code = compile_hip(_PRELUDE + _MIXED, arch, flags=[level])
    given = np.random.default_rng(seed).uniform(-1, 1, 64).astype(np.float32)
    results = []
    take_findings(check_emulator.library)
    for each in (check_emulator, emulator):
        out = np.zeros(768 + 64, np.float32)
        launch_code(each, arch, code, "mixed", 1, 64, out, given)
        results.append(out)
    assert take_findings(check_emulator.library) == []
    np.testing.assert_array_equal(*results)
    assert np.count_nonzero(results[0]) > 700
