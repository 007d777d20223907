"""Clover-2's and Falcon's losses against their formulas, pair by pair; Falcon against EAGLE-1."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from light_heads import KINDS, last_state, made
from tiny_heads import TOKENS, llama, one_batch, words
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.heads.clover import Clover
from draftsmith.models.heads.eagle import Eagle, EagleConfig
from draftsmith.models.heads.falcon import Falcon
from draftsmith.models.layers.layer import causal
from draftsmith.models.taps import target_states
from draftsmith.train.losses.pure import forward_kl
from draftsmith.train.objectives.clover import CloverObjective
from draftsmith.train.objectives.falcon import FalconObjective
from draftsmith.train.teachers.states import OnlineTaps
from draftsmith.train.text.batches import Batch


def objective_of(head: Clover | Falcon, target: PreTrainedModel, **about: object):
    own = CloverObjective if isinstance(head, Clover) else FalconObjective
    about = {"loss": "fkl", "decay": 0.7, "state": 2.0} | about
    return own(head, target, words(TOKENS), OnlineTaps(target, head.taps), **about)


def documents(batch: Batch) -> list[tuple[int, int, int]]:
    """(row, first, end) of each document of a batch."""
    found = []
    for row, positions in enumerate(batch.position_ids.tolist()):
        starts = [t for t, at in enumerate(positions) if at == 0] + [len(positions)]
        found += [(row, *ends) for ends in itertools.pairwise(starts)]
    return found


def formula(
    head: Clover | Falcon, target: PreTrainedModel, batch: Batch, depths: int, *, late: int = 0
) -> tuple[Tensor, int]:
    """The loss over all trained pairs, each document alone; late: a twin whose labels are so much
    too late.
    """
    total, count = torch.zeros(()), 0
    p_head_VH = target.lm_head.weight[:TOKENS]
    for row, first, end in documents(batch):
        ids = batch.input_ids[row, first:end].tolist()
        norm_TH, taps_TF = (
            x[0] for x in target_states(target, head.taps, input_ids=torch.tensor([ids]))
        )
        for depth in range(depths):
            for t in range(len(ids) - 1 - depth):
                short = isinstance(head, Falcon) and t < head.block - 1
                if short or not batch.loss_mask[row, first + t + 1 + depth]:
                    continue
                path = ids[: t + 2 + (depth if isinstance(head, Clover) else 0)]
                if isinstance(head, Falcon):
                    path = path + [0] * depth  # it reads none of a block's own tokens
                state_H = last_state(head, taps_TF[None, : t + 1], path)
                at = min(t + 1 + depth + late, len(ids) - 1)
                p_V, q_V = p_head_VH @ norm_TH[at], p_head_VH @ state_H
                far = F.smooth_l1_loss(state_H, norm_TH[at])
                total = total + 0.7**depth * (forward_kl(p_V, q_V) + 2 * far)
                count += 1
    return total, count


def trained_from(batch: Batch, block: int) -> Batch:
    """Only pairs that end a whole block, at any depth: earlier rows read zeros."""
    return replace(batch, loss_mask=batch.loss_mask & (batch.position_ids >= 2 * block - 1))


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_formula_pair_by_pair(kind: str, packing: bool) -> None:
    """Documents side by side too: nothing of one reaches the next, through the LSTM or its rows."""
    target, batch = llama(), one_batch(packing)
    head = made(kind, target, levels=3).requires_grad_(True)
    depths, about = 3, {}
    if isinstance(head, Falcon):
        depths, about = head.block, {"glance": 0.0}
        batch = trained_from(batch, head.block)
    output = objective_of(head, target, **about)(batch)
    total, count = formula(head, target, batch, depths)
    assert sum(int(output.metrics[f"count_{depth}"]) for depth in range(depths)) == count > 10
    assert torch.allclose(output.loss, total, rtol=2e-5)
    twin, _ = formula(head, target, batch, depths, late=1)
    assert not torch.allclose(output.loss, twin, rtol=1e-4)
    weights = [p for p in head.parameters() if p.requires_grad]
    pairs = (torch.autograd.grad(x, weights, allow_unused=True) for x in (output.loss, total))
    for ours, theirs in zip(*pairs, strict=True):
        if theirs is not None:
            scale = theirs.abs().max().clamp(min=1e-3)
            assert torch.allclose(ours / scale, theirs / scale, atol=2e-3)


def text_of(target: PreTrainedModel, head: Falcon) -> tuple[Tensor, Tensor, Tensor]:
    ids_1T = torch.randint(TOKENS, (1, 20), generator=torch.Generator().manual_seed(4))
    states_1TH = target_states(target, head.taps, input_ids=ids_1T).taps_BTF
    return states_1TH, ids_1T.roll(-1, 1), torch.arange(20)[None]


@torch.no_grad()
def test_falcon_of_one_token_a_pass_is_eagle_with_an_lstm() -> None:
    """In its fc's place; of two it isn't."""
    target = llama()
    for kind, same in (("falcon-1", True), ("falcon-2", False)):
        head = made(kind, target)
        eagle = Eagle(EagleConfig(head.config, 1)).bind(target)
        eagle.layers[0].load_state_dict(head.layer.state_dict())
        eagle.fc.weight.copy_(torch.cat([torch.zeros(32, 32), torch.eye(32)], 1))
        states, tokens, at = text_of(target, head)
        y = head.lstm(torch.cat([head.embed(tokens), states], -1).transpose(0, 1))[0]
        wanted = eagle.step(y.transpose(0, 1), tokens, at, causal())
        assert torch.allclose(head.drafted(states, tokens, at)[:, :, 0], wanted, atol=1e-4) == same


@torch.no_grad()
def test_falcon_drafts_the_same_wherever_its_text_begins() -> None:
    """Behind another document, and taken up halfway; without the LSTM's end it doesn't."""
    target = llama()
    head = made("falcon-3", target)
    states, tokens, at = text_of(target, head)
    alone = head.drafted(states, tokens, at)
    for before in (1, 2, 3, 7):
        both = [torch.cat([x[:, 5 : 5 + before], x], 1) for x in (states, tokens)]
        place = torch.cat([torch.arange(before), at[0]])[None]
        document = torch.cat([torch.zeros(before), torch.ones(20)])
        mask = (document[:, None] == document).tril()[None, None]
        assert torch.allclose(head.drafted(*both, place, mask)[:, before:], alone, atol=1e-4)
        y = head.along(*both)[0][:, before:]
        assert not torch.allclose(y, head.along(states, tokens)[0], atol=1e-4)
    whole, memory = head.along(states, tokens)
    for cut in (1, 2, 8):
        begun, carried = head.along(states[:, :12], tokens[:, :12], last_B1=torch.tensor([[cut]]))
        rest = head.along(states[:, cut + 1 :], tokens[:, cut + 1 :], carried)
        assert torch.allclose(begun[:, : cut + 1], whole[:, : cut + 1], atol=1e-5)
        assert torch.allclose(rest[0], whole[:, cut + 1 :], atol=1e-5)
        assert torch.allclose(rest[1], memory, atol=1e-5)


def test_glancing_shows_answers_of_the_text_and_less_of_them_by_and_by() -> None:
    target, batch = llama(), one_batch(True)
    head = made("falcon-2", target, levels=3)
    objective = objective_of(head, target, glance=1.0, steps=4)
    states = target_states(target, head.taps, input_ids=batch.input_ids).taps_BTF
    next_BT = batch.input_ids.roll(-1, 1)

    def shown(seed: int) -> Tensor:
        torch.manual_seed(seed)
        found, tokens = objective._glanced(batch, states, next_BT)
        other_BT = (found != states).any(2)
        assert torch.equal(found[other_BT], states.roll(-2, 1)[other_BT])
        assert torch.equal(tokens, next_BT.roll(-2, 1).where(other_BT, next_BT))
        return other_BT

    counts = []
    for step in range(5):
        assert torch.equal(shown(3), shown(3))
        counts.append(sum(int(shown(seed).sum()) for seed in range(40)) / 40)
        same = batch.position_ids.roll(-2, 1) == batch.position_ids + 2
        may_BT = batch.loss_mask.roll(-2, 1) & same
        assert not (shown(step) & ~may_BT).any()
        objective.observe({"count_0": 1.0, "count_1": 1.0, "alpha_0": 0.5, "alpha_1": 0.5})
    every = int(may_BT.sum())
    # All is wrong before the first step, half from then on.
    wanted = [every * share for share in (1, 3 / 8, 2 / 8, 1 / 8, 0)]
    assert counts == pytest.approx(wanted, rel=0.15)
    objective.eval()
    plain = objective(batch).loss
    assert torch.equal(plain, objective.measure(batch).loss)
    objective.train()
    objective.steps_done.zero_()
    assert objective(batch).loss != plain


def test_what_a_node_of_clover_knows() -> None:
    """Every token of its path, and by a state that takes in tokens by their direction."""
    target = llama()
    head = made("clover2", target)
    paths = torch.randint(TOKENS, (1, 4), generator=torch.Generator().manual_seed(1))
    paths = paths.repeat(4, 1)
    for place in range(3):
        paths[1 + place, place] += 1
    state = torch.randn(1, 32).expand(4, -1)
    for token in paths.T:
        state = head.step(state, head.embed(token))
    laws = head.state(state, head.embed(paths[:, -1]))
    assert all(not torch.allclose(laws[0], law, atol=1e-4) for law in laws[1:])
    part, token = head.step, head.embed(torch.tensor(7))
    old = torch.randn(32)
    query, key, value = part.query(part.norm(old)), part.key(token), part.value(token)
    taken = []
    for at in range(0, 32, 8):
        one, other = query[at : at + 8], key[at : at + 8]
        taken.append(value[at : at + 8] * (one @ other) / (one.norm() * other.norm()))
    assert torch.allclose(part(old, token), old + torch.cat(taken), atol=1e-5)


def test_what_cannot_be_is_refused() -> None:
    target = llama()
    head = made("falcon-2", target)
    config = head.config
    with pytest.raises(ValueError, match="block=4, 3 tokens ahead, expected one layer and a block"):
        Falcon(config, 3, 4)
    with pytest.raises(ValueError, match="heads=0, layers=1, expected each to be at least 1"):
        Clover(config, 2, 0)
    with pytest.raises(ValueError, match=r"glance: got 2\.0, expected a share"):
        objective_of(head, target, glance=2.0)
    with pytest.raises(ValueError, match=r"state: got -1\.0, expected a weight"):
        objective_of(head, target, state=-1.0)
    with pytest.raises(ValueError, match=r"config\.json: got block=None, expected int"):
        Falcon.from_json({k: v for k, v in head.to_json().items() if k != "block"})
