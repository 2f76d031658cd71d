// The sanitizer's state. It watches waves through the hooks and reports; it never changes what a
// kernel computes. check.cpp wires the hooks to one file for each kind of fault:
//
//   registers.cpp    registers that nobody wrote, and what comes of them
//   counters.cpp     results used before the s_waitcnt that covers them
//   wait_states.cpp  wait states that software must insert (the table: wait_states.inc)
//   paths.cpp        the same over all paths of a code object, which does not run
//   lds.cpp          LDS: bounds, words that nobody wrote, races between waves
//   findings.cpp     the findings themselves, and their export
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "decode/code_object.h"
#include "decode/text.h"
#include "execution/hooks.h"

namespace emulator {

// ---- Findings -----------------------------------------------------------------------------------

// The first occurrence of a fault at one instruction, and how often there were more.
struct Finding {
  u64 workgroup = 0;  // linear number
  u32 workgroup_id[3] = {0, 0, 0};
  u32 wave = 0;
  int lane = -1;
  u64 count = 0;
  std::string message;
};

// By kind and dword of the code.
using Findings = std::map<std::pair<FindingKind, u32>, Finding>;

// Counts a fault of `inst`. Gives the finding where it is the first of its kind at the instruction
// and lacks a message; null otherwise. `lane`: -1 where it is the whole wave.
Finding* count_finding(Wave&, const Instruction&, FindingKind, int lane);

// The same with a message, which is only made where it is needed.
template <class Message>
void report(Wave& wave, const Instruction& inst, FindingKind kind, int lane, Message&& message) {
  if (Finding* const finding = count_finding(wave, inst, kind, lane)) finding->message = message();
}

// "`global_load_dword v0, ...` at add+0x40"
std::string instruction_at(const CodeObject&, u32 dword);
std::string instruction_at(const Wave&, u32 dword);
u32 dword_of(const CodeObject&, const Instruction&);
u32 dword_of(const Wave&, const Instruction&);

// ---- What the checks know about an instruction --------------------------------------------------

// In what ways software must keep an instruction away from the ones before it, and later ones from
// it; see wait_states.inc. Producers are what the earlier instruction did, uses are what the
// later one does.
using UseSet = u64;
using ProducerSet = u32;

// The order in which memory operations complete. Operations of one order complete one after the
// other; flat and scalar ones do so in any order.
enum class Order : u8 { none, vector_memory, lds, flat, scalar };
constexpr u32 kOrders = 5;

// Registers by one number: VGPRs as operands have them, then scalar ones by their encoding.
constexpr u32 kFirstScalar = kVgprs, kRegisters = kFirstScalar + 128;
inline std::string name_of_register(u32 number) {
  return number < kFirstScalar ? register_name(number) : scalar_name(number - kFirstScalar);
}

struct RegisterRange {
  u32 first, count;
  UseSet uses;
  u32 end() const { return first + count; }
};

template <u32 kMost>
struct RegisterRanges {
  RegisterRange ranges[kMost];
  u8 count = 0;

  void add(const RegisterRange& range) {
    if (count < kMost) ranges[count++] = range;
  }
  const RegisterRange* begin() const { return ranges; }
  const RegisterRange* end() const { return ranges + count; }
};

// What becomes of undefined registers that an instruction reads; see registers.cpp.
enum class Flow : u8 {
  used,       // it matters what they hold: addresses, branches, matrix products
  stored,     // they go to memory
  gathered,   // lanes of them go to other lanes
  exchanged,  // two registers change places
  lanes,      // a lane of the result comes from the same lane of each source
  halves,     // the same of each half of a pair
  upwards,    // the same of each half, and of the upper half also from the lower one
  chosen,     // each lane of the result comes from one of two sources
  read_lane,
  written_lane,
  scalar,     // the result is undefined
  bits,       // bit by bit
  field,      // all of it from some bits of the first source
  exec_bits,  // the same, and EXEC is the other source and gets the result
  choice,     // one of two sources, as SCC says
};
Flow flow_of(const Instruction&);

// s_getreg and s_setreg.
enum class HardwareRegisterUse : u8 { none, read, written };

struct InstructionTraits {
  RegisterRanges<14> reads;
  RegisterRanges<4> writes;

  Order order = Order::none;  // of the counter that it raises
  bool loads_to_lds = false;
  bool has_result = false;  // in its `writes`, when the counter says so

  u8 wait_states = 1;                   // that it takes itself; s_nop takes more
  u8 passes_column = 0;                 // MFMA: 2, 4, 8, 16 passes are columns 0 to 3
  ProducerSet produces = 0;             // by what it writes
  ProducerSet produces_by_reading = 0;  // write-after-read hazards
  UseSet threatened = 0;                // uses of what it writes
  u8 protected_source = 0xff;           // the entry of `reads` that produces_by_reading is about
  u8 matrix_c = 0xff;                   // that of C
  HardwareRegisterUse hardware_register = HardwareRegisterUse::none;
  ProducerSet changes_vskip = 0;
  bool is_vector = false;
  bool is_f64_fma = false, is_f64_matrix = false, is_dot = false;

  bool reads_scc = false, writes_scc = false;
  Flow flow = Flow::used;
};

InstructionTraits traits_of(const Instruction&, Arch);

// ---- State --------------------------------------------------------------------------------------

struct DispatchObservation {
  std::vector<InstructionTraits> traits;  // one for each of CodeObject::instructions
  std::mutex mutex;
  Findings findings;
};

// The last instruction that wrote (or, for some rules, read) a register.
struct LastAccess {
  const InstructionTraits* by = nullptr;
  u32 time = 0;  // in wait states
  u32 dword = 0;
};

// That an instruction comes too early after another one.
struct MissingWaits {
  static constexpr i32 kNoRegister = -1;
  u32 after;  // dword of the other one
  u32 needed, has;
  i32 reg;           // that both use; kNoRegister where it is none
  const char* rule;  // what the two do
  const char* source;
  u32 count() const { return needed - has; }
};
std::string text_of(const CodeObject&, const MissingWaits&);

// No two instructions need more wait states between them.
constexpr u32 kLongestWait = 20;

// What a path through the code has done that later instructions may have to keep away from.
struct WaitStateState {
  u32 now = 1000;  // so that an access that never happened is long ago
  LastAccess written[kRegisters], read[kRegisters], hardware_register[64], f64_matrix, vskip;

  // The path goes on with an instruction; what comes too early is added to `missing`.
  void pass(const CodeObject&, const Instruction&, const InstructionTraits&,
            std::vector<MissingWaits>& missing);
  // The same of an instruction that MODE.VSKIP skips.
  void skip(const CodeObject&, const Instruction&, const InstructionTraits&,
            std::vector<MissingWaits>& missing);
};

struct CounterState {
  u32 issued[kOrders] = {}, completed[kOrders] = {};
  u32 flat_vmcnt_done = 0, flat_lgkmcnt_done = 0;  // flat operations wait for both counters
  u64 pending[kRegisters / 64] = {};               // registers that an operation is going to write
  struct Operation {
    Order order = Order::none;
    u32 serial = 0, dword = 0;
  };
  Operation operations[kRegisters];  // by the register

  // All but the last `outstanding` operations of the order are complete.
  void complete(Order, u32 outstanding);
  bool is_complete(Order order, u32 serial) const {
    return serial <= completed[static_cast<u32>(order)];
  }
};

// What is defined: lanes of vector registers, bits of scalar ones. A register that nobody wrote is
// not, nor is what was computed from one.
struct RegisterState {
  static constexpr u32 kScalars = kRegisters - kFirstScalar, kMostResults = 32, kMostData = 8;

  u64 written[kVgprs] = {};
  u64 written_scalars[2] = {};   // a bit for each register
  u32 undefined_bits[kScalars];  // of those that are not in written_scalars
  bool undefined_scc = false;
  // Which instruction made a register undefined: its dword and one; 0: nobody wrote the register.
  u32 origin[kRegisters] = {};
  std::vector<u64> undefined_scratch;  // lanes, for each dword; empty: none

  // Of the instruction that runs, where it reads or may leave something undefined.
  struct OfInstruction {
    u32 origin = 0;
    u64 lanes[kMostResults] = {};  // of the destination's registers
    u64 other_lanes = 0;           // of the other register of an exchange
    u32 bits[2] = {};              // of a scalar destination
    u64 mask = 0;                  // of a lane mask
    bool scc = false;
    u64 data[kMostData] = {};  // lanes of the registers that go to memory or to other lanes
    u8 moved[64] = {};         // bytes that each lane has moved to or from memory
  } now;

  RegisterState() { std::fill(std::begin(undefined_bits), std::end(undefined_bits), ~0u); }
};

// A lane's access of LDS.
struct LdsAccess {
  Wave& wave;
  const Instruction& inst;
  int lane;
  Access kind;
  Order order;
  u32 serial, at;  // at: dword of the code
  u64 begin;       // its first byte in LDS
  bool is_write() const { return kind != Access::load; }
  bool loads_to_lds() const;
  // Where a load into LDS has the word at `offset` from; 0 where it is none.
  u64 source(u32 offset) const;
};

// A store to bytes of LDS that another wave stores to as well. It does no harm if it leaves them as
// they were, which is known when it is done.
struct ContestedStore {
  LdsAccess access;
  u32 offset;
  u8 bytes;    // of the word, a bit each
  u32 before;  // the word
};

struct WaveObservation {
  WaitStateState wait_states;
  CounterState counters;
  RegisterState registers;
  const InstructionTraits* current = nullptr;
  bool is_unfinished = false;                    // something is left to do behind `current`
  std::vector<ContestedStore> contested_stores;  // of `current`
  u32 barriers = 0;                              // that it arrived at
  u64 loaded_from[64] = {};     // by the load into LDS that runs, for each lane; 0: nowhere
  alignas(64) u8 stand_in[64];  // where accesses go that cannot be executed
};

// What is known of one LDS word.
struct LdsWord {
  static constexpr u8 kNobody = 0xff;
  u32 written_serial = 0, written_at = 0;  // at: dword of the code
  u32 read_serial[2] = {0, 0};
  u8 writer = kNobody, reader[2] = {kNobody, kNobody};  // waves; two readers are remembered
  Order written_order = Order::none, read_order[2] = {Order::none, Order::none};
  u8 written_bytes = 0;  // by the writer; a bit each
  u8 initialized_bytes : 4;
  u8 written_atomically : 1;
  u8 written_by_several : 1;  // waves, the same bytes: see WorkgroupObservation::writes_of_word
  u64 loaded_from = 0;        // by a load into LDS; 0 where it loaded nothing
  LdsWord() : initialized_bytes(0), written_atomically(0), written_by_several(0) {}
};

constexpr u32 kMostWaves = 16;  // of a workgroup

struct WorkgroupObservation {
  std::vector<Wave*> waves;
  std::vector<LdsWord> lds;
  std::vector<u8> undefined_lds;  // bytes of each word, a bit each; empty: none
  // Of words to which several waves wrote the same: each wave's operation, 0 where it has none.
  std::map<u32, std::array<u32, kMostWaves>> writes_of_word;
  // For each wave: operations that had completed when it arrived at the last barrier. What it did
  // before them is ordered before everything that other waves do after the barrier.
  std::vector<std::array<u32, kOrders>> published;
  Findings findings;
};

// ---- The checks, called by the hooks ------------------------------------------------------------

void begin_registers(Wave&);
void finish_registers(Wave&, const Instruction&);
// An access of LDS or of private memory: what is undefined goes to memory or comes from there.
void move_undefined_lds(Wave&, int lane, u32 offset, u32 bytes, Access);

void check_counters(Wave&, const Instruction&, const InstructionTraits&);

void settle_contested_stores(Wave&);
void publish_lds(Workgroup&);

void export_findings(const Dispatch&, const Findings&);

}  // namespace emulator
