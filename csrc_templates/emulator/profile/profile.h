// The cost model's state. It watches waves through the hooks and counts; it never changes what a
// kernel computes. profile.cpp wires the hooks to one file for each question:
//
//   costs.cpp     what an instruction occupies, and for how long
//   accesses.cpp  what an access costs: LDS banks, cache lines
//   loops.cpp     the loops of the code that ran
//   sample.cpp    which workgroups are timed
//   waits.cpp     which workgroup waits for which other one
//   polls.cpp     which store was the first that ended a wait
//   timing.cpp    when the instructions of a compute unit's waves issue
//   hbm.cpp       what a workgroup brings in from HBM, and how fast
//   export.cpp    all of it as JSON, for jitfmha/emulator/profile.py
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "decode/code_object.h"
#include "execution/dispatch.h"
#include "execution/hooks.h"
#include "execution/occupancy.h"
#include "profile/rates.h"

namespace emulator {

// ---- Costs --------------------------------------------------------------------------------------

Rates rates_of(Arch);

// What the model asks of an instruction, over and over.
struct Cost {
  enum class Port : u8 { none, scalar, vector, memory };  // issue ports of a SIMD; LDS is memory
  Unit unit;
  Port port;
  bool is_packed = false;         // packed float32, which needs what matrix instructions need
  bool sees_other_units = false;  // a load of what these may have stored
  i8 priority = -1;               // that s_setprio sets
  u16 cycles;                     // that its unit is busy; memory: known by execution only
  u16 wait_cycles = 0;            // of s_nop, s_sleep
  u16 lgkm_count = 0xffff, vm_count = 0xffff;  // s_waitcnt
  // Registers, for waiting for results of matrix and transcendental instructions.
  struct Range {
    u16 first = 0, count = 0;
  };
  Range reads[4], write, matrix_c;
};

Cost cost_of(const Instruction&, const Rates&);

// ---- Counts -------------------------------------------------------------------------------------

// What the executions of one instruction by one wave came to.
struct Counts {
  u64 executed = 0;
  u64 taken = 0;  // branches
  u64 lds_bytes = 0;
  u64 lds_cycles = 0;           // of the banks
  u64 lds_conflict_cycles = 0;  // of them, those beyond a conflict-free access
  u64 global_bytes = 0;
  u64 lines = 0;  // cache lines, counted again for each execution
  u64 scratch_bytes = 0;

  void operator+=(const Counts& other) {
    executed += other.executed;
    taken += other.taken;
    lds_bytes += other.lds_bytes;
    lds_cycles += other.lds_cycles;
    lds_conflict_cycles += other.lds_conflict_cycles;
    global_bytes += other.global_bytes;
    lines += other.lines;
    scratch_bytes += other.scratch_bytes;
  }
};
using CountsByDword = std::vector<Counts>;  // one for each of CodeObject::instructions

// One executed instruction of a wave, for timing.cpp.
struct Step {
  u32 dword;
  u16 lds_cycles;
  u16 lines;
};

constexpr u64 kNoLook = ~u64{0};

// A step by which workgroups wait for each other. A flag is a dword that they do it by.
struct Event {
  // A look is a poll before the loop that waits, which can make it unnecessary to poll there.
  enum class Kind : u8 { store, poll, look };
  Kind kind;
  u32 step;    // of the wave's
  u64 flag;    // its address
  u64 number;  // of a store or a look, which tells it from others; of a poll: how many stores to
               // the flag it has seen, or, where that is known, how many it waited for
  // Of a poll: the look that came before it. The poll is no step of the wave's then, but ends the
  // loop, and takes so many cycles where the look came too early.
  u64 look = kNoLook;
  u64 poll_cycles = 0;
};

// What a wave did. The cache lines of all steps are in a row, by the low bits of their numbers.
struct Steps {
  std::vector<Step> steps;
  std::vector<u32> lines;
  std::vector<Event> events;  // by step

  void append(const Steps& other);
};

// The lanes' accesses of the instruction that runs.
class AccessList {
 public:
  void add(int lane, u64 address, u32 bytes) { accesses_.push_back({lane, bytes, address}); }
  bool empty() const { return accesses_.empty(); }
  void clear() { accesses_.clear(); }

  u64 bytes() const;
  // The numbers of the cache lines, ascending; valid until the next call.
  const std::vector<u64>& lines(u32 line_bytes);
  // Cycles of the banks; conflict-free ones through the pointer.
  u64 bank_cycles(const Rates&, bool is_read, u64* without_conflicts) const;

 private:
  struct LaneAccess {
    int lane;
    u32 bytes;
    u64 address;
  };
  std::vector<LaneAccess> accesses_;
  std::vector<u64> lines_;
};

// ---- Loops --------------------------------------------------------------------------------------

// Instructions `first` to `last`, which branches back to `first`.
struct Loop {
  u32 first, last;
  int outer;  // the smallest loop around it, or -1
  u32 depth;  // 1: no loop is around it
};

constexpr int kNoLoop = -1;

// By `first`. Of the back-edges that were taken.
std::vector<Loop> find_loops(const CodeObject&, const CountsByDword&);
// The innermost loop of every dword.
std::vector<int> innermost_loops(const std::vector<Loop>&, std::size_t dwords);

// ---- Waits for other workgroups -----------------------------------------------------------------

// A loop in which a wave may wait for another workgroup. It has no other one inside, sees what
// other units store, and has neither a store nor matrix work.
struct PollingLoop {
  u32 first, last;         // dwords, as of Loop
  u64 cycles;              // of an iteration, about
  bool can_be_tried;       // what it does with a dword that it has polled depends on registers only
  u16 polled = 0;          // the register that it polls into, if so
  std::vector<u16> vgprs;  // that it names
};

constexpr u32 kNoPollingLoop = ~0u;

struct PollingLoops {
  std::vector<PollingLoop> loops;
  std::vector<u32> of_dword;  // places in `loops`, or kNoPollingLoop; empty where there is no loop

  bool empty() const { return loops.empty(); }
};

PollingLoops polling_loops(const Dispatch&, const std::vector<Cost>&);

// What has become of the flags of a launch. Whoever looks at one or stores to it holds the mutex
// from before until it is noted, so that what is noted is the order in which it happened.
class Flags {
 public:
  std::mutex mutex;

  // Gives the store's number. `adds`: it made its value from the one before.
  u64 note_store(u64 flag, u64 workgroup, bool adds, u32 before);
  u64 note_look() { return next_++; }
  u64 stores_to(u64 flag) const;
  // What the flag held after so many stores, of which there is one at least.
  u32 value_after(u64 flag, u64 stores) const;
  // How many stores there were when the workgroup stored last; 0: it has not.
  u64 last_store_by(u64 flag, u64 workgroup) const;
  // Numbers of the stores by others which made what a workgroup saw after `seen` stores: of each
  // workgroup the last one.
  std::vector<u64> awaited(u64 flag, u64 seen, u64 workgroup) const;

 private:
  struct Store {
    u64 number, workgroup;
    bool adds;
    u32 value;
  };
  struct History {
    u32 before = 0;  // all stores
    std::vector<Store> stores;
    std::unordered_map<u64, u64> last_of;  // workgroup: stores up to its last one
  };
  std::unordered_map<u64, History> history_;
  u64 next_ = 0;
};

// The lanes' accesses of the instruction that runs, where it may be one to a flag, with what was in
// memory before.
class FlagAccesses {
 public:
  void add(u64 address, u32 bytes);
  void clear() { before_.clear(); }
  const std::map<u64, u32>& dwords() const { return before_; }
  // Whether all lanes are at one place, and what is there has changed.
  bool is_store() const;

 private:
  std::map<u64, u32> before_;  // by address
};

// What a wave did from one branch back of a polling loop to the next one.
struct Iteration {
  Steps steps;
  std::vector<std::pair<u32, Counts>> counts;  // by dword

  // Whether `later`, which came next, looked at the same flags, because it did not find there what
  // it waits for.
  bool polls_as(const Iteration& later) const;
};

// What a wave has polled, and all that decides, in a loop that can be tried, whether it goes on.
struct Polled {
  const PollingLoop* loop = nullptr;  // null: nothing
  const Instruction* next;            // behind the poll
  u64 flag, seen;                     // as of an Event
  u32 value;
  std::vector<u32> registers;
};

// Before the wave goes on, which has just polled `value`.
Polled polled_by(const Wave&, const PollingLoop&, u64 flag, u64 seen, u32 value);
// How many stores to the flag, at least `known` of those that were seen, make a wave leave its loop
// that has polled when the last one of them was there; kUnknown: what it saw does not make it.
constexpr u64 kUnknown = ~u64{0};
u64 stores_that_end(Wave&, const Flags&, const Polled&, u64 known);

// ---- Timing -------------------------------------------------------------------------------------

// Why a wave did not issue, and for how many cycles.
enum class Stall : u32 {
  vm_count,
  lgkm_count,
  barrier,
  matrix_unit,
  vector_unit,
  result,
  memory_unit,
  nop,
  fetch,
  other_wave,
  kinds,
};
constexpr u32 kStalls = static_cast<u32>(Stall::kinds);

// What a workgroup brings in from HBM. A launch moves each line that it touches once, and its
// workgroups share that evenly, whichever of them is the first to ask: of a range that all of them
// read, most lines are in L2 or the Infinity Cache when a workgroup comes to them.
struct Hbm {
  struct Part {
    u32 first_line, lines;  // of a range that the launch may touch, by the low bits of the number
    double share;           // of the workgroup's lines there that it brings in
    bool has_stores;        // of the launch
  };
  std::vector<Part> parts;
  double share_elsewhere;  // the same of lines in none of them
  double line_cycles;      // until the unit's share of HBM has moved a line
};

struct Timing {
  bool is_known = false;
  std::string why_not;
  u32 workgroups = 0;                    // on the compute unit together
  u64 cycles = 0;                        // until the last of them has ended
  u64 matrix_busy = 0, vector_busy = 0;  // sums over the four SIMDs
  u64 lds_busy = 0, l1_busy = 0;         // of the compute unit
  u64 lines = 0, l1_hits = 0;            // that loads asked for, and that L1 had
  u64 lines_at_ends = 0;                 // that HBM moves before and behind the matrix work
  u64 stalls[kStalls] = {};              // sums over all waves
  // When the events of the waves, one wave after the other, issue in the last of the workgroups to
  // do so, if nobody has to wait.
  std::vector<u64> event_cycles;
};

// `workgroups` copies of one workgroup, whose waves did `waves`, on one compute unit.
Timing time_workgroups(const std::vector<Cost>&, const Rates&, const Hbm&,
                       const std::vector<const Steps*>& waves, u32 workgroups);

// With as many copies as the launch has on a compute unit, at the clock that the chip keeps up.
Timing time_workgroup(const Dispatch&, const std::vector<Steps>& waves);

// ---- Sample -------------------------------------------------------------------------------------

// The linear number of a workgroup, x fastest.
u64 number_of(const Workgroup&);

// Linear numbers of at most `most` workgroups, ascending, `looked_at` among them.
std::vector<u64> sample_of(const u32 (&workgroups)[3], u64 most, u64 looked_at);

// A workgroup that was timed: copies of it share a compute unit.
struct TimedWorkgroup {
  u64 number;
  u32 id[3];
  u64 instructions;  // of its waves
  Timing timing;
  std::vector<Event> events;  // those of Timing::event_cycles
};

// ---- State --------------------------------------------------------------------------------------

struct DispatchObservation {
  ProfileOptions options;
  Rates rates;
  Occupancy occupancy;
  std::vector<u64> sample;                    // by number, ascending
  u32 workgroups_per_unit = 1;                // for the timing
  std::vector<Cost> costs;                    // one for each of CodeObject::instructions
  std::vector<std::atomic<bool>> has_stores;  // of each range that the launch may touch
  PollingLoops polling_loops;
  Flags flags;
  std::mutex mutex;
  CountsByDword total;               // of all waves
  std::vector<CountsByDword> waves;  // of the workgroup that is looked at
  std::vector<TimedWorkgroup> timed;
  u64 workgroups = 0;  // that have ended
};

struct WorkgroupObservation {
  CountsByDword total;
  std::vector<Steps> steps;  // of its waves, where it is timed
  bool is_looked_at = false, is_timed = false, has_all_steps = true;
  std::unique_lock<std::mutex> flags_lock;  // where the instruction that runs may be at a flag
};

struct WaveObservation {
  CountsByDword counts;       // of its own, where the wave is looked at
  CountsByDword* counted_in;  // these, or those of its workgroup
  Steps steps;
  Step step{0, 0, 0};  // the instruction that runs
  AccessList lds, global;
  bool is_looked_at = false, is_timed = false;

  // In a polling loop what is done is kept for each iteration, since those that waited in vain are
  // no part of what the launch costs: how many there are depends on whose turn it is here.
  const PollingLoop* polling_loop = nullptr;
  Iteration iteration, before_it, in_vain;
  u64 polled_in_vain = 0;  // iterations like `in_vain`, which looked at the flags of `before_it`
  FlagAccesses flag_accesses;
  Polled look, entry, poll;  // before the loop, what it began with of that, and in it
  u64 look_number = kNoLook;
  std::unordered_map<u64, u64> known;  // stores to a flag that earlier waits were for

  Counts& counts_of_step() {
    return polling_loop ? iteration.counts.back().second : (*counted_in)[step.dword];
  }
  Steps& recorded() { return polling_loop ? iteration.steps : steps; }
};

// Whether the wave's steps are kept, and there is room for more; if not, that is noted.
bool has_room_for_steps(Wave&);

// Of the hooks, for kernels with polling loops.
void before_polling(Wave&, const Instruction&);
void after_polling(Wave&, const Instruction&);
void leave_polling_loop(Wave&);

// Sorts the timed workgroups.
void export_profile(const Dispatch&, DispatchObservation&);
ProfileOptions profile_options();

}  // namespace emulator
