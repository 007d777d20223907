"""A draft LM that drafts a round's tokens in one pass (PARD, An et al., arXiv 2504.18583).

Behind the pending token stand MASKs, and the one k places behind says token k + 1. A row's latest
tokens wait until the next round's pass feeds them, the pending one last, and the MASKs with them:

    fed            x_{a-u+1} ... x_a  MASK  MASK ...      u tokens that wait, at their positions
    law of         -             x_{a+1} x_{a+2} ...

Keys and values of MASKs lie beyond the row, and what comes next goes over them. Rows of which fewer
wait have more MASKs, which nothing reads.

Shapes: B rows, W tokens of a tail, M fed in a pass, K levels, L tokens of a kept path, H hidden, V
vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.drafting.base import Admitted, Fed, Feed, Kept, Round, picked
from draftsmith.decode.drafting.grow_tree import by_depth, grow, grow_known
from draftsmith.decode.drafting.in_rounds import Draws, InRounds, pard_rounds
from draftsmith.decode.forward.kv import round_up
from draftsmith.decode.forward.runner import Seen
from draftsmith.decode.forward.size import ModelSize
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.draft_lm import mask_token
from draftsmith.models.vocab import DraftVocab


class PardDrafter(LMDrafter):
    """unfed_B: how many of a row's last tokens wait, the pending one among them. ValueError for a
    MASK that the model hasn't, and for one that keeps a state in the place of keys and values.
    """

    kind = "pard"
    one_pass = True
    native = per_node = None
    held = (*LMDrafter.held, "unfed_B")

    def __init__(
        self, model: PreTrainedModel, vocab_size: int, vocab: DraftVocab | None = None
    ) -> None:
        super().__init__(model, vocab_size, vocab)
        table: Any = model.get_input_embeddings().weight
        mask = mask_token(vars(model.config))
        self.mask = -1 if mask is None else mask
        self.levels = int(getattr(model.config, "para_num", None) or 8)  # PARD's own, if unsaid
        if not 0 <= self.mask < table.shape[0] or self.levels < 1:
            raise ValueError(
                f"drafter: got pard_token={mask}, para_num={self.levels} of a draft LM with "
                f"{table.shape[0]} embeddings, expected one of these, and tokens of a pass"
            )
        if self.runner.mixers:
            raise ValueError(
                f"drafter: got a {model.config.model_type} with a pard_token, expected a model "
                "with keys and values for each token: a state can't forget its MASKs"
            )
        self.tail = self.levels + 1

    @property
    def size(self) -> ModelSize:
        return replace(ModelSize.of(self.runner), scratch=self.tail, ahead=self.levels)

    def reset(self, rows: int, slots: int) -> None:
        super().reset(rows, slots + self.tail)
        self.unfed_B = torch.ones_like(self.tail_BW[:, 0])

    def prefill(self, admitted: Admitted) -> None:
        super().prefill(admitted)
        self.unfed_B[admitted.rows_R] = 1

    def propose(self, request: Round) -> TokenTree:
        tree = grow_known(request, lambda: self._drafted(request).logits_BFV)
        return grow(request, self.feed(request))[0] if tree is None else tree

    def in_rounds(self, nodes: int, temperature: float) -> InRounds | None:
        native, rows = self.runner.native, len(self.tail_BW)
        if native is None or not native.steps(rows * (self.tail + nodes - 2)):
            return None
        drawn = Draws(self.runner.head, temperature, self.pool, self.runner.context)
        return pard_rounds(native, drawn, self.mask, self.tail_BW, self.unfed_B)

    def feed(self, request: Round) -> Feed:
        return by_depth(lambda: self._drafted(request))

    def extend(self, kept: Kept) -> None:
        super().extend(kept._replace(path_BL=None))
        self.unfed_B.copy_(torch.where(kept.n_new_B > 0, kept.n_new_B, self.unfed_B))

    def catch_up(self, kept: Kept) -> None:
        """All but the pending token."""
        known_BM = torch.cat([self.tail_BW, kept.tokens_BL], 1)
        first_B1, at_BM = self._waiting(kept.lens_B, known_BM.shape[1] - 1)
        tokens_BM = known_BM.gather(1, at_BM.clamp(max=known_BM.shape[1] - 1))
        self._take_in(tokens_BM, first_B1, kept)
        self.extend(kept)
        self.unfed_B.fill_(1)

    def _waiting(self, lens_B: Tensor, many: int) -> tuple[Tensor, Tensor]:
        """Where in its text [B, 1] and from which places of its tail on [B, many] what waits of a
        row begins; of a row that nobody holds any more no sooner than its text.
        """
        unfed_B1 = torch.minimum(self.unfed_B, lens_B)[:, None]
        place_BM = self.tail - unfed_B1 + torch.arange(many, device=lens_B.device)
        return lens_B[:, None] + 1 - unfed_B1, place_BM

    def _drafted(self, request: Round) -> Fed:
        """Of all levels. As many tokens are fed as may wait: a GPU doesn't say how many do."""
        levels, last = request.plan.levels, self.tail - 1
        first_B1, place_BM = self._waiting(request.lens_B, last + levels)
        known_BM = self.tail_BW.gather(1, place_BM.clamp(max=last))
        tokens_BM = torch.where(place_BM <= last, known_BM, self.mask)
        step_M = torch.arange(last + levels, device=place_BM.device)
        at_BM = first_B1 + step_M
        width = min(round_up(request.top + len(step_M) + 1), self.pool.slots)
        fed = tokens_BM, at_BM, at_BM, Seen(at_BM[:, 0], width)
        hidden_BMH, _ = self.runner.verify(self.pool, *fed)
        hidden_BKH = picked(hidden_BMH, last - place_BM[:, :1] + step_M[:levels])
        return Fed(self.runner.logits(hidden_BKH), hidden_BKH)

    @property
    def parameter_bytes(self) -> int:
        """Of a pass, shared out among as many levels as it has."""
        return super().parameter_bytes // self.levels


def lm_drafter(
    model: PreTrainedModel, vocab_size: int, vocab: DraftVocab | None = None
) -> LMDrafter:
    """A draft LM's drafter, by what its config says."""
    kind = LMDrafter if mask_token(vars(model.config)) is None else PardDrafter
    return kind(model, vocab_size, vocab)
