"""Drafts that learn from what was served, draft LMs or EAGLE heads: the one in training, the one
that serves, and in a replay those that they are measured beside. The objectives are those of
offline training; the target's side comes with the requests (`batches.py`).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafters.load import composed, load_drafter, moved
from draftsmith.decode.drafting.base import Drafter
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.serve.buffer import Served
from draftsmith.decode.serve.versions import learning_kinds
from draftsmith.models.disk.provenance import provenance
from draftsmith.models.draft_lm import recast
from draftsmith.models.folder.drafter_folder import DrafterFolder, open_drafter, save_drafter
from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.heads.head import Head, family
from draftsmith.models.ngram_cache import NgramCache
from draftsmith.models.target import vocab_size
from draftsmith.models.tokenizer import load_tokenizer
from draftsmith.models.vocab_map import Spelling
from draftsmith.train.drafts.start import place
from draftsmith.train.live.batches import Alpha, ServedBatch, as_batch, kept_states, listed_rows
from draftsmith.train.live.respelled import Hybrid, respelled
from draftsmith.train.objectives.distillation import Distillation, Losses, stages
from draftsmith.train.objectives.eagle import EagleObjective, Unroll
from draftsmith.train.run.settings import Settings
from draftsmith.train.teachers.teachers import StateTeacher, Teacher
from draftsmith.train.text.batches import Batch

AT_ONE = SamplingParams(1.0)  # what was kept of the target is its law at temperature 1


@dataclass(frozen=True)
class Lessons:
    """Which draft learns, and what: parts of a recipe."""

    drafter: str
    kind: str
    loss: Losses
    unroll: Unroll
    steps: int = 1
    max_length: int = 1024
    ngram: float = 0.0


@dataclass(frozen=True)
class Learner:
    """A draft in fp32, the folder that it began as, and what it is trained for."""

    folder: DrafterFolder
    module: PreTrainedModel | Head
    objective: Distillation | EagleObjective

    def alpha(self, batch: Batch, teacher: Teacher | None = None) -> Alpha:
        """Of a batch; of heads over all depths. teacher: of a draft LM, exact rows in place of the
        likeliest tokens, against which alpha is an upper bound.
        """
        self.objective.eval()
        if isinstance(self.objective, Distillation):
            output = self.objective.measure(batch, teacher)
            return output.metrics["alpha"].item(), output.tokens.item()
        sums = self.objective.measure(batch, kept_states).metrics
        alpha, count = (
            sum(sums[f"{name}_{depth}"].item() for depth in range(self.objective.steps))
            for name in ("alpha", "count")
        )
        return alpha, count


def open_learner(
    path: str | Path,
    lessons: Lessons,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    mark: dict[str, Any],
    cache: NgramCache | None = None,
) -> Learner:
    """The drafter in a folder, ready to learn, on the target's device. cache: of a draft LM with
    other tokens. ValueError for what `open_drafter` and the objectives refuse, or another kind.
    """
    folder = open_drafter(
        path,
        mark,
        target_tokenizer=tokenizer if cache is None else None,
        target_config=target.config.get_text_config(),
    )
    if folder.kind != lessons.kind or lessons.kind not in learning_kinds():
        raise ValueError(
            f"got drafter={path} of kind {folder.kind} and kind={lessons.kind}, expected the same, "
            f"one of {', '.join(learning_kinds())}"
        )
    module: Any = folder.model("float32") if folder.kind == "lm" else folder.head("float32")
    module = place(module, target.device).requires_grad_(True)
    objective = make_objective(lessons, module, target, tokenizer, cache).to(target.device)
    return Learner(folder, module, objective)


def make_objective(
    lessons: Lessons,
    draft: PreTrainedModel | Eagle,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: NgramCache | None = None,
) -> Distillation | EagleObjective:
    """What the recipe trains for; ValueError for what the objectives refuse."""
    if isinstance(draft, PreTrainedModel):
        size = vocab_size(tokenizer)
        loss = stages(lessons.loss, lessons.steps)
        if cache is not None:
            return Hybrid(draft, cache, loss, lessons.ngram)
        return Distillation(draft, listed_rows, loss, vocab_size=size, warp=AT_ONE)
    if lessons.loss != Losses(name=lessons.loss.name):
        raise ValueError(
            f"got {lessons.loss} with a draft of kind {lessons.kind}, expected loss.name alone: "
            "the rest is for draft models; leave it out"
        )
    draft.bind(target)
    objective_of = family(lessons.kind, "train.objectives", "Objective")
    given = (lessons.unroll, draft, target, tokenizer, kept_states)
    return objective_of(*given, loss=lessons.loss.name)


@dataclass(eq=False)
class OnlineDrafts:
    """The draft in training, and the one that serves. Errors of `open_learner` pass."""

    lessons: Lessons
    settings: Settings
    accelerator: Accelerator
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    mark: dict[str, Any]  # the target's fingerprint
    path: Path | None  # what the first begins as, None for the first drafter
    argv: list[str]  # of the run, for the provenance

    def __post_init__(self) -> None:
        lessons = self.lessons
        batch_of: Callable[..., ServedBatch] = partial(
            as_batch,
            pad_id=self.tokenizer.pad_token_id or 0,
            max_length=lessons.max_length,
            dtype=self.target.dtype,
        )
        looked, self.first = composed(lessons.drafter)
        self.own, self.cache, self.batch_of = self.tokenizer, None, batch_of
        if looked:
            self.own = load_tokenizer(self.first)
            spelled = Spelling(self.own), Spelling(self.tokenizer)
            self.cache = cache = NgramCache(*spelled, vocab_size(self.tokenizer))
            self.batch_of = lambda *given, **how: respelled(batch_of(*given, **how), cache)
        self.learner = self.open(self.path)
        if self.settings.gradient_checkpointing:
            if lessons.kind != "lm":
                raise ValueError(
                    f"got gradient_checkpointing=true with kind={lessons.kind}, expected false: a "
                    "head has one layer"
                )
            draft: Any = self.learner.module
            draft.gradient_checkpointing_enable({"use_reentrant": False})
        self.beside = {"online": self.learner}  # by the names of a replay's arms
        self.steps = 0  # that the draft in training has made
        self.swapped: Callable[[Drafter, int], None] | None = None

    def open(self, path: Path | None) -> Learner:
        """A draft as it is in a folder, None for the first one."""
        given = self.lessons, self.target, self.tokenizer, self.mark, self.cache
        return open_learner(path or self.first, *given)

    def drafter(self, path: Path | None) -> Drafter:
        """The same to decode with."""
        name = moved(self.lessons.drafter, path)
        found = load_drafter(name, self.target, self.tokenizer)
        assert found is not None
        return found

    def candidate(self, served: Served) -> Alpha:
        """Of the draft in training, on a request."""
        return self._alpha(self.learner, served)

    def serving(self, served: Served) -> Alpha:
        """Of the one that serves."""
        return self._alpha(self.beside["online"], served)

    def serve(self, path: Path | None) -> None:
        """From now on what lies there serves; None: the first drafter."""
        self.beside["online"] = self.open(path)
        if self.swapped is not None:
            self.swapped(self.drafter(path), int(path.name) if path else 0)

    def save(self, folder: Path, alpha: float) -> None:
        """Write the draft in training as a drafter folder; it stays as it is. alpha: held-out."""
        learner, settings = self.learner, self.settings
        model = copy.deepcopy(learner.module).cpu()
        recast(model, getattr(torch, settings.save_dtype))
        # Nobody keeps the stream's text, so it has no hash.
        made = provenance(self.argv, settings.seed, None, self.steps, alpha)
        save_drafter(
            folder,
            kind=learner.folder.kind,
            model=model,
            tokenizer=self.own,
            target_fingerprint=self.mark,
            provenance=made,
            defaults=learner.folder.meta["defaults"],
            vocab=learner.folder.vocab,
        )

    def go_back(self) -> None:
        """Give the draft in training the weights of the one that serves."""
        self.learner.module.load_state_dict(self.beside["online"].module.state_dict())

    def compare_with(self, ceiling: str) -> None:
        """Have `arms` tell of the first drafter, too, and of `ceiling`, if that is one."""
        self.beside = {"frozen": self.open(None), **self.beside}
        if ceiling:
            self.beside["ceiling"] = self.open(Path(ceiling))

    def arms(self, served: Served) -> dict[str, Alpha]:
        """Exact alpha of each draft on a request that has its states; of one with other tokens as
        in training, over those that both have.
        """
        exact = None
        if self.cache is None:
            exact = StateTeacher(self.target, vocab_size(self.tokenizer), kept_states)
        return {arm: self._alpha(one, served, exact) for arm, one in self.beside.items()}

    @torch.no_grad()
    def _alpha(self, learner: Learner, served: Served, teacher: Teacher | None = None) -> Alpha:
        batch = self.batch_of([served], [0]).to(self.accelerator.device)
        with self.accelerator.autocast():
            return learner.alpha(batch, teacher)
