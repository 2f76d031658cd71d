// Chunks of rows: where a thread has them, how they come and go, and what the threads of a row find
// out together.
#pragma once

// kWidth numbers as floats. Operations take two at once, where instructions do.
typedef float Floats __attribute__((ext_vector_type(kWidth)));

template <class Function>
__device__ inline Floats each(Floats a, const Function& function) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) a[i] = function(a[i]);
  return a;
}

// a - b. The compiler makes sums two at a time, but differences one by one.
__device__ inline Floats less(Floats a, float b) {
  asm("v_mul_f32 %0, -1.0, %0" : "+v"(b));
  return a + b;
}

// Two sums side by side, which one instruction adds to.
constexpr int kSums = kWidth > 1 ? 2 : 1;
typedef float Sums __attribute__((ext_vector_type(kSums)));
template <class Some>
__device__ inline Sums with(Sums sums, Some a) {
  if constexpr (sizeof(Some) == sizeof(Sums)) return sums + a;
  else return with(with(sums, a.lo), a.hi);
}
__device__ inline float sum_of(Sums sums) {
  if constexpr (kSums == 1) return sums[0];
  else return sums[0] + sums[1];
}

// The largest of all, or of their absolute values. The compiler would take an instruction for each
// to look for a signalling NaN.
template <bool kAbsolute>
__device__ inline float largest_with(float largest, Floats a) {
#pragma unroll
  for (int i = 0; i < kWidth; i += kSums) {
    const float first = a[i], second = a[i + kSums - 1];
    if constexpr (kAbsolute)
      asm("v_max3_f32 %0, |%1|, |%2|, %0" : "+v"(largest) : "v"(first), "v"(second));
    else asm("v_max3_f32 %0, %1, %2, %0" : "+v"(largest) : "v"(first), "v"(second));
  }
  return largest;
}

// The largest of absolute values; infinite or NaN where one is NaN.
__device__ inline float largest_or_nan(float largest, Floats a) {
#if defined(__gfx950__)
#pragma unroll
  for (int i = 0; i < kWidth; i += kSums)
    asm("v_maximum3_f32 %0, |%1|, |%2|, %0" : "+v"(largest) : "v"(a[i]), "v"(a[i + kSums - 1]));
  return largest;
#else
  bool has_nan = false;
#pragma unroll
  for (int i = 0; i < kWidth; i += kSums) has_nan |= __builtin_isunordered(a[i], a[i + kSums - 1]);
  return has_nan ? __builtin_inff() : largest_with<true>(largest, a);
#endif
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

// The compiler knows no longer what they are, and waits until they are there.
template <class E>
__device__ inline void take_as_new(Numbers<E>& numbers) {
#pragma unroll
  for (auto& word : numbers.words) asm volatile("" : "+v"(word));
}

template <class E>
__device__ inline Floats floats_of(const Numbers<E>& from) {
  Floats result;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const unsigned bits = from.dword(i);
    if constexpr (E::kBytes == 4) result[i] = bits_as<float>(bits);
    else if constexpr (__is_same(E, BF16))
      result[i] = bits_as<float>(i % 2 ? bits & 0xffff0000u : bits << 16);
    else result[i] = bits_as<_Float16>(static_cast<unsigned short>(i % 2 ? bits >> 16 : bits));
  }
  return result;
}

// Rounded to nearest even. Those that become 8 bits are no larger than these are.
template <class E>
__device__ inline Numbers<E> numbers_of(const Floats& from) {
  Numbers<E> result;
  const auto at = [&](int i) { return i < kWidth ? from[i] : 0.0f; };
  // In the last byte: floats between 2^23 and 2^24 are whole numbers.
  const auto byte = [&](int i) { return bits_of(at(i) + 0x1.8p23f); };
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
      bits = lower_halves(pair(i), pair(i + 2));
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

// ---- What the threads of a row find out together ------------------------------------------------

constexpr int kWaveLanes = kRowLanes < 64 ? kRowLanes : 64;
constexpr int kWavesOfRow = kRowLanes > 64 ? kRowLanes / 64 : 1;
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

// combine(x, y) over the lanes of a row that one wave has, of which each gets the same.
template <class Combine>
__device__ inline float over_wave(float x, const Combine& combine) {
  x = over_lanes<kWaveLanes>(x, combine);
  if constexpr (kWaveLanes == 32) x = combine(x, from_other(x, 16));
  if constexpr (kWaveLanes == 64) {
    // The last lane of a sixteen goes to the next sixteen, that of the first 32 to the others.
    constexpr int kOfSixteen = 0x142, kOfHalf = 0x143, kLast = 63;
    x = with_pattern<kOfHalf>(with_pattern<kOfSixteen>(x, combine), combine);
    x = bits_as<float>(__builtin_amdgcn_readlane(bits_as<int>(x), kLast));
  }
  return x;
}

// Each time has a place of its own, so that nobody waits for those who still read the last one.
// Puts in place of the numbers x those of all waves of the row, of a wave in every kWavesOfRow-th
// lane; false where a row has no more than one wave. They have turns from `turn` on.
template <int kCount>
__device__ inline bool over_waves(Shared shared, int turn, float* x) {
  if constexpr (kWavesOfRow == 1) return false;
  static_assert(kWavesOfRow <= 16);
  const int thread = __builtin_amdgcn_workitem_id_x();
  const Shared of_turn = shared + turn * kWavesOfRow;
#pragma unroll
  for (int n = 0; n < kCount; ++n)
    if (thread % 64 == 0) of_turn[n * kWavesOfRow + thread / 64 % kWavesOfRow] = x[n];
  wait_for_waves();
#pragma unroll
  for (int n = 0; n < kCount; ++n) x[n] = of_turn[n * kWavesOfRow + thread % kWavesOfRow];
  return true;
}

// combine(x, y) over all threads of the row, of which each gets the same.
template <class Combine>
__device__ inline float over_row(Shared shared, int turn, float x, const Combine& combine) {
  x = over_wave(x, combine);
  return over_waves<1>(shared, turn, &x) ? over_lanes<kWavesOfRow>(x, combine) : x;
}

__device__ inline float larger(float a, float b) {
  asm("v_max_f32 %0, %0, %1" : "+v"(a) : "v"(b));
  return a;
}
// Of numbers that are not below 0, or of NaN: in one instruction with what another lane has.
__device__ inline float larger_magnitude(float a, float b) {
  return bits_as<float>(bits_of(a) > bits_of(b) ? bits_of(a) : bits_of(b));
}
__device__ inline float added(float a, float b) { return a + b; }
