// The table of tables.py on a CPU: what follows there as operations on whole tensors, here context by
// context.

#include "../forward/numbers.h"
#include "lookups.h"

#include <algorithm>
#include <unordered_set>

// By place, of `places` and one more that holds nothing: a context's hash, a law's `kept` tokens and
// their probabilities, its visits. mean: of all visits, not the last one.
struct Table {
    int64_t orders, places, kept, mean;
    const int64_t *order;
    int64_t *keys;
    int32_t *counts, *ids;
    float *p;

    // The place of the longest context that is known; -1 where none is.
    int64_t known(const int64_t *context) const {
        int64_t at = -1;
        lookups::hashes(context, order, orders, [&](int64_t, int64_t hash) {
            if (keys[hash % places] == hash) at = hash % places;
        });
        return at;
    }
    // A visit to a context at its place.
    void visit(int64_t at, int64_t key, const int64_t *said, const float *chance) const {
        std::vector<std::pair<int64_t, float>> law(kept);
        for (int64_t k = 0; k < kept; k++) law[k] = {said[k], chance[k]};
        const int32_t visits = mean && keys[at] == key ? counts[at] : 0;
        if (visits) {
            const float before = float(visits) / float(visits + 1);
            for (auto &one : law) one.second /= float(visits + 1);
            for (int64_t k = 0; k < kept; k++) {
                const float old = p[at * kept + k] * before;
                bool again = false;
                for (int64_t i = 0; i < kept; i++)
                    if (law[i].first == ids[at * kept + k]) law[i].second += old, again = true;
                if (!again) law.push_back({ids[at * kept + k], old});
            }
            const auto likelier = [](const auto &a, const auto &b) { return a.second > b.second; };
            std::stable_sort(law.begin(), law.end(), likelier);
        }
        for (int64_t k = 0; k < kept; k++)
            ids[at * kept + k] = int32_t(law[k].first), p[at * kept + k] = law[k].second;
        counts[at] = visits + 1, keys[at] = key;
    }
};

extern "C" {

// The law after each context: 0 of all tokens where none is known.
void laws(const Table *table, const int64_t *contexts, int64_t count, int64_t *ids, float *p) {
    const int64_t kept = table->kept, longest = table->order[table->orders - 1];
    for (int64_t x = 0; x < count; x++) {
        const int64_t at = table->known(contexts + x * longest);
        for (int64_t k = 0; k < kept; k++) {
            ids[x * kept + k] = at < 0 ? -1 : table->ids[at * kept + k];
            p[x * kept + k] = at < 0 ? 0.0f : table->p[at * kept + k];
        }
    }
}

// Of contexts that come to one place the last one is taken, and one of a longer order before that.
void learn(const Table *table, const int64_t *contexts, const int64_t *ids, const float *p,
           const uint8_t *real, int64_t count) {
    const int64_t kept = table->kept, longest = table->order[table->orders - 1];
    std::vector<int64_t> key(table->orders * count);
    for (int64_t x = 0; x < count; x++)
        lookups::hashes(contexts + x * longest, table->order, table->orders,
                        [&](int64_t o, int64_t hash) { key[o * count + x] = hash; });
    std::unordered_set<int64_t> taken;
    for (int64_t i = table->orders * count - 1; i >= 0; i--) {
        const int64_t x = i % count, at = key[i] % table->places;
        if (real[x] && taken.insert(at).second)
            table->visit(at, key[i], ids + x * kept, p + x * kept);
    }
}

// What each node of some trees follows, itself first; above a root stands its row's text, which ends
// with it.
void contexts(const int64_t *nodes, const int64_t *parent, int64_t parent_row, const int64_t *text,
              int64_t slots, const int64_t *lens, int64_t rows, int64_t count, int64_t longest,
              int64_t *made) {
    for (int64_t b = 0; b < rows; b++)
        for (int64_t n = 0; n < count; n++) {
            int64_t at = n, above = lens[b] - 1;
            for (int64_t m = 0; m < longest; m++, made++) {
                if (at >= 0)
                    *made = nodes[b * count + at], at = at ? parent[b * parent_row + at] : -1;
                else
                    *made = --above >= 0 ? text[b * slots + above] : -1;
            }
        }
}

// Chains after each row's context, which goes along; no level where nothing is known of a row.
int64_t follow(const Table *table, int64_t *contexts, const lookups::Chains *how) {
    const int64_t longest = table->order[table->orders - 1];
    bool any = false;
    for (int64_t b = 0; b < how->rows && !any; b++) {
        const int64_t at = how->active[b] ? table->known(contexts + b * longest) : -1;
        for (int64_t k = 0; at >= 0 && k < table->kept; k++) any |= table->p[at * table->kept + k] > 0;
    }
    if (!any) return 0;
    const auto fill = [&](int64_t b, int64_t, lookups::Law &law) {
        const int64_t at = table->known(contexts + b * longest);
        for (int64_t k = 0; at >= 0 && k < table->kept; k++)
            if (const float p = table->p[at * table->kept + k]; p > 0)
                law.add(table->ids[at * table->kept + k], p);
    };
    const auto go = [&](int64_t b, int64_t, int64_t best) {
        int64_t *context = contexts + b * longest;
        std::copy_backward(context, context + longest - 1, context + longest);
        *context = best;
    };
    return lookups::follow(*how, fill, go);
}

typedef lookups::Drafts<Table> Drafts;

void draft(const Drafts *d, Round *r) {
    std::vector<int64_t> context = d->endings(r->rows);
    lookups::draft(*r, *d->how, true, [&](const lookups::Chains &how) {
        return follow(d->store, context.data(), &how);
    });
}

// The likeliest tokens by these logits, times a factor, and their chances.
static void likeliest(const float *logits, int64_t vocab, float factor, int64_t kept, int64_t *ids,
                      float *p) {
    int64_t found = 0;
    for (int64_t v = 0; v < vocab; v++) {
        if (found == kept && !(logits[v] > p[kept - 1])) continue;
        int64_t at = found < kept ? found++ : kept - 1;
        for (; at > 0 && logits[v] > p[at - 1]; at--) p[at] = p[at - 1], ids[at] = ids[at - 1];
        p[at] = logits[v], ids[at] = v;
    }
    F16 total = (F16){}, part;
    const float most = p[0];
    for (int64_t v = 0; v < vocab; v += 16) {
        part = (F16){} - INFINITY;
        memcpy(&part, logits + v, 4 * (vocab - v < 16 ? vocab - v : 16));
        total += exp16((part - most) * factor);
    }
    const float all = sum16(total);
    for (int64_t k = 0; k < found; k++) p[k] = std::exp((p[k] - most) * factor) / all;
    for (int64_t k = found; k < kept; k++) p[k] = 0, ids[k] = -1;
}

// Every node of a row that went on teaches.
void told(const Drafts *d, Round *r) {
    const int64_t kept = d->store->kept, B = r->rows, N = r->nodes, T = B * N;
    std::vector<int64_t> context(T * d->ending), ids(T * kept);
    std::vector<float> p(T * kept);
    std::vector<uint8_t> real(T);
    contexts(r->tokens, r->parent, r->tree_row, d->texts.text, d->texts.slots, d->texts.lens, B, N,
             d->ending, context.data());
    for (int64_t t = 0; t < T; t++)
        if ((real[t] = r->emitted(t / N) > 0 && (!r->verified || t % N < r->verified[t / N])))
            likeliest(r->logits + t * r->vocab, r->vocab, d->how->temperature, kept, &ids[t * kept],
                      &p[t * kept]);
    learn(d->store, context.data(), ids.data(), p.data(), real.data(), T);
    d->texts.extend(*r);
}
}
