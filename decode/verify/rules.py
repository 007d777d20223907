"""Accept / reject rules as pure, batched tensor functions; each is lossless.

A rule takes the proposed tree, the transformed target logits at every node and the round's noise,
and says which path is kept and which token follows it. The two here emit what the target itself
samples with the shared noise: token equality with plain decoding. Those of `rejection.py` are
lossless in distribution.

Shapes: B rows, N nodes, D levels (N = D + 1 for a chain), V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decode.sampling import choose
from draftsmith.decode.token_tree import (
    COUPLED,
    DETERMINISTIC,
    WITH_REPLACEMENT,
    WITHOUT_REPLACEMENT,
    TokenTree,
)
from draftsmith.decode.verify.rejection import block, leviathan, recursive, traversal
from draftsmith.decode.verify.verdict import Noise, Rule, Verdict, deepest, path_to

__all__ = ["RULES", "Noise", "Rule", "RuleInfo", "Verdict", "coupled", "path_to", "point_mass"]


def coupled(
    tree: TokenTree, p_logits_BNV: Tensor, noise: Noise, extra_accept_BN: Tensor | None = None
) -> Verdict:
    """Keep the longest path whose every token is what the target samples there with the shared
    noise; greedy is the same code without noise.

    tree of any topology and law; p_logits_BNV transformed; extra_accept_BN marks nodes accepted
    whatever the target says (lossy).
    """
    topology = tree.topology
    sampled_BN = choose(p_logits_BNV, noise.race_at_nodes(topology))
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
    leaf_B = deepest(topology, agree_BN)
    return Verdict(*path_to(topology, leaf_B), sampled_BN.gather(1, leaf_B[:, None])[:, 0])


def point_mass(
    tree: TokenTree, p_logits_BNV: Tensor, noise: Noise, extra_accept_BN: Tensor | None = None
) -> Verdict:
    """The rule for trees fixed by the context alone: go on while the target's sample is a child.

    A deterministic draft is a draw from a point mass, and rejection then accepts with the sum of p
    over the children: what one sample of the target compared with them does. So it is `coupled`.
    """
    if tree.law != DETERMINISTIC:
        raise ValueError(
            f"rule point_mass: got a tree drawn {tree.law}, expected {DETERMINISTIC}; use "
            "rule=coupled for this drafter"
        )
    return coupled(tree, p_logits_BNV, noise, extra_accept_BN)


@dataclass(frozen=True)
class RuleInfo:
    """verify: the function; law: how a drafter that can choose should draw; laws: all it can
    handle; trees: whether it takes more than chains; identical: whether the output equals plain
    decoding token for token (else only in distribution); masks: whether it takes extra acceptances.
    """

    verify: Rule
    law: str
    laws: tuple[str, ...]
    trees: bool
    identical: bool
    masks: bool


_DRAWN = (WITH_REPLACEMENT, WITHOUT_REPLACEMENT)
RULES = {
    "coupled": RuleInfo(coupled, COUPLED, (COUPLED, DETERMINISTIC, *_DRAWN), True, True, True),
    "point_mass": RuleInfo(point_mass, DETERMINISTIC, (DETERMINISTIC,), True, True, True),
    "leviathan": RuleInfo(leviathan, WITH_REPLACEMENT, _DRAWN, False, False, True),
    "block": RuleInfo(block, WITH_REPLACEMENT, _DRAWN, False, False, False),
    "recursive": RuleInfo(recursive, WITHOUT_REPLACEMENT, _DRAWN, True, False, True),
    "traversal": RuleInfo(traversal, WITHOUT_REPLACEMENT, _DRAWN, True, False, False),
}
