"""Finished requests as training data: micro-batches that bring the target's side with them, and
which requests a step takes.

A draft LM is compared with the target's likeliest tokens, a head with its states; both were kept
when the request was served, so the target doesn't run again.

Legend: B rows, T positions, N = B * T, J listed tokens of a row, G hidden size of the target.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from draftsmith.command import check_one_of
from draftsmith.decode.serve.buffer import ReplayBuffer, Served
from draftsmith.models.taps import TargetStates
from draftsmith.progress import LINE_SECONDS, seconds_left
from draftsmith.train.live.idle_time import Duty
from draftsmith.train.losses.top_k import TopKRows
from draftsmith.train.run.loop import GO_ON
from draftsmith.train.text.batches import Batch

Read = TypeVar("Read")
POLL_SECONDS = 0.2
Alpha = tuple[float, float]  # the sum of sum_v min(p, q) of some positions, and how many they are


@dataclass(kw_only=True)
class Mix:
    """The group `mix` of a recipe: what a step learns from."""

    positions: str = "all"  # all | rejected: those where the target put another token alone
    recent: float = 0.5  # these three: shares of a step's requests; the newest `window`,
    reservoir: float = 0.25  # any that is kept,
    disagreement: float = 0.25  # any, the likelier the more of its tokens were corrected
    window: int = 128
    requests_per_step: int = 4  # finished requests that a step waits for
    max_length: int = 1024  # tokens of a request that are read

    def __post_init__(self) -> None:
        shares = (self.recent, self.reservoir, self.disagreement)
        if not (all(0 <= share <= 1 for share in shares) and any(shares)):
            raise ValueError(
                f"mix.recent, reservoir, disagreement: got {shares}, expected shares from 0 to 1, "
                "one of them above 0"
            )
        check_one_of("mix.positions", self.positions, ("all", "rejected"))
        for name, least in {"window": 1, "requests_per_step": 1, "max_length": 3}.items():
            if (got := getattr(self, name)) < least:
                raise ValueError(f"mix.{name}: got {got}, expected at least {least}")


@dataclass(frozen=True)
class ServedBatch(Batch):
    """Requests as a micro-batch; `listed` [N rows] for draft LMs, `states` for heads."""

    listed: TopKRows | None = None
    states: TargetStates | None = None


def listed_rows(batch: Batch) -> TopKRows:
    """The teacher of a draft LM."""
    assert isinstance(batch, ServedBatch) and batch.listed is not None
    return batch.listed


def kept_states(batch: Batch) -> TargetStates:
    """The states that a head reads and is compared with; zeros where nothing is trained."""
    assert isinstance(batch, ServedBatch) and batch.states is not None
    return batch.states


def as_batch(
    requests: Sequence[Served],
    numbers: Sequence[int],
    *,
    pad_id: int,
    max_length: int,
    rejected: bool = False,
    dtype: torch.dtype = torch.float32,
) -> ServedBatch:
    """Requests, right-padded. Trained are their answers without the first token, which is never
    drafted; rejected: of these, where the draft had proposed another token. dtype: of the states.
    """
    cut = [served.tokens_T[:max_length] for served in requests]
    shape = (len(requests), max(map(len, cut)))
    listed = max(served.ids_NJ.shape[1] for served in requests)
    ids_BT, mask_BT = torch.full(shape, pad_id), torch.zeros(shape, dtype=torch.bool)
    places_BT = torch.full(shape, -1)
    top_BTJ = torch.zeros(*shape, listed, dtype=torch.int64)
    log_p_BTB = torch.full((*shape, listed + 1), -torch.inf)
    log_p_BTB[..., 0] = 0.0  # a law also where nothing is trained
    states = None
    if requests[0].norm_NH is not None:  # requests of one lane are kept alike
        kept = (requests[0].norm_NH, requests[0].taps_TU)
        wide = (0 if part is None else part.shape[1] for part in kept)
        states = TargetStates(*(torch.zeros(*shape, size, dtype=dtype) for size in wide))
    for row, (served, tokens_T) in enumerate(zip(requests, cut, strict=True)):
        end = len(tokens_T)
        ids_BT[row, :end], places_BT[row, :end] = tokens_T.long(), torch.arange(end)
        rows = max(0, end - 1 - served.prompt)
        here = slice(served.prompt, served.prompt + rows)
        trained_A = served.corrected_A if rejected else torch.ones_like(served.corrected_A)
        mask_BT[row, here] = trained_A[1 : 1 + rows]
        # A row that lists fewer repeats its first token: an empty bucket from there on.
        few = served.ids_NJ.shape[1]
        top_BTJ[row, here] = served.ids_NJ[:rows, :1].long()
        top_BTJ[row, here, :few] = served.ids_NJ[:rows].long()
        log_p_BTB[row, here, :few] = served.log_p_NB[:rows, :-1].float()
        log_p_BTB[row, here, -1] = served.log_p_NB[:rows, -1].float()
        if states is not None and served.norm_NH is not None:
            answer_TG = states.norm_BTG[row, served.prompt :]
            answer_TG[: len(served.norm_NH)] = served.norm_NH[: len(answer_TG)].to(dtype)
        if states is not None and served.taps_TU is not None:
            taps_TU = served.taps_TU[: shape[1]]
            states.taps_BTF[row, : len(taps_TU)] = taps_TU.to(dtype)
    positions_BT = torch.arange(shape[1]).expand(shape)
    return ServedBatch(
        *(ids_BT, positions_BT, mask_BT, None, tuple(numbers), places_BT),
        listed=TopKRows(top_BTJ.flatten(0, 1), log_p_BTB.flatten(0, 1)),
        states=states,
    )


def still_there(read: Callable[[int], Read], numbers: Iterable[int]) -> Iterator[tuple[int, Read]]:
    """What is read of each request, by number, but of those dropped since they were listed."""
    for number in numbers:
        try:
            found = read(number)
        except FileNotFoundError:
            continue
        yield number, found


class Feed:
    """Where requests come from while there are too few. to_go_on: see `loop.StepBatches`."""

    to_go_on = GO_ON

    def more(self) -> bool:
        """Wait a moment, or do something that brings requests; False: none will come."""
        time.sleep(POLL_SECONDS)
        return True


@dataclass(eq=False)
class Buffered:
    """Micro-batches from a replay buffer, for `loop.fit`. A step waits until `requests_per_step`
    requests have come for it since the start; the requests that it takes are drawn by (seed, step,
    micro) from what is in the buffer then.

    batch_of: (requests, numbers) -> micro-batch; tell: prints a line that says what is waited for.
    """

    mix: Mix
    buffer: ReplayBuffer
    batch_of: Callable[[Sequence[Served], Sequence[int]], ServedBatch]
    feed: Feed
    duty: Duty
    tell: Callable[[str], None] | None = None
    batch_size: int = field(kw_only=True)
    seed: int = field(kw_only=True)

    chooses = "requests from a buffer"

    def __post_init__(self) -> None:
        self.to_go_on = self.feed.to_go_on
        self.endless = self.tell is not None  # requests come for as long as a server runs
        self.silent_s = 0.0  # that a step waits before it says so; the first says it at once
        self.first = -1  # the number from which requests are counted
        self.steps = 0  # of the run, the one that was asked for last included
        self.stop: list[int] = []
        self._about: dict[int, dict[str, Any]] = {}

    def heed(self, stop: list[int]) -> None:
        """Wait no longer once there is something in `stop`: the batch is then an empty one."""
        self.stop = stop

    def state(self, step: int) -> Any:
        return {"first": self.first}

    def restore(self, state: Any) -> None:
        self.first = state["first"]

    def batch(self, step: int, micro: int, rank: int, *, accumulation: int, world: int) -> Batch:
        assert world == 1, "a draft has one learner"
        self.steps = step + 1
        if micro == 0:
            self.duty.rest(self.stop)
            self._wait(step)
            self.duty.worked_from_now()
        rng = np.random.default_rng((self.seed, step, micro))
        requests: list[Served] = []
        numbers: list[int] = []
        while len(requests) < self.batch_size and not self.stop:
            number = self._draw(rng)
            try:
                requests.append(self.buffer.read(number))
                numbers.append(number)
            except FileNotFoundError:  # dropped by the server since it was listed
                self._about.pop(number, None)
                self._look()
                if not self._trainable():
                    self._wait(step)
                    self.duty.worked_from_now()
        return EMPTY if self.stop else self.batch_of(requests, numbers)

    def _wait(self, step: int) -> None:
        """Until requests for `step` are there, one of them with something to train."""
        began = time.monotonic()
        due, had, told = began + self.silent_s, -1, -1  # had: requests at the first look
        while not self.stop:
            there = self._look()
            per_step = self.mix.requests_per_step
            if there:
                # What a server collected before counts too, as far as it is still there. A buffer
                # that was begun anew has fewer than the steps were for.
                end = there[-1] + 1
                least = end - len(there) - step * per_step
                anew = end - self.first < step * per_step
                self.first = least if anew else max(self.first, least)
            need = (step + 1) * per_step
            come = end - self.first if there else 0
            enough = come >= need
            if enough and self._trainable():
                return
            now, had = time.monotonic(), come if had < 0 else had
            if self.tell is not None and come != told and now >= due:
                self.silent_s, due, told = LINE_SECONDS, now + LINE_SECONDS, come
                left = seconds_left(come - had, need - had, now - began)
                news = f"{come} of {need}{left and ', '}{left}"
                if enough:
                    news += (
                        f", none with a token to train at positions={self.mix.positions} and "
                        f"max_length={self.mix.max_length}, which longer prompts fill"
                    )
                self.tell(f"step {step + 1} waits for requests in {self.buffer.folder}: {news}")
            if not self.feed.more():
                if self._trainable():
                    return
                raise ValueError(
                    f"{self.buffer.folder}: got {len(self._about)} requests to train on, none of "
                    "them with a trained token, expected some; no more will come"
                )

    def _look(self) -> list[int]:
        """Take in what has come and gone; the numbers of all requests, held-out ones too."""
        numbers = self.buffer.all_numbers()
        there = set(numbers)
        self._about = {n: about for n, about in self._about.items() if n in there}
        new = (n for n in numbers if n not in self._about and not self.buffer.is_heldout(n))
        self._about |= still_there(self.buffer.about, list(new))
        return numbers

    def _trainable(self) -> list[int]:
        """The requests with something to train, oldest first."""
        least = self.mix.max_length - 1  # a prompt that leaves room for two tokens
        return [
            number
            for number, about in self._about.items()
            if about["prompt"] < least and (about["corrected"] or self.mix.positions == "all")
        ]

    def _draw(self, rng: np.random.Generator) -> int:
        mix, numbers = self.mix, self._trainable()
        shares = np.array([mix.recent, mix.reservoir, mix.disagreement])
        way = rng.choice(3, p=shares / shares.sum())
        if way == 0:
            numbers = numbers[-mix.window :]
        weights = np.ones(len(numbers))
        if way == 2:
            of = [self._about[number] for number in numbers]
            weights = np.array([about["corrected"] / about["answer"] for about in of]) + 1e-3
        return int(rng.choice(numbers, p=weights / weights.sum()))


NOTHING_11 = torch.zeros(1, 1, dtype=torch.int64)
EMPTY = ServedBatch(NOTHING_11, NOTHING_11, NOTHING_11.bool(), None, ())
