"""Tokenised examples, and the batches of a step.

`Batches` is a pure function of (step, micro-batch, rank): a resumed run needs no saved iterator.

Shapes: B rows, T positions.
"""

import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._pytree import tree_map_only

from draftsmith.models.disk.store import save_shard


@dataclass(frozen=True, eq=False)
class Examples:
    """Tokenised examples, flat: cheap to hash, to save and to map into memory."""

    ids: Tensor  # [total] int32, all examples one after the other
    trained: Tensor  # [total] bool, this token is something the draft must learn to write
    starts: Tensor  # [n+1] int64, where each example begins; the last entry is the total

    def __post_init__(self) -> None:
        shapes = self.ids.shape, self.trained.shape
        assert shapes == ((int(self.starts[-1]),),) * 2, (shapes, self.starts)

    @classmethod
    def collect(cls, pairs: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> "Examples":
        """From (ids, trained) of each example. Raises ValueError when there are none."""
        kept = [(np.asarray(ids, np.int32), np.asarray(own, np.bool_)) for ids, own in pairs]
        if not kept:
            raise ValueError("got no examples, expected at least one; is the data's split empty?")
        assert all(len(ids) == len(own) for ids, own in kept)
        ids, own = (torch.from_numpy(np.concatenate(side)) for side in zip(*kept, strict=True))
        starts = np.cumsum([0, *(len(ids) for ids, _ in kept)], dtype=np.int64)
        return cls(ids, own, torch.from_numpy(starts))

    @classmethod
    def answered(cls, pairs: Iterable[tuple[list[int], list[int]]]) -> "Examples":
        """From (prompt, answer) of each example, whose answers are trained."""
        return cls.collect((p + a, [False] * len(p) + [True] * len(a)) for p, a in pairs)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def example(self, i: int) -> tuple[Tensor, Tensor]:
        """(ids [T] int64, trained [T] bool) of example i."""
        assert 0 <= i < len(self), (i, len(self))
        begin, end = int(self.starts[i]), int(self.starts[i + 1])
        return self.ids[begin:end].long(), self.trained[begin:end]

    def prompt(self, i: int) -> list[int]:
        """The ids before the first trained token of example i: what a generation starts from."""
        ids, trained = self.example(i)
        first = int(trained.int().argmax()) if trained.any() else len(ids)
        return ids[:first].tolist()

    def parted(self, last: int) -> tuple["Examples", "Examples"]:
        """All but the last so many, and these; at most half are."""
        first = len(self) - min(last, len(self) // 2)
        cut, starts = int(self.starts[first]), self.starts
        kept = Examples(self.ids[:cut], self.trained[:cut], starts[: first + 1])
        return kept, Examples(self.ids[cut:], self.trained[cut:], starts[first:] - cut)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for tensor in vars(self).values():
            digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    def save(self, path: str | Path) -> None:
        """One safetensors file, whole or not at all."""
        save_shard(Path(path), vars(self))

    @classmethod
    def load(cls, path: str | Path) -> "Examples":
        """Raises ValueError on a file that is missing, truncated or something else."""
        try:
            return cls(**load_file(path))
        except (OSError, SafetensorError, TypeError) as error:
            raise ValueError(
                f"{path}: not a file of saved examples ({error!r}); expected tensors ids, trained, "
                "starts; tokenise the data again"
            ) from error


class Cut(NamedTuple):
    """What `cut_long` leaves: piece j is tokens `spans[j]`, and comes from example `origin[j]`."""

    spans: np.ndarray  # [pieces, 2] int64, begin and end among all tokens
    origin: np.ndarray  # [pieces] int64


def cut_long(examples: Examples, max_length: int) -> Cut:
    """Pieces of at most `max_length` tokens; nothing is copied. A document (every token trained)
    becomes chunks, each a document of its own; anything with a prompt is truncated, since its end
    without its beginning would be another example. Pieces in which no trained token can be
    predicted are dropped; ValueError where nothing is left.
    """
    if max_length < 2:
        raise ValueError(f"max_length: got {max_length}, expected at least 2")
    spans: list[tuple[int, int]] = []
    origin: list[int] = []
    trained = examples.trained.numpy()
    for i, (begin, end) in enumerate(pairwise(examples.starts.tolist())):
        is_document = end - begin > max_length and bool(trained[begin:end].all())
        for first in range(begin, end if is_document else begin + 1, max_length):
            last = min(first + max_length, end)
            if trained[first + 1 : last].any():
                spans.append((first, last))
                origin.append(i)
    if not spans:
        raise ValueError(
            f"none of {len(examples)} examples has a trained token within max_length={max_length}; "
            "raise max_length, or look at one with `python -m draftsmith data show`"
        )
    return Cut(np.array(spans), np.array(origin))


@dataclass(frozen=True)
class Batch:
    """One micro-batch. `attention_mask` needs sdpa: eager attention adds a bool mask as numbers."""

    input_ids: Tensor  # [B, T] int64, right-padded
    position_ids: Tensor  # [B, T] int64, from 0 in each document; padding counts on
    loss_mask: Tensor  # [B, T] bool: token t+1 is trained and of the same document as token t
    attention_mask: Tensor | None  # [B, 1, T, T] bool, True = may attend; None: plain causal
    rows: tuple[int, ...]  # the examples in it, by their index before cutting
    # [B, T] int64, each token's place among all tokens of the examples, -1 for padding; None for
    # text that isn't in the examples.
    places: Tensor | None = None

    @property
    def inputs(self) -> dict[str, Tensor | None]:
        """What a model's body reads."""
        return {name: vars(self)[name] for name in ("input_ids", "position_ids", "attention_mask")}

    @property
    def lengths(self) -> Tensor:
        """[B, T] how long the document is that each token is of; without `places` with padding."""
        first_BT = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        first_BT = first_BT - self.position_ids
        real_BT = torch.ones_like(first_BT) if self.places is None else (self.places >= 0).long()
        return torch.zeros_like(first_BT).scatter_add(1, first_BT, real_BT).gather(1, first_BT)

    def to(self, device: torch.device | str) -> Self:
        return replace(self, **tree_map_only(Tensor, lambda part: part.to(device), vars(self)))


@dataclass(frozen=True)
class EpochOrder:
    """The order of `count` things over all epochs: each is one permutation of them, seeded by
    (seed, epoch), and the next follows without a gap.
    """

    count: int
    seed: int

    def take(self, first: int, many: int) -> list[int]:
        """The next `many` after the first `first`."""
        epochs, places = np.divmod(np.arange(first, first + many), self.count)
        orders = {e: _order(self.count, self.seed, int(e)) for e in np.unique(epochs)}
        return [int(orders[e][place]) for e, place in zip(epochs, places, strict=True)]


@lru_cache(maxsize=8)  # a step touches two epochs at most, unless there is less than a step of all
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


@dataclass(eq=False)
class Batches:
    """Which examples train at which step: a pure function of (step, micro, rank).

    Each step takes the next batch_size * world * accumulation sequences (examples, or packed bins
    of them) of the `EpochOrder`. How that number is divided changes no step. Unpacked examples are
    dealt out by length: micro-batches take them from the longest on, and within one the processes
    in turn, so that rows of a batch are padded little and no process waits long for another.
    """

    examples: Examples
    batch_size: int
    max_length: int
    seed: int
    # Fill sequences of exactly `max_length` with several documents, which don't see each other.
    # Otherwise one example a row, padded to the longest of the batch.
    packing: bool
    pad_id: int  # any: padding is never trained nor attended by what is

    def __post_init__(self) -> None:
        self.cut = cut_long(self.examples, self.max_length)
        lengths = np.diff(self.cut.spans)[:, 0].tolist()
        alone = [[j] for j in range(len(lengths))]
        self._bins = pack(lengths, self.max_length) if self.packing else alone
        self._order = EpochOrder(len(self._bins), self.seed)

    def __len__(self) -> int:
        """Sequences an epoch."""
        return len(self._bins)

    def amount(self, steps: int, size: int) -> str:
        """What there is to train on, and how often `steps` of `size` sequences go through it."""
        rows, of = len(np.unique(self.cut.origin)), len(self.examples)
        counted = self.examples.trained.numpy().cumsum(dtype=np.int64)
        first, last = self.cut.spans.T
        tokens = int((counted[last - 1] - counted[first]).sum())  # a first one isn't predicted
        return (
            f"{rows:,} rows{f' of {of:,}' if rows < of else ''}, {tokens:,} trained tokens, "
            f"{len(self):,} sequences: {steps:,} steps of {size:,} are "
            f"{steps * size / len(self):.2f} epochs"
        )

    def batch(self, step: int, micro: int, rank: int, *, accumulation: int, world: int) -> Batch:
        """The micro-batch `micro` of `step` on `rank`. Costs the batch alone, at any step."""
        assert 0 <= micro < accumulation, (micro, accumulation)
        assert 0 <= rank < world, (rank, world)
        size, many = self.batch_size, accumulation * world
        all_ = self.sequences(step * size * many, size * many)
        if not self.packing and many > 1:
            all_.sort(key=lambda bin_: -int(np.diff(self.cut.spans[bin_]).sum()))
            # There and back, as teams are chosen: else the first would always get the longer ones.
            turns = [world * i + (rank, world - 1 - rank)[i % 2] for i in range(size)]
            return self._form([all_[micro * world * size + turn] for turn in turns])
        first = (micro * world + rank) * size
        return self._form(all_[first : first + size])

    def sequences(self, first: int, many: int) -> list[list[int]]:
        """The pieces of `cut` that each of these sequences holds, counted over all epochs."""
        return [self._bins[i] for i in self._order.take(first, many)]

    def _form(self, bins: list[list[int]]) -> Batch:
        spans = [[slice(*self.cut.spans[j]) for j in bin_] for bin_ in bins]
        width = self.max_length if self.packing else 0
        rows = tuple(dict.fromkeys(int(self.cut.origin[j]) for bin_ in bins for j in bin_))
        return replace(batch_of(self.examples, spans, self.pad_id, width), rows=rows)


def batch_of(examples: Examples, spans: list[list[slice]], pad_id: int, width: int = 0) -> Batch:
    """The batch whose rows are these documents, side by side; width 0: the longest row's."""
    longest = max(sum(span.stop - span.start for span in row) for row in spans)
    shape = (len(spans), width or longest)
    input_ids = torch.full(shape, pad_id)
    trained = torch.zeros(shape, dtype=torch.bool)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    document = torch.full(shape, -1)
    places = torch.full(shape, -1)
    for row, row_spans in enumerate(spans):
        place = 0
        for number, span in enumerate(row_spans):
            here = slice(place, place + span.stop - span.start)
            input_ids[row, here] = examples.ids[span].long()
            trained[row, here] = examples.trained[span]
            document[row, here] = number
            places[row, here] = torch.arange(span.start, span.stop)
            position_ids[row, place:] = torch.arange(shape[1] - place)
            place = here.stop
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    loss_mask[:, :-1] = trained[:, 1:] & (document[:, 1:] == document[:, :-1])
    mask = None
    if max(map(len, spans)) > 1:
        # Padding is a document too: a row that may attend nothing would be NaN.
        mask = (document[:, :, None] == document[:, None, :]).tril()[:, None]
    return Batch(input_ids, position_ids, loss_mask, mask, (), places)


def pack(lengths: list[int], max_length: int) -> list[list[int]]:
    """Bins of indices whose lengths sum to at most `max_length`: best fit, longest first."""
    bins: list[list[int]] = []
    open_bins: defaultdict[int, list[int]] = defaultdict(list)  # free space -> bins
    spaces: list[int] = []  # the keys of open_bins, ascending
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        assert 0 < lengths[i] <= max_length, (lengths[i], max_length)
        place = bisect_left(spaces, lengths[i])
        if place < len(spaces):
            free = spaces[place]
            chosen = open_bins[free].pop()
            if not open_bins[free]:
                del open_bins[free], spaces[place]
        else:
            free, chosen = max_length, len(bins)
            bins.append([])
        bins[chosen].append(i)
        left = free - lengths[i]
        if left:
            if left not in open_bins:
                insort(spaces, left)
            open_bins[left].append(chosen)
    return bins
