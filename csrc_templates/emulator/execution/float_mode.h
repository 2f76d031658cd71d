// Runs host floating point under a wave's rounding mode. The default (nearest even) is what worker
// threads run under anyway, so that nothing is set for it.
#pragma once

#include "execution/wave.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace emulator {

#if defined(__SSE2__)
using HostFloatControl = u32;
inline HostFloatControl host_float_control() { return _mm_getcsr(); }
inline void set_host_float_control(HostFloatControl control) { _mm_setcsr(control); }
// round: 0 nearest even, 1 up, 2 down, 3 to zero. denormal: bit 0 keeps sources, bit 1 results.
inline HostFloatControl host_float_control_of(u32 round, u32 denormal) {
  constexpr u32 kMaskExceptions = 0x1f80, kSourcesToZero = 0x40, kResultsToZero = 0x8000;
  constexpr u32 kRound[4] = {0x0000, 0x4000, 0x2000, 0x6000};
  return kMaskExceptions | kRound[round & 3] | (denormal & 1 ? 0 : kSourcesToZero) |
         (denormal & 2 ? 0 : kResultsToZero);
}
#elif defined(__aarch64__)
using HostFloatControl = u64;
inline HostFloatControl host_float_control() {
  u64 control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  return control;
}
inline void set_host_float_control(HostFloatControl control) {
  asm volatile("msr fpcr, %0" ::"r"(control));
}
// The CPU flushes sources and results together: it does where MODE asks for either.
inline HostFloatControl host_float_control_of(u32 round, u32 denormal) {
  return (u64{round & 3} << 22) | (denormal == 3 ? 0 : u64{1} << 24);
}
#else
#error "the emulator runs on x86-64 and AArch64"
#endif

// Which bits of MODE rule an operation: those of the result where it is floating point, else those
// of the sources.
enum class FloatClass : u8 { none, single, half_or_double };

constexpr FloatClass float_class(OperandType type) {
  switch (type) {
    case OperandType::f32:
    case OperandType::f32x2: return FloatClass::single;
    case OperandType::f16:
    case OperandType::bf16:
    case OperandType::f16x2:
    case OperandType::bf16x2:
    case OperandType::f64: return FloatClass::half_or_double;
    default: return FloatClass::none;
  }
}

constexpr FloatClass float_class(const Signature& signature) {
  if (float_class(signature.result.type) != FloatClass::none)
    return float_class(signature.result.type);
  for (const Parameter& source : signature.sources)
    if (float_class(source.type) != FloatClass::none) return float_class(source.type);
  return FloatClass::none;
}

template <FloatClass kClass>
class FloatEnvironment {
 public:
  explicit FloatEnvironment(const Wave& wave) : changed_(!wave.default_float_mode) {
    if (__builtin_expect(changed_, 0)) {
      saved_ = host_float_control();
      const u32 mode = kClass == FloatClass::single ? wave.mode : wave.mode >> 2;
      // Denormals are flushed by the operand layer: hosts differ in when a result counts as one,
      // and conversions have two kinds of them.
      set_host_float_control(host_float_control_of(mode & 3, 3));
    }
  }
  ~FloatEnvironment() {
    if (__builtin_expect(changed_, 0)) set_host_float_control(saved_);
  }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  HostFloatControl saved_{};
  bool changed_;
};

template <>
class FloatEnvironment<FloatClass::none> {
 public:
  explicit FloatEnvironment(const Wave&) {}
};

}  // namespace emulator
