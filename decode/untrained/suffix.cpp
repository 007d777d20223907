// The store of suffix.py on a CPU: what follows there as operations on whole tensors, here place by
// place.

#include "lookups.h"

// The ring's tokens and behind them the rows' ("places"); of `orders` endings `buckets` and one
// more of each, the latest `wide` places and how many there were.
struct Store {
    int64_t ring, known, orders, buckets, wide;
    const int64_t *order;  // the longest is the last
    const int32_t *own;
    const int64_t *rows;
    int32_t *latest, *counts;

    int64_t read(int64_t at) const {
        if (at < 0 || at >= ring + known) return -1;
        return at < ring ? own[at] : rows[at - ring];
    }
    // Each order's bucket of an ending, the last token first.
    void find(const int64_t *ending, int64_t *bucket) const {
        lookups::hashes(ending, order, orders, [&](int64_t o, int64_t hash) {
            bucket[o] = o * (buckets + 1) + hash % buckets;
        });
    }
};

extern "C" {

// Note places that follow what stands before them.
void note(const Store *store, const int64_t *at, const uint8_t *real, int64_t count) {
    const int64_t longest = store->order[store->orders - 1];
    std::vector<int64_t> before(longest), bucket(store->orders);
    for (int64_t x = 0; x < count; x++) {
        if (!real[x]) continue;
        for (int64_t m = 0; m < longest; m++) before[m] = store->read(at[x] - 1 - m);
        store->find(before.data(), bucket.data());
        for (int64_t b : bucket) {
            store->latest[b * store->wide + store->counts[b] % store->wide] = int32_t(at[x]);
            store->counts[b]++;
        }
    }
}

// Of each text's ending (`compared` tokens, the last first) the places of all orders, and how many
// tokens before each are the ending's; 0 of places that stand there twice or that another order has.
void matching(const Store *store, const int64_t *endings, int64_t texts, int64_t compared, int64_t *at,
              int64_t *matched) {
    std::vector<int64_t> bucket(store->orders);
    for (int64_t b = 0; b < texts; b++, endings += compared) {
        store->find(endings, bucket.data());
        for (int64_t o = 0; o < store->orders; o++) {
            const int64_t least = store->order[o];
            const int64_t more = o + 1 < store->orders ? store->order[o + 1] : INT64_MAX;
            const int32_t *places = store->latest + bucket[o] * store->wide;
            for (int64_t w = 0; w < store->wide; w++, at++, matched++) {
                *at = places[w];
                bool again = false;
                for (int64_t earlier = 0; earlier < w; earlier++) again |= places[earlier] == *at;
                int64_t same = 0;
                while (!again && same < compared && endings[same] >= 0 &&
                       store->read(*at - 1 - same) == endings[same])
                    same++;
                *matched = same >= least && same < more ? same : 0;
            }
        }
    }
}

// Chains along the places that lead on.
int64_t follow(const Store *store, const int64_t *at, const float *weight, int64_t places,
               const lookups::Chains *how) {
    std::vector<uint8_t> agree(how->rows * places);
    for (int64_t i = 0; i < how->rows * places; i++) agree[i] = weight[i] > 0;
    const auto fill = [&](int64_t b, int64_t k, lookups::Law &law) {
        for (int64_t c = b * places; c < (b + 1) * places; c++) {
            const int64_t token = agree[c] ? store->read(at[c] + k) : -1;
            if (token >= 0) law.add(token, weight[c]);
        }
    };
    const auto go = [&](int64_t b, int64_t k, int64_t best) {
        for (int64_t c = b * places; c < (b + 1) * places; c++)
            agree[c] = agree[c] && store->read(at[c] + k) == best;
    };
    return lookups::follow(*how, fill, go);
}

typedef lookups::Drafts<Store> Drafts;

void draft(const Drafts *d, Round *r) {
    const int64_t B = r->rows, places = d->store->orders * d->store->wide;
    std::vector<int64_t> at(B * places), matched(B * places);
    matching(d->store, d->endings(B).data(), B, d->ending, at.data(), matched.data());
    std::vector<float> weight(B * places);
    bool known = false;
    for (int64_t i = 0; i < B * places; i++) {
        weight[i] = matched[i] > 0 ? std::exp2(float(matched[i])) : 0;
        known |= matched[i] > 0 && r->active[i / places];
    }
    lookups::draft(*r, *d->how, known, [&](const lookups::Chains &how) {
        return follow(d->store, at.data(), weight.data(), places, &how);
    });
}

void told(const Drafts *d, Round *r) {
    std::vector<int64_t> at;
    for (int64_t b = 0; b < r->rows; b++)
        for (int64_t i = 0; i < r->emitted(b); i++)
            at.push_back(d->store->ring + b * d->texts.slots + d->texts.lens[b] + i);
    d->texts.extend(*r);
    std::vector<uint8_t> real(at.size(), 1);
    note(d->store, at.data(), real.data(), int64_t(at.size()));
}
}
