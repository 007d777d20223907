// Products by the tiles of AMX, where a processor has them: strips as they are laid, or as the compressed come
// out piece by piece, by up to 32 tokens at a time. A tile's product takes as many cycles as it has tokens.

#pragma once
#include "numbers.h"
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Whether products are by tiles, which a system grants a process on demand.
static inline bool tiles() {
#ifdef TILES
    static const bool granted = !syscall(SYS_arch_prctl, 0x1023, 18);
    return granted;
#else
    return false;
#endif
}
#ifdef TILES
const int64_t ROWS = 16, PIECE = 32;  // tokens of a tile; inputs, of a strip's both tiles too
const int64_t AHEAD = 2, ALIVE = 4;   // pieces made before they are read, which writes wait for; kept
// The eight tiles: 0 to 3 sums of `rows` tokens and 16 outputs, 4 and 5 a piece of a strip, 6 and 7 of tokens.
struct Shapes {
    uint8_t palette = 1, start = 0, kept[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
    Shapes(int64_t n) {
        for (int i = 0; i < 8; i++) rows[i] = i / 2 == 2 ? 16 : n;
    }
};
// Tokens as tiles of as many each; the last tile has some of those before it again.
struct Split {
    int64_t tokens, tiles = (tokens + ROWS - 1) / ROWS, rows = (tokens + tiles - 1) / tiles;
    int64_t first(int64_t tile) const { return std::min(tile * rows, tokens - rows); }
};
// Tokens' numbers as they are read, [tiles, pieces, rows, 32], the last piece's rest zeros.
static const bf16 *in_tiles(const bf16 *x, int64_t tokens, int64_t in) {
    static thread_local std::vector<__m512i> made;
    Split split{tokens};
    made.resize(split.tiles * split.rows * ((in + PIECE - 1) / PIECE));
    __m512i *to = made.data();
    for (int64_t tile = 0; tile < split.tiles; tile++)
        for (int64_t i = 0; i < in; i += PIECE)
            for (int64_t row = 0; row < split.rows; row++) {
                const bf16 *from = x + (split.first(tile) + row) * in + i;
                *to++ = in - i < PIECE ? _mm512_maskz_loadu_epi16((1u << (in - i)) - 1, from)
                                       : _mm512_loadu_si512(from);
            }
    return (const bf16 *)made.data();
}
// What a strip has for the inputs from i on, two tiles side by side; beyond the last one zeros.
template <class Matrix>
static inline void unpacked(Matrix &strip, int64_t i, int64_t in, __m512i *to) {
    for (int64_t k = 0; k < PIECE; k += 4, to += 4) {
        Pairs own[2][2] = {};
        if (i + k < in) strip.template take<1>(own, i + k, 0, 0);
        for (int n = 0; n < 4; n++) to[n] = (__m512i)own[n / 2][n % 2];
    }
}
// Strips first to last - 1 by all tokens, which lie as `in_tiles` makes them.
template <class Matrix>
static void by_tiles(const Matrix &w, const Sides &to, int64_t first, int64_t last, int64_t tokens) {
    static thread_local std::vector<__m512i> made;
    const int64_t in = to.in, pieces = (in + PIECE - 1) / PIECE;
    const Split split{tokens};
    const int64_t kept = split.tiles > 2 ? -1 : ALIVE - 1, tile = PIECE * split.rows;  // as a mask
    made.resize(PIECE * std::max(pieces, ALIVE));
    auto place = [&](int64_t piece) { return made.data() + PIECE * (piece & kept); };
    alignas(64) float sums[4][ROWS * 16];
    Shapes shapes(split.rows);
    _tile_loadconfig(&shapes);
    for (int64_t n = first; n < last; n++) {
        const int64_t o = STRIP * n, left = to.out - o;
        const Sums bias[2] = {to.biases(o), to.biases(o + 16)};
        Matrix strip = w.strip(n);
        strip.begin();
        for (int64_t i = 0; i < AHEAD && i < pieces; i++) unpacked(strip, PIECE * i, in, place(i));
        for (int64_t t = 0; t < split.tiles; t += 2) {
            const bool both = t + 1 < split.tiles;
            const bf16 *x = to.x + t * pieces * tile, *next = x + pieces * tile;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t i = 0; i < pieces; i++, x += tile, next += tile) {
                if (int64_t then = i + AHEAD; !t && then < pieces) unpacked(strip, PIECE * then, in, place(then));
                const __m512i *piece = place(i);
                _tile_loadd(6, x, 64);
                _tile_loadd(4, piece, 128);
                _tile_dpbf16ps(0, 6, 4);
                _tile_loadd(5, piece + 1, 128);
                _tile_dpbf16ps(1, 6, 5);
                if (!both) continue;
                _tile_loadd(7, next, 64);
                _tile_dpbf16ps(2, 7, 4);
                _tile_dpbf16ps(3, 7, 5);
            }
            _tile_stored(0, sums[0], 64);
            _tile_stored(1, sums[1], 64);
            if (both) _tile_stored(2, sums[2], 64);
            if (both) _tile_stored(3, sums[3], 64);
            for (int part = 0; part < (both ? 4 : 2); part += 2) {
                bf16 *y = to.y + split.first(t + part / 2) * to.step + o;
                for (const float *sum = sums[part]; sum < sums[part] + 16 * split.rows; sum += 16, y += to.step) {
                    put(y, read<Sums>(sum) + bias[0], left);
                    put(y + 16, read<Sums>(sum + ROWS * 16) + bias[1], left - 16);
                }
            }
        }
    }
    _tile_release();
}
#endif
