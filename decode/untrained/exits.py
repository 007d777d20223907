"""The target drafts with its first layers, and a policy says after how many of them: `exits:2+4+6`,
for `policy=exits` (DEL, arXiv 2504.05598); without it the first one named.

Verification runs all layers over what is kept, so each exit's state there costs nothing. Through
norm and LM head it says what that exit would have drafted ("shadow tokens"): all exits are counted
in every round, whichever drafted, also in a round that draws nothing. Compared with what the target
said under the noise of the round, that is whether the rule would have kept it, at any temperature.

Shapes: B rows, L tokens of a kept path, A exits, U width of their states side by side, H hidden, V
vocabulary, X sums a row.
"""

import copy
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Kept
from draftsmith.decode.forward.lean import agree
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.forward.size import ModelSize, at_once
from draftsmith.decode.sampling import choose
from draftsmith.decode.tree_shapes import Plan
from draftsmith.decode.untrained.own_layers import OwnLayersDrafter
from draftsmith.models.target import output_head


class ExitsDrafter(OwnLayersDrafter):
    """Chains and trees from as many of the target's layers as the plan's `by` says. ValueError:
    see `Runner.part`; and for a body whose final norm isn't found.
    """

    def __init__(self, target: PreTrainedModel, vocab_size: int, exits: list[int]) -> None:
        super().__init__("exits", target, vocab_size, exits[0], set())
        self.taps, self.norm = tuple(exits), getattr(output_head(target)[0], "norm", None)
        whole = copy.copy(self.whole)
        whole.taps = (whole.config.num_hidden_layers,)
        normed_BTH, last_BTH = whole.states(torch.arange(8, device=whole.device)[None])
        if self.norm is None or not agree([normed_BTH], [self.norm(last_BTH)], whole.dtype):
            raise ValueError(
                f"model {type(target).__name__}: got no module `norm` between its layers and its "
                "LM head, expected one, as Llama has; use drafter=exit:E for this target"
            )
        self.parts, self.ways = {0: self.runner}, {}
        for last in exits:
            part = copy.copy(self)
            part.last = last
            self.ways[last] = part.parameter_bytes + sum(p.nbytes for p in self.norm.parameters())
            self.parts[last] = self.runner if last == self.last else self.whole.part(last)

    @classmethod
    def named(cls, kind: str, says: str, target: PreTrainedModel, vocab_size: int) -> Self:
        """E+E+..., of 1 to all layers, each once; ValueError for anything else."""
        depth = target.config.get_text_config().num_hidden_layers
        words = says.split("+")
        exits = [int(w) for w in words if w.isdecimal() and 0 < int(w) <= depth]
        if len(set(exits)) != len(words) or len(words) < 2:
            raise ValueError(
                f"drafter: got exits:{says}, expected several numbers of layers, 1 to {depth}, "
                "each once and joined by +: exits:2+4+6"
            )
        return cls(target, vocab_size, exits)

    @property
    def size(self) -> ModelSize:
        made = super().size
        return ModelSize(made.config, made.dtype, shadow=len(self.taps))

    def part(self, plan: Plan) -> Runner:
        return self.parts[plan.by]

    @torch.inference_mode()
    def extend(self, kept: Kept) -> Tensor:
        """Of each exit in turn, over the tokens just emitted: how many of them it would have
        drafted, the chances that it gave these, how many it would have missed, the chances of what
        it had in their place; sums [B, X].
        """
        assert kept.taps_BLU is not None
        states_ABLH = torch.stack(kept.taps_BLU.chunk(len(self.taps), -1))
        groups = states_ABLH.split(at_once(*kept.tokens_BL.shape))
        sums = [sum_B for group in groups for sum_B in self._sums(group, kept)]
        return torch.stack(sums, 1).double()

    def _sums(self, states_ABLH: Tensor, kept: Kept) -> list[Tensor]:
        """Of some exits."""
        assert self.norm is not None
        step_L = torch.arange(kept.tokens_BL.shape[1], device=kept.tokens_BL.device)
        told_BL, sums = step_L < kept.n_new_B[:, None], []
        for logits_BLV in self.runner.logits(self.norm(states_ABLH)):
            q_logits_BLV = kept.params.transform(logits_BLV)
            own_BL = choose(q_logits_BLV, kept.race_BLV)
            log_q_BL = q_logits_BLV.gather(2, own_BL[..., None])[..., 0]
            chance_BL = (log_q_BL - q_logits_BLV.logsumexp(-1)).exp()
            right_BL = own_BL == kept.tokens_BL
            for side_BL in (told_BL & right_BL, told_BL & ~right_BL):
                sums += [side_BL.sum(1), torch.where(side_BL, chance_BL, 0).sum(1)]
        return sums
