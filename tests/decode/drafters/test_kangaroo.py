"""Kangaroo as the drafter: no answer changes, and what it drafts is what one pass over the text's
cached states says, whatever was kept before.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import counting_target
from randomised import randomised
from rounds import reads_nothing, records, started
from saved_heads import reloaded
from tiny_hydra import layer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.drafters.kangaroo import KangarooDrafter
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.drafting.base import Fed, Feed, Frontier, Kept, Round
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.round import first_rows
from draftsmith.models.heads.kangaroo import Kangaroo
from draftsmith.models.taps import target_states
from draftsmith.models.target import head_weight, output_head

ROWS = 328  # of the LM head: eight more than the tokenizer has
TREES: list[dict[str, Any]] = [{"K": 3}, {"tree": "eagle-25"}, {"tree": "dynamic:4,3,12"}]
WAYS = [replace(params, max_new_tokens=14) for params in SETTINGS[:2]]


@pytest.fixture(scope="module")
def target(tiny_tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return counting_target(len(tiny_tokenizer), ROWS, blur=0.04)


def fresh(target: PreTrainedModel, early: int = 1) -> Kangaroo:
    """As training begins."""
    torch.manual_seed(2)
    return Kangaroo(layer(vocab_size=len(head_weight(target))), early).init_from(target)


def drafting(target: PreTrainedModel, *, random: bool = False, kind: Any = KangarooDrafter) -> Any:
    head = fresh(target).eval().requires_grad_(False)
    if random:
        randomised(head)
    return kind(head, target, 320)


def test_no_answer_changes(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Rows come and go: four prompts in three rows; drafts are random, or right now and then; by
    the coupled rule, by p / q, and with upstream's early stop.
    """
    answers = [truths(target, tiny_tokenizer, params) for params in WAYS]
    for random in (True, False):
        drafter = drafting(target, random=random)
        for tree in [*TREES, {"K": 6, "policy": "confidence:0.6"}]:
            decoder = Decoder(target, tiny_tokenizer, drafter, batch_size=3, **tree)
            for expected, params in zip(answers, WAYS, strict=True):
                done = decoder.generate(PROMPTS, params)
                assert [c.tokens for c in done] == expected, tree
                rounds = sum(c.counters.rounds for c in done)
                assert random or sum(c.counters.emitted for c in done) > 1.5 * rounds, tree
    for rule, tree in (("leviathan", "chain"), ("recursive", "eagle-25")):
        decoder = Decoder(target, tiny_tokenizer, drafter, rule=rule, tree=tree, batch_size=3)
        assert [c.tokens for c in decoder.generate(PROMPTS, WAYS[0])] == answers[0]
        decoder.generate(PROMPTS, WAYS[1])


class Noted(KangarooDrafter):
    """Keeps what each draft call of a round gave, with the path to each node fed."""

    def feed(self, request: Round) -> Feed:
        made, paths = super().feed(request), [[[x] for x in request.pending_B.tolist()]]
        self.noted: list[tuple[list[list[list[int]]], torch.Tensor]] = []
        above: list[list[list[int]]] = [[[]] for _ in paths[0]]

        def feed(frontier: Frontier) -> Fed:
            nonlocal above
            fed, tokens = made(frontier), frontier.tokens_BF.tolist()
            of = frontier.of_BF.tolist() if frontier.of_BF is not None else [[0]] * len(tokens)
            above = [
                [[*above[row][p], token] for p, token in zip(of[row], tokens[row], strict=True)]
                for row in range(len(tokens))
            ]
            self.noted.append((above, fed.logits_BFV.clone()))
            return fed

        return feed


class Forgetful(Noted):
    """Takes in none of what was kept: right, but for a kept leaf."""

    def extend(self, kept: Kept) -> None:
        pass


@torch.no_grad()
def off(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafter: Noted, **tree: Any
) -> tuple[float, set[int]]:
    """How far the drafted logits are from one pass of the adapter over cached states, at most; and
    how many tokens rounds gave.
    """
    decoder = Decoder(target, tokenizer, drafter, batch_size=4, **tree)
    session = decoder._open(PROMPTS, replace(WAYS[1], max_new_tokens=90, ignore_eos=True), None)
    session.admit()
    worst, kept = 0.0, set()
    for _ in range(8):
        done = [request.completion for request in session.batch.rows.requests if request]
        texts = [made.prompt_tokens + made.tokens for made in done]
        kept |= {len(tokens) for _, tokens, _ in session.hear(session.launch())}
        for paths_BF, logits_BFV in drafter.noted:
            for row, text in enumerate(texts):
                ids_FT = torch.tensor([text[:-1] + path for path in paths_BF[row]])
                taps_FTU = target_states(target, drafter.taps, input_ids=ids_FT).taps_BTF
                wanted_FV = drafter.teacher_logits(ids_FT, taps_FTU)[:, -1]
                assert logits_BFV[row].shape == wanted_FV.shape
                worst = max(worst, float((logits_BFV[row] - wanted_FV).abs().max()))
    return worst, kept


@pytest.mark.parametrize("tree", TREES, ids=["chain", "static", "dynamic"])
def test_drafted_logits_equal_one_pass_over_cached_states(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tree: dict[str, Any]
) -> None:
    """In rounds that keep none, some and all of what was drafted, in rows of different lengths."""
    found = [
        off(target, tiny_tokenizer, drafting(target, kind=Noted, random=random), **tree)
        for random in (False, True)
    ]
    assert max(worst for worst, _ in found) < 2e-5
    kept = found[0][1] | found[1][1]
    assert {1, 2, levels(tree) + 1} <= kept


def levels(tree: dict[str, Any]) -> int:
    return {"dynamic:4,3,12": 4, "eagle-25": 5}.get(tree.get("tree", ""), 3)


@pytest.mark.parametrize("tree", TREES[:2], ids=["chain", "static"])
def test_one_that_forgets_what_was_kept_is_told_apart(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tree: dict[str, Any]
) -> None:
    """In a chain only full acceptance breaks it."""
    drafter = drafting(target, kind=Forgetful)
    assert off(target, tiny_tokenizer, drafter, **tree)[0] > 1e-3


@torch.no_grad()
def test_an_adapter_that_adds_nothing_is_the_raw_exit(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Through a norm of its own: here the target's, then another."""
    own = drafting(target)
    own.head.adapter.self_attn.o_proj.weight.zero_()
    ids_BT = torch.arange(40).view(2, 20) * 7 % 320
    taps_BTU = target_states(target, (1,), input_ids=ids_BT).taps_BTF
    raw = load_drafter("exit:1", target, tiny_tokenizer)
    assert raw is not None
    wanted_BTV = raw.teacher_logits(ids_BT, taps_BTU)
    assert torch.allclose(own.teacher_logits(ids_BT, taps_BTU)[..., :320], wanted_BTV, atol=1e-5)
    got = [
        [c.counters.histogram for c in Decoder(target, tiny_tokenizer, d, K=4).generate(PROMPTS, p)]
        for d in (own, raw)
        for p in WAYS[:1]
    ]
    assert got[0] == got[1]
    own.head.adapter.post_attention_layernorm.weight.mul_(torch.linspace(0.5, 2, 32))
    assert not torch.allclose(own.teacher_logits(ids_BT, taps_BTU)[..., :320], wanted_BTV, atol=0.1)


def test_it_drafts_in_the_target_s_pool_and_keeps_the_adapter_s_beside(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    drafter = drafting(target)
    decoder = Decoder(target, tiny_tokenizer, drafter, K=3, batch_size=4)
    batch = started(decoder, WAYS[0]).batch
    theirs, own = drafter.target_pool.kv_2LBSHE, drafter.pool.kv_2LBSHE
    assert theirs.data_ptr() == batch.pool.kv_2LBSHE.data_ptr()
    assert own.shape[:4] == (2, 1, *theirs.shape[2:4])
    assert own.nbytes == drafter.size.kv(4, batch.pool.slots)
    part = first_rows(drafter, 2)
    assert part.target_pool.rows == part.pool.rows == 2
    assert part.target_pool.kv_2LBSHE.data_ptr() == theirs.data_ptr()
    drafter.release()
    assert not hasattr(drafter, "pool") and not hasattr(drafter, "target_pool")


@pytest.mark.parametrize("tree", TREES[::2], ids=["chain", "dynamic"])
def test_a_round_never_reads_the_device_and_can_be_recorded(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tree: dict[str, Any]
) -> None:
    decoder = Decoder(target, tiny_tokenizer, drafting(target), batch_size=4, **tree)
    reads_nothing(decoder, started(decoder, WAYS[1]))
    records((target, tiny_tokenizer), drafting(target), WAYS[1], **tree)


@torch.no_grad()
def test_a_saved_adapter_drafts_as_before(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    drafter = drafting(target, random=True)
    loaded = reloaded((target, tiny_tokenizer), drafter, tmp_path)
    assert loaded.taps == (1,)
    assert not [name for name in drafter.head.state_dict() if "mlp" in name]
    ids_1T = torch.tensor([[(7 * i) % 320 for i in range(12)]])
    taps_1TU = target_states(target, (1,), input_ids=ids_1T).taps_BTF
    assert torch.equal(*(d.teacher_logits(ids_1T, taps_1TU) for d in (drafter, loaded)))


def test_it_begins_as_the_next_layer_and_the_last_norm(target: PreTrainedModel) -> None:
    head, (body, *_) = fresh(target), output_head(target)
    part: Any = body.layers[1]  # type: ignore[index, union-attr]
    assert torch.equal(head.adapter.self_attn.q_proj.weight, part.self_attn.q_proj.weight)
    assert torch.equal(head.adapter.post_attention_layernorm.weight, body.norm.weight)  # type: ignore[union-attr]


def test_bytes_that_a_draft_call_reads(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    drafter, raw = drafting(target), load_drafter("exit:1", target, tiny_tokenizer)
    assert raw is not None
    own = sum(p.nbytes for p in drafter.head.parameters())
    padding = 4 * (ROWS - 320) * 32
    assert drafter.parameter_bytes == raw.parameter_bytes + own - padding


def test_room_for_a_tree_at_the_end_of_the_context(
    target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = list(range(4, 300)) + list(range(4, 214))
    plain = Decoder(target, tiny_tokenizer, None).generate([prompt], WAYS[0])[0].tokens
    for tree in TREES:
        decoder = Decoder(target, tiny_tokenizer, drafting(target), **tree)
        assert decoder.generate([prompt], WAYS[0])[0].tokens == plain


def test_exits_that_are_not_there(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="got the target's first 0 layers"):
        fresh(target, 0)
    with pytest.raises(ValueError, match=r"taps: got \[3\] for a target of 2 layers"):
        fresh(target, 3)
