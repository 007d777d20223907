"""Prompt lookup: propose what followed the last occurrence of the text's own ending.

    ngram           needs no training and no model; the baseline in every table (Saxena 2023,
                    "prompt lookup decoding")
    ngram:unique    for edits of the prompt (IAD: Ge et al., arXiv 2205.10350): the prompt goes on
                    to be copied as long as the answer follows it, and is found again by the fewest
                    of the answer's last tokens, up to 3, that stand in it exactly once

Shapes: B rows, S known tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Admitted, Kept, Round
from draftsmith.decode.drafting.in_rounds import InRounds
from draftsmith.decode.forward.compiled import library
from draftsmith.decode.token_tree import DETERMINISTIC, TokenTree, chain
from draftsmith.decode.untrained.texts import TextDrafter

LONGEST = 3
SOURCE = Path(__file__).with_name("ngram.cpp")


class NgramDrafter(TextDrafter):
    """Matches the longest ending of at most LONGEST tokens; among equal lengths, the latest match.

    When no row of the batch has a match, the round on a CPU is plain decoding: reading the flag
    costs nothing there, idle products do. A row without a match beside one with a match proposes
    what it has, and those tokens count as drafted.
    """

    kind = "ngram"
    trees = samples = False
    held = (*TextDrafter.held, "prompt_B", "at_B")

    def __init__(self, device: torch.device | str = "cpu", *, unique: bool = False) -> None:
        super().__init__(device)
        self.unique = unique

    @classmethod
    def named(cls, kind: str, says: str, target: PreTrainedModel, vocab_size: int) -> Self:
        """Of the word after the colon, or none; ValueError for another one."""
        if says not in ("", "unique"):
            raise ValueError(f"drafter: got ngram:{says}, expected ngram or ngram:unique")
        return cls(target.device, unique=bool(says))

    def reset(self, rows: int, slots: int) -> None:
        """prompt_B: tokens of each row's prompt; at_B: which of them comes next, -1 if unknown."""
        super().reset(rows, slots)
        self.prompt_B, self.at_B = torch.zeros_like(self.lens_B), torch.zeros_like(self.lens_B) - 1

    def prefill(self, admitted: Admitted) -> None:
        super().prefill(admitted)
        self.prompt_B[admitted.rows_R], self.at_B[admitted.rows_R] = admitted.lens_R, -1

    def extend(self, kept: Kept) -> None:
        super().extend(kept)
        if not self.unique:
            return
        step_L = torch.arange(kept.tokens_BL.shape[1], device=self.device)
        at_BL = (self.at_B[:, None] + step_L).clamp(0, self.text_BS.shape[1] - 1)
        same_BL = self.text_BS.gather(1, at_BL) == kept.tokens_BL
        same_BL |= step_L >= kept.n_new_B[:, None]
        next_B = self.at_B + kept.n_new_B
        follows_B = same_BL.all(1) & (self.at_B >= 0) & (next_B < self.prompt_B)
        self.at_B.copy_(torch.where(follows_B, next_B, -1))

    def propose(self, request: Round) -> TokenTree:
        text_BS = self.text_BS[:, : request.top + 1]
        follow_B = self._only_match(text_BS) if self.unique else self._last_match(text_BS)
        found_B = follow_B >= 0
        levels = request.plan.levels
        if self.device.type == "cpu" and not bool((found_B & request.active_B).any()):
            levels = 0
        step_D = torch.arange(levels, device=self.device)
        at_BD = follow_B[:, None] + step_D
        # Past the end of the text the match is continued periodically from its own start.
        period_B1 = (self.lens_B - follow_B).clamp(min=1)[:, None]
        at_BD = torch.where(
            at_BD < self.lens_B[:, None], at_BD, follow_B[:, None] + step_D % period_B1
        )
        drafted_BD = text_BS.gather(1, at_BD.clamp(0, text_BS.shape[1] - 1)).clamp(min=0)
        tokens_BN = torch.cat([request.pending_B[:, None], drafted_BD], 1)
        return TokenTree(tokens_BN, chain(levels, self.device), DETERMINISTIC)

    def in_rounds(self, nodes: int, temperature: float) -> InRounds | None:
        if self.device.type != "cpu" or self.unique or (made := library(SOURCE)) is None:
            return None
        return self.drafts_in(made, LONGEST)

    def _last_match(self, text_BS: Tensor) -> Tensor:
        """Where the continuation of the best match begins, or -1; [B]."""
        slots_S = torch.arange(text_BS.shape[1], device=self.device)
        # matched[s]: how many tokens before slot s equal the text's ending.
        matched_BS = torch.zeros_like(text_BS)
        for alive_BS in self._matches(text_BS):
            matched_BS += alive_BS
        matched_BS = torch.where(slots_S < self.lens_B[:, None], matched_BS, 0)
        score_BS = matched_BS * text_BS.shape[1] + slots_S
        best_B = score_BS.argmax(1)
        found_B = matched_BS.gather(1, best_B[:, None])[:, 0] > 0
        return torch.where(found_B, best_B, -1)

    def _only_match(self, text_BS: Tensor) -> Tensor:
        """The same of the prompt, which is followed until the answer differs; [B]."""
        inside_BS = torch.arange(text_BS.shape[1], device=self.device) < self.prompt_B[:, None]
        for alive_BS in self._matches(text_BS):
            alive_BS = alive_BS & inside_BS
            once_B = (alive_BS.sum(1) == 1) & (self.at_B < 0)
            self.at_B.copy_(torch.where(once_B, alive_BS.int().argmax(1), self.at_B))
        return self.at_B

    def _matches(self, text_BS: Tensor) -> Iterator[Tensor]:
        """Before which slots [B, S] the text's last token stands, its last two, ..."""
        slots_S = torch.arange(text_BS.shape[1], device=self.device)
        alive_BS = torch.ones_like(text_BS, dtype=torch.bool)
        for back in range(1, LONGEST + 1):
            # Rows that have finished may be longer than the text looked at: any index will do.
            ending_at_B = (self.lens_B - back).clamp(0, text_BS.shape[1] - 1)
            ending_B1 = text_BS.gather(1, ending_at_B[:, None])
            shifted_BS = text_BS.roll(back, 1)
            alive_BS = alive_BS & (shifted_BS == ending_B1) & (slots_S >= back)
            alive_BS &= self.lens_B[:, None] > back
            yield alive_BS
