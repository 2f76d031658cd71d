// Forward: the way of a wave's output from registers to memory.
#pragma once

#include "forward.h"
#include "split_results.h"

constexpr int kValueBlocks = kHdimV / 32;
using OwnResult = SplitResult<kValueBlocks, kWaves>;

// What a wave of a split of the task leaves.
__device__ inline OwnResult split_result_of(const Task& task, int split, int wave) {
  return OwnResult::of(task.workspace, task.tile * task.num_splits + split, wave);
}

// The 32 rows of the output that begin with `rows`, on their way from registers through LDS, where
// there are 64 values of each row together.
template <bool kAreFar>
struct OutputRows {
  Rows rows;
  __amdgpu_buffer_rsrc_t buffer;

  __device__ explicit OutputRows(Rows given) : rows(given) {
    // The stride of a single row may be anything, and has to lead behind the end.
    if (rows.count == 1) rows.stride = kHdimV * 2;
    buffer = buffer_of<32, kHdimV * 2>(rows);
  }

  // Puts four values of a lane there, the accumulator's 4 * group and on.
  __device__ static void put(Lds<char> exchange, int group, f32x4 values, int lane) {
    *(Lds<u32x2>)(exchange + Exchange::accumulator_place(group, lane)) =
        u32x2{packed_results<DTYPE>(values.x, values.y), packed_results<DTYPE>(values.z, values.w)};
  }

  // Stores eight rows of the 64 values from `column` on.
  __device__ void store(Lds<const char> exchange, int pass, int column, int lane) const {
    const int row = Exchange::row_of(pass, lane), chunk = Exchange::chunk_of(lane);
    const u32x4 values =
        Exchange::unswapped(*(Lds<const u32x4>)(exchange + Exchange::place(row, chunk)), pass);
    const int offset = column * 2 + chunk * 16;
    if constexpr (!kAreFar)
      __builtin_amdgcn_raw_buffer_store_b128(values, buffer, row * rows.stride + offset, 0, 0);
    else if (row < rows.count)
      *(Global<u32x4>)(rows.base + static_cast<unsigned long>(row) * rows.stride + offset) = values;
  }
};

// What the output is multiplied with in the end. Rows that see no key are zero.
__device__ inline float output_scale(const Task& task, float row_sum) {
  return row_sum == 0 ? 0 : __builtin_amdgcn_rcpf(row_sum) * task.value_scale;
}

__device__ inline void store_lse(const Head& head, int first_row, float maximum, float row_sum,
                                 int lane) {
  const int row = first_row + lane % 32;
  if (head.lse && lane < 32 && row < head.q.count)
    head.lse[row] = row_sum == 0 ? -kInfinity : (maximum + __builtin_amdgcn_logf(row_sum)) * kLn2;
}

template <bool kAreFar, class Wave>
__device__ inline void store_output(Wave& wave, const Task& task, int first_row, Lds<char> exchange,
                                    int lane) {
  const OutputRows<kAreFar> rows(task.head.o.from(first_row));
  const float sum = wave.row_sum(lane);
  wave.clear_blind_rows(sum);
  const float factor = output_scale(task, sum);
#pragma unroll
  for (int first = 0; first < kValueBlocks; first += 2) {
#pragma unroll
    for (int group = 0; group < 8; ++group) {
      const f32x16& o = wave.output[first + group / 4];
      const int i = group % 4 * 4;
      rows.put(exchange, group, f32x4{o[i], o[i + 1], o[i + 2], o[i + 3]} * factor, lane);
    }
    wave_barrier();
#pragma unroll
    for (int pass = 0; pass < Exchange::kPasses; ++pass)
      rows.store(exchange, pass, first * 32, lane);
    wave_barrier();
  }
  store_lse(task.head, first_row, wave.maximum, sum, lane);
}
