// FLAT, GLOBAL and SCRATCH. The table is flat.inc. Operands: vaddr, data, saddr; result.
//
//     FLAT      vgpr[2] + offset, in LDS, private or global memory
//     GLOBAL    vgpr[2] + offset, or sgpr[2] + vgpr + offset
//     SCRATCH   any of sgpr, vgpr, both and none, + offset; 32 bits, within the lane's own memory
#include "memory/vector_memory.h"

namespace emulator {
namespace {

class Flat {
 public:
  static constexpr bool kChecksEachDword = false;

  Flat(Wave& wave, const Instruction& inst) : wave_(wave), inst_(inst) {
    count_vector_memory(wave, inst);
    const Operand& vaddr = inst.source[0];
    const Operand& saddr = inst.source[2];
    if (vaddr.place == Place::vgpr) low_ = read_address(wave, inst, 0);
    if (vaddr.dwords == 2) high_ = read_address(wave, inst, 0, 1);
    if (saddr.place == Place::scalar)
      base_ = saddr.dwords == 2 ? read_scalar_pair(wave, saddr.index)
                                : read_scalar_register(wave, saddr.index);
    base_ += static_cast<u64>(static_cast<i64>(inst.offset));
    if (inst.encoding != Format::SCRATCH)
      land_own_atomics(wave, [&](u32 lane) { return address(lane); });
  }

  u8* at(u32 lane, u32 within, u32 bytes, Access access) const {
    const int where = static_cast<int>(lane);
    const u64 address = this->address(lane) + within;
    switch (inst_.encoding) {
      case Format::GLOBAL: return global_memory(wave_, inst_, where, address, bytes, access);
      case Format::SCRATCH:
        return scratch_memory(wave_, inst_, where, static_cast<u32>(address), bytes, access);
      default: return flat_memory(wave_, inst_, where, address, bytes, access);
    }
  }

  bool point_at_all(u32 bytes, Access, LanePointers& pointers) const {
    if (hooks::kObserving || inst_.encoding == Format::SCRATCH) return false;
    const AddressRange range(wave_.exec(), [&](u32 lane) { return address(lane); });
    const bool is_global = inst_.encoding == Format::GLOBAL || range.highest < kSharedAperture;
    if (!is_global || !range.is_allowed(wave_, bytes)) return false;
    for (u32 lane = 0; lane < kLanes; ++lane)
      pointers.lane[lane] = reinterpret_cast<u8*>(address(lane));
    return true;
  }

 private:
  u64 address(u32 lane) const {
    return base_ + (low_ ? low_[lane] : 0) + (high_ ? static_cast<u64>(high_[lane]) << 32 : 0);
  }

  Wave& wave_;
  const Instruction& inst_;
  const u32* low_ = nullptr;
  const u32* high_ = nullptr;
  u64 base_ = 0;
};

// The executors of flat.inc.
#define LOAD(DWORDS) execute_load<Flat, DWORDS>
#define STORE(DWORDS) execute_store<Flat, DWORDS>
#define LOAD_PART(...) execute_load_part<Flat, __VA_ARGS__>
#define STORE_PART(...) execute_store_part<Flat, __VA_ARGS__>
#define LDS_LOAD(DWORDS) execute_load_to_lds<Flat, DWORDS>
#define LDS_LOAD_PART(...) execute_load_part_to_lds<Flat, __VA_ARGS__>
#define ATOMIC(...) execute_atomic<Flat, &atomics::__VA_ARGS__>

const Definition kDefinitions[] = {
#include "instructions/flat.inc"
};

}  // namespace

DefinitionSpan flat_definitions() { return {kDefinitions, std::size(kDefinitions)}; }

}  // namespace emulator
