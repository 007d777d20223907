"""Accept / reject rules as pure, batched tensor functions; each is lossless.

A rule takes the proposed tree, the transformed target logits at every node and the round's noise,
and says which path is kept and which token follows it. `coupled` (greedy is the same code, without
noise) emits what the target itself samples with the shared noise: token equality with plain
decoding. `block` is block verification (Sun et al., arXiv 2403.10444): lossless in distribution,
accepts more on chains at temperature 1.

Shapes: B rows, N nodes, D levels (N = D + 1 for a chain), V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.decode.sampling import choose
from draftsmith.decode.token_tree import COUPLED, WITH_REPLACEMENT, TokenTree, Topology


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


def coupled(
    tree: TokenTree, p_logits_BNV: Tensor, noise: Noise, extra_accept_BN: Tensor | None = None
) -> Verdict:
    """Keep the longest path whose every token is what the target samples there with the shared
    noise.

    tree of any topology and law; p_logits_BNV transformed; extra_accept_BN marks nodes accepted
    whatever the target says (lossy).
    """
    topology = tree.topology
    race_BNV = None
    if noise.log_race_BLV is not None:
        race_BNV = noise.log_race_BLV
        if topology.depth.ndim == 2:
            rows_B1 = torch.arange(race_BNV.shape[0], device=race_BNV.device)[:, None]
            race_BNV = race_BNV[rows_B1, topology.depth]
        elif not topology.is_chain:
            race_BNV = race_BNV[:, topology.depth]
    sampled_BN = choose(p_logits_BNV, race_BNV)
    if topology.is_chain:
        agree_BD = tree.tokens_BN[:, 1:] == sampled_BN[:, :-1]
        if extra_accept_BN is not None:
            agree_BD |= extra_accept_BN[:, 1:]
        n_accepted_B = agree_BD.long().cumprod(1).sum(1)
        path_BL = torch.arange(topology.levels + 1, device=sampled_BN.device).expand_as(sampled_BN)
        return Verdict(path_BL, n_accepted_B, sampled_BN.gather(1, n_accepted_B[:, None])[:, 0])

    parent_BN = topology.parent.clamp(min=0).expand_as(sampled_BN)
    agree_BN = tree.tokens_BN == sampled_BN.gather(1, parent_BN)
    if extra_accept_BN is not None:
        agree_BN |= extra_accept_BN
    agree_BN[:, 0] = True
    kept_BN = ~(topology.ancestors & ~agree_BN[:, None, :]).any(-1)
    # Among kept nodes of equal depth (repeated siblings) argmax takes the first.
    leaf_B = torch.where(kept_BN, topology.depth, -1).argmax(1)
    return Verdict(*path_to(topology, leaf_B), sampled_BN.gather(1, leaf_B[:, None])[:, 0])


def path_to(topology: Topology, leaf_B: Tensor) -> tuple[Tensor, Tensor]:
    """(path_BL, n_accepted_B) of the path from the root to a node of each row."""
    rows_B = torch.arange(leaf_B.shape[0], device=leaf_B.device)
    ancestors_BNN = topology.ancestors.expand(leaf_B.shape[0], -1, -1)
    depth_BN = topology.depth.expand(leaf_B.shape[0], -1)
    levels_L = torch.arange(topology.levels + 1, device=leaf_B.device)
    at_depth_BLN = ancestors_BNN[rows_B, leaf_B][:, None] & (depth_BN[:, None] == levels_L[:, None])
    return at_depth_BLN.long().argmax(-1), depth_BN[rows_B, leaf_B]


def block(
    tree: TokenTree, p_logits_BNV: Tensor, noise: Noise, extra_accept_BN: Tensor | None = None
) -> Verdict:
    """Block verification: the joint decision that is optimal for one chain of independent draws.

    With w_0 = 1 and w_i = min(1, w_(i-1) p(x_i) / q(x_i)), the prefix of length i is kept when
    u_i <= h_i, where h_D = w_D and, before it, h_i = s_i / (s_i + 1 - w_i) with
    s_i = sum_v max(w_i p(v) - q(v), 0). After the longest kept prefix i < D the next token is drawn
    from max(w_i p - q, 0) renormalised; after all D, from p.
    """
    if not tree.topology.is_chain or tree.law != WITH_REPLACEMENT or tree.q_logits_BIV is None:
        raise ValueError(
            f"rule block: got a tree of {tree.tokens_BN.shape[1]} nodes drawn {tree.law}, expected "
            "a chain drawn with replacement, with its q; use rule=coupled for this drafter"
        )
    if extra_accept_BN is not None:
        raise ValueError("rule block: got a mask of extra acceptances; use rule=coupled with it")
    assert noise.accept_BN is not None and noise.log_residual_BV is not None
    p_BNV = p_logits_BNV.softmax(-1)
    q_BDV = tree.q_logits_BIV.softmax(-1)
    drafted_BD1 = tree.tokens_BN[:, 1:, None]
    ratio_BD = (p_BNV[:, :-1].gather(2, drafted_BD1) / q_BDV.gather(2, drafted_BD1))[..., 0]
    weight_B = torch.ones_like(ratio_BD[:, 0])
    weights = [weight_B]
    for level in range(tree.topology.levels):
        weight_B = (weight_B * ratio_BD[:, level]).clamp(max=1)
        weights.append(weight_B)
    weight_BL = torch.stack(weights, 1)

    excess_BDV = (weight_BL[:, :-1, None] * p_BNV[:, :-1] - q_BDV).clamp(min=0)
    s_BD = excess_BDV.sum(-1)
    keep_BD = s_BD / (s_BD + 1 - weight_BL[:, :-1])
    keep_BD = torch.where(s_BD > 0, keep_BD, 0.0)  # 0 / 0 where w p = q: nothing left to keep for
    threshold_BD = torch.cat([keep_BD[:, 1:], weight_BL[:, -1:]], 1)
    # Strict: u in (0, 1), and a threshold of 0 (a token with p = 0) must never pass.
    kept_BD = noise.accept_BN[:, 1:] < threshold_BD
    levels_D = torch.arange(1, tree.topology.levels + 1, device=kept_BD.device)
    n_accepted_B = (kept_BD * levels_D).amax(1)

    everything = torch.cat([excess_BDV, p_BNV[:, -1:]], 1)
    at_B11 = n_accepted_B[:, None, None].expand(-1, 1, p_BNV.shape[-1])
    law_BV = everything.gather(1, at_B11)[:, 0]
    # Rounding alone can leave nothing over where p = q; the target's own law is then the answer.
    empty_B1 = law_BV.sum(-1, keepdim=True) == 0
    law_BV = torch.where(empty_B1, p_BNV.gather(1, at_B11)[:, 0], law_BV)
    next_B = choose(law_BV.log(), noise.log_residual_BV)
    path_BL = torch.arange(tree.topology.levels + 1, device=next_B.device).expand_as(weight_BL)
    return Verdict(path_BL, n_accepted_B, next_B)


Rule = Callable[[TokenTree, Tensor, Noise, Tensor | None], Verdict]


@dataclass(frozen=True)
class RuleInfo:
    """verify: the function; law: how a drafter that can choose should draw; identical: whether the
    output equals plain decoding token for token (else only in distribution).
    """

    verify: Rule
    law: str
    identical: bool


RULES = {
    "coupled": RuleInfo(coupled, COUPLED, identical=True),
    "block": RuleInfo(block, WITH_REPLACEMENT, identical=False),
}
