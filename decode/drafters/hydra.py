"""Hydra heads as the drafter, Hydra++'s prefix layer included.

Shapes: B rows, R of them just admitted, N prompt tokens, L tokens of a kept path, T tokens of a
text, F nodes fed, H hidden, I = H * (1 + tokens of the path), V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.drafters.base import Admitted, Fed, Feed, Frontier, Kept, Round
from draftsmith.decode.drafters.grow_tree import grow
from draftsmith.decode.drafters.head_kv import (
    HeadKV,
    bytes_of,
    from_second,
    keep_last,
    picked,
    state_at,
)
from draftsmith.decode.drafters.medusa import headless, output_product, through
from draftsmith.decode.forward.attention import Seen
from draftsmith.decode.forward.product import Product, head_logits
from draftsmith.decode.forward.size import ModelSize
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.heads.eagle import causal
from draftsmith.models.heads.hydra import Hydra
from draftsmith.models.heads.medusa import ResidualBlock
from draftsmith.models.scorers import Scored


class HydraDrafter:
    """Trees and chains from heads that read the embeddings of a node's whole path.

    base_BH holds what the heads read of the target at each row's last committed token. Hydra++'s
    prefix layer has keys and values of its own, position i in slot i; it runs over kept tokens
    only, so nothing is ever rolled back.

    Raises ValueError for heads made for another target (see `Head.bind`).
    """

    kind = "hydra"
    trees = samples = True
    acceptance: Scored | None = None
    held: tuple[str, ...] = ("pool", "base_BH")

    def __init__(self, head: Hydra, target: PreTrainedModel, vocab_size: int) -> None:
        self.head = head.bind(target)
        self.taps, self.levels, self.context = head.taps, head.levels, head.context
        levels = range(head.levels)
        blocks = [head.blocks(depth) for depth in levels]
        self.first = [Product.of(_entry(first)) for first, *_ in blocks]
        self.more = [[Product.of([block.linear]) for block in more] for _, *more in blocks]
        outputs = [head.output(depth) for depth in levels]
        self.outputs = [output_product(o.weight, o.bias, vocab_size) for o in outputs]
        self.layer = head.config.prefix
        weight = self.outputs[0].weight
        self.dtype, self.device = weight.dtype, weight.device

    @property
    def size(self) -> ModelSize:
        if self.layer is None:
            return headless(self.head.hidden, self.dtype)
        return ModelSize(self.layer, self.dtype)

    def reset(self, rows: int, slots: int) -> None:
        hidden = self.head.hidden
        self.base_BH = torch.zeros(rows, hidden, dtype=self.dtype, device=self.device)
        if self.layer is not None:
            self.pool = HeadKV(
                self.layer, rows=rows, slots=slots, context=self.context, like=self.base_BH
            )

    def release(self) -> None:
        self.__dict__.pop("base_BH", None)
        self.__dict__.pop("pool", None)

    def prefill(self, admitted: Admitted) -> None:
        rows_R, states_RNH = admitted.rows_R, admitted.taps_RNU
        assert states_RNH is not None
        states_RNH = states_RNH.to(self.dtype)
        if self.layer is not None:
            where = self.pool.prefill(rows_R, states_RNH.shape[1])
            states_RNH = self.head.prefix(states_RNH, *where)
        self.base_BH[rows_R] = state_at(states_RNH, admitted.lens_R - 1)

    def propose(self, request: Round) -> TokenTree:
        return grow(request, self.feed(request))[0]

    def feed(self, request: Round) -> Feed:
        fed_BFI = self.base_BH[:, None]  # what the nodes fed last have read

        def feed(frontier: Frontier) -> Fed:
            nonlocal fed_BFI
            if frontier.of_BF is not None:
                fed_BFI = picked(fed_BFI, frontier.of_BF)
            fed_BFI = torch.cat([fed_BFI, self.head.embed(frontier.tokens_BF)], -1)
            return self._fed(frontier.depth, fed_BFI)

        return feed

    def extend(self, kept: Kept) -> None:
        """Take in the tokens just emitted. What Hydra++'s layer makes beyond them is garbage, which
        is overwritten before anything sees it.
        """
        assert kept.taps_BLU is not None
        states_BLH, lens_B = kept.taps_BLU.to(self.dtype), kept.lens_B
        if self.layer is not None:
            length = states_BLH.shape[1]
            at_BL = lens_B[:, None] + torch.arange(length, device=self.device)
            seen = Seen(lens_B, self.pool.width(kept.top + length))
            states_BLH = self.head.prefix(states_BLH, *self.pool.fed(at_BL, at_BL, seen))
        keep_last(self.base_BH, states_BLH, kept.n_new_B)

    def teacher_logits(self, ids_BT: Tensor, taps_BTU: Tensor) -> Tensor:
        """Head 0 on the state before each token, and the token; before the first: 0."""
        at_BT = torch.arange(ids_BT.shape[1] - 1, device=self.device).expand(len(ids_BT), -1)
        base_BTH = self.head.prefix(taps_BTU[:, :-1].to(self.dtype), at_BT, causal())
        fed_BTI = torch.cat([base_BTH, self.head.embed(ids_BT[:, 1:])], -1)
        return from_second(self._fed(0, fed_BTI).logits_BFV)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights read in a round of all levels, the prefix layer's included, shared
        out among as many draft calls.
        """
        return bytes_of(self.head.parameters()) // self.levels

    def _fed(self, depth: int, fed_BFI: Tensor) -> Fed:
        """Of nodes, from all that they read side by side."""
        inner_BFH, skipped_BFH = self.first[depth](fed_BFI).chunk(2, -1)
        state_BFH = through(self.more[depth], skipped_BFH + F.silu(inner_BFH))
        return Fed(head_logits(self.outputs[depth], state_BFH), state_BFH)


def _entry(block: ResidualBlock) -> list[nn.Linear]:
    """The two maps that read a first block's input."""
    assert isinstance(block.res_connection, nn.Linear)
    return [block.linear, block.res_connection]
