"""Measuring on held-out text while a draft trains."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.draft_lms.lm import weights_read
from draftsmith.decode.draft_lms.pard import lm_drafter
from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.evaluate.metrics import FEW, ratio_interval
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.target import vocab_size
from draftsmith.train.answers.asks import prompts_for_development
from draftsmith.train.objectives.distillation import Distillation
from draftsmith.train.run.folder import Run
from draftsmith.train.run.frozen_target import in_company
from draftsmith.train.run.loop import Evaluate, StepOutput
from draftsmith.train.teachers.states import Cache
from draftsmith.train.teachers.teachers import StateTeacher
from draftsmith.train.text.batches import Batch, Batches, Examples
from draftsmith.train.text.on_policy import Snapshot, text_at_hand

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
class HeldOutPrompts:
    """The group `heldout` of a recipe: what a draft is measured on with its target as it trains."""

    prompts: str = ""  # that the target answers; empty: of the held-out side of the run's data
    limit: int = 32  # of them
    prompt_tokens: int = 32  # of a document, where it is to be continued
    max_new_tokens: int = 128
    batch_size: int = 16  # of them, decoded together

    def __post_init__(self) -> None:
        if self.prompts.isdecimal():
            raise ValueError(
                f"heldout.prompts: got {self.prompts}, expected rows with prompts, such as a file; "
                "how many of them is heldout.limit"
            )

    def params(self, temperature: float) -> SamplingParams:
        """How the target writes the answers, and how tau is decoded."""
        return SamplingParams(temperature, max_new_tokens=self.max_new_tokens)


def shrunk(config: Any) -> Any:
    """Two steps of a recipe on a tiny random target, whose states aren't worth keeping: shows that
    it composes and runs.
    """
    prompts_from = text_at_hand(config.heldout.prompts or config.data)
    data = config.data if Path(config.data).exists() else prompts_from
    few = HeldOutPrompts(prompts=prompts_from, limit=2, prompt_tokens=8, max_new_tokens=8)
    text = replace(config.text, max_length=min(config.text.max_length, 256))
    short: dict[str, Any] = {"steps": 2, "warmup": 0, "batch_size": 2}
    short |= {"cache": Cache()} if hasattr(config, "cache") else {}
    return replace(config, data=data, heldout=few, text=text, **short)


def draft_figures(
    heldout: "HeldOut", objective: Distillation, snapshot: Snapshot[PreTrainedModel], K: int
) -> Evaluate:
    """Loss, alpha and agreement on the target's answers, tau and MBSU, of a draft LM in training;
    decoded, by K tokens a round, with copies of it.
    """
    size = vocab_size(heldout.tokenizer)
    teacher = StateTeacher(heldout.target, size)

    def measure(batch: Batch) -> StepOutput:
        # Looked up now: what cuts the draft over processes puts a method of its own in its place.
        return objective.measure(batch, teacher)

    def evaluate() -> dict[str, float]:
        drafter = lm_drafter(snapshot.take(), size)
        return heldout.means(measure) | heldout.worth(drafter, K, heldout.target)

    return evaluate


def open_heldout(
    config: Any,
    params: SamplingParams,
    accelerator: Accelerator,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    run: Run,
) -> "HeldOut":
    """The held-out prompts of a recipe with the target's answers, which the run keeps; errors of
    `prompts_for_development` pass.
    """
    asked = config.heldout
    size = {"limit": asked.limit, "prompt_tokens": asked.prompt_tokens}
    prompts = prompts_for_development(asked.prompts or config.data, tokenizer, **size)
    rows = config.batch_size, asked.batch_size
    heldout = HeldOut(accelerator, target, tokenizer, prompts, params, *rows)
    heldout.write_answers(run.cache / "heldout.safetensors")
    return heldout


@dataclass
class HeldOut:
    """Prompts that nobody trains on, and the target's own answers to them."""

    accelerator: Accelerator
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: list[list[int]]
    params: SamplingParams  # how it answers, and how tau is decoded
    batch_size: int  # rows of the teacher-forced passes
    rows: int = 16  # that are decoded together
    warned: bool = False  # that they are few

    def write_answers(self, cache: Path) -> None:
        """Have the target answer, or read `cache`. Before `means`, by all processes together."""
        with in_company(self.target):
            if self.accelerator.is_main_process and not cache.exists():
                decoder = Decoder(self.target, self.tokenizer, batch_size=self.rows)
                answers = decoder.generate(self.prompts, self.params)
                written = [made.tokens for made in answers]
                Examples.answered(zip(self.prompts, written, strict=True)).save(cache)
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

    def means(self, score: Score) -> dict[str, float]:
        """Means over contexts that the target wrote: alpha's definition asks for just these."""
        return mean_output(self.accelerator, score, self.answers, len(self.answers))

    def worth(self, drafter: Drafter, K: int, target: PreTrainedModel) -> dict[str, float]:
        """`tau` by chains of K tokens, and `mbsu`: by the bytes that draft and target read."""
        tau, c_bytes = self.tau(drafter, K), drafter.parameter_bytes / weights_read(target)
        return {"tau": tau, "mbsu": tau / (1 + K * c_bytes)}

    def tau(self, drafter: Drafter, K: int, tree: str = "chain") -> float:
        """Block efficiency: tokens emitted a target call. The processes share the prompts."""
        accelerator = self.accelerator
        mine = range(accelerator.process_index, len(self.prompts), accelerator.num_processes)
        how: dict[str, Any] = {"K": K, "tree": tree, "batch_size": self.rows}
        decoder = Decoder(self.target, self.tokenizer, drafter, **how)
        with in_company(self.target):
            made = decoder.generate([self.prompts[i] for i in mine], self.params, list(mine))
        counts = gather_object([(m.counters.emitted, m.counters.rounds) for m in made])
        emitted, rounds = zip(*counts, strict=True)
        if len(counts) < FEW and not self.warned:
            self.warned = True
            low, high = ratio_interval(emitted, rounds)
            where = f"from {low:.2f} to {high:.2f}" if len(counts) > 1 else "anywhere"
            if accelerator.is_main_process:
                warnings.warn(
                    f"got {len(counts)} held-out prompts, by which tau now is {where} (95%, over "
                    f"such prompts; wider as more is kept); expected at least {FEW}; raise "
                    "heldout.limit, or give more rows by heldout.prompts",
                    stacklevel=2,
                )
        return float(sum(emitted) / max(1, sum(rounds)))
