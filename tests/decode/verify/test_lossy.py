"""Lossy masks: by hand on tiny cases, nothing extra when off, and the laws they change."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from enumeration import CPU, enumerate_rule, error, one_node, toy
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from draftsmith.decode.token_tree import (
    COUPLED,
    WITH_REPLACEMENT,
    WITHOUT_REPLACEMENT,
    TokenTree,
    Topology,
    chain,
)
from draftsmith.decode.verify.lossy import Lossy, parse
from draftsmith.decode.verify.rules import Noise, Rule, coupled, leviathan, recursive

FORK = Topology.from_parents([-1, 0, 0, 1, 2], CPU)
TEXTS = ["typical", "typical:0.2,0.5", "lenience:0.5", "lenience-exp:0.25", "fuzzy:0.4"]


def greedy_case() -> tuple[TokenTree, Tensor]:
    """The root's p is (.5, .3, .15, .05), node 1's even, node 2's (.97, .01, .01, .01)."""
    rows = [[0.5, 0.3, 0.15, 0.05], [0.25] * 4, [0.97, 0.01, 0.01, 0.01], [0.25] * 4, [0.25] * 4]
    tree = TokenTree(torch.tensor([[3, 1, 3, 2, 1]]), FORK, COUPLED)
    return tree, torch.tensor([rows], dtype=torch.float64).log()


def test_typical_by_hand() -> None:
    tree, p_logits = greedy_case()
    # exp(-H) at the root: prod p^p = 0.3193; at node 1: 1/4; at node 2: 0.8457.
    # Node 1 (p .3), node 2 (.05), node 3 (.25 after node 1), node 4 (.01 after node 2).
    for text, expected in (
        ("typical", [False, True, False, True, False]),  # .09, .075, .09
        ("typical:0.02,0.3", [False, True, True, True, False]),  # eps alone: p > .02
        ("typical:1,0.95", [False, False, False, True, False]),  # .303, .2375, .803
        ("typical:1,0.15", [False, True, True, True, False]),  # .048, .0375, .127
    ):
        assert parse(text).mask(tree, p_logits, Noise()).tolist() == [expected], text


def test_greedy_lenience_by_hand() -> None:
    tree, p_logits = greedy_case()
    # p / max p: node 1 .6, node 2 .1, node 3 1, node 4 .0103.
    for text, expected in (
        ("lenience:1", [False, False, False, True, False]),  # a tie with the best is no loss
        ("lenience:0.55", [False, True, False, True, False]),
        ("lenience:0.09", [False, True, True, True, False]),
        ("lenience:0.01", [False, True, True, True, True]),
        ("lenience-exp:0.5", [False, True, False, True, False]),  # .5477, .2236 of .5; .1 of .97
        ("lenience-exp:0.005", [False, True, True, True, True]),
    ):
        assert parse(text).mask(tree, p_logits, Noise()).tolist() == [expected], text


def test_fuzzy_by_hand() -> None:
    """JS of (1, 0) and (.5, .5) is H(.75, .25) - H(.5, .5) / 2 = 0.2158 nats; of equals 0."""
    p_logits = torch.tensor([[[1.0, 0.0], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]]).log()
    q_logits = torch.tensor([[[0.5, 0.5], [0.5, 0.5], [0.0, 1.0]]]).log()
    tree = TokenTree(torch.tensor([[0, 0, 1, 0, 1]]), FORK, COUPLED, q_logits)
    for text, expected in (
        ("fuzzy:0", [False, False, False, False, False]),
        ("fuzzy:0.2", [False, False, False, True, False]),
        ("fuzzy:0.216", [False, True, True, True, True]),
    ):
        assert parse(text).mask(tree, p_logits, Noise()).tolist() == [expected], text
    with pytest.raises(ValueError, match="a tree without the draft's q"):
        parse("fuzzy:0.2").mask(replace(tree, q_logits_BIV=None), p_logits, Noise())


def drafted(rows: int, topology: Topology) -> tuple[TokenTree, Tensor, Tensor]:
    """Coupled drafts of a draft near the target; p's logits and the noise they share."""
    g = torch.Generator().manual_seed(0)
    vocab, levels = 4, topology.levels + 1
    p, q = toy(1, vocab, levels, 1.5), toy(2, vocab, levels)
    race = torch.empty(rows, levels, vocab, dtype=torch.float64).exponential_(generator=g).log()
    tokens = torch.zeros(rows, topology.nodes, dtype=torch.long)
    p_logits = torch.empty(rows, topology.nodes, vocab, dtype=torch.float64)
    q_logits = []
    for node in range(topology.nodes):
        path = [m for m in range(1, node + 1) if topology.ancestors[node, m]]
        at = tuple(tokens[:, m] for m in path)
        p_logits[:, node] = p[len(path)][at].log()
        if node in topology.children:
            q_logits.append(q[len(path)][at].log().expand(rows, -1))
            children = topology.children[node]
            scores = q_logits[-1] - race[:, len(path)]
            tokens[:, list(children)] = scores.topk(len(children)).indices
    return TokenTree(tokens, topology, COUPLED, torch.stack(q_logits, 1)), p_logits, race


def first_token(tree: TokenTree, p_logits: Tensor, race: Tensor, lossy: Lossy | None) -> Tensor:
    """The share of rows that emit each token first, under the coupled rule."""
    noise = Noise(race)
    mask = None if lossy is None else lossy.mask(tree, p_logits, noise)
    verdict = coupled(tree, p_logits, noise, mask)
    kept = tree.tokens_BN.gather(1, verdict.path_BL[:, 1:2])[:, 0]
    first = torch.where(verdict.n_accepted_B > 0, kept, verdict.next_B)
    return first.bincount(minlength=4).double() / len(first)


@pytest.mark.parametrize("topology", [chain(2, CPU), FORK], ids=["chain", "fork"])
@pytest.mark.parametrize("text", TEXTS)
def test_each_mask_changes_the_law_under_noise(text: str, topology: Topology) -> None:
    """Total variation to p of 40,000 rows: sampling alone gives about 0.005."""
    case = drafted(40_000, topology)
    p = case[1][0, 0].exp()
    assert float((first_token(*case, None) - p).abs().sum()) / 2 < 0.01
    assert float((first_token(*case, parse(text)) - p).abs().sum()) / 2 > 0.03


@pytest.mark.parametrize("topology", [chain(2, CPU), FORK], ids=["chain", "fork"])
@pytest.mark.parametrize("text", ["lenience:1", "lenience-exp:1", "fuzzy:0"])
def test_switched_off_nothing_extra_is_accepted(text: str, topology: Topology) -> None:
    tree, p_logits, race = drafted(2000, topology)
    mask = parse(text).mask(tree, p_logits, Noise(race))
    for plain, masked in zip(
        coupled(tree, p_logits, Noise(race), None),
        coupled(tree, p_logits, Noise(race), mask),
        strict=True,
    ):
        assert torch.equal(plain, masked)


def test_lenience_bounds_every_token() -> None:
    """No token comes with more than p / l: by the race, at most p / (p + l (1 - p))."""
    tree, p_logits, race = drafted(40_000, chain(2, CPU))
    p = p_logits[0, 0].exp()
    for share in (0.3, 0.7):
        emitted = first_token(tree, p_logits, race, Lossy("lenience", (share,)))
        assert (emitted <= p / (p + share * (1 - p)) + 0.01).all()


def extra(text: str) -> Callable[[TokenTree, Tensor, Noise], Tensor]:
    return parse(text).mask


@pytest.mark.parametrize(
    ("rule", "topology", "text"),
    [
        *((leviathan, chain(2, CPU), text) for text in TEXTS),
        *((recursive, FORK, text) for text in ("typical", "fuzzy:0.4")),
    ],
)
def test_each_mask_changes_the_exact_law_of_rejection(
    rule: Rule, topology: Topology, text: str
) -> None:
    law = WITH_REPLACEMENT if topology.is_chain else WITHOUT_REPLACEMENT
    p, q = toy(1, 3, 3, 1.5), toy(2, 3, 3)
    assert error(rule, topology, law, p, q) < 1e-12
    assert error(rule, topology, law, p, q, extra=extra(text)) > 1e-3


@pytest.mark.parametrize("text", ["lenience:1", "lenience-exp:1", "fuzzy:0"])
def test_rejection_switched_off_stays_exact(text: str) -> None:
    p, q = toy(1, 3, 3, 1.5), toy(2, 3, 3)
    assert error(leviathan, chain(2, CPU), WITH_REPLACEMENT, p, q, extra=extra(text)) < 1e-12


def test_lenience_by_rejection_is_the_papers() -> None:
    """One position accepts with sum min(q, p / l), and emits no token more often than p / l."""
    p, q = toy(1, 4, 2, 1.5), toy(2, 4, 2)
    for share in (0.4, 0.8):
        mask = extra(f"lenience:{share}")
        outcome = enumerate_rule(leviathan, chain(1, CPU), WITH_REPLACEMENT, p, q, extra=mask)
        accepted = float(torch.minimum(q[0], p[0] / share).sum())
        assert outcome.tau - 1 == pytest.approx(accepted, abs=1e-12)
        assert (outcome.joint.sum(1) <= p[0] / share + 1e-12).all()


def test_lenience_refuses_siblings_judged_by_rejection() -> None:
    tree, p_logits, _ = drafted(2, FORK)
    with pytest.raises(ValueError, match="use rule=coupled"):
        parse("lenience:0.5").mask(tree, p_logits, Noise(None, *torch.zeros(2, 2, 5)))


@pytest.mark.parametrize("text", TEXTS)
def test_a_mask_reads_no_tensor_and_spares_the_root(text: str) -> None:
    with FakeTensorMode():
        topology = Topology.from_parents([-1, 0, 0, 1, 2], CPU)
        q_logits = torch.zeros(2, 3, 9)
        tree = TokenTree(torch.zeros(2, 5, dtype=torch.long), topology, COUPLED, q_logits)
        for race in (None, torch.zeros(2, 3, 9)):
            mask = parse(text).mask(tree, torch.zeros(2, 5, 9), Noise(race))
            assert mask.shape == (2, 5) and mask.dtype == torch.bool
    tree, p_logits, race = drafted(50, FORK)
    assert not parse(text).mask(tree, p_logits, Noise(race))[:, 0].any()
    bare = TokenTree(tree.tokens_BN[:, :1], chain(0, CPU), COUPLED)
    assert parse(text).mask(bare, p_logits[:, :1], Noise(race)).tolist() == [[False]] * 50


@pytest.mark.parametrize("text", TEXTS)
def test_rows_of_different_topology(text: str) -> None:
    tree, p_logits, race = drafted(20, FORK)
    topology = replace(
        FORK,
        parent=FORK.parent.expand(20, -1),
        depth=FORK.depth.expand(20, -1),
        ancestors=FORK.ancestors.expand(20, -1, -1),
        parents=None,
    )
    if text.startswith("fuzzy"):
        with pytest.raises(ValueError, match="static tree"):
            parse(text).mask(replace(tree, topology=topology), p_logits, Noise(race))
        return
    masks = [
        parse(text).mask(replace(tree, topology=t), p_logits, Noise(race)) for t in (FORK, topology)
    ]
    assert torch.equal(*masks) and masks[0].any()


@pytest.mark.parametrize("text", [*TEXTS, "fuzzy:0", "lenience:1"])
def test_a_description_is_read_back(text: str) -> None:
    lossy = parse(text)
    assert parse(str(lossy)) == lossy
    assert lossy.needs_q == text.startswith("fuzzy")
    assert parse("typical") == parse("typical:0.09,0.3")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "judge",
        "Typical",
        "typical:",
        "typical:0.1",
        "typical:0.1,0.2,0.3",
        "typical:0,0.3",
        "lenience",
        "lenience:0",
        "lenience:1.5",
        "lenience:-1",
        "lenience:half",
        "fuzzy",
        "fuzzy:nan",
        "fuzzy:inf",
        "fuzzy:0.1,",
    ],
)
def test_bad_descriptions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"lossy: got .*, expected"):
        parse(text)


def test_typical_matches_its_definition() -> None:
    """Against scalar arithmetic, laws with zeros included."""
    tree, p_logits, _ = drafted(50, FORK)
    p_logits = p_logits.masked_fill(p_logits < -2.5, -torch.inf)
    mask = parse("typical").mask(tree, p_logits, Noise())
    for row in range(50):
        for node, parent in ((1, 0), (2, 0), (3, 1), (4, 2)):
            law = p_logits[row, parent].softmax(0).tolist()
            entropy = -sum(p * math.log(p) for p in law if p > 0)
            accept = law[int(tree.tokens_BN[row, node])] > min(0.09, 0.3 * math.exp(-entropy))
            assert bool(mask[row, node]) == accept


def test_fuzzy_by_its_other_divergences_by_hand() -> None:
    """p (.8, .2), q (.5, .5): KL(q || p) = .5 log(.25 / .16) = .2231 nats, TV .3; JS .0507."""
    tree, p_logits = one_node(torch.tensor([[0.8, 0.2]]).log(), torch.tensor([[0.5, 0.5]]).log())
    for text, passes in (
        ("fuzzy:kl,0.22", False),
        ("fuzzy:0.224,kl", True),
        ("fuzzy:tv,0.299", False),
        ("fuzzy:tv,0.301", True),
        ("fuzzy:js,0.050", False),
        ("fuzzy:0.051", True),
    ):
        mask = parse(text).mask(tree, p_logits, Noise())
        assert mask.tolist() == [[False, passes]], text
        assert parse(str(parse(text))) == parse(text)


def test_top_beta_by_hand() -> None:
    """p (.5, .3, .15, .05): token 2 is the third best, log(.5 / .15) = 1.204 behind."""
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    tree, p_logits = one_node(p, p)
    for token, text, passes in (
        (0, "top-beta:1,0", True),
        (1, "top-beta:1,0", False),
        (1, "top-beta:1,9", False),
        (2, "top-beta:3,1.21", True),
        (2, "top-beta:3,1.2", False),
        (2, "top-beta:2,9", False),
    ):
        drafted = replace(tree, tokens_BN=torch.tensor([[0, token]]))
        mask = parse(text).mask(drafted, p_logits, Noise())
        assert mask.tolist() == [[False, passes]], (token, text)
