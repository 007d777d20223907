"""P-EAGLE heads (arXiv 2602.01469), and ParallelSpec's (2410.05589): EAGLE-3 that drafts K tokens
in one pass instead of going on from its own outputs.

At position i row 0 is EAGLE-3's pair (f_i, x_{i+1}). The rows below it, d = 1 .. K - 1, know
neither the token nor the state of their places: they read MASK and one learnt state m.

    row 0 at i: x_{i+1}, fc([taps])    position i        sees rows 0 of all i' <= i
    row d at i: MASK_d,  fc(m)         position i + d    sees those, and rows 1 .. d of its own i
    row d predicts x_{i+2+d}

So the tokens of one pass don't know each other, and no row changes those above it. P-EAGLE has one
MASK and four layers; ParallelSpec a MASK for each d and its host's one layer.

Shapes: B rows, T positions, M of them that go on, H hidden, U width of the taps side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.models.heads.eagle import Eagle, EagleConfig, read_eagle3
from draftsmith.models.heads.head import Kind, entry
from draftsmith.models.heads.unrolled_attention import Unrolled


@dataclass(frozen=True)
class PEagleConfig(EagleConfig):
    """parallel: K, the tokens that a pass drafts; own_masks: a MASK for each depth."""

    parallel: int = 8
    own_masks: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.version != 3 or self.parallel < 1 or self.norm_output:
            raise ValueError(
                f"peagle: got version {self.version}, parallel={self.parallel}, norm_output="
                f"{self.norm_output}, expected version 3, at least 1, and false: no output is fed "
                "back"
            )


class PEagle(Eagle):
    """An EAGLE-3 head whose deeper rows read what was learnt; as token, -d is MASK_d."""

    kinds: ClassVar = {"peagle": Kind("P-EAGLE", whole="")}
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
        masks_X = (-1 - tokens_X).clamp(0, self.mask_token.num_embeddings - 1)
        masked_XH = self.mask_token(masks_X).to(known_XH.dtype)
        return torch.where(tokens_X.unsqueeze(-1) < 0, masked_XH, known_XH)

    def unroll(
        self,
        hidden_BTH: Tensor,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        mask: Tensor | None = None,
        *,
        steps: int,
        going_on: tuple[Tensor, Sequence[int]] | None = None,
    ) -> list[Tensor]:
        """Rows 0 .. `steps` - 1 of a text, as `Eagle.unroll`. going_on: positions at_BM and counts,
        row d is made of the first counts[d - 1] of them, ever fewer: [B, M, H]; None: of all.
        """
        attention, next_BT = Unrolled(mask), F.pad(tokens_BT[:, 1:], (0, 1))
        outputs = [self.step(hidden_BTH, next_BT, positions_BT, attention)]
        mask_H, counts = self.fuse(self.mask_state), [tokens_BT.shape[1]] * (steps - 1)
        if going_on is not None:
            at_BM, counts = going_on
            attention.go_on(at_BM)
            positions_BT = positions_BT.gather(1, at_BM)
        for depth, count in enumerate(counts, 1):
            at_BM = positions_BT[:, :count] + depth
            masks_BM = torch.full_like(at_BM, -depth)
            mask_BMH = mask_H.expand(*at_BM.shape, -1)
            outputs.append(self.step(mask_BMH, masks_BM, at_BM, attention))
        return [self.before_head(output) for output in outputs]

    def to_json(self) -> dict[str, Any]:
        own = {name: getattr(self.config, name) for name in ("parallel", "own_masks")}
        return super().to_json() | own | {"architectures": ["PEagle"]}  # no server's EAGLE-3

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "PEagle":
        own = {"parallel": entry(config, "parallel", int)}
        own |= {"own_masks": entry(config, "own_masks", bool)}
        return cls(PEagleConfig(**read_eagle3(config), **own))
