// The sanitizer's state. It watches waves through the hooks and reports; it never changes what a
// kernel computes. check.cpp wires the hooks to one file for each kind of fault:
//
//   registers.cpp    registers that nobody wrote
//   counters.cpp     results used before the s_waitcnt that covers them
//   wait_states.cpp  wait states that software must insert (the table: wait_states.inc)
//   paths.cpp        the same over all paths of a code object, which does not run
//   lds.cpp          LDS: bounds, words that nobody wrote, races between waves
//   findings.cpp     the findings themselves, and their export
#pragma once

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

  bool reads_one_lane = false;                                      // v_readlane, v_readfirstlane
  bool moves_one_lane = false;                                      // v_readlane, v_writelane
  bool moves_accumulation = false;                                  // v_accvgpr_*
  bool halves_are_independent = false, high_half_flows_up = false;  // registers.cpp
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

  bool is_complete(Order order, u32 serial) const {
    return serial <= completed[static_cast<u32>(order)];
  }
};

struct RegisterState {
  u64 written[kVgprs] = {};  // lanes
  u64 written_scalars[2] = {};
  // Lanes of the destination's registers that stay unwritten, because their source is.
  u64 undefined_result[2] = {};
  bool has_undefined_result = false;
};

struct WaveObservation {
  WaitStateState wait_states;
  CounterState counters;
  RegisterState registers;
  const InstructionTraits* current = nullptr;
  u32 barriers = 0;             // that it arrived at
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
  u8 loaded_by_several : 1;  // waves, the same bytes: see WorkgroupObservation::loads_of_word
  u64 loaded_from = 0;       // by a load into LDS; 0 where it loaded nothing
  LdsWord() : initialized_bytes(0), written_atomically(0), loaded_by_several(0) {}
};

constexpr u32 kMostWaves = 16;  // of a workgroup

struct WorkgroupObservation {
  std::vector<Wave*> waves;
  std::vector<LdsWord> lds;
  // Of words that several waves loaded from the same place: each wave's load, 0 where it has none.
  std::map<u32, std::array<u32, kMostWaves>> loads_of_word;
  // For each wave: operations that had completed when it arrived at the last barrier. What it did
  // before them is ordered before everything that other waves do after the barrier.
  std::vector<std::array<u32, kOrders>> published;
  Findings findings;
};

// ---- The checks, called by the hooks ------------------------------------------------------------

void begin_registers(Wave&);
void finish_registers(Wave&, const Instruction&);

void check_counters(Wave&, const Instruction&, const InstructionTraits&);

void publish_lds(Workgroup&);

void export_findings(const Dispatch&, const Findings&);

}  // namespace emulator
