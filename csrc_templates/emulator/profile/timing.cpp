// The timing model: the waves of a compute unit issue in order against Rates.
//
//  * Each of the four SIMDs issues to each port (scalar, vector, LDS and memory) at most once in
//    Rates::issue cycles, and from each wave at most one instruction: highest s_setprio first,
//    then the oldest wave.
//  * The vector port is busy for a VALU instruction's cycles, and for those in which a matrix
//    instruction reads, whose other cycles are the matrix unit's. So the two overlap, of one wave
//    or several. Packed float32 does not overlap: it waits until the matrix unit is free, before
//    the next matrix instruction of another wave, and a while longer behind those of its own.
//  * An instruction that reads or overwrites a matrix result waits for it for
//    Rates::matrix_result; the accumulator of the next matrix instruction does not.
//  * LDS and L1 are the compute unit's. They serve requests in order; data comes a latency later,
//    of lines that L1 does not have the one of L2 and the Infinity Cache. Atomics are L2's, which
//    takes a line of a compute unit at a time.
//  * HBM moves the lines that the workgroup brings in (hbm.cpp) one after the other, at the unit's
//    share of what the chip streams, and their latency is HBM's. So as much of its time hides
//    behind other work as the loads do that s_waitcnt lets a wave have on their way.
//  * Before a wave's first matrix instruction and behind its last one there is no such work, and
//    those of all units come at once: these lines are counted, for estimate.py.
//
// What is not modelled: which lines L2 gives up, instruction fetch other than of branch targets,
// register banks, and workgroups that start while others run.
#include <algorithm>
#include <cmath>
#include <deque>
#include <memory>
#include <unordered_set>

#include "profile/profile.h"

namespace emulator {
namespace {

constexpr u32 kPriorities = 4;
constexpr u32 kMostOutstanding = 63;  // of a wave's loads and stores: as far as vmcnt counts
constexpr u64 kNever = ~u64{0};
constexpr std::size_t kNoEnd = ~std::size_t{0};

// Operations that a counter of s_waitcnt counts, by the time when each is done: in order.
class Outstanding {
 public:
  void add(u64 done) { done_.push_back(done_.empty() ? done : std::max(done, done_.back())); }
  // When at most `allowed` are left, not before `now`.
  u64 time_of(u32 allowed, u64 now) {
    while (!done_.empty() && done_.front() <= now) done_.pop_front();
    return done_.size() <= allowed ? now : done_[done_.size() - allowed - 1];
  }

 private:
  std::deque<u64> done_;
};

struct SimulatedWave {
  const std::vector<Step>* steps;
  const u32* next_line;  // of those that the steps touch
  const std::vector<Event>* events;
  std::size_t first_event;  // in Timing::event_cycles
  u32 workgroup;
  std::size_t next = 0, next_event = 0;
  std::size_t matrix_begin = 0, matrix_end = kNoEnd;  // its matrix instructions are within
  u64 ready = 0;                                      // it cannot issue before
  Stall waiting_for = Stall::fetch;
  u64 issued_at = kNever;
  u32 priority = 0;
  bool at_barrier = false;
  Outstanding vm, lgkm;
  u64 packed_free = 0;           // when packed float32 can follow its matrix instructions
  u64 last_result = 0;           // when all of the results below are there
  u64 result[kVgprs] = {};       // of matrix instructions, by register
  u64 accumulator[kVgprs] = {};  // the same for the next matrix instruction's C

  bool has_ended() const { return next >= steps->size(); }
  bool is_at_an_end() const { return next < matrix_begin || next >= matrix_end; }
  bool can_try(u64 now) const {
    return !has_ended() && !at_barrier && ready <= now && issued_at != now;
  }
  bool waits(Stall reason, u64 until = 0) {
    waiting_for = reason;
    ready = std::max(ready, until);
    return false;
  }
};

u64 latest(const u64* times, const Cost::Range& range) {
  u64 time = 0;
  for (u32 i = 0; i < range.count; ++i) time = std::max(time, times[range.first + i]);
  return time;
}

struct Simd {
  std::vector<SimulatedWave*> waves;  // the oldest first
  u64 vector_free = 0, matrix_free = 0;
  const SimulatedWave* claimant = nullptr;  // whose packed float32 is next at the matrix unit
  u64 port_used[4] = {kNever, kNever, kNever, kNever};  // when it issued last
};

// A compute unit's L1: sets of ways, which are filled in turn.
class Cache {
 public:
  Cache(u32 lines, u32 ways)
      : ways_(ways),
        sets_(lines / ways),
        numbers_(lines, kNever),
        there_(lines),
        next_way_(lines / ways, 0) {}

  // When the data of a line is here; null: it was not asked for, or has been given up.
  const u64* find(u64 line) const {
    const std::size_t begin = line % sets_ * ways_;
    u32 way = ways_;
    for (u32 i = 0; i < ways_; ++i) way = numbers_[begin + i] == line ? i : way;
    return way < ways_ ? &there_[begin + way] : nullptr;
  }
  void insert(u64 line, u64 there) {
    const u64 set = line % sets_;
    const std::size_t at = set * ways_ + next_way_[set]++ % ways_;
    numbers_[at] = line;
    there_[at] = there;
  }

 private:
  u32 ways_, sets_;
  std::vector<u64> numbers_, there_;
  std::vector<u32> next_way_;
};

class ComputeUnit {
 public:
  ComputeUnit(const std::vector<Cost>& costs, const Rates& rates, const Hbm& hbm,
              const std::vector<const Steps*>& waves, u32 workgroups)
      : costs_(costs),
        rates_(rates),
        hbm_(hbm),
        brought_(hbm.parts.size() + 1, 0.5),
        running_(workgroups, 0),
        arrived_(workgroups, 0),
        l1_(rates.l1_bytes / rates.line_bytes, rates.l1_ways) {
    for (u32 workgroup = 0; workgroup < workgroups; ++workgroup) {
      std::size_t events = 0;
      for (const Steps* const steps : waves) {
        Simd& simd = simds_[waves_.size() % kSimds];
        waves_.push_back(std::make_unique<SimulatedWave>());
        waves_.back()->steps = &steps->steps;
        waves_.back()->next_line = steps->lines.data();
        waves_.back()->events = &steps->events;
        waves_.back()->first_event = events;
        events += steps->events.size();
        waves_.back()->workgroup = workgroup;
        find_matrix_work(*waves_.back());
        simd.waves.push_back(waves_.back().get());
        running_[workgroup] += !steps->steps.empty();
      }
      timing_.event_cycles.resize(events);
    }
    timing_.workgroups = workgroups;
  }

  Timing run() {
    while (true) {
      bool issued = false;
      for (Simd& simd : simds_) issued |= issue_slot(simd);
      u64 next = kNever;
      bool all_ended = true;
      for (const auto& wave : waves_) {
        if (wave->has_ended()) continue;
        all_ended = false;
        if (!wave->at_barrier) next = std::min(next, std::max(wave->ready, now_ + rates_.issue));
      }
      if (all_ended) break;
      // Where nothing issued, nothing happens until the first wave can go on.
      const u64 slots =
          issued || next == kNever ? 1 : (next - now_ + rates_.issue - 1) / rates_.issue;
      for (const auto& wave : waves_)
        if (!wave->has_ended() && wave->issued_at != now_)
          timing_.stalls[static_cast<u32>(wave->waiting_for)] += slots * rates_.issue;
      now_ += slots * rates_.issue;
      if (next == kNever && !issued) {
        timing_.why_not = "the waves that are left wait at barriers that no other wave reaches";
        return timing_;
      }
    }
    timing_.cycles = std::max({now_ + rates_.issue, lds_free_, l1_free_, last_end_, hbm_end()});
    timing_.is_known = true;
    return timing_;
  }

 private:
  void find_matrix_work(SimulatedWave& wave) const {
    const std::vector<Step>& steps = *wave.steps;
    const auto is_matrix = [&](const Step& step) { return costs_[step.dword].unit == Unit::mfma; };
    const auto first = std::find_if(steps.begin(), steps.end(), is_matrix);
    if (first == steps.end()) return;  // a kernel, or a wave, that only moves: all of it overlaps
    const auto behind = std::find_if(steps.rbegin(), steps.rend(), is_matrix).base();
    wave.matrix_begin = static_cast<std::size_t>(first - steps.begin());
    wave.matrix_end = static_cast<std::size_t>(behind - steps.begin());
  }

  bool issue_slot(Simd& simd) {
    bool issued = false;
    for (u32 priority = kPriorities; priority-- > 0;) {
      for (SimulatedWave* const wave : simd.waves) {
        if (wave->priority != priority || !wave->can_try(now_)) continue;
        if (!issue(simd, *wave)) continue;
        wave->issued_at = now_;
        issued = true;
      }
    }
    return issued;
  }

  // Issues the wave's next instruction, or notes why not.
  bool issue(Simd& simd, SimulatedWave& wave) {
    const Step& step = (*wave.steps)[wave.next];
    const Cost& cost = costs_[step.dword];
    if (cost.unit == Unit::waitcnt) {
      if (const u64 time = wave.vm.time_of(cost.vm_count, now_); time > now_)
        return wave.waits(Stall::vm_count, time);
      if (const u64 time = wave.lgkm.time_of(cost.lgkm_count, now_); time > now_)
        return wave.waits(Stall::lgkm_count, time);
    }
    if (wave.last_result > now_)
      if (const u64 time = time_of_results(wave, cost); time > now_)
        return wave.waits(Stall::result, time);
    u64& port_used = simd.port_used[static_cast<u32>(cost.port)];
    if (cost.port != Cost::Port::none && port_used == now_) return wave.waits(Stall::other_wave);
    if (cost.port == Cost::Port::vector) {
      if (simd.vector_free > now_) return wave.waits(Stall::vector_unit);
      if (cost.is_packed && wave.packed_free > now_)
        return wave.waits(Stall::matrix_unit, wave.packed_free);
      if (cost.is_packed || cost.unit == Unit::mfma) {
        const bool is_claimed = simd.claimant && simd.claimant != &wave;
        if (cost.is_packed && !is_claimed) simd.claimant = &wave;
        if (is_claimed || simd.matrix_free > now_) return wave.waits(Stall::matrix_unit);
        simd.claimant = nullptr;
      }
    }
    if (cost.port == Cost::Port::memory) {
      if (queue_of(cost.unit) > now_ + rates_.queue) return wave.waits(Stall::memory_unit);
      if (cost.unit != Unit::lds)
        if (const u64 time = wave.vm.time_of(kMostOutstanding - 1, now_); time > now_)
          return wave.waits(Stall::vm_count, time);
    }

    port_used = now_;
    wave.ready = now_ + rates_.issue;
    for (; wave.next_event < wave.events->size(); ++wave.next_event) {
      const Event& event = (*wave.events)[wave.next_event];
      if (event.step != wave.next) break;
      // The last of the workgroups to come there stays.
      timing_.event_cycles[wave.first_event + wave.next_event] = now_;
    }
    occupy(simd, wave, step, cost);
    advance(wave, step, cost);
    return true;
  }

  static u64 time_of_results(const SimulatedWave& wave, const Cost& cost) {
    u64 time = 0;
    for (const Cost::Range& range : cost.reads) time = std::max(time, latest(wave.result, range));
    if (cost.unit == Unit::mfma) return std::max(time, latest(wave.accumulator, cost.matrix_c));
    return std::max(time, latest(wave.result, cost.write));
  }

  // Until when requests of this kind keep busy what takes the next one.
  u64 queue_of(Unit unit) const {
    if (unit == Unit::lds) return lds_free_;
    return unit == Unit::vmem_atomic ? std::max(l1_free_, atomics_free_) : l1_free_;
  }

  void occupy(Simd& simd, SimulatedWave& wave, const Step& step, const Cost& cost) {
    switch (cost.unit) {
      case Unit::mfma:
        simd.vector_free = now_ + rates_.matrix_read;
        simd.matrix_free = now_ + cost.cycles;
        wave.packed_free = simd.matrix_free + rates_.packed_after_matrix;
        timing_.matrix_busy += cost.cycles;
        for (u32 i = 0; i < cost.write.count; ++i) {
          wave.accumulator[cost.write.first + i] = simd.matrix_free;
          wave.result[cost.write.first + i] = simd.matrix_free + rates_.matrix_result;
        }
        wave.last_result = std::max(wave.last_result, simd.matrix_free + rates_.matrix_result);
        break;
      case Unit::valu:
      case Unit::transcendental:
        simd.vector_free = now_ + cost.cycles;
        timing_.vector_busy += cost.cycles;
        break;
      case Unit::lds: wave.lgkm.add(occupy_lds(step.lds_cycles) + rates_.lds_latency); break;
      case Unit::smem: wave.lgkm.add(now_ + rates_.scalar_latency); break;
      case Unit::vmem_load: wave.vm.add(load(wave, step, cost)); break;
      case Unit::vmem_store:
      case Unit::vmem_atomic: wave.vm.add(store(wave, step, cost.unit)); break;
      default: break;
    }
  }

  // Each line passes L1; those that are not there come from L2 or beyond. Loads into LDS, and
  // generic accesses to it, occupy its banks too. What the launch stores is in L2 or the Infinity
  // Cache, for loads that see it.
  u64 load(SimulatedWave& wave, const Step& step, const Cost& cost) {
    u64 there = now_ + rates_.l1_latency;
    for (u32 i = 0; i < step.lines; ++i) {
      occupy_l1(rates_.l1_line);
      // Workgroups that share a compute unit are at different places: each has lines of its own.
      const u64 line = u64{wave.workgroup} << 32 | *wave.next_line++;
      const u64* known = cost.sees_other_units ? nullptr : l1_.find(line);
      timing_.l1_hits += known != nullptr;
      if (!known) {
        fills_free_ = std::max(fills_free_, l1_free_) + rates_.global_line;
        u64 filled = fills_free_ + rates_.global_latency;
        const bool is_there = cost.sees_other_units && may_be_stored(line);
        if (!is_there && is_brought_in(line) && move(wave, fills_free_))
          filled = std::max(filled, hbm_end() + rates_.hbm_latency);
        l1_.insert(line, filled);
        there = std::max(there, filled);
      } else {
        there = std::max({there, *known, l1_free_ + rates_.l1_latency});
      }
    }
    timing_.lines += step.lines;
    if (step.lds_cycles) occupy_lds(step.lds_cycles);
    last_end_ = std::max(last_end_, there);
    return there;
  }

  // Written through, and atomics are L2's. L2 has what is stored before HBM does.
  u64 store(SimulatedWave& wave, const Step& step, Unit unit) {
    for (u32 i = 0; i < step.lines; ++i)
      if (is_brought_in(u64{wave.workgroup} << 32 | *wave.next_line++)) move(wave, l1_free_);
    occupy_l1(step.lines * rates_.l1_line);
    u64 begin = l1_free_;
    if (unit == Unit::vmem_atomic)
      begin = atomics_free_ = std::max(atomics_free_, begin) + step.lines * rates_.atomic_line;
    if (step.lds_cycles) occupy_lds(step.lds_cycles);
    const u64 done = begin + rates_.global_latency;
    last_end_ = std::max(last_end_, done);
    return done;
  }

  // Whether the workgroup, when it touches a line for the first time, is the one that brings it in:
  // evenly as many of those of each part as are its share.
  bool is_brought_in(u64 line) {
    const std::size_t part = part_of(line);
    const double share = part < hbm_.parts.size() ? hbm_.parts[part].share : hbm_.share_elsewhere;
    if (share == 0 || !touched_.insert(line).second) return false;
    brought_[part] += share;
    if (brought_[part] < 1) return false;
    brought_[part] -= 1;
    return true;
  }

  std::size_t part_of(u64 line) const {
    std::size_t part = 0;
    while (part < hbm_.parts.size() &&
           static_cast<u32>(line) - hbm_.parts[part].first_line >= hbm_.parts[part].lines)
      ++part;
    return part;
  }

  // Whether the launch stores where a line is, or may.
  bool may_be_stored(u64 line) const {
    const std::size_t part = part_of(line);
    return part == hbm_.parts.size() || hbm_.parts[part].has_stores;
  }

  // HBM moves a line of this unit, not before `time`. False: it is counted, and takes no time here.
  bool move(const SimulatedWave& wave, u64 time) {
    timing_.lines_at_ends += wave.is_at_an_end();
    if (wave.is_at_an_end()) return false;
    hbm_free_ = std::max(hbm_free_, static_cast<double>(time)) + hbm_.line_cycles;
    return true;
  }
  u64 hbm_end() const { return static_cast<u64>(std::ceil(hbm_free_)); }

  void occupy_l1(u32 cycles) {
    l1_free_ = std::max(l1_free_, now_) + cycles;
    timing_.l1_busy += cycles;
  }

  u64 occupy_lds(u32 cycles) {
    timing_.lds_busy += cycles;
    return lds_free_ = std::max(lds_free_, now_) + cycles;
  }

  void advance(SimulatedWave& wave, const Step& step, const Cost& cost) {
    ++wave.next;
    if (cost.priority >= 0) wave.priority = static_cast<u32>(cost.priority);
    if (cost.wait_cycles > rates_.issue) wave.waits(Stall::nop, now_ + cost.wait_cycles);
    if (cost.unit == Unit::branch && !wave.has_ended() &&
        (*wave.steps)[wave.next].dword != step.dword + 1)
      wave.waits(Stall::fetch, now_ + rates_.branch);
    if (wave.has_ended()) {
      --running_[wave.workgroup];
    } else if (cost.unit == Unit::barrier) {
      wave.at_barrier = true;
      wave.waiting_for = Stall::barrier;
      ++arrived_[wave.workgroup];
    }
    if (running_[wave.workgroup] && arrived_[wave.workgroup] == running_[wave.workgroup])
      release(wave.workgroup);
  }

  void release(u32 workgroup) {
    arrived_[workgroup] = 0;
    for (const auto& wave : waves_) {
      if (wave->workgroup != workgroup || !wave->at_barrier) continue;
      wave->at_barrier = false;
      wave->waits(Stall::barrier, now_ + rates_.barrier);
    }
  }

  const std::vector<Cost>& costs_;
  const Rates& rates_;
  const Hbm& hbm_;
  std::vector<double> brought_;  // of each part: what is due of the next line
  std::unordered_set<u64> touched_;
  std::vector<std::unique_ptr<SimulatedWave>> waves_;
  std::vector<u32> running_, arrived_;  // waves of each workgroup: not ended, at the barrier
  Simd simds_[kSimds];
  Cache l1_;
  u64 now_ = 0, lds_free_ = 0, l1_free_ = 0, fills_free_ = 0, atomics_free_ = 0, last_end_ = 0;
  double hbm_free_ = 0;
  Timing timing_;
};

}  // namespace

Timing time_workgroups(const std::vector<Cost>& costs, const Rates& rates, const Hbm& hbm,
                       const std::vector<const Steps*>& waves, u32 workgroups) {
  return ComputeUnit(costs, rates, hbm, waves, workgroups).run();
}

}  // namespace emulator
