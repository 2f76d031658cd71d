// The sanitizer: its definitions of the hooks. See hooks.h and check.h.
// Those of registers and memory, of LDS and of s_waitcnt are in the files of their checks.
#include "checks/check.h"

#include <algorithm>
#include <cstring>

namespace emulator::hooks {

// ---- Beginnings and ends ------------------------------------------------------------------------

void dispatch_begin(Dispatch& dispatch) {
  dispatch.observation = new DispatchObservation;
  std::vector<InstructionTraits>& traits = dispatch.observation->traits;
  traits.reserve(dispatch.code->instructions.size());
  for (const Instruction& inst : dispatch.code->instructions)
    traits.push_back(traits_of(inst, dispatch.code->arch));
}

void dispatch_end(Dispatch& dispatch) {
  export_findings(dispatch, dispatch.observation->findings);
  delete dispatch.observation;
  dispatch.observation = nullptr;
}

void workgroup_begin(Workgroup& workgroup) {
  workgroup.observation = new WorkgroupObservation;
  workgroup.observation->lds.resize((workgroup.dispatch.lds_bytes + 3) / 4);
  workgroup.observation->published.resize(workgroup.wave_count);
}

// The example that is shown is the one of the first workgroup, whatever the threads did.
void workgroup_end(Workgroup& workgroup) {
  DispatchObservation& dispatch = *workgroup.dispatch.observation;
  {
    const std::lock_guard<std::mutex> lock(dispatch.mutex);
    for (auto& [key, finding] : workgroup.observation->findings) {
      Finding& known = dispatch.findings[key];
      const u64 count = known.count + finding.count;
      if (known.count == 0 || finding.workgroup < known.workgroup) known = finding;
      known.count = count;
    }
  }
  delete workgroup.observation;
  workgroup.observation = nullptr;
}

void wave_begin(Wave& wave) {
  wave.observation = new WaveObservation;
  wave.workgroup->observation->waves.push_back(&wave);
  begin_registers(wave);
}

void wave_end(Wave& wave) {
  delete wave.observation;
  wave.observation = nullptr;
}

namespace {

void report_missing_waits(Wave& wave, const Instruction& inst,
                          const std::vector<MissingWaits>& missing) {
  for (const MissingWaits& each : missing)
    report(wave, inst, FindingKind::wait_states, -1,
           [&] { return text_of(*wave.dispatch().code, each); });
}

}  // namespace

// ---- Instructions -------------------------------------------------------------------------------

void before_instruction(Wave& wave, const Instruction& inst) {
  const InstructionTraits& traits = wave.dispatch().observation->traits[dword_of(wave, inst)];
  wave.observation->current = &traits;
  if (traits.loads_to_lds)
    std::fill(std::begin(wave.observation->loaded_from), std::end(wave.observation->loaded_from),
              0);
  const CodeObject& code = *wave.dispatch().code;
  std::vector<MissingWaits> missing;
  wave.observation->wait_states.pass(code, inst, traits, missing);
  report_missing_waits(wave, inst, missing);
  check_counters(wave, inst, traits);
}

void after_instruction(Wave& wave, const Instruction& inst) {
  if (__builtin_expect(!wave.observation->is_unfinished, 1)) return;
  settle_contested_stores(wave);
  finish_registers(wave, inst);
}

void instruction_skipped(Wave& wave, const Instruction& inst) {
  const InstructionTraits& traits = wave.dispatch().observation->traits[dword_of(wave, inst)];
  std::vector<MissingWaits> missing;
  wave.observation->wait_states.skip(*wave.dispatch().code, inst, traits, missing);
  report_missing_waits(wave, inst, missing);
}

// ---- Memory -------------------------------------------------------------------------------------

// What is read there is zero, what is written is lost.
u8* instead_of_memory(Wave& wave, const Instruction& inst, bool is_scratch, const Fault& fault) {
  const FindingKind kind = is_scratch ? FindingKind::scratch_bounds : FindingKind::global_bounds;
  report(wave, inst, kind, fault.lane, [&] { return std::string(fault.what()); });
  std::memset(wave.observation->stand_in, 0, sizeof(wave.observation->stand_in));
  return wave.observation->stand_in;
}

// ---- Waves among each other ---------------------------------------------------------------------

void barrier_arrived(Wave& wave) { ++wave.observation->barriers; }

// The hardware lets waves pass when others have ended; a kernel that means it is rare, and a kernel
// that forgot a barrier in one branch is not.
void barrier_released(Workgroup& workgroup) {
  const std::vector<Wave*>& waves = workgroup.observation->waves;
  const Wave* ended = nullptr;
  Wave* waiting = nullptr;
  for (Wave* const wave : waves) {
    if (wave->state == WaveState::ended && !ended) ended = wave;
    if (wave->state == WaveState::at_barrier && !waiting) waiting = wave;
  }
  if (ended && waiting)
    report(*waiting, *waiting->current, FindingKind::barrier, -1, [&] {
      return formatted("waits at its barrier number %u, but wave %u has ended after %u",
                       waiting->observation->barriers, ended->index, ended->observation->barriers);
    });
  publish_lds(workgroup);
}

// ---- Of no interest -----------------------------------------------------------------------------

std::vector<u64> selected_workgroups(const Dispatch&) { return {}; }

}  // namespace emulator::hooks
