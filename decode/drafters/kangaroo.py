"""Kangaroo as the drafter: the target's first E layers in its own keys and values, then an adapter.

A node goes through the target's first E layers, in slots beyond the committed ones, which
verification writes anew; its state there is exact, as is the adapter's key and value of it. What
was kept is therefore in place, but for a kept leaf, which was never fed, and the nodes of a tree,
which lie elsewhere. Verification gives the state of every kept token anyway (`Kept.taps_BLU`), and
keys and values are one small product of it: it makes them all, and nothing has to be moved.

Their second early exit, which stops drafting at an improbable token, is `policy=confidence:0.6`.

Shapes: B rows, L tokens of a kept path, F nodes fed, T tokens of a text, H hidden, V vocabulary.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Admitted, Fed, Feed, Frontier, Kept, Round
from draftsmith.decode.drafting.head_drafter import HeadDrafter, HeadKV, Where
from draftsmith.decode.forward.kv import KVPool
from draftsmith.decode.forward.runner import Runner
from draftsmith.models.heads.kangaroo import Kangaroo
from draftsmith.models.layers.layer import causal
from draftsmith.models.taps import decoder_layers
from draftsmith.models.target import bytes_read


class KangarooDrafter(HeadDrafter):
    """Each draft call runs E layers of the target and the adapter over the nodes fed. ValueError:
    see `Runner.part`.
    """

    head: Kangaroo
    shares, trims = True, False  # it drafts by the target's own LM head
    held = ("pool", "target_pool")

    def __init__(self, head: Kangaroo, target: PreTrainedModel, vocab_size: int) -> None:
        super().__init__(head, target, head.config)
        self.early = int(head.taps[0])
        self.runner = Runner(target, vocab_size).part(self.early, taps=(self.early,))

    def reset(self, rows: int, slots: int) -> None:
        self.share(self.runner.pool(rows, slots))

    def share(self, pool: KVPool) -> None:
        """The adapter's own keys and values beside the target's, slot by slot."""
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        self.pool = HeadKV(self.head.config, pool.rows, pool.slots, self.context, like)
        self.target_pool = pool

    def prefill(self, admitted: Admitted) -> None:
        assert admitted.taps_RNU is not None, "the engine gives what `taps` asks for"
        at_RN, keep = self.pool.taken(admitted.rows_R, admitted.tokens_RN.shape[1])
        keep(0, *self.head.keys(admitted.taps_RNU.to(self.dtype), at_RN))

    def extend(self, kept: Kept) -> None:
        """What is made beyond the kept tokens is overwritten before anything sees it."""
        assert kept.taps_BLU is not None, "the engine gives what `taps` asks for"
        step_L = torch.arange(kept.tokens_BL.shape[1], device=self.device)
        at_BL, keep = self.pool.added(kept.lens_B[:, None] + step_L)
        keep(0, *self.head.keys(kept.taps_BLU.to(self.dtype), at_BL))

    def feed(self, request: Round) -> Feed:
        width = self.pool.width(request.top + request.plan.slots)

        def feed(frontier: Frontier) -> Fed:
            placed = frontier.placed(request.lens_B[:, None], width)
            _, taps_BFH = self.runner.verify(self.target_pool, frontier.tokens_BF, *placed)
            assert taps_BFH is not None, "the part has a tap"
            return self.first(self.read(taps_BFH, frontier.tokens_BF, self.pool.fed(*placed)))

        return feed

    def read(self, taps_BNU: Tensor, next_BN: Tensor, where: Where | None) -> Tensor:
        assert where is not None
        return self.head.adapted(taps_BNU.to(self.dtype), *where)

    def first(self, states_BTH: Tensor, next_BT: Tensor | None = None) -> Fed:
        return Fed(self.runner.logits(states_BTH), states_BTH)

    def teacher_logits(self, ids_BT: Tensor, taps_BTU: Tensor) -> Tensor:
        """It reads the states of all tokens, the last one's too."""
        at_BT = torch.arange(ids_BT.shape[1], device=self.device).expand_as(ids_BT)
        return self.first(self.read(taps_BTU, ids_BT, (at_BT, causal()))).logits_BFV

    @property
    def parameter_bytes(self) -> int:
        """The target's first layers, the adapter, the LM head."""
        layers = decoder_layers(self.runner.model)[: self.early]
        shared = sum(bytes_read(p) for layer in layers for p in layer.parameters())
        own = sum(p.nbytes for p in self.head.parameters())
        return shared + own + self.runner.head.weight.nbytes
