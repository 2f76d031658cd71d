#include "execution/occupancy.h"

#include <algorithm>

#include "chips.h"
#include "decode/code_object.h"

namespace emulator {

// 512 VGPRs and 800 SGPRs a SIMD, 8 waves: LLVM's AMDGPU subtarget description.
Occupancy occupancy_of(const Dispatch& dispatch) {
  constexpr u32 kWavesOfSimd = 8, kSgprsOfSimd = 800, kWorkgroupsOfUnit = 16;
  const KernelDescriptor& descriptor = dispatch.kernel->descriptor;
  const u32 granule = dispatch.device->architecture().lds_granularity;
  Occupancy result{};
  result.vgprs = descriptor.vgprs();
  result.architectural_vgprs = std::min(descriptor.accumulation_offset(), result.vgprs);
  result.sgprs = ((descriptor.rsrc1 >> 6 & 15) / 2 + 1) * 16;
  result.lds_bytes = (dispatch.lds_bytes + granule - 1) / granule * granule;
  const u32 threads =
      dispatch.workgroup_size[0] * dispatch.workgroup_size[1] * dispatch.workgroup_size[2];
  result.waves_of_workgroup = (threads + kLanes - 1) / kLanes;
  // Waves of a workgroup go to the SIMDs in turn, so that the fullest SIMD decides.
  const auto workgroups_for = [&](u32 waves_of_simd) {
    u32 count = 0;
    while (count < kWorkgroupsOfUnit &&
           (result.waves_of_workgroup * (count + 1) + kSimds - 1) / kSimds <= waves_of_simd)
      ++count;
    return count;
  };
  result.by_waves = workgroups_for(kWavesOfSimd);
  result.by_vgprs = workgroups_for(std::min(kWavesOfSimd, kVgprs / result.vgprs));
  result.by_sgprs = workgroups_for(std::min(kWavesOfSimd, kSgprsOfSimd / result.sgprs));
  result.by_lds = result.lds_bytes
                      ? std::min(kWorkgroupsOfUnit,
                                 dispatch.device->architecture().lds_bytes / result.lds_bytes)
                      : kWorkgroupsOfUnit;
  result.workgroups = std::min({result.by_waves, result.by_vgprs, result.by_sgprs, result.by_lds});
  return result;
}

}  // namespace emulator
