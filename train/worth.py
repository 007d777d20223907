"""Variants of one drafter side by side: what each covers, accepts, reads and takes.

Shapes: V rows of the target's LM head.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafters.eagle import EagleDrafter
from draftsmith.decode.drafters.lm import LMDrafter, weights_read
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.evaluate import metrics
from draftsmith.decode.policies.timing import (
    draft_call,
    forward_call,
    graphed,
    median_times,
    teacher_forced,
    with_room,
)
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.tree_shapes import chain_plan

ROWS = 8  # of the decoder
CONTEXT = 128  # tokens in the KV of a timed call
REPEATS = 25  # of a timed call
Trimmable = LMDrafter | EagleDrafter


@dataclass
class Worth:
    """arms: the variants by name, the first one what the others are compared with; K: of their
    chains; counts_V: of the tokens that the vocabularies were made by.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    arms: dict[Hashable, Trimmable]
    params: SamplingParams
    K: int
    counts_V: Tensor

    def __post_init__(self) -> None:
        self.plain = Decoder(self.target, self.tokenizer, batch_size=ROWS)
        self.context = min(self.plain.context, *(arm.context for arm in self.arms.values()))

    def rows(self, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """One row an arm, all on the target's own answers to the same prompts. counted, written:
        share of counts_V, and of these answers, that the draft has tokens for; tau_change: from the
        first arm's, with its interval; bytes: read by a draft call; the rest: as everywhere.
        """
        answers = self.plain.generate(prompts, self.params)
        written = torch.tensor([token for answer in answers for token in answer.tokens])
        written_V = torch.bincount(written, minlength=len(self.counts_V))
        rows: list[dict[str, Any]] = []
        sides: list[tuple[list[int], list[int]]] = []
        for name, drafter in self.arms.items():
            decoder = Decoder(self.target, self.tokenizer, drafter, K=self.K, batch_size=ROWS)
            counters = [made.counters for made in decoder.generate(prompts, self.params)]
            tau = metrics.block_efficiency(counters)
            sides.append(([c.emitted for c in counters], [c.rounds for c in counters]))
            change, interval = metrics.paired_difference(sides[-1], sides[0])
            forced = teacher_forced(self.plain.runner, drafter, answers, self.params)
            device, read = drafter.vocab.ids_D.device, drafter.parameter_bytes
            row = {
                "name": name,
                "tokens": len(drafter.vocab.ids_D),
                "counted": drafter.vocab.coverage(self.counts_V.to(device)),
                "written": drafter.vocab.coverage(written_V.to(device)),
                "alpha": sum(one.alpha for one in forced) / sum(one.positions for one in forced),
                "tau": tau,
                "tau_change": change,
                "tau_change_interval": interval,
                "bytes": read,
                "mbsu": tau / (1 + self.K * read / weights_read(self.target)),
                "prompts": len(prompts),
            }
            rows.append(row)
        return rows

    def times(self) -> dict[Hashable, float]:
        """c of each arm: the time of a draft call over that of the target's forward of one token.
        All take turns.
        """
        runner = self.plain.runner
        context = min(CONTEXT, self.context - self.K - 2)
        calls = {"plain": forward_call(runner, batch=1, length=1, context=context)}
        for name, drafter in self.arms.items():
            twin, fed = with_room(drafter, 1, context + self.K + 2), chain_plan(self.K).fed
            made = draft_call(twin, fed, batch=1, context=context, device=runner.device)
            calls[f"draft {name}"] = made
        calls = {name: graphed(call, runner.device) for name, call in calls.items()}
        times = median_times(calls, runner.device, REPEATS)
        return {name: times[f"draft {name}"] / self.K / times["plain"] for name in self.arms}
