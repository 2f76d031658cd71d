// In place of <algorithm>, <atomic> and <numeric>: without large headers a kernel is compiled in
// five sixths of the time.
#pragma once

#include <cstdint>

namespace {

// By reference, as std::min: otherwise GCC keeps less in registers of backward's products.
template <class T>
constexpr const T& min(const T& a, const T& b) {
  return b < a ? b : a;
}
template <class T>
constexpr const T& max(const T& a, const T& b) {
  return a < b ? b : a;
}

constexpr int common_multiple(int a, int b) {
  int multiple = a;
  while (multiple % b != 0) multiple += a;
  return multiple;
}

template <class T>
inline void fill(T* to, int64_t count, T value) {
  for (int64_t i = 0; i < count; ++i) to[i] = value;
}

// A number that threads share. An order is __ATOMIC_RELAXED or such.
template <class T>
struct Atomic {
  alignas(sizeof(T)) T value;

  __attribute__((always_inline)) T load(int order) const { return __atomic_load_n(&value, order); }
  __attribute__((always_inline)) void store(T to, int order) {
    __atomic_store_n(&value, to, order);
  }
  __attribute__((always_inline)) T fetch_add(T more, int order) {
    return __atomic_fetch_add(&value, more, order);
  }
};

}  // namespace
