"""Which tokens of another tokenizer spell a target's token, learned as it comes (OmniDraft,
Ramakrishnan et al., arXiv 2507.02659).

Shapes: V vocabulary of the target, N tokens of the longest n-gram, G beginnings of n-grams, X
n-grams, Y tokens of all, B rows, D vocabulary of the draft.
"""

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from draftsmith.models.vocab_map import NEAR, Spelling, VocabMap

LONGEST = 8  # draft tokens of an n-gram that can be drafted


class NgramCache:
    """Target token -> the draft's tokens that spell it, and how often each was seen: at first the
    tokens that map alone, once each. Nothing is evicted. size: of the target's vocabulary.

    gram_NV: the n-grams, -1 beyond their ends; begins_NV: by a number, what their first 1, 2, ...
    tokens begin; length_V: 0 of what isn't known; counts_V; total_G: the counts of all n-grams with
    that beginning; whole_G: the token that a beginning spells by itself, -1 for none.
    """

    def __init__(
        self, own: Spelling, target: Spelling, size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.own, self.target, self.size, self.device = own, target, size, torch.device(device)
        found = VocabMap.of(own, target)
        self.mapped = found.ordinary | found.special
        self.forget()

    def forget(self) -> None:
        self.grams: dict[int, list[int]] = {}
        self._numbers: dict[tuple[int, ...], int] = {}
        shape, device = (LONGEST, self.size), self.device
        self.gram_NV = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.begins_NV = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.length_V, self.counts_V = torch.zeros(2, self.size, dtype=torch.int64, device=device)
        self.total_G = torch.zeros(0, dtype=torch.int64, device=device)
        self.whole_G = self.total_G.clone()
        ids = sorted(self.mapped)
        self._insert({token: [self.mapped[token]] for token in ids})
        self.count(torch.tensor(ids, device=device))

    def spelled(self, tokens: Iterable[int], before: bytes = b"") -> tuple[list[list[int]], bytes]:
        """The draft's tokens for each of the target's, which follow a text that ends with `before`;
        and how it ends then. What is new stays as it is spelled here.
        """
        grams = []
        for token in tokens:
            said, gram = self.target.bytes_of.get(token, b""), self.grams.get(token)
            if gram is None:
                gram = self.own.after(before, said)
                # Else it says a space more, or less than the token.
                if b"".join(self.own.bytes_of[i] for i in gram) == said:
                    self._insert({token: gram})
            grams.append(gram)
            before = (before + said)[-NEAR:]
        return grams, before

    @torch.inference_mode()
    def count(self, tokens_X: Tensor, many_X: Tensor | None = None) -> None:
        """Tokens that were seen, once each or so often."""
        many_X = torch.ones_like(tokens_X) if many_X is None else many_X
        many_X = many_X * (self.length_V[tokens_X] > 0)
        begins_NX = self.begins_NV[:, tokens_X]
        self.counts_V.index_add_(0, tokens_X, many_X)
        many_NX = many_X * (begins_NX >= 0)
        self.total_G.index_add_(0, begins_NX.clamp(min=0).flatten(), many_NX.flatten())

    def longer(self, log_q_BD: Tensor, fed_B: Tensor, begun_B: Tensor) -> tuple[Tensor, Tensor]:
        """The logits [B, V] of tokens whose n-grams go on with what a draft said so far, where it
        says `log_q_BD` next; and the token that is all of it [B], -1 where there is none. fed_B:
        tokens said so far; begun_B: their number, where they are any.
        """
        before_BV = self.begins_NV[(fed_B - 1).clamp(min=0)]
        follows_BV = ((before_BV == begun_B[:, None]) | (fed_B == 0)[:, None]) & (
            self.length_V > fed_B[:, None]
        )
        at_B = fed_B.clamp(max=LONGEST - 1)
        next_BV, begins_BV = self.gram_NV[at_B].clamp(min=0), self.begins_NV[at_B].clamp(min=0)
        share_BV = self.counts_V.log() - self.total_G.clamp(min=1).log()[begins_BV]
        law_BV = (log_q_BD.gather(1, next_BV) + share_BV).masked_fill(~follows_BV, -torch.inf)
        whole_B = torch.where(fed_B > 0, self.whole_G[begun_B], -1)
        rest_B1 = torch.log1p(-law_BV.logsumexp(-1, keepdim=True).exp().clamp(max=1 - 1e-6))
        at_B1 = whole_B.clamp(min=0)[:, None]
        rest_B1 = torch.where(whole_B[:, None] < 0, law_BV.gather(1, at_B1), rest_B1)
        return law_BV.scatter(1, at_B1, rest_B1), whole_B

    def stored(self) -> dict[str, Tensor]:
        """What a file holds."""
        lists = [self.grams[token] for token in sorted(self.grams)]
        return {
            "tokens_X": torch.tensor(sorted(self.grams)),
            "lengths_X": torch.tensor([len(gram) for gram in lists]),
            "grams_Y": torch.tensor([i for gram in lists for i in gram]),
            "counts_V": self.counts_V,
        }

    def restore(self, stored: dict[str, Tensor]) -> None:
        """Be as one was that stored this."""
        self.forget()
        grams = stored["grams_Y"].split(stored["lengths_X"].tolist())
        found = dict(zip(stored["tokens_X"].tolist(), (g.tolist() for g in grams), strict=True))
        self._insert({token: gram for token, gram in found.items() if token not in self.grams})
        seen_V = stored["counts_V"].to(self.device) - self.counts_V
        self.count(torch.arange(self.size, device=self.device), seen_V)

    @torch.inference_mode()
    def _insert(self, grams: dict[int, list[int]]) -> None:
        self.grams |= grams
        numbers, begun, device = self._numbers, len(self._numbers), self.device
        begins = {}
        for token, gram in grams.items():
            if 0 < len(gram) <= LONGEST:
                starts = accumulate((i,) for i in gram)
                begins[token] = [numbers.setdefault(start, len(numbers)) for start in starts]
        new_G = self.total_G.new_zeros(len(numbers) - begun)
        self.total_G = torch.cat([self.total_G, new_G])
        self.whole_G = torch.cat([self.whole_G, new_G - 1])
        for token, numbered in begins.items():
            many = len(numbered)
            self.gram_NV[:many, token] = torch.tensor(grams[token], device=device)
            self.begins_NV[:many, token] = torch.tensor(numbered, device=device)
            self.length_V[token] = many
            if self.whole_G[numbered[-1]] < 0:
                self.whole_G[numbered[-1]] = token
