// Pointers that say which memory they point into.
#pragma once

// Global memory. Loads through generic pointers would be FLAT ones, which occupy both wait counters.
template <class T>
using Global = __attribute__((address_space(1))) T*;

template <class T>
using Lds = __attribute__((address_space(3))) T*;
