"""What the engine asks of a drafter, whatever its kind.

Shapes: B rows, R of them just admitted, N prompt tokens, D levels, L = D + 1, F nodes fed in one
draft call, C children drawn from them, U width of the taps' states side by side, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.decode.drafting.in_rounds import InRounds
from draftsmith.decode.forward.attention import Seen
from draftsmith.decode.forward.kv import KVPool, kv_shape
from draftsmith.decode.forward.native import NativeBody
from draftsmith.decode.forward.product import VocabHead
from draftsmith.decode.forward.size import ModelSize
from draftsmith.decode.sampling import BatchParams, SamplingParams
from draftsmith.decode.token_tree import TokenTree, Topology
from draftsmith.decode.tree_shapes import Plan
from draftsmith.models.heads.head import ANY_DEPTH
from draftsmith.models.scorers import Scored
from draftsmith.models.taps import Tap


class Fed(NamedTuple):
    """What a draft call gives: raw logits_BFV, and states_BFH, what the LM head made them of."""

    logits_BFV: Tensor
    states_BFH: Tensor


@dataclass
class Call:
    """One draft call and the children drawn in it, as policies and recorders see them.

    depth: of the nodes fed; active_B: rows that still decode; q_logits_BFV: transformed;
    states_BFH: as in `Fed`; race_B1V: the shared noise that children are ranked with; of_BC: which
    of the nodes fed each child is of; path_BC: log chance of the children's whole paths, by the
    round's `chance` (of a dynamic tree without one, by what orders it), None if nobody asks;
    above_BF: log q of the whole paths to the nodes fed, where a chance or a recorder may ask.
    """

    depth: int
    active_B: Tensor
    q_logits_BFV: Tensor
    states_BFH: Tensor
    race_B1V: Tensor | None
    of_BC: Tensor
    tokens_BC: Tensor
    path_BC: Tensor | None = None
    above_BF: Tensor | None = None

    @cached_property
    def scores_BFV(self) -> Tensor:
        """What children are ranked by: the logits less the noise."""
        return self.q_logits_BFV if self.race_B1V is None else self.q_logits_BFV - self.race_B1V

    @cached_property
    def log_q_BC(self) -> Tensor:
        """Log q of each child's token."""
        return self._of_children(self.q_logits_BFV) - self._sums_BF[0].gather(1, self.of_BC)

    @cached_property
    def joint_BC(self) -> Tensor:
        """Log q of each child's whole path."""
        assert self.above_BF is not None
        return self.above_BF.gather(1, self.of_BC) + self.log_q_BC

    @property
    def rank_BC(self) -> Tensor:
        """Each child's place among its siblings, which come best first."""
        return (self.of_BC[:, :, None] == self.of_BC[:, None, :]).tril(-1).sum(-1)

    @property
    def entropy_BF(self) -> Tensor:
        """H(q) after each node fed, nats."""
        return self._sums_BF[1]

    @cached_property
    def lead_BC(self) -> Tensor:
        """How far each child's score is above the best other token's; below 0 of lower ranks."""
        own_BC = self._of_children(self.scores_BFV)
        if self.tokens_BC.shape[1] == self.scores_BFV.shape[1] == 1:  # a chain: no need to sort
            others_BFV = self.scores_BFV.scatter(2, self.tokens_BC[..., None], -torch.inf)
            return own_BC - others_BFV.amax(-1)
        best_BF2 = self.scores_BFV.topk(2, -1).values
        first_BC, second_BC = (best_BF2[..., i].gather(1, self.of_BC) for i in range(2))
        return own_BC - torch.where(own_BC >= first_BC, second_BC, first_BC)

    @cached_property
    def _sums_BF(self) -> tuple[Tensor, Tensor]:
        """Log of the sum of the logits' exponentials, and H(q): over a vocabulary of 152k a softmax
        for each would cost a small draft a tenth of its call.
        """
        peak_BF1 = self.q_logits_BFV.amax(-1, keepdim=True)
        weight_BFV = (self.q_logits_BFV - peak_BF1).exp_()
        sum_BF = weight_BFV.sum(-1)
        log_sum_BF = sum_BF.log() + peak_BF1[..., 0]
        # A token that isn't drafted weighs 0 and has a logit of -inf.
        mean_BF = weight_BFV.mul_(self.q_logits_BFV.clamp(min=-1e30)).sum(-1) / sum_BF
        return log_sum_BF, (log_sum_BF - mean_BF).clamp(min=0)

    def _of_children(self, x_BFV: Tensor) -> Tensor:
        rows_B1 = torch.arange(x_BFV.shape[0], device=x_BFV.device)[:, None]
        return x_BFV[rows_B1, self.of_BC, self.tokens_BC]


# Says for each row [B] bool whether drafting deeper isn't worth another call.
Enough = Callable[[Call], Tensor]
# Log chance [B, C] that a call adds to the paths of its children.
Chance = Callable[[Call], Tensor]
# How many of a grown tree's nodes, the best, are verified: by the log chances [B, N] that they are
# kept (the root's, 0, first) and the rows that decode [B].
HowMany = Callable[[Tensor, Tensor], int]
# log E [B, M, V] of the tokens at positions [B, M], None when they weren't chosen by it.
Race = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class Round:
    """One round's request. plan: the tree to draft; lens_B: committed tokens of each row;
    pending_B: the token sampled but not yet in the target's KV; active_B: rows that still decode;
    top: at least the largest of lens_B, a plain int; law: how to draw; race_BDV: log E for the
    token of each level, shared with the target, None when greedy or the law isn't coupled; race:
    the same at any position; seeds_B: of the noise that laws of independent draws use, fresh each
    round; want_q: whether the tree must carry the draft's logits; enough: asked after each call;
    chance: what paths are judged by; orders: whether a dynamic tree's nodes are chosen by it too;
    keep: asked once it has grown; sure: whether a chain is to say how sure the draft is; calls:
    takes in every call.
    """

    plan: Plan
    lens_B: Tensor
    pending_B: Tensor
    active_B: Tensor
    top: int
    params: BatchParams
    law: str
    race_BDV: Tensor | None = None
    race: Race | None = None
    seeds_B: Tensor | None = None
    want_q: bool = False
    enough: Enough | None = None
    chance: Chance | None = None
    orders: bool = False
    keep: HowMany | None = None
    sure: bool = False
    calls: list[Call] | None = None


class Frontier(NamedTuple):
    """Nodes to feed at once, all at `depth`. of_BF: the place of each one's parent among the nodes
    fed before (None at the root); slot_F: where it goes, beyond the committed slots; block: [F, M]
    or [B, F, M], which slots of the block it sees, itself included (None: all before it); depth_M:
    the depths of these slots.
    """

    depth: int
    tokens_BF: Tensor
    of_BF: Tensor | None
    slot_F: Tensor
    block: Tensor | None = None
    depth_M: Tensor | None = None

    def placed(self, root_B1: Tensor, width: int) -> tuple[Tensor, Tensor, Seen]:
        """Positions and slots [B, F], and what they see, where the root's are `root_B1`."""
        slots_BF = root_B1 + self.slot_F
        at_BF = (root_B1 + self.depth).expand_as(slots_BF)
        first_B1 = slots_BF if self.block is None else root_B1
        return at_BF, slots_BF, Seen(first_B1[:, 0], width, self.block, self.depth_M)


Feed = Callable[[Frontier], Fed]


class Kept(NamedTuple):
    """What a round came to: tokens_BL, of which the first n_new_B were emitted (accepted ones, then
    the new pending one; 0: nothing changed); path_BL: the tree's node at each depth of the kept
    path, None for chains; lens_B: committed tokens before the round; taps_BLU: the target's states
    at the tokens of the kept path (the old pending token, then the accepted ones), so that
    tokens_BL[b, l] is the token after the one of taps_BLU[b, l]; None for drafters without taps.
    top: at least the largest of lens_B, where that is known. nodes_BN, topology: of the whole tree;
    chosen_BN: what the target chose after each node; ids_BNX, log_p_BNX: the `likeliest` tokens of
    its raw law there, before temperature; None for drafters that aren't told. params, race_BLV: how
    tokens_BL were sampled, and by which noise (see `Round`).
    """

    tokens_BL: Tensor
    n_new_B: Tensor
    path_BL: Tensor | None
    lens_B: Tensor
    taps_BLU: Tensor | None = None
    top: int = ANY_DEPTH
    nodes_BN: Tensor | None = None
    chosen_BN: Tensor | None = None
    topology: Topology | None = None
    ids_BNX: Tensor | None = None
    log_p_BNX: Tensor | None = None
    params: BatchParams = SamplingParams()
    race_BLV: Tensor | None = None

    def write(self, text_BS: Tensor) -> None:
        """Let each row's text go on; what wasn't kept lies beyond its end."""
        step_L = torch.arange(1, self.tokens_BL.shape[1] + 1, device=self.lens_B.device)
        at_BL = (self.lens_B[:, None] + step_L).clamp(max=text_BS.shape[1] - 1)
        text_BS.scatter_(1, at_BL, self.tokens_BL)


class Admitted(NamedTuple):
    """Prompts that begin: the rows they take, their tokens right-padded, their lengths, the first
    token sampled after each; taps_RNU: the target's states at their tokens, where it has taps, or
    `each` prompt's [n, U] until they are padded.
    """

    rows_R: Tensor
    tokens_RN: Tensor
    lens_R: Tensor
    pending_R: Tensor
    taps_RNU: Tensor | None = None
    each: Sequence[Tensor] | None = None

    def alone(self, i: int) -> "Admitted":
        """The i-th of them, without its padding."""
        one, many = slice(i, i + 1), int(self.lens_R[i])
        tokens_1N = self.tokens_RN[one, :many].clone()  # of a batch that would stay else
        taps_1NU = None if self.taps_RNU is None else self.taps_RNU[one, :many].clone()
        taps_1NU = self.each[i][None] if self.each else taps_1NU
        own = self.rows_R[one], tokens_1N, self.lens_R[one], self.pending_R[one]
        return Admitted(*own, taps_1NU)

    def padded(self) -> "Admitted":
        taps_RNU = pad_sequence(list(self.each), True) if self.each else self.taps_RNU
        return self._replace(taps_RNU=taps_RNU, each=None)

    @property
    def next_RN(self) -> Tensor:
        """The tokens after theirs."""
        last_R1 = self.lens_R[:, None] - 1
        return self.tokens_RN.roll(-1, 1).scatter(1, last_R1, self.pending_R[:, None])

    def write(self, text_BS: Tensor) -> None:
        """Begin the text of these rows."""
        text_BS[self.rows_R, : self.tokens_RN.shape[1]] = self.tokens_RN
        text_BS[self.rows_R, self.lens_R] = self.pending_R


class Drafter(Protocol):
    """A source of proposals, by default one without a model. It owns its state, which it changes in
    place only (a captured round is replayed on the same tensors), with the engine's rows.
    """

    kind: str
    context: int = ANY_DEPTH  # tokens that it can follow; beyond, decoding with it ends
    trees: bool = True  # whether it can draft anything but chains
    samples: bool = True  # whether it can draw from a q of its own, as rules by rejection need
    taps: tuple[Tap, ...] = ()  # states of the target that it reads
    levels: int = ANY_DEPTH  # of the deepest tree that it can draft
    one_pass: bool = False  # whether a round's first draft call makes what the later ones look up
    stride: int = 1  # levels that one pass drafts: draft calls between them look up what it made
    follows: bool = True  # whether it takes in tokens that it hasn't drafted
    owes: bool = False  # whether tokens may wait until it drafts again (`catch_up`)
    room: int = ANY_DEPTH  # slots that a round's drafted tokens may take
    shares: bool = False  # whether it drafts in the target's own keys and values
    chooses: bool = False  # whether it is told what the target chose at every node
    asks: bool = False  # whether its trees hold tokens that no target chooses
    likeliest: int = 0  # how many of the target's likeliest tokens at every node it is told
    remembers: bool = False  # whether what it drafts depends on earlier answers
    host: bool = False  # whether it works on the host: a round then reads the device
    scratch: int = 0  # slots beyond a row's length that it writes between rounds; 0: isn't asked
    form: str = ""  # which of several it drafts by now; a recorded round is of one
    ways: Mapping[int, int] = MappingProxyType({})  # plans may name: bytes a call of each reads
    acceptance: Scored | None = None  # foretells what is kept, where its folder holds such a head
    held: tuple[str, ...]  # the attributes that are its state of the rows

    @property
    def size(self) -> ModelSize | None:
        """Of its model, for the memory planner; None where there is no model."""
        return None

    def leader(self, plan: Plan) -> "Drafter":
        """Who drafts it in rounds of one call and hears of them; the rest of it is told later."""
        return self

    def owe(self, rounds: Sequence[Kept]) -> None:
        """Take in rounds of another leader, at once or before the rest drafts."""
        assert not rounds, "who has another leader takes them in"

    @property
    def native(self) -> NativeBody | None:
        """What drafts a chain in one call, if there is such a thing."""
        return None

    def in_rounds(self, nodes: int, temperature: float) -> InRounds | None:
        """How it drafts chains of best tokens at one temperature in several rounds of so many nodes
        that are one call, its state kept up, if there is such a thing for its rows.
        """
        return None

    @property
    def per_node(self) -> VocabHead | None:
        """The LM head that is read for every node, of the states that `feed` gives; None where it
        isn't, so that a preview of it would be worth nothing.
        """
        return None

    @property
    def parameter_bytes(self) -> int:
        """Bytes read by one draft call; 0 where there is no model."""
        return 0

    def reset(self, rows: int, slots: int) -> None:
        """Forget everything; make room for rows of so many slots, the largest plan's included."""

    def share(self, pool: KVPool) -> None:
        """In the place of `reset` for drafters that share: the target's own keys and values, which
        they read, and write from each row's length on.
        """
        raise AssertionError(f"a drafter of kind {self.kind} has no use for them")

    def succeed(self, old: "Drafter") -> None:
        """Go on with the state of another of the same shape."""
        for name in self.held:
            if hasattr(old, name):
                setattr(self, name, getattr(old, name))

    def release(self) -> None:
        """Let go of the state: another `reset` follows before anything else."""
        for name in self.held:
            part: Any = self.__dict__.get(name)
            if hasattr(part, "held"):  # a drafter made of drafters
                part.release()
            else:
                self.__dict__.pop(name, None)

    def forget(self) -> None:
        """Empty what outlives rows: a store of earlier answers."""
        assert not self.remembers, "who remembers can forget"

    def prefill(self, admitted: Admitted) -> None:
        """Take in prompts, and the first token sampled after each."""

    def propose(self, request: Round) -> TokenTree:
        """A tree of at most `request.plan.levels` levels whose root is the pending token."""

    def feed(self, request: Round) -> Feed | None:
        """The draft calls of one round, as `grow` makes them; None where there is no model."""
        return None

    def extend(self, kept: Kept) -> Tensor | None:
        """Take in the tokens just emitted; float64 [B, X] for the policy to hear (`Outcome.news`),
        where there is anything to say.
        """

    @property
    def hears(self) -> bool:
        """Whether there is anything that it takes in."""
        return type(self).extend is not Drafter.extend

    def catch_up(self, kept: Kept) -> None:
        """Take in what several rounds that drafted nothing emitted."""
        self.extend(kept)

    def between(self, request: Round, race: Race) -> bool:
        """Before a round, for drafters with `scratch`: look at the text so far. True where other
        halves draft from now on: of what `first_rows` copied nothing is good any more.
        """
        return False

    def teacher_logits(self, ids_BT: Tensor, taps_BTU: Tensor) -> Tensor | None:
        """Raw logits [B, T, V] of what it drafts first after each token of a text, from the states
        of the target at all tokens before; None where it has no q.
        """
        return None


def shape_of(drafter: Drafter | None) -> str:
    """What two drafters must share for one to go on with the other's state of the rows."""
    if drafter is None:
        return "none"
    size, state = drafter.size, ""
    if size is not None:
        state = f", {size.config.hidden_size} wide, keys and values {kv_shape(size.config, 1, 1)}"
        state += f" in {str(size.dtype).removeprefix('torch.')}"
    about = f"context {drafter.context}, {drafter.levels} levels, taps {list(drafter.taps)}"
    return f"kind {drafter.kind} ({about}{state})"


def picked(states_BNX: Tensor, of_BF: Tensor) -> Tensor:
    """The states [B, F, X] at places `of_BF` of each row."""
    return states_BNX.gather(1, of_BF[..., None].expand(-1, -1, states_BNX.shape[2]))
