"""AdaSPEC's selection and its controls, and weights by depth, against the obvious forms."""

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.sampling import SamplingParams
from draftsmith.train.losses.pure import forward_kl
from draftsmith.train.losses.token_selection import (
    ORDERS,
    Weighting,
    check,
    depth_weights,
    selected,
)
from draftsmith.train.objectives.distillation import Distillation, Losses, stages
from draftsmith.train.teachers.teachers import StateTeacher
from draftsmith.train.text.batches import Batch

VOCABULARY = 300


@pytest.fixture
def batch() -> Batch:
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(2, VOCABULARY, (4, 12), generator=draw)
    mask = torch.rand(4, 12, generator=draw) < 0.7
    mask[:, -1] = False
    return Batch(ids, torch.arange(12).expand(4, -1), mask, None, (0, 1, 2, 3))


@pytest.fixture
def reference(tiny_draft: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(3)  # or two gains may once be equal up to rounding, and either token kept
    other = type(tiny_draft)(tiny_draft.config)
    return other.eval().requires_grad_(False)


def objective_of(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    weighting: Weighting,
    reference: PreTrainedModel | None = None,
) -> Distillation:
    return Distillation(
        draft,
        StateTeacher(target, VOCABULARY),
        stages(Losses(), 10),
        vocab_size=VOCABULARY,
        warp=SamplingParams(1.0),
        weighting=weighting,
        reference=reference,
    )


KEPT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "adaspec": lambda loss, reference: loss - reference,
    "bottom": lambda loss, reference: reference - loss,
    "easy": lambda loss, reference: -reference,
}


@pytest.mark.parametrize("select", KEPT)
@pytest.mark.parametrize("keep", [0.4, 0.75, 1.0])
def test_selection_is_the_papers_formula(
    select: str,
    keep: float,
    batch: Batch,
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    reference: PreTrainedModel,
) -> None:
    """Losses from whole logits, an argsort, a sum over the kept tokens; in value and gradient."""
    tiny_draft = copy.deepcopy(tiny_draft).requires_grad_(True)
    weighting = Weighting(select=select, keep=keep, reference="somewhere")
    objective = objective_of(tiny_draft, tiny_target, weighting, reference)
    output = objective(batch)
    output.loss.backward()
    got = [p.grad.clone() for p in tiny_draft.parameters()]
    tiny_draft.zero_grad()

    def logits(model: PreTrainedModel) -> Tensor:
        return model(batch.input_ids).logits[batch.loss_mask][:, :VOCABULARY]

    loss_K = forward_kl(logits(tiny_target), logits(tiny_draft))
    reference_K = forward_kl(logits(tiny_target), logits(reference))
    order = KEPT[select](loss_K, reference_K).detach().argsort(descending=True)
    count = int(keep * len(order))
    expected = loss_K[order[:count]].sum()
    expected.backward()
    assert output.tokens == objective.tokens(batch) == count
    torch.testing.assert_close(output.loss, expected, rtol=1e-4, atol=1e-5)
    for a, parameter in zip(got, tiny_draft.parameters(), strict=True):
        torch.testing.assert_close(a, parameter.grad, rtol=1e-3, atol=1e-5)
    assert all(p.grad is None for p in reference.parameters())


def test_one_batch_of_four_is_not_two_of_two(
    batch: Batch,
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    reference: PreTrainedModel,
) -> None:
    """Selection is within a micro-batch; each keeps its own share, and both shares are counted."""
    weighting = Weighting(select="adaspec", keep=0.5, reference="somewhere")
    objective = objective_of(tiny_draft, tiny_target, weighting, reference)
    halves = [
        Batch(batch.input_ids[at], batch.position_ids[at], batch.loss_mask[at], None, batch.rows)
        for at in (slice(0, 2), slice(2, 4))
    ]
    outputs = [objective(half) for half in halves]
    for half, output in zip(halves, outputs, strict=True):
        assert output.tokens == int(0.5 * half.loss_mask.sum())
    whole = objective(batch)
    assert abs(int(whole.tokens) - sum(int(output.tokens) for output in outputs)) <= 1
    assert not torch.isclose(whole.loss, sum(output.loss for output in outputs))


def test_random_is_a_function_of_the_steps_seed(batch: Batch) -> None:
    mask_N, zero_N = batch.loss_mask.flatten(), torch.zeros(48)
    picks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        picks.append(selected("random", 9, mask_N, zero_N, zero_N))
    assert torch.equal(picks[0], picks[1]) and not torch.equal(picks[0], picks[2])
    assert all(pick.sum() == 9 and not pick[~mask_N].any() for pick in picks)


def test_ties_go_to_the_earlier_token() -> None:
    mask_N = torch.tensor([False, True, True, True])
    assert selected("easy", 2, mask_N, torch.zeros(4), torch.zeros(4)).tolist() == [0, 1, 1, 0]


def kept_tokens(alpha_T: Tensor, starts_T: Tensor, K: int) -> Tensor:
    """Drafted tokens kept by rounds that begin at each place with a given chance."""
    total = alpha_T.new_zeros(())
    for start, chance in enumerate(starts_T):
        accepted = alpha_T.new_ones(())
        for place in range(start, min(start + K, len(alpha_T))):
            accepted = accepted * alpha_T[place]
            total = total + chance * accepted
    return total


def chances_of_rounds(alpha_T: Tensor, K: int) -> Tensor:
    """The chance that a round begins at each place, by walking every pattern of verdicts."""
    places = len(alpha_T)
    starts_T = torch.zeros(places, dtype=alpha_T.dtype)
    for verdicts in product((True, False), repeat=places):
        chance = torch.stack([a if v else 1 - a for a, v in zip(alpha_T, verdicts, strict=True)])
        start = 0
        while start < places:
            starts_T[start] += chance.prod()
            run = 0
            while run < K and start + run < places and verdicts[start + run]:
                run += 1
            start += run + 1  # the rejected token, or the one after K kept ones, is the target's
    return starts_T


@pytest.mark.parametrize("K", [1, 2, 3, 7])
def test_depth_weights_are_the_derivative(K: int) -> None:
    alpha_T = torch.rand(6, generator=torch.Generator().manual_seed(K), dtype=torch.float64)
    alpha_T.requires_grad_(True)
    starts_T = chances_of_rounds(alpha_T.detach(), K)
    (expected_T,) = torch.autograd.grad(kept_tokens(alpha_T, starts_T, K), alpha_T)
    # A second row: the same stretch, begun later, after another one.
    mask_BT = torch.tensor([[True] * 6 + [False] * 3, [True, False, *[True] * 6, False]])
    alpha_BT = torch.full((2, 9), 0.5, dtype=torch.float64)
    alpha_BT[0, :6] = alpha_BT[1, 2:8] = alpha_T.detach()
    got_BT = depth_weights(alpha_BT, mask_BT, K)
    assert not got_BT[~mask_BT].any()
    torch.testing.assert_close(got_BT[0, :6], expected_T)
    torch.testing.assert_close(got_BT[1, 2:8], expected_T)


def test_depth_weights_enter_the_loss(
    batch: Batch, tiny_target: PreTrainedModel, tiny_draft: PreTrainedModel
) -> None:
    objective = objective_of(tiny_draft, tiny_target, Weighting(by_depth=3))
    p, q = (m(batch.input_ids).logits[..., :VOCABULARY] for m in (tiny_target, tiny_draft))
    alpha_BT = torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1)
    weight_BT = depth_weights(alpha_BT, batch.loss_mask, 3)
    output = objective(batch)
    expected = (forward_kl(p, q) * weight_BT).sum()
    torch.testing.assert_close(output.loss, expected)
    assert output.tokens == batch.loss_mask.sum()
    objective.observe({name: float(m / output.tokens) for name, m in output.metrics.items()})
    mean = weight_BT.sum() / output.tokens
    torch.testing.assert_close(objective(batch).loss, expected / mean)
    assert objective(batch).metrics == output.metrics, "the weights as they are"


def test_kept_is_told_before_the_step(
    batch: Batch, tiny_target: PreTrainedModel, tiny_draft: PreTrainedModel
) -> None:
    def kept(weighting: Weighting) -> int:
        return objective_of(tiny_draft, tiny_target, weighting).tokens(batch)

    tokens = int(batch.loss_mask.sum())
    assert kept(Weighting()) == tokens
    assert kept(Weighting(select="random", keep=0.4)) == int(0.4 * tokens)
    with pytest.raises(ValueError, match=rf"of the {tokens} trained tokens .* leaves none"):
        kept(Weighting(select="random", keep=0.01))


@pytest.mark.parametrize(
    ("weighting", "message"),
    [
        (Weighting(select="top"), "expected one of adaspec, bottom, easy, random"),
        (Weighting(select="random", keep=0.0), r"got 0\.0, .*in \(0, 1\]"),
        (Weighting(select="random", keep=1.5), r"got 1\.5, .*in \(0, 1\]"),
        (Weighting(select="adaspec"), "easy need one"),
        (Weighting(reference="x"), "has no use for one"),
        (Weighting(select="random", by_depth=4), "not both"),
        (Weighting(by_depth=-1), "got -1"),
    ],
)
def test_bad_weighting(weighting: Weighting, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(weighting)


def test_orders_are_documented() -> None:
    assert sorted(ORDERS) == ["adaspec", "bottom", "easy", "random"]
