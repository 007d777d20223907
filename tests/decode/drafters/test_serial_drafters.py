"""Chimera and Mixture of Attentions as drafters: no answer changes, and what they draft is what an
obvious loop drafts.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_drafts import VOCAB, counting
from rounds import reads_nothing, records, started
from saved_heads import reloaded
from serial_heads import KINDS, following, serial
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.drafters.load import drafter_of
from draftsmith.decode.drafting.base import Admitted, Round
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.taps import target_states

TREES: dict[str, dict[str, Any]] = {
    "chain": {"K": 4},
    "static": {"tree": "medusa-63", "K": 4},
    "dynamic": {"tree": "dynamic:4,3,12"},
}
WAYS = {"greedy": replace(SETTINGS[0], max_new_tokens=20)}
WAYS |= {"t1": replace(SETTINGS[1], max_new_tokens=20)}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return counting(wrong=0.3)[0]


@pytest.fixture(scope="module")
def answers(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[list[int]]]:
    return {way: truths(target, tiny_tokenizer, params) for way, params in WAYS.items()}


def made(kind: str, target: PreTrainedModel, **about: Any) -> Any:
    return drafter_of(serial(kind, target, **about), target, VOCAB)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_changes(
    target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    answers: dict[str, list[list[int]]],
    kind: str,
    tree: str,
    way: str,
) -> None:
    """Rows come and go: four prompts in three rows. Of heads that know nothing, and that know some
    of it.
    """
    for wrong in (1.0, 0.1):
        drafter = made(kind, target, wrong=wrong)
        decoder = Decoder(target, tiny_tokenizer, drafter, batch_size=3, **TREES[tree])
        done = decoder.generate(PROMPTS, WAYS[way])
        assert [c.tokens for c in done] == answers[way], wrong
        rounds = sum(c.counters.rounds for c in done)
        assert wrong == 1 or sum(c.counters.emitted for c in done) > 1.2 * rounds


@pytest.mark.parametrize("kind", KINDS)
def test_rules_by_rejection_run_and_keep_drafts(
    target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    answers: dict[str, list[list[int]]],
    kind: str,
) -> None:
    drafter = made(kind, target, wrong=0.1)
    for rule, tree in (("leviathan", "chain"), ("recursive", "eagle-25")):
        tree_of = {"tree": tree} | ({"K": 4} if tree == "chain" else {})
        if kind == "chimera" and tree == "eagle-25":
            drafter = made(kind, target, wrong=0.1, levels=6)
        decoder = Decoder(target, tiny_tokenizer, drafter, rule=rule, batch_size=3, **tree_of)
        assert [c.tokens for c in decoder.generate(PROMPTS, WAYS["greedy"])] == answers["greedy"]
        sampled = [c.counters for c in decoder.generate(PROMPTS, WAYS["t1"])]
        assert sum(c.emitted for c in sampled) > 1.2 * sum(c.rounds for c in sampled)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_state_and_drafts_are_those_of_the_text(
    target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    kind: str,
    tree: str,
    way: str,
) -> None:
    """In rounds that keep all, some and none of what was drafted: the state is a fresh prefill's,
    and each node the child of its rank by the law after its path.
    """
    drafter, fresh = (made(kind, target, wrong=0.1) for _ in range(2))
    decoder = Decoder(target, tiny_tokenizer, drafter, batch_size=3, **TREES[tree])
    seen: list[tuple[Round, TokenTree]] = []
    propose = drafter.propose

    def recorded(request: Round) -> TokenTree:
        seen.append((request, propose(request)))
        return seen[-1][1]

    drafter.propose = recorded
    session = decoder._open(PROMPTS[:3], WAYS[way], None)
    rows = session.batch.rows
    session.admit()
    kept = set()
    for _ in range(5):
        texts = {
            row: request.completion.prompt_tokens + request.completion.tokens
            for row, request in enumerate(rows.requests)
            if request is not None
        }
        for row, text in texts.items():
            check_state(drafter, fresh, target, row, text)
        session.hear(session.launch())
        for row, text in texts.items():
            check_tree(drafter.head, target, *seen[-1], row, text)
            now = rows.requests[row]
            kept.add(0 if now is None else len(now.completion.tokens) - len(text))
    assert len(kept) > 1, "rounds that kept different numbers of tokens"


def check_state(
    drafter: Any, fresh: Any, target: PreTrainedModel, row: int, text: list[int]
) -> None:
    n = len(text) - 1
    ids_1N = torch.tensor([text[:-1]])
    taps_1NU = target_states(target, drafter.taps, input_ids=ids_1N).taps_BTF
    fresh.reset(1, n + 8)
    first, last = torch.arange(1), torch.tensor(text[-1:])
    fresh.prefill(Admitted(first, ids_1N, first + n, last, taps_1NU))
    ours, theirs = drafter.pool.kv_2LBSHE[:, :, row, :n], fresh.pool.kv_2LBSHE[:, :, 0, :n]
    assert torch.allclose(ours, theirs, atol=1e-5)
    for name in set(drafter.held) - {"pool"}:
        assert torch.allclose(getattr(drafter, name)[row], getattr(fresh, name)[0], atol=1e-5), name


def check_tree(
    head: Any, target: PreTrainedModel, request: Round, tree: TokenTree, row: int, text: list[int]
) -> None:
    """Of the deeper levels some nodes: each costs a pass over the whole text."""
    tokens, parent = tree.tokens_BN[row].tolist(), tree.topology.parent
    parents = parent.expand(len(tree.tokens_BN), -1)[row].tolist()
    paths = [[text[-1]]]
    for node in range(1, len(tokens)):
        path = paths[parents[node]]
        paths.append([*path, tokens[node]])
        if node > 6 and node % 5:
            continue
        score_V = following(head, target, text[:-1], path)[:VOCAB]
        if request.race_BDV is not None:
            score_V = score_V - request.race_BDV[row, len(path) - 1]
        rank = sum(parents[n] == parents[node] for n in range(1, node))
        # Siblings come best first, in trees without gaps in their ranks.
        assert tokens[node] == int(score_V.topk(rank + 1).indices[-1]), (node, path)


@pytest.mark.parametrize(
    ("kind", "twins"),
    [("chimera", ("turned", "order", "grams")), ("mixture", ("turned", "grown"))],
)
@torch.no_grad()
def test_chains_logits_are_the_obvious_loops(
    target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    kind: str,
    twins: tuple[str, ...],
) -> None:
    """And not those of a loop that reads something else."""
    drafter, text = made(kind, target), [(7 * i) % VOCAB for i in range(9)]
    decoder = Decoder(target, tiny_tokenizer, drafter, K=4)
    found: list[TokenTree] = []
    propose = drafter.propose

    def recorded(request: Round) -> TokenTree:
        found.append(propose(replace(request, want_q=True)))
        return found[-1]

    drafter.propose = recorded
    decoder.generate([text], replace(WAYS["greedy"], max_new_tokens=2))
    tree = found[0]
    assert tree.q_logits_BIV is not None
    pending = tree.tokens_BN[0].tolist()
    apart = {twin: 0.0 for twin in ("", *twins)}
    for depth in range(4):
        for twin in apart:
            logits_V = following(drafter.head, target, text, pending[: depth + 1], twin)
            gap = (tree.q_logits_BIV[0, depth] - logits_V[:VOCAB]).abs().max()
            apart[twin] = max(apart[twin], float(gap / logits_V.abs().max()))
    assert apart.pop("") < 2e-5
    assert min(apart.values()) > 5e-3, apart


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_never_reads_the_device(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, kind: str, tree: str
) -> None:
    drafter = made(kind, target)
    decoder = Decoder(target, tiny_tokenizer, drafter, batch_size=4, **TREES[tree])
    reads_nothing(decoder, started(decoder, WAYS["t1"]))


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_round_is_the_round(
    target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    answers: dict[str, list[list[int]]],
    kind: str,
    tree: str,
) -> None:
    """Replayed on the same tensors, over two calls whose rows come and go: the same tokens."""
    drafter = made(kind, target, wrong=0.1)
    records((target, tiny_tokenizer), drafter, WAYS["t1"], **TREES[tree])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_saved_heads_draft_as_before(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, kind: str
) -> None:
    drafter = made(kind, target)
    loaded = reloaded((target, tiny_tokenizer), drafter, tmp_path)
    ids_BT = torch.arange(24).view(2, 12)
    taps_BTU = target_states(target, drafter.taps, input_ids=ids_BT).taps_BTF
    teacher = [each.teacher_logits(ids_BT, taps_BTU) for each in (drafter, loaded)]
    assert torch.equal(*teacher)
    wanted_V = following(drafter.head, target, ids_BT[1, :7].tolist(), [19])
    assert torch.allclose(teacher[0][1, 7], wanted_V, atol=1e-4)
    assert not teacher[0][:, 0].any()


@pytest.mark.parametrize("kind", KINDS)
def test_room_for_a_tree_at_the_end_of_the_context(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, kind: str
) -> None:
    prompt = list(range(4, 300)) + list(range(4, 214))
    drafter = made(kind, target, wrong=0.1)
    answers = [
        Decoder(target, tiny_tokenizer, each, **way).generate([prompt], WAYS["greedy"])[0].tokens
        for each, way in ((None, {}), (drafter, TREES["static"]), (drafter, TREES["chain"]))
    ]
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) == 512 - len(prompt)
