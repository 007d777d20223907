"""Two drafters as one: what is looked up where that is sure of itself, a trained one elsewhere.

    suffix+FOLDER     also recycling+FOLDER, stand+FOLDER
    suffix++FOLDER    fused: every tree is grown from both laws

A row is sure where the first token looked up is the right one as often as the trained one's. How
often that is is counted by classes of the chance that the law looked up gives its best token: of
the look-up in every round that drafts, whoever drafts, of the trained one where it did. At first
the law is believed, and the trained one taken for as good as SURE, as which it slowly passes again
in a class where it rests, so that it has its trials. On a CPU the trained drafter isn't asked where
all rows are sure, nor the other one where none is; where rows differ, and on a GPU, which reads
nothing back, both draft, and each row keeps one of the two trees, brought to a common size by
children of the root that are there already. Under the coupled rule, the only one, a tree's shape
may depend on what was drawn. A draft LM, whose draft calls make its keys, takes in what it hasn't
drafted by one pass.

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

Shapes: B rows, N nodes, V vocabulary.
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
from draftsmith.decode.drafting.grow_tree import grow
from draftsmith.decode.drafting.head_drafter import HeadDrafter
from draftsmith.decode.drafting.in_rounds import InRounds, either_rounds
from draftsmith.decode.drafting.owed import Owed
from draftsmith.decode.forward.size import ModelSize
from draftsmith.decode.token_tree import TokenTree, Topology
from draftsmith.decode.tree_shapes import Plan, chain_plan
from draftsmith.decode.untrained.texts import LookupDrafter, hopeless

SURE = 0.6
BELIEVED = 8.0  # rounds that what is taken for granted at first counts for
PLACES, MOST, RESTS = 8, 256.0, 1024.0
ALONE = 1  # of `ways`: what is looked up, and no more


class CompositeDrafter(Drafter):
    """looked: asked first; trained: any drafter that may rest, levels: how deep it drafts; fused:
    whether both draft in one tree. ValueError for one that drafts in the target's own keys, or
    that isn't led call by call, to be fused.
    """

    remembers = True
    held = ("looked", "trained", "owed")

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

    def succeed(self, old: Drafter) -> None:
        assert isinstance(old, CompositeDrafter), "drafters of one kind"
        self.looked.succeed(old.looked)
        self.trained.succeed(old.trained)
        self.kept_22X = old.kept_22X
        if hasattr(old, "owed"):
            self.owed = old.owed

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
        rate_2X = (kept_2X[0] / kept_2X[1]).view(2, PLACES)
        sure_B = known_B & (rate_2X[0] >= rate_2X[1])[place_B]
        self.asked = kept_2X, place_B, torch.where(known_B, scores_BV.argmax(-1), -1), sure_B
        return sure_B

    def _tell(self, kept: Kept) -> None:
        if not self.asked:
            return
        assert kept.nodes_BN is not None and kept.topology is not None, "the engine tells"
        kept_2X, place_B, guess_B, sure_B = self.asked
        self.asked = ()
        went_B, first_B1 = (kept.n_new_B > 0) & (guess_B >= 0), kept.tokens_BL[:, :1]
        drafted_B = ((kept.nodes_BN == first_B1) & (kept.topology.depth == 1)).any(-1)
        led_B = went_B & ~sure_B
        hits = went_B & (first_B1[:, 0] == guess_B), led_B & drafted_B
        before_2X = kept_2X[:, PLACES:].clone()
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

        levels = min(request.plan.levels, request.plan.nodes - 1)
        far = replace(request, plan=chain_plan(levels))
        if self.looked.reads:
            if bool((sure_B | ~request.active_B).all()):
                return self.looked.propose(far)
            if not bool((sure_B & request.active_B).any()):
                self.led = True
                return self.trained.propose(self._shallow(request))
        copied = self.looked.grown(far, feed)
        return either(sure_B, copied, self.trained.propose(self._shallow(request)))

    def in_rounds(self, nodes: int, temperature: float) -> InRounds | None:
        if self.fused:
            return None
        self._settle()
        first = self.looked.in_rounds(nodes, temperature)
        other = self.trained.in_rounds(min(nodes, 1 + self.deepest), temperature)
        if first is None or other is None:
            return None
        kept_2X, rows = self.kept_22X[int(temperature > 0)], len(self.looked.lens_B)
        how = PLACES, SURE, MOST, RESTS
        return either_rounds(first, other, self.deepest, rows, kept_2X, how)

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


def either(first_B: Tensor, first: TokenTree, second: TokenTree) -> TokenTree:
    """Of each row one of two trees."""
    nodes = max(first.tokens_BN.shape[1], second.tokens_BN.shape[1])
    pairs = zip(_padded(first, nodes), _padded(second, nodes), strict=True)
    tokens_BN, parent_BN, depth_BN, ancestors_BNN = (
        torch.where(first_B.view(-1, *[1] * (one.dim() - 1)), one, other) for one, other in pairs
    )
    levels = max(first.topology.levels, second.topology.levels)
    topology = Topology(parent_BN, depth_BN, ancestors_BNN, levels)
    return TokenTree(tokens_BN, topology, first.law)


def _padded(tree: TokenTree, nodes: int) -> tuple[Tensor, ...]:
    """Tokens, parents, depths and ancestors of a tree with more children of its root."""
    rows, own = tree.tokens_BN.shape
    more, topology = nodes - own, tree.topology
    extra_BN = tree.tokens_BN[:, min(1, own - 1)][:, None].expand(-1, more)
    tokens_BN = torch.cat([tree.tokens_BN, extra_BN], 1)
    parent_BN = F.pad(topology.parent.expand(rows, -1), (0, more))
    depth_BN = F.pad(topology.depth.expand(rows, -1), (0, more), value=1)
    ancestors_BNN = F.pad(topology.ancestors.expand(rows, -1, -1), (0, more, 0, more))
    ancestors_BNN = ancestors_BNN | torch.eye(nodes, dtype=torch.bool, device=tokens_BN.device)
    ancestors_BNN[..., 0] = True
    return tokens_BN, parent_BN, depth_BN, ancestors_BNN
