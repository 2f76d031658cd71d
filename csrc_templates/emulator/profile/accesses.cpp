// What an access costs: the banks of LDS, and cache lines.
#include <algorithm>
#include <array>

#include "profile/profile.h"

namespace emulator {
namespace {

constexpr u32 kBankBytes = 4;

// The lanes of an access of `bytes` a lane are served in groups, as many as fill the banks. All are
// consecutive lanes but those of 16-byte reads (AMD's CK-Tile guide, "LDS bank conflicts"): with 32
// banks 0-3 and 20-23, 4-7 and 16-19, 8-11 and 28-31, 12-15 and 24-27, then the same from 32 on.
// With 64 banks two of these groups are taken together, which is an assumption.
u32 group_of(u32 lane, u32 bytes, bool is_read, u32 banks) {
  const u32 dwords = bytes <= 4 ? 1 : bytes <= 8 ? 2 : 4;
  const u32 lanes_of_group = std::min(banks / dwords, kLanes);
  if (!is_read || dwords < 4) return lane / lanes_of_group;
  const u32 half = lane / 32, quad = lane % 32 / 4;
  constexpr u8 kGroup32[8] = {0, 1, 2, 3, 1, 0, 3, 2};
  constexpr u8 kGroup64[8] = {0, 1, 1, 0, 1, 0, 0, 1};
  return banks == 32 ? half * 4 + kGroup32[quad] : half * 2 + kGroup64[quad];
}

}  // namespace

u64 AccessList::bytes() const {
  u64 sum = 0;
  for (const LaneAccess& access : accesses_) sum += access.bytes;
  return sum;
}

const std::vector<u64>& AccessList::lines(u32 line_bytes) {
  lines_.clear();
  for (const LaneAccess& access : accesses_) {
    const u64 last = (access.address + access.bytes - 1) / line_bytes;
    for (u64 line = access.address / line_bytes; line <= last; ++line)
      if (lines_.empty() || lines_.back() != line) lines_.push_back(line);
  }
  std::sort(lines_.begin(), lines_.end());
  lines_.erase(std::unique(lines_.begin(), lines_.end()), lines_.end());
  return lines_;
}

// A bank serves one dword a cycle, to any number of lanes. A group takes as many cycles as the
// dwords of its fullest bank; instructions with two addresses make two accesses.
u64 AccessList::bank_cycles(const Rates& rates, bool is_read, u64* without_conflicts) const {
  constexpr u32 kMostGroups = 8, kMostDwords = kLanes * 4;
  const u32 banks = is_read ? rates.lds_read_banks : rates.lds_write_banks;
  u64 cycles = 0;
  *without_conflicts = 0;
  for (std::size_t begin = 0, end; begin < accesses_.size(); begin = end) {
    for (end = begin + 1; end < accesses_.size() && accesses_[end].lane > accesses_[end - 1].lane;)
      ++end;
    const u32 bytes = accesses_[begin].bytes;
    std::array<std::array<u64, kMostDwords>, kMostGroups> dwords;
    std::array<u32, kMostGroups> count{};
    for (std::size_t i = begin; i < end; ++i) {
      const LaneAccess& access = accesses_[i];
      const u32 group = group_of(static_cast<u32>(access.lane), bytes, is_read, banks);
      const u64 last = (access.address + access.bytes - 1) / kBankBytes;
      for (u64 dword = access.address / kBankBytes; dword <= last && count[group] < kMostDwords;
           ++dword)
        dwords[group][count[group]++] = dword;
    }
    for (u32 group = 0; group < kMostGroups; ++group) {
      if (!count[group]) continue;
      const auto first = dwords[group].begin();
      std::sort(first, first + count[group]);
      const auto last = std::unique(first, first + count[group]);
      std::array<u32, 64> load{};
      u32 most = 1;
      for (auto it = first; it != last; ++it) most = std::max(most, ++load[*it % banks]);
      cycles += most;
      ++*without_conflicts;
    }
  }
  return cycles;
}

}  // namespace emulator
