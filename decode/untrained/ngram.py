"""Prompt lookup: propose what followed the last occurrence of the text's own ending.

Needs no training and no model; the baseline in every table. (Saxena 2023, "prompt lookup decoding")

Shapes: B rows, S known tokens.
"""

import torch
from torch import Tensor

from draftsmith.decode.drafting.base import Round
from draftsmith.decode.token_tree import DETERMINISTIC, TokenTree, chain
from draftsmith.decode.untrained.texts import TextDrafter

LONGEST = 3


class NgramDrafter(TextDrafter):
    """Matches the longest ending of at most LONGEST tokens; among equal lengths, the latest match.

    When no row of the batch has a match, the round on a CPU is plain decoding: reading the flag
    costs nothing there, idle products do. A row without a match beside one with a match proposes
    what it has, and those tokens count as drafted.
    """

    kind = "ngram"
    trees = samples = False

    def propose(self, request: Round) -> TokenTree:
        text_BS = self.text_BS[:, : request.top + 1]
        follow_B = self._last_match(text_BS)
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

    def _last_match(self, text_BS: Tensor) -> Tensor:
        """Where the continuation of the best match begins, or -1; [B]."""
        slots_S = torch.arange(text_BS.shape[1], device=self.device)
        # matched[s]: how many tokens before slot s equal the text's ending.
        matched_BS = torch.zeros_like(text_BS)
        alive_BS = torch.ones_like(text_BS, dtype=torch.bool)
        for back in range(1, LONGEST + 1):
            # Rows that have finished may be longer than the text looked at: any index will do.
            ending_at_B = (self.lens_B - back).clamp(0, text_BS.shape[1] - 1)
            ending_B1 = text_BS.gather(1, ending_at_B[:, None])
            shifted_BS = text_BS.roll(back, 1)
            alive_BS = alive_BS & (shifted_BS == ending_B1) & (slots_S >= back)
            alive_BS &= self.lens_B[:, None] > back
            matched_BS += alive_BS
        matched_BS = torch.where(slots_S < self.lens_B[:, None], matched_BS, 0)
        score_BS = matched_BS * text_BS.shape[1] + slots_S
        best_B = score_BS.argmax(1)
        found_B = matched_BS.gather(1, best_B[:, None])[:, 0] > 0
        return torch.where(found_B, best_B, -1)
