"""Measuring on held-out text while a draft trains."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafters.base import Drafter
from draftsmith.decode.drafters.lm import LMDrafter, weights_read
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.target import vocab_size
from draftsmith.train.answers.development import prompts_for_development
from draftsmith.train.objectives.distillation import Distillation, Losses
from draftsmith.train.run.frozen_target import in_company
from draftsmith.train.run.loop import Evaluate, StepOutput
from draftsmith.train.teachers.teachers import StateTeacher
from draftsmith.train.text.batches import Batch, Batches, Examples
from draftsmith.train.text.on_policy import Snapshot

Score = Callable[[Batch], StepOutput]


def mean_output(
    accelerator: Accelerator, score: Score, batches: Batches, sequences: int
) -> dict[str, float]:
    """Loss and metrics a trained token, over the first `sequences` (at most an epoch), always the
    same ones and each once: what fills up the last batches of the processes isn't counted.
    """
    rank, world, rows = accelerator.process_index, accelerator.num_processes, batches.batch_size
    sequences = min(sequences, len(batches))
    sums = []
    for step in range(-(-sequences // (rows * world))):
        number = step * world + rank
        batch = batches.batch(number, 0, 0, accumulation=1, world=1)
        batch.loss_mask[max(0, sequences - number * rows) :] = False
        with torch.no_grad(), accelerator.autocast():
            output = score(batch.to(accelerator.device))
        sums.append(torch.stack([output.tokens, output.loss, *output.metrics.values()]).double())
    tokens, *totals = accelerator.reduce(torch.stack(sums).sum(0)).tolist()
    names = ["loss", *output.metrics]
    return {name: total / tokens for name, total in zip(names, totals, strict=True)}


@dataclass(kw_only=True)
class Figures:
    """The part of a recipe that says how a draft is measured with its target while it trains."""

    heldout_data: str = ""  # whose prompts the target answers; empty: the held-out side of data
    heldout_prompts: int = 32  # 0: no figures but the loss
    prompt_tokens: int = 32  # of a document, where it is to be continued
    max_new_tokens: int = 128
    temperature: float = 1.0
    K: int = 4  # drafted tokens a round: for tau and MBSU, and the result's default

    @property
    def warp(self) -> SamplingParams:
        """How both sides' logits become distributions."""
        return SamplingParams(self.temperature, max_new_tokens=self.max_new_tokens)


@dataclass(kw_only=True)
class CrossEntropy(Losses):
    """The loss of pretraining, in terms of distillation."""

    loss: str = "ce"
    steps: int = 1


class HeldOutSettings(Protocol):
    """The part of a recipe that says what figures are taken on."""

    data: str
    heldout_data: str
    heldout_prompts: int
    prompt_tokens: int
    batch_size: int


class DraftFigures(HeldOutSettings, Protocol):
    """The same for a draft LM."""

    K: int

    @property
    def warp(self) -> SamplingParams: ...


def draft_figures(
    config: DraftFigures,
    accelerator: Accelerator,
    objective: Distillation,
    snapshot: Snapshot[PreTrainedModel],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
) -> Evaluate:
    """Loss, alpha and agreement on the target's answers, tau and MBSU, of a draft LM in training.

    Args:
        snapshot: copies of the draft, to decode with.
        cache: the folder to keep the answers in.
    """
    size = vocab_size(tokenizer)
    heldout = open_heldout(config, config.warp, accelerator, target, tokenizer, cache)
    itself = StateTeacher(target, size)

    def evaluate() -> dict[str, float]:
        drafter = LMDrafter(snapshot.take(), size)
        means = heldout.means(partial(objective.measure, teacher=itself))
        tau = heldout.tau(drafter, config.K)
        c_bytes = drafter.parameter_bytes / weights_read(target)
        return means | {"tau": tau, "mbsu": tau / (1 + config.K * c_bytes)}

    return evaluate


def open_heldout(
    config: HeldOutSettings,
    params: SamplingParams,
    accelerator: Accelerator,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
) -> "HeldOut":
    """The held-out prompts with the target's answers; errors of `prompts_for_development` pass.

    cache: the folder to keep the answers in.
    """
    source, many = config.heldout_data or config.data, config.heldout_prompts
    prompts = prompts_for_development(source, tokenizer, count=many, length=config.prompt_tokens)
    rows = config.batch_size
    heldout = HeldOut(accelerator, target, tokenizer, prompts, params, batch_size=rows)
    heldout.write_answers(cache / "heldout.safetensors")
    return heldout


class HeldOut:
    """Prompts that nobody trains on, and the target's own answers to them.

    Args:
        params: how the target answers, and how tau is decoded.
        batch_size: rows of the teacher-forced passes.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        batch_size: int,
    ) -> None:
        self.accelerator = accelerator
        self.target = target
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.params = params
        self.batch_size = batch_size

    def write_answers(self, cache: Path) -> None:
        """Have the target answer, or read its answers from `cache`. Before `means`; all processes
        call it together.
        """
        with in_company(self.target):
            if self.accelerator.is_main_process and not cache.exists():
                self._answer(cache)
        self.accelerator.wait_for_everyone()
        examples = Examples.load(cache)
        self.answers = Batches(
            examples,
            batch_size=self.batch_size,
            max_length=int(examples.starts.diff().max()),
            seed=0,
            packing=False,
            pad_id=self.tokenizer.pad_token_id or 0,
        )

    def _answer(self, cache: Path) -> None:
        decoder = Decoder(self.target, self.tokenizer, batch_size=DECODER_ROWS)
        answers = [made.tokens for made in decoder.generate(self.prompts, self.params)]
        pairs = zip(self.prompts, answers, strict=True)
        examples = Examples.collect(
            (prompt + answer, [False] * len(prompt) + [True] * len(answer))
            for prompt, answer in pairs
        )
        half = cache.with_name(f".{cache.name}.half")
        examples.save(half)
        half.replace(cache)

    def means(self, score: Score) -> dict[str, float]:
        """Means over contexts that the target wrote: alpha's definition asks for just these."""
        return mean_output(self.accelerator, score, self.answers, len(self.answers))

    def tau(self, drafter: Drafter, K: int, tree: str = "chain") -> float:
        """Block efficiency: tokens emitted a target call. The processes share the prompts."""
        accelerator = self.accelerator
        mine = range(accelerator.process_index, len(self.prompts), accelerator.num_processes)
        decoder = Decoder(
            self.target, self.tokenizer, drafter, K=K, tree=tree, batch_size=DECODER_ROWS
        )
        with in_company(self.target):
            made = decoder.generate([self.prompts[i] for i in mine], self.params, list(mine))
        counts = [sum(m.counters.emitted for m in made), sum(m.counters.rounds for m in made)]
        total = accelerator.reduce(torch.tensor(counts, device=accelerator.device))
        emitted, rounds = total.tolist()
        return emitted / max(1, rounds)


DECODER_ROWS = 16
