// Products by the tiles of AMX, where a processor has them.

#pragma once
#include "numbers.h"
#include <vector>
#if defined(__AMX_BF16__) && defined(__linux__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
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
