// Attention of new tokens over the slots of their rows (native.cpp). Names: E a head's width, 16 or 32
// numbers of it at a time.

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
// What they attend to: runs of 16 slots of one row and head of keys, of which those from `whole` on aren't
// seen by all.
struct Held {
    const bf16 *const *keys, *const *values;
    int64_t whole, step, apart;  // step: from slot to slot; apart: from a query's scores to the next one's
    float scale;
    const __m512i *pairs;  // the values as tiles are read
};
// Scores of M queries for the slots from `first` on, whose keys are transposed. A query's sum is made in
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
        write(of[m].scores + first, sum);
    }
}
// Of a query's scores its shares, not yet divided by their sum, of which 1 is returned.
static float shared(const Asking &of, int64_t whole) {
    F16 most = (F16){} - INFINITY, total = (F16){};
    for (int64_t s = 0; s < whole; s += 16) {
        F16 score = read<F16>(of.scores + s);
        most = score > most ? score : most;
    }
    float top = _mm512_reduce_max_ps((__m512)most);
    for (int64_t s = 0; s < whole; s += 16) {
        F16 score = read<F16>(of.scores + s);
        F16 made = exp16(score - top);
        made = score == (F16){} - INFINITY ? (F16){} : made;
        total += made;
        store16(of.shares + s, made);
    }
    return 1 / sum16(total);
}
// What the next row's queries will read, fetched while this one's are answered: of its keys and of its values
// `lines` each, `each` of both a run and head.
struct Ahead {
    const char *keys, *values;
    int64_t lines, each, at = 0;
    inline void fetch() {
        for (int64_t to = at + each < lines ? at + each : lines; at < to; at++) {
            __builtin_prefetch(keys + 64 * at, 0, 2);
            __builtin_prefetch(values + 64 * at, 0, 2);
        }
    }
};
// Takes from queries' scores those of slots from first to last - 1 that they don't see.
static inline void hide(const Asking *of, int64_t count, int64_t first, int64_t last) {
    for (int64_t q = 0; q < count; q++)
        for (int64_t s = of[q].allowed ? first : std::max(first, of[q].slots); s < last; s++)
            if (!of[q].sees(s)) of[q].scores[s] = -INFINITY;
}
// 32 numbers, of which every other four come from each.
static inline void put_apart(bf16 *to, F16 low, F16 high) {
    store16(to, __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
    store16(to + 16, __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29,
                                             30, 31));
}
#include "tiled_attention.h"
// What M queries make of values, in runs of 16 slots that lie at `from`: two slots at a time.
template <int E32, int M>
static inline void gathered(const Asking *of, const bf16 *const *from, int64_t runs, int64_t step,
                            const float *factor) {
    __m512 sum[M][2 * E32] = {};
    for (int64_t run = 0; run < runs; run++) {
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
            put_apart(of[m].out + 32 * c, low, high);
        }
}
// Queries and the first runs of what they attend to.
template <int E32>
static void mixed(const Asking *of, int64_t count, const Held &held, int64_t runs, Ahead &next) {
#ifdef TILES
    if (tiles()) return mixed_by_tiles<E32>(of, count, held, runs, next);
#endif
    constexpr int MANY = E32 > 2 ? 2 : 4;
    __m512i columns[16 * E32];
    float factor[MANY];
    for (int64_t run = 0; run < runs; run++) {
        next.fetch();
        for (int c = 0; c < E32; c++) transposed16(held.keys[run] + 32 * c, held.step, columns + 16 * c, 1);
        int64_t q = 0;
        for (; q + 2 <= count; q += 2) scored<E32, 2>(of + q, columns, 16 * run, held.scale);
        if (q < count) scored<E32, 1>(of + q, columns, 16 * run, held.scale);
    }
    hide(of, count, 16 * held.whole, 16 * runs);
    for (int64_t q = 0; q < count; q += MANY) {
        int64_t left = count - q < MANY ? count - q : MANY;
        for (int64_t m = 0; m < left; m++) factor[m] = shared(of[q + m], 16 * runs);
        if (left == 1) gathered<E32, 1>(of + q, held.values, runs, held.step, factor);
        if (left == 2) gathered<E32, 2>(of + q, held.values, runs, held.step, factor);
        if (left == 3) gathered<E32, MANY - 1>(of + q, held.values, runs, held.step, factor);
        if (left == 4) gathered<E32, MANY>(of + q, held.values, runs, held.step, factor);
    }
}

const int64_t TOGETHER = 16;  // queries whose scores are held at a time

// Attention of every token's heads, those of the keys' heads from..to - 1; all: numbers from one token's
// heads to the next one's. Runs of 16 slots begin at multiples of 16, so that a token comes out the same in
// a long pass and alone; the last ones, of which a row's tokens see different parts, are copied, zeros where
// no token sees anything: what isn't a number there breaks all that share it.
static void attended(const Body &b, const Pass &p, int64_t layer, const bf16 *heads, int64_t all,
                     bf16 *out, int64_t from, int64_t to) {
    int64_t E = b.width, step = b.kv_heads * E, group = b.heads / b.kv_heads;
    int64_t tokens = p.rows * p.n;
    static thread_local std::vector<bf16> copies, shares;
    static thread_local std::vector<float> scores;
    static thread_local std::vector<Asking> asking;
    static thread_local std::vector<const bf16 *> keys, values;
#ifdef TILES
    Shapes shapes(ROWS);
    if (tiles()) _tile_loadconfig(&shapes);
#endif
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
                memcpy(&copies[side * apart + (s - 16 * whole) * step + from * E],
                       at[side] + s * step + from * E, (to - from) * E * sizeof(bf16));
        }
        int64_t count = asking.size() * group, heads_here = to - from;
        Ahead next{};
        if (end < tokens) {
            int64_t row = place(end) / across, seen = p.width < p.lens[row] ? p.width : p.lens[row];
            int64_t base = layer * p.layer_step + row * p.row_step;
            next = {(const char *)(p.keys + base), (const char *)(p.values + base), seen * step / 32,
                    seen * step / 32 / (std::max<int64_t>(runs, 1) * heads_here) + 1};
        }
        keys.resize(runs), values.resize(runs);
        int64_t wide = 32 * ((runs + 1) / 2);
        scores.resize(TOGETHER * wide), shares.resize(TOGETHER * wide);
        Held held{keys.data(), values.data(), whole, step, wide, (float)b.scale, nullptr};
        for (int64_t h = from; h < to; h++) {
            for (int64_t run = 0; run < runs; run++) {
                int64_t own = (run < whole ? run : run - whole) * 16 * step + h * E;
                keys[run] = (run < whole ? at[0] : copies.data()) + own;
                values[run] = (run < whole ? at[1] : copies.data() + apart) + own;
            }
#ifdef TILES
            auto pair = E == 32 ? paired<1> : E == 64 ? paired<2> : E == 96 ? paired<3> : paired<4>;
            if (tiles()) held.pairs = pair(held, runs);
#endif
            for (int64_t q = 0; q < count; q += TOGETHER) {
                Asking of[TOGETHER];
                int64_t left = count - q < TOGETHER ? count - q : TOGETHER, last = 0;
                for (int64_t i = 0; i < left; i++) {
                    of[i] = asking[(q + i) / group];
                    int64_t own = (h * group + (q + i) % group) * E;
                    of[i].query += own, of[i].out += own;
                    of[i].scores = &scores[i * wide], of[i].shares = &shares[i * wide];
                    last = last < of[i].slots ? of[i].slots : last;
                }
                auto mix = E == 32 ? mixed<1> : E == 64 ? mixed<2> : E == 96 ? mixed<3> : mixed<4>;
                mix(of, left, held, (last + 15) / 16, next);
            }
        }
    }
#ifdef TILES
    if (tiles()) _tile_release();
#endif
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
        for (int e = 0; e < E16; e += 2)
            made = dot32(made, pairs<U16>(x + e * 16), pairs<U16>(key + e * 16));
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
        U8 pairs = read<U8>(from);
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
        F16 score = read<F16>(weights + s), made = exp16(score - most);
        made = score == (F16){} - INFINITY ? (F16){} : made;
        total += made;
        write(weights + s, made);
    }
    for (int64_t s = 0; s < slots; s++)
        if (weights[s] != 0) query.add(values + s * step, weights[s]);
    query.put(out, 1 / sum16(total));
}

static void attended(const Body &b, const Pass &p, int64_t layer, const bf16 *heads, int64_t all,
                     bf16 *out, int64_t from, int64_t to) {
    static thread_local std::vector<float> room;
    room.resize(p.width + 16);
    float *weights = room.data();
    int64_t E = b.width, step = b.kv_heads * E, group = b.heads / b.kv_heads;
    for (int64_t t = 0; t < p.rows * p.n; t++) {
        int64_t at = p.places ? p.places[t] : t, across = p.places ? p.across : p.n;
        int64_t row = at / across, n = at % across, slots = p.lens[row] + (p.block ? p.wide : n + 1);
        if (p.width < slots) slots = p.width;
        const uint8_t *allowed = p.block ? p.block + row * p.block_row + n * p.wide : nullptr;
        int64_t open = allowed ? p.lens[row] : slots;
        for (int64_t h = from * group; h < to * group; h++) {
            int64_t at = layer * p.layer_step + row * p.row_step + h / group * E;
            const bf16 *q = heads + t * all + h * E;
            auto mix = E == 32 ? mixed<2> : E == 64 ? mixed<4> : E == 96 ? mixed<6> : mixed<8>;
            mix(q, p.keys + at, p.values + at, step, slots, open, allowed, (float)b.scale, weights,
                out + (t * b.heads + h) * E);
        }
    }
}
#endif
