// The store of suffix.py on a CPU: what follows there as operations on whole tensors, here place by
// place. The numbers are those of `hashed` and of `law_of`, to the bit.

#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr int64_t MIX = 0x1E3779B97F4A7C15;

int64_t times(int64_t a, int64_t b) { return int64_t(uint64_t(a) * uint64_t(b)); }

// Where the least of some numbers stands first.
int64_t least_of(const float *x, int64_t count) {
    float least[16];
    for (float &lane : least) lane = INFINITY;
    int64_t v = 0;
    for (; v + 16 <= count; v += 16)
        for (int i = 0; i < 16; i++) least[i] = x[v + i] < least[i] ? x[v + i] : least[i];
    for (; v < count; v++) least[0] = x[v] < least[0] ? x[v] : least[0];
    float most = least[0];
    for (float lane : least) most = lane < most ? lane : most;
    for (v = 0; v + 1 < count && x[v] != most;) v++;
    return v;
}

}  // namespace

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
        int64_t sum = 0, factor = 1, m = 0;
        for (int64_t o = 0; o < orders; o++) {
            for (; m < order[o]; m++) {
                factor = times(factor, MIX);
                sum = int64_t(uint64_t(sum) + uint64_t(times(ending[m] + 2, factor)));
            }
            int64_t hash = int64_t(uint64_t(sum) + uint64_t(order[o]));
            hash = times(hash ^ (hash >> 29), MIX);
            bucket[o] = o * (buckets + 1) + ((hash ^ (hash >> 32)) & ((int64_t(1) << 62) - 1)) % buckets;
        }
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

// Each row's next tokens, the best by log(weight + slack) / temperature - race, up to the level at
// which no row that decodes has one likelier than `hopeless`; how many levels that is.
int64_t follow(const Store *store, const int64_t *at, const float *weight, const uint8_t *active,
               const float *race, int64_t *tokens, int64_t rows, int64_t places, int64_t vocab,
               int64_t race_row, int64_t race_step, int64_t steps, float slack, float temperature,
               float hopeless) {
    std::vector<uint8_t> agree(rows * places);
    for (int64_t i = 0; i < rows * places; i++) agree[i] = weight[i] > 0;
    std::vector<int64_t> ids(places);
    std::vector<float> total(places);
    const float unseen = std::log(slack) / temperature;
    for (int64_t k = 0; k < steps; k++) {
        bool hope = false;
        for (int64_t b = 0; b < rows; b++) {
            int64_t found = 0;
            for (int64_t c = b * places; c < (b + 1) * places; c++) {
                const int64_t token = agree[c] ? store->read(at[c] + k) : -1;
                if (token < 0) continue;
                int64_t i = 0;
                while (i < found && ids[i] != token) i++;
                if (i == found) ids[found] = token, total[found++] = slack;
                total[i] += weight[c];
            }
            // What was never seen is led by the noise alone, or where there is none by number.
            const float *noise = race ? race + b * race_row + k * race_step : nullptr;
            int64_t best = noise ? least_of(noise, vocab) : 0;
            float score = noise ? unseen - noise[best] : unseen, own = slack;
            double all = double(vocab - found);
            for (int64_t i = 0; i < found; i++) {
                all += std::pow(double(total[i]) / slack, 1.0 / temperature);
                const float rated = std::log(total[i]) / temperature - (noise ? noise[ids[i]] : 0.0f);
                if (rated > score || (rated == score && ids[i] <= best))
                    score = rated, best = ids[i], own = total[i];
            }
            tokens[b * steps + k] = best;
            hope |= active[b] && std::pow(double(own) / slack, 1.0 / temperature) >= hopeless * all;
            for (int64_t c = b * places; c < (b + 1) * places; c++)
                agree[c] = agree[c] && store->read(at[c] + k) == best;
        }
        if (!hope) return k + 1;
    }
    return steps;
}
}
