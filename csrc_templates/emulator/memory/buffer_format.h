// Data formats of buffer memory: what BUFFER_*_FORMAT_* and TBUFFER_* convert from and to.
//
// A component is loaded to a float where its number format is a float or scaled, else to an
// integer. What the documents do not say (rounding, components beyond the format's, packed small
// floats) faults.
#pragma once

#include <cmath>

#include "execution/wave.h"

namespace emulator {

enum class NumberFormat : u8 { unorm, snorm, uscaled, sscaled, uint, sint, reserved, floating };

struct DataFormat {
  u8 components;  // 0: not emulated
  u8 bits;        // of each component
};

// By the DFMT field.
constexpr DataFormat kDataFormats[16] = {
    {0, 0}, {1, 8}, {1, 16}, {2, 8},  {1, 32}, {2, 16}, {0, 0},  {0, 0},
    {0, 0}, {0, 0}, {4, 8},  {2, 32}, {4, 16}, {3, 32}, {4, 32}, {0, 0},
};

class BufferFormat {
 public:
  // Where a component that is loaded comes from: 0, 1, or 4 to 7 for those of the format.
  using Selection = u8[4];

  BufferFormat(u32 data, u32 number)
      : data_(kDataFormats[data]), number_(static_cast<NumberFormat>(number)) {
    const bool is_converted = number <= 3;
    const bool is_valid =
        number_ == NumberFormat::floating ? data_.bits != 8 : number_ != NumberFormat::reserved;
    if (!data_.components || !is_valid || (is_converted && data_.bits == 32))
      fault("buffer data format %u with number format %u is not emulated", data, number);
  }

  u32 components() const { return data_.components; }
  u32 bytes() const { return data_.components * data_.bits / 8; }
  u32 one() const { return is_integer() ? 1 : bit_cast<u32>(1.0f); }
  u32 half_one() const { return is_integer() ? 1 : float_to_half(1.0f); }

  // Component `i` of the data at `from`, as 32 bits.
  u32 load(const u8* from, u32 i) const {
    const u32 raw = raw_component(from, i), most = (1u << (data_.bits - 1)) - 1;
    const f32 signed_value = static_cast<f32>(sign_extended(raw));
    switch (number_) {
      case NumberFormat::unorm:
        return bit_cast<u32>(static_cast<f32>(raw) / static_cast<f32>(2 * most + 1));
      case NumberFormat::snorm:
        return bit_cast<u32>(std::fmax(signed_value / static_cast<f32>(most), -1.0f));
      case NumberFormat::uscaled: return bit_cast<u32>(static_cast<f32>(raw));
      case NumberFormat::sscaled: return bit_cast<u32>(signed_value);
      case NumberFormat::sint: return static_cast<u32>(sign_extended(raw));
      case NumberFormat::floating:
        return data_.bits == 16 ? bit_cast<u32>(half_to_float(static_cast<u16>(raw))) : raw;
      default: return raw;
    }
  }
  // The same, as 16 bits: where that loses nothing.
  u32 load_half(const u8* from, u32 i) const {
    const u32 raw = raw_component(from, i);
    if (data_.bits == 32 || (!is_integer() && number_ != NumberFormat::floating))
      fault("a conversion of this buffer format to 16 bits is not emulated");
    return number_ == NumberFormat::sint ? static_cast<u16>(sign_extended(raw)) : raw;
  }

  void store(u8* to, u32 i, u32 value) const {
    u32 raw = value;
    if (number_ == NumberFormat::floating) {
      if (data_.bits == 16) raw = float_to_half(bit_cast<f32>(value));
      if (data_.bits == 16 && bit_cast<u32>(half_to_float(static_cast<u16>(raw))) != value)
        inexact();
    } else if (is_integer()) {
      if (data_.bits < 32) raw = value & ((1u << data_.bits) - 1);
      if ((number_ == NumberFormat::sint ? static_cast<u32>(sign_extended(raw)) : raw) != value)
        inexact();
    } else {
      inexact();
    }
    std::memcpy(to + i * data_.bits / 8, &raw, data_.bits / 8);
  }
  void store_half(u8* to, u32 i, u32 half) const {
    if (number_ == NumberFormat::floating)
      store(to, i, bit_cast<u32>(half_to_float(static_cast<u16>(half))));
    else
      store(to, i, number_ == NumberFormat::sint ? static_cast<u32>(static_cast<i16>(half)) : half);
  }

 private:
  bool is_integer() const { return number_ == NumberFormat::uint || number_ == NumberFormat::sint; }
  u32 raw_component(const u8* from, u32 i) const {
    u32 raw = 0;
    std::memcpy(&raw, from + i * data_.bits / 8, data_.bits / 8);
    return raw;
  }
  i32 sign_extended(u32 raw) const {
    return static_cast<i32>(raw << (32 - data_.bits)) >> (32 - data_.bits);
  }
  [[noreturn]] static void inexact() {
    fault("a store that this buffer format must round or clamp is not emulated");
  }

  DataFormat data_;
  NumberFormat number_;
};

}  // namespace emulator
