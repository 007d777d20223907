"""The smallest language model, its text and its settings: what the loop and whole jobs train."""

import math
from pathlib import Path

import torch
from torch import nn

from draftsmith.train.run.loop import Objective, StepOutput
from draftsmith.train.run.settings import Settings
from draftsmith.train.text.batches import Batch

VOCAB, WIDTH, ROWS = 23, 12, 8


class Sequences:
    """Random sequences with unequal masks; a step is `ROWS` of them, however it is divided."""

    def __init__(self, rows: int = ROWS, trained: bool = True) -> None:
        self.rows = rows
        self.trained = trained

    def batch(self, step: int, micro: int, rank: int, *, accumulation: int, world: int) -> Batch:
        draw = torch.Generator().manual_seed(step)
        ids = torch.randint(0, VOCAB, (self.rows, WIDTH), generator=draw)
        lengths = torch.randint(2, WIDTH, (self.rows,), generator=draw)
        mask = (torch.arange(WIDTH) < lengths[:, None]) & self.trained
        share = self.rows // (accumulation * world)
        first = (micro * world + rank) * share
        part = slice(first, first + share)
        positions = torch.arange(WIDTH).expand(share, -1)
        return Batch(ids[part], positions, mask[part], None, tuple(range(first, first + share)))


class Bigram(Objective):
    """The smallest language model, with dropout so that its randomness is tested too."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.table = nn.Embedding(VOCAB, 16)
        self.table.weight.data = torch.randn(VOCAB, 16, generator=draw)
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout(dropout)
        self.mix = nn.Linear(16, VOCAB)
        self.mix.weight.data = torch.randn(VOCAB, 16, generator=draw)
        self.mix.bias.data.zero_()
        self.seen: list[dict[str, float]] = []
        self.poison_at = -1
        self.poison = "loss"
        self.calls = 0

    def forward(self, batch: Batch) -> StepOutput:
        hidden = self.drop(self.norm(self.table(batch.input_ids)))
        logits = self.mix(hidden).float()[:, :-1]
        loss = nn.functional.cross_entropy(
            logits.transpose(1, 2), batch.input_ids[:, 1:], reduction="none"
        )
        loss = (loss * batch.loss_mask[:, :-1]).sum()
        if self.calls == self.poison_at:
            # sqrt has an infinite slope at 0: a finite loss with a gradient that isn't.
            zero = self.mix.weight.sum() * 0
            loss = loss * math.nan if self.poison == "loss" else loss + zero.sqrt()
        self.calls += self.training
        right = (logits.argmax(-1) == batch.input_ids[:, 1:]) & batch.loss_mask[:, :-1]
        return StepOutput(loss, batch.loss_mask.sum(), {"alpha": right.sum().float()})

    def observe(self, means: dict[str, float]) -> None:
        self.seen.append(means)


def settings(folder: Path, **changes: object) -> Settings:
    values = {"steps": 5, "dtype": "float32", "eval_every": 0, "save_every": 0, "lr": 0.1}
    return Settings(out=str(folder), **(values | changes))  # type: ignore[arg-type]
