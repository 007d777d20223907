"""A draft that learns from what was served, of either kind: a draft LM, or an EAGLE head.

The same objectives as offline; the target's side comes with the requests (`served.py`).

Legend: B rows, T positions.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.serve.versions import LEARNING
from draftsmith.models.draft_lm import recast
from draftsmith.models.folder.drafter_folder import DrafterFolder, open_drafter, save_drafter
from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.target import vocab_size
from draftsmith.train.drafts.draft_start import TINY, DraftSource, fresh_draft, place
from draftsmith.train.drafts.eagle_start import EagleSource, open_head
from draftsmith.train.live.batches import kept_states, listed_rows
from draftsmith.train.objectives.distillation import Distillation, Losses
from draftsmith.train.objectives.eagle import Eagle1Objective, Eagle3Objective, EagleObjective
from draftsmith.train.teachers.teachers import Teacher
from draftsmith.train.text.batches import Batch

AT_ONE = SamplingParams(1.0)  # what was kept of the target is its law at temperature 1


@dataclass(kw_only=True)
class Lessons(Losses):
    """The part of a recipe that says what the draft is trained to, one from served requests."""

    kind: str = "lm"  # of the drafter: lm | eagle1 | eagle3
    loss: str = "jsd"
    steps: int
    unroll: int = 4  # of EAGLE heads: S of EAGLE-3, and the depths that are measured
    step_decay: float = 0.8  # of EAGLE-3, from one step to the next
    token_weight: float = 0.1  # of EAGLE-1's divergence
    noise: float = 0.2  # of EAGLE-1, on the target's states


@dataclass(frozen=True)
class Learner:
    """A draft in fp32, and what it is trained for."""

    folder: DrafterFolder  # where it began
    module: PreTrainedModel | Eagle
    objective: Distillation | EagleObjective

    @property
    def kind(self) -> str:
        return self.folder.kind

    def alpha(self, batch: Batch, teacher: Teacher | None = None) -> tuple[float, float]:
        """(sum of sum_v min(p, q), positions) of a batch; of heads over all depths.

        teacher: of a draft LM, exact rows in place of the likeliest tokens, against which alpha is
        an upper bound.
        """
        self.objective.eval()
        if isinstance(self.objective, Distillation):
            output = self.objective.measure(batch, teacher)
            return output.metrics["alpha"].item(), output.tokens.item()
        sums = self.objective.measure(batch, kept_states).metrics
        depths = range(self.objective.steps)
        alpha = sum(sums[f"alpha_{depth}"].item() for depth in depths)
        return alpha, sum(sums[f"count_{depth}"].item() for depth in depths)

    def save(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        mark: dict[str, Any],
        made: dict[str, Any],
        dtype: str,
    ) -> None:
        """A drafter folder with the weights as they are now; the module stays as it is.

        mark: the target's fingerprint; made: the provenance.
        """
        model = copy.deepcopy(self.module).cpu()
        recast(model, getattr(torch, dtype))
        save_drafter(
            folder,
            kind=self.kind,
            model=model,
            tokenizer=tokenizer,
            target_fingerprint=mark,
            provenance=made,
            defaults=self.folder.meta["defaults"],
            vocab=self.folder.vocab,
        )


def open_learner(
    path: str | Path,
    lessons: Lessons,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    mark: dict[str, Any],
) -> Learner:
    """The drafter in a folder, ready to learn, on the target's device.

    mark: the target's fingerprint.

    Raises:
        ValueError: what `open_drafter` and the objectives refuse, or another kind.
    """
    folder = open_drafter(
        path, mark, target_tokenizer=tokenizer, target_config=target.config.get_text_config()
    )
    if folder.kind != lessons.kind or lessons.kind not in LEARNING:
        raise ValueError(
            f"got drafter={path} of kind {folder.kind} and kind={lessons.kind}, expected the same, "
            f"one of {', '.join(LEARNING)}"
        )
    if folder.kind == "lm":
        draft = place(folder.model("float32"), target.device).requires_grad_(True)
        size = vocab_size(tokenizer)
        objective = Distillation(draft, listed_rows, lessons, vocab_size=size, warp=AT_ONE)
        return Learner(folder, draft, objective.to(target.device))
    if lessons.second_loss or lessons.beta != Losses.beta:
        raise ValueError(
            f"got second_loss={lessons.second_loss!r} and beta={lessons.beta} with a draft of kind "
            f"{folder.kind}, expected neither: they are for draft models; leave them out"
        )
    head = folder.head("float32")
    assert isinstance(head, Eagle)
    place(head, target.device).bind(target)
    shared: dict[str, Any] = {"steps": lessons.unroll, "loss": lessons.loss}
    make: Callable[..., EagleObjective] = Eagle3Objective
    if folder.kind == "eagle1":
        make = Eagle1Objective
        shared |= {"token_weight": lessons.token_weight, "noise": lessons.noise}
    else:
        shared["step_decay"] = lessons.step_decay
    made = make(head, target, tokenizer, kept_states, **shared)
    return Learner(folder, head, made.to(target.device))


def tiny_drafter(
    path: str | Path,
    lessons: Lessons,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    mark: dict[str, Any],
) -> None:
    """A random drafter folder for a random target: tries a recipe without its weights."""
    sizes = DraftSource(**TINY)
    model: Any
    if lessons.kind == "lm":
        model = fresh_draft(sizes, target, tokenizer, seed=0)
    else:
        source = EagleSource(version=int(lessons.kind[-1]))
        counts_V = torch.ones(target.get_output_embeddings().weight.shape[0])
        model = open_head(source, target, tokenizer, counts_V, seed=0)
    save_drafter(
        path,
        kind=lessons.kind,
        model=model,
        tokenizer=tokenizer,
        target_fingerprint=mark,
        provenance={},
        defaults={},
    )
