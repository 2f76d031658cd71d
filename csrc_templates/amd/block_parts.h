// Parts of a block of rows that persistent workgroups share, and the output made of them.
//
// Each wave has 32 rows of a block, in every part the same ones. Where it finds the other parts of
// its group in memory, it adds them to what its registers have; else it leaves that there, and
// counts it. The last one to count finds all others, so nobody waits. A group is of a few parts
// that follow each other. What it makes is a part of a larger group: so most of many parts are
// added at the same time. Parts of a group are added in their order, whoever does it: the output
// does not depend on which workgroup is the last one.
//
// Counts and parts go past caches that are not those of the whole chip (agent scope), and what a
// wave's s_waitcnt has waited for is there. Source: LLVM's "User Guide for AMDGPU Backend", Memory
// Model GFX942.
//
// Included after Wave, Result and kResultFloats.
#pragma once

#include "forward_tasks.h"
#include "split_results.h"

// Where the parts of a block are. There are two for each cut at most: those around it.
__device__ inline Global<float> results_of_cut(const Arguments& a, int first_cut) {
  return a.workspace + 2L * first_cut * kResultFloats;
}

// The counts of a block, kWaves for each of its parts. Nothing is cut where share 0 begins: what
// would be left there has room for all counts.
__device__ inline Global<unsigned> counts_of_cut(Global<float> workspace, int first_cut) {
  return (Global<unsigned>)workspace + 2L * first_cut * kWaves;
}
static_assert(kMostSplits * kWaves <= kResultFloats);

// By all `threads` of one workgroup, before shares begin.
__device__ inline void clear_counts(const Arguments& a, unsigned workgroups, unsigned thread,
                                    unsigned threads) {
  for (unsigned i = thread; i < 2 * workgroups * kWaves; i += threads)
    ((Global<unsigned>)a.workspace)[i] = 0;
}

// Those of one wave, where so many share a SIMD.
template <int kWavesOfSimd>
class BlockParts {
  using Results = SplitResults<Wave::kValueBlocks, kWaves>;
  static constexpr int kGroup = 4;        // parts
  static constexpr int kAgentScope = 16;  // sc1
  // Whether a wave's own values are chosen from among those of a group, one by one. A branch takes
  // less time, and registers that three waves do not have.
  static constexpr bool kChooses = kWavesOfSimd > 2;
  // Fours of values that are on their way, of each part of a group: as many as there is room for
  // beside the wave's own values and what the kernel holds. Of them so many are added at once.
  static constexpr int kRegisters = kWavesOfSimd > 1 ? 512 / kWavesOfSimd : 256,
                       kHeld = 16 * Wave::kValueBlocks + (kChooses ? 92 : 56);
  static constexpr int kRoom = (kRegisters - kHeld) / (4 * kGroup);
  static constexpr int kQuads = kRoom >= 8 ? 8 : kRoom >= 4 ? 4 : kRoom >= 2 ? 2 : 1;
  static constexpr int kAtOnce = kQuads < 4 ? kQuads : 4;

 public:
  // Lanes without a row load zeros, and store nothing.
  __device__ BlockParts(const Arguments& a, const Task& task, int wave_index, int given_lane,
                        bool has_row)
      : count_(task.num_splits.divisor),
        counts_(counts_of_cut(a.workspace, task.first_cut) + wave_index),
        lane_(given_lane),
        results_(Result::of(task.results, 0, wave_index), count_, given_lane, has_row) {}

  // How many others of the first group of part `part` are there: asked before the part is made, so
  // that the answer is there when it is.
  __device__ static unsigned look(const Task& task, int wave_index, int part) {
    const Global<float> workspace = task.results - 2L * task.first_cut * kResultFloats;
    const Global<unsigned> counts =
        counts_of_cut(workspace, task.first_cut) + part / kGroup * kGroup * kWaves + wave_index;
    return loaded(counts + kWaves);
  }

  // Whether `wave`, which has made part number `part`, now has what all parts make. Otherwise that
  // is left to another wave. `looked` is what look() gave.
  __device__ bool complete(Wave& wave, int part, unsigned looked) const {
    int there = seen(looked);
#pragma unroll 1
    for (int step = 1; step < count_; step *= kGroup) {
      const int first = part / (step * kGroup) * (step * kGroup);
      const int others = (smaller(first + step * kGroup, count_) - first - 1) / step;
      if (others == 0) continue;
      // No other group, of whatever size, has the same second part.
      const Global<unsigned> count = counts_ + (first + step) * kWaves;
      if (step > 1) there = seen(loaded(count));
      if (there < others) {
        store(wave, part);
        if (counted(count) < others) return false;
      }
      add(wave, (part - first) / step, first, step, others + 1);
      part = first;
    }
    return true;
  }

 private:
  __device__ static unsigned loaded(Global<unsigned> count) {
    return __hip_atomic_load(count, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  }
  // What is loaded behind it was stored before.
  __device__ static int seen(unsigned count) {
    const int result = __builtin_amdgcn_readfirstlane(count);
    asm volatile("" ::: "memory");
    return result;
  }
  // Counts a part, behind its stores; gives how many there were before.
  __device__ int counted(Global<unsigned> count) const {
    asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
    unsigned before = 0;
    if (lane_ == 0)
      before = __hip_atomic_fetch_add(count, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    return seen(before);
  }

  __device__ void store(const Wave& wave, int part) const {
#pragma unroll
    for (int i = 0; i < Result::kQuads; ++i) {
      const f32x16& o = wave.output[i / 4];
      const int at = i % 4 * 4;
      const f32x4 four = {o[at], o[at + 1], o[at + 2], o[at + 3]};
      __builtin_amdgcn_raw_buffer_store_b128(bits_as<u32x4>(four), results_.buffer,
                                             offset_of_quad(part, i), 0, kAgentScope);
    }
    store(wave.maximum, part, Result::kMaximum);
    store(wave.sum, part, Result::kSum);
  }
  __device__ void store(float x, int part, int at) const {
    __builtin_amdgcn_raw_buffer_store_b32(bits_as<unsigned>(x), results_.buffer,
                                          offset_of(part, at), 0, kAgentScope);
  }
  __device__ float load(int part, int at) const {
    return bits_as<float>(
        __builtin_amdgcn_raw_buffer_load_b32(results_.buffer, offset_of(part, at), 0, kAgentScope));
  }
  __device__ f32x4 load_quad(int part, int i) const {
    return bits_as<f32x4>(__builtin_amdgcn_raw_buffer_load_b128(
        results_.buffer, offset_of_quad(part, i), 0, kAgentScope));
  }
  __device__ int offset_of(int part, int at) const {
    return part * Results::kStride + at * 4 + results_.lane * 4;
  }
  __device__ int offset_of_quad(int part, int i) const {
    return part * Results::kStride + i * 1024 + results_.lane * 16;
  }

  // Of what `size` parts of a group make, the wave has that of number `own`, and adds the others.
  __device__ void add(Wave& wave, int own, int first, int step, int size) const {
    static_assert(Result::kQuads % kAtOnce == 0 && kQuads % kAtOnce == 0);
    // Its own and those that the group lacks are zeros, from behind the end: so the compiler knows
    // how many loads are on their way.
    int parts[kGroup];
    float maxima[kGroup], sums[kGroup];
    f32x4 values[kGroup][kQuads];
    const auto load_quads = [&](int n, int first_quad) {
#pragma unroll
      for (int i = first_quad; i < first_quad + kAtOnce; ++i)
        values[n][i % kQuads] = load_quad(parts[n], i);
    };
#pragma unroll
    for (int n = 0; n < kGroup; ++n) {
      parts[n] = n != own && n < size ? first + n * step : kMostSplits;
      maxima[n] = load(parts[n], Result::kMaximum);
      sums[n] = load(parts[n], Result::kSum);
    }
#pragma unroll
    for (int quad = 0; quad < kQuads; quad += kAtOnce)
#pragma unroll
      for (int n = 0; n < kGroup; ++n) load_quads(n, quad);
    __builtin_amdgcn_sched_barrier(0);  // or each would be loaded when it is needed
    float largest = wave.maximum;
#pragma unroll
    for (int n = 0; n < kGroup; ++n) {
      if (parts[n] == kMostSplits) maxima[n] = wave.maximum;
      if (n == own) sums[n] = wave.sum;
      largest = __builtin_fmaxf(largest, maxima[n]);
    }
    float sum = 0, factors[kGroup];
#pragma unroll
    for (int n = 0; n < kGroup; ++n) {
      factors[n] = __builtin_amdgcn_exp2f((maxima[n] - largest) * kUnitOfMaxima);
      sum = __builtin_fmaf(sums[n], factors[n], sum);
    }
#pragma unroll
    for (int quad = 0; quad < Result::kQuads; quad += kAtOnce) {
      f32x4 made[kAtOnce] = {};
      const auto own_quad = [&](int i) -> f32x4 {
        const f32x16& o = wave.output[(quad + i) / 4];
        const int at = (quad + i) % 4 * 4;
        return {o[at], o[at + 1], o[at + 2], o[at + 3]};
      };
#pragma unroll
      for (int n = 0; n < kGroup; ++n) {
        const auto loaded_quad = [&](int i) { return values[n][(quad + i) % kQuads]; };
        const auto add = [&](auto four) {
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i)
            made[i] = __builtin_elementwise_fma(four(i), f32x4(factors[n]), made[i]);
        };
        if constexpr (kChooses) {
          add([&](int i) { return n == own ? own_quad(i) : loaded_quad(i); });
        } else if (n == own) {
          asm volatile("");  // or the compiler would choose
          add(own_quad);
        } else if (n < size) {
          asm volatile("");
          add(loaded_quad);
        }
        if (quad + kQuads < Result::kQuads) load_quads(n, quad + kQuads);
        __builtin_amdgcn_sched_barrier(0);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          wave.output[(quad + i) / 4][(quad + i) % 4 * 4 + j] = made[i][j];
    }
    wave.maximum = largest;
    wave.sum = sum;
  }

  int count_;
  Global<unsigned> counts_;
  int lane_;
  Results results_;
};
