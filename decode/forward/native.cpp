// A frozen Llama-like body on a few new tokens, in bf16 on a CPU: one call for all layers, or for all of a
// drafted chain, on the model's own weights (native.py calls it; lean.py and lean_heads.py have the same in
// torch).
//
// Sums are fp32; what torch holds in bf16 between its calls is rounded to bf16 here too. A token's
// result doesn't depend on which others come with it. Names: T tokens (rows times new ones), H
// hidden, I the feed-forward's width, E a head's width, S slots.

#include "../engine/round.h"
#include "products.h"

// A convolution of each token and the one before it in its row, [2, H] and what a map [2 H / 16, H] of the
// token adds to them, 16 numbers alike; null: there is none.
struct TwoTap {
    const bf16 *base, *delta;
};
// Weights and biases (null: none). Without `out` or `gate` that half of the layer is left out. taps: over what
// attention reads and gives, and the feed-forward.
struct Layer {
    const bf16 *norm, *qkv[3], *qkv_bias[3], *q_norm, *k_norm, *out, *out_bias, *after;
    const bf16 *gate, *gate_bias, *up, *up_bias, *down, *down_bias;
    TwoTap taps[4];
};
struct Body {
    int64_t layers, hidden, heads, kv_heads, width;
    const int64_t *inner;  // of each layer's feed-forward
    const bf16 *embedding, *norm, *cos, *sin;  // no embedding: layer 0 reads the states given
    double epsilon, scale;
    const Layer *layer;
    // Of a head that reads a state beside each token (`pairs`): norms of both, and the map of them to
    // what layer 0 reads (null: it reads both); which is also what layer 0 adds to, but without a
    // map the state, `normed` or as it came. fed_normed: what stands for the next token's state is;
    // beside: the state is added to what the map gives.
    int64_t pairs, normed, fed_normed, beside;
    const bf16 *of_token, *of_state, *front, *front_bias;
    int64_t threads;
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
    // Which of `states` each token's row of `side` [T, taps * H] holds side by side; -1: of `out`.
    const int64_t *tapped;
    int64_t taps;
    bf16 *side;
};
// What foretells an LM head's logits: a map of what it reads to `rank` numbers, and one of these. The rows of
// the `least` best of them are read, and of as many more as reach the least of that many groups' best.
struct Preview {
    const bf16 *down, *up;
    int64_t rank, least;
};
// How the next tokens of rows are drafted, one after another: the LM head's `size` rows of tokens
// `ids` (null: of the first), the temperature (0: greedy), and the noise of row b and level k at
// race + b * race_row + k * race_step (null: none). context: positions that there are. sure: [rows,
// steps], log of the share of the best score in all (null: unasked). pending: the token before the
// first, of a head whose states beside all tokens, `given` a row, are known beforehand (null: each
// is what was made of the token before). from: of each row, levels of its noise to leave out (null:
// none).
struct Chain {
    int64_t steps, size, context, slots, race_row, race_step, given;
    const bf16 *head, *bias;
    const int64_t *ids, *pending;
    const float *race;
    double temperature;
    float *sure;
    const int64_t *from;
    int64_t beside;  // from one call's states side by side to the next one's
    const Preview *preview;  // null: all rows are read
};

// Linear maps of one input x [tokens, in], their outputs side by side in y [tokens, all].
struct Map {
    const bf16 *weight, *bias;
    int64_t out;
};
extern "C" void maps(const Map *map, int64_t count, const bf16 *x, bf16 *y, int64_t tokens,
                     int64_t in, int64_t all, int64_t threads) {
    Threads here(threads);
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

#include "attention.h"

static void attended(const Body &b, const Pass &p, int64_t layer, const bf16 *heads, int64_t all,
                     bf16 *out) {
    split(b.kv_heads, p.rows * p.n * p.width * b.heads * b.width, [&](int64_t from, int64_t to) {
        attended(b, p, layer, heads, all, out, from, to);
    });
}

// A token's heads of queries, or of keys, normed and turned.
static void placed(const Body &b, const Pass &p, int64_t t, const bf16 *norm, bf16 *own,
                   int64_t heads) {
    for (int64_t E = b.width; heads--; own += E) {
        if (norm) normed(own, norm, own, E, b.epsilon);
        turned(own, b.cos + p.positions[t] * E, b.sin + p.positions[t] * E, E);
    }
}
// The layer's keys and values of x [T, in], which go to their slots; made at `sides`, rows of `all`.
static void kept(const Body &b, const Pass &p, int64_t index, const bf16 *x, int64_t in, bf16 *sides,
                 int64_t all) {
    const Layer &layer = b.layer[index];
    int64_t T = p.rows * p.n, kv = b.kv_heads * b.width;
    product(layer.qkv[1], layer.qkv_bias[1], x, sides, T, in, kv, all);
    product(layer.qkv[2], layer.qkv_bias[2], x, sides + kv, T, in, kv, all);
    for (int64_t t = 0; t < T; t++, sides += all) {
        placed(b, p, t, layer.k_norm, sides, b.kv_heads);
        int64_t at = index * p.layer_step + p.slots[t] * kv;
        memcpy(p.keys + at, sides, kv * sizeof(bf16));
        memcpy(p.values + at, sides + kv, kv * sizeof(bf16));
    }
}
// The layer's queries, keys and values, turned, of x [T, in]; new keys and values go to their slots.
static void entered(const Body &b, const Pass &p, int64_t index, const bf16 *x, int64_t in,
                    bf16 *heads) {
    const Layer &layer = b.layer[index];
    int64_t T = p.rows * p.n, q = b.heads * b.width, all = q + 2 * b.kv_heads * b.width;
    product(layer.qkv[0], layer.qkv_bias[0], x, heads, T, in, q, all);
    for (int64_t t = 0; t < T; t++) placed(b, p, t, layer.q_norm, heads + t * all, b.heads);
    kept(b, p, index, x, in, heads + q, all);
}
// Keys and values of the states given, in every layer; nothing attends.
extern "C" void keep(const Body *b, const Pass *p) {
    Threads here(b->threads);
    int64_t all = 2 * b->kv_heads * b->width;
    std::vector<bf16> sides(p->rows * p->n * all);
    for (int64_t l = p->first; l < p->last; l++)
        kept(*b, *p, l, p->given, b->hidden, sides.data(), all);
}

static void added(bf16 *x, const bf16 *more, int64_t size) {
    for (int64_t i = 0; i < size; i += 16) store16(x + i, wide16(x + i) + wide16(more + i));
}

// Over rows of n tokens.
static void convolved(const TwoTap &by, bf16 *x, int64_t T, int64_t n, int64_t H) {
    if (!by.base) return;
    int64_t G = H / 16;
    std::vector<bf16> more(2 * G * T);
    product(by.delta, nullptr, x, more.data(), T, H, 2 * G, 2 * G);
    for (int64_t t = T - 1; t >= 0; t--)
        for (int64_t g = 0; g < G; g++) {
            bf16 *own = x + t * H + 16 * g;
            const bf16 *now = &more[2 * G * t + g];
            F16 made = (wide16(by.base + 16 * g) + wide(now[0])) * wide16(own);
            if (t % n) made += (wide16(by.base + H + 16 * g) + wide(now[G])) * wide16(own - H);
            store16(own, made);
        }
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

// Tokens that a pass may have; 0 where this is the fastest for none.
extern "C" int64_t most() {
#ifdef __x86_64__
    return 2048;
#else
    return 0;
#endif
}

extern "C" void body(const Body *model, const Pass *pass) {
    const Body &b = *model;
    const Pass &p = *pass;
    Threads here(b.threads);
    int64_t T = p.rows * p.n, H = b.hidden, E = b.width;
    std::vector<bf16> x(2 * T * H), more(T * H), heads(T * (b.heads + 2 * b.kv_heads) * E);
    std::vector<bf16> out(T * b.heads * E), inner(2 * T * *std::max_element(b.inner, b.inner + b.layers));
    begun(b, p, p.states, x.data());
    for (int64_t l = p.first; l < p.last; l++) {
        const Layer &layer = b.layer[l];
        bf16 *now = p.states + (l - p.first + 1) * T * H;
        memcpy(now, now - T * H, T * H * sizeof(bf16));
        if (layer.out) {
            bool both = l == 0 && b.pairs && !b.front;
            for (int64_t t = 0; t < T && !both; t++)
                normed(now + t * H, layer.norm, &x[t * H], H, b.epsilon);
            convolved(layer.taps[0], x.data(), T, p.n, H);
            entered(b, p, l, x.data(), both ? 2 * H : H, heads.data());
            attended(b, p, l, heads.data(), (b.heads + 2 * b.kv_heads) * E, out.data());
            product(layer.out, layer.out_bias, out.data(), more.data(), T, b.heads * E, H, H);
            convolved(layer.taps[1], more.data(), T, p.n, H);
            added(now, more.data(), T * H);
        }
        if (!layer.gate) continue;
        for (int64_t t = 0; t < T; t++) normed(now + t * H, layer.after, &x[t * H], H, b.epsilon);
        convolved(layer.taps[2], x.data(), T, p.n, H);
        int64_t I = b.inner[l];
        bf16 *gate = inner.data(), *up = gate + T * I;
        product(layer.gate, layer.gate_bias, x.data(), gate, T, H, I, I);
        product(layer.up, layer.up_bias, x.data(), up, T, H, I, I);
        split(T * I / 16, T * I, [&](int64_t from, int64_t to) {
            for (int64_t i = 16 * from; i < 16 * to; i += 16) {
                F16 g = wide16(gate + i);
                store16(gate + i, g / (exp16(-g) + 1.0f) * wide16(up + i));
            }
        });
        product(layer.down, layer.down_bias, gate, more.data(), T, I, H, H);
        convolved(layer.taps[3], more.data(), T, p.n, H);
        added(now, more.data(), T * H);
    }
    for (int64_t t = 0; t < T; t++)
        normed(p.states + ((p.last - p.first) * T + t) * H, b.norm, p.out + t * H, H, b.epsilon);
    bf16 *side = p.side;
    for (int64_t t = 0; t < T; t++)
        for (const int64_t *tap = p.tapped; tap < p.tapped + p.taps; tap++, side += H)
            memcpy(side, (*tap < 0 ? p.out : p.states + *tap * T * H) + t * H, H * sizeof(bf16));
}

// Attention of given queries [T, heads * width] to a layer's slots; the pass says which they see.
extern "C" void attend(const Body *b, const Pass *p, int64_t layer, const bf16 *queries, bf16 *out) {
    attended(*b, *p, layer, queries, b->heads * b->width, out);
}

// The best token at a row's level by its logits; scores: of all tokens, where they are wanted; more:
// what is added to the logits.
static int64_t chosen(const Chain &c, const bf16 *logits, int64_t row, int64_t k, float &most,
                      float *scores = nullptr, const bf16 *more = nullptr) {
    int64_t noise = row * c.race_row + ((c.from ? c.from[row] : 0) + k) * c.race_step, best = 0;
    const float *race = c.race ? c.race + noise : nullptr;
    float by = (float)c.temperature;
    F16 top = (F16){} - INFINITY;
    I16 at = (I16){}, here = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    auto scored = [&](auto score, auto noise) {
        if (by != 0) score /= by;
        return race ? score - noise : score;
    };
    int64_t d = 0;
    for (; d + 16 <= c.size; d += 16, here += 16) {
        F16 noise = race && !c.ids ? read<F16>(race + d) : (F16){};
        for (int i = 0; race && c.ids && i < 16; i++) noise[i] = race[c.ids[d + i]];
        F16 score = scored(more ? wide16(logits + d) + wide16(more + d) : wide16(logits + d), noise);
        if (scores) memcpy(scores + d, &score, sizeof(score));
        I16 over = score > top;
        top = over ? score : top, at = over ? here : at;
    }
    most = -INFINITY;
    for (int i = 0; i < 16; i++)
        if (top[i] > most || (top[i] == most && at[i] < best)) most = top[i], best = at[i];
    for (; d < c.size; d++) {
        float score = scored(more ? wide(logits[d]) + wide(more[d]) : wide(logits[d]),
                             race ? race[c.ids ? c.ids[d] : d] : 0.0f);
        if (scores) scores[d] = score;
        if (score > most) most = score, best = d;
    }
    return c.ids ? c.ids[best] : best;
}

// The LM head's logits [B, size] at level k of what it reads [B, H]: where there is a preview those that may
// be chosen, others as foretold.
static void read_out(const Chain &c, const bf16 *x, bf16 *logits, int64_t B, int64_t H, int64_t k) {
    if (!c.preview) return product(c.head, c.bias, x, logits, B, H, c.size, c.size);
    const Preview &by = *c.preview;
    // Groups of tokens, every 16th of a block; of few tokens smaller ones.
    const int64_t group = std::clamp<int64_t>(c.size / (4 * by.least), 1, 32), block = 16 * group;
    const int64_t groups = c.size / block * 16;
    std::vector<bf16> low(B * by.rank);
    std::vector<float> scores(c.size), best(groups), sorted;
    product(by.down, nullptr, x, low.data(), B, H, by.rank, by.rank);
    product(by.up, c.bias, low.data(), logits, B, by.rank, c.size, c.size);
    for (int64_t b = 0; b < B; b++, logits += c.size, x += H) {
        float most, least = -INFINITY;
        chosen(c, logits, b, k, most, scores.data());
        for (int64_t g = 0; g < groups; g += 16) {
            F16 top = read<F16>(&scores[g * group]);
            for (int64_t i = 16; i < block; i += 16) {
                F16 next = read<F16>(&scores[g * group + i]);
                top = next > top ? next : top;
            }
            memcpy(&best[g], &top, sizeof(top));
        }
        if (groups > by.least) {
            sorted = best;
            std::nth_element(sorted.begin(), sorted.begin() + by.least - 1, sorted.end(), std::greater<float>());
            least = sorted[by.least - 1];
        }
        auto exact = [&](int64_t d) {
            const bf16 *w = c.head + d * H;
            F16 total = (F16){};
            for (int64_t h = 0; h < H; h += 16) total += wide16(x + h) * wide16(w + h);
            logits[d] = narrow(sum16(total) + (c.bias ? wide(c.bias[d]) : 0.0f));
        };
        for (int64_t g = 0; g < groups; g++)
            for (int64_t d = g / 16 * block + g % 16, end = d + block; best[g] >= least && d < end; d += 16)
                if (scores[d] >= least) exact(d);
        for (int64_t d = groups * group; d < c.size; d++)
            if (scores[d] >= least) exact(d);
    }
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
    Threads here(b.threads);
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
        read_out(c, out.data(), logits.data(), B, H, k);
        for (int64_t row = 0; row < B; row++) {
            float most, *all = c.sure ? scores.data() : nullptr;
            fed[row] = chosen(c, &logits[row * c.size], row, k, most, all);
            if (c.sure) {
                F16 total = (F16){};
                for (int64_t d = 0; d < c.size; d += 16) total += exp16(read<F16>(&scores[d]) - most);
                c.sure[row * c.steps + k] = -logf(sum16(total));
            }
            tokens[row * c.steps + k] = fed[row];
        }
        if (!c.pending && k + 1 < c.steps) feed(k);
    }
}

// Keys and values of some slots go to others, one after another.
extern "C" void moved(const Body *model, const Pass *pass, const int64_t *from, const int64_t *to,
                      int64_t count) {
    const int64_t kv = model->kv_heads * model->width;
    for (int64_t l = pass->first; l < pass->last; l++)
        for (int64_t i = 0; i < count; i++)
            for (bf16 *all : {pass->keys, pass->values})
                memcpy(all + l * pass->layer_step + to[i] * kv,
                       all + l * pass->layer_step + from[i] * kv, kv * sizeof(bf16));
}

// Logits of each row's next n tokens [T, size], over the temperature, which see each other as `sees`
// marks (null: those before); the next call's states side by side lie `beside` behind this one's.
extern "C" void logits(const Body *model, Pass *pass, const Chain *how, int64_t n, const uint8_t *sees,
                       float *out) {
    Threads here(model->threads);
    int64_t T = pass->rows * n, size = how->size;
    std::vector<bf16> made(T * size);
    pass->n = pass->wide = n, pass->block = sees, pass->block_row = n * n;
    body(model, pass);
    pass->side += how->beside;
    product(how->head, how->bias, pass->out, made.data(), T, model->hidden, size, size);
    for (int64_t i = 0; i < T * size; i++) out[i] = wide(made[i]);
    float temperature = how->temperature;
    if (temperature != 0 && temperature != 1)
        for (int64_t i = 0; i < T * size; i++) out[i] /= temperature;
}

#include "../drafting/lights.h"
#include "../drafting/in_rounds.h"
#include "../drafting/heads.h"

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
