// How a round of a coupled rule ends, in one call: which drafted tokens the target itself chose, and
// where that leaves every row (rows.py calls it; verify/rules.py and `Rows.advance` have the same in
// torch); and several rounds without a draft (plain.py). Names: B rows, N nodes, L tokens that a
// round can emit, V vocabulary.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

typedef float F16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t I16 __attribute__((vector_size(64), aligned(4)));

struct Round {
    int64_t rows, nodes, length, vocab, stops;
    int64_t race_row, race_step;  // from one row's noise to the next one's, and one depth's
    int64_t tree_row;             // from one row's tree to the next one's; 0 where all share one
    const int64_t *tokens, *parent, *depth;
    const float *logits, *race;
    int64_t *lens, *pending, *rounds, *room;
    uint8_t *active;
    const int64_t *stop_ids;
    int64_t *before, *table;  // [B], and [B, 2 L + 4]: a round's news
    const int64_t *verified;  // [B]: nodes that are judged; null: all
};

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
        int64_t leaf = 0;
        for (int64_t n = 0; n < (r.verified ? r.verified[b] : N); n++) {
            const float *race = r.race ? r.race + b * r.race_row + depth[n] * r.race_step : nullptr;
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

// Of every row's next token, from what a model's own library holds of it (native.cpp).
typedef void (*Logits)(const void *body, void *pass, const void *how, float *logits);

// At most so many rounds of one token a row, until a row ends; how many. at: [2, B], the positions
// and slots of a pass, which are filled in here, round by round.
extern "C" int64_t several(const Round *first, int64_t most, int64_t context, int64_t slots,
                           int64_t *at, Logits logits, const void *body, void *pass,
                           const void *how) {
    Round r = *first;
    std::vector<uint8_t> before(r.rows);
    for (int64_t made = 1;; made++) {
        memcpy(before.data(), r.active, r.rows);
        for (int64_t b = 0; b < r.rows; b++) {
            at[b] = r.lens[b] < context ? r.lens[b] : context - 1;
            at[r.rows + b] = b * slots + r.lens[b];
        }
        logits(body, pass, how, (float *)r.logits);
        settle(&r);
        if (made == most || memcmp(before.data(), r.active, r.rows)) return made;
        r.before += r.rows, r.table += r.rows * (2 * r.length + 4);
        if (r.race) r.race += r.race_step;
    }
}
