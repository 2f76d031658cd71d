// Decodes the encodings of CDNA3 and CDNA4. Field positions: the ISA documents' chapter on
// microcode formats. What an instruction's operands are, the tables say.
#include "decode/decode.h"

#include <array>

#include "execution/wave.h"

namespace emulator {
namespace {

constexpr u32 kSourceSdwa = 249, kSourceDpp = 250, kSourceLiteral = 255, kFirstVgpr = 256;
constexpr u32 kNoSaddr = 0x7f;

// ---- Finding the table row ----------------------------------------------------------------------

class Tables {
 public:
  Tables() {
    for (const Definition* definition : all_definitions()) add(*definition);
  }
  const Definition* find(Arch arch, Format format, u32 opcode) const {
    return opcode < kOpcodes ? rows_[arch == kGfx950][static_cast<u32>(format)][opcode] : nullptr;
  }

 private:
  static constexpr u32 kOpcodes = 1024;
  void add(const Definition& definition) {
    for (u32 is_gfx950 = 0; is_gfx950 < 2; ++is_gfx950)
      if (definition.arch & (is_gfx950 ? kGfx950 : kGfx942))
        rows_[is_gfx950][static_cast<u32>(definition.format)][definition.opcode] = &definition;
  }
  std::array<std::array<std::array<const Definition*, kOpcodes>, static_cast<u32>(Format::count)>,
             2>
      rows_{};
};

const Tables& tables() {
  static const Tables instance;
  return instance;
}

void execute_unknown(Wave&, const Instruction& inst) {
  fault("unknown instruction, dwords %08x %08x", inst.words[0], inst.words[1]);
}

void execute_unknown_clamp(Wave&, const Instruction&) {
  fault("clamp is not emulated for this instruction");
}

void execute_end_of_code(Wave&, const Instruction&) {
  fault("the kernel ran past the end of its code");
}

// ---- Constants ----------------------------------------------------------------------------------

u64 inline_integer(u32 field) {
  const i64 value = field <= 192 ? static_cast<i64>(field) - 128 : 192 - static_cast<i64>(field);
  return static_cast<u64>(value);
}

// A 32-bit literal as a 64-bit operand: the upper half of a double, a sign-extended signed integer.
u64 widen_literal(u32 literal, OperandType type) {
  switch (type) {
    case OperandType::f64: return static_cast<u64>(literal) << 32;
    case OperandType::i64: return static_cast<u64>(static_cast<i64>(static_cast<i32>(literal)));
    default: return literal;
  }
}

// ---- One instruction ----------------------------------------------------------------------------

class Decoder {
 public:
  Decoder(Arch arch, const u32* words, u32 available) : arch_(arch), available_(available) {
    for (u32 i = 0; i < 4 && i < available; ++i) inst_.words[i] = words[i];
  }

  Instruction decode() {
    decode_format();
    if (!valid_ || !inst_.definition || inst_.dwords > available_) return unknown();
    for (u32 i = inst_.dwords; i < 4; ++i) inst_.words[i] = 0;
    finish();
    return inst_;
  }

 private:
  u32 word(u32 i) const { return inst_.words[i]; }

  // Bits of two dwords, the first of which is number `first`.
  u32 field(u32 high, u32 low, u32 first = 0) const {
    const u64 pair = word(first) | static_cast<u64>(word(first + 1)) << 32;
    return static_cast<u32>(pair >> low & ((u64{1} << (high - low + 1)) - 1));
  }
  bool bit(u32 position, u32 first = 0) const { return field(position, position, first); }

  Instruction unknown() const {
    Instruction unknown{};
    unknown.execute = execute_unknown;
    unknown.definition = nullptr;
    std::memcpy(unknown.words, inst_.words, sizeof(unknown.words));
    return unknown;
  }

  // Finds the row of the table and sets the executor; false if there is none.
  bool define(Format encoding, Format table, u32 opcode, u32 dwords) {
    inst_.encoding = encoding;
    inst_.dwords = static_cast<u8>(dwords);
    inst_.definition = tables().find(arch_, table, opcode);
    if (!inst_.definition) return false;
    inst_.execute = inst_.definition->execute;
    return true;
  }

  void decode_format() {
    const u32 w = word(0);
    if (w >> 31 == 0) {
      if (w >> 25 == 0x3f) decode_vop1();
      else if (w >> 25 == 0x3e) decode_vop12c(Format::VOPC, field(24, 17), 0, 2);
      else decode_vop12c(Format::VOP2, field(30, 25), field(24, 17), 2);
    } else if (w >> 30 == 2) {
      decode_scalar();
    } else {
      switch (w >> 26) {
        case 0x30: decode_smem(); break;
        case 0x34: field(25, 23) == 7 ? decode_vop3p() : decode_vop3(); break;
        case 0x36: decode_ds(); break;
        case 0x37: decode_flat(); break;
        case 0x38: decode_mubuf(); break;
        case 0x3a: decode_mtbuf(); break;
        default: break;
      }
    }
  }

  // ---- Operands ----

  Operand vgpr(u32 index, u32 dwords, bool accumulation = false,
               OperandType type = OperandType::registers) {
    Operand operand;
    if (index + dwords > kFirstAccumulation) valid_ = false;
    operand.place = Place::vgpr;
    operand.index = static_cast<u16>(index + (accumulation ? kFirstAccumulation : 0));
    operand.dwords = static_cast<u8>(dwords);
    operand.type = type;
    return operand;
  }

  Operand scalar(u32 index, u32 dwords, OperandType type = OperandType::registers) {
    Operand operand;
    const u32 alignment = dwords >= 4 ? 4 : dwords == 2 ? 2 : 1;
    // Tuples stay within the SGPRs, or within what has one name.
    const u32 end = index < kFlatScratch ? u32{kFlatScratch}
                    : index < kTtmp0     ? (index / 2 + 1) * 2
                    : index < kM0        ? u32{kM0}
                    : index == kM0       ? kM0 + 1u
                                         : 128u;
    if (index + dwords > end || index % alignment || index == 125) valid_ = false;
    operand.place = Place::scalar;
    operand.index = static_cast<u16>(index);
    operand.dwords = static_cast<u8>(dwords);
    operand.type = type;
    return operand;
  }

  Operand constant(u64 value, OperandType type) {
    Operand operand;
    operand.place = Place::constant;
    operand.constant = value;
    operand.type = type;
    operand.dwords = static_cast<u8>(dwords_of(type));
    return operand;
  }

  // As a 32-bit operand an aperture gives its upper half.
  Operand aperture(u32 field, u64 address, OperandType type) {
    Operand operand = constant(dwords_of(type) == 2 ? address : address >> 32, type);
    operand.index = static_cast<u16>(field);
    return operand;
  }

  // An 8- or 9-bit source field.
  Operand source(u32 field, OperandType type, u32 dwords) {
    if (field >= kFirstVgpr) return vgpr(field - kFirstVgpr, dwords, false, type);
    if (field < 128) return scalar(field, dwords, type);
    if (field <= 208) return constant(inline_integer(field), type);
    if (field >= kFirstInlineFloat && field <= kLastInlineFloat)
      return constant(inline_float(field, type), type);
    Operand operand;
    operand.type = type;
    operand.dwords = static_cast<u8>(dwords);
    switch (field) {
      case kSharedBase: return aperture(field, kSharedAperture, type);
      case kSharedLimit: return aperture(field, kSharedAperture + kApertureBytes - 1, type);
      case kPrivateBase: return aperture(field, kPrivateAperture, type);
      case kPrivateLimit: return aperture(field, kPrivateAperture + kApertureBytes - 1, type);
      case 251: operand.place = Place::vccz; break;
      case 252: operand.place = Place::execz; break;
      case 253: operand.place = Place::scc; break;
      case kSourceLiteral: return literal(type);
      default: valid_ = false;
    }
    return operand;
  }
  Operand source(u32 field, OperandType type) { return source(field, type, dwords_of(type)); }

  Operand literal(OperandType type) {
    if (!literal_allowed_) valid_ = false;
    inst_.dwords = 2;
    return constant(widen_literal(word(1), type), type);
  }

  // ---- Scalar formats ----

  void decode_scalar() {
    const u32 w = word(0), sdst = field(22, 16), first = field(7, 0), second = field(15, 8);
    if (w >> 23 == 0x17d) bind_scalar(Format::SOP1, second, {first}, sdst);
    else if (w >> 23 == 0x17e) bind_scalar(Format::SOPC, sdst, {first, second}, 0);
    else if (w >> 23 == 0x17f) bind_scalar(Format::SOPP, sdst, {}, 0);
    else if (w >> 28 == 0xb) bind_scalar(Format::SOPK, field(27, 23), {}, sdst);
    else bind_scalar(Format::SOP2, field(29, 23), {first, second}, sdst);
    if (inst_.encoding == Format::SOPP || inst_.encoding == Format::SOPK)
      inst_.offset = static_cast<i16>(w);
  }

  // Fields are consumed by the parameters that are plain sources.
  void bind_scalar(Format format, u32 opcode, std::initializer_list<u32> fields, u32 sdst) {
    if (!define(format, format, opcode, 1)) return;
    literal_allowed_ = true;
    const Signature& signature = inst_.definition->signature;
    auto next = fields.begin();
    for (u32 k = 0; k < kMaxSources; ++k) {
      const Parameter& parameter = signature.sources[k];
      switch (parameter.role) {
        case Role::source:
          if (next == fields.end()) valid_ = false;
          else inst_.source[k] = source(*next++, parameter.type);
          break;
        case Role::old:
          inst_.source[k] = scalar(sdst, dwords_of(parameter.type), parameter.type);
          break;
        case Role::literal: inst_.source[k] = literal(parameter.type); break;
        default: break;
      }
    }
    if (signature.result.role == Role::destination)
      inst_.destination = scalar(sdst, dwords_of(signature.result.type), signature.result.type);
  }

  void decode_smem() {
    if (!define(Format::SMEM, Format::SMEM, field(25, 18), 2)) return;
    const u32 opcode = field(25, 18);
    const u32 result = inst_.definition->registers[0], data = inst_.definition->registers[1];
    const bool is_atomic = opcode >= 0x40, is_glc = bit(16);
    const bool is_buffer = (opcode >= 0x08 && opcode <= 0x0c) ||
                           (opcode >= 0x18 && opcode <= 0x1a) || opcode == 0x27 ||
                           (opcode >= 0x40 && opcode <= 0x6c);
    if (data) inst_.source[2] = scalar(field(12, 6), data);
    if (result && (!is_atomic || is_glc)) inst_.destination = scalar(field(12, 6), result);
    const bool has_address = opcode < 0x20 || opcode > 0x25;  // between: cache control and clocks
    if (!has_address) return;
    inst_.source[0] = scalar(2 * field(5, 0), is_buffer ? 4 : 2);
    const bool has_immediate = bit(17), has_sgpr = bit(14);
    if (has_immediate) inst_.offset = static_cast<i32>(word(1) << 11) >> 11;  // 21 bits, signed
    if (has_sgpr) inst_.source[1] = source(field(63, 57), OperandType::b32);
    // Without both bits the offset field names an SGPR. Compilers never emit it, people do.
    else if (!has_immediate) inst_.source[1] = source(field(38, 32), OperandType::b32);
    inst_.cache_policy = static_cast<u8>(is_glc);
  }

  // ---- Vector ALU ----

  struct VectorFields {
    u32 source[3];  // 9 bits each
    u32 vdst;
    // The lane mask that is read (LaneBit without a field), or written (carry, comparison).
    u32 mask = kVccIndex;
    bool lane_bit_in_field = false;
  };

  void bind_vector(const VectorFields& fields, u32 field_count) {
    const Signature& signature = inst_.definition->signature;
    u32 next = 0;
    const auto next_source = [&](OperandType type) {
      if (next < field_count) return source(fields.source[next++], type);
      valid_ = false;
      return Operand{};
    };
    for (u32 k = 0; k < kMaxSources; ++k) {
      const Parameter& parameter = signature.sources[k];
      switch (parameter.role) {
        case Role::source:
          source_field_[k] = static_cast<int>(next);
          inst_.source[k] = next_source(parameter.type);
          if (dwords_of(parameter.type) > 2 && inst_.source[k].place != Place::vgpr) valid_ = false;
          break;
        case Role::old:
          inst_.source[k] = vgpr(fields.vdst, dwords_of(parameter.type), false, parameter.type);
          break;
        case Role::literal:
          literal_allowed_ = true;
          inst_.source[k] = literal(parameter.type);
          break;
        case Role::lane_bit:
          inst_.source[k] = fields.lane_bit_in_field ? next_source(OperandType::lane_mask)
                                                     : scalar(kVccIndex, 2, OperandType::lane_mask);
          if (inst_.source[k].place == Place::vgpr) valid_ = false;
          break;
        default: break;
      }
    }
    const OperandType type = signature.result.type;
    switch (signature.result.role) {
      case Role::with_carry: inst_.scalar_destination = scalar(fields.mask, 2); [[fallthrough]];
      case Role::destination:
        inst_.destination = vgpr(fields.vdst, dwords_of(type), false, type);
        break;
      case Role::scalar_destination:
        inst_.destination = scalar(fields.vdst, dwords_of(type), type);
        break;
      case Role::lane_mask: inst_.scalar_destination = scalar(fields.mask, 2); break;
      default: break;
    }
  }

  bool is_float(OperandType type) const {
    return type == OperandType::f32 || type == OperandType::f16 || type == OperandType::bf16 ||
           type == OperandType::f64;
  }

  // neg and abs of source field `field`, on floating-point parameters only: elsewhere the bits mean
  // nothing, or something else.
  void modify_source(u32 field, bool negate, bool absolute) {
    for (u32 k = 0; k < kMaxSources; ++k) {
      if (source_field_[k] != static_cast<int>(field)) continue;
      const OperandType type = inst_.source[k].type;
      if (is_float(type))
        inst_.source[k].modifiers |= (negate ? kNegate : 0) | (absolute ? kAbsolute : 0);
      // Which half of v_dot2c's and v_pk_fmac's would it be?
      if ((type == OperandType::f16x2 || type == OperandType::bf16x2) && (negate || absolute))
        valid_ = false;
    }
  }

  void decode_vop1() {
    decode_vop12c(Format::VOP1, field(16, 9), field(24, 17), 1);
    if (!inst_.definition) return;
    if (is_swap()) require_vgpr_source();
    if (is_accvgpr_mov()) {
      require_vgpr_source();
      inst_.source[0].index |= kFirstAccumulation;
      inst_.destination.index |= kFirstAccumulation;
    }
  }

  void decode_vop12c(Format format, u32 opcode, u32 vdst, u32 field_count) {
    if (!define(format, format, opcode, 1)) return;
    literal_allowed_ = true;
    const u32 source0 = field(8, 0), source1 = field(16, 9);
    VectorFields fields{{source0, kFirstVgpr + source1, 0}, vdst};
    if (source0 != kSourceSdwa && source0 != kSourceDpp) {
      bind_vector(fields, field_count);
      return;
    }
    check_sdwa_or_dpp(source0 == kSourceSdwa);
    inst_.dwords = 2;
    if (source0 == kSourceDpp) {
      fields.source[0] = kFirstVgpr + field(39, 32);
      if (inst_.encoding == Format::VOPC || !is_dpp_control(field(48, 40))) valid_ = false;
      bind_vector(fields, field_count);
      inst_.dpp = true;
      inst_.dpp_control = {static_cast<u16>(field(48, 40)), static_cast<u8>(field(63, 60)),
                           static_cast<u8>(field(59, 56)), bit(51)};
      modify_source(0, bit(52), bit(53));
      modify_source(1, bit(54), bit(55));
      return;
    }
    fields.source[0] = field(39, 32) + (bit(55) ? 0 : kFirstVgpr);
    if (bit(63)) fields.source[1] = source1;
    const bool is_comparison = inst_.encoding == Format::VOPC;
    if (is_comparison && bit(47)) fields.mask = field(46, 40);
    literal_allowed_ = false;
    bind_vector(fields, field_count);
    inst_.sdwa = true;
    select_source(0, field(50, 48), bit(51));
    select_source(1, field(58, 56), bit(59));
    modify_source(0, bit(52), bit(53));
    modify_source(1, bit(60), bit(61));
    if (is_comparison) return;
    inst_.destination_select = select_of(field(42, 40));
    inst_.destination_unused = static_cast<u8>(field(44, 43));
    if (inst_.destination_unused == 3) valid_ = false;
    inst_.clamp = bit(45);
    inst_.omod = static_cast<u8>(field(47, 46));
  }

  // Which instructions have these forms.
  void check_sdwa_or_dpp(bool is_sdwa) {
    const Signature& signature = inst_.definition->signature;
    const bool has_source = signature.sources[0].role != Role::none;
    if (!has_source || signature.result.role == Role::scalar_destination || is_accvgpr_mov() ||
        is_swap())
      valid_ = false;
    for (const Parameter& parameter : signature.sources) {
      if (parameter.role == Role::literal) valid_ = false;  // in the dword that SDWA and DPP use
      if (!is_sdwa || parameter.role == Role::none) continue;
      const bool is_wide = parameter.role == Role::source && dwords_of(parameter.type) == 2;
      if (is_wide || parameter.role == Role::old) valid_ = false;
    }
    if (is_sdwa && signature.result.type == OperandType::f64) valid_ = false;
  }
  bool is_vop1(u32 opcode) const {
    return inst_.definition->format == Format::VOP1 && inst_.definition->opcode == opcode;
  }
  static constexpr u32 kSwap = 0x51, kAccvgprMov = 0x52, kPermlane16Swap = 0x59,
                       kPermlane32Swap = 0x5a;
  bool is_accvgpr_mov() const { return is_vop1(kAccvgprMov); }
  bool is_swap() const {
    return is_vop1(kSwap) || is_vop1(kPermlane16Swap) || is_vop1(kPermlane32Swap);
  }

  // The source of moves from accumulation registers, and of swaps, which write to it.
  void require_vgpr_source() {
    if (inst_.source[0].place != Place::vgpr) valid_ = false;
  }

  static bool is_dpp_control(u32 control) {
    if (control < 0x130)
      return control < 0x100 || control % 16 != 0;  // quad_perm; row shifts by 1 to 15
    if (control < 0x140) return control % 4 == 0;   // wave shifts and rotations by 1
    return control <= 0x143 || (control >= 0x150 && control <= 0x15f);
  }

  Select select_of(u32 field) {
    if (field > 6) valid_ = false;
    return static_cast<Select>(field);
  }

  void select_source(u32 field, u32 select, bool sign_extend) {
    for (u32 k = 0; k < kMaxSources; ++k) {
      if (source_field_[k] != static_cast<int>(field)) continue;
      inst_.source[k].select = select_of(select);
      if (sign_extend) inst_.source[k].modifiers |= kSignExtend;
    }
  }

  void decode_vop3() {
    const u32 opcode = field(25, 16);
    const bool found = opcode < 0x100   ? define(Format::VOP3, Format::VOPC, opcode, 2)
                       : opcode < 0x140 ? define(Format::VOP3, Format::VOP2, opcode - 0x100, 2)
                       : opcode < 0x1c0 ? define(Format::VOP3, Format::VOP1, opcode - 0x140, 2)
                                        : define(Format::VOP3, Format::VOP3, opcode, 2);
    if (!found) return;
    VectorFields fields{{field(40, 32), field(49, 41), field(58, 50)}, field(7, 0)};
    fields.lane_bit_in_field = true;
    for (const Parameter& parameter : inst_.definition->signature.sources)
      if (parameter.role == Role::literal) valid_ = false;  // no room for it
    if (is_accvgpr_mov() || is_vop1(kSwap)) valid_ = false;
    const Role result = inst_.definition->signature.result.role;
    const bool has_sdst = result == Role::with_carry;  // VOP3B
    if (has_sdst) fields.mask = field(14, 8);
    if (result == Role::lane_mask) fields.mask = field(7, 0);
    bind_vector(fields, 3);
    if (is_swap()) require_vgpr_source();
    inst_.clamp = bit(15);
    inst_.omod = static_cast<u8>(field(60, 59));
    for (u32 k = 0; k < 3; ++k) modify_source(k, bit(61 + k), !has_sdst && bit(8 + k));
    if (has_sdst) return;
    inst_.op_sel = static_cast<u8>(field(14, 11));
    for (u32 k = 0; k < kMaxSources; ++k) {
      const int field = source_field_[k];
      if (field >= 0 && is_16_bit(inst_.source[k].type) && inst_.op_sel >> field & 1)
        inst_.source[k].select = Select::word_1;
    }
    if (is_16_bit(inst_.destination.type) && inst_.op_sel & 8) {
      inst_.destination_select = Select::word_1;
      inst_.destination_unused = 2;
    }
  }

  void decode_vop3p() {
    const u32 opcode = field(22, 16);
    constexpr u32 kAccvgprRead = 0x58, kAccvgprWrite = 0x59, kLoadScale = 0x2c;
    if (opcode == kLoadScale && arch_ == kGfx950) decode_mfma_scale();
    if (inst_.definition) return;
    if (tables().find(arch_, Format::MFMA, opcode)) {
      decode_mfma(Format::MFMA, 0, 2);
    } else if (define(Format::VOP3P, Format::VOP3P, opcode, 2)) {
      bind_vector({{field(40, 32), field(49, 41), field(58, 50)}, field(7, 0)}, 3);
      inst_.neg_hi = static_cast<u8>(field(10, 8));
      inst_.op_sel = static_cast<u8>(field(13, 11));
      inst_.op_sel_hi = static_cast<u8>(bit(14) << 2 | field(60, 59));
      inst_.neg_lo = static_cast<u8>(field(63, 61));
      inst_.clamp = bit(15);
      if (opcode == kAccvgprRead) require_vgpr_source();
      if (opcode == kAccvgprRead) inst_.source[0].index |= kFirstAccumulation;
      if (opcode == kAccvgprWrite) inst_.destination.index |= kFirstAccumulation;
    }
  }

  // `first` is the first dword of the MFMA itself.
  void decode_mfma(Format table, u32 first, u32 dwords) {
    if (!define(table, table, field(22, 16, first), dwords)) return;
    const u8* const registers = inst_.definition->registers;
    const Signature& signature = inst_.definition->signature;
    const bool is_sparse = signature.sources[3].role == Role::old;  // SMFMAC
    inst_.cbsz = static_cast<u8>(field(10, 8, first));
    inst_.abid = static_cast<u8>(field(14, 11, first));
    inst_.blgp = static_cast<u8>(field(63, 61, first));
    const bool accumulates = bit(15, first);
    inst_.destination = vgpr(field(7, 0, first), registers[2], accumulates);
    if (bit(40, first) == 0 || bit(49, first) == 0) valid_ = false;
    inst_.source[0] =
        vgpr(field(39, 32, first), registers[0] ? registers[0] : registers_of_format(inst_.cbsz),
             bit(59, first));
    inst_.source[1] =
        vgpr(field(48, 41, first), registers[1] ? registers[1] : registers_of_format(inst_.blgp),
             bit(60, first));
    // C is where D is, in architectural or accumulation registers; SMFMAC's indices are never in
    // the latter.
    const u32 c = field(58, 50, first);
    if (c >= kFirstVgpr)
      inst_.source[2] =
          is_sparse ? vgpr(c - kFirstVgpr, 1) : vgpr(c - kFirstVgpr, registers[2], accumulates);
    else inst_.source[2] = source(c, signature.sources[2].type);
    if (inst_.source[2].place != Place::vgpr &&
        (is_sparse || inst_.source[2].place != Place::constant))
      valid_ = false;
  }

  // The formats of f8f6f4: fp8, bf8, fp6, bf6, fp4; 32 elements in each lane.
  u32 registers_of_format(u32 format) {
    constexpr u32 kRegisters[8] = {8, 8, 6, 6, 4};
    if (!kRegisters[format]) valid_ = false;
    return kRegisters[format];
  }

  // Two instructions in one: the first names the scales, the second is an MFMA.
  void decode_mfma_scale() {
    if (available_ < 4 || word(2) >> 23 != 0x1a7) return;
    decode_mfma(Format::MFMA_SCALE, 2, 4);
    if (!inst_.definition) return;
    inst_.source[3] = source(field(40, 32), OperandType::b32);
    inst_.source[4] = source(field(49, 41), OperandType::b32);
    inst_.op_sel = static_cast<u8>(field(13, 11));
    inst_.op_sel_hi = static_cast<u8>(bit(14) << 2 | field(60, 59));
  }

  // ---- Memory ----

  void decode_ds() {
    if (!define(Format::DS, Format::DS, field(24, 17), 2)) return;
    inst_.offset = static_cast<i32>(field(15, 0));
    const u8* const registers = inst_.definition->registers;
    const bool accumulation = bit(25);
    constexpr u32 kNop = 0x14, kWriteAddtid = 0x1d, kReadAddtid = 0xb6, kConsume = 0xbd,
                  kAppend = 0xbe;
    const u32 opcode = field(24, 17);
    constexpr u32 kFirstGws = 0x98, kLastGws = 0x9d;
    const bool is_gws = opcode >= kFirstGws && opcode <= kLastGws;
    // Nothing else of GDS, the memory of all workgroups, is left on these chips.
    if (bit(16) != is_gws) valid_ = false;
    const bool has_value = opcode % 2;  // of the GWS: init, sema_br, barrier
    if (is_gws && !has_value) return;
    const bool has_address = opcode != kNop && opcode != kWriteAddtid && opcode != kReadAddtid &&
                             opcode != kConsume && opcode != kAppend;
    if (has_address) inst_.source[0] = vgpr(field(39, 32), 1, false, OperandType::b32);
    if (registers[0]) inst_.source[1] = vgpr(field(47, 40), registers[0], accumulation);
    if (registers[1]) inst_.source[2] = vgpr(field(55, 48), registers[1], accumulation);
    if (registers[2]) inst_.destination = vgpr(field(63, 56), registers[2], accumulation);
  }

  void decode_mubuf() {
    if (!define(Format::MUBUF, Format::MUBUF, field(24, 18), 2)) return;
    inst_.to_lds = bit(16);
    bind_buffer(bit(14) | bit(17) << 1 | bit(15) << 2);
  }
  // The format is read from the words.
  void decode_mtbuf() {
    if (define(Format::MTBUF, Format::MTBUF, field(18, 15), 2))
      bind_buffer(bit(14) | bit(54) << 1 | bit(53) << 2);
  }

  void bind_buffer(u32 cache_policy) {
    const u8* const registers = inst_.definition->registers;
    inst_.offset = static_cast<i32>(field(11, 0));
    inst_.offen = bit(12);
    inst_.idxen = bit(13);
    inst_.cache_policy = static_cast<u8>(cache_policy);
    if (!registers[0] && !registers[1]) return;  // cache control
    const bool accumulation = bit(55);
    const u32 address_dwords = inst_.offen + inst_.idxen;
    if (address_dwords) inst_.source[0] = vgpr(field(39, 32), address_dwords);
    if (registers[0]) inst_.source[1] = vgpr(field(47, 40), registers[0], accumulation);
    inst_.source[2] = scalar(4 * field(52, 48), 4);
    inst_.source[3] = source(field(63, 56), OperandType::b32);
    if (registers[1] && !inst_.to_lds && returns())
      inst_.destination = vgpr(field(47, 40), registers[1], accumulation);
  }

  void decode_flat() {
    constexpr Format kSegments[4] = {Format::FLAT, Format::SCRATCH, Format::GLOBAL, Format::count};
    const Format segment = kSegments[field(15, 14)];
    if (segment == Format::count || !define(segment, segment, field(24, 18), 2)) return;
    const u8* const registers = inst_.definition->registers;
    const u32 offset = field(12, 0);
    inst_.offset = segment == Format::FLAT ? static_cast<i32>(offset & 0xfff)
                                           : static_cast<i32>(offset << 19) >> 19;
    inst_.cache_policy = static_cast<u8>(bit(16) | bit(17) << 1 | bit(25) << 2);
    const bool accumulation = bit(55);
    const u32 saddr = field(54, 48);
    const bool has_saddr = segment != Format::FLAT && saddr != kNoSaddr;
    const bool scratch_has_vaddr = bit(13);
    if (segment != Format::SCRATCH) inst_.source[0] = vgpr(field(39, 32), has_saddr ? 1 : 2);
    else if (scratch_has_vaddr) inst_.source[0] = vgpr(field(39, 32), 1);
    if (registers[0]) inst_.source[1] = vgpr(field(47, 40), registers[0], accumulation);
    if (has_saddr) inst_.source[2] = scalar(saddr, segment == Format::SCRATCH ? 1 : 2);
    if (registers[1] && returns())
      inst_.destination = vgpr(field(63, 56), registers[1], accumulation);
    inst_.to_lds = inst_.definition->unit == Unit::vmem_load && !registers[1];
  }

  // Atomics return the old value with sc0 only.
  bool returns() const {
    return inst_.definition->unit != Unit::vmem_atomic || inst_.cache_policy & 1;
  }

  // What follows from everything else.
  void finish() {
    const Format table = inst_.definition->format;
    const Signature& signature = inst_.definition->signature;
    const bool has_value =
        signature.result.role == Role::destination || signature.result.role == Role::with_carry;
    if (inst_.clamp && table >= Format::VOP1 && table <= Format::VOP3 && has_value &&
        !is_float(signature.result.type) && !signature.saturates)
      inst_.execute = execute_unknown_clamp;
    inst_.has_output_modifiers =
        inst_.clamp || inst_.omod || inst_.destination_select != Select::dword;
    for (u32 k = 0; k < kMaxSources; ++k) {
      Operand& operand = inst_.source[k];
      operand.direct = operand.place == Place::vgpr && !operand.modifiers &&
                       operand.select == Select::dword && !(inst_.dpp && k == 0);
    }
  }

  const Arch arch_;
  const u32 available_;
  Instruction inst_{};
  bool valid_ = true;
  bool literal_allowed_ = false;
  int source_field_[kMaxSources] = {-1, -1, -1, -1, -1};  // parameter -> source field
};

}  // namespace

u64 inline_float(u32 field, OperandType type) {
  constexpr f32 kValues[9] = {0.5f, -0.5f, 1.0f, -1.0f, 2.0f, -2.0f, 4.0f, -4.0f, 0.15915494f};
  const f32 value = kValues[field - kFirstInlineFloat];
  const bool is_inverse_2_pi = field == kLastInlineFloat;
  switch (type) {
    case OperandType::f64:
    case OperandType::b64:
    case OperandType::i64:
      return is_inverse_2_pi ? 0x3fc45f306dc9c882u : bit_cast<u64>(static_cast<f64>(value));
    case OperandType::f16:
    case OperandType::f16x2: return float_to_half(value);
    case OperandType::bf16:
    case OperandType::bf16x2: return bit_cast<u32>(value) >> 16;
    case OperandType::f32x2: return bit_cast<u32>(value) * u64{0x100000001};
    default: return bit_cast<u32>(value);
  }
}

void execute_unsupported(Wave&, const Instruction&) {
  fault("the emulator knows this instruction, but does not emulate it");
}

Instruction decode_instruction(Arch arch, const u32* words, u32 available) {
  return Decoder(arch, words, available).decode();
}

std::vector<const Definition*> all_definitions() {
  std::vector<const Definition*> rows;
  for (const DefinitionSpan span :
       {sop_definitions(), smem_definitions(), vop1_definitions(), vop2_definitions(),
        vopc_definitions(), vop3_definitions(), vop3_convert_definitions(), vop3p_definitions(),
        mfma_definitions(), lds_definitions(), buffer_definitions(), flat_definitions()})
    for (std::size_t i = 0; i < span.count; ++i) rows.push_back(span.begin + i);
  return rows;
}

Instruction end_of_code() {
  Instruction inst{};
  inst.execute = execute_end_of_code;
  inst.definition = nullptr;
  return inst;
}

bool is_decoded(const Instruction& inst) { return inst.definition != nullptr; }

}  // namespace emulator
