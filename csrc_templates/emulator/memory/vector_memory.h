// Shared by the families that move data between memory and the lanes' registers.
//
// A family describes its addresses by a class, here called Memory:
//
//     Memory(Wave&, const Instruction&)
//         counts the instruction, if vmcnt does
//     u8* at(u32 lane, u32 offset, u32 bytes, Access) const
//         the lane's access, from `offset` on; null where hardware reads 0 and drops writes
//     bool point_at_all(u32 bytes, Access, LanePointers&) const
//         the accesses of all active lanes; false where each lane must be asked for with `at`
//     static constexpr bool kChecksEachDword
//         whether one dword of an access may be out of range and the next one not
//
// and gets loads, stores, atomics and loads into LDS from the templates below.
#pragma once

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "execution/dispatch.h"
#include "execution/lanes.h"
#include "memory/atomics.h"

namespace emulator {

// Counts an instruction that raises vmcnt.
inline void count_vector_memory(Wave& wave, const Instruction& inst) {
  ++wave.vector_memory_issued;
  wave.workgroup->polls += sees_other_units(inst);
}

template <class Body> inline void for_each_lane(u64 lanes, Body&& body) {
  if (lanes == kAllLanes) {
    for (u32 lane = 0; lane < kLanes; ++lane) body(lane);
    return;
  }
  for (; lanes; lanes &= lanes - 1) body(static_cast<u32>(__builtin_ctzll(lanes)));
}

// The plane of register `reg` of a source.
inline const u32* read_address(Wave& wave, const Instruction& inst, u32 source, u32 reg = 0) {
  const Operand& operand = inst.source[source];
  hooks::vgpr_read(wave, operand.index + reg, 1, wave.exec());
  return wave.vgpr[operand.index + reg];
}

// Where the accesses of the active lanes go, when all of them are known to be allowed.
struct LanePointers {
  u8* lane[kLanes];
};

// The lowest and the highest of the active lanes' addresses.
struct AddressRange {
  u64 lowest = ~u64{0}, highest = 0;

  AddressRange(u64 lowest, u64 highest) : lowest(lowest), highest(highest) {}
  template <class AddressOf> AddressRange(u64 lanes, AddressOf&& address_of) {
    for_each_lane(lanes, [&](u32 lane) {
      const u64 address = address_of(lane);
      lowest = std::min(lowest, address);
      highest = std::max(highest, address);
    });
  }
  // One check for all lanes: they lie in one allowed range of global memory.
  bool is_allowed(Wave& wave, u32 bytes) const {
    const u64 span = highest - lowest + bytes;
    return lowest <= highest && span <= ~u32{0} &&
           wave.dispatch().memory.contains(lowest, static_cast<u32>(span), wave.memory_hit);
  }
};

// Before a wave's next access: what its own atomic operations change there is changed.
template <class AddressOf> void land_own_atomics(Wave& wave, AddressOf&& address_of) {
  if (wave.workgroup->late_atomics.empty()) return;
  constexpr u32 kMostBytes = 16, kMostOnTheirWay = 63;
  const AddressRange range(wave.exec(), address_of);
  wave.workgroup->land_atomics_of(wave, kMostOnTheirWay);
  wave.workgroup->land_atomics_at(wave, range.lowest, range.highest + kMostBytes);
}

// Data of up to four registers a lane, between planes and bytes. Reading views the registers in
// place; writing goes through a buffer, because results may overwrite the addresses they came by.
class LaneRegisters {
 public:
  static constexpr u32 kMostRegisters = 4;

  LaneRegisters() : planes_(buffer_) {}
  LaneRegisters(Wave& wave, const Operand& source) : planes_(&wave.vgpr[source.index]) {
    hooks::vgpr_read(wave, source.index, source.dwords, wave.exec());
  }
  LaneRegisters(const LaneRegisters&) = delete;
  LaneRegisters& operator=(const LaneRegisters&) = delete;

  u32 dword(u32 lane, u32 reg) const { return planes_[reg][lane]; }
  void set_dword(u32 lane, u32 reg, u32 value) { buffer_[reg][lane] = value; }

  // Whole registers of a lane to memory.
  template <u32 kDwords> void get(u32 lane, u8* to) const {
    u32 values[kDwords];
    for (u32 reg = 0; reg < kDwords; ++reg) values[reg] = planes_[reg][lane];
    std::memcpy(to, values, sizeof(values));
  }
  // Whole registers of a lane from memory; null, which is out of range, gives zeros.
  template <u32 kDwords> void put(u32 lane, const u8* from, u32 first = 0) {
    u32 values[kDwords] = {};
    if (from) std::memcpy(values, from, sizeof(values));
    for (u32 reg = 0; reg < kDwords; ++reg) buffer_[first + reg][lane] = values[reg];
  }
  // The buffer to registers, in the lanes of the mask.
  void store(Wave& wave, const Operand& destination, u32 registers, u64 lanes) const {
    for (u32 reg = 0; reg < registers; ++reg)
      write_vgpr(wave, destination.index + reg, buffer_[reg], lanes);
  }

 private:
  const u32 (*planes_)[kLanes];
  alignas(64) u32 buffer_[kMostRegisters][kLanes];
};

// ---- Loads and stores of whole registers --------------------------------------------------------

template <u32 kDwords, class Memory>
void load_lanes(const Wave& wave, const Memory& memory, LaneRegisters& result, u32 first = 0) {
  LanePointers from;
  if (memory.point_at_all(4 * kDwords, Access::load, from)) {
    for_each_lane(wave.exec(),
                  [&](u32 lane) { result.put<kDwords>(lane, from.lane[lane], first); });
    return;
  }
  for_each_lane(wave.exec(), [&](u32 lane) {
    if constexpr (Memory::kChecksEachDword) {
      for (u32 reg = 0; reg < kDwords; ++reg)
        result.put<1>(lane, memory.at(lane, 4 * reg, 4, Access::load), first + reg);
    } else {
      result.put<kDwords>(lane, memory.at(lane, 0, 4 * kDwords, Access::load), first);
    }
  });
}

template <u32 kDwords, class Memory>
void store_lanes(const Wave& wave, const Memory& memory, const LaneRegisters& data) {
  LanePointers to;
  if (memory.point_at_all(4 * kDwords, Access::store, to)) {
    for_each_lane(wave.exec(), [&](u32 lane) { data.get<kDwords>(lane, to.lane[lane]); });
    return;
  }
  for_each_lane(wave.exec(), [&](u32 lane) {
    if constexpr (Memory::kChecksEachDword) {
      for (u32 reg = 0; reg < kDwords; ++reg) {
        const u32 value = data.dword(lane, reg);
        if (u8* const at = memory.at(lane, 4 * reg, 4, Access::store)) std::memcpy(at, &value, 4);
      }
    } else if (u8* const at = memory.at(lane, 0, 4 * kDwords, Access::store)) {
      data.get<kDwords>(lane, at);
    }
  });
}

template <class Memory, u32 kDwords> void execute_load(Wave& wave, const Instruction& inst) {
  const Memory memory(wave, inst);
  LaneRegisters result;
  load_lanes<kDwords>(wave, memory, result);
  result.store(wave, inst.destination, kDwords, wave.exec());
}

template <class Memory, u32 kDwords> void execute_store(Wave& wave, const Instruction& inst) {
  const Memory memory(wave, inst);
  store_lanes<kDwords>(wave, memory, LaneRegisters(wave, inst.source[1]));
}

// ---- Bytes and shorts ---------------------------------------------------------------------------
// In memory they are a From; the register gets it as a To, shifted up. With error correction on its
// registers, which these chips have, a d16 load clears the other half: there is no partial write.

template <class From, class To, u32 kShift> u32 widened(const u8* from) {
  if (!from) return 0;
  From value;
  std::memcpy(&value, from, sizeof(value));
  return static_cast<u32>(static_cast<To>(value)) << kShift;
}

template <class Memory, class From, class To, u32 kShift = 0>
void execute_load_part(Wave& wave, const Instruction& inst) {
  const Memory memory(wave, inst);
  LaneRegisters result;
  for_each_lane(wave.exec(), [&](u32 lane) {
    result.set_dword(lane, 0,
                     widened<From, To, kShift>(memory.at(lane, 0, sizeof(From), Access::load)));
  });
  result.store(wave, inst.destination, 1, wave.exec());
}

template <class Memory, u32 kBytes, u32 kShift = 0>
void execute_store_part(Wave& wave, const Instruction& inst) {
  const Memory memory(wave, inst);
  const LaneRegisters data(wave, inst.source[1]);
  for_each_lane(wave.exec(), [&](u32 lane) {
    const u32 value = data.dword(lane, 0) >> kShift;
    if (u8* const to = memory.at(lane, 0, kBytes, Access::store)) std::memcpy(to, &value, kBytes);
  });
}

// ---- Loads into LDS -----------------------------------------------------------------------------
// Lanes go to consecutive places in LDS: M0 says where, the instruction's offset counts there too.
// Loads of three and four dwords take 16 bytes a lane, all others 4.

inline LdsLoad& begin_lds_load(Wave& wave, const Instruction& inst, u32 bytes) {
  const u32 m0 = read_scalar_register(wave, kM0);
  if (m0 & 3) fault("m0 is 0x%x: an LDS offset that is not a multiple of 4 is not documented", m0);
  const u32 mask = wave.dispatch().device->arch == kGfx950 ? 0x3ffff : 0xffff;
  const u32 base = (m0 & mask) + static_cast<u32>(inst.offset), pitch = bytes > 8 ? 16 : 4;
  Workgroup& workgroup = *wave.workgroup;
  workgroup.make_room_for_lds_load_of(wave);
  LdsLoad& load = workgroup.lds_loads.emplace_back();
  ++wave.lds_loads_on_their_way;
  load.wave = &wave;
  load.number = wave.vector_memory_issued;
  load.due = workgroup.now + workgroup.memory_latency;
  load.bytes = bytes;
  for (u8*& to : load.to) to = nullptr;
  for_each_lane(wave.exec(), [&](u32 lane) {
    load.to[lane] =
        lds_memory(wave, inst, static_cast<int>(lane), base + lane * pitch, bytes, Access::store);
  });
  return load;
}

template <class Memory, u32 kDwords> void execute_load_to_lds(Wave& wave, const Instruction& inst) {
  const Memory memory(wave, inst);
  LaneRegisters data;
  load_lanes<kDwords>(wave, memory, data);
  LdsLoad& load = begin_lds_load(wave, inst, 4 * kDwords);
  for_each_lane(wave.exec(), [&](u32 lane) {
    for (u32 reg = 0; reg < kDwords; ++reg) load.data[lane][reg] = data.dword(lane, reg);
  });
}

template <class Memory, class From, class To>
void execute_load_part_to_lds(Wave& wave, const Instruction& inst) {
  const Memory memory(wave, inst);
  u32 data[kLanes];
  for_each_lane(wave.exec(), [&](u32 lane) {
    data[lane] = widened<From, To, 0>(memory.at(lane, 0, sizeof(From), Access::load));
  });
  LdsLoad& load = begin_lds_load(wave, inst, 4);
  for_each_lane(wave.exec(), [&](u32 lane) { load.data[lane][0] = data[lane]; });
}

// ---- Atomics ------------------------------------------------------------------------------------

// The operands are in consecutive registers of one source.
template <class Memory>
void execute_atomic_operation(Wave& wave, const Instruction& inst, ApplyAtomic apply, u32 bytes) {
  const Memory memory(wave, inst);
  const Operand& source = inst.source[1];
  const LaneRegisters data(wave, source);
  LaneRegisters result;
  struct Operation {
    u8* at;
    std::array<u32, 4> operands;
  };
  std::vector<Operation> late;
  const bool has_result = inst.destination.place != Place::none;
  // FLAT may mean LDS.
  const bool is_late =
      wave.dispatch().options.random_order && !has_result && inst.encoding != Format::FLAT;
  for_each_lane(wave.exec(), [&](u32 lane) {
    std::array<u32, 4> operands = {};
    u32 old[2] = {};
    for (u32 reg = 0; reg < source.dwords; ++reg) operands[reg] = data.dword(lane, reg);
    if (u8* const at = memory.at(lane, 0, bytes, Access::atomic)) {
      if (reinterpret_cast<u64>(at) % bytes)
        lane_fault(static_cast<int>(lane),
                   "atomic operation on an address that is not a multiple of %u bytes", bytes);
      if (is_late) late.push_back({at, operands});
      else apply(at, operands.data(), old, Denormals{});
    }
    for (u32 reg = 0; reg < bytes / 4; ++reg) result.set_dword(lane, reg, old[reg]);
  });
  if (has_result) result.store(wave, inst.destination, bytes / 4, wave.exec());
  if (late.empty()) return;
  Workgroup& workgroup = *wave.workgroup;
  LateAtomic& atomic = workgroup.late_atomics.emplace_back();
  atomic.wave = &wave;
  atomic.number = wave.vector_memory_issued;
  atomic.due = workgroup.now + workgroup.memory_latency;
  const auto [lowest, highest] = std::minmax_element(
      late.begin(), late.end(), [](const Operation& a, const Operation& b) { return a.at < b.at; });
  atomic.begin = reinterpret_cast<u64>(lowest->at);
  atomic.end = reinterpret_cast<u64>(highest->at) + bytes;
  atomic.take_effect = [late = std::move(late), apply] {
    u32 old[2];
    for (const Operation& each : late) apply(each.at, each.operands.data(), old, Denormals{});
  };
}

template <class Memory, auto kNext> void execute_atomic(Wave& wave, const Instruction& inst) {
  execute_atomic_operation<Memory>(wave, inst, Atomic<kNext>::apply, Atomic<kNext>::kBytes);
}

}  // namespace emulator
