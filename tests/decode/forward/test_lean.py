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
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.forward.lean import lean_body
from draftsmith.decode.forward.product import ONEDNN, Product, lay_side_by_side
from draftsmith.decode.forward.runner import Runner, Seen
from draftsmith.decode.sampling import SamplingParams

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
    "yarn": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SIZES,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 24,
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


@pytest.mark.parametrize("laid", [False, True])
def test_weights_are_held_once_and_follow_changes_in_place(tmp_path: Path, laid: bool) -> None:
    model = made("qwen2")
    before = copy.deepcopy(model.state_dict())
    if laid:
        lay_side_by_side(model)
        attention = model.model.layers[0].self_attn
        storages = {p.untyped_storage().data_ptr() for p in attention.parameters() if p.ndim == 2}
        assert len(storages) == 2  # q, k, v in one; o
        assert len(Product.of([attention.q_proj, attention.k_proj]).tensors[0]) == 1
    runner = Runner(model, 120)
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for layer in runner.call.layers:
        for product in (layer.entry[1], layer.exit[0], *layer.exit[2:]):
            read = [tensor for tensors in product for tensor in tensors]
            assert {tensor.untyped_storage().data_ptr() for tensor in read} <= held
            assert len(read) <= 2 or not laid  # a matrix, and a bias
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(v, before[n]) for n, v in again.state_dict().items())

    changed = {name: value * 1.5 for name, value in before.items()}
    model.load_state_dict(changed)
    fresh = made("qwen2")
    fresh.load_state_dict(changed)
    # The old runner, a new runner on the same storage, and another model agree.
    for other in (Runner(model, 120), Runner(fresh, 120)):
        for a, b in zip(states(runner), states(other), strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2", "windowed"])
def test_a_decoder_changes_nothing_of_its_models(
    kind: torch.dtype, family: str, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Neither target nor draft: their parameters are the same tensors in the same places, and their
    own passes are what they were, by the attention that they had.
    """
    sizes = SIZES | {"vocab_size": len(tiny_tokenizer)}
    windowed = MistralConfig(**sizes, sliding_window=4)
    config = windowed if family == "windowed" else Qwen2Config(**sizes)
    ids_BT = torch.arange(20).view(2, 10)

    def seen(model: PreTrainedModel) -> tuple:
        parameters = list(model.named_parameters())
        places = [(n, id(p), p.data_ptr(), p.untyped_storage().data_ptr()) for n, p in parameters]
        implementations = (model.config._attn_implementation, model.model.config is model.config)
        return places, implementations, [type(m) for m in model.modules()]

    pair = [AutoModelForCausalLM.from_config(config).to(kind).requires_grad_(False) for _ in "pq"]
    before = [(seen(model), model(ids_BT).logits) for model in pair]
    drafter = LMDrafter(pair[1], len(tiny_tokenizer))
    decoder = Decoder(pair[0], tiny_tokenizer, drafter, K=2)
    decoder.generate([[5, 6, 7]], SamplingParams(max_new_tokens=8))
    for model, (had, logits_BTV) in zip(pair, before, strict=True):
        assert seen(model) == had and had[1][0] == "sdpa"
        assert torch.equal(model(ids_BT).logits, logits_BTV)


def halved(parameter: torch.Tensor) -> None:
    parameter.data.mul_(0.5)  # unseen by autograd, and by its count of versions


CHANGES: dict[str, Callable[[PreTrainedModel, PreTrainedModel], object]] = {
    "weight": lambda model, other: halved(model.model.layers[1].mlp.down_proj.weight),
    "norm": lambda model, other: halved(model.model.norm.weight),
    "head": lambda model, other: halved(model.lm_head.weight),
    "layer": lambda model, other: model.model.layers.__setitem__(1, other.model.layers[0]),
    "attention": lambda model, other: setattr(
        model.model.layers[0].self_attn, "v_proj", other.model.layers[1].self_attn.v_proj
    ),
    "embedding": lambda model, other: model.set_input_embeddings(other.get_input_embeddings()),
    "dropped": lambda model, other: (
        model.model.layers.__delitem__(1), setattr(model.config, "num_hidden_layers", 1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGES)
def test_a_new_runner_decodes_the_model_as_it_is_now(change: str, kind: torch.dtype) -> None:
    model = made("llama").to(kind)
    old = states(Runner(model, 120))
    other = made("llama").to(kind)
    other.load_state_dict({name: value.flip(0) for name, value in other.state_dict().items()})
    other.model.layers[0].self_attn.layer_idx = 1
    CHANGES[change](model, other)
    new, own = Runner(model, 120), Runner(model, 120)
    assert new.call != new._whole
    own.call = own._whole
    found = states(new)
    far, moved = (
        max((a.float() - b.float()).abs().max() for a, b in zip(found, others, strict=True))
        for others in (states(own), old)
    )
    assert far < 0.1 * moved


@pytest.mark.skipif(not ONEDNN, reason="this processor has no bf16 products of oneDNN's")
def test_decoders_of_one_model_share_what_was_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.decode.forward.product.library", lambda: None)
    model = made("llama").bfloat16()
    first, second = (Runner(model, 120).call.layers[0].entry[1] for _ in range(2))
    assert first.packed[0] is second.packed[0]


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
    monkeypatch.setattr("draftsmith.decode.forward.lean.normed", lambda norm, x: x)
    runner = Runner(made("llama"), 120)
    assert runner.call == runner._whole


def test_models_in_training_and_other_families_use_their_own_forward() -> None:
    training = made("llama").requires_grad_(True)
    neox = GPTNeoXForCausalLM(
        GPTNeoXConfig(vocab_size=120, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    ).requires_grad_(False)
    for model in (training, neox):
        assert lean_body(model.base_model) is None
    with pytest.warns(UserWarning, match=r"require gradients.* expected model\.requires_grad_"):
        Runner(training, 120)
