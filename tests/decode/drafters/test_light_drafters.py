"""Clover-2 and Falcon as drafters: no answer changes, and what they draft is what an obvious loop
drafts.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import counting_target
from light_heads import KINDS, fresh, last_state, lesson, made, states_of
from randomised import randomised
from rounds import reads_nothing, records, started
from saved_heads import reloaded
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.drafters.clover import CloverDrafter
from draftsmith.decode.drafters.falcon import FalconDrafter
from draftsmith.decode.drafting.base import Admitted, Kept, Round
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.forward.product import lay_side_by_side
from draftsmith.decode.policies.timing import round_of
from draftsmith.decode.token_tree import TokenTree
from draftsmith.decode.tree_shapes import Plan, StaticTree, parse_tree
from draftsmith.models.heads.clover import Clover

ROWS = 328  # of the LM head: eight more than the tokenizer has
TREES: list[dict[str, Any]] = [{"K": 6}, {"tree": "eagle-25"}, {"tree": "dynamic:5,3,14"}]
WAYS = [replace(params, max_new_tokens=14) for params in SETTINGS[:2]]
Drafting = CloverDrafter | FalconDrafter


@pytest.fixture(scope="module")
def target(tiny_tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return counting_target(len(tiny_tokenizer), ROWS, blur=0.04)


def drafter_of(head: Any, target: PreTrainedModel, vocab: int) -> Drafting:
    return (CloverDrafter if isinstance(head, Clover) else FalconDrafter)(head, target, vocab)


# Blocks of 1 as drafters of whole answers; their nodes, one by one, are compared below.
TAUGHT = [pytest.param(k, marks=pytest.mark.slow) if k == "falcon-1" else k for k in KINDS]


@pytest.fixture(scope="module", params=TAUGHT)
def knows(
    request: pytest.FixtureRequest,
    target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> Drafting:
    """After a lesson in counting, so that some of what it drafts is right."""
    head = fresh(request.param, target)
    lesson(head, target, len(tiny_tokenizer))
    return drafter_of(head.eval().requires_grad_(False), target, len(tiny_tokenizer))


def test_no_answer_changes(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, knows: Drafting
) -> None:
    """Rows come and go: four prompts of different lengths, one of a single token, in three rows;
    drafts are random, or right now and then; by the coupled rule, greedy too, and by p / q.
    """
    vocab = len(tiny_tokenizer)
    answers = [truths(target, tiny_tokenizer, params) for params in WAYS]
    head = copy.deepcopy(knows.head)
    randomised(head)
    for drafter in (drafter_of(head, target, vocab), knows):
        for tree in TREES:
            decoder = Decoder(target, tiny_tokenizer, drafter, batch_size=3, **tree)
            for expected, params in zip(answers, WAYS, strict=True):
                done = decoder.generate(PROMPTS, params)
                assert [c.tokens for c in done] == expected, tree
                rounds = sum(c.counters.rounds for c in done)
                right = sum(c.counters.emitted for c in done) > 1.05 * rounds
                assert right or drafter is not knows, tree
    for rule, tree in (("leviathan", "chain"), ("block", "chain"), ("recursive", "eagle-25")):
        decoder = Decoder(target, tiny_tokenizer, knows, rule=rule, tree=tree, batch_size=3)
        greedy = decoder.generate(PROMPTS, WAYS[0])
        assert [c.tokens for c in greedy] == answers[0]
        several = [replace(WAYS[1], seed=seed) for seed in range(2)]
        sampled = [c.counters for way in several for c in decoder.generate(PROMPTS, way)]
        assert sum(c.emitted for c in sampled) > sum(c.rounds for c in sampled)


@pytest.mark.parametrize("tree", TREES, ids=["chain", "static", "dynamic"])
@torch.no_grad()
def test_state_after_each_round_equals_a_fresh_prefill(
    target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    knows: Drafting,
    tree: dict[str, Any],
) -> None:
    """In rounds that keep all, some and none of what was drafted: where text began, or how it
    came, makes no difference.
    """
    vocab = len(tiny_tokenizer)
    drafter = knows
    again = drafter_of(drafter.head, target, vocab)
    decoder = Decoder(target, tiny_tokenizer, drafter, batch_size=4, **tree)
    session = decoder._open(PROMPTS, WAYS[1], None)
    batch, kept = session.batch, set()
    session.admit()
    for _ in range(7):
        before = batch.rows.lens_B.clone()
        session.hear(session.launch())
        kept |= set((batch.rows.lens_B - before).tolist())
        for row, request in enumerate(batch.rows.requests):
            if request is None:
                continue
            text = request.completion.prompt_tokens + request.completion.tokens
            begin(again, target, [text])
            length = len(text) - 1
            pools = (drafter.pool.kv_2LBSHE[:, :, row], again.pool.kv_2LBSHE[:, :, 0])
            ours, fresh_one = (pool[:, :, :length] for pool in pools)
            assert torch.allclose(ours, fresh_one, atol=1e-5)
            states = (getattr(one, drafter.held[1]) for one in (drafter, again))
            ours, fresh_one = (state_BX[i] for state_BX, i in zip(states, (row, 0), strict=True))
            assert torch.allclose(ours, fresh_one, atol=1e-4)
    assert len(kept - {0}) >= 2, kept


def begin(drafter: Drafting, target: PreTrainedModel, texts: list[list[int]]) -> None:
    """Prefill texts whose last tokens are pending, with garbage behind the shorter ones."""
    lens_R = torch.tensor([len(text) - 1 for text in texts])
    tokens_RN = torch.full((len(texts), int(lens_R.max())), 3)
    for row, text in enumerate(texts):
        tokens_RN[row, : len(text) - 1] = torch.tensor(text[:-1])
    taps_RNU = torch.cat([states_of(target, drafter.head, row) for row in tokens_RN.tolist()])
    pending_R = torch.tensor([text[-1] for text in texts])
    drafter.reset(len(texts), 128)
    drafter.prefill(Admitted(torch.arange(len(texts)), tokens_RN, lens_R, pending_R, taps_RNU))


def drafted(drafter: Drafting, texts: list[list[int]], plan: Plan) -> TokenTree:
    """A greedy round's tree."""
    request: Round = round_of(plan, len(texts), max(map(len, texts)), torch.device("cpu"))
    lens_B = torch.tensor([len(text) - 1 for text in texts])
    pending_B = torch.tensor([text[-1] for text in texts])
    return drafter.propose(replace(request, lens_B=lens_B, pending_B=pending_B, want_q=True))


TEXTS = [[(7 * i + 31 * row) % 320 for i in range(5 + 4 * row)] for row in range(4)]


@pytest.mark.parametrize("tree", ["chain", "eagle-25", "dynamic:5,4,30"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_nodes_are_what_an_obvious_loop_drafts(
    target: PreTrainedModel, kind: str, tree: str
) -> None:
    """After a prefill, and after a round that kept 0 to 3 tokens: each node is the child of its
    rank by the law after its path.
    """
    drafter, plan = drafter_of(made(kind, target), target, 320), parse_tree(tree, 6)
    begin(drafter, target, TEXTS)
    check(drafter, target, TEXTS, drafted(drafter, TEXTS, plan))
    longer = [text + [(11 * i + row) % 320 for i in range(row)] for row, text in enumerate(TEXTS)]
    lens_B, n_new_B = torch.tensor([len(text) - 1 for text in TEXTS]), torch.arange(4)
    tokens_BL, taps_BLU = torch.full((4, 5), 9), torch.randn(4, 5, 32)
    for row, text in enumerate(longer):
        states_1TH = states_of(target, drafter.head, text[:-1])
        tokens_BL[row, :row] = torch.tensor(text[len(text) - row :])
        taps_BLU[row, :row] = states_1TH[0, len(text) - 1 - row :]
    drafter.extend(Kept(tokens_BL, n_new_B, None, lens_B, taps_BLU))
    check(drafter, target, longer, drafted(drafter, longer, plan))


def check(
    drafter: Drafting, target: PreTrainedModel, texts: list[list[int]], tree: TokenTree
) -> None:
    for row, text in enumerate(texts):
        tokens, topology = tree.tokens_BN[row].tolist(), tree.topology
        parents = topology.parent.expand(len(tree.tokens_BN), -1)[row].tolist()
        states_1TH, paths = states_of(target, drafter.head, text[:-1]), [[text[-1]]]
        for node in range(1, len(tokens)):
            path = paths[parents[node]]
            state_H = last_state(drafter.head, states_1TH, text[:-1] + path)
            logits_V = (drafter.head.head_VH(0) @ state_H)[:320]
            siblings = [n for n in range(1, node) if parents[n] == parents[node]]
            best = logits_V.topk(len(siblings) + 1)
            gap = float(best.values[-1] - logits_V[tokens[node]])
            assert gap < 1e-3, (node, path)  # of equals by rounding, either
            paths.append([*path, tokens[node]])


@torch.no_grad()
def test_falcons_tokens_enter_between_passes(target: PreTrainedModel) -> None:
    """Within a block siblings share a law; where the next one begins they don't, nor Clover's."""
    shared = {}
    for kind in ("falcon-2", "falcon-3", "clover2"):
        drafter = drafter_of(made(kind, target), target, 320)
        begin(drafter, target, TEXTS)
        # The root's two children, two of the first's, two of the second's, and theirs.
        paths = [(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0), (0, 0, 0, 0), (1, 0, 0, 0)]
        tree = drafted(drafter, TEXTS, StaticTree.from_paths(paths))
        q_BIV: Tensor = tree.q_logits_BIV  # of the root, and pairs of nodes of each depth
        shared[kind] = [
            torch.equal(q_BIV[:, 2 * depth - 1], q_BIV[:, 2 * depth]) for depth in (1, 2, 3)
        ]
    assert shared == {
        "falcon-2": [True, False, False],
        "falcon-3": [True, True, False],
        "clover2": [False, False, False],
    }


@pytest.mark.parametrize("tree", TREES[::2], ids=["chain", "dynamic"])
@pytest.mark.parametrize("kind", ["clover2", "falcon-2"])
def test_a_round_never_reads_the_device_and_can_be_recorded(
    target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    kind: str,
    tree: dict[str, Any],
) -> None:
    drafter = drafter_of(made(kind, target), target, len(tiny_tokenizer))
    decoder = Decoder(target, tiny_tokenizer, drafter, batch_size=4, **tree)
    reads_nothing(decoder, started(decoder, WAYS[1]))
    records((target, tiny_tokenizer), drafter, WAYS[1], **tree)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_saved_heads_draft_as_before(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, kind: str
) -> None:
    head = made(kind, target)
    lay_side_by_side(head)  # as a loaded one's maps are, which rounds otherwise
    drafter = drafter_of(head, target, len(tiny_tokenizer))
    loaded = reloaded((target, tiny_tokenizer), drafter, tmp_path)
    states_1TH = states_of(target, drafter.head, TEXTS[3])
    teacher = [d.teacher_logits(torch.tensor(TEXTS[3:]), states_1TH) for d in (drafter, loaded)]
    assert torch.equal(*teacher)
    assert not teacher[0][:, 0].any()
    for end in (6, 11):
        state_H = last_state(drafter.head, states_1TH[:, : end - 1], TEXTS[3][:end])
        wanted_V = drafter.head.head_VH(0)[:320] @ state_H
        assert torch.allclose(teacher[0][0, end - 1], wanted_V, atol=1e-4)


def test_room_for_a_tree_at_the_end_of_the_context(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = list(range(4, 300)) + list(range(4, 214))
    plain = Decoder(target, tiny_tokenizer, None).generate([prompt], WAYS[0])[0].tokens
    for kind in ("clover2", "falcon-3"):
        drafter = drafter_of(made(kind, target), target, len(tiny_tokenizer))
        for tree in TREES:
            decoder = Decoder(target, tiny_tokenizer, drafter, **tree)
            assert decoder.generate([prompt], WAYS[0])[0].tokens == plain


def test_more_levels_than_it_drafts_are_refused(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    for kind in ("clover2", "falcon-2"):
        drafter = drafter_of(made(kind, target), target, len(tiny_tokenizer))
        with pytest.raises(ValueError, match="give K=6 or less"):
            Decoder(target, tiny_tokenizer, drafter, K=7)


def test_bytes_that_a_draft_call_reads(target: PreTrainedModel) -> None:
    drafters = {kind: drafter_of(made(kind, target), target, 320) for kind in KINDS}
    held = {k: sum(p.nbytes for p in d.head.parameters()) for k, d in drafters.items()}
    vocabulary, lstm = 4 * 320 * 32, 4 * (128 * 64 + 3 * 128 * 32 + 4 * 128)
    assert drafters["clover2"].parameter_bytes == held["clover2"] // 6 + vocabulary
    layer = held["falcon-2"] - lstm
    assert drafters["falcon-2"].parameter_bytes == (layer + vocabulary) // 2 + lstm
