// Fused multi-head attention, forward: O = softmax(scale Q K^T) V, for gfx942 and gfx950.
//
// A workgroup computes kTileRows queries of one head, each wave 32 of them, over all key tiles with
// an online softmax. Everything is transposed: S^T = K Q^T and O^T = V^T P^T. So a lane holds
// scores of one query only, and P^T in the accumulator is the second product's operand as it is.
//
// How waves go through the keys, and what is in LDS meanwhile, depends on the inputs:
//
//     forward_turns.h   16 bits
//     fp8_turns.h       the chip's own form of e4m3 for Q, K, V and probabilities
//
// With 8-bit inputs the output is bf16. The scales of queries and keys are part of that of scores,
// and the scale of values is part of what the output is multiplied with in the end. Probabilities
// are rounded to four significant bits (fp8_attention.h), and their sum is not.
//
// A launch that would not fill the chip splits the keys: num_splits workgroups attend to the same
// queries, each to its share of the keys. Each leaves its registers in the workspace, from which
// the kernel COMBINE then makes the output, 32 queries in each workgroup.
//
// Set by the build: HAS_8_BITS, DTYPE (BF16 or FP16: of the output, and of inputs with 16 bits),
// HDIM_Q, HDIM_V, MASK, GROUP, ROUNDING, KERNEL and COMBINE (symbols), TILE_ROWS, TILE_KEYS,
// PAGED and WIDENS_KEYS (whether keys and values are in pages, and of 8 bits alone; 0 here).
#if HAS_8_BITS
#include "fp8_turns.h"
#else
#include "forward_turns.h"
#endif
#include "forward_work.h"

// ---- What a workgroup has to do -----------------------------------------------------------------

// kBytes of the arguments from byte kFrom on, in scalar registers.
template <int kFrom, int kBytes>
struct PartOfArguments {
  typedef unsigned Words __attribute__((ext_vector_type(kBytes / 4)));
  Words words;

  __device__ explicit PartOfArguments(const Arguments& from) {
    __builtin_memcpy(&words, reinterpret_cast<const char*>(&from) + kFrom, kBytes);
  }
  __device__ void put(Arguments& to) const {
    __builtin_memcpy(reinterpret_cast<char*>(&to) + kFrom, &words, kBytes);
  }
};

// The arguments in registers, all of them before anything else is done. Left alone, the compiler
// would load each when it is needed, and every such round is a trip to memory, which may be the
// host's.
__device__ inline Arguments loaded_at_once(const Arguments& arguments) {
  constexpr int kDescales = __builtin_offsetof(Arguments, q_descale);
  static_assert(kDescales == 248 && sizeof(Arguments) == kDescales + 48);
  static_assert(__builtin_offsetof(Arguments, cu_seqlens_q) <= 160);
  Arguments result;
  PartOfArguments<0, 64> first(arguments);
  PartOfArguments<64, 64> second(arguments);
#if HAS_8_BITS
  PartOfArguments<kDescales, 32> pointers(arguments);
  PartOfArguments<kDescales + 32, 16> strides(arguments);
#endif
  if constexpr (!kGroupMode) {
    PartOfArguments<128, 32> rest(arguments);
#if HAS_8_BITS
    asm(""
        : "+s"(first.words), "+s"(second.words), "+s"(rest.words), "+s"(pointers.words),
          "+s"(strides.words));
#else
    asm("" : "+s"(first.words), "+s"(second.words), "+s"(rest.words));
#endif
    rest.put(result);
  } else {
    PartOfArguments<128, 64> third(arguments);
#if HAS_8_BITS
    PartOfArguments<192, 32> fourth(arguments);
    PartOfArguments<224, 16> fifth(arguments);
    PartOfArguments<240, 8> sixth(arguments);
    asm(""
        : "+s"(first.words), "+s"(second.words), "+s"(third.words), "+s"(fourth.words),
          "+s"(fifth.words), "+s"(sixth.words));
    asm("" : "+s"(pointers.words), "+s"(strides.words));
    third.put(result);
    fourth.put(result);
    fifth.put(result);
    sixth.put(result);
#else
    PartOfArguments<192, 64> fourth(arguments);
    asm("" : "+s"(first.words), "+s"(second.words), "+s"(third.words), "+s"(fourth.words));
    third.put(result);
    fourth.put(result);
#endif
  }
  first.put(result);
  second.put(result);
#if HAS_8_BITS
  pointers.put(result);
  strides.put(result);
#endif
  return result;
}

// ---- The kernels --------------------------------------------------------------------------------

__global__ void forward(Arguments) asm(KERNEL);

// Two waves a SIMD: 256 registers each.
__global__
    __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads), amdgpu_waves_per_eu(2, 2))) void
    forward(Arguments arguments) {
  alignas(1024) __shared__ char lds[kSharedBytes];
#if !HAS_8_BITS
  const int thread = opaque_below<kThreads>(__builtin_amdgcn_workitem_id_x());
#endif
  const Arguments a = loaded_at_once(arguments);
  Place place = place_of_workgroup<kGroupMode>(a, a.num_splits);
  // With 16-bit inputs these stay numbers of 32 bits: of more, products with strides would be made
  // of more parts.
  if constexpr (!HAS_8_BITS) asm("" : "+s"(place.batch), "+s"(place.head));
  const Sequence sequence = sequence_of<kGroupMode>(a, place.batch);
  const int queries = computed_queries<kGroupMode>(a, sequence);
  const int tile = tile_of(a, place, queries);
  if (kGroupMode && (tile < 0 || tile * kTileRows >= queries)) return;
  const Task task = task_of(a, place, sequence, queries, tile);
#if HAS_8_BITS
  const int thread = opaque(__builtin_amdgcn_workitem_id_x());
#endif
  if (are_far<kTileKeys>(task.head.k) || are_far<kTileKeys>(task.head.v) ||
      are_far<32>(task.head.q) || are_far<32>(task.head.o))
    attend<true>(task, (Lds<char>)lds, thread);
  else attend<false>(task, (Lds<char>)lds, thread);
}

__global__ void combine(Arguments) asm(COMBINE);

// Makes the output of what the splits left. Its grid is that of the other kernel with as many
// workgroups in place of splits as that has waves: each has the 32 queries of one.
__global__ __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads))) void combine(
    Arguments arguments) {
  alignas(1024) __shared__ char lds[kValueBlocks / 2 * Exchange::kBytes];
  const Arguments a = loaded_at_once(arguments);
  const Place place = place_of_workgroup<kGroupMode>(a, Divisor{kWaves, ~0u / kWaves});
  const Sequence sequence = sequence_of<kGroupMode>(a, place.batch);
  const int queries = computed_queries<kGroupMode>(a, sequence);
  const int tile = tile_of(a, place, queries);
  if (tile < 0 || tile * kTileRows + static_cast<int>(place.share) * 32 >= queries) return;
  const Task task = task_of(a, place, sequence, queries, tile);
  const int thread = __builtin_amdgcn_workitem_id_x();
  if (are_far<32>(task.head.o)) combine_splits<true>(task, place.share, (Lds<char>)lds, thread);
  else combine_splits<false>(task, place.share, (Lds<char>)lds, thread);
}
