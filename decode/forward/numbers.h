// Numbers in bf16 and fp32 as vectors, and what is made of them.

#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#ifdef __AVX2__
#include <immintrin.h>
#endif

typedef uint16_t bf16;
typedef float F16 __attribute__((vector_size(64), aligned(4)));
typedef float F8 __attribute__((vector_size(32)));
typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I16 __attribute__((vector_size(64), aligned(4)));
typedef uint32_t U16 __attribute__((vector_size(64), aligned(4)));
typedef uint16_t B16 __attribute__((vector_size(32), aligned(2)));
typedef uint32_t U8 __attribute__((vector_size(32)));
typedef uint16_t B8 __attribute__((vector_size(16)));

// What lies there as a vector. A copy of 64 bytes goes by the stack in two halves, where compilers are tuned
// for vectors of 32, and a load of both waits until these are written.
template <typename V>
static inline V read(const void *x) {
    typedef V Lying __attribute__((aligned(1), may_alias));
    return *(const Lying *)x;
}
template <typename V>
static inline void write(void *to, V x) {
    typedef V Lying __attribute__((aligned(1), may_alias));
    *(Lying *)to = x;
}
static inline float wide(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float made;
    memcpy(&made, &bits, 4);
    return made;
}
static inline bf16 narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7FC0;
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
static inline F16 wide16(const bf16 *x) {
#if defined(__AVX512F__)  // of which compilers make six instructions, and of the next ten
    return (F16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(read<__m256i>(x)), 16);
#elif defined(__AVX2__)
    __m256i half[2];
    for (int i = 0; i < 2; i++)
        half[i] = _mm256_slli_epi32(
            _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(x + 8 * i))), 16);
    F16 made;
    memcpy(&made, half, 64);
    return made;
#else
    return (F16)(__builtin_convertvector(read<B16>(x), U16) << 16);
#endif
}
static inline B16 narrow16(F16 x) {
    U16 bits = (U16)x;
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    bits = x == x ? bits : (U16){} + 0x7FC0;
    return __builtin_convertvector(bits, B16);
}
static inline void store16(bf16 *to, F16 x) {
    write(to, narrow16(x));
}
static inline void store8(bf16 *to, F8 x) {
    U8 bits = (U8)x;
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    bits = x == x ? bits : (U8){} + 0x7FC0;
    write(to, __builtin_convertvector(bits, B8));
}
static inline F4 fold(F8 x) {
    return __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
}
static inline F4 fold(F16 x) {
    F8 half = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
              __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    return fold(half);
}
static inline float sum16(F16 x) {
    F4 part = fold(x);
    return (part[0] + part[2]) + (part[1] + part[3]);
}
// e^x to 2e-7; below -87 what -87 gives, and NaN of NaN.
static inline F16 exp16(F16 x) {
    const F16 magic = (F16){} + 12582912.0f, least = (F16){} - 87.0f, most = (F16){} + 88.0f;
    x = x < least ? least : x;
    x = x > most ? most : x;
    F16 z = x * 1.44269504f, shifted = z + magic, f = z - (shifted - magic);
    I16 power = (I16)shifted - (I16)magic;
    F16 p = (F16){} + 1.5403530e-4f;
    for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 0.24022651f, 0.69314718f, 1.0f})
        p = p * f + c;
    return p * (F16)((power + 127) << 23);
}
static inline F16 sigmoid16(F16 x) { return 1.0f / (exp16(-x) + 1.0f); }
static inline F16 tanh16(F16 x) { return 2.0f * sigmoid16(2.0f * x) - 1.0f; }

// Numbers of a vector, as pairs: the low halves are the even ones. Read once, not in each product.
template <typename V>
static inline V pairs(const bf16 *x) {
    V made = read<V>(x);
#ifdef __AVX512F__
    asm("" : "+v"(made));
#endif
    return made;
}
// 32 products of bf16, added to a sum of 16 parts.
static inline F16 dot32(F16 sum, U16 x, U16 y) {
#ifdef __AVX512BF16__
    return (F16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
#else
    sum += (F16)(x << 16) * (F16)(y << 16);
    return sum + (F16)(x & 0xFFFF0000u) * (F16)(y & 0xFFFF0000u);
#endif
}
#ifdef __AVX512F__
// Of sixteen rows of a matrix 32 inputs, transposed: 16 vectors, `apart` from each other, each of one pair
// of inputs of all rows.
static inline void transposed16(const bf16 *x, int64_t step, __m512i *to, int64_t apart) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(x + i * step);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512i even = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
        __m512i odd = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xDD);
        __m512i even2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        __m512i odd2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xDD);
        _mm512_storeu_si512(to + j * apart, _mm512_shuffle_i32x4(even, even2, 0x88));
        _mm512_storeu_si512(to + (4 + j) * apart, _mm512_shuffle_i32x4(odd, odd2, 0x88));
        _mm512_storeu_si512(to + (8 + j) * apart, _mm512_shuffle_i32x4(even, even2, 0xDD));
        _mm512_storeu_si512(to + (12 + j) * apart, _mm512_shuffle_i32x4(odd, odd2, 0xDD));
    }
}
#endif
#ifdef __AVX512BF16__
static inline __m512bh pair_of(const bf16 *x) {
    int32_t both;
    memcpy(&both, x, 4);
    return (__m512bh)_mm512_set1_epi32(both);
}
#endif
