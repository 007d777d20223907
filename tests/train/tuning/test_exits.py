"""Exits trained together: the loss of whole logits, its weights over the run, layers left out."""

import copy
from itertools import pairwise

import pytest
import torch
from tiny_heads import ROWS, TOKENS, one_batch
from tiny_llama import build_llama
from torch import Tensor
from transformers import LlamaForCausalLM

from draftsmith.train.text.batches import Batch
from draftsmith.train.tuning.exits import ExitObjective, Exits

LAYERS, STEPS = 6, 12


def model() -> LlamaForCausalLM:
    return build_llama(ROWS, layers=LAYERS, hidden=32, seed=0)


def objective(of: LlamaForCausalLM, **how: object) -> ExitObjective:
    return ExitObjective(of, Exits(**how), steps=STEPS, vocab_size=TOKENS)  # type: ignore[arg-type]


def states(of: LlamaForCausalLM, batch: Batch, *, normed: bool = True) -> list[Tensor]:
    """What the LM head multiplies after each layer, by transformers' own pass."""
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    mask = batch.attention_mask
    found = of.model(**inputs, attention_mask=mask, output_hidden_states=True)
    early = found.hidden_states[1:-1]
    return [*((of.model.norm(h) for h in early) if normed else early), found.last_hidden_state]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("normed", [True, False], ids=["ours", "twin without the final norm"])
def test_the_loss_is_that_of_whole_logits(packing: bool, normed: bool) -> None:
    """In value and gradient, at a step with three exits; raw states give another."""
    ours, obvious = model().double(), model().double()
    made, batch = objective(ours, scale=0.5, every=2, dropout=0.0), one_batch(packing)
    made.train().steps_done.fill_(1)
    exits = made.chosen(1)
    assert exits == [2, 4, LAYERS]
    output = made(batch)
    output.loss.backward()
    raw = torch.tensor([0.5 * 2, 0.5 * (2 + 4), 2 + 4 + LAYERS])
    total, after = torch.zeros((), dtype=torch.float64), states(obvious, batch, normed=normed)
    for exit, weight in zip(exits, raw / raw.sum(), strict=True):
        logits_BTV = obvious.lm_head(after[exit - 1])[..., :TOKENS]
        log_BT = logits_BTV.log_softmax(-1)[:, :-1].gather(-1, batch.input_ids[:, 1:, None])
        ce = -log_BT[..., 0][batch.loss_mask[:, :-1]].sum()
        total = total + weight.item() * ce
    total.backward()
    same = output.loss.item() == pytest.approx(total.item(), rel=1e-6)
    assert same is normed
    if normed:
        assert output.metrics["last"].item() == pytest.approx(ce.item(), rel=1e-6)
        assert output.tokens == batch.loss_mask.sum()
        for (name, a), b in zip(ours.named_parameters(), obvious.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_curricula() -> None:
    rotational = objective(model(), curriculum="rotational", every=2)
    assert [rotational.chosen(step) for step in range(3)] == [[1, 3, 5, 6], [2, 4, 6], [1, 3, 5, 6]]
    few = objective(model(), curriculum="rotational", every=2, layers=[4, 2])
    assert [few.chosen(step) for step in range(3)] == [[2, 6], [4, 6], [2, 6]]
    gradual = objective(model(), curriculum="gradual")
    seen = [gradual.chosen(step) for step in range(STEPS)]
    assert seen[0] == [6] and seen[-1] == [1, 2, 3, 4, 5, 6]
    assert all(set(a) <= set(b) for a, b in pairwise(seen))
    on = {e: next(t for t in range(STEPS) if e in seen[t]) / (STEPS - 1) for e in range(1, 6)}
    assert all(0 <= on[e] - 0.5 * (LAYERS - e + 1) / LAYERS < 1 / (STEPS - 1) for e in on)
    sorted_ones = objective(model(), curriculum="none", layers=[2, 4], weights="equal", dropout=0)
    assert sorted_ones.chosen(7) == [2, 4, 6]
    assert sorted_ones.shares([2, 4, 6]).tolist() == pytest.approx([1 / 3] * 3)
    rotational.observe({})
    assert rotational.steps_done == 1 and rotational.drafter == "exit:3"


def test_without_dropout_a_pass_is_the_plain_one_to_the_bit() -> None:
    batch = one_batch(False)
    for how in (0.0, 0.5):
        made = objective(copy.deepcopy(model()), dropout=how)
        made.train(how == 0.0)(batch)  # evaluation leaves nothing out
        got_MH, _ = made._states(batch, [LAYERS])
        assert torch.equal(got_MH, states(model(), batch)[-1].flatten(0, 1))


def test_layers_are_left_out_as_often_as_they_should() -> None:
    """And a row that leaves one out passes it unchanged; never the first layer."""
    of = model()
    made = objective(of, dropout=0.6).train()
    batch = few_tokens(256)
    torch.manual_seed(0)
    kept_L, wrong = torch.zeros(LAYERS), 0
    for _ in range(8):
        made(batch)
        assert made._kept_LB is not None
        kept_L += made._kept_LB.float().mean(1) / 8
        after = of.model(input_ids=batch.input_ids, output_hidden_states=True).hidden_states
        through_LB = torch.stack([(a != b).flatten(1).any(1) for a, b in pairwise(after)])
        wrong += int((through_LB != made._kept_LB)[:-1].sum())  # the last state is normed
    rates = [0.6 * (2 ** (layer / (LAYERS - 1)) - 1) for layer in range(LAYERS)]
    deviation = [(rate * (1 - rate) / 2048) ** 0.5 for rate in rates]
    for layer in range(LAYERS):
        assert abs(1 - rates[layer] - kept_L[layer]) <= 4 * deviation[layer], layer
    assert kept_L[0] == 1 and rates[-1] == pytest.approx(0.6)
    assert wrong == 0


def few_tokens(rows: int) -> Batch:
    ids_BT = torch.arange(rows * 3).view(rows, 3) % TOKENS
    return Batch(ids_BT, torch.arange(3).expand(rows, -1), ids_BT >= 0, None, ())


def test_layers_that_run_again_leave_out_the_same() -> None:
    found = []
    for checkpointing in (False, True):
        of, batch = model(), one_batch(True)
        made = objective(of, dropout=0.5).train()
        if checkpointing:
            of.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        made(batch).loss.backward()
        found.append([p.grad for p in of.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_measured_agreement_is_counted() -> None:
    of, batch = model(), one_batch(True)
    made = objective(of, draft=2).eval()
    after, mask = states(of, batch), batch.loss_mask
    exit_BTV, last_BTV = (of.lm_head(after[i])[..., :TOKENS] for i in (1, LAYERS - 1))
    same_BT = exit_BTV.argmax(-1) == last_BTV.argmax(-1)
    alpha_BT = torch.minimum(exit_BTV.softmax(-1), last_BTV.softmax(-1)).sum(-1)
    output = made.measure(batch)
    assert output.metrics["agreement"] == same_BT[mask].sum()
    assert output.metrics["alpha"].item() == pytest.approx(alpha_BT[mask].sum().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            {"curriculum": "rotating"},
            "exits.curriculum: got 'rotating', expected one of rotational",
        ),
        ({"weights": "deep"}, "exits.weights: got 'deep', expected one of depth, equal"),
        ({"dropout": 1.0}, "exits: got dropout=1.0"),
        ({"every": 0}, "every=0, expected"),
        ({"layers": [6]}, r"exits: got \[6\], expected exits after 1 to 5 of this model's 6"),
        ({"draft": 9}, r"exits: got \[9\], expected"),
    ],
)
def test_what_cannot_be(how: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        objective(model(), **how)
