// What kernels of HIP C++ commonly use, where ROCm's headers are not there: `python -m jitfmha hip`
// puts this in front of a source. It is for device code alone: no host API, no printf, no asserts,
// no textures, no cooperative groups. Built on clang's builtins, without ROCm's device libraries.
#pragma once

#define __host__ __attribute__((host))
#define __constant__ __attribute__((constant))
#define __managed__ __attribute__((managed))
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define HIP_DYNAMIC_SHARED(type, name) extern __shared__ type name[];
#define HIP_KERNEL_NAME(...) __VA_ARGS__

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __INTPTR_TYPE__ intptr_t;
typedef __UINTPTR_TYPE__ uintptr_t;
typedef signed char int8_t;
typedef unsigned char uint8_t, uchar;
typedef short int16_t;
typedef unsigned short uint16_t, ushort;
typedef int int32_t;
typedef unsigned uint32_t, uint;
typedef __INT64_TYPE__ int64_t;
typedef __UINT64_TYPE__ uint64_t;
typedef unsigned long ulong;

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX (__INT_MAX__ * 2U + 1U)

#define HIP_DEVICE static __device__ __forceinline__

// ---- Vectors ------------------------------------------------------------------------------------

#define HIP_VECTORS(type, name)                                                           \
  typedef type name##2 __attribute__((ext_vector_type(2)));                               \
  typedef type name##3 __attribute__((ext_vector_type(3)));                               \
  typedef type name##4 __attribute__((ext_vector_type(4)));                               \
  HIP_DEVICE name##2 make_##name##2(type x, type y) { return name##2 {x, y}; }            \
  HIP_DEVICE name##3 make_##name##3(type x, type y, type z) { return name##3 {x, y, z}; } \
  HIP_DEVICE name##4 make_##name##4(type x, type y, type z, type w) { return name##4 {x, y, z, w}; }
HIP_VECTORS(char, char)
HIP_VECTORS(unsigned char, uchar)
HIP_VECTORS(short, short)
HIP_VECTORS(unsigned short, ushort)
HIP_VECTORS(int, int)
HIP_VECTORS(unsigned, uint)
HIP_VECTORS(long, long)
HIP_VECTORS(unsigned long, ulong)
HIP_VECTORS(long long, longlong)
HIP_VECTORS(unsigned long long, ulonglong)
HIP_VECTORS(float, float)
HIP_VECTORS(double, double)
#undef HIP_VECTORS

struct dim3 {
  unsigned x, y, z;
  __host__ __device__ constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1)
      : x(x), y(y), z(z) {}
};

// ---- Where a thread is --------------------------------------------------------------------------

// Of three numbers that the hardware or the launch has, read where they are used.
#define HIP_PLACE(type, name, of_x, of_y, of_z)                                     \
  struct type {                                                                     \
    __declspec(property(get = get_x)) unsigned x;                                   \
    __declspec(property(get = get_y)) unsigned y;                                   \
    __declspec(property(get = get_z)) unsigned z;                                   \
    __device__ __forceinline__ unsigned get_x() const { return of_x; }              \
    __device__ __forceinline__ unsigned get_y() const { return of_y; }              \
    __device__ __forceinline__ unsigned get_z() const { return of_z; }              \
    __device__ __forceinline__ operator dim3() const { return {of_x, of_y, of_z}; } \
  };                                                                                \
  extern const __device__ __attribute__((weak)) type name;
// Behind a kernel's own arguments the runtime puts how many workgroups there are.
HIP_DEVICE unsigned hip_workgroups(int dimension) {
  return ((const __attribute__((
      address_space(4))) unsigned*)__builtin_amdgcn_implicitarg_ptr())[dimension];
}
HIP_PLACE(HipThread, threadIdx, __builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(),
          __builtin_amdgcn_workitem_id_z())
HIP_PLACE(HipBlock, blockIdx, __builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(),
          __builtin_amdgcn_workgroup_id_z())
HIP_PLACE(HipBlockSize, blockDim, __builtin_amdgcn_workgroup_size_x(),
          __builtin_amdgcn_workgroup_size_y(), __builtin_amdgcn_workgroup_size_z())
HIP_PLACE(HipGridSize, gridDim, hip_workgroups(0), hip_workgroups(1), hip_workgroups(2))
#undef HIP_PLACE

constexpr int warpSize = 64;

HIP_DEVICE unsigned __lane_id() {
  return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
}

// ---- Waiting for others -------------------------------------------------------------------------

HIP_DEVICE void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
HIP_DEVICE void __syncwarp() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
HIP_DEVICE void __threadfence_block() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup"); }
HIP_DEVICE void __threadfence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
HIP_DEVICE void __threadfence_system() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, ""); }

// ---- Within a wave ------------------------------------------------------------------------------

HIP_DEVICE unsigned long long __ballot(int predicate) {
  return __builtin_amdgcn_ballot_w64(predicate != 0);
}
HIP_DEVICE unsigned long long __activemask() { return __ballot(1); }
HIP_DEVICE int __any(int predicate) { return __ballot(predicate) != 0; }
HIP_DEVICE int __all(int predicate) { return __ballot(predicate == 0) == 0; }

// What the lane `from` has, of any type: whole words at a time.
template <class Value>
HIP_DEVICE Value hip_of_lane(const Value& value, int from) {
  constexpr int words = (sizeof(Value) + 3) / 4;
  int all[words] = {};
  __builtin_memcpy(all, &value, sizeof(Value));
#pragma unroll
  for (int n = 0; n < words; ++n) all[n] = __builtin_amdgcn_ds_bpermute(from * 4, all[n]);
  Value result;
  __builtin_memcpy(&result, all, sizeof(Value));
  return result;
}
template <class Value>
HIP_DEVICE Value __shfl(Value value, int lane, int width = warpSize) {
  const int first = __lane_id() & ~(width - 1);
  return hip_of_lane(value, first + (lane & (width - 1)));
}
template <class Value>
HIP_DEVICE Value __shfl_up(Value value, unsigned delta, int width = warpSize) {
  const int own = __lane_id(), from = own - static_cast<int>(delta);
  return hip_of_lane(value, from < (own & ~(width - 1)) ? own : from);
}
template <class Value>
HIP_DEVICE Value __shfl_down(Value value, unsigned delta, int width = warpSize) {
  const int own = __lane_id(), in_group = own & (width - 1);
  return hip_of_lane(value, in_group + static_cast<int>(delta) >= width ? own : own + delta);
}
template <class Value>
HIP_DEVICE Value __shfl_xor(Value value, int mask, int width = warpSize) {
  const int own = __lane_id(), from = own ^ mask;
  return hip_of_lane(value, from >= ((own + width) & ~(width - 1)) ? own : from);
}

// ---- Atomic operations --------------------------------------------------------------------------

#define HIP_ATOMIC(name, operation)                                        \
  template <class Value>                                                   \
  HIP_DEVICE Value name(Value* place, decltype(Value() + Value()) value) { \
    return operation(place, static_cast<Value>(value), __ATOMIC_RELAXED,   \
                     __HIP_MEMORY_SCOPE_AGENT);                            \
  }
HIP_ATOMIC(atomicAdd, __hip_atomic_fetch_add)
HIP_ATOMIC(atomicMax, __hip_atomic_fetch_max)
HIP_ATOMIC(atomicMin, __hip_atomic_fetch_min)
HIP_ATOMIC(atomicAnd, __hip_atomic_fetch_and)
HIP_ATOMIC(atomicOr, __hip_atomic_fetch_or)
HIP_ATOMIC(atomicXor, __hip_atomic_fetch_xor)
HIP_ATOMIC(atomicExch, __hip_atomic_exchange)
#undef HIP_ATOMIC
template <class Value>
HIP_DEVICE Value atomicSub(Value* place, decltype(Value() + Value()) value) {
  return atomicAdd(place, -value);
}
template <class Value>
HIP_DEVICE Value atomicCAS(Value* place, Value expected, Value value) {
  __hip_atomic_compare_exchange_strong(place, &expected, value, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                       __HIP_MEMORY_SCOPE_AGENT);
  return expected;
}

// ---- Mathematics --------------------------------------------------------------------------------

#define HIP_FUNCTION(name)                                             \
  HIP_DEVICE float name##f(float x) { return __builtin_##name##f(x); } \
  HIP_DEVICE float name(float x) { return __builtin_##name##f(x); }
HIP_FUNCTION(ceil)
HIP_FUNCTION(exp)
HIP_FUNCTION(exp2)
HIP_FUNCTION(fabs)
HIP_FUNCTION(floor)
HIP_FUNCTION(log)
HIP_FUNCTION(log10)
HIP_FUNCTION(log2)
HIP_FUNCTION(rint)
HIP_FUNCTION(round)
HIP_FUNCTION(sqrt)
HIP_FUNCTION(trunc)
#undef HIP_FUNCTION
HIP_DEVICE double ceil(double x) { return __builtin_ceil(x); }
HIP_DEVICE double fabs(double x) { return __builtin_fabs(x); }
HIP_DEVICE double floor(double x) { return __builtin_floor(x); }
HIP_DEVICE double sqrt(double x) { return __builtin_sqrt(x); }
HIP_DEVICE double fma(double x, double y, double z) { return __builtin_fma(x, y, z); }
HIP_DEVICE float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
HIP_DEVICE float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
HIP_DEVICE float fmaxf(float x, float y) { return __builtin_fmaxf(x, y); }
HIP_DEVICE float fminf(float x, float y) { return __builtin_fminf(x, y); }
HIP_DEVICE float rsqrtf(float x) { return __builtin_amdgcn_rsqf(x); }
HIP_DEVICE float __expf(float x) { return __builtin_amdgcn_exp2f(x * 1.442695041f); }
HIP_DEVICE float __logf(float x) { return __builtin_amdgcn_logf(x) * 0.693147181f; }
HIP_DEVICE float __log2f(float x) { return __builtin_amdgcn_logf(x); }
HIP_DEVICE float __frcp_rn(float x) { return 1 / x; }
HIP_DEVICE float __frsqrt_rn(float x) { return 1 / __builtin_sqrtf(x); }
HIP_DEVICE float __fdividef(float x, float y) { return x * __builtin_amdgcn_rcpf(y); }
// 1 - 2 / (e^2|x| + 1), and for small ones, of which that loses the last digits, a series.
HIP_DEVICE float tanhf(float x) {
  const float size = __builtin_fabsf(x), square = x * x;
  const float far = 1 - 2 / (__builtin_expf(2 * size) + 1);
  const float near =
      size + size * square * (-0.333333333f + square * (0.133333333f - 0.053968254f * square));
  return __builtin_copysignf(size < 0.25f ? near : far, x);
}
#define HIP_OF_TWO(type)                                        \
  HIP_DEVICE type max(type x, type y) { return x > y ? x : y; } \
  HIP_DEVICE type min(type x, type y) { return x < y ? x : y; }
HIP_OF_TWO(int)
HIP_OF_TWO(unsigned)
HIP_OF_TWO(long)
HIP_OF_TWO(unsigned long)
HIP_OF_TWO(long long)
HIP_OF_TWO(unsigned long long)
#undef HIP_OF_TWO
HIP_DEVICE float max(float x, float y) { return __builtin_fmaxf(x, y); }
HIP_DEVICE float min(float x, float y) { return __builtin_fminf(x, y); }
HIP_DEVICE double max(double x, double y) { return __builtin_fmax(x, y); }
HIP_DEVICE double min(double x, double y) { return __builtin_fmin(x, y); }
HIP_DEVICE int abs(int x) { return x < 0 ? -x : x; }
HIP_DEVICE float abs(float x) { return __builtin_fabsf(x); }

HIP_DEVICE int __popc(unsigned x) { return __builtin_popcount(x); }
HIP_DEVICE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
HIP_DEVICE int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
HIP_DEVICE int __clzll(unsigned long long x) { return x ? __builtin_clzll(x) : 64; }
HIP_DEVICE int __ffs(unsigned x) { return __builtin_ffs(x); }
HIP_DEVICE int __ffsll(unsigned long long x) { return __builtin_ffsll(x); }
HIP_DEVICE unsigned __brev(unsigned x) { return __builtin_bitreverse32(x); }
template <class To, class From>
HIP_DEVICE To hip_bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}
HIP_DEVICE int __float_as_int(float x) { return hip_bits_as<int>(x); }
HIP_DEVICE unsigned __float_as_uint(float x) { return hip_bits_as<unsigned>(x); }
HIP_DEVICE float __int_as_float(int x) { return hip_bits_as<float>(x); }
HIP_DEVICE float __uint_as_float(unsigned x) { return hip_bits_as<float>(x); }
HIP_DEVICE long long clock64() { return __builtin_readcyclecounter(); }

// ---- 16 bits ------------------------------------------------------------------------------------

typedef _Float16 __half, half;
typedef _Float16 __half2 __attribute__((ext_vector_type(2)));
typedef __half2 half2;
HIP_DEVICE float __half2float(__half x) { return x; }
HIP_DEVICE __half __float2half(float x) { return static_cast<__half>(x); }
HIP_DEVICE __half2 __halves2half2(__half x, __half y) { return __half2{x, y}; }
HIP_DEVICE __half2 __float2half2_rn(float x) { return __half2{__half(x), __half(x)}; }
HIP_DEVICE __half2 __floats2half2_rn(float x, float y) { return __half2{__half(x), __half(y)}; }
HIP_DEVICE float2 __half22float2(__half2 x) { return float2{x.x, x.y}; }
HIP_DEVICE __half __low2half(__half2 x) { return x.x; }
HIP_DEVICE __half __high2half(__half2 x) { return x.y; }
HIP_DEVICE __half __hadd(__half x, __half y) { return x + y; }
HIP_DEVICE __half __hsub(__half x, __half y) { return x - y; }
HIP_DEVICE __half __hmul(__half x, __half y) { return x * y; }
HIP_DEVICE __half __hfma(__half x, __half y, __half z) { return __builtin_fmaf16(x, y, z); }
HIP_DEVICE __half2 __hadd2(__half2 x, __half2 y) { return x + y; }
HIP_DEVICE __half2 __hmul2(__half2 x, __half2 y) { return x * y; }
HIP_DEVICE __half2 __hfma2(__half2 x, __half2 y, __half2 z) {
  return __builtin_elementwise_fma(x, y, z);
}

typedef __bf16 __hip_bfloat16, hip_bfloat16, __nv_bfloat16;
typedef __bf16 __hip_bfloat162 __attribute__((ext_vector_type(2)));
HIP_DEVICE float __bfloat162float(__hip_bfloat16 x) {
  return hip_bits_as<float>(static_cast<unsigned>(hip_bits_as<unsigned short>(x)) << 16);
}
// To the nearest one, of two as near to the even one; a NaN stays one.
HIP_DEVICE __hip_bfloat16 __float2bfloat16(float x) {
  const unsigned bits = hip_bits_as<unsigned>(x);
  const unsigned rounded = x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
  return hip_bits_as<__hip_bfloat16>(static_cast<unsigned short>(rounded >> 16));
}
