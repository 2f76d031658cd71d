// Wait states that software must insert. The rules are data: wait_states.inc.
//
// An instruction's traits say which producers of the rules it is and which uses it makes of each
// register. Every register remembers who wrote it last, and when, counted in wait states: an
// instruction takes one, s_nop N takes N + 1.
#include <algorithm>
#include <array>
#include <cstring>

#include "checks/check.h"
#include "execution/dispatch.h"

namespace emulator {
namespace {

// ---- The rules ----------------------------------------------------------------------------------

enum Producer : u32 {
  setreg,
  setreg_vskip,
  setvskip,
  valu_writes_scalar,
  salu_writes_scalar,
  valu_writes,
  trans_writes,
  valu_writes_part,
  dot_writes,
  xdl_writes,
  xdl_reads_c,
  sgemm_writes,
  dgemm_16_writes,
  dgemm_4_writes,
  dgemm,
  wide_store_reads,
  kProducers,
};

namespace use {
enum Use : u32 {
  getreg,
  getreg_mode,
  setreg,
  vector_operation,
  vmem_reads_scalar,
  valu_reads_scalar,
  selects_lane,
  div_fmas_reads_vcc,
  reads_vccz,
  reads_execz,
  dpp_under_exec,
  lane_access_under_exec,
  matrix_under_exec,
  permlane_under_exec,
  message_reads_m0,
  lds_dma_reads_m0,
  addtid_reads_m0,
  movrel_reads_m0,
  dpp_reads,
  lane_access_reads,
  permlane_reads,
  matrix_reads_ab,
  matrix_reads_c,
  non_trans_reads,
  valu_reads,
  memory_reads,
  valu_writes,
  matrix_reads_same_c,
  xdl_reads_c,
  dgemm_4_reads_same_c,
  sdgemm_reads_c,
  f64_fma,
  kUses,
};
static_assert(kUses <= 64, "a UseSet is 64 bits");
}  // namespace use
using use::Use;

constexpr UseSet one(Use use) { return UseSet{1} << use; }
constexpr ProducerSet one(Producer producer) { return ProducerSet{1} << producer; }

using Waits = std::array<u8, 4>;  // by passes: 2, 4, 8, 16
constexpr Waits each(u8 n) { return {n, n, n, n}; }
constexpr Waits by(u8 two, u8 four, u8 eight, u8 sixteen) { return {two, four, eight, sixteen}; }

struct Rule {
  Producer producer;
  Use use;
  Waits waits[2];  // gfx942, gfx950
  const char* text;
  const char* source;
};

#define RULE(PRODUCER, USE, GFX942, GFX950, SOURCE) \
  {PRODUCER, use::USE, {GFX942, GFX950}, #PRODUCER ", " #USE, SOURCE},
constexpr Rule kRules[] = {
#include "checks/wait_states.inc"
};
#undef RULE

// The uses that must keep away from any of the producers for a while.
UseSet threatened_by(ProducerSet producers) {
  UseSet uses = 0;
  for (const Rule& rule : kRules)
    if (producers & one(rule.producer)) uses |= one(rule.use);
  return uses;
}

constexpr i32 kModeRegister = 1;  // of s_getreg and s_setreg

// ---- What an instruction is ---------------------------------------------------------------------

bool begins_with(const char* text, const char* prefix) {
  return std::strncmp(text, prefix, std::strlen(prefix)) == 0;
}
bool ends_with(const char* text, const char* suffix) {
  const std::size_t length = std::strlen(text), end = std::strlen(suffix);
  return length >= end && std::strcmp(text + length - end, suffix) == 0;
}
bool contains(const char* text, const char* part) { return std::strstr(text, part) != nullptr; }

class TraitsBuilder {
 public:
  TraitsBuilder(const Instruction& inst, Arch arch)
      : inst_(inst), definition_(*inst.definition), name_(definition_.mnemonic), arch_(arch) {}

  InstructionTraits build() {
    switch (definition_.format) {
      case Format::VOP1:
      case Format::VOP2:
      case Format::VOPC:
      case Format::VOP3:
      case Format::VOP3P: describe_valu(); break;
      case Format::MFMA:
      case Format::MFMA_SCALE: describe_matrix(); break;
      case Format::DS:
      case Format::MUBUF:
      case Format::MTBUF:
      case Format::FLAT:
      case Format::GLOBAL:
      case Format::SCRATCH: describe_memory(); break;
      default: describe_scalar(); break;
    }
    traits_.is_vector = is_vector(definition_);
    traits_.flow = flow_of(inst_);
    traits_.writes_scc = is_scalar_alu() && definition_.signature.writes_scc;
    traits_.reads_scc = begins_with(name_, "s_cbranch_scc");
    for (const Parameter& each : definition_.signature.sources)
      traits_.reads_scc |= each.role == Role::scc;
    traits_.threatened = threatened_by(traits_.produces);
    return traits_;
  }

 private:
  void reads_vgpr(const Operand& operand, UseSet uses) {
    if (operand.place == Place::vgpr && operand.dwords)
      traits_.reads.add({operand.index, operand.dwords, uses});
  }
  void reads_scalar(u32 index, u32 dwords, UseSet uses) {
    if (index < 128) traits_.reads.add({kFirstScalar + index, dwords, uses});
  }
  void reads(const Operand& operand, UseSet vgpr_uses, UseSet scalar_uses) {
    reads_vgpr(operand, vgpr_uses);
    if (operand.place == Place::scalar) reads_scalar(operand.index, operand.dwords, scalar_uses);
    if (operand.place == Place::vccz) reads_scalar(kVccIndex, 2, one(use::reads_vccz));
    if (operand.place == Place::execz) reads_scalar(kExecIndex, 2, one(use::reads_execz));
  }
  void writes(const Operand& operand, UseSet vgpr_uses) {
    if (operand.place == Place::vgpr && operand.dwords)
      traits_.writes.add({operand.index, operand.dwords, vgpr_uses});
    if (operand.place == Place::scalar)
      traits_.writes.add({kFirstScalar + operand.index, operand.dwords, 0});
  }
  void is_under_exec(Use use) { reads_scalar(kExecIndex, 2, one(use)); }

  void describe_valu() {
    const bool is_trans = definition_.unit == Unit::transcendental;
    const bool is_lane_read =
        begins_with(name_, "v_readlane") || begins_with(name_, "v_readfirstlane");
    const bool is_lane_write = begins_with(name_, "v_writelane");
    const bool is_lane_access = is_lane_read || is_lane_write;
    const bool is_permlane = begins_with(name_, "v_permlane");
    const bool is_div_fmas = begins_with(name_, "v_div_fmas");
    traits_.is_dot = begins_with(name_, "v_dot");
    traits_.is_f64_fma = begins_with(name_, "v_fma_f64") || begins_with(name_, "v_fmac_f64");

    UseSet source = one(use::valu_reads);
    if (!is_trans) source |= one(use::non_trans_reads);
    if (inst_.dpp) source |= one(use::dpp_reads);
    if (is_lane_read) source |= one(use::lane_access_reads);
    if (is_permlane) source |= one(use::permlane_reads);
    for (u32 k = 0; k < kMaxSources; ++k) {
      const Parameter& parameter = definition_.signature.sources[k];
      const bool is_carry = parameter.role == Role::lane_bit;
      UseSet scalar_use = is_carry ? 0 : one(use::valu_reads_scalar);
      if (is_lane_access && k == 1) scalar_use = one(use::selects_lane);
      reads(inst_.source[k], source, scalar_use);
      if (parameter.role == Role::vcc)
        reads_scalar(kVccIndex, 2, is_div_fmas ? one(use::div_fmas_reads_vcc) : 0);
      // D += A . B, or D = A . B + C
      if (traits_.is_dot && inst_.source[k].place == Place::vgpr &&
          (k == 2 || parameter.role == Role::old))
        traits_.matrix_c = static_cast<u8>(traits_.reads.count - 1);
    }
    // The rest of the register stays, so that it is read.
    if (inst_.destination_unused == 2) reads_vgpr(inst_.destination, source);
    writes(inst_.destination, one(use::valu_writes));
    writes(inst_.scalar_destination, 0);
    // Both registers change places.
    if (begins_with(name_, "v_swap") || ends_with(name_, "_swap_b32") ||
        ends_with(name_, "_swap")) {
      reads_vgpr(inst_.destination, source);
      writes(inst_.source[0], one(use::valu_writes));
    }
    if (begins_with(name_, "v_cmpx")) traits_.writes.add({kFirstScalar + kExecIndex, 2, 0});
    if (inst_.dpp) is_under_exec(use::dpp_under_exec);
    if (is_lane_access) is_under_exec(use::lane_access_under_exec);
    if (is_permlane) is_under_exec(use::permlane_under_exec);

    traits_.produces = one(valu_writes_scalar) | one(traits_.is_dot ? dot_writes : valu_writes);
    if (is_trans) traits_.produces |= one(trans_writes);
    if (writes_part()) traits_.produces |= one(valu_writes_part);
  }

  bool is_scalar_alu() const {
    return definition_.format >= Format::SOP1 && definition_.format <= Format::SOPC;
  }
  bool name_is(const char* name) const { return std::strcmp(name_, name) == 0; }

  // Of s_setreg: the register's number, the field's position and its width less one.
  bool is_of_mode() const { return (inst_.offset & 63) == kModeRegister; }
  bool writes_vskip() const {
    constexpr i32 kVskipBit = 28;
    const i32 first = inst_.offset >> 6 & 31, last = first + (inst_.offset >> 11 & 31);
    return first <= kVskipBit && kVskipBit <= last;
  }

  // Results that are moved within their register, and those that LLVM treats alike.
  bool writes_part() const {
    if (inst_.sdwa) return inst_.destination_select != Select::dword;
    if (inst_.encoding != Format::VOP3) return false;
    if (inst_.op_sel & 8) return true;
    if (begins_with(name_, "v_cvt_sr_") && inst_.op_sel & 4) return true;
    return arch_ == kGfx950 && begins_with(name_, "v_cvt_scalef32") && contains(name_, "pk_fp4");
  }

  void describe_matrix() {
    const bool is_sparse = begins_with(name_, "v_smfmac");
    const bool is_f64 = begins_with(name_, "v_mfma_f64"),
               is_f64_4x4 = is_f64 && contains(name_, "4x4x4");
    const bool is_f32 =
        begins_with(name_, "v_mfma_f32") && ends_with(name_, "_f32") && !contains(name_, "xf32");
    const bool is_xdl = !is_f64 && !is_f32;
    const UseSet c =
        one(use::matrix_reads_c) | one(is_xdl ? use::xdl_reads_c : use::sdgemm_reads_c);
    reads(inst_.source[0], one(use::matrix_reads_ab), 0);
    reads(inst_.source[1], one(use::matrix_reads_ab), 0);
    reads(inst_.source[3], one(use::matrix_reads_ab), one(use::valu_reads_scalar));
    reads(inst_.source[4], one(use::matrix_reads_ab), one(use::valu_reads_scalar));
    if (is_sparse) reads(inst_.source[2], one(use::matrix_reads_ab), 0);  // the indices
    const Operand& accumulator = is_sparse ? inst_.destination : inst_.source[2];
    if (accumulator.place == Place::vgpr) traits_.matrix_c = traits_.reads.count;
    reads(accumulator, c, 0);
    writes(inst_.destination, 0);
    is_under_exec(use::matrix_under_exec);
    const u32 passes = mfma_passes(inst_);
    traits_.passes_column = passes <= 2 ? 0 : passes <= 4 ? 1 : passes <= 8 ? 2 : 3;
    traits_.produces = one(is_xdl       ? xdl_writes
                           : is_f32     ? sgemm_writes
                           : is_f64_4x4 ? dgemm_4_writes
                                        : dgemm_16_writes);
    traits_.is_f64_matrix = is_f64;
    if (is_xdl && traits_.matrix_c != 0xff) {
      traits_.produces_by_reading = one(Producer::xdl_reads_c);
      traits_.protected_source = traits_.matrix_c;
    }
  }

  void describe_memory() {
    const bool is_lds = definition_.format == Format::DS;
    const bool is_cache_invalidation = begins_with(name_, "buffer_inv");  // raises no counter
    traits_.order = is_lds                               ? Order::lds
                    : definition_.format == Format::FLAT ? Order::flat
                                                         : Order::vector_memory;
    if (is_cache_invalidation) traits_.order = Order::none;
    traits_.loads_to_lds = inst_.to_lds;
    for (u32 k = 0; k < kMaxSources; ++k) {
      if (k == 1) traits_.protected_source = traits_.reads.count;
      reads(inst_.source[k], one(use::memory_reads), is_lds ? 0 : one(use::vmem_reads_scalar));
    }
    const Operand& data = inst_.source[1];
    const bool is_wide_store = !is_lds && data.place == Place::vgpr && data.dwords > 2;
    const bool is_buffer =
        definition_.format == Format::MUBUF || definition_.format == Format::MTBUF;
    const bool has_soffset = is_buffer && inst_.source[3].place == Place::scalar;
    if (is_wide_store && !has_soffset) traits_.produces_by_reading = one(wide_store_reads);
    // A half that is loaded keeps the other half: old content, not a use.
    writes(inst_.destination, 0);
    traits_.has_result = traits_.writes.count != 0;
    if (inst_.to_lds) reads_scalar(kM0, 1, one(use::lds_dma_reads_m0));
    if (contains(name_, "addtid")) reads_scalar(kM0, 1, one(use::addtid_reads_m0));
  }

  void describe_scalar() {
    for (const Operand& operand : inst_.source) reads(operand, 0, 0);
    writes(inst_.destination, 0);
    if (definition_.format == Format::SMEM) {
      traits_.order = Order::scalar;
      traits_.has_result = traits_.writes.count != 0;
      return;
    }
    traits_.produces = one(salu_writes_scalar);
    if (name_is("s_nop")) traits_.wait_states = static_cast<u8>((inst_.offset & 15) + 1);
    if (begins_with(name_, "s_sendmsg")) {
      traits_.order = Order::scalar;
      reads_scalar(kM0, 1, one(use::message_reads_m0));
    }
    if (begins_with(name_, "s_movrel")) reads_scalar(kM0, 1, one(use::movrel_reads_m0));
    if (begins_with(name_, "s_getreg")) traits_.hardware_register = HardwareRegisterUse::read;
    if (begins_with(name_, "s_setreg")) traits_.hardware_register = HardwareRegisterUse::written;
    if (begins_with(name_, "s_setreg") && is_of_mode() && writes_vskip())
      traits_.changes_vskip = one(setreg_vskip);
    if (name_is("s_setvskip")) traits_.changes_vskip = one(setvskip);
    if (begins_with(name_, "s_cbranch_vcc")) reads_scalar(kVccIndex, 2, 0);
  }

  const Instruction& inst_;
  const Definition& definition_;
  const char* const name_;
  const Arch arch_;
  InstructionTraits traits_;
};

// ---- Checking -----------------------------------------------------------------------------------

struct Site {
  const CodeObject& code;
  const Instruction& inst;
  WaitStateState& state;
  std::vector<MissingWaits>& missing;
};

void check_rules(const Site& site, const LastAccess& last, ProducerSet producers, UseSet uses,
                 i32 reg = MissingWaits::kNoRegister) {
  const u32 since = site.state.now - last.time - 1;
  const u32 column = site.code.arch == kGfx950;
  const Rule* broken = nullptr;
  u32 needed = 0;
  for (const Rule& rule : kRules) {
    if (!(producers & one(rule.producer)) || !(uses & one(rule.use))) continue;
    const u32 waits = rule.waits[column][last.by->passes_column];
    if (waits > since && waits > needed) broken = &rule, needed = waits;
  }
  if (broken)
    site.missing.push_back({last.dword, needed, since, reg, broken->text, broken->source});
}

bool is_recent(const WaitStateState& state, const LastAccess& last) {
  return state.now - last.time <= kLongestWait;
}

// Whether the last access is that of the same dot product, which passes its result on to itself.
bool is_same_dot(const Site& site, const LastAccess& last) {
  const Instruction& before = site.code.instructions[last.dword];
  return last.by->is_dot && before.definition == site.inst.definition;
}

// What reading C means to the matrix instruction that wrote it: exactly its result is passed on
// inside of the matrix unit.
UseSet uses_of_matrix_c(const InstructionTraits& traits, const LastAccess& last) {
  const RegisterRange& c = traits.reads.ranges[traits.matrix_c];
  const RegisterRange& written = last.by->writes.ranges[0];
  constexpr ProducerSet kMatrix =
      one(xdl_writes) | one(sgemm_writes) | one(dgemm_4_writes) | one(dgemm_16_writes);
  const bool by_matrix = last.by->produces & kMatrix;
  if (!by_matrix || c.first != written.first || c.count != written.count) return c.uses;
  const bool both_f64_4x4 = last.by->produces & traits.produces & one(dgemm_4_writes);
  return one(both_f64_4x4 ? use::dgemm_4_reads_same_c : use::matrix_reads_same_c);
}

void check_reads(const Site& site, const InstructionTraits& traits) {
  for (u32 i = 0; i < traits.reads.count; ++i) {
    const RegisterRange& range = traits.reads.ranges[i];
    if (!range.uses) continue;
    for (u32 reg = range.first; reg < range.end(); ++reg) {
      const LastAccess& last = site.state.written[reg];
      if (!is_recent(site.state, last) || !(last.by->threatened & range.uses)) continue;
      UseSet uses = range.uses;
      if (i == traits.matrix_c) {
        if (!traits.is_dot) uses = uses_of_matrix_c(traits, last);
        else if (is_same_dot(site, last)) continue;
      }
      check_rules(site, last, last.by->produces, uses, static_cast<i32>(reg));
    }
  }
}

void check_writes(const Site& site, const InstructionTraits& traits) {
  for (const RegisterRange& range : traits.writes) {
    if (!range.uses) continue;
    for (u32 reg = range.first; reg < range.end(); ++reg) {
      const LastAccess& read = site.state.read[reg];
      if (is_recent(site.state, read))
        check_rules(site, read, read.by->produces_by_reading, range.uses, static_cast<i32>(reg));
      const LastAccess& written = site.state.written[reg];
      if (is_recent(site.state, written) && written.by->threatened & range.uses &&
          !is_same_dot(site, written))
        check_rules(site, written, written.by->produces, range.uses, static_cast<i32>(reg));
    }
  }
}

void check_hardware_register(const Site& site, const InstructionTraits& traits,
                             const LastAccess& here) {
  if (traits.hardware_register == HardwareRegisterUse::none) return;
  LastAccess& last = site.state.hardware_register[site.inst.offset & 63];
  const bool writes = traits.hardware_register == HardwareRegisterUse::written;
  if (is_recent(site.state, last))
    check_rules(site, last, one(setreg), one(writes ? use::setreg : use::getreg));
  if (writes) last = here;
}

// MODE.VSKIP decides about vector instructions, also about those that it skips.
void check_uses_of_vskip(const Site& site, const InstructionTraits& traits) {
  const LastAccess& last = site.state.vskip;
  if (!is_recent(site.state, last)) return;
  const bool reads_mode = traits.hardware_register == HardwareRegisterUse::read &&
                          (site.inst.offset & 63) == kModeRegister;
  const UseSet uses = (traits.is_vector ? one(use::vector_operation) : 0) |
                      (reads_mode ? one(use::getreg_mode) : 0);
  check_rules(site, last, last.by->changes_vskip, uses);
}

void check_f64(const Site& site, const InstructionTraits& traits, const LastAccess& here) {
  if (traits.is_f64_fma && is_recent(site.state, site.state.f64_matrix))
    check_rules(site, site.state.f64_matrix, one(dgemm), one(use::f64_fma));
  if (traits.is_f64_matrix) site.state.f64_matrix = here;
}

}  // namespace

InstructionTraits traits_of(const Instruction& inst, Arch arch) {
  return inst.definition ? TraitsBuilder(inst, arch).build() : InstructionTraits{};
}

std::string text_of(const CodeObject& code, const MissingWaits& missing) {
  const std::string about = missing.reg == MissingWaits::kNoRegister
                                ? ""
                                : name_of_register(static_cast<u32>(missing.reg)) + ": ";
  return formatted("%sneeds %u wait states after %s, has %u (%s; %s)", about.c_str(),
                   missing.needed, instruction_at(code, missing.after).c_str(), missing.has,
                   missing.rule, missing.source);
}

void WaitStateState::pass(const CodeObject& code, const Instruction& inst,
                          const InstructionTraits& traits, std::vector<MissingWaits>& missing) {
  const Site site{code, inst, *this, missing};
  const LastAccess here{&traits, now, dword_of(code, inst)};
  check_reads(site, traits);
  check_writes(site, traits);
  check_hardware_register(site, traits, here);
  check_uses_of_vskip(site, traits);
  if (traits.changes_vskip) vskip = here;
  check_f64(site, traits, here);
  const auto note = [&](const RegisterRange& range, LastAccess* accesses) {
    std::fill(accesses + range.first, accesses + range.end(), here);
  };
  if (traits.produces_by_reading) note(traits.reads.ranges[traits.protected_source], read);
  for (const RegisterRange& range : traits.writes) note(range, written);
  now += traits.wait_states;
}

void WaitStateState::skip(const CodeObject& code, const Instruction& inst,
                          const InstructionTraits& traits, std::vector<MissingWaits>& missing) {
  check_uses_of_vskip({code, inst, *this, missing}, traits);
}

}  // namespace emulator
