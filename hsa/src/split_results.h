// What splits of the keys leave in the workspace, and what the kernel that combines them makes of
// it.
#pragma once

#include "attention.h"
#include "workgroups.h"

// As many as jitfmha/kernels/ready/key_split.py makes at most: a buffer's offsets reach them.
constexpr int kMostSplits = 1024;

// What one wave of a split leaves: its registers, as they are. kWaves are those of a workgroup.
template <int kValueBlocks, int kWaves>
struct SplitResult {
  static constexpr int kQuads = 4 * kValueBlocks;
  static constexpr int kMaximum = kQuads * 4 * 64, kSum = kMaximum + 64;  // where, in floats
  static constexpr int kFloats = kSum + 64;                               // of a wave
  Global<float> base;

  // `index` counts the splits of all tiles in the workspace.
  __device__ static SplitResult of(Global<float> workspace, int index, int wave_index) {
    return {workspace + (static_cast<unsigned long>(index) * kWaves + wave_index) * kFloats};
  }

  template <class Wave>
  __device__ void store(const Wave& wave, int lane) const {
    // Four values of each lane lie together, so that lanes move whole lines.
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const f32x16& o = wave.output[i / 4];
      const int at = i % 4 * 4;
      ((Global<f32x4>)(base + i * 256))[lane] = f32x4{o[at], o[at + 1], o[at + 2], o[at + 3]};
    }
    base[kMaximum + lane] = wave.maximum;
    base[kSum + lane] = wave.sum;
  }
};

// What all splits of a tile left for one of its waves, as one lane sees it.
template <int kValueBlocks, int kWaves>
struct SplitResults {
  using Result = SplitResult<kValueBlocks, kWaves>;
  static constexpr int kBytes = Result::kFloats * 4;  // of a split
  static constexpr int kStride = kWaves * kBytes;
  __amdgpu_buffer_rsrc_t buffer;
  int lane;

  // Lanes without a row read zeros, from behind the end.
  __device__ SplitResults(const Result& first, int num_splits, int given_lane, bool has_row)
      : lane(has_row ? given_lane : 1 << 26) {
    const Rows rows = {(Global<const char>)first.base, kStride, num_splits};
    buffer = buffer_of<kMostSplits, kBytes>(rows);
  }

  __device__ f32x4 quad(int split, int i) const {
    const int offset = split * kStride + i * 1024 + lane * 16;
    return bits_as<f32x4>(__builtin_amdgcn_raw_buffer_load_b128(buffer, offset, 0, 0));
  }
  __device__ float maximum(int split) const { return value(split, Result::kMaximum); }
  __device__ float sum(int split) const { return value(split, Result::kSum); }

 private:
  __device__ float value(int split, int at) const {
    const int offset = split * kStride + at * 4 + lane * 4;
    return bits_as<float>(__builtin_amdgcn_raw_buffer_load_b32(buffer, offset, 0, 0));
  }
};

// What all splits make together: kQuads of a lane's fours of the output, and the maximum and sum of
// what the lane has seen. kAtOnce splits are loaded at once.
template <int kQuads, int kAtOnce>
struct CombinedSplits {
  float maximum = kNoMaximum, sum = 0;
  f32x4 output[kQuads];

  template <class Results>
  __device__ static CombinedSplits of(const Results& results, int first_quad, int num_splits) {
    const int last_split = num_splits - 1;
    CombinedSplits combined;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) combined.output[i] = f32x4(0);
    for (int first = 0; first <= last_split; first += kAtOnce) {
      float maxima[kAtOnce], sums[kAtOnce];
      f32x4 quads[kAtOnce][kQuads];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) maxima[n] = results.maximum(smaller(first + n, last_split));
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        // Behind the last split these are zeros.
        sums[n] = results.sum(first + n);
#pragma unroll
        for (int i = 0; i < kQuads; ++i) quads[n][i] = results.quad(first + n, first_quad + i);
      }
      // Left alone, the compiler would load each when it is needed, to save registers.
      __builtin_amdgcn_sched_barrier(0);
      combined.add(maxima, sums, quads);
    }
    return combined;
  }

  // Of the probabilities of the whole row: the other half of the wave has seen the other keys.
  __device__ float row_sum(int lane) const {
    return sum + bits_as<float>(__builtin_amdgcn_ds_bpermute((lane ^ 32) * 4, bits_as<int>(sum)));
  }

 private:
  __device__ void add(const float (&maxima)[kAtOnce], const float (&sums)[kAtOnce],
                      const f32x4 (&quads)[kAtOnce][kQuads]) {
    float next = maximum;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) next = __builtin_fmaxf(next, maxima[n]);
    const float before = __builtin_amdgcn_exp2f(maximum - next);
    maximum = next;
    sum *= before;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) output[i] *= before;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const float factor = __builtin_amdgcn_exp2f(maxima[n] - maximum);
      sum += sums[n] * factor;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) output[i] += quads[n][i] * factor;
    }
  }
};
