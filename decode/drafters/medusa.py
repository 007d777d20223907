"""Medusa heads as the drafter.

Shapes: B rows, L tokens of a kept path, T tokens of a text, K heads, F nodes fed, H hidden, V
vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from draftsmith.decode.drafters.base import Admitted, Feed, Frontier, Kept, Round
from draftsmith.decode.growth import grow
from draftsmith.decode.memory import ModelSize
from draftsmith.decode.product import Product, head_logits
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.medusa import Medusa


class MedusaDrafter:
    """Trees and chains from heads that know how far ahead they guess, but not what was drafted
    before: all nodes of one depth share one law.

    hidden_BH holds the target's state at each row's last committed token. The weights of the heads'
    first blocks become views of one matrix.

    Raises ValueError for heads made for another target (see `Head.bind`).
    """

    kind = "medusa"
    trees = samples = True

    def __init__(self, head: Medusa, target: PreTrainedModel, vocab_size: int) -> None:
        self.head = head.bind(target)
        self.taps, self.levels, self.context = head.taps, head.levels, head.context
        blocks = [head.blocks(depth) for depth in range(head.levels)]
        self.first = Product.of([first.linear for first, *_ in blocks])
        self.more = [[Product.of([block.linear]) for block in more] for _, *more in blocks]
        own = range(head.levels if head.config.own_heads else 1)
        self.outputs = [output_product(head.head_VH(depth), None, vocab_size) for depth in own]

    @property
    def size(self) -> ModelSize:
        return headless(self.head.hidden, self.outputs[0].weight.dtype)

    def reset(self, rows: int, slots: int) -> None:
        self.hidden_BH = self.first.weight.new_zeros(rows, self.head.hidden)

    def release(self) -> None:
        self.__dict__.pop("hidden_BH", None)

    def prefill(self, admitted: Admitted) -> None:
        assert admitted.taps_RNU is not None
        last_RH = state_at(admitted.taps_RNU, admitted.lens_R - 1)
        self.hidden_BH[admitted.rows_R] = last_RH.to(self.hidden_BH.dtype)

    def propose(self, request: Round) -> TokenTree:
        return grow(request, self.feed(request))[0]

    def feed(self, request: Round) -> Feed:
        logits_BKV = self.hidden_BH

        def feed(frontier: Frontier) -> Tensor:
            nonlocal logits_BKV
            if frontier.depth == 0:
                logits_BKV = self._logits(self.hidden_BH, request.plan.levels)
            nodes = frontier.tokens_BF.shape[1]
            return logits_BKV[:, frontier.depth, None].expand(-1, nodes, -1)

        return feed

    def extend(self, kept: Kept) -> None:
        assert kept.taps_BLU is not None
        keep_last(self.hidden_BH, kept.taps_BLU, kept.n_new_B)

    def teacher_logits(self, ids_BT: Tensor, taps_BTU: Tensor) -> Tensor:
        """Head 0 on the state before each token; before the first there is none: 0."""
        before_XH = taps_BTU[:, :-1].to(self.first.weight.dtype).flatten(0, 1)
        logits_BTV = self._logits(before_XH, 1).view(*taps_BTU[:, :-1].shape[:2], -1)
        return torch.cat([torch.zeros_like(logits_BTV[:, :1]), logits_BTV], 1)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights read for all levels, shared out among as many draft calls."""
        shared = [] if self.head.config.own_heads else [self.head.target_head_VH]
        return bytes_of([*self.head.parameters(), *shared]) // self.levels

    def _logits(self, hidden_BH: Tensor, levels: int) -> Tensor:
        """Raw logits [B, K, V] of the first `levels` heads."""
        inner_BKH = self.first(hidden_BH).unflatten(-1, (self.levels, -1))
        state_BKH = (hidden_BH[:, None] + F.silu(inner_BKH))[:, :levels]
        states = [
            through(products, state_BH)
            for products, state_BH in zip(self.more[:levels], state_BKH.unbind(1), strict=True)
        ]
        if not self.head.config.own_heads:
            return head_logits(self.outputs[0], torch.stack(states, 1))
        pairs = zip(self.outputs[:levels], states, strict=True)
        return torch.stack([head_logits(output, state_BH) for output, state_BH in pairs], 1)


def output_product(head_VH: Tensor, bias_V: Tensor | None, vocab_size: int) -> Product:
    """An LM head, cut to the tokenizer's size."""
    bias_V = None if bias_V is None else bias_V.detach()[:vocab_size]
    return Product(head_VH.detach()[:vocab_size], bias_V, [head_VH])


def through(blocks: list[Product], state_XH: Tensor) -> Tensor:
    """A state after residual blocks without a projection."""
    for linear in blocks:
        state_XH = state_XH + F.silu(linear(state_XH))
    return state_XH


def state_at(states_BLH: Tensor, place_B: Tensor) -> Tensor:
    """The state [B, H] at one place of each row."""
    return states_BLH.gather(1, place_B[:, None, None].expand(-1, 1, states_BLH.shape[2]))[:, 0]


def keep_last(old_BH: Tensor, states_BLH: Tensor, n_new_B: Tensor) -> None:
    """Put the state before the new pending token in the old one's place, where anything is new."""
    last_BH = state_at(states_BLH, (n_new_B - 1).clamp(min=0)).to(old_BH.dtype)
    old_BH.copy_(torch.where(n_new_B[:, None] > 0, last_BH, old_BH))


def bytes_of(tensors: list[Tensor]) -> int:
    """Bytes that tensors hold."""
    return sum(t.numel() * t.element_size() for t in tensors)


def headless(hidden: int, dtype: torch.dtype) -> ModelSize:
    """The size of a drafter without a layer: no keys, no values, states of one block at a time."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=0,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    return ModelSize(config, dtype)
