"""An EAGLE head in as few calls as possible, on the head's own weights; see lean.py.

Shapes: B rows, N pairs (any leading axes: X), H hidden, U width of the taps side by side.
"""

import torch
from torch import Tensor

from draftsmith.decode.forward import lean
from draftsmith.decode.forward.product import Product
from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.heads.layer import Attention, causal


class LeanEagle:
    """The lean form of a head that is frozen and whose rotary embeddings depend on nothing but the
    position: the same `fuse`, `step`, `before_head` and `fed_back`.
    """

    def __init__(self, head: Eagle) -> None:
        self.head, self.config = head, head.config
        self.fc = Product.of([head.fc])
        self.layers = [lean.LeanLayer(layer, i) for i, layer in enumerate(head.layers)]
        self.wide = head.config.version == 3
        if self.wide:
            first = head.layers[0]
            self.of_token = lean.norm_of(first.input_layernorm)
            self.of_state = lean.norm_of(first.hidden_norm)
            self.layers[0].entry = (None, *self.layers[0].entry[1:])
            self.norm = lean.norm_of(head.norm)
            self.of_taps = [lean.norm_of(norm) for norm in getattr(head, "fc_norm", ())]
            self.of_all = lean.norm_of(head.input_norm if head.config.norm_before_fc else None)
        self.cos_SE, self.sin_SE = lean.rotary_tables(head.rotary, head.context, head.fc.weight)

    def fuse(self, taps_XU: Tensor) -> Tensor:
        if not self.wide:
            return taps_XU
        if self.of_taps:
            parts = zip(self.of_taps, taps_XU.split(self.head.hidden, -1), strict=True)
            taps_XU = torch.cat([lean.normed(norm, part) for norm, part in parts], -1)
        return self.fc(lean.normed(self.of_all, taps_XU))

    def step(
        self, hidden_BTH: Tensor, tokens_BT: Tensor, positions_BT: Tensor, attention: Attention
    ) -> Tensor:
        embedded_BTH = self.head.embed(tokens_BT)
        rotary = self.cos_SE[positions_BT].unsqueeze(2), self.sin_SE[positions_BT].unsqueeze(2)
        if self.wide:
            normed_BTH = lean.normed(self.of_state, hidden_BTH)
            entry_BTI = torch.cat([lean.normed(self.of_token, embedded_BTH), normed_BTH], -1)
            if self.config.norm_before_residual:
                hidden_BTH = normed_BTH
            del normed_BTH
        else:
            entry_BTI = hidden_BTH = self.fc(torch.cat([embedded_BTH, hidden_BTH], -1))
        del embedded_BTH  # a prompt's is large
        for layer in self.layers:
            # No names for what lies between: it is free as soon as it has been used.
            entry_BTI = hidden_BTH = lean.leave(
                hidden_BTH,
                attention(layer.index, *lean.enter(entry_BTI, rotary, layer.entry, layer.sizes)),
                layer.exit,
                layer.activation,
            )
        return hidden_BTH

    def before_head(self, output_XH: Tensor) -> Tensor:
        return lean.normed(self.norm, output_XH) if self.wide else output_XH

    def fed_back(self, output_XH: Tensor) -> Tensor:
        return lean.normed(self.norm, output_XH) if self.config.norm_output else output_XH


def lean_eagle(head: Eagle) -> LeanEagle | None:
    """The head's lean form; None where it isn't known to be the same, or gives other states in two
    steps of two rows, the second from the first's states.
    """
    rope = head.config.layer.rope_parameters or {}
    if (
        any(p.requires_grad for p in head.parameters())
        or rope["rope_type"] not in lean.POSITION_ONLY
    ):
        return None
    device, dtype = head.fc.weight.device, head.fc.weight.dtype
    noise = torch.Generator().manual_seed(0)
    taps_BTU = torch.randn(2, 7, len(head.taps) * head.hidden, generator=noise).to(device, dtype)
    tokens_BT = torch.arange(14, device=device).view(2, 7) % head.rows
    at_BT = (torch.arange(7, device=device) % head.context).expand(2, -1)

    def states(body: Eagle | LeanEagle) -> list[Tensor]:
        first_BTH = body.step(body.fuse(taps_BTU), tokens_BT, at_BT, causal())
        second_BTH = body.step(body.fed_back(first_BTH), tokens_BT, at_BT, causal())
        return [x.float() for x in (first_BTH, second_BTH, body.before_head(second_BTH))]

    made = LeanEagle(head)
    with torch.inference_mode():
        return made if lean.agree(states(head), states(made), dtype) else None
