"""What a draft is trained for, against the obvious form; and text that it writes itself."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from four_steps import four_steps, some_batch
from torch import Tensor
from transformers import PhiConfig, PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.draft_lm import draft_from_config
from draftsmith.train.losses.pure import divergence, lk_weight
from draftsmith.train.objectives.distillation import Distillation
from draftsmith.train.teachers.teachers import StateTeacher
from draftsmith.train.text.batches import Batches, Examples
from draftsmith.train.text.on_policy import OnPolicy, OnPolicyText, Snapshot, as_batch, prompt_of


@pytest.fixture
def padded_draft(tiny_target: PreTrainedModel) -> PreTrainedModel:
    """A draft with more logits than the tokenizer has tokens, and than the target has."""
    draft = draft_from_config(
        tiny_target.config,
        layers=1,
        hidden=16,
        heads=2,
        kv_heads=1,
        intermediate=32,
        seed=3,
        vocab_size=384,
        initializer_range=0.3,
    )
    return draft.train()


def distillation(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    vocabulary: int,
    warp: SamplingParams | None = None,
    **losses: Any,
) -> Distillation:
    return Distillation(
        draft,
        StateTeacher(target, vocabulary),
        four_steps(**losses),
        vocab_size=vocabulary,
        warp=warp or SamplingParams(1.0),
    )


@pytest.mark.parametrize("loss", ["fkl", "rkl", "jsd", "tv", "tvpp", "nla", "lk"])
@pytest.mark.parametrize("warp", [SamplingParams(1.0), SamplingParams(0.7, top_k=40, top_p=0.9)])
def test_distillation_is_the_plain_formula(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
    padded_draft: PreTrainedModel,
    loss: str,
    warp: SamplingParams,
) -> None:
    """Logits of both models in full, one transform, one pure loss, a masked sum."""
    batch, vocabulary = some_batch(), len(tiny_tokenizer)
    objective = distillation(padded_draft, tiny_target, vocabulary, warp, name=loss, beta=0.3)
    objective.observe({"alpha": 0.4})
    output = objective(batch)
    output.loss.backward()
    got = [parameter.grad.clone() for parameter in padded_draft.parameters()]
    padded_draft.zero_grad()

    def warped(model: PreTrainedModel) -> Tensor:
        logits = model(batch.input_ids).logits[..., :vocabulary]
        return warp.transform(logits)[batch.loss_mask]

    formula: Callable = divergence(loss, 0.3, kl_weight=lk_weight(torch.tensor(0.4)))
    with torch.no_grad():
        p = warped(tiny_target)
    q = warped(padded_draft)
    expected = formula(p, q).sum()
    expected.backward()
    assert output.tokens == batch.loss_mask.sum() == len(p)
    torch.testing.assert_close(output.loss, expected, rtol=1e-4, atol=1e-4)
    alpha = torch.minimum(p.softmax(-1), q.softmax(-1)).sum()
    torch.testing.assert_close(output.metrics["alpha"], alpha.detach(), rtol=1e-4, atol=1e-4)
    for a, parameter in zip(got, padded_draft.parameters(), strict=True):
        torch.testing.assert_close(a, parameter.grad, rtol=2e-3, atol=2e-4)


def phi(layers: int, seed: int) -> PreTrainedModel:
    """A small Phi, whose LM head has a bias."""
    sizes = {"hidden": 16, "heads": 2, "kv_heads": 2, "intermediate": 32, "vocab_size": 320}
    model = draft_from_config(PhiConfig(), layers=layers, seed=seed, **sizes, eos_token_id=1)
    model.lm_head.bias.data = torch.linspace(-2, 2, 320).roll(50 * layers)
    return model


def test_a_bias_of_the_output_head_is_compared_and_trained() -> None:
    draft, target, batch = phi(1, 0), phi(2, 1).requires_grad_(False), some_batch()
    output = distillation(draft, target, 300, name="0.5*ce+0.5*rkl")(batch)
    output.loss.backward()
    got = {name: parameter.grad.clone() for name, parameter in draft.named_parameters()}
    draft.zero_grad()
    p, q = (model(batch.input_ids).logits[..., :300][batch.loss_mask] for model in (target, draft))
    following = batch.input_ids.roll(-1, 1)[batch.loss_mask]
    own = torch.nn.functional.cross_entropy(q, following, reduction="sum")
    expected = 0.5 * own + 0.5 * divergence("rkl", 0.5)(p, q).sum()
    expected.backward()
    torch.testing.assert_close(output.loss, expected, rtol=1e-4, atol=1e-4)
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=2e-3, atol=2e-4, msg=name)
    assert got["lm_head.bias"].any()


def test_measure_and_temperature_zero(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tiny_draft: PreTrainedModel,
) -> None:
    batch = some_batch()
    same = (tiny_target(batch.input_ids).logits.argmax(-1)) == (
        tiny_draft(batch.input_ids).logits.argmax(-1)
    )
    agreeing = (same & batch.loss_mask).sum().float()
    for temperature in (0.0, 1.0):
        warp = SamplingParams(temperature)
        objective = distillation(tiny_draft, tiny_target, len(tiny_tokenizer), warp)
        measured = objective.measure(batch)
        assert measured.metrics["agreement"] == agreeing
        assert measured.metrics["alpha"].isclose(agreeing) == (temperature == 0)
        torch.testing.assert_close(measured.loss, objective(batch).loss.detach())


def test_the_target_is_no_part_of_it(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
    padded_draft: PreTrainedModel,
) -> None:
    objective = distillation(padded_draft, tiny_target, len(tiny_tokenizer))
    names = set(objective.state_dict())
    assert names == {"mean_alpha", "steps_done"} | {
        f"draft.{name}" for name in padded_draft.state_dict()
    }
    before = copy.deepcopy(tiny_target.state_dict())
    objective(some_batch()).loss.backward()
    assert all(parameter.grad is None for parameter in tiny_target.parameters())
    assert all(torch.equal(a, before[name]) for name, a in tiny_target.state_dict().items())


def test_unknown_loss_and_beta(tiny_target: PreTrainedModel, tiny_draft: PreTrainedModel) -> None:
    for loss, message in (
        ("kl", "got 'kl', expected one of ce, fkl, rkl"),
        ("0*ce+fkl", "with weights above 0"),
        ("fkl+fkl", "each once"),
    ):
        with pytest.raises(ValueError, match=message):
            distillation(tiny_draft, tiny_target, 300, name=loss)
    with pytest.raises(ValueError, match=r"beta: got 1\.0, expected a number strictly between"):
        distillation(tiny_draft, tiny_target, 300, name="jsd", beta=1.0)
    with pytest.raises(ValueError, match="leaves 4 and 0 of 4 steps"):
        distillation(tiny_draft, tiny_target, 300, second="tv", second_from=1.0)


def test_mixes_with_the_text_and_stages(
    tiny_target: PreTrainedModel, tiny_draft: PreTrainedModel
) -> None:
    """OmniDraft's hybrid first, total variation after half of the steps."""
    batch, stages = some_batch(), {"name": "rkl+0.2*ce", "second": "tv"}
    objective = distillation(tiny_draft, tiny_target, 300, **stages)
    p, q = (m(batch.input_ids).logits[..., :300] for m in (tiny_target, tiny_draft))
    next_BT = batch.input_ids.roll(-1, 1)
    ce_BT = torch.nn.functional.cross_entropy(q.transpose(1, 2), next_BT, reduction="none")
    hybrid = (divergence("rkl")(p, q) + 0.2 * ce_BT)[batch.loss_mask].sum()
    for done in range(4):
        expected = hybrid if done < 2 else divergence("tv")(p, q)[batch.loss_mask].sum()
        torch.testing.assert_close(objective(batch).loss, expected)
        objective.observe({"alpha": 0.5})


def test_cross_entropy_alone_runs_no_target(
    tiny_target: PreTrainedModel, tiny_draft: PreTrainedModel
) -> None:
    batch, objective = some_batch(), distillation(tiny_draft, tiny_target, 300, name="ce")
    usual = objective.measure(batch)
    objective._teacher = None  # type: ignore[assignment]
    output = objective(batch)
    torch.testing.assert_close(output.loss.detach(), usual.loss)
    assert output.metrics == {} and 0 < usual.metrics["alpha"] < output.tokens


def chats_and_documents() -> Examples:
    """Prompts of 3 to 7 tokens with answers, and every third a document."""
    draw = torch.Generator().manual_seed(0)
    pairs = []
    for i in range(12):
        ids = torch.randint(2, 300, (20,), generator=draw).tolist()
        first = 0 if i % 3 == 0 else 3 + i % 5
        pairs.append((ids, [place >= first for place in range(20)]))
    return Examples.collect(pairs)


def on_policy(
    draft: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, **changes: float
) -> tuple[OnPolicy, Batches]:
    text = OnPolicyText(prompt_tokens=6, max_new_tokens=9, **changes)
    batches = Batches(
        chats_and_documents(), batch_size=4, max_length=32, seed=1, packing=False, pad_id=1
    )
    return OnPolicy(text, batches, Snapshot(draft, torch.float32), tokenizer), batches


def test_the_draft_writes_the_answers(
    tiny_draft: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Prompts stay, answers are the draft's: under greedy sampling each is its own argmax."""
    writing, batches = on_policy(tiny_draft, tiny_tokenizer, share=1.0, temperature=0.0)
    place = {"accumulation": 1, "world": 1}
    for step in range(3):
        batch, plain = writing.batch(step, 0, 0, **place), batches.batch(step, 0, 0, **place)
        assert batch.rows == plain.rows
        best = tiny_draft(batch.input_ids).logits.argmax(-1)
        assert bool((best == batch.input_ids.roll(-1, 1))[batch.loss_mask].all())
        for row in range(4):
            trained = batch.loss_mask[row].nonzero().flatten()
            length = int(trained[0]) + 1
            assert torch.equal(batch.input_ids[row, :length], plain.input_ids[row, :length])
            expected = int(plain.loss_mask[row].nonzero()[0]) + 1
            assert length == (6 if expected == 1 else expected)
            assert 1 <= len(trained) <= 9
            assert len(trained) == int(trained[-1] - trained[0]) + 1


def test_on_policy_is_a_function_of_seed_step_micro_and_rank(
    tiny_draft: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    first, _ = on_policy(tiny_draft, tiny_tokenizer, share=1.0)
    second, _ = on_policy(tiny_draft, tiny_tokenizer, share=1.0)
    place = {"accumulation": 2, "world": 2}
    second.batch(0, 0, 0, **place)
    a, b = first.batch(5, 1, 1, **place), second.batch(5, 1, 1, **place)
    assert torch.equal(a.input_ids, b.input_ids)
    assert torch.equal(a.loss_mask, b.loss_mask)


def test_processes_and_micro_batches_draw_answers_of_their_own(
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the same prompts."""
    writing, batches = on_policy(tiny_draft, tiny_tokenizer, share=1.0)
    place = {"accumulation": 2, "world": 2}
    same = batches.batch(5, 0, 0, **place)
    monkeypatch.setattr(batches, "batch", lambda *_, **__: same)
    answers = [writing.batch(5, micro, rank, **place) for micro in (0, 1) for rank in (0, 1)]
    assert len({str(batch.input_ids.tolist()) for batch in answers}) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # bf16 packs its weights
def test_answers_are_those_of_the_weights_of_now(
    tiny_draft: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, dtype: torch.dtype
) -> None:
    draft = copy.deepcopy(tiny_draft)
    plain, batches = on_policy(draft, tiny_tokenizer, share=1.0)
    place = {"accumulation": 1, "world": 1}

    def writing() -> OnPolicy:
        return OnPolicy(plain.asked, batches, Snapshot(draft, dtype), tiny_tokenizer)

    kept = writing()
    before = kept.batch(5, 0, 0, **place).input_ids
    with torch.no_grad():
        for weight in draft.parameters():
            weight.mul_(-1.0)
    after = kept.batch(5, 0, 0, **place).input_ids
    assert not torch.equal(before, after)
    assert torch.equal(after, writing().batch(5, 0, 0, **place).input_ids)


def test_one_draw_a_step_for_all(
    tiny_draft: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    writing, batches = on_policy(tiny_draft, tiny_tokenizer, share=0.4)
    place = {"accumulation": 2, "world": 2}
    rewritten = []
    for step in range(60):
        changed = {
            writing.batch(step, micro, rank, **place).input_ids.shape
            != batches.batch(step, micro, rank, **place).input_ids.shape
            for micro, rank in ((0, 0), (1, 1))
        }
        assert len(changed) == 1, "processes and micro-batches must not differ"
        rewritten.append(changed.pop())
    assert 0.25 < sum(rewritten) / 60 < 0.55


def test_on_policy_settings(
    tiny_draft: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match=r"on_policy.share: got 1\.5"):
        on_policy(tiny_draft, tiny_tokenizer, share=1.5)
    with pytest.raises(ValueError, match=r"prompt_tokens: got 6, expected fewer than text\.max"):
        text = OnPolicyText(prompt_tokens=6, share=1.0)
        batches = Batches(
            chats_and_documents(), batch_size=4, max_length=6, seed=1, packing=False, pad_id=1
        )
        OnPolicy(text, batches, Snapshot(tiny_draft, torch.float32), tiny_tokenizer)


def test_prompt_and_batch_forms() -> None:
    ids = torch.arange(10, 20)
    chat = torch.tensor([0, 0, 1, 1, 1, 0, 0, 0, 0, 0], dtype=torch.bool)
    assert prompt_of(ids, chat, 8) == [10, 11, 12]
    document = torch.tensor([1, 1, 1, 1, 1, 0, 0, 0, 0, 0], dtype=torch.bool)
    assert prompt_of(ids, document, 3) == [10, 11, 12]
    assert prompt_of(ids, document, 8) == [10, 11, 12, 13, 14], "its last token stays to be written"
    batch = as_batch([[5, 6], [7]], [[8], [9, 4, 3]], pad_id=1, rows=(2, 3))
    assert batch.input_ids.tolist() == [[5, 6, 8, 1], [7, 9, 4, 3]]
    assert batch.loss_mask.tolist() == [[False, True, False, False], [True, True, True, False]]
