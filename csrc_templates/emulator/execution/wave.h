// The state of a wave, of its workgroup, and of the launch that they belong to.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "decode/instruction.h"
#include "memory/memory.h"
#include "shared_structs.h"

namespace emulator {

constexpr u32 kLanes = 64;
constexpr u32 kVgprs = 512;  // architectural and accumulation
constexpr u32 kFirstAccumulation = 256;
constexpr u64 kAllLanes = ~u64{0};

// Encodings of the scalar operands that have a name.
enum ScalarIndex : u16 {
  kFlatScratch = 102,
  kXnackMask = 104,
  kVccIndex = 106,
  kTtmp0 = 108,
  kM0 = 124,
  kExecIndex = 126,
};

// MODE as s_getreg and s_setreg see it.
enum ModeBits : u32 {
  kModeRound32 = 3u << 0,
  kModeRound16And64 = 3u << 2,
  kModeDenormal32 = 3u << 4,
  kModeDenormal16And64 = 3u << 6,
  kModeDx10Clamp = 1u << 8,
  kModeIeee = 1u << 9,
  kModeFp16Overflow = 1u << 23,
  kModeVgprIndexing = 1u << 27,
  kModeVectorSkip = 1u << 28,
};

// What stopped a kernel. The scheduler adds kernel, address, instruction, workgroup and wave.
class Fault : public std::runtime_error {
 public:
  explicit Fault(const std::string& message, int lane = -1)
      : std::runtime_error(message), lane(lane) {}
  const int lane;
};

std::string formatted(const char* format, ...) __attribute__((format(printf, 1, 2)));
// `Fault` with such a message.
[[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void lane_fault(int lane, const char* format, ...)
    __attribute__((format(printf, 2, 3)));

// State that checks/ and profile/ keep for a wave, a workgroup and a launch; see hooks.h.
struct WaveObservation;
struct WorkgroupObservation;
struct DispatchObservation;

struct CodeObject;
struct Kernel;
struct Device;
struct Wave;

// Whether a launch goes on; 0: it ends. Only the thread that launches asks.
using InterruptionCheck = int (*)();

// One kernel launch. Workers share it and only read it, `memory` included.
struct Dispatch {
  const CodeObject* code;
  const Kernel* kernel;
  const Device* device;
  u32 workgroups[3];
  u32 workgroup_size[3];
  u32 lds_bytes;  // static and dynamic
  u32 scratch_bytes_per_lane;
  const u8* kernarg;
  AddressSpace memory;
  Options options;
  InterruptionCheck interruption_check;  // null: none
  alignas(64) u8 dispatch_packet[64];
  DispatchObservation* observation = nullptr;
};

// A load into LDS on its way.
struct LdsLoad {
  Wave* wave;      // that issued it
  u64 number;      // of its vector memory instructions, counted as vmcnt does
  u64 due;         // in the workgroup's time
  u32 bytes;       // of each lane
  u8* to[kLanes];  // null: nothing
  u32 data[kLanes][4];
};

// An atomic operation without a result on its way.
struct LateAtomic {
  const Wave* wave;                   // that issued it
  u64 number;                         // of its vector memory instructions, counted as vmcnt does
  u64 due;                            // in the workgroup's time
  u64 begin, end;                     // of the addresses, which lie between
  std::function<void()> take_effect;  // in all lanes
};

struct Workgroup {
  const Dispatch& dispatch;
  u32 id[3];
  u8* lds;
  u32 lds_bytes;
  u32 wave_count;
  WorkgroupObservation* observation = nullptr;

  // Loads into LDS of all waves, in the order of issue, in which they land as well: memory answers
  // a compute unit in order. One lands when it is due, or earlier where a wave waits for it or for
  // a later one. Production kernels rely on both sides of that: that memory is far away, right
  // after a barrier, and that what was issued before it is there when a later load is. vmcnt counts
  // to 63, and a wave's next load waits where it would go beyond.
  std::deque<LdsLoad> lds_loads;
  u64 now = 0;             // instructions of the wave that ran most, summed over the rounds
  u64 memory_latency = 0;  // of what is issued now
  // Instructions of which loops consist that wait for other workgroups: s_sleep, loads that go past
  // the unit's own cache, atomic operations with a result.
  u64 polls = 0;

  void make_room_for_lds_load_of(Wave&);
  void land_due_lds_loads();
  // Lets loads land until at most `outstanding` vector memory instructions of the wave are left.
  void land_lds_loads_of(const Wave&, u64 outstanding);

  // In random order, atomic operations without a result take effect late, and not in the order in
  // which they were issued: when they are due, or earlier where their wave waits for them, or comes
  // back to what they change. Otherwise none is late.
  std::vector<LateAtomic> late_atomics{};

  void land_due_atomics();
  void land_all_atomics();
  void land_atomics_of(const Wave&, u64 outstanding);
  void land_atomics_at(const Wave&, u64 begin, u64 end);

 private:
  void land_first_lds_load();
  template <class Predicate> void land_atomics_if(Predicate&&);
};

enum class WaveState : u8 { running, at_barrier, ended };

struct Wave {
  alignas(64) u32 vgpr[kVgprs][kLanes];
  alignas(64) u32 scalar[128];  // indexed by operand encoding: SGPRs, vcc, m0, exec, ...
  const Instruction* pc;        // the next instruction
  const Instruction* current;   // the one that runs
  Workgroup* workgroup;
  u32 mode;
  u32 status_bits;  // hardware registers that kernels read for information only
  bool scc;
  WaveState state;
  bool yields;              // set by s_sleep: the other waves get their turn
  bool indexes_vgprs;       // between s_set_gpr_idx_on and _off
  bool skips_vector;        // MODE.VSKIP: vector instructions are not issued
  bool default_float_mode;  // nearest even, denormals kept: nothing to set around float code
  u8 index;                 // in the workgroup
  u8 priority;
  u32 vgpr_count;                // architectural and accumulation, that the kernel allocated
  u32 accumulation_offset;       // architectural VGPRs; accumulation registers come after
  u64 executed;                  // instructions
  u8* scratch;                   // scratch_bytes_per_lane for each of 64 lanes, one after the other
  AddressSpace::Hit memory_hit;  // the range of the last access
  u64 vector_memory_issued;      // instructions that raise vmcnt
  u32 lds_loads_on_their_way;    // of this wave in Workgroup::lds_loads
  WaveObservation* observation = nullptr;

  u64& vcc() { return pair(kVccIndex); }
  u64& exec() { return pair(kExecIndex); }
  u64 exec() const { return const_cast<Wave*>(this)->pair(kExecIndex); }
  u64& pair(u32 index) { return reinterpret_cast<u64&>(scalar[index]); }  // index is even
  const Dispatch& dispatch() const { return workgroup->dispatch; }
  void set_mode(u32 value);
};

}  // namespace emulator
