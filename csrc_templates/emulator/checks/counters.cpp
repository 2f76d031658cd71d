// Results that are used before the s_waitcnt that covers them, although the emulator itself has
// them at once. Counters and orders: CDNA3 and CDNA4 ISA documents, 4.4 "Data Dependency
// Resolution".
//
//   vmcnt     vector memory, loads and stores alike, in the order of issue
//   lgkmcnt   LDS in the order of issue among themselves; scalar memory and messages in any order
//   both      FLAT: in any order, so that only zero covers it ("Important Timing Consideration")
//
// An operation of an in-order kind is complete when the counter was seen at or below the number of
// operations of its own kind that were issued after it: operations of other kinds only make the
// counter larger.
#include "checks/check.h"

#if JITFMHA_EMULATOR_CHECK

#include <algorithm>

namespace emulator {

namespace {

constexpr u32 kVmcntLimit = 63, kLgkmcntLimit = 15;  // these do not wait at all

const char* counter_name(Order order) {
  switch (order) {
    case Order::vector_memory: return "vmcnt";
    case Order::lds:
    case Order::scalar: return "lgkmcnt";
    default: return "vmcnt and lgkmcnt, both 0";
  }
}

// The first register of the range whose pending result `inst` must not touch; -1 if there is none.
// Pending marks of complete operations are removed on the way.
int find_pending(CounterState& state, u64* pending, CounterState::Pending* operations,
                 const RegisterRange& range, Order writes_in) {
  for (u32 reg = range.first; reg < u32{range.first} + range.count; ++reg) {
    u64& word = pending[reg / 64];
    if (__builtin_expect(word == 0, 1)) {  // skip to the next 64
      reg |= 63;
      continue;
    }
    const u64 bit = u64{1} << (reg % 64);
    if (!(word & bit)) continue;
    const CounterState::Pending& operation = operations[reg];
    if (state.is_complete(operation.order, operation.serial)) {
      word &= ~bit;
      continue;
    }
    // Results of one order arrive in that order: the later one stays.
    const bool in_order = operation.order == Order::vector_memory || operation.order == Order::lds;
    if (writes_in == operation.order && in_order) continue;
    return static_cast<int>(reg);
  }
  return -1;
}

void report_pending(Wave& wave, const Instruction& inst, const std::string& name,
                    const CounterState::Pending& operation, bool is_write) {
  report(wave, inst, FindingKind::wait_count, -1, [&] {
    return formatted("%s %s, the result of %s, before an s_waitcnt (%s) covers it",
                     is_write ? "overwrites" : "uses", name.c_str(),
                     instruction_at(wave, operation.dword).c_str(), counter_name(operation.order));
  });
}

}  // namespace

void check_counters(Wave& wave, const Instruction& inst, const InstructionTraits& traits) {
  CounterState& state = wave.observation->counters;
  const auto check_vgprs = [&](const RegisterRange& range, bool is_write) {
    const int reg = find_pending(state, state.pending_vgprs, state.vgpr, range,
                                 is_write ? traits.order : Order::none);
    if (reg >= 0)
      report_pending(wave, inst, register_name(static_cast<u32>(reg)), state.vgpr[reg], is_write);
  };
  const auto check_scalars = [&](const RegisterRange& range, bool is_write) {
    const int reg = find_pending(state, state.pending_scalars, state.scalar, range, Order::none);
    if (reg >= 0)
      report_pending(wave, inst, scalar_name(static_cast<u32>(reg)), state.scalar[reg], is_write);
  };
  for (u32 i = 0; i < traits.vgpr_read_count; ++i) check_vgprs(traits.vgpr_reads[i], false);
  for (u32 i = 0; i < traits.vgpr_write_count; ++i) check_vgprs(traits.vgpr_writes[i], true);
  for (u32 i = 0; i < traits.scalar_read_count; ++i) check_scalars(traits.scalar_reads[i], false);
  for (u32 i = 0; i < traits.scalar_write_count; ++i) check_scalars(traits.scalar_writes[i], true);

  if (traits.order == Order::none) {
    // Written at once: nothing is pending any more, also where that was reported.
    const auto clear = [](const RegisterRange& range, u64* pending) {
      for (u32 reg = range.first; reg < u32{range.first} + range.count; ++reg)
        pending[reg / 64] &= ~(u64{1} << (reg % 64));
    };
    for (u32 i = 0; i < traits.vgpr_write_count; ++i)
      clear(traits.vgpr_writes[i], state.pending_vgprs);
    for (u32 i = 0; i < traits.scalar_write_count; ++i)
      clear(traits.scalar_writes[i], state.pending_scalars);
    return;
  }
  const u32 serial = ++state.issued[static_cast<u32>(traits.order)];
  if (!traits.has_result) return;
  const CounterState::Pending operation{traits.order, serial, dword_of(wave, inst)};
  const auto mark = [&](const RegisterRange& range, u64* pending,
                        CounterState::Pending* operations) {
    for (u32 reg = range.first; reg < u32{range.first} + range.count; ++reg) {
      pending[reg / 64] |= u64{1} << (reg % 64);
      operations[reg] = operation;
    }
  };
  for (u32 i = 0; i < traits.vgpr_write_count; ++i)
    mark(traits.vgpr_writes[i], state.pending_vgprs, state.vgpr);
  for (u32 i = 0; i < traits.scalar_write_count; ++i)
    mark(traits.scalar_writes[i], state.pending_scalars, state.scalar);
}

void note_waitcnt(Wave& wave, u32 vmcnt, u32 lgkmcnt) {
  CounterState& state = wave.observation->counters;
  const auto mark_completed = [&](Order order, u32 outstanding) {
    const u32 issued = state.issued[static_cast<u32>(order)];
    u32& completed = state.completed[static_cast<u32>(order)];
    if (issued > outstanding) completed = std::max(completed, issued - outstanding);
  };
  if (vmcnt < kVmcntLimit) mark_completed(Order::vector_memory, vmcnt);
  if (lgkmcnt < kLgkmcntLimit) mark_completed(Order::lds, lgkmcnt);
  if (lgkmcnt == 0) mark_completed(Order::scalar, 0);
  const u32 flat = state.issued[static_cast<u32>(Order::flat)];
  if (vmcnt == 0) state.flat_vmcnt_done = flat;
  if (lgkmcnt == 0) state.flat_lgkmcnt_done = flat;
  state.completed[static_cast<u32>(Order::flat)] =
      std::min(state.flat_vmcnt_done, state.flat_lgkmcnt_done);
}

}  // namespace emulator

#endif
