// Chunks of rows: where a thread has them, how they come and go, and what the threads of a row find
// out together.
#pragma once

// kWidth numbers as floats.
struct Floats {
  float of[kWidth];
};

template <class Function>
__device__ inline Floats each(Floats a, const Function& function) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) a.of[i] = function(a.of[i]);
  return a;
}
__device__ inline Floats operator*(Floats a, float b) {
  return each(a, [&](float x) { return x * b; });
}
__device__ inline Floats operator+(Floats a, Floats b) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) a.of[i] += b.of[i];
  return a;
}
__device__ inline Floats operator*(Floats a, Floats b) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) a.of[i] *= b.of[i];
  return a;
}
// Two sums side by side, which one instruction adds to.
__device__ inline float sum_of(Floats a) {
  if constexpr (kWidth == 1) return a.of[0];
  f32x2 sums = 0;
#pragma unroll
  for (int i = 0; i + 1 < kWidth; i += 2) sums += f32x2{a.of[i], a.of[i + 1]};
  return sums.x + sums.y;
}

// The same as they lie in memory: words of 16 bytes at most, which one instruction moves.
template <class E>
constexpr int kWordBytes = kWidth * E::kBytes < 16 ? kWidth * E::kBytes : 16;
template <class E>
struct Numbers {
  static constexpr int kWordCount = kWidth * E::kBytes / kWordBytes<E>;
  WordsOf<kWordBytes<E>> words[kWordCount];

  // The 32 bits with the first bits of number `i`.
  __device__ unsigned dword(int i) const {
    const int byte = i * E::kBytes, word = byte / kWordBytes<E>;
    if constexpr (kWordBytes<E> <= 4) return words[word];
    else return words[word][byte % kWordBytes<E> / 4];
  }
  __device__ void set_dword(int i, unsigned bits) {
    const int byte = i * E::kBytes, word = byte / kWordBytes<E>;
    if constexpr (kWordBytes<E> <= 4) words[word] = static_cast<WordsOf<kWordBytes<E>>>(bits);
    else words[word][byte % kWordBytes<E> / 4] = bits;
  }
};

template <class E>
__device__ inline Floats floats_of(const Numbers<E>& from) {
  Floats result;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const unsigned bits = from.dword(i);
    if constexpr (E::kBytes == 4) result.of[i] = bits_as<float>(bits);
    else if constexpr (__is_same(E, BF16))
      result.of[i] = bits_as<float>(i % 2 ? bits & 0xffff0000u : bits << 16);
    else result.of[i] = bits_as<_Float16>(static_cast<unsigned short>(i % 2 ? bits >> 16 : bits));
  }
  return result;
}

// Rounded to nearest even.
template <class E>
__device__ inline Numbers<E> numbers_of(const Floats& from) {
  Numbers<E> result;
  const auto at = [&](int i) { return i < kWidth ? from.of[i] : 0.0f; };
  // In the last byte: floats between 2^23 and 2^24 are whole numbers.
  const auto byte = [&](int i) {
    return bits_of(__builtin_amdgcn_fmed3f(at(i), -kLargest, kLargest) + 0x1.8p23f);
  };
  constexpr int kOfDword = 4 / E::kBytes;
#pragma unroll
  for (int i = 0; i < kWidth; i += kOfDword) {
    unsigned bits;
    if constexpr (E::kBytes == 4) {
      bits = bits_of(at(i));
    } else if constexpr (E::kBytes == 2) {
      bits = packed_results<E>(at(i), at(i + 1));
    } else if constexpr (__is_same(E, FP8)) {
      bits = __builtin_amdgcn_cvt_pk_fp8_f32(at(i), at(i + 1), 0, false);
      bits = __builtin_amdgcn_cvt_pk_fp8_f32(at(i + 2), at(i + 3), bits, true);
    } else {
      const auto pair = [&](int j) { return __builtin_amdgcn_perm(byte(j + 1), byte(j), 0x0400); };
      bits = pair(i) & 0xffff | pair(i + 2) << 16;
    }
    result.set_dword(i, bits);
  }
  return result;
}

// At a place that is counted in numbers; beyond the end of a buffer, zeros.
constexpr unsigned kNowhere = 1u << 30;
template <class E>
__device__ inline Numbers<E> load_numbers(__amdgpu_buffer_rsrc_t from, unsigned place) {
  Numbers<E> result;
  const unsigned offset = place == kNowhere ? ~0u << 31 : place * E::kBytes;
#pragma unroll
  for (int i = 0; i < Numbers<E>::kWordCount; ++i)
    result.words[i] = load_near<WordsOf<kWordBytes<E>>>(from, offset + i * kWordBytes<E>);
  return result;
}
template <class E>
__device__ inline void store_numbers(__amdgpu_buffer_rsrc_t to, unsigned place,
                                     const Numbers<E>& from) {
  const unsigned offset = place == kNowhere ? ~0u << 31 : place * E::kBytes;
#pragma unroll
  for (int i = 0; i < Numbers<E>::kWordCount; ++i) {
    const auto word = from.words[i];
    const unsigned at = offset + i * kWordBytes<E>;
    if constexpr (sizeof(word) == 1) __builtin_amdgcn_raw_buffer_store_b8(word, to, at, 0, 0);
    else if constexpr (sizeof(word) == 2) __builtin_amdgcn_raw_buffer_store_b16(word, to, at, 0, 0);
    else if constexpr (sizeof(word) == 4) __builtin_amdgcn_raw_buffer_store_b32(word, to, at, 0, 0);
    else if constexpr (sizeof(word) == 8) __builtin_amdgcn_raw_buffer_store_b64(word, to, at, 0, 0);
    else __builtin_amdgcn_raw_buffer_store_b128(word, to, at, 0, 0);
  }
}

// One row of weights.
template <class E>
__device__ inline __amdgpu_buffer_rsrc_t one_row_of(Global<const void> base, long columns) {
  return __builtin_amdgcn_make_buffer_rsrc((void*)base, 0, static_cast<int>(columns) * E::kBytes,
                                           kRawBuffer);
}

// ---- What the threads of a row find out together ------------------------------------------------

constexpr int kWaveLanes = kRowLanes < 64 ? kRowLanes : 64;
constexpr int kWavesOfRow = kRowLanes > 64 ? kRowLanes / 64 : 1;
// Each time has a place of its own, so that nobody waits for those who still read the last one.
constexpr int kTurns = 4;
using Shared = Lds<float>;

__device__ inline void wait_for_waves() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

template <int kPattern, class Combine>
__device__ inline float with_pattern(float x, const Combine& combine) {
  return combine(
      x, bits_as<float>(__builtin_amdgcn_update_dpp(0, bits_as<int>(x), kPattern, 0xf, 0xf, true)));
}

// What the lane has whose number differs in one bit.
__device__ inline float from_other(float x, int bit) {
  const int other = (__builtin_amdgcn_workitem_id_x() ^ bit) * 4;
  return bits_as<float>(__builtin_amdgcn_ds_bpermute(other, bits_as<int>(x)));
}

// combine(x, y) over groups of kLanes lanes, sixteen at most.
template <int kLanes, class Combine>
__device__ inline float over_lanes(float x, const Combine& combine) {
  // Each lane with another one of its pair, its four, its eight and its sixteen.
  constexpr int kSwapPairs = 0xb1, kSwapTwos = 0x4e, kMirrorEight = 0x141, kMirrorSixteen = 0x140;
  if constexpr (kLanes >= 2) x = with_pattern<kSwapPairs>(x, combine);
  if constexpr (kLanes >= 4) x = with_pattern<kSwapTwos>(x, combine);
  if constexpr (kLanes >= 8) x = with_pattern<kMirrorEight>(x, combine);
  if constexpr (kLanes >= 16) x = with_pattern<kMirrorSixteen>(x, combine);
  return x;
}

// combine(x, y) of each of some numbers over all threads of the row, of which each gets the same.
// They have turns from `turn` on.
template <int kCount, class Combine>
__device__ inline void over_row(Shared shared, int turn, float (&x)[kCount],
                                const Combine& combine) {
#pragma unroll
  for (float& own : x) {
    own = over_lanes<kWaveLanes>(own, combine);
    if constexpr (kWaveLanes == 32) own = combine(own, from_other(own, 16));
    if constexpr (kWaveLanes == 64) {
      // The last lane of a sixteen goes to the next sixteen, that of the first 32 to the others.
      constexpr int kOfSixteen = 0x142, kOfHalf = 0x143, kLast = 63;
      own = with_pattern<kOfHalf>(with_pattern<kOfSixteen>(own, combine), combine);
      own = bits_as<float>(__builtin_amdgcn_readlane(bits_as<int>(own), kLast));
    }
  }
  if constexpr (kWavesOfRow > 1) {
    static_assert(kWavesOfRow <= 16);
    const int thread = __builtin_amdgcn_workitem_id_x();
    const Shared of_turn = shared + turn * kWavesOfRow;
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      if (thread % 64 == 0) of_turn[n * kWavesOfRow + thread / 64 % kWavesOfRow] = x[n];
    wait_for_waves();
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      x[n] = over_lanes<kWavesOfRow>(of_turn[n * kWavesOfRow + thread % kWavesOfRow], combine);
  }
}
template <class Combine>
__device__ inline float over_row(Shared shared, int turn, float x, const Combine& combine) {
  float one[] = {x};
  over_row(shared, turn, one, combine);
  return one[0];
}
