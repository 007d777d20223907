"""Medusa-2: heads and adapters trained together."""

import copy
import math
from pathlib import Path

import pytest
import torch
from tiny_heads import (
    DECAY,
    HEADS,
    TOKENS,
    fresh,
    llama,
    objective_of,
    one_batch,
    words,
)
from transformers import LlamaForCausalLM, PreTrainedModel

from draftsmith.train.objectives.medusa import JointMedusa, JointTraining
from draftsmith.train.run.lora import Lora
from draftsmith.train.run.optim import optimizers
from draftsmith.train.run.settings import Settings


def joint(target: PreTrainedModel, **options: object) -> JointMedusa:
    pytest.importorskip("peft")
    lora = Lora(**{"dropout": 0.0, "rank": 4, "alpha": 8} | options)  # type: ignore[arg-type]
    together = JointTraining(enabled=True, head_weight=0.5, head_lr_scale=4.0)
    how = (together, lora, Settings(out="", steps=10))
    torch.manual_seed(2)
    tokenizer = words(TOKENS)
    return JointMedusa(fresh("medusa", target), target, tokenizer, *how, loss="ce", decay=DECAY)  # type: ignore[arg-type]


def perturb(objective: JointMedusa) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in objective.adapters.named_parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
            assert "default" in name


def test_new_adapters_cost_nothing_and_learn_from_the_heads() -> None:
    batch = one_batch(True)
    objective = joint(llama())
    first = objective(batch)
    assert first.metrics["base_kl"].item() == pytest.approx(0.0, abs=1e-4)
    assert first.loss.item() == pytest.approx(0.0, abs=1e-4), "the ramp begins at 0"
    for _ in range(10):
        objective.observe({f"count_{d}": 0.0 for d in range(HEADS)})
    assert objective.steps_done == 10
    last = objective(batch)
    alone = objective_of(fresh("medusa", llama()), llama())(batch)
    assert last.loss.item() == pytest.approx(0.5 * alone.loss.item(), rel=1e-5)
    last.loss.backward()
    for name, parameter in objective.named_parameters():
        # B begins at 0, so A gets no gradient yet; the last layer's v and o see no head further on.
        lowers = "adapters" in name and parameter.any() and parameter.shape[0] == 4
        assert parameter.grad is not None, name
        assert parameter.grad.any() != bool(lowers), name


def test_the_joint_loss_is_that_of_whole_logits() -> None:
    before, after = llama().double(), llama().double()
    batch = one_batch(True)
    objective = joint(after).double()
    perturb(objective)
    objective.steps_done.fill_(4)
    output = objective(batch)
    output.loss.backward()
    got = {name: p.grad.clone() for name, p in objective.named_parameters()}
    objective.zero_grad()
    p_BTV, q_BTV = (
        model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
        ).logits[..., :TOKENS]
        for model in (before, after)
    )
    base_BT = (p_BTV.softmax(-1) * (p_BTV.log_softmax(-1) - q_BTV.log_softmax(-1))).sum(-1)
    base = base_BT[batch.loss_mask].sum()
    norm_BTH = after.model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=batch.attention_mask,
    ).last_hidden_state
    heads = objective.score(batch, norm_BTH, norm_BTH).loss  # compared with the loops above
    ramp = torch.sin(0.5 * math.pi * torch.tensor(0.4))  # in fp32, as there
    assert ramp.item() == pytest.approx(math.sin(0.2 * math.pi), rel=1e-6)
    loss = base + 0.5 * ramp * heads
    loss.backward()
    assert base.item() > 1.0
    assert output.metrics["base_kl"].item() == pytest.approx(base.item(), rel=1e-8)
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-8)
    for name, parameter in objective.named_parameters():
        # transformers' norms work in fp32 whatever comes in.
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_a_joint_state_is_heads_and_adapters_and_comes_back() -> None:
    objective, batch = joint(llama()), one_batch(True)
    perturb(objective)
    objective.steps_done.fill_(5)
    state = copy.deepcopy(objective.state_dict())
    held = sum(t.numel() for t in state.values())
    layers = 2 * 4 * (2 * 64 + 2 * 48 + 2 * 80 + 80)  # rank 4: q o, k v, gate up, down
    assert held == sum(p.numel() for p in objective.head.parameters()) + layers + HEADS + 1
    again = joint(llama())
    again.load_state_dict(state)
    assert again.eval()(batch).loss.item() == objective.eval()(batch).loss.item()
    ids_BT = batch.input_ids[:, :8]
    adapted_BTV = again._target[0](ids_BT).logits
    merged = again.merged()
    assert type(merged) is LlamaForCausalLM
    assert not any("lora" in name for name in merged.state_dict())
    torch.testing.assert_close(merged(ids_BT).logits, adapted_BTV, rtol=1e-4, atol=1e-4)
    assert (adapted_BTV - llama()(ids_BT).logits).abs().max() > 0.1


def test_dropout_of_the_adapters_follows_the_mode() -> None:
    objective, batch = joint(llama(), dropout=0.5), one_batch(True)
    perturb(objective)
    trained = [objective.train()(batch).loss.item() for _ in range(2)]
    kept = [objective.eval()(batch).loss.item() for _ in range(2)]
    assert trained[0] != trained[1] and kept[0] == kept[1]


def test_heads_learn_faster_than_adapters(tmp_path: Path) -> None:
    objective = joint(llama())
    settings = Settings(out=str(tmp_path), steps=1, lr=1e-3)
    [adamw] = optimizers(objective, settings)
    scale = {id(p): g["lr_scale"] for g in adamw.param_groups for p in g["params"]}
    assert all(scale[id(p)] == 4.0 for p in objective.head.parameters())
    assert all(scale[id(p)] == 1.0 for p in objective.adapters.parameters())
    assert len(scale) == len(list(objective.parameters()))
