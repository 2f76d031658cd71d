// The sum of each row of a matrix of floats: a workgroup of four waves takes four rows, one after
// the other. It has three faults, which -DMENDED mends; docs/emulator.md finds them.

constexpr int kThreads = 256, kRows = 4;

extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads))) void
row_sums(const float* x, float* sums, int rows, int columns) {
  __shared__ float partial[kThreads];
  const int thread = __builtin_amdgcn_workitem_id_x();
#pragma unroll 1
  for (int i = 0; i < kRows; ++i) {
    const int row = __builtin_amdgcn_workgroup_id_x() * kRows + i;
#ifdef MENDED
    if (row >= rows) return;  // the same for all waves
#endif
    float sum = 0;
    for (int column = thread; column < columns; column += kThreads)
      sum += x[row * columns + column];
    partial[thread] = sum;
    for (int width = kThreads / 2; width; width /= 2) {
#ifdef MENDED
      __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
      __builtin_amdgcn_s_barrier();
      __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
#endif
      if (thread < width) partial[thread] += partial[thread + width];
    }
    if (thread == 0) sums[row] = partial[0];
#ifdef MENDED
    // The next row's sums come into the same place, of which thread 0 has yet to read.
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
#endif
  }
}
