// Expands a table of vector instructions: define VECTOR_TABLE ("vop2.inc") and VECTOR_FORMAT
// (VOP2), then include this file inside of namespace emulator's anonymous namespace. Gives
// kDefinitions, and forgets its macros.
//
//   V(opcode, mnemonic, arch, result, (parameters), expression)
//       one lane's semantics
//   V_NEAREST(...)
//       the same, rounded to nearest whatever MODE says
//   V_TRANSCENDENTAL(...)
//       as V_NEAREST, at a quarter of the rate
//   V_CUSTOM(opcode, mnemonic, arch, result, (parameters), executor)
//       whole-wave semantics; the signature says what to decode
//   V_OF_CHIP(opcode, mnemonic, result, (parameters), executor, format)
//       the same, with executor<format>: a format of 8 bits, FNUZ on gfx942 and OCP on gfx950

#ifndef VECTOR_EXECUTOR
#define VECTOR_EXECUTOR Elementwise
#define VECTOR_SIGNATURE EMULATOR_SIGNATURE
#endif
#define V(...) V_ROW(VECTOR_EXECUTOR, valu, __VA_ARGS__)
#define V_NEAREST(...) V_ROW(NearestElementwise, valu, __VA_ARGS__)
#define V_TRANSCENDENTAL(...) V_ROW(NearestElementwise, transcendental, __VA_ARGS__)
#define V_OF_CHIP(OPCODE, NAME, RESULT, ARGS, EXECUTOR, FORMAT)        \
  V_CUSTOM(OPCODE, NAME, GFX942, RESULT, ARGS, EXECUTOR<FORMAT##Fnuz>) \
  V_CUSTOM(OPCODE, NAME, GFX950, RESULT, ARGS, EXECUTOR<FORMAT>)

#ifndef EMULATOR_DECODES_ONLY
#define V_ROW(EXECUTOR, UNIT, OPCODE, NAME, ARCH, RESULT, ARGS, ...) \
  inline RESULT NAME##_semantics ARGS { return __VA_ARGS__; }
#define V_CUSTOM(...)
#include VECTOR_TABLE
#undef V_ROW
#undef V_CUSTOM
#endif

#define V_ROW(EXECUTOR, UNIT, OPCODE, NAME, ARCH, RESULT, ARGS, ...)    \
  EMULATOR_ROW(VECTOR_FORMAT, OPCODE, ARCH, #NAME,                      \
               EMULATOR_EXECUTOR(EXECUTOR<&NAME##_semantics>::execute), \
               VECTOR_SIGNATURE(RESULT, ARGS), Unit::UNIT)
#define V_CUSTOM(OPCODE, NAME, ARCH, RESULT, ARGS, ...)                            \
  EMULATOR_ROW(VECTOR_FORMAT, OPCODE, ARCH, #NAME, EMULATOR_EXECUTOR(__VA_ARGS__), \
               EMULATOR_SIGNATURE(RESULT, ARGS), Unit::valu)
const Definition kDefinitions[] = {
#include VECTOR_TABLE
};
#undef VECTOR_TABLE
#undef VECTOR_FORMAT
#undef VECTOR_EXECUTOR
#undef VECTOR_SIGNATURE
#undef V
#undef V_NEAREST
#undef V_TRANSCENDENTAL
#undef V_OF_CHIP
#undef V_ROW
#undef V_CUSTOM
