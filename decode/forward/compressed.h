// Matrices of bf16 in 12 bits a weight, from which each weight is had again to the last bit, for products
// of few tokens, which wait for the memory. Needs AVX-512 and its instructions on bytes.
//
// Sign and upper seven bits of the exponent are one of sixteen values (DFloat11, arXiv 2504.11651, found
// how few of them a trained matrix has; its codes are of any length, for a GPU), the other eight bits as they
// are. Four rows have a table of their own, of the eight commonest exponents, and in the same line how many
// patches come before theirs; then blocks of 64 columns: of each row the lower bytes, then of each row the
// halves of bytes that say which. In both the columns lie as two vectors of 32 come out of them. Weights
// with other exponents are patches, each block << 24 | place in the block << 16 | weight, by blocks, and
// one that no block has at the end.

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
const int64_t COLUMNS = 64, TABLE = 64, BLOCK = 4 * (COLUMNS + COLUMNS / 2);  // bytes of both
const int64_t FETCHED = 12 * 1024;                                           // bytes ahead

static std::shared_mutex guard;
static std::unordered_map<const bf16 *, Compressed> known;

// Whether products of few tokens with a matrix go by this from now on; not: by this one no longer.
extern "C" void compressed(const Compressed *c, int64_t on) {
    std::unique_lock lock(guard);
    auto found = known.find(c->matrix);
    if (on)
        known[c->matrix] = *c;
    else if (found != known.end() && found->second.bytes == c->bytes)
        known.erase(found);
}
// The compressed form of so many rows of a matrix, if it has one.
static Compressed compressed_of(const bf16 *w, int64_t in, int64_t out) {
    std::shared_lock lock(guard);
    auto found = known.find(w);
    bool fits = found != known.end() && found->second.in == in && out <= found->second.out;
    return fits ? found->second : Compressed{};
}

// Bytes of a block's columns, as two vectors of 32 come out of them: eights of both in turn.
static inline void laid_as_read(const uint8_t *columns, uint8_t *to) {
    for (int64_t n = 0; n < COLUMNS; n += 8) memcpy(to + n, columns + n % 16 * 4 + n / 16 * 8, 8);
}
// Compresses [out, in], in fours and in 64s; -1 where it would take more than `most` patches, and where
// products aren't by it.
extern "C" int64_t compress(const bf16 *w, int64_t in, int64_t out, uint8_t *to, int64_t *patches,
                            int64_t most) {
    int64_t patched = 0, block = 0;
#ifdef __AVX512BW__
    if (tiles()) return -1;
#else
    return -1;
#endif
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
                    int64_t place = (c / 32 * 4 + r) * 32 + c % 32;
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

#ifdef __AVX512BW__
struct Weights {
    U16 pairs[2][4];  // of both halves of a block, of each row
};
static void __attribute__((noinline)) mend(Weights &own, int64_t block, const int64_t *&patch) {
    for (; *patch >> 24 == block; patch++)
        memcpy((char *)&own + 2 * (*patch >> 16 & 255), patch, sizeof(bf16));  // the lower bytes
}
// As `rows` has them, to the last bit: `out` outputs from `first` on, a multiple of four.
template <int M>
static void compressed_rows(const Compressed &c, const bf16 *bias, const bf16 *x, bf16 *y, int64_t first, int64_t out,
                            int64_t step) {
    const __m512i half = _mm512_set1_epi8(15);
    const int64_t in = c.in, groups = first / 4;
    const uint8_t *from = c.bytes + groups * (TABLE + in / COLUMNS * BLOCK);
    int64_t block = groups * (in / COLUMNS), patch_at;
    memcpy(&patch_at, from + 16, 8);
    const int64_t *patch = c.patches + patch_at;
    for (int64_t o = 0; o < out; o += 4) {
        F16 part[M][4] = {}, sum[M][4];
        __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)from));
        from += TABLE;
        for (int64_t i = 0; i < in; i += COLUMNS, from += BLOCK, block++) {
            Weights own;
#pragma GCC unroll 6
            for (int line = 0; line < BLOCK; line += 64) __builtin_prefetch(from + FETCHED + line);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                __m512i low = _mm512_loadu_si512(from + r * COLUMNS);
                const uint8_t *halves = from + 4 * COLUMNS + r * COLUMNS / 2;
                __m512i which = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)halves));
                which = _mm512_and_si512(
                    _mm512_or_si512(which, _mm512_slli_epi16(which, 4)), half);
                __m512i high = _mm512_shuffle_epi8(table, which);
                own.pairs[0][r] = (U16)_mm512_unpacklo_epi8(low, high);
                own.pairs[1][r] = (U16)_mm512_unpackhi_epi8(low, high);
            }
            if (__builtin_expect(*patch >> 24 == block, 0)) {
                Weights mended = own;  // own stays in registers
                mend(mended, block, patch);
                own = mended;
            }
#pragma GCC unroll 2
            for (int part32 = 0; part32 < 2; part32++)
#pragma GCC unroll 6
                for (int m = 0; m < M; m++) {
                    U16 given = pairs16(x + m * in + i + 32 * part32);
#pragma GCC unroll 4
                    for (int r = 0; r < 4; r++)
                        part[m][r] = dot32(part[m][r], own.pairs[part32][r], given);
                }
        }
#pragma GCC unroll 6
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) sum[m][r] = part[m][r];
        put<M>(sum, bias, y, o, step);
    }
}
static void (*const by_compressed[])(const Compressed &, const bf16 *, const bf16 *, bf16 *, int64_t,
                                     int64_t, int64_t) = {
    compressed_rows<1>, compressed_rows<2>, compressed_rows<3>,
    compressed_rows<4>, compressed_rows<5>, compressed_rows<6>};
#endif
