"""The rows of a running batch on the device, and how a round moves them on: `settled` on a CPU in
one call of C++ (`rows.cpp`), where every operation of torch costs what a small model's layer does.

Shapes: B rows, R of them just admitted, N nodes, L = D + 1 tokens that one round can emit, M ids
that may end one request, V vocabulary.
"""

import ctypes
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.decode.drafting.base import Kept
from draftsmith.decode.engine.request import Request
from draftsmith.decode.forward.compiled import OPERATORS, library
from draftsmith.decode.token_tree import TokenTree
from draftsmith.decode.verify.rules import Verdict

SOURCE = Path(__file__).with_name("rows.cpp")


class Rows:
    """lens: tokens in the target's KV; pending: sampled, not yet in the KV; room: tokens that the
    row may still emit; active rows advance, the others are computed and ignored. All [B]. stops: M,
    the most ids that may end one request.
    """

    def __init__(self, batch: int, stops: int, device: torch.device) -> None:
        zeros = (torch.zeros(batch, dtype=torch.int64, device=device) for _ in range(5))
        self.lens_B, self.pending_B, self.seeds_B, self.rounds_B, self.room_B = zeros
        self.active_B = torch.zeros(batch, dtype=torch.bool, device=device)
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


class Settled(NamedTuple):
    """What a round came to. emitted_BL: accepted tokens and the one after them, beyond that any;
    path_BL: as in `Verdict`; n_new_B: how many were emitted, 0 in rows that don't advance;
    before_B: the rows' lengths until then; table: all but the latter, as `Told` has it.
    """

    emitted_BL: Tensor
    path_BL: Tensor
    n_new_B: Tensor
    before_B: Tensor
    table: Tensor

    @classmethod
    def by(cls, rows: Rows, tree: TokenTree, verdict: Verdict, bad_B: Tensor) -> "Settled":
        """What a verdict comes to, the rows then moved on. bad_B: whose logits are broken."""
        path_BL, n_accepted_B, next_B = verdict
        kept_BL = tree.tokens_BN.gather(1, path_BL)
        emitted_BL = kept_BL.roll(-1, 1).scatter(1, n_accepted_B[:, None], next_B[:, None])
        before_B = rows.lens_B.clone()
        n_new_B = rows.advance(emitted_BL, n_accepted_B, bad_B)
        ended = torch.stack([n_accepted_B, n_new_B, rows.active_B, bad_B], 1)
        table = torch.cat([emitted_BL, tree.ranks(path_BL), ended], 1)
        return cls(emitted_BL, path_BL, n_new_B, before_B, table)

    @classmethod
    def at_once(
        cls, rows: Rows, tree: TokenTree, p_logits_BNV: Tensor, race_BLV: Tensor | None
    ) -> "Settled | None":
        """The same by the rule `coupled`, in C++; None where there is none for it."""
        if p_logits_BNV.device.type != "cpu" or p_logits_BNV.dtype != torch.float32:
            return None
        if library(SOURCE) is None:
            return None
        topology, length = tree.topology, tree.topology.levels + 1
        state = rows.lens_B, rows.pending_B, rows.rounds_B, rows.room_B, rows.active_B
        table, before_B = torch.ops.draftsmith.settle(
            *(tree.tokens_BN, topology.parent, topology.depth, p_logits_BNV, race_BLV),
            *(*state, rows.stop_ids_BM, tree.verified_B, length),
        )
        emitted_BL, path_BL, ended = table.split([length, length, 4], 1)
        if tree.rank_BN is not None:
            table = torch.cat([emitted_BL, tree.ranks(path_BL), ended], 1)
        return cls(emitted_BL, path_BL, ended[:, 1], before_B, table)


class Told(NamedTuple):
    """A round's news. table: int64 [B, 2 L + 4 + W]: tokens emitted, nodes of the kept path (of a
    tree ordered by worth: their places in that order), how many drafted ones the rule kept, how
    many were emitted, whether the row still decodes, whether its logits were broken; then, where
    the batch asks for them, the bits of `told_log_probs` of the tokens, and those of what the
    drafter says. levels, nodes: of the tree that was verified (nodes without the root); said: the
    drafter's columns; owes: what it is still to take in; tree: the tree, where rows verify a part
    of it; several: levels and nodes of each of rounds made at once, whose tables stand in the
    rows of `table`; took: a thread's seconds for each of them.
    """

    table: Tensor
    levels: int
    nodes: int
    said: int = 0
    owes: Sequence[Kept] = ()
    tree: TokenTree | None = None
    several: Sequence[tuple[int, int]] = ()
    took: Sequence[float] = ()

    def listed_BLW(self, table: Tensor) -> Tensor | None:
        """That part of the table, read from its copy on the host; None where nobody asked."""
        columns, length = 2 * self.levels + 6, self.levels + 1
        if table.shape[1] == columns + self.said:
            return None
        listed_BX = table[:, columns : table.shape[1] - self.said]
        return listed_BX.view(torch.float64).unflatten(1, (length, -1))

    def news_BX(self, table: Tensor) -> Tensor | None:
        """The drafter's, likewise."""
        return table[:, -self.said :].view(torch.float64) if self.said else None


_NUMBERS = (
    *("rows", "nodes", "length", "vocab", "stops"),
    *("race_row", "race_step", "tree_row", "beside"),
)
_PLACES = (
    *("tokens", "parent", "depth", "logits", "race"),
    *("lens", "pending", "rounds", "room", "active", "stop_ids", "before", "table"),
    *("verified", "begun", "side", "asked", "sees"),
)


class _Round(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in _NUMBERS]
    _fields_ += [(name, ctypes.c_void_p) for name in _PLACES]


def _settle(
    tokens_BN: Tensor,
    parent: Tensor,
    depth: Tensor,
    p_logits_BNV: Tensor,
    race_BLV: Tensor | None,
    *rows: Any,
) -> tuple[Tensor, Tensor]:
    """rows: state and end tokens of `Rows`, how much of each is verified, then L."""
    *state, verified_B, length = rows
    table, before_B = _settled_like(tokens_BN, length)
    given = [x.contiguous() for x in (tokens_BN, parent, depth, p_logits_BNV)]
    if race_BLV is not None and race_BLV.stride(2) != 1:
        race_BLV = race_BLV.contiguous()
    places = *given, race_BLV, *state, before_B, table, verified_B, None, None
    library(SOURCE).settle(ctypes.byref(round_of(places, length)))
    return table, before_B


def round_of(places: Sequence[Tensor | None], length: int) -> _Round:
    """Of tensors in the order of `_PLACES`, which must live as long."""
    _, parent, _, p_logits_BNV, race_BLV, *_, stop_ids_BM, _, _, _, _, side_MBNU = places
    assert parent is not None and p_logits_BNV is not None and stop_ids_BM is not None
    strides = (0, 0) if race_BLV is None else race_BLV.stride()[:2]
    wide, (B, N, V) = parent.shape[-1] if parent.ndim == 2 else 0, p_logits_BNV.shape
    beside = side_MBNU[0].numel() if side_MBNU is not None else 0
    sizes = B, N, length, V, stop_ids_BM.shape[1], *strides, wide, beside
    return _Round(*sizes, *(None if x is None else x.data_ptr() for x in places))


def _settled_like(tokens_BN: Tensor, length: int) -> tuple[Tensor, Tensor]:
    rows = len(tokens_BN)
    return tokens_BN.new_empty((rows, 2 * length + 4)), tokens_BN.new_empty(rows)


OPERATORS.define(
    "settle(Tensor tokens, Tensor parent, Tensor depth, Tensor logits, Tensor? race, "
    "Tensor(a!) lens, Tensor(b!) pending, Tensor(c!) rounds, Tensor(d!) room, Tensor(e!) active, "
    "Tensor stop_ids, Tensor? verified, int length) -> (Tensor, Tensor)"
)
OPERATORS.impl("settle", _settle, "CPU")
OPERATORS.impl("settle", lambda tokens_BN, *rest: _settled_like(tokens_BN, rest[-1]), "Meta")
