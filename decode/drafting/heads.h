// Heads that draft a token by a few small products in the rounds of in_rounds.h, which native.cpp includes
// before this.

#pragma once

// Heads without attention in such rounds, as Medusa's and Hydra's: of every level residual blocks (with
// maps `skip` of the first one's input, or without), whose inputs are the row's state and, with an
// `embedding`, its path's tokens side by side; then an LM head. prefix: what the target's states go
// through before they are a row's (null: nothing).
struct Block {
    const bf16 *weight, *bias, *skip, *skip_bias;
};
struct Level {
    const Block *block;
    int64_t blocks;
    const bf16 *head, *bias;
};
struct Heads {
    int64_t hidden;
    const Chain *chain;
    const Level *level;
    const bf16 *embedding;
    bf16 *state;
    const Body *prefix;
    const Pass *pass;
};
extern "C" void draft_heads(const Heads *h, Round *r) {
    int64_t B = r->rows, K = r->nodes - 1, H = h->hidden, most = (1 + K) * H;
    std::vector<bf16> read(B * most), x(B * H), inner(B * H), in(B * most);
    std::vector<int64_t> from(B), made(B * K);
    Chain c = now(*h->chain, *r, from);
    for (int64_t b = 0; b < B; b++) memcpy(&read[b * most], h->state + b * H, H * sizeof(bf16));
    for (int64_t k = 0; k < K; k++) {
        const Level &level = h->level[k];
        int64_t wide_in = h->embedding ? (2 + k) * H : H;
        for (int64_t b = 0; b < B; b++) {
            int64_t token = k ? made[b * K + k - 1] : r->pending[b];
            if (h->embedding)
                memcpy(&read[b * most + (1 + k) * H], h->embedding + token * H, H * sizeof(bf16));
            memcpy(&in[b * wide_in], &read[b * most], wide_in * sizeof(bf16));
        }
        for (int64_t i = 0; i < level.blocks; i++) {
            const Block &block = level.block[i];
            const bf16 *given = i ? x.data() : in.data();
            int64_t width = i ? H : wide_in;
            product(block.weight, block.bias, given, inner.data(), B, width, H, H);
            if (block.skip) product(block.skip, block.skip_bias, given, x.data(), B, width, H, H);
            if (!block.skip && !i) memcpy(x.data(), given, B * H * sizeof(bf16));
            for (int64_t j = 0; j < B * H; j += 16) {
                F16 g = wide16(&inner[j]);
                store16(&inner[j], g / (exp16(-g) + 1.0f));
            }
            added(x.data(), inner.data(), B * H);
        }
        c.head = level.head, c.bias = level.bias;
        tell(c, x, k, K, made);
    }
    r->draft(made.data(), K, K);
}
extern "C" void told_heads(const Heads *h, Round *r) {
    std::vector<bf16> states, out;
    if (h->prefix) fed(*h->prefix, *h->pass, *h->chain, *r, r->side, states, out);
    keep_last(*r, h->prefix ? out.data() : r->side, h->state, h->hidden);
}

// A head whose rows' `state` a call keeps up, by a body over the text's tokens and their embeddings.
struct Kept {
    const Body *body;
    const Pass *pass;
    const Chain *chain;
    const bf16 *embedding;
    bf16 *state;
};

// What takes a token into a state by its direction, head by head: s + V e * cos(Q norm s, K e). token: the
// maps K and V.
struct Taking {
    const bf16 *norm;
    const Map *query, *token;
};
// Of states and tokens [T, H]; made may be the states.
static void taken(const Taking &by, const Body &b, const bf16 *state, const bf16 *token, bf16 *made,
                  int64_t T) {
    int64_t H = b.hidden, E = H / b.heads;
    std::vector<bf16> query(T * H), sides(2 * T * H), read(T * H);
    for (int64_t t = 0; t < T; t++) normed(state + t * H, by.norm, &read[t * H], H, b.epsilon);
    maps(by.query, 1, read.data(), query.data(), T, H, H, b.threads);
    maps(by.token, 2, token, sides.data(), T, H, 2 * H, b.threads);
    for (int64_t at = 0; at < T * H; at += E) {
        const bf16 *q = &query[at], *k = &sides[at / H * 2 * H + at % H], *v = k + H;
        F16 along = (F16){}, own = (F16){}, other = (F16){};
        for (int64_t i = 0; i < E; i += 16) {
            F16 x = wide16(q + i), y = wide16(k + i);
            along += x * y, own += x * x, other += y * y;
        }
        float sizes = std::max(sqrtf(sum16(own)), 1e-6f) * std::max(sqrtf(sum16(other)), 1e-6f);
        float alike = sum16(along) / sizes;
        for (int64_t i = 0; i < E; i += 16)
            store16(made + at + i, wide16(state + at + i) + wide16(v + i) * alike);
    }
}
// Clover-2's heads in such rounds: the target's states, with the tokens after them taken in by `enter`, go
// through the prefix to a row's state, and each drafted token is taken into that by `step`. What the LM head
// multiplies is a map of the row's state, `first`, or of a later one beside its token, and normed.
struct Clover : Kept {
    Taking enter, step;
    const bf16 *norm;
    const Map *first, *later;
};
extern "C" void draft_clover(const Clover *h, Round *r) {
    const Body &body = *h->body;
    int64_t B = r->rows, K = r->nodes - 1, H = body.hidden;
    std::vector<bf16> state(h->state, h->state + B * H), token(B * H), read(B * H);
    std::vector<int64_t> from(B), made(B * K);
    Chain c = now(*h->chain, *r, from);
    for (int64_t k = 0; k < K; k++) {
        for (int64_t b = 0; k && b < B; b++)
            memcpy(&token[b * H], h->embedding + made[b * K + k - 1] * H, H * sizeof(bf16));
        if (k) taken(h->step, body, state.data(), token.data(), state.data(), B);
        std::vector<bf16> given = k ? beside(B, {{state.data(), H}, {token.data(), H}}) : state;
        maps(k ? h->later : h->first, 1, given.data(), read.data(), B, k ? 2 * H : H, H, body.threads);
        for (int64_t b = 0; b < B; b++) normed(&read[b * H], h->norm, &read[b * H], H, body.epsilon);
        tell(c, read, k, K, made);
    }
    r->draft(made.data(), K, K);
}
extern "C" void told_clover(const Clover *h, Round *r) {
    int64_t L = r->length, T = r->rows * L, H = h->body->hidden;
    std::vector<bf16> tokens(T * H), entries(T * H), states, out;
    for (int64_t t = 0; t < T; t++)
        memcpy(&tokens[t * H], h->embedding + r->told(t / L)[t % L] * H, H * sizeof(bf16));
    taken(h->enter, *h->body, r->side, tokens.data(), entries.data(), T);
    fed(*h->body, *h->pass, *h->chain, *r, entries.data(), states, out);
    keep_last(*r, out.data(), h->state, H);
}

// Falcon in such rounds. Of a row, `state` holds what its last pass drafts by, the `block` last pairs, and
// what the LSTM keeps: of both its layers the output and the cell. into, before: of each layer, the maps to
// the gates (in, forget, cell, out) of what it reads, and of its output at the pair before.
struct Falcon : Kept {
    int64_t block;
    const Map *into[2], *before[2];
    int64_t wide() const { return (2 * block + 4) * body->hidden; }
};
// What the LSTM makes of T pairs of each row, x [B, T, 2 H]: y [B, T, H]; each row's `state` keeps what it
// is after `count` of them.
static std::vector<bf16> along(const Falcon &f, int64_t B, int64_t T, const int64_t *count,
                               std::vector<bf16> x, bf16 *state) {
    int64_t H = f.body->hidden, G = 4 * H, W = f.wide(), in = 2 * H;
    std::vector<bf16> gates(B * T * G), own(B * G), now(B * H), cell(B * H);
    for (int64_t layer = 0; layer < 2; layer++, in = H) {
        maps(f.into[layer], 1, x.data(), gates.data(), B * T, in, G, f.body->threads);
        x.resize(B * T * H);
        auto kept = [&](int64_t b) { return state + b * W + (2 * f.block + 2 * layer) * H; };
        for (int64_t b = 0; b < B; b++) {
            memcpy(&now[b * H], kept(b), H * sizeof(bf16));
            memcpy(&cell[b * H], kept(b) + H, H * sizeof(bf16));
        }
        for (int64_t t = 0; t < T; t++) {
            maps(f.before[layer], 1, now.data(), own.data(), B, H, G, f.body->threads);
            for (int64_t b = 0; b < B; b++) {
                bf16 *h = &now[b * H], *c = &cell[b * H], *y = &x[(b * T + t) * H];
                const bf16 *given = &gates[(b * T + t) * G], *again = &own[b * G];
                for (int64_t i = 0; i < H; i += 16) {
                    auto gate = [&](int64_t g) { return wide16(given + g * H + i) + wide16(again + g * H + i); };
                    F16 kept = sigmoid16(gate(1)) * wide16(c + i);
                    F16 held = kept + sigmoid16(gate(0)) * tanh16(gate(2));
                    store16(c + i, held);
                    store16(h + i, sigmoid16(gate(3)) * tanh16(held));
                }
                memcpy(y, h, H * sizeof(bf16));
                if (t + 1 != count[b]) continue;
                memcpy(kept(b), h, H * sizeof(bf16));
                memcpy(kept(b) + H, c, H * sizeof(bf16));
            }
        }
    }
    return x;
}
// A pass over each row's last `block` pairs, of which `ends` end there, all of which see all; to each
// row's `state` goes what it drafts by. Of a text of fewer pairs the first rows are none.
static void passed(const Falcon &f, int64_t B, const int64_t *ends, bf16 *state) {
    int64_t k = f.block, H = f.body->hidden;
    std::vector<bf16> given(B * k * H), states(2 * B * k * H), out(B * k * H);
    std::vector<int64_t> seen(B);
    std::vector<uint8_t> sees(B * k * k);
    for (int64_t b = 0; b < B; b++) {
        seen[b] = std::max(ends[b] - k, (int64_t)0);
        memcpy(&given[b * k * H], state + b * f.wide() + k * H, k * H * sizeof(bf16));
        for (int64_t i = 0; i < k * k; i++) sees[b * k * k + i] = seen[b] + i % k < std::max(ends[b], (int64_t)1);
    }
    Places places(*f.chain, B, k, seen.data());
    for (int64_t b = 0; b < B; b++)
        for (int64_t i = 0, none = k - ends[b]; i < k && none > 0; i++) {
            places.at[b * k + i] = std::max(i - none, (int64_t)0);
            places.slots[b * k + i] = b * f.chain->slots + (i - none + k) % k;
        }
    Pass p = places.of(*f.pass, B, seen.data(), states, out);
    p.given = given.data(), p.block = sees.data(), p.wide = k, p.block_row = k * k;
    body(f.body, &p);
    for (int64_t b = 0; b < B; b++) memcpy(state + b * f.wide(), &out[b * k * H], k * H * sizeof(bf16));
}
extern "C" void draft_falcon(const Falcon *f, Round *r) {
    int64_t B = r->rows, K = r->nodes - 1, k = f->block, H = f->body->hidden, W = f->wide();
    std::vector<bf16> state(f->state, f->state + B * W), read(B * k * H), pairs(2 * B * k * H);
    std::vector<int64_t> from(B), made(B * K), all(B, k), ends(r->lens, r->lens + B);
    Chain c = now(*f->chain, *r, from);
    std::vector<bf16> logits(B * k * c.size);
    for (int64_t depth = 0; depth < K; depth += k) {
        if (depth) {
            for (int64_t i = 0; i < B * k; i++) {
                int64_t token = made[i / k * K + depth - k + i % k];
                memcpy(&pairs[2 * i * H], f->embedding + token * H, H * sizeof(bf16));
                memcpy(&pairs[(2 * i + 1) * H], &state[i / k * W + i % k * H], H * sizeof(bf16));
            }
            std::vector<bf16> y = along(*f, B, k, all.data(), pairs, state.data());
            for (int64_t b = 0; b < B; b++) {
                memcpy(&state[b * W + k * H], &y[b * k * H], k * H * sizeof(bf16));
                ends[b] += k;
            }
            passed(*f, B, ends.data(), state.data());
        }
        int64_t n = std::min(k, K - depth);
        for (int64_t i = 0; i < B * n; i++)
            memcpy(&read[i * H], &state[i / n * W + i % n * H], H * sizeof(bf16));
        product(c.head, c.bias, read.data(), logits.data(), B * n, H, c.size, c.size);
        float best;
        for (int64_t i = 0; i < B * n; i++)
            made[i / n * K + depth + i % n] = chosen(c, &logits[i * c.size], i / n, depth + i % n, best);
    }
    r->draft(made.data(), K, K);
}
extern "C" void told_falcon(const Falcon *f, Round *r) {
    int64_t B = r->rows, L = r->length, k = f->block, H = f->body->hidden, W = f->wide();
    std::vector<bf16> pairs(2 * B * L * H), none, was(f->state, f->state + B * W);
    std::vector<int64_t> count(B), ends(B);
    for (int64_t b = 0; b < B; b++) count[b] = r->emitted(b), ends[b] = r->before[b] + count[b];
    for (int64_t t = 0; t < B * L; t++) {
        const bf16 *token = f->embedding + r->told(t / L)[t % L] * H;
        memcpy(&pairs[2 * t * H], token, H * sizeof(bf16));
        memcpy(&pairs[(2 * t + 1) * H], r->side + t * H, H * sizeof(bf16));
    }
    std::vector<bf16> y = along(*f, B, L, count.data(), pairs, f->state);
    Places places(*f->chain, B, L, r->before);
    Pass p = places.of(*f->pass, B, nullptr, none, none);
    p.given = y.data();
    keep(f->body, &p);
    for (int64_t b = 0; b < B; b++)
        for (int64_t i = 0; i < k; i++) {
            int64_t at = count[b] - k + i;
            const bf16 *from = at < 0 ? &was[b * W + (2 * k + at) * H] : &y[(b * L + at) * H];
            memcpy(f->state + b * W + (k + i) * H, from, H * sizeof(bf16));
        }
    passed(*f, B, ends.data(), f->state);
}
