// Matrices of bf16 as products read them, and in 12 bits a weight, from which each weight is had again to
// the last bit. Products of few tokens wait for the memory, of many for the sums of vectors, which columns
// that lie side by side don't need.
//
// A matrix is laid in strips of 32 outputs (the last one's rest zeros), of each pair of inputs all outputs'
// side by side. Sign and upper seven bits of a weight's exponent are one of sixteen values (DFloat11, arXiv
// 2504.11651, found how few of them a trained matrix has; its codes are of any length, for a GPU), the other
// eight bits as they are. A strip has a table of its own, of the eight commonest exponents, and in the same
// line how many patches come before its; then blocks of two pairs: of each the lower bytes, then of each the
// halves of bytes that say which, both as two vectors come out of them. Weights with other exponents are
// patches, each block << 24 | place in the block << 16 | weight, by blocks, and one that no block has at the
// end. Needs AVX2 or AVX-512 with its instructions on bytes.

#pragma once
#include "numbers.h"
#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

struct Compressed {
    const bf16 *matrix;
    int64_t in, out;
    const uint8_t *bytes;
    const int64_t *patches;
};
const int64_t STRIP = 32, TABLE = 64, BLOCK = 192;  // outputs; bytes of both
// Bytes ahead that are fetched into the nearest cache, and further ones into the second: a core with tiles
// reads 13 GB/s of a memory that others read 34 of, and waits longer for each line.
const int64_t FETCHED = 8 * 1024;
#ifdef __AMX_BF16__
const int64_t FAR = 24 * 1024;
#else
const int64_t FAR = 0;
#endif

// What a product makes of a strip at a time: of two halves of it WIDE outputs in each pass over it.
#ifdef __AVX512F__
typedef U16 Pairs;
typedef F16 Sums;
#else
typedef U8 Pairs;
typedef F8 Sums;
#endif
const int WIDE = sizeof(Sums) / 4, PASSES = 16 / WIDE;

#ifdef __AVX512BW__
#define COMPRESSES
typedef __m512i Bytes;
static inline Bytes four_times(const uint8_t *from) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)from));
}
// The weights of two vectors, by the table, their lower bytes and what stands for the others.
static inline void widened(Bytes table, const uint8_t *lower, const uint8_t *halves, int, Pairs &a,
                           Pairs &b) {
    __m512i which = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)halves));
    which = _mm512_srlv_epi16(which, _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1));
#ifdef __AVX512VBMI__  // two bits more, by which the table's copies are told apart, don't matter
    __m512i high = _mm512_permutexvar_epi8(which, table);
#else
    __m512i high = _mm512_shuffle_epi8(table, _mm512_and_si512(which, _mm512_set1_epi8(15)));
#endif
    __m512i low = _mm512_loadu_si512(lower);
    a = (Pairs)_mm512_unpacklo_epi8(low, high), b = (Pairs)_mm512_unpackhi_epi8(low, high);
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define COMPRESSES
typedef __m256i Bytes;
static inline Bytes four_times(const uint8_t *from) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)from));
}
static inline void widened(Bytes table, const uint8_t *lower, const uint8_t *halves, int pass, Pairs &a,
                           Pairs &b) {
    __m256i which = _mm256_loadu_si256((const __m256i *)halves);
    which = _mm256_srl_epi16(which, _mm_cvtsi32_si128(4 * pass));
    which = _mm256_and_si256(which, _mm256_set1_epi8(15));
    __m256i low = _mm256_loadu_si256((const __m256i *)(lower + 32 * pass));
    __m256i high = _mm256_shuffle_epi8(table, which);
    a = (Pairs)_mm256_unpacklo_epi8(low, high), b = (Pairs)_mm256_unpackhi_epi8(low, high);
}
#endif

static std::shared_mutex guard;
static auto &known = *new std::unordered_map<const bf16 *, Compressed>;  // outlives all threads

// Whether products with a matrix go by this from now on; not: by this one no longer.
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

// Up to 32 rows of a matrix as a strip of it.
static void lay(const bf16 *w, int64_t rows, int64_t in, bf16 *to) {
    static thread_local std::vector<bf16> whole;
    if (rows < STRIP) {
        whole.assign(STRIP * in, 0);
        memcpy(whole.data(), w, rows * in * sizeof(bf16));
        w = whole.data();
    }
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + 32 <= in; i += 32)
        for (int half = 0; half < 2; half++) {
            const bf16 *from = w + 16 * half * in + i;
            for (int r = 0; r < 16 && rows == STRIP; r++) __builtin_prefetch(from + (STRIP + r) * in, 0, 2);
            transposed16(from, in, (__m512i *)to + i + half, 2);
        }
#endif
    for (; i < in; i += 2)
        for (int r = 0; r < STRIP; r++) memcpy(to + STRIP * i + 2 * r, w + r * in + i, 4);
}
// 64 bytes of a strip's pair, as two vectors come out of them: eights of both halves in turn.
static inline void laid_as_read(const uint8_t *pair, uint8_t *to) {
    for (int n = 0; n < 64; n += 8) memcpy(to + n % 32 * 2 + n / 32 * 8, pair + n, 8);
}
// Compresses [out, in], in sixteens; -1 where it would take more than `most` patches, and where products
// aren't by it.
extern "C" int64_t compress(const bf16 *w, int64_t in, int64_t out, uint8_t *to, int64_t *patches,
                            int64_t most) {
    int64_t patched = 0, block = 0;
#ifdef COMPRESSES
    std::vector<bf16> laid(STRIP * in);
    for (int64_t o = 0; o < out; o += STRIP, w += STRIP * in) {
        lay(w, std::min(STRIP, out - o), in, laid.data());
        int32_t counts[4][128] = {};  // side by side, since the same exponents follow one another
        for (int64_t i = 0; i < STRIP * in; i += 4)
            for (int n = 0; n < 4; n++) counts[n][laid[i + n] >> 8 & 127]++;
        for (int high = 0; high < 128; high++)
            for (int n = 1; n < 4; n++) counts[0][high] += counts[n][high];
        const uint8_t *table = to;
        memcpy(to + 16, &patched, 8);
        for (int code = 0; code < 8; code++) {
            int best = std::max_element(counts[0], counts[0] + 128) - counts[0];
            counts[0][best] = -1, to[code] = best, to[8 + code] = best | 128;
        }
        to += TABLE;
        for (int64_t i = 0; i < in; i += 2) {
            const bf16 *from = &laid[STRIP * i];
            int64_t second = i % 4 / 2;
            uint8_t low[64], high[64], which[64], strange = 0;
            for (int c = 0; c < 64; c++)
                low[c] = from[c], high[c] = from[c] >> 8 & 127, which[c] = 255;
            for (int code = 0; code < 8; code++)
                for (int c = 0; c < 64; c++) which[c] = high[c] == table[code] ? code : which[c];
            for (int c = 0; c < 64; c++) strange |= which[c];
            for (int c = 0; c < 64 && strange > 7; c++) {
                if (which[c] < 8) continue;
                if (patched == most) return -1;
                patches[patched++] = block << 24 | (64 * second + c) << 16 | from[c];
                which[c] = 0;
            }
            for (int c = 0; c < 64; c++) which[c] |= from[c] >> 15 << 3;
            uint8_t *halves = to + 128 + 32 * second;
            laid_as_read(low, to + 64 * second);
            laid_as_read(which, high);
            for (int n = 0; n < 32; n++) halves[n] = high[n] | high[n + 32] << 4;
            if (second) to += BLOCK, block++;
        }
    }
    patches[patched] = INT64_MAX;
    return patched;
#else
    return -1;
#endif
}

// Strips of a matrix that is laid so, one after another. take: of two pairs of inputs from i on what a strip
// has for P parts of its outputs.
struct Laid {
    const bf16 *from;
    int64_t in;
    Laid strip(int64_t n) const { return {from + n * STRIP * in, in}; }
    inline void begin() {}
    template <int P>
    inline void take(Pairs (*own)[2 * P], int64_t i, int pass, int64_t) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++)
#pragma GCC unroll 2
            for (int part = 0; part < 2 * P; part++) {
                int64_t at = STRIP * (i + 2 * j) + 32 * (part % 2) + 2 * WIDE * (pass + part / 2);
                own[j][part] = read<Pairs>(from + at);
            }
    }
};
#ifdef COMPRESSES
// The same of a compressed one.
struct Short {
    const Compressed *form;
    int64_t first;  // block
    const uint8_t *from;
    const int64_t *patch;
    int64_t next;  // block of this strip that has a patch
    Bytes table;
    Short strip(int64_t n) const {
        int64_t blocks = form->in / 4;
        Short made = *this;
        made.first = n * blocks, made.from = form->bytes + n * (TABLE + blocks * BLOCK);
        return made;
    }
    inline void begin() {
        int64_t before;
        memcpy(&before, from + 16, sizeof before);
        patch = form->patches + before, next = (*patch >> 24) - first;
        table = four_times(from);
        from += TABLE;
    }
    // beyond: bytes of strips that go by at the same time.
    template <int P>
    inline void take(Pairs (*own)[2 * P], int64_t i, int pass, int64_t beyond) {
        int64_t block = i / 4;
        const uint8_t *here = from + i * (BLOCK / 4), *ahead = here + FETCHED + beyond;
#pragma GCC unroll 3
        for (int line = 0; line < BLOCK; line += 64) {
            __builtin_prefetch(ahead + line);
            if (FAR) __builtin_prefetch(ahead + line + FAR, 0, 1);
        }
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++)
#pragma GCC unroll 2
            for (int p = 0; p < P; p++) {
                const uint8_t *halves = here + 128 + 32 * j;
                widened(table, here + 64 * j, halves, pass + p, own[j][2 * p], own[j][2 * p + 1]);
            }
        if (__builtin_expect(block == next, 0)) {
            Pairs mended[2][2 * P];  // own stays in registers
            memcpy(mended, own, sizeof mended);
            patch = mend(mended, pass, P, first + block, patch);
            next = (*patch >> 24) - first;
            memcpy(own, mended, sizeof mended);
        }
    }
    static inline const int64_t *mend(void *own, int pass, int P, int64_t block, const int64_t *patch) {
        for (const int64_t each = 2 * WIDE; *patch >> 24 == block; patch++) {
            int64_t place = *patch >> 16 & 127, part = place % 32 / each - pass;
            bf16 *vector = (bf16 *)own + (place / 64 * 2 * P + 2 * part + place / 32 % 2) * each;
            if (part >= 0 && part < P) memcpy(vector + place % each, patch, sizeof(bf16));  // its lower bytes
        }
        return patch;
    }
};
// Whether it is of the matrix as this is now.
extern "C" int64_t compressed_matches(const Compressed *c) {
    std::vector<bf16> laid(STRIP * c->in);
    for (int64_t o = 0; o < c->out; o += STRIP) {
        lay(c->matrix + o * c->in, std::min(STRIP, c->out - o), c->in, laid.data());
        for (int pass = 0; pass < PASSES; pass++) {
            Laid wanted{laid.data(), c->in};
            Short found = Short{c}.strip(o / STRIP);
            found.begin();
            for (int64_t i = 0; i < c->in; i += 4) {
                Pairs own[2][2][2];
                found.take<1>(own[0], i, pass, 0);
                wanted.take<1>(own[1], i, pass, 0);
                if (memcmp(own[0], own[1], sizeof own[0])) return 0;
            }
        }
    }
    return 1;
}
#endif
