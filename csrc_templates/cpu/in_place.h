// Keys and values where they lie, as a few rows read them; packed_in_place.h has packed pages.
#pragma once

#include "problem.h"

namespace {

// Keys or values of one head from key `from` on.
struct InPlace {
  KeyRows rows;
  int64_t from;

  const KeyElement* operator()(int key) const { return rows[from + key]; }
  // What to ask for ahead of key `key` among those of a step.
  const KeyElement* ahead(int key) const { return rows[from + key]; }
  // Whether all of `count` keys from `key` on lie strides.seq apart.
  bool lies_in_strides(int key, int count) const {
    return !kPaged || uint32_t(from + key) % rows.page_size + count <= rows.page_size;
  }
};
using KeysInPlace = InPlace;
using ValuesInPlace = InPlace;

}  // namespace
