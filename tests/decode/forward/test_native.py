"""The lean body in one call of C++: the model's own states, on its own weights."""

from collections.abc import Callable

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftsmith.decode.forward import compiled, native
from draftsmith.decode.forward.runner import Runner, Seen
from draftsmith.models.taps import NORM

SIZES = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 96,
    "initializer_range": 0.1,
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 64})),
}
pytestmark = pytest.mark.usefixtures("one_thread")
needs_compiler = pytest.mark.skipif(compiled.library() is None, reason="no C++ compiler")


def made(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = FAMILIES[family]().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # born as ones and zeros, which would hide a mistake
            parameter.add_(torch.randn_like(parameter) / 3)
    return model.bfloat16()


@torch.inference_mode()
def states(runner: Runner) -> list[torch.Tensor]:
    """Of ragged rows: a chain with taps, then a tree of one; and the keys and values at the end."""
    lens_B = torch.tensor([37, 3])
    pool = runner.pool(2, 48)
    tokens_BN = torch.arange(74).view(2, 37) * 7 % 120
    runner.prefill(pool, torch.arange(2), tokens_BN, lens_B)
    at_BN = lens_B[:, None] + torch.arange(4)
    found = list(runner.verify(pool, tokens_BN[:, :4], at_BN, at_BN, Seen(lens_B, 64)))
    ancestors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    depth_N = torch.tensor([0, 1, 1, 2])
    seen = Seen(lens_B, 64, ancestors, depth_N)
    found += runner.verify(pool, tokens_BN[:, 2:6], lens_B[:, None] + depth_N, at_BN, seen)
    pool.kv_2LBSHE[:, :, 1, 7:] = 0  # what a padded prompt leaves
    return [s.float() for s in [*found, pool.kv_2LBSHE] if s is not None]


@needs_compiler
@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_the_models_own(family: str) -> None:
    runner, whole = (Runner(made(family), 120, taps=(0, 2, NORM, 3)) for _ in range(2))
    assert runner.call.native is not None
    whole.call = whole._whole
    wide = Runner(made(family).float(), 120, taps=(0, 2, NORM, 3))
    for ours, own, exact in zip(states(runner), states(whole), states(wide), strict=True):
        assert ours.shape == own.shape
        # As near to the exact states as the model's own rounding comes.
        assert (ours - exact).norm() <= 1.5 * (own - exact).norm() + 1e-6 * exact.norm()


@needs_compiler
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "without",
    [
        {(1, "attention")},
        {(0, "mlp"), (2, "attention")},
        *({(layer, half) for half in native.HALVES} for layer in range(3)),
    ],
    ids=["attention", "both", "first", "second", "last"],
)
def test_a_part_without_some_halves(family: str, without: set[tuple[int, str]]) -> None:
    """As the same part's layers in torch, one after another; which isn't the whole model."""
    parts = [Runner(made(family), 120).part(3, without) for _ in range(2)]
    assert parts[0].call.native is not None
    parts[1].call.native = None
    wide = Runner(made(family).float(), 120).part(3, without)
    whole = states(Runner(made(family).float(), 120))
    for ours, lean, exact, other in zip(*map(states, (*parts, wide)), whole, strict=True):
        assert (ours - exact).norm() <= 1.5 * (lean - exact).norm() + 1e-6 * exact.norm()
        assert (other - exact).norm() > 0.05 * exact.norm()


@needs_compiler
@pytest.mark.parametrize(("many", "hidden", "inner"), [(14, 208, 304), (70, 256, 320)])
@torch.inference_mode()
def test_a_token_comes_out_the_same_whoever_is_with_it(many: int, hidden: int, inner: int) -> None:
    """Also among so many that products have another form."""
    torch.manual_seed(0)
    wide = LlamaConfig(**{**SIZES, "hidden_size": hidden, "intermediate_size": inner})
    runner = Runner(LlamaForCausalLM(wide).eval().requires_grad_(False).bfloat16(), 120)
    assert runner.call.native is not None
    runner.call.native = runner.call.native.unbound()  # on a machine too where it isn't faster
    tokens_1N, lens_1 = torch.arange(many)[None] * 5 % 120, torch.tensor([1])
    at_1N = lens_1[:, None] + torch.arange(many)
    pools = [runner.pool(1, 80) for _ in range(2)]
    together_1NH = runner.verify(pools[0], tokens_1N, at_1N, at_1N, Seen(lens_1, 80))[0]
    for n in range(many):
        one = tokens_1N[:, n : n + 1], at_1N[:, n : n + 1], at_1N[:, n : n + 1]
        alone_11H = runner.verify(pools[1], *one, Seen(lens_1 + n, 80))[0]
        assert torch.equal(alone_11H, together_1NH[:, n : n + 1])
    assert torch.equal(pools[0].kv_2LBSHE, pools[1].kv_2LBSHE)


@needs_compiler
@torch.inference_mode()
def test_prompts_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged prompts a few tokens at a time: what a whole pass makes of them, to the bit what any
    other pieces do; no other row is written.
    """
    runner, lens_B = Runner(made("qwen2"), 120, taps=(0, 2, 3)), torch.tensor([37, 9])
    runner.call.native = runner.call.native.unbound()
    tokens_BN, rows_B = torch.arange(74).view(2, 37) * 7 % 120, torch.tensor([2, 0])
    real_BN, found = torch.arange(37) < lens_B[:, None], []
    for piece in (0, 8, 64):
        runner.call.native.longest = 64 * (piece > 0)
        monkeypatch.setattr("draftsmith.decode.forward.runner.PIECE", piece)
        pool = runner.pool(3, 48)
        pool.kv_2LBSHE.fill_(7)
        logits_BV, taps = runner.prefill(pool, rows_B, tokens_BN, lens_B)
        assert (pool.kv_2LBSHE[:, :, 1] == 7).all()
        taps_MU = torch.cat(taps) if isinstance(taps, tuple) else taps[real_BN]
        kept = [pool.kv_2LBSHE[:, :, row, :many] for row, many in zip(rows_B, lens_B, strict=True)]
        found.append([logits_BV, taps_MU, *kept])
    for whole, some, others in zip(*found, strict=True):
        assert_near(some, whole)
        assert torch.equal(some, others)
    monkeypatch.setattr(native.NativeBody, "takes", lambda *_: False)  # pieces in torch
    assert_near(runner.prefill(runner.pool(3, 48), rows_B, tokens_BN, lens_B)[0], found[0][0])


@needs_compiler
@pytest.mark.parametrize("width", [32, 64])
@torch.inference_mode()
def test_attention_to_committed_slots(width: int) -> None:
    """Of queries of another model to a layer's slots: the softmax of all of them in fp32."""
    config = LlamaConfig(**{**SIZES, "head_dim": width})
    pool, lens_B = Runner(LlamaForCausalLM(config).bfloat16(), 120).pool(3, 200), [190, 17, 1]
    pool.kv_2LBSHE.normal_()
    query_BNAE = torch.randn(3, 2, 4, width, dtype=torch.bfloat16)
    assert not native.attends(query_BNAE.float(), pool)
    assert not native.attends(query_BNAE[..., :16], pool)
    found = native.committed(query_BNAE, pool, 1, torch.tensor(lens_B), 192)
    for row, many in enumerate(lens_B):
        keys, values = pool.kv_2LBSHE[:, 1, row, :many].float().repeat_interleave(2, 2)
        scores = torch.einsum("nae,sae->ans", query_BNAE[row].float(), keys) * width**-0.5
        assert_near(found[row], torch.einsum("ans,sae->nae", scores.softmax(-1), values))


@pytest.mark.parametrize("form", ["native", "lean", "whole"])
@torch.inference_mode()
def test_a_packed_pass_is_the_rectangular_one(form: str) -> None:
    """Rows with new tokens of their own number, of a chain and of a tree: their states, taps, keys
    and values are those of the rectangle, slow and obvious; nothing else is written.
    """
    runner = Runner(made("qwen2"), 120, taps=(0, 2, 3))
    if form == "native" and runner.call.native is None:
        pytest.skip("no C++ compiler")
    if form == "whole":
        runner.call = runner._whole
    else:
        runner.call.native = None if form == "lean" else runner.call.native.unbound()
    lens_B, pools = torch.tensor([9, 3, 5]), [runner.pool(3, 40) for _ in range(2)]
    tokens_BN, rows_B = torch.arange(27).view(3, 9) * 7 % 120, torch.arange(3)
    ancestors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    packed = torch.tensor([0, 1, 2, 4, 8, 9, 10, 11])  # of 4 each: three, one and four
    for block, depth_N in ((None, torch.arange(4)), (ancestors, torch.tensor([0, 1, 1, 2]))):
        for pool in pools:
            pool.kv_2LBSHE.zero_()
            runner.prefill(pool, rows_B, tokens_BN, lens_B)
        at_BN = lens_B[:, None] + torch.arange(4)
        fed = tokens_BN[:, 2:6], lens_B[:, None] + depth_N, at_BN, Seen(lens_B, 64, block, depth_N)
        wide = runner.verify(pools[0], *fed)
        found = runner.verify(pools[1], *fed, packed=packed)
        for a, b in zip(wide, found, strict=True):
            assert b.shape == (1, 8, a.shape[-1])
            assert_near(b[0], a.flatten(0, 1)[packed])
        slots = pools[0].flat(at_BN)
        for kv_2LBSHE in (pool.kv_2LBSHE for pool in pools):
            kv_2LBSHE.flatten(2, 3)[:, :, [s for i, s in enumerate(slots) if i not in packed]] = 0
        assert_near(pools[1].kv_2LBSHE, pools[0].kv_2LBSHE)


def assert_near(a: torch.Tensor, b: torch.Tensor) -> None:
    """But for how bf16 rounds where products have other shapes."""
    assert (a.float() - b.float()).abs().max() <= 0.02 * b.float().abs().max()


@needs_compiler
def test_changed_weights_and_parts_of_the_body_are_followed() -> None:
    runner = Runner(made("llama"), 120)
    layer = runner.model.model.layers[1]
    layer.mlp.down_proj.weight.mul_(2)
    layer.input_layernorm.weight.mul_(2)
    part = runner.part(2, taps=(1,))
    assert part.call.native is not None
    for ours in (runner, part):
        torch_runner = Runner(made("llama"), 120, taps=ours.taps)
        changed = torch_runner.model.model.layers[1]
        changed.mlp.down_proj.weight.mul_(2)
        changed.input_layernorm.weight.mul_(2)
        torch_runner = torch_runner if ours is runner else torch_runner.part(2, taps=(1,))
        torch_runner.call.native = None
        for a, b in zip(ours._trial(), torch_runner._trial(), strict=True):
            assert torch.allclose(a, b, atol=0.05 * float(b.abs().max()))


@pytest.mark.parametrize("reason", ["no compiler", "it fails", "widths", "fp32"])
def test_without_it_the_lean_body_goes_on(
    reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    model = made("llama")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled.library.cache_clear()
    if reason == "no compiler":
        monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    elif reason == "it fails":
        monkeypatch.setattr(compiled.shutil, "which", lambda name: "/bin/false")
    elif reason == "widths":
        model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "head_dim": 16})).bfloat16()
        model.eval().requires_grad_(False)
    else:
        model = model.float()
    runner = Runner(model, 120)
    compiled.library.cache_clear()
    assert runner.call is not runner._whole and runner.call.native is None
    states(runner)
