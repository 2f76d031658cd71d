// LDS instructions. The table is ds.inc. Operands: address, data0, data1; result.
#include "memory/vector_memory.h"

namespace emulator {
namespace {

// ---- Addresses ----------------------------------------------------------------------------------

// One address a lane: its register plus an offset.
class Lds {
 public:
  static constexpr bool kChecksEachDword = false;

  Lds(Wave& wave, const Instruction& inst) : Lds(wave, inst, static_cast<u32>(inst.offset)) {}
  Lds(Wave& wave, const Instruction& inst, u32 offset)
      : wave_(wave), inst_(inst), address_(read_address(wave, inst, 0)), offset_(offset) {}

  u8* at(u32 lane, u32 within, u32 bytes, Access access) const {
    const u32 address = address_[lane] + offset_ + within;
    u8* const pointer = lds_memory(wave_, inst_, static_cast<int>(lane), address, bytes, access);
    if (!pointer && address < wave_.workgroup->lds_bytes)
      lane_fault(static_cast<int>(lane),
                 "%u bytes at LDS offset 0x%x, across the end of the workgroup's 0x%x bytes", bytes,
                 address, wave_.workgroup->lds_bytes);
    return pointer;
  }

  bool point_at_all(u32 bytes, Access, LanePointers& pointers) const {
    if (hooks::kObserving) return false;
    u32 highest = 0;
    for_each_lane(wave_.exec(),
                  [&](u32 lane) { highest = std::max(highest, address_[lane] + offset_); });
    if (u64{highest} + bytes > wave_.workgroup->lds_bytes) return false;
    u8* const lds = wave_.workgroup->lds;
    for (u32 lane = 0; lane < kLanes; ++lane)
      pointers.lane[lane] = lds + (address_[lane] + offset_);
    return true;
  }

 private:
  Wave& wave_;
  const Instruction& inst_;
  const u32* address_;
  u32 offset_;
};

// The two offsets of instructions with two addresses, each in units of kUnit bytes.
template <u32 kUnit> struct TwoOffsets {
  u32 first, second;
  explicit TwoOffsets(const Instruction& inst)
      : first((inst.offset & 0xff) * kUnit), second((inst.offset >> 8 & 0xff) * kUnit) {}
  // The ISA document says in one place that only data0 is written then, in another that both are.
  void require_different() const {
    if (first == second) fault("two writes to one address are not documented");
  }
};

// ---- Loads and stores ---------------------------------------------------------------------------

template <u32 kDwords, u32 kUnit> void execute_read2(Wave& wave, const Instruction& inst) {
  const TwoOffsets<kUnit> offsets(inst);
  LaneRegisters result;
  load_lanes<kDwords>(wave, Lds(wave, inst, offsets.first), result);
  load_lanes<kDwords>(wave, Lds(wave, inst, offsets.second), result, kDwords);
  result.store(wave, inst.destination, 2 * kDwords, wave.exec());
}

template <u32 kDwords, u32 kUnit> void execute_write2(Wave& wave, const Instruction& inst) {
  const TwoOffsets<kUnit> offsets(inst);
  offsets.require_different();
  store_lanes<kDwords>(wave, Lds(wave, inst, offsets.first), LaneRegisters(wave, inst.source[1]));
  store_lanes<kDwords>(wave, Lds(wave, inst, offsets.second), LaneRegisters(wave, inst.source[2]));
}

// Addresses that need no register: M0 and the offset, one dword a lane.
u8* dword_of_lane(Wave& wave, const Instruction& inst, u32 lane, Access access) {
  const u32 base = (read_scalar_register(wave, kM0) & 0xffff) + static_cast<u32>(inst.offset);
  return lds_memory(wave, inst, static_cast<int>(lane), u64{base} + 4 * lane, 4, access);
}

void execute_read_by_lane(Wave& wave, const Instruction& inst) {
  LaneRegisters result;
  for_each_lane(wave.exec(), [&](u32 lane) {
    result.put<1>(lane, dword_of_lane(wave, inst, lane, Access::load));
  });
  result.store(wave, inst.destination, 1, wave.exec());
}

void execute_write_by_lane(Wave& wave, const Instruction& inst) {
  const LaneRegisters data(wave, inst.source[1]);
  for_each_lane(wave.exec(), [&](u32 lane) {
    if (u8* const to = dword_of_lane(wave, inst, lane, Access::store)) data.get<1>(lane, to);
  });
}

// ---- Transposing loads --------------------------------------------------------------------------
// Each group of 16 lanes loads a matrix of kBits-wide elements, row by row: 64 or 96 bits a lane,
// so that a row of 16 elements is in 1, 2 or 4 lanes. Lane i gets column i.

u32 read_bits(const u32* words, u32 position, u32 count) {
  const bool crosses = position % 32 + count > 32;
  const u64 pair = words[position / 32] | static_cast<u64>(crosses ? words[position / 32 + 1] : 0)
                                              << 32;
  return static_cast<u32>(pair >> position % 32) & ((1u << count) - 1);
}

void write_bits(u32* words, u32 position, u32 value, u32 count) {
  words[position / 32] |= value << position % 32;
  if (position % 32 + count > 32) words[position / 32 + 1] |= value >> (32 - position % 32);
}

template <u32 kBits, u32 kLaneBits>
void execute_read_transposed(Wave& wave, const Instruction& inst) {
  constexpr u32 kDwords = kLaneBits / 32, kColumns = 16, kElements = kLaneBits / kBits;
  constexpr u32 kLanesOfRow = kColumns / kElements;
  if (wave.exec() != kAllLanes) fault("transposing loads need all lanes active");
  const u32* const address = read_address(wave, inst, 0);
  for (u32 lane = 0; lane < kLanes; ++lane)
    if ((address[lane] + static_cast<u32>(inst.offset)) % (kLaneBits == 64 ? 8 : 4))
      lane_fault(static_cast<int>(lane),
                 "transposing load from LDS offset 0x%x, which is not aligned",
                 address[lane] + static_cast<u32>(inst.offset));
  LaneRegisters loaded, result;
  load_lanes<kDwords>(wave, Lds(wave, inst), loaded);
  u32 words[kLanes][kDwords];
  for (u32 lane = 0; lane < kLanes; ++lane)
    for (u32 reg = 0; reg < kDwords; ++reg) words[lane][reg] = loaded.dword(lane, reg);
  for (u32 lane = 0; lane < kLanes; ++lane) {
    const u32 group = lane & ~15u, column = lane & 15;
    u32 transposed[kDwords] = {};
    for (u32 row = 0; row < kElements; ++row) {
      const u32 from = group + row * kLanesOfRow + column / kElements;
      write_bits(transposed, row * kBits, read_bits(words[from], column % kElements * kBits, kBits),
                 kBits);
    }
    for (u32 reg = 0; reg < kDwords; ++reg) result.set_dword(lane, reg, transposed[reg]);
  }
  result.store(wave, inst.destination, kDwords, kAllLanes);
}

// ---- Atomics ------------------------------------------------------------------------------------

Denormals denormals_of(const Wave& wave, bool is_single) {
  const u32 bits = wave.mode >> (is_single ? 4 : 6);
  return {(bits & 1) != 0, (bits & 2) != 0};
}

void run_atomic(Wave& wave, const Instruction& inst, ApplyAtomic apply, u32 bytes,
                Denormals denormals) {
  const Lds lds(wave, inst);
  const u32 dwords = bytes / 4;
  const LaneRegisters data0(wave, inst.source[1]);
  const bool has_data1 = inst.source[2].place != Place::none;
  const LaneRegisters data1(wave, has_data1 ? inst.source[2] : inst.source[1]);
  LaneRegisters result;
  for_each_lane(wave.exec(), [&](u32 lane) {
    u32 operands[4], old[2] = {};
    for (u32 reg = 0; reg < dwords; ++reg) {
      operands[reg] = data0.dword(lane, reg);
      operands[dwords + reg] = data1.dword(lane, reg);
    }
    if (u8* const at = lds.at(lane, 0, bytes, Access::atomic)) {
      if (reinterpret_cast<u64>(at) % bytes)
        lane_fault(static_cast<int>(lane),
                   "atomic operation on an LDS offset that is not a multiple of %u bytes", bytes);
      apply(at, operands, old, denormals);
    }
    for (u32 reg = 0; reg < dwords; ++reg) result.set_dword(lane, reg, old[reg]);
  });
  if (inst.destination.place != Place::none)
    result.store(wave, inst.destination, dwords, wave.exec());
}

// MODE's bits for denormals of 16 bits rule where kIs16Bit.
template <auto kNext, bool kIs16Bit = false>
void execute_atomic(Wave& wave, const Instruction& inst) {
  using Operation = Atomic<kNext>;
  run_atomic(wave, inst, Operation::apply, Operation::kBytes,
             denormals_of(wave, Operation::kBytes == 4 && !kIs16Bit));
}

template <class T, u32 kUnit> void execute_exchange2(Wave& wave, const Instruction& inst) {
  constexpr u32 kDwords = sizeof(T) / 4;
  const TwoOffsets<kUnit> offsets(inst);
  offsets.require_different();
  const Lds places[2] = {Lds(wave, inst, offsets.first), Lds(wave, inst, offsets.second)};
  const LaneRegisters data[2] = {{wave, inst.source[1]}, {wave, inst.source[2]}};
  LaneRegisters result;
  for_each_lane(wave.exec(), [&](u32 lane) {
    for (u32 i = 0; i < 2; ++i) {
      u8* const at = places[i].at(lane, 0, sizeof(T), Access::atomic);
      result.put<kDwords>(lane, at, i * kDwords);
      if (at) data[i].get<kDwords>(lane, at);
    }
  });
  result.store(wave, inst.destination, 2 * kDwords, wave.exec());
}

// Two dwords, each exchanged where the new one has its top bit set; that bit is not stored.
void execute_conditional_exchange(Wave& wave, const Instruction& inst) {
  const u32* const address = read_address(wave, inst, 0);
  const LaneRegisters data(wave, inst.source[1]);
  LaneRegisters result;
  for_each_lane(wave.exec(), [&](u32 lane) {
    const u32 offset = (address[lane] + static_cast<u32>(inst.offset)) & 0xfff8;
    u8* const at = lds_memory(wave, inst, static_cast<int>(lane), offset, 8, Access::atomic);
    result.put<2>(lane, at);
    for (u32 reg = 0; at && reg < 2; ++reg) {
      const u32 value = data.dword(lane, reg);
      const u32 stored = value & 0x7fffffff;
      if (value >> 31) std::memcpy(at + 4 * reg, &stored, 4);
    }
  });
  result.store(wave, inst.destination, 2, wave.exec());
}

// ds_append, ds_consume: the number of active lanes is added to or taken from one counter.
template <int kSign> void execute_count(Wave& wave, const Instruction& inst) {
  // The ISA document says that M0 takes no part in LDS, compilers put the counter's address there.
  if (read_scalar_register(wave, kM0))
    fault("m0 is 0x%x: its part in the address is not documented", wave.scalar[kM0]);
  if (!wave.exec()) return;
  const u32 count = static_cast<u32>(__builtin_popcountll(wave.exec()));
  const int first = __builtin_ctzll(wave.exec());
  LaneRegisters result;
  u32 old = 0;
  if (u8* const at =
          lds_memory(wave, inst, first, static_cast<u32>(inst.offset) & ~3u, 4, Access::atomic)) {
    std::memcpy(&old, at, 4);
    const u32 next = old + static_cast<u32>(kSign) * count;
    std::memcpy(at, &next, 4);
  }
  for_each_lane(wave.exec(), [&](u32 lane) { result.set_dword(lane, 0, old); });
  result.store(wave, inst.destination, 1, wave.exec());
}

// ---- Exchange among lanes -----------------------------------------------------------------------

// The lane that ds_swizzle_b32 with this offset makes `lane` read.
u32 swizzle_source(u32 offset, u32 lane) {
  const u32 half = lane & 32, in_half = lane & 31;
  if (offset >= 0xe000) {  // FFT: the lane's bits reversed, as far as the mask says
    const u32 mask = offset & 31;
    u32 reversed = 0;
    for (u32 bit = 0; bit < 5; ++bit) reversed |= (in_half >> bit & 1) << (4 - bit);
    return half | reversed >> __builtin_popcount(mask) | (in_half & mask);
  }
  if (offset >= 0xc000) {
    const u32 mask = offset & 31, count = offset >> 5 & 31;
    const u32 moved = offset >> 10 & 1 ? in_half - count : in_half + count;
    return half | (in_half & mask) | (moved & ~mask & 31);
  }
  if (offset & 0x8000) return (lane & ~3u) | (offset >> (2 * (lane & 3)) & 3);
  const u32 keep = offset & 31, set = offset >> 5 & 31, flip = offset >> 10 & 31;
  return half | (((in_half & keep) | set) ^ flip);
}

// Every lane gets what `source_of` says, and 0 from an inactive lane.
template <class SourceOf>
void gather_lanes(Wave& wave, const Instruction& inst, const u32* data, SourceOf&& source_of) {
  const u64 active = wave.exec();
  LaneRegisters result;
  u32 from[kLanes];
  for_each_lane(active, [&](u32 lane) {
    from[lane] = source_of(lane);
    result.set_dword(lane, 0, active >> from[lane] & 1 ? data[from[lane]] : 0);
  });
  hooks::lanes_gathered(wave, from);
  result.store(wave, inst.destination, 1, active);
}

void execute_swizzle(Wave& wave, const Instruction& inst) {
  const u32* const data = read_address(wave, inst, 0);
  gather_lanes(wave, inst, data,
               [&](u32 lane) { return swizzle_source(static_cast<u32>(inst.offset), lane); });
}

void execute_bpermute(Wave& wave, const Instruction& inst) {
  const u32* const address = read_address(wave, inst, 0);
  const u32* const data = read_address(wave, inst, 1);
  gather_lanes(wave, inst, data, [&](u32 lane) {
    return (address[lane] + static_cast<u32>(inst.offset)) / 4 % kLanes;
  });
}

// The highest lane wins where two send to one.
void execute_permute(Wave& wave, const Instruction& inst) {
  const u32* const address = read_address(wave, inst, 0);
  const u32* const data = read_address(wave, inst, 1);
  LaneRegisters result;
  for (u32 lane = 0; lane < kLanes; ++lane) result.set_dword(lane, 0, 0);
  for_each_lane(wave.exec(), [&](u32 lane) {
    result.set_dword((address[lane] + static_cast<u32>(inst.offset)) / 4 % kLanes, 0, data[lane]);
  });
  result.store(wave, inst.destination, 1, wave.exec());
}

void execute_nothing(Wave&, const Instruction&) {}

// The executors of ds.inc.
#define LOAD(DWORDS) execute_load<Lds, DWORDS>
#define STORE(DWORDS) execute_store<Lds, DWORDS>
#define LOAD_PART(...) execute_load_part<Lds, __VA_ARGS__>
#define STORE_PART(...) execute_store_part<Lds, __VA_ARGS__>
#define ATOMIC(...) execute_atomic<&atomics::__VA_ARGS__>
#define ATOMIC_16(...) execute_atomic<&atomics::__VA_ARGS__, true>

const Definition kDefinitions[] = {
#include "instructions/ds.inc"
};

}  // namespace

DefinitionSpan lds_definitions() { return {kDefinitions, std::size(kDefinitions)}; }

}  // namespace emulator
