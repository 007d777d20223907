"""P-EAGLE's objective against the formula, pair by pair, and the oracles of its rows.

Shapes: B rows, T positions, M places, D depths, H hidden.
"""

from typing import Any

import pytest
import torch
from tapped import llama
from tiny_eagle import BT, TOKENS, Words, batch, layer_config
from torch import Tensor

from draftsmith.models.heads.eagle import Eagle, EagleConfig
from draftsmith.models.heads.peagle import PEagle, PEagleConfig
from draftsmith.models.layers.layer import causal
from draftsmith.models.taps import target_states
from draftsmith.models.vocab import DraftVocab
from draftsmith.train.losses.pure import mixed, parse_loss
from draftsmith.train.objectives.eagle import EagleObjective, Unroll
from draftsmith.train.objectives.peagle import PEagleObjective
from draftsmith.train.teachers.states import OnlineTaps


def head_of(parallel: int = 4, *, layers: int = 2, draft_vocab: int = 48, **more: Any) -> PEagle:
    torch.manual_seed(1)
    fields: dict[str, Any] = {"taps": (1, 2), "draft_vocab": draft_vocab, "parallel": parallel}
    head = PEagle(PEagleConfig(layer_config(layers=layers), **fields, **more)).bind(llama())
    if draft_vocab < 97:
        ids_D = torch.randperm(TOKENS)[:draft_vocab].sort().values
        head.set_vocab(DraftVocab(ids_D, 97))
    return head


def build(head: Eagle, of: type = PEagleObjective, loss: str = "fkl", **options: Any) -> Any:
    target = llama()
    states = OnlineTaps(target, head.taps)
    return of(Unroll(**options), head, target, Words(), states, loss=loss)


def text_of(head: PEagle) -> tuple[Tensor, ...]:
    """What `unroll` takes, and the target's last states."""
    given, target = batch(), llama()
    inputs = {"input_ids": given.input_ids, "position_ids": given.position_ids}
    seen = target_states(target, head.taps, attention_mask=given.attention_mask, **inputs)
    return (head.fuse(seen.taps_BTF), *inputs.values(), given.attention_mask), seen


@pytest.mark.parametrize("own_masks", [False, True])
@torch.no_grad()
def test_rows_packed_are_rows_alone(own_masks: bool) -> None:
    """Each place by itself: the pairs of its document up to it, then its rows, as one text."""
    head = head_of(own_masks=own_masks)
    text, _ = text_of(head)
    states = head.unroll(*text, steps=4)
    hidden_BTH, ids_BT, at_BT, mask = text
    deeper_13 = torch.arange(1, 4)[None]
    for row in range(BT[0]):
        for t in range(BT[1] - 1):
            here = mask[row, 0, t].nonzero().flatten()
            mask_13H = head.fuse(head.mask_state).expand(1, 3, -1)
            given_1TH = torch.cat([hidden_BTH[row, here][None], mask_13H], 1)
            tokens_1T = torch.cat([ids_BT[row, here + 1][None], -deeper_13], 1)
            places_1T = torch.cat([at_BT[row, here][None], at_BT[row, t] + deeper_13], 1)
            output_1TH = head.step(given_1TH, tokens_1T, places_1T, causal())
            alone_4H = head.before_head(output_1TH)[0, len(here) - 1 :]
            packed_4H = torch.stack([state[row, t] for state in states])
            assert torch.allclose(packed_4H, alone_4H, atol=1e-5), (row, t)


@torch.no_grad()
def test_deeper_rows_change_nothing_above() -> None:
    head = head_of()
    text, _ = text_of(head)
    four, two = (head.unroll(*text, steps=steps) for steps in (4, 2))
    assert all(torch.equal(a, b) for a, b in zip(four, two, strict=False))


@pytest.mark.parametrize("packed", [True, False])
def test_rows_that_stay_are_what_they_were(packed: bool) -> None:
    """Values and gradients of the places kept, in any order; a twin in another order is seen."""
    head = head_of()
    (hidden_BTH, *rest), _ = text_of(head)
    text = (hidden_BTH.detach().double(), *rest[:2], rest[2] if packed else None)
    head.double()
    at_BM = torch.stack([torch.randperm(BT[1])[:7] for _ in range(BT[0])])
    counts = [7, 4, 3]
    going_on = [at_BM[:, :count] for count in counts]
    whole, kept = head.unroll(*text, steps=4), head.unroll(*text, steps=4, going_on=going_on)
    rows_BTH = torch.arange(BT[0])[:, None]
    picked = [whole[0], *(whole[d + 1][rows_BTH, at_BM[:, :n]] for d, n in enumerate(counts))]
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(picked, kept, strict=True))
    assert not torch.allclose(kept[1].flip(1), picked[1], atol=1e-3)
    weights = [*head.layers.parameters(), head.mask_state, head.mask_token.weight]
    upstream = [torch.randn_like(x) for x in picked]
    ours, theirs = (
        torch.autograd.grad([(x * u).sum() for x, u in zip(side, upstream, strict=True)], weights)
        for side in (kept, picked)
    )
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("loss", ["fkl", "0.9*fkl+0.1*nla", "lk"])
@pytest.mark.parametrize("keep", [1.0, 0.6])
def test_the_loss_is_the_formula_pair_by_pair(loss: str, keep: float) -> None:
    """Of the pairs drawn, of which none is untrained or of two documents."""
    head = head_of()
    objective = build(head, loss=loss, keep=keep, least=0.3, step_decay=0.9)
    torch.manual_seed(7)
    output = objective(batch())
    torch.manual_seed(7)
    at, _, pairs = zip(*objective.drawn_places(batch()), strict=True)
    text, seen = text_of(head)
    states, given = head.unroll(*text, steps=4), batch()
    ids_D = head.vocab.ids_D
    p_head, of_pair = llama().lm_head.weight[ids_D], mixed(parse_loss(loss))
    total, counts = torch.zeros(()), [0] * 4
    twin = torch.zeros(())  # the label of the depth before
    for depth in range(4):
        for row, rank in pairs[depth].nonzero().tolist():
            t = int(at[depth][row, rank])
            n = t + 1 + depth
            assert given.loss_mask[row, n]
            assert given.position_ids[row, n] == given.position_ids[row, t] + 1 + depth
            q = states[depth][row, t] @ head.head_DH.T
            p, wrong = (p_head @ seen.norm_BTG[row, at_n] for at_n in (n, n - 1))
            total = total + 0.9**depth * of_pair(p, q)
            twin = twin + 0.9**depth * of_pair(wrong, q)
            counts[depth] += 1
    assert torch.allclose(output.loss, total, rtol=1e-5)
    assert not torch.allclose(output.loss, twin, rtol=1e-3)
    assert [int(output.metrics[f"count_{depth}"]) for depth in range(4)] == counts
    assert output.tokens == given.loss_mask.sum()
    weights = [p for p in head.parameters() if p.requires_grad]
    ours, theirs = (torch.autograd.grad(x, weights) for x in (output.loss, total))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=2e-5)
    if keep == 1:  # then nothing is drawn by chance
        assert torch.allclose(output.loss, objective.measure(given).loss, rtol=1e-5)


def test_what_drops_out_stays_out() -> None:
    """Depth d has the share max(keep^d, least) of the places that go on, each of them at d - 1."""
    objective = build(head_of(5), keep=0.6, least=0.3)
    torch.manual_seed(0)
    at, _, pairs = zip(*objective.drawn_places(batch()), strict=True)
    able_B = torch.tensor([3 + 1, 5])  # places whose row 1 is trained: see `batch`
    for depth in range(1, 5):
        share = max(0.6**depth, 0.3)
        drawn_B = torch.ceil(share * able_B)
        for row in range(BT[0]):
            chosen = at[depth][row, : int(drawn_B[row])].tolist()
            assert set(chosen) <= set(at[depth - 1][row].tolist())
            assert not pairs[depth][row, int(drawn_B[row]) :].any()
            if depth == 1:
                assert pairs[1][row].sum() == drawn_B[row]
    again = objective.drawn_places(batch())[1][0]
    assert not torch.equal(at[1], again), "drawn anew at each step"


@pytest.mark.parametrize("draft_vocab", [97, 48])
def test_one_token_a_pass_is_eagle3_without_its_test(draft_vocab: int) -> None:
    head = head_of(1, draft_vocab=draft_vocab)
    plain = Eagle(EagleConfig(head.config.layer, 3, (1, 2), draft_vocab)).bind(llama())
    own = {name: x for name, x in head.state_dict().items() if "mask" not in name}
    if draft_vocab < 97:
        plain.set_vocab(head.vocab)
    plain.load_state_dict(own)
    outputs = [build(head)(batch()), build(plain, EagleObjective, steps=1)(batch())]
    assert torch.allclose(outputs[0].loss, outputs[1].loss, rtol=1e-6)
    assert outputs[0].metrics.keys() == outputs[1].metrics.keys()
    two = build(plain, EagleObjective, steps=2)(batch()).loss
    assert not torch.allclose(two, outputs[0].loss, rtol=1e-2)
    gradients = [
        torch.autograd.grad(output.loss, made.layers[0].mlp.up_proj.weight)[0]
        for output, made in zip(outputs, (head, plain), strict=True)
    ]
    assert torch.allclose(*gradients, atol=1e-6)


def test_training_raises_the_acceptance_at_every_depth() -> None:
    head = head_of(3, draft_vocab=97)
    objective = build(head, step_decay=1.0)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)

    def alphas() -> list[float]:
        metrics = objective.measure(batch()).metrics
        return [float(metrics[f"alpha_{d}"] / metrics[f"count_{d}"]) for d in range(3)]

    first, masks = alphas(), [head.mask_state.clone(), head.mask_token.weight.clone()]
    for _ in range(60):
        output = objective(batch())
        (output.loss / output.tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(b > a + 0.05 for a, b in zip(first, alphas(), strict=True)), (first, alphas())
    assert not torch.equal(masks[0], head.mask_state)
    assert not torch.equal(masks[1], head.mask_token.weight)


def test_what_does_not_fit_is_refused() -> None:
    for wrong in ({"keep": 0.1}, {"keep": 1.1}, {"least": 0.0}):
        with pytest.raises(ValueError, match="expected shares with 0 < least <= keep <= 1"):
            build(head_of(2), **wrong)
    for wrong in ({"parallel": 0}, {"norm_output": True}):
        with pytest.raises(ValueError, match="peagle: got version 3, parallel="):
            head_of(**wrong)
