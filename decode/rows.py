"""The rows of a running batch: their device state, and what the host records of each request.

Shapes: B rows, L = D + 1 tokens that one round can emit.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


@dataclass
class Counters:
    """What one request's decoding did. The prefill pass and its token are outside all of it.

    rounds: target calls; emitted: tokens they gave; drafted: proposed tokens; histogram[n]: rounds
    that kept n drafted tokens; reached[i]: rounds that drafted at least i + 1 levels;
    prefill_seconds, decode_seconds: wall time, shared with the other rows of the batch.
    """

    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    histogram: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def record(self, drafted: int, accepted: int, emitted: int) -> None:
        """One round: of `drafted` tokens the rule accepted `accepted`; `emitted` were kept."""
        kept = min(accepted, emitted)
        self.histogram.extend([0] * (drafted + 1 - len(self.histogram)))
        self.reached.extend([0] * (drafted - len(self.reached)))
        self.histogram[kept] += 1
        for level in range(drafted):
            self.reached[level] += 1
        self.rounds += 1
        self.drafted += drafted
        self.emitted += emitted


@dataclass
class Completion:
    """The answer to one prompt. tokens include the stop token, text does not; finish_reason is
    "stop" or "length"; accepted[i] says whether token i came from the draft.
    """

    index: int
    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    counters: Counters = field(default_factory=Counters)


@dataclass(frozen=True)
class Event:
    """One step of one streamed request: tokens and text just added; at the end, the whole."""

    index: int
    tokens: list[int]
    text: str
    completion: Completion | None = None


@dataclass
class Request:
    """A prompt on its way: its completion, its noise seed, and how many tokens it may emit."""

    completion: Completion
    seed: int
    limit: int
    started: float = 0.0
    context_from: int = 0  # text is decoded from here, so that spacing at the seam is right
    shown_to: int = 0  # tokens whose text has been handed out

    @property
    def length(self) -> int:
        """Tokens in the target's KV: all but the pending one."""
        return len(self.completion.prompt_tokens) + max(0, len(self.completion.tokens) - 1)

    def next_text(self, tokenizer: PreTrainedTokenizerBase, finished: bool) -> str:
        """The text added since the last call, in whole characters; at the end, all that is left."""
        tokens = self.completion.tokens
        if finished and self.completion.finish_reason == "stop":
            tokens = tokens[:-1]
        before = str(tokenizer.decode(tokens[self.context_from : self.shown_to]))
        text = str(tokenizer.decode(tokens[self.context_from :]))
        if text.endswith("\ufffd") and not finished:
            return ""
        self.context_from, self.shown_to = self.shown_to, len(tokens)
        return text[len(before) :]


class Rows:
    """lens: tokens in the target's KV; pending: sampled, not yet in the KV; active rows advance,
    the others are computed and ignored. All [B].
    """

    def __init__(self, batch: int, stop_ids: Sequence[int], device: torch.device) -> None:
        def zeros(dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(batch, dtype=dtype, device=device)

        # One committed garbage token keeps every mask row non-empty, also in rows never used.
        self.lens_B = zeros() + 1
        self.pending_B = zeros()
        self.seeds_B = zeros()
        self.rounds_B = zeros()
        self.room_B = zeros()  # tokens that the row may still emit
        self.active_B = zeros(torch.bool)
        self.stop_ids = frozenset(stop_ids)
        self.stop_ids_M = torch.tensor(list(stop_ids), dtype=torch.int64, device=device)
        self.requests: list[Request | None] = [None] * batch
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
        self.active_B[rows_R] = (self.room_B[rows_R] > 0) & ~self.stops(pending_R)

    def stops(self, tokens: Tensor) -> Tensor:
        """True where a token ends its request."""
        return (tokens[..., None] == self.stop_ids_M).any(-1)

    def advance(self, emitted_BL: Tensor, n_accepted_B: Tensor) -> Tensor:
        """Commit a round, cut at a stop token and the room left; n_new_B, 0 in inactive rows."""
        step_L = torch.arange(1, emitted_BL.shape[1] + 1, device=emitted_BL.device)
        valid_BL = step_L <= (n_accepted_B + 1)[:, None]
        stops_BL = self.stops(emitted_BL) & valid_BL
        first_stop_B = torch.where(stops_BL, step_L, emitted_BL.shape[1] + 1).amin(1)
        n_new_B = torch.minimum(torch.minimum(n_accepted_B + 1, first_stop_B), self.room_B)
        n_new_B = torch.where(self.active_B, n_new_B, 0)
        last_B = emitted_BL.gather(1, (n_new_B - 1).clamp(min=0)[:, None])[:, 0]
        self.lens_B = self.lens_B + n_new_B
        self.room_B = self.room_B - n_new_B
        self.rounds_B = self.rounds_B + self.active_B
        self.pending_B = torch.where(self.active_B, last_B, self.pending_B)
        self.active_B = self.active_B & (first_stop_B > n_new_B) & (self.room_B > 0)
        return n_new_B
