"""Each row's own text, and drafting by what is looked up with it.

Shapes: B rows, R of them just admitted, S known tokens, N prompt tokens, L tokens of a kept path, F
nodes fed, C of a node's tokens with a weight, M tokens of a context, X contexts, O orders, V
vocabulary.
"""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from filelock import BaseFileLock
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.drafting.base import Admitted, Call, Drafter, Fed, Feed, Kept, Round
from draftsmith.decode.drafting.grow_tree import best_chain, grow
from draftsmith.decode.drafting.in_rounds import InRounds, called
from draftsmith.decode.forward.compiled import pointer
from draftsmith.decode.token_tree import COUPLED, TokenTree, chain
from draftsmith.models.disk.store import LOCK, hold, open_shard, save_shard

HOPELESS = 0.2  # a draft ends where its next token is less likely than that
MIX = 0x1E3779B97F4A7C15  # odd


class ChainsCall(ctypes.Structure):
    """`Chains` in lookups.h, of which a round fills in the rest."""

    _fields_ = [
        *((n, ctypes.c_int64) for n in ("rows", "vocab", "race_row", "race_step", "steps")),
        *((n, ctypes.c_float) for n in ("slack", "temperature", "hopeless")),
        *((n, ctypes.c_void_p) for n in ("active", "race", "tokens", "from", "asked")),
    ]

    @classmethod
    def by(cls, slack: float, vocab_size: int, temperature: float) -> Self:
        numbers = slack / vocab_size, temperature or 1.0, HOPELESS
        return cls(0, vocab_size, 0, 0, 0, *numbers)


class DraftsCall(ctypes.Structure):
    """`Drafts` in lookups.h, with the `Texts` there."""

    _fields_ = [
        *(("store", ctypes.c_void_p), ("slots", ctypes.c_int64)),
        *((n, ctypes.c_void_p) for n in ("text", "lens", "how")),
        ("ending", ctypes.c_int64),
    ]


class TextDrafter(Drafter):
    """text_BS: prompt and answer, the pending token last; lens_B: how many tokens that is. Beyond
    stands -1, which equals no token.
    """

    held: tuple[str, ...] = ("text_BS", "lens_B")
    owes = True

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def reset(self, rows: int, slots: int) -> None:
        self.text_BS = torch.full((rows, slots), -1, dtype=torch.int64, device=self.device)
        self.lens_B = torch.zeros(rows, dtype=torch.int64, device=self.device)

    def prefill(self, admitted: Admitted) -> None:
        rows_R, tokens_RN, lens_R = admitted.rows_R, admitted.tokens_RN, admitted.lens_R
        self.text_BS[rows_R] = -1
        inside_RN = torch.arange(tokens_RN.shape[1], device=self.device) < lens_R[:, None]
        self.text_BS[rows_R, : tokens_RN.shape[1]] = torch.where(inside_RN, tokens_RN, -1)
        self.text_BS[rows_R, lens_R] = admitted.pending_R
        self.lens_B[rows_R] = lens_R + 1

    def extend(self, kept: Kept) -> None:
        tokens_BL, n_new_B = kept.tokens_BL, kept.n_new_B
        step_L = torch.arange(tokens_BL.shape[1], device=self.device)
        at_BL = (self.lens_B[:, None] + step_L).clamp(max=self.text_BS.shape[1] - 1)
        new_BL = step_L < n_new_B[:, None]
        old_BL = self.text_BS.gather(1, at_BL)
        self.text_BS.scatter_(1, at_BL, torch.where(new_BL, tokens_BL, old_BL))
        self.lens_B += n_new_B

    def drafts_in(
        self, made: Any, ending: int, store: Any = None, how: ChainsCall | None = None
    ) -> InRounds:
        """What drafts in several rounds that are one call, by the functions of a source."""
        lie = map(pointer, (self.text_BS, self.lens_B))
        parts = (None if part is None else ctypes.addressof(part) for part in (store, how))
        first, last = parts
        drafts = DraftsCall(first, self.text_BS.shape[1], *lie, last, ending)
        return called(drafts, (store, how), made.draft, made.told)

    def tail(self, tokens: int) -> Tensor:
        """The last tokens [B, M] of the text, the last one first; -1 before its beginning."""
        at_BM = self.lens_B[:, None] - 1 - torch.arange(tokens, device=self.device)
        return torch.where(at_BM >= 0, self.text_BS.gather(1, at_BM.clamp(min=0)), -1)


class StoredDrafter(Drafter):
    """A drafter with a store, which outlives rows; drafters of one kind may have one in common.
    mark: what else than kind and the target's tokenizer a file of it belongs to.
    """

    remembers = True
    store: Any
    mark = ""

    def succeed(self, old: Drafter) -> None:
        super().succeed(old)
        assert isinstance(old, StoredDrafter), "drafters of one kind"
        self.store = old.store

    def settle(self) -> None:
        """Take into the store what the rows alone hold until now."""

    def forget(self) -> None:
        self.store.forget()

    def stored(self) -> dict[str, Tensor]:
        """What a file of the store holds, once it is settled."""
        return dict(self.store.stored())

    def restore(self, stored: dict[str, Tensor]) -> None:
        """Begin with what such a file held."""
        self.store.restore(stored)

    def save(self, path: Path, tokenizer: str) -> None:
        """Write the store, so that a kill leaves the file as it was, or new. tokenizer: its
        fingerprint. ValueError where another process keeps the file.
        """
        lock = claimed(path)
        try:
            self.settle()
            self.write(path, tokenizer, self.stored())
        finally:
            lock.release()

    def write(self, path: Path, tokenizer: str, stored: dict[str, Tensor]) -> None:
        """The file of what was `stored`, by who has claimed it."""
        save_shard(path, stored, of=f"{self.kind} {tokenizer}{self.mark}")

    def load(self, path: Path, tokenizer: str) -> None:
        """ValueError: a file that is cut, or of another kind or tokenizer."""
        with open_shard(path, self.remedy(path), f"{self.kind} {tokenizer}{self.mark}") as shard:
            self.restore({name: shard.get_tensor(name) for name in shard.keys()})  # noqa: SIM118

    def remedy(self, path: Path) -> str:
        """What to do about a file that can't be read."""
        return f"write it anew: draftsmith remember drafter={self.kind} data=... out={path}"


class LookupDrafter(StoredDrafter, TextDrafter):
    """Trees and chains from laws that are looked up. reads: whether a tree looks at what it found,
    as costs nothing on a CPU (a chain in C++ always does): a round where nothing is found is then
    plain decoding, and a draft ends where no row goes on; slack: the weight of what it never saw,
    shared out among all tokens; ending: how many of the text's last tokens it looks at.
    """

    slack: float
    ending: int

    def __init__(self, kind: str, device: torch.device, vocab_size: int) -> None:
        super().__init__(device)
        self.kind, self.vocab_size, self.reads = kind, vocab_size, self.device.type == "cpu"

    @classmethod
    def named(cls, kind: str, says: str, target: PreTrainedModel, vocab_size: int) -> Self:
        """Of any words after the colon: they name a file, which is read by `load`."""
        return cls(kind, target.device, vocab_size)

    def remember(self, tokens_N: Tensor) -> None:
        """Learn from a whole text, as `draftsmith remember` reads them."""
        raise NotImplementedError

    def looked_up(self) -> tuple[Feed, Tensor]:
        """The calls of a round; and whether anything is known after a row's text [B]."""
        raise NotImplementedError

    def feed(self, request: Round) -> Feed:
        return self.looked_up()[0]

    def followed(self, request: Round) -> Tensor:
        """The chains [B, up to K] that `grow` would come to, in C++: `chained`."""
        raise NotImplementedError

    def in_memory(self) -> Any:
        """Its store as C++ has it."""
        raise NotImplementedError

    def in_rounds(self, nodes: int, temperature: float) -> InRounds | None:
        if not self.store.made:
            return None
        how = ChainsCall.by(self.slack, self.vocab_size, temperature)
        return self.drafts_in(self.store.made, self.ending, self.in_memory(), how)

    def propose(self, request: Round) -> TokenTree:
        """Chains of best tokens are drafted in one call, where there is one."""
        if self.store.made and best_chain(request) and not request.sure:
            tokens_BN = torch.cat([request.pending_B[:, None], self.followed(request)], 1)
            return TokenTree(tokens_BN, chain(tokens_BN.shape[1] - 1, self.device), request.law)
        feed, found_B = self.looked_up()
        none = self.reads and not bool((found_B & request.active_B).any())
        if none and not request.want_q:
            return TokenTree(request.pending_B[:, None], chain(0, self.device), request.law)
        return self.grown(request, feed)

    def grown(self, request: Round, feed: Feed) -> TokenTree:
        """The tree asked for, where it reads no deeper than there is hope."""
        if self.reads:
            request = replace(request, enough=request.enough or hopeless)
        return grow(request, feed)[0]


def chained(request: Round, slack: float, vocab_size: int, follow: Callable[[Any], int]) -> Tensor:
    """Chains [B, up to K], by a function of lookups.h that says how many levels it drafted."""
    race_BKV = request.race_BDV if request.law == COUPLED else None
    tokens_BK = request.lens_B.new_empty(len(request.lens_B), request.plan.levels)
    how = ChainsCall.by(slack, vocab_size, request.params.law[0])
    how.rows, how.steps = tokens_BK.shape
    how.race_row, how.race_step = (0, 0) if race_BKV is None else race_BKV.stride()[:2]
    how.active, how.race, how.tokens = map(pointer, (request.active_B, race_BKV, tokens_BK))
    return tokens_BK[:, : follow(ctypes.byref(how))]


def claimed(path: Path) -> BaseFileLock:
    """Become the one who writes this file; ValueError where another does."""
    advice = f"it keeps {path}: end it first, or name another file"
    return hold(path.parent, advice, name=f".{path.name}{LOCK}")


def hopeless(call: Call) -> Tensor:
    """Where the best child is hardly likely."""
    return call.log_q_BC.amax(1).exp() < HOPELESS


def law_of(tokens_BFC: Tensor, weight_BFC: Tensor, slack: float, vocab_size: int) -> Fed:
    """Tokens by their weights, and `slack` shared out among all; a token may come twice, and what
    weighs nothing may be any number.
    """
    shape = *weight_BFC.shape[:2], vocab_size
    total_BFV = weight_BFC.new_full(shape, slack / vocab_size)
    total_BFV.scatter_add_(2, tokens_BFC.clamp(min=0), weight_BFC)
    return Fed(total_BFV.log(), weight_BFC[..., :0])


def hashed(last_XM: Tensor, orders: tuple[int, ...]) -> Tensor:
    """Of as many tokens of each text as an order says, the last one first: [O, X], from 0 up."""
    step_M = torch.arange(max(orders), device=last_XM.device)
    orders_O1 = torch.tensor(orders, device=last_XM.device)[:, None]
    factor_OM = torch.full_like(step_M, MIX).cumprod(0) * (step_M < orders_O1)
    hash_OX = ((last_XM[:, : max(orders)] + 2) * factor_OM[:, None]).sum(-1) + orders_O1
    hash_OX = (hash_OX ^ (hash_OX >> 29)) * MIX
    return (hash_OX ^ (hash_OX >> 32)) & ((1 << 62) - 1)
