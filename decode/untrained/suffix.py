"""What followed the text's own ending before, here or in earlier answers, as a law that any tree is
grown from (suffix decoding: Oliaro et al., arXiv 2411.04975).

    suffix            begins with nothing, and remembers the latest answers
    suffix:FILE       begins with what `draftsmith remember` wrote

A token that is known, with those before it, is a place that a match may lead to. Of each ending of
1, 2, 4 and 8 tokens a table keeps the latest WIDE places, by the ending's hash: a look-up costs the
same whatever the store holds. The tokens before these places are compared with the text's ending. A
place weighs 2 to the number of them that match, and SLACK is the weight of what was never seen, so
that one short match isn't taken for a certainty; after a path

    q(v) ~ the weights of the places that went on with the path and then with v, + SLACK / V

Our differences: the latest places count, not all; lengths of matches are mixed by weight, where the
paper takes the one with the best score; trees; and the noise is the target's.

Shapes: B rows, S slots of a row's text, R tokens of the store, Y = B S of the rows, X places, O
orders, H buckets, W places of one, C = O W places looked at, P tokens compared, F nodes fed, V
vocabulary.
"""

import ctypes
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.decode.drafting.base import Admitted, Fed, Feed, Frontier, Kept, Round, picked
from draftsmith.decode.forward.compiled import library, place, pointer
from draftsmith.decode.untrained.texts import LookupDrafter, chained, hashed, law_of

ORDERS = (1, 2, 4, 8)
WIDE = 16
BUCKETS = 1 << 17
COMPARED = 16
SLACK = 16.0
REMEMBERED = 1 << 20  # tokens of earlier answers; the oldest give way
LED = 8  # tokens before an answer that are remembered with it

SOURCE = Path(__file__).with_name("suffix.cpp")
_P = ctypes.c_void_p


class _Store(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("ring", "known", "orders", "buckets", "wide")),
        *((name, _P) for name in ("order", "own", "rows", "latest", "counts")),
    ]


class Places:
    """The text remembered, and where each ending was seen last. One for all who share it. On a CPU
    in C++ (suffix.cpp), place by place: as operations on tensors a look-up is a hundred small ones.

    ring_R: answers one behind the other, -1 between them; latest_OHW: places, the ring's below R,
    those of rows above; counts_OH: places noted in each bucket, the last of which takes what isn't
    to be noted.
    """

    def __init__(self, device: torch.device, remembered: int = REMEMBERED) -> None:
        self.ring_R = torch.full((remembered,), -1, dtype=torch.int32, device=device)
        shape = len(ORDERS), BUCKETS + 1
        self.latest_OHW = torch.full((*shape, WIDE), -1, dtype=torch.int32, device=device)
        self.counts_OH = torch.zeros(shape, dtype=torch.int32, device=device)
        self.end = 0
        self.order_O = torch.tensor(ORDERS)

    @cached_property
    def made(self) -> Any:
        """The functions of suffix.cpp; None on a GPU, and where nothing compiles them."""
        return library(SOURCE) if self.ring_R.device.type == "cpu" else None

    def laid(self, rows_Y: Tensor) -> Any:
        """As suffix.cpp has it."""
        return ctypes.byref(self.in_memory(rows_Y))

    def in_memory(self, rows_Y: Tensor) -> _Store:
        sizes = len(self.ring_R), len(rows_Y), len(ORDERS), BUCKETS, WIDE
        lie = self.order_O, self.ring_R, rows_Y, self.latest_OHW, self.counts_OH
        return _Store(*sizes, *map(pointer, lie))

    def forget(self) -> None:
        self.ring_R.fill_(-1)
        self.latest_OHW.fill_(-1)
        self.counts_OH.zero_()
        self.end = 0

    def remember(self, tokens_N: Tensor) -> None:
        """An answer, in the place of the oldest ones where there is no more room."""
        tokens_N = tokens_N[-len(self.ring_R) + 1 :]
        if self.end + len(tokens_N) >= len(self.ring_R):
            self.end = 0
        at_N = self.end + torch.arange(len(tokens_N), device=self.ring_R.device)
        self.ring_R[at_N] = tokens_N.to(torch.int32)
        self.end += len(tokens_N) + 1
        self.ring_R[self.end - 1] = -1
        self._note_own(at_N[1:])

    def restore(self, ring_R: Tensor, end: int) -> None:
        """Be as one was whose ring this is, and go on behind its `end`."""
        self.forget()
        self.ring_R.copy_(ring_R)
        self.end = end
        at_R = torch.arange(1, len(ring_R), device=self.ring_R.device).roll(-end)
        known_R = (self.ring_R[at_R] >= 0) & (self.ring_R[at_R - 1] >= 0)
        self._note_own(at_R[known_R])

    def _note_own(self, at_N: Tensor) -> None:
        for at_X in at_N.split(1 << 16):
            self.note(at_X, torch.ones_like(at_X).bool(), self.ring_R[:0])

    def read(self, at: Tensor, rows_Y: Tensor) -> Tensor:
        """The tokens at places; -1 before the first and past the last."""
        size = len(self.ring_R)
        own = self.ring_R[at.clamp(0, size - 1)].long()
        if len(rows_Y):
            theirs = rows_Y[(at - size).clamp(0, len(rows_Y) - 1)]
            own = torch.where(at < size, own, theirs)
        return torch.where((at >= 0) & (at < size + len(rows_Y)), own, -1)

    def note(self, at_X: Tensor, real_X: Tensor, rows_Y: Tensor) -> None:
        """That these places follow what stands before them; of a bucket the latest are kept."""
        if self.made:
            given = at_X.contiguous(), real_X.contiguous()
            self.made.note(self.laid(rows_Y), *map(place, given), len(at_X))
            return
        back_P = torch.arange(1, max(ORDERS) + 1, device=at_X.device)
        bucket_OX = hashed(self.read(at_X[:, None] - back_P, rows_Y), ORDERS) % BUCKETS
        bucket_OX = torch.where(real_X, bucket_OX, BUCKETS)
        order_O1 = torch.arange(len(ORDERS), device=at_X.device)[:, None]
        bucket_X, sorted_X = (order_O1 * (BUCKETS + 1) + bucket_OX).flatten().sort(stable=True)
        at_X = at_X.repeat(len(ORDERS))[sorted_X]
        # Of many places for one bucket at once each has a number, and the last WIDE stay.
        step_X = torch.arange(len(at_X), device=at_X.device)
        number_X = step_X - torch.searchsorted(bucket_X, bucket_X)
        left_X = torch.searchsorted(bucket_X, bucket_X, right=True) - step_X
        counts_H = self.counts_OH.view(-1)
        into_X = bucket_X * WIDE + (counts_H[bucket_X] + number_X) % WIDE
        into_X = torch.where(left_X <= WIDE, into_X, BUCKETS * WIDE)
        self.latest_OHW.view(-1)[into_X] = at_X.to(torch.int32)
        counts_H.scatter_add_(0, bucket_X, torch.ones_like(bucket_X, dtype=torch.int32))

    def matching(self, ending_BP: Tensor, rows_Y: Tensor) -> tuple[Tensor, Tensor]:
        """Places [B, C], and how many tokens before each equal the ending (the last one first); 0
        of places that another order has too.
        """
        if self.made:
            ending_BP = ending_BP.contiguous()
            found = torch.empty(2, len(ending_BP), len(ORDERS) * WIDE, dtype=torch.int64)
            lie = map(place, (ending_BP, *found))
            sizes = map(ctypes.c_int64, ending_BP.shape)
            self.made.matching(self.laid(rows_Y), next(lie), *sizes, *lie)
            return found[0], found[1]
        bucket_OB = hashed(ending_BP, ORDERS) % BUCKETS
        order_O1 = torch.arange(len(ORDERS), device=bucket_OB.device)[:, None]
        at_BOW = self.latest_OHW[order_O1, bucket_OB].transpose(0, 1).long()
        # A place of a row may stand there twice: once from a text that the row had before.
        earlier_WW = torch.ones(WIDE, WIDE, dtype=torch.bool, device=at_BOW.device).tril(-1)
        again_BOW = ((at_BOW[..., None] == at_BOW[..., None, :]) & earlier_WW).any(-1)
        back_P = torch.arange(1, ending_BP.shape[1] + 1, device=at_BOW.device)
        before_BOWP = self.read(at_BOW[..., None] - back_P, rows_Y)
        ending_B11P = ending_BP[:, None, None]
        same_BOWP = (before_BOWP == ending_B11P) & (ending_B11P >= 0)
        matched_BOW = same_BOWP.long().cumprod(-1).sum(-1) * ~again_BOW
        for number, (least, more) in enumerate(zip(ORDERS, (*ORDERS[1:], 1 << 20), strict=True)):
            of_BW = matched_BOW[:, number]
            of_BW *= (of_BW >= least) & (of_BW < more)
        return at_BOW.flatten(1), matched_BOW.flatten(1)


class SuffixDrafter(LookupDrafter):
    held = ("text_BS", "lens_B", "answer_B")
    slack, ending = SLACK, COMPARED

    def __init__(
        self, kind: str, device: torch.device, vocab_size: int, remembered: int = REMEMBERED
    ) -> None:
        super().__init__(kind, device, vocab_size)
        self.store = Places(self.device, remembered)

    def remember(self, tokens_N: Tensor) -> None:
        self.store.remember(tokens_N)

    def stored(self) -> dict[str, Tensor]:
        return {"ring_R": self.store.ring_R, "end": torch.tensor(self.store.end)}

    def restore(self, stored: dict[str, Tensor]) -> None:
        self.store.restore(stored["ring_R"], int(stored["end"]))

    @torch.inference_mode()
    def forget(self) -> None:
        self.store.forget()
        if hasattr(self, "lens_B"):
            self.answer_B.copy_(self.lens_B)

    def reset(self, rows: int, slots: int) -> None:
        self.settle()
        super().reset(rows, slots)
        self.answer_B = torch.zeros_like(self.lens_B)

    def release(self) -> None:
        self.settle()
        super().release()

    @torch.inference_mode()
    def settle(self, rows: Tensor | None = None) -> None:
        """Take the answers that stand in some rows, or in all, into the store. Of one that goes on
        the rest follows, as a text of its own.
        """
        if not hasattr(self, "lens_B"):
            return
        rows = torch.arange(len(self.lens_B), device=self.device) if rows is None else rows
        bounds = zip(self.answer_B[rows].tolist(), self.lens_B[rows].tolist(), strict=True)
        for row, (begin, end) in zip(rows.tolist(), bounds, strict=True):
            if begin < end:
                self.store.remember(self.text_BS[row, begin:end])
        self.answer_B[rows] = self.lens_B[rows]

    def prefill(self, admitted: Admitted) -> None:
        rows_R = admitted.rows_R
        self.settle(rows_R)
        super().prefill(admitted)
        self.answer_B[rows_R] = (admitted.lens_R - LED).clamp(min=0)
        at_N = torch.arange(1, admitted.tokens_RN.shape[1] + 1, device=self.device)
        self._note(rows_R, at_N.expand(len(rows_R), -1))

    def extend(self, kept: Kept) -> None:
        before_B1 = self.lens_B[:, None].clone()
        super().extend(kept)
        step_L = torch.arange(kept.tokens_BL.shape[1], device=self.device)
        self._note(torch.arange(len(before_B1), device=self.device), before_B1 + step_L)

    def _note(self, rows_R: Tensor, at_RN: Tensor) -> None:
        """That the tokens at these places of some rows are known, where they are."""
        real_RN = at_RN < self.lens_B[rows_R, None]
        first = len(self.store.ring_R)
        place_RN = first + rows_R[:, None] * self.text_BS.shape[1] + at_RN
        self.store.note(place_RN.flatten(), real_RN.flatten(), self.text_BS.flatten())

    def _matching(self) -> tuple[Tensor, Tensor]:
        """Places that the rows' endings lead to, and their weights: [B, C]."""
        at_BC, matched_BC = self.store.matching(self.tail(self.ending), self.text_BS.flatten())
        return at_BC, torch.where(matched_BC > 0, torch.exp2(matched_BC.float()), 0)

    def followed(self, request: Round) -> Tensor:
        at_BC, weight_BC = self._matching()
        if not bool(((weight_BC > 0).any(1) & request.active_B).any()):
            return at_BC[:, :0]
        where = *map(place, (at_BC, weight_BC)), ctypes.c_int64(at_BC.shape[1])
        store = self.store.laid(self.text_BS.flatten())
        follow = partial(self.store.made.follow, store, *where)
        return chained(request, SLACK, self.vocab_size, follow)

    def in_memory(self) -> _Store:
        return self.store.in_memory(self.text_BS.view(-1))

    def looked_up(self) -> tuple[Feed, Tensor]:
        rows_Y = self.text_BS.flatten()
        at_BC, weight_BC = self._matching()
        found_BC = weight_BC > 0
        agree_BFC = found_BC[:, None]

        def feed(frontier: Frontier) -> Fed:
            nonlocal agree_BFC
            if frontier.depth:
                if frontier.of_BF is not None:
                    agree_BFC = picked(agree_BFC, frontier.of_BF)
                passed_BC = self.store.read(at_BC + frontier.depth - 1, rows_Y)
                agree_BFC = agree_BFC & (passed_BC[:, None] == frontier.tokens_BF[..., None])
            next_B1C = self.store.read(at_BC + frontier.depth, rows_Y)[:, None]
            given_BFC = weight_BC[:, None] * (agree_BFC & (next_B1C >= 0))
            return law_of(next_B1C.expand_as(given_BFC), given_BFC, SLACK, self.vocab_size)

        return feed, found_BC.any(1)
