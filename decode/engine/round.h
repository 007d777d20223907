// A round of rows by a coupled rule, as C++ has it (rows.cpp), and what drafters in C++ see of it.
// Names: B rows, N nodes, L tokens that a round can emit, V vocabulary.

#pragma once
#include <cstdint>
#include <vector>

// Which of two drafters a row's chain is of, by how often either's first token was the one emitted, in
// `places` classes of the chance that the one that is asked first gives its likeliest token: of that one in
// every round, and after these of the other one in the rounds that it drafted. Of a round, [B]: class, the
// token that the first one drafts first (-1: it knows nothing), and whether the row's chain is its own; once
// the round is over, whether the row holds what the other one is to take in. own, [B, 2]: how often the other
// one was right in a row, and how often its classes made expect that.
struct Asked {
    float *hits, *seen;
    int64_t *place, *guess;
    uint8_t *certain;
    float *own;
    int64_t places;
    float sure;  // how good the other one is taken for, and again where it rests
    float most, rests;  // rounds that count in full, and that it rests until it is taken for that again
    float usual, fades;  // rounds in which a row is taken for like all, and what is left of its past at each

    void ask(int64_t b, int64_t token, float chance) const {
        int64_t at = int64_t(chance * places + 0.5f / places);
        at = at < places ? at : places - 1;
        place[b] = at, guess[b] = token;
        float row = (own[2 * b] + usual) / (own[2 * b + 1] + usual);
        certain[b] = hits[at] / seen[at] >= hits[places + at] / seen[places + at] * row;
    }
    // first, drafted: of each row the first token emitted, -1 for none, and the first one drafted.
    void tell(int64_t rows, const int64_t *first, const int64_t *drafted) const {
        std::vector<float> hit(2 * places), more(2 * places), rest(places);
        for (int64_t b = 0; b < rows; b++) {
            if (first[b] < 0 || guess[b] < 0) continue;
            int64_t at = place[b];
            more[at]++, hit[at] += first[b] == guess[b];
            if (certain[b]) {
                rest[at]++;
                continue;
            }
            bool right = first[b] == drafted[b];
            more[places + at]++, hit[places + at] += right;
            own[2 * b] = fades * own[2 * b] + right;
            own[2 * b + 1] = fades * own[2 * b + 1] + hits[places + at] / seen[places + at];
        }
        for (int64_t at = 0; at < places; at++)
            hit[places + at] += rest[at] * (sure * seen[places + at] - hits[places + at]) / rests;
        for (int64_t at = 0; at < 2 * places; at++) {
            hits[at] += hit[at], seen[at] += more[at];
            if (seen[at] > most) seen[at] *= 0.5f, hits[at] *= 0.5f;
        }
    }
};

struct Round {
    int64_t rows, nodes, length, vocab, stops;
    int64_t race_row, race_step;  // from one row's noise to the next one's, and one depth's
    int64_t tree_row;             // from one row's tree to the next one's; 0 where all share one
    int64_t beside;               // from one round's states of the taps to the next one's
    int64_t *tokens;              // [B, N], the pending ones first
    const int64_t *parent, *depth;
    const float *logits, *race;
    int64_t *lens, *pending, *rounds, *room;
    uint8_t *active;
    const int64_t *stop_ids;
    int64_t *before, *table;  // [B], and [B, 2 L + 4]: a round's news
    const int64_t *verified;  // [B]: nodes that are judged; null: all
    const int64_t *begun;     // [B]: the lengths at which the noise begins; null: the rows' own
    const uint16_t *side;     // [B, N, U]: the taps' states, side by side
    const Asked *asked;       // of a composite; null: nobody asks
    const uint8_t *sees;      // [B, N, N]: itself and the nodes above each; null: chains

    // The pending tokens, and after them each row's chain, the first of `wide`.
    void draft(const int64_t *chains, int64_t wide, int64_t levels) {
        nodes = 1 + levels;
        for (int64_t b = 0; b < rows; b++) {
            tokens[b * nodes] = pending[b];
            for (int64_t k = 0; k < levels; k++) tokens[b * nodes + 1 + k] = chains[b * wide + k];
        }
    }
    // How far into its noise a row is.
    int64_t along(int64_t b) const { return begun ? lens[b] - begun[b] : 0; }
    // A row's tokens emitted, the nodes of its path, and its four numbers, one after another.
    const int64_t *told(int64_t b) const { return table + b * (2 * length + 4); }
    // How many tokens it emitted.
    int64_t emitted(int64_t b) const { return told(b)[2 * length + 1]; }
};

// Of a drafter: fill in a round's tokens, the pending ones first, lower `nodes` where there are fewer, and
// say what tree they are where they aren't chains; or hear what the round came to.
typedef void (*Drafting)(void *drafter, Round *round);
