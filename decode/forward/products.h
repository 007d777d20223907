// Products with fixed matrices in bf16, sums in fp32, on a CPU: of few tokens on the weights as they lie or
// compressed, of many by tiles or transposed. A token's result doesn't depend on which others come with it.

#include "crew.h"
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

typedef uint16_t bf16;
typedef float F16 __attribute__((vector_size(64), aligned(4)));
typedef float F8 __attribute__((vector_size(32)));
typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I16 __attribute__((vector_size(64), aligned(4)));
typedef uint32_t U16 __attribute__((vector_size(64), aligned(4)));
typedef uint16_t B16 __attribute__((vector_size(32), aligned(2)));
typedef uint32_t U8 __attribute__((vector_size(32)));
typedef uint32_t U4 __attribute__((vector_size(16)));
typedef uint16_t B4 __attribute__((vector_size(8)));

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
#if defined(__AVX2__) && !defined(__AVX512F__)  // of which compilers make ten instructions
    __m256i half[2];
    for (int i = 0; i < 2; i++)
        half[i] = _mm256_slli_epi32(
            _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(x + 8 * i))), 16);
    F16 made;
    memcpy(&made, half, 64);
    return made;
#else
    return (F16)(__builtin_convertvector(*(const B16 *)x, U16) << 16);
#endif
}
static inline B16 narrow16(F16 x) {
    U16 bits = (U16)x;
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    bits = x == x ? bits : (U16){} + 0x7FC0;
    return __builtin_convertvector(bits, B16);
}
static inline void store16(bf16 *to, F16 x) {
    B16 made = narrow16(x);
    memcpy(to, &made, 32);
}
static inline B4 narrow4(F4 x) {
    U4 bits = (U4)x;
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    bits = x == x ? bits : (U4){} + 0x7FC0;
    return __builtin_convertvector(bits, B4);
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
// The sums of four vectors.
template <typename V>
static inline F4 sums(const V *x) {
    F4 a = fold(x[0]), b = fold(x[1]), c = fold(x[2]), d = fold(x[3]);
    F4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
    F4 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) +
           __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
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

// Numbers of a vector, as pairs: the low halves are the even ones. Read once, not in each product.
template <typename V>
static inline V pairs(const bf16 *x) {
    V made;
    memcpy(&made, x, sizeof made);
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

// Four outputs of M tokens, from the parts of their sums.
template <int M, typename V>
static void put(const V (*sum)[4], const bf16 *bias, bf16 *y, int64_t o, int64_t step) {
    for (int m = 0; m < M; m++) {
        F4 made = sums(sum[m]);
        for (int r = 0; r < 4 && M < 3; r++)  // faster one by one, in a body's layers
            y[m * step + o + r] = narrow(made[r] + (bias ? wide(bias[o + r]) : 0));
        if (M < 3) continue;
        if (bias)
            for (int r = 0; r < 4; r++) made[r] += wide(bias[o + r]);
        B4 narrower = narrow4(made);
        memcpy(y + m * step + o, &narrower, sizeof narrower);
    }
}
#include "compressed.h"

// Four rows after another of a matrix as it lies, R of them at a time, by vectors. What is read of a token
// serves four rows, side by side; so rows are fetched ahead in the order in which they lie, as far as half
// of the nearest cache holds: into the second one takes a tenth to a third longer.
const int64_t AHEAD = 7 * 1024;  // numbers
struct Lying {
    static const int VECTORS = 1;
    const bf16 *from;
    int64_t in;
    inline void begin() {}
    template <int R, typename V>
    inline void take(V (*own)[R], int64_t i, int first, bool fetch) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++)
            if (fetch && i % 32 == 0) __builtin_prefetch(from + AHEAD + 4 * i + 32 * r);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) own[0][r] = pairs<V>(from + (first + r) * in + i);
    }
    inline void end() { from += 4 * in; }
};
// `out` outputs of M tokens.
template <int M, class Rows>
static void rows(Rows w, const bf16 *bias, const bf16 *x, bf16 *y, int64_t in, int64_t out,
                 int64_t step) {
    const int V = Rows::VECTORS;
    for (int64_t o = 0; o < out; o += 4) {
        F16 part[M][4] = {}, sum[M][4];  // parts stay in registers
        int64_t i = 0;
        for (w.begin(); i + 32 * V <= in; i += 32 * V) {
            U16 own[V][4];
            w.take(own, i, 0, true);
#pragma GCC unroll 2
            for (int v = 0; v < V; v++)
#pragma GCC unroll 6
                for (int m = 0; m < M; m++) {
                    U16 given = pairs<U16>(x + m * in + i + 32 * v);
#pragma GCC unroll 4
                    for (int r = 0; r < 4; r++) part[m][r] = dot32(part[m][r], own[v][r], given);
                }
        }
        if constexpr (V == 1)
            for (; i < in; i += 16)
#pragma GCC unroll 6
                for (int m = 0; m < M; m++)
#pragma GCC unroll 4
                    for (int r = 0; r < 4; r++)
                        part[m][r] += wide16(w.from + r * in + i) * wide16(x + m * in + i);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) sum[m][r] = part[m][r];
        put<M>(sum, bias, y, o, step);
        w.end();
    }
}
#ifndef __AVX512F__
// As `rows`, where vectors are half as wide, and 16: R rows of the matrix and M tokens at a time, so
// that their sums, what is multiplied, and nothing else are in them. Tokens are in fp32, of each 16
// inputs the even ones first, as shifts and masks give a matrix's. fetch: whether to fetch rows ahead.
template <int M, int R, class Rows>
static void rows8(const Rows &w, const bf16 *bias, const float *x, bf16 *y, int64_t in, int64_t step,
                  bool fetch) {
    const int V = Rows::VECTORS;
    F8 sum[M][4];
    for (int first = 0; first < 4; first += R) {
        Rows own = w;
        F8 part[M][R] = {}, wider[R], given;
        own.begin();
        for (int64_t i = 0; i < in; i += 16 * V) {
            U8 pairs[V][R];
            own.take(pairs, i, first, fetch && !first);
#pragma GCC unroll 2
            for (int v = 0; v < V; v++)
#pragma GCC unroll 2
                for (int odd = 0; odd < 2; odd++) {
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++)
                        wider[r] = (F8)(odd ? pairs[v][r] & 0xFFFF0000u : pairs[v][r] << 16);
#pragma GCC unroll 6
                    for (int m = 0; m < M; m++) {
                        memcpy(&given, x + m * in + i + 16 * v + 8 * odd, 32);
#ifdef __AVX2__
                        asm("" : "+x"(given));  // read once, not in each product
#endif
#pragma GCC unroll 4
                        for (int r = 0; r < R; r++) part[m][r] += wider[r] * given;
                    }
                }
        }
#pragma GCC unroll 6
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sum[m][first + r] = part[m][r];
    }
    put<M>(sum, bias, y, 0, step);
}
template <class Rows>
static void eights(const Rows &w, const bf16 *bias, const float *x, bf16 *y, int64_t tokens, int64_t in,
                   int64_t step) {
    void (*const by[])(const Rows &, const bf16 *, const float *, bf16 *, int64_t, int64_t, bool) = {
        rows8<1, 4>, rows8<2, 4>, rows8<3, 2>, rows8<4, 2>, rows8<5, 2>, rows8<6, 2>};
    int64_t blocks = (tokens + 5) / 6;
    for (int64_t block = 0; block < blocks; block++) {
        int64_t t = block * tokens / blocks, m = (block + 1) * tokens / blocks - t;
        by[m - 1](w, bias, x + t * in, y + t * step, in, step, !block);
    }
}
static void by_eights(const bf16 *w, const Compressed &form, const bf16 *bias, const bf16 *x, bf16 *y,
                      int64_t tokens, int64_t in, int64_t first, int64_t last, int64_t step) {
    static thread_local std::vector<float> given;
    given.resize(tokens * in);
    for (int64_t i = 0; i < tokens * in; i += 16)
        for (int j = 0; j < 8; j++)
            for (int odd = 0; odd < 2; odd++) given[i + 8 * odd + j] = wide(x[i + 2 * j + odd]);
    for (int64_t o = first; o < last; o += 4) {
        const bf16 *own = bias ? bias + o : bias;
        if (!form.bytes) eights(Lying{w + o * in, in}, own, given.data(), y + o, tokens, in, step);
#ifdef COMPRESSES
        if (form.bytes) eights(Short(form, o), own, given.data(), y + o, tokens, in, step);
#endif
    }
}
#endif
#ifdef __AVX512F__
// `out` rows of the matrix by any number of tokens.
template <class Rows>
static void sixteens(const Rows &w, const bf16 *bias, const bf16 *x, bf16 *y, int64_t tokens, int64_t in,
                     int64_t out, int64_t step) {
    void (*const by[])(Rows, const bf16 *, const bf16 *, bf16 *, int64_t, int64_t, int64_t) = {
        rows<1>, rows<2>, rows<3>, rows<4>, rows<5>, rows<6>};
    int64_t blocks = (tokens + 5) / 6;
    for (int64_t block = 0; block < blocks; block++) {
        int64_t t = block * tokens / blocks, m = (block + 1) * tokens / blocks - t;
        by[m - 1](w, bias, x + t * in, y + t * step, in, out, step);
    }
}
#endif
// Whether products are by tiles (AMX), which a system grants a process on demand.
extern "C" int64_t tiles() {
#ifdef TILES
    static const int64_t granted = !syscall(SYS_arch_prctl, 0x1023, 18);
    return granted;
#else
    return 0;
#endif
}
#ifdef __AVX512BF16__
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
        to[j * apart] = _mm512_shuffle_i32x4(even, even2, 0x88);
        to[(4 + j) * apart] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
        to[(8 + j) * apart] = _mm512_shuffle_i32x4(even, even2, 0xDD);
        to[(12 + j) * apart] = _mm512_shuffle_i32x4(odd, odd2, 0xDD);
    }
}
#endif
#ifdef TILES
// The eight tiles, of 16 rows: 0 to 3 sums of 16 outputs and n tokens, 4 and 5 of 16 rows of a matrix
// and 32 inputs, 6 and 7 of n tokens and 16 pairs of inputs.
struct Shapes {
    uint8_t palette = 1, start = 0, kept[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    Shapes(int64_t n) {
        for (int i = 0; i < 8; i++) bytes[i] = i / 2 == 2 ? 64 : 4 * n;
    }
};
const int64_t SPARSE = 8;  // tokens that are turned one by one
// Pairs of inputs of each n tokens side by side, [blocks, in / 2, n], the last block's rest zeros; n: 16, or
// as many as there are.
static const char *paired(const bf16 *x, int64_t tokens, int64_t in, int64_t n) {
    static thread_local std::vector<__m512i> made;
    const uint32_t *pairs = (const uint32_t *)x;
    if (n == 1) return (const char *)x;
    made.resize((tokens + 15) / 16 * in / 2);
    uint32_t *few = (uint32_t *)made.data();
    for (int64_t i = 0; i < in / 2 && n < 16; i++)
        for (int64_t t = 0; t < n; t++) few[i * n + t] = pairs[t * in / 2 + i];
    __m512i *to = made.data();
    for (int64_t t = 0; t < tokens && n == 16; t += 16)
        for (int64_t i = 0; i < in; i += 32, to += 16) {
            if (tokens - t >= 16) {
                transposed16(x + t * in + i, in, to, 1);
                continue;
            }
            bf16 rest[16 * 32] = {};
            for (int64_t r = 0; r < tokens - t; r++) memcpy(rest + 32 * r, x + (t + r) * in + i, 64);
            transposed16(rest, 32, to, 1);
        }
    return (const char *)made.data();
}
// Sixteen outputs of some tokens, from the sums of theirs and others, [16, 16].
static void put16(const float *sums, const bf16 *bias, bf16 *y, int64_t tokens, int64_t step) {
    const __m512i each = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i of_tokens[16];
    for (int64_t t = 0; t < tokens && tokens <= SPARSE; t++)
        of_tokens[t] = _mm512_i32gather_epi32(_mm512_slli_epi32(each, 4), sums + t, 4);
    if (tokens > SPARSE) transposed16((const bf16 *)sums, 32, of_tokens, 1);
    F16 more = bias ? wide16(bias) : (F16){};
    for (int64_t t = 0; t < tokens; t++) store16(y + t * step, (F16)of_tokens[t] + more);
}
// As `product`, of whole sixteens of outputs and 32s of inputs. A tile is read as the matrix lies and
// costs as much for one token as for sixteen: of the matrix two at a time, of tokens likewise.
static void by_tiles(const bf16 *w, const bf16 *bias, const bf16 *x, bf16 *y, int64_t tokens,
                     int64_t in, int64_t out, int64_t step) {
    int64_t n = tokens > SPARSE ? 16 : tokens, line = 4 * n;
    alignas(64) float sums[4][256];
    Shapes shapes(n);
    const char *pairs = paired(x, tokens, in, n);
    _tile_loadconfig(&shapes);
    for (int64_t o = 0; o < out; o += 32, w += 32 * in)
        for (int64_t t = 0; t < tokens; t += 32) {
            bool more = o + 16 < out, both = t + 16 < tokens;
            const char *here = pairs + 2 * t * in, *next = here + 32 * in;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t i = 0; i < in; i += 32) {
#pragma GCC unroll 32
                for (int r = 0; r < 32 && !t; r++)
                    __builtin_prefetch(w + 32 * in + 32 * (i + r), 0, 2);
                _tile_loadd(4, w + i, 2 * in);
                _tile_loadd(6, here + i / 2 * line, line);
                _tile_dpbf16ps(0, 4, 6);
                if (more) {
                    _tile_loadd(5, w + 16 * in + i, 2 * in);
                    _tile_dpbf16ps(2, 5, 6);
                }
                if (both) {
                    _tile_loadd(7, next + i / 2 * line, line);
                    _tile_dpbf16ps(1, 4, 7);
                    if (more) _tile_dpbf16ps(3, 5, 7);
                }
            }
            _tile_stored(0, sums[0], 64);
            _tile_stored(1, sums[1], 64);
            _tile_stored(2, sums[2], 64);
            _tile_stored(3, sums[3], 64);
            for (int part = 0; part < 4; part++) {
                int64_t from = t + 16 * (part % 2), at = o + part / 2 * 16, left = tokens - from;
                if (left > 0 && at < out)
                    put16(sums[part], bias ? bias + at : bias, y + from * step + at,
                          left < 16 ? left : 16, step);
            }
        }
    _tile_release();
}
#endif
#ifdef __AVX512BF16__
static inline __m512bh pair_of(const bf16 *x) {
    int32_t both;
    memcpy(&both, x, 4);
    return (__m512bh)_mm512_set1_epi32(both);
}
// As `rows`, of many tokens: 32 outputs at a time, transposed, which stay in the nearest caches while the
// tokens go by, M at a time. Each lane that `rows` sums is made alone, lanes are added as `sums` does.
template <int M>
static void transposed_rows(const __m512i *w, const bf16 *bias, const bf16 *x, bf16 *y, int64_t in,
                            int64_t step) {
    const int lanes[8] = {0, 4, 2, 6, 1, 5, 3, 7};
    F16 held[4][2][M];  // sums of 2, 4, 8 and all lanes; those that wait for the next as many
    int64_t apart = in / 32 + 1;
    for (int n = 0; n < 8; n++) {
        const __m512i *from = w + lanes[n] * apart;
        const bf16 *pairs = x + 2 * lanes[n];
        __m512 part[2][2][M] = {};  // of a lane and the eighth after it
        for (int64_t i = 0; i < in / 32; i++)
#pragma GCC unroll 2
            for (int lane = 0; lane < 2; lane++)
#pragma GCC unroll 6
                for (int m = 0; m < M; m++) {
                    __m512bh pair = pair_of(pairs + m * in + 32 * i + 16 * lane);
#pragma GCC unroll 2
                    for (int half = 0; half < 2; half++)
                        part[lane][half][m] = _mm512_dpbf16_ps(
                            part[lane][half][m],
                            (__m512bh)from[(16 * half + 8 * lane) * apart + i], pair);
                }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
#pragma GCC unroll 6
            for (int m = 0; m < M; m++) {
                F16 sum = (F16)part[0][half][m] + (F16)part[1][half][m];
                int level = 0;
                for (; n >> level & 1; level++) sum = held[level][half][m] + sum;
                held[level][half][m] = sum;
            }
    }
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) {
            F16 made = held[3][half][m];
            if (bias) made += wide16(bias + 16 * half);
            store16(y + m * step + 16 * half, made);
        }
}
static void by_columns(const bf16 *w, const bf16 *bias, const bf16 *x, bf16 *y, int64_t tokens,
                       int64_t in, int64_t out, int64_t step) {
    void (*const by[])(const __m512i *, const bf16 *, const bf16 *, bf16 *, int64_t, int64_t) = {
        transposed_rows<1>, transposed_rows<2>, transposed_rows<3>, transposed_rows<4>,
        transposed_rows<5>, transposed_rows<6>};
    static thread_local std::vector<__m512i> columns;
    int64_t blocks = (tokens + 5) / 6, apart = in / 32 + 1;  // odd mostly: lines of caches of their own
    columns.resize(32 * apart);
    for (int64_t o = 0; o < out; o += 32, w += 32 * in, bias += bias ? 32 : 0) {
        for (int64_t i = 0; i < in / 32; i++)
            for (int half = 0; half < 2; half++) {
                const bf16 *from = w + 16 * half * in + 32 * i;
                for (int r = 0; r < 16; r++) __builtin_prefetch(from + (32 + r) * in, 0, 2);
                transposed16(from, in, &columns[16 * half * apart + i], apart);
            }
        for (int64_t block = 0; block < blocks; block++) {
            int64_t t = block * tokens / blocks, m = (block + 1) * tokens / blocks - t;
            by[m - 1](columns.data(), bias, x + t * in, y + t * step + o, in, step);
        }
    }
}
#endif
// Outputs first to last - 1, of which four divides the number, in groups that stay in the nearest cache
// while the tokens go by.
static void outputs(const bf16 *w, const Compressed &form, const bf16 *bias, const bf16 *x, bf16 *y,
                    int64_t tokens, int64_t in, int64_t first, int64_t last, int64_t step) {
    auto own = [&](int64_t o) { return bias ? bias + o : bias; };
#ifndef __AVX512F__
    return by_eights(w, form, bias, x, y, tokens, in, first, last, step);
#else
#ifdef TILES
    if (int64_t whole = (last - first) / 16 * 16; whole && in % 32 == 0 && tiles()) {
        by_tiles(w + first * in, own(first), x, y + first, tokens, in, whole, step);
        first += whole;
    }
#endif
#ifdef __AVX512BF16__
    // To transpose costs the less the more tokens there are, and the more the longer rows lie apart.
    if (int64_t whole = (last - first) / 32 * 32; tokens >= 16 + in / 32 && in % 32 == 0) {
        by_columns(w + first * in, own(first), x, y + first, tokens, in, whole, step);
        first += whole;
    }
#endif
    for (int64_t o = first, group = tokens > 6 ? 32 : last - first; o < last; o += group) {
        int64_t some = group < last - o ? group : last - o;
        if (!form.bytes) sixteens(Lying{w + o * in, in}, own(o), x, y + o, tokens, in, some, step);
#ifdef COMPRESSES
        if (form.bytes) sixteens(Short(form, o), own(o), x, y + o, tokens, in, some, step);
#endif
    }
#endif
}
// y[t, o] = w[o] . x[t] + bias[o], with `step` numbers between the rows of y. Outputs that four doesn't
// divide one by one.
static void product(const bf16 *w, const bf16 *bias, const bf16 *x, bf16 *y, int64_t tokens,
                    int64_t in, int64_t out, int64_t step) {
    for (; out % 4; out--)
        for (int64_t t = 0; t < tokens; t++) {
            F16 sum = (F16){};
            for (int64_t i = 0; i < in; i += 16)
                sum += wide16(w + (out - 1) * in + i) * wide16(x + t * in + i);
            y[t * step + out - 1] = narrow(sum16(sum) + (bias ? wide(bias[out - 1]) : 0));
        }
    std::shared_lock<std::shared_mutex> lock;
    Compressed form = compressed_of(w, in, out, lock);
    split((out + 31) / 32, in * out, [&](int64_t from, int64_t to) {
        outputs(w, form, bias, x, y, tokens, in, 32 * from, 32 * to < out ? 32 * to : out, step);
    });
}
