// Scalar memory. The table is smem.inc. Operands: source 0 base, source 1 the SGPR offset if any,
// source 2 the data that is stored; destination what is loaded.
#include <algorithm>

#include "execution/scalar_operands.h"
#include "memory/atomics.h"

namespace emulator {
namespace {

u64 offset_of(Wave& wave, const Instruction& inst) {
  const Operand& soffset = inst.source[1];
  const u32 from_register = soffset.place == Place::none ? 0 : read_scalar<u32>(wave, soffset);
  return from_register + static_cast<u64>(static_cast<i64>(inst.offset));
}

// Where an access goes; the low bits of addresses and of offsets do not count. A buffer's resource
// has a base, stride and size: beyond the size, loads give 0 and stores are dropped. Of each dword,
// because part of an access can be out of its range.
template <bool kIsBuffer>
class Address {
 public:
  Address(Wave& wave, const Instruction& inst) : wave_(wave), inst_(inst) {
    const u64 low = read_scalar_pair(wave, inst.source[0].index);
    offset_ = offset_of(wave, inst);
    if constexpr (kIsBuffer) {
      const u32 records = read_scalar_register(wave, inst.source[0].index + 2);
      const u32 stride = static_cast<u32>(low >> 48 & 0x3fff);
      base_ = low & 0xfffffffffffc;
      bytes_ = stride ? u64{stride} * records : records;
      offset_ &= ~u64{3};
    } else {
      base_ = (low + offset_) & ~u64{3};
      offset_ = 0;
    }
  }
  u8* at(u32 dword, u32 dwords, Access access) const {
    const u64 offset = offset_ + 4 * dword, bytes = 4 * dwords;
    if (offset > bytes_ || bytes_ - offset < bytes) return nullptr;
    return global_memory(wave_, inst_, kScalarLane, base_ + offset, 4 * dwords, access);
  }

 private:
  Wave& wave_;
  const Instruction& inst_;
  u64 base_, bytes_ = ~u64{0}, offset_;
};
using GlobalAddress = Address<false>;
using BufferAddress = Address<true>;

// ---- Executors ----------------------------------------------------------------------------------

void execute_load(Wave& wave, const Instruction& inst) {
  const u32 dwords = inst.destination.dwords;
  const u8* const from = GlobalAddress(wave, inst).at(0, dwords, Access::load);
  std::memcpy(&wave.scalar[inst.destination.index], from, 4 * dwords);
  hooks::scalar_written(wave, inst.destination.index, dwords);
}

void execute_buffer_load(Wave& wave, const Instruction& inst) {
  const BufferAddress address(wave, inst);
  for (u32 dword = 0; dword < inst.destination.dwords; ++dword) {
    u32 value = 0;
    if (const u8* const from = address.at(dword, 1, Access::load)) std::memcpy(&value, from, 4);
    write_scalar_register(wave, inst.destination.index + dword, value);
  }
}

template <class Address>
void execute_store(Wave& wave, const Instruction& inst) {
  const Address address(wave, inst);
  for (u32 dword = 0; dword < inst.source[2].dwords; ++dword) {
    const u32 value = read_scalar_register(wave, inst.source[2].index + dword);
    if (u8* const to = address.at(dword, 1, Access::store)) std::memcpy(to, &value, 4);
  }
}

// One operation for the wave, whatever EXEC is.
template <class Address, auto kNext>
void execute_scalar_atomic(Wave& wave, const Instruction& inst) {
  constexpr u32 kDwords = Atomic<kNext>::kBytes / 4;
  const Address address(wave, inst);
  u32 data[4] = {}, old[2] = {};
  for (u32 dword = 0; dword < inst.source[2].dwords; ++dword)
    data[dword] = read_scalar_register(wave, inst.source[2].index + dword);
  if (u8* const memory = address.at(0, kDwords, Access::atomic)) {
    if (reinterpret_cast<u64>(memory) % Atomic<kNext>::kBytes)
      fault("atomic operation on an address that is not a multiple of %u bytes",
            Atomic<kNext>::kBytes);
    Atomic<kNext>::apply(memory, data, old, Denormals{});
  }
  if (inst.destination.place == Place::none) return;
  for (u32 dword = 0; dword < kDwords; ++dword)
    write_scalar_register(wave, inst.destination.index + dword, old[dword]);
}

// There are no caches and no translation of addresses. Lines that may be discarded hold nothing
// that the kernel still wants.
void execute_cache_control(Wave&, const Instruction&) {}

// Time passes with instructions, so that runs repeat.
void execute_time(Wave& wave, const Instruction& inst) {
  write_scalar<u64>(wave, inst.destination, 4 * wave.executed);
}

// ---- The table ----------------------------------------------------------------------------------

const Definition kDefinitions[] = {
#include "instructions/smem.inc"
};

}  // namespace

DefinitionSpan smem_definitions() { return {kDefinitions, std::size(kDefinitions)}; }

}  // namespace emulator
