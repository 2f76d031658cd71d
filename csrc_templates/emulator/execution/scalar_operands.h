// Reading and writing scalar registers: the operand layer of SALU and SMEM, and of scalar operands
// elsewhere.
#pragma once

#include "execution/hooks.h"
#include "execution/wave.h"

namespace emulator {

inline u32 read_scalar_register(Wave& wave, u32 index) {
  hooks::scalar_read(wave, index, 1);
  return wave.scalar[index];
}

inline u64 read_scalar_pair(Wave& wave, u32 index) {
  hooks::scalar_read(wave, index, 2);
  return wave.pair(index);
}

inline void write_scalar_register(Wave& wave, u32 index, u32 value) {
  wave.scalar[index] = value;
  hooks::scalar_written(wave, index, 1);
}

inline void write_scalar_pair(Wave& wave, u32 index, u64 value) {
  wave.pair(index) = value;
  hooks::scalar_written(wave, index, 2);
}

u64 read_scalar_status(Wave& wave, Place place);

// A scalar source: register, constant or status bit. 64-bit where the operand is.
inline u64 read_scalar_bits(Wave& wave, const Operand& operand) {
  switch (operand.place) {
    case Place::scalar:
      return operand.dwords == 2 ? read_scalar_pair(wave, operand.index)
                                 : read_scalar_register(wave, operand.index);
    case Place::constant: return operand.constant;
    default: return read_scalar_status(wave, operand.place);
  }
}

template <class T>
inline T read_scalar(Wave& wave, const Operand& operand) {
  const u64 bits = read_scalar_bits(wave, operand);
  if constexpr (sizeof(T) == 8) {
    return bit_cast<T>(bits);
  } else {
    return bit_cast<T>(static_cast<u32>(bits));
  }
}

template <class T>
inline void write_scalar(Wave& wave, const Operand& operand, T value) {
  if constexpr (sizeof(T) == 8) {
    write_scalar_pair(wave, operand.index, bit_cast<u64>(value));
  } else {
    write_scalar_register(wave, operand.index, bit_cast<u32>(value));
  }
}

}  // namespace emulator
