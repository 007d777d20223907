"""One round over device state: draft, verify, commit. Nothing in it reads the device (unless a
policy asks for it, or prompt lookup on a CPU), so a round can be captured and replayed as it is.

Shapes: B rows, R of them just admitted, N nodes, L = D + 1 tokens that one round can emit, M ids
that may end one request, U width of the taps' states, V vocabulary.
"""

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from draftsmith.decode import sampling
from draftsmith.decode.drafting.base import Call, Drafter, Kept, Round, picked
from draftsmith.decode.engine.grammar import Grammar, ruled
from draftsmith.decode.engine.owed import Owed
from draftsmith.decode.engine.recorder import Harvest, Recorder
from draftsmith.decode.engine.request import Request
from draftsmith.decode.engine.settings import DecodeSettings
from draftsmith.decode.forward.kv import KVPool
from draftsmith.decode.forward.runner import Runner, Seen, round_up
from draftsmith.decode.policies.policy import Policy
from draftsmith.decode.sampling import (
    BatchParams,
    RowParams,
    choose,
    position_keys,
    told_log_probs,
)
from draftsmith.decode.token_tree import COUPLED, TokenTree, Topology, chain
from draftsmith.decode.tree_shapes import Plan
from draftsmith.decode.verify.lossy import Lossy
from draftsmith.decode.verify.rules import RULES, Noise, RuleInfo

Kind = TypeVar("Kind")


class Rows:
    """lens: tokens in the target's KV; pending: sampled, not yet in the KV; room: tokens that the
    row may still emit; active rows advance, the others are computed and ignored. All [B]. stops: M,
    the most ids that may end one request.
    """

    def __init__(self, batch: int, stops: int, device: torch.device) -> None:
        zeros = (torch.zeros(batch, dtype=torch.int64, device=device) for _ in range(5))
        self.lens_B, self.pending_B, self.seeds_B, self.rounds_B, self.room_B = zeros
        self.active_B = torch.zeros(batch, dtype=torch.bool, device=device)
        self.stop_ids_BM = torch.full((batch, stops), -1, dtype=torch.int64, device=device)
        self.reset()

    def reset(self) -> None:
        """All rows free."""
        # One committed garbage token keeps every mask row non-empty, also in rows never used.
        self.lens_B.fill_(1)
        self.active_B.fill_(False)
        self.requests: list[Request | None] = [None] * len(self.lens_B)
        self.waiting: deque[Request] = deque()

    @property
    def free(self) -> list[int]:
        return [row for row, request in enumerate(self.requests) if request is None]

    @property
    def busy(self) -> list[int]:
        return [row for row, request in enumerate(self.requests) if request is not None]

    def admit(
        self, rows_R: Tensor, lens_R: Tensor, pending_R: Tensor, requests: list[Request]
    ) -> None:
        """Give rows to requests whose prompts have just been prefilled and first tokens sampled."""
        self.lens_B[rows_R] = lens_R
        self.pending_B[rows_R] = pending_R
        self.rounds_B[rows_R] = 0
        device = self.lens_B.device
        self.seeds_B[rows_R] = torch.tensor([r.seed for r in requests], device=device)
        self.room_B[rows_R] = torch.tensor([r.limit - 1 for r in requests], device=device)
        most = self.stop_ids_BM.shape[1]
        # No token is -1.
        ends = [sorted(r.stop_ids) + [-1] * (most - len(r.stop_ids)) for r in requests]
        ends_RM = torch.tensor(ends, dtype=torch.int64, device=device).view(len(ends), most)
        self.stop_ids_BM[rows_R] = ends_RM
        stopped_R = (pending_R[:, None] == ends_RM).any(1)
        self.active_B[rows_R] = (self.room_B[rows_R] > 0) & ~stopped_R

    def advance(self, emitted_BL: Tensor, n_accepted_B: Tensor, bad_B: Tensor) -> Tensor:
        """Commit a round, cut at a stop token and the room left; n_new_B, 0 in inactive rows and in
        bad ones (broken logits), which end here.
        """
        step_L = torch.arange(1, emitted_BL.shape[1] + 1, device=emitted_BL.device)
        valid_BL = step_L <= (n_accepted_B + 1)[:, None]
        stops_BL = (emitted_BL[..., None] == self.stop_ids_BM[:, None]).any(-1) & valid_BL
        first_stop_B = torch.where(stops_BL, step_L, emitted_BL.shape[1] + 1).amin(1)
        n_new_B = torch.minimum(torch.minimum(n_accepted_B + 1, first_stop_B), self.room_B)
        n_new_B = torch.where(self.active_B & ~bad_B, n_new_B, 0)
        last_B = emitted_BL.gather(1, (n_new_B - 1).clamp(min=0)[:, None])[:, 0]
        # In place: a captured round is replayed on these very tensors.
        self.rounds_B += self.active_B
        self.pending_B.copy_(torch.where(n_new_B > 0, last_B, self.pending_B))
        self.lens_B += n_new_B
        self.room_B -= n_new_B
        self.active_B &= (first_stop_B > n_new_B) & (self.room_B > 0) & ~bad_B
        return n_new_B

    @torch.inference_mode()
    def release(self, row: int) -> None:
        """Free a row; it rests, if the host alone knows that its request has ended."""
        self.requests[row] = None
        self.active_B[row] = False


def first_rows(whole: Kind, rows: int) -> Kind:
    """A shallow copy of an object whose tensors [B, ...] and pools, or of a drafter those `held`,
    are the first rows of its own, on the same memory: what is written in place is written there.
    """
    part = copy.copy(whole)
    for name in () if whole is None else getattr(whole, "held", vars(whole)):
        value = getattr(whole, name, None)
        if isinstance(value, Tensor):
            setattr(part, name, value[:rows])
        elif isinstance(value, KVPool):
            setattr(part, name, value.first(rows))
        elif hasattr(value, "held"):  # a drafter made of drafters
            setattr(part, name, first_rows(value, rows))
    return part


@dataclass
class DecodeBatch:
    """What rounds work on. harvest: None where nobody wants it; drafter: the stepper's own, of a
    part of the rows; listed: how many likeliest tokens to tell of each place, None for no
    log-probabilities; grammars: of each row's answer, None where no row has one. They are followed
    on the host, so what was emitted is read before the next round. owed: to drafters that let
    tokens wait, where a policy may draft nothing.
    """

    rows: Rows
    pool: KVPool
    params: BatchParams
    harvest: Harvest | None = None
    drafter: Drafter | None = None
    listed: int | None = None
    grammars: Sequence[Grammar | None] | None = None
    owed: Owed | None = None

    def told(self, drafter: Drafter, kept: Kept, *, waits: bool) -> Tensor | None:
        """Let the drafter take a round in, now or, where it `waits`, with others."""
        if not waits or self.owed is None:
            return drafter.extend(kept)
        self.owed.take(kept)
        return None

    def law(self, logits_BNV: Tensor, tokens_BN: Tensor, parent: Tensor) -> Tensor:
        """What the target's raw logits at some nodes become: ruled by grammars, transformed."""
        if self.grammars is not None:
            logits_BNV = ruled(logits_BNV, self.grammars, tokens_BN, parent)
        return self.params.transform(logits_BNV)

    def holds(self, rows: int, slots: int, stops: int) -> bool:
        """Whether it is of so many rows, with at least these slots and ids that end a request."""
        wide = self.rows.stop_ids_BM.shape[1] >= stops
        return wide and self.pool.rows == rows and self.pool.slots >= slots

    def first(self, rows: int, params: BatchParams, drafter: Drafter | None) -> "DecodeBatch":
        """Rows 0..rows-1 on the same memory; drafter: whose state of them is shared likewise."""
        part, found = first_rows(self, rows), first_rows(drafter, rows)
        part.rows, part.harvest = first_rows(self.rows, rows), first_rows(self.harvest, rows)
        part.params, part.drafter = params, found
        part.owed = first_rows(self.owed, rows)
        return part


class Told(NamedTuple):
    """A round's news. table: int64 [B, 2 L + 4 + W]: tokens emitted, nodes of the kept path (of a
    tree ordered by worth: their places in that order), how
    many drafted ones the rule kept, how many were emitted, whether the row still decodes, whether
    its logits were broken; then, where the batch asks for them, the bits of `told_log_probs` of the
    tokens, and those of what the drafter says. levels, nodes: of the tree that was verified (nodes
    without the root); said: the drafter's columns.
    """

    table: Tensor
    levels: int
    nodes: int
    said: int = 0

    def listed_BLW(self, table: Tensor) -> Tensor | None:
        """That part of the table, read from its copy on the host; None where nobody asked."""
        columns, length = 2 * self.levels + 6, self.levels + 1
        if table.shape[1] == columns + self.said:
            return None
        listed_BX = table[:, columns : table.shape[1] - self.said]
        return listed_BX.view(torch.float64).unflatten(1, (length, -1))

    def news_BX(self, table: Tensor) -> Tensor | None:
        """The drafter's, likewise."""
        return table[:, -self.said :].view(torch.float64) if self.said else None


Run = Callable[[], Told]  # a round, or its recording
Record = Callable[[Run], Run]  # a round -> its recording; doesn't run it


@dataclass
class Stepper:
    """The round of one decoder. acceptance: the settings' own, ready for the target."""

    runner: Runner
    drafter: Drafter | None
    settings: DecodeSettings
    acceptance: Lossy | None
    recorder: Recorder | None

    @torch.inference_mode()
    def step(self, batch: DecodeBatch, plan: Plan | None, top: int, policy: Policy | None) -> Told:
        """Advance every active row by one round. plan: None for plain decoding; top: at least the
        largest committed length, a plain int; policy: asked on the way, None for whole trees.
        """
        rows, params, pool = batch.rows, batch.params, batch.pool
        levels = 0 if plan is None else plan.levels
        lens_B1 = rows.lens_B[:, None]
        step_L, shared_BLV = torch.arange(levels + 1, device=self.runner.device), None
        if (rule := self.rule(params)).identical:
            shared_BLV = self.race(rows.seeds_B, lens_B1 + step_L + 1, params)
        calls: list[Call] | None = None if self.recorder is None else []
        tree = self._propose(batch, plan, top, shared_BLV, policy, calls)
        if shared_BLV is not None:
            shared_BLV = shared_BLV[:, : tree.topology.levels + 1]
        tokens_BN, topology = tree.tokens_BN, tree.topology
        block = None if topology.is_chain else topology.ancestors
        width = min(round_up(top + topology.nodes), pool.slots)
        seen = Seen(rows.lens_B, width, block, topology.depth)
        slots_BN = lens_B1 + torch.arange(topology.nodes, device=tokens_BN.device)
        positions_BN = (lens_B1 + topology.depth).expand_as(slots_BN)
        hidden_BNH, taps_BNU = self.runner.verify(pool, tokens_BN, positions_BN, slots_BN, seen)
        logits_BNV = self.runner.logits(hidden_BNH)
        p_logits_BNV = batch.law(logits_BNV, tokens_BN, topology.parent)
        drafter = batch.drafter or self.drafter
        told = _told(drafter, tree, logits_BNV, p_logits_BNV, shared_BLV)
        raw_BNV = None if batch.listed is None else logits_BNV
        del logits_BNV  # a round's largest tensor, which nobody else needs
        # One broken node breaks its row: nothing times NaN is NaN in every product over the slots.
        bad_B = p_logits_BNV.amax(-1).isnan().any(1)
        if self.acceptance is not None:
            p_logits_BNV = self.acceptance.law(tree, p_logits_BNV, params)

        noise, extra_BN = self._noise(batch, topology, shared_BLV), None
        if self.recorder is not None and calls:
            self.recorder.record(rows, tree, calls, p_logits_BNV, hidden_BNH, noise)
        if self.acceptance is not None and self.acceptance.masks:
            extra_BN = self.acceptance.mask(tree, p_logits_BNV, noise, hidden_BNH)
        path_BL, n_accepted_B, next_B = rule.verify(tree, p_logits_BNV, noise, extra_BN)
        if self.settings.same_shape:
            n_accepted_B = torch.zeros_like(n_accepted_B)
            next_B = choose(p_logits_BNV[:, 0], None if shared_BLV is None else shared_BLV[:, 0])
        elif not topology.is_chain:
            pool.commit(lens_B1 + path_BL, lens_B1 + step_L[: topology.levels + 1])
        kept_BL = tokens_BN.gather(1, path_BL)
        emitted_BL = kept_BL.roll(-1, 1).scatter(1, n_accepted_B[:, None], next_B[:, None])
        before_B = rows.lens_B.clone()
        n_new_B = rows.advance(emitted_BL, n_accepted_B, bad_B)
        pool.settle(path_BL, n_new_B)
        taps_BLU = None if taps_BNU is None else picked(taps_BNU, path_BL)
        if batch.harvest is not None:
            batch.harvest.keep(before_B, picked(hidden_BNH, path_BL), taps_BLU)
        said_BX = None
        if drafter is not None:
            path = None if topology.is_chain else path_BL
            kept = Kept(emitted_BL, n_new_B, path, before_B, taps_BLU, top, params=params, **told)
            said_BX = batch.told(drafter, kept, waits=plan is None)
        ended = torch.stack([n_accepted_B, n_new_B, rows.active_B, bad_B], 1)
        news = [emitted_BL, tree.ranks(path_BL), ended]
        if raw_BNV is not None and batch.listed is not None:
            told_BLW = told_log_probs(picked(raw_BNV, path_BL), emitted_BL, batch.listed)
            news.append(told_BLW.flatten(1).view(torch.int64))
        said = [] if said_BX is None else [said_BX.view(torch.int64)]
        size = topology.levels, topology.nodes - 1, sum(part.shape[1] for part in said)
        return Told(torch.cat(news + said, 1), *size)

    @torch.inference_mode()
    def catch_up(self, batch: DecodeBatch, rounds: int, top: int) -> None:
        """Let the drafter take in what at most so many rounds without a draft owe it."""
        drafter = batch.drafter or self.drafter
        if drafter is not None and batch.owed is not None:
            drafter.catch_up(batch.owed.settled(batch.rows.lens_B, rounds, top))

    @torch.inference_mode()
    def between(self, batch: DecodeBatch, plan: Plan, top: int) -> bool:
        """Let a drafter with `scratch` look at its rows; as `Drafter.between`."""
        if self.drafter is None or not self.drafter.scratch:
            return False
        rows, params = batch.rows, batch.params
        rule = self.rule(params)

        def race(positions_BM: Tensor) -> Tensor | None:
            return self.race(rows.seeds_B, positions_BM, params) if rule.identical else None

        at = rows.lens_B, rows.pending_B, rows.active_B
        return self.drafter.between(Round(plan, *at, top, params, rule.law), race)

    def rule(self, params: BatchParams) -> RuleInfo:
        """The rule asked for; where nothing is drafted or drawn, every rule is the coupled one."""
        plain = params.greedy or self.drafter is None
        return RULES["coupled" if plain else self.settings.rule]

    def race(self, seeds_B: Tensor, positions_BD: Tensor, params: BatchParams) -> Tensor | None:
        """log E [B, D, V] of the tokens at these positions; None when greedy."""
        if params.greedy:
            return None
        race_BDV = sampling.log_race(position_keys(seeds_B, positions_BD), self.runner.head.size)
        return params.quiet(race_BDV) if isinstance(params, RowParams) else race_BDV

    def _propose(
        self,
        batch: DecodeBatch,
        plan: Plan | None,
        top: int,
        shared_BLV: Tensor | None,
        policy: Policy | None,
        calls: list[Call] | None,
    ) -> TokenTree:
        rows, drafter = batch.rows, batch.drafter or self.drafter
        if drafter is None or plan is None:
            return TokenTree(rows.pending_B[:, None], chain(0, self.runner.device), COUPLED)
        rule = self.rule(batch.params)
        request = Round(
            plan=plan,
            lens_B=rows.lens_B,
            pending_B=rows.pending_B,
            active_B=rows.active_B,
            top=top,
            params=batch.params,
            law=rule.law,
            race_BDV=shared_BLV if rule.law == COUPLED else None,
            # Keyed by the round: a level drafted again after a rejection needs fresh noise.
            seeds_B=None if rule.identical else self._round_keys(rows, sampling.DRAFT),
            want_q=self.settings.needs_q or not rule.identical,
            enough=None if policy is None else policy.enough,
            chance=None if policy is None else policy.chance,
            orders=policy is not None and policy.orders,
            keep=None if policy is None else policy.keep,
            calls=calls,
        )
        return drafter.propose(request)

    def _noise(self, batch: DecodeBatch, topology: Topology, shared_BLV: Tensor | None) -> Noise:
        if self.rule(batch.params).identical:
            return Noise(shared_BLV)
        keys_B = self._round_keys(batch.rows, sampling.ACCEPT)
        node_N = torch.arange(topology.nodes, device=self.runner.device)
        accept_BN = sampling.uniform(position_keys(keys_B, node_N.expand(keys_B.shape[0], -1)))
        residual_B1 = self._round_keys(batch.rows, sampling.RESIDUAL)[:, None]
        residual_BV = sampling.log_race(residual_B1, self.runner.head.size)[:, 0]
        return Noise(None, accept_BN, residual_BV)

    def _round_keys(self, rows: Rows, stream: int) -> Tensor:
        return position_keys(rows.seeds_B, rows.rounds_B[:, None], stream)[:, 0]


def _told(
    drafter: Drafter | None,
    tree: TokenTree,
    logits_BNV: Tensor,
    p_logits_BNV: Tensor,
    shared_BLV: Tensor | None,
) -> dict[str, Any]:
    """What a drafter is told of the tree's nodes, as `Kept` has it."""
    told: dict[str, Any] = {"nodes_BN": tree.tokens_BN, "topology": tree.topology}
    told["race_BLV"] = shared_BLV
    if drafter is not None and drafter.chooses:
        race_BNV = None
        if shared_BLV is not None:
            at_BN = tree.topology.depth.expand(p_logits_BNV.shape[:2])
            race_BNV = shared_BLV[torch.arange(len(at_BN), device=at_BN.device)[:, None], at_BN]
        told["chosen_BN"] = choose(p_logits_BNV, race_BNV)
    if drafter is not None and drafter.likeliest:
        values_BNX, told["ids_BNX"] = sampling.likeliest(logits_BNV, drafter.likeliest)
        told["log_p_BNX"] = values_BNX - logits_BNV.logsumexp(-1, keepdim=True)
    return told
