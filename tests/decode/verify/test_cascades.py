"""Laws that a rule verifies against in the place of p: against loops, exact by enumeration, off at
their lossless ends; and what decoding makes of them.

Shapes as in decode/verify/cascades.py.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import covering
from enumeration import CPU, Tables, at_nodes, enumerate_rule, joint_of, one_node, toy
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import RowParams, SamplingParams, request_race
from draftsmith.decode.token_tree import (
    COUPLED,
    WITH_REPLACEMENT,
    WITHOUT_REPLACEMENT,
    TokenTree,
    Topology,
    chain,
)
from draftsmith.decode.verify.lossy import parse
from draftsmith.decode.verify.rules import (
    RULES,
    Noise,
    Rule,
    Verdict,
    block,
    coupled,
    leviathan,
    recursive,
    traversal,
)

T1, GREEDY = SamplingParams(temperature=1.0), SamplingParams()
TEXTS = ["rapid:3", "cascade:chow,0.5", "cascade:diff,0.1", "cascade:opt,0.6"]
TEXTS += ["cascade:v1,0.2", "cascade:v2,0.2", "cascade:v3,0.6", "cascade:v3,0"]
SHAPES = {
    "chain": chain(2, CPU),
    "star": Topology.from_parents([-1, 0, 0], CPU),
    "bush": Topology.from_parents([-1, 0, 0, 1, 1, 2], CPU),
}


def pi_of(text: str, p: list[float], q: list[float], greedy: bool = False) -> list[float]:
    """By the definitions, number by number."""
    name, _, tail = text.partition(":")
    tokens = range(len(p))
    if name == "rapid":
        z = [
            math.log(p[v]) + float(tail) * (q[v] - p[v]) * (q[v] >= 0.1 * max(q)) if p[v] else None
            for v in tokens
        ]
        total = sum(math.exp(x) for x in z if x is not None)
        return [0.0 if x is None else math.exp(x) / total for x in z]
    rule, a = tail.split(",")[0], float(tail.split(",")[1])
    drawn = [[float(v == law.index(max(law))) for v in tokens] if greedy else law for law in (p, q)]
    tv = sum(max(y - x, 0) for x, y in zip(*drawn, strict=True))
    whole = {"chow": 1 - a, "diff": max(p) - a, "opt": max(p) - a * tv}
    if rule in whole:
        return drawn[max(q) >= whole[rule]]
    inside = {
        "v1": [q[v] >= max(p) - a for v in tokens],
        "v2": [p[v] >= max(p) - a for v in tokens],
        "v3": [p[v] >= (1 - a) * max(p) for v in tokens],
    }[rule]
    kept = sum(drawn[1][v] for v in tokens if inside[v])
    return [drawn[1][v] * inside[v] + (1 - kept) * drawn[0][v] for v in tokens]


def of_tables(text: str, p: Tables, q: Tables, levels: int) -> Tables:
    """The laws at each depth that has drafts; p beyond."""
    found = []
    for depth, (p_law, q_law) in enumerate(zip(p, q, strict=True)):
        vocab = p_law.shape[-1]
        rows = zip(p_law.view(-1, vocab).tolist(), q_law.view(-1, vocab).tolist(), strict=True)
        flat = [pi_of(text, *row) for row in rows] if depth < levels else p_law.tolist()
        found.append(torch.tensor(flat, dtype=torch.float64).view(p_law.shape))
    return found


@pytest.mark.parametrize("params", [T1, GREEDY], ids=["t1", "greedy"])
@pytest.mark.parametrize("text", TEXTS)
def test_each_law_is_its_definition(text: str, params: SamplingParams) -> None:
    """Laws with holes too, of which rapid's keeps p's."""
    torch.manual_seed(0)
    p, q = (torch.randn(200, 5, dtype=torch.float64) * 2 for _ in range(2))
    p[::3, 1], q[::4, 2] = -torch.inf, -torch.inf
    got = parse(text).law(*one_node(p, q), params)
    for row in range(200):
        laws = p[row].softmax(0).tolist(), q[row].softmax(0).tolist()
        want = torch.tensor(pi_of(text, *laws, params.greedy), dtype=torch.float64)
        found = got[row, 0].softmax(0)
        if params.greedy:
            found, want = found.argmax(), want.argmax()
        assert torch.allclose(found.double(), want.double(), atol=1e-12), row
    assert torch.equal(got[:, 1], torch.zeros_like(p)), "a leaf has no q: p stands"


def against(text: str, rule: Rule) -> Rule:
    def judged(tree: TokenTree, p_logits: Tensor, noise: Noise, extra: Tensor | None) -> Verdict:
        return rule(tree, parse(text).law(tree, p_logits, T1), noise, extra)

    return judged


CASES = [
    *((rule, "chain", law) for rule in (leviathan, block) for law in (WITH_REPLACEMENT,)),
    *(
        (rule, name, law)
        for rule in (recursive, traversal)
        for name in SHAPES
        for law in (WITH_REPLACEMENT, WITHOUT_REPLACEMENT)
    ),
]


def error(text: str, rule: Rule, topology: Topology, law: str, seed: int = 0) -> float:
    """The largest error of the joint law against pi's, where nodes were drafted, and then p's."""
    levels = topology.levels + 1
    p, q = toy(seed, 3, levels, 1.5), toy(seed + 50, 3, levels)
    laws = of_tables(text, p, q, topology.levels)

    def told(tree: TokenTree, logits: Tensor, noise: Noise, extra: Tensor | None) -> Verdict:
        """What goes on after a path that ended early has pi's law; the rule is told p."""
        return rule(tree, at_nodes(topology, tree.tokens_BN, p).log(), noise, extra)

    joint = enumerate_rule(told, topology, law, laws, q).joint
    return float((joint - joint_of(laws, levels)).abs().max())


@pytest.mark.parametrize(("rule", "name", "law"), CASES)
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_decoded_has_the_law(text: str, rule: Rule, name: str, law: str) -> None:
    for seed in range(2):
        assert error(text, against(text, rule), SHAPES[name], law, seed) < 1e-12


def test_the_residual_of_rapid_s_code_fails() -> None:
    """Accepted by pi, then drawn from max(p - q, p - pi): the answer has neither law."""

    def broken(tree: TokenTree, p_logits: Tensor, noise: Noise, extra: Tensor | None) -> Verdict:
        pi_logits = parse("rapid:3").law(tree, p_logits, T1)
        verdict = leviathan(tree, pi_logits, noise, extra)
        assert tree.q_logits_BIV is not None and noise.log_residual_BV is not None
        p, pi = p_logits.softmax(-1), pi_logits.softmax(-1)
        left = p.clone()
        left[:, :-1] = (p[:, :-1] - torch.minimum(tree.q_logits_BIV.softmax(-1), pi[:, :-1])).relu()
        law = left[torch.arange(len(p)), verdict.n_accepted_B]
        return verdict._replace(next_B=(law.log() - noise.log_residual_BV).argmax(-1))

    assert error("rapid:3", broken, SHAPES["chain"], WITH_REPLACEMENT) > 1e-2


def test_token_rules_by_p_at_zero_are_not_lossless() -> None:
    """The tokens of v3 always hold the target's best: p = (.6, .4), q = (.5, .5) gives (.8, .2)."""
    tree, p_logits = one_node(torch.tensor([[0.6, 0.4]]).log(), torch.tensor([[0.5, 0.5]]).log())
    law = parse("cascade:v3,0").law(tree, p_logits, T1)[0, 0].exp()
    torch.testing.assert_close(law, torch.tensor([0.8, 0.2]))


OFF = ["rapid:0", "cascade:diff,-1", "cascade:v1,-1", "cascade:v2,-1"]


@pytest.mark.parametrize("text", OFF)
def test_switched_off_the_law_is_p_to_the_last_bit(text: str) -> None:
    torch.manual_seed(0)
    tree, p_logits = one_node(torch.randn(50, 7), torch.randn(50, 7))
    for params in (T1, GREEDY):
        assert torch.equal(parse(text).law(tree, p_logits, params), p_logits)


@pytest.mark.parametrize("text", ["cascade:chow,1", "cascade:v3,1"])
def test_fully_on_the_law_is_q_where_it_was_drawn(text: str) -> None:
    torch.manual_seed(0)
    tree, p_logits = one_node(torch.randn(50, 7), torch.randn(50, 7))
    assert tree.q_logits_BIV is not None
    law = parse(text).law(tree, p_logits, T1)
    torch.testing.assert_close(law[:, 0].softmax(-1), tree.q_logits_BIV[:, 0].softmax(-1))


@pytest.mark.parametrize("rule", ["chow", "diff", "opt"])
def test_the_larger_a_the_more_is_kept(rule: str) -> None:
    p, q = toy(1, 4, 3, 1.5), toy(2, 4, 3)
    chains, least = (leviathan, chain(2, CPU), WITH_REPLACEMENT, p, q), 0.0
    for a in (-1, -0.3, 0, 0.2, 0.5, 0.8, 1):
        judged = against(f"cascade:{rule},{a}", leviathan)
        tau = enumerate_rule(judged, *chains[1:]).tau
        assert tau >= least - 1e-12, a
        least = tau
    assert least > enumerate_rule(*chains).tau + 0.1


@pytest.mark.parametrize("rule", ["v1", "v2", "v3"])
def test_token_rules_keep_all_in_the_end_but_at_first_less_than_p(rule: str) -> None:
    """What the draft gives to tokens outside is spread like p, over those inside too: few tokens
    inside then come more often than either model says.
    """
    p, q = toy(1, 4, 3, 1.5), toy(2, 4, 3)
    taus = [
        enumerate_rule(
            against(f"cascade:{rule},{a}", leviathan), chain(2, CPU), WITH_REPLACEMENT, p, q
        )
        for a in (-1, 0, 0.5, 1)
    ]
    off, least, some, most = (outcome.tau for outcome in taus)
    assert least < off < most <= 3 and least < some < most


def test_greedy_v3_is_lenience() -> None:
    """The draft's best token is kept where p(x) >= (1 - a) max p."""
    torch.manual_seed(0)
    p_logits, q_logits = torch.randn(300, 4, 6) * 2, torch.randn(300, 3, 6)
    tokens = torch.cat([torch.zeros(300, 1, dtype=torch.int64), q_logits.argmax(-1)], 1)
    tree = TokenTree(tokens, chain(3, CPU), COUPLED, q_logits)
    for a in (0, 0.4, 0.9):
        law = parse(f"cascade:v3,{a}").law(tree, p_logits, GREEDY)
        mask = parse(f"lenience:{1 - a}").mask(tree, p_logits, Noise())
        ours, theirs = coupled(tree, law, Noise()), coupled(tree, p_logits, Noise(), mask)
        assert torch.equal(ours.n_accepted_B, theirs.n_accepted_B)
        assert torch.equal(ours.next_B, theirs.next_B)
        assert 0 < ours.n_accepted_B.float().mean() < 3


@pytest.mark.parametrize("text", TEXTS)
def test_rows_of_several_laws_are_each_as_alone(text: str) -> None:
    torch.manual_seed(0)
    tree, p_logits = one_node(torch.randn(4, 7), torch.randn(4, 7))
    lossy, mixed = parse(text), RowParams([T1, GREEDY, GREEDY, T1], CPU)
    both = lossy.law(tree, p_logits, T1), lossy.law(tree, p_logits, GREEDY)
    want = torch.stack([both[0][0], both[1][1], both[1][2], both[0][3]])
    assert torch.equal(lossy.law(tree, p_logits, mixed), want)


@pytest.mark.parametrize("text", TEXTS)
def test_a_law_reads_no_tensor_and_a_broken_draft_says_nothing(text: str) -> None:
    with FakeTensorMode():
        topology = Topology.from_parents([-1, 0, 0, 1, 2], CPU)
        tree = TokenTree(
            torch.zeros(2, 5, dtype=torch.long), topology, COUPLED, torch.ones(2, 3, 9)
        )
        for params in (T1, GREEDY, RowParams([T1, T1], CPU)):
            assert parse(text).law(tree, torch.zeros(2, 5, 9), params).shape == (2, 5, 9)
    tree, p_logits = one_node(torch.randn(2, 7), torch.full((2, 7), torch.nan))
    assert torch.equal(parse(text).law(tree, p_logits, T1), p_logits)
    with pytest.raises(ValueError, match="a tree without the draft's q"):
        parse(text).law(replace(tree, q_logits_BIV=None), p_logits, T1)
    bare = TokenTree(tree.tokens_BN[:, :1], chain(0, CPU), COUPLED)
    assert torch.equal(parse(text).law(bare, p_logits[:, :1], T1), p_logits[:, :1])


def decoded(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft: PreTrainedModel,
    params: SamplingParams,
    **how: Any,
) -> tuple[list[list[int]], float]:
    """Answers, and tokens a round."""
    own = LMDrafter(draft, len(tokenizer))
    decoder = Decoder(target, tokenizer, own, batch_size=3, allow_lossy=True, **how)
    done = decoder.generate(PROMPTS, params)
    emitted = sum(c.counters.emitted for c in done)
    return [c.tokens for c in done], emitted / sum(c.counters.rounds for c in done)


Models = tuple[PreTrainedModel, PreTrainedTokenizerBase, PreTrainedModel]


@pytest.fixture(scope="module")
def models(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tiny_draft: PreTrainedModel,
) -> Models:
    return tiny_target, tiny_tokenizer, tiny_draft


@pytest.mark.parametrize(
    ("text", "params", "tree"),
    covering([*OFF, "cascade:v3,0.9"], SETTINGS, [{"K": 3}, {"tree": "eagle-25", "K": 3}]),
)
def test_switched_off_no_answer_changes(
    models: Models, text: str, params: SamplingParams, tree: dict[str, Any]
) -> None:
    """The last of them isn't."""
    same = decoded(*models, params, lossy=text, **tree)[0] == truths(*models[:2], params)
    assert same == (text in OFF)


@torch.no_grad()
def slow(models: Models, text: str, params: SamplingParams, index: int, K: int) -> list[int]:
    """A prompt's answer by the coupled rule, a whole pass for every token."""
    target, tokenizer, draft = models
    ids, vocab = tokenizer(PROMPTS[index]).input_ids, len(tokenizer)
    race = request_race(params, index, torch.arange(len(ids) + 99), vocab)
    stops, start = () if params.ignore_eos else (0,), len(ids)

    def logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
        return params.transform(model(torch.tensor([tokens])).logits[0, -1, :vocab])

    def chosen(law: Tensor, at: int) -> int:
        return int((law if race is None else law - race[at]).argmax())

    def ended() -> bool:
        return ids[-1] in stops or len(ids) - start >= params.max_new_tokens

    ids.append(chosen(logits(target, ids), len(ids)))
    while not ended():
        drafted, q = list(ids), []
        for _ in range(K):
            q.append(logits(draft, drafted))
            drafted.append(chosen(q[-1], len(drafted)))
        for depth in range(K + 1):
            law = logits(target, ids)
            if depth < K:
                law = parse(text).law(*one_node(law[None], q[depth][None]), params)[0, 0]
            ids.append(chosen(law, len(ids)))
            if ended() or ids != drafted[: len(ids)]:
                break
    return ids[start:]


@pytest.mark.parametrize("params", SETTINGS, ids=["greedy", "t1", "top-p"])
@pytest.mark.parametrize("text", ["rapid:9", "cascade:opt,0.8", "cascade:v3,0.9"])
def test_decoding_is_the_obvious_loop(models: Models, text: str, params: SamplingParams) -> None:
    params = replace(params, max_new_tokens=20)
    found = decoded(*models, params, lossy=text, K=2)[0]
    assert found == [slow(models, text, params, i, 2) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("rule", sorted(RULES))
def test_fully_on_every_rule_keeps_every_token(models: Models, rule: str) -> None:
    """Under the law q whatever was drawn is kept; recursive's chains are such too."""
    if rule == "point_mass":
        pytest.skip("its drafts are no draws from q")
    params = replace(SETTINGS[1], ignore_eos=True, max_new_tokens=33)
    _, tau = decoded(*models, params, lossy="cascade:chow,1", rule=rule, K=3)
    assert tau == 4.0


def test_what_a_law_needs(models: Models) -> None:
    for how, says in (
        ({"lossy": "cascade:v3,0.5"}, "allow_lossy=true"),
        ({"lossy": "rapid:1", "allow_lossy": True, "tree": "dynamic:3,3,9"}, "static tree"),
    ):
        with pytest.raises(ValueError, match=says):
            Decoder(*models[:2], LMDrafter(models[2], len(models[1])), **how)


@pytest.mark.parametrize("text", [*TEXTS, *OFF])
def test_a_description_is_read_back(text: str) -> None:
    lossy = parse(text)
    assert parse(str(lossy)) == lossy and lossy.needs_q and not lossy.masks


def test_bad_descriptions_are_refused() -> None:
    for text, says in (
        (
            "cascade",
            r"expected one of \['chow', .*\] and 1 number\(s\) in \[-1, 1\] after 'cascade",
        ),
        ("cascade:0.5", "expected one of"),
        ("cascade:chow", "1 number"),
        ("cascade:v4,0.5", "expected one of"),
        ("cascade:v1,v2,0.5", "1 number"),
        ("cascade:v1,1.1", "1 number"),
        ("rapid:-1", r"expected 1 number\(s\) in \[0, 100\] after 'rapid:'"),
        ("rapid:nan", "expected 1 number"),
        ("rapid:v1,1", "expected 1 number"),
    ):
        with pytest.raises(ValueError, match=f"lossy: got {text!r}, .*{says}"):
            parse(text)


def test_top_beta_one_and_zero_is_greedy(models: Models) -> None:
    expected = truths(models[0], models[1], SETTINGS[0])
    for tree in ({"K": 3}, {"tree": "dynamic:3,3,9"}):
        assert decoded(*models, SETTINGS[0], lossy="top-beta:1,0", **tree)[0] == expected
    taus = [decoded(*models, SETTINGS[0], lossy=f"top-beta:{b},9", K=3)[1] for b in (1, 20, 320)]
    assert taus[0] < taus[1] < taus[2]
