"""One round over device state: draft, verify, commit. Nothing in it reads the device (unless a
policy asks for it, or prompt lookup on a CPU), so a round can be captured and replayed as it is.

Shapes: B rows, N nodes, L = D + 1 tokens that one round can emit, U width of the taps' states, V
vocabulary.
"""

import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.decode import sampling
from draftsmith.decode.drafters.base import Call, Drafter, Kept, Round, picked
from draftsmith.decode.engine.harvest import Harvest
from draftsmith.decode.engine.recorder import Recorder
from draftsmith.decode.engine.rows import Rows, first_rows
from draftsmith.decode.engine.settings import DecodeSettings
from draftsmith.decode.forward.kv import KVPool
from draftsmith.decode.forward.runner import Runner, Seen, round_up
from draftsmith.decode.policies.policy import Policy
from draftsmith.decode.sampling import BatchParams, RowParams, choose, position_keys
from draftsmith.decode.token_tree import COUPLED, TokenTree, Topology, chain
from draftsmith.decode.tree_shapes import Plan
from draftsmith.decode.verify.rules import RULES, Noise, RuleInfo


@dataclass
class DecodeBatch:
    """What rounds work on: rows, KV, sampling parameters; harvest: what the target knew of each
    row's answer, None where nobody wants it; drafter: the stepper's own, of a part of the rows.
    """

    rows: Rows
    pool: KVPool
    params: BatchParams
    harvest: Harvest | None = None
    drafter: Drafter | None = None

    def first(self, rows: int, params: BatchParams, drafter: Drafter | None) -> "DecodeBatch":
        """Rows 0..rows-1 on the same memory; drafter: whose state of them is shared likewise."""
        part = None
        if drafter is not None:
            part = copy.copy(drafter)
            for name in drafter.held:
                state = getattr(drafter, name, None)
                if state is not None:
                    cut = state.first(rows) if isinstance(state, KVPool) else state[:rows]
                    setattr(part, name, cut)
        harvest = None if self.harvest is None else first_rows(self.harvest, rows)
        return DecodeBatch(
            first_rows(self.rows, rows), self.pool.first(rows), params, harvest, part
        )


class Told(NamedTuple):
    """A round's news. table: int64 [B, 2 L + 4]: tokens emitted, nodes of the kept path, how many
    drafted ones the rule kept, how many were emitted, whether the row still decodes, whether its
    logits were broken. levels, nodes: of the tree that was verified (nodes without the root).
    """

    table: Tensor
    levels: int
    nodes: int


class Stepper:
    """The round of one decoder."""

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter | None,
        settings: DecodeSettings,
        vocab_size: int,
        recorder: Recorder | None = None,
    ) -> None:
        self.runner, self.drafter, self.settings = runner, drafter, settings
        self.recorder = recorder
        self.vocab_size = vocab_size
        self.acceptance = settings.acceptance

    @torch.inference_mode()
    def step(self, batch: DecodeBatch, plan: Plan | None, top: int, policy: Policy | None) -> Told:
        """Advance every active row by one round. plan: None for plain decoding; top: at least the
        largest committed length, a plain int; policy: asked on the way, None for whole trees.
        """
        rows, params, pool = batch.rows, batch.params, batch.pool
        drafter = batch.drafter or self.drafter
        levels = 0 if plan is None else plan.levels
        lens_B1 = rows.lens_B[:, None]
        step_L = torch.arange(levels + 1, device=self.runner.device)
        shared_BLV = None
        if self.rule(params).identical:
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
        p_logits_BNV = params.transform(self.runner.logits(hidden_BNH))
        # One broken node breaks its row: nothing times NaN is NaN in every product over the slots.
        bad_B = p_logits_BNV.amax(-1).isnan().any(1)

        noise = self._noise(batch, topology, shared_BLV)
        if self.recorder is not None and calls:
            self.recorder.record(rows, tree, calls, p_logits_BNV, hidden_BNH, noise)
        path_BL, n_accepted_B, next_B = self._verdict(
            batch.params, tree, p_logits_BNV, hidden_BNH, noise
        )
        if not (topology.is_chain or self.settings.same_shape):
            level_L = step_L[: topology.levels + 1]
            pool.commit(lens_B1 + path_BL, lens_B1 + level_L)
        kept_BL = tokens_BN.gather(1, path_BL)
        emitted_BL = torch.cat([kept_BL[:, 1:], kept_BL[:, :1]], 1)
        emitted_BL = emitted_BL.scatter(1, n_accepted_B[:, None], next_B[:, None])
        before_B = rows.lens_B.clone()
        n_new_B = rows.advance(emitted_BL, n_accepted_B, bad_B)
        taps_BLU = None if taps_BNU is None else picked(taps_BNU, path_BL)
        if batch.harvest is not None:
            batch.harvest.keep(before_B, picked(hidden_BNH, path_BL), taps_BLU)
        if drafter is not None:
            path = None if topology.is_chain else path_BL
            drafter.extend(Kept(emitted_BL, n_new_B, path, before_B, taps_BLU, top))
        columns = [n_accepted_B, n_new_B, rows.active_B, bad_B]
        news = torch.cat([emitted_BL, path_BL, torch.stack(columns, 1)], 1)
        return Told(news, topology.levels, topology.nodes - 1)

    def rule(self, params: BatchParams) -> RuleInfo:
        """The rule asked for; where nothing is drafted or drawn, every rule is the coupled one."""
        plain = params.greedy or self.drafter is None
        return RULES["coupled" if plain else self.settings.rule]

    def race(self, seeds_B: Tensor, positions_BD: Tensor, params: BatchParams) -> Tensor | None:
        """log E [B, D, V] of the tokens at these positions; None when greedy."""
        if params.greedy:
            return None
        race_BDV = sampling.log_race(position_keys(seeds_B, positions_BD), self.vocab_size)
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
        needs_q = self.acceptance is not None and self.acceptance.needs_q
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
            want_q=needs_q or not rule.identical,
            enough=None if policy is None else policy.enough,
            chance=None if policy is None else policy.chance,
            orders=policy is not None and policy.orders,
            calls=calls,
        )
        return drafter.propose(request)

    def _verdict(
        self,
        params: BatchParams,
        tree: TokenTree,
        p_logits_BNV: Tensor,
        hidden_BNH: Tensor,
        noise: Noise,
    ) -> tuple[Tensor, Tensor, Tensor]:
        extra_BN = None
        if self.acceptance is not None:
            extra_BN = self.acceptance.mask(tree, p_logits_BNV, noise, hidden_BNH)
        verdict = self.rule(params).verify(tree, p_logits_BNV, noise, extra_BN)
        if not self.settings.same_shape:
            return verdict
        race_BV = None if noise.log_race_BLV is None else noise.log_race_BLV[:, 0]
        plain_B = choose(p_logits_BNV[:, 0], race_BV)
        return verdict.path_BL, torch.zeros_like(verdict.n_accepted_B), plain_B

    def _noise(self, batch: DecodeBatch, topology: Topology, shared_BLV: Tensor | None) -> Noise:
        if self.rule(batch.params).identical:
            return Noise(shared_BLV)
        keys_B = self._round_keys(batch.rows, sampling.ACCEPT)
        node_N = torch.arange(topology.nodes, device=self.runner.device)
        accept_BN = sampling.uniform(position_keys(keys_B, node_N.expand(keys_B.shape[0], -1)))
        residual_B1 = self._round_keys(batch.rows, sampling.RESIDUAL)[:, None]
        residual_BV = sampling.log_race(residual_B1, self.vocab_size)[:, 0]
        return Noise(None, accept_BN, residual_BV)

    def _round_keys(self, rows: Rows, stream: int) -> Tensor:
        return position_keys(rows.seeds_B, rows.rounds_B[:, None], stream)[:, 0]
