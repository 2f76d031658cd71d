// How the C++ signature of an instruction's semantics says where its operands are.
//
// An instruction is a function such as `f32 (f32 a, f32 b)`. Its parameters are taken in order from
// the source fields of the encoding; the types below stand for everything that is not a plain
// source or a plain destination. Decoder, executor and disassembler all follow this one
// description.
#pragma once

#include "numbers/numeric_types.h"

namespace emulator {

// An enumeration, and the names of its members.
#define EMULATOR_MEMBER(NAME) NAME,
#define EMULATOR_NAME(NAME) #NAME,
#define EMULATOR_ENUM(ENUM, MEMBERS)                           \
  enum class ENUM : u8 { MEMBERS(EMULATOR_MEMBER) };           \
  inline const char* name_of(ENUM member) {                    \
    constexpr const char* kNames[] = {MEMBERS(EMULATOR_NAME)}; \
    return kNames[static_cast<u32>(member)];                   \
  }

// clang-format off
#define EMULATOR_VALUE_TYPES(X)        /* each is called as its C++ type */ \
  X(u16) X(i16) X(f16) X(bf16)         /* the low half of a register; SDWA and op_sel choose */ \
  X(b32) X(i32) X(f32)                 /* b32 stands for u32 too */ \
  X(b64) X(i64) X(f64)                 /* two registers */ \
  X(f16x2) X(bf16x2) X(i16x2) X(f32x2) /* packed: VOP3P */ \
  X(b128) X(b192) X(b512) X(b1024)     /* as many bits, in registers */
#define EMULATOR_OPERAND_TYPES(X) \
  X(none) \
  EMULATOR_VALUE_TYPES(X) \
  X(lane_mask)                         /* one bit a lane, in a pair of scalar registers */ \
  X(registers)                         /* as many as the instruction says (memory, MFMA) */
EMULATOR_ENUM(OperandType, EMULATOR_OPERAND_TYPES)

#define EMULATOR_ROLES(X) \
  X(source)             /* the next source field */ \
  X(old)                /* the destination's previous content */ \
  X(literal)            /* the 32-bit constant after the instruction (v_fmamk, v_fmaak) */ \
  X(lane_bit)           /* VOP2: VCC; VOP3: the next source field, an SGPR pair */ \
  X(vcc)                /* VCC, in any encoding */ \
  X(scc) X(exec)        /* scalar state */ \
  X(simm16)             /* SOPK's constant */ \
  X(destination)        /* result in the destination field */ \
  X(scalar_destination) /* result in a scalar register (v_readlane) */ \
  X(lane_mask)          /* result of a comparison: VOPC to VCC, VOP3 to an SGPR pair */ \
  X(with_carry)         /* a value, and a lane mask to VCC (VOP2) or to sdst (VOP3) */ \
  X(none) \
  X(mode)               /* MODE */
EMULATOR_ENUM(Role, EMULATOR_ROLES)
// clang-format on

// ---- Parameters ---------------------------------------------------------------------------------

// clang-format off
template <class T> struct Old { T value; operator T() const { return value; } };
template <class T> struct Literal { T value; operator T() const { return value; } };
struct LaneBit { u32 value; operator bool() const { return value != 0; } };  // 0 or ~0
struct Vcc { u32 value; operator bool() const { return value != 0; } };      // 0 or ~0
struct Scc { u32 value; operator u32() const { return value; } };
struct Exec { u64 value; operator u64() const { return value; } };
struct Simm16 { i32 value; operator i32() const { return value; } };
// clang-format on

// Vector semantics that depend on MODE in more than rounding and denormals.
struct Mode {
  u32 bits;
  bool ieee() const { return bits >> 9 & 1; }
  bool rounds_halves_and_doubles_to_nearest() const { return (bits >> 2 & 3) == 0; }
  bool rounds_floats_to_nearest() const { return (bits & 3) == 0; }
  bool flushes_half_results() const { return !(bits >> 7 & 1); }
  // A float, with denormals as zeros where MODE says so of sources or of results.
  f32 flush_source(f32 value) const { return bits >> 4 & 1 ? value : without_denormals(value); }
  f32 flush_result(f32 value) const { return bits >> 5 & 1 ? value : without_denormals(value); }

 private:
  static f32 without_denormals(f32 value) {
    const u32 number = bit_cast<u32>(value);
    return bit_cast<f32>(number & (number & 0x7f800000u ? ~0u : 0x80000000u));
  }
};

// ---- Results ------------------------------------------------------------------------------------

// clang-format off

// Vector: the value, and the lane's bit of the carry mask.
template <class T> struct WithCarry { T value; bool carry; };
// Vector: clamp saturates to the range of T instead of wrapping around. Holds the exact result.
template <class T> struct Saturating { i64 exact; };
// Vector: a 16-bit result that leaves the other half of the register alone. (Most clear it.)
template <class T> struct KeepHigh { T value; };
// Vector: one result for the wave, in a scalar register.
template <class T> struct ToScalar { T value; };
// Scalar: the value, and SCC.
template <class T> struct WithScc { T value; bool scc; };
// Scalar: SCC alone is bool. Value, new EXEC; SCC is whether EXEC is not zero.
struct WithExec { u64 value; u64 exec; };
// clang-format on

template <class T> inline WithScc<T> nonzero(T value) { return {value, value != 0}; }

// Fields of kBits of two dwords, multiplied and added.
template <u32 kBits, class C>
Saturating<C> dot(u32 a, u32 b, C addend) {
  i64 sum = addend;
  for (u32 position = 0; position < 32; position += kBits) {
    const u32 up = 32 - kBits - position, down = 32 - kBits;
    const C left = static_cast<C>(a << up) >> down, right = static_cast<C>(b << up) >> down;
    sum += i64{left} * right;
  }
  return {sum};
}

// ---- C++ type -> description --------------------------------------------------------------------

struct Parameter {
  OperandType type = OperandType::none;
  Role role = Role::none;
};

template <class T> constexpr OperandType operand_type = OperandType::none;
#define EMULATOR_OPERAND_TYPE(TYPE) \
  template <> inline constexpr OperandType operand_type<TYPE> = OperandType::TYPE;
EMULATOR_VALUE_TYPES(EMULATOR_OPERAND_TYPE)

// clang-format off
template <class T> constexpr Parameter parameter_of{operand_type<T>, Role::source};
template <class T> constexpr Parameter parameter_of<Old<T>>{operand_type<T>, Role::old};
template <class T> constexpr Parameter parameter_of<Literal<T>>{operand_type<T>, Role::literal};
template <>
inline constexpr Parameter parameter_of<LaneBit>{OperandType::lane_mask, Role::lane_bit};
template <> inline constexpr Parameter parameter_of<Vcc>{OperandType::lane_mask, Role::vcc};
template <> inline constexpr Parameter parameter_of<Scc>{OperandType::none, Role::scc};
template <> inline constexpr Parameter parameter_of<Exec>{OperandType::none, Role::exec};
template <> inline constexpr Parameter parameter_of<Mode>{OperandType::none, Role::mode};
template <> inline constexpr Parameter parameter_of<Simm16>{OperandType::none, Role::simm16};

template <class T> constexpr Parameter result_of{operand_type<T>, Role::destination};
template <> inline constexpr Parameter result_of<void>{};
template <> inline constexpr Parameter result_of<bool>{OperandType::lane_mask, Role::lane_mask};
template <class T> constexpr Parameter result_of<Saturating<T>> = result_of<T>;
template <class T> constexpr Parameter result_of<KeepHigh<T>> = result_of<T>;
template <class T> constexpr Parameter result_of<WithCarry<T>>{result_of<T>.type, Role::with_carry};
template <class T>
constexpr Parameter result_of<ToScalar<T>>{operand_type<T>, Role::scalar_destination};
template <class T> constexpr Parameter result_of<WithScc<T>> = result_of<T>;
template <> inline constexpr Parameter result_of<WithExec> = result_of<u64>;
// clang-format on

constexpr int kMaxSources = 5;

template <class R> constexpr bool kSaturates = false;
template <class T> constexpr bool kSaturates<Saturating<T>> = true;
template <class T> constexpr bool kSaturates<WithCarry<T>> = kSaturates<T>;
template <class T> constexpr bool kSaturates<KeepHigh<T>> = kSaturates<T>;

// Of scalar tables; of vector ones, bool is a lane mask.
template <class R> constexpr bool kWritesScc = false;
template <> inline constexpr bool kWritesScc<bool> = true;
template <> inline constexpr bool kWritesScc<WithExec> = true;
template <class T> constexpr bool kWritesScc<WithScc<T>> = true;

struct Signature {
  Parameter result;
  Parameter sources[kMaxSources];
  bool saturates = false;   // clamp works on the integer result
  bool writes_scc = false;  // of scalar tables
};

template <class R, class... A>
constexpr Signature signature_of(R (*)(A...)) {
  static_assert(sizeof...(A) <= kMaxSources, "more sources than an encoding has");
  return {result_of<R>, {parameter_of<A>...}, kSaturates<R>, kWritesScc<R>};
}

// The pair type that a half's type decodes as.
constexpr OperandType packed_type(OperandType half) {
  switch (half) {
    case OperandType::f16: return OperandType::f16x2;
    case OperandType::bf16: return OperandType::bf16x2;
    case OperandType::u16:
    case OperandType::i16: return OperandType::i16x2;
    case OperandType::f32: return OperandType::f32x2;
    default: return half;
  }
}

// Of packed math, whose semantics are those of a half.
constexpr Signature packed_signature(Signature half) {
  half.result.type = packed_type(half.result.type);
  for (Parameter& source : half.sources) source.type = packed_type(source.type);
  return half;
}

// Of matrix instructions, what the decoder has to know beyond the number of registers: the type of
// C's constants, and that SMFMAC adds to its destination.
constexpr Signature signature_of_c(OperandType type) {
  Signature signature{};
  signature.sources[2] = {type, Role::source};
  return signature;
}
constexpr Signature signature_of_sparse() {
  Signature signature = signature_of_c(OperandType::b32);
  signature.sources[3] = {OperandType::registers, Role::old};
  return signature;
}
constexpr Signature kFloat32C = signature_of_c(OperandType::f32);
constexpr Signature kFloat64C = signature_of_c(OperandType::f64);
constexpr Signature kSparse = signature_of_sparse();

// 32-bit registers that a value of this type takes.
constexpr u32 dwords_of(OperandType type) {
  switch (type) {
    case OperandType::none:
    case OperandType::registers: return 0;
    case OperandType::b64:
    case OperandType::i64:
    case OperandType::f64:
    case OperandType::f32x2:
    case OperandType::lane_mask: return 2;
    case OperandType::b128: return 4;
    case OperandType::b192: return 6;
    case OperandType::b512: return 16;
    case OperandType::b1024: return 32;
    default: return 1;
  }
}

constexpr bool is_16_bit(OperandType type) {
  return type == OperandType::u16 || type == OperandType::i16 || type == OperandType::f16 ||
         type == OperandType::bf16;
}

}  // namespace emulator
