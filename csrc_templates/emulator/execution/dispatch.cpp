// Initial state of waves, turns of waves, workers. Initial state: LLVM's "User Guide for AMDGPU
// Backend", Initial Kernel Execution State.
#include "execution/dispatch.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "decode/text.h"
#include "execution/float_mode.h"
#include "execution/hooks.h"
#include "execution/occupancy.h"

namespace emulator {
namespace {

// Instructions that a wave executes before what it loads into LDS lands: about 600 cycles to
// memory, as the cost model has it, with an instruction every fourth. In random order it is 0 to
// 4095.
constexpr u64 kLdsLoadLatency = 150;

// A wave that has a workgroup to itself keeps pace with nobody; its turns end for loads into LDS.
constexpr u32 kSliceOfLoneWave = 64;

// Between turns a launch can be stopped.
constexpr u64 kLongestSlice = 1 << 16;

// Waves' slices and workgroups' turns in random order are up to 2^12 and 2^16 instructions long.
constexpr u32 kMagnitudesOfSlice = 13, kMagnitudesOfTurn = 17;

// In random order so many workgroups may stand in the middle of their work; each takes memory.
constexpr u32 kMostHeld = 16;

// The generator of the `random_order` option: splitmix64.
class Random {
 public:
  explicit Random(u64 seed) : state_(seed) {}
  u64 next() {
    u64 z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  u32 below(u32 bound) { return static_cast<u32>(next() % bound); }
  // Any of so many orders of magnitude, beginning with 1: now and then one wave or one workgroup
  // runs far ahead of the others, which is what shows that they do not wait for each other.
  u32 length(u32 magnitudes) {
    const u32 magnitude = 1u << below(magnitudes);
    return magnitude / 2 + 1 + below((magnitude + 1) / 2);
  }

 private:
  u64 state_;
};

void set_initial_scalars(Wave& wave) {
  const Dispatch& dispatch = wave.dispatch();
  const KernelDescriptor& descriptor = dispatch.kernel->descriptor;
  u32 next = 0;
  const auto push = [&](u32 value) {
    if (next < kFlatScratch) wave.scalar[next++] = value;
  };
  const auto push_address = [&](const void* address) {
    push(static_cast<u32>(reinterpret_cast<u64>(address)));
    push(static_cast<u32>(reinterpret_cast<u64>(address) >> 32));
  };
  if (descriptor.has(kPrivateSegmentBuffer))
    for (u32 i = 0; i < 4; ++i) push(0);
  if (descriptor.has(kDispatchPtr)) push_address(dispatch.dispatch_packet);
  if (descriptor.has(kQueuePtr)) push_address(nullptr);
  if (descriptor.has(kKernargPtr)) push_address(dispatch.kernarg);
  if (descriptor.has(kDispatchId)) push_address(nullptr);
  if (descriptor.has(kFlatScratchInit)) push_address(wave.scratch);
  if (descriptor.has(kPrivateSegmentSize)) push(dispatch.scratch_bytes_per_lane);
  const u8* const preloaded = dispatch.kernarg + 4 * descriptor.preload_offset_dwords();
  for (u32 i = 0; i < descriptor.preload_dwords(); ++i) {
    u32 value;
    std::memcpy(&value, preloaded + 4 * i, 4);
    push(value);
  }
  next = descriptor.user_sgprs();
  for (u32 axis = 0; axis < 3; ++axis)
    if (descriptor.enables_workgroup_id(axis)) push(wave.workgroup->id[axis]);
  if (descriptor.enables_workgroup_info()) push(wave.workgroup->wave_count);
  wave.pair(kFlatScratch) = reinterpret_cast<u64>(wave.scratch);
}

void set_initial_lanes(Wave& wave) {
  const u32* const size = wave.dispatch().workgroup_size;
  const u32 threads = size[0] * size[1] * size[2];
  const u32 enabled_axes = wave.dispatch().kernel->descriptor.rsrc2 >> 11 & 3;
  u64 exec = 0;
  for (u32 lane = 0; lane < kLanes; ++lane) {
    const u32 thread = wave.index * kLanes + lane;
    if (thread >= threads) break;
    exec |= u64{1} << lane;
    const u32 x = thread % size[0], y = thread / size[0] % size[1],
              z = thread / (size[0] * size[1]);
    wave.vgpr[0][lane] = x | (enabled_axes >= 1 ? y << 10 : 0) | (enabled_axes >= 2 ? z << 20 : 0);
  }
  wave.exec() = exec;
}

void begin_wave(Wave& wave, Workgroup& workgroup, u32 index, u8* scratch) {
  const Dispatch& dispatch = workgroup.dispatch;
  const KernelDescriptor& descriptor = dispatch.kernel->descriptor;
  const u32 fill = dispatch.options.register_fill;
  wave.workgroup = &workgroup;
  wave.index = static_cast<u8>(index);
  wave.scratch = scratch;
  wave.vgpr_count = std::min(descriptor.vgprs(), kVgprs);
  wave.accumulation_offset =
      std::min({descriptor.accumulation_offset(), wave.vgpr_count, kFirstAccumulation});
  const auto fill_registers = [&](u32 first, u32 count) {
    std::fill_n(&wave.vgpr[first][0], std::min(count, kFirstAccumulation) * kLanes, fill);
  };
  fill_registers(0, wave.accumulation_offset);
  fill_registers(kFirstAccumulation, wave.vgpr_count - wave.accumulation_offset);
  std::fill_n(wave.scalar, 128, fill);
  wave.vcc() = 0;
  wave.scalar[kM0] = 0;
  // A kernel with preloaded arguments begins with 256 bytes that load them on older firmware.
  const u32 skipped_dwords = descriptor.preload_dwords() ? 64 : 0;
  wave.pc = dispatch.code->instructions.data() +
            std::min(dispatch.kernel->entry_dword + skipped_dwords, dispatch.code->text_dwords);
  wave.current = wave.pc;
  wave.scc = false;
  wave.state = WaveState::running;
  wave.yields = false;
  wave.priority = 0;
  wave.executed = 0;
  wave.memory_hit = nullptr;
  wave.vector_memory_issued = 0;
  wave.lds_loads_on_their_way = 0;
  wave.set_mode(descriptor.initial_mode());
  set_initial_scalars(wave);
  set_initial_lanes(wave);
  hooks::wave_begin(wave);
}

// Under s_set_gpr_idx_on, M0 has a number to add to the indices of VALU operands (bits 0 to 7) and
// says which: bits 12 to 14 the sources, bit 15 the destination.
Instruction with_indices(const Wave& wave, const Instruction& inst) {
  Instruction relative = inst;
  const u32 m0 = wave.scalar[kM0], added = m0 & 0xff, enabled = m0 >> 12 & 15;
  const auto add = [&](Operand& operand) {
    if (operand.place != Place::vgpr) return;
    const u32 index = operand.index + added;
    if (index + operand.dwords > wave.accumulation_offset)
      fault("the index in M0 leads to v%u", index);
    operand.index = static_cast<u16>(index);
  };
  if (inst.destination.place == Place::scalar) fault("VGPR indexing with a scalar destination");
  u32 field = 0;
  for (u32 k = 0; k < kMaxSources; ++k) {
    const Role role = inst.definition->signature.sources[k].role;
    if (role == Role::old ? enabled & 8 : role == Role::source && enabled >> field & 1)
      add(relative.source[k]);
    field += role == Role::source;
  }
  if (enabled & 8) add(relative.destination);
  return relative;
}

// The same as run_slice while registers are indexed or vector instructions skipped. What is skipped
// is not issued: it raises no counter.
void run_under_mode(Wave& wave, u64 end) {
  while (wave.executed < end && (wave.indexes_vgprs || wave.skips_vector)) {
    wave.current = wave.pc;
    wave.pc += wave.current->dwords;
    ++wave.executed;
    // Hooks tell where an instruction is by where it lies.
    const Instruction& inst = *wave.current;
    if (wave.skips_vector && inst.definition && is_vector(*inst.definition)) {
      hooks::instruction_skipped(wave, inst);
      continue;
    }
    hooks::before_instruction(wave, inst);
    const bool is_indexed = wave.indexes_vgprs && inst.definition &&
                            inst.encoding >= Format::VOP1 && inst.encoding <= Format::VOP3P;
    if (is_indexed) {
      const Instruction relative = with_indices(wave, inst);
      relative.execute(wave, relative);
    } else {
      inst.execute(wave, inst);
    }
    hooks::after_instruction(wave, inst);
    if (wave.state != WaveState::running || wave.yields) break;
  }
}

// Runs until the wave ends, reaches a barrier, yields, or has had its slice.
void run_slice(Wave& wave, u64 instructions) {
  const u64 end = wave.executed + instructions;
  if (__builtin_expect(wave.indexes_vgprs || wave.skips_vector, 0)) {
    run_under_mode(wave, end);
    wave.yields = false;
    return;
  }
  while (wave.executed < end) {
    const Instruction& inst = *wave.pc;
    wave.current = &inst;
    wave.pc += inst.dwords;
    ++wave.executed;
    hooks::before_instruction(wave, inst);
    inst.execute(wave, inst);
    hooks::after_instruction(wave, inst);
    if (__builtin_expect(wave.state != WaveState::running || wave.yields, 0)) break;
  }
  wave.yields = false;
}

std::string describe(const Fault& fault, const Wave& wave) {
  const Dispatch& dispatch = wave.dispatch();
  const CodeObject& code = *dispatch.code;
  const Instruction* const inst = wave.current;
  const u32* const id = wave.workgroup->id;
  const std::string where =
      formatted(", workgroup (%u, %u, %u), wave %u", id[0], id[1], id[2], wave.index);
  std::string text = "kernel " + dispatch.kernel->name + ", at " +
                     code.location(static_cast<u32>(inst - code.instructions.data())) + ": `" +
                     text_of(*inst) + "`" + where;
  if (fault.lane >= 0) text += ", lane " + std::to_string(fault.lane);
  return text + ": " + fault.what();
}

// What the workers of one launch have in common: the workgroups that are left, and why it failed.
class LaunchProgress {
 public:
  LaunchProgress(const Dispatch& dispatch, u64 workgroups)
      : kernel_(dispatch.kernel->name), check_(dispatch.interruption_check), left_(workgroups) {}

  // The next workgroup to run, counted from 0; false when there is none. Those before a failed one
  // still run, so that the failure that is reported is always the same: see `is_abandoned`.
  bool take(u64& number) {
    number = next_++;
    return number < std::min<u64>(left_, first_failed_) && !is_stopped();
  }
  void report(u64 number, const std::string& message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (number >= first_failed_) return;
    first_failed_ = number;
    message_ = message;
  }

  bool has_failure() const { return first_failed_.load(std::memory_order_relaxed) != kNone; }

  // Whether workgroup `number` is left where it is, because another one has failed: at once behind
  // the failed one, and before it after so many instructions that it probably waits for something
  // that the failed one would have done. `executed`: since the failure was seen.
  bool is_abandoned(u64 number, u64 executed) const {
    const u64 failed = first_failed_.load(std::memory_order_relaxed);
    return number > failed || (failed != kNone && executed > kPatience);
  }

  // Ends the launch: workers leave their waves where they are. Allocates nothing.
  enum class Stop : u8 { none, interrupted, no_memory, no_thread };
  void stop(Stop reason, int error = 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_stopped()) return;
    error_ = error;
    stopped_ = reason;
  }
  bool is_stopped() const { return stopped_.load(std::memory_order_relaxed) != Stop::none; }

  // For the thread that launches: asks now and then whether to go on, and stops the others if not.
  void ask() {
    const auto now = std::chrono::steady_clock::now();
    if (!check_ || is_stopped() || now < next_check_) return;
    next_check_ = now + kBetweenChecks;
    if (!check_()) stop(Stop::interrupted);
  }

  void begin_worker() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++running_;
  }
  void end_worker() {
    const std::lock_guard<std::mutex> lock(mutex_);
    --running_;
    ended_.notify_all();
  }
  // Waits for all workers; meanwhile asks.
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!ended_.wait_for(lock, kBetweenChecks, [&] { return running_ == 0; })) {
      lock.unlock();
      ask();
      lock.lock();
    }
  }

  // After the last worker.
  LaunchFailure failure() const {
    const std::string kernel = "kernel " + kernel_;
    switch (stopped_) {
      case Stop::interrupted: return {true, kernel + " was interrupted"};
      case Stop::no_memory: return {true, kernel + ": no memory for the state of its waves"};
      case Stop::no_thread:
        return {true, kernel + ": a worker thread does not start: " +
                          std::generic_category().message(error_)};
      case Stop::none: break;
    }
    return {first_failed_ != kNone, message_};
  }

 private:
  static constexpr std::chrono::milliseconds kBetweenChecks{50};
  static constexpr u64 kNone = ~u64{0};
  static constexpr u64 kPatience = u64{1} << 26;  // instructions: some seconds

  const std::string& kernel_;
  const InterruptionCheck check_;
  std::chrono::steady_clock::time_point next_check_ =
      std::chrono::steady_clock::now() + kBetweenChecks;
  const u64 left_;
  std::atomic<u64> next_{0}, first_failed_{kNone};
  std::atomic<Stop> stopped_{Stop::none};
  std::mutex mutex_;
  std::condition_variable ended_;
  u32 running_ = 0;
  int error_ = 0;
  std::string message_;
};

// Where a workgroup runs, and how far it is.
struct Resident {
  u64 place = 0;  // of those that run
  std::unique_ptr<Wave[]> waves;
  std::unique_ptr<u64[]> lds, scratch;
  std::unique_ptr<Workgroup> workgroup;
  std::vector<u32> order;  // of the waves
  Random random{0};
  bool is_held = false;  // put aside although it does not wait
};

// One thread's share of a launch. It runs one workgroup after the other in the same memory; one
// that seems to wait for others is put aside, and goes on after them. So is in random order one
// whose turn has ended: it goes on when each of the others has had a turn, until it waited, ended
// or was held back in its turn. Where they do not wait for it, they overtake it.
class Worker {
 public:
  // `is_launching`: on the thread that launches, which asks whether to go on. `selected`: the
  // workgroups that run; empty: all of them. `room`: workgroups that it may have at a time.
  Worker(const Dispatch& dispatch, LaunchProgress& progress, const std::vector<u64>& selected,
         u64 room, bool is_launching)
      : dispatch_(dispatch),
        progress_(progress),
        selected_(selected),
        room_(room),
        is_launching_(is_launching),
        turns_(dispatch.options.seed) {
    const u32 threads =
        dispatch.workgroup_size[0] * dispatch.workgroup_size[1] * dispatch.workgroup_size[2];
    wave_count_ = (threads + kLanes - 1) / kLanes;
    const u32 granule = dispatch.device->architecture().lds_granularity;
    lds_bytes_ = (dispatch.lds_bytes + granule - 1) / granule * granule;
    scratch_bytes_ = dispatch.scratch_bytes_per_lane * kLanes;
    unused_ = make_resident();
  }

  void run() {
    while (std::unique_ptr<Resident> resident = next()) {
      std::string failure;
      if (run_turn(*resident, failure)) {
        waiting_.push_back(std::move(resident));
        continue;
      }
      for (u32 i = 0; i < wave_count_; ++i) hooks::wave_end(resident->waves[i]);
      hooks::workgroup_end(*resident->workgroup);
      if (!failure.empty()) progress_.report(resident->place, failure);
      unused_ = std::move(resident);
    }
  }

 private:
  std::unique_ptr<Resident> make_resident() const {
    auto resident = std::make_unique<Resident>();
    resident->waves.reset(new Wave[wave_count_]());
    resident->lds.reset(new u64[lds_bytes_ / 8 + 1]);
    resident->scratch.reset(new u64[u64{scratch_bytes_} * wave_count_ / 8 + 1]());
    resident->order.resize(wave_count_);
    return resident;
  }

  // Whether there is memory for another workgroup; for one there must be.
  bool has_room() {
    if (waiting_.size() >= room_) return false;
    try {
      if (!unused_) unused_ = make_resident();
    } catch (const std::bad_alloc&) {
      if (waiting_.empty()) throw;
    }
    return unused_ != nullptr;
  }

  // A workgroup that has not begun, where there is room, or else the one that has waited longest;
  // null where all have ended.
  std::unique_ptr<Resident> next() {
    u64 place;
    if (held_ < kMostHeld && has_room() && progress_.take(place)) {
      begin(*unused_, place);
      return std::move(unused_);
    }
    if (waiting_.empty()) return nullptr;
    std::unique_ptr<Resident> resident = std::move(waiting_.front());
    waiting_.pop_front();
    held_ -= resident->is_held;
    return resident;
  }

  void begin(Resident& resident, u64 place) {
    const u64 number = selected_.empty() ? place : selected_[place];
    const u32* const grid = dispatch_.workgroups;
    u8* const lds = reinterpret_cast<u8*>(resident.lds.get());
    resident.workgroup.reset(
        new Workgroup{dispatch_, {}, lds, lds_bytes_, wave_count_, nullptr, {}});
    Workgroup& workgroup = *resident.workgroup;
    workgroup.id[0] = static_cast<u32>(number % grid[0]);
    workgroup.id[1] = static_cast<u32>(number / grid[0] % grid[1]);
    workgroup.id[2] = static_cast<u32>(number / grid[0] / grid[1]);
    workgroup.memory_latency = kLdsLoadLatency;
    std::fill_n(reinterpret_cast<u32*>(lds), lds_bytes_ / 4, dispatch_.options.register_fill);
    resident.place = place;
    // Of a hash of the seed: workgroups under the next seed are not the same ones in another order.
    resident.random = Random(Random(dispatch_.options.seed).next() ^ number);
    hooks::workgroup_begin(workgroup);
    for (u32 i = 0; i < wave_count_; ++i) {
      resident.order[i] = i;
      begin_wave(resident.waves[i], workgroup, i,
                 reinterpret_cast<u8*>(resident.scratch.get()) + u64{i} * scratch_bytes_);
    }
  }

  // Whether the workgroup is to go on later. What made it fail is in `failure`.
  bool run_turn(Resident& resident, std::string& failure) {
    // As many as a loop has that waits for a millisecond.
    constexpr u64 kPollsOfTurn = 1 << 12;
    Workgroup& workgroup = *resident.workgroup;
    Random& random = resident.random;
    std::vector<u32>& order = resident.order;
    const Options& options = dispatch_.options;
    const u64 last_poll = workgroup.polls + kPollsOfTurn;
    const u64 length = options.random_order ? turns_.length(kMagnitudesOfTurn) : ~u64{0};
    u64 executed_of_turn = 0;
    while (workgroup.polls < last_poll && executed_of_turn < length) {
      if (options.random_order)
        for (u32 i = wave_count_; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
      u64 longest = 0, executed = 0;
      for (const u32 index : order) {
        Wave& wave = resident.waves[index];
        if (wave.state != WaveState::running) continue;
        const u64 executed_before = wave.executed;
        if (options.random_order) workgroup.memory_latency = random.length(kMagnitudesOfSlice) - 1;
        workgroup.land_due_lds_loads();
        workgroup.land_due_atomics();
        try {
          u64 slice = options.random_order ? random.length(kMagnitudesOfSlice)
                      : wave_count_ == 1   ? std::max(options.time_slice, kSliceOfLoneWave)
                                           : options.time_slice;
          slice = std::min(slice, kLongestSlice);
          if (options.instruction_budget) {
            if (wave.executed >= options.instruction_budget)
              fault("the wave's budget of %llu instructions is used up",
                    static_cast<unsigned long long>(options.instruction_budget));
            slice = std::min(slice, options.instruction_budget - wave.executed);
          }
          run_slice(wave, slice);
        } catch (const Fault& fault) {
          failure = describe(fault, wave);
          return false;
        }
        if (wave.state == WaveState::at_barrier) hooks::barrier_arrived(wave);
        longest = std::max(longest, wave.executed - executed_before);
        executed += wave.executed - executed_before;
      }
      executed_of_turn += executed;
      if (must_stop(resident.place, executed)) return false;
      workgroup.now += longest;  // waves run side by side
      if (!release_barrier(resident)) {
        workgroup.land_all_atomics();
        return false;
      }
    }
    resident.is_held = workgroup.polls < last_poll;
    held_ += resident.is_held;
    return true;
  }

  // Looks now and then whether the workgroup ends early; that takes longer than an instruction.
  bool must_stop(u64 place, u64 executed) {
    constexpr u64 kBetweenLooks = 4096;  // instructions: of a millisecond's order
    since_look_ += executed;
    if (since_look_ < kBetweenLooks) return false;
    if (progress_.has_failure()) since_failure_ += since_look_;
    since_look_ = 0;
    if (is_launching_) progress_.ask();
    return progress_.is_stopped() || progress_.is_abandoned(place, since_failure_);
  }

  // Lets the waves go on if all that have not ended are at the barrier. False when all have ended.
  bool release_barrier(Resident& resident) {
    Wave* const waves = resident.waves.get();
    u32 waiting = 0, running = 0;
    for (u32 i = 0; i < wave_count_; ++i) {
      waiting += waves[i].state == WaveState::at_barrier;
      running += waves[i].state == WaveState::running;
    }
    if (running == 0 && waiting) {
      hooks::barrier_released(*resident.workgroup);
      for (u32 i = 0; i < wave_count_; ++i)
        if (waves[i].state == WaveState::at_barrier) waves[i].state = WaveState::running;
    }
    return running || waiting;
  }

  const Dispatch& dispatch_;
  LaunchProgress& progress_;
  const std::vector<u64>& selected_;
  const u64 room_;
  const bool is_launching_;
  Random turns_;
  u32 held_ = 0;
  u64 since_look_ = 0, since_failure_ = 0;  // instructions
  u32 wave_count_, lds_bytes_, scratch_bytes_;
  std::deque<std::unique_ptr<Resident>> waiting_;
  std::unique_ptr<Resident> unused_;
};

void fill_dispatch_packet(Dispatch& dispatch) {
  u8* const packet = dispatch.dispatch_packet;
  std::memset(packet, 0, sizeof(dispatch.dispatch_packet));
  const auto put = [&](u32 offset, auto value) {
    std::memcpy(packet + offset, &value, sizeof(value));
  };
  put(0, u16{2});  // type: kernel dispatch
  put(2, u16{3});  // dimensions
  for (u32 axis = 0; axis < 3; ++axis) {
    put(4 + 2 * axis, static_cast<u16>(dispatch.workgroup_size[axis]));
    put(12 + 4 * axis, dispatch.workgroups[axis] * dispatch.workgroup_size[axis]);
  }
  put(24, dispatch.scratch_bytes_per_lane);
  put(28, dispatch.lds_bytes);
  put(40, reinterpret_cast<u64>(dispatch.kernarg));
}

}  // namespace

void Wave::set_mode(u32 value) {
  mode = value;
  constexpr u32 kFloatBits =
      kModeRound32 | kModeRound16And64 | kModeDenormal32 | kModeDenormal16And64 | kModeFp16Overflow;
  // A turn runs with or without indexing and skipping: this one ends where that changes.
  indexes_vgprs = value & kModeVgprIndexing;
  skips_vector = value & kModeVectorSkip;
  yields = yields || indexes_vgprs || skips_vector;
  default_float_mode = (value & kFloatBits) == (kModeDenormal32 | kModeDenormal16And64);
}

LaunchFailure run_dispatch(Dispatch& dispatch) {
  fill_dispatch_packet(dispatch);
  hooks::dispatch_begin(dispatch);
  const std::vector<u64> selected = hooks::selected_workgroups(dispatch);
  const u64 total = u64{dispatch.workgroups[0]} * dispatch.workgroups[1] * dispatch.workgroups[2];
  const u64 count = selected.empty() ? total : selected.size();
  // In random order the seed alone decides, also which workgroup is overtaken where.
  const u32 wanted = dispatch.options.random_order ? 1
                     : dispatch.options.threads ? dispatch.options.threads
                                                : std::max(1u, std::thread::hardware_concurrency());
  const u64 workers = std::max<u64>(std::min<u64>(wanted, count), 1);
  const u64 resident =
      u64{dispatch.device->compute_units} * std::max(1u, occupancy_of(dispatch).workgroups);
  LaunchProgress progress(dispatch, count);
  const auto work = [&](bool is_launching) {
    const HostFloatControl saved = host_float_control();
    set_host_float_control(host_float_control_of(0, 3));
    try {
      Worker(dispatch, progress, selected, (resident + workers - 1) / workers, is_launching).run();
    } catch (const std::bad_alloc&) {
      progress.stop(LaunchProgress::Stop::no_memory);
    }
    set_host_float_control(saved);
    progress.end_worker();
  };
  std::vector<std::thread> threads;
  for (u32 i = 1; i < workers && !progress.is_stopped(); ++i) {
    progress.begin_worker();
    try {
      threads.emplace_back(work, false);
    } catch (const std::system_error& error) {
      progress.end_worker();
      progress.stop(LaunchProgress::Stop::no_thread, error.code().value());
    } catch (const std::bad_alloc&) {
      progress.end_worker();
      progress.stop(LaunchProgress::Stop::no_memory);
    }
  }
  progress.begin_worker();
  work(true);
  progress.wait();
  for (std::thread& thread : threads) thread.join();
  hooks::dispatch_end(dispatch);
  return progress.failure();
}

}  // namespace emulator
