"""The drafts of one learner: the one in training, the one that serves, and in a replay those that
they are measured beside.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafters.base import Drafter
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.serve.buffer import Served
from draftsmith.models.disk.provenance import provenance
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.target import TargetSpec, vocab_size
from draftsmith.train.live.batches import as_batch, kept_states
from draftsmith.train.live.learner import Learner, Lessons, open_learner, tiny_drafter
from draftsmith.train.live.publishing import Alpha
from draftsmith.train.run.settings import Settings
from draftsmith.train.teachers.teachers import StateTeacher, Teacher


@dataclass(kw_only=True)
class DraftSettings(Settings, Lessons):
    """The part of a recipe that says which draft learns, and what."""

    target: TargetSpec
    drafter: str  # the drafter folder that the server was started with
    max_length: int = 1024  # tokens of a request that are read


class OnlineDrafts:
    """`publishing.Drafts`.

    Args:
        path: what the draft in training begins as; None: the first drafter.
        argv: of the run, for the provenance.

    Errors of `open_learner` pass.
    """

    def __init__(
        self,
        config: DraftSettings,
        accelerator: Accelerator,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        path: Path | None,
        argv: list[str],
    ) -> None:
        self.config, self.accelerator, self.argv = config, accelerator, argv
        self.target, self.tokenizer = target, tokenizer
        self.mark = fingerprint(target, tokenizer, config.target.path)
        if config.target.shrink:
            tiny_drafter(config.drafter, config, target, tokenizer, self.mark)
        self.batch_of = partial(
            as_batch,
            pad_id=tokenizer.pad_token_id or 0,
            max_length=config.max_length,
            dtype=target.dtype,
        )
        self.learner = self.open(path)
        if config.gradient_checkpointing:
            if config.kind != "lm":
                raise ValueError(
                    f"got gradient_checkpointing=true with kind={config.kind}, expected false: a "
                    "head has one layer"
                )
            draft: Any = self.learner.module
            draft.gradient_checkpointing_enable({"use_reentrant": False})
        self.beside = {"online": self.learner}  # by the names of a replay's arms
        self.steps = 0  # that the draft in training has made
        self.swapped: Callable[[Drafter, int], None] | None = None

    def open(self, path: Path | None) -> Learner:
        """A draft as it is in a folder, None for the first one."""
        config = self.config
        where = path or config.drafter
        return open_learner(where, config, self.target, self.tokenizer, self.mark)

    def drafter(self, path: Path | None) -> Drafter:
        """The same to decode with."""
        found = load_drafter(str(path or self.config.drafter), self.target, self.tokenizer)
        assert found is not None
        return found

    def candidate(self, served: Served) -> Alpha:
        return self._alpha(self.learner, served)

    def serving(self, served: Served) -> Alpha:
        return self._alpha(self.beside["online"], served)

    def serve(self, path: Path | None) -> None:
        self.beside["online"] = self.open(path)
        if self.swapped is not None:
            self.swapped(self.drafter(path), int(path.name) if path else 0)

    def save(self, folder: Path, alpha: float) -> None:
        made = provenance(
            recipe=dict(arg.split("=", 1) for arg in self.argv).get("recipe"),
            argv=self.argv,
            seeds={"run": self.config.seed},
            data_hash=None,  # of a stream that nobody keeps
            steps=self.steps,
            acceptance=alpha,
        )
        self.learner.save(folder, self.tokenizer, self.mark, made, self.config.save_dtype)

    def go_back(self) -> None:
        self.learner.module.load_state_dict(self.beside["online"].module.state_dict())

    def compare_with(self, ceiling: str) -> None:
        """Have `arms` tell of the first drafter, too, and of `ceiling`, if that is one."""
        self.beside = {"frozen": self.open(None), **self.beside}
        if ceiling:
            self.beside["ceiling"] = self.open(Path(ceiling))

    def arms(self, served: Served) -> dict[str, Alpha]:
        """Exact alpha of each draft on a request that has its states."""
        exact = StateTeacher(self.target, vocab_size(self.tokenizer), kept_states)
        return {arm: self._alpha(one, served, exact) for arm, one in self.beside.items()}

    @torch.no_grad()
    def _alpha(self, learner: Learner, served: Served, teacher: Teacher | None = None) -> Alpha:
        batch = self.batch_of([served], [0]).to(self.accelerator.device)
        with self.accelerator.autocast():
            return learner.alpha(batch, teacher)
