"""What a drafter is owed by rounds in which it drafted nothing: a pass of its model a round would
be wasted on them, so that their tokens wait and are taken in together before its next draft. So do
prompts that came while nothing was drafted: most have their answers before it drafts again.

Shapes: B rows, R of them just admitted, L tokens of a round, M that wait, U width of the taps'
states.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from draftsmith.decode.drafting.base import Admitted, Kept

NAP = 32  # rounds before a draft from which on a drafter that reads states hears of each
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
        if not asleep:
            return False
        alone = {row: admitted.alone(i) for i, row in enumerate(admitted.rows_R.tolist())}
        held = (self.prompts | alone).values()
        fits = sum(x.nbytes for one in held for x in one if isinstance(x, Tensor)) <= PROMPTS
        self.prompts |= alone if fits else {}
        return fits

    def take(self, owes: Sequence[Kept], *, replayed: bool) -> None:
        """Rounds, each of a Kept or several of one; none where they aren't to be told: all before
        is lost then. replayed: into the same tensors each time.
        """
        if not owes:
            self.rounds.clear()
        for kept in owes:
            self._take(kept, replayed=replayed)

    def _take(self, kept: Kept, *, replayed: bool) -> None:
        if not self.rounds:
            self.begin(slice(len(kept.lens_B)), kept.lens_B)
        tokens_BL, n_new_B, _, lens_B, taps_BLU, *_ = kept  # no noise, which would stay with it
        if replayed:
            tokens_BL, n_new_B, lens_B = (x.clone() for x in (tokens_BL, n_new_B, lens_B))
            taps_BLU = None if taps_BLU is None else taps_BLU.clone()
        self.rounds.append(Kept(tokens_BL, n_new_B, None, lens_B, taps_BLU))

    def settled(self, lens_B: Tensor, top: int) -> Kept:
        """All that is owed to rows of now `lens_B` tokens, as if a round had kept it. Nobody owes
        anything from now on.
        """
        waited, held_B, rows = list(self.rounds), torch.zeros_like(lens_B), len(lens_B)
        self.rounds.clear()
        for kept in waited:  # of rows that were computed, which may be fewer or more than now
            held_B[: len(kept.n_new_B)] += kept.n_new_B[:rows]
        most = min(sum(kept.tokens_BL.shape[1] for kept in waited), self.most)
        n_new_B = torch.minimum(lens_B - self.lens_B[:rows], held_B).clamp(0, most)
        if lens_B.device.type == "cpu":  # most rounds keep less than they might
            most = max(1, int(n_new_B.max()))
        before_B = lens_B - n_new_B
        taps = [kept.taps_BLU for kept in waited if kept.taps_BLU is not None][:1]
        made = [lens_B.new_zeros(rows, most + 1)]  # the last place is for what isn't owed
        made += [taps_BLU.new_zeros(rows, most + 1, taps_BLU.shape[2]) for taps_BLU in taps]
        for kept in waited:
            tokens_RL, lens_R1 = kept.tokens_BL[:rows], kept.lens_B[:rows, None]
            row_R1 = torch.arange(len(lens_R1), device=lens_B.device)[:, None]
            step_L = torch.arange(tokens_RL.shape[1], device=lens_B.device)
            at_RL = lens_R1 - before_B[: len(lens_R1), None] + step_L
            # What a row had before its present text lies below, or where its own comes to lie.
            owed_RL = (at_RL >= 0) & (at_RL < most) & (step_L < kept.n_new_B[:rows, None])
            at_RL = torch.where(owed_RL, at_RL, most)
            for whole, part in zip(made, (tokens_RL, kept.taps_BLU), strict=False):
                if part is not None:
                    whole[row_R1, at_RL] = part[:rows]
        tokens_BM, taps_BMU = (x[:, :most] for x in made) if taps else (made[0][:, :most], None)
        return Kept(tokens_BM, n_new_B, None, before_B, taps_BMU, top)
