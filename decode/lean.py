"""A decoder-only body called layer by layer: the same layers, without what surrounds them.

transformers' own `forward` of a body makes masks, looks settings up and wraps its output, which on
a small model costs a quarter of a one-token pass (0.3 of 1.1 ms for one layer of 96 on two cores,
docs/log.md). Here the layers of the very same module are called in a row, with the rotary
embeddings looked up in a table. Whether that gives what the body gives is not assumed but tried, once a model;
where it doesn't, or where a body is built otherwise, its own forward is used.

Shapes: B rows, N tokens, S positions of the table, E rotary width, H hidden.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

Body = Callable[[Tensor, Tensor, Tensor | None, Cache], Tensor]

# Rotary embeddings that depend on nothing but the position.
POSITION_ONLY = {"default", "linear", "llama3"}
_bodies: "weakref.WeakKeyDictionary[nn.Module, Body]" = weakref.WeakKeyDictionary()


def body_of(body: nn.Module) -> Body:
    """(tokens [B, N], positions [B, N], additive mask or None, cache) -> hidden [B, N, H]."""
    if body not in _bodies:
        lean = _LeanBody(body) if _is_plain(body) else None
        _bodies[body] = lean if lean is not None and _agrees(body, lean) else _WholeBody(body)
    return _bodies[body]


class _WholeBody:
    """The body's own forward."""

    def __init__(self, body: nn.Module) -> None:
        self.body = weakref.ref(body)

    def __call__(
        self, tokens_BN: Tensor, positions_BN: Tensor, mask: Tensor | None, cache: Cache
    ) -> Tensor:
        body = self.body()
        assert body is not None
        return body(
            input_ids=tokens_BN,
            position_ids=positions_BN,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state


class _LeanBody:
    """Embedding, layers, final norm; holds the body weakly, since the body is its key."""

    def __init__(self, body: nn.Module) -> None:
        self.body = weakref.ref(body)
        self.table: tuple[Tensor, Tensor] | None = None

    def __call__(
        self, tokens_BN: Tensor, positions_BN: Tensor, mask: Tensor | None, cache: Cache
    ) -> Tensor:
        body = self.body()
        assert body is not None
        hidden_BNH = body.embed_tokens(tokens_BN)
        cos_SE, sin_SE = self._rotary(body, hidden_BNH)
        rotary = (cos_SE[positions_BN], sin_SE[positions_BN])
        for layer in body.layers.children():
            hidden_BNH = layer(
                hidden_BNH,
                attention_mask=mask,
                position_embeddings=rotary,
                position_ids=positions_BN,
                past_key_values=cache,
                use_cache=True,
            )
        return body.norm(hidden_BNH)

    def _rotary(self, body: nn.Module, hidden_BNH: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [S, E] of every position of the context, in the type of the hidden states."""
        table = self.table
        if (
            table is None
            or table[0].dtype != hidden_BNH.dtype
            or table[0].device != hidden_BNH.device
        ):
            # A draft at the end of the context reaches a little beyond it; nothing there is kept.
            length = body.config.max_position_embeddings + 64
            positions_1S = torch.arange(length, device=hidden_BNH.device)[None]
            cos_1SE, sin_1SE = body.rotary_emb(hidden_BNH, position_ids=positions_1S)
            self.table = table = (cos_1SE[0], sin_1SE[0])
        return table


def _is_plain(body: nn.Module) -> bool:
    """Is it built of embed_tokens, rotary_emb, layers and norm, with position-only rotation?"""
    parts = ("embed_tokens", "rotary_emb", "layers", "norm")
    if not all(hasattr(body, part) for part in parts):
        return False
    rope = getattr(body.config, "rope_parameters", None) or {}
    return rope.get("rope_type", "") in POSITION_ONLY


@torch.inference_mode()
def _agrees(body: nn.Module, lean: _LeanBody) -> bool:
    """Do both give the same states, bit by bit, for a prompt of six tokens and one more token?"""
    device = next(body.parameters()).device
    training = body.training
    body.eval()
    states = []
    for call in (_WholeBody(body), lean):
        cache = DynamicCache(config=body.config)
        for start, length in ((0, 6), (6, 1)):
            positions_1N = torch.arange(start, start + length, device=device)[None]
            tokens_1N = positions_1N % body.embed_tokens.num_embeddings
            try:
                states.append(call(tokens_1N, positions_1N, None, cache))
            except (TypeError, AttributeError):
                body.train(training)
                return False
    body.train(training)
    return torch.equal(states[0], states[2]) and torch.equal(states[1], states[3])
