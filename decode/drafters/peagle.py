"""P-EAGLE heads as the drafter (arXiv 2602.01469; ParallelSpec, 2410.05589): one pass a round.

The pairs of kept tokens, the pending one's last, are fed as they are kept, as EAGLE's are: the last
output gives the law of the root's children. The rows of MASK come with a round's first draft call:
with n tokens committed, depth d has slot n - 1 + d and that position. What they leave there is seen
by themselves alone: the pairs of the next kept tokens go over it.

Shapes: B rows, D rows of MASK, L levels, F nodes fed, H hidden, V vocabulary.
"""

import torch
from torch import Tensor

from draftsmith.decode.drafters.eagle import EagleDrafter
from draftsmith.decode.drafting.base import Feed, Round
from draftsmith.decode.drafting.grow_tree import by_depth
from draftsmith.decode.forward.attention import Seen
from draftsmith.models.heads.peagle import PEagle


class PEagleDrafter(EagleDrafter):
    """All nodes of one depth share one law, as Medusa's; the layers run once a round for them."""

    head: PEagle
    one_pass, each = True, False

    def feed(self, request: Round) -> Feed:
        return by_depth(lambda: self.first(self._rows(request)))

    def _rows(self, request: Round) -> Tensor:
        """Outputs of all levels, [B, L, H]; none changes those above it, so no more are made."""
        if request.plan.levels == 1:
            return self.state_BH[:, None]
        depth_D = torch.arange(1, request.plan.levels, device=self.device)
        at_BD = request.lens_B[:, None] - 1 + depth_D
        width = self.pool.width(request.top + len(depth_D))
        seen = Seen(request.lens_B, width, depth_D[:, None] >= depth_D, depth_D)
        mask_BDH = self.body.fuse(self.head.mask_state[None, None]).expand(*at_BD.shape, -1)
        where = self.pool.fed(at_BD, at_BD, seen)
        output_BDH = self.body.step(mask_BDH, (-depth_D).expand_as(at_BD), *where)
        return torch.cat([self.state_BH[:, None], output_BDH], 1)

    @property
    def parameter_bytes(self) -> int:
        return (super().parameter_bytes + self.head.fc.weight.nbytes) // self.levels
