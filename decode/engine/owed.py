"""What rounds that drafted nothing owe the drafter: a pass of its model a round would be wasted on
them, so that their tokens wait and are taken in together before the next draft. So do prompts that
came while it slept, of which most have their answers before it drafts again.

Shapes: B rows, R of them just admitted, M rounds that wait, U width of the taps' states.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from draftsmith.decode.drafting.base import Admitted, Kept
from draftsmith.decode.policies.policy import NAP

TOKENS, STATES = 512, NAP  # that wait: of drafters that read tokens alone, and of those with taps
PROMPTS = 64 << 20  # bytes of prompts that wait, and of the taps' states there


class Owed:
    """lens_B: tokens of each row when the first of the rounds that wait set off, or when it was
    admitted meanwhile. Of more rounds than may wait the oldest are lost: the drafter then lacks
    them, which costs acceptance and no more. prompts: that wait, by their rows. taps: whether the
    drafter reads states too.
    """

    def __init__(self, lens_B: Tensor, *, taps: bool) -> None:
        self.lens_B = lens_B.clone()  # also of rows that nobody holds yet, which owe nothing
        self.most = STATES if taps else TOKENS
        self.rounds: deque[Kept] = deque(maxlen=self.most)  # one each, or several of one call
        self.prompts: dict[int, Admitted] = {}

    @torch.inference_mode()
    def begin(self, rows: slice | Tensor, lens: Tensor) -> None:
        """Of these rows nothing is owed yet."""
        self.lens_B[rows] = lens

    def admit(self, admitted: Admitted, busy: Iterable[int], *, asleep: bool) -> bool:
        """These rows owe nothing yet; whether their prompts wait: it sleeps, and there is room
        beside those of rows that are busy by now, of which these aren't.
        """
        self.begin(admitted.rows_R, admitted.lens_R)
        for row in self.prompts.keys() - set(busy):
            self.prompts.pop(row)
        held = *self.prompts.values(), admitted
        fits = sum(x.nbytes for one in held for x in one if x is not None) <= PROMPTS
        if asleep and fits:
            rows = enumerate(admitted.rows_R.tolist())
            self.prompts.update({row: admitted.alone(i) for i, row in rows})
        return asleep and fits

    def take(self, owes: Sequence[Kept], *, replayed: bool) -> None:
        """Rounds of one token a row, of one call or several; none where they aren't to be told:
        all before is lost then. replayed: into the same tensors each time.
        """
        if not owes:
            self.rounds.clear()
        for kept in owes:
            self._take(kept, replayed=replayed)

    def _take(self, kept: Kept, *, replayed: bool) -> None:
        if not self.rounds:
            self.begin(slice(len(kept.lens_B)), kept.lens_B)
        if replayed:
            taps_BLU = None if kept.taps_BLU is None else kept.taps_BLU.clone()
            kept = kept._replace(tokens_BL=kept.tokens_BL.clone(), taps_BLU=taps_BLU)
        self.rounds.append(kept)

    def settled(self, lens_B: Tensor, top: int) -> Kept:
        """All that is owed to rows of now `lens_B` tokens, as if a round had kept it. Nobody owes
        anything from now on.
        """
        waited = list(self.rounds)
        self.rounds.clear()
        total = sum(kept.tokens_BL.shape[1] for kept in waited)
        n_new_B = (lens_B - self.lens_B).clamp(max=min(total, self.most))
        step_M = torch.arange(min(total, self.most), device=lens_B.device)
        # A row's own are the last ones.
        of_BM = (step_M + total - n_new_B[:, None]).clamp(max=total - 1)
        tokens_BM = side_by_side([kept.tokens_BL for kept in waited], of_BM)
        taps = [kept.taps_BLU for kept in waited if kept.taps_BLU is not None]
        taps_BMU = side_by_side(taps, of_BM) if taps else None
        return Kept(tokens_BM, n_new_B, None, lens_B - n_new_B, taps_BMU, top)


def side_by_side(rounds: Sequence[Tensor], of_BM: Tensor) -> Tensor:
    """Of rounds' [R, L, ...] each row's in this order, [B, M, ...]; R, the rows that were computed,
    may be fewer or more than now.
    """
    total, place = sum(one.shape[1] for one in rounds), 0
    found = rounds[0].new_zeros(len(of_BM), total, *rounds[0].shape[2:])
    for one in rounds:
        found[: len(one), place : place + one.shape[1]] = one[: len(of_BM)]
        place += one.shape[1]
    return found[torch.arange(len(of_BM), device=of_BM.device)[:, None], of_BM]
