"""The target's states of a whole training text on disk: it runs once, not once an epoch.

    <folder>/index.json                  what the states were made from, and of
             states-00000.safetensors    states [N, S, G]; of int8 also scales [N, S], fp32

Every piece of the text (`data.cut_long`) runs as a document of its own, as it does in training, so
packed and unpacked batches read the same states. Tokens lie flat in the order of the pieces, a
shard ends with a piece, and each state is stored once: the final one, then the taps.

int8 is symmetric with one scale a token and state, max |x| / 127. On the taps of a small model, a
15M Llama, its error is 1.1 to 1.3% of the states' root mean square (tests/test_tap_cache.py).

Shapes: N tokens, S states a token, G hidden size of the target.
"""

import hashlib
import json
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.models.checkpoint import read_json
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.taps import NORM, Tap, check_taps, target_states
from draftsmith.models.target import split_head
from draftsmith.train.data import Batches
from draftsmith.train.state import write_atomically

FORMAT = 1
SHARD_BYTES = 2**29
STORED = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}


class TapCache:
    """The states of `batches`' pieces in `folder`: what belongs there, how it is written and read.

    Made under the autocast that its states are to be computed under.

    Args:
        taps: besides the final state, which is always there.
        stored: a key of `STORED`.
        shard_bytes: a shard takes no further piece from this size on.

    Raises ValueError for taps that the target hasn't, or an unknown `stored`.
    """

    def __init__(
        self,
        folder: Path,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        taps: Sequence[Tap],
        batches: Batches,
        *,
        stored: str = "bfloat16",
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        if stored not in STORED:
            raise ValueError(f"got stored={stored!r}, expected one of {', '.join(STORED)}")
        config = target.config.get_text_config()
        check_taps(taps, config.num_hidden_layers)
        self.folder, self.target, self.batches = folder, target, batches
        self.states: tuple[Tap, ...] = (NORM, *(tap for tap in taps if tap != NORM))
        self.stored, self.hidden = stored, split_head(target)[1].shape[1]
        scale = 4 if stored == "int8" else 0
        self.token_bytes = len(self.states) * (self.hidden * STORED[stored].itemsize + scale)
        shard_tokens = max(1, shard_bytes // self.token_bytes)
        spans = batches.cut.spans
        # Token `place` of the text, in piece j, is row place - spans[j, 0] + offsets[j].
        self.offsets = np.concatenate([[0], np.diff(spans)[:, 0].cumsum()])
        self.firsts = np.unique(self.offsets[:-1] // shard_tokens, return_index=True)[1]
        self.identity = {
            "format": FORMAT,
            "examples": batches.examples.fingerprint(),
            "max_length": batches.max_length,
            "states": list(self.states),
            "stored": stored,
            "computed in": str(target.dtype).removeprefix("torch."),
            "autocast": autocast_type(target.device.type),
            "tokens a shard": shard_tokens,
            **{f"target {k}": v for k, v in fingerprint(target, tokenizer).items() if v},
        }
        self.hash = hashlib.sha256(json.dumps(self.identity).encode()).hexdigest()
        self._open: dict[int, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        """Shards."""
        return len(self.firsts)

    def path(self, shard: int) -> Path:
        return self.folder / f"states-{shard:05d}.safetensors"

    def pieces(self, shard: int) -> range:
        """The pieces in a shard."""
        last = self.firsts[shard + 1] if shard + 1 < len(self) else len(self.offsets) - 1
        return range(int(self.firsts[shard]), int(last))

    def tokens(self, shard: int) -> int:
        pieces = self.pieces(shard)
        return int(self.offsets[pieces.stop] - self.offsets[pieces.start])

    def claim(self) -> None:
        """Make `folder` this cache's, or check that it already is; say what it will take. One
        process comes first, alone.

        Raises ValueError for a folder made from something else, or too little room on the disk.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        index = self.folder / "index.json"
        if index.exists():
            self._check_identity(index)
        else:
            write_atomically(index, json.dumps(self.identity, indent=1).encode())
        left = [shard for shard in range(len(self)) if not self.path(shard).exists()]
        needed = sum(map(self.tokens, left)) * self.token_bytes
        free = shutil.disk_usage(self.folder).free
        print(
            f"{self.folder}: {self.offsets[-1]:,} tokens, {len(self.states)} states of "
            f"{self.hidden} in {self.stored}: {self.offsets[-1] * self.token_bytes / 1e9:.2f} GB; "
            f"{needed / 1e9:.2f} GB of it to write, {free / 1e9:.1f} GB free"
        )
        if needed > free:
            raise ValueError(
                f"{self.folder}: got {free / 1e9:.1f} GB free, expected {needed / 1e9:.1f} GB for "
                "the target's states; make room, set cache_int8=true, shorten max_length, or leave "
                "out cache"
            )

    def write(self, rank: int = 0, world: int = 1) -> None:
        """Write every `world`-th shard; those that are there are checked and kept.

        Raises ValueError for a shard that is damaged or of another cache.
        """
        assert autocast_type(self.target.device.type) == self.identity["autocast"]
        mine = range(rank, len(self), world)
        for shard in track(mine, "target's states", disable=rank > 0, transient=True):
            if self.path(shard).exists():
                self._check_content(shard)
            else:
                tensors = self._compute(shard)
                write_atomically(self.path(shard), save(tensors, {"of": self._mark(tensors)}))

    def rows(self, places_N: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        """States [N, S, G] of tokens by their places in the text, all of them in some piece."""
        spans, places = self.batches.cut.spans, places_N.cpu().numpy()
        piece = spans[:, 0].searchsorted(places, "right") - 1
        assert (places < spans[piece, 1]).all(), "a place that no piece holds"
        row = places - spans[piece, 0] + self.offsets[piece]
        of_shard = self.firsts.searchsorted(piece, "right") - 1
        shape = (len(row), len(self.states), self.hidden)
        states_NSG = torch.empty(shape, dtype=dtype, device=device)
        for shard in np.unique(of_shard).tolist():
            at_N = torch.from_numpy((of_shard == shard).nonzero()[0])
            local_N = torch.from_numpy(row - self.offsets[self.firsts[shard]])[at_N]
            tensors = self._tensors(shard)
            found = tensors["states"][local_N].to(device)
            if self.stored == "int8":
                found = found * tensors["scales"][local_N].to(device)[..., None]
            states_NSG[at_N.to(device)] = found.to(dtype)
        return states_NSG

    def _tensors(self, shard: int) -> dict[str, Tensor]:
        """A shard's tensors, mapped into memory: only the rows that are read are loaded."""
        if shard not in self._open:
            path = self.path(shard)
            try:
                mark = self._read_mark(shard)
                self._open[shard] = load_file(path)
            except (OSError, SafetensorError) as error:
                raise _damaged(path, f"cut or missing ({error})") from error
            if not mark.startswith(self.hash):
                raise _damaged(path, "of another cache")
        return self._open[shard]

    def _check_content(self, shard: int) -> None:
        if self._mark(self._tensors(shard)) != self._read_mark(shard):
            raise _damaged(self.path(shard), "damaged: its checksum differs")

    def _mark(self, tensors: dict[str, Tensor]) -> str:
        """What a shard says of itself: the cache that it belongs to, the checksum of its tensors.

        One string, since safetensors writes several in any order.
        """
        total = 0
        for name in sorted(tensors):
            total = zlib.crc32(tensors[name].view(torch.uint8).numpy().data, total)
        return f"{self.hash} {total:08x}"

    def _read_mark(self, shard: int) -> str:
        with safe_open(self.path(shard), "pt") as file:
            return (file.metadata() or {}).get("of", "")

    def _compute(self, shard: int) -> dict[str, Tensor]:
        pieces, spans, ids = self.pieces(shard), self.batches.cut.spans, self.batches.examples.ids
        first = int(self.offsets[pieces.start])
        shape = (self.tokens(shard), len(self.states), self.hidden)
        states_NSG = torch.empty(shape, dtype=STORED[self.stored])
        scales_NS = torch.empty(shape[:2])
        by_length = sorted(pieces, key=lambda j: spans[j, 0] - spans[j, 1])  # little padding
        for start in range(0, len(by_length), self.batches.batch_size):
            rows = by_length[start : start + self.batches.batch_size]
            texts = [ids[slice(*spans[j])].long() for j in rows]
            padded = pad_sequence(texts, batch_first=True, padding_value=self.batches.pad_id)
            inputs = {"input_ids": padded, "position_ids": torch.arange(padded.shape[1])[None]}
            inputs = {name: t.to(self.target.device) for name, t in inputs.items()}
            norm_BTG, taps_BTF = target_states(self.target, self.states[1:], **inputs)
            all_BTSG = torch.cat([norm_BTG, taps_BTF], -1).unflatten(-1, (-1, self.hidden))
            for text, j, found in zip(texts, rows, all_BTSG, strict=True):
                at = slice(int(self.offsets[j]) - first, int(self.offsets[j + 1]) - first)
                kept = found[: len(text)]
                if self.stored == "int8":
                    kept, scale = quantised(kept.float())
                    scales_NS[at] = scale.cpu()
                states_NSG[at] = kept.to(states_NSG.dtype).cpu()
        return {"states": states_NSG} | ({"scales": scales_NS} if self.stored == "int8" else {})

    def _check_identity(self, index: Path) -> None:
        found, given = read_json(index), self.identity
        differ = [
            f"{name}: got {_short(found.get(name))}, expected {_short(given.get(name))}"
            for name in sorted(found.keys() | given.keys())
            if found.get(name) != given.get(name)
        ]
        if differ:
            raise ValueError(
                f"{self.folder} holds states made with other weights, text or settings "
                f"({'; '.join(differ)}); restore those, give this run a folder of its own, or "
                "delete this one to write it anew"
            )


def autocast_type(device: str) -> str | None:
    """What autocast computes products in on this kind of device, None where it is off."""
    if not torch.is_autocast_enabled(device):
        return None
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def quantised(states_NSG: Tensor) -> tuple[Tensor, Tensor]:
    """(states as whole numbers from -127 to 127, scales [N, S]): states = numbers * scales."""
    scales_NS = states_NSG.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (states_NSG / scales_NS[..., None]).round().to(torch.int8), scales_NS


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(
        f"{path}: got a shard that is {what}, expected it as it was written; delete this file and "
        "repeat the command: it alone is written again"
    )


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else str(value)
