"""Medusa heads as the drafter.

Shapes: B rows, L tokens of a kept path, T tokens of a text, K heads, F nodes fed, H hidden, V
vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from draftsmith.decode.drafters.base import Admitted, Fed, Feed, Frontier, Kept, Round
from draftsmith.decode.drafters.grow_tree import grow
from draftsmith.decode.drafters.head_kv import bytes_of, from_second, keep_last, state_at
from draftsmith.decode.forward.product import Product, head_logits
from draftsmith.decode.forward.size import ModelSize
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.heads.medusa import Medusa
from draftsmith.models.scorers import Scored


class MedusaDrafter:
    """Trees and chains from heads that know how far ahead they guess, but not what was drafted
    before: all nodes of one depth share one law.

    hidden_BH holds the target's state at each row's last committed token.

    Raises ValueError for heads made for another target (see `Head.bind`).
    """

    kind = "medusa"
    trees = samples = True
    acceptance: Scored | None = None
    held: tuple[str, ...] = ("hidden_BH",)

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
        levels = request.plan.levels
        states_BKH = self.hidden_BH
        shared_BKV: Tensor | None = None

        def feed(frontier: Frontier) -> Fed:
            nonlocal states_BKH, shared_BKV
            depth, nodes = frontier.depth, frontier.tokens_BF.shape[1]
            if depth == 0:
                states_BKH = self._states(self.hidden_BH, levels)
                if not self.head.config.own_heads:  # one matrix, read once for all levels
                    shared_BKV = head_logits(self.outputs[0], states_BKH)
            state_B1H = states_BKH[:, depth, None]
            if shared_BKV is not None:
                logits_B1V = shared_BKV[:, depth, None]
            else:
                logits_B1V = head_logits(self.outputs[depth], state_B1H)
            return Fed(logits_B1V.expand(-1, nodes, -1), state_B1H.expand(-1, nodes, -1))

        return feed

    def extend(self, kept: Kept) -> None:
        assert kept.taps_BLU is not None
        keep_last(self.hidden_BH, kept.taps_BLU, kept.n_new_B)

    def teacher_logits(self, ids_BT: Tensor, taps_BTU: Tensor) -> Tensor:
        """Head 0 on the state before each token; before the first there is none: 0."""
        before_XH = taps_BTU[:, :-1].to(self.first.weight.dtype).flatten(0, 1)
        logits_XV = head_logits(self.outputs[0], self._states(before_XH, 1))
        logits_BTV = logits_XV.view(*taps_BTU[:, :-1].shape[:2], -1)
        return from_second(logits_BTV)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights read for all levels, shared out among as many draft calls."""
        shared = [] if self.head.config.own_heads else [self.head.target_head_VH]
        return bytes_of([*self.head.parameters(), *shared]) // self.levels

    def _states(self, hidden_BH: Tensor, levels: int) -> Tensor:
        """What the LM heads of the first `levels` heads multiply, [B, K, H]."""
        inner_BKH = self.first(hidden_BH).unflatten(-1, (self.levels, -1))
        state_BKH = (hidden_BH[:, None] + F.silu(inner_BKH))[:, :levels]
        states = [
            through(products, state_BH)
            for products, state_BH in zip(self.more[:levels], state_BKH.unbind(1), strict=True)
        ]
        return torch.stack(states, 1)


def output_product(head_VH: Tensor, bias_V: Tensor | None, vocab_size: int) -> Product:
    """An LM head, cut to the tokenizer's size."""
    biases = [] if bias_V is None else [bias_V.detach()[:vocab_size]]
    return Product([head_VH.detach()[:vocab_size]], biases)


def through(blocks: list[Product], state_XH: Tensor) -> Tensor:
    """A state after residual blocks without a projection."""
    for linear in blocks:
        state_XH = state_XH + F.silu(linear(state_XH))
    return state_XH


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
