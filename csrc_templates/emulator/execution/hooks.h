// Where the sanitizer (checks/) and the cost model (profile/) look in.
//
// Each has a library of its own, and its folder defines the functions below; other code is compiled
// once for both, with -DJITFMHA_EMULATOR_OBSERVED=1. Without that, every hook is an empty inline
// function and its arguments fold away. What does not include this file is the same in all
// libraries, so nothing else may ask for the macro.
//
// Instruction families never call hooks: the operand layer (lanes.h, scalar_operands.h), the memory
// functions (memory.h) and the scheduler do.
#pragma once

#include <vector>

#include "execution/wave.h"

#ifndef JITFMHA_EMULATOR_OBSERVED
#define JITFMHA_EMULATOR_OBSERVED 0
#endif

namespace emulator::hooks {

#if JITFMHA_EMULATOR_OBSERVED
constexpr bool kObserving = true;
#define EMULATOR_HOOK(...) __VA_ARGS__;
#else
constexpr bool kObserving = false;
#define EMULATOR_HOOK(...) \
  inline __VA_ARGS__ {}
#endif

// Empty hooks use none of their parameters, whose names are what documents them.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"

// Begin creates and end frees `observation` of the launch, workgroup or wave. Workgroups run on
// several threads at once; dispatch_begin and dispatch_end run alone. *_end also run after a fault.
EMULATOR_HOOK(void dispatch_begin(Dispatch&))
EMULATOR_HOOK(void dispatch_end(Dispatch&))
EMULATOR_HOOK(void workgroup_begin(Workgroup&))
EMULATOR_HOOK(void workgroup_end(Workgroup&))
EMULATOR_HOOK(void wave_begin(Wave&))  // registers hold their initial state
EMULATOR_HOOK(void wave_end(Wave&))

EMULATOR_HOOK(void before_instruction(Wave&, const Instruction&))
EMULATOR_HOOK(void after_instruction(Wave&, const Instruction&))
// In place of both, under MODE.VSKIP.
EMULATOR_HOOK(void instruction_skipped(Wave&, const Instruction&))

// Registers index .. index + dwords - 1; `lanes` are those that are read or written.
EMULATOR_HOOK(void vgpr_read(Wave&, u32 index, u32 dwords, u64 lanes))
EMULATOR_HOOK(void vgpr_written(Wave&, u32 index, u32 dwords, u64 lanes))
// Each active lane's result is what lane from[lane] of the data that was read holds.
EMULATOR_HOOK(void lanes_gathered(Wave&, const u32 (&from)[kLanes]))
// Scalar registers by operand encoding: SGPRs, vcc, m0, exec.
EMULATOR_HOOK(void scalar_read(Wave&, u32 index, u32 dwords))
EMULATOR_HOOK(void scalar_written(Wave&, u32 index, u32 dwords))

// One lane's access, before it happens. `lane` is kScalarLane for SMEM.
EMULATOR_HOOK(void global_access(Wave&, const Instruction&, int lane, u64 address, u32 bytes,
                                 Access))
EMULATOR_HOOK(void scratch_access(Wave&, const Instruction&, int lane, u64 offset, u32 bytes,
                                  Access))
// 64 bytes for an access outside of memory, so that the kernel goes on. Null: the fault is thrown.
#if JITFMHA_EMULATOR_OBSERVED
u8* instead_of_memory(Wave&, const Instruction&, bool is_scratch, const Fault&);
#else
inline u8* instead_of_memory(Wave&, const Instruction&, bool, const Fault&) { return nullptr; }
#endif
// As global_access; also called for offsets outside of the allocation.
EMULATOR_HOOK(void lds_access(Wave&, const Instruction&, int lane, u64 offset, u32 bytes, Access))

// s_waitcnt: wait until at most this many are outstanding; a counter that does not matter is ~0.
EMULATOR_HOOK(void waitcnt(Wave&, u32 vmcnt, u32 lgkmcnt, u32 expcnt))
// All waves that have not ended are at the barrier.
EMULATOR_HOOK(void barrier_arrived(Wave&))
EMULATOR_HOOK(void barrier_released(Workgroup&))

// The workgroups that run, by linear number, in ascending order; none: all of them. The cost model
// looks at a part of large launches.
#if JITFMHA_EMULATOR_OBSERVED
std::vector<u64> selected_workgroups(const Dispatch&);
#else
inline std::vector<u64> selected_workgroups(const Dispatch&) { return {}; }
#endif

#pragma GCC diagnostic pop
#undef EMULATOR_HOOK

}  // namespace emulator::hooks
