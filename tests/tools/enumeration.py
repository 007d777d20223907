"""The exact joint law of what a verify rule emits, by walking every draft and every outcome.

A rule sees its uniforms only through `u < threshold` and its last race only through
`law.log() - race`. Both are watched, so the thresholds and the law come from the rule itself: all
drafts and all cells of the noise between thresholds are then one batch of float64 rows.

Shapes: R rows, N nodes, L levels of tokens, V vocabulary; laws are tables [V] * depth + [V].
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from draftsmith.decode.token_tree import (
    COUPLED,
    LAST_DRAWN,
    WITHOUT_REPLACEMENT,
    TokenTree,
    Topology,
    chain,
)
from draftsmith.decode.verify.rules import Noise, Rule

Tables = list[Tensor]  # at depth d: the law of the next token after each prefix of d tokens
Extra = Callable[[TokenTree, Tensor, Noise], Tensor]
CPU = torch.device("cpu")


def toy(seed: int, vocab: int, levels: int, sharpness: float = 1.0, top: int = 0) -> Tables:
    """A conditional law for every prefix; top: tokens that may follow each one, 0 for all."""
    generator = torch.Generator().manual_seed(seed)
    tables = []
    for depth in range(levels):
        shape = (vocab,) * (depth + 1)
        logits = torch.randn(shape, generator=generator, dtype=torch.float64) * sharpness
        if top:
            logits[logits < logits.topk(top, dim=-1).values[..., -1:]] = -torch.inf
        tables.append(logits.softmax(-1))
    return tables


@dataclass(frozen=True)
class Outcome:
    """joint: the law of the first `levels + 1` tokens; tau: tokens a round emits, on average."""

    joint: Tensor
    tau: float


def joint_of(tables: Tables, levels: int) -> Tensor:
    joint = torch.ones((), dtype=torch.float64)
    for depth in range(levels):
        joint = joint[..., None] * tables[depth]
    return joint


def drafts(topology: Topology, q: Tables, law: str) -> tuple[Tensor, Tensor, Tensor]:
    """Every draft a tree can be: tokens [R, N], its probability [R], and q's log [R, I, V]."""
    vocab = q[0].shape[-1]
    drawn = itertools.product(range(vocab), repeat=topology.nodes - 1)
    tokens_RN = torch.tensor([(0, *row) for row in drawn])
    weight_R = torch.ones(len(tokens_RN), dtype=torch.float64)
    q_RIV = at_nodes(topology, tokens_RN, q)[:, list(topology.inner)]
    for i, node in enumerate(topology.inner):
        q_RV = q_RIV[:, i]
        if law == LAST_DRAWN:
            given = topology.children[node][:-1]
            best_RK = q_RV.argsort(1, descending=True)[:, : len(given)]
            weight_R = weight_R * (tokens_RN[:, given] == best_RK).all(1)
            q_RV = q_RV.scatter(1, best_RK, 0.0)
            q_RV = q_RV / q_RV.sum(1, keepdim=True).clamp(min=1e-300)
            q_RIV[:, i] = q_RV
        for child in topology.children[node][-1 if law == LAST_DRAWN else 0 :]:
            # Once everything q can draw is drawn, token 0 stands in: no rule may accept it.
            empty_R1 = q_RV.sum(1, keepdim=True) == 0
            q_RV = torch.where(empty_R1, torch.eye(vocab, dtype=q_RV.dtype)[:1], q_RV)
            weight_R = weight_R * q_RV.gather(1, tokens_RN[:, child : child + 1])[:, 0]
            if law == WITHOUT_REPLACEMENT:
                q_RV = q_RV.scatter(1, tokens_RN[:, child : child + 1], 0.0)
                q_RV = q_RV / q_RV.sum(1, keepdim=True).clamp(min=1e-300)
    possible_R = weight_R > 0
    return tokens_RN[possible_R], weight_R[possible_R], q_RIV[possible_R].log()


def at_nodes(topology: Topology, tokens_RN: Tensor, tables: Tables) -> Tensor:
    """The law [R, N, V] after each node's path."""
    rows = []
    for node in range(topology.nodes):
        path = [m for m in range(1, topology.nodes) if topology.ancestors[node, m]]
        law = tables[len(path)]
        rows.append(law[tuple(tokens_RN[:, m] for m in path)].expand(len(tokens_RN), -1))
    return torch.stack(rows, 1)


class Watch(TorchFunctionMode):
    """Writes down what a rule compares its uniforms with, and the law it draws from."""

    def __init__(self, race: Tensor) -> None:
        super().__init__()
        self.race = race
        self.compared: list[tuple[Tensor, Tensor]] = []
        self.log_laws: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("lt", "__lt__") and isinstance(args[1], Tensor):
            self.compared.append((args[0], args[1]))
        if name in ("sub", "__sub__") and args[1] is self.race:
            self.log_laws.append(args[0])
        return func(*args, **(kwargs or {}))


def run(
    rule: Rule, tree: TokenTree, p_RNV: Tensor, u_RN: Tensor, extra: Extra | None
) -> tuple[Any, Watch]:
    rows, vocab = p_RNV.shape[0], p_RNV.shape[2]
    generator = torch.Generator().manual_seed(0)
    race = torch.rand(rows, vocab, dtype=torch.float64, generator=generator).log()
    noise = Noise(accept_BN=u_RN, log_residual_BV=race)
    with Watch(race) as watch:
        mask_RN = None if extra is None else extra(tree, p_RNV.log(), noise)
        verdict = rule(tree, p_RNV.log(), noise, mask_RN)
    assert torch.equal(verdict.next_B, (watch.log_laws[-1] - race).argmax(-1))
    return verdict, watch


def thresholds(watch: Watch, nodes: int) -> list[list[Tensor]]:
    """For each node all [R] that its uniform is compared with, in a run whose uniforms are their
    own names: minus (node + 1).
    """
    found: list[list[Tensor]] = [[] for _ in range(nodes)]
    for marks, bounds in watch.compared:
        if bool((marks < 0).all()):
            for column in range(marks.shape[1]):
                found[int(-marks[0, column]) - 1].append(bounds[:, column].clamp(0, 1))
    found[0] = []  # the root is kept whatever its uniform
    return found


def enumerate_rule(
    rule: Rule,
    topology: Topology,
    law: str,
    p: Tables,
    q: Tables,
    *,
    extra: Extra | None = None,
    drawn: Tables | None = None,
    share: Callable[[Tensor], Tensor] | None = None,
) -> Outcome:
    """What `rule` emits when it verifies trees drawn from q by `law`, completed from p.

    drawn: what the drafts are truly drawn from, where a drafter lies about its q; share: of each
    draft [R, N], how often it is this tree that is drafted.
    """
    tokens_RN, weight_R, log_q_RIV = drafts(topology, drawn or q, law)
    if share is not None:
        weight_R = weight_R * share(tokens_RN)
    if drawn is not None:
        log_q_RIV = at_nodes(topology, tokens_RN, q)[:, list(topology.inner)].log()
    tree = TokenTree(tokens_RN, topology, law, log_q_RIV)
    p_RNV = at_nodes(topology, tokens_RN, p)
    names_RN = -torch.arange(1.0, topology.nodes + 1, dtype=torch.float64).expand_as(tokens_RN)
    first = run(rule, tree, p_RNV, names_RN, extra)[1]
    cuts = [
        torch.stack([torch.zeros_like(weight_R), *found, torch.ones_like(weight_R)]).sort(0).values
        for found in thresholds(first, topology.nodes)
    ]
    cells = list(itertools.product(*[range(len(cut) - 1) for cut in cuts]))
    low_RCN, high_RCN = (
        torch.stack([cut[[cell[n] + end for cell in cells]] for n, cut in enumerate(cuts)], -1)
        .transpose(0, 1)
        .contiguous()
        for end in (0, 1)
    )
    weight_R = (weight_R[:, None] * (high_RCN - low_RCN).prod(-1)).flatten()
    real = weight_R > 0
    index_R = torch.arange(len(tokens_RN)).repeat_interleave(len(cells))[real]
    u_RN = ((low_RCN + high_RCN) / 2).flatten(0, 1)[real]
    big = TokenTree(tokens_RN[index_R], topology, law, log_q_RIV[index_R])
    verdict, watch = run(rule, big, p_RNV[index_R], u_RN, extra)
    # What a uniform is compared with may depend on the tree alone: else there are more cells.
    for (_, before), (_, now) in zip(first.compared, watch.compared, strict=True):
        assert torch.equal(before[index_R], now)
    return _collect(verdict, watch.log_laws[-1].softmax(-1), big.tokens_BN, weight_R[real], p)


def _collect(
    verdict: Any, law_RV: Tensor, tokens_RN: Tensor, weight_R: Tensor, p: Tables
) -> Outcome:
    vocab, levels = law_RV.shape[1], verdict.path_BL.shape[1] - 1
    path_RL = tokens_RN.gather(1, verdict.path_BL)
    joint = torch.ones((), dtype=torch.float64)
    for kept in range(levels + 1):
        rows = verdict.n_accepted_B == kept
        ended = torch.zeros((vocab,) * (kept + 1), dtype=torch.float64)
        prefix = tuple(path_RL[rows, d] for d in range(1, kept + 1))
        mass_RV = weight_R[rows, None] * law_RV[rows]
        if kept == 0:
            ended += mass_RV.sum(0)
            joint = ended
        else:
            joint = joint[..., None] * p[kept] + ended.index_put(prefix, mass_RV, accumulate=True)
    tau = float((weight_R * (verdict.n_accepted_B + 1)).sum() / weight_R.sum())
    return Outcome(joint, tau)


def error(rule: Rule, topology: Topology, law: str, p: Tables, q: Tables, **options: Any) -> float:
    """The largest error of the joint law that `rule` emits."""
    outcome = enumerate_rule(rule, topology, law, p, q, **options)
    return float((outcome.joint - joint_of(p, topology.levels + 1)).abs().max())


def one_node(p: Tensor, q: Tensor) -> tuple[TokenTree, Tensor]:
    """A chain of one drafted token, of p and q logits [B, V]."""
    tokens = torch.zeros(len(p), 2, dtype=torch.int64)
    p_BNV = torch.stack([p, torch.zeros_like(p)], 1)
    return TokenTree(tokens, chain(1, CPU), COUPLED, q[:, None]), p_BNV
