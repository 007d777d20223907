"""Arms of a comparison: whatever answers a list of prompts, run turn by turn, and what they did."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedModel

from draftsmith.bench.rows import row
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.evaluate.metrics import block_efficiency


@dataclass
class PairBench:
    """A target and its draft, what they are asked, and where the rows go."""

    target: str = "runs/quickstart/target/model"
    drafter: str = "runs/quickstart/distill/drafter"  # a draft LM
    prompts: str = "stdlib"
    limit: int = 16  # prompts decoded one at a time
    prompt_tokens: int = 64
    dtype: str = "bfloat16"
    out: str = "runs/bench"


Kind = TypeVar("Kind")
Arm = Callable[[Sequence[list[int]]], list[Completion]]


@dataclass
class Turn:
    """One arm on one prompt or batch: its answers and the seconds of the whole call."""

    done: list[Completion]
    seconds: float

    @property
    def rate(self) -> float:
        return sum(len(c.tokens) for c in self.done) / self.seconds


Turns = dict[str, list[Turn]]


def assisted(
    model: PreTrainedModel,
    length: int,
    assistant: PreTrainedModel,
    setting: tuple[int, str, float],
    **options: Any,
) -> Arm:
    """Assisted generation with (drafted tokens, schedule, confidence threshold)."""
    config = assistant.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = setting[:2]
    config.assistant_confidence_threshold = setting[2]
    return generate(model, length, assistant_model=assistant, **options)


def generate(model: PreTrainedModel, length: int, **options: Any) -> Arm:
    """`generate`: greedy, exactly `length` tokens, prompts padded on the left."""

    @torch.inference_mode()
    def call(prompts: Sequence[list[int]]) -> list[Completion]:
        longest = max(map(len, prompts))
        pads = [longest - len(prompt) for prompt in prompts]
        ids = torch.tensor([[0] * pad + p for pad, p in zip(pads, prompts, strict=True)])
        mask = torch.arange(longest) >= torch.tensor(pads)[:, None]
        out = model.generate(
            ids.to(model.device),
            attention_mask=mask.long().to(model.device),
            max_new_tokens=length,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )[:, longest:].tolist()
        return [Completion(i, list(prompt), out[i]) for i, prompt in enumerate(prompts)]

    return call


def decode_by(threads: int) -> None:
    """Decode with so many threads; one by its own clock, which the engine then reads too: what
    others do on the machine doesn't count.
    """
    torch.set_num_threads(threads)
    if threads == 1:
        time.perf_counter = time.thread_time


def by_lot(names: Sequence[Kind], turn: int) -> list[Kind]:
    """In this turn's own order: what runs before an arm tells on it, and in an order that rotates
    that is always the same one.
    """
    return Random(turn).sample(names, len(names))


def take_turns(what: str, arms: dict[str, Arm], groups: Sequence[Sequence[list[int]]]) -> Turns:
    """Every arm on every group of prompts, after one warm-up each, in an order by lot. Answers come
    as plain lists, so a GPU has finished when a call returns.
    """
    names, length = list(arms), 0
    turns: Turns = {name: [] for name in names}
    progress = track([groups[0], *groups], what, transient=True, console=Console(stderr=True))
    for number, group in enumerate(progress):
        for name in by_lot(names, number):
            started = time.perf_counter()
            done = arms[name](group)
            seconds = time.perf_counter() - started
            length = length or len(done[0].tokens)
            assert all(len(c.tokens) == length for c in done), f"{name}: not {length} tokens each"
            if number:
                turns[name].append(Turn(done, seconds))
    return turns


def rates_row(what: str, peer: str, ours: list[Turn], theirs: list[Turn]) -> dict[str, Any]:
    return row(what, peer, [t.rate for t in ours], [t.rate for t in theirs], "tokens/s")


def rate(turns: list[Turn]) -> float:
    return median(turn.rate for turn in turns)


def tau(turns: Sequence[Turn]) -> float:
    return block_efficiency([c.counters for turn in turns for c in turn.done])


def efficiency(
    seconds: Mapping[str, float | None], K: int, spec: list[Turn], plain: list[Turn]
) -> tuple[float, float]:
    """The measured speed-up, and tau * t_plain / (t_verify + K * t_draft) of isolated forwards."""
    ideal = tau(spec) * seconds["plain"] / (seconds["verify"] + K * seconds["draft"])
    return decode_rate(spec) / decode_rate(plain), ideal


def decode_rate(turns: Sequence[Turn]) -> float:
    """Tokens a second without the prefill and its token."""
    emitted = sum(c.counters.emitted for turn in turns for c in turn.done)
    return emitted / sum(max(c.counters.decode_seconds for c in turn.done) for turn in turns)
