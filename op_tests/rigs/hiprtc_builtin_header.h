// What hiprtc puts in front of a program, as far as names are concerned: those that a program must
// not be surprised by. Collected from ROCm's HIPRTC.cmake and the headers that it takes together.
#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __constant__ __attribute__((constant))
#define __shared__ __attribute__((shared))
#define __align__(x) __attribute__((aligned(x)))
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define HIP_INCLUDE_HIP_HIP_RUNTIME_H
#define warpSize 64

typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __SIZE_TYPE__ size_t;
typedef long clock_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;

namespace std {
using ::ptrdiff_t;
template <bool, typename = void>
struct enable_if {};
}  // namespace std

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
};
struct hip_bfloat16 {
  unsigned short data;
};

__device__ inline int min(int a, int b) { return a < b ? a : b; }
__device__ inline int max(int a, int b) { return a > b ? a : b; }
__device__ inline float fabsf(float x) { return __builtin_fabsf(x); }
__device__ inline float tanh(float x) { return __builtin_tanhf(x); }
__device__ inline void __syncthreads() { __builtin_amdgcn_s_barrier(); }
