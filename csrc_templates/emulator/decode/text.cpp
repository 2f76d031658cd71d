// Disassembly, in the syntax of LLVM's assembler for GFX9: LLVM reads the text back to the same
// bits. Modifiers are taken from the encoding itself where their names say which bits they are.
#include "decode/text.h"

#include <cstring>

#include "decode/decode.h"
#include "execution/wave.h"

namespace emulator {
namespace {

// ---- Registers and constants --------------------------------------------------------------------

std::string registers(const char* file, u32 index, u32 count) {
  return count <= 1 ? formatted("%s%u", file, index)
                    : formatted("%s[%u:%u]", file, index, index + count - 1);
}

std::string scalar_text(u32 index, u32 dwords) {
  if (index < kFlatScratch) return registers("s", index, dwords);
  if (index >= kTtmp0 && index < kM0) return registers("ttmp", index - kTtmp0, dwords);
  const char* name = index < kXnackMask  ? "flat_scratch"
                     : index < kVccIndex ? "xnack_mask"
                     : index < kTtmp0    ? "vcc"
                     : index == kM0      ? "m0"
                                         : "exec";
  if (dwords == 2 || index == kM0) return name;
  return formatted("%s_%s", name, index % 2 ? "hi" : "lo");
}

// 0.5 and its like, where the constant is what the operand's type makes of them.
const char* inline_float_name(const Operand& operand) {
  static constexpr const char* kNames[] = {"0.5",  "-0.5", "1.0",  "-1.0",      "2.0",
                                           "-2.0", "4.0",  "-4.0", "0.15915494"};
  if (operand.constant == inline_float(kLastInlineFloat, OperandType::f64))
    return "0.15915494309189532";
  for (u32 i = 0; i < std::size(kNames); ++i)
    if (operand.constant == inline_float(kFirstInlineFloat + i, operand.type)) return kNames[i];
  return nullptr;
}

std::string constant_text(const Operand& operand) {
  switch (operand.index) {
    case kSharedBase: return "src_shared_base";
    case kSharedLimit: return "src_shared_limit";
    case kPrivateBase: return "src_private_base";
    case kPrivateLimit: return "src_private_limit";
  }
  const bool is_64_bit = dwords_of(operand.type) == 2 && operand.type != OperandType::f32x2;
  const i64 value =
      is_64_bit ? static_cast<i64>(operand.constant) : static_cast<i32>(operand.constant);
  if (value >= -16 && value <= 64) return formatted("%d", static_cast<int>(value));
  if (const char* const name = inline_float_name(operand)) return name;
  // The encoding holds half of a double.
  const u64 literal = operand.type == OperandType::f64 ? operand.constant >> 32 : operand.constant;
  return formatted("0x%x", static_cast<u32>(literal));
}

std::string operand_text(const Operand& operand) {
  std::string text;
  switch (operand.place) {
    case Place::none: return "off";
    case Place::vgpr:
      text = operand.index < kFirstAccumulation
                 ? registers("v", operand.index, operand.dwords)
                 : registers("a", operand.index - kFirstAccumulation, operand.dwords);
      break;
    case Place::scalar: text = scalar_text(operand.index, operand.dwords); break;
    case Place::constant: text = constant_text(operand); break;
    case Place::vccz: text = "src_vccz"; break;
    case Place::execz: text = "src_execz"; break;
    case Place::scc: text = "src_scc"; break;
  }
  if (operand.modifiers & kAbsolute) text = "|" + text + "|";
  if (operand.modifiers & kSignExtend) text = "sext(" + text + ")";
  // -1 is another constant than the negation of 1.
  const bool is_number = operand.place == Place::constant && !(operand.modifiers & kAbsolute);
  if (operand.modifiers & kNegate) text = is_number ? "neg(" + text + ")" : "-" + text;
  return text;
}

// ---- Pieces of lines ----------------------------------------------------------------------------

// A mnemonic, operands between commas, modifiers between blanks.
class Line {
 public:
  explicit Line(std::string mnemonic) : text_(std::move(mnemonic)) {}
  void operand(const std::string& text) {
    text_ += separator_ + text;
    separator_ = ", ";
  }
  void operand(const Operand& operand) { this->operand(operand_text(operand)); }
  void operand_if_there(const Operand& operand) {
    if (operand.place != Place::none) this->operand(operand);
  }
  void modifier(const std::string& text) { text_ += " " + text; }
  void modifier_if(bool is_there, const char* text) {
    if (is_there) modifier(text);
  }
  // name:[b0,b1,...]
  void bit_list(const char* name, u32 bits, u32 count) {
    std::string list;
    for (u32 i = 0; i < count; ++i) list += formatted("%s%u", i ? "," : "", bits >> i & 1);
    modifier(formatted("%s:[", name) + list + "]");
  }
  std::string text() const { return text_; }

 private:
  std::string text_;
  const char* separator_ = " ";
};

bool begins_with(const char* text, const char* beginning) {
  return std::strncmp(text, beginning, std::strlen(beginning)) == 0;
}
bool contains(const char* text, const char* part) { return std::strstr(text, part) != nullptr; }

// ---- Scalar formats -----------------------------------------------------------------------------

std::string hardware_register_text(u32 field) {
  // By number; LLVM has no name on these chips for the others.
  static constexpr const char* kNames[] = {
      nullptr,        "HW_REG_MODE",      "HW_REG_STATUS",    "HW_REG_TRAPSTS",
      "HW_REG_HW_ID", "HW_REG_GPR_ALLOC", "HW_REG_LDS_ALLOC", "HW_REG_IB_STS"};
  const u32 id = field & 63, position = field >> 6 & 31, width = (field >> 11 & 31) + 1;
  std::string text = id < std::size(kNames) && kNames[id] ? kNames[id]
                     : id == 15                           ? "HW_REG_SH_MEM_BASES"
                     : id == 20                           ? "HW_REG_XCC_ID"
                                                          : std::to_string(id);
  if (position || width != 32) text += formatted(", %u, %u", position, width);
  return "hwreg(" + text + ")";
}

std::string waitcnt_text(u32 field) {
  const u32 vmcnt = (field & 15) | (field >> 14 & 3) << 4, expcnt = field >> 4 & 7,
            lgkmcnt = field >> 8 & 15;
  if (field & 0x3080) return formatted("0x%x", field);  // bits that no counter has
  const bool is_none = vmcnt == 63 && expcnt == 7 && lgkmcnt == 15;
  std::string text;
  const auto add = [&](const char* name, u32 count, u32 most) {
    if (count != most || is_none)
      text += formatted("%s%s(%u)", text.empty() ? "" : " ", name, count);
  };
  add("vmcnt", vmcnt, 63);
  add("expcnt", expcnt, 7);
  add("lgkmcnt", lgkmcnt, 15);
  return text;
}

std::string gpr_idx_text(u32 operands) {
  static constexpr const char* kNames[4] = {"SRC0", "SRC1", "SRC2", "DST"};
  std::string text;
  for (u32 i = 0; i < 4; ++i)
    if (operands >> i & 1) text += (text.empty() ? "" : ",") + std::string(kNames[i]);
  return "gpr_idx(" + text + ")";
}

void scalar_immediate(Line& line, const Instruction& inst) {
  const u32 field = static_cast<u32>(inst.offset) & 0xffff;
  const char* const mnemonic = inst.definition->mnemonic;
  if (inst.encoding == Format::SOPK) {
    if (inst.definition->unit == Unit::branch) line.operand(formatted("%u", field));
    else
      line.operand(contains(mnemonic, "reg_") ? hardware_register_text(field)
                                              : formatted("0x%x", field));
    return;
  }
  if (inst.definition->unit == Unit::waitcnt) {
    line.operand(waitcnt_text(field));
    return;
  }
  for (const char* const name : {"s_barrier", "s_wakeup", "s_icache_inv", "s_ttracedata",
                                 "s_set_gpr_idx_off", "s_endpgm_saved", "s_endpgm_ordered_ps_done"})
    if (!std::strcmp(mnemonic, name)) return;
  if (!std::strcmp(mnemonic, "s_set_gpr_idx_mode") && field < 16) {
    line.operand(gpr_idx_text(field));
    return;
  }
  if (field || std::strcmp(mnemonic, "s_endpgm")) line.operand(formatted("%u", field));
}

std::string scalar_text_of(const Instruction& inst) {
  const Signature& signature = inst.definition->signature;
  Line line(inst.definition->mnemonic);
  const bool writes_hardware_register = begins_with(inst.definition->mnemonic, "s_setreg");
  if (writes_hardware_register) scalar_immediate(line, inst);
  line.operand_if_there(inst.destination);
  for (u32 k = 0; k < kMaxSources; ++k) {
    // The destination's old content has no text of its own, unless there is no destination.
    if (signature.sources[k].role == Role::old && inst.destination.place != Place::none) continue;
    line.operand_if_there(inst.source[k]);
  }
  if (!std::strcmp(inst.definition->mnemonic, "s_set_gpr_idx_on"))
    line.operand(gpr_idx_text(inst.words[0] >> 8 & 15));
  if ((inst.encoding == Format::SOPK || inst.encoding == Format::SOPP) && !writes_hardware_register)
    scalar_immediate(line, inst);
  return line.text();
}

std::string scalar_memory_text_of(const Instruction& inst) {
  Line line(inst.definition->mnemonic);
  // Atomics that return have one field for both.
  const Operand& data = inst.source[2].place != Place::none ? inst.source[2] : inst.destination;
  if (begins_with(inst.definition->mnemonic, "s_atc_probe"))
    line.operand(formatted("%u", inst.words[0] >> 6 & 127));
  line.operand_if_there(data);
  line.operand_if_there(inst.source[0]);
  line.operand_if_there(inst.source[1]);
  const bool has_base = inst.source[0].place != Place::none;
  const bool has_immediate = inst.words[0] >> 17 & 1;
  const std::string offset =
      formatted("%s0x%x", inst.offset < 0 ? "-" : "", inst.offset < 0 ? -inst.offset : inst.offset);
  if (has_base && has_immediate) {
    if (inst.source[1].place == Place::none) line.operand(offset);
    else line.modifier("offset:" + offset);
  }
  line.modifier_if(inst.cache_policy & 1, "glc");
  return line.text();
}

// ---- Vector ALU ---------------------------------------------------------------------------------

// Instructions with one encoding only carry no suffix.
std::string suffix(const Instruction& inst) {
  const Format table = inst.definition->format;
  if (table != Format::VOP1 && table != Format::VOP2 && table != Format::VOPC) return "";
  if (inst.sdwa) return "_sdwa";
  if (inst.dpp) return "_dpp";
  const char* const mnemonic = inst.definition->mnemonic;
  for (const char* const name :
       {"v_nop", "v_readfirstlane_b32", "v_swap_b32", "v_accvgpr_mov_b32", "v_clrexcp"})
    if (!std::strcmp(mnemonic, name) && inst.encoding != Format::VOP3) return "";
  if (begins_with(mnemonic, "v_fmamk") || begins_with(mnemonic, "v_fmaak")) return "";
  return inst.encoding == Format::VOP3 ? "_e64" : "_e32";
}

void append_vector_operands(Line& line, const Instruction& inst) {
  const Signature& signature = inst.definition->signature;
  line.operand_if_there(inst.destination);
  line.operand_if_there(inst.scalar_destination);
  for (u32 k = 0; k < kMaxSources; ++k)
    if (signature.sources[k].role != Role::old) line.operand_if_there(inst.source[k]);
}

u32 source_count(const Instruction& inst) {
  u32 count = 0;
  for (const Parameter& parameter : inst.definition->signature.sources)
    count += parameter.role == Role::source;
  return count;
}

void append_output_modifiers(Line& line, const Instruction& inst) {
  static constexpr const char* kOmod[4] = {"", "mul:2", "mul:4", "div:2"};
  line.modifier_if(inst.clamp, "clamp");
  line.modifier_if(inst.omod, kOmod[inst.omod & 3]);
}

void append_dpp(Line& line, const Instruction& inst) {
  const u32 control = inst.dpp_control.control & 0x1ff;
  struct Range {
    u32 first, last;
    const char* name;
    bool has_amount;
  };
  static constexpr Range kControls[] = {
      {0x101, 0x10f, "row_shl", true},          {0x111, 0x11f, "row_shr", true},
      {0x121, 0x12f, "row_ror", true},          {0x130, 0x130, "wave_shl:1", false},
      {0x134, 0x134, "wave_rol:1", false},      {0x138, 0x138, "wave_shr:1", false},
      {0x13c, 0x13c, "wave_ror:1", false},      {0x140, 0x140, "row_mirror", false},
      {0x141, 0x141, "row_half_mirror", false}, {0x142, 0x142, "row_bcast:15", false},
      {0x143, 0x143, "row_bcast:31", false},    {0x150, 0x15f, "row_newbcast", true},
  };
  if (control < 0x100)
    line.modifier(formatted("quad_perm:[%u,%u,%u,%u]", control & 3, control >> 2 & 3,
                            control >> 4 & 3, control >> 6));
  for (const Range& range : kControls)
    if (control >= range.first && control <= range.last)
      line.modifier(range.has_amount ? formatted("%s:%u", range.name, control & 15) : range.name);
  line.modifier(formatted("row_mask:0x%x bank_mask:0x%x", inst.dpp_control.row_mask,
                          inst.dpp_control.bank_mask));
  line.modifier_if(inst.dpp_control.bound_control, "bound_ctrl:1");
}

void append_sdwa(Line& line, const Instruction& inst) {
  static constexpr const char* kSelect[] = {"BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3",
                                            "WORD_0", "WORD_1", "DWORD"};
  static constexpr const char* kUnused[] = {"UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"};
  append_output_modifiers(line, inst);
  // These conversions write whole registers.
  const bool has_select =
      !contains(inst.definition->mnemonic, "_fp8") && !contains(inst.definition->mnemonic, "_bf8");
  if (inst.encoding != Format::VOPC && has_select)
    line.modifier(formatted("dst_sel:%s dst_unused:%s",
                            kSelect[static_cast<u32>(inst.destination_select)],
                            kUnused[inst.destination_unused % 3]));
  u32 field = 0;
  for (u32 k = 0; k < kMaxSources; ++k)
    if (inst.definition->signature.sources[k].role == Role::source)
      line.modifier(
          formatted("src%u_sel:%s", field++, kSelect[static_cast<u32>(inst.source[k].select)]));
}

// VOP3's op_sel: a bit a source, then the destination's.
void append_op_sel(Line& line, const Instruction& inst) {
  if (!inst.op_sel) return;
  const u32 sources = source_count(inst);
  const u32 count = inst.op_sel & 7 & ~((1u << sources) - 1) ? 3 : sources;
  const u32 bits = (inst.op_sel & ((1u << count) - 1)) | (inst.op_sel >> 3 & 1u) << count;
  line.bit_list("op_sel", bits, count + 1);
}

std::string vector_text_of(const Instruction& inst) {
  const char* const mnemonic = inst.definition->mnemonic;
  Line line(mnemonic + suffix(inst));
  append_vector_operands(line, inst);
  if (inst.dpp) append_dpp(line, inst);
  if (inst.sdwa) append_sdwa(line, inst);
  if (inst.encoding != Format::VOP3) return line.text();
  if (begins_with(mnemonic, "v_bitop3")) {
    // The truth table stands where other instructions have omod, abs and neg.
    const u32 table =
        (inst.words[1] >> 27 & 3) << 6 | (inst.words[0] >> 8 & 7) << 3 | inst.words[1] >> 29;
    if (table) line.modifier(formatted("bitop3:0x%x", table));
    append_op_sel(line, inst);
    return line.text();
  }
  if (begins_with(mnemonic, "v_permlane")) {
    line.modifier_if(inst.op_sel & 2, "bound_ctrl:1");
    line.modifier_if(inst.op_sel & 1, "fi:1");
    return line.text();
  }
  append_op_sel(line, inst);
  append_output_modifiers(line, inst);
  return line.text();
}

std::string packed_text_of(const Instruction& inst) {
  const char* const mnemonic = inst.definition->mnemonic;
  Line line(mnemonic);
  // In v_fma_mix, neg_hi is the absolute value and op_sel_hi chooses 16 bits.
  const bool is_mix = contains(mnemonic, "_mix");
  if (is_mix) {
    Instruction scalar = inst;
    u32 field = 0;
    for (u32 k = 0; k < kMaxSources; ++k) {
      if (inst.definition->signature.sources[k].role != Role::source) continue;
      const bool negate = inst.neg_lo >> field & 1, absolute = inst.neg_hi >> field & 1;
      scalar.source[k].modifiers =
          static_cast<u8>((negate ? kNegate : 0) | (absolute ? kAbsolute : 0));
      ++field;
    }
    append_vector_operands(line, scalar);
  } else {
    append_vector_operands(line, inst);
  }
  if (begins_with(mnemonic, "v_accvgpr")) return line.text();
  const u32 count = source_count(inst), all = (1u << count) - 1;
  if (inst.op_sel & all) line.bit_list("op_sel", inst.op_sel, count);
  if ((inst.op_sel_hi & all) != (is_mix ? 0 : all))
    line.bit_list("op_sel_hi", inst.op_sel_hi, count);
  if (!is_mix) {
    if (inst.neg_lo & all) line.bit_list("neg_lo", inst.neg_lo, count);
    if (inst.neg_hi & all) line.bit_list("neg_hi", inst.neg_hi, count);
  }
  line.modifier_if(inst.clamp, "clamp");
  return line.text();
}

std::string matrix_text_of(const Instruction& inst) {
  const char* const mnemonic = inst.definition->mnemonic;
  Line line(mnemonic);
  line.operand(inst.destination);
  for (u32 k = 0; k < kMaxSources; ++k) line.operand_if_there(inst.source[k]);
  if (inst.encoding == Format::MFMA_SCALE) {
    // A bit for each scale. LLVM writes a third, which the hardware ignores.
    if (inst.op_sel & 3) line.bit_list("op_sel", inst.op_sel & 3, 3);
    line.bit_list("op_sel_hi", inst.op_sel_hi & 3, 3);
  }
  if (inst.cbsz) line.modifier(formatted("cbsz:%u", inst.cbsz));
  if (inst.abid && inst.encoding == Format::MFMA) line.modifier(formatted("abid:%u", inst.abid));
  if (inst.blgp) {
    if (contains(mnemonic, "f64")) line.bit_list("neg", inst.blgp, 3);
    else line.modifier(formatted("blgp:%u", inst.blgp));
  }
  return line.text();
}

// ---- Memory -------------------------------------------------------------------------------------

void append_cache_policy(Line& line, const Instruction& inst) {
  line.modifier_if(inst.cache_policy & 1, "sc0");
  line.modifier_if(inst.cache_policy & 2, "nt");
  line.modifier_if(inst.cache_policy & 4, "sc1");
}

// ds_swizzle_b32's pattern, by LLVM's names.
std::string swizzle_text(u32 pattern) {
  if (pattern >> 8 == 0x80)
    return formatted("swizzle(QUAD_PERM,%u,%u,%u,%u)", pattern & 3, pattern >> 2 & 3,
                     pattern >> 4 & 3, pattern >> 6 & 3);
  if (pattern >> 15) return formatted("%u", pattern);
  const u32 and_mask = pattern & 31, or_mask = pattern >> 5 & 31, xor_mask = pattern >> 10 & 31;
  const bool is_power = xor_mask && !(xor_mask & (xor_mask - 1));
  if (and_mask == 31 && !or_mask && is_power) return formatted("swizzle(SWAP,%u)", xor_mask);
  if (and_mask == 31 && !or_mask && xor_mask && !(xor_mask & (xor_mask + 1)))
    return formatted("swizzle(REVERSE,%u)", xor_mask + 1);
  const u32 group = 32 - and_mask;
  if (!xor_mask && and_mask && group > 1 && !(group & (group - 1)) && or_mask < group)
    return formatted("swizzle(BROADCAST,%u,%u)", group, or_mask);
  std::string mask;
  for (u32 bit = 5; bit-- > 0;) {
    const bool keeps = and_mask >> bit & 1, sets = or_mask >> bit & 1, flips = xor_mask >> bit & 1;
    // Set, then flipped, is 0; kept and set has no letter.
    if (keeps && sets) return formatted("%u", pattern);
    mask += keeps ? (flips ? 'i' : 'p') : sets ? (flips ? '?' : '1') : (flips ? '?' : '0');
  }
  return mask.find('?') == std::string::npos ? "swizzle(BITMASK_PERM,\"" + mask + "\")"
                                             : formatted("%u", pattern);
}

std::string lds_text_of(const Instruction& inst) {
  const char* const mnemonic = inst.definition->mnemonic;
  Line line(mnemonic);
  line.operand_if_there(inst.destination);
  for (u32 k = 0; k < kMaxSources; ++k) line.operand_if_there(inst.source[k]);
  const u32 offset = static_cast<u32>(inst.offset), first = offset & 255, second = offset >> 8;
  if (contains(mnemonic, "read2") || contains(mnemonic, "write2") ||
      contains(mnemonic, "wrxchg2")) {
    if (first) line.modifier(formatted("offset0:%u", first));
    if (second) line.modifier(formatted("offset1:%u", second));
  } else if (offset && begins_with(mnemonic, "ds_swizzle")) {
    line.modifier("offset:" + swizzle_text(offset));
  } else if (offset) {
    line.modifier(formatted("offset:%u", offset));
  }
  line.modifier_if(inst.words[0] >> 16 & 1, "gds");
  return line.text();
}

// LLVM names the fields by what it calls their values on these chips; as numbers it takes any.
std::string buffer_format_text(u32 word) {
  return formatted("format:%u", (word >> 19 & 15) | (word >> 23 & 7) << 4);
}

std::string buffer_text_of(const Instruction& inst) {
  Line line(inst.definition->mnemonic);
  const Operand& vaddr = inst.source[0];
  // Atomics that return have one field for both.
  const Operand& data = inst.source[1].place != Place::none ? inst.source[1] : inst.destination;
  if (inst.source[2].place != Place::none) {
    line.operand_if_there(data);
    line.operand(vaddr);
    line.operand(inst.source[2]);
    line.operand(inst.source[3]);
  }
  if (inst.encoding == Format::MTBUF) line.modifier(buffer_format_text(inst.words[0]));
  line.modifier_if(inst.idxen, "idxen");
  line.modifier_if(inst.offen, "offen");
  if (inst.offset) line.modifier(formatted("offset:%d", inst.offset));
  append_cache_policy(line, inst);
  line.modifier_if(inst.to_lds, "lds");
  return line.text();
}

std::string flat_text_of(const Instruction& inst) {
  Line line(inst.definition->mnemonic);
  const Operand& vaddr = inst.source[0];
  line.operand_if_there(inst.destination);
  line.operand(vaddr);
  line.operand_if_there(inst.source[1]);
  if (inst.encoding != Format::FLAT) line.operand(inst.source[2]);
  if (inst.offset) line.modifier(formatted("offset:%d", inst.offset));
  append_cache_policy(line, inst);
  return line.text();
}

}  // namespace

std::string register_name(u32 vgpr) {
  return vgpr < kFirstAccumulation ? registers("v", vgpr, 1)
                                   : registers("a", vgpr - kFirstAccumulation, 1);
}
std::string scalar_name(u32 index) {
  return index < kFlatScratch ? registers("s", index, 1) : scalar_text(index & ~1u, 2);
}

std::string text_of(const Instruction& inst) {
  if (!inst.definition) return formatted(".long 0x%08x", inst.words[0]);
  switch (inst.encoding) {
    case Format::SMEM: return scalar_memory_text_of(inst);
    case Format::VOP1:
    case Format::VOP2:
    case Format::VOPC:
    case Format::VOP3: return vector_text_of(inst);
    case Format::VOP3P: return packed_text_of(inst);
    case Format::MFMA:
    case Format::MFMA_SCALE: return matrix_text_of(inst);
    case Format::DS: return lds_text_of(inst);
    case Format::MUBUF:
    case Format::MTBUF: return buffer_text_of(inst);
    case Format::FLAT:
    case Format::GLOBAL:
    case Format::SCRATCH: return flat_text_of(inst);
    default: return scalar_text_of(inst);
  }
}

}  // namespace emulator
