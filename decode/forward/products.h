// Products with fixed matrices in bf16, sums in fp32, on a CPU: by strips of them, compressed or laid for the
// call, and by vectors or by tiles. A token's result doesn't depend on which others come with it.

#pragma once
#include "compressed.h"
#include "crew.h"

// Numbers of tokens as vectors are multiplied by them. Pairs of bf16 take an AMD's core half as long as two
// of fp32, an Intel's twice as long (86 and 173 GFLOP/s), but for its tiles, which read no others.
#if defined(__AVX512BF16__) && (defined(__AMX_BF16__) || !defined(INTEL))
#define PAIRS
typedef bf16 Given;
#else
typedef float Given;
#endif
const int REGISTERS = WIDE == 16 ? 24 : 12, MOST = REGISTERS / 2;  // of sums; tokens at a time

static inline Sums same(float x) {
#if defined(__AVX512F__)
    return (Sums)_mm512_set1_ps(x);
#elif defined(__AVX__)
    return (Sums)_mm256_set1_ps(x);
#else
    Sums made;
    for (int i = 0; i < WIDE; i++) made[i] = x;
    return made;
#endif
}
static inline void store(bf16 *to, F16 x) { store16(to, x); }
static inline void store(bf16 *to, F8 x) { store8(to, x); }
// `left` outputs of a token, at most WIDE.
static inline void put(bf16 *y, Sums sum, int64_t left) {
    bf16 made[WIDE];
    if (left >= WIDE) return store(y, sum);
    store(made, sum);
    if (left > 0) memcpy(y, made, left * sizeof(bf16));
}
// What a product is made of: a matrix's inputs and outputs, M tokens' numbers, and where outputs go, `step`
// numbers from token to token.
struct Sides {
    const bf16 *bias;
    const Given *x;
    bf16 *y;
    int64_t in, out, step;
    // The biases of WIDE outputs from o on.
    Sums biases(int64_t o) const {
        Sums made = {};
        for (int i = 0; bias && i < WIDE && o + i < out; i++) made[i] = wide(bias[o + i]);
        return made;
    }
};
#include "tiles.h"

static inline const Given *given(const bf16 *x, int64_t tokens, int64_t in) {
#ifdef TILES
    if (tiles()) return in_tiles(x, tokens, in);
#endif
#ifdef PAIRS
    return x;
#else
    static thread_local std::vector<float> made;
    made.resize(tokens * in);
    for (int64_t i = 0; i < tokens * in; i++) made[i] = wide(x[i]);
    return made.data();
#endif
}
// Adds to sums what two pairs of S strips make with M tokens' numbers, of which each has `in`, from i on.
template <int M, int S, int P>
static inline __attribute__((always_inline)) void multiplied(Sums (*sum)[2 * P][M], Pairs (*own)[2][2 * P],
                                                             const Given *x, int64_t in, int64_t i) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
#ifdef PAIRS
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
            __m512bh pair = pair_of(x + m * in + i + 2 * j);
#pragma GCC unroll 4
            for (int s = 0; s < S; s++)
#pragma GCC unroll 4
                for (int part = 0; part < 2 * P; part++)
                    sum[s][part][m] = (Sums)_mm512_dpbf16_ps((__m512)sum[s][part][m],
                                                             (__m512bh)own[s][j][part], pair);
        }
#else
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            Sums wider[S][2 * P];
#pragma GCC unroll 4
            for (int s = 0; s < S; s++)
#pragma GCC unroll 4
                for (int part = 0; part < 2 * P; part++) {
                    Pairs both = own[s][j][part];
                    wider[s][part] = (Sums)(odd ? both & 0xFFFF0000u : both << 16);
                }
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) {
                Sums one = same(x[m * in + i + 2 * j + odd]);
#pragma GCC unroll 4
                for (int s = 0; s < S; s++)
#pragma GCC unroll 4
                    for (int part = 0; part < 2 * P; part++) sum[s][part][m] += wider[s][part] * one;
            }
        }
#endif
    }
}
// Strips first to last - 1 by M tokens: S strips side by side, so that sums needn't wait for one another, and
// P parts of each, those WIDE outputs of its halves that a pass over it makes.
template <int M, int S, int P, class Matrix>
static void by_strips(const Matrix &w, const Sides &to, int64_t first, int64_t last) {
    // What is fetched ahead lies beyond the strips that go by at the same time.
    const int64_t in = to.in, beyond = (S - 1) * (TABLE + in * (BLOCK / 4)), turn = in - FETCHED / (BLOCK / 4);
    const Given *x = to.x;
    for (; first + S <= last; first += S)
        for (int pass = 0; pass < PASSES; pass += P) {
            Sums sum[S][2 * P][M] = {};
            Matrix of[S];
            for (int s = 0; s < S; s++) of[s] = w.strip(first + s), of[s].begin();
            for (int64_t i = 0; i < in; i += 4) {
                Pairs own[S][2][2 * P];
#pragma GCC unroll 4
                for (int s = 0; s < S; s++) of[s].template take<P>(own[s], i, pass, i < turn ? 0 : beyond);
                multiplied<M, S, P>(sum, own, x, in, i);
            }
            for (int s = 0; s < S; s++)
                for (int part = 0; part < 2 * P; part++) {
                    int64_t o = STRIP * (first + s) + 16 * (part % 2) + WIDE * (pass + part / 2);
                    Sums bias = to.biases(o);
                    for (int m = 0; m < M; m++)
                        put(to.y + m * to.step + o, sum[s][part][m] + bias, to.out - o);
                }
        }
    if constexpr (S > 1)
        if (first < last) by_strips<M, 1, P>(w, to, first, last);
}
// Strips by any number of tokens: each strip stays in the nearest caches while many of them go by.
template <class Matrix, int... M>
static void by_strips(const Matrix &w, const Sides &to, int64_t first, int64_t last, int64_t tokens,
                      std::integer_sequence<int, M...>) {
    void (*const by[])(const Matrix &, const Sides &, int64_t, int64_t) = {
        by_strips<M + 1, M < (WIDE > 8 ? 4 : 1) ? 2 : 1, M < 2 ? PASSES : 1, Matrix>...};
    int64_t blocks = (tokens + MOST - 1) / MOST, group = blocks > 1 ? 1 : last - first;
    for (int64_t n = first; n < last; n += group)
        for (int64_t block = 0; block < blocks; block++) {
            int64_t t = block * tokens / blocks, m = (block + 1) * tokens / blocks - t;
            Sides own = to;
            own.x += t * to.in, own.y += t * to.step;
            by[m - 1](w, own, n, n + group);
        }
}
// By the tiles, where there are any.
template <class Matrix>
static void by_strips(const Matrix &w, const Sides &to, int64_t first, int64_t last, int64_t tokens) {
#ifdef TILES
    if (tiles()) return by_tiles(w, to, first, last, tokens);
#endif
    by_strips(w, to, first, last, tokens, std::make_integer_sequence<int, MOST>());
}
// Tokens whose numbers stay in the second cache while strips go by, or that are made wider.
static inline int64_t at_once(int64_t in) {
    if (tiles()) return std::max<int64_t>(64, (1 << 19) / in / 32 * 32);
    return sizeof(Given) > sizeof(bf16) ? 256 : INT64_MAX;
}
// Outputs of strips first to last - 1.
static void outputs(const bf16 *w, const Compressed &form, const bf16 *bias, const bf16 *x, bf16 *y,
                    int64_t tokens, int64_t in, int64_t out, int64_t first, int64_t last, int64_t step) {
    if (int64_t piece = at_once(in); tokens > piece) {
        outputs(w, form, bias, x + piece * in, y + piece * step, tokens - piece, in, out, first, last, step);
        tokens = piece;
    }
    Sides to{bias, given(x, tokens, in), y, in, out, step};
#ifdef COMPRESSES
    if (form.bytes) return by_strips(Short{&form}, to, first, last, tokens);
#endif
    static thread_local std::vector<bf16> laid;
    laid.resize(STRIP * in);
    for (int64_t n = first; n < last; n++) {
        lay(w + STRIP * n * in, std::min(STRIP, out - STRIP * n), in, laid.data());
        Sides own{bias ? bias + STRIP * n : bias, to.x, y + STRIP * n, in, out - STRIP * n, step};
        by_strips(Laid{laid.data(), in}, own, 0, 1, tokens);
    }
}
// y[t, o] = w[o] . x[t] + bias[o], with `step` numbers between the rows of y.
static void product(const bf16 *w, const bf16 *bias, const bf16 *x, bf16 *y, int64_t tokens,
                    int64_t in, int64_t out, int64_t step) {
    if (!tokens) return;
    std::shared_lock<std::shared_mutex> lock;
    Compressed form = compressed_of(w, in, out, lock);
    split((out + STRIP - 1) / STRIP, in * out, [&](int64_t from, int64_t to) {
        outputs(w, form, bias, x, y, tokens, in, out, from, to, step);
    });
}
