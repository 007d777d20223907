"""The target's states of a whole training text on disk: it runs once, not once an epoch.

A shard (`store.py`) holds states [N, S, G]; of int8 also scales [N, S], fp32. Each state is
stored once: the final one, then the taps.

int8 is symmetric with one scale a token and state, max |x| / 127. On the taps of a small model, a
15M Llama, its error is 1.1 to 1.3% of the states' root mean square
(tests/train/teachers/test_tap_cache.py).

Shapes: N tokens, S states a token, G hidden size of the target.

The target's likeliest tokens at every position of a training text on disk.

A shard (`store.py`) holds for each token what the target says of the next one, after the one
transform (temperature, top-k, top-p, min-p):

    ids    [N, J]  its J likeliest tokens, likeliest first; uint16 where they fit, else int32
    log_p  [N, B]  their log-probabilities, and last that of all the rest, in float16

float16 errs by at most 2^-11 of a log-probability, an eighth of what bfloat16 does: for a small
Llama on GSM8K a total variation of 1e-4 in the mean, 4e-4 at worst. -inf is a token that the
transform cut. The rest has a number of its own, since 1 minus rounded numbers would be rounding
where it is small.

Shapes: N tokens, J listed tokens, B = J + 1, V vocabulary, H / G hidden size of draft / target.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.serve.top_k import likeliest
from draftsmith.models.taps import NORM, Tap, check_taps, target_states
from draftsmith.models.target import cut_rows, output_head, vocab_size, without_bias
from draftsmith.train.losses.chunked import (
    CHUNK_LOGITS,
    Side,
    chunk_logits,
    chunked_divergence,
    matmul_type,
    rows_of,
)
from draftsmith.train.losses.closed_form import Transform
from draftsmith.train.losses.pure import centred, forward_kl
from draftsmith.train.losses.top_k import TopKRows
from draftsmith.train.teachers.store import SHARD_BYTES, TokenShards
from draftsmith.train.text.batches import Batches

STORED = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}


class TapCache(TokenShards):
    """The states of `batches`' pieces in `folder`.

    Args:
        taps: besides the final state, which is always there.
        stored: a key of `STORED`.
        shard_bytes: as in `TokenShards`.

    Raises ValueError for taps that the target hasn't, or an unknown `stored`.
    """

    stem, what, remedy = "states", "the target's states", "set cache.int8=true"

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
        self.states: tuple[Tap, ...] = (NORM, *(tap for tap in taps if tap != NORM))
        self.stored, self.hidden = stored, output_head(target)[1].shape[1]
        scale = 4 if stored == "int8" else 0
        super().__init__(
            folder,
            target,
            tokenizer,
            batches,
            holds={"states": list(self.states), "stored": stored},
            token_bytes=len(self.states) * (self.hidden * STORED[stored].itemsize + scale),
            shard_bytes=shard_bytes,
        )

    def about(self) -> str:
        return f"{len(self.states)} states of {self.hidden} in {self.stored}"

    def rows(self, places_N: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        """States [N, S, G] of tokens by their places in the text, all of them in some piece."""
        shape = (len(places_N), len(self.states), self.hidden)
        states_NSG = torch.empty(shape, dtype=dtype, device=device)
        for at_N, tensors, local_N in self.found(places_N):
            found = tensors["states"][local_N].to(device)
            if self.stored == "int8":
                found = found * tensors["scales"][local_N].to(device)[..., None]
            states_NSG[at_N.to(device)] = found.to(dtype)
        return states_NSG

    def compute(self, shard: int) -> dict[str, Tensor]:
        shape = (self.tokens(shard), len(self.states), self.hidden)
        states_NSG = torch.empty(shape, dtype=STORED[self.stored])
        scales_NS = torch.empty(shape[:2])
        for inputs, rows in self.passes(shard):
            norm_BTG, taps_BTF = target_states(self.target, self.states[1:], **inputs)
            all_BTSG = torch.cat([norm_BTG, taps_BTF], -1).unflatten(-1, (-1, self.hidden))
            for at, found in zip(rows, all_BTSG, strict=True):
                kept = found[: at.stop - at.start]
                if self.stored == "int8":
                    kept, scale = quantised(kept.float())
                    scales_NS[at] = scale.cpu()
                states_NSG[at] = kept.to(states_NSG.dtype).cpu()
        return {"states": states_NSG} | ({"scales": scales_NS} if self.stored == "int8" else {})


def quantised(states_NSG: Tensor) -> tuple[Tensor, Tensor]:
    """(states as whole numbers from -127 to 127, scales [N, S]): states = numbers * scales."""
    scales_NS = states_NSG.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (states_NSG / scales_NS[..., None]).round().to(torch.int8), scales_NS


class TopKCache(TokenShards):
    """The likeliest tokens after each token of `batches`' pieces, in `folder`.

    Args:
        k: how many (J).
        warp: the transform that they are taken after.
        shard_bytes: as in `TokenShards`.

    Raises ValueError for a k that the vocabulary hasn't.
    """

    stem, what, remedy = "top-k", "the target's likeliest tokens", "lower cache.top_k"

    def __init__(
        self,
        folder: Path,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        k: int,
        warp: SamplingParams,
        batches: Batches,
        *,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.k, self.warp, self.vocab_size = k, warp, vocab_size(tokenizer)
        if not 0 < k <= self.vocab_size:
            raise ValueError(
                f"cache.top_k: got {k}, expected 1 to {self.vocab_size}, the tokens of the "
                "vocabulary; 0 keeps the target's last states, which are exact"
            )
        self.ids_type = torch.uint16 if self.vocab_size <= 1 << 16 else torch.int32
        super().__init__(
            folder,
            target,
            tokenizer,
            batches,
            holds={"top k": k, "transform": list(law(warp))},
            token_bytes=k * self.ids_type.itemsize + (k + 1) * torch.float16.itemsize,
            shard_bytes=shard_bytes,
        )

    def about(self) -> str:
        exact = 2 * output_head(self.target)[1].shape[1]
        return (
            f"{self.k} likeliest tokens each, {self.token_bytes:,} bytes a token (its last state, "
            f"which is exact, has {exact:,}: {self.offsets[-1] * exact / 1e9:.2f} GB)"
        )

    def rows(self, places_N: Tensor, device: torch.device) -> TopKRows:
        """What follows the tokens at these places in the text, all of them in some piece."""
        ids_NJ = torch.empty(len(places_N), self.k, dtype=torch.int64)
        log_p_NB = torch.empty(len(places_N), self.k + 1)
        for at_N, tensors, local_N in self.found(places_N):
            ids_NJ[at_N] = tensors["ids"][local_N].long()
            log_p_NB[at_N] = tensors["log_p"][local_N].float()
        return TopKRows(ids_NJ.to(device), log_p_NB.to(device))

    def compute(self, shard: int) -> dict[str, Tensor]:
        ids_NJ = torch.empty(self.tokens(shard), self.k, dtype=self.ids_type)
        log_p_NB = torch.empty(self.tokens(shard), self.k + 1, dtype=torch.float16)
        for inputs, rows in self.passes(shard):
            norm_BTG = target_states(self.target, (), **inputs).norm_BTG
            for at, hidden_TG in zip(rows, norm_BTG, strict=True):
                place = at.start
                for found in self._likeliest(hidden_TG[: at.stop - at.start]):
                    here = slice(place, place + len(found.ids_NJ))
                    ids_NJ[here] = found.ids_NJ.cpu().to(self.ids_type)
                    log_p_NB[here] = found.log_p_NB.half().cpu()
                    place = here.stop
        return {"ids": ids_NJ, "log_p": log_p_NB}

    @torch.no_grad()
    def _likeliest(self, hidden_NG: Tensor) -> Iterator[TopKRows]:
        """The rows of some states, chunk by chunk."""
        _, head_VG, bias_V = output_head(self.target)
        hidden_NG, head_VG = without_bias(hidden_NG, head_VG, bias_V)
        head_VG = cut_rows(head_VG, self.vocab_size).to(matmul_type("p", hidden_NG, head_VG))
        device = hidden_NG.device
        size = rows_of(CHUNK_LOGITS, device, len(head_VG))
        every_N = torch.arange(len(hidden_NG), device=device)
        with torch.autocast(device.type, enabled=False):
            for logits_CV in chunk_logits(hidden_NG, head_VG, every_N, size):
                logits_CV = self.warp.transform(centred(logits_CV))
                yield TopKRows(*likeliest(logits_CV, self.k))


def law(warp: SamplingParams) -> tuple[float, ...]:
    """The transform as numbers: greedy compares distributions as they are, so at temperature 1."""
    return (1.0, 0, 1.0, 0.0) if warp.greedy else warp.law


def what_is_lost(rows: TopKRows, p: Side, q: Side, weight_N: Tensor, transform: Transform) -> Table:
    """The forward KL and alpha of a draft against `rows`, and fewer of its tokens, beside those
    against the full distributions: means over the positions with a weight.

    p, q: states and heads of target and draft. transform: of the logits of both.
    """
    tokens, k = int((weight_N > 0).sum()), rows.ids_NJ.shape[1]
    counted_N = (weight_N > 0).float()
    full = chunked_divergence(forward_kl, *q, *p, counted_N, transform=transform)
    table = Table(title=f"top-k against full logits: this draft, {tokens:,} tokens")
    for name in ("k", "mass outside", "fkl", "alpha, at most"):
        table.add_column(name, justify="right")
    for few in sorted({max(1, k // 16), max(1, k // 4), k}):
        cut = rows.first(few)
        found = cut.divergence(forward_kl, q, counted_N, transform)
        outside = (cut.log_p_NB[:, -1].exp() * counted_N).sum() / tokens
        kl, alpha = found.total / tokens, found.alpha_N.sum() / tokens
        table.add_row(f"{few}", f"{outside:.2%}", f"{kl:.4f}", f"{alpha:.4f}")
    table.add_row("all", "", f"{full.total / tokens:.4f}", f"{full.alpha_N.sum() / tokens:.4f}")
    return table
