"""What block drafters are trained for, against the formula position by position; the anchors drawn;
and the noise that explains a text.

Shapes: B rows, T positions, M anchors, n depths, N draws, V vocabulary.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_drafts import FORMS
from chi_square import chi_square_p
from tiny_heads import ROWS, TOKENS, llama, one_batch, words
from torch import Tensor

from draftsmith.models.heads.block import Block, BlockConfig
from draftsmith.models.layers.layer import layer_like
from draftsmith.models.taps import target_states
from draftsmith.train.losses.pure import acceptance, mixed, parse_loss
from draftsmith.train.objectives import block as objectives
from draftsmith.train.objectives.block import Anchors, BlockObjective, draw, posterior_race
from draftsmith.train.teachers.states import OnlineTaps
from draftsmith.train.text.batches import Batch

LEVELS, ALL = 3, 24  # anchors: rows are of 24 tokens


def fresh(name: str) -> Block:
    """A drafter with every weight away from where it begins."""
    about = {key: value for key, value in FORMS[name].items() if key not in ("layers", "kind")}
    target = llama()
    config = BlockConfig(layer_like(target), (1, 2), LEVELS, rank=8, **about)
    torch.manual_seed(1)
    head = Block(config).init_from(target)
    with torch.no_grad():
        for part, parameter in head.named_parameters():
            parameter.add_((0.3 if "light" in part else 0.05) * torch.randn_like(parameter))
    return head


def objective_of(head: Block, loss: str = "fkl", **anchors: Any) -> BlockObjective:
    target = llama()
    given = Anchors(**{"count": ALL} | anchors), head, target, words(TOKENS)
    return BlockObjective(*given, OnlineTaps(target, head.taps), loss=loss)


def bare(states_BRH: Tensor) -> Tensor:
    """What rows guess without noise."""
    return (states_BRH @ llama().lm_head.weight[:TOKENS].T).argmax(-1)


def pairs(head: Block, batch: Batch) -> Any:
    """Of every trained (row, anchor, depth): these, the target's logits, the drafter's with and
    without its light head, the token, how far apart their states are: block by block.
    """
    target = llama()
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    seen = target_states(target, head.taps, attention_mask=batch.attention_mask, **inputs)
    p_BTV = seen.norm_BTG @ target.lm_head.weight[:TOKENS].T
    wide_VI = torch.cat([rows[:TOKENS] for rows in head.heads], 1)
    for row, ids_T in enumerate(batch.input_ids):
        text = seen.taps_BTF[row, None], ids_T[None], batch.position_ids[row, None]
        for anchor in range(len(ids_T) - 1):
            if batch.position_ids[row, anchor] == 0:
                continue
            base, lit = head.drafted(*text, torch.tensor([[anchor]]), bare)
            for depth in range(min(LEVELS, len(ids_T) - 1 - anchor)):
                if not batch.loss_mask[row, anchor + depth]:
                    break
                q_V, u_V = wide_VI @ lit[0, 0, depth], wide_VI[:, :32] @ base[0, 0, depth]
                at = row, anchor, depth
                states = lit[0, 0, depth, :32], seen.norm_BTG[row, anchor + depth]
                apart, p_V = F.smooth_l1_loss(*states), p_BTV[row, anchor + depth]
                yield at, p_V, q_V, u_V, int(ids_T[anchor + depth + 1]), apart


CASES: list[tuple[str, dict[str, Any]]] = [
    ("dspark", {}),
    ("dspark", {"loss": "0.1*ce+0.9*tv", "base": 0.5}),
    ("dflash", {"loss": "ce", "base": 0.5}),  # it has no light head: no share
    ("domino", {"loss": "ce", "base": 1.0, "decay": 0.0}),
    ("treeflash", {"loss": "tv", "base": 0.25, "decay": 1.0}),
    ("rnn", {"loss": "0.5*fkl+0.5*ce", "base": 0.5}),
    ("noise-path", {"base": 0.3}),
    ("noise-path", {"base": 0.3, "state": 2.0}),
    ("dflash", {"loss": "ce", "state": 0.5, "decay": 1.0}),
    ("noise-markov", {"base": 0.5}),
]


@pytest.mark.parametrize(("name", "given"), CASES, ids=str)
def test_the_loss_is_the_formula_pair_by_pair(
    name: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On packed documents, with the gradient; and what is counted."""
    monkeypatch.setattr(objectives, "posterior_race", lambda p_NV, tokens_N: 0 * p_NV)
    head, batch = fresh(name), one_batch(packing=True)
    objective = objective_of(head, **given)
    output = objective(batch)
    parts = parse_loss(given.get("loss", "fkl"))
    share = 0.0 if name == "dflash" else given.get("base", 0.0)
    of_law = mixed({key: weight for key, weight in parts.items() if key != "ce"} or {"tv": 0.0})

    def compared(p_V: Tensor, q_V: Tensor, token: int) -> Tensor:
        own = of_law(p_V, q_V) if set(parts) != {"ce"} else torch.zeros(())
        return own - parts.get("ce", 0.0) * q_V.log_softmax(-1)[token]

    depth_n = [math.exp(-k / (given.get("decay", 4.0) or math.inf)) for k in range(LEVELS)]
    sums = {f"{key}_{k}": 0.0 for key in ("count", "alpha", "top1") for k in range(LEVELS)}
    losses, can = {}, [0] * len(batch.input_ids)
    for (row, anchor, depth), p_V, q_V, u_V, token, apart in pairs(head, batch):
        can[row] += depth == 0
        both = (1 - share) * compared(p_V, q_V, token) + share * compared(p_V, u_V, token)
        both += given.get("state", 0.0) * apart
        losses[row, anchor, depth] = depth_n[depth] / sum(depth_n) * both
        sums[f"count_{depth}"] += 1
        sums[f"alpha_{depth}"] += acceptance(p_V, q_V).item()
        sums[f"top1_{depth}"] += float(p_V.argmax() == q_V.argmax())
    tokens = batch.loss_mask.sum(1).tolist()
    total = sum(loss * tokens[row] / can[row] for (row, *_), loss in losses.items())
    assert torch.allclose(output.loss, total, rtol=1e-5)
    assert output.tokens == sum(tokens)
    measured = objective.measure(batch)
    assert torch.allclose(measured.loss, output.loss.detach(), rtol=1e-5)
    assert measured.metrics.keys() == sums.keys()
    for key, value in sums.items():
        assert measured.metrics[key].item() == pytest.approx(value, abs=1e-3), key
        if "top1" not in key and not (key.startswith("alpha") and set(parts) == {"ce"}):
            assert output.metrics[key].item() == pytest.approx(value, abs=1e-3), key
    weights = [parameter for parameter in head.parameters()]
    ours, theirs = (
        torch.autograd.grad(loss, weights, allow_unused=True) for loss in (output.loss, total)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None) or not (mine if other is None else other).any()
        if mine is not None and other is not None:
            assert torch.allclose(mine, other, atol=1e-4 * max(1, other.abs().max()))


def test_pairs_end_with_their_document() -> None:
    """What a naive draw, which only looks at positions, would train across two documents."""
    batch = one_batch(packing=True)
    drawn = draw(batch, ALL, LEVELS)
    wanted = {at for at, *_ in pairs(fresh("dspark"), batch)}
    got = {
        (row, int(drawn.at_BM[row, place]), depth)
        for row, place, depth in drawn.pair_BMn.nonzero().tolist()
    }
    assert got == wanted
    ahead = {(row, anchor, depth + 1) for row, anchor, depth in got if depth + 1 < LEVELS}
    crossing = {at for at in ahead - got if at[1] + at[2] + 1 < batch.input_ids.shape[1]}
    assert len(crossing) > 5


def test_the_base_loses_its_share_step_by_step() -> None:
    objective, batch = objective_of(fresh("dspark"), base=0.8, base_ends=4), one_batch(packing=True)
    whole, none = (objective_of(objective.head, base=b)(batch).loss for b in (0.8, 0.0))
    for step in range(6):
        share = max(0.0, 1 - step / 4)
        assert torch.allclose(objective(batch).loss, share * whole + (1 - share) * none, rtol=1e-5)
        objective.observe({})
    again = objective_of(objective.head, base=0.8, base_ends=4)
    again.load_state_dict(objective.state_dict())  # as a run that goes on
    assert torch.allclose(again(batch).loss, none, rtol=1e-5)


def test_drawn_anchors_stand_for_all() -> None:
    """Each is as likely; their weights are the row's tokens, however few are asked for."""
    torch.manual_seed(0)
    batch = one_batch(packing=True)
    can_BT = objectives.trainable(batch)
    for count, draws in ((1, 300), (4, 300), (ALL, 1)):
        weight_BT = torch.zeros(can_BT.shape)
        for _ in range(draws):
            drawn = draw(batch, count, LEVELS)
            real_BM = drawn.weight_BM1[..., 0] > 0
            each = drawn.weight_BM1.expand_as(drawn.pair_BMn)[..., 0]
            weight_BT.scatter_add_(1, drawn.at_BM, each.float())
            assert torch.allclose(drawn.weight_BM1.sum((1, 2)), batch.loss_mask.sum(1).float())
            assert torch.equal(real_BM.sum(1), can_BT.sum(1).clamp(max=count))
            assert all(len(set(row.tolist())) == len(row) for row in drawn.at_BM)
        assert not weight_BT[~can_BT].any()
        for row, can_T in enumerate(can_BT):
            counts = weight_BT[row, can_T]
            counts = counts / counts.sum() * draws * min(count, len(counts))
            assert chi_square_p(counts, torch.full(counts.shape, 1 / len(counts))) > 1e-4


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 11, ALL])
def test_measured_anchors_are_spread_evenly(count: int) -> None:
    batch = one_batch(packing=True)
    drawn = draw(batch, count, LEVELS, evenly=True)
    for row, can_T in enumerate(objectives.trainable(batch)):
        places = (can_T.cumsum(0) - 1)[drawn.at_BM[row][drawn.weight_BM1[row, :, 0] > 0]]
        many = int(can_T.sum())
        assert len(places) == min(count, many)
        gaps = places.diff()
        assert not len(gaps) or gaps.max() - gaps.min() <= 1
        assert abs((places.float().mean() - (many - 1) / 2).item()) <= 1, "about the middle"


# --- the noise that explains a text ---------------------------------------------------------------

P_V = torch.tensor([0.5, 0.3, 0.15, 0.05, 1e-12])


def explains(race_NV: Tensor, token_N: Tensor) -> bool:
    """Whether E is i.i.d. Exp(1) given the token (of a token drawn from p), and lets it win."""
    if not torch.equal((P_V.log() - race_NV).argmax(-1), token_N):
        return False
    share_NV = 1 - torch.exp(-race_NV.double().exp())  # uniform
    tenth, flat = (share_NV * 10).long().clamp(max=9), torch.full((10,), 0.1)
    known = [chi_square_p(tenth[:, v].bincount(minlength=10), flat) for v in range(4)]
    centred = share_NV[:, :4] - 0.5
    size = len(token_N) ** 0.5
    apart = (centred.T @ centred / len(token_N) * 12 * size).fill_diagonal_(0).abs().max() < 4.5
    return min(known) > 1e-4 and bool(apart)


def test_the_races_of_tokens_drawn_from_p_are_all_alike() -> None:
    torch.manual_seed(0)
    token_N = torch.multinomial(P_V, 100_000, replacement=True)
    p_NV = P_V.expand(len(token_N), -1)
    assert explains(posterior_race(p_NV, token_N), token_N)
    # As the first winner's time, whoever wins: the token isn't known beforehand.
    first_N = (posterior_race(p_NV, token_N).exp() / p_NV).amin(1)
    tenth = ((1 - torch.exp(-first_N)) * 10).long().clamp(max=9)
    for token in range(4):
        counts = tenth[token_N == token].bincount(minlength=10)
        assert chi_square_p(counts, torch.full((10,), 0.1)) > 1e-4, token

    # Twins: a winning time that isn't scaled; the others not delayed by it; a text of another law.
    time_N1 = torch.empty(len(token_N), 1).exponential_()
    later_NV = torch.empty(len(token_N), 5).exponential_().scatter_(1, token_N[:, None], 0.0)
    assert explains((p_NV * time_N1 + later_NV).log(), token_N)
    assert not explains((time_N1 + later_NV).log(), token_N)
    alone_NV = later_NV.scatter(1, token_N[:, None], (p_NV * time_N1).gather(1, token_N[:, None]))
    assert not explains(alone_NV.log(), token_N)
    greedy_N = torch.zeros_like(token_N)
    assert not explains(posterior_race(p_NV, greedy_N), greedy_N)


def test_tokens_that_p_excludes_win_too() -> None:
    p_NV = torch.tensor([[1.0, 0.0, 0.0]]).expand(1000, -1)
    race_NV = posterior_race(p_NV, torch.ones(1000, dtype=torch.int64))
    assert race_NV.isfinite().all()
    assert (race_NV.argmin(-1) == 1).all()


def test_a_drafter_that_knows_p_guesses_the_text() -> None:
    """Shown the race that the text's tokens win; and no more often than by chance if it says that
    all tokens are alike.
    """
    objective, target = objective_of(fresh("noise")), llama()
    p_NG, next_N = torch.randn(400, 32), torch.randint(TOKENS, (400,))
    p = p_NG, target.lm_head.weight[:TOKENS]
    guess = objective._guess(p, next_N)
    assert torch.equal(guess(p_NG.view(4, 100, 32)).flatten(), next_N)
    assert (guess(torch.zeros(4, 100, 32)).flatten() == next_N).float().mean() < 0.9
    assert ROWS > TOKENS, "padded rows are never guessed"


@pytest.mark.parametrize("name", ["dflash", "jetspec", "noise-markov", "domino", "treeflash"])
def test_training_raises_the_acceptance_at_every_depth(name: str) -> None:
    torch.manual_seed(0)
    head, batch = fresh(name), one_batch(packing=True)
    objective = objective_of(head, base=0.5)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)

    def alphas() -> list[float]:
        metrics = objective.measure(batch).metrics
        return [float(metrics[f"alpha_{k}"] / metrics[f"count_{k}"]) for k in range(LEVELS)]

    first = alphas()
    for _ in range(40):
        output = objective(batch)
        (output.loss / output.tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(b > a + 0.05 for a, b in zip(first, alphas(), strict=True)), (first, alphas())


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"count": 0}, "anchors: got count=0.*expected at least 1"),
    ({"decay": -1.0}, "decay=-1.0"),
    ({"base_ends": -1.0}, "base_ends=-1.0"),
    ({"state": -1.0}, "state=-1.0"),
    ({"base": 2.0}, "anchors.base: got 2.0, expected a share, 0 to 1"),
    ({"loss": "soft"}, "got 'soft', expected"),
    ({"loss": "0*ce"}, "weights above 0"),
]


@pytest.mark.parametrize(("options", "told"), WRONG, ids=str)
def test_what_cannot_be_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as raised:
        objective_of(fresh("dspark"), **options)
    assert "\n" not in str(raised.value)
