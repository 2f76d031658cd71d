// Which workgroup waits for which other one, as those of stream-k and persistent kernels do: one
// polls a flag in memory until the other has stored to it.
//
// How often it polls here depends on whose turn it is, and tells nothing. So of iterations that
// look at the same flags, one after the other, only the last one is kept, which found what it waits
// for, and with it how many stores to the flag it has seen: estimate.py lets it wait for these. A
// loop that polls what no other workgroup stores waits for nobody, and keeps all of its iterations.
//
// A flag is stored to by an instruction that changes one dword, or two, with all of its lanes.
#include <algorithm>
#include <cstring>

#include "profile/profile.h"

namespace emulator {
namespace {

constexpr u64 kFlagBytes = 4, kMostFlagBytes = 8;

u32 content_of(u64 flag) {
  u32 value;
  std::memcpy(&value, reinterpret_cast<const u8*>(flag), sizeof(value));
  return value;
}

// Whether the instructions from `first` to `last`, the branch back, only look at memory.
bool only_polls(const CodeObject& code, u32 first, u32 last) {
  bool polls = false;
  for (u32 dword = first; dword < last; dword += code.instructions[dword].dwords) {
    const Instruction& inst = code.instructions[dword];
    if (!inst.definition) return false;
    const Unit unit = inst.definition->unit;
    if (unit == Unit::mfma || unit == Unit::vmem_store) return false;
    if (unit == Unit::vmem_atomic && !sees_other_units(inst)) return false;
    polls |= sees_other_units(inst);
  }
  return polls;
}

void commit(Wave& wave, const Iteration& iteration) {
  WaveObservation& state = *wave.observation;
  for (const auto& [dword, counts] : iteration.counts) (*state.counted_in)[dword] += counts;
  if (has_room_for_steps(wave)) state.steps.append(iteration.steps);
}

// Keeps `before_it`, which was no poll in vain.
void keep_before_it(Wave& wave) {
  WaveObservation& state = *wave.observation;
  const Flags& flags = wave.dispatch().observation->flags;
  const std::vector<Event>& events = state.before_it.steps.events;
  const bool waits = std::any_of(events.begin(), events.end(), [&](const Event& event) {
    return event.is_poll &&
           !flags.awaited(event.flag, event.number, number_of(*wave.workgroup)).empty();
  });
  for (u64 i = 0; !waits && i < state.polled_in_vain; ++i) commit(wave, state.in_vain);
  commit(wave, state.before_it);
  state.polled_in_vain = 0;
}

// The iteration that has ended takes the place of the one before it.
void end_iteration(Wave& wave) {
  WaveObservation& state = *wave.observation;
  if (!state.before_it.polls_as(state.iteration)) keep_before_it(wave);
  else if (!state.polled_in_vain++) state.in_vain = std::move(state.before_it);
  state.before_it = std::move(state.iteration);
  state.iteration = {};
}

}  // namespace

void Steps::append(const Steps& other) {
  for (Event event : other.events) {
    event.step += static_cast<u32>(steps.size());
    events.push_back(event);
  }
  steps.insert(steps.end(), other.steps.begin(), other.steps.end());
  lines.insert(lines.end(), other.lines.begin(), other.lines.end());
}

bool Iteration::polls_as(const Iteration& later) const {
  const std::vector<Event>&here = steps.events, &there = later.steps.events;
  const bool has_stored =
      std::any_of(here.begin(), here.end(), [](const Event& event) { return !event.is_poll; });
  const auto polls_of = [](const std::vector<Event>& events) {
    std::vector<u64> flags;
    for (const Event& event : events)
      if (event.is_poll) flags.push_back(event.flag);
    return flags;
  };
  const std::vector<u64> flags = polls_of(here);
  return !has_stored && !flags.empty() && flags == polls_of(there);
}

std::vector<int> polling_loops(const Dispatch& dispatch) {
  const CodeObject& code = *dispatch.code;
  const u32 begin = dispatch.kernel->entry_dword;
  u32 end = code.text_dwords;
  for (const auto& kernel : code.kernels)
    if (kernel->entry_dword > begin) end = std::min(end, kernel->entry_dword);
  std::map<u32, u32> last_of;  // branch back, by its target
  for (u32 dword = begin; dword < end; dword += code.instructions[dword].dwords) {
    const Instruction& inst = code.instructions[dword];
    if (!inst.definition || inst.definition->unit != Unit::branch) continue;
    const i64 target = i64{dword} + inst.dwords + inst.offset;
    if (inst.definition->format != Format::SOPP || target < i64{begin} || target > i64{dword})
      continue;
    last_of[static_cast<u32>(target)] = dword;
  }
  std::vector<int> loops;
  for (auto loop = last_of.begin(); loop != last_of.end(); ++loop) {
    const auto [first, last] = *loop;
    const auto is_inside = [last = last](const auto& other) { return other.second <= last; };
    const bool has_inner = std::any_of(std::next(loop), last_of.end(), is_inside);
    if (has_inner || !only_polls(code, first, last)) continue;
    loops.resize(code.instructions.size(), kNoLoop);
    std::fill(loops.begin() + first, loops.begin() + last + 1, static_cast<int>(first));
  }
  return loops;
}

// ---- Flags --------------------------------------------------------------------------------------

u64 Flags::note_store(u64 flag, u64 workgroup, bool adds) {
  stores_[flag].push_back({next_, workgroup, adds});
  return next_++;
}

u64 Flags::stores_to(u64 flag) const {
  const auto found = stores_.find(flag);
  return found == stores_.end() ? 0 : found->second.size();
}

std::vector<u64> Flags::awaited(u64 flag, u64 seen, u64 workgroup) const {
  const auto found = stores_.find(flag);
  if (found == stores_.end()) return {};
  std::map<u64, u64> last_of;  // store of each workgroup
  for (u64 i = seen; i-- > 0;) {
    const Store& store = found->second[i];
    if (store.workgroup != workgroup) last_of.emplace(store.workgroup, store.number);
    if (!store.adds) break;
  }
  std::vector<u64> numbers;
  for (const auto& [of, number] : last_of) numbers.push_back(number);
  return numbers;
}

void FlagAccesses::add(u64 address, u32 bytes) {
  const u64 last = (address + bytes - 1) / kFlagBytes * kFlagBytes;
  for (u64 flag = address / kFlagBytes * kFlagBytes; flag <= last; flag += kFlagBytes)
    before_.emplace(flag, content_of(flag));
}

bool FlagAccesses::is_store() const {
  if (before_.empty()) return false;
  const auto changed = [](const auto& dword) { return content_of(dword.first) != dword.second; };
  return before_.rbegin()->first - before_.begin()->first < kMostFlagBytes &&
         std::any_of(before_.begin(), before_.end(), changed);
}

// ---- Hooks --------------------------------------------------------------------------------------

void leave_polling_loop(Wave& wave) {
  WaveObservation& state = *wave.observation;
  wave.workgroup->observation->flags_lock = {};  // which a fault leaves held
  if (state.polling_loop == kNoLoop) return;
  DispatchObservation& dispatch = *wave.dispatch().observation;
  const std::lock_guard<std::mutex> lock(dispatch.flags.mutex);
  end_iteration(wave);
  keep_before_it(wave);
  state.before_it = {};
  state.polling_loop = kNoLoop;
}

void before_polling(Wave& wave, const Instruction& inst) {
  WaveObservation& state = *wave.observation;
  DispatchObservation& dispatch = *wave.dispatch().observation;
  const int loop = dispatch.polling_loop[state.step.dword];
  if (loop != state.polling_loop) leave_polling_loop(wave);
  state.polling_loop = loop;
  if (loop != kNoLoop) state.iteration.counts.emplace_back(state.step.dword, Counts{});
  constexpr u8 kSc1 = 4;
  const Unit unit = inst.definition ? inst.definition->unit : Unit::salu;
  if (unit == Unit::vmem_atomic || (unit == Unit::vmem_store && inst.cache_policy & kSc1) ||
      (loop != kNoLoop && inst.definition && sees_other_units(inst)))
    wave.workgroup->observation->flags_lock = std::unique_lock<std::mutex>(dispatch.flags.mutex);
}

void after_polling(Wave& wave, const Instruction& inst) {
  WaveObservation& state = *wave.observation;
  DispatchObservation& dispatch = *wave.dispatch().observation;
  std::unique_lock<std::mutex>& flags_lock = wave.workgroup->observation->flags_lock;
  if (flags_lock.owns_lock()) {
    Steps& recorded = state.recorded();
    const u32 step = static_cast<u32>(recorded.steps.size()) - 1;
    const bool polls = state.polling_loop != kNoLoop && sees_other_units(inst);
    const bool stores = state.flag_accesses.is_store();
    for (const auto& [flag, before] : state.flag_accesses.dwords()) {
      if (polls) recorded.events.push_back({true, step, flag, dispatch.flags.stores_to(flag)});
      if (!stores) continue;
      const bool adds = inst.definition->unit == Unit::vmem_atomic;
      const u64 store = dispatch.flags.note_store(flag, number_of(*wave.workgroup), adds);
      recorded.events.push_back({false, step, flag, store});
    }
    state.flag_accesses.clear();
    flags_lock.unlock();
  }
  const bool is_back =
      state.polling_loop != kNoLoop && inst.definition->unit == Unit::branch &&
      wave.pc == &wave.dispatch().code->instructions[static_cast<u32>(state.polling_loop)];
  if (!is_back) return;
  const std::lock_guard<std::mutex> lock(dispatch.flags.mutex);
  end_iteration(wave);
}

}  // namespace emulator
