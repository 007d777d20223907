"""Hydra heads as the drafter, Hydra++'s prefix layer included.

Shapes: B rows, N tokens, T tokens of a text, F nodes fed, H hidden, I = H * (1 + tokens of the
path), V vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafters.medusa import through
from draftsmith.decode.drafting.base import Fed, Feed, Frontier, Round, picked
from draftsmith.decode.drafting.head_drafter import HeadDrafter, Where
from draftsmith.decode.drafting.in_rounds import InRounds, heads_rounds
from draftsmith.decode.forward.lean_heads import LeanStack, lean_prefix
from draftsmith.decode.forward.product import Product, sides
from draftsmith.decode.forward.size import ModelSize
from draftsmith.models.heads.hydra import Hydra


class HydraDrafter(HeadDrafter):
    """Heads that read a node's whole path. Hydra++'s prefix layer runs over kept tokens only."""

    head: Hydra

    def __init__(self, head: Hydra, target: PreTrainedModel, vocab_size: int) -> None:
        super().__init__(head, target, head.config.prefix)
        lean, levels = head.config.prefix and lean_prefix(head), range(head.levels)
        self.prefix = lean or head.prefix
        blocks = [head.blocks(depth) for depth in levels]
        # The two maps that read a first block's input.
        entries: list[list[Any]] = [[b.linear, b.res_connection] for b, *_ in blocks]
        self.entries = [Product.of(pair) for pair in entries]
        self.more = [[Product.of([block.linear]) for block in more] for _, *more in blocks]
        outputs = [head.output(depth) for depth in levels]
        self.outputs = tuple(self.vocab_head(o.weight, vocab_size, o.bias) for o in outputs)

    @property
    def size(self) -> ModelSize:
        # The lean layer goes on from the states that are handed over, which are counted as such.
        lean = isinstance(self.prefix, LeanStack)
        return replace(super().size, beside=-self.head.hidden * lean)

    def read(self, taps_BNU: Tensor, next_BN: Tensor, where: Where | None) -> Tensor:
        if self.layer is None or where is None:
            return taps_BNU
        return self.prefix(taps_BNU, *where)

    def feed(self, request: Round) -> Feed:
        fed_BFI = self.state_BH[:, None]  # what the nodes fed last have read

        def feed(frontier: Frontier) -> Fed:
            nonlocal fed_BFI
            if frontier.of_BF is not None:
                fed_BFI = picked(fed_BFI, frontier.of_BF)
            fed_BFI = torch.cat([fed_BFI, self.head.embed(frontier.tokens_BF)], -1)
            return self._fed(frontier.depth, fed_BFI)

        return feed

    def in_rounds(self, nodes: int, temperature: float) -> InRounds | None:
        prefix = None
        if self.layer is not None:
            native = getattr(self.prefix, "native", None)
            if native is None or not native.steps(len(self.state_BH) * nodes):
                return None
            prefix = native, self.pool, self.context
        blocks = [[sides(self.entries[k]), *map(sides, self.more[k])] for k in range(nodes - 1)]
        how = temperature, self.state_BH, self.head.target_embedding_VH, prefix
        return heads_rounds(blocks, self.outputs[: nodes - 1], *how)

    def first(self, states_BTH: Tensor, next_BT: Tensor) -> Fed:
        return self._fed(0, torch.cat([states_BTH, self.head.embed(next_BT)], -1))

    def _fed(self, depth: int, fed_BFI: Tensor) -> Fed:
        """Of nodes, from all that they read side by side."""
        inner_BFH, skipped_BFH = self.entries[depth](fed_BFI).chunk(2, -1)
        state_BFH = through(self.more[depth], skipped_BFH + F.silu(inner_BFH))
        return Fed(self.outputs[depth].logits(state_BFH), state_BFH)
