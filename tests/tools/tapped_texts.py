"""Texts and batches whose states are cached."""

import torch

from draftsmith.train.teachers.store import TokenShards
from draftsmith.train.text.batches import Batch, Batches, Examples

LENGTH = 40

SHARD_BYTES = 60_000  # of fp32: three states of 32 are 384 bytes a token


def examples(count: int = 24, seed: int = 0) -> Examples:
    """Documents and prompts with answers, some of them longer than `LENGTH`."""
    draw = torch.Generator().manual_seed(seed)
    pairs = []
    for number in range(count):
        length = int(torch.randint(3, 2 * LENGTH, (), generator=draw))
        prompt = 0 if number % 3 else length // 3
        ids = torch.randint(4, 300, (length,), generator=draw).tolist()
        pairs.append((ids, [False] * prompt + [True] * (length - prompt)))
    return Examples.collect(pairs)


def batches(packing: bool = False, **changed) -> Batches:
    options = {"examples": examples(), "max_length": LENGTH} | changed
    return Batches(**options, batch_size=3, seed=0, packing=packing, pad_id=1)


def contents(cache: TokenShards) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(cache.folder.iterdir())}


def some_batches(packing: bool) -> list[Batch]:
    text = batches(packing)
    return [text.batch(step, 0, 0, accumulation=1, world=1) for step in range(5)]
