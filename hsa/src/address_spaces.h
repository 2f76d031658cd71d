// Pointers that say which memory they point into.
#pragma once

// Global memory. Generic pointers would make FLAT loads, which count in both wait counters.
template <class T>
using Global = __attribute__((address_space(1))) T*;

// The same, where nobody writes during a kernel: a load from one address for all lanes is a scalar
// one, also behind an atomic.
template <class T>
using Constant = const __attribute__((address_space(4))) T*;

template <class T>
using Lds = __attribute__((address_space(3))) T*;
