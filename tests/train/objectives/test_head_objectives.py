"""What heads are trained for, against a transcription by loops, and on a text where every token
ahead is known.
"""

from pathlib import Path

import pytest
import torch
from tiny_heads import (
    ALPHA,
    DECAY,
    HEADS,
    KINDS,
    ROWS,
    TOKENS,
    fresh,
    llama,
    objective_of,
    one_batch,
    text,
    words,
)
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from draftsmith.decode.drafters.hydra import HydraDrafter
from draftsmith.decode.drafters.medusa import MedusaDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.heads.hydra import Hydra, HydraConfig
from draftsmith.models.heads.medusa import Medusa
from draftsmith.models.layers.layer import causal
from draftsmith.models.taps import NORM
from draftsmith.train.losses.pure import divergence, lk_weight
from draftsmith.train.objectives.heads import HeadObjective
from draftsmith.train.run.folder import Run
from draftsmith.train.run.launch import start
from draftsmith.train.run.loop import fit
from draftsmith.train.run.settings import Settings
from draftsmith.train.teachers.states import OnlineTaps
from draftsmith.train.text.batches import Batch


def documents(positions_T: Tensor) -> list[range]:
    starts = [t for t, position in enumerate(positions_T.tolist()) if position == 0]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(positions_T)], strict=True)]


def base_states(head: Medusa | Hydra, norm_BTH: Tensor, batch: Batch) -> Tensor:
    """Hydra++'s layer over each document alone."""
    if not isinstance(head, Hydra):
        return norm_BTH
    rows = []
    for norm_TH, positions_T in zip(norm_BTH, batch.position_ids, strict=True):
        parts = [
            head.prefix(norm_TH[None, d.start : d.stop], torch.arange(len(d))[None], causal())[0]
            for d in documents(positions_T)
        ]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def q_state(head: Medusa | Hydra, depth: int, base_TH: Tensor, ids_T: Tensor, t: int) -> Tensor:
    if isinstance(head, Medusa):
        return head.states(base_TH[t])[depth]
    return head.state(depth, base_TH[t], head.embed(ids_T[t + 1 : t + 2 + depth]))


def by_loops(
    head: Medusa | Hydra, target: PreTrainedModel, batch: Batch, loss: str
) -> dict[str, Tensor]:
    """Every pair (t, d) one by one, from whole logits."""
    norm_BTH = OnlineTaps(target, (NORM,))(batch).norm_BTG
    base_BTH = base_states(head, norm_BTH, batch)
    p_head_VH = target.lm_head.weight[:TOKENS]
    sums: dict[str, Tensor] = {"loss": torch.zeros((), dtype=norm_BTH.dtype)}
    for depth in range(HEADS):
        sums |= {f"{name}_{depth}": torch.tensor(0.0) for name in ("alpha", "top1", "count")}
    for row, ids_T in enumerate(batch.input_ids):
        for document in documents(batch.position_ids[row]):
            for t in document:
                for depth in range(HEADS):
                    goal = t + 2 + depth
                    if goal not in document or not batch.loss_mask[row, goal - 1]:
                        continue
                    q_state_H = q_state(head, depth, base_BTH[row], ids_T, t)
                    p_state_H = norm_BTH[row, t + 1 + depth]
                    q_V = q_state_H @ head.head_VH(depth)[:TOKENS].T
                    p_V = p_state_H @ p_head_VH.T
                    if loss == "ce":
                        cost = -q_V.log_softmax(-1)[ids_T[goal]]
                    else:
                        cost = divergence(loss, kl_weight=lk_weight(torch.tensor(ALPHA)))(p_V, q_V)
                    sums["loss"] = sums["loss"] + DECAY**depth * cost
                    sums[f"alpha_{depth}"] += torch.minimum(p_V.softmax(-1), q_V.softmax(-1)).sum()
                    sums[f"top1_{depth}"] += float(p_V.argmax() == q_V.argmax())
                    sums[f"count_{depth}"] += 1
    return {name: value.detach() if name != "loss" else value for name, value in sums.items()}


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("loss", ["ce", "fkl", "lk"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_loops(kind: str, loss: str, packing: bool) -> None:
    target, batch = llama().double(), one_batch(packing)
    head = fresh(kind, target).double()
    objective = objective_of(head, target, loss=loss)
    assert objective.vocab_size == TOKENS < ROWS
    objective.mean_alpha_D.fill_(ALPHA)  # of the step before: what `lk` weighs its KL by
    output = objective(batch)
    output.loss.backward()
    got = {name: p.grad.clone() for name, p in head.named_parameters()}
    head.zero_grad()
    expected = by_loops(head, target, batch, loss)
    expected["loss"].backward()
    assert output.tokens == batch.loss_mask.sum()
    assert output.loss.item() == pytest.approx(expected["loss"].item(), rel=1e-9)
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-8, atol=1e-9, msg=name)
    measured = objective.eval().measure(batch)
    assert measured.loss.item() == pytest.approx(expected["loss"].item(), rel=1e-9)
    for name, value in measured.metrics.items():
        assert value.item() == pytest.approx(expected[name].item(), rel=1e-5), name
    assert set(measured.metrics) == set(expected) - {"loss"}
    in_training = {"count"} if loss == "ce" else {"count", "alpha"}
    assert {name.split("_")[0] for name in output.metrics} == in_training
    assert 0 < measured.metrics["count_2"] < measured.metrics["count_0"] < output.tokens


@pytest.mark.parametrize("length", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_shorter_than_the_heads_reach(kind: str, length: int) -> None:
    """Of five heads only those have pairs, and gradients, whose tokens the text still has: none of
    two tokens, one of three.
    """
    target = llama()
    ids_BT = torch.arange(3, 3 + 2 * length).view(2, length)
    mask_BT = torch.ones(2, length, dtype=torch.bool)
    mask_BT[:, -1] = False
    batch = Batch(ids_BT, torch.arange(length).expand(2, -1), mask_BT, None, (0, 1))
    head = fresh(kind, target, heads=5)
    output = objective_of(head, target, loss="fkl")(batch)
    output.loss.backward()
    assert output.tokens == 2 * (length - 1)
    counts = [int(output.metrics[f"count_{depth}"]) for depth in range(5)]
    assert counts == [2 * max(0, length - 2 - depth) for depth in range(5)]
    assert (output.loss > 0) == (length > 2)
    for depth in range(5):
        gradient = head.output(depth).weight.grad
        assert (gradient is not None and bool(gradient.any())) == (counts[depth] > 0)


def counting_target(size: int = 31) -> PreTrainedModel:
    """Predicts x + 1 mod `size`, since its layers add nothing: f_t is the embedding of x_t."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        eos_token_id=None,
    )
    target = LlamaForCausalLM(config).eval().requires_grad_(False)
    layer = target.model.layers[0]
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    table = torch.linalg.qr(torch.randn(32, 32))[0][:size]
    target.model.embed_tokens.weight.copy_(table)
    target.lm_head.weight.copy_(table.roll(1, 0))
    return target


def counting_text(size: int = 31) -> Batch:
    draw = torch.Generator().manual_seed(0)
    first_B1 = torch.randint(0, size, (16, 1), generator=draw)
    ids_BT = (first_B1 + torch.arange(20)) % size
    mask_BT = torch.ones(ids_BT.shape, dtype=torch.bool)
    mask_BT[:, -1] = False
    return Batch(ids_BT, torch.arange(20).expand_as(ids_BT), mask_BT, None, ())


def off_by_one(objective: HeadObjective) -> None:
    """The twin: every head is taught the token after the one it is to predict."""
    rightly = objective._compared

    def wrongly(batch: Batch, *states: Tensor):
        later = Batch(
            batch.input_ids.roll(-1, dims=1),
            batch.position_ids,
            batch.loss_mask & batch.loss_mask.roll(-1, dims=1),
            None,
            (),
        )
        for right, at in zip(rightly(batch, *states), rightly(later, *states), strict=True):
            yield *right[:2], *at[2:]

    objective._compared = wrongly  # type: ignore[method-assign]


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_learn_to_count_and_the_twin_does_not(kind: str, twin: bool) -> None:
    """Trained for 30 steps; then judged by the text and by decoding, not by the objective."""
    target, batch = counting_target(), counting_text()
    head = fresh(kind, target, heads=4)
    objective = objective_of(head, target, decay=1.0)
    if twin:
        off_by_one(objective)
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-2)
    for _ in range(30):
        output = objective(batch)
        (output.loss / output.tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    head.eval()
    ids_BT = batch.input_ids
    norm_BTH = OnlineTaps(target, (NORM,))(batch).norm_BTG
    base_BTH = base_states(head, norm_BTH, batch)
    for depth in range(4):
        right = [
            bool((q_state(head, depth, base_TH, ids_T, t) @ head.head_VH(depth).T).argmax() == goal)
            for base_TH, ids_T in zip(base_BTH, ids_BT, strict=True)
            for t, goal in enumerate(ids_T[2 + depth :].tolist())
        ]
        share = sum(right) / len(right)
        assert share < 0.1 if twin else share > 0.9, (depth, share)
    made = HydraDrafter if isinstance(head, Hydra) else MedusaDrafter
    drafter = made(head, target, 31)  # type: ignore[arg-type]
    decoder = Decoder(target, words(31), drafter, K=4, batch_size=4)
    prompts = [[a, a + 1, a + 2] for a in (2, 9, 20)]
    params = SamplingParams(temperature=0.0, max_new_tokens=21)
    answers = decoder.generate(prompts, params)
    emitted = sum(made.counters.emitted for made in answers)
    rounds = sum(made.counters.rounds for made in answers)
    assert [a.tokens[0] for a in answers] == [5, 12, 23]
    assert emitted / rounds < 1.2 if twin else emitted / rounds > 4.5


@pytest.mark.parametrize("kind", KINDS)
def test_one_batch_of_eight_equals_four_of_two(kind: str, tmp_path: Path) -> None:
    target = llama()
    heads, logs = [], []
    for batch_size, accumulation in ((8, 1), (2, 4)):
        head = fresh(kind, target)
        settings = Settings(
            out=str(tmp_path / f"{batch_size}"),
            steps=3,
            batch_size=batch_size,
            accumulation=accumulation,
            optimizer="sgd",
            momentum=0.0,
            lr=0.1,
            dtype="float32",
            eval_every=0,
            save_every=0,
        )
        run = Run(settings.out, "steps: 3\n", main=True)
        objective = objective_of(head, target, loss="fkl")
        fit(start(settings), objective, text(batch_size=batch_size), settings, run)
        heads.append(head)
        logs.append(objective.mean_alpha_D)
        run.close()
    torch.testing.assert_close(logs[0], logs[1], rtol=1e-4, atol=1e-5)
    assert logs[0].min() > 0
    for a, b in zip(heads[0].parameters(), heads[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_noise_and_dropout_are_for_training_alone() -> None:
    target, batch = llama(), one_batch(True)
    head = fresh("hydra", target)
    objective = objective_of(head, target, noise=5.0)
    noisy = [objective(batch).loss.item() for _ in range(2)]
    objective.eval()
    plain = [objective(batch).loss.item() for _ in range(2)]
    assert noisy[0] != noisy[1] and plain[0] == plain[1]
    assert plain[0] == objective_of(head, target)(batch).loss.item()
    norm_BTH = OnlineTaps(target, (NORM,))(batch).norm_BTG
    seen: list[Tensor] = []
    head.prefix = lambda norm, *_: seen.append(norm) or norm  # type: ignore[method-assign]
    objective.train()(batch)
    reach_BT1 = 5.0 / (batch.lengths.unsqueeze(2) * norm_BTH.shape[2]).sqrt()
    distance_BTH = (seen[0] - norm_BTH).abs() / reach_BT1
    assert 0.95 < distance_BTH.max() <= 1.0001
    assert distance_BTH.mean().item() == pytest.approx(1 / 2, rel=0.1)
    assert 0.45 < (seen[0] > norm_BTH).float().mean() < 0.55, "to both sides"


def test_a_bias_that_the_loss_would_not_see_is_refused() -> None:
    target = llama()
    config = HydraConfig(hidden=32, rows=ROWS, heads=HEADS, head_bias=True)
    with pytest.raises(AssertionError, match="weights alone"):
        objective_of(Hydra(config).init_from(target), target)


def test_an_unknown_loss_is_named_at_once() -> None:
    target = llama()
    with pytest.raises(ValueError, match="got 'soft', expected one of fkl"):
        objective_of(fresh("medusa", target), target, loss="soft")
