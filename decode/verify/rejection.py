"""Rules by rejection, for drafts that are draws from q: lossless in distribution.

Each compares one uniform a node with a chance that depends on the tree alone, and draws the token
after the kept path from what the rejected nodes have left of the target's law. Siblings are offered
in the order in which they were drawn; a rejected one turns p into max(p - q, 0) renormalised and,
where they were drawn without replacement, drops out of q.

    leviathan  a chain, token by token (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318)
    block      a chain, its tokens judged together (Sun et al., arXiv 2403.10444)
    recursive  a tree from the root down: SpecInfer's rounds with replacement (Miao et al., arXiv
               2305.09781), recursive rejection without (Jeon et al., arXiv 2402.14160)
    traversal  a tree from its leaves up (Weng et al., arXiv 2505.12398); of a chain, `block`

Shapes: B rows, N nodes, I inner nodes, M of them at a time, D levels, L = D + 1, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.decode.sampling import choose
from draftsmith.decode.token_tree import WITH_REPLACEMENT, WITHOUT_REPLACEMENT, TokenTree
from draftsmith.decode.verify.verdict import Noise, Verdict, deepest, path_to


def leviathan(
    tree: TokenTree, p_logits_BNV: Tensor, noise: Noise, extra_accept_BN: Tensor | None = None
) -> Verdict:
    """Accept token after token of a chain where u < p / q. `recursive`, for chains alone."""
    _law("leviathan", tree, chains=True)
    return recursive(tree, p_logits_BNV, noise, extra_accept_BN)


def recursive(
    tree: TokenTree, p_logits_BNV: Tensor, noise: Noise, extra_accept_BN: Tensor | None = None
) -> Verdict:
    """From the root down: of a node's children keep the first that passes u < p / q, with p and q
    as the siblings before it left them. extra_accept_BN marks nodes that pass anyway (lossy).
    """
    q_BIV = _law("recursive", tree)
    topology, nodes = tree.topology, tree.topology.inner
    laws, chances, _ = _reject(tree, p_logits_BNV.softmax(-1), q_BIV, [nodes], joint=False)
    assert noise.accept_BN is not None
    pass_BN = noise.accept_BN < torch.stack(chances, 1)
    if extra_accept_BN is not None:
        pass_BN |= extra_accept_BN
    before_NN = torch.ones_like(topology.ancestors).tril(-1)
    before_NN &= topology.parent[:, None] == topology.parent
    first_BN = pass_BN & ~(before_NN & pass_BN[:, None, :]).any(-1)
    return _verdict(tree, laws, deepest(topology, first_BN), noise)


def traversal(
    tree: TokenTree, p_logits_BNV: Tensor, noise: Noise, extra_accept_BN: Tensor | None = None
) -> Verdict:
    """From the leaves up: keep the first path that passes u < w, where w is the chance left to a
    node's whole path once all its children were rejected.

    A child gets min(1, w p / q) of its parent's w; each child's rejection leaves its parent
    s / (s + 1 - w), s = sum_v max(w p - q, 0), and the law max(w p - q, 0) / s. The root always
    passes, and is asked last.
    """
    _refuse_mask("traversal", extra_accept_BN)
    q_BIV = _law("traversal", tree)
    topology, depths = tree.topology, [0]
    assert topology.parents is not None and noise.accept_BN is not None
    for parent in topology.parents[1:]:
        depths.append(depths[parent] + 1)
    levels = [[n for n in topology.inner if depths[n] == d] for d in range(topology.levels)]
    laws, _, weights = _reject(tree, p_logits_BNV.softmax(-1), q_BIV, levels, joint=True)

    order = _post_order(topology.children)
    pass_BN = _columns(noise.accept_BN, order) < torch.stack([weights[n] for n in order], 1)
    pass_BN[:, -1] = True
    nodes_1N = torch.arange(topology.nodes, device=pass_BN.device)[None]
    leaf_B = _columns(nodes_1N, order)[0][pass_BN.long().argmax(1)]
    return _verdict(tree, laws, leaf_B, noise)


def block(
    tree: TokenTree, p_logits_BNV: Tensor, noise: Noise, extra_accept_BN: Tensor | None = None
) -> Verdict:
    """Block verification: the joint decision that is optimal for one chain of independent draws.

    With w_0 = 1 and w_i = min(1, w_(i-1) p(x_i) / q(x_i)), the prefix of length i is kept when
    u_i < h_i, where h_D = w_D and, before it, h_i = s_i / (s_i + 1 - w_i) with
    s_i = sum_v max(w_i p(v) - q(v), 0). After the longest kept prefix i < D the next token is drawn
    from max(w_i p - q, 0) renormalised; after all D, from p.
    """
    _refuse_mask("block", extra_accept_BN)
    q_BDV = _law("block", tree, chains=True)
    assert noise.accept_BN is not None and noise.log_residual_BV is not None
    p_BNV = p_logits_BNV.softmax(-1)
    drafted_BD1 = tree.tokens_BN[:, 1:, None]
    ratio_BD = _ratio(*(x.gather(2, drafted_BD1)[..., 0] for x in (p_BNV[:, :-1], q_BDV)))
    weight_B = torch.ones_like(ratio_BD[:, 0])
    weights = [weight_B]
    for level in range(tree.topology.levels):
        weight_B = (weight_B * ratio_BD[:, level]).clamp(max=1)
        weights.append(weight_B)
    weight_BL = torch.stack(weights, 1)

    law_BDV, keep_BD = _left(p_BNV[:, :-1], q_BDV, weight_BL[:, :-1])
    threshold_BD = torch.cat([keep_BD[:, 1:], weight_BL[:, -1:]], 1)
    # Strict: u in (0, 1), and a threshold of 0 (a token with p = 0) must never pass.
    kept_BD = noise.accept_BN[:, 1:] < threshold_BD
    levels_D = torch.arange(1, tree.topology.levels + 1, device=kept_BD.device)
    n_accepted_B = (kept_BD * levels_D).amax(1)

    laws_BLV = torch.cat([law_BDV, p_BNV[:, -1:]], 1)
    at_B11 = n_accepted_B[:, None, None].expand(-1, 1, p_BNV.shape[-1])
    next_B = choose(laws_BLV.gather(1, at_B11)[:, 0].log(), noise.log_residual_BV)
    path_BL = torch.arange(tree.topology.levels + 1, device=next_B.device).expand_as(weight_BL)
    return Verdict(path_BL, n_accepted_B, next_B)


def _reject(
    tree: TokenTree, p_BNV: Tensor, q_BIV: Tensor, groups: Sequence[Sequence[int]], *, joint: bool
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Offer every child of the inner nodes in `groups` (parents in earlier ones) and reject it.

    Returns for each node the law [B, V] of the token after it once all its children are rejected,
    the chance [B] it was offered at, and the weight [B] its path then keeps. joint: a node's weight
    begins as its chance, that of its whole path; else as 1.
    """
    children = tree.topology.children
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
    """p / q of drawn tokens. One that q doesn't hold (a sibling beyond the end of its support, a
    node whose logits are NaN) was never drawn: it has no chance.
    """
    return torch.where(q > 0, p / q, 0.0)


def _left(p_BMV: Tensor, q_BMV: Tensor, weight_BM: Tensor) -> tuple[Tensor, Tensor]:
    """The law [B, M, V] and the weight [B, M] that a node is left with when a child drawn from q is
    rejected.
    """
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
    assert noise.log_residual_BV is not None
    at_B11 = leaf_B[:, None, None].expand(-1, 1, laws[0].shape[-1])
    law_BV = torch.stack(laws, 1).gather(1, at_B11)[:, 0]
    next_B = choose(law_BV.log(), noise.log_residual_BV)
    return Verdict(*path_to(tree.topology, leaf_B), next_B)


def _law(rule: str, tree: TokenTree, *, chains: bool = False) -> Tensor:
    """q [B, I, V], 0 throughout where the draft's logits are NaN; ValueError for a tree that the
    rule can't judge.
    """
    topology, drawn = tree.topology, (WITH_REPLACEMENT, WITHOUT_REPLACEMENT)
    fits = topology.is_chain if chains else topology.parents is not None
    if not fits or tree.law not in drawn or tree.q_logits_BIV is None:
        raise ValueError(
            f"rule {rule}: got {'a chain' if topology.is_chain else 'a tree'} of {topology.nodes} "
            f"nodes drawn {tree.law}, expected a {'chain' if chains else 'static tree'} drawn "
            f"{' or '.join(drawn)}, with its q; use rule=coupled for this drafter"
        )
    return tree.q_logits_BIV.softmax(-1).nan_to_num_(0)


def _refuse_mask(rule: str, extra_accept_BN: Tensor | None) -> None:
    if extra_accept_BN is not None:
        raise ValueError(
            f"rule {rule}: got a mask of extra acceptances, expected none, since it judges whole "
            "paths; use rule=coupled with it"
        )


def _post_order(children: dict[int, tuple[int, ...]], node: int = 0) -> list[int]:
    """Nodes in the order in which a walk from the leaves up asks them."""
    below = [_post_order(children, child) for child in children.get(node, ())]
    return [*(n for nodes in below for n in nodes), node]


def _columns(x_BNX: Tensor, nodes: Sequence[int]) -> Tensor:
    # Views joined on the device: an index tensor made here would cross from the host.
    return torch.stack([x_BNX[:, node] for node in nodes], 1)
