"""P-EAGLE and ParallelSpec heads (arXiv 2602.01469, 2410.05589): EAGLE-3, K tokens in one pass.

At position i row 0 is EAGLE-3's pair (f_i, x_{i+1}). The rows below it, d = 1 .. K - 1, know
neither token nor state of their places: they read MASK and a learnt state m.

    row 0 at i: x_{i+1}, fc([taps])    position i        sees rows 0 of all i' <= i
    row d at i: MASK_d,  fc(m)         position i + d    sees those, and rows 1 .. d of its own i
    row d predicts x_{i+2+d}

No row changes those above it. P-EAGLE has one MASK and four layers; ParallelSpec a MASK for each d
and its host's one layer.

Shapes: B rows, T positions, M of them that go on, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.models.heads.eagle import Eagle, EagleConfig, read_eagle3
from draftsmith.models.heads.head import Kind, entry
from draftsmith.models.layers.unrolled_attention import Unrolled


@dataclass(frozen=True)
class PEagleConfig(EagleConfig):
    """parallel: K, the tokens that a pass drafts; own_masks: a MASK for each depth."""

    parallel: int = 8
    own_masks: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.version != 3 or self.parallel < 1 or self.norm_output:
            own = f"parallel={self.parallel}, norm_output={self.norm_output}"
            told = "expected 3, at least 1, and false: no output is fed back"
            raise ValueError(f"peagle: got version {self.version}, {own}, {told}")


class PEagle(Eagle):
    """An EAGLE-3 head whose deeper rows read what was learnt; as token, -d is MASK_d."""

    kinds: ClassVar = {"peagle": Kind("P-EAGLE")}
    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.kind, self.levels = "peagle", config.parallel
        masks = max(1, config.parallel - 1) if config.own_masks else 1
        self.mask_token = nn.Embedding(masks, self.hidden)
        nn.init.normal_(self.mask_token.weight, std=config.layer.initializer_range)
        self.mask_state = nn.Parameter(torch.randn(self.fc.in_features))

    def embed(self, tokens_X: Tensor) -> Tensor:
        known_XH = super().embed(tokens_X.clamp(min=0))
        masks_XH = self.mask_token((-1 - tokens_X).clamp(0, self.mask_token.num_embeddings - 1))
        return torch.where(tokens_X.unsqueeze(-1) < 0, masks_XH.to(known_XH.dtype), known_XH)

    def unroll(
        self,
        hidden_BTH: Tensor,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        mask: Tensor | None = None,
        *,
        steps: int,
        going_on: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """Rows 0 .. `steps` - 1 of a text, as `Eagle.unroll`. going_on: places [B, M] of the rows
        from 1 on, each depth's the first of those before: states [B, M, H]; none: all of them.
        """
        attention, next_BT = Unrolled(mask), F.pad(tokens_BT[:, 1:], (0, 1))
        outputs = [self.step(hidden_BTH, next_BT, positions_BT, attention)]
        if going_on:
            attention.go_on(going_on[0])
        for depth in range(1, steps):
            at_BM = positions_BT.gather(1, going_on[depth - 1]) if going_on else positions_BT
            mask_BMH = self.fuse(self.mask_state).expand(*at_BM.shape, -1)
            masks_BM = torch.full_like(at_BM, -depth)
            outputs.append(self.step(mask_BMH, masks_BM, at_BM + depth, attention))
        return [self.before_head(output) for output in outputs]

    def to_json(self) -> dict[str, Any]:
        own = {"parallel": self.config.parallel, "own_masks": self.config.own_masks}
        return super().to_json() | own | {"architectures": ["PEagle"]}  # no server's EAGLE-3

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "PEagle":
        own = {"parallel": entry(config, "parallel", int)}
        own |= {"own_masks": entry(config, "own_masks", bool)}
        return cls(PEagleConfig(**read_eagle3(config), **own))
