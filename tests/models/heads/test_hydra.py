"""Hydra and Hydra++ heads as modules: what they compute, and which token each input stands for."""

import copy

import pytest
import torch
from counting import ahead, counting_target
from randomised import randomised
from tapped import llama
from tiny_hydra import layer, looks_at
from torch import Tensor
from transformers import LlamaConfig, LlamaModel, PretrainedConfig, Qwen3Config

from draftsmith.models.heads.hydra import Hydra, HydraConfig
from draftsmith.models.layers.layer import causal
from draftsmith.models.taps import target_states


def text_states(head: Hydra, ids_BT: Tensor, norm_BTH: Tensor) -> list[Tensor]:
    """The obvious loop over positions: of each head, the states [B, T - 1 - depth, H]."""
    at_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
    base_BTH = head.prefix(norm_BTH, at_BT, causal())
    found = []
    for depth in range(head.levels):
        rows = [
            head.state(depth, base_BTH[:, t], head.embed(ids_BT[:, t + 1 : t + 2 + depth]))
            for t in range(ids_BT.shape[1] - 1 - depth)
        ]
        found.append(torch.stack(rows, 1))
    return found


@pytest.mark.parametrize("bias", [True, False])
def test_heads_by_hand(bias: bool) -> None:
    target = llama()
    head = Hydra(HydraConfig(32, 97, heads=3, layers=2, head_bias=bias)).bind(target)
    randomised(head)
    ids_BT = torch.arange(20).view(2, 10)
    norm_BTH, _ = target_states(target, (), input_ids=ids_BT)
    w, table = head.on_disk(), target.model.embed_tokens.weight
    for depth, states_BSH in enumerate(text_states(head, ids_BT, norm_BTH)):
        for t in range(10 - 1 - depth):
            tokens_BP = ids_BT[:, t + 1 : t + 2 + depth]
            z = torch.cat([norm_BTH[:, t], *(table[p] for p in tokens_BP.T)], -1)
            one = f"hydra_mlp.{depth}.0"
            inner = z @ w[f"{one}.linear.weight"].T + w[f"{one}.linear.bias"]
            x = z @ w[f"{one}.res_connection.weight"].T + w[f"{one}.res_connection.bias"]
            x = x + inner * torch.sigmoid(inner)
            two = f"hydra_mlp.{depth}.1.linear"
            inner = x @ w[f"{two}.weight"].T + w[f"{two}.bias"]
            x = x + inner * torch.sigmoid(inner)
            assert torch.allclose(states_BSH[:, t], x, atol=1e-4)
            logits = x @ w[f"hydra_lm_head.{depth}.weight"].T
            if bias:
                logits = logits + w[f"hydra_lm_head.{depth}.bias"]
            assert torch.allclose(head.output(depth)(states_BSH[:, t]), logits, atol=1e-4)
    assert len({p.data_ptr() for p in head.parameters()}) == len(list(head.parameters()))


def test_the_prefix_is_a_llama_of_one_layer() -> None:
    config = layer()
    head = Hydra(HydraConfig(32, 97, prefix=config))
    randomised(head)
    body = LlamaModel(config).eval()
    own = {k.removeprefix("prefix_"): v for k, v in head.state_dict().items() if "prefix" in k}
    tensors = {k.replace("layer.", "layers.0.", 1): v for k, v in own.items()}
    body.load_state_dict({"embed_tokens.weight": body.embed_tokens.weight} | tensors)
    x_BTH = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    at_BT = torch.arange(9).expand(2, -1)
    with torch.no_grad():
        wanted = body(inputs_embeds=x_BTH, use_cache=False).last_hidden_state
        assert torch.allclose(head.prefix(x_BTH, at_BT, causal()), wanted, atol=1e-5)
    assert head.context == 512


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_each_input_is_the_token_it_should_be(place: int) -> None:
    """Heads that look at one part of their input alone: the base state, or a token of the path.
    After x_{t + place} comes x_{t + 2 + depth}, 2 + depth - place further on.
    """
    target = counting_target(97, 97)
    head = Hydra(HydraConfig(32, 97, heads=3)).init_from(target)
    table = target.model.embed_tokens.weight
    text_BT = ((torch.arange(20) + 70) % 97)[None]
    norm_BTH, _ = target_states(target, (), input_ids=text_BT)
    for depth in range(3):
        seen = min(place, depth + 1)
        looks_at(head, depth, seen)
        state_BSH = text_states(head, text_BT, norm_BTH)[depth]
        for shift in (-1, 0, 1):
            said_BS = (state_BSH @ ahead(table, 2 + depth - seen + shift).T).argmax(-1)
            right = torch.equal(said_BS[:, :-1], text_BT[:, 2 + depth :])
            assert right == (shift == 0), (depth, seen, shift)


def test_dropout_is_for_training_alone() -> None:
    head = Hydra(HydraConfig(32, 97, dropout=0.5)).init_from(llama())
    base_BH, path_BPH = torch.ones(4, 32), torch.ones(4, 2, 32)
    states = []
    for train in (False, True):
        head.train(train)
        torch.manual_seed(0)
        states.append([head.state(1, base_BH, path_BPH) for _ in range(2)])
    assert torch.equal(*states[0])
    assert not torch.equal(*states[1])
    assert 0.3 < float((states[1][0] == 0).float().mean()) < 0.7


def test_positions_stay_exact_when_a_head_is_cast() -> None:
    head = Hydra(HydraConfig(32, 97, prefix=layer()))
    exact = head.rotary.inv_freq.clone()
    cast = copy.deepcopy(head).to(torch.bfloat16)
    assert cast.prefix_norm.weight.dtype == torch.bfloat16
    assert torch.equal(cast.rotary.inv_freq, exact)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_the_config_survives_json(kind: type[PretrainedConfig]) -> None:
    rope = {"rope_type": "default", "rope_theta": 12345.0}
    prefix = layer(kind, rope_parameters=rope, head_dim=16)
    config = HydraConfig(32, 97, 3, 2, prefix, dropout=0.2, head_bias=True)
    back = Hydra.from_json(Hydra(config).to_json())
    assert back.config.prefix is not None
    assert back.config.prefix.to_dict() == prefix.to_dict()
    assert (back.config.heads, back.config.layers, back.config.dropout) == (3, 2, 0.2)
    assert back.config.head_bias and torch.equal(
        back.rotary.inv_freq, Hydra(config).rotary.inv_freq
    )


def test_bad_configs_are_refused() -> None:
    for prefix in (layer(hidden_size=64), layer(num_hidden_layers=2)):
        with pytest.raises(ValueError, match="hydra: got a prefix of kind llama"):
            HydraConfig(32, 97, prefix=prefix)
    with pytest.raises(ValueError, match="dropout=1"):
        HydraConfig(32, 97, dropout=1.0)
    with pytest.raises(ValueError, match="model_type='gpt2'"):
        Hydra.from_json(Hydra(HydraConfig(32, 97, prefix=layer())).to_json() | GPT2)


GPT2 = {"prefix": {"model_type": "gpt2"}}
