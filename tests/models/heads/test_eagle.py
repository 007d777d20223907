"""EAGLE heads unrolled over a text against the same head run on, one token at a time."""

import pytest
import torch
import torch.nn.functional as F
from tapped import llama
from tiny_eagle import eagle, layer_config
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config

from draftsmith.models.heads.eagle import FLAGS, Eagle
from draftsmith.models.layers.gated import GatedFusion
from draftsmith.models.layers.layer import Attention, causal
from draftsmith.models.taps import default_taps, target_states
from draftsmith.models.vocab import DraftVocab

T = 12

TEXT_BT = torch.arange(2 * T).view(2, T) * 7 % 97

POSITIONS_BT = torch.arange(T).expand(2, T)


def target_of(layers: int) -> PreTrainedModel:
    torch.manual_seed(layers)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    config = LlamaConfig(vocab_size=97, num_attention_heads=4, num_key_value_heads=2, **sizes)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def unrolled(head: Eagle, target: PreTrainedModel, steps: int, mask: Tensor | None = None):
    inputs = {"input_ids": TEXT_BT, "position_ids": POSITIONS_BT, "attention_mask": mask}
    fused_BTH = head.fuse(target_states(target, head.taps, **inputs).taps_BTF)
    return fused_BTH, head.unroll(fused_BTH, TEXT_BT, POSITIONS_BT, mask, steps=steps)


def growing() -> Attention:
    """One pair after another, each attending to itself and to all before it: a KV cache."""
    kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kept.setdefault(layer, []).append((key, value))
        keys, values = (torch.cat(x, 1).transpose(1, 2) for x in zip(*kept[layer], strict=True))
        heads = (query.transpose(1, 2), keys, values)
        return F.scaled_dot_product_attention(*heads, enable_gqa=True).transpose(1, 2).flatten(2)

    return attend


def run_on(head: Eagle, fused_BTH: Tensor, row: int, at: int, steps: int) -> list[Tensor]:
    """As the drafter does after position `at`: pairs (f_i, x_{i+1}), i <= at, one by one, and then
    its own outputs with the text's tokens.
    """
    attention, made = growing(), []
    hidden = fused_BTH[row : row + 1, :1]
    for i in range(at + steps):
        hidden = fused_BTH[row : row + 1, i : i + 1] if i <= at else hidden
        position = torch.tensor([[i]])
        output = head.step(hidden, TEXT_BT[row : row + 1, i + 1 : i + 2], position, attention)
        hidden = head.fed_back(output)
        if i >= at:
            made.append(head.before_head(output)[0, 0])
    return made


HEADS = {
    "eagle1": {"version": 1},
    "eagle1, two layers": {"version": 1, "layer": layer_config(layers=2)},
    "dovetail": {"version": 1, "fusion": "gated"},
    "mtp": {"version": 1, "mtp": True},
    "mtp, two layers of qwen3": {
        "version": 1,
        "mtp": True,
        "layer": layer_config(Qwen3Config, layers=2),
    },
    "eagle3": {},
    "eagle3, two layers": {"layer": layer_config(layers=2)},
    "qwen3": {"layer": layer_config(Qwen3Config)},
    "half the vocabulary": {"draft_vocab": 48},
    **{flag: {flag: True} for flag in FLAGS},
}


@pytest.mark.parametrize("name", HEADS)
def test_unrolled_steps_are_those_of_running_on(name) -> None:
    """What defines the training-time test, at every position that has a text for it."""
    target, steps = llama(), 4
    head = eagle(target, **HEADS[name])
    with torch.no_grad():
        fused_BTH, states_SBTH = unrolled(head, target, steps)
        for row in range(2):
            for at in range(T - steps):
                want = run_on(head, fused_BTH, row, at, steps)
                for step in range(steps):
                    assert torch.allclose(states_SBTH[step][row, at], want[step], atol=1e-5)
    # Later steps do depend on what was fed back: not the same states again.
    assert not torch.allclose(states_SBTH[1], states_SBTH[0], atol=1e-3)


def test_gated_fusion_is_the_papers_formula() -> None:
    """With no gate and maps that change nothing half the state and half silu of the token; at any
    weights the formula, which another order of its inputs isn't.
    """
    torch.manual_seed(0)
    fusion, token_XH, state_XH = GatedFusion(8, 1e-6), torch.randn(5, 8), torch.randn(5, 8)
    both = torch.cat([token_XH, state_XH], -1)
    with torch.no_grad():
        normed_XH = token_XH / (token_XH.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        one_XH, two_XH = state_XH @ fusion.state.weight.T, normed_XH @ fusion.token.weight.T
        two_XH = F.silu(two_XH)
        z_XH = (torch.cat([one_XH, two_XH], -1) @ fusion.gate.weight.T).sigmoid()
        want_XH = z_XH * one_XH + (1 - z_XH) * two_XH
        assert torch.allclose(fusion(both), want_XH, atol=1e-6)
        assert not torch.allclose(fusion(both.roll(8, -1)), want_XH, atol=1e-2)
        for linear in (fusion.state, fusion.token):
            linear.weight.copy_(torch.eye(8))
        fusion.gate.weight.zero_()
        assert torch.allclose(fusion(both), (state_XH + F.silu(normed_XH)) / 2, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("layers", [2, 3, 5, 8])
def test_any_depth_of_targets_and_steps(layers, steps) -> None:
    target = target_of(layers)
    for taps in (default_taps(layers), (0, layers), tuple(range(layers + 1))):
        head = eagle(target, taps=taps)
        with torch.no_grad():
            fused_BTH, states = unrolled(head, target, steps)
            assert len(states) == steps
            at = T - steps - 1
            want = run_on(head, fused_BTH, 1, at, steps)
        assert torch.allclose(states[-1][1, at], want[-1], atol=1e-5)


@pytest.mark.parametrize("version", [1, 3])
def test_step_0_is_one_causal_step(version) -> None:
    target = llama()
    head = eagle(target, version=version)
    fused_BTH, (first_BTH, *_) = unrolled(head, target, 2)
    tokens_BT = F.pad(TEXT_BT[:, 1:], (0, 1))
    want_BTH = head.before_head(head.step(fused_BTH, tokens_BT, POSITIONS_BT, causal()))
    assert torch.allclose(first_BTH, want_BTH, atol=1e-6)


def test_gradients_flow_through_all_steps() -> None:
    """From the last step alone, to the layer that ran before and to the states it began with."""
    target = llama()
    head = eagle(target)
    fused_BTH, states = unrolled(head, target, 3)
    at = 4
    (d_fused,) = torch.autograd.grad(states[2][0, at].square().sum(), fused_BTH)
    reached = d_fused[0].abs().sum(-1) > 0
    assert reached[: at + 1].all()
    assert not reached[at + 1 :].any()
    assert not d_fused[1].any()


def test_documents_do_not_see_each_other() -> None:
    """Two documents in one row draft as each of them alone does."""
    target = llama()
    head = eagle(target)
    cut, steps = 7, 3
    document_T = (torch.arange(T) >= cut).long()
    mask_TT = (document_T[:, None] == document_T[None]).tril()
    positions_BT = torch.cat([torch.arange(cut), torch.arange(T - cut)]).expand(2, T)

    def states(tokens_BT: Tensor, positions_BT: Tensor, mask: Tensor | None) -> Tensor:
        inputs = {"input_ids": tokens_BT, "position_ids": positions_BT, "attention_mask": mask}
        with torch.no_grad():
            fused_BTH = head.fuse(target_states(target, head.taps, **inputs).taps_BTF)
            return torch.stack(head.unroll(fused_BTH, tokens_BT, positions_BT, mask, steps=steps))

    packed = states(TEXT_BT, positions_BT, mask_TT.expand(2, 1, T, T))
    for span in (slice(0, cut), slice(cut, T)):
        alone = states(TEXT_BT[:, span], positions_BT[:, span], None)
        inside = alone.shape[2] - steps
        assert torch.allclose(packed[:, :, span][:, :, :inside], alone[:, :, :inside], atol=1e-5)


def test_a_draft_vocabulary_is_named_by_the_targets_ids() -> None:
    head = eagle(llama(), draft_vocab=48)
    ids_D = torch.randperm(97, generator=torch.Generator().manual_seed(0))[:48].sort().values
    head.set_vocab(DraftVocab(ids_D, 97))
    assert torch.equal(head.vocab.ids_D, ids_D)
    assert head.head_DH.shape == (48, 32)
