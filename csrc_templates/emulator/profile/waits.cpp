// Which workgroup waits for which other one, as those of stream-k and persistent kernels do: one
// polls a flag in memory until the other has stored to it.
//
// How often it polls here depends on whose turn it is, and tells nothing. So of iterations that
// look at the same flags, one after the other, only the last one is kept, which found what it waits
// for, and with it how many stores to the flag that took (polls.cpp): estimate.py lets it wait for
// these. A loop that polls what no other workgroup stores waits for nobody, and keeps all of its
// iterations.
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

// What it does with what it polls depends on registers alone, and it polls one dword.
bool can_be_tried(const CodeObject& code, const PollingLoop& loop) {
  u32 polls = 0;
  for (u32 dword = loop.first; dword <= loop.last; dword += code.instructions[dword].dwords) {
    const Instruction& inst = code.instructions[dword];
    const Unit unit = inst.definition->unit;
    if (unit == Unit::message || unit == Unit::smem || unit == Unit::lds) return false;
    if (unit == Unit::vmem_load && !sees_other_units(inst)) return false;
    if (!sees_other_units(inst)) continue;
    ++polls;
    if (inst.to_lds || inst.destination.place != Place::vgpr || inst.destination.dwords != 1)
      return false;
  }
  return polls == 1;
}

PollingLoop polling_loop(const CodeObject& code, u32 first, u32 last, const Rates& rates,
                         const std::vector<Cost>& costs) {
  PollingLoop loop{first, last, rates.branch, false, 0, {}};
  loop.can_be_tried = can_be_tried(code, loop);
  for (u32 dword = first; dword <= last; dword += code.instructions[dword].dwords) {
    const Instruction& inst = code.instructions[dword];
    loop.cycles += rates.issue + costs[dword].wait_cycles;
    if (sees_other_units(inst)) loop.polled = inst.destination.index;
    if (sees_other_units(inst)) loop.cycles += rates.global_latency;
    const auto add = [&](const Operand& operand) {
      if (operand.place != Place::vgpr) return;
      for (u16 i = 0; i < operand.dwords; ++i) loop.vgprs.push_back(operand.index + i);
    };
    add(inst.destination);
    for (const Operand& source : inst.source) add(source);
  }
  std::sort(loop.vgprs.begin(), loop.vgprs.end());
  loop.vgprs.erase(std::unique(loop.vgprs.begin(), loop.vgprs.end()), loop.vgprs.end());
  return loop;
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
    return event.kind == Event::Kind::poll &&
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

bool has_polled(const Iteration& iteration) {
  const std::vector<Event>& events = iteration.steps.events;
  return std::any_of(events.begin(), events.end(),
                     [](const Event& event) { return event.kind == Event::Kind::poll; });
}

// What a wave that leaves its loop has waited for: the first store that made it, not the last one
// that was there.
void find_store(Wave& wave) {
  WaveObservation& state = *wave.observation;
  const Flags& flags = wave.dispatch().observation->flags;
  const u64 workgroup = number_of(*wave.workgroup);
  const auto stores_for = [&](const Polled& polled) {
    const u64 known =
        std::max(state.known[polled.flag], flags.last_store_by(polled.flag, workgroup));
    return known <= polled.seen ? stores_that_end(wave, flags, polled, known) : kUnknown;
  };
  if (state.entry.loop && (!state.poll.loop || state.poll.flag == state.entry.flag) &&
      !has_polled(state.iteration)) {
    // With luck the look before the loop would have been enough. Whether it was is for the chip to
    // say, so that polls in the loop are left out.
    Polled& entry = state.entry;
    if (state.poll.loop) entry.seen = state.poll.seen;
    const u64 stores = entry.seen ? stores_for(entry) : kUnknown;
    if (stores != kUnknown) {
      state.known[entry.flag] = stores;
      state.before_it = {};
      state.polled_in_vain = 0;
      Steps& steps = state.iteration.steps;
      steps.events.push_back({Event::Kind::poll, static_cast<u32>(steps.steps.size()) - 1,
                              entry.flag, stores, state.look_number, state.polling_loop->cycles});
      return;
    }
  }
  if (!state.poll.loop || !state.poll.seen) return;
  const u64 stores = stores_for(state.poll);
  if (stores == kUnknown) return;
  state.known[state.poll.flag] = stores;
  Iteration& last = has_polled(state.iteration) ? state.iteration : state.before_it;
  for (Event& event : last.steps.events)
    if (event.kind == Event::Kind::poll) event.number = stores;
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
  const auto is_poll = [](const Event& event) { return event.kind == Event::Kind::poll; };
  const bool has_stored = !std::all_of(here.begin(), here.end(), is_poll);
  const auto polls_of = [&](const std::vector<Event>& events) {
    std::vector<u64> flags;
    for (const Event& event : events)
      if (is_poll(event)) flags.push_back(event.flag);
    return flags;
  };
  const std::vector<u64> flags = polls_of(here);
  return !has_stored && !flags.empty() && flags == polls_of(there);
}

PollingLoops polling_loops(const Dispatch& dispatch, const std::vector<Cost>& costs) {
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
  PollingLoops found;
  for (auto loop = last_of.begin(); loop != last_of.end(); ++loop) {
    const auto [first, last] = *loop;
    const auto is_inside = [last = last](const auto& other) { return other.second <= last; };
    const bool has_inner = std::any_of(std::next(loop), last_of.end(), is_inside);
    if (has_inner || !only_polls(code, first, last)) continue;
    found.of_dword.resize(code.instructions.size(), kNoPollingLoop);
    std::fill(found.of_dword.begin() + first, found.of_dword.begin() + last + 1,
              static_cast<u32>(found.loops.size()));
    found.loops.push_back(polling_loop(code, first, last, dispatch.observation->rates, costs));
  }
  return found;
}

// ---- Flags --------------------------------------------------------------------------------------

u64 Flags::note_store(u64 flag, u64 workgroup, bool adds, u32 before) {
  History& history = history_[flag];
  if (history.stores.empty()) history.before = before;
  history.stores.push_back({next_, workgroup, adds, content_of(flag)});
  history.last_of[workgroup] = history.stores.size();
  return next_++;
}

u64 Flags::stores_to(u64 flag) const {
  const auto found = history_.find(flag);
  return found == history_.end() ? 0 : found->second.stores.size();
}

u32 Flags::value_after(u64 flag, u64 stores) const {
  const History& history = history_.at(flag);
  return stores ? history.stores[stores - 1].value : history.before;
}

u64 Flags::last_store_by(u64 flag, u64 workgroup) const {
  const auto found = history_.find(flag);
  if (found == history_.end()) return 0;
  const auto last = found->second.last_of.find(workgroup);
  return last == found->second.last_of.end() ? 0 : last->second;
}

std::vector<u64> Flags::awaited(u64 flag, u64 seen, u64 workgroup) const {
  const auto found = history_.find(flag);
  if (found == history_.end()) return {};
  std::map<u64, u64> last_of;  // store of each workgroup
  for (u64 i = seen; i-- > 0;) {
    const Store& store = found->second.stores[i];
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

namespace {

// A wave comes to a loop at `inst`. What it has looked at before may be in the register into which
// the loop polls: then the loop begins with that, as with a poll of its own.
void begin_polling(Wave& wave, const Instruction& inst) {
  WaveObservation& state = *wave.observation;
  const PollingLoop& loop = *state.polling_loop;
  const Polled& look = state.look;
  const bool is_at_first = state.step.dword == loop.first;
  if (!is_at_first || !loop.can_be_tried || state.look_number == kNoLook || !wave.exec()) return;
  if (wave.vgpr[loop.polled][__builtin_ctzll(wave.exec())] != look.value) return;
  state.entry = polled_by(wave, loop, look.flag, look.seen, look.value);
  state.entry.next = &inst;
}

// Of an instruction that may have been at a flag, while the lock is held.
void note_accesses(Wave& wave, const Instruction& inst) {
  WaveObservation& state = *wave.observation;
  Flags& flags = wave.dispatch().observation->flags;
  Steps& recorded = state.recorded();
  const u32 step = static_cast<u32>(recorded.steps.size()) - 1;
  const u64 workgroup = number_of(*wave.workgroup);
  const auto& dwords = state.flag_accesses.dwords();
  const bool sees = sees_other_units(inst), stores = state.flag_accesses.is_store();
  for (const auto& [flag, before] : dwords) {
    if (sees && state.polling_loop)
      recorded.events.push_back({Event::Kind::poll, step, flag, flags.stores_to(flag)});
    if (!stores) continue;
    const bool adds = inst.definition->unit == Unit::vmem_atomic;
    const u64 store = flags.note_store(flag, workgroup, adds, before);
    recorded.events.push_back({Event::Kind::store, step, flag, store});
  }
  if (!sees) return;
  state.poll = {};
  // One that stores as well, as by which a lock is taken, saw the last store there was.
  if (stores || dwords.size() != 1) return;
  const auto& [flag, value] = *dwords.begin();
  const u64 seen = flags.stores_to(flag);
  if (!state.polling_loop) {
    state.look = {nullptr, nullptr, flag, seen, value, {}};
    state.look_number = flags.note_look();
    recorded.events.push_back({Event::Kind::look, step, flag, state.look_number});
  } else if (state.polling_loop->can_be_tried) {
    state.poll = polled_by(wave, *state.polling_loop, flag, seen, value);
  }
}

}  // namespace

void leave_polling_loop(Wave& wave) {
  WaveObservation& state = *wave.observation;
  wave.workgroup->observation->flags_lock = {};  // which a fault leaves held
  if (!state.polling_loop) return;
  DispatchObservation& dispatch = *wave.dispatch().observation;
  const std::lock_guard<std::mutex> lock(dispatch.flags.mutex);
  find_store(wave);
  end_iteration(wave);
  keep_before_it(wave);
  state.before_it = {};
  state.polling_loop = nullptr;
  state.entry = state.poll = {};
  state.look_number = kNoLook;
}

void before_polling(Wave& wave, const Instruction& inst) {
  WaveObservation& state = *wave.observation;
  DispatchObservation& dispatch = *wave.dispatch().observation;
  const u32 place = dispatch.polling_loops.of_dword[state.step.dword];
  const PollingLoop* const loop =
      place == kNoPollingLoop ? nullptr : &dispatch.polling_loops.loops[place];
  if (loop != state.polling_loop) {
    leave_polling_loop(wave);
    state.polling_loop = loop;
    if (loop) begin_polling(wave, inst);
  }
  if (loop) state.iteration.counts.emplace_back(state.step.dword, Counts{});
  constexpr u8 kSc1 = 4;
  const Unit unit = inst.definition ? inst.definition->unit : Unit::salu;
  if (unit == Unit::vmem_atomic || (unit == Unit::vmem_store && inst.cache_policy & kSc1) ||
      (inst.definition && sees_other_units(inst)))
    wave.workgroup->observation->flags_lock = std::unique_lock<std::mutex>(dispatch.flags.mutex);
}

void after_polling(Wave& wave, const Instruction& inst) {
  WaveObservation& state = *wave.observation;
  std::unique_lock<std::mutex>& flags_lock = wave.workgroup->observation->flags_lock;
  if (flags_lock.owns_lock()) {
    note_accesses(wave, inst);
    state.flag_accesses.clear();
    flags_lock.unlock();
  }
  const bool is_back = state.polling_loop && inst.definition->unit == Unit::branch &&
                       wave.pc == &wave.dispatch().code->instructions[state.polling_loop->first];
  if (!is_back) return;
  const std::lock_guard<std::mutex> lock(wave.dispatch().observation->flags.mutex);
  end_iteration(wave);
}

}  // namespace emulator
