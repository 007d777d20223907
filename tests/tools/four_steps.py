"""A teacher of four steps and a batch, for tests of objectives."""

import torch

from draftsmith.train.objectives.distillation import Losses, Stages, stages
from draftsmith.train.text.batches import Batch


def some_batch(rows: int = 3, width: int = 14) -> Batch:
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 300, (rows, width), generator=draw)
    mask = torch.rand(rows, width, generator=draw) < 0.6
    mask[:, -1] = False
    return Batch(ids, torch.arange(width).expand(rows, -1), mask, None, tuple(range(rows)))


def four_steps(**losses: object) -> Stages:
    return stages(Losses(**losses), 4)  # type: ignore[arg-type]
