"""Accept / reject rules as pure, batched tensor functions; each is lossless.

A rule takes the proposed tree, the transformed target logits at every node and the round's noise,
and says which path is kept and which token follows it. Two emit what the target itself samples with
the shared noise, token for token; the others are exact in distribution, for drafts drawn from q:

    coupled     any tree
    point_mass  a tree fixed by the context alone
    leviathan   a chain, token by token (Leviathan, arXiv 2211.17192; Chen et al., 2302.01318)
    block       a chain, its tokens judged together (Sun et al., arXiv 2403.10444)
    recursive   a tree from the root down: SpecInfer's rounds with replacement (Miao et al., arXiv
                2305.09781), recursive rejection without (Jeon et al., arXiv 2402.14160)
    traversal   a tree from its leaves up (Weng et al., arXiv 2505.12398); of a chain, `block`
    multi-draft the same, for trees of q's best children and a drawn one (Hu et al., 2502.18779)
    k-seq       a tree of independent draws from the root down, siblings at one chance (SpecTr: Sun
                et al., arXiv 2310.15141)

The last six compare one uniform a node with a chance that depends on the tree alone. Siblings are
offered as they were drawn; but in `k-seq` a rejected one turns p into max(p - q, 0) renormalised
and, where they were drawn without replacement, drops out of q. A given one is a draw from a point
mass: offered after the drawn one, they are accepted as often as any rule can. The token after the
kept path is drawn from what is left of p.

Shapes: B rows, N nodes, I inner nodes, M of them at a time, D levels, L = D + 1, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.decode.sampling import choose
from draftsmith.decode.token_tree import (
    COUPLED,
    DETERMINISTIC,
    LAST_DRAWN,
    WITH_REPLACEMENT,
    WITHOUT_REPLACEMENT,
    TokenTree,
    Topology,
)


class Verdict(NamedTuple):
    """path_BL: the node at each depth 0..D of the kept path (beyond its end: any node);
    n_accepted_B: drafted tokens kept; next_B: the token that follows them.
    """

    path_BL: Tensor
    n_accepted_B: Tensor
    next_B: Tensor


@dataclass(frozen=True)
class Noise:
    """A round's randomness. log_race_BLV: log E at each depth, None when greedy; accept_BN: one
    uniform in (0, 1) a node (the root's is unused), and log_residual_BV: the race for the token
    after the kept path (both only for rules that aren't coupled).
    """

    log_race_BLV: Tensor | None = None
    accept_BN: Tensor | None = None
    log_residual_BV: Tensor | None = None

    def race_at_nodes(self, topology: Topology) -> Tensor | None:
        """log E [B, N, V] for the token that follows each node; None when greedy."""
        race_BLV = self.log_race_BLV
        if race_BLV is None or topology.is_chain:
            return race_BLV
        if topology.depth.ndim == 1:
            return race_BLV[:, topology.depth]
        rows_B1 = torch.arange(race_BLV.shape[0], device=race_BLV.device)[:, None]
        return race_BLV[rows_B1, topology.depth]


Extra = Tensor | None  # nodes [B, N] that pass whatever the target says (lossy)
Rule = Callable[[TokenTree, Tensor, Noise, Extra], Verdict]


def path_to(topology: Topology, leaf_B: Tensor) -> tuple[Tensor, Tensor]:
    """(path_BL, n_accepted_B) of the path from the root to a node of each row."""
    rows_B = torch.arange(leaf_B.shape[0], device=leaf_B.device)
    ancestors_BNN = topology.ancestors.expand(leaf_B.shape[0], -1, -1)
    depth_BN = topology.depth.expand(leaf_B.shape[0], -1)
    levels_L = torch.arange(topology.levels + 1, device=leaf_B.device)
    at_depth_BLN = ancestors_BNN[rows_B, leaf_B][:, None] & (depth_BN[:, None] == levels_L[:, None])
    return at_depth_BLN.long().argmax(-1), depth_BN[rows_B, leaf_B]


def deepest(topology: Topology, agree_BN: Tensor) -> Tensor:
    """The deepest node [B] that agrees with all above it (the root does), of several the first."""
    agree_BN = agree_BN | (topology.depth == 0)
    broken_BN = (topology.ancestors & ~agree_BN[:, None, :]).any(-1)
    return torch.where(broken_BN, -1, topology.depth).argmax(1)


def coupled(tree: TokenTree, p_logits_BNV: Tensor, noise: Noise, extra: Extra = None) -> Verdict:
    """Keep the longest path whose every token is what the target samples there with the shared
    noise; greedy is the same code without noise. tree: of any topology and law.
    """
    topology = tree.topology
    sampled_BN = choose(p_logits_BNV, noise.race_at_nodes(topology))
    if topology.is_chain:
        agree_BD = _passed(tree, tree.tokens_BN[:, 1:] == sampled_BN[:, :-1], extra)
        n_accepted_B = agree_BD.long().cumprod(1).sum(1)
        path_BL = torch.arange(topology.levels + 1, device=sampled_BN.device).expand_as(sampled_BN)
        return Verdict(path_BL, n_accepted_B, sampled_BN.gather(1, n_accepted_B[:, None])[:, 0])

    parent_BN = topology.parent.clamp(min=0).expand_as(sampled_BN)
    agree_BN = _passed(tree, tree.tokens_BN == sampled_BN.gather(1, parent_BN), extra)
    leaf_B = deepest(topology, agree_BN)
    return Verdict(*path_to(topology, leaf_B), sampled_BN.gather(1, leaf_B[:, None])[:, 0])


def _passed(tree: TokenTree, agree_BX: Tensor, extra: Extra) -> Tensor:
    """Of the last X nodes those that agree, or pass anyhow, and are verified."""
    agree_BX = agree_BX if extra is None else agree_BX | extra[:, -agree_BX.shape[1] :]
    cut = tree.verified_B is not None
    return agree_BX & tree.verified_BN[:, -agree_BX.shape[1] :] if cut else agree_BX


def point_mass(tree: TokenTree, p_logits_BNV: Tensor, noise: Noise, extra: Extra = None) -> Verdict:
    """A deterministic draft is a draw from a point mass, and rejection then accepts with the sum of
    p over the children: what one sample of the target compared with them does. So it is `coupled`.
    """
    if tree.law != DETERMINISTIC:
        raise ValueError(
            f"rule point_mass: got a tree drawn {tree.law}, expected {DETERMINISTIC}; use "
            "rule=coupled for this drafter"
        )
    return coupled(tree, p_logits_BNV, noise, extra)


def leviathan(tree: TokenTree, p_logits_BNV: Tensor, noise: Noise, extra: Extra = None) -> Verdict:
    """Accept token after token of a chain where u < p / q. `recursive`, for chains alone."""
    _law("leviathan", tree, chains=True)
    return recursive(tree, p_logits_BNV, noise, extra)


def recursive(tree: TokenTree, p_logits_BNV: Tensor, noise: Noise, extra: Extra = None) -> Verdict:
    """From the root down: of a node's children keep the first that passes u < p / q, with p and q
    as the siblings before it left them.
    """
    q_BIV = _law("recursive", tree)
    nodes = tree.topology.inner
    laws, chances, _ = _reject(tree, p_logits_BNV.softmax(-1), q_BIV, [nodes], joint=False)
    return _downward(tree, laws, chances, noise, extra)


def k_seq(tree: TokenTree, p_logits_BNV: Tensor, noise: Noise, extra: Extra = None) -> Verdict:
    """From the root down: of a node's k children keep the first that passes u < p / (rho q), the
    same p and q for each; after k rejections max(p - rho q, 0) renormalised is left. rho, of 1 to
    k, solves 1 - (1 - b)^k = rho b with b = sum_v min(q, p / rho), by bisection.
    """
    q_BIV = _law("k-seq", tree, drawn=(WITH_REPLACEMENT,))
    children, nodes = tree.topology.children, tree.topology.inner
    p_BNV = p_logits_BNV.softmax(-1)
    laws, chances = list(p_BNV.unbind(1)), [torch.ones_like(p_BNV[:, 0, 0])] * tree.topology.nodes
    for i, node in enumerate(nodes):
        p_BV, q_BV, drawn = laws[node], q_BIV[:, i], children[node]
        rho_B1 = _rho(p_BV, q_BV, len(drawn))
        offered_BC = _columns(tree.tokens_BN, drawn)
        ratio_BC = _ratio(p_BV.gather(1, offered_BC), (rho_B1 * q_BV).gather(1, offered_BC))
        for child, ratio_B in zip(drawn, ratio_BC.clamp(max=1).unbind(1), strict=True):
            chances[child] = ratio_B
        left_BV = (p_BV - rho_B1 * q_BV).clamp(min=0)
        s_B1 = left_BV.sum(-1, keepdim=True)
        laws[node] = torch.where(s_B1 > 0, left_BV / s_B1, p_BV)
    return _downward(tree, laws, chances, noise, extra)


def traversal(tree: TokenTree, p_logits_BNV: Tensor, noise: Noise, extra: Extra = None) -> Verdict:
    """From the leaves up: keep the first path that passes u < w, where w is the chance left to a
    node's whole path once all its children were rejected.

    A child gets min(1, w p / q) of its parent's w; each child's rejection leaves its parent
    s / (s + 1 - w), s = sum_v max(w p - q, 0), and the law max(w p - q, 0) / s. The root always
    passes, and is asked last.
    """
    drawn = WITH_REPLACEMENT, WITHOUT_REPLACEMENT, LAST_DRAWN
    q_BIV = _law("traversal", tree, extra, drawn=drawn)
    topology, depths = tree.topology, [0]
    assert topology.parents is not None and noise.accept_BN is not None
    for parent in topology.parents[1:]:
        depths.append(depths[parent] + 1)
    levels = [[n for n in topology.inner if depths[n] == d] for d in range(topology.levels)]
    laws, _, weights = _reject(tree, p_logits_BNV.softmax(-1), q_BIV, levels, joint=True)

    order = _post_order(_offered(tree))
    pass_BN = _columns(noise.accept_BN, order) < torch.stack([weights[n] for n in order], 1)
    pass_BN[:, -1] = True
    nodes_1N = torch.arange(topology.nodes, device=pass_BN.device)[None]
    leaf_B = _columns(nodes_1N, order)[0][pass_BN.long().argmax(1)]
    return _verdict(tree, laws, leaf_B, noise)


def block(tree: TokenTree, p_logits_BNV: Tensor, noise: Noise, extra: Extra = None) -> Verdict:
    """Block verification: the joint decision that is optimal for one chain of independent draws.

    With w_0 = 1 and w_i = min(1, w_(i-1) p(x_i) / q(x_i)), the prefix of length i is kept when
    u_i < h_i, where h_D = w_D and, before it, h_i = s_i / (s_i + 1 - w_i) with
    s_i = sum_v max(w_i p(v) - q(v), 0). After the longest kept prefix i < D the next token is drawn
    from max(w_i p - q, 0) renormalised; after all D, from p.
    """
    q_BDV = _law("block", tree, extra, chains=True)
    assert noise.accept_BN is not None
    p_BNV = p_logits_BNV.softmax(-1)
    drafted_BD1 = tree.tokens_BN[:, 1:, None]
    ratio_BD = _ratio(*(x.gather(2, drafted_BD1)[..., 0] for x in (p_BNV[:, :-1], q_BDV)))
    weights = [torch.ones_like(ratio_BD[:, 0])]
    for ratio_B in ratio_BD.unbind(1):
        weights.append((weights[-1] * ratio_B).clamp(max=1))
    weight_BL = torch.stack(weights, 1)

    law_BDV, keep_BD = _left(p_BNV[:, :-1], q_BDV, weight_BL[:, :-1])
    threshold_BD = torch.cat([keep_BD[:, 1:], weight_BL[:, -1:]], 1)
    # Strict: u in (0, 1), and a threshold of 0 (a token with p = 0) must never pass.
    kept_BD = noise.accept_BN[:, 1:] < threshold_BD
    levels_D = torch.arange(1, tree.topology.levels + 1, device=kept_BD.device)
    n_accepted_B = (kept_BD * levels_D).amax(1)

    next_B = _after(torch.cat([law_BDV, p_BNV[:, -1:]], 1), n_accepted_B, noise)
    path_BL = torch.arange(tree.topology.levels + 1, device=next_B.device).expand_as(weight_BL)
    return Verdict(path_BL, n_accepted_B, next_B)


def _downward(
    tree: TokenTree, laws: list[Tensor], chances: list[Tensor], noise: Noise, extra: Extra
) -> Verdict:
    """Keep, from the root down, the first child that passes its chance."""
    assert noise.accept_BN is not None
    topology = tree.topology
    pass_BN = noise.accept_BN < torch.stack(chances, 1)
    if extra is not None:
        pass_BN |= extra
    before_NN = (topology.parent[:, None] == topology.parent).tril(-1)
    first_BN = pass_BN & ~(before_NN & pass_BN[:, None, :]).any(-1)
    return _verdict(tree, laws, deepest(topology, first_BN), noise)


def _rho(p_BV: Tensor, q_BV: Tensor, k: int) -> Tensor:
    """What k independent draws are charged for [B, 1]; see `k_seq`."""
    low_B1 = torch.ones_like(p_BV[:, :1])
    high_B1 = low_B1 * k
    for _ in range(torch.finfo(p_BV.dtype).bits):
        rho_B1 = (low_B1 + high_B1) / 2
        b_B1 = torch.minimum(q_BV, p_BV / rho_B1).sum(-1, keepdim=True)
        more_B1 = 1 - (1 - b_B1) ** k > rho_B1 * b_B1
        low_B1 = torch.where(more_B1, rho_B1, low_B1)
        high_B1 = torch.where(more_B1, high_B1, rho_B1)
    return high_B1


def _reject(
    tree: TokenTree, p_BNV: Tensor, q_BIV: Tensor, groups: Sequence[Sequence[int]], *, joint: bool
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Reject every child of the inner nodes in `groups` (parents in earlier ones). For each node:
    the law [B, V] of the token after it once all its children are rejected, the chance [B] it was
    offered at, and the weight [B] its path then keeps. joint: a node's weight begins as its chance,
    that of its whole path; else as 1.
    """
    children = _offered(tree)
    place = {node: i for i, node in enumerate(tree.topology.inner)}
    laws = list(p_BNV.unbind(1))
    chances = [torch.ones_like(p_BNV[:, 0, 0])] * tree.topology.nodes
    weights = list(chances)
    for group in groups:
        # Those with most children first: the ones still busy at a rank are then a prefix.
        nodes = sorted(group, key=lambda node: -len(children[node]))
        q_BMV = _columns(q_BIV, [place[node] for node in nodes])
        for rank in range(len(children[nodes[0]])):
            nodes = [node for node in nodes if len(children[node]) > rank]
            drawn = [children[node][rank] for node in nodes]
            drawn_BM1 = _columns(tree.tokens_BN, drawn)[..., None]
            p_BMV = torch.stack([laws[node] for node in nodes], 1)
            q_BMV = q_BMV[:, : len(nodes)]
            if tree.law == LAST_DRAWN and rank:
                q_BMV = torch.zeros_like(q_BMV).scatter(2, drawn_BM1, 1.0)
            weight_BM = torch.stack([weights[node] for node in nodes], 1)
            p_BM, q_BM = (x.gather(2, drawn_BM1)[..., 0] for x in (p_BMV, q_BMV))
            chance_BM = (weight_BM * _ratio(p_BM, q_BM)).clamp(max=1)
            law_BMV, left_BM = _left(p_BMV, q_BMV, weight_BM)
            for i, (node, child) in enumerate(zip(nodes, drawn, strict=True)):
                laws[node], weights[node] = law_BMV[:, i], left_BM[:, i]
                chances[child] = chance_BM[:, i]
                if joint:
                    weights[child] = chance_BM[:, i]
            if tree.law == WITHOUT_REPLACEMENT:
                q_BMV = _without(q_BMV, drawn_BM1)
    return laws, chances, weights


def _ratio(p: Tensor, q: Tensor) -> Tensor:
    """p / q of drawn tokens; 0 for those that q can't have drawn (its support ended, or NaN)."""
    return torch.where(q > 0, p / q, 0.0)


def _left(p_BMV: Tensor, q_BMV: Tensor, weight_BM: Tensor) -> tuple[Tensor, Tensor]:
    """The law [B, M, V] and the weight [B, M] of a node when a child drawn from q is rejected."""
    excess_BMV = (weight_BM[..., None] * p_BMV - q_BMV).clamp(min=0)
    s_BM = excess_BMV.sum(-1)
    some_BM = s_BM > 0
    # Rounding alone leaves nothing over where w p = q; the target's own law is then the answer.
    law_BMV = torch.where(some_BM[..., None], excess_BMV / s_BM[..., None], p_BMV)
    return law_BMV, torch.where(some_BM, s_BM / (s_BM + (1 - weight_BM)), 0.0)


def _without(q_BMV: Tensor, drawn_BM1: Tensor) -> Tensor:
    """q once these tokens are drawn: all 0 where nothing is left."""
    q_BMV = q_BMV.scatter(2, drawn_BM1, 0.0)
    return q_BMV / q_BMV.sum(-1, keepdim=True).clamp(min=torch.finfo(q_BMV.dtype).tiny)


def _verdict(tree: TokenTree, laws: list[Tensor], leaf_B: Tensor, noise: Noise) -> Verdict:
    return Verdict(*path_to(tree.topology, leaf_B), _after(torch.stack(laws, 1), leaf_B, noise))


def _after(laws_BNV: Tensor, node_B: Tensor, noise: Noise) -> Tensor:
    """The token drawn from the law at one node of each row."""
    assert noise.log_residual_BV is not None
    at_B11 = node_B[:, None, None].expand(-1, 1, laws_BNV.shape[-1])
    return choose(laws_BNV.gather(1, at_B11)[:, 0].log(), noise.log_residual_BV)


def _law(
    rule: str,
    tree: TokenTree,
    extra: Extra = None,
    *,
    chains: bool = False,
    drawn: Sequence[str] = (WITH_REPLACEMENT, WITHOUT_REPLACEMENT),
) -> Tensor:
    """q [B, I, V], 0 throughout where the draft's logits are NaN; ValueError for a tree that the
    rule can't judge, or marked nodes where it takes none.
    """
    if extra is not None:
        raise ValueError(
            f"rule {rule}: got a mask of extra acceptances, expected none, since it judges whole "
            "paths; use rule=coupled with it"
        )
    topology = tree.topology
    chains |= tree.verified_B is not None
    fits = topology.is_chain if chains else topology.parents is not None
    if not fits or tree.law not in drawn or tree.q_logits_BIV is None:
        raise ValueError(
            f"rule {rule}: got {'a chain' if topology.is_chain else 'a tree'} of {topology.nodes} "
            f"nodes drawn {tree.law}, expected a {'chain' if chains else 'static tree'} drawn "
            f"{' or '.join(drawn)}, with its q; use rule=coupled for this drafter"
        )
    q_BIV = tree.q_logits_BIV.softmax(-1).nan_to_num_(0)
    # From a q of nothing no token passes, and p is left as it is.
    return q_BIV if tree.verified_B is None else q_BIV * tree.verified_BN[:, 1:, None]


def _offered(tree: TokenTree) -> dict[int, tuple[int, ...]]:
    """Inner node -> its children in the order in which they are offered: a drawn one first."""
    children = tree.topology.children
    if tree.law != LAST_DRAWN:
        return children
    return {node: (last, *given) for node, (*given, last) in children.items()}


def _post_order(children: dict[int, tuple[int, ...]], node: int = 0) -> list[int]:
    """Nodes in the order in which a walk from the leaves up asks them."""
    below = [_post_order(children, child) for child in children.get(node, ())]
    return [*(n for nodes in below for n in nodes), node]


def _columns(x_BNX: Tensor, nodes: Sequence[int]) -> Tensor:
    # Views are joined: an index tensor made here would cross from the host to the device.
    return torch.stack([x_BNX[:, node] for node in nodes], 1)


class RuleInfo(NamedTuple):
    """verify: the function; law: how a drafter that can choose should draw; trees: whether it takes
    more than chains; identical: whether the output equals plain decoding token for token (else only
    in distribution); masks: whether it takes extra acceptances; cuts: what may choose how much of a
    draft is verified: "any"thing, what lies before each token ("prefix"), or nothing ("").
    """

    verify: Rule
    law: str
    trees: bool
    identical: bool
    masks: bool
    cuts: str


RULES = {
    "coupled": RuleInfo(coupled, COUPLED, True, True, True, "any"),
    "point_mass": RuleInfo(point_mass, DETERMINISTIC, True, True, True, "any"),
    "leviathan": RuleInfo(leviathan, WITH_REPLACEMENT, False, False, True, "prefix"),
    "block": RuleInfo(block, WITH_REPLACEMENT, False, False, False, "prefix"),
    "recursive": RuleInfo(recursive, WITHOUT_REPLACEMENT, True, False, True, ""),
    "traversal": RuleInfo(traversal, WITHOUT_REPLACEMENT, True, False, False, ""),
    "multi-draft": RuleInfo(traversal, LAST_DRAWN, True, False, False, ""),
    "k-seq": RuleInfo(k_seq, WITH_REPLACEMENT, True, False, True, ""),
}
