// Results that are used before the s_waitcnt that covers them, although the emulator itself has
// them at once. Counters and orders: CDNA3 and CDNA4 ISA documents, 4.4 "Data Dependency
// Resolution".
//
//   vmcnt     vector memory, loads and stores alike, in the order of issue
//   lgkmcnt   LDS in the order of issue among themselves; scalar memory and messages in any order
//   both      FLAT: in any order, so that only zero covers it ("Important Timing Consideration")
//
// vmcnt holds no more than 63: behind so many, an operation is issued when the first is complete.
//
// An operation of an in-order kind is complete when the counter was seen at or below the number of
// operations of its own kind that were issued after it: operations of other kinds only make the
// counter larger.
#include <algorithm>

#include "checks/check.h"

namespace emulator {
namespace {

constexpr u32 kVmcntLimit = 63, kLgkmcntLimit = 15;  // waits for so many do not wait at all

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
int find_pending(CounterState& state, const RegisterRange& range, Order writes_in) {
  for (u32 reg = range.first; reg < range.end(); ++reg) {
    u64& word = state.pending[reg / 64];
    if (__builtin_expect(word == 0, 1)) {  // skip to the next 64
      reg |= 63;
      continue;
    }
    const u64 bit = u64{1} << (reg % 64);
    if (!(word & bit)) continue;
    const CounterState::Operation& operation = state.operations[reg];
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

}  // namespace

void CounterState::complete(Order order, u32 outstanding) {
  const u32 all = issued[static_cast<u32>(order)];
  u32& done = completed[static_cast<u32>(order)];
  if (all > outstanding) done = std::max(done, all - outstanding);
}

void check_counters(Wave& wave, const Instruction& inst, const InstructionTraits& traits) {
  CounterState& state = wave.observation->counters;
  const auto check = [&](const RegisterRange& range, bool is_write) {
    const int reg = find_pending(state, range, is_write ? traits.order : Order::none);
    if (reg < 0) return;
    const CounterState::Operation& operation = state.operations[reg];
    report(wave, inst, FindingKind::wait_count, -1, [&] {
      return formatted(
          "%s %s, the result of %s, before an s_waitcnt (%s) covers it",
          is_write ? "overwrites" : "uses", name_of_register(static_cast<u32>(reg)).c_str(),
          instruction_at(wave, operation.dword).c_str(), counter_name(operation.order));
    });
  };
  for (const RegisterRange& range : traits.reads) check(range, false);
  for (const RegisterRange& range : traits.writes) check(range, true);

  u32 serial = 0;
  if (traits.order != Order::none) {
    serial = ++state.issued[static_cast<u32>(traits.order)];
    if (traits.order == Order::vector_memory) state.complete(Order::vector_memory, kVmcntLimit);
    if (!traits.has_result) return;
  }
  for (const RegisterRange& range : traits.writes) {
    for (u32 reg = range.first; reg < range.end(); ++reg) {
      u64& word = state.pending[reg / 64];
      const u64 bit = u64{1} << (reg % 64);
      if (traits.order == Order::none) {
        word &= ~bit;  // it is written at once: also where that was reported
        continue;
      }
      word |= bit;
      state.operations[reg] = {traits.order, serial, dword_of(wave, inst)};
    }
  }
}

void hooks::waitcnt(Wave& wave, u32 vmcnt, u32 lgkmcnt, u32) {
  CounterState& state = wave.observation->counters;
  if (vmcnt < kVmcntLimit) state.complete(Order::vector_memory, vmcnt);
  if (lgkmcnt < kLgkmcntLimit) state.complete(Order::lds, lgkmcnt);
  if (lgkmcnt == 0) state.complete(Order::scalar, 0);
  const u32 flat = state.issued[static_cast<u32>(Order::flat)];
  if (vmcnt == 0) state.flat_vmcnt_done = flat;
  if (lgkmcnt == 0) state.flat_lgkmcnt_done = flat;
  state.completed[static_cast<u32>(Order::flat)] =
      std::min(state.flat_vmcnt_done, state.flat_lgkmcnt_done);
}

}  // namespace emulator
