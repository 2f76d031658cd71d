"""HIP programs of several styles, for what compilers emit: no header, builtins only."""

_COMMON = """
#define GLOBAL extern "C" __global__
#define LANE __builtin_amdgcn_workitem_id_x()
#define GROUP __builtin_amdgcn_workgroup_id_x()
#define AGENT __HIP_MEMORY_SCOPE_AGENT
#define SYSTEM __HIP_MEMORY_SCOPE_SYSTEM
typedef _Float16 h2 __attribute__((ext_vector_type(2)));
typedef __bf16 b2 __attribute__((ext_vector_type(2)));
typedef int i4 __attribute__((ext_vector_type(4)));
"""

_INTEGERS = """
GLOBAL void bytes(const unsigned char* a, const signed char* b, int* out, unsigned shift) {
  const int i = LANE;
  out[i] = a[i] * b[i] + ((a[i] >> shift) | (b[i] << 3)) + (a[4 * i] << 8 | a[4 * i + 1]);
}
GLOBAL void shorts(const unsigned short* a, short* b, int k) {
  b[LANE] = (short)((a[LANE] * k) >> 3) + b[LANE + 1];
}
GLOBAL void longs(const unsigned long* a, unsigned long* b, long c) {
  const int i = LANE;
  b[i] = a[i] * (unsigned long)c + (a[i + 1] >> (a[i] & 63));
  b[i] += __builtin_popcountl(a[i]) + __builtin_clzl(a[i] | 1);
  b[i + 64] = (unsigned long)((long)a[i] / (c | 1)) ^ (a[i] % 1000003ul);
}
GLOBAL void divide(const int* a, const int* b, int* c, unsigned d) {
  c[LANE] = a[LANE] / b[LANE] + (unsigned)a[LANE] % d + (a[LANE] < b[LANE] ? a[LANE] : b[LANE]);
}
GLOBAL void cases(const int* a, int* out) {
  int value = a[LANE];
  switch (GROUP & 7) {
    case 0: value += 3; break;
    case 1: value *= 77; break;
    case 2: value = value << 3 ^ value; break;
    case 3: value = __builtin_bitreverse32(value); break;
    case 5: while (value > 10) value = (value & 1) ? 3 * value + 1 : value >> 1; break;
    default: value = -value;
  }
  out[LANE] = value;
}
"""

_FLOATS = """
GLOBAL void halves(const h2* a, const h2* b, h2* c, _Float16 s) {
  const int i = LANE;
  c[i] = a[i] * b[i] + c[i];
  c[i + 64] = __builtin_elementwise_max(a[i], b[i]) - (h2)(s);
  c[i + 128] = (h2){a[i].y, b[i].x} * -b[i];
  ((_Float16*)c)[i + 512] = a[i].x * b[i].y + s;
}
GLOBAL void bfloats(const b2* a, float* out, b2* narrow) {
  const int i = LANE;
  out[i] = (float)a[i].x + (float)a[i].y;
  narrow[i] = (b2){(__bf16)out[i + 64], (__bf16)out[i + 65]};
}
GLOBAL void doubles(const double* a, const double* b, double* c) {
  const int i = LANE;
  c[i] = __builtin_fma(a[i], b[i], c[i]);
  c[i + 64] = a[i] / b[i];
  c[i + 128] = __builtin_sqrt(a[i]) + __builtin_floor(b[i]);
  c[i + 192] = (double)(int)a[i] + (double)(float)b[i] + (double)(unsigned)b[i + 1];
}
GLOBAL void functions(const float* a, float* c) {
  const int i = LANE;
  c[i] = __builtin_amdgcn_rsqf(a[i]) + __builtin_amdgcn_logf(__builtin_fabsf(a[i]));
  c[i] -= __builtin_truncf(a[i]);
  c[i + 64] = a[i] / c[i + 1] + __builtin_sqrtf(a[i]);
  c[i + 128] = __builtin_amdgcn_fmed3f(a[i], 0.0f, 1.0f) + __builtin_rintf(a[i]) * 0.15915494f;
  c[i + 192] = __builtin_ldexpf(a[i], (int)c[i]) + __builtin_amdgcn_fractf(a[i]);
  c[i + 192] += __builtin_amdgcn_sinf(a[i]);
  c[i + 256] = __builtin_fminf(__builtin_fmaxf(a[i], 0.0f), 1.0f);
}
"""

_LANES = """
GLOBAL void cross(const int* x, int* out) {
  int v = x[LANE];
  v += __builtin_amdgcn_update_dpp(0, v, 0x111, 0xf, 0xf, true);
  v += __builtin_amdgcn_update_dpp(v, v, 0x142, 0xa, 0xf, false);
  v += __builtin_amdgcn_mov_dpp(v, 0x4e, 0xf, 0xf, true);
  v ^= __builtin_amdgcn_ds_swizzle(v, 0x041f) + __builtin_amdgcn_ds_swizzle(v, 0x801b);
  v += __builtin_amdgcn_readlane(v, 5) + __builtin_amdgcn_readfirstlane(v);
  v += __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
  out[LANE] = __builtin_amdgcn_perm(v, x[LANE + 1], 0x05040100);
  out[LANE] += __builtin_popcountl(__builtin_amdgcn_uicmp(v, 3, 34));
}
"""

_MEMORY = """
GLOBAL void raw(float* p, int bytes, int* out) {
  __amdgpu_buffer_rsrc_t r = __builtin_amdgcn_make_buffer_rsrc(p, 0, bytes, 0x20000);
  i4 v = __builtin_amdgcn_raw_buffer_load_b128(r, 16 * LANE, 64, 0);
  const auto pair = __builtin_amdgcn_raw_buffer_load_b64(r, 8 * LANE, 0, 2);
  __builtin_amdgcn_raw_buffer_store_b64(pair, r, LANE * 8 + 4096, 0, 1);
  *(i4*)(out + 4 * LANE) = v;
}
GLOBAL void atomics(int* a, float* f, unsigned long* u, int* old) {
  __hip_atomic_fetch_add(a + LANE, 3, __ATOMIC_RELAXED, AGENT);
  old[LANE] = __hip_atomic_fetch_max(a + 64, (int)LANE, __ATOMIC_SEQ_CST, SYSTEM);
  __hip_atomic_fetch_or(u, 1ul << LANE, __ATOMIC_ACQ_REL, AGENT);
  int expected = 0;
  __hip_atomic_compare_exchange_strong(a + 65, &expected, (int)LANE, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED, AGENT);
  __builtin_nontemporal_store(__builtin_nontemporal_load(f + LANE) + 1.0f, f + LANE + 64);
}
GLOBAL void scratch(const int* index, float* out) {
  float table[32];
  for (int i = 0; i < 32; ++i) table[i] = out[i + LANE];
  for (int i = 0; i < 4; ++i) table[index[i] & 31] += table[index[i + 4] & 31];
  out[LANE] = table[index[LANE] & 31];
}
__device__ __attribute__((noinline)) int fibonacci(int n) {
  return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2);
}
GLOBAL void recursive(int* out, int n) { out[LANE] = fibonacci(n); }
GLOBAL void generic(int* out, int pick, volatile unsigned short* h) {
  __shared__ int local[64];
  int* const where = pick ? out : local;
  where[LANE] = pick;
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup");
  out[LANE + 64] = where[LANE ^ 1] + h[LANE];
  h[LANE + 1] = (unsigned short)pick;
}
"""

# Style -> source. What only gfx950 has is behind its macro.
STYLES: dict[str, str] = {
    name: _COMMON + source
    for name, source in {
        "integers": _INTEGERS,
        "floats": _FLOATS,
        "lanes": _LANES,
        "memory": _MEMORY,
    }.items()
}
