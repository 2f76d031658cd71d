// Bounds checks of every access, and the hooks on them.
#include "memory/memory.h"

#include <algorithm>

#include "execution/hooks.h"

namespace emulator {

void AddressSpace::allow(u64 address, u64 bytes) {
  if (bytes) ranges_.push_back({address, address + bytes});
}

void AddressSpace::finish() {
  std::sort(ranges_.begin(), ranges_.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  // Ranges that overlap or touch become one, so that an access across both is allowed.
  std::vector<Range> merged;
  for (const Range& range : ranges_) {
    if (!merged.empty() && range.begin <= merged.back().end)
      merged.back().end = std::max(merged.back().end, range.end);
    else merged.push_back(range);
  }
  ranges_ = std::move(merged);
}

u64 AddressSpace::bytes() const {
  u64 sum = 0;
  for (const Range& range : ranges_) sum += range.end - range.begin;
  return everything_ ? 0 : sum;
}

bool AddressSpace::find(u64 address, u32 bytes, Hit& hit) const {
  auto above = std::upper_bound(ranges_.begin(), ranges_.end(), address,
                                [](u64 a, const Range& range) { return a < range.begin; });
  if (above == ranges_.begin()) return false;
  const Range& range = *--above;
  if (address >= range.end || range.end - address < bytes) return false;
  hit = &range;
  return true;
}

namespace {

const char* verb(Access access) {
  return access == Access::load ? "load" : access == Access::store ? "store" : "atomic operation";
}

// What happens to an access that is not allowed: a fault, or what the sanitizer offers instead.
u8* refuse(Wave& wave, const Instruction& inst, int lane, bool is_scratch,
           const std::string& message) {
  const Fault fault(message, lane);
  if (u8* const memory = hooks::instead_of_memory(wave, inst, is_scratch, fault)) return memory;
  throw fault;
}

}  // namespace

void Workgroup::land_first_lds_load() {
  const LdsLoad& load = lds_loads.front();
  for (u32 lane = 0; lane < kLanes; ++lane)
    if (load.to[lane]) std::memcpy(load.to[lane], load.data[lane], load.bytes);
  --load.wave->lds_loads_on_their_way;
  lds_loads.pop_front();
}

void Workgroup::make_room_for_lds_load_of(Wave& wave) {
  constexpr u32 kMostOnTheirWay = 63;
  while (wave.lds_loads_on_their_way >= kMostOnTheirWay) land_first_lds_load();
}

void Workgroup::land_due_lds_loads() {
  while (!lds_loads.empty() && lds_loads.front().due <= now) land_first_lds_load();
}

void Workgroup::land_lds_loads_of(const Wave& wave, u64 outstanding) {
  const auto last = std::find_if(lds_loads.rbegin(), lds_loads.rend(), [&](const LdsLoad& load) {
    return load.wave == &wave && load.number + outstanding <= wave.vector_memory_issued;
  });
  for (auto count = lds_loads.rend() - last; count > 0; --count) land_first_lds_load();
}

template <class Predicate> void Workgroup::land_atomics_if(Predicate&& lands) {
  const auto landed = std::stable_partition(late_atomics.begin(), late_atomics.end(),
                                            [&](const LateAtomic& each) { return !lands(each); });
  std::for_each(landed, late_atomics.end(), [](const LateAtomic& each) { each.take_effect(); });
  late_atomics.erase(landed, late_atomics.end());
}

void Workgroup::land_due_atomics() {
  land_atomics_if([&](const LateAtomic& each) { return each.due <= now; });
}

void Workgroup::land_all_atomics() {
  land_atomics_if([](const LateAtomic&) { return true; });
}

void Workgroup::land_atomics_of(const Wave& wave, u64 outstanding) {
  land_atomics_if([&](const LateAtomic& each) {
    return each.wave == &wave && each.number + outstanding <= wave.vector_memory_issued;
  });
}

void Workgroup::land_atomics_at(const Wave& wave, u64 begin, u64 end) {
  land_atomics_if([&](const LateAtomic& each) {
    return each.wave == &wave && each.begin < end && begin < each.end;
  });
}

u8* global_memory(Wave& wave, const Instruction& inst, int lane, u64 address, u32 bytes,
                  Access access) {
  hooks::global_access(wave, inst, lane, address, bytes, access);
  if (__builtin_expect(!wave.dispatch().memory.contains(address, bytes, wave.memory_hit), 0))
    return refuse(
        wave, inst, lane, false,
        formatted("%s of %u bytes at 0x%llx, which is outside of all memory that the launch was "
                  "given",
                  verb(access), bytes, static_cast<unsigned long long>(address)));
  return reinterpret_cast<u8*>(address);
}

u8* scratch_memory(Wave& wave, const Instruction& inst, int lane, u64 offset, u32 bytes,
                   Access access) {
  hooks::scratch_access(wave, inst, lane, offset, bytes, access);
  const u32 size = wave.dispatch().scratch_bytes_per_lane;
  if (offset > size || size - offset < bytes)
    return refuse(
        wave, inst, lane, true,
        formatted("%s of %u bytes at offset 0x%llx of private memory, of which the kernel has %u "
                  "bytes a lane",
                  verb(access), bytes, static_cast<unsigned long long>(offset), size));
  return wave.scratch + static_cast<u64>(lane < 0 ? 0 : lane) * size + offset;
}

u8* lds_memory(Wave& wave, const Instruction& inst, int lane, u64 offset, u32 bytes,
               Access access) {
  hooks::lds_access(wave, inst, lane, offset, bytes, access);
  const u32 size = wave.workgroup->lds_bytes;
  return offset <= size && size - offset >= bytes ? wave.workgroup->lds + offset : nullptr;
}

u8* flat_memory(Wave& wave, const Instruction& inst, int lane, u64 address, u32 bytes,
                Access access) {
  if (address - kSharedAperture < kApertureBytes)
    return lds_memory(wave, inst, lane, address - kSharedAperture, bytes, access);
  if (address - kPrivateAperture < kApertureBytes)
    return scratch_memory(wave, inst, lane, address - kPrivateAperture, bytes, access);
  return global_memory(wave, inst, lane, address, bytes, access);
}

}  // namespace emulator
