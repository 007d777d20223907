"""What Chimera and Mixture of Attentions are trained for, against a transcription by loops: every
pair from a pass of its own over the text before it. In float64 but for rotary angles and distances
of states.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from serial_heads import serial, standing
from tiny_heads import TOKENS, llama, one_batch, words
from torch import Tensor

from draftsmith.models.heads.chimera import Chimera
from draftsmith.models.heads.mixture import Mixture
from draftsmith.models.layers.layer import layer_like
from draftsmith.models.taps import target_states
from draftsmith.train.drafts.start import EagleSource, open_head
from draftsmith.train.losses.pure import acceptance, forward_kl
from draftsmith.train.objectives.chimera import ChimeraObjective
from draftsmith.train.objectives.eagle import Unroll
from draftsmith.train.objectives.mixture import MixtureObjective
from draftsmith.train.teachers.states import OnlineTaps
from draftsmith.train.text.batches import Batch

LEVELS, DECAY = 3, 0.5


def made(kind: str) -> tuple[Any, Any, Any, Batch]:
    """(head, target, objective, batch), in float64."""
    target, batch = llama().double(), one_batch(packing=True)
    head = serial(kind, target, levels=LEVELS).double().requires_grad_(True)
    given = (head, target, words(TOKENS), OnlineTaps(target, head.taps))
    if kind == "chimera":
        how: Any = {"loss": "fkl", "decay": DECAY}
        return head, target, ChimeraObjective(*given, **how), batch
    return head, target, MixtureObjective(Unroll(steps=LEVELS), *given), batch


def pairs(batch: Batch, target: Any) -> Iterator[tuple[int, int, int, list[int], Tensor]]:
    """(row, place in the row, t, its document, the target's states there) of every t."""
    for row, positions_T in enumerate(batch.position_ids.tolist()):
        starts = [t for t, at in enumerate(positions_T) if at == 0]
        for start, end in zip(starts, [*starts[1:], len(positions_T)], strict=True):
            text = batch.input_ids[row, start:end].tolist()
            h_TH = target_states(target, (), input_ids=torch.tensor([text])).norm_BTG[0]
            yield from ((row, start + t, t, text, h_TH) for t in range(end - start))


def trained(batch: Batch, row: int, at: int, t: int, depth: int, text: list[int]) -> bool:
    """Whether the text says the token two and `depth` after t."""
    inside = t + 1 + depth < len(text)
    return inside and bool(batch.loss_mask[row, at + 1 + depth])


def by_loops(head: Any, target: Any, batch: Batch, stale_BT: Tensor, twin: str = "") -> Any:
    """Loss and sums by depth. stale: how old the memory of a pair is in training."""
    rows_VH = target.lm_head.weight[:TOKENS]
    total, sums = torch.zeros((), dtype=torch.float64), {}
    for row, at, t, text, h_TH in pairs(batch, target):
        for depth in range(LEVELS):
            if not trained(batch, row, at, t, depth, text):
                continue
            n = t + 1 + depth
            p_V, old = rows_VH @ h_TH[n], t + 1
            if isinstance(head, Mixture) and depth == 0:
                old = t + 1 - int(stale_BT[row, at])
            state_I = standing(head, target, text[:old], text[old : n + 1], twin)
            apart = 0.0
            if isinstance(head, Chimera):
                q_V = head.head_VH(depth)[:TOKENS] @ state_I
                cost = DECAY**depth * forward_kl(p_V, q_V)
            else:
                q_V = rows_VH @ state_I
                cost = 0.1 * forward_kl(p_V, q_V) * (depth == 0)
                apart = F.smooth_l1_loss(state_I, h_TH[n]) * (depth == 0)
            total = total + cost + apart
            for name, value in (("alpha", acceptance(p_V, q_V).item()), ("count", 1)):
                sums[f"{name}_{depth}"] = sums.get(f"{name}_{depth}", 0.0) + float(
                    torch.as_tensor(value).detach()
                )
    return total, sums


@pytest.mark.parametrize("kind", ["chimera", "mixture"])
def test_loss_and_gradients_are_those_of_the_loops(kind: str) -> None:
    """And neither of trigrams in the others' place, nor of a memory without a cut."""
    head, target, objective, batch = made(kind)
    torch.manual_seed(7)
    output = objective(batch)
    output.loss.backward()
    got = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    head.zero_grad()
    torch.manual_seed(7)
    stale_BT = batch.position_ids % torch.randint(6, 15, (len(batch.input_ids), 1))
    total, sums = by_loops(head, target, batch, stale_BT)
    total.backward()
    assert output.tokens == batch.loss_mask.sum()
    assert output.loss.item() == pytest.approx(total.item(), rel=1e-6)
    assert output.metrics["alpha_0"].item() == pytest.approx(sums["alpha_0"], rel=1e-6)
    for name, parameter in head.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
    untrained = {name for name, p in head.named_parameters() if p.grad is None}
    assert untrained == set(), untrained
    twin = {"twin": "grams"} if kind == "chimera" else {}
    with torch.no_grad():
        other, _ = by_loops(head, target, batch, 0 * stale_BT, **twin)
    assert abs(other.item() / total.item() - 1) > 1e-4


@pytest.mark.parametrize("kind", ["chimera", "mixture"])
@torch.no_grad()
def test_measured_depth_by_depth(kind: str) -> None:
    """Of the mixture each depth with a memory that ends so much earlier, whatever training cuts."""
    head, target, objective, batch = made(kind)
    measured = objective.measure(batch)
    total, sums = by_loops(head, target, batch, torch.zeros_like(batch.position_ids))
    assert measured.loss.item() == pytest.approx(total.item(), rel=1e-6)
    for name, value in sums.items():
        assert measured.metrics[name].item() == pytest.approx(value, rel=1e-5), name
    assert 0 < sums["count_2"] < sums["count_0"]


def test_the_memory_is_cut_where_decoding_would_find_it() -> None:
    """Every 6 to 14 tokens of each document, never before its beginning."""
    _, _, objective, batch = made("mixture")
    longest = set()
    for _ in range(40):
        stale_BT = objective.drawn(batch)["stale_BT"]
        assert (stale_BT <= batch.position_ids).all()
        longest.add(int(stale_BT.max()))
    assert longest <= set(range(5, 14)) and len(longest) > 3


def test_wrong_settings_are_told() -> None:
    target = llama()
    with pytest.raises(ValueError, match=r"chimera: got .*expected each to be at least 1"):
        Chimera(layer_like(target), 0)
    counts_V = torch.ones(target.config.vocab_size)
    for source, said in (
        (EagleSource(kind="mix"), "head.kind='mix', expected mixture"),
        (EagleSource(kind="mixture", draft_vocab=8), "mixture: got draft_vocab, expected none"),
        (EagleSource(kind="mixture", layers=3), "mixture: got layers, expected none"),
        (EagleSource(kind="mixture", fc_norm=True), "mixture: got fc_norm, expected none"),
    ):
        with pytest.raises(ValueError, match=said):
            open_head(source, target, words(TOKENS), counts_V, 0)
    head = open_head(EagleSource(kind="mixture"), target, words(TOKENS), counts_V, 0)
    assert isinstance(head, Mixture) and head.taps == (1, 2)
    for missing in ("taps", "model_type"):
        about = head.to_json()
        del about[missing]
        with pytest.raises(ValueError, match=rf"config.json: got .*{missing}=None"):
            Mixture.from_json(about)
