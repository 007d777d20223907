"""Tensors with a row for each token of a training text, in shards on disk.

    <folder>/index.json                  what they were made from, and of
             <stem>-00000.safetensors    tensors whose first axis is tokens

A shard ends with a piece of the text (`data.cut_long`), and tokens lie flat in the order of the
pieces. Every piece runs as a document of its own, as it does in training, so packed and unpacked
batches read the same rows. Several processes fill a folder together, and a kill costs the shards
that were being written.

Shapes: N tokens, T of a piece.
"""

import hashlib
import json
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.disk.store import Manifest, open_shard, save_shard
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.taps import Tap, target_states
from draftsmith.progress import watched
from draftsmith.train.run.frozen_target import in_company
from draftsmith.train.text.batches import Batches

FORMAT = 1
SHARD_BYTES = 2**29  # a shard takes no further piece from this size on
INDEX = Manifest("index.json", "training with cache=")
REMEDY = "delete this file and repeat the command: it alone is written again"


@dataclass(eq=False)
class TokenShards:
    """Rows of the tokens of `batches`' pieces in `folder`: what belongs there, its files, its rows.

    Made under the autocast that its rows are to be computed under.
    """

    stem: ClassVar[str]  # of the shards' names
    what: ClassVar[str]  # they hold, for messages
    remedy: ClassVar[str]  # against a full disk
    folder: Path
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    batches: Batches
    # What a row is made of, besides the final state.
    taps: tuple[Tap, ...] = field(default=(), init=False)

    def describe(self, *, holds: dict[str, Any], token_bytes: int, about: str) -> None:
        """holds: what a row is; with text and target it decides the folder's content. token_bytes:
        of it; about: the same in words.
        """
        self.token_bytes, self.about = token_bytes, about
        shard_tokens = max(1, SHARD_BYTES // token_bytes)
        spans = self.batches.cut.spans
        # Token `place` of the text, in piece j, is row place - spans[j, 0] + offsets[j].
        self.offsets = np.concatenate([[0], np.diff(spans)[:, 0].cumsum()])
        # Shard i has the pieces firsts[i] to firsts[i + 1], and sizes[i] tokens.
        firsts = np.unique(self.offsets[:-1] // shard_tokens, return_index=True)[1]
        self.firsts = np.append(firsts, len(spans))
        self.sizes = np.diff(self.offsets[self.firsts])
        self.identity = {
            "format": FORMAT,
            "examples": self.batches.examples.fingerprint(),
            "max_length": self.batches.max_length,
            **holds,
            "computed in": str(self.target.dtype).removeprefix("torch."),
            "autocast": autocast_type(self.target.device.type),
            "tokens a shard": shard_tokens,
        }
        mark = fingerprint(self.target, self.tokenizer)
        self.identity |= {f"target {name}": value for name, value in mark.items() if value}
        self.hash = hashlib.sha256(json.dumps(self.identity).encode()).hexdigest()
        self._open: dict[int, dict[str, Tensor]] = {}

    def made(self, norm_TG: Tensor, taps_TF: Tensor) -> dict[str, Tensor]:
        """A text's rows [T, ...] from its states."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.sizes)  # shards

    def path(self, shard: int) -> Path:
        return self.folder / f"{self.stem}-{shard:05d}.safetensors"

    def claim(self) -> None:
        """Make `folder` this cache's, or check that it already is; say what it will take. One
        process comes first, alone. ValueError for a folder made from something else, or too little
        room on the disk.
        """
        INDEX.claim(self.folder, self.identity)
        left = [shard for shard in range(len(self)) if not self.path(shard).exists()]
        needed = int(self.sizes[left].sum()) * self.token_bytes
        free = shutil.disk_usage(self.folder).free
        print(
            f"{self.folder}: {self.offsets[-1]:,} tokens, {self.about}: "
            f"{self.offsets[-1] * self.token_bytes / 1e9:.2f} GB; {needed / 1e9:.2f} GB of it to "
            f"write, {free / 1e9:.1f} GB free"
        )
        if needed > free:
            raise ValueError(
                f"{self.folder}: got {free / 1e9:.1f} GB free, expected {needed / 1e9:.1f} GB for "
                f"{self.what}; make room, {self.remedy}, shorten max_length, or leave out cache"
            )

    def fill(self, accelerator: Accelerator) -> None:
        """Have all processes write what is missing, together. Errors as in `claim` and `write`."""
        if accelerator.is_main_process:
            self.claim()
        accelerator.wait_for_everyone()
        with in_company(self.target):
            self.write(accelerator.process_index, accelerator.num_processes)
        accelerator.wait_for_everyone()

    def write(self, rank: int = 0, world: int = 1) -> None:
        """Write every `world`-th shard; those that are there are checked and kept: ValueError for
        one that is damaged or of another cache.
        """
        assert autocast_type(self.target.device.type) == self.identity["autocast"]
        mine = range(rank, len(self), world)
        for shard in watched(mine, self.what, len(mine), shown=not rank):
            if self.path(shard).exists():
                with open_shard(self.path(shard), REMEDY, of=self._mark(self._tensors(shard))):
                    pass
            else:
                tensors = self.compute(shard)
                save_shard(self.path(shard), tensors, of=self._mark(tensors))

    def compute(self, shard: int) -> dict[str, Tensor]:
        """A shard's tensors [N, ...], by passes of the target."""
        spans, ids = self.batches.cut.spans, self.batches.examples.ids
        pieces = range(*self.firsts[shard : shard + 2].tolist())
        by_length = sorted(pieces, key=lambda j: spans[j, 0] - spans[j, 1])  # little padding
        whole: dict[str, Tensor] = {}
        for start in range(0, len(by_length), self.batches.batch_size):
            rows = by_length[start : start + self.batches.batch_size]
            texts = [ids[slice(*spans[j])].long() for j in rows]
            padded = pad_sequence(texts, batch_first=True, padding_value=self.batches.pad_id)
            inputs = {"input_ids": padded, "position_ids": torch.arange(padded.shape[1])[None]}
            inputs = {name: given.to(self.target.device) for name, given in inputs.items()}
            states = target_states(self.target, self.taps, **inputs)
            for j, text, norm_TG, taps_TF in zip(rows, texts, *states, strict=True):
                first = int(self.offsets[j] - self.offsets[pieces.start])
                for name, rows_T in self.made(norm_TG[: len(text)], taps_TF[: len(text)]).items():
                    if name not in whole:
                        shape = (int(self.sizes[shard]), *rows_T.shape[1:])
                        whole[name] = torch.empty(shape, dtype=rows_T.dtype)
                    whole[name][first : first + len(text)] = rows_T.cpu()
        return whole

    def found(self, places_N: Tensor) -> Iterator[tuple[Tensor, dict[str, Tensor], Tensor]]:
        """Where tokens lie, by their places in the text: for each shard (which of them, its
        tensors, their rows in these). Places below 0 are in none.
        """
        spans, places = self.batches.cut.spans, places_N.cpu().numpy()
        piece = spans[:, 0].searchsorted(places, "right") - 1
        assert (places < spans[piece, 1]).all(), "a place that no piece holds"
        row = places - spans[piece, 0] + self.offsets[piece]
        of_shard = self.firsts.searchsorted(piece, "right") - 1
        for shard in np.unique(of_shard[places >= 0]).tolist():
            at_N = torch.from_numpy((of_shard == shard).nonzero()[0])
            local_N = torch.from_numpy(row - self.offsets[self.firsts[shard]])[at_N]
            yield at_N, self._tensors(shard), local_N

    def _tensors(self, shard: int) -> dict[str, Tensor]:
        """A shard's tensors, mapped into memory: only the rows that are read are loaded."""
        if shard not in self._open:
            with open_shard(self.path(shard), REMEDY, of=self.hash) as file:
                self._open[shard] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return self._open[shard]

    def _mark(self, tensors: dict[str, Tensor]) -> str:
        """What a shard says of itself: the cache that it belongs to, the checksum of its tensors;
        in one string, since safetensors writes several in any order.
        """
        total = 0
        for name in sorted(tensors):
            total = zlib.crc32(tensors[name].view(torch.uint8).numpy().data, total)
        return f"{self.hash} {total:08x}"


def autocast_type(device: str) -> str | None:
    """What autocast computes products in on this kind of device, None where it is off."""
    on = torch.is_autocast_enabled(device)
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if on else None
