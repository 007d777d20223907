"""Falcon (Gao et al., arXiv 2412.12639): EAGLE-1 that drafts k tokens a pass.

    pair i          (f_i, x_{i+1}): what the target knew at i, and the token that came next
    y_i             a two-layer LSTM over the pairs so far, each [e(x_{i+1}); f_i]
    block of j      the pairs j-k+1 .. j; all its rows attend to every pair up to j, then an MLP
    row of pair i   -> f'_{i+k}, by which the target's LM head drafts x_{i+1+k}

So one pass over the last k pairs gives the laws of the next k tokens, x_{j+2} .. x_{j+1+k}, which
don't know each other; these and their f' are the next pass's pairs. With k = 1 it is EAGLE-1 with
an LSTM in its fc's place.

There is one decoder layer, so keys and values of a pair depend on no block: a block may end at any
pair, and what it drafts depends on nothing else. The public code (Bestpay-inc/Falcon) counts blocks
from where a call begins, runs its LSTM along the batch instead of the text, without what came
before the call, and hands its (output, state) on as states; here none of this is so. A row before
the text's first pair reads zeros. Ours has no dropout.

Shapes: B rows, T pairs, M blocks, k rows of a block, R = M * k, H hidden, S = 4 H: what the LSTM
keeps of a text, G = 4 H its gates, V rows of the target's LM head.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from draftsmith.models.heads.head import Kind, LayerHead
from draftsmith.models.layers.layer import Attention, EagleLayer, causal
from draftsmith.models.taps import NORM

OF_LSTM = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
SHUT = 1e4  # a gate's input that closes or opens it exactly, in any type


class Falcon(LayerHead):
    """See `LayerHead`; levels: tokens ahead; block: k."""

    kind = "falcon"
    kinds: ClassVar = {kind: Kind("Falcon")}
    taps = (NORM,)
    own: ClassVar = {"levels": int, "block": int}

    def __init__(self, layer: PretrainedConfig, levels: int, block: int) -> None:
        super().__init__(layer)
        if layer.num_hidden_layers != 1 or not 1 <= block <= levels:
            raise ValueError(
                f"falcon: got {layer.num_hidden_layers} layers, block={block}, {levels} tokens "
                "ahead, expected one layer and a block of 1 to as many tokens as are drafted"
            )
        self.levels, self.block = levels, block
        self.lstm = nn.LSTM(2 * self.hidden, self.hidden, num_layers=2)
        self.layer = EagleLayer(layer, 0, bare=True)
        self.prefix_parts = layer, [self.layer], None
        # Of the gates (in, forget, cell, out): what ends a text, and what passes over a pair.
        shut_42 = SHUT * torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [0.0, 0.0], [-1.0, 0.0]])
        self.register_buffer("shut_G2", shut_42.repeat_interleave(self.hidden, 0), persistent=False)

    def along(
        self,
        states_BTH: Tensor,
        next_BT: Tensor,
        memory_BS: Tensor | None = None,
        *,
        ends_BT: Tensor | None = None,
        last_B1: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """y [B, T, H] of pairs, and what is kept after each row's pair `last` (its own last one).
        ends: pairs after which all is forgotten; their own y is 0.
        """
        rows, length = next_BT.shape
        if last_B1 is None:
            last_B1 = torch.full((rows, 1), length - 1, device=next_BT.device)
        over_BT = torch.arange(length, device=next_BT.device) > last_B1
        ends_BT = torch.zeros_like(over_BT) if ends_BT is None else ends_BT
        x_BTI = torch.cat([self.embed(next_BT), states_BTH], -1)
        flags_BT2 = torch.stack([ends_BT, over_BT], -1).to(x_BTI.dtype)
        if memory_BS is None:
            memory_BS = states_BTH.new_zeros(rows, 4 * self.hidden)
        parts, kept = memory_BS.unsqueeze(0).chunk(4, -1), []
        at_B1H = last_B1.unsqueeze(-1).expand(-1, -1, self.hidden)
        for index in range(2):
            into, *others = (getattr(self.lstm, f"{name}_l{index}") for name in OF_LSTM)
            assert isinstance(self.shut_G2, Tensor)
            weights = [torch.cat([into, self.shut_G2.to(into.dtype)], 1), *others]
            begun = [part.contiguous() for part in parts[2 * index : 2 * index + 2]]
            given = (torch.cat([x_BTI, flags_BT2], -1), begun, weights, True, 1, 0.0)
            x_BTI, _, cell_1BH = torch.lstm(*given, self.training, False, True)
            kept += [x_BTI.gather(1, at_B1H)[:, 0], cell_1BH[0]]
        return x_BTI, torch.cat(kept, -1)

    def blocks(
        self, y_BTH: Tensor, positions_BT: Tensor, recent_BkH: Tensor | None = None
    ) -> Tensor:
        """The rows [B, T, k, H] of the blocks that end at each pair. recent: the y before them."""
        if recent_BkH is None:
            recent_BkH = y_BTH.new_zeros(len(y_BTH), self.block, self.hidden)
        all_BXH = torch.cat([recent_BkH[:, 1:], y_BTH], 1)
        rows_BTkH = all_BXH.unfold(1, self.block, 1).transpose(2, 3)
        return rows_BTkH * (self._placed(positions_BT) >= 0).unsqueeze(-1)

    def prefix(self, rows_BRH: Tensor, positions_BR: Tensor, attention: Attention) -> Tensor:
        """The layer on rows that see each other as `attention` has it."""
        return self.layer.run(rows_BRH, self.rotary(rows_BRH, positions_BR), attention, 0)

    def keys(self, y_BTH: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer.remember(y_BTH, self.rotary(y_BTH, positions_BT))

    def draft(
        self, rows_BMkH: Tensor, positions_BM: Tensor, attend: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """f' [B, M, k, H] of the blocks that end at these positions; attend: what queries [B, R,
        heads, width] of their rows come to.
        """
        rows_BRH = rows_BMkH.flatten(1, 2)
        at_BR = self._placed(positions_BM).clamp(min=0).flatten(1)
        query = self.layer.project(rows_BRH, self.rotary(rows_BRH, at_BR))[0]
        return self.layer.leave(rows_BRH, attend(query)).unflatten(1, (-1, self.block))

    def drafted(
        self,
        states_BTH: Tensor,
        next_BT: Tensor,
        positions_BT: Tensor,
        mask_B1TT: Tensor | None = None,
    ) -> Tensor:
        """f' [B, T, k, H] of the blocks that end at each pair of a text. positions: from 0 in each
        document; mask: which pairs each may see.
        """
        ends_BT = F.pad(positions_BT[:, 1:] == 0, (0, 1))
        y_BTH, _ = self.along(states_BTH, next_BT, ends_BT=ends_BT)
        length = next_BT.shape[1]
        if mask_B1TT is None:
            mask_B1TT = torch.ones(1, 1, length, length, dtype=torch.bool, device=y_BTH.device)
            mask_B1TT = mask_B1TT.tril()
        sees = causal(mask_B1TT.repeat_interleave(self.block, 2))
        keyed, rows_BTkH = self.keys(y_BTH, positions_BT), self.blocks(y_BTH, positions_BT)
        return self.draft(rows_BTkH, positions_BT, lambda query: sees(0, query, *keyed))

    def _placed(self, positions_BM: Tensor) -> Tensor:
        """Positions [B, M, k] of the rows of the blocks that end at these."""
        back_k = torch.arange(self.block - 1, -1, -1, device=positions_BM.device)
        return positions_BM.unsqueeze(-1) - back_k
