// A frozen Llama-like body on a few new tokens, in bf16 on one thread of a CPU: one call for all
// layers, or for all of a drafted chain, on the model's own weights (native.py calls it; lean.py and
// lean_heads.py have the same in torch).
//
// Sums are fp32; what torch holds in bf16 between its calls is rounded to bf16 here too. A token's
// result doesn't depend on which others come with it. Names: T tokens (rows times new ones), H
// hidden, I the feed-forward's width, E a head's width, S slots.

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

// Weights and biases (null: none). Without `out` or `gate` that half of the layer is left out.
struct Layer {
    const bf16 *norm, *qkv[3], *qkv_bias[3], *q_norm, *k_norm, *out, *out_bias, *after;
    const bf16 *gate, *gate_bias, *up, *up_bias, *down, *down_bias;
};
struct Body {
    int64_t layers, hidden, heads, kv_heads, width, inner;
    const bf16 *embedding, *norm, *cos, *sin;  // no embedding: layer 0 reads the states given
    double epsilon, scale;
    const Layer *layer;
    // Of a head that reads a state beside each token (`pairs`): norms of both, and the map of them to
    // what layer 0 reads (null: it reads both); which is also what layer 0 adds to, but without a
    // map the state, `normed` or as it came. fed_normed: what stands for the next token's state is;
    // beside: the state is added to what the map gives.
    int64_t pairs, normed, fed_normed, beside;
    const bf16 *of_token, *of_state, *front, *front_bias;
};
// Each token sees the slots before lens, and of those from there on what `block` marks: [rows, n, wide]
// or, with block_row 0, the same for all rows; null: new token n sees the slots up to lens + n.
struct Pass {
    int64_t rows, n, width, first, last;  // of the layers: those to run, `last` not
    const int64_t *tokens, *positions, *slots, *lens;
    const uint8_t *block;
    int64_t wide, block_row;
    const bf16 *given;  // [T, H]: the states beside the tokens, or (no embedding) in their place
    bf16 *keys, *values;
    int64_t layer_step, row_step;
    bf16 *states;  // [last - first + 1, T, H]: each layer's input, and the last one's output
    bf16 *out;     // [T, H], after the norm
    // Where rows have new tokens of their own number: each one's place in [rows, across] (then `rows`
    // is 1, and n all of them); null: side by side.
    const int64_t *places;
    int64_t across;
};
// How the next tokens of rows are drafted, one after another: the LM head's `size` rows of tokens
// `ids` (null: of the first), the temperature (0: greedy), and the noise of row b and level k at
// race + b * race_row + k * race_step (null: none). context: positions that there are. sure: [rows,
// steps], log of the share of the best score in all (null: unasked). pending: the token before the
// first, of a head whose states beside all tokens, `given` a row, are known beforehand (null: each
// is what was made of the token before).
struct Chain {
    int64_t steps, size, context, slots, race_row, race_step, given;
    const bf16 *head, *bias;
    const int64_t *ids, *pending;
    const float *race;
    double temperature;
    float *sure;
};

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

// 32 products of bf16, added to a sum of 16 parts.
static inline F16 dot32(F16 sum, const bf16 *a, const bf16 *b) {
#ifdef __AVX512BF16__
    return (F16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(a),
                                 (__m512bh)_mm512_loadu_si512(b));
#else
    U16 x, y;  // pairs: the low halves are the even numbers
    memcpy(&x, a, 64);
    memcpy(&y, b, 64);
    sum += (F16)(x << 16) * (F16)(y << 16);
    return sum + (F16)(x & 0xFFFF0000u) * (F16)(y & 0xFFFF0000u);
#endif
}

// Four outputs of M tokens, from the parts of their sums.
template <int M, typename V>
static void put(const V (*sum)[4], const bf16 *bias, bf16 *y, int64_t o, int64_t step) {
    for (int m = 0; m < M; m++) {
        F4 made = sums(sum[m]);
        if (bias)
            for (int r = 0; r < 4; r++) made[r] += wide(bias[o + r]);
        B4 narrower = narrow4(made);
        memcpy(y + m * step + o, &narrower, sizeof narrower);
    }
}
// `out` outputs of M tokens. What is read of a token serves four rows of the matrix, side by side; so
// rows are fetched ahead in the order in which they lie, into the second cache: of misses of the first
// one too few can wait at a time for a far memory's speed.
template <int M>
static void rows(const bf16 *w, const bf16 *bias, const bf16 *x, bf16 *y, int64_t in, int64_t out,
                 int64_t step) {
    for (int64_t o = 0; o < out; o += 4, w += 4 * in) {
        F16 part[M][4] = {}, sum[M][4];  // parts stay in registers
        int64_t i = 0;
        for (; i + 32 <= in; i += 32) {
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) __builtin_prefetch(w + 24 * in + 4 * i + 32 * r, 0, 2);
#pragma GCC unroll 6
            for (int m = 0; m < M; m++)
#pragma GCC unroll 4
                for (int r = 0; r < 4; r++)
                    part[m][r] = dot32(part[m][r], w + r * in + i, x + m * in + i);
        }
        for (; i < in; i += 16)
#pragma GCC unroll 6
            for (int m = 0; m < M; m++)
#pragma GCC unroll 4
                for (int r = 0; r < 4; r++)
                    part[m][r] += wide16(w + r * in + i) * wide16(x + m * in + i);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) sum[m][r] = part[m][r];
        put<M>(sum, bias, y, o, step);
    }
}
#ifndef __AVX512F__
// As `rows`, where vectors are half as wide, and 16: R rows of the matrix and M tokens at a time, so
// that their sums, what is multiplied, and nothing else are in them. Tokens are in fp32, of each 16
// inputs the even ones first, as shifts and masks give a matrix's. fetch: whether to fetch rows ahead.
template <int M, int R>
static void rows8(const bf16 *w, const bf16 *bias, const float *x, bf16 *y, int64_t in, int64_t step,
                  bool fetch) {
    F8 sum[M][4];
    for (int first = 0; first < 4; first += R, w += R * in) {
        F8 part[M][R] = {}, wider[R], given;
        for (int64_t i = 0; i < in; i += 16) {
            if (fetch && i % 32 == 0)
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) __builtin_prefetch(w + 24 * in + R * i + 32 * r, 0, 2);
            U8 pairs[R];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) memcpy(&pairs[r], w + r * in + i, 32);
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
                    wider[r] = (F8)(odd ? pairs[r] & 0xFFFF0000u : pairs[r] << 16);
#pragma GCC unroll 6
                for (int m = 0; m < M; m++) {
                    memcpy(&given, x + m * in + i + 8 * odd, 32);
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
static void by_eights(const bf16 *w, const bf16 *bias, const bf16 *x, bf16 *y, int64_t tokens,
                      int64_t in, int64_t out, int64_t step) {
    void (*const by[])(const bf16 *, const bf16 *, const float *, bf16 *, int64_t, int64_t, bool) = {
        rows8<1, 4>, rows8<2, 4>, rows8<3, 2>, rows8<4, 2>, rows8<5, 2>, rows8<6, 2>};
    static thread_local std::vector<float> given;
    given.resize(tokens * in);
    for (int64_t i = 0; i < tokens * in; i += 16)
        for (int j = 0; j < 8; j++)
            for (int odd = 0; odd < 2; odd++) given[i + 8 * odd + j] = wide(x[i + 2 * j + odd]);
    int64_t blocks = (tokens + 5) / 6;
    for (int64_t o = 0; o < out; o += 4, w += 4 * in, bias += bias ? 4 : 0)
        for (int64_t block = 0; block < blocks; block++) {
            int64_t t = block * tokens / blocks, m = (block + 1) * tokens / blocks - t;
            by[m - 1](w, bias, &given[t * in], y + t * step + o, in, step, !block);
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
// Pairs of inputs of each n tokens side by side, [blocks, in / 2, n], the last block's rest zeros.
static const uint32_t *paired(const bf16 *x, int64_t tokens, int64_t in, int64_t n) {
    static thread_local std::vector<uint32_t> made;
    const uint32_t *pairs = (const uint32_t *)x;
    int64_t each = in / 2, blocks = (tokens + n - 1) / n;
    if (n == 1) return pairs;
    made.assign(blocks * each * n, 0);
    for (int64_t b = 0; b < blocks; b++) {
        int64_t left = tokens - n * b, many = left < n ? left : n;
        uint32_t *to = made.data() + b * each * n;
        for (int64_t i = 0; i < each; i++)
            for (int64_t t = 0; t < many; t++) to[i * n + t] = pairs[(n * b + t) * each + i];
    }
    return made.data();
}
// Sixteen outputs of some tokens, from the sums [16, n].
static void put16(const float *sums, const bf16 *bias, bf16 *y, int64_t tokens, int64_t n,
                  int64_t step) {
    const __m512i each = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i at = _mm512_mullo_epi32(each, _mm512_set1_epi32(n));
    F16 more = bias ? wide16(bias) : (F16){};
    for (int64_t t = 0; t < tokens; t++)
        store16(y + t * step, (F16)_mm512_i32gather_ps(at, sums + t, 4) + more);
}
// As `product`, of whole sixteens of outputs and 32s of inputs. A tile is read as the matrix lies and
// costs as much for one token as for sixteen: of the matrix two at a time, of tokens likewise.
static void by_tiles(const bf16 *w, const bf16 *bias, const bf16 *x, bf16 *y, int64_t tokens,
                     int64_t in, int64_t out, int64_t step) {
    int64_t n = tokens < 16 ? tokens : 16, blocks = (tokens + n - 1) / n, line = 4 * n;
    alignas(64) float sums[4][256];
    Shapes shapes(n);
    const uint32_t *pairs = paired(x, tokens, in, n);
    _tile_loadconfig(&shapes);
    for (int64_t o = 0; o < out; o += 32, w += 32 * in)
        for (int64_t b = 0; b < blocks; b += 2) {
            bool more = o + 16 < out, both = b + 1 < blocks;
            const uint32_t *here = pairs + b * in / 2 * n, *next = here + in / 2 * n;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t i = 0; i < in; i += 32) {
#pragma GCC unroll 32
                for (int r = 0; r < 32 && !b; r++)
                    __builtin_prefetch(w + 32 * in + 32 * (i + r), 0, 2);
                _tile_loadd(4, w + i, 2 * in);
                _tile_loadd(6, here + i / 2 * n, line);
                _tile_dpbf16ps(0, 4, 6);
                if (more) {
                    _tile_loadd(5, w + 16 * in + i, 2 * in);
                    _tile_dpbf16ps(2, 5, 6);
                }
                if (both) {
                    _tile_loadd(7, next + i / 2 * n, line);
                    _tile_dpbf16ps(1, 4, 7);
                    if (more) _tile_dpbf16ps(3, 5, 7);
                }
            }
            _tile_stored(0, sums[0], line);
            _tile_stored(1, sums[1], line);
            _tile_stored(2, sums[2], line);
            _tile_stored(3, sums[3], line);
            for (int part = 0; part < 4; part++) {
                int64_t t = n * (b + part % 2), at = o + part / 2 * 16, left = tokens - t;
                if (left > 0 && at < out)
                    put16(sums[part], bias ? bias + at : bias, y + t * step + at,
                          left < n ? left : n, n, step);
            }
        }
    _tile_release();
}
#endif
#ifdef __AVX512BF16__
// Of sixteen rows of a matrix 32 inputs, turned: 16 vectors, `apart` from each other, each of one pair
// of inputs of all rows.
static inline void turned16(const bf16 *x, int64_t step, __m512i *to, int64_t apart) {
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
static inline __m512bh pair_of(const bf16 *x) {
    int32_t both;
    memcpy(&both, x, 4);
    return (__m512bh)_mm512_set1_epi32(both);
}
// As `rows`, of many tokens: 32 outputs at a time, turned, which stay in the nearest caches while the
// tokens go by, M at a time. Each lane that `rows` sums is made alone, lanes are added as `sums` does.
template <int M>
static void turned_rows(const __m512i *w, const bf16 *bias, const bf16 *x, bf16 *y, int64_t in,
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
static void by_turns(const bf16 *w, const bf16 *bias, const bf16 *x, bf16 *y, int64_t tokens,
                     int64_t in, int64_t out, int64_t step) {
    void (*const by[])(const __m512i *, const bf16 *, const bf16 *, bf16 *, int64_t, int64_t) = {
        turned_rows<1>, turned_rows<2>, turned_rows<3>, turned_rows<4>,
        turned_rows<5>, turned_rows<6>};
    static thread_local std::vector<__m512i> turned;
    int64_t blocks = (tokens + 5) / 6, apart = in / 32 + 1;  // odd mostly: lines of caches of their own
    turned.resize(32 * apart);
    for (int64_t o = 0; o < out; o += 32, w += 32 * in, bias += bias ? 32 : 0) {
        for (int64_t i = 0; i < in / 32; i++)
            for (int half = 0; half < 2; half++) {
                const bf16 *from = w + 16 * half * in + 32 * i;
                for (int r = 0; r < 16; r++) __builtin_prefetch(from + (32 + r) * in, 0, 2);
                turned16(from, in, &turned[16 * half * apart + i], apart);
            }
        for (int64_t block = 0; block < blocks; block++) {
            int64_t t = block * tokens / blocks, m = (block + 1) * tokens / blocks - t;
            by[m - 1](turned.data(), bias, x + t * in, y + t * step + o, in, step);
        }
    }
}
#endif
// y[t, o] = w[o] . x[t] + bias[o], with `step` numbers between the rows of y. Outputs in groups
// that stay in the nearest cache while the tokens go by; those that four doesn't divide one by one.
static void product(const bf16 *w, const bf16 *bias, const bf16 *x, bf16 *y, int64_t tokens,
                    int64_t in, int64_t out, int64_t step) {
    for (; out % 4; out--)
        for (int64_t t = 0; t < tokens; t++) {
            F16 sum = (F16){};
            for (int64_t i = 0; i < in; i += 16)
                sum += wide16(w + (out - 1) * in + i) * wide16(x + t * in + i);
            y[t * step + out - 1] = narrow(sum16(sum) + (bias ? wide(bias[out - 1]) : 0));
        }
#ifndef __AVX512F__
    return by_eights(w, bias, x, y, tokens, in, out, step);
#else
    void (*const by[])(const bf16 *, const bf16 *, const bf16 *, bf16 *, int64_t, int64_t,
                       int64_t) = {rows<1>, rows<2>, rows<3>, rows<4>, rows<5>, rows<6>};
#ifdef TILES
    if (int64_t whole = out / 16 * 16; whole && in % 32 == 0 && tiles()) {
        by_tiles(w, bias, x, y, tokens, in, whole, step);
        w += whole * in, bias += bias ? whole : 0, y += whole, out -= whole;
    }
#endif
#ifdef __AVX512BF16__
    // To turn costs the less the more tokens there are, and the more the longer rows lie apart.
    if (int64_t whole = out / 32 * 32; tokens >= 16 + in / 32 && in % 32 == 0) {
        by_turns(w, bias, x, y, tokens, in, whole, step);
        w += whole * in, bias += bias ? whole : 0, y += whole, out -= whole;
    }
#endif
    int64_t blocks = (tokens + 5) / 6, group = blocks > 1 ? 32 : out;
    for (int64_t o = 0; o < out; o += group)
        for (int64_t block = 0; block < blocks; block++) {
            int64_t t = block * tokens / blocks, m = (block + 1) * tokens / blocks - t;
            by[m - 1](w + o * in, bias ? bias + o : bias, x + t * in, y + t * step + o, in,
                      group < out - o ? group : out - o, step);
        }
#endif
}

// Linear maps of one input x [tokens, in], their outputs side by side in y [tokens, all].
struct Map {
    const bf16 *weight, *bias;
    int64_t out;
};
extern "C" void maps(const Map *map, int64_t count, const bf16 *x, bf16 *y, int64_t tokens,
                     int64_t in, int64_t all) {
    for (const Map *m = map; m < map + count; y += m++->out)
        product(m->weight, m->bias, x, y, tokens, in, m->out, all);
}

static void normed(const bf16 *x, const bf16 *weight, bf16 *y, int64_t width, double epsilon) {
    if (!weight) {
        memmove(y, x, width * sizeof(bf16));
        return;
    }
    F16 squares = (F16){};
    for (int64_t i = 0; i < width; i += 16) {
        F16 part = wide16(x + i);
        squares += part * part;
    }
    float factor = 1 / sqrtf(sum16(squares) / width + (float)epsilon);
    for (int64_t i = 0; i < width; i += 16)
        store16(y + i, wide16(x + i) * factor * wide16(weight + i));
}

static void turned(bf16 *x, const bf16 *cos, const bf16 *sin, int64_t width) {
    int64_t half = width / 2;
    for (int64_t i = 0; i < half; i += 16) {
        F16 low = wide16(x + i), high = wide16(x + i + half);
        store16(x + i, low * wide16(cos + i) + high * wide16(sin + i));
        store16(x + i + half, high * wide16(cos + i + half) + low * wide16(sin + i + half));
    }
}

#ifdef __AVX512BF16__
// What attends: one head's query, of which slots it sees those before `slots`, and of these from
// `open` on those that are `allowed` (null: all); its scores, and the same in bf16 once they are shares.
struct Asking {
    const bf16 *query;
    int64_t slots, open;
    const uint8_t *allowed;
    float *scores;
    bf16 *shares, *out;
    bool sees(int64_t s) const { return s < slots && (s < open || !allowed || allowed[s - open]); }
};
// Scores of M queries for the slots from `first` on, whose keys are turned. A query's sum is made in
// the same order whatever comes beside it.
template <int E32, int M>
static inline void scored(const Asking *of, const __m512i *keys, int64_t first, float scale) {
    __m512 part[M][4] = {};
#pragma GCC unroll 4
    for (int e = 0; e < 16 * E32; e += 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
            for (int m = 0; m < M; m++)
                part[m][i] = _mm512_dpbf16_ps(part[m][i], (__m512bh)keys[e + i],
                                              pair_of(of[m].query + 2 * (e + i)));
    for (int m = 0; m < M; m++) {
        F16 sum = ((F16)part[m][0] + (F16)part[m][1]) + ((F16)part[m][2] + (F16)part[m][3]);
        sum *= scale;
        memcpy(of[m].scores + first, &sum, 64);
    }
}
// Of a query's scores its shares, not yet divided by their sum, of which 1 is returned.
static float shared(const Asking &of, int64_t whole) {
    F16 most = (F16){} - INFINITY, total = (F16){}, score;
    for (int64_t s = 0; s < whole; s += 16) {
        memcpy(&score, of.scores + s, 64);
        most = score > most ? score : most;
    }
    float top = _mm512_reduce_max_ps((__m512)most);
    for (int64_t s = 0; s < whole; s += 16) {
        memcpy(&score, of.scores + s, 64);
        F16 made = exp16(score - top);
        made = score == (F16){} - INFINITY ? (F16){} : made;
        total += made;
        __m256bh narrower = _mm512_cvtneps_pbh((__m512)made);
        memcpy(of.shares + s, &narrower, 32);
    }
    return 1 / sum16(total);
}
// What M queries make of values, in runs of 16 slots that lie at `from`: two slots at a time.
template <int E32, int M>
static inline void gathered(const Asking *of, const bf16 *const *from, int64_t runs, int64_t step,
                            const float *factor, int64_t fetch) {
    __m512 sum[M][2 * E32] = {};
    for (int64_t run = 0; run < runs; run++) {
        if (run + 1 < fetch)
            for (int64_t i = 0; i < 16 * step; i += 32) __builtin_prefetch(from[run + 1] + i, 0, 2);
        for (int64_t s = 0; s < 16; s += 2) {
            const bf16 *x = from[run] + s * step;
            __m512bh share[M];
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) share[m] = pair_of(of[m].shares + 16 * run + s);
#pragma GCC unroll 4
            for (int c = 0; c < E32; c++) {
                __m512i one = _mm512_loadu_si512(x + 32 * c);
                __m512i two = _mm512_loadu_si512(x + step + 32 * c);
                __m512bh low = (__m512bh)_mm512_unpacklo_epi16(one, two);
                __m512bh high = (__m512bh)_mm512_unpackhi_epi16(one, two);
#pragma GCC unroll 4
                for (int m = 0; m < M; m++) {
                    sum[m][2 * c] = _mm512_dpbf16_ps(sum[m][2 * c], low, share[m]);
                    sum[m][2 * c + 1] = _mm512_dpbf16_ps(sum[m][2 * c + 1], high, share[m]);
                }
            }
        }
    }
    for (int m = 0; m < M; m++)
        for (int c = 0; c < E32; c++) {
            F16 low = (F16)sum[m][2 * c] * factor[m], high = (F16)sum[m][2 * c + 1] * factor[m];
            store16(of[m].out + 32 * c,
                    __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20,
                                            21, 22, 23));
            store16(of[m].out + 32 * c + 16,
                    __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15,
                                            28, 29, 30, 31));
        }
}
// Queries of one row and head of keys, whose runs of 16 slots lie at `keys` and `values`; those from
// `whole` on aren't seen by all.
template <int E32>
static void mixed(const Asking *of, int64_t count, const bf16 *const *keys,
                  const bf16 *const *values, int64_t runs, int64_t whole, int64_t step,
                  float scale, bool fetch) {
    constexpr int MANY = E32 > 2 ? 2 : 4;
    __m512i turned[16 * E32];
    float factor[MANY];
    for (int64_t run = 0; run < runs; run++) {
        if (fetch && run + 1 < whole)
            for (int64_t i = 0; i < 16 * step; i += 32) __builtin_prefetch(keys[run + 1] + i, 0, 2);
        for (int c = 0; c < E32; c++) turned16(keys[run] + 32 * c, step, turned + 16 * c, 1);
        int64_t q = 0;
        for (; q + 2 <= count; q += 2) scored<E32, 2>(of + q, turned, 16 * run, scale);
        if (q < count) scored<E32, 1>(of + q, turned, 16 * run, scale);
        if (run < whole) continue;
        for (q = 0; q < count; q++)
            for (int64_t s = 16 * run; s < 16 * (run + 1); s++)
                if (!of[q].sees(s)) of[q].scores[s] = -INFINITY;
    }
    for (int64_t q = 0; q < count; q += MANY) {
        int64_t left = count - q < MANY ? count - q : MANY;
        for (int64_t m = 0; m < left; m++) factor[m] = shared(of[q + m], 16 * runs);
        if (left == 1) gathered<E32, 1>(of + q, values, runs, step, factor, fetch && !q ? whole : 0);
        if (left == 2) gathered<E32, 2>(of + q, values, runs, step, factor, fetch && !q ? whole : 0);
        if (left == 3) gathered<E32, MANY - 1>(of + q, values, runs, step, factor, fetch && !q ? whole : 0);
        if (left == 4) gathered<E32, MANY>(of + q, values, runs, step, factor, fetch && !q ? whole : 0);
    }
}

const int64_t TOGETHER = 16;  // queries whose scores are held at a time

// Attention of every token's heads. Runs of 16 slots begin at multiples of 16, so that a token comes
// out the same in a long pass and alone; the last ones, of which a row's tokens see different parts,
// are copied, zeros where nothing is seen.
static void attended(const Body &b, const Pass &p, int64_t layer, const bf16 *heads, bf16 *out) {
    int64_t E = b.width, step = b.kv_heads * E, group = b.heads / b.kv_heads;
    int64_t all = (b.heads + 2 * b.kv_heads) * E, tokens = p.rows * p.n;
    static thread_local std::vector<bf16> copies, shares;
    static thread_local std::vector<float> scores;
    static thread_local std::vector<Asking> asking;
    static thread_local std::vector<const bf16 *> keys, values;
    auto place = [&](int64_t t) { return p.places ? p.places[t] : t; };
    int64_t across = p.places ? p.across : p.n, end;
    for (int64_t t = 0; t < tokens; t = end) {
        int64_t row = place(t) / across, lens = p.lens[row], most = 0;
        asking.clear();
        for (end = t; end < tokens && place(end) / across == row; end++) {
            int64_t n = place(end) % across, slots = lens + (p.block ? p.wide : n + 1);
            slots = p.width < slots ? p.width : slots;
            most = most < slots ? slots : most;
            const uint8_t *allowed = p.block ? p.block + row * p.block_row + n * p.wide : nullptr;
            asking.push_back({heads + end * all, slots, lens, allowed, nullptr, nullptr,
                              out + end * b.heads * E});
        }
        int64_t whole = (p.width < lens ? p.width : lens) / 16, runs = (most + 15) / 16;
        copies.assign(2 * (runs - whole) * 16 * step, 0);
        const bf16 *at[2] = {p.keys + layer * p.layer_step + row * p.row_step,
                             p.values + layer * p.layer_step + row * p.row_step};
        int64_t apart = (runs - whole) * 16 * step;
        for (int64_t s = 16 * whole; s < most; s++) {
            bool seen = false;
            for (const Asking &one : asking) seen = seen || one.sees(s);
            for (int side = 0; side < 2 && seen; side++)
                memcpy(&copies[side * apart + (s - 16 * whole) * step], at[side] + s * step,
                       step * sizeof(bf16));
        }
        int64_t count = asking.size() * group;
        keys.resize(runs), values.resize(runs);
        scores.resize(TOGETHER * 16 * runs), shares.resize(TOGETHER * 16 * runs);
        for (int64_t h = 0; h < b.kv_heads; h++) {
            for (int64_t run = 0; run < runs; run++) {
                const bf16 *copy = copies.data() + (run - whole) * 16 * step;
                keys[run] = (run < whole ? at[0] + run * 16 * step : copy) + h * E;
                values[run] = (run < whole ? at[1] + run * 16 * step : copy + apart) + h * E;
            }
            for (int64_t q = 0; q < count; q += TOGETHER) {
                Asking of[TOGETHER];
                int64_t left = count - q < TOGETHER ? count - q : TOGETHER;
                for (int64_t i = 0; i < left; i++) {
                    of[i] = asking[(q + i) / group];
                    int64_t own = (h * group + (q + i) % group) * E;
                    of[i].query += own, of[i].out += own;
                    of[i].scores = &scores[i * 16 * runs], of[i].shares = &shares[i * 16 * runs];
                }
                auto mix = E == 32 ? mixed<1> : E == 64 ? mixed<2> : E == 96 ? mixed<3> : mixed<4>;
                mix(of, left, keys.data(), values.data(), runs, whole, step, (float)b.scale, !h && !q);
            }
        }
    }
}
#else
// A query, and what it makes of values: sixteen numbers at a time, or (without AVX-512, as products
// have them) eight even ones and eight odd ones.
#ifdef __AVX512F__
template <int E16>
struct Query {
    const bf16 *x;
    F16 sum[E16] = {};
    Query(const bf16 *q) : x(q) {}
    float score(const bf16 *key) {
        F16 made = (F16){};
        for (int e = 0; e < E16; e += 2) made = dot32(made, x + e * 16, key + e * 16);
        return sum16(made);
    }
    void add(const bf16 *value, float weight) {
        for (int e = 0; e < E16; e++) sum[e] += wide16(value + e * 16) * weight;
    }
    void put(bf16 *out, float share) {
        for (int e = 0; e < E16; e++) store16(out + e * 16, sum[e] * share);
    }
};
#else
template <int E16>
struct Query {
    F8 x[E16][2], sum[E16][2] = {};
    Query(const bf16 *q) {
        for (int e = 0; e < E16; e++) split(q + e * 16, x[e]);
    }
    static void split(const bf16 *from, F8 *two) {
        U8 pairs;
        memcpy(&pairs, from, 32);
        two[0] = (F8)(pairs << 16), two[1] = (F8)(pairs & 0xFFFF0000u);
    }
    float score(const bf16 *key) {
        F8 made = (F8){}, two[2];
        for (int e = 0; e < E16; e++) {
            split(key + e * 16, two);
            made += x[e][0] * two[0];
            made += x[e][1] * two[1];
        }
        F4 part = fold(made);
        return (part[0] + part[2]) + (part[1] + part[3]);
    }
    void add(const bf16 *value, float weight) {
        F8 two[2];
        for (int e = 0; e < E16; e++) {
            split(value + e * 16, two);
            sum[e][0] += two[0] * weight;
            sum[e][1] += two[1] * weight;
        }
    }
    void put(bf16 *out, float share) {
        for (int e = 0; e < E16; e++)
            for (int i = 0; i < 16; i++) out[e * 16 + i] = narrow(sum[e][i % 2][i / 2] * share);
    }
};
#endif
// Attention of one head's query over the first `slots` of its row, of those from `open` on over
// those that are `allowed`.
template <int E16>
static void mixed(const bf16 *q, const bf16 *keys, const bf16 *values, int64_t step, int64_t slots,
                  int64_t open, const uint8_t *allowed, float scale, float *weights, bf16 *out) {
    float most = -INFINITY;
    Query<E16> query(q);
    for (int64_t s = 0; s < slots; s++) {
        weights[s] = -INFINITY;
        if (s >= open && !allowed[s - open]) continue;
        weights[s] = query.score(keys + s * step) * scale;
        most = weights[s] > most ? weights[s] : most;
    }
    int64_t whole = (slots + 15) / 16 * 16;
    for (int64_t s = slots; s < whole; s++) weights[s] = -INFINITY;
    F16 total = (F16){};
    for (int64_t s = 0; s < whole; s += 16) {
        F16 score, made;
        memcpy(&score, weights + s, 64);
        made = exp16(score - most);
        made = score == (F16){} - INFINITY ? (F16){} : made;
        total += made;
        memcpy(weights + s, &made, 64);
    }
    for (int64_t s = 0; s < slots; s++)
        if (weights[s] != 0) query.add(values + s * step, weights[s]);
    query.put(out, 1 / sum16(total));
}

static void attended(const Body &b, const Pass &p, int64_t layer, const bf16 *heads, bf16 *out) {
    std::vector<float> room(p.width + 16);
    float *weights = room.data();
    int64_t E = b.width, step = b.kv_heads * E, group = b.heads / b.kv_heads;
    int64_t all = (b.heads + 2 * b.kv_heads) * E;
    for (int64_t t = 0; t < p.rows * p.n; t++) {
        int64_t at = p.places ? p.places[t] : t, across = p.places ? p.across : p.n;
        int64_t row = at / across, n = at % across, slots = p.lens[row] + (p.block ? p.wide : n + 1);
        if (p.width < slots) slots = p.width;
        const uint8_t *allowed = p.block ? p.block + row * p.block_row + n * p.wide : nullptr;
        int64_t open = allowed ? p.lens[row] : slots;
        for (int64_t h = 0; h < b.heads; h++) {
            int64_t at = layer * p.layer_step + row * p.row_step + h / group * E;
            const bf16 *q = heads + t * all + h * E;
            auto mix = E == 32 ? mixed<2> : E == 64 ? mixed<4> : E == 96 ? mixed<6> : mixed<8>;
            mix(q, p.keys + at, p.values + at, step, slots, open, allowed, (float)b.scale, weights,
                out + (t * b.heads + h) * E);
        }
    }
}
#endif

// The layer's queries, keys and values, turned, of x [T, in]; new keys and values go to their slots.
static void entered(const Body &b, const Pass &p, int64_t index, const bf16 *x, int64_t in,
                    bf16 *heads) {
    const Layer &layer = b.layer[index];
    int64_t T = p.rows * p.n, E = b.width, q = b.heads * E, kv = b.kv_heads * E, all = q + 2 * kv;
    product(layer.qkv[0], layer.qkv_bias[0], x, heads, T, in, q, all);
    product(layer.qkv[1], layer.qkv_bias[1], x, heads + q, T, in, kv, all);
    product(layer.qkv[2], layer.qkv_bias[2], x, heads + q + kv, T, in, kv, all);
    for (int64_t t = 0; t < T; t++) {
        bf16 *own = heads + t * all;
        for (int64_t h = 0; h < b.heads + b.kv_heads; h++) {
            const bf16 *norm = h < b.heads ? layer.q_norm : layer.k_norm;
            if (norm) normed(own + h * E, norm, own + h * E, E, b.epsilon);
            turned(own + h * E, b.cos + p.positions[t] * E, b.sin + p.positions[t] * E, E);
        }
        int64_t at = index * p.layer_step + p.slots[t] * kv;
        memcpy(p.keys + at, own + q, kv * sizeof(bf16));
        memcpy(p.values + at, own + q + kv, kv * sizeof(bf16));
    }
}

static void added(bf16 *x, const bf16 *more, int64_t size) {
    for (int64_t i = 0; i < size; i += 16) store16(x + i, wide16(x + i) + wide16(more + i));
}

// What layer 0 adds to, `now` [T, H], and, of a head whose layer 0 reads both, the pairs x [T, 2 H].
static void begun(const Body &b, const Pass &p, bf16 *now, bf16 *x) {
    int64_t T = p.rows * p.n, H = b.hidden;
    for (int64_t t = 0; t < T; t++) {
        const bf16 *state = p.given + t * H;
        const bf16 *token = b.embedding ? b.embedding + p.tokens[t] * H : state;
        if (!b.pairs) {
            memcpy(now + t * H, token, H * sizeof(bf16));
            continue;
        }
        bf16 *pair = x + 2 * t * H;
        normed(token, b.of_token, pair, H, b.epsilon);
        normed(state, b.of_state, pair + H, H, b.epsilon);
        memcpy(now + t * H, b.normed ? pair + H : state, H * sizeof(bf16));
    }
    if (b.front) product(b.front, b.front_bias, x, now, T, 2 * H, H, H);
    if (b.beside) added(now, p.given, T * H);
}

// Tokens of a pass up to which this is faster than a product at a time; small: of layers that stay in
// the caches, where torch has one thread too.
extern "C" int64_t most(int64_t small) {
#ifdef __AVX512BF16__
    return tiles() ? 256 : small ? 640 : 80;
#elif defined(__x86_64__) && !defined(__AVX512F__)
    return 80;
#else
    return 2;
#endif
}

extern "C" void body(const Body *model, const Pass *pass) {
    const Body &b = *model;
    const Pass &p = *pass;
    int64_t T = p.rows * p.n, H = b.hidden, I = b.inner, E = b.width;
    std::vector<bf16> x(2 * T * H), more(T * H), heads(T * (b.heads + 2 * b.kv_heads) * E);
    std::vector<bf16> out(T * b.heads * E), inner(2 * T * I);
    begun(b, p, p.states, x.data());
    for (int64_t l = p.first; l < p.last; l++) {
        const Layer &layer = b.layer[l];
        bf16 *now = p.states + (l - p.first + 1) * T * H;
        memcpy(now, now - T * H, T * H * sizeof(bf16));
        if (layer.out) {
            bool both = l == 0 && b.pairs && !b.front;
            for (int64_t t = 0; t < T && !both; t++)
                normed(now + t * H, layer.norm, &x[t * H], H, b.epsilon);
            entered(b, p, l, x.data(), both ? 2 * H : H, heads.data());
            attended(b, p, l, heads.data(), out.data());
            product(layer.out, layer.out_bias, out.data(), more.data(), T, b.heads * E, H, H);
            added(now, more.data(), T * H);
        }
        if (!layer.gate) continue;
        for (int64_t t = 0; t < T; t++) normed(now + t * H, layer.after, &x[t * H], H, b.epsilon);
        bf16 *gate = inner.data(), *up = gate + T * I;
        product(layer.gate, layer.gate_bias, x.data(), gate, T, H, I, I);
        product(layer.up, layer.up_bias, x.data(), up, T, H, I, I);
        for (int64_t i = 0; i < T * I; i += 16) {
            F16 g = wide16(gate + i);
            store16(gate + i, g / (exp16(-g) + 1.0f) * wide16(up + i));
        }
        product(layer.down, layer.down_bias, gate, more.data(), T, I, H, H);
        added(now, more.data(), T * H);
    }
    for (int64_t t = 0; t < T; t++)
        normed(p.states + ((p.last - p.first) * T + t) * H, b.norm, p.out + t * H, H, b.epsilon);
}

// Each row's next tokens [rows, steps], from what the LM head reads of the last one, `first` [rows,
// H], and the state beside it, `carried` (of a head); or from the pending ones and the states beside
// all that are fed, [rows, given, H]. at: the position of the first that is fed, which is its slot of
// the row. The pass says where keys and values lie.
extern "C" void chain(const Body *model, const Pass *pass, const Chain *how, const bf16 *first,
                      const bf16 *carried, const int64_t *at, int64_t *tokens) {
    const Body &b = *model;
    const Chain &c = *how;
    Pass p = *pass;
    int64_t B = p.rows, H = b.hidden;
    std::vector<bf16> states((b.layers + 1) * B * H), out(B * H), logits(B * c.size);
    std::vector<bf16> given(B * H);
    std::vector<int64_t> fed(4 * B);
    std::vector<float> scores(c.sure ? (c.size + 15) / 16 * 16 : 0, -INFINITY);
    if (c.pending) memcpy(&fed[0], c.pending, B * sizeof(int64_t));
    if (first) memcpy(out.data(), first, B * H * sizeof(bf16));
    if (b.pairs && !c.pending) memcpy(given.data(), carried, B * H * sizeof(bf16));
    p.tokens = &fed[0], p.positions = &fed[B], p.slots = &fed[2 * B], p.lens = &fed[3 * B];
    p.given = given.data(), p.states = states.data(), p.out = out.data();
    auto feed = [&](int64_t k) {
        for (int64_t row = 0; row < B; row++) {
            int64_t place = at[row] + k;
            fed[B + row] = place < c.context ? place : c.context - 1;
            fed[2 * B + row] = row * c.slots + place;
            fed[3 * B + row] = place;
            const bf16 *own = carried + (row * c.given + k) * H;
            if (c.pending) memcpy(&given[row * H], own, H * sizeof(bf16));
        }
        body(model, &p);
        if (c.pending) return;
        memcpy(given.data(), b.fed_normed ? p.out : &states[b.layers * B * H], B * H * sizeof(bf16));
    };
    for (int64_t k = 0; k < c.steps; k++) {
        if (c.pending) feed(k);
        product(c.head, c.bias, out.data(), logits.data(), B, H, c.size, c.size);
        for (int64_t row = 0; row < B; row++) {
            const float *race = c.race ? c.race + row * c.race_row + k * c.race_step : nullptr;
            float most = -INFINITY;
            int64_t best = 0;
            for (int64_t d = 0; d < c.size; d++) {
                float score = wide(logits[row * c.size + d]);
                if (c.temperature != 0) score /= (float)c.temperature;
                if (race) score -= race[c.ids ? c.ids[d] : d];
                if (c.sure) scores[d] = score;
                if (score > most) most = score, best = d;
            }
            if (c.sure) {
                F16 total = (F16){}, score;
                for (int64_t d = 0; d < c.size; d += 16) {
                    memcpy(&score, &scores[d], 64);
                    total += exp16(score - most);
                }
                c.sure[row * c.steps + k] = -logf(sum16(total));
            }
            fed[row] = tokens[row * c.steps + k] = c.ids ? c.ids[best] : best;
        }
        if (!c.pending && k + 1 < c.steps) feed(k);
    }
}

static inline uint64_t finished(uint64_t x) {  // splitmix64's
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// Of each key, a number for each token, as sampling.py has it.
extern "C" void uniforms(const int64_t *keys, float *out, int64_t count, int64_t vocab) {
    for (int64_t k = 0; k < count; k++, out += vocab)
        for (int64_t v = 0; v < vocab; v++) {
            uint64_t key = (uint64_t)keys[k] + (uint64_t)(v + 1) * 0x9E3779B97F4A7C15u;
            float made = ((float)(uint32_t)(finished(key) >> 32) + 0.5f) * 0x1p-32f;
            out[v] = made < 1 - 0x1p-24f ? made : 1 - 0x1p-24f;
        }
}
