"""The rows of a running batch: their device state, and which request each serves.

Shapes: B rows, R of them just admitted, L = D + 1 tokens that one round can emit, M ids that may
end one request.
"""

import copy
from collections import deque
from typing import TypeVar

import torch
from torch import Tensor

from draftsmith.decode.engine.request import Request

Kind = TypeVar("Kind")


class Rows:
    """lens: tokens in the target's KV; pending: sampled, not yet in the KV; active rows advance,
    the others are computed and ignored. All [B]. stops: M, the most ids that may end one request.
    """

    def __init__(self, batch: int, stops: int, device: torch.device) -> None:
        def zeros(dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(batch, dtype=dtype, device=device)

        self.lens_B, self.pending_B, self.seeds_B, self.rounds_B = (zeros() for _ in range(4))
        self.room_B = zeros()  # tokens that the row may still emit
        self.active_B = zeros(torch.bool)
        self.stop_ids_BM = torch.full((batch, stops), -1, dtype=torch.int64, device=device)
        self.reset()

    def reset(self) -> None:
        """All rows free."""
        # One committed garbage token keeps every mask row non-empty, also in rows never used.
        self.lens_B.fill_(1)
        self.active_B.fill_(False)
        self.requests: list[Request | None] = [None] * len(self.lens_B)
        self.waiting: deque[Request] = deque()

    @property
    def free(self) -> list[int]:
        return [row for row, request in enumerate(self.requests) if request is None]

    @property
    def busy(self) -> list[int]:
        return [row for row, request in enumerate(self.requests) if request is not None]

    def admit(
        self, rows_R: Tensor, lens_R: Tensor, pending_R: Tensor, requests: list[Request]
    ) -> None:
        """Give rows to requests whose prompts have just been prefilled and first tokens sampled."""
        self.lens_B[rows_R] = lens_R
        self.pending_B[rows_R] = pending_R
        self.rounds_B[rows_R] = 0
        device = self.lens_B.device
        self.seeds_B[rows_R] = torch.tensor([r.seed for r in requests], device=device)
        self.room_B[rows_R] = torch.tensor([r.limit - 1 for r in requests], device=device)
        most = self.stop_ids_BM.shape[1]
        # No token is -1.
        ends = [sorted(r.stop_ids) + [-1] * (most - len(r.stop_ids)) for r in requests]
        ends_RM = torch.tensor(ends, dtype=torch.int64, device=device).view(len(ends), most)
        self.stop_ids_BM[rows_R] = ends_RM
        stopped_R = (pending_R[:, None] == ends_RM).any(1)
        self.active_B[rows_R] = (self.room_B[rows_R] > 0) & ~stopped_R

    def advance(self, emitted_BL: Tensor, n_accepted_B: Tensor, bad_B: Tensor) -> Tensor:
        """Commit a round, cut at a stop token and the room left; n_new_B, 0 in inactive rows and in
        bad ones (broken logits), which end here.
        """
        step_L = torch.arange(1, emitted_BL.shape[1] + 1, device=emitted_BL.device)
        valid_BL = step_L <= (n_accepted_B + 1)[:, None]
        stops_BL = (emitted_BL[..., None] == self.stop_ids_BM[:, None]).any(-1) & valid_BL
        first_stop_B = torch.where(stops_BL, step_L, emitted_BL.shape[1] + 1).amin(1)
        n_new_B = torch.minimum(torch.minimum(n_accepted_B + 1, first_stop_B), self.room_B)
        n_new_B = torch.where(self.active_B & ~bad_B, n_new_B, 0)
        last_B = emitted_BL.gather(1, (n_new_B - 1).clamp(min=0)[:, None])[:, 0]
        # In place: a captured round is replayed on these very tensors.
        self.rounds_B += self.active_B
        self.pending_B.copy_(torch.where(n_new_B > 0, last_B, self.pending_B))
        self.lens_B += n_new_B
        self.room_B -= n_new_B
        self.active_B &= (first_stop_B > n_new_B) & (self.room_B > 0) & ~bad_B
        return n_new_B

    @torch.inference_mode()
    def release(self, row: int) -> None:
        """Free a row; it rests, if the host alone knows that its request has ended."""
        self.requests[row] = None
        self.active_B[row] = False


def first_rows(whole: Kind, rows: int) -> Kind:
    """A shallow copy of an object whose tensors [B, ...] are the first rows of its own, on the same
    memory: what is written in place is written there.
    """
    part = copy.copy(whole)
    for name, value in vars(whole).items():
        if isinstance(value, Tensor):
            setattr(part, name, value[:rows])
    return part
