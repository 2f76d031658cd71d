// The intrinsics of x86. GCC reads <immintrin.h>, which has those of every processor, for longer
// than the rest of a kernel. For versions of GCC that this was tried with, those that are used are
// declared here, by GCC's builtins.
#pragma once

#if defined(__GNUC__) && !defined(__clang__) && (__GNUC__ == 12 || __GNUC__ == 13)

// Lanes that are of no account stay as they are, of which GCC warns elsewhere.
#pragma GCC system_header

#define JITFMHA_VECTOR(name, element, bytes)                                   \
  typedef element name __attribute__((__vector_size__(bytes), __may_alias__)); \
  typedef element name##_u __attribute__((__vector_size__(bytes), __may_alias__, __aligned__(1)))
JITFMHA_VECTOR(__m128, float, 16);
JITFMHA_VECTOR(__m256, float, 32);
JITFMHA_VECTOR(__m128i, long long, 16);
JITFMHA_VECTOR(__m256i, long long, 32);

// Vectors by their elements, as builtins take them.
typedef char __v16qi __attribute__((__vector_size__(16)));
typedef short __v16hi __attribute__((__vector_size__(32)));
typedef int __v4si __attribute__((__vector_size__(16)));
typedef long long __v2di __attribute__((__vector_size__(16)));

#define _MM_FROUND_TO_NEAREST_INT 0
#define _MM_FROUND_TO_NEG_INF 1
#define _MM_FROUND_CUR_DIRECTION 4
#define _MM_FROUND_NO_EXC 8
#define _CMP_UNORD_Q 0x03
#define _CMP_ORD_Q 0x07
#define _CMP_LE_OQ 0x12
#define _CMP_NLE_UQ 0x16

// `function` is a name with its arguments. Where numbers are part of the instruction, it is a macro
// below.
#define JITFMHA_INTRINSIC(result, function, ...) \
  static inline __attribute__((__always_inline__, __artificial__)) result function { __VA_ARGS__; }

JITFMHA_INTRINSIC(__m128, _mm_loadu_ps(const float* p), return *(const __m128_u*)p)
JITFMHA_INTRINSIC(__m128i, _mm_loadu_si128(const __m128i* p), return *(const __m128i_u*)p)
JITFMHA_INTRINSIC(__m256, _mm256_loadu_ps(const float* p), return *(const __m256_u*)p)
JITFMHA_INTRINSIC(__m256i, _mm256_loadu_si256(const __m256i* p), return *(const __m256i_u*)p)
JITFMHA_INTRINSIC(void, _mm_stream_si128(__m128i* p, __m128i a),
                  __builtin_ia32_movntdq((__v2di*)p, (__v2di)a))
JITFMHA_INTRINSIC(void, _mm_sfence(), __builtin_ia32_sfence())

#if defined(__AVX512F__)

JITFMHA_VECTOR(__m512, float, 64);
JITFMHA_VECTOR(__m512i, long long, 64);
typedef unsigned char __mmask8;
typedef unsigned short __mmask16;
typedef unsigned __mmask32;
typedef unsigned long long __mmask64;

typedef char __v64qi __attribute__((__vector_size__(64)));
typedef short __v32hi __attribute__((__vector_size__(64)));
typedef int __v16si __attribute__((__vector_size__(64)));
typedef unsigned __v16su __attribute__((__vector_size__(64)));
typedef long long __v8di __attribute__((__vector_size__(64)));
typedef float __v16sf __attribute__((__vector_size__(64)));
typedef double __v4df __attribute__((__vector_size__(32)));
typedef double __v8df __attribute__((__vector_size__(64)));

#define _MM_PERM_CCAA 0xa0
#define _MM_PERM_DDBB 0xf5

// A mask of all lanes, beside which what the others would keep is of no account.
#define JITFMHA_16 __mmask16(-1)
#define JITFMHA_ROUNDING _MM_FROUND_CUR_DIRECTION

JITFMHA_INTRINSIC(__m256i, _mm256_undefined_si256(), __m256i a = a; return a)
JITFMHA_INTRINSIC(__m512, _mm512_undefined_ps(), __m512 a = a; return a)

// ---- Memory

JITFMHA_INTRINSIC(__m256i, _mm256_load_si256(const __m256i* p), return *p)
JITFMHA_INTRINSIC(__m512, _mm512_loadu_ps(const void* p), return *(const __m512_u*)p)
JITFMHA_INTRINSIC(__m512i, _mm512_loadu_si512(const void* p), return *(const __m512i_u*)p)
JITFMHA_INTRINSIC(__m512i, _mm512_load_si512(const void* p), return *(const __m512i*)p)
JITFMHA_INTRINSIC(__m512, _mm512_maskz_loadu_ps(__mmask16 m, const void* p),
                  return __builtin_ia32_loadups512_mask((const float*)p, __v16sf{}, m))
JITFMHA_INTRINSIC(__m256i, _mm256_maskz_loadu_epi16(__mmask16 m, const void* p),
                  return (__m256i)__builtin_ia32_loaddquhi256_mask((const short*)p, __v16hi{}, m))

JITFMHA_INTRINSIC(void, _mm256_storeu_si256(__m256i* p, __m256i a), *(__m256i_u*)p = a)
JITFMHA_INTRINSIC(void, _mm256_store_si256(__m256i* p, __m256i a), *p = a)
JITFMHA_INTRINSIC(void, _mm512_storeu_ps(void* p, __m512 a), *(__m512_u*)p = a)
JITFMHA_INTRINSIC(void, _mm512_mask_storeu_ps(void* p, __mmask16 m, __m512 a),
                  __builtin_ia32_storeups512_mask((float*)p, a, m))
JITFMHA_INTRINSIC(void, _mm256_mask_storeu_epi16(void* p, __mmask16 m, __m256i a),
                  __builtin_ia32_storedquhi256_mask((short*)p, (__v16hi)a, m))

// ---- The same lanes as another type, and in all lanes one number

JITFMHA_INTRINSIC(__m512i, _mm512_castps_si512(__m512 a), return (__m512i)a)
JITFMHA_INTRINSIC(__m512, _mm512_castsi512_ps(__m512i a), return (__m512)a)
JITFMHA_INTRINSIC(__m512, _mm512_castps256_ps512(__m256 a), return __builtin_ia32_ps512_256ps(a))
JITFMHA_INTRINSIC(__m512, _mm512_set1_ps(float a),
                  return __m512{a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a})
JITFMHA_INTRINSIC(__m512i, _mm512_set1_epi32(int a),
                  return (__m512i)(__v16si{a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a}))
JITFMHA_INTRINSIC(__m512i, _mm512_set1_epi8(char a),
                  return (__m512i)(__v64qi{a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a,
                                           a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a,
                                           a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a,
                                           a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a}))
#define _mm512_setr_epi32(...) ((__m512i)(__v16si{__VA_ARGS__}))

// ---- Floats

JITFMHA_INTRINSIC(__m512, _mm512_add_ps(__m512 a, __m512 b), return a + b)
JITFMHA_INTRINSIC(__m512, _mm512_mul_ps(__m512 a, __m512 b), return a * b)
JITFMHA_INTRINSIC(__m512, _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c),
                  return __builtin_ia32_vfmaddps512_mask(a, b, c, JITFMHA_16, JITFMHA_ROUNDING))
JITFMHA_INTRINSIC(__m512, _mm512_fnmadd_ps(__m512 a, __m512 b, __m512 c),
                  return __builtin_ia32_vfnmaddps512_mask(a, b, c, JITFMHA_16, JITFMHA_ROUNDING))
JITFMHA_INTRINSIC(__m512, _mm512_max_ps(__m512 a, __m512 b),
                  return __builtin_ia32_maxps512_mask(a, b, _mm512_undefined_ps(), JITFMHA_16,
                                                      JITFMHA_ROUNDING))
JITFMHA_INTRINSIC(__m512, _mm512_min_ps(__m512 a, __m512 b),
                  return __builtin_ia32_minps512_mask(a, b, _mm512_undefined_ps(), JITFMHA_16,
                                                      JITFMHA_ROUNDING))
JITFMHA_INTRINSIC(__m512, _mm512_rcp14_ps(__m512 a),
                  return __builtin_ia32_rcp14ps512_mask(a, _mm512_undefined_ps(), JITFMHA_16))
JITFMHA_INTRINSIC(__m512, _mm512_maskz_scalef_ps(__mmask16 m, __m512 a, __m512 b),
                  return __builtin_ia32_scalefps512_mask(a, b, __v16sf{}, m, JITFMHA_ROUNDING))
#define _mm512_reduce_ps(a, mode) \
  ((__m512)__builtin_ia32_reduceps512_mask(a, mode, _mm512_undefined_ps(), JITFMHA_16))
#define _mm512_roundscale_ps(a, mode)                                                 \
  ((__m512)__builtin_ia32_rndscaleps_mask(a, mode, _mm512_undefined_ps(), JITFMHA_16, \
                                          JITFMHA_ROUNDING))

// ---- Masks

#define _mm512_mask_cmp_ps_mask(m, a, b, relation) \
  ((__mmask16)__builtin_ia32_cmpps512_mask(a, b, relation, m, JITFMHA_ROUNDING))
#define _mm512_cmp_ps_mask(a, b, relation) _mm512_mask_cmp_ps_mask(JITFMHA_16, a, b, relation)
JITFMHA_INTRINSIC(__mmask16, _mm512_testn_epi32_mask(__m512i a, __m512i b),
                  return __builtin_ia32_ptestnmd512((__v16si)a, (__v16si)b, JITFMHA_16))
JITFMHA_INTRINSIC(__m512, _mm512_mask_blend_ps(__mmask16 m, __m512 a, __m512 b),
                  return __builtin_ia32_blendmps_512_mask(a, b, m))
JITFMHA_INTRINSIC(__m512, _mm512_maskz_mov_ps(__mmask16 m, __m512 a),
                  return __builtin_ia32_movaps512_mask(a, __v16sf{}, m))

// ---- Integers

JITFMHA_INTRINSIC(__m512i, _mm512_add_epi32(__m512i a, __m512i b),
                  return (__m512i)((__v16su)a + (__v16su)b))
JITFMHA_INTRINSIC(__m512i, _mm512_mask_add_epi32(__m512i kept, __mmask16 m, __m512i a, __m512i b),
                  return (__m512i)__builtin_ia32_paddd512_mask((__v16si)a, (__v16si)b,
                                                               (__v16si)kept, m))
JITFMHA_INTRINSIC(__m512i, _mm512_and_si512(__m512i a, __m512i b),
                  return (__m512i)((__v16su)a & (__v16su)b))
JITFMHA_INTRINSIC(__m512i, _mm512_or_si512(__m512i a, __m512i b),
                  return (__m512i)((__v16su)a | (__v16su)b))
JITFMHA_INTRINSIC(__m512, _mm512_abs_ps(__m512 a),
                  return (__m512)_mm512_and_si512((__m512i)a, _mm512_set1_epi32(0x7fffffff)))
JITFMHA_INTRINSIC(__m512i, _mm512_mul_epu32(__m512i a, __m512i b),
                  return (__m512i)__builtin_ia32_pmuludq512_mask((__v16si)a, (__v16si)b,
                                                                 (__v8di)_mm512_undefined_ps(),
                                                                 __mmask8(-1)))
JITFMHA_INTRINSIC(__m512i, _mm512_subs_epu8(__m512i a, __m512i b),
                  return (__m512i)__builtin_ia32_psubusb512_mask((__v64qi)a, (__v64qi)b, __v64qi{},
                                                                 __mmask64(-1)))
#define _mm512_slli_epi32(a, bits)                                                            \
  ((__m512i)__builtin_ia32_pslldi512_mask((__v16si)(a), bits, (__v16si)_mm512_undefined_ps(), \
                                          JITFMHA_16))
#define _mm512_srli_epi32(a, bits)                                                            \
  ((__m512i)__builtin_ia32_psrldi512_mask((__v16si)(a), bits, (__v16si)_mm512_undefined_ps(), \
                                          JITFMHA_16))
#define _mm512_srli_epi64(a, bits)                                                          \
  ((__m512i)__builtin_ia32_psrlqi512_mask((__v8di)(a), bits, (__v8di)_mm512_undefined_ps(), \
                                          __mmask8(-1)))
#define _mm512_ternarylogic_epi32(a, b, c, table)                                             \
  ((__m512i)__builtin_ia32_pternlogd512_mask((__v16si)(a), (__v16si)(b), (__v16si)(c), table, \
                                             JITFMHA_16))

// ---- Conversions

JITFMHA_INTRINSIC(__m512, _mm512_cvtepi32_ps(__m512i a),
                  return __builtin_ia32_cvtdq2ps512_mask((__v16si)a, _mm512_undefined_ps(),
                                                         JITFMHA_16, JITFMHA_ROUNDING))
JITFMHA_INTRINSIC(__m512i, _mm512_cvtepu8_epi32(__m128i a),
                  return (__m512i)__builtin_ia32_pmovzxbd512_mask((__v16qi)a,
                                                                  (__v16si)_mm512_undefined_ps(),
                                                                  JITFMHA_16))
JITFMHA_INTRINSIC(__m512i, _mm512_cvtepu16_epi32(__m256i a),
                  return (__m512i)__builtin_ia32_pmovzxwd512_mask((__v16hi)a,
                                                                  (__v16si)_mm512_undefined_ps(),
                                                                  JITFMHA_16))
JITFMHA_INTRINSIC(__m256i, _mm512_cvtepi32_epi16(__m512i a),
                  return (__m256i)__builtin_ia32_pmovdw512_mask((__v16si)a,
                                                                (__v16hi)_mm256_undefined_si256(),
                                                                JITFMHA_16))
JITFMHA_INTRINSIC(__m512, _mm512_cvtph_ps(__m256i a),
                  return __builtin_ia32_vcvtph2ps512_mask((__v16hi)a, _mm512_undefined_ps(),
                                                          JITFMHA_16, JITFMHA_ROUNDING))
#define _mm512_cvtps_ph(a, mode)                                                         \
  ((__m256i)__builtin_ia32_vcvtps2ph512_mask(a, mode, (__v16hi)_mm256_undefined_si256(), \
                                             JITFMHA_16))

// ---- Lanes elsewhere

JITFMHA_INTRINSIC(__m512i, _mm512_unpacklo_epi16(__m512i a, __m512i b),
                  return (__m512i)__builtin_ia32_punpcklwd512_mask((__v32hi)a, (__v32hi)b,
                                                                   __v32hi{}, __mmask32(-1)))
JITFMHA_INTRINSIC(__m512i, _mm512_unpackhi_epi16(__m512i a, __m512i b),
                  return (__m512i)__builtin_ia32_punpckhwd512_mask((__v32hi)a, (__v32hi)b,
                                                                   __v32hi{}, __mmask32(-1)))
JITFMHA_INTRINSIC(__m512, _mm512_unpacklo_ps(__m512 a, __m512 b),
                  return __builtin_ia32_unpcklps512_mask(a, b, _mm512_undefined_ps(), JITFMHA_16))
JITFMHA_INTRINSIC(__m512, _mm512_unpackhi_ps(__m512 a, __m512 b),
                  return __builtin_ia32_unpckhps512_mask(a, b, _mm512_undefined_ps(), JITFMHA_16))
#define _mm512_shuffle_ps(a, b, lanes) \
  ((__m512)__builtin_ia32_shufps512_mask(a, b, lanes, _mm512_undefined_ps(), JITFMHA_16))
#define _mm512_shuffle_f32x4(a, b, quarters) \
  ((__m512)__builtin_ia32_shuf_f32x4_mask(a, b, quarters, _mm512_undefined_ps(), JITFMHA_16))
#define _mm512_mask_shuffle_epi32(kept, m, a, lanes) \
  ((__m512i)__builtin_ia32_pshufd512_mask((__v16si)(a), lanes, (__v16si)(kept), m))
#define _mm512_shuffle_epi32(a, lanes) \
  _mm512_mask_shuffle_epi32(_mm512_undefined_ps(), JITFMHA_16, a, lanes)
#define _mm512_insertf32x8(a, b, half) \
  ((__m512)__builtin_ia32_insertf32x8_mask(a, b, half, __v16sf{}, JITFMHA_16))
JITFMHA_INTRINSIC(__m512, _mm512_broadcast_f32x4(__m128 a),
                  return __builtin_ia32_broadcastf32x4_512(a, _mm512_undefined_ps(), JITFMHA_16))
JITFMHA_INTRINSIC(__m512, _mm512_broadcast_f32x8(__m256 a),
                  return __builtin_ia32_broadcastf32x8_512_mask(a, _mm512_undefined_ps(),
                                                                JITFMHA_16))
JITFMHA_INTRINSIC(__m512, _mm512_permutexvar_ps(__m512i from, __m512 a),
                  return __builtin_ia32_permvarsf512_mask(a, (__v16si)from, _mm512_undefined_ps(),
                                                          JITFMHA_16))
JITFMHA_INTRINSIC(__m512i, _mm512_permutexvar_epi16(__m512i from, __m512i a),
                  return (__m512i)__builtin_ia32_permvarhi512_mask((__v32hi)a, (__v32hi)from,
                                                                   __v32hi{}, __mmask32(-1)))
JITFMHA_INTRINSIC(__m512, _mm512_permutex2var_ps(__m512 a, __m512i from, __m512 b),
                  return __builtin_ia32_vpermt2varps512_mask((__v16si)from, a, b, JITFMHA_16))

// ---- Over all lanes

#define JITFMHA_REDUCED(a, operation256, operation128)                                    \
  const __v4df none = (__v4df)_mm256_undefined_si256();                                   \
  const __m256 high = (__m256)__builtin_ia32_extractf64x4_mask((__v8df)a, 1, none, 0xff); \
  const __m256 low = (__m256)__builtin_ia32_extractf64x4_mask((__v8df)a, 0, none, 0xff);  \
  const __m256 half = operation256(high, low);                                            \
  const __m128 upper = __builtin_ia32_vextractf128_ps256(half, 1);                        \
  const __m128 lower = __builtin_ia32_vextractf128_ps256(half, 0);                        \
  const __m128 quarter = operation128(upper, lower);                                      \
  const __m128 two = operation128(quarter, __builtin_shuffle(quarter, __v4si{2, 3, 0, 1}))
#define JITFMHA_SUM(a, b) ((a) + (b))
JITFMHA_INTRINSIC(float, _mm512_reduce_add_ps(__m512 a),
                  JITFMHA_REDUCED(a, JITFMHA_SUM, JITFMHA_SUM);
                  return two[0] + two[1])
JITFMHA_INTRINSIC(float, _mm512_reduce_max_ps(__m512 a),
                  JITFMHA_REDUCED(a, __builtin_ia32_maxps256, __builtin_ia32_maxps);
                  return __builtin_ia32_maxps(two, __builtin_shuffle(two, __v4si{1, 0, 1, 0}))[0])

// ---- Pairs of bf16

#if defined(__AVX512BF16__)
#if __GNUC__ == 12
typedef short __m512bh __attribute__((__vector_size__(64), __may_alias__));
#define JITFMHA_TWO_TO_BF16 __builtin_ia32_cvtne2ps2bf16_v32hi
#else
typedef __bf16 __m512bh __attribute__((__vector_size__(64), __may_alias__));
#define JITFMHA_TWO_TO_BF16 __builtin_ia32_cvtne2ps2bf16_v32bf
#endif
JITFMHA_INTRINSIC(__m512bh, _mm512_cvtne2ps_pbh(__m512 a, __m512 b),
                  return (__m512bh)JITFMHA_TWO_TO_BF16(a, b))
JITFMHA_INTRINSIC(__m512, _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b),
                  return __builtin_ia32_dpbf16ps_v16sf(sums, a, b))
#endif

#elif defined(__AVX2__)

typedef char __v32qi __attribute__((__vector_size__(32)));
typedef short __v8hi __attribute__((__vector_size__(16)));
typedef int __v8si __attribute__((__vector_size__(32)));
typedef unsigned __v8su __attribute__((__vector_size__(32)));
typedef long long __v4di __attribute__((__vector_size__(32)));

// ---- Memory

JITFMHA_INTRINSIC(__m128i, _mm_loadl_epi64(const __m128i* p),
                  return __m128i{(*(const __m128i_u*)p)[0], 0})
JITFMHA_INTRINSIC(void, _mm_storeu_si128(__m128i* p, __m128i a), *(__m128i_u*)p = a)
JITFMHA_INTRINSIC(void, _mm256_storeu_ps(float* p, __m256 a), *(__m256_u*)p = a)
JITFMHA_INTRINSIC(__m256, _mm256_broadcast_ps(const __m128* p),
                  return __builtin_ia32_vbroadcastf128_ps256(p))

// ---- The same lanes as another type, and in all lanes one number

JITFMHA_INTRINSIC(__m256i, _mm256_castps_si256(__m256 a), return (__m256i)a)
JITFMHA_INTRINSIC(__m256, _mm256_castsi256_ps(__m256i a), return (__m256)a)
JITFMHA_INTRINSIC(__m128, _mm256_castps256_ps128(__m256 a), return __builtin_ia32_ps_ps256(a))
JITFMHA_INTRINSIC(__m128i, _mm256_castsi256_si128(__m256i a),
                  return (__m128i)__builtin_ia32_si_si256((__v8si)a))
JITFMHA_INTRINSIC(__m256i, _mm256_setzero_si256(), return __m256i{})
JITFMHA_INTRINSIC(__m256, _mm256_set1_ps(float a), return __m256{a, a, a, a, a, a, a, a})
JITFMHA_INTRINSIC(__m256i, _mm256_set1_epi32(int a),
                  return (__m256i)(__v8si{a, a, a, a, a, a, a, a}))
JITFMHA_INTRINSIC(__m256i, _mm256_set1_epi8(char a),
                  return (__m256i)(__v32qi{a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a,
                                           a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a}))
#define _mm256_setr_epi32(...) ((__m256i)(__v8si{__VA_ARGS__}))

// ---- Floats

JITFMHA_INTRINSIC(__m128, _mm_add_ps(__m128 a, __m128 b), return a + b)
JITFMHA_INTRINSIC(__m128, _mm_add_ss(__m128 a, __m128 b), return __builtin_ia32_addss(a, b))
JITFMHA_INTRINSIC(__m128, _mm_max_ps(__m128 a, __m128 b), return __builtin_ia32_maxps(a, b))
JITFMHA_INTRINSIC(__m128, _mm_max_ss(__m128 a, __m128 b), return __builtin_ia32_maxss(a, b))
JITFMHA_INTRINSIC(float, _mm_cvtss_f32(__m128 a), return a[0])
JITFMHA_INTRINSIC(__m256, _mm256_add_ps(__m256 a, __m256 b), return a + b)
JITFMHA_INTRINSIC(__m256, _mm256_mul_ps(__m256 a, __m256 b), return a * b)
JITFMHA_INTRINSIC(__m256, _mm256_div_ps(__m256 a, __m256 b), return a / b)
JITFMHA_INTRINSIC(__m256, _mm256_fmadd_ps(__m256 a, __m256 b, __m256 c),
                  return __builtin_ia32_vfmaddps256(a, b, c))
JITFMHA_INTRINSIC(__m256, _mm256_max_ps(__m256 a, __m256 b), return __builtin_ia32_maxps256(a, b))
JITFMHA_INTRINSIC(__m256, _mm256_min_ps(__m256 a, __m256 b), return __builtin_ia32_minps256(a, b))
JITFMHA_INTRINSIC(__m256, _mm256_hadd_ps(__m256 a, __m256 b), return __builtin_ia32_haddps256(a, b))
JITFMHA_INTRINSIC(__m256, _mm256_and_ps(__m256 a, __m256 b), return __builtin_ia32_andps256(a, b))
JITFMHA_INTRINSIC(__m256, _mm256_andnot_ps(__m256 a, __m256 b),
                  return __builtin_ia32_andnps256(a, b))
JITFMHA_INTRINSIC(__m256, _mm256_blendv_ps(__m256 a, __m256 b, __m256 m),
                  return __builtin_ia32_blendvps256(a, b, m))
#define _mm256_cmp_ps(a, b, relation) ((__m256)__builtin_ia32_cmpps256(a, b, relation))
#define _mm256_round_ps(a, mode) ((__m256)__builtin_ia32_roundps256(a, mode))

// ---- Integers

JITFMHA_INTRINSIC(__m256i, _mm256_add_epi32(__m256i a, __m256i b),
                  return (__m256i)((__v8su)a + (__v8su)b))
JITFMHA_INTRINSIC(__m256i, _mm256_and_si256(__m256i a, __m256i b), return a & b)
JITFMHA_INTRINSIC(__m256i, _mm256_xor_si256(__m256i a, __m256i b), return a ^ b)
JITFMHA_INTRINSIC(__m256i, _mm256_cmpeq_epi32(__m256i a, __m256i b),
                  return (__m256i)((__v8si)a == (__v8si)b))
JITFMHA_INTRINSIC(__m256i, _mm256_mul_epu32(__m256i a, __m256i b),
                  return (__m256i)__builtin_ia32_pmuludq256((__v8si)a, (__v8si)b))
JITFMHA_INTRINSIC(__m256i, _mm256_subs_epu8(__m256i a, __m256i b),
                  return (__m256i)__builtin_ia32_psubusb256((__v32qi)a, (__v32qi)b))
#define _mm256_slli_epi32(a, bits) ((__m256i)__builtin_ia32_pslldi256((__v8si)(a), bits))
#define _mm256_srli_epi32(a, bits) ((__m256i)__builtin_ia32_psrldi256((__v8si)(a), bits))
#define _mm256_slli_epi64(a, bits) ((__m256i)__builtin_ia32_psllqi256((__v4di)(a), bits))
#define _mm256_srli_epi64(a, bits) ((__m256i)__builtin_ia32_psrlqi256((__v4di)(a), bits))
#define _mm256_blend_epi32(a, b, lanes) \
  ((__m256i)__builtin_ia32_pblendd256((__v8si)(a), (__v8si)(b), lanes))

// ---- Conversions

JITFMHA_INTRINSIC(__m256, _mm256_cvtepi32_ps(__m256i a),
                  return __builtin_ia32_cvtdq2ps256((__v8si)a))
JITFMHA_INTRINSIC(__m256i, _mm256_cvtps_epi32(__m256 a),
                  return (__m256i)__builtin_ia32_cvtps2dq256(a))
JITFMHA_INTRINSIC(__m256i, _mm256_cvtepu8_epi32(__m128i a),
                  return (__m256i)__builtin_ia32_pmovzxbd256((__v16qi)a))
JITFMHA_INTRINSIC(__m256i, _mm256_cvtepu16_epi32(__m128i a),
                  return (__m256i)__builtin_ia32_pmovzxwd256((__v8hi)a))
JITFMHA_INTRINSIC(__m256, _mm256_cvtph_ps(__m128i a), return __builtin_ia32_vcvtph2ps256((__v8hi)a))
#define _mm256_cvtps_ph(a, mode) ((__m128i)__builtin_ia32_vcvtps2ph256(a, mode))
JITFMHA_INTRINSIC(__m256i, _mm256_packus_epi32(__m256i a, __m256i b),
                  return (__m256i)__builtin_ia32_packusdw256((__v8si)a, (__v8si)b))

// ---- Lanes elsewhere

JITFMHA_INTRINSIC(__m128, _mm_movehdup_ps(__m128 a), return __builtin_ia32_movshdup(a))
JITFMHA_INTRINSIC(__m128, _mm_movehl_ps(__m128 a, __m128 b), return __builtin_ia32_movhlps(a, b))
#define _mm256_extractf128_ps(a, half) ((__m128)__builtin_ia32_vextractf128_ps256(a, half))
JITFMHA_INTRINSIC(__m256, _mm256_unpacklo_ps(__m256 a, __m256 b),
                  return __builtin_ia32_unpcklps256(a, b))
JITFMHA_INTRINSIC(__m256, _mm256_unpackhi_ps(__m256 a, __m256 b),
                  return __builtin_ia32_unpckhps256(a, b))
#define _mm256_shuffle_ps(a, b, lanes) ((__m256)__builtin_ia32_shufps256(a, b, lanes))
#define _mm256_permute2f128_ps(a, b, halves) ((__m256)__builtin_ia32_vperm2f128_ps256(a, b, halves))
#define _mm256_permute4x64_epi64(a, parts) ((__m256i)__builtin_ia32_permdi256((__v4di)(a), parts))
JITFMHA_INTRINSIC(__m256, _mm256_permutevar8x32_ps(__m256 a, __m256i from),
                  return __builtin_ia32_permvarsf256(a, (__v8si)from))

#endif

#else

#include <immintrin.h>

#endif
