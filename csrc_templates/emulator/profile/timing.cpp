// The timing model: the waves of a compute unit issue in order against Rates.
//
//  * Each of the four SIMDs issues to each port (scalar, vector, LDS, vector memory) at most once
//    in Rates::issue cycles, and from each wave at most one instruction: highest s_setprio first,
//    then the oldest wave.
//  * The vector port is busy for a VALU instruction's cycles, and for one issue slot of a matrix
//    instruction, whose cycles are the matrix unit's. So the two overlap, of one wave or several.
//  * An instruction that reads or overwrites a matrix result waits for it for
//    Rates::matrix_result; the accumulator of the next matrix instruction does not.
//  * LDS and L1 are the compute unit's. They serve requests in order; data comes a latency later.
//
// What is not modelled: caches (every access has one latency), HBM, instruction fetch other than
// of branch targets, register banks, and workgroups that start while others run.
#include "execution/hooks.h"

#if JITFMHA_EMULATOR_PROFILE

#include <algorithm>
#include <deque>
#include <memory>

#include "profile/profile.h"

namespace emulator {

namespace {

constexpr u32 kPriorities = 4;
constexpr u64 kNever = ~u64{0};

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
  const Steps* steps;
  u32 workgroup;
  std::size_t next = 0;
  u64 ready = 0;  // it cannot issue before
  Stall waiting_for = Stall::fetch;
  u64 issued_at = kNever;
  u32 priority = 0;
  bool at_barrier = false;
  Outstanding vm, lgkm;
  u64 last_result = 0;           // when all of the results below are there
  u64 result[kVgprs] = {};       // of matrix instructions, by register
  u64 accumulator[kVgprs] = {};  // the same for the next matrix instruction's C

  bool has_ended() const { return next >= steps->size(); }
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
  u64 port_used[5] = {kNever, kNever, kNever, kNever, kNever};  // when it issued last
};

class ComputeUnit {
 public:
  ComputeUnit(const std::vector<Cost>& costs, const Rates& rates,
              const std::vector<const Steps*>& waves, u32 workgroups)
      : costs_(costs), rates_(rates), running_(workgroups, 0), arrived_(workgroups, 0) {
    for (u32 workgroup = 0; workgroup < workgroups; ++workgroup) {
      for (const Steps* const steps : waves) {
        Simd& simd = simds_[waves_.size() % kSimds];
        waves_.push_back(std::make_unique<SimulatedWave>());
        waves_.back()->steps = steps;
        waves_.back()->workgroup = workgroup;
        simd.waves.push_back(waves_.back().get());
        running_[workgroup] += !steps->empty();
      }
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
    timing_.cycles = std::max({now_ + rates_.issue, lds_free_, l1_free_, last_end_});
    timing_.is_known = true;
    return timing_;
  }

 private:
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
      if (cost.unit == Unit::mfma && simd.matrix_free > now_) return wave.waits(Stall::matrix_unit);
    }
    if (cost.port == Cost::Port::lds && lds_free_ > now_ + rates_.queue)
      return wave.waits(Stall::memory_unit);
    if (cost.port == Cost::Port::vector_memory && l1_free_ > now_ + rates_.queue)
      return wave.waits(Stall::memory_unit);

    port_used = now_;
    wave.ready = now_ + rates_.issue;
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

  void occupy(Simd& simd, SimulatedWave& wave, const Step& step, const Cost& cost) {
    switch (cost.unit) {
      case Unit::mfma:
        simd.vector_free = now_ + rates_.issue;
        simd.matrix_free = now_ + cost.cycles;
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
      case Unit::vmem_load:
      case Unit::vmem_store:
      case Unit::vmem_atomic: {
        const u32 cycles = step.lines * rates_.cycles_of_line;
        l1_free_ = std::max(l1_free_, now_) + cycles;
        timing_.l1_busy += cycles;
        wave.vm.add(l1_free_ + rates_.global_latency);
        last_end_ = std::max(last_end_, l1_free_ + rates_.global_latency);
        // Loads into LDS, and generic accesses to it.
        if (step.lds_cycles) occupy_lds(step.lds_cycles);
        break;
      }
      default: break;
    }
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
  std::vector<std::unique_ptr<SimulatedWave>> waves_;
  std::vector<u32> running_, arrived_;  // waves of each workgroup: not ended, at the barrier
  Simd simds_[kSimds];
  u64 now_ = 0, lds_free_ = 0, l1_free_ = 0, last_end_ = 0;
  Timing timing_;
};

}  // namespace

Timing time_workgroups(const std::vector<Cost>& costs, const Rates& rates,
                       const std::vector<const Steps*>& waves, u32 workgroups) {
  return ComputeUnit(costs, rates, waves, workgroups).run();
}

}  // namespace emulator

#endif
