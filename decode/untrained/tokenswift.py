"""TokenSwift (Wu et al., arXiv 2502.18890): a pass over a part of the keys and values, then heads.

    tokenswift:BUDGET+FOLDER    the pass of snapkv:BUDGET, and the Medusa heads in FOLDER

The pass over the pending token drafts the next one by the target's own LM head, and the heads, on
the state it ends with, the tokens after that; so a round reads the target's weights twice, however
deep its tree. What followed the drafted path where it stood in the row's text before is mixed in:

    q(v | path) = (1 - SHARE) head(v) + SHARE n(path v) / n(path)        where n(path) > 0

with n(x) how often x is in the text so far, and path what was drafted since the pending token.

Shapes: B rows, R of them just admitted, N prompt tokens, L tokens of a kept path, S slots of text,
F nodes fed, V vocabulary.
"""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Admitted, Fed, Feed, Frontier, Kept, Round, picked
from draftsmith.decode.drafting.head_drafter import HeadDrafter
from draftsmith.decode.forward.kv import KVPool, round_up
from draftsmith.decode.untrained.partial_kv import PartialKVDrafter

SHARE = 0.5  # of the text's own counts


class TokenSwiftDrafter(PartialKVDrafter):
    """Trees and chains, one level deeper than there are heads. ValueError as for snapkv, and for
    what isn't a drafter of Medusa heads.
    """

    one_pass = True
    held = (*PartialKVDrafter.held, "text_BS")

    def __init__(
        self, target: PreTrainedModel, vocab_size: int, budget: int, heads: HeadDrafter
    ) -> None:
        super().__init__("snapkv", target, vocab_size, budget)
        self.kind, self.heads = "tokenswift", heads
        self.levels = min(self.levels, heads.levels + 1)

    @classmethod
    def over(cls, says: str, heads: object, target: PreTrainedModel, vocab_size: int) -> Self:
        """Around the heads of a folder, of a name's budget."""
        if not isinstance(heads, HeadDrafter) or heads.kind != "medusa":
            raise ValueError(
                f"drafter tokenswift: got a drafter of kind {getattr(heads, 'kind', None)}, "
                "expected tokenswift:BUDGET+FOLDER with the folder of Medusa heads; train them "
                "with recipe=tokenswift/gsm8k"
            )
        budget = PartialKVDrafter.named("snapkv", says, target, vocab_size).budget
        return cls(target, vocab_size, budget, heads)

    @property
    def parameter_bytes(self) -> int:
        """Of a round of all levels, shared out among as many calls."""
        heads = self.heads.parameter_bytes * self.heads.levels
        return (super().parameter_bytes + heads) // self.levels

    def _begin(self, pool: KVPool, room: int) -> None:
        super()._begin(pool, room)
        self.text_BS = torch.zeros(pool.rows, pool.slots, dtype=torch.int64).to(self.runner.device)

    @torch.inference_mode()
    def prefill(self, admitted: Admitted) -> None:
        super().prefill(admitted)
        admitted.write(self.text_BS)

    def extend(self, kept: Kept) -> None:
        super().extend(kept)
        kept.write(self.text_BS)

    def feed(self, request: Round) -> Feed:
        ask = super().feed(request)
        guess: Feed | None = None
        text_BS = self.text_BS[:, : round_up(request.top + 1)]
        inside_BS = torch.arange(text_BS.shape[1], device=text_BS.device) < request.lens_B[:, None]
        # Where the path of each node fed last ended in the text.
        ends_BFS = torch.empty(0)

        def feed(frontier: Frontier) -> Fed:
            nonlocal guess, ends_BFS
            if frontier.depth == 0:
                fed = ask(frontier)
                self.heads.state_BH = fed.states_BFH[:, 0]
                guess = self.heads.feed(request)
                return fed
            assert guess is not None, "the root is fed first"
            fed = guess(frontier._replace(depth=frontier.depth - 1))
            now_BFS = (text_BS[:, None] == frontier.tokens_BF[..., None]) & inside_BS[:, None]
            if frontier.depth > 1:
                before = frontier.of_BF
                ends_BFS = ends_BFS if before is None else picked(ends_BFS, before)
                now_BFS &= F.pad(ends_BFS[..., :-1], (1, 0))
            ends_BFS = now_BFS
            return fed._replace(logits_BFV=mixed(fed.logits_BFV, ends_BFS, text_BS))

        return feed


def mixed(logits_BFV: Tensor, ends_BFS: Tensor, text_BS: Tensor) -> Tensor:
    """Logits of a mixture: a law, and the shares of what stands after the marked places of a text,
    where any is marked.
    """
    q_BFV = logits_BFV.float().softmax(-1)
    after_BFS = text_BS[:, None].roll(-1, 2).expand(ends_BFS.shape)
    counts_BFV = torch.zeros_like(q_BFV).scatter_add_(2, after_BFS, ends_BFS.to(q_BFV.dtype))
    total_BF1 = ends_BFS.sum(-1, keepdim=True)
    told_BFV = (q_BFV.lerp(counts_BFV / total_BF1.clamp(min=1), SHARE)).log()
    return torch.where(total_BF1 > 0, told_BFV, logits_BFV)
