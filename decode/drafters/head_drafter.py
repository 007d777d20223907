"""What drafters around a trained head share: a state of each row, kept up with the target's.

A row's state is what its head has made of the target's taps at its last committed token and of the
pending one; heads with layers keep keys and values too. Each kind says how it reads (`read`) and
what it drafts from that (`feed`, `first`).

Shapes: B rows, R of them just admitted, N prompt tokens, L tokens of a kept path, T tokens of a
text, U width of the taps side by side, H hidden, V vocabulary.
"""

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

from draftsmith.decode.drafters.base import Admitted, Fed, Feed, Kept, Round
from draftsmith.decode.drafters.grow_tree import grow
from draftsmith.decode.drafters.head_kv import (
    HeadKV,
    Where,
    bytes_of,
    from_second,
    keep_last,
    state_at,
)
from draftsmith.decode.forward.attention import Seen
from draftsmith.decode.forward.size import ModelSize
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.heads.head import Head
from draftsmith.models.heads.layer import causal
from draftsmith.models.scorers import Scored


class HeadDrafter:
    """Trees and chains from a head, in its own type and on its device.

    layer: sizes of the layers whose keys and values it keeps, position i in slot i; None for none.
    They are of committed tokens and of this round's nodes: nothing is ever rolled back.

    Raises ValueError for a head made for another target (see `Head.bind`).
    """

    head: Head
    trees = samples = True
    acceptance: Scored | None = None
    held: tuple[str, ...] = ("pool", "state_BH")

    def __init__(
        self, head: Head, target: PreTrainedModel, layer: PretrainedConfig | None = None
    ) -> None:
        self.head = head.bind(target)
        self.kind, self.taps = head.kind, head.taps
        self.levels, self.context = head.levels, head.context
        weight = next(head.parameters())
        self.dtype, self.device = weight.dtype, weight.device
        self.layer = layer

    def read(self, taps_BNU: Tensor, next_BN: Tensor, where: Where | None) -> Tensor:
        """States [B, N, H] from the target's, in the head's type, and the tokens after them. where:
        the positions and how they attend, of a head with layers.
        """
        return taps_BNU

    def feed(self, request: Round) -> Feed:
        """As `Drafter.feed`, from `state_BH`."""
        raise NotImplementedError

    def first(self, states_BTH: Tensor, next_BT: Tensor) -> Fed:
        """What is drafted after the tokens `next`, from what `read` gave for them."""
        raise NotImplementedError

    @property
    def size(self) -> ModelSize:
        """Without a layer: no keys, no values, states of one block at a time."""
        hidden = self.head.hidden
        flat = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=hidden,
            num_hidden_layers=0,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
        return ModelSize(self.layer or flat, self.dtype)

    def reset(self, rows: int, slots: int) -> None:
        self.state_BH = torch.zeros(rows, self.head.hidden, dtype=self.dtype, device=self.device)
        if self.layer is not None:
            self.pool = HeadKV(
                self.layer, rows=rows, slots=slots, context=self.context, like=self.state_BH
            )

    def release(self) -> None:
        for name in self.held:
            self.__dict__.pop(name, None)

    def prefill(self, admitted: Admitted) -> None:
        assert admitted.taps_RNU is not None, "the engine gives what `taps` asks for"
        rows_R, tokens_RN = admitted.rows_R, admitted.tokens_RN
        last_R1 = admitted.lens_R[:, None] - 1
        next_RN = tokens_RN.roll(-1, 1).scatter(1, last_R1, admitted.pending_R[:, None])
        where = None if self.layer is None else self.pool.prefill(rows_R, tokens_RN.shape[1])
        states_RNH = self.read(admitted.taps_RNU.to(self.dtype), next_RN, where)
        self.state_BH[rows_R] = state_at(states_RNH, admitted.lens_R - 1)

    def propose(self, request: Round) -> TokenTree:
        return grow(request, self.feed(request))[0]

    def extend(self, kept: Kept) -> None:
        """Take in the tokens just emitted. What layers make beyond them is garbage, which is
        overwritten before anything sees it.
        """
        assert kept.taps_BLU is not None, "the engine gives what `taps` asks for"
        where = None
        if self.layer is not None:
            length = kept.tokens_BL.shape[1]
            at_BL = kept.lens_B[:, None] + torch.arange(length, device=self.device)
            seen = Seen(kept.lens_B, self.pool.width(kept.top + length))
            where = self.pool.fed(at_BL, at_BL, seen)
        states_BLH = self.read(kept.taps_BLU.to(self.dtype), kept.tokens_BL, where)
        keep_last(self.state_BH, states_BLH, kept.n_new_B)

    def teacher_logits(self, ids_BT: Tensor, taps_BTU: Tensor) -> Tensor:
        """After the first token, before which there is no state, 0."""
        next_BT = ids_BT[:, 1:]
        at_BT = torch.arange(next_BT.shape[1], device=self.device).expand(len(ids_BT), -1)
        states_BTH = self.read(taps_BTU[:, :-1].to(self.dtype), next_BT, (at_BT, causal()))
        return from_second(self.first(states_BTH, next_BT).logits_BFV)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights read in a round of all levels, shared out among as many calls."""
        return bytes_of(self.head.parameters()) // self.levels
