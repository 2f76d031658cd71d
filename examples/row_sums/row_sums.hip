// The sum of each row of a matrix of floats: a workgroup of four waves takes four rows, one after
// the other. It has three faults, which -DMENDED mends; docs/emulator.md finds them.
#include <hip/hip_runtime.h>

constexpr int kThreads = 256, kRows = 4;

extern "C" __global__ void __launch_bounds__(kThreads)
    row_sums(const float* x, float* sums, int rows, int columns) {
  __shared__ float partial[kThreads];
#pragma unroll 1
  for (int i = 0; i < kRows; ++i) {
    const int row = blockIdx.x * kRows + i;
#ifdef MENDED
    if (row >= rows) return;  // the same for all waves
#endif
    float sum = 0;
    for (int column = threadIdx.x; column < columns; column += kThreads)
      sum += x[row * columns + column];
    partial[threadIdx.x] = sum;
    for (int width = kThreads / 2; width; width /= 2) {
#ifdef MENDED
      __syncthreads();
#endif
      if (threadIdx.x < width) partial[threadIdx.x] += partial[threadIdx.x + width];
    }
    if (threadIdx.x == 0) sums[row] = partial[0];
#ifdef MENDED
    // The next row's sums come into the same place, of which thread 0 has yet to read.
    __syncthreads();
#endif
  }
}
