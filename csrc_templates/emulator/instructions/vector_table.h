// Expands a table of vector instructions: define VECTOR_TABLE ("vop2.inc") and VECTOR_FORMAT
// (VOP2), then include this file inside of namespace emulator's anonymous namespace. Gives
// kDefinitions.
//
//   V(opcode, mnemonic, arch, result, (parameters), expression)
//       one lane's semantics
//   V_NEAREST(...)
//       the same, rounded to nearest whatever MODE says
//   V_TRANSCENDENTAL(...)
//       as V_NEAREST, at a quarter of the rate
//   V_CUSTOM(opcode, mnemonic, arch, result, (parameters), executor)
//       whole-wave semantics; the signature says what to decode

#define V(OPCODE, NAME, ARCH, RESULT, ARGS, ...) \
  inline RESULT NAME##_semantics ARGS { return __VA_ARGS__; }
#define V_NEAREST(OPCODE, NAME, ARCH, RESULT, ARGS, ...) \
  inline RESULT NAME##_semantics ARGS { return __VA_ARGS__; }
#define V_TRANSCENDENTAL(OPCODE, NAME, ARCH, RESULT, ARGS, ...) \
  inline RESULT NAME##_semantics ARGS { return __VA_ARGS__; }
#define V_CUSTOM(OPCODE, NAME, ARCH, RESULT, ARGS, ...) using NAME##_signature = RESULT ARGS;
#include VECTOR_TABLE
#undef V
#undef V_NEAREST
#undef V_TRANSCENDENTAL
#undef V_CUSTOM

template <class F>
constexpr Signature signature_of_type() {
  return signature_of(static_cast<F*>(nullptr));
}

#ifndef VECTOR_EXECUTOR
#define VECTOR_EXECUTOR Elementwise
#endif
#define ROW(EXECUTOR, UNIT, OPCODE, NAME, ARCH) \
  {Format::VECTOR_FORMAT,                       \
   OPCODE,                                      \
   ARCH,                                        \
   #NAME,                                       \
   &EXECUTOR<&NAME##_semantics>::execute,       \
   EXECUTOR<&NAME##_semantics>::kSignature,     \
   Unit::UNIT},
#define V(OPCODE, NAME, ARCH, RESULT, ARGS, ...) ROW(VECTOR_EXECUTOR, valu, OPCODE, NAME, ARCH)
#define V_NEAREST(OPCODE, NAME, ARCH, RESULT, ARGS, ...) \
  ROW(NearestElementwise, valu, OPCODE, NAME, ARCH)
#define V_TRANSCENDENTAL(OPCODE, NAME, ARCH, RESULT, ARGS, ...) \
  ROW(NearestElementwise, transcendental, OPCODE, NAME, ARCH)
#define V_CUSTOM(OPCODE, NAME, ARCH, RESULT, ARGS, ...) \
  {Format::VECTOR_FORMAT,                               \
   OPCODE,                                              \
   ARCH,                                                \
   #NAME,                                               \
   &__VA_ARGS__,                                        \
   signature_of_type<NAME##_signature>(),               \
   Unit::valu},
const Definition kDefinitions[] = {
#include VECTOR_TABLE
};
#undef V
#undef V_NEAREST
#undef V_TRANSCENDENTAL
#undef V_CUSTOM
#undef VECTOR_TABLE
#undef VECTOR_FORMAT
#undef VECTOR_EXECUTOR
#undef ROW
