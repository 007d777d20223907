"""One round over device state: draft, verify, commit. Nothing in it reads the device (unless a
policy asks for it, or prompt lookup on a CPU), so a round can be captured and replayed as it is.

Shapes: B rows, R of them just admitted, N nodes, L = D + 1 tokens that one round can emit, M ids
that may end one request, U width of the taps' states, V vocabulary.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftsmith.decode import sampling
from draftsmith.decode.drafting.base import Call, Drafter, Kept, Round, picked
from draftsmith.decode.drafting.in_rounds import InRounds
from draftsmith.decode.drafting.owed import Owed
from draftsmith.decode.engine.grammar import Grammar, ruled
from draftsmith.decode.engine.recorder import Harvest, Recorder
from draftsmith.decode.engine.rows import Rows, Settled, Told
from draftsmith.decode.engine.settings import DecodeSettings
from draftsmith.decode.engine.several import MOST, kept_of, rounds_at_once, several
from draftsmith.decode.forward.attention import spread
from draftsmith.decode.forward.kv import KVPool, round_up
from draftsmith.decode.forward.runner import Runner, Seen
from draftsmith.decode.policies.policy import Policy
from draftsmith.decode.sampling import (
    BatchParams,
    RowParams,
    choose,
    position_keys,
    told_log_probs,
    unfiltered,
)
from draftsmith.decode.token_tree import COUPLED, TokenTree, Topology, chain
from draftsmith.decode.tree_shapes import Plan
from draftsmith.decode.verify.lossy import Lossy
from draftsmith.decode.verify.rules import RULES, Noise, RuleInfo, Verdict

Kind = TypeVar("Kind")


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
            setattr(part, name, value.part(0, rows))
        elif hasattr(value, "held"):  # a drafter made of drafters
            setattr(part, name, first_rows(value, rows))
    return part


@dataclass
class DecodeBatch:
    """What rounds work on. harvest: None where nobody wants it; drafter: the stepper's own, of a
    part of the rows; listed: how many likeliest tokens to tell of each place, None for no
    log-probabilities; grammars: of each row's answer, None where no row has one. They are followed
    on the host, so what was emitted is read before the next round. owed: to drafters that let
    tokens wait, where a policy may draft nothing; longest: rounds of one call.
    """

    rows: Rows
    pool: KVPool
    params: BatchParams
    harvest: Harvest | None = None
    drafter: Drafter | None = None
    listed: int | None = None
    grammars: Sequence[Grammar | None] | None = None
    owed: Owed | None = None
    longest: int = MOST

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
        return part


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
        lens_B1, shared_BLV = rows.lens_B[:, None], None
        if self.rule(params).identical and not params.greedy:
            next_L = torch.arange(1, levels + 2, device=self.runner.device)
            shared_BLV = self.race(rows.seeds_B, lens_B1 + next_L, params)
        calls: list[Call] | None = None if self.recorder is None else []
        tree = self._propose(batch, plan, top, shared_BLV, policy, calls)
        if policy is not None and policy.share is not None and plan is not None:
            tree = policy.share(tree, rows.active_B)
        if shared_BLV is not None:
            shared_BLV = shared_BLV[:, : tree.topology.levels + 1]
        tokens_BN, topology = tree.tokens_BN, tree.topology
        deaf = self._deaf(batch, plan, policy)
        hidden_BNH, taps_BNU, logits_BNV = self._verify(batch, tree, top, taps=not deaf)
        p_logits_BNV = batch.law(logits_BNV, tokens_BN, topology.parent)
        drafter, waits = batch.drafter or self.drafter, plan is None and batch.owed is not None
        told = {} if waits else _told(drafter, tree, logits_BNV, p_logits_BNV, shared_BLV)
        raw_BNV = None if batch.listed is None else logits_BNV
        del logits_BNV  # a round's largest tensor, which nobody else needs
        made = self._settled(batch, tree, p_logits_BNV, shared_BLV, hidden_BNH, calls)
        emitted_BL, path_BL, n_new_B, before_B, table = made
        if not (topology.is_chain or self.settings.same_shape):
            before_B1 = before_B[:, None]
            step_L = torch.arange(path_BL.shape[1], device=path_BL.device)
            pool.commit(before_B1 + path_BL, before_B1 + step_L)
        pool.settle(path_BL, n_new_B)
        # A round of one node keeps that.
        taps_BLU = taps_BNU if taps_BNU is None or plan is None else picked(taps_BNU, path_BL)
        if batch.harvest is not None:
            batch.harvest.keep(before_B, picked(hidden_BNH, path_BL), taps_BLU)
        said_BX, owes = None, list[Kept]()
        if drafter is not None and not deaf:
            path = None if topology.is_chain else path_BL
            kept = Kept(emitted_BL, n_new_B, path, before_B, taps_BLU, top, params=params, **told)
            owes = [kept] if waits else []
            said_BX = None if waits else drafter.extend(kept)
        news = [table]
        if raw_BNV is not None and batch.listed is not None:
            told_BLW = told_log_probs(picked(raw_BNV, path_BL), emitted_BL, batch.listed)
            news.append(told_BLW.flatten(1).view(torch.int64))
        if said_BX is not None:
            news.append(said_BX.view(torch.int64))
        size = topology.levels, topology.nodes - 1, 0 if said_BX is None else said_BX.shape[1]
        cut = None if tree.verified_B is None else tree
        return Told(table if len(news) == 1 else torch.cat(news, 1), *size, owes, cut)

    @torch.inference_mode()
    def several(
        self, batch: DecodeBatch, plan: Plan | None, top: int, policy: Policy
    ) -> Told | None:
        """Some rounds at once, their tables one after another, up to one in which a row ends; None
        where that isn't for such rows, or such a draft, or rounds must be looked at one by one.
        policy: which has just been asked.
        """
        rows, params, drafter = batch.rows, batch.params, batch.drafter or self.drafter
        nodes = 1 if plan is None else plan.nodes
        most, span = rounds_at_once(self.runner, len(rows.lens_B), params, nodes, batch.longest)
        most = most if drafter is None else min(most, policy.stays)
        if most < 1:
            return None
        requests = [r for r in rows.requests if r is not None]
        most = min([most, *(r.limit - len(r.completion.tokens) for r in requests)])
        watchers = self.acceptance, self.recorder, batch.harvest, batch.listed, batch.grammars
        watched = self.settings.same_shape or any(one is not None for one in watchers)
        if plan is not None:
            alone = policy.asked or (drafter is not None and drafter.chooses)
            watched = watched or alone or not (plan.is_chain and unfiltered(params))
        elif drafter is not None:  # one that isn't owed rounds is told of each as it ends
            watched = watched or (batch.owed is None and drafter.hears)
        if drafter is not None and drafter.remembers:  # nothing past a string that ends an answer
            watched = watched or any(r.params.stop for r in requests)
        if watched or most < 1 or self.rule(params) is not RULES["coupled"]:
            return None
        drafts: InRounds | None = InRounds()
        leader = drafter if plan is None or drafter is None else drafter.leader(plan)
        if plan is not None and leader is not None:
            drafts = leader.in_rounds(nodes, params.law[0])
        if drafts is None:
            return None
        span = min(span, most * nodes, 2 * (most + nodes - 1))
        began, race_BMV = time.thread_time(), None
        if not params.greedy:
            at_BM = rows.lens_B[:, None] + torch.arange(1, span + 1)
            race_BMV = self.race(rows.seeds_B, at_BM, params)
        noise = time.thread_time() - began  # the longer, the more rounds there may be
        reach = most, nodes, min(round_up(top + most * nodes), batch.pool.slots)
        told = plan is None and batch.owed is not None and not self._deaf(batch, None, policy)
        taps = self.runner.taps if told or plan is not None else ()
        at = self.runner, batch.pool, rows, params
        tables_MX, sizes, before_MB, side_MBNU, took = several(*at, race_BMV, reach, drafts, taps)
        owes: list[Kept] = []
        if told:
            table_MBX = tables_MX.view(len(tables_MX), len(rows.lens_B), -1)
            taps_BMU = side_MBNU[:, :, 0].transpose(0, 1)
            kept = table_MBX[..., 0].T, table_MBX[..., 3].sum(0), None, before_MB[0]
            owes = [Kept(*kept, taps_BMU if taps else None, top, params=params)]
        if drafter is not None and leader is not drafter:
            rounds = zip(tables_MX, sizes, before_MB, side_MBNU, strict=True)
            drafter.owe([kept_of(*one) for one in rounds])
        noise /= len(took) if nodes > 1 else span  # what no round came to belongs to none
        took = [seconds + noise for seconds in took]
        drafted = [(length - 1, n - 1) for length, n in sizes]
        return Told(tables_MX, nodes - 1, nodes - 1, owes=owes, several=drafted, took=took)

    def _verify(
        self, batch: DecodeBatch, tree: TokenTree, top: int, *, taps: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The target's states [B, N, H], its taps' where they are wanted, and its logits, at all
        nodes; where rows verify a part, of one pass over the nodes of these parts, zeros elsewhere.
        """
        pool, topology, lens_B1 = batch.pool, tree.topology, batch.rows.lens_B[:, None]
        block = None if topology.is_chain else topology.ancestors
        width = min(round_up(top + topology.nodes), pool.slots)
        seen = Seen(batch.rows.lens_B, width, block, topology.depth)
        slots_BN = positions_BN = lens_B1 + topology.depth
        if not topology.is_chain:
            slots_BN = lens_B1 + torch.arange(topology.nodes, device=lens_B1.device)
        at = pool, tree.tokens_BN, positions_BN, slots_BN, seen
        # Layers with a state take in whole rows.
        if tree.verified_B is None or pool.states is not None:
            hidden_BNH, taps_BNU = self.runner.verify(*at, taps=taps)
            return hidden_BNH, taps_BNU, self.runner.logits(hidden_BNH)
        packed = tree.verified_BN.flatten().nonzero()[:, 0]
        hidden_1MH, taps_1MU = self.runner.verify(*at, taps=taps, packed=packed)
        states = self.runner.logits(hidden_1MH), hidden_1MH, taps_1MU
        wide = [x if x is None else spread(x, packed, tree.tokens_BN.shape) for x in states]
        assert wide[0] is not None and wide[1] is not None
        return wide[1], wide[2], wide[0]

    def _deaf(self, batch: DecodeBatch, plan: Plan | None, policy: Policy | None) -> bool:
        """Whether the drafter need not hear of a round: it is not to draft for more rounds than it
        would be told of (`Owed`).
        """
        sleeps = plan is None and policy is not None and policy.asleep and batch.harvest is None
        remembers = self.drafter is None or self.drafter.remembers
        return sleeps and batch.owed is not None and bool(self.runner.taps) and not remembers

    def _settled(
        self,
        batch: DecodeBatch,
        tree: TokenTree,
        p_logits_BNV: Tensor,
        shared_BLV: Tensor | None,
        hidden_BNH: Tensor,
        calls: list[Call] | None,
    ) -> Settled:
        """What the rule keeps of a tree, the rows then moved on."""
        rows, params, rule = batch.rows, batch.params, self.rule(batch.params)
        watched = self.acceptance is not None or self.recorder is not None
        if not watched and not self.settings.same_shape and rule is RULES["coupled"]:
            made = Settled.at_once(rows, tree, p_logits_BNV, shared_BLV)
            if made is not None:
                return made
        # One broken node breaks its row: nothing times NaN is NaN in every product over the slots.
        bad_B = p_logits_BNV.amax(-1).isnan().any(1)
        if self.acceptance is not None:
            p_logits_BNV = self.acceptance.law(tree, p_logits_BNV, params)
        noise, extra_BN = self._noise(batch, tree.topology, shared_BLV), None
        if self.recorder is not None and calls:
            self.recorder.record(rows, tree, calls, p_logits_BNV, hidden_BNH, noise)
        if self.acceptance is not None and self.acceptance.masks:
            extra_BN = self.acceptance.mask(tree, p_logits_BNV, noise, hidden_BNH)
        verdict = rule.verify(tree, p_logits_BNV, noise, extra_BN)
        if self.settings.same_shape:
            next_B = choose(p_logits_BNV[:, 0], None if shared_BLV is None else shared_BLV[:, 0])
            none_B = torch.zeros_like(verdict.n_accepted_B)
            verdict = Verdict(verdict.path_BL, none_B, next_B)
        return Settled.by(rows, tree, verdict, bad_B)

    def catch_up(self, batch: DecodeBatch, top: int) -> None:
        """Let the drafter take in the prompts and the rounds without a draft that it is owed."""
        drafter, owed = batch.drafter or self.drafter, batch.owed
        if drafter is None or owed is None or not (owed.prompts or owed.rounds):
            return
        with torch.inference_mode():  # which costs more than to see that there is nothing
            for row, admitted in owed.prompts.items():
                if batch.rows.requests[row] is not None:
                    drafter.prefill(admitted)
            owed.prompts.clear()
            if owed.rounds:
                drafter.catch_up(owed.settled(batch.rows.lens_B, top))

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
        params = batch.params
        rule = self.rule(params)
        request = Round(
            plan=plan,
            lens_B=rows.lens_B,
            pending_B=rows.pending_B,
            active_B=rows.active_B,
            top=top,
            params=params,
            law=rule.law,
            race_BDV=shared_BLV if rule.law == COUPLED else None,
            race=None if rule.law != COUPLED else lambda at: self.race(rows.seeds_B, at, params),
            # Keyed by the round: a level drafted again after a rejection needs fresh noise.
            seeds_B=None if rule.identical else self._round_keys(rows, sampling.DRAFT),
            want_q=self.settings.needs_q or not rule.identical,
            enough=None if policy is None else policy.enough,
            chance=None if policy is None else policy.chance,
            orders=policy is not None and policy.orders,
            keep=None if policy is None else policy.keep,
            sure=policy is not None and policy.share is not None,
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
    """What `Kept` has of the tree's nodes, whose root may lie on `pending_B`."""
    told: dict[str, Any] = {"nodes_BN": tree.tokens_BN.clone(), "topology": tree.topology}
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
