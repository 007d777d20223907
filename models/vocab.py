"""Draft vocabularies: the tokens that a head can propose, and how they map to the target's.

A head that drafts 32k of 128k tokens multiplies a quarter of the matrix. What it can't propose, it
can't get accepted, so the tokens are chosen by how often the target writes them.

An EAGLE-3 folder has no other rows, and its map among its weights. Other folders stay the plain
ones that servers load, with all rows; their map lies beside, in `draft_vocab.json`. It is no
safetensors file: vLLM and SGLang load every one of those in a folder, and stop at an unknown name.

Shapes: V tokens of the target (rows of its LM head), D of the draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.disk.read_lm import read_json, write_json

FILE = "draft_vocab.json"
ENOUGH = 0.95  # share of the target's own text that a draft vocabulary should cover


@dataclass(frozen=True)
class DraftVocab:
    """ids_D: the target's ids in ascending order, int64; size: V."""

    ids_D: Tensor
    size: int

    @classmethod
    def most_frequent(cls, counts_V: Tensor, draft_size: int) -> "DraftVocab":
        """The tokens counted most often, of equals the smaller ids; ValueError for no such size."""
        size = len(counts_V)
        if not 1 <= draft_size <= size:
            raise ValueError(
                f"draft_vocab: got {draft_size}, expected 1 to the target's {size} tokens"
            )
        order_V = torch.sort(counts_V, descending=True, stable=True).indices
        return cls(order_V[:draft_size].sort().values, size)

    @classmethod
    def from_offsets(cls, d2t_D: Tensor, size: int) -> "DraftVocab":
        """From the stored form, d2t[i] = id - i; ValueError where it points outside the vocabulary
        or its ids don't ascend, as those of every toolkit do.
        """
        ids_D = d2t_D.long() + torch.arange(len(d2t_D), device=d2t_D.device)
        outside = ((ids_D < 0) | (ids_D >= size)).nonzero().flatten().tolist()
        falls = (ids_D.diff() <= 0).nonzero().flatten().tolist()
        if outside:
            at = f"entry {outside[0]} to token {int(ids_D[outside[0]])} of {size}"
            raise ValueError(
                f"d2t: got {len(outside)} entries that point outside the vocabulary ({at}), "
                "expected offsets, d2t[i] = id - i; this map holds ids, or is of another target"
            )
        if falls:
            got = f"token {int(ids_D[falls[0]])} at entry {falls[0]} and {int(ids_D[falls[0] + 1])}"
            raise ValueError(
                f"d2t: got {got} after it, expected ascending ids, each once; sort the map, and "
                "the rows of the LM head alike"
            )
        return cls(ids_D, size)

    @classmethod
    def whole(cls, size: int) -> "DraftVocab":
        """Of a draft that has every token."""
        return cls(torch.arange(size), size)

    def among(self, counts_V: Tensor, draft_size: int, keep: Sequence[int] = ()) -> "DraftVocab":
        """The `draft_size` tokens of these that are counted most often, those of `keep` that it
        has always among them. ValueError for a size that leaves them no room, or isn't smaller.
        """
        has_V = self.t2d_V
        kept = [token for token in dict.fromkeys(keep) if has_V[token]]
        if not max(1, len(kept)) <= draft_size < len(self.ids_D):
            raise ValueError(
                f"draft vocabulary: got {draft_size} tokens, expected at least {max(1, len(kept))} "
                f"(those that end an answer are kept) and less than the {len(self.ids_D)} there are"
            )
        rank_V = counts_V.where(has_V, -1)
        rank_V[kept] = counts_V.max() + 1
        return DraftVocab.most_frequent(rank_V, draft_size)

    def save(self, folder: Path, tokenizer: str) -> None:
        """Write a drafter's map; tokenizer: the fingerprint of the target's."""
        d2t = self.d2t_D.tolist()
        write_json(folder / FILE, {"target": self.size, "tokenizer": tokenizer, "d2t": d2t})

    @property
    def is_full(self) -> bool:
        return len(self.ids_D) == self.size

    @property
    def d2t_D(self) -> Tensor:
        """Offsets, as EAGLE-3 folders store them: id of draft token i is i + d2t[i]."""
        return self.ids_D - torch.arange(len(self.ids_D), device=self.ids_D.device)

    @property
    def t2d_V(self) -> Tensor:
        """Which of the target's tokens the draft has, bool."""
        mask_V = torch.zeros(self.size, dtype=torch.bool, device=self.ids_D.device)
        mask_V[self.ids_D] = True
        return mask_V

    def coverage(self, counts_V: Tensor) -> float:
        """Share of the counted tokens that the draft can propose; 1 where nothing was counted."""
        total = int(counts_V.sum())
        return int(counts_V[self.ids_D].sum()) / total if total else 1.0


def read_vocab(folder: Path, meta: dict[str, Any], rows: int) -> DraftVocab | None:
    """The draft vocabulary beside a drafter's weights; None where it drafts all tokens. meta: its
    draftsmith.json; rows: of its LM head. ValueError for a map that is missing, damaged, of another
    size or of another tokenizer.
    """
    said, file = meta.get("vocabulary_map"), folder / FILE
    if said is None and not file.exists():
        return None
    mend = f"restore the folder as it was saved; or, to draft all tokens, remove {FILE} and set "
    mend += "vocabulary_map to null"
    if said is None or not file.exists():
        one = f"{FILE} and no vocabulary_map" if said is None else f"a vocabulary_map and no {FILE}"
        raise ValueError(f"got {folder} with {one}, expected both or neither; {mend}")
    content = read_json(file)
    d2t = content.get("d2t")
    if not isinstance(d2t, list) or not all(type(offset) is int for offset in d2t):
        raise ValueError(f"got {file} without d2t, a list of whole numbers; {mend}")
    got = (len(d2t), content.get("target"), content.get("tokenizer"))
    if got != (said.get("draft"), rows, (meta["target"] or {}).get("tokenizer")):
        raise ValueError(
            f"got {file} of {got[0]} of {got[1]} tokens, expected {said.get('draft')} of {rows}, "
            f"of the tokenizer that {folder} was made for: it belongs to another draft or another "
            f"target; {mend}"
        )
    return DraftVocab.from_offsets(torch.tensor(d2t, dtype=torch.int64), rows)
