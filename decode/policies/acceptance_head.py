"""An acceptance head (models/scorers.py) as draft calls ask it: log chances of being kept.

Shapes: B rows, F nodes fed, C children drawn from them, H hidden, S numbers beside a state.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.decode.drafters.base import Call, picked
from draftsmith.models.scorers import Scorer, within


class AcceptanceHead:
    """(call) -> what it adds to the log chance of its children's paths [B, C]; a copy of the scorer
    on `device` in fp32, its calibration folded into its last map.

    A head that reads the state a token was drawn from scores the children. One that reads the state
    after a token scores the nodes fed, which stand for their children: the newest tokens of a round
    are never scored (nor in the official code), and the root, which is kept, counts 0.
    """

    def __init__(self, scorer: Scorer, device: torch.device) -> None:
        made = copy.deepcopy(scorer)
        with torch.no_grad():
            made.out.weight.mul_(made.scale)
            made.out.bias.copy_(made.calibrated(made.out.bias))
        made.to(device)
        self.config = made.config
        self.enter = None if made.enter is None else tuple(made.enter.parameters())
        *self.blocks, self.out = (tuple(linear.parameters()) for linear in (*made.blocks, made.out))

    def __call__(self, call: Call) -> Tensor:
        states_BFH = call.states_BFH.float()
        if self.config.state == "token":
            if call.depth == 0:
                return torch.zeros_like(call.of_BC, dtype=torch.float32)
            return self._log_chance(states_BFH).gather(1, call.of_BC)
        if call.of_BC.shape[1] > 1:
            states_BFH = picked(states_BFH, call.of_BC)
        if self.config.scalars:
            numbers = [READ[name](call)[..., None] for name in self.config.scalars]
            states_BFH = torch.cat([states_BFH, *numbers], -1)
        return self._log_chance(states_BFH)

    def _log_chance(self, x: Tensor) -> Tensor:
        """Log probability [...] of inputs [..., I]."""
        x = x if self.enter is None else F.linear(x, *self.enter)
        for block in self.blocks:
            x = x + F.silu(F.linear(x, *block))
        return F.logsigmoid(F.linear(x, *self.out)[..., 0])


# What `models.scorers.SCALARS` names, of each child [B, C].
READ = {
    "log_q": lambda call: within(call.log_q_BC),
    "entropy": lambda call: call.entropy_BF.gather(1, call.of_BC),
    "lead": lambda call: within(call.lead_BC),
    "depth": lambda call: torch.full_like(call.of_BC, call.depth, dtype=torch.float32),
}
