"""What the target said after the same few tokens before, kept in a table and drafted again.

    recycling    after one token, the target's latest law (Token Recycling: Luo et al., 2408.08696)
    stand        after 4, 3, 2 or 1, the mean of its laws (STAND: Song et al., 2506.04708)

Every verified node teaches, rejected ones too: the KEPT likeliest tokens of the target's raw law
there, before temperature. A prompt teaches its own next tokens. Laws lie in a table by the hash of
the context; of two in one place the later one stays.

Our differences: Recycling keeps probabilities, not ranks alone, so that a tree's nodes are drawn by
the target's noise; STAND also looks after one token; a table has no fixed tree.

Shapes: B rows, N nodes, M tokens of a context, O orders, H places, X contexts at once, K tokens
kept of a law, F nodes fed, V vocabulary.
"""

import ctypes
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.decode.drafting.base import Admitted, Fed, Feed, Frontier, Kept, Round, picked
from draftsmith.decode.forward.compiled import library, place, pointer
from draftsmith.decode.untrained.texts import LookupDrafter, chained, hashed, law_of

ORDERS = {"recycling": (1,), "stand": (1, 2, 3, 4)}
KEPT = 10
PLACES = 1 << 18
CHUNK = 64  # tokens of a text that are learnt at once
SLACK = 0.05  # chance of all tokens that aren't in a law

SOURCE = Path(__file__).with_name("tables.cpp")
_P, _N = ctypes.c_void_p, ctypes.c_int64


class _Table(ctypes.Structure):
    _fields_ = [
        *((name, _N) for name in ("orders", "places", "kept", "mean")),
        *((name, _P) for name in ("order", "keys", "counts", "ids", "p")),
    ]


class LawTable:
    """On a CPU in C++ (tables.cpp), context by context.

    keys_H: contexts' hashes, -1 where there is none; of the last place, which takes what isn't
    to be kept, always. ids_HK, p_HK: a law, its tokens' probabilities; counts_H: its visits.
    """

    def __init__(self, orders: tuple[int, ...], mean: bool, device: torch.device) -> None:
        self.orders, self.mean, self.device = orders, mean, device
        self.laid_orders = (_N * len(orders))(*orders)
        self.keys_H = torch.full((PLACES + 1,), -1, dtype=torch.int64, device=device)
        self.counts_H = torch.zeros(PLACES + 1, dtype=torch.int32, device=device)
        self.ids_HK = torch.zeros(PLACES + 1, KEPT, dtype=torch.int32, device=device)
        self.p_HK = torch.zeros(PLACES + 1, KEPT, device=device)

    @cached_property
    def made(self) -> Any:
        """The functions of tables.cpp; None on a GPU, and where nothing compiles them."""
        return library(SOURCE) if self.device.type == "cpu" else None

    def laid(self) -> Any:
        """As tables.cpp has it."""
        return ctypes.byref(self.in_memory())

    def in_memory(self) -> _Table:
        sizes = len(self.orders), PLACES, KEPT, self.mean
        lie = self.keys_H, self.counts_H, self.ids_HK, self.p_HK
        order = ctypes.addressof(self.laid_orders)
        return _Table(*sizes, order, *map(pointer, lie))

    def forget(self) -> None:
        for part in self.stored().values():
            part.zero_()
        self.keys_H.fill_(-1)

    def stored(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if torch.is_tensor(value)}

    def restore(self, stored: dict[str, Tensor]) -> None:
        for name, tensor in stored.items():
            getattr(self, name).copy_(tensor)

    def laws(self, context_XM: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [X, K] and probabilities after the longest context known, last token first; 0
        where none is.
        """
        if self.made:
            ids_XK = context_XM.new_empty(len(context_XM), KEPT)
            p_XK = ids_XK.new_empty(ids_XK.shape, dtype=torch.float32)
            context_XM = context_XM[:, : self.orders[-1]].contiguous()
            lie = map(place, (ids_XK, p_XK))
            self.made.laws(self.laid(), place(context_XM), _N(len(ids_XK)), *lie)
            return ids_XK, p_XK
        keys_OX = hashed(context_XM, self.orders)
        at_OX = keys_OX % PLACES
        found_OX = self.keys_H[at_OX] == keys_OX
        number_O1 = torch.arange(1, len(self.orders) + 1, device=at_OX.device)[:, None]
        longest_X = (found_OX * number_O1).amax(0)
        at_X = at_OX.gather(0, (longest_X - 1).clamp(min=0)[None])[0]
        return self.ids_HK[at_X].long(), self.p_HK[at_X] * (longest_X > 0)[:, None]

    def learn(self, context_XM: Tensor, ids_XK: Tensor, p_XK: Tensor, real_X: Tensor) -> None:
        """Of contexts that come twice the one that stands last is taken."""
        if self.made:
            parts = context_XM[:, : self.orders[-1]], ids_XK.long(), p_XK.float(), real_X
            given = [part.contiguous() for part in parts]
            self.made.learn(self.laid(), *map(place, given), _N(len(real_X)))
            return
        keys_OX = hashed(context_XM, self.orders)
        keys_X, orders = keys_OX.flatten(), len(self.orders)
        ids_XK, p_XK = ids_XK.repeat(orders, 1), p_XK.repeat(orders, 1)
        at_X = torch.where(real_X.repeat(orders), keys_X % PLACES, PLACES)
        # A number of its own for each, of which the largest wins a place.
        number_X = torch.arange(len(at_X), dtype=torch.int32, device=at_X.device)
        last_H = torch.full_like(self.counts_H, -1).scatter_reduce_(0, at_X, number_X, "amax")
        at_X = torch.where(last_H[at_X] == number_X, at_X, PLACES)
        visits_X = self.counts_H[at_X] * (self.keys_H[at_X] == keys_X) * self.mean
        if self.mean:
            before = self.ids_HK[at_X], self.p_HK[at_X]
            ids_XK, p_XK = mixed(*before, ids_XK, p_XK, visits_X)
        self.ids_HK[at_X], self.p_HK[at_X] = ids_XK.to(torch.int32), p_XK.float()
        self.counts_H[at_X], self.keys_H[at_X] = visits_X + 1, keys_X
        self.keys_H[PLACES] = -1


def mixed(
    old_XK: Tensor, old_p_XK: Tensor, new_XK: Tensor, new_p_XK: Tensor, visits_X: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean of a law of so many visits and one more, its K likeliest tokens, of equal ones those
    that were said last. -1 is no token.
    """
    old_p_XK = old_p_XK * (visits_X / (visits_X + 1))[:, None]
    new_p_XK = new_p_XK / (visits_X + 1)[:, None]
    same_XKK = new_XK[:, :, None] == old_XK[:, None]
    new_p_XK = new_p_XK + (same_XKK * old_p_XK[:, None]).sum(-1)
    alone_XK = old_p_XK * ~same_XKK.any(1)
    p_XC = torch.cat([new_p_XK, alone_XK], 1)
    p_XC, at_XC = p_XC.sort(dim=1, descending=True, stable=True)
    p_XK, at_XK = (both[:, : old_XK.shape[1]] for both in (p_XC, at_XC))
    return torch.cat([new_XK, old_XK], 1).gather(1, at_XK), p_XK


class TableDrafter(LookupDrafter):
    """Trees and chains by look-ups alone."""

    likeliest, slack = KEPT, SLACK

    def __init__(self, kind: str, device: torch.device, vocab_size: int) -> None:
        super().__init__(kind, device, vocab_size)
        self.store = LawTable(ORDERS[kind], kind == "stand", self.device)
        self.ending = max(ORDERS[kind])
        self.context_M = torch.arange(self.ending, device=self.device)

    def remember(self, tokens_N: Tensor) -> None:
        """A context counts once in CHUNK tokens."""
        for end in range(1, len(tokens_N), CHUNK):
            self._read(tokens_N[None, max(0, end - len(self.context_M)) : end + CHUNK])

    def prefill(self, admitted: Admitted) -> None:
        super().prefill(admitted)
        self._read(self.text_BS[admitted.rows_R, : admitted.tokens_RN.shape[1] + 1])

    def _read(self, text_RN: Tensor) -> None:
        """Of a text each token is all of the law before it."""
        at_NM = torch.arange(text_RN.shape[1] - 1, device=self.device)[:, None] - self.context_M
        context_RNM = torch.where(at_NM >= 0, text_RN[:, at_NM.clamp(min=0)], -1)
        next_XK = F.pad(text_RN[:, 1:].reshape(-1, 1), (0, KEPT - 1), value=-1)
        real_XK = next_XK >= 0
        self.store.learn(context_RNM.flatten(0, 1), next_XK, real_XK.float(), real_XK[:, 0])

    def extend(self, kept: Kept) -> None:
        """From the nodes' laws, of rows that went on."""
        assert kept.nodes_BN is not None and kept.topology is not None, "the engine tells"
        assert kept.ids_BNX is not None and kept.log_p_BNX is not None, "who asks by `likeliest`"
        rows, nodes = kept.nodes_BN.shape
        context_XM = self._contexts(kept.nodes_BN, kept.topology.parent).flatten(0, 1)
        real_BN = (kept.n_new_B > 0)[:, None].expand(rows, nodes)
        if not kept.topology.is_chain:  # a child that is there already fills a row up
            parent_BN = kept.topology.parent.expand(rows, -1)
            alike = (x[:, :, None] == x[:, None] for x in (kept.nodes_BN, parent_BN))
            real_BN = real_BN & ~(next(alike) & next(alike)).tril(-1).any(-1)
        real_X = real_BN.flatten()
        p_XK = kept.log_p_BNX.flatten(0, 1).exp()
        self.store.learn(context_XM, kept.ids_BNX.flatten(0, 1), p_XK, real_X)
        super().extend(kept)

    def _contexts(self, nodes_BN: Tensor, parent: Tensor) -> Tensor:
        """What each node follows, [B, N, M]."""
        rows, nodes = nodes_BN.shape
        if self.store.made:
            found_BNM = nodes_BN.new_empty(rows, nodes, len(self.context_M))
            nodes_BN, parent = nodes_BN.contiguous(), parent.contiguous()
            step = 0 if parent.ndim == 1 else nodes
            trees = place(nodes_BN), place(parent), _N(step)
            texts = place(self.text_BS), _N(self.text_BS.shape[1]), place(self.lens_B)
            sizes = map(_N, found_BNM.shape)
            self.store.made.contexts(*trees, *texts, *sizes, place(found_BNM))
            return found_BNM
        tail_BM = self.tail(self.ending)
        # The row's text hangs above the root: one more node for each token before the pending one.
        above_M = nodes + self.context_M
        parent_BN = parent.expand(rows, nodes).clone()
        parent_BN[:, 0] = nodes
        parent_BX = torch.cat([parent_BN, (above_M + 1).expand(rows, -1)], 1)
        tokens_BX = torch.cat([nodes_BN, tail_BM[:, 1:], tail_BM[:, :1] * 0 - 1], 1)
        at_BN = torch.arange(nodes, device=self.device).expand(rows, -1)
        context = []
        for _ in self.context_M:
            context.append(tokens_BX.gather(1, at_BN))
            at_BN = parent_BX.gather(1, at_BN)
        return torch.stack(context, -1)

    def catch_up(self, kept: Kept) -> None:
        """The text alone: laws of rounds that drafted nothing aren't told."""
        super().extend(kept)

    def followed(self, request: Round) -> Tensor:
        context_BM = self.tail(self.ending)
        follow = partial(self.store.made.follow, self.store.laid(), place(context_BM))
        return chained(request, SLACK, self.vocab_size, follow)

    def in_memory(self) -> _Table:
        return self.store.in_memory()

    def looked_up(self) -> tuple[Feed, Tensor]:
        context_BFM = self.tail(self.ending)[:, None]
        first = self.store.laws(context_BFM.flatten(0, 1))

        def feed(frontier: Frontier) -> Fed:
            nonlocal context_BFM
            ids_XK, p_XK = first
            if frontier.depth:
                if frontier.of_BF is not None:
                    context_BFM = picked(context_BFM.flatten(2), frontier.of_BF)
                tokens_BF1 = frontier.tokens_BF[..., None]
                context_BFM = torch.cat([tokens_BF1, context_BFM[..., :-1]], -1)
                ids_XK, p_XK = self.store.laws(context_BFM.flatten(0, 1))
            shape = (*context_BFM.shape[:2], -1)
            return law_of(ids_XK.view(shape), p_XK.view(shape), SLACK, self.vocab_size)

        return feed, first[1].amax(-1) > 0
