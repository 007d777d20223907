"""Dovetail's gated fusion (arXiv 2412.18934) of a token and the target's state before it.

    h1 = W_1 f;  h2 = silu(W_2 norm(e));  z = sigmoid(W_z [h1; h2]);  z h1 + (1 - z) h2

Shapes: H hidden, X any leading axes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm


class GatedFusion(nn.Module):
    """In the place of EAGLE-1's map: 4 H^2 numbers and a norm where that has 2 H^2."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(hidden, eps=eps)
        self.state, self.token = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.gate = nn.Linear(2 * hidden, hidden, bias=False)
        for linear in (self.state, self.token, self.gate):
            nn.init.xavier_uniform_(linear.weight)

    @property
    def weight(self) -> Tensor:
        """Whose type and place are those of all."""
        return self.state.weight

    def forward(self, both_X2H: Tensor) -> Tensor:
        """[e; f] -> what the first layer reads, [..., H]."""
        token_XH, state_XH = both_X2H.chunk(2, -1)
        from_state_XH = self.state(state_XH)
        from_token_XH = F.silu(self.token(self.norm(token_XH)))
        open_XH = self.gate(torch.cat([from_state_XH, from_token_XH], -1)).sigmoid()
        return torch.lerp(from_token_XH, from_state_XH, open_XH)
