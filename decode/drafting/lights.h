// What a block drafter's light head tells a token of those drafted before it (block_lights.py), where it is
// no layer; native.cpp includes this.

#pragma once
#include <initializer_list>
#include <utility>

// after: of what is made, `rank` numbers, what is added to the logits; without one it changes the state that
// the LM head is to read. before: of each token's own numbers; carried on are `width`, by a GRU's maps, cell,
// of a token and of themselves. first, second: maps; of_token, of_state: norms (null: there is none).
struct Light {
    enum { MARKOV, SELECTOR, GATED, RNN, GRU, SWIGLU };
    int64_t kind, rank, width;
    double epsilon;
    const bf16 *before, *after, *of_token, *of_state;
    const Map *first, *second, *cell[2];
};
// Parts of rows, each so wide, side by side.
static std::vector<bf16> beside(int64_t rows,
                                std::initializer_list<std::pair<const bf16 *, int64_t>> parts) {
    int64_t all = 0, at = 0;
    for (auto &part : parts) all += part.second;
    std::vector<bf16> made(rows * all);
    for (auto &[from, width] : parts) {
        for (int64_t b = 0; b < rows; b++)
            memcpy(&made[b * all + at], from + b * width, width * sizeof(bf16));
        at += width;
    }
    return made;
}
static void remember(const Light &l, int64_t B, const bf16 *x, int64_t in, bf16 *carried, int64_t threads) {
    int64_t W = l.width;
    std::vector<bf16> given(B * 3 * W), kept(B * 3 * W);
    maps(l.cell[0], 1, x, given.data(), B, in, 3 * W, threads);
    maps(l.cell[1], 1, carried, kept.data(), B, W, 3 * W, threads);
    for (int64_t b = 0; b < B; b++)
        for (int64_t i = 0; i < W; i += 16) {
            auto of = [&](const std::vector<bf16> &made, int64_t gate) {
                return wide16(&made[(3 * b + gate) * W + i]);
            };
            F16 keep = sigmoid16(of(given, 1) + of(kept, 1)), own = wide16(carried + b * W + i);
            F16 fresh = tanh16(of(given, 2) + sigmoid16(of(given, 0) + of(kept, 0)) * of(kept, 2));
            store16(carried + b * W + i, fresh + keep * (own - fresh));
        }
}
// Of B rows' states [B, H] and last tokens: what `after` multiplies [B, R], or the changed states.
static std::vector<bf16> lit(const Light &l, const Body &b, const bf16 *embedding, const int64_t *token,
                             const std::vector<bf16> &state, std::vector<bf16> &carried) {
    int64_t H = b.hidden, R = l.rank, W = l.width, B = state.size() / H;
    std::vector<bf16> own(B * R), word(B * H), made, read = state;
    for (int64_t i = 0; i < B; i++) {
        if (l.before) memcpy(&own[i * R], l.before + token[i] * R, R * sizeof(bf16));
        memcpy(&word[i * H], embedding + token[i] * H, H * sizeof(bf16));
        if (l.of_token) normed(&word[i * H], l.of_token, &word[i * H], H, l.epsilon);
        if (l.of_state) normed(&read[i * H], l.of_state, &read[i * H], H, l.epsilon);
    }
    if (l.cell[0]) remember(l, B, word.data(), H, carried.data(), b.threads);
    const bf16 *past = carried.data();
    std::vector<bf16> in = l.kind == l.SELECTOR ? read
                           : l.kind == l.GATED  ? beside(B, {{read.data(), H}, {own.data(), R}})
                           : l.kind == l.RNN    ? beside(B, {{past, W}, {own.data(), R}, {read.data(), H}})
                           : l.kind == l.GRU    ? beside(B, {{read.data(), H}, {past, W}})
                           : l.kind == l.SWIGLU ? beside(B, {{word.data(), H}, {read.data(), H}, {past, W}})
                                                : own;
    if (l.kind == l.MARKOV) return in;
    int64_t out = l.kind == l.RNN ? 3 * R : l.kind == l.SWIGLU ? 2 * H : R;
    int64_t wide = l.kind == l.SWIGLU ? H : R;
    std::vector<bf16> gates(B * out);
    made.resize(B * wide);
    maps(l.first, 1, in.data(), gates.data(), B, in.size() / B, out, b.threads);
    for (int64_t i = 0; i < B; i++)
        for (int64_t j = 0; j < wide; j += 16) {
            bf16 *to = &made[i * wide + j];
            auto gate = [&](int64_t which) { return wide16(&gates[i * out + which * wide + j]); };
            if (l.kind == l.SELECTOR) store16(to, wide16(&own[i * R + j]) * gate(0));
            if (l.kind == l.GATED) store16(to, wide16(&own[i * R + j]) * sigmoid16(gate(0)));
            if (l.kind == l.GRU) store16(to, gate(0) * sigmoid16(gate(0)));
            if (l.kind == l.SWIGLU) store16(to, gate(0) * sigmoid16(gate(0)) * gate(1));
            if (l.kind != l.RNN) continue;
            F16 keep = sigmoid16(gate(0)), was = wide16(&carried[i * R + j]), now = tanh16(gate(1));
            store16(&carried[i * R + j], now + keep * (was - now));
            store16(to, tanh16(gate(2)));
        }
    if (l.kind != l.SWIGLU) return made;
    std::vector<bf16> changed(B * H);
    maps(l.second, 1, made.data(), changed.data(), B, H, H, b.threads);
    added(changed.data(), state.data(), B * H);
    return changed;
}
