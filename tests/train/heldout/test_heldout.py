"""Held-out means: each answer once, however the answers are divided into batches and processes."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from distilled import distilled
from tiny_heads import text
from torch import Tensor

from draftsmith.train.heldout.heldout import mean_output
from draftsmith.train.run.loop import StepOutput
from draftsmith.train.text.batches import Batch


def process(rank: int, world: int, totals: list[Tensor]) -> SimpleNamespace:
    """One of several processes, as far as `mean_output` asks; totals: what each would sum."""

    def reduce(mine: Tensor) -> Tensor:
        totals.append(mine)
        return sum(totals)

    place = {"process_index": rank, "num_processes": world, "device": torch.device("cpu")}
    return SimpleNamespace(**place, autocast=nullcontext, reduce=reduce)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("batch_size", "world"), [(1, 1), (3, 1), (4, 2), (2, 3), (30, 2)])
def test_every_answer_counts_once(packing: bool, batch_size: int, world: int) -> None:
    objective = distilled().eval()
    whole = text(batch_size=1, packing=packing)
    one = mean_output(process(0, 1, []), objective.measure, whole, len(whole))
    batches = text(batch_size=batch_size, packing=packing)
    totals: list[Tensor] = []
    for rank in range(world):
        found = mean_output(process(rank, world, totals), objective.measure, batches, len(batches))
    assert found == pytest.approx(one, rel=1e-6)


def test_no_more_than_an_epoch_and_no_more_than_asked() -> None:
    seen: list[Tensor] = []

    def score(batch: Batch) -> StepOutput:
        seen.append(batch.places[batch.loss_mask])
        return StepOutput(torch.zeros(()), batch.loss_mask.sum(), {})

    def places(batch_size: int, asked: int) -> Tensor:
        seen.clear()
        mean_output(process(0, 1, []), score, text(batch_size=batch_size), asked)
        return torch.cat(seen)

    epoch = len(text())
    assert torch.equal(places(3, 4), places(1, 4))
    assert torch.equal(places(3, 1000), places(1, epoch))
    assert len(places(3, 1000).unique()) == len(places(3, 1000)) > len(places(3, 4))
