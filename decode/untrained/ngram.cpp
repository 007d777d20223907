// Prompt lookup in several rounds that are one call: what ngram.py has as operations on whole texts.

#include "lookups.h"

typedef lookups::Drafts<void> Drafts;

// Where the continuation of the best match begins: of the longest, the latest; -1 if there is none.
static int64_t match(const int64_t *text, int64_t length, int64_t longest) {
    int64_t best = 0, found = -1;
    for (int64_t at = length - 1; at > 0 && best < longest; at--) {
        int64_t same = 0;
        while (same < longest && same < at && text[at - 1 - same] == text[length - 1 - same]) same++;
        if (same > best) best = same, found = at;
    }
    return found;
}

extern "C" void draft(const Drafts *d, Round *r) {
    const int64_t K = r->nodes - 1;
    std::vector<int64_t> made(r->rows * K);
    bool known = false;
    for (int64_t b = 0; b < r->rows; b++) {
        const int64_t *text = d->texts.text + b * d->texts.slots, length = d->texts.lens[b];
        const int64_t begin = match(text, length, d->ending);
        known |= begin >= 0 && r->active[b];
        // Past the end of the text the match is continued periodically from its own start.
        const int64_t period = length > begin ? length - begin : 1;
        for (int64_t k = 0; k < K; k++) {
            int64_t at = begin + k < length ? begin + k : begin + k % period;
            int64_t token = text[at > 0 ? at : 0];
            made[b * K + k] = token > 0 ? token : 0;
        }
    }
    r->draft(made.data(), K, known ? K : 0);
}

extern "C" void told(const Drafts *d, Round *r) { d->texts.extend(*r); }
