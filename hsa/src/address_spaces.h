// Pointers that say which memory they point into.
#pragma once

// Global memory. Generic pointers would make FLAT loads, which count in both wait counters.
template <class T>
using Global = __attribute__((address_space(1))) T*;

template <class T>
using Lds = __attribute__((address_space(3))) T*;
