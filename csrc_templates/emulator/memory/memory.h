// Device memory is host memory. A launch may touch the ranges it was given and nothing else.
#pragma once

#include <vector>

#include "numbers/numeric_types.h"
#include "shared_structs.h"

namespace emulator {

struct Wave;
struct Instruction;

enum class Access : u8 { load, store, atomic };

class AddressSpace {
 public:
  using Hit = const Range*;

  void allow_everything() { everything_ = true; }
  void allow(u64 address, u64 bytes);
  void finish();      // sorts; no `allow` after it
  u64 bytes() const;  // of the ranges together; 0 where everything is allowed
  // Ascending, apart from each other; none where everything is allowed.
  const std::vector<Range>& ranges() const { return ranges_; }

  // Whether a range contains the access; remembers it for the next one.
  bool contains(u64 address, u32 bytes, Hit& hit) const {
    if (hit && address >= hit->begin && address + bytes <= hit->end && address + bytes >= address)
      return true;
    return everything_ || find(address, bytes, hit);
  }

 private:
  bool find(u64 address, u32 bytes, Hit& hit) const;

  std::vector<Range> ranges_;
  bool everything_ = false;
};

// ---- The only ways in which instructions reach memory -------------------------------------------
// Each returns a host pointer to `bytes` bytes (not necessarily aligned), or faults with the
// address. `lane` is for messages and hooks; scalar accesses say kScalarLane.

constexpr int kScalarLane = -1;

// Global memory: GLOBAL, MUBUF, SMEM, and FLAT outside of the apertures.
u8* global_memory(Wave&, const Instruction&, int lane, u64 address, u32 bytes, Access);
// The lane's private memory, at a byte offset into its own part. SCRATCH, and FLAT in its aperture.
u8* scratch_memory(Wave&, const Instruction&, int lane, u64 offset, u32 bytes, Access);
// LDS at a byte offset. Null outside of the allocation: hardware then reads 0 and drops writes.
u8* lds_memory(Wave&, const Instruction&, int lane, u64 offset, u32 bytes, Access);
// A generic address: LDS or scratch in their apertures, global memory elsewhere.
u8* flat_memory(Wave&, const Instruction&, int lane, u64 address, u32 bytes, Access);

// The apertures of generic addresses; not canonical on the host, so they cannot collide with it.
constexpr u64 kSharedAperture = u64{0x10000} << 32;
constexpr u64 kPrivateAperture = u64{0x20000} << 32;
constexpr u64 kApertureBytes = u64{1} << 32;

}  // namespace emulator
