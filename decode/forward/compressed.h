// Matrices of bf16 in 12 bits a weight, from which each weight is had again to the last bit, for products
// of few tokens, which wait for the memory. Needs AVX2 or AVX-512 with its instructions on bytes.
//
// Sign and upper seven bits of the exponent are one of sixteen values (DFloat11, arXiv 2504.11651, found
// how few of them a trained matrix has; its codes are of any length, for a GPU), the other eight bits as they
// are. Four rows have a table of their own, of the eight commonest exponents, and in the same line how many
// patches come before theirs; then blocks of as many columns as a vector has bytes: of each row the lower
// bytes, then of each row the halves of bytes that say which. In both the columns lie as two vectors come
// out of them. Weights with other exponents are patches, each block << 24 | place in the block << 16 |
// weight, by blocks, and one that no block has at the end.

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

struct Compressed {
    const bf16 *matrix;
    int64_t in, out;
    const uint8_t *bytes;
    const int64_t *patches;
};
#ifdef __AVX512BW__
const int64_t COLUMNS = 64;
#else
const int64_t COLUMNS = 32;
#endif
const int64_t TABLE = 64, BLOCK = 4 * (COLUMNS + COLUMNS / 2);  // bytes of both
const int64_t FETCHED = 12 * 1024;                              // bytes ahead

#ifdef __AVX512BW__
#define COMPRESSES
typedef U16 Vector;
typedef __m512i Bytes;
static inline Bytes sixteen(const uint8_t *from) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)from));
}
// The weights of two vectors, by the table, their lower bytes and what stands for the others.
static inline void widened(Bytes table, const uint8_t *lower, const uint8_t *halves, U16 &a, U16 &b) {
    __m512i which = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)halves));
    which = _mm512_or_si512(which, _mm512_slli_epi16(which, 4));
    which = _mm512_and_si512(which, _mm512_set1_epi8(15));
    __m512i low = _mm512_loadu_si512(lower), high = _mm512_shuffle_epi8(table, which);
    a = (U16)_mm512_unpacklo_epi8(low, high), b = (U16)_mm512_unpackhi_epi8(low, high);
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define COMPRESSES
typedef U8 Vector;
typedef __m256i Bytes;
static inline Bytes sixteen(const uint8_t *from) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)from));
}
static inline void widened(Bytes table, const uint8_t *lower, const uint8_t *halves, U8 &a, U8 &b) {
    __m256i which = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)halves));
    which = _mm256_or_si256(which, _mm256_slli_epi16(which, 4));
    which = _mm256_and_si256(which, _mm256_set1_epi8(15));
    __m256i low = _mm256_loadu_si256((const __m256i *)lower);
    __m256i high = _mm256_shuffle_epi8(table, which);
    a = (U8)_mm256_unpacklo_epi8(low, high), b = (U8)_mm256_unpackhi_epi8(low, high);
}
#endif
extern "C" int64_t tiles();

static std::shared_mutex guard;
static auto &known = *new std::unordered_map<const bf16 *, Compressed>;  // outlives all threads

// Whether products of few tokens with a matrix go by this from now on; not: by this one no longer.
extern "C" void compressed(const Compressed *c, int64_t on) {
    std::unique_lock lock(guard);
    auto found = known.find(c->matrix);
    if (on)
        known[c->matrix] = *c;
    else if (found != known.end() && found->second.bytes == c->bytes)
        known.erase(found);
}
// The compressed form of so many rows of a matrix, if it has one; while `lock` is held nobody frees it.
static Compressed compressed_of(const bf16 *w, int64_t in, int64_t out,
                                std::shared_lock<std::shared_mutex> &lock) {
    lock = std::shared_lock(guard);
    auto found = known.find(w);
    bool fits = found != known.end() && found->second.in == in && out <= found->second.out;
    if (!fits) lock.unlock();
    return fits ? found->second : Compressed{};
}

// Bytes of a block's columns, as two vectors come out of them: eights of both in turn.
static inline void laid_as_read(const uint8_t *columns, uint8_t *to) {
    for (int64_t n = 0; n < COLUMNS; n += 8)
        memcpy(to + n, columns + n % 16 * (COLUMNS / 16) + n / 16 * 8, 8);
}
// Compresses [out, in], in fours and in 64s; -1 where it would take more than `most` patches, and where
// products aren't by it.
extern "C" int64_t compress(const bf16 *w, int64_t in, int64_t out, uint8_t *to, int64_t *patches,
                            int64_t most) {
    int64_t patched = 0, block = 0;
#ifndef COMPRESSES
    return -1;
#endif
    if (tiles()) return -1;
    for (int64_t o = 0; o < out; o += 4, w += 4 * in) {
        int32_t counts[4][128] = {};  // side by side, since the same exponents follow one another
        for (int64_t i = 0; i < 4 * in; i += 4)
            for (int n = 0; n < 4; n++) counts[n][w[i + n] >> 8 & 127]++;
        for (int high = 0; high < 128; high++)
            for (int n = 1; n < 4; n++) counts[0][high] += counts[n][high];
        const uint8_t *table = to;
        memcpy(to + 16, &patched, 8);
        for (int code = 0; code < 8; code++) {
            int best = std::max_element(counts[0], counts[0] + 128) - counts[0];
            counts[0][best] = -1, to[code] = best, to[8 + code] = best | 128;
        }
        to += TABLE;
        for (int64_t i = 0; i < in; i += COLUMNS, to += BLOCK, block++)
            for (int64_t r = 0; r < 4; r++) {
                const bf16 *from = w + r * in + i;
                uint8_t low[COLUMNS], high[COLUMNS], which[COLUMNS], strange = 0;
                for (int64_t c = 0; c < COLUMNS; c++)
                    low[c] = from[c], high[c] = from[c] >> 8 & 127, which[c] = 255;
                for (int code = 0; code < 8; code++)
                    for (int64_t c = 0; c < COLUMNS; c++)
                        which[c] = high[c] == table[code] ? code : which[c];
                for (int64_t c = 0; c < COLUMNS; c++) strange |= which[c];
                for (int64_t c = 0; c < COLUMNS && strange > 7; c++) {
                    if (which[c] < 8) continue;
                    if (patched == most) return -1;
                    int64_t place = (2 * c / COLUMNS * 4 + r) * COLUMNS / 2 + c % (COLUMNS / 2);
                    patches[patched++] = block << 24 | place << 16 | from[c];
                    which[c] = 0;
                }
                for (int64_t c = 0; c < COLUMNS; c++) which[c] |= from[c] >> 15 << 3;
                uint8_t *lows = to + r * COLUMNS, *halves = to + 4 * COLUMNS + r * COLUMNS / 2;
                laid_as_read(low, lows);
                laid_as_read(which, high);
                for (int64_t n = 0; n < COLUMNS; n += 2) halves[n / 2] = high[n] | high[n + 1] << 4;
            }
    }
    patches[patched] = INT64_MAX;
    return patched;
}

#ifdef COMPRESSES
// Four rows after another of a compressed matrix, R of them at a time, block by block: of each row two
// vectors. fetch: whether to fetch those that follow.
struct Short {
    static const int VECTORS = 2;
    const uint8_t *from;
    const int64_t *patch;
    int64_t block;
    Bytes table;
    Short(const Compressed &c, int64_t row) : block(row / 4 * (c.in / COLUMNS)) {
        int64_t before;
        from = c.bytes + row / 4 * (TABLE + c.in / COLUMNS * BLOCK);
        memcpy(&before, from + 16, sizeof before);
        patch = c.patches + before;
    }
    inline void begin() {
        table = sixteen(from);
        from += TABLE;
    }
    template <int R>
    inline void take(Vector (*own)[R], int64_t, int first, bool fetch) {
#pragma GCC unroll 6
        for (int line = 0; line < BLOCK; line += 64)
            if (fetch) __builtin_prefetch(from + FETCHED + line);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const uint8_t *low = from + (first + r) * COLUMNS;
            const uint8_t *halves = from + 4 * COLUMNS + (first + r) * COLUMNS / 2;
            widened(table, low, halves, own[0][r], own[1][r]);
        }
        if (__builtin_expect(*patch >> 24 == block, 0)) {
            Vector mended[2][R];  // own stays in registers
            memcpy(mended, own, sizeof mended);
            patch = mend(mended, first, R, block, patch);
            memcpy(own, mended, sizeof mended);
        }
        from += BLOCK, block++;
    }
    inline void end() {}
    static const int64_t *__attribute__((noinline)) mend(void *own, int first, int R, int64_t block,
                                                         const int64_t *patch) {
        for (const int64_t each = COLUMNS / 2; *patch >> 24 == block; patch++) {
            int64_t place = *patch >> 16 & 255, vector = place / each, row = vector % 4 - first;
            int64_t at = (vector / 4 * R + row) * each + place % each;
            if (row >= 0 && row < R) memcpy((bf16 *)own + at, patch, sizeof(bf16));  // its lower bytes
        }
        return patch;
    }
};
// Whether it is of the matrix as this is now.
extern "C" int64_t compressed_matches(const Compressed *c) {
    for (int64_t row = 0; row < c->out; row += 4) {
        Short rows(*c, row);
        rows.begin();
        for (int64_t i = 0; i < c->in; i += COLUMNS) {
            Vector own[2][4];
            rows.take(own, i, 0, true);
            for (int64_t r = 0; r < 4; r++)
                for (int64_t half = 0; half < 2; half++)
                    if (memcmp(&own[half][r], c->matrix + (row + r) * c->in + i + half * COLUMNS / 2, COLUMNS))
                        return 0;
        }
    }
    return 1;
}
#endif
