"""EAGLE heads as drafters: no answer changes, and what they draft is what an obvious loop drafts.

Shapes: B rows, T positions, L tokens of a kept path, H hidden, U width of the taps, V vocabulary.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from eagle_drafts import HEADS, TEXTS, VOCAB, begin, counting, draft, made
from rounds import MODES, reads_nothing, records, started
from tiny_llama import build_llama
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.drafters.eagle import EagleDrafter
from draftsmith.decode.drafting.base import Kept
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.forward import lean_heads
from draftsmith.decode.forward.lean_heads import LeanEagle
from draftsmith.decode.token_tree import TokenTree
from draftsmith.decode.tree_shapes import chain_plan, parse_tree
from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.layers.layer import causal
from draftsmith.models.taps import target_states

ROUNDS: dict[str, dict[str, Any]] = MODES | {"leviathan": {"rule": "leviathan"}}

WAYS = [replace(params, max_new_tokens=18) for params in SETTINGS]


@pytest.fixture(scope="module")
def answers(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> list[list[list[int]]]:
    return [truths(tiny_target, tiny_tokenizer, params) for params in WAYS]


@pytest.mark.parametrize("tree", ["chain", "eagle-25", "dynamic:4,3,12"])
@pytest.mark.parametrize("name", HEADS)
def test_no_answer_changes(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    answers: list[list[list[int]]],
    name: str,
    tree: str,
) -> None:
    """Rows come and go: four prompts in three rows."""
    drafter = EagleDrafter(made(name), tiny_target, VOCAB)
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, tree=tree, batch_size=3)
    ways = list(zip(answers, WAYS, strict=True))
    for expected, params in ways if tree == "chain" else ways[:2]:
        assert [c.tokens for c in decoder.generate(PROMPTS, params)] == expected


@pytest.mark.parametrize("params", WAYS[:2], ids=["greedy", "t1"])
@pytest.mark.parametrize("tree", ["chain", "eagle-25"])
def test_a_head_that_knows_fills_the_best_path(
    tiny_tokenizer: PreTrainedTokenizerBase, tree: str, params: Any
) -> None:
    """Tokens, their order and the noise are right at every depth: no round falls short."""
    target, head = counting(wrong=0.0)
    drafter = EagleDrafter(head, target, VOCAB)
    params = replace(params, max_new_tokens=40, ignore_eos=True)
    decoder = Decoder(target, tiny_tokenizer, drafter, tree=tree, batch_size=2)
    for done in decoder.generate(PROMPTS, params):
        assert done.finish_reason == "length"
        assert sum(done.counters.histogram[:-1]) <= 1, done.counters  # the last may be cut


@pytest.mark.parametrize("tree", ["chain", "eagle-25", "dynamic:4,3,12"])
@torch.no_grad()
def test_state_after_each_round_equals_a_fresh_prefill(
    tiny_tokenizer: PreTrainedTokenizerBase, tree: str
) -> None:
    """In rounds that keep all, some and none of what was drafted."""
    target, head = counting(wrong=0.35)
    drafter, fresh = (EagleDrafter(head, target, VOCAB) for _ in range(2))
    decoder = Decoder(target, tiny_tokenizer, drafter, tree=tree, batch_size=4)
    session = decoder._open(PROMPTS, SETTINGS[0], None)
    batch = session.batch
    session.admit()
    kept = set()
    for _ in range(7):
        before = batch.rows.lens_B.clone()
        session.hear(session.launch())
        kept |= set((batch.rows.lens_B - before).tolist())
        for row, request in enumerate(batch.rows.requests):
            if request is None:
                continue
            text = request.completion.prompt_tokens + request.completion.tokens
            begin(fresh, target, [text])
            length = len(text) - 1
            ours = drafter.pool.kv_2LBSHE[:, :, row, :length]
            assert torch.allclose(ours, fresh.pool.kv_2LBSHE[:, :, 0, :length], atol=1e-5)
            assert torch.allclose(drafter.state_BH[row], fresh.state_BH[0], atol=1e-5)
    assert len(kept - {0}) >= 3, kept


def obvious(
    head: Eagle, target: PreTrainedModel, text: list[int], *, turned: int = 0, shift: int = 0
) -> tuple[list[int], Tensor]:
    """Four tokens, one by one, by the head's own step on everything before; and logits [4, D].

    Twins: what is drafted stands `turned` positions further; tokens come `shift` pairs too late.
    """
    text_1T = torch.tensor([text])
    hidden_1TH = head.fuse(target_states(target, head.taps, input_ids=text_1T[:, :-1]).taps_BTF)
    tokens_1T = text_1T[:, 1 - shift : len(text) - shift]
    at_1T = torch.arange(len(text) - 1)[None]
    drafted, logits = [], []
    for step in range(4):
        output_1TH = head.step(hidden_1TH, tokens_1T, at_1T, causal())
        last_1H = output_1TH[:, -1]
        logits.append((head.before_head(last_1H) @ head.head_DH.T)[0])
        drafted.append(int(head.vocab.ids_D[logits[-1].argmax()]))
        hidden_1TH = torch.cat([hidden_1TH, head.fed_back(last_1H)[:, None]], 1)
        tokens_1T = torch.cat([tokens_1T, torch.tensor([drafted[-1:]])], 1)
        at_1T = torch.cat([at_1T, torch.tensor([[len(text) - 1 + step + turned]])], 1)
    return drafted, torch.stack(logits)


def gap(head: Eagle, tree: TokenTree, expected: list[tuple[list[int], Tensor]]) -> float:
    """The largest difference of a chain's logits from those expected, as a share of the largest:
    EAGLE-1's states grow from step to step, and with them what was rounded.
    """
    assert tree.q_logits_BIV is not None
    theirs_BID = torch.stack([logits for _, logits in expected])
    gap_BID = tree.q_logits_BIV[..., head.vocab.ids_D] - theirs_BID
    return float(gap_BID.abs().max() / theirs_BID.abs().max())


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_chains_are_what_an_obvious_loop_drafts(tiny_target: PreTrainedModel, name: str) -> None:
    """After a prefill; and after a round that kept 0 to 3 tokens, beside states of others. In fp64:
    what an EAGLE-1 head of two layers rounds in fp32 grows to 5e-5 in four steps on some machines.
    """
    head, target = made(name).double(), copy.deepcopy(tiny_target).double()
    drafter = EagleDrafter(head, target, VOCAB)
    begin(drafter, target, TEXTS)
    expected = [obvious(head, target, text) for text in TEXTS]
    tree = draft(drafter, TEXTS)
    assert tree.tokens_BN[:, 1:].tolist() == [tokens for tokens, _ in expected]
    assert gap(head, tree, expected) < 2e-5
    for twin in ({"turned": 1}, {"shift": 1}):
        wrong = [obvious(head, target, text, **twin) for text in TEXTS]
        assert gap(head, tree, wrong) > 5e-3, twin

    longer = [text + [(11 * i + row) % VOCAB for i in range(row)] for row, text in enumerate(TEXTS)]
    lens_B, n_new_B = torch.tensor([len(text) - 1 for text in TEXTS]), torch.arange(4)
    tokens_BL, taps_BLU = torch.full((4, 5), 9), torch.randn(4, 5, len(head.taps) * 32).double()
    for row, text in enumerate(longer):
        states = target_states(target, head.taps, input_ids=torch.tensor([text[:-1]]))
        tokens_BL[row, :row] = torch.tensor(text[len(text) - row :])
        taps_BLU[row, :row] = states.taps_BTF[0, len(text) - 1 - row :]
    drafter.extend(Kept(tokens_BL, n_new_B, None, lens_B, taps_BLU))
    expected = [obvious(head, target, text) for text in longer]
    assert gap(head, draft(drafter, longer), expected) < 2e-5


@pytest.mark.parametrize("tree", ["eagle-25", "dynamic:4,1,5"])
@torch.no_grad()
def test_a_trees_best_path_is_the_chain(tiny_target: PreTrainedModel, tree: str) -> None:
    """Nodes see their ancestors alone, at the slots and positions where these were fed."""
    drafter = EagleDrafter(made("eagle3-two"), tiny_target, VOCAB)
    begin(drafter, tiny_target, TEXTS)
    chains, trees = (draft(drafter, TEXTS, t).tokens_BN[:, 1:].tolist() for t in ("chain", tree))
    paths = getattr(parse_tree(tree, None), "paths", chain_plan(4).paths)
    best = [i for i, path in enumerate(paths) if not any(path)][:4]
    assert [[row[i] for i in best] for row in trees] == chains


@pytest.mark.parametrize("name", ["eagle1-two", "eagle3"])
@torch.no_grad()
def test_teacher_forced_logits_are_those_of_the_first_draft(
    tiny_target: PreTrainedModel, name: str
) -> None:
    drafter, text = EagleDrafter(made(name), tiny_target, VOCAB), TEXTS[3]
    ids_1T = torch.tensor([text])
    taps_1TU = target_states(tiny_target, drafter.taps, input_ids=ids_1T).taps_BTF
    all_TV = drafter.teacher_logits(ids_1T, taps_1TU)[0]
    for end in range(2, len(text) + 1):
        begin(drafter, tiny_target, [text[:end]])
        first_V = drafter.first(drafter.state_BH[:, None]).logits_BFV[0, 0]
        assert torch.allclose(all_TV[end - 1], first_V, atol=1e-5)


@pytest.mark.parametrize("mode", ROUNDS)
def test_a_round_never_reads_the_device(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, mode: str
) -> None:
    """Under every rule, in place: the recurrent loop can be captured."""
    drafter = EagleDrafter(made("eagle3-two"), tiny_target, VOCAB)
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, batch_size=4, **ROUNDS[mode])
    session = started(decoder, SETTINGS[1])
    places = [t.data_ptr() for t in (drafter.state_BH, drafter.pool.kv_2LBSHE)]
    session.hear(session.launch())
    assert places == [t.data_ptr() for t in (drafter.state_BH, drafter.pool.kv_2LBSHE)]
    reads_nothing(decoder, session)


@pytest.mark.parametrize("tree", ["chain", "eagle-25", "dynamic:3,3,9"])
def test_a_recorded_round_is_the_round(tiny_tokenizer: PreTrainedTokenizerBase, tree: str) -> None:
    """Replayed on the same tensors, over two calls whose rows come and go: the same tokens."""
    target, head = counting(wrong=0.35)
    drafter = EagleDrafter(head, target, VOCAB)
    records((target, tiny_tokenizer), drafter, WAYS[1], tree=tree)


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_the_lean_form_is_the_head(tiny_target: PreTrainedModel, name: str) -> None:
    lean, plain = (EagleDrafter(made(name), tiny_target, VOCAB) for _ in range(2))
    assert isinstance(lean.body, LeanEagle)
    plain.body = plain.head
    for drafter in (lean, plain):
        begin(drafter, tiny_target, TEXTS)
    assert torch.allclose(lean.state_BH, plain.state_BH, atol=1e-5)
    trees = [draft(drafter, TEXTS, "eagle-25") for drafter in (lean, plain)]
    assert torch.equal(trees[0].tokens_BN, trees[1].tokens_BN)
    # On the same weights: a change in place is a change of both.
    lean.head.load_state_dict({k: v * 1.5 for k, v in plain.head.state_dict().items()})
    plain.head.load_state_dict(lean.head.state_dict())
    for drafter in (lean, plain):
        begin(drafter, tiny_target, TEXTS)
    assert torch.allclose(lean.state_BH, plain.state_BH, rtol=1e-4, atol=1e-5)


def test_what_is_not_the_same_is_not_used(
    tiny_target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = made("eagle3").requires_grad_(True)
    assert EagleDrafter(training, tiny_target, VOCAB).body is training
    monkeypatch.setattr("draftsmith.decode.forward.lean.normed", lambda norm, x: x)
    head = made("eagle3")
    assert EagleDrafter(head, tiny_target, VOCAB).body is head


@pytest.mark.parametrize("wrong", [False, True])
def test_far_apart_in_bf16_the_exact_states_judge(
    monkeypatch: pytest.MonkeyPatch, *, wrong: bool
) -> None:
    """Where attention is sharp, two right forms are far apart; one that is off in bf16 alone is
    refused all the same.
    """
    target, head = build_llama(VOCAB, layers=3, hidden=32, seed=0).bfloat16(), made("eagle3")
    for part in (head.layers[0].self_attn.q_proj, head.layers[0].self_attn.k_proj):
        part.weight.mul_(4)
    agree, normed, asked = lean_heads.agree, lean_heads.normed, []

    def never_in_bf16(own: list[Tensor], lean: list[Tensor], dtype: torch.dtype) -> bool:
        asked.append(dtype)
        return dtype == torch.float32 and agree(own, lean, dtype)

    def off(norm: Any, x: Tensor) -> Tensor:
        return normed(norm, x) * (1.0625 if x.dtype == torch.bfloat16 else 1)

    monkeypatch.setattr(lean_heads, "agree", never_in_bf16)
    if wrong:
        monkeypatch.setattr(lean_heads, "normed", off)
    body = EagleDrafter(head.bfloat16(), target, VOCAB).body
    assert asked[0] == torch.bfloat16 and isinstance(body, Eagle if wrong else LeanEagle)


def test_answers_end_at_the_heads_context(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """And what is drafted past it harms nothing before."""
    plain = Decoder(tiny_target, tiny_tokenizer).generate([[7] * 20], WAYS[0])[0].tokens
    head = made("eagle3", max_position_embeddings=32)
    drafter = EagleDrafter(head, tiny_target, VOCAB)
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, tree="eagle-25")
    assert decoder.context == 32
    got = decoder.generate([[7] * 20], WAYS[0])[0]
    assert (got.tokens, got.finish_reason) == (plain[:12], "length")
    with pytest.raises(ValueError, match="expected less than the context of 32"):
        Decoder(tiny_target, tiny_tokenizer, drafter, K=32)


def test_padded_rows_and_tokens_it_lacks_are_never_drafted(tiny_target: PreTrainedModel) -> None:
    for name in ("eagle1", "eagle3"):
        head = made(name)
        logits_BNV = EagleDrafter(head, tiny_target, 300).first(torch.randn(2, 3, 32)).logits_BFV
        assert logits_BNV.shape == (2, 3, 300) and logits_BNV.dtype == torch.float32
        drafted = logits_BNV.isfinite().all(0).all(0).nonzero().flatten()
        assert drafted.tolist() == [i for i in head.vocab.ids_D.tolist() if i < 300]


def test_bytes_of_a_draft_call(tiny_target: PreTrainedModel) -> None:
    layer = 4 * sum(p.numel() for p in made("eagle1").layers.parameters())
    wide = 4 * sum(p.numel() for p in made("eagle3").layers.parameters())
    one, three = (EagleDrafter(made(n), tiny_target, VOCAB) for n in ("eagle1", "eagle3"))
    assert one.parameter_bytes == layer + 4 * (64 * 32 + 32 + VOCAB * 32)
    assert three.parameter_bytes == wide + 4 * (VOCAB // 2) * 32
