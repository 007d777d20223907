"""Medusa heads as modules: what they compute, how they begin, which token each one means."""

import pytest
import torch
import torch.nn.functional as F
from counting import ahead, counting_target
from randomised import randomised
from tapped import llama

from draftsmith.models.heads.medusa import Medusa, MedusaConfig
from draftsmith.models.taps import NORM, target_states


@pytest.mark.parametrize("own_heads", [True, False])
def test_heads_by_hand(own_heads: bool) -> None:
    target = llama()
    head = Medusa(MedusaConfig(32, 97, heads=3, layers=2, own_heads=own_heads)).bind(target)
    randomised(head)
    norm_BTH = target_states(target, (NORM,), input_ids=torch.arange(20).view(2, 10)).norm_BTG
    tensors = head.on_disk()
    blocks = {f"{i}.{j}.linear.{n}" for i in range(3) for j in range(2) for n in ("weight", "bias")}
    assert tensors.keys() == blocks | ({f"{i}.2.weight" for i in range(3)} if own_heads else set())
    for depth, state_BTH in enumerate(head.states(norm_BTH)):
        x = norm_BTH
        for j in range(2):
            inner = (
                x @ tensors[f"{depth}.{j}.linear.weight"].T + tensors[f"{depth}.{j}.linear.bias"]
            )
            x = x + inner * torch.sigmoid(inner)
        assert torch.allclose(state_BTH, x, atol=1e-5)
        wanted = tensors[f"{depth}.2.weight"] if own_heads else target.lm_head.weight
        assert torch.equal(head.head_VH(depth), wanted)


@pytest.mark.parametrize("own_heads", [True, False])
def test_a_new_head_says_what_the_target_says(own_heads: bool) -> None:
    target = llama()
    config = MedusaConfig(32, 97, heads=3, layers=2, own_heads=own_heads)
    head = Medusa(config).init_from(target)
    norm_BTH, _ = target_states(target, (), input_ids=torch.arange(20).view(2, 10))
    for depth, state_BTH in enumerate(head.states(norm_BTH)):
        assert torch.equal(state_BTH @ head.head_VH(depth).T, target.lm_head(norm_BTH))
    # Nothing is shared: neither blocks among each other, nor LM heads with the target's.
    places = [p.data_ptr() for p in head.parameters()]
    assert len({*places, target.lm_head.weight.data_ptr()}) == len(places) + 1


def test_head_i_at_t_means_the_token_at_t_plus_2_plus_i() -> None:
    target = counting_target(97, 97)
    head = Medusa(MedusaConfig(32, 97, heads=3)).init_from(target)
    text_T = (torch.arange(40) + 70) % 97
    norm_1TH, _ = target_states(target, (), input_ids=text_T[None])
    table = target.model.embed_tokens.weight
    for depth, state_1TH in enumerate(head.states(norm_1TH)):
        for shift in (-1, 0, 1):
            said_T = (state_1TH[0] @ ahead(table, 2 + depth + shift).T).argmax(-1)
            right = torch.equal(said_T[: -2 - depth], text_T[2 + depth :])
            assert right == (shift == 0), (depth, shift)


def test_gradients_reach_every_weight() -> None:
    head = Medusa(MedusaConfig(32, 97, heads=2, layers=2)).init_from(llama())
    x_BTH = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    loss = sum(
        F.cross_entropy((s @ head.head_VH(d).T).flatten(0, 1), torch.arange(10))
        for d, s in enumerate(head.states(x_BTH))
    )
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in head.parameters())


def test_bad_configs_and_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="heads=0"):
        MedusaConfig(32, 97, heads=0)
    with pytest.raises(
        ValueError, match="medusa head: made for a target of hidden size 64, got 32"
    ):
        Medusa(MedusaConfig(64, 97)).bind(llama())
    with pytest.raises(ValueError, match="medusa_num_heads"):
        Medusa.from_json({"hidden_size": 32, "vocab_size": 97, "medusa_num_layers": 1})
