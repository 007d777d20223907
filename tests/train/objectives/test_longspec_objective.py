"""LongSpec's loss against its formula, pair by pair; moved positions."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from randomised import randomised
from tiny_heads import TOKENS, llama, one_batch, words
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.heads.longspec import LongSpec, last_keys
from draftsmith.models.layers.layer import layer_like
from draftsmith.models.taps import target_states
from draftsmith.train.losses.pure import forward_kl
from draftsmith.train.objectives.longspec import ANCHORS, LongSpecObjective
from draftsmith.train.teachers.states import OnlineTaps
from draftsmith.train.text.batches import Batch

LEVELS, WINDOW = 3, 5


def head_for(target: PreTrainedModel) -> LongSpec:
    torch.manual_seed(1)
    head = LongSpec(layer_like(target), 1, LEVELS, WINDOW).init_from(target)
    randomised(head)
    return head.requires_grad_(True)


def objective_of(head: LongSpec, target: PreTrainedModel, **about: Any) -> LongSpecObjective:
    about = {"loss": "fkl", "decay": 0.7} | about
    return LongSpecObjective(head, target, words(TOKENS), OnlineTaps(target, head.taps), **about)


def state_after(head: LongSpec, target: PreTrainedModel, ids: list[int], lag: int) -> Tensor:
    """What the LM head multiplies after a text, [H]: by the formulas, one query, no masks."""
    at = torch.arange(len(ids))[None]
    layer, tokens = head.layer, torch.tensor([ids])
    rotary = head.rotary(torch.zeros(1, 1, 32), at)
    x_1TH = head.embed(tokens)
    query, key, value = layer.project(layer.input_layernorm(x_1TH), rotary)
    first = max(0, len(ids) - WINDOW)
    mixed = mix(query[0, -1], key[0, first:], value[0, first:])
    x_H = x_1TH[0, -1] + layer.self_attn.o_proj(mixed)
    own = head.cross_q(head.cross_norm(x_H)).view(4, 8)
    cos, sin = rotary[0][0, -1], rotary[1][0, -1]
    own = own * cos + torch.cat([-own[:, 4:], own[:, :4]], -1) * sin
    if len(ids) > lag:
        states = target_states(target, head.taps, input_ids=tokens).taps_BTF
        keys, values = last_keys(target, states, at)
        x_H = x_H + head.cross_o(mix(own, keys[0, : len(ids) - lag], values[0, : len(ids) - lag]))
    return head.norm(x_H + layer.mlp(layer.post_attention_layernorm(x_H)))


def mix(query_AE: Tensor, key_SKE: Tensor, value_SKE: Tensor) -> Tensor:
    key, value = (x.repeat_interleave(2, 1).transpose(0, 1) for x in (key_SKE, value_SKE))
    scores = key @ query_AE[..., None] / math.sqrt(8)
    return (scores.softmax(1) * value).sum(1).flatten()


def formula(
    head: LongSpec, target: PreTrainedModel, batch: Batch, early: int
) -> tuple[Tensor, int]:
    """The loss over all trained pairs, each document alone; early: a twin that sees so many tokens
    more of the target than it will have.
    """
    total, count = torch.zeros(()), 0
    p_head_VH = target.lm_head.weight[:TOKENS]
    for row, positions in enumerate(batch.position_ids.tolist()):
        starts = [t for t, at in enumerate(positions) if at == 0] + [len(positions)]
        for first, end in itertools.pairwise(starts):
            ids = batch.input_ids[row, first:end].tolist()
            norm_TH = target_states(target, (), input_ids=torch.tensor([ids])).norm_BTG[0]
            for depth in range(LEVELS):
                for t in range(len(ids) - 1 - depth):
                    if not batch.loss_mask[row, first + t + 1 + depth]:
                        continue
                    at = t + 1 + depth
                    state_H = state_after(head, target, ids[: at + 1], depth + 1 - early)
                    p_V, q_V = p_head_VH @ norm_TH[at], p_head_VH @ state_H
                    total = total + 0.7**depth * forward_kl(p_V, q_V)
                    count += 1
    return total, count


@pytest.mark.parametrize("packing", [True, False])
def test_the_loss_is_the_formula_pair_by_pair(packing: bool) -> None:
    """Documents side by side too; a draft that sees the target's keys of its own token is told."""
    target, batch = llama(), one_batch(packing)
    head = head_for(target)
    output = objective_of(head, target)(batch)
    total, count = formula(head, target, batch, 0)
    assert sum(int(output.metrics[f"count_{depth}"]) for depth in range(LEVELS)) == count > 10
    assert torch.allclose(output.loss, total, rtol=2e-5)
    twin, _ = formula(head, target, batch, 1)
    assert not torch.allclose(output.loss, twin, rtol=1e-4)
    weights = [p for p in head.parameters() if p.requires_grad]
    pairs = (torch.autograd.grad(x, weights) for x in (output.loss, total))
    for ours, theirs in zip(*pairs, strict=True):
        scale = theirs.abs().max().clamp(min=1e-3)
        assert torch.allclose(ours / scale, theirs / scale, atol=2e-3)


@pytest.mark.parametrize("packing", [True, False])
def test_moved_positions(packing: bool) -> None:
    """All but a document's first 0 to 4 tokens, by one number a row; the target sees the same text
    from there: what is moved as a whole is as it was, what stays is still seen.
    """
    target, batch = llama(), one_batch(packing)
    head = head_for(target)
    objective = objective_of(head, target, offset=300)
    found = set()
    for seed in range(8):
        torch.manual_seed(seed)
        moved = objective.moved(batch)
        by_BT = moved.position_ids - batch.position_ids
        for row_T, at_T in zip(by_BT, batch.position_ids, strict=True):
            anchors = next((a for a in range(6) if row_T[at_T == a].any()), 5)
            found.add(anchors)
            assert anchors <= ANCHORS and not row_T[at_T < anchors].any()
            assert len(set(row_T[at_T >= anchors].tolist())) == 1
        assert torch.equal(objective.moved(batch).loss_mask, batch.loss_mask)
    assert len(found) > 3
    at_BT = batch.position_ids
    whole = replace(moved, position_ids=at_BT + 100)
    anchored = replace(moved, position_ids=at_BT + 100 * (at_BT >= 2))
    plain, same, other = (
        OnlineTaps(target, head.taps)(b).norm_BTG for b in (batch, whole, anchored)
    )
    torch.testing.assert_close(plain, same, atol=1e-4, rtol=1e-4)
    late_BT = at_BT >= 2
    assert not torch.allclose(plain[late_BT], other[late_BT], atol=1e-3)
    alone = replace(anchored, attention_mask=None)
    cut = OnlineTaps(target, head.taps)(alone).norm_BTG
    if not packing:  # without a mask of one's own the gap begins another document
        assert not torch.allclose(cut[late_BT], other[late_BT], atol=1e-3)
    assert torch.equal(objective.measure(batch).loss, objective_of(head, target)(batch).loss)


def test_what_cannot_be_is_refused() -> None:
    target = llama()
    with pytest.raises(ValueError, match="offset: got -1, expected 0 or more"):
        objective_of(head_for(target), target, offset=-1)
    recipe = SimpleNamespace(
        shard_target=False,
        offset=5,
        cache=SimpleNamespace(path="kept"),
        head=SimpleNamespace(heads=2, window=8),
    )
    with pytest.raises(ValueError, match="moved positions are in no cache; leave one of them out"):
        LongSpecObjective.fresh(recipe, target)
