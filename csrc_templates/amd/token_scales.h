// Scales that tokens of 8-bit keys and values have, each its own. Scores are multiplied with those
// of keys as soon as there are any, and probabilities with those of values once they are added up.
//
// Tokens are the columns of a tile of scores, of which a lane has several; it loads the scale of
// one of them, and its neighbours tell it the others.
//
// Included after kAccess, kTokenKDescales and kTokenVDescales.
#pragma once

#include "row_tiles.h"
#include "workgroups.h"

// Calls take(i, what lane i of the caller's row of 16 lanes has) for the first kCount lanes.
template <int kCount, int kLane = 0, class Take>
__device__ inline void for_lanes_of_row(float x, Take take) {
  constexpr int kBroadcast = 0x150 + kLane, kAll = 0xf;
  take(kLane, bits_as<float>(
                  __builtin_amdgcn_update_dpp(0, bits_as<int>(x), kBroadcast, kAll, kAll, true)));
  if constexpr (kLane + 1 < kCount) for_lanes_of_row<kCount, kLane + 1>(x, take);
}

// Where the halves of a tile are in wide pages, for who has not looked them up for its keys.
struct ScalePlaces {
  PagePlace half[2];

  __device__ static ScalePlaces of(const Pages& pages, int first_key, int count) {
    ScalePlaces result;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Quotient in_page = divide(smaller(first_key + 16 * i, count - 1), pages.size);
      result.half[i] = {pages.at_uniform(in_page.value), in_page.remainder};
    }
    return result;
  }
};

// The scales of one head of a sequence.
struct TokenScales {
  Global<const char> base;  // of the first token; in pages, of page 0
  long stride;              // bytes between tokens
  Pages pages;              // of use in pages only
  int last;                 // token that counts, whose scale those behind it have

  // `pages` and `count` are those of the keys; `of_head` is the first scale of a head in a tensor.
  __device__ static TokenScales of(Global<const char> of_head, long batch, long seq,
                                   const Place& place, const Sequence& sequence, int count,
                                   const Pages& pages) {
    TokenScales result = {of_head, seq, pages, count - 1};
    result.pages.stride = batch;
    if (!is_paged(kAccess)) result.base += place.batch * batch + sequence.k_start * seq;
    return result;
  }

  // The scale of a token of the tile from `first_key` on. In pages its places have been looked up,
  // with the same `count`; in wide ones those of the first of each 16 tokens.
  template <class Places>
  __device__ float at(int first_key, int token, const Places& places) const {
    const int there = smaller(first_key + token, last);
    if constexpr (has_key_places(kAccess)) {
      const unsigned long of_own_key =
          pages.there(places.page) * pages.stride + places.row * stride;
      return load(from_lane(of_own_key, token));
    } else if constexpr (has_block_places(kAccess)) {
      const auto place = token < 16 ? places.half[0] : places.half[1];
      const long row = place.row + there - smaller(first_key + token / 16 * 16, last);
      return load(pages.there(place.page) * pages.stride + row * stride);
    } else {
      return load(there * stride);
    }
  }

 private:
  __device__ float load(long offset) const { return *(Global<const float>)(base + offset); }
};

// What a lane has of a tile.
struct TileScales {
  float of_key, of_value;
};

// Those of keys and of values; where they have none, what is loaded is 1.
struct KeyValueScales {
  TokenScales of_keys, of_values;

  __device__ static KeyValueScales of(const Arguments& a, const Modifiers& m, const Place& place,
                                      const Sequence& sequence, int count, const Pages& pages) {
    const long head = divide(place.head, a.gqa).value;
    KeyValueScales result = {};
    if (kTokenKDescales)
      result.of_keys =
          TokenScales::of((Global<const char>)m.k_token_descales + head * m.k_token_head,
                          m.k_token_batch, m.k_token_seq, place, sequence, count, pages);
    if (kTokenVDescales)
      result.of_values =
          TokenScales::of((Global<const char>)m.v_token_descales + head * m.v_token_head,
                          m.v_token_batch, m.v_token_seq, place, sequence, count, pages);
    return result;
  }

  template <class Places>
  __device__ TileScales at(int first_key, int token, const Places& places) const {
    TileScales result = {1, 1};
    if (kTokenKDescales) result.of_key = of_keys.at(first_key, token, places);
    if (kTokenVDescales) result.of_value = of_values.at(first_key, token, places);
    return result;
  }
};
