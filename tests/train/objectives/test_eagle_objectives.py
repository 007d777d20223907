"""EAGLE's losses: the bounded form against whole logits, and the objectives against their formulas,
position by position.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from chunks import chunks_of
from tapped import llama
from tiny_eagle import BT, TOKENS, Words, batch, eagle
from torch import Tensor

from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.taps import target_states
from draftsmith.models.tokenizer import vocab_size
from draftsmith.models.vocab import DraftVocab
from draftsmith.train.losses import pure as losses
from draftsmith.train.losses.chunked import chunked_steps, measure_steps
from draftsmith.train.losses.pure import acceptance, divergence, mixed, parse_loss
from draftsmith.train.objectives.eagle import EagleObjective, Unroll
from draftsmith.train.teachers.states import OnlineTaps

S, N, H, G, D = 3, 14, 6, 5, 11
MIXES = [{"fkl": 1.0}, {"nla": 1.0}, {"lk": 1.0}, {"tv": 2.0}, {"fkl": 0.7, "nla": 0.3}]


def made(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    states = [torch.randn(N, H).to(dtype).requires_grad_() for _ in range(S)]
    q_head = torch.randn(D, H).to(dtype).requires_grad_()
    p_hidden, p_head = torch.randn(N, G).to(dtype), torch.randn(D, G).to(dtype)
    weight_SN = torch.rand(S, N).to(dtype) * (torch.rand(S, N) < 0.7)
    weight_SN[:, 5] = 0  # a row that nobody needs
    for step in range(S):
        weight_SN[step, : 1 + step] = 0
    return states, q_head, p_hidden, p_head, weight_SN


def whole(loss, states, q_head, p_hidden, p_head, weight_SN) -> tuple[Tensor, Tensor, Tensor]:
    """(total, loss_SN, alpha_SN) of whole logits under autograd."""
    p_logits = p_hidden @ p_head.T
    rows, alphas = [], []
    for step, state in enumerate(states):
        q_logits = state.roll(1 + step, 0) @ q_head.T  # row n is state n - 1 - step
        trained = weight_SN[step] > 0
        rows.append(loss(p_logits, q_logits) * trained)
        alphas.append(acceptance(p_logits, q_logits) * trained)
    loss_SN = torch.stack(rows)
    return (loss_SN * weight_SN).sum(), loss_SN, torch.stack(alphas)


@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_bounded_losses_are_those_of_whole_logits(mix, chunk) -> None:
    loss = mixed(mix, kl_weight=0.3)
    inputs = made()
    leaves = [*inputs[0], inputs[1]]
    want = whole(loss, *inputs)
    with chunks_of(chunk, S * D):
        found = chunked_steps([loss] * S, *inputs)
    for ours, theirs in zip(found, want, strict=True):
        assert torch.allclose(ours, theirs.detach(), atol=1e-12)
    upstream = torch.tensor(0.7, dtype=torch.float64)
    gradients = [torch.autograd.grad(x[0], leaves, upstream) for x in (found, want)]
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_each_step_may_have_a_loss_of_its_own() -> None:
    """lk's weights differ by step."""
    own = [divergence("lk", kl_weight=weight) for weight in (0.1, 0.5, 1.0)]
    inputs = made()
    _, loss_SN, _ = chunked_steps(own, *inputs)
    for step, loss in enumerate(own):
        assert torch.allclose(loss_SN[step], whole(loss, *inputs)[1][step].detach(), atol=1e-12)


def test_only_wanted_gradients_are_formed() -> None:
    states, q_head, *rest = made(torch.float32)
    total, *_ = chunked_steps([losses.forward_kl] * S, states, q_head.detach(), *rest)
    total.backward()
    assert q_head.grad is None
    assert all(state.grad is not None for state in states)
    with torch.no_grad():
        assert not chunked_steps([losses.forward_kl] * S, states, q_head, *rest)[0].requires_grad


def test_bf16_products_under_autocast() -> None:
    states, q_head, *rest = made(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        total, *_ = chunked_steps([losses.forward_kl] * S, states, q_head, *rest)
    total.backward()
    exact, *_ = whole(losses.forward_kl, *made())
    assert total.dtype == torch.float32
    assert abs(total.item() - exact.item()) < 0.02 * exact.item()
    assert q_head.grad is not None


def test_a_batch_without_trained_rows_gives_zeros() -> None:
    states, q_head, p_hidden, p_head, weight_SN = made()
    given = (states, q_head, p_hidden, p_head, weight_SN * 0)
    total, *_ = chunked_steps([losses.forward_kl] * S, *given)
    total.backward()
    assert total == 0
    assert not states[0].grad.any()


def test_what_does_not_fit_is_refused() -> None:
    states, q_head, p_hidden, p_head, weight_SN = made()
    loss = [losses.forward_kl] * S
    with pytest.raises(ValueError, match=r"weight: got shape .*q_hidden of \[14, 14\] rows"):
        chunked_steps(loss, states[:2], q_head, p_hidden, p_head, weight_SN)
    with pytest.raises(ValueError, match="logits: got 9 of the target and 11 of the draft"):
        chunked_steps(loss, states, q_head, p_hidden, p_head[:9], weight_SN)
    with pytest.raises(ValueError, match="weights above 0"):
        parse_loss("0*fkl")
    with pytest.raises(ValueError, match="divergence: got 'kl'"):
        mixed({"kl": 1.0})


def test_measured_acceptance_counts_what_is_outside() -> None:
    """By the definition: a distribution over the whole vocabulary, 0 where the head drafts none."""
    states, _, p_hidden, _, weight_SN = made()
    ids_D = torch.tensor([1, 4, 5, 9])
    q_head, p_head_VG = torch.randn(4, H).double(), torch.randn(D, G).double()
    loss = [losses.forward_kl] * S
    _, alpha_SN, top1_SN = measure_steps(
        loss, states, q_head, p_hidden, p_head_VG, ids_D, weight_SN
    )
    p_NV = (p_hidden @ p_head_VG.T).softmax(-1)
    for step in range(S):
        q_NV = torch.zeros(N, D, dtype=torch.float64)
        q_NV[:, ids_D] = (states[step].roll(1 + step, 0) @ q_head.T).softmax(-1).detach()
        trained = weight_SN[step] > 0
        alpha = torch.minimum(p_NV, q_NV).sum(-1) * trained
        assert torch.allclose(alpha_SN[step], alpha, atol=1e-12)
        agree = (p_NV.argmax(-1) == q_NV.argmax(-1)) & trained
        assert torch.equal(top1_SN[step].bool(), agree)


# --- the objectives ------------------------------------------------------------------------------


def head_of(version: int, draft_vocab: int) -> Eagle:
    head = eagle(llama(), version=version, draft_vocab=draft_vocab)
    if version == 3 and draft_vocab < 97:
        ids_D = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))[:draft_vocab]
        head.set_vocab(DraftVocab(ids_D.sort().values, 97))
    return head


def build(head: Eagle, loss: str = "fkl", **options) -> EagleObjective:
    target = llama()
    states = OnlineTaps(target, head.taps)
    return EagleObjective(Unroll(**options), head, target, Words(), states, loss=loss)


class Pairs:
    """Every trained (row, t, step) with the logits of both sides, one by one."""

    def __init__(self, head: Eagle, steps: int, noise_BTU: Tensor | float = 0.0) -> None:
        self.batch, target = batch(), llama()
        inputs = {"input_ids": self.batch.input_ids, "position_ids": self.batch.position_ids}
        seen = target_states(target, head.taps, attention_mask=self.batch.attention_mask, **inputs)
        self.norm_BTG = seen.norm_BTG
        args = (*inputs.values(), self.batch.attention_mask)
        self.states = head.unroll(head.fuse(seen.taps_BTF + noise_BTU), *args, steps=steps)
        self.ids_D = head.vocab.ids_D[head.vocab.ids_D < TOKENS]
        self.q_head, self.p_head = head.head_DH[: len(self.ids_D)], target.lm_head.weight[:TOKENS]
        self.steps = steps

    def __iter__(self):
        position, mask = self.batch.position_ids, self.batch.loss_mask
        for step in range(self.steps):
            for row in range(BT[0]):
                for t in range(BT[1]):
                    n = t + 1 + step
                    if n >= BT[1] or not mask[row, n]:
                        continue
                    if position[row, n] != position[row, t] + 1 + step:
                        continue  # another document
                    q = self.states[step][row, t] @ self.q_head.T
                    p = self.p_head @ self.norm_BTG[row, n]
                    yield step, (row, t), p, q


EAGLE3 = [
    *({"loss": name} for name in ("fkl", "nla", "lk")),
    {"loss": "0.9*fkl+0.1*nla"},
    {"loss": "fkl", "step_decay": 0.5},
]


@pytest.mark.parametrize("options", EAGLE3, ids=str)
@pytest.mark.parametrize("draft_vocab", [97, 48])
@pytest.mark.parametrize("steps", [1, 4])
def test_eagle3_is_the_formula_pair_by_pair(options, draft_vocab, steps) -> None:
    head = head_of(3, draft_vocab)
    objective = build(head, steps=steps, **options)
    output = objective(batch())
    loss, decay = mixed(parse_loss(options["loss"])), options.get("step_decay", 0.8)
    pairs = Pairs(head, steps)
    total, counts, alphas = torch.zeros(()), [0] * steps, [0.0] * steps
    for step, _, p, q in pairs:
        p = p[pairs.ids_D]
        total = total + decay**step * loss(p, q)
        counts[step] += 1
        alphas[step] += acceptance(p, q).item()
    assert torch.allclose(output.loss, total, rtol=1e-5)
    assert output.tokens == batch().loss_mask.sum()
    name = "alpha" if draft_vocab == 97 else "restricted_alpha"
    for step in range(steps):
        assert output.metrics[f"count_{step}"] == counts[step]
        assert abs(output.metrics[f"{name}_{step}"] - alphas[step]) < 1e-4
    weights = [p for p in head.parameters() if p.requires_grad]
    ours = torch.autograd.grad(output.loss, weights)
    theirs = torch.autograd.grad(total, weights)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("loss", ["fkl", "lk"])
def test_mtp_is_the_formula_pair_by_pair(loss) -> None:
    """FastMTP's weights over the depths, by the target's LM head; no noise, no loss on states."""
    head = eagle(llama(), version=1, mtp=True)
    output = build(head, steps=3, step_decay=0.6, loss=loss)(batch())
    pairs, totals = Pairs(head, 3), []
    for decay, shift in ((0.6, 0), (0.8, 0), (0.6, 1)):
        total = torch.zeros(())
        for step, (row, t), p, q in pairs:
            if shift:  # a twin: what is compared lies a token too early
                p = pairs.p_head @ pairs.norm_BTG[row, t + step]
            total = total + decay**step * mixed(parse_loss(loss))(p, q)
        totals.append(total)
    assert torch.allclose(output.loss, totals[0], rtol=1e-5)
    assert not any(torch.allclose(output.loss, wrong, rtol=1e-4) for wrong in totals[1:])
    weights = list(head.parameters())
    theirs = torch.autograd.grad(totals[0], weights)
    for a, b in zip(torch.autograd.grad(output.loss, weights), theirs, strict=True):
        assert torch.allclose(a, b, atol=2e-5)
    assert output.metrics.keys() == {f"{n}_{s}" for n in ("alpha", "count") for s in range(3)}


@pytest.mark.parametrize(("version", "draft_vocab"), [(1, 0), (3, 97), (3, 48)])
def test_measuring_is_over_the_whole_vocabulary(version, draft_vocab) -> None:
    """Without noise, on every pair; alpha is 1 - TV with nothing drafted outside."""
    head, steps = head_of(version, draft_vocab), 3
    objective = build(head, steps=steps)
    output = objective.measure(batch())
    pairs = Pairs(head, steps)
    want = {f"{name}_{s}": 0.0 for name in ("alpha", "top1", "count") for s in range(steps)}
    for step, _, p, q in pairs:
        q_V = torch.zeros(TOKENS)
        q_V[pairs.ids_D] = q.softmax(-1).detach()
        want[f"alpha_{step}"] += torch.minimum(p.softmax(-1), q_V).sum().item()
        want[f"top1_{step}"] += float(p.argmax() == q_V.argmax())
        want[f"count_{step}"] += 1
    assert output.metrics.keys() == want.keys()
    for name, value in want.items():
        assert abs(output.metrics[name] - value) < 1e-4, name
    assert want["count_0"] > want["count_2"] > 0


def test_a_measured_loss_is_the_trained_one() -> None:
    for objective in (
        build(head_of(3, 48), steps=3),
        build(head_of(1, 0), steps=3, noise=0.0),
    ):
        assert torch.allclose(objective(batch()).loss, objective.measure(batch()).loss, rtol=1e-5)


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_eagle1_is_the_formula_pair_by_pair(noise) -> None:
    head = head_of(1, 0)
    objective = build(head, steps=5, noise=noise)
    torch.manual_seed(7)
    output = objective(batch())
    torch.manual_seed(7)
    uniform_BTU = torch.rand(*BT, 32) - 0.5
    lengths_BT = torch.tensor([[6] * 6 + [4] * 4, [8] * 10])
    pairs = Pairs(head, 1, uniform_BTU * noise * 512 / lengths_BT.unsqueeze(2))
    total = torch.zeros(())
    for _, (row, t), p, q in pairs:
        ahead = pairs.norm_BTG[row, t + 1]
        total = total + F.smooth_l1_loss(pairs.states[0][row, t], ahead)
        total = total + 0.1 * losses.forward_kl(p, q)
    assert torch.allclose(output.loss, total, rtol=1e-5)
    assert output.metrics.keys() == {"alpha_0", "count_0"}
    weights = list(head.parameters())
    for a, b in zip(
        torch.autograd.grad(output.loss, weights), torch.autograd.grad(total, weights), strict=True
    ):
        assert torch.allclose(a, b, atol=2e-5)


def test_a_seed_makes_the_noise_again() -> None:
    objective = build(head_of(1, 0), steps=1)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(objective(batch()).loss.item())
    assert found[0] == found[1] != found[2]


def test_lk_weighs_its_kl_by_the_last_steps_alpha() -> None:
    head = head_of(3, 48)
    objective = build(head, steps=2, loss="lk")
    alphas = {"restricted_alpha_0": 0.5, "restricted_alpha_1": 0.125}
    objective.observe({"count_0": 0.5, "count_1": 0.25} | alphas)
    assert objective.mean_alpha_D.tolist() == [1.0, 0.5]
    pairs, want = Pairs(head, 2), 0.0
    for step, _, p, q in pairs:
        weight = math.exp(-3.0 * (1.0, 0.5)[step])
        want += 0.8**step * losses.lk(p[pairs.ids_D], q, kl_weight=weight).item()
    assert abs(objective(batch()).loss.item() - want) < 1e-5 * want
    assert "mean_alpha_D" in objective.state_dict()


def test_a_frozen_lm_head_gets_no_gradient_and_the_target_none() -> None:
    head = head_of(3, 48)
    head.lm_head.requires_grad_(False)
    objective = build(head, steps=2)
    objective(batch()).loss.backward()
    assert head.lm_head.weight.grad is None
    assert all(p.grad is not None for name, p in head.named_parameters() if "lm_head" not in name)
    assert not any("target" in name for name, _ in objective.named_parameters())


def test_training_raises_the_acceptance_at_every_depth() -> None:
    head = head_of(3, 97)
    objective = build(head, steps=3)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)

    def alphas() -> list[float]:
        metrics = objective.measure(batch()).metrics
        return [float(metrics[f"alpha_{s}"] / metrics[f"count_{s}"]) for s in range(3)]

    first = alphas()
    for _ in range(60):
        output = objective(batch())
        (output.loss / output.tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(b > a + 0.05 for a, b in zip(first, alphas(), strict=True)), (first, alphas())


def test_wrong_settings_are_refused() -> None:
    head = head_of(3, 48)
    for options, words in (
        ({"steps": 0, "loss": "fkl"}, "steps: got 0"),
        ({"steps": 1, "loss": "kl"}, "loss: got 'kl'"),
        ({"steps": 1, "loss": "ce"}, "divergence: got 'ce'"),
        ({"steps": 1, "loss": "fkl", "step_decay": 0.0}, "step_decay: got 0.0"),
    ):
        with pytest.raises(ValueError, match=words):
            build(head, **options)
    assert vocab_size(Words()) == TOKENS
