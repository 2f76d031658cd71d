// What atomic operations make of memory. DS, MUBUF and FLAT share them.
//
// An operation is a function of the content of memory and of one or two data operands that gives
// the new content. `Atomic<operation>` applies it as one step for all threads of the host: global
// memory is shared by workgroups that run at the same time.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "execution/wave.h"

namespace emulator {

// Denormals that an operation keeps; it takes the others as zeros. LDS asks MODE, the L2 cache
// keeps all. (CDNA3's and CDNA4's documents say that float32 additions in the L2 cache flush;
// compilers know that they do not since gfx940.)
struct Denormals {
  bool sources = true, results = true;
};

namespace atomics {

// ---- Integers -----------------------------------------------------------------------------------

template <class T> T add(T memory, T data) { return memory + data; }
template <class T> T subtract(T memory, T data) { return memory - data; }
template <class T> T reverse_subtract(T memory, T data) { return data - memory; }
template <class T> T increment(T memory, T data) { return memory >= data ? 0 : memory + 1; }
template <class T> T decrement(T memory, T data) {
  return memory == 0 || memory > data ? data : memory - 1;
}
template <class T> T minimum(T memory, T data) { return data < memory ? data : memory; }
template <class T> T maximum(T memory, T data) { return data > memory ? data : memory; }
template <class T> T bitwise_and(T memory, T data) { return memory & data; }
template <class T> T bitwise_or(T memory, T data) { return memory | data; }
template <class T> T bitwise_xor(T memory, T data) { return memory ^ data; }
template <class T> T exchange(T, T data) { return data; }
template <class T> T masked_or(T memory, T mask, T bits) { return (memory & ~mask) | bits; }
template <class T> T wrap(T memory, T data0, T data1) {
  return memory >= data0 ? memory - data0 : memory + data1;
}
// DS compares with data0 and stores data1; MUBUF and FLAT the other way around.
template <class T> T compare_store(T memory, T compared, T stored) {
  return memory == compared ? stored : memory;
}
template <class T> T compare_swap(T memory, T stored, T compared) {
  return memory == compared ? stored : memory;
}

// ---- Floating point -----------------------------------------------------------------------------
// Rounding is to nearest even whatever MODE says, which is how the host's threads run.

template <class T> using Bits = std::conditional_t<sizeof(T) == 8, u64, u32>;
template <class T> constexpr Bits<T> kQuiet = Bits<T>{1} << (sizeof(T) == 8 ? 51 : 22);

template <class T> bool is_signaling(T value) {
  return std::isnan(value) && !(bit_cast<Bits<T>>(value) & kQuiet<T>);
}
template <class T> T made_quiet(T nan) { return bit_cast<T>(bit_cast<Bits<T>>(nan) | kQuiet<T>); }
template <class T> T flushed(T value, bool keep) {
  return keep || std::fpclassify(value) != FP_SUBNORMAL ? value : std::copysign(T(0), value);
}

template <class T> T sum(T memory, T data, Denormals denormals) {
  if (std::isnan(memory)) return made_quiet(memory);
  if (std::isnan(data)) return made_quiet(data);
  const T result = flushed(memory, denormals.sources) + flushed(data, denormals.sources);
  // Of infinities with opposite signs; the host would give a negative NaN.
  return std::isnan(result) ? std::numeric_limits<T>::quiet_NaN()
                            : flushed(result, denormals.results);
}
inline f32 add_f32(f32 memory, f32 data, Denormals denormals) {
  return sum(memory, data, denormals);
}
// The adder of doubles never flushes.
inline f64 add_f64(f64 memory, f64 data, Denormals) { return sum(memory, data, Denormals{}); }

inline u16 add_halves(u16 memory, u16 data, Denormals denormals) {
  const auto keep = [](u16 half, bool kept) -> u16 {
    return !kept && (half & 0x7c00) == 0 ? half & 0x8000 : half;
  };
  // Exact, or rounded so far below a half's last bit that rounding twice does no harm.
  const f32 total = sum(half_to_float(keep(memory, denormals.sources)),
                        half_to_float(keep(data, denormals.sources)), Denormals{});
  return keep(float_to_half(total), denormals.results);
}
inline u16 add_bfloats(u16 memory, u16 data, Denormals denormals) {
  const auto widened = [](u16 bits) { return bit_cast<f32>(static_cast<u32>(bits) << 16); };
  return float_to_bfloat(sum(widened(memory), widened(data), denormals));
}
template <u16 (*kAdd)(u16, u16, Denormals)>
u32 add_halfwords(u32 memory, u32 data, Denormals denormals) {
  const u32 low = kAdd(static_cast<u16>(memory), static_cast<u16>(data), denormals);
  const u32 high = kAdd(static_cast<u16>(memory >> 16), static_cast<u16>(data >> 16), denormals);
  return high << 16 | low;
}
inline u32 add_f16x2(u32 memory, u32 data, Denormals denormals) {
  return add_halfwords<add_halves>(memory, data, denormals);
}
inline u32 add_bf16x2(u32 memory, u32 data, Denormals denormals) {
  return add_halfwords<add_bfloats>(memory, data, denormals);
}

// A signaling NaN wins, made quiet; a quiet one loses. -0 is less than +0. Denormals are flushed
// for the comparison only.
template <class T, bool kLarger> T select(T memory, T data, Denormals denormals) {
  if (is_signaling(memory)) return made_quiet(memory);
  if (is_signaling(data)) return made_quiet(data);
  if (std::isnan(memory)) return data;
  if (std::isnan(data)) return memory;
  const T a = flushed(memory, denormals.sources), b = flushed(data, denormals.sources);
  const T less = kLarger ? a : b, more = kLarger ? b : a;
  return less < more || (less == more && std::signbit(less) && !std::signbit(more)) ? data : memory;
}
template <class T> T minimum_float(T memory, T data, Denormals denormals) {
  return select<T, false>(memory, data, denormals);
}
template <class T> T maximum_float(T memory, T data, Denormals denormals) {
  return select<T, true>(memory, data, denormals);
}

template <class T> T compare_store_float(T memory, T compared, T stored, Denormals denormals) {
  const bool is_equal = flushed(memory, denormals.sources) == flushed(compared, denormals.sources);
  return is_equal ? flushed(stored, denormals.sources) : memory;
}

// ---- In memory ----------------------------------------------------------------------------------

template <class T, class Next> T update(u8* address, Next&& next) {
  Bits<T>* const memory = reinterpret_cast<Bits<T>*>(address);
  Bits<T> old = __atomic_load_n(memory, __ATOMIC_SEQ_CST);
  while (!__atomic_compare_exchange_n(memory, &old, bit_cast<Bits<T>>(next(bit_cast<T>(old))), true,
                                      __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return bit_cast<T>(old);
}

template <class T> T operand(const u32* data, u32 number) {
  T value;
  std::memcpy(&value, data + number * (sizeof(T) / 4), sizeof(T));
  return value;
}

}  // namespace atomics

// Changes memory and gives its old content. `data` holds the operands, one after the other.
using ApplyAtomic = void (*)(u8* memory, const u32* data, u32* old, Denormals);

template <auto kNext> struct Atomic;

template <class T, class... A, T (*kNext)(T, A...)> struct Atomic<kNext> {
  using Type = T;
  static constexpr bool kFloat = (std::is_same_v<A, Denormals> || ...);
  static constexpr u32 kBytes = sizeof(T);

  static void apply(u8* memory, const u32* data, u32* old, Denormals denormals) {
    const T before = atomics::update<T>(memory, [&](T content) {
      const T first = atomics::operand<T>(data, 0);
      if constexpr (sizeof...(A) - kFloat == 2) {
        const T second = atomics::operand<T>(data, 1);
        if constexpr (kFloat) return kNext(content, first, second, denormals);
        else return kNext(content, first, second);
      } else if constexpr (kFloat) {
        return kNext(content, first, denormals);
      } else {
        return kNext(content, first);
      }
    });
    std::memcpy(old, &before, sizeof(T));
  }
};

// The operations that scalar, buffer and flat memory have alike, of 32 bits and, as NAME_x2, of 64:
// ROW(opcode, NAME, registers of data, of the result, function<type>).
#define EMULATOR_ATOMIC(ROW, OPCODE, NAME, OPERANDS, FUNCTION, SIGN) \
  ROW(OPCODE, NAME, OPERANDS, 1, FUNCTION<SIGN##32>)                 \
  ROW(OPCODE + 0x20, NAME##_x2, 2 * OPERANDS, 2, FUNCTION<SIGN##64>)
#define EMULATOR_ATOMICS(ROW, BASE)                           \
  EMULATOR_ATOMIC(ROW, BASE + 0, swap, 1, exchange, u)        \
  EMULATOR_ATOMIC(ROW, BASE + 1, cmpswap, 2, compare_swap, u) \
  EMULATOR_ATOMIC(ROW, BASE + 2, add, 1, add, u)              \
  EMULATOR_ATOMIC(ROW, BASE + 3, sub, 1, subtract, u)         \
  EMULATOR_ATOMIC(ROW, BASE + 4, smin, 1, minimum, i)         \
  EMULATOR_ATOMIC(ROW, BASE + 5, umin, 1, minimum, u)         \
  EMULATOR_ATOMIC(ROW, BASE + 6, smax, 1, maximum, i)         \
  EMULATOR_ATOMIC(ROW, BASE + 7, umax, 1, maximum, u)         \
  EMULATOR_ATOMIC(ROW, BASE + 8, and, 1, bitwise_and, u)      \
  EMULATOR_ATOMIC(ROW, BASE + 9, or, 1, bitwise_or, u)        \
  EMULATOR_ATOMIC(ROW, BASE + 10, xor, 1, bitwise_xor, u)     \
  EMULATOR_ATOMIC(ROW, BASE + 11, inc, 1, increment, u)       \
  EMULATOR_ATOMIC(ROW, BASE + 12, dec, 1, decrement, u)

}  // namespace emulator
