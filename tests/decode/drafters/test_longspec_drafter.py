"""LongSpec as the drafter: no answer changes, its memory stays, and what it drafts is what a pass
over the whole text drafts at the lag it was trained for.

Shapes as in decode/drafters/longspec.py.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting import counting_target
from families import made as made_family
from randomised import randomised
from rounds import reads_nothing, records, started
from saved_heads import keeps_its_size, reloaded
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.drafters.longspec import LongSpecDrafter
from draftsmith.decode.drafting.base import Round
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.token_tree import TokenTree
from draftsmith.models.heads.longspec import LongSpec, last_keys
from draftsmith.models.layers.layer import layer_like
from draftsmith.models.taps import target_states

ROWS, WINDOW = 328, 12  # of the LM head: eight more than the tokenizer has
TREES: list[dict[str, Any]] = [{"K": 6}, {"tree": "eagle-25"}, {"tree": "dynamic:5,3,14"}]
WAYS = [replace(params, max_new_tokens=24) for params in SETTINGS[:2]]


def head_for(target: PreTrainedModel, window: int = WINDOW, levels: int = 6) -> LongSpec:
    torch.manual_seed(1)
    tap = target.config.num_hidden_layers - 1
    head = LongSpec(layer_like(target), tap, levels, window).init_from(target)
    return head.eval().requires_grad_(False)


def keys_of(head: LongSpec, target: PreTrainedModel, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    at_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
    return last_keys(target, target_states(target, head.taps, input_ids=ids_BT).taps_BTF, at_BT)


def lesson(head: LongSpec, target: PreTrainedModel, tokens: int) -> None:
    """Teach it that after x comes x + 1."""
    head.requires_grad_(True)
    learner = torch.optim.Adam(head.parameters(), lr=0.02)
    ids_BT = (torch.arange(tokens // 5)[:, None] * 5 + torch.arange(16)) % tokens
    at_BT = torch.arange(16).expand_as(ids_BT)
    kv = keys_of(head, target, ids_BT)
    for _ in range(60):
        loss = torch.zeros(())
        for state_BTH in head.lagging(ids_BT, at_BT, kv, None, (1, 3, 6)):
            logits_NV = state_BTH[:, :-1].flatten(0, 1) @ head.target_head_VH.T
            loss = loss + F.cross_entropy(logits_NV, ids_BT[:, 1:].flatten())
        learner.zero_grad()
        loss.backward()
        learner.step()
    head.requires_grad_(False)


@pytest.fixture(scope="module")
def target(tiny_tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return counting_target(len(tiny_tokenizer), ROWS, blur=0.04)


@pytest.fixture(scope="module")
def knows(target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> LongSpecDrafter:
    head = head_for(target)
    lesson(head, target, len(tiny_tokenizer))
    return LongSpecDrafter(head, target, len(tiny_tokenizer))


def test_no_answer_changes(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, knows: LongSpecDrafter
) -> None:
    """Rows come and go: four prompts in three rows, shorter and longer than the window; drafts are
    random, or right now and then; by the coupled rule, greedy too, and by p / q.
    """
    answers = [truths(target, tiny_tokenizer, params) for params in WAYS]
    head = copy.deepcopy(knows.head)
    randomised(head)
    for drafter in (LongSpecDrafter(head, target, len(tiny_tokenizer)), knows):
        for tree, batch in zip(TREES, (3, 1, 16), strict=True):
            decoder = Decoder(target, tiny_tokenizer, drafter, batch_size=batch, **tree)
            for expected, params in zip(answers, WAYS, strict=True):
                done = decoder.generate(PROMPTS, params)
                assert [c.tokens for c in done] == expected, tree
                rounds = sum(c.counters.rounds for c in done)
                right = sum(c.counters.emitted for c in done) > 1.3 * rounds
                assert right or drafter is not knows, tree
    for rule, tree in (("leviathan", "chain"), ("recursive", "eagle-25")):
        decoder = Decoder(target, tiny_tokenizer, knows, rule=rule, tree=tree, batch_size=3)
        assert [c.tokens for c in decoder.generate(PROMPTS, WAYS[0])] == answers[0]


class Checked(LongSpecDrafter):
    """Compares every node it drafts with a pass over the node's whole text; twin: at a lag that is
    one too short.
    """

    texts: dict[int, list[int]]
    twin = 0
    depths: set[int]

    def propose(self, request: Round) -> TokenTree:
        before = self.pool.kv_2LBSHE.clone()
        tree = super().propose(request)
        assert torch.equal(self.pool.kv_2LBSHE, before), "it writes nothing of the target's"
        for row in torch.nonzero(request.active_B)[:, 0].tolist():
            self._check(row, self.texts[row], tree)
        return tree

    def _check(self, row: int, text: list[int], tree: TokenTree) -> None:
        tokens, topology = tree.tokens_BN[row].tolist(), tree.topology
        parents = topology.parent.expand(len(tree.tokens_BN), -1)[row].tolist()
        assert tokens[0] == text[-1]
        paths = [[text[-1]]]
        for node in range(1, len(tokens)):
            path = paths[parents[node]]
            logits_V = self._law(text[:-1], path)
            siblings = [n for n in range(1, node) if parents[n] == parents[node]]
            best = logits_V.topk(len(siblings) + 1)
            gap = float(best.values[-1] - logits_V[tokens[node]])
            assert gap < 1e-3, (node, path)  # of equals by rounding, either
            paths.append([*path, tokens[node]])
            self.depths.add(len(path))

    def _law(self, committed: list[int], path: list[int]) -> Tensor:
        ids_1T = torch.tensor([committed + path])
        at_1T, lag = torch.arange(ids_1T.shape[1])[None], len(path) - self.twin
        kv = keys_of(self.head, self.runner.model, ids_1T)
        (state_1TH,) = self.head.lagging(ids_1T, at_1T, kv, None, (lag,))
        return self.runner.logits(state_1TH[:, -1])[0]


@pytest.mark.parametrize("way", ["taught", "random", "twin"])
@pytest.mark.parametrize("tree", TREES, ids=["chain", "static", "dynamic"])
@torch.no_grad()
def test_nodes_are_what_a_pass_over_the_whole_text_drafts(
    target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    knows: LongSpecDrafter,
    tree: dict[str, Any],
    way: str,
) -> None:
    """A masked full cache in the ring's place, through rounds that keep some (taught) and none,
    over more than a turn of the ring; a lag that sees one token more is told.
    """
    head = copy.deepcopy(knows.head)
    if way != "taught":
        randomised(head)
    drafter = Checked(head, target, len(tiny_tokenizer))
    drafter.texts, drafter.twin, drafter.depths = {}, int(way == "twin"), set()
    params = replace(WAYS[0], max_new_tokens=24 if way == "taught" else 8, ignore_eos=True)
    decoder = Decoder(target, tiny_tokenizer, drafter, batch_size=2, **tree)
    session = decoder._open(PROMPTS[1:3], params, None)
    session.admit()

    def run() -> None:
        while session.busy:
            for row, request in enumerate(session.batch.rows.requests):
                if request is not None:
                    done = request.completion
                    drafter.texts[row] = done.prompt_tokens + done.tokens
            session.step()

    if way == "twin":
        with pytest.raises(AssertionError):
            run()
    else:
        run()
        assert len(drafter.depths) > 2


@torch.no_grad()
def test_the_target_s_last_keys_are_those_of_its_pool(
    target: PreTrainedModel, tiny_target: PreTrainedModel
) -> None:
    ids_BT = torch.arange(40).view(2, 20) * 7 % 300
    for model in (target, tiny_target):
        head = head_for(model)
        runner = Runner(model, 320)
        pool, rows_B = runner.pool(2, 20), torch.arange(2)
        runner.prefill(pool, rows_B, ids_BT, torch.tensor([20, 20]))
        for ours, theirs in zip(keys_of(head, model, ids_BT), pool.kv_2LBSHE[:, -1], strict=True):
            torch.testing.assert_close(ours, theirs[:, :20], atol=1e-5, rtol=1e-4)


def test_its_memory_is_planned_and_does_not_grow(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, knows: LongSpecDrafter
) -> None:
    keeps_its_size((target, tiny_tokenizer), knows, "own", PROMPTS[:2], WAYS[0])


@pytest.mark.parametrize("tree", TREES[::2], ids=["chain", "dynamic"])
def test_a_round_never_reads_the_device_and_can_be_recorded(
    target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    knows: LongSpecDrafter,
    tree: dict[str, Any],
) -> None:
    decoder = Decoder(target, tiny_tokenizer, knows, batch_size=4, **tree)
    reads_nothing(decoder, started(decoder, WAYS[1]))
    records((target, tiny_tokenizer), knows, WAYS[1], **tree)


@torch.no_grad()
def test_a_saved_head_drafts_as_before(
    target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    knows: LongSpecDrafter,
    tmp_path: Path,
) -> None:
    loaded = reloaded((target, tiny_tokenizer), knows, tmp_path)
    ids_BT = torch.arange(4, 34)[None]
    ours, theirs = (one.teacher_logits(ids_BT, ids_BT[..., None]) for one in (knows, loaded))
    assert torch.equal(ours, theirs) and ours.shape == (1, 30, 320)
    (state_BTH,) = knows.head.lagging(
        ids_BT, torch.arange(30)[None], keys_of(knows.head, target, ids_BT), None, (1,)
    )
    torch.testing.assert_close(ours, knows.runner.logits(state_BTH), atol=1e-4, rtol=1e-4)


def test_what_cannot_be_is_refused(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, knows: LongSpecDrafter
) -> None:
    with pytest.raises(ValueError, match="give K=6 or less"):
        Decoder(target, tiny_tokenizer, knows, K=7)
    with pytest.raises(ValueError, match="got 4 tokens ahead, window=4, expected"):
        head_for(target, window=4, levels=4)
    for family in ("gpt-neox", "phi"):
        model = made_family(family)
        with pytest.raises(ValueError, match=r"whose last layer makes its keys|output head"):
            LongSpec(layer_like(made_family("mistral")), 2, 4, 8).bind(model)
    made = knows.head.to_json()
    with pytest.raises(ValueError, match=r"config\.json: got window=None, expected int"):
        LongSpec.from_json({key: value for key, value in made.items() if key != "window"})
