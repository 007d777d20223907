// What drafts in several rounds that are one call of C++ (in_rounds.py gives it what it needs), by the
// bodies and chains of native.cpp, which includes this: a round's tokens are drafted, and what it came
// to is heard.

#pragma once
#include <algorithm>

// A body that drafts, of what keys and values, and how; tail: of a draft LM, the last two tokens of each
// row, of which the second is pending (null: all but the pending one have keys and values already).
struct Draft {
    const Body *body;
    const Pass *pass;
    const Chain *chain;
    int64_t *tail;
};
// A chain by what a round knows of its noise.
static Chain now(const Chain &how, const Round &r, std::vector<int64_t> &from) {
    for (int64_t b = 0; b < r.rows; b++) from[b] = r.along(b);
    Chain c = how;
    c.steps = r.nodes - 1, c.race = r.race, c.race_row = r.race_row, c.race_step = r.race_step;
    c.from = from.data();
    return c;
}
static void drafted_by(const Draft &d, Round *r, Pass *p, const bf16 *first, const bf16 *carried,
                       const int64_t *at) {
    int64_t B = r->rows, N = r->nodes;
    std::vector<int64_t> from(B), made(B * (N - 1));
    Chain c = now(*d.chain, *r, from);
    chain(d.body, p, &c, first, carried, at, made.data());
    r->draft(made.data(), N - 1, N - 1);
}
// Where n tokens of every row go, from these places on.
struct Places {
    std::vector<int64_t> at, slots;
    Places(const Chain &c, int64_t rows, int64_t n, const int64_t *from) : at(rows * n), slots(rows * n) {
        for (int64_t i = 0; i < rows * n; i++) {
            int64_t place = from[i / n] + i % n;
            at[i] = place < c.context ? place : c.context - 1;
            slots[i] = i / n * c.slots + place;
        }
    }
    // A pass over them, into these states.
    Pass of(const Pass &like, int64_t rows, const int64_t *lens, std::vector<bf16> &states,
            std::vector<bf16> &out) const {
        Pass p = like;
        p.rows = rows, p.n = at.size() / rows, p.positions = at.data(), p.slots = slots.data();
        p.lens = lens, p.states = states.data(), p.out = out.data();
        return p;
    }
};
// Of what was kept the last token may have no keys and values yet: with a tail it is fed again.
extern "C" void draft_lm(const Draft *d, Round *r) {
    int64_t B = r->rows, H = d->body->hidden, n = d->tail ? 2 : 1;
    std::vector<bf16> states((d->body->layers + 1) * n * B * H), out(n * B * H), last(B * H);
    std::vector<int64_t> seen(B), next(B);
    for (int64_t b = 0; b < B; b++) seen[b] = r->lens[b] + 1 - n, next[b] = r->lens[b] + 1;
    Places places(*d->chain, B, n, seen.data());
    Pass p = places.of(*d->pass, B, seen.data(), states, out);
    p.tokens = d->tail ? d->tail : r->pending;
    body(d->body, &p);
    for (int64_t b = 0; b < B; b++) memcpy(&last[b * H], &out[(n * b + n - 1) * H], H * sizeof(bf16));
    p.n = 1;
    drafted_by(*d, r, &p, last.data(), nullptr, next.data());
}
// Keys and values of all but the last two tokens of each row, where others have drafted some; what
// lies beyond a shorter row's end all goes where its pending token will be fed.
static void take(const Draft &d, const Round &r) {
    int64_t B = r.rows, n = 0, H = d.body->hidden;
    std::vector<int64_t> seen(B);
    for (int64_t b = 0; b < B; b++) seen[b] = r.before[b] - 1, n = r.emitted(b) > n ? r.emitted(b) : n;
    if (!n) return;
    std::vector<bf16> states((d.body->layers + 1) * B * n * H), out(B * n * H);
    std::vector<int64_t> tokens(B * n);
    Places places(*d.chain, B, n, seen.data());
    for (int64_t i = 0; i < B * n; i++) {
        int64_t b = i / n, k = i % n, beyond = k - 1 - r.emitted(b);
        tokens[i] = k < 2 ? d.tail[2 * b + k] : r.told(b)[k - 2];
        if (beyond > 0) places.at[i] -= beyond, places.slots[i] -= beyond;
    }
    Pass p = places.of(*d.pass, B, seen.data(), states, out);
    p.tokens = tokens.data();
    body(d.body, &p);
}
extern "C" void told_lm(const Draft *d, Round *r) {
    bool others = false;
    for (int64_t b = 0; r->asked && b < r->rows; b++) others |= r->asked->certain[b];
    if (others) take(*d, *r);
    for (int64_t b = 0; b < r->rows; b++) {
        int64_t count = r->emitted(b), *tail = d->tail + 2 * b;
        if (!count) continue;
        tail[0] = count > 1 ? r->told(b)[count - 2] : tail[1];
        tail[1] = r->told(b)[count - 1];
    }
}

// A head in such rounds: of each row what its layers made of the last pair (`state`), and what the
// target's taps [T, wide] become the states beside tokens by: norms of all, or of each of them, and a
// map (null: there is none).
struct Head {
    Draft draft;
    const bf16 *of_all, *const *of_taps, *fuse, *bias;
    int64_t wide;
    bf16 *state;
};
extern "C" void draft_head(const Head *h, Round *r) {
    const Body &b = *h->draft.body;
    int64_t H = b.hidden;
    std::vector<bf16> first(r->rows * H);
    for (int64_t i = 0; i < r->rows; i++)
        normed(h->state + i * H, b.norm, &first[i * H], H, b.epsilon);
    Pass p = *h->draft.pass;
    p.rows = r->rows;
    drafted_by(h->draft, r, &p, first.data(), b.fed_normed ? first.data() : h->state, r->lens);
}
// The states beside a round's tokens [T, H], of the taps' there.
static std::vector<bf16> fused(const Head &h, const Round &r, int64_t H, double epsilon) {
    int64_t T = r.rows * r.length, U = h.wide;
    std::vector<bf16> taps(r.side, r.side + T * U), made(h.fuse ? T * H : 0);
    for (int64_t t = 0; t < T; t++) {
        bf16 *own = &taps[t * U];
        if (h.of_all) normed(own, h.of_all, own, U, epsilon);
        for (int64_t u = 0; h.of_taps && u < U / H; u++)
            normed(own + u * H, h.of_taps[u], own + u * H, H, epsilon);
    }
    if (h.fuse) product(h.fuse, h.bias, taps.data(), made.data(), T, U, H, H);
    return h.fuse ? made : taps;
}
// A round's tokens are fed to layers that go by pairs of them and states, or by these alone.
static void fed(const Body &b, const Pass &like, const Chain &c, const Round &r, const bf16 *given,
                std::vector<bf16> &states, std::vector<bf16> &out) {
    int64_t L = r.length, T = r.rows * L;
    std::vector<int64_t> tokens(T);
    for (int64_t t = 0; t < T; t++) tokens[t] = r.told(t / L)[t % L];
    states.resize((b.layers + 1) * T * b.hidden), out.resize(T * b.hidden);
    Places places(c, r.rows, L, r.before);
    Pass p = places.of(like, r.rows, r.before, states, out);
    p.tokens = tokens.data(), p.given = given;
    body(&b, &p);
}
// Of what was made at a round's tokens [T, H], what lies before each row's new pending one.
static void keep_last(const Round &r, const bf16 *made, bf16 *state, int64_t H) {
    for (int64_t b = 0; b < r.rows; b++)
        if (int64_t count = r.emitted(b))
            memcpy(state + b * H, made + (b * r.length + count - 1) * H, H * sizeof(bf16));
}
// All pairs of a round are fed again, with the target's own states.
extern "C" void told_head(const Head *h, Round *r) {
    const Body &b = *h->draft.body;
    std::vector<bf16> given = fused(*h, *r, b.hidden, b.epsilon), states, out;
    fed(b, *h->draft.pass, *h->draft.chain, *r, given.data(), states, out);
    keep_last(*r, &states[b.layers * out.size()], h->state, b.hidden);
}

// Each row's token at level k of `levels`, by what the LM head reads [B, H].
static void tell(const Chain &c, const std::vector<bf16> &read, int64_t k, int64_t levels,
                 std::vector<int64_t> &made) {
    int64_t B = made.size() / levels, H = read.size() / B;
    std::vector<bf16> logits(B * c.size);
    read_out(c, read.data(), logits.data(), B, H, k);
    float best;
    for (int64_t b = 0; b < B; b++) made[b * levels + k] = chosen(c, &logits[b * c.size], b, k, best);
}

// Chains of which the LM head reads the states of all places [B, K, H] at once.
static void tell_all(const Chain &how, Round *r, const bf16 *read, int64_t K, int64_t H) {
    int64_t B = r->rows;
    std::vector<int64_t> from(B), made(B * K);
    Chain c = now(how, *r, from);
    std::vector<bf16> logits(B * K * c.size);
    product(c.head, c.bias, read, logits.data(), B * K, H, c.size, c.size);
    float best;
    for (int64_t i = 0; i < B * K; i++) made[i] = chosen(c, &logits[i * c.size], i / K, i % K, best);
    r->draft(made.data(), K, K);
}

// A draft LM that drafts a round's tokens in one pass, by MASKs behind the pending one. Of a row's last tokens
// `tail` [B, W] so many are `unfed`, the pending one among them; none of them, once it has `drafted`.
struct Pard {
    Draft draft;
    int64_t mask, wide, *unfed;
    uint8_t drafted;

    // What waits of each row, of no more than its tokens, and how many came before that.
    std::vector<std::vector<int64_t>> waiting(int64_t rows, std::vector<int64_t> &lens) const {
        std::vector<std::vector<int64_t>> found;
        for (int64_t b = 0; b < rows; b++) {
            const int64_t *end = draft.tail + (b + 1) * wide, waits = std::min(unfed[b], lens[b]);
            found.emplace_back(end - (drafted ? 0 : waits), end);
            lens[b] += 1 - int64_t(found[b].size());
        }
        return found;
    }
};
// Such tokens of rows, of which `lens` came before, go through the body, and MASKs behind them until there
// are so many more than the longest has. The states [B, K, H] from each row's last token on.
static std::vector<bf16> fed_behind(const Pard &d, const std::vector<std::vector<int64_t>> &rows,
                                    const std::vector<int64_t> &lens, int64_t masks) {
    int64_t B = rows.size(), H = d.draft.body->hidden, K = 1 + masks, n = 0;
    for (const auto &row : rows) n = std::max(n, int64_t(row.size()) + masks);
    std::vector<int64_t> tokens(B * n, d.mask);
    for (int64_t b = 0; b < B; b++) std::copy(rows[b].begin(), rows[b].end(), &tokens[b * n]);
    std::vector<bf16> states((d.draft.body->layers + 1) * n * B * H), out(n * B * H), made(B * K * H);
    Places places(*d.draft.chain, B, n, lens.data());
    Pass p = places.of(*d.draft.pass, B, lens.data(), states, out);
    p.tokens = tokens.data();
    body(d.draft.body, &p);
    for (int64_t b = 0; b < B; b++)
        if (int64_t own = rows[b].size())
            memcpy(&made[b * K * H], &out[(b * n + own - 1) * H], K * H * sizeof(bf16));
    return made;
}
extern "C" void draft_pard(Pard *d, Round *r) {
    int64_t K = r->nodes - 1;
    std::vector<int64_t> lens(r->lens, r->lens + r->rows);
    std::vector<std::vector<int64_t>> waits = d->waiting(r->rows, lens);
    std::vector<bf16> read = fed_behind(*d, waits, lens, K - 1);
    d->drafted = 1;
    tell_all(*d->draft.chain, r, read.data(), K, d->draft.body->hidden);
}
// Of more than may wait all but the pending one are fed at once.
extern "C" void told_pard(Pard *d, Round *r) {
    int64_t B = r->rows, most = 0;
    std::vector<int64_t> lens(r->before, r->before + B);
    std::vector<std::vector<int64_t>> waits = d->waiting(B, lens);
    for (int64_t b = 0; b < B; b++) {
        waits[b].insert(waits[b].end(), r->told(b), r->told(b) + r->emitted(b));
        most = std::max(most, int64_t(waits[b].size()));
        int64_t n = std::min(r->emitted(b), d->wide), *tail = d->draft.tail + b * d->wide;
        std::copy(tail + n, tail + d->wide, tail);
        std::copy(waits[b].end() - n, waits[b].end(), tail + d->wide - n);
        if (n) d->unfed[b] = waits[b].size();
    }
    d->drafted = 0;
    if (most <= d->wide) return;
    for (auto &row : waits) row.resize(row.empty() ? 0 : row.size() - 1);
    fed_behind(*d, waits, lens, 0);
    for (int64_t b = 0; b < B; b++) d->unfed[b] = 1;
}

// A block drafter in such rounds. head: the light head's layers, if it has any, and what the taps
// become the context by; trunk: its layers and the light head's, of which the first `layers` are run
// over a block. Of its `rows`, which all see each other (0: as few as do, which see those before), the first
// that drafts is `first`; each is `mask`, but the pending token's embedding, and added to it is a map `last`
// of the last state (null: isn't). light: the light head, if it has any other.
struct OnePass {
    Head head;
    const Body *trunk;
    const Pass *pass;
    int64_t layers, first, rows;
    const bf16 *norm, *mask, *embedding, *last;
    const Light *light;
};
extern "C" void draft_one_pass(const OnePass *h, Round *r) {
    const Draft &d = h->head.draft;
    const Body &b = *h->trunk;
    int64_t B = r->rows, K = r->nodes - 1, n = h->rows ? h->rows : h->first + K, T = B * n, H = b.hidden;
    std::vector<bf16> given(T * H), more(B * H), states((h->layers + 1) * T * H), out(T * H);
    if (h->last) product(h->last, nullptr, h->head.state, more.data(), B, H, H, H);
    for (int64_t t = 0; t < T; t++) {
        const bf16 *row = t % n ? h->mask : h->embedding + r->pending[t / n] * H;
        memcpy(&given[t * H], row, H * sizeof(bf16));
        if (h->last) added(&given[t * H], &more[t / n * H], H);
    }
    std::vector<uint8_t> all(n * n, 1);
    Places places(*d.chain, B, n, r->lens);
    Pass p = places.of(*h->pass, B, r->lens, states, out);
    p.last = h->layers, p.given = given.data();
    if (h->rows) p.block = all.data(), p.wide = n;
    body(&b, &p);
    const bf16 *drafting = &states[(h->layers * T + h->first) * H];
    if (d.body) {
        Chain c = *d.chain;
        c.given = n, c.pending = r->pending;
        Draft lit = d;
        lit.chain = &c;
        Pass each = *d.pass;
        each.rows = B;
        drafted_by(lit, r, &each, nullptr, drafting, r->lens);
        return;
    }
    const Light *l = h->light;
    std::vector<bf16> rows(B * K * H), read(B * K * H), state(B * H);
    for (int64_t i = 0; i < B * K; i++) {
        memcpy(&rows[i * H], drafting + (i / K * n + i % K) * H, H * sizeof(bf16));
        normed(&rows[i * H], b.norm, &read[i * H], H, b.epsilon);
    }
    if (!l) return tell_all(*d.chain, r, read.data(), K, H);
    bool deep = !l->after;  // whose logits are each token's own
    std::vector<int64_t> from(B), made(B * K), last(r->pending, r->pending + B);
    Chain c = now(*d.chain, *r, from);
    std::vector<bf16> logits(deep ? 0 : B * K * c.size), carried(B * l->width), low;
    std::vector<bf16> adds(deep ? 0 : B * c.size);
    if (!deep) product(c.head, c.bias, read.data(), logits.data(), B * K, H, c.size, c.size);
    for (int64_t k = 0; k < K; k++) {
        for (int64_t i = 0; i < B; i++)
            memcpy(&state[i * H], &(deep ? rows : read)[(i * K + k) * H], H * sizeof(bf16));
        low = lit(*l, b, h->embedding, last.data(), state, carried);
        for (int64_t i = 0; deep && i < B; i++) normed(&low[i * H], b.norm, &low[i * H], H, b.epsilon);
        if (deep) tell(c, low, k, K, made);
        if (!deep) product(l->after, nullptr, low.data(), adds.data(), B, l->rank, c.size, c.size);
        float best;
        for (int64_t i = 0; !deep && i < B; i++) {
            const bf16 *own = &logits[(i * K + k) * c.size];
            made[i * K + k] = chosen(c, own, i, k, best, nullptr, &adds[i * c.size]);
        }
        for (int64_t i = 0; i < B; i++) last[i] = made[i * K + k];
    }
    r->draft(made.data(), K, K);
}
extern "C" void told_one_pass(const OnePass *h, Round *r) {
    const Body &b = *h->trunk;
    std::vector<bf16> context = fused(h->head, *r, b.hidden, b.epsilon), none;
    for (int64_t t = 0; t < r->rows * r->length; t++)
        normed(&context[t * b.hidden], h->norm, &context[t * b.hidden], b.hidden, b.epsilon);
    Places places(*h->head.draft.chain, r->rows, r->length, r->before);
    Pass p = places.of(*h->pass, r->rows, nullptr, none, none);
    p.given = context.data();
    keep(&b, &p);
    keep_last(*r, context.data(), h->head.state, b.hidden);
}

// Two drafters as one in such rounds: of a row whose chain isn't the first's the tree is the other one's, at
// most `levels` deep, and from where they part the first's, as far as there are nodes; both hear of all. Of a
// round: verified, drafted [B], nodes of a row's, and of the other one's chain, tree: parents, depths
// [2, B, N], sees: [B, N, N].
struct Drafter {
    Drafting draft, hear;
    void *own;
};
struct Either {
    Drafter first, other;
    int64_t levels, *verified, *drafted, *tree;
    uint8_t *sees;
    Asked asked;
};
extern "C" void draft_either(const Either *e, Round *r) {
    int64_t B = r->rows, most = r->nodes, shallow = 1 + e->levels, led = 0;
    const Asked &asked = e->asked;
    memset(asked.certain, 0, B);
    std::fill_n(asked.guess, B, -1);
    r->asked = &asked, r->verified = nullptr;
    e->first.draft(e->first.own, r);
    for (int64_t b = 0; b < B; b++) led += r->active[b] && !asked.certain[b];
    if (!led) return;
    int64_t one = r->nodes;
    std::vector<int64_t> known(r->tokens, r->tokens + B * one), parted(B);
    r->nodes = most < shallow ? most : shallow;
    e->other.draft(e->other.own, r);
    int64_t two = r->nodes, all = 0;
    std::fill_n(e->drafted, B, two);
    if (one == 1) return;
    std::vector<int64_t> drafted(r->tokens, r->tokens + B * two);
    bool trees = false;
    for (int64_t b = 0; b < B; b++) {
        int64_t at = 1, count = r->active[b] ? one : 1;
        while (at < one && at < two && known[b * one + at] == drafted[b * two + at]) at++;
        if (r->active[b] && !asked.certain[b])
            count = std::min(most, two + one - at), trees |= count > two;
        parted[b] = at - 1, e->verified[b] = count, all = std::max(all, count);
    }
    int64_t *parent = e->tree, *depth = e->tree + B * all;
    std::fill_n(e->sees, B * all * all, 0);
    for (int64_t b = 0; b < B; b++, parent += all, depth += all) {
        int64_t n = std::min(asked.certain[b] ? one : two, e->verified[b]), *tokens = r->tokens + b * all;
        const int64_t *chain = asked.certain[b] ? &known[b * one] : &drafted[b * two];
        for (int64_t i = 0; i < all; i++) {
            bool beside = i >= n && i < e->verified[b];
            depth[i] = i < n ? i : beside ? parted[b] + 1 + i - n : 1;
            parent[i] = i < n || (beside && i > n) ? i - 1 : beside ? parted[b] : 0;
            tokens[i] = i < n ? chain[i] : beside ? known[b * one + depth[i]] : chain[0];
            uint8_t *sees = e->sees + (b * all + i) * all;
            if (i) memcpy(sees, e->sees + (b * all + parent[i]) * all, all);
            sees[i] = 1;
        }
    }
    r->nodes = all, r->verified = e->verified;
    if (trees)
        r->tree_row = all, r->parent = e->tree, r->depth = e->tree + B * all, r->sees = e->sees;
}
extern "C" void told_either(const Either *e, Round *r) {
    std::vector<int64_t> first(r->rows, -1), drafted(r->rows, -1);
    for (int64_t b = 0; b < r->rows; b++) {
        if (r->emitted(b)) first[b] = *r->told(b);
        if (r->nodes > 1) drafted[b] = r->tokens[b * r->nodes + 1];
    }
    e->asked.tell(r->rows, first.data(), drafted.data());
    // What the other one hasn't drafted it is to take in.
    for (int64_t b = 0; b < r->rows; b++)
        for (int64_t l = 1; l + 1 < r->emitted(b); l++)
            if (l + 1 >= e->drafted[b] || r->tokens[b * r->nodes + l] != r->told(b)[l - 1])
                e->asked.certain[b] = 1;
    for (const Drafter *one : {&e->first, &e->other})
        if (one->hear) one->hear(one->own, r);
}
