"""Finished requests on disk, for a draft to learn from.

A request is one file, `000000000042.safetensors`: written beside, flushed, renamed, and then
acknowledged by its number. A kill at any moment loses no number that was. One process adds, others
may read at the same time; what they were about to read may be dropped meanwhile.

The newest requests stay (`recent`), and of all older ones a uniform sample (`reservoir`): those
whose numbers have the smallest hashes, so that nothing about the sample has to be kept. Every
`heldout_every`-th request is for measuring alone.

Shapes: T tokens of prompt and answer, A answer tokens, N = A - 1, J listed tokens, B = J + 1, H
hidden size of the target, U width of the drafter's taps side by side.
"""

import bisect
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import BaseFileLock
from torch import Tensor

from draftsmith.command import check_least
from draftsmith.decode.engine.recorder import Harvested
from draftsmith.decode.engine.request import Request
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.top_k import likeliest
from draftsmith.models.disk.store import hold, open_shard, save_shard

SUFFIX = ".safetensors"
REMEDY = "remove this file: the others are good"
ROWS = 128  # whose logits are there at a time: 80 MB at a vocabulary of 152k


@dataclass
class Served:
    """One finished request, and what the target said at each position that a draft can be at. Row n
    of what has N rows belongs to answer token n + 1: the first one is never drafted.
    """

    tokens_T: Tensor  # int32
    prompt: int  # of these tokens, the prompt's
    accepted_A: Tensor  # bool: the token came from the draft
    corrected_A: Tensor  # bool: the draft had proposed another one there
    ids_NJ: Tensor  # int32: the target's likeliest tokens at temperature 1, likeliest first
    log_p_NB: Tensor  # float16: their log-probabilities, and last that of all the rest
    norm_NH: Tensor | None  # for heads: the target's states after the final norm
    taps_TU: Tensor | None  # for heads: the taps' states; row t of token t, none of the last one
    version: int  # of the draft that served it
    about: dict[str, Any]  # index, finish_reason, temperature, rounds, drafted, emitted

    def __post_init__(self) -> None:
        tokens, answer = len(self.tokens_T), len(self.accepted_A)
        rows, listed = self.ids_NJ.shape
        got = {"corrected": len(self.corrected_A), "ids": rows + 1, "prompt": tokens - self.prompt}
        if self.norm_NH is not None:
            got["norm"] = len(self.norm_NH) + 1
        if self.taps_TU is not None:
            got["taps"] = len(self.taps_TU) + 1 - self.prompt
        if {*got.values()} != {answer} or self.log_p_NB.shape != (rows, listed + 1):
            raise ValueError(
                f"a served request: got {answer} answer tokens, and {got} of them in its other "
                f"parts; ids {tuple(self.ids_NJ.shape)}, log_p {tuple(self.log_p_NB.shape)}"
            )


def as_served(
    request: Request, harvested: Harvested, runner: Runner, *, k: int, version: int, states: bool
) -> Served | None:
    """What is kept of a finished request; None for an answer of one token, which teaches nothing.
    runner: the target's, of which only its LM head runs; k: how many of the likeliest tokens are
    listed; states: keep the target's states too, for heads.
    """
    made, counters, taps_TU = request.completion, request.completion.counters, harvested.taps_TU
    if len(made.tokens) < 2:
        return None
    with torch.inference_mode():
        chunks = harvested.norm_AH.to(runner.device).split(ROWS)
        found = [likeliest(runner.logits(chunk_CH), k) for chunk_CH in chunks]
        ids_NJ, log_p_NB = (torch.cat(parts) for parts in zip(*found, strict=True))
    about = {"index": made.index, "finish_reason": made.finish_reason}
    about |= {"temperature": request.params.temperature, "rounds": counters.rounds}
    about |= {"drafted": counters.drafted, "emitted": counters.emitted}
    return Served(
        tokens_T=torch.tensor(made.prompt_tokens + made.tokens, dtype=torch.int32),
        prompt=len(made.prompt_tokens),
        accepted_A=torch.tensor(made.accepted),
        corrected_A=torch.tensor(made.corrected),
        ids_NJ=ids_NJ.int().cpu(),
        log_p_NB=log_p_NB.half().cpu(),
        norm_NH=harvested.norm_AH.bfloat16() if states else None,
        taps_TU=taps_TU.bfloat16() if states and taps_TU is not None else None,
        version=version,
        about=about,
    )


@dataclass(eq=False)
class ReplayBuffer:
    """The finished requests in a folder. All who read must say the writer's `heldout_every`."""

    folder: Path
    recent: int = 2048  # of the newest that may be trained on stay so many,
    reservoir: int = 2048  # and of the older ones
    heldout_every: int = 8  # requests whose number it divides are held out, never trained on;
    heldout: int = 128  # so many of the newest of these stay

    def __post_init__(self) -> None:
        check_least(self, recent=1, reservoir=0, heldout_every=2, heldout=1)
        self._lock: BaseFileLock | None = None
        self._next = 0
        self._recent: list[int] = []
        self._heldout: list[int] = []
        self._older: list[tuple[bytes, int]] = []  # by hash

    def open_for_writing(self) -> None:
        """Become the one who adds, and clean up after a kill; ValueError where there is one."""
        if self._lock:
            return
        advice = "expected one server a folder: stop that one, or choose another folder or tag"
        self._lock = hold(self.folder, advice)
        for half in self.folder.glob(".*.half"):
            half.unlink()
        found = self.all_numbers()
        self._next = max(found, default=-1) + 1
        self._recent, self._heldout, self._older = [], [], []
        for number in found:
            self._keep(number)

    def close(self) -> None:
        """Let another process add; the end of the process does the same."""
        if self._lock:
            self._lock.release()
            self._lock = None

    def add(self, served: Served) -> int:
        """Write a request; once its number is returned it is on the disk. Then drops what no longer
        belongs in the folder. OSError where the disk is full: nothing was added. ValueError where
        another process writes to the folder.
        """
        self.open_for_writing()
        number = self._next
        self._next += 1
        tensors = {name: value for name, value in vars(served).items() if torch.is_tensor(value)}
        about = served.about | {"prompt": served.prompt, "version": served.version}
        about |= {"answer": len(served.accepted_A), "accepted": int(served.accepted_A.sum())}
        about |= {"corrected": int(served.corrected_A.sum())}
        save_shard(self._path(number), tensors, about=json.dumps(about))
        self._keep(number)
        return number

    def numbers(self) -> list[int]:
        """The requests that may be trained on, oldest first."""
        return [number for number in self.all_numbers() if not self.is_heldout(number)]

    def heldout_numbers(self) -> list[int]:
        """The requests for measuring, oldest first."""
        return [number for number in self.all_numbers() if self.is_heldout(number)]

    def all_numbers(self) -> list[int]:
        """The requests of both kinds, oldest first."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        found = map(re.compile(rf"(\d+){re.escape(SUFFIX)}").fullmatch, names)
        return sorted(int(one[1]) for one in found if one)

    def is_heldout(self, number: int) -> bool:
        return number % self.heldout_every == 0

    def read(self, number: int) -> Served:
        """A request; FileNotFoundError for a dropped one, ValueError for a broken file."""
        with open_shard(self._path(number), REMEDY) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = json.loads(file.metadata()["about"])
            more = {name: about.pop(name) for name in ("prompt", "version")}
            for name in ("answer", "accepted", "corrected"):
                del about[name]
        return Served(**{"norm_NH": None, "taps_TU": None} | tensors, **more, about=about)

    def about(self, number: int) -> dict[str, Any]:
        """`Served.about`, with prompt, version, and how many tokens were answer, accepted and
        corrected. Reads the head of the file alone; raises what `read` raises.
        """
        with open_shard(self._path(number), REMEDY) as file:
            return dict(json.loads(file.metadata()["about"]))

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:012d}{SUFFIX}"

    def _keep(self, number: int) -> None:
        """Count a request in, and drop the one that has to go for it."""
        if self.is_heldout(number):
            self._heldout.append(number)
            if len(self._heldout) > self.heldout:
                self._path(self._heldout.pop(0)).unlink(missing_ok=True)
            return
        self._recent.append(number)
        if len(self._recent) > self.recent:
            leaving = self._recent.pop(0)
            hashed = hashlib.blake2b(str(leaving).encode(), digest_size=8).digest()
            bisect.insort(self._older, (hashed, leaving))
        if len(self._older) > self.reservoir:
            self._path(self._older.pop()[1]).unlink(missing_ok=True)
