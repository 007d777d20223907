// How a round of a coupled rule ends, in one call: which drafted tokens the target itself chose, and
// where that leaves every row (rows.py calls it; verify/rules.py and `Rows.advance` have the same in
// torch); and several rounds, with chains of a drafter in C++ or without a draft (several.py).

#include <cmath>
#include <cstring>
#include <ctime>
#include <vector>

#include "round.h"

typedef float F16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t I16 __attribute__((vector_size(64), aligned(4)));

// The token of the best score, of several the first; broken: whether a logit is no number.
static int64_t best(const float *logits, const float *race, int64_t V, bool &broken) {
    F16 most = (F16){} - INFINITY;
    I16 at = {}, now, bad = {};
    for (int i = 0; i < 16; i++) now[i] = i;
    int64_t v = 0;
    for (; v + 16 <= V; v += 16, now += 16) {
        F16 score, noise;
        memcpy(&score, logits + v, 64);
        bad |= score != score;
        if (race) {
            memcpy(&noise, race + v, 64);
            score -= noise;
        }
        I16 more = score > most;
        most = more ? score : most;
        at = more ? now : at;
    }
    float top = -INFINITY;
    int64_t found = 0;
    for (int i = 0; i < 16; i++) {
        broken |= bad[i] != 0;
        if (most[i] > top || (most[i] == top && at[i] < found)) top = most[i], found = at[i];
    }
    for (; v < V; v++) {
        float score = race ? logits[v] - race[v] : logits[v];
        broken |= std::isnan(logits[v]);
        if (score > top) top = score, found = v;
    }
    return found;
}

extern "C" void settle(const Round *round) {
    const Round &r = *round;
    int64_t N = r.nodes, L = r.length;
    std::vector<int64_t> chosen(N), kept(N);
    for (int64_t b = 0; b < r.rows; b++) {
        const int64_t *tokens = r.tokens + b * N, *parent = r.parent + b * r.tree_row;
        const int64_t *depth = r.depth + b * r.tree_row, *stops = r.stop_ids + b * r.stops;
        int64_t *emitted = r.table + b * (2 * L + 4), *path = emitted + L, *news = path + L;
        bool broken = false;
        int64_t leaf = 0, along = r.along(b);
        for (int64_t n = 0; n < (r.verified ? r.verified[b] : N); n++) {
            int64_t at = b * r.race_row + (along + depth[n]) * r.race_step;
            const float *race = r.race ? r.race + at : nullptr;
            chosen[n] = best(r.logits + (b * N + n) * r.vocab, race, r.vocab, broken);
            int64_t above = parent[n];
            kept[n] = depth[n] == 0 || (kept[above] && tokens[n] == chosen[above]);
            if (kept[n] && depth[n] > depth[leaf]) leaf = n;
        }
        int64_t accepted = depth[leaf], length = accepted + 1, ended = 0;
        for (int64_t l = 0; l < L; l++) path[l] = l < N ? l : 0;
        for (int64_t n = leaf; depth[n] > 0; n = parent[n]) path[depth[n]] = n;
        path[0] = 0;
        for (int64_t l = 0; l < L; l++) emitted[l] = tokens[path[(l + 1) % L]];
        emitted[accepted] = chosen[leaf];
        for (int64_t l = 0; l < length && !ended; l++)
            for (int64_t m = 0; m < r.stops; m++)
                if (emitted[l] == stops[m]) ended = l + 1;
        int64_t count = ended && ended < length ? ended : length;
        count = count < r.room[b] ? count : r.room[b];
        if (!r.active[b] || broken) count = 0;
        r.rounds[b] += r.active[b];
        if (count) r.pending[b] = emitted[count - 1];
        r.before[b] = r.lens[b];
        r.lens[b] += count;
        r.room[b] -= count;
        r.active[b] = r.active[b] && !(ended && ended <= count) && r.room[b] > 0 && !broken;
        news[0] = accepted, news[1] = count, news[2] = r.active[b], news[3] = broken;
    }
}

// Of `nodes` tokens of every row, from what a model's own library holds of it (native.cpp).
typedef void (*Logits)(const void *body, void *pass, const void *how, int64_t nodes, const uint8_t *sees,
                       float *logits);
// Keys and values of a model from some slots to others.
typedef void (*Moved)(const void *body, const void *pass, const int64_t *from, const int64_t *to,
                      int64_t count);

// What a tree's kept paths are made of goes where a chain's would be: a model's keys and values, in slots
// [B, N], and the taps' states, `width` numbers each; they are told as chains.
static void straighten(Round &r, const int64_t *slots, int64_t width, Moved moved, const void *body,
                       const void *pass) {
    std::vector<int64_t> from, to;
    uint16_t *side = (uint16_t *)r.side;
    for (int64_t b = 0; b < r.rows; b++) {
        int64_t *path = r.table + b * (2 * r.length + 4) + r.length;
        for (int64_t l = 0; l < r.length; l++) {
            int64_t own = b * r.nodes, node = path[l];
            if (node > l) from.push_back(slots[own + node]), to.push_back(slots[own + l]);
            if (width) memmove(side + (b * r.length + l) * width, side + (own + node) * width, 2 * width);
            path[l] = l;
        }
    }
    moved(body, pass, from.data(), to.data(), int64_t(from.size()));
}

// Seconds that this thread has run.
static double of_thread() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

// At most so many rounds, until a row ends or the noise, of so many positions, does; how many. at:
// [2, B, N], the positions and slots of a pass, which are filled in here, round by round; sizes: of each
// round how many tokens it could emit, and nodes, whose news begin 2 N + 4 a row apart all the same; took:
// this thread's seconds for each. drafted, told: null where nothing is drafted.
extern "C" int64_t several(const Round *first, int64_t most, int64_t noise, int64_t context,
                           int64_t slots, int64_t *at, int64_t *sizes, double *took, Logits logits,
                           Moved moved, const void *body, void *pass, const void *how, Drafting drafted,
                           Drafting told, void *drafter) {
    Round r = *first;
    double before_it = of_thread();
    int64_t B = r.rows, N = r.nodes;
    std::vector<uint8_t> before(B);
    std::vector<int64_t> begun(r.lens, r.lens + B);
    r.begun = begun.data();
    for (int64_t made = 1;; made++) {
        memcpy(before.data(), r.active, B);
        r.nodes = N, r.parent = first->parent, r.depth = first->depth, r.tree_row = 0, r.sees = nullptr;
        if (drafted) drafted(drafter, &r);
        r.length = 0;
        for (int64_t i = 0; i < B * r.nodes; i++) {
            int64_t b = i / r.nodes, n = i % r.nodes, deep = r.depth[b * r.tree_row + n];
            int64_t place = r.lens[b] + deep;
            at[i] = place < context ? place : context - 1;
            at[B * N + i] = b * slots + r.lens[b] + n;
            r.length = deep < r.length ? r.length : deep + 1;
        }
        *sizes++ = r.length, *sizes++ = r.nodes;
        logits(body, pass, how, r.nodes, r.sees, (float *)r.logits);
        settle(&r);
        if (r.sees) straighten(r, at + B * N, r.beside / (B * N), moved, body, pass);
        if (told) told(drafter, &r);
        double now = of_thread();
        *took++ = now - before_it, before_it = now;
        bool on = made < most && !memcmp(before.data(), r.active, B);
        for (int64_t b = 0; b < B; b++) on = on && (!r.race || r.along(b) + N <= noise);
        if (!on) return made;
        r.before += B, r.table += B * (2 * N + 4), r.side += r.beside;
    }
}
