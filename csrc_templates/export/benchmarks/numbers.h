// What the benchmarks and examples share: the bits of numbers, tensors as bytes, dropout's numbers.
#pragma once

#include <jitfmha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "hip.h"

namespace bench {

inline void check(const jitfmha::Status& status) {
  if (!status) throw std::runtime_error(status.text);
}

using Bits = std::uint32_t;  // the lower ones, as many as an element has

inline bool is_fp8(jitfmha::DataType dtype) {
  return dtype == jitfmha::DataType::fp8_e4m3fnuz || dtype == jitfmha::DataType::fp8_e4m3fn;
}

inline bool is_bf8(jitfmha::DataType dtype) {
  return dtype == jitfmha::DataType::bf8_e5m2fnuz || dtype == jitfmha::DataType::bf8_e5m2;
}

inline bool has_8_bits(jitfmha::DataType dtype) {
  return is_fp8(dtype) || is_bf8(dtype) || dtype == jitfmha::DataType::int8;
}

inline std::size_t bytes_of(jitfmha::DataType dtype) {
  return has_8_bits(dtype) ? 1 : dtype == jitfmha::DataType::fp32 ? 4 : 2;
}

inline double largest_of(jitfmha::DataType dtype) {
  return dtype == jitfmha::DataType::int8         ? 127
         : is_bf8(dtype)                          ? 57344
         : dtype == jitfmha::DataType::fp8_e4m3fn ? 448
                                                  : 240;
}

inline const char* name_of(jitfmha::DataType dtype) {
  constexpr const char* kNames[] = {"bf16", "fp16", "fp8_e4m3fnuz", "fp8_e4m3fn",
                                    "fp32", "int8", "bf8_e5m2fnuz", "bf8_e5m2"};
  return kNames[static_cast<int>(dtype)];
}

// The bits of a mantissa lie below those of the exponent.
struct Format {
  int mantissa_bits, bias, sign_bit;
};

inline Format format_of(jitfmha::DataType dtype) {
  switch (dtype) {
    case jitfmha::DataType::bf16: return {7, 127, 15};
    case jitfmha::DataType::fp16: return {10, 15, 15};
    case jitfmha::DataType::fp8_e4m3fnuz: return {3, 8, 7};
    case jitfmha::DataType::fp8_e4m3fn: return {3, 7, 7};
    case jitfmha::DataType::fp32: return {23, 127, 31};
    case jitfmha::DataType::bf8_e5m2fnuz: return {2, 16, 7};
    case jitfmha::DataType::bf8_e5m2: return {2, 15, 7};
    case jitfmha::DataType::int8: break;  // no such format
  }
  return {};
}

// To nearest even; what is drawn is finite and in the range of all types.
inline Bits narrowed(double value, jitfmha::DataType dtype) {
  if (dtype == jitfmha::DataType::int8)
    return static_cast<Bits>(std::clamp<int>(static_cast<int>(std::nearbyint(value)), -128, 127)) &
           0xff;
  const auto [mantissa_bits, bias, sign_bit] = format_of(dtype);
  int exponent = 0;
  std::frexp(value, &exponent);
  const int field = std::max(exponent - 1 + bias, 1);  // 1 also of subnormal numbers
  const double steps = std::nearbyint(std::ldexp(std::fabs(value), mantissa_bits + bias - field));
  if (steps == 0) return 0;  // where there is no -0, its bits are a NaN
  const int bits = ((field - 1) << mantissa_bits) + static_cast<int>(steps);
  return static_cast<Bits>(value < 0) << sign_bit | static_cast<Bits>(bits);
}

inline double widened(Bits bits, jitfmha::DataType dtype) {
  if (dtype == jitfmha::DataType::int8) return static_cast<std::int8_t>(bits);
  const auto [mantissa_bits, bias, sign_bit] = format_of(dtype);
  const int one = 1 << mantissa_bits, last_field = (1 << (sign_bit - mantissa_bits)) - 1;
  const int field = static_cast<int>(bits >> mantissa_bits) & last_field;
  const int mantissa = static_cast<int>(bits) & (one - 1);
  const double sign = bits >> sign_bit & 1 ? -1 : 1;
  const bool has_infinity = !is_fp8(dtype) && dtype != jitfmha::DataType::bf8_e5m2fnuz;
  if (field == last_field && has_infinity) return mantissa ? std::nan("") : sign * HUGE_VAL;
  return sign *
         std::ldexp(field ? mantissa + one : mantissa, std::max(field, 1) - bias - mantissa_bits);
}

inline std::vector<double> widened(const std::vector<Bits>& values, jitfmha::DataType dtype) {
  std::vector<double> wide;
  for (const Bits each : values) wide.push_back(widened(each, dtype));
  return wide;
}

// The values of a tensor as they lie in memory.
inline std::vector<std::uint8_t> stored(const std::vector<Bits>& values, jitfmha::DataType dtype) {
  const std::size_t size = bytes_of(dtype);
  std::vector<std::uint8_t> bytes(values.size() * size);
  for (std::size_t i = 0; i < values.size(); ++i) std::memcpy(&bytes[i * size], &values[i], size);
  return bytes;
}

// The same of a tensor on the device.
inline std::vector<Bits> values_of(const hip::Memory& memory, jitfmha::DataType dtype) {
  const std::size_t size = bytes_of(dtype);
  const std::vector<std::uint8_t> bytes = memory.content<std::uint8_t>();
  std::vector<Bits> values(bytes.size() / size, 0);
  for (std::size_t i = 0; i < values.size(); ++i) std::memcpy(&values[i], &bytes[i * size], size);
  return values;
}

// What dropout multiplies a probability with, of heads that are counted through all sequences. The
// random bytes of 16 keys that follow each other are those of Philox 4x32-7 (Salmon et al.,
// SC 2011), at the place of the first one.
inline double kept_share(double p, std::uint64_t seed, std::uint64_t offset, std::int64_t head,
                         std::int64_t i, std::int64_t j) {
  if (p == 0) return 1;
  const auto low = [](auto x) { return static_cast<std::uint32_t>(x); };
  std::uint32_t counter[4] = {low(j / 16), low(i), low(head), low(offset)};
  std::uint32_t key[2] = {low(seed), low(seed >> 32)};
  for (int round = 0; round < 7; ++round, key[0] += 0x9e3779b9u, key[1] += 0xbb67ae85u) {
    const std::uint64_t first = std::uint64_t{0xd2511f53u} * counter[0];
    const std::uint64_t second = std::uint64_t{0xcd9e8d57u} * counter[2];
    counter[0] = low(second >> 32) ^ counter[1] ^ key[0];
    counter[1] = low(second);
    counter[2] = low(first >> 32) ^ counter[3] ^ key[1];
    counter[3] = low(first);
  }
  const auto byte = counter[j % 16 / 4] >> (j % 4 * 8) & 0xff;
  return byte <= std::floor(255 * (1 - p)) ? 1 / (1 - p) : 0;
}

}  // namespace bench
