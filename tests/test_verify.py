"""Every rule by exact enumeration on a toy vocabulary, and its deliberately broken twin."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.decode import verify
from draftsmith.decode.token_tree import COUPLED, WITH_REPLACEMENT, TokenTree, Topology, chain
from draftsmith.decode.verify import Noise, Verdict

V = 3
CPU = torch.device("cpu")


def toy_law(seed: int, sharpness: float) -> Callable[[tuple[int, ...]], Tensor]:
    """A conditional law over V tokens for every prefix."""

    def law(prefix: tuple[int, ...]) -> Tensor:
        key = seed * 1009 + sum((t + 1) * 17**i for i, t in enumerate(prefix))
        logits = torch.randn(V, generator=torch.Generator().manual_seed(key), dtype=torch.float64)
        return (logits * sharpness).softmax(-1)

    return law


P, Q = toy_law(1, 1.5), toy_law(2, 1.0)


def thresholds_of_block(p_rows: Tensor, q_rows: Tensor, tokens: list[int]) -> list[float]:
    """h_1..h_D straight from the paper's definition, in scalar arithmetic."""
    weight, h = 1.0, []
    for i, token in enumerate(tokens):
        weight = min(1.0, weight * float(p_rows[i, token] / q_rows[i, token]))
        if i == len(tokens) - 1:
            h.append(weight)
        else:
            s = float((weight * p_rows[i + 1] - q_rows[i + 1]).clamp(min=0).sum())
            h.append(s / (s + 1 - weight) if s > 0 else 0.0)
    return h


def joint_of_rule(rule: verify.Rule, depth: int) -> Tensor:
    """The exact joint law of the first depth + 1 tokens when `rule` verifies one chain drafted from
    Q and the rest is completed from P. Walks every draft and every cell of the acceptance noise.
    """
    joint = torch.zeros((V,) * (depth + 1), dtype=torch.float64)
    for drafted in itertools.product(range(V), repeat=depth):
        prefixes = [drafted[:i] for i in range(depth + 1)]
        p_rows = torch.stack([P(prefix) for prefix in prefixes])
        q_rows = torch.stack([Q(prefix) for prefix in prefixes])
        weight_of_draft = float(torch.stack([q_rows[i, t] for i, t in enumerate(drafted)]).prod())
        tree = TokenTree(
            torch.tensor([[0, *drafted]]),
            chain(depth, CPU),
            WITH_REPLACEMENT,
            q_rows[None, :-1].log(),
        )
        cells = [sorted({0.0, h, 1.0}) for h in thresholds_of_block(p_rows, q_rows, list(drafted))]
        for cell in itertools.product(*[list(itertools.pairwise(c)) for c in cells]):
            size = float(torch.tensor([hi - lo for lo, hi in cell], dtype=torch.float64).prod())
            u = torch.tensor([[(lo + hi) / 2 for lo, hi in cell]], dtype=torch.float64)
            for token, share in next_token_law(rule, tree, p_rows, u):
                kept = int(rule_verdict(rule, tree, p_rows, u, token).n_accepted_B)
                add_completed(
                    joint, (*drafted[:kept], token), weight_of_draft * size * share, depth + 1
                )
    return joint


def pad(u: Tensor) -> Tensor:
    """A uniform for the root, which no rule reads."""
    return torch.cat([torch.full_like(u[:, :1], torch.nan), u], 1)


def rule_verdict(
    rule: verify.Rule, tree: TokenTree, p_rows: Tensor, u: Tensor, win: int
) -> Verdict:
    """The verdict when token `win` wins the residual's race if it has any mass at all."""
    race = torch.full((1, V), 600.0, dtype=torch.float64)
    race[0, win] = -600.0
    return rule(tree, p_rows.log()[None], Noise(accept_BN=pad(u), log_residual_BV=race), None)


def next_token_law(
    rule: verify.Rule, tree: TokenTree, p_rows: Tensor, u: Tensor
) -> list[tuple[int, float]]:
    """The law of the token after the kept path, recovered from the rule itself: the race decides
    between tokens i and j at log E_i - log E_j = log law_i - log law_j, found by bisection.
    """
    alive = [t for t in range(V) if int(rule_verdict(rule, tree, p_rows, u, t).next_B) == t]
    log_ratio = {alive[0]: 0.0}
    for token in alive[1:]:
        low, high = -80.0, 80.0
        for _ in range(70):
            middle = (low + high) / 2
            race = torch.full((1, V), 600.0, dtype=torch.float64)
            race[0, alive[0]], race[0, token] = 0.0, middle
            noise = Noise(accept_BN=pad(u), log_residual_BV=race)
            won = int(rule(tree, p_rows.log()[None], noise, None).next_B) == token
            low, high = (middle, high) if won else (low, middle)
        log_ratio[token] = low
    total = torch.tensor(list(log_ratio.values()), dtype=torch.float64).softmax(0)
    return list(zip(log_ratio, total.tolist(), strict=True))


def add_completed(joint: Tensor, tokens: tuple[int, ...], mass: float, length: int) -> None:
    """Add `mass` to every way in which P completes `tokens` to `length`."""
    if len(tokens) == length:
        joint[tokens] += mass
        return
    for token, p in enumerate(P(tokens).tolist()):
        add_completed(joint, (*tokens, token), mass * p, length)


def joint_of_target(length: int) -> Tensor:
    joint = torch.zeros((V,) * length, dtype=torch.float64)
    add_completed(joint, (), 1.0, length)
    return joint


@pytest.mark.parametrize("depth", [1, 2])
def test_block_is_exact(depth: int) -> None:
    error = (joint_of_rule(verify.block, depth) - joint_of_target(depth + 1)).abs().max()
    assert float(error) < 1e-12


def test_broken_block_fails() -> None:
    """The twin draws the token after a rejection from p instead of the residual."""

    def broken(tree: TokenTree, p_logits: Tensor, noise: Noise, extra: Tensor | None) -> Verdict:
        verdict = verify.block(tree, p_logits, noise, extra)
        law = p_logits[torch.arange(1), verdict.n_accepted_B]
        return verdict._replace(next_B=(law - noise.log_residual_BV).argmax(-1))

    error = (joint_of_rule(broken, 2) - joint_of_target(3)).abs().max()
    assert float(error) > 1e-3


def test_coupled_emits_what_plain_decoding_emits() -> None:
    """Injected noise, every draft: the emitted prefix is the target's own samples."""
    depth = 3
    for trial in range(40):
        generator = torch.Generator().manual_seed(trial)
        race = (
            torch.empty(1, depth + 1, V, dtype=torch.float64)
            .exponential_(generator=generator)
            .log()
        )
        truth: tuple[int, ...] = ()
        for level in range(depth + 1):
            truth = (*truth, int((P(truth).log() - race[0, level]).argmax()))
        longest = 0
        for drafted in itertools.product(range(V), repeat=depth):
            p_rows = torch.stack([P(drafted[:i]) for i in range(depth + 1)])
            tree = TokenTree(torch.tensor([[0, *drafted]]), chain(depth, CPU), COUPLED)
            verdict = verify.coupled(tree, p_rows.log()[None], Noise(race), None)
            kept = int(verdict.n_accepted_B)
            assert (*drafted[:kept], int(verdict.next_B)) == truth[: kept + 1]
            assert kept == depth or drafted[kept] != truth[kept]
            longest = max(longest, kept)
        assert longest == depth


def test_coupled_tree_finds_the_longest_path() -> None:
    #       0
    #     1   2        tokens 1: a, 2: b; below 1: 3 (a); below 2: 4 (b), 5 (c)
    topology = Topology.from_parents([-1, 0, 0, 1, 2, 2], CPU)
    tokens = torch.tensor([[9, 0, 1, 0, 1, 2]])
    wants = torch.tensor([[1, 0, 2, 0, 0, 1]])  # what the target samples after each node
    p_logits = torch.full((1, 6, V), -50.0).scatter(2, wants[..., None], 0.0)
    tree = TokenTree(tokens, topology, COUPLED)
    verdict = verify.coupled(tree, p_logits, Noise(), None)
    assert verdict.path_BL.tolist() == [[0, 2, 5]]
    assert (int(verdict.n_accepted_B), int(verdict.next_B)) == (2, 1)


def test_tree_code_and_chain_code_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, V, (64, 5), generator=generator)
    p_logits = torch.randn(64, 5, V, generator=generator)
    flat = chain(4, CPU)
    chained = verify.coupled(TokenTree(tokens, flat, COUPLED), p_logits, Noise(), None)
    # A useless extra child of the root forces the general code.
    bushy = Topology.from_parents([-1, 0, 1, 2, 3, 0], CPU)
    wrong = (p_logits[:, 0].argmax(-1, keepdim=True) + 1) % V
    general = verify.coupled(
        TokenTree(torch.cat([tokens, wrong], 1), bushy, COUPLED),
        torch.cat([p_logits, p_logits[:, :1]], 1),
        Noise(),
        None,
    )
    assert torch.equal(chained.n_accepted_B, general.n_accepted_B)
    assert torch.equal(chained.next_B, general.next_B)
    assert chained.n_accepted_B.max() >= 3


def test_block_refuses_a_law_it_cannot_handle() -> None:
    tree = TokenTree(torch.zeros(1, 3, dtype=torch.long), chain(2, CPU), COUPLED)
    with pytest.raises(ValueError, match="drawn with replacement"):
        verify.block(tree, torch.zeros(1, 3, V), Noise(), None)


def test_topology_refuses_children_before_parents() -> None:
    with pytest.raises(ValueError, match="node 1 has parent 2"):
        Topology.from_parents([-1, 2, 0], CPU)
