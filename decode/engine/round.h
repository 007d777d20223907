// A round of rows by a coupled rule, as C++ has it (rows.cpp), and what drafters in C++ see of it.
// Names: B rows, N nodes, L tokens that a round can emit, V vocabulary.

#pragma once
#include <cstdint>

// Which of two drafters a row's chain is of, by how often either's first token was kept: of the one that
// is asked first by the chance that it gives its likeliest token, in PLACES parts, and after these of the
// other one. Of a round, [B]: place, the token that it drafts first (-1: nothing is known), and whether
// the row's chain is its own.
struct Asked {
    float *hits, *seen;
    int64_t *place, *guess;
    uint8_t *certain;
    static constexpr int64_t PLACES = 8;
    static constexpr float MOST = 256;

    void ask(int64_t b, int64_t token, float chance) const {
        int64_t at = int64_t(chance * PLACES + 1.0f / 16);
        place[b] = at < PLACES ? at : PLACES - 1, guess[b] = token;
        certain[b] = hits[place[b]] / seen[place[b]] >= hits[PLACES] / seen[PLACES];
    }
    void tell(int64_t b, int64_t first, bool kept) const {
        seen[place[b]]++, hits[place[b]] += first == guess[b];
        if (!certain[b]) seen[PLACES]++, hits[PLACES] += kept;
    }
    void fade() const {
        for (int64_t i = 0; i <= PLACES; i++)
            if (seen[i] > MOST) seen[i] *= 0.5f, hits[i] *= 0.5f;
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

// Of a drafter: fill in a round's tokens, the pending ones first, and lower `nodes` where there are
// fewer; or hear what the round came to.
typedef void (*Drafting)(void *drafter, Round *round);
