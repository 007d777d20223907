"""Two drafters as one: what is looked up where that is sure of itself, both elsewhere.

    suffix+FOLDER     also recycling+FOLDER, stand+FOLDER
    suffix++FOLDER    fused: every tree is grown from both laws

A row is sure where the first token looked up is the right one as often as the trained one's. How
often that is is counted by classes of the chance that the law looked up gives its best token: of
the look-up in every round that drafts, whoever drafts, of the trained one where it did, and of that
by row too, against what its classes made expect, since it may know nothing of the text at hand. At
first the law is believed, and the trained one taken for as good as SURE, as which it slowly passes
again in a class where it rests, so that it has its trials. A sure row drafts what is looked up; of
any other one the trained one's tree is verified, and beside it what is looked up, from where it
parts from that tree, as far as the plan has nodes (but under policies that choose among a draft's
nodes, which know them by their depths). On a CPU the trained drafter isn't asked where all rows are
sure; a GPU, which reads nothing back, always asks it. Rows are brought to a common size by children
of the root that are there already. Under the coupled rule, the only one, a tree's shape may depend
on what was drawn. A draft LM, whose draft calls make its keys, takes in what it hasn't drafted by
one pass.

On a CPU the store may lead a round alone too (`ALONE` of `ways`, which policies that weigh rounds
choose): the trained one then neither drafts nor hears, and takes in what waits before it drafts
again.

A looked-up draft is a chain as deep as the plan; the trained one is asked for as many levels of it
as its folder's K says, so that K=16 copies far and drafts no farther than it did.

Fused, what was never seen is what the head says: w(v) the weights looked up after a path, s that of
the unseen,

    q(v) ~ w(v) + s head(v)

in one tree, in which retrieved and drafted paths that begin alike are one, and all compete by their
chance (RASD, arXiv 2503.03434, prunes a retrieved tree by the head's first step and unites it with
the head's, which has no q). So it serves rules by rejection too. Below the head's last level the
law is what is looked up alone.

Shapes: B rows, N nodes, M of them beside a tree, K tokens of a copy, V vocabulary.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.decode.drafting.base import (
    Admitted,
    Call,
    Drafter,
    Fed,
    Feed,
    Frontier,
    Kept,
    Round,
)
from draftsmith.decode.drafting.grow_tree import corrected, grow
from draftsmith.decode.drafting.head_drafter import HeadDrafter
from draftsmith.decode.drafting.in_rounds import InRounds, either_rounds
from draftsmith.decode.drafting.owed import Owed
from draftsmith.decode.forward.size import ModelSize
from draftsmith.decode.token_tree import TokenTree, Topology
from draftsmith.decode.tree_shapes import Plan, chain_plan
from draftsmith.decode.untrained.texts import LookupDrafter, hopeless

SURE = 0.6
BELIEVED = 8.0  # rounds that what is taken for granted at first counts for
USUAL, FADES = 4.0, 0.95  # of a row: rounds in which it is taken for like all; of its past, at each
PLACES, MOST, RESTS = 8, 256.0, 1024.0
ALONE = 1  # of `ways`: what is looked up, and no more


class CompositeDrafter(Drafter):
    """looked: asked first; trained: any drafter that may rest, levels: how deep it drafts; fused:
    whether both draft in one tree. ValueError for one that drafts in the target's own keys, or
    that isn't led call by call, to be fused.
    """

    remembers = True
    held = ("looked", "trained", "owed", "own_B2")

    def __init__(
        self, looked: LookupDrafter, trained: Drafter, levels: int, *, fused: bool = False
    ) -> None:
        by_calls = getattr(type(trained), "propose", None) is HeadDrafter.propose
        if fused and not by_calls and trained.follows:  # who doesn't is a draft LM
            raise ValueError(
                f"drafter: got {looked.kind}++FOLDER with a drafter of kind {trained.kind}, "
                "expected a draft LM, or EAGLE's, Hydra's or Medusa's heads; use "
                f"{looked.kind}+FOLDER"
            )
        if trained.shares or isinstance(trained, CompositeDrafter):
            raise ValueError(
                f"drafter: got {looked.kind}+FOLDER with a drafter of kind {trained.kind}, "
                "expected one that can rest while another drafts: a draft LM or a head, as EAGLE's"
            )
        self.looked, self.trained, self.deepest = looked, trained, min(levels, trained.levels)
        self.fused = self.samples = fused
        self.kind = f"{looked.kind}{'++' if fused else '+'}{trained.kind}"
        self.taps, self.likeliest, self.context = trained.taps, looked.likeliest, trained.context
        self.host, self.owes = trained.host, looked.owes and trained.owes
        if self.owes and looked.reads and not fused:
            self.ways = {ALONE: 0}
        self.led = self.waits = False  # whether the latest tree is all the trained one's, or none
        self.nodes = 1  # of it, the trained one's
        self.asked: tuple[Tensor, ...] = ()  # of the latest round, as `Asked` in round.h
        self.kept_22X = torch.empty(2, 2, 2 * PLACES, device=looked.device)
        self._believe()

    @property
    def form(self) -> str:  # type: ignore[override]
        return self.trained.form

    @property
    def size(self) -> ModelSize | None:
        return self.trained.size

    @property
    def parameter_bytes(self) -> int:
        return self.trained.parameter_bytes

    def reset(self, rows: int, slots: int) -> None:
        self.looked.reset(rows, slots)
        self.trained.reset(rows, slots)
        self.owed = Owed(self.looked.lens_B, taps=bool(self.taps))
        # How often the trained one was right in a row, and how often that was to be expected.
        self.own_B2 = self.kept_22X.new_zeros(rows, 2)

    def succeed(self, old: Drafter) -> None:
        assert isinstance(old, CompositeDrafter), "drafters of one kind"
        self.looked.succeed(old.looked)
        self.trained.succeed(old.trained)
        self.kept_22X = old.kept_22X
        if hasattr(old, "owed"):
            self.owed, self.own_B2 = old.owed, old.own_B2

    def forget(self) -> None:
        self.looked.forget()
        self._believe()

    def _believe(self) -> None:
        """Of greedy rounds and others: how often first tokens were emitted, and seen; of the
        look-up by its own chance, then of the trained one.
        """
        chances = [*((i + 0.5) / PLACES for i in range(PLACES)), *[SURE] * PLACES]
        chance_X = torch.tensor(chances)
        self.kept_22X.copy_(BELIEVED * torch.stack([chance_X, torch.ones_like(chance_X)]))

    def prefill(self, admitted: Admitted) -> None:
        self.asked = ()
        self.looked.prefill(admitted)
        self.trained.prefill(admitted)
        self.owed.begin(admitted.rows_R, admitted.lens_R)
        self.own_B2[admitted.rows_R] = 0

    def extend(self, kept: Kept) -> Tensor | None:
        self._tell(kept)
        self.looked.extend(kept)
        if self.waits:
            self.owe([kept])
            return None
        if self.led or self.trained.follows:
            return self.trained.extend(kept)
        self.trained.catch_up(kept._replace(path_BL=None))
        return None

    def catch_up(self, kept: Kept) -> None:
        self.looked.catch_up(kept)
        if self.ways:
            self.owe([kept])
        else:
            self.trained.catch_up(kept)

    def _settle(self) -> None:
        """Let the trained one take in what waits, before it drafts."""
        if self.owed.rounds:
            lens_B = (self.looked.lens_B - 1).clamp(min=1)  # as of rows that nobody holds
            kept = self.owed.settled(lens_B, int(lens_B.max()))
            if kept.n_new_B.any():
                self.trained.catch_up(kept)

    def owe(self, rounds: Sequence[Kept]) -> None:
        self.owed.take(rounds, replayed=False)

    def leader(self, plan: Plan) -> Drafter:
        return self.looked if plan.by == ALONE else self

    def feed(self, request: Round) -> Feed | None:
        """Of the trained one, which is what a draft call costs; or of both."""
        drafted = self.trained.feed(self._shallow(request))
        assert drafted is not None, "a head is asked by draft calls"
        drafted = corrected(request, drafted, self.trained.per_node)
        if not self.fused:
            fed = None

            def shallow(frontier: Frontier) -> Fed:
                nonlocal fed
                fed = drafted(frontier) if frontier.depth < self.deepest else fed
                assert fed is not None
                return fed

            return shallow
        ask, slack = self.looked.looked_up()[0], self.looked.slack

        def feed(frontier: Frontier) -> Fed:
            found_BFV = ask(frontier).logits_BFV
            if frontier.depth >= self.deepest:
                return Fed(found_BFV, found_BFV[..., :0])
            fed, unseen = drafted(frontier), slack / found_BFV.shape[-1]
            known_BFV = (found_BFV.exp() - unseen).clamp(min=0)
            return fed._replace(
                logits_BFV=(known_BFV + slack * fed.logits_BFV.float().softmax(-1)).log()
            )

        return feed

    def _ask(self, first_BV: Tensor, request: Round) -> Tensor:
        """Rows that are sure [B], by the law looked up first."""
        kept_2X = self.kept_22X[int(not request.params.greedy)]
        known_B = first_BV.amax(-1) > first_BV.amin(-1)
        place_B = (first_BV.softmax(-1).amax(-1) * PLACES + 0.5 / PLACES).long()
        place_B = torch.where(known_B, place_B.clamp(max=PLACES - 1), 0)
        scores_BV = request.params.transform(first_BV[:, None])[:, 0]
        if request.race_BDV is not None:
            scores_BV = scores_BV - request.race_BDV[:, 0]
        rate_2B = (kept_2X[0] / kept_2X[1]).view(2, PLACES)[:, place_B]
        right_B, expected_B = (self.own_B2 + USUAL).unbind(1)
        sure_B = known_B & (rate_2B[0] >= rate_2B[1] * (right_B / expected_B))
        self.asked = kept_2X, place_B, torch.where(known_B, scores_BV.argmax(-1), -1), sure_B
        return sure_B

    def _tell(self, kept: Kept) -> None:
        if not self.asked:
            return
        assert kept.nodes_BN is not None and kept.topology is not None, "the engine tells"
        kept_2X, place_B, guess_B, sure_B = self.asked
        self.asked = ()
        went_B, first_B1 = (kept.n_new_B > 0) & (guess_B >= 0), kept.tokens_BL[:, :1]
        drafted_BN = (kept.nodes_BN == first_B1) & (kept.topology.depth == 1)
        led_B = went_B & ~sure_B
        hits = went_B & (first_B1[:, 0] == guess_B), led_B & drafted_BN[:, : self.nodes].any(-1)
        before_2X = kept_2X[:, PLACES:].clone()
        own_B2 = torch.stack([hits[1], (before_2X[0] / before_2X[1])[place_B]], 1)
        self.own_B2.copy_(torch.where(led_B[:, None], FADES * self.own_B2 + own_B2, self.own_B2))
        at_X = torch.cat([place_B, place_B + PLACES])
        for counts_X, own in zip(kept_2X, (hits, (went_B, led_B)), strict=True):
            counts_X.index_add_(0, at_X, torch.cat(own).to(counts_X))
        rest_X = torch.zeros_like(before_2X[0]).index_add_(0, place_B, (went_B & sure_B).float())
        kept_2X[0, PLACES:] += rest_X * (SURE * before_2X[1] - before_2X[0]) / RESTS
        kept_2X.mul_(torch.where(kept_2X[1] > MOST, 0.5, 1.0))

    def propose(self, request: Round) -> TokenTree:
        self.led, self.waits, self.asked = False, request.plan.by == ALONE, ()
        if self.waits:
            return self.looked.propose(request)
        self._settle()
        if self.fused:
            if self.looked.reads and request.enough is None:
                request = replace(request, enough=self._hopeless)
            feed_both = self.feed(request)
            assert feed_both is not None, "as above"
            return grow(request, feed_both)[0]
        ask, known_B = self.looked.looked_up()
        slot_1 = torch.zeros_like(known_B[:1]).long()
        first = ask(Frontier(0, request.pending_B[:, None], None, slot_1))
        sure_B = self._ask(first.logits_BFV[:, 0], request)

        def feed(frontier: Frontier) -> Fed:
            return ask(frontier) if frontier.depth else first

        levels, reads = min(request.plan.levels, request.plan.nodes - 1), self.looked.reads
        far = replace(request, plan=chain_plan(levels))
        if reads and bool((sure_B | ~request.active_B).all()):
            return self.looked.propose(far)
        copied = self.looked.propose(far) if reads else self.looked.grown(far, feed)
        drafted = self.trained.propose(self._shallow(request))
        self.nodes = drafted.topology.nodes
        most = 0 if request.sure or request.keep is not None else request.plan.nodes
        cut_B = request.active_B if reads else None
        tree = either(sure_B, copied, drafted, most, cut_B) if copied.topology.levels else drafted
        alone = reads and tree.topology.nodes == self.nodes
        self.led = alone and not bool((sure_B & request.active_B).any())
        return drafted if self.led else tree

    def in_rounds(self, nodes: int, temperature: float) -> InRounds | None:
        if self.fused:
            return None
        self._settle()
        first = self.looked.in_rounds(nodes, temperature)
        other = self.trained.in_rounds(min(nodes, 1 + self.deepest), temperature)
        if first is None or other is None:
            return None
        kept_2X = self.kept_22X[int(temperature > 0)]
        how = PLACES, SURE, MOST, RESTS, USUAL, FADES
        size, kept = (self.deepest, nodes), (kept_2X, self.own_B2)
        return either_rounds(first, other, size, kept, how)

    def _hopeless(self, call: Call) -> Tensor:
        """Where the head goes no deeper, and what is looked up isn't likely."""
        return hopeless(call) & (call.depth + 1 >= self.deepest)

    def _shallow(self, request: Round) -> Round:
        return replace(request, plan=request.plan.cut(self.deepest))

    def __copy__(self) -> "CompositeDrafter":
        """With parts of its own, as other drafters have tensors of their own after `reset`."""
        made = object.__new__(CompositeDrafter)
        parts = {"looked": copy.copy(self.looked), "trained": copy.copy(self.trained)}
        made.__dict__ |= self.__dict__ | parts
        return made


def either(
    first_B: Tensor,
    first: TokenTree,
    second: TokenTree,
    most: int = 0,
    active_B: Tensor | None = None,
) -> TokenTree:
    """Of each row the first tree, a chain, or the second one and, up to so many nodes, what isn't
    in it of the first beside it; active_B: rows to whose size it is cut, which reads it.
    """
    own, copied = second.topology.nodes, first.topology.nodes
    nodes = max(own, copied, min(most, own + copied - 1))
    pairs = zip(_padded(first, nodes), _padded(second, nodes, first.tokens_BN[:, 1:]), strict=True)
    real_B, tokens_BN, parent_BN, depth_BN, ancestors_BNN = (
        torch.where(first_B.view(-1, *[1] * (one.dim() - 1)), one, other) for one, other in pairs
    )
    levels = max(first.topology.levels, second.topology.levels)
    if active_B is not None:
        nodes = int(real_B[active_B].max())
        tokens_BN, parent_BN, depth_BN = (x[:, :nodes] for x in (tokens_BN, parent_BN, depth_BN))
        ancestors_BNN, levels = ancestors_BNN[:, :nodes, :nodes], int(depth_BN[active_B].max())
        depth_BN = depth_BN.clamp(max=levels)
    topology = Topology(parent_BN, depth_BN, ancestors_BNN, levels)
    return TokenTree(tokens_BN, topology, first.law)


def _padded(tree: TokenTree, nodes: int, chain_BK: Tensor | None = None) -> tuple[Tensor, ...]:
    """Of a tree with what it hasn't of a chain, and then more children of its root: how many nodes
    [B] without the latter; tokens, parents, depths and ancestors.
    """
    (rows, own), topology = tree.tokens_BN.shape, tree.topology
    more, parent_BN = nodes - own, topology.parent.expand(rows, -1)
    extra_BM = tree.tokens_BN[:, min(1, own - 1)][:, None].expand(-1, more)
    parent_BM, depth_BM = torch.zeros_like(extra_BM), torch.ones_like(extra_BM)
    ancestors_BNN = F.pad(topology.ancestors.expand(rows, -1, -1), (0, more, 0, more))
    real_B = torch.full_like(tree.tokens_BN[:, 0], own)
    if chain_BK is not None and chain_BK.shape[1]:
        at_B1 = parted_B1 = torch.zeros_like(chain_BK[:, :1])
        along_B1 = torch.ones_like(at_B1, dtype=torch.bool)
        for k in range(min(topology.levels, chain_BK.shape[1])):
            next_BN = (parent_BN == at_B1) & (tree.tokens_BN == chain_BK[:, k : k + 1])
            along_B1 = along_B1 & next_BN.any(1, keepdim=True)
            at_B1 = torch.where(along_B1, next_BN.int().argmax(1, keepdim=True), at_B1)
            parted_B1 = parted_B1 + along_B1
        step_M = torch.arange(more, device=at_B1.device)
        depth_BM = parted_B1 + 1 + step_M
        there_BM = depth_BM <= chain_BK.shape[1]
        depth_BM, real_B = torch.where(there_BM, depth_BM, 1), own + there_BM.sum(1)
        parent_BM = torch.where(there_BM, torch.where(step_M > 0, own - 1 + step_M, at_B1), 0)
        extra_BM = torch.where(there_BM, chain_BK.gather(1, depth_BM - 1), extra_BM)
        above_BMN = ancestors_BNN.gather(1, at_B1[..., None].expand(-1, more, nodes))
        above_BMN[..., own:] = step_M[:, None] >= step_M
        ancestors_BNN[:, own:] = above_BMN & there_BM[..., None]
    parent_BN = torch.cat([parent_BN, parent_BM], 1)
    depth_BN = torch.cat([topology.depth.expand(rows, -1), depth_BM], 1)
    ancestors_BNN = ancestors_BNN | torch.eye(nodes, dtype=torch.bool, device=depth_BN.device)
    ancestors_BNN[..., 0] = True
    return real_B, torch.cat([tree.tokens_BN, extra_BM], 1), parent_BN, depth_BN, ancestors_BNN
