// What the stores on a CPU have in common, in the numbers of `hashed` and `law_of` of texts.py.

#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "../engine/round.h"

namespace lookups {

constexpr int64_t MIX = 0x1E3779B97F4A7C15;

inline int64_t times(int64_t a, int64_t b) { return int64_t(uint64_t(a) * uint64_t(b)); }

// The hash of as many tokens as each order says, the last one first; the longest order is the last.
template <class Each>
inline void hashes(const int64_t *last, const int64_t *order, int64_t orders, Each each) {
    int64_t sum = 0, factor = 1, m = 0;
    for (int64_t o = 0; o < orders; o++) {
        for (; m < order[o]; m++) {
            factor = times(factor, MIX);
            sum = int64_t(uint64_t(sum) + uint64_t(times(last[m] + 2, factor)));
        }
        int64_t hash = int64_t(uint64_t(sum) + uint64_t(order[o]));
        hash = times(hash ^ (hash >> 29), MIX);
        each(o, (hash ^ (hash >> 32)) & ((int64_t(1) << 62) - 1));
    }
}

// Where the least of some numbers stands first.
inline int64_t least_of(const float *x, int64_t count) {
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

// Rows' own texts, prompt and answer, the pending token last; beyond `lens` stands -1.
struct Texts {
    int64_t slots, *text, *lens;

    // A row's last tokens, the last one first; -1 before its beginning.
    void tail(int64_t b, int64_t count, int64_t *last) const {
        for (int64_t i = 0, at = lens[b] - 1; i < count; i++, at--)
            last[i] = at >= 0 ? text[b * slots + at] : -1;
    }
    // Let each go on with what a round emitted.
    void extend(const Round &r) const {
        for (int64_t b = 0; b < r.rows; b++) {
            for (int64_t i = 0; i < r.emitted(b); i++) {
                const int64_t at = lens[b] + i < slots ? lens[b] + i : slots - 1;
                text[b * slots + at] = r.told(b)[i];
            }
            lens[b] += r.emitted(b);
        }
    }
};

// How chains are drafted. slack: the weight of each token that was never seen; race: of the rows'
// levels, or none; from: levels of each row's to leave out (null: none); asked: whether a row's chain is to
// be of these (null: nobody asks).
struct Chains {
    int64_t rows, vocab, race_row, race_step, steps;
    float slack, temperature, hopeless;
    const uint8_t *active;
    const float *race;
    int64_t *tokens;
    const int64_t *from;
    const Asked *asked;
};

// Tokens by their weights, of which some may come twice; those that there aren't are left out.
struct Law {
    int64_t vocab;
    float slack;
    std::vector<int64_t> ids;
    std::vector<float> total;
    void add(int64_t token, float weight) {
        if (token < 0 || token >= vocab) return;
        size_t i = 0;
        while (i < ids.size() && ids[i] != token) i++;
        if (i == ids.size()) ids.push_back(token), total.push_back(slack);
        total[i] += weight;
    }
};

// Each row's next tokens, the best by log(weight + slack) / temperature - race, up to the level at
// which no row that decodes has one likelier than `hopeless`; how many levels that is. fill: the law
// of a row at a level; go: goes on with its best token.
template <class Fill, class Go> inline int64_t follow(const Chains &how, Fill fill, Go go) {
    Law law{how.vocab, how.slack, {}, {}};
    const float unseen = std::log(how.slack) / how.temperature;
    for (int64_t k = 0; k < how.steps; k++) {
        bool hope = false;
        for (int64_t b = 0; b < how.rows; b++) {
            law.ids.clear(), law.total.clear();
            fill(b, k, law);
            // What was never seen is led by the noise alone, or where there is none by number.
            const int64_t at = b * how.race_row + ((how.from ? how.from[b] : 0) + k) * how.race_step;
            const float *noise = how.race ? how.race + at : nullptr;
            int64_t best = noise ? least_of(noise, how.vocab) : 0;
            float score = noise ? unseen - noise[best] : unseen, own = how.slack;
            for (size_t i = 0; i < law.ids.size(); i++) {
                const int64_t id = law.ids[i];
                const float weight = law.total[i];
                const float rated = std::log(weight) / how.temperature - (noise ? noise[id] : 0.0f);
                if (rated > score || (rated == score && id <= best)) score = rated, best = id, own = weight;
            }
            how.tokens[b * how.steps + k] = best;
            // How much less likely than all tokens together.
            const auto beside = [&](float weight) {
                return std::pow(double(weight) / own, 1.0 / how.temperature);
            };
            const double unknown = double(how.vocab - int64_t(law.ids.size()));
            double all = unknown * beside(how.slack), weights = unknown * how.slack;
            float most = how.slack;
            for (float weight : law.total) {
                all += beside(weight), weights += weight;
                most = weight > most ? weight : most;
            }
            hope |= how.active[b] && how.hopeless * all <= 1;
            if (!k && how.asked && how.active[b] && !law.ids.empty())
                how.asked->ask(b, best, float(most / weights));
            go(b, k, best);
        }
        if (!hope) return k + 1;
    }
    return how.steps;
}

// What drafts in several rounds that are one call; ending: how many of a text's last tokens it looks at.
template <class Store> struct Drafts {
    const Store *store;
    Texts texts;
    const Chains *how;
    int64_t ending;

    std::vector<int64_t> endings(int64_t rows) const {
        std::vector<int64_t> found(rows * ending);
        for (int64_t b = 0; b < rows; b++) texts.tail(b, ending, &found[b * ending]);
        return found;
    }
};

// The chains of a round of several that are one call. follow: drafts by what it is given; how many
// levels. known: whether anything is, of a row that decodes.
template <class Follow> inline void draft(Round &r, Chains how, bool known, Follow follow) {
    const int64_t K = r.nodes - 1;
    std::vector<int64_t> made(r.rows * K), from(r.rows);
    for (int64_t b = 0; b < r.rows; b++) from[b] = r.along(b);
    how.rows = r.rows, how.steps = K, how.active = r.active, how.tokens = made.data();
    how.race = r.race, how.race_row = r.race_row, how.race_step = r.race_step;
    how.from = from.data(), how.asked = r.asked;
    r.draft(made.data(), K, known ? follow(how) : 0);
}

}  // namespace lookups
