"""Drafting several tokens in a pass, against one pass for each number of MASKs.

Shapes as in train/tuning/pard.py.
"""

import math
from typing import Any

import pytest
import torch
from four_steps import four_steps, some_batch
from tiny_llama import build_llama
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.decode.sampling import SamplingParams
from draftsmith.train.losses.pure import divergence
from draftsmith.train.losses.token_selection import Weighting
from draftsmith.train.teachers.teachers import StateTeacher
from draftsmith.train.text.batches import Batch
from draftsmith.train.tuning import pard
from draftsmith.train.tuning.pard import Pard, PardDistillation, masked
from draftsmith.train.tuning.windows import windows

K, MASK = 4, 7


def objective(
    target: PreTrainedModel, vocabulary: int, how: Pard, loss: str = "jsd", **more: Any
) -> PardDistillation:
    draft = build_llama(vocabulary, layers=1, hidden=16, seed=3).train()
    draft.config.pard_token, draft.config.para_num = MASK, K
    given = draft, StateTeacher(target, vocabulary), four_steps(name=loss)
    options = {"vocab_size": vocabulary, "warp": SamplingParams(1.0)} | more
    return PardDistillation(how, *given, **options)


def long_batch() -> Batch:
    """Of two rows of which most is trained."""
    batch = some_batch(2, 17)
    batch.loss_mask[:] = True
    batch.loss_mask[0, :5] = batch.loss_mask[1, 9] = batch.loss_mask[:, -1] = False
    return batch


@pytest.mark.parametrize("decay", [0.0, 2.0])
@pytest.mark.parametrize("phase", [0, 3])
def test_the_loss_is_that_of_one_pass_for_each_number_of_masks(
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    decay: float,
    phase: int,
) -> None:
    batch, how = long_batch(), Pard(levels=K, decay=decay)
    own = objective(tiny_target, len(tiny_tokenizer), how)
    monkeypatch.setattr(torch, "rand", lambda *_: torch.tensor(phase / K))
    found = own(batch)
    found.loss.backward()
    got = [parameter.grad.clone() for parameter in own.draft.parameters()]
    own.draft.zero_grad()

    weights = [math.exp(-k / decay) if decay else 1.0 for k in range(K)]
    weights = [weight / sum(weights) for weight in weights]
    formula: Any = divergence("jsd", 0.5)
    with torch.no_grad():
        p_BTV = tiny_target(batch.input_ids).logits
    expected, ahead, depths = torch.zeros(()), [], []
    begin_BT = windows(batch, K, phase=phase)
    for row, ids_T in enumerate(batch.input_ids):
        for at in range(len(ids_T) - 1):
            if batch.loss_mask[row, at]:
                q_V = own.draft(ids_T[None, : at + 1]).logits[0, -1]
                expected = expected + weights[0] * formula(p_BTV[row, at], q_V)
            begin = int(begin_BT[row, at])
            if not begin or begin != begin_BT[row, at + 1]:
                continue
            masks = at + 1 - begin  # behind the text before the window
            read = torch.cat([ids_T[:begin], torch.full((masks,), MASK)])
            q_V = own.draft(read[None]).logits[0, -1]
            expected = expected + K * weights[masks] * formula(p_BTV[row, at], q_V)
            ahead.append(torch.minimum(p_BTV[row, at].softmax(-1), q_V.softmax(-1)).sum())
            depths.append(masks)
    expected.backward()
    assert set(depths) == set(range(1, K))
    torch.testing.assert_close(found.loss, expected, rtol=1e-4, atol=1e-4)
    mean = found.metrics["ahead"] / found.tokens
    torch.testing.assert_close(mean, torch.stack(ahead).mean().detach(), rtol=1e-4, atol=1e-5)
    for a, parameter in zip(got, own.draft.parameters(), strict=True):
        torch.testing.assert_close(a, parameter.grad, rtol=2e-3, atol=2e-4)


def test_windows_begin_everywhere_in_turn() -> None:
    """Each trained token is behind every number of MASKs in some phase, and none twice in one."""
    batch = long_batch()
    behind = {at: set[int]() for at in range(6, 16)}
    for phase in range(K):
        begin_T = windows(batch, K, phase=phase)[0].tolist()
        for at, found in behind.items():
            assert 0 < at - begin_T[at] + 1 <= K and begin_T[at] >= 6
            found.add(at - begin_T[at])
    assert behind[6] == {0} and all(behind[at] == set(range(K)) for at in range(9, 16))


def test_measuring_is_of_the_first_token_and_of_those_ahead(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Also where the loss has nothing to do with the target."""
    batch = long_batch()
    for loss in ("fkl", "ce"):
        own = objective(tiny_target, len(tiny_tokenizer), Pard(levels=K), loss)
        found = own.measure(batch)
        shares = {name: float(value / found.tokens) for name, value in found.metrics.items()}
        assert 0 < shares["ahead"] < 1 and 0 < shares["alpha"] < 1
        assert own(batch).metrics.keys() == ({"alpha", "ahead"} if loss == "fkl" else set())


def test_masks_are_found_or_refused(
    tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = len(tiny_tokenizer)
    wide = build_llama(known + 3, layers=1, hidden=16, seed=0)
    assert masked(wide, tiny_tokenizer, Pard(levels=K)).config.pard_token == known
    again = masked(wide, tiny_tokenizer, Pard(levels=6, mask_token=known + 1))
    assert (again.config.pard_token, again.config.para_num) == (known + 1, 6)
    assert masked(wide, tiny_tokenizer, Pard(levels=K)).config.pard_token == known + 1
    exact = build_llama(known, layers=1, hidden=16, seed=0)
    assert masked(exact, tiny_tokenizer, Pard(levels=K)).config.pard_token == (
        tiny_tokenizer.pad_token_id
    )
    monkeypatch.setattr(pard, "mask_token", lambda _: None)
    for mask in (-1, known):
        none = type("None", (), {"pad_token_id": None, "__len__": lambda _: known})()
        monkeypatch.setattr(pard, "vocab_size", len)
        with pytest.raises(ValueError, match="expected the number of a token that no text holds"):
            masked(exact, none, Pard(levels=K, mask_token=mask))


def test_what_it_does_not_go_with_is_refused(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    for levels, decay in ((1, 0.0), (-2, 0.0), (4, -1.0)):
        with pytest.raises(ValueError, match="pard: got"):
            Pard(levels=levels, decay=decay)
    weighting = Weighting(select="random", keep=0.5)
    with pytest.raises(ValueError, match=r"pard.levels: got it with tokens.select"):
        objective(tiny_target, len(tiny_tokenizer), Pard(levels=K), weighting=weighting)
