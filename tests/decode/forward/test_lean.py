"""The lean body: the model's own states from fewer calls, and its own weights, held once."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftsmith.decode.forward.lean import lean_body
from draftsmith.decode.forward.runner import Runner, Seen

SIZES = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "llama3": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SIZES,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        )
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
}


def made(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = FAMILIES[family]().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # born as ones and zeros, which would hide a mistake
            parameter.add_(torch.randn_like(parameter) / 3)
    return model


@torch.inference_mode()
def states(runner: Runner) -> list[torch.Tensor]:
    """Logits after ragged prompts, then states of ragged rounds: a chain, and a tree."""
    lens_B = torch.tensor([9, 3, 6])
    tokens_BN = torch.arange(27).view(3, 9) * 7 % 120
    pool = runner.pool(3, 40)
    found = [runner.prefill(pool, torch.arange(3), tokens_BN, lens_B)[0]]
    positions_BN = lens_B[:, None] + torch.arange(4)
    seen = Seen(lens_B, 64)
    found.append(runner.verify(pool, tokens_BN[:, :4], positions_BN, positions_BN, seen)[0])
    ancestors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    depth_BN = lens_B[:, None] + torch.tensor([0, 1, 1, 2])
    seen = Seen(lens_B, 64, ancestors, torch.tensor([0, 1, 1, 2]))
    found.append(runner.verify(pool, tokens_BN[:, 2:6], depth_BN, positions_BN, seen)[0])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_the_models_own(family: str) -> None:
    lean, whole = Runner(made(family), 120), Runner(made(family), 120)
    assert lean.call is not whole._whole
    whole.call = whole._whole
    for ours, own in zip(states(lean), states(whole), strict=True):
        assert torch.allclose(ours, own, rtol=1e-4, atol=1e-4)


def test_weights_are_held_once_and_follow_changes_in_place(tmp_path: Path) -> None:
    model = made("qwen2")
    before = copy.deepcopy(model.state_dict())
    runner = Runner(model, 120)
    attention = model.model.layers[0].self_attn
    storages = {p.untyped_storage().data_ptr() for p in attention.parameters() if p.ndim == 2}
    assert len(storages) == 2  # q, k, v in one; o
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(v, before[n]) for n, v in again.state_dict().items())

    twin = copy.deepcopy(model)
    assert Runner(twin, 120).call is not None
    changed = {name: value * 1.5 for name, value in before.items()}
    model.load_state_dict(changed)
    fresh = made("qwen2")
    fresh.load_state_dict(changed)
    # The old runner, a new runner on the same storage, and another model agree.
    for other in (Runner(model, 120), Runner(fresh, 120)):
        for a, b in zip(states(runner), states(other), strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_one_compiled_graph_serves_all_layers(family: str) -> None:
    """Compiled whole (no break allowed): the same states, and as many graphs as with one layer."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(graph)
        return graph.forward

    plain, compiled = Runner(made(family), 120), Runner(made(family), 120)
    compiled.compile(backend=backend, fullgraph=True, dynamic=False)
    for ours, own in zip(states(compiled), states(plain), strict=True):
        assert torch.allclose(ours, own, rtol=1e-5, atol=1e-5)
    assert len(compiled.call.layers) == 2
    assert len(graphs) == 2  # before and after the attention; chain and tree have one shape
    torch._dynamo.reset()


def test_a_lean_form_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.decode.forward.lean.Norm.__call__", lambda norm, x: x)
    runner = Runner(made("llama"), 120)
    assert runner.call == runner._whole


def test_models_in_training_and_other_families_use_their_own_forward() -> None:
    training = made("llama").requires_grad_(True)
    neox = GPTNeoXForCausalLM(
        GPTNeoXConfig(vocab_size=120, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    ).requires_grad_(False)
    for model in (training, neox):
        assert lean_body(model.base_model) is None
