"""What only a CUDA device can show. Run by `make gpu`."""

from copy import deepcopy

import pytest
import torch
from head_folders import made
from rounds import MODES, started
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.draft_lms.lm import LMDrafter
from draftsmith.decode.draft_lms.pard import lm_drafter
from draftsmith.decode.drafters.load import drafter_of
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.engine.graphs import Graphs
from draftsmith.decode.evaluate.answers import divergences
from draftsmith.decode.forward.attention import Attend, Seen, available, mix
from draftsmith.decode.sampling import SamplingParams, log_race, position_keys
from draftsmith.decode.untrained.ngram import NgramDrafter
from draftsmith.models.heads.head import heads
from draftsmith.train.losses.chunked import chunked_divergence
from draftsmith.train.losses.pure import divergence

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = [
    "def main(",
    "import os, sys\nfor x in",
    "a",
    "class Foo:\n    def __init__(self):\n",
] * 4
TREES = {name: MODES[name] for name in ("chain", "static", "dynamic")}
HALF = torch.bfloat16


def test_noise_is_the_same_on_both_devices() -> None:
    keys = position_keys(torch.tensor([3, -5]), torch.arange(64).expand(2, -1))
    on_cpu, on_gpu = log_race(keys, 5_000), log_race(keys.to(DEVICE), 5_000).cpu()
    # The bits are equal; log1p and log may differ in the last place.
    assert torch.allclose(on_cpu, on_gpu, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", TREES)
def test_fp32_identity(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    mode: str,
    temperature: float,
) -> None:
    """Whatever drafts, the answers of plain decoding; where they differ, a near-tie."""
    torch.backends.cuda.matmul.allow_tf32 = False
    vocab = len(tiny_tokenizer)
    params = SamplingParams(temperature=temperature, max_new_tokens=64, ignore_eos=True)
    target, draft = _there(tiny_target), _there(tiny_draft)
    plain = Decoder(target, tiny_tokenizer).generate(PROMPTS, params)
    some = [LMDrafter(draft, vocab), LMDrafter(target, vocab)]
    ahead = _there(tiny_draft)
    ahead.config = deepcopy(ahead.config)
    ahead.config.pard_token = 1
    some.append(lm_drafter(ahead, vocab))
    for drafter in [*some, NgramDrafter(device=DEVICE)] if mode == "chain" else some:
        decoder = Decoder(target, tiny_tokenizer, drafter, batch_size=5, **TREES[mode])
        got = decoder.generate(PROMPTS, params)
        found = divergences(plain, got, target, params, vocab_size=vocab, dtype="float32")
        assert all(d.near_tie for d in found), found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("mode", TREES)
def test_a_graph_gives_the_tokens_of_the_calls_it_records(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    mode: str,
    dtype: torch.dtype,
    temperature: float,
) -> None:
    params = SamplingParams(temperature=temperature, max_new_tokens=64, ignore_eos=True)
    target, draft = _there(tiny_target, dtype), _there(tiny_draft, dtype)
    answers = []
    for record in (None, lambda run: run):
        drafter = LMDrafter(draft, len(tiny_tokenizer))
        decoder = Decoder(target, tiny_tokenizer, drafter, batch_size=3, **TREES[mode])
        decoder.graphs = Graphs(decoder.stepper, record)
        answers.append([c.tokens for c in decoder.generate(PROMPTS, params)])
        assert decoder.graphs.recordings, "no round was recorded"
    assert answers[0] == answers[1]


@pytest.mark.parametrize("mode", TREES)
@pytest.mark.parametrize("kind", [*heads(), "eagle1, a preview"])
def test_heads_are_captured_and_change_no_answer(
    tiny_target: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, kind: str, mode: str
) -> None:
    """In fp32: a graph's tokens are those of the calls it records, and plain decoding's."""
    torch.backends.cuda.matmul.allow_tf32 = False
    vocab, params = len(tiny_tokenizer), SamplingParams(1.0, max_new_tokens=64, ignore_eos=True)
    target = _there(tiny_target)
    plain = Decoder(target, tiny_tokenizer).generate(PROMPTS, params)
    kind, _, preview = kind.partition(", ")
    head = made(kind, tiny_target, **({"prefixed": True} if kind == "hydra" else {}))
    drafter = drafter_of(head.to(DEVICE), target, vocab)
    if preview:
        drafter.per_node.foretell(16)
    answers = []
    for record in (None, lambda run: run):
        settings = TREES[mode] | ({"K": 3} if mode != "dynamic" else {})
        decoder = Decoder(target, tiny_tokenizer, drafter, batch_size=3, **settings)
        decoder.graphs = Graphs(decoder.stepper, record)
        got = decoder.generate(PROMPTS, params)
        answers.append([c.tokens for c in got])
        assert decoder.graphs.recordings, "no round was recorded"
    found = divergences(plain, got, target, params, vocab_size=vocab, dtype="float32")
    assert answers[0] == answers[1] and all(d.near_tie for d in found), found


@pytest.mark.parametrize("mode", TREES)
def test_bf16_same_shape_identity(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    mode: str,
) -> None:
    """One row in bf16: the baseline that decodes through the same rounds gives the same tokens."""
    vocab = len(tiny_tokenizer)
    params = SamplingParams(max_new_tokens=64, ignore_eos=True)
    target, draft = _there(tiny_target, HALF), _there(tiny_draft, HALF)
    answers = []
    for same_shape in (False, True):
        settings = {"attention": "masked", "same_shape": same_shape, **TREES[mode]}
        decoder = Decoder(target, tiny_tokenizer, LMDrafter(draft, vocab), **settings)
        answers.append([c.tokens for c in decoder.generate(PROMPTS[:4], params)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("mode", MODES)
def test_a_round_never_waits_for_the_device(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    mode: str,
) -> None:
    target, draft = _there(tiny_target, HALF), _there(tiny_draft, HALF)
    drafter = LMDrafter(draft, len(tiny_tokenizer))
    decoder = Decoder(target, tiny_tokenizer, drafter, batch_size=4, fast=False, **MODES[mode])
    batch = started(decoder, SamplingParams(temperature=1.0, max_new_tokens=40)).batch
    plan = decoder.policy.next_plan()
    decoder.stepper.step(batch, plan, 64, None)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoder.stepper.step(batch, plan, 64, None)
        with pytest.raises(RuntimeError):
            batch.rows.lens_B.tolist()  # the check can fail
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_attention_backends_are_masked_sdpa(shape: str) -> None:
    """Each backend in bf16 is about as near to fp64 as masked sdpa in bf16 is."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=DEVICE, dtype=torch.float64)

    rows, slots, nodes = 3, 128, 8
    lens_B = torch.tensor([1, 37, 100], device=DEVICE)
    step_N = torch.arange(nodes, device=DEVICE)
    seen, depth_N = Seen(lens_B, slots), step_N
    if shape == "tree":
        depth_N = step_N.clamp(max=1)
        seen = Seen(lens_B, slots, torch.eye(nodes, device=DEVICE).bool() | (step_N == 0), depth_N)
    q, k, v = normal(rows, 8, nodes, 64), normal(rows, 2, slots, 64), normal(rows, 2, slots, 64)
    # Slots lie next to one another as they do in the pool.
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))

    def mixed(backend: str, dtype: torch.dtype) -> Tensor:
        where = {"groups": 4, "dtype": dtype, "backend": backend}
        attend = Attend(seen, lens_B[:, None] + depth_N, **where)
        return mix(attend, q.to(dtype), k.to(dtype), v.to(dtype), scale=None).double()

    exact = mixed("masked", torch.float64)
    error = {name: (mixed(name, HALF) - exact).abs().max() for name in available(DEVICE, HALF)}
    assert all(e <= 2 * error["masked"] for e in error.values()), error


@pytest.mark.parametrize("name", ["fkl", "rkl", "tv"])
def test_chunked_divergence_equals_the_naive_form(name: str) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"device": "cuda", "generator": generator}
    q_hidden_NH = torch.randn(96, 64, **options).requires_grad_()
    q_head_VH = (torch.randn(5_000, 64, **options) / 8).requires_grad_()
    p_hidden_NG, p_head_VG = torch.randn(96, 80, **options), torch.randn(5_000, 80, **options) / 9
    weight_N = (torch.arange(96, device="cuda") % 3 > 0).float()
    loss = divergence(name)
    out = chunked_divergence(loss, q_hidden_NH, q_head_VH, p_hidden_NG, p_head_VG, weight_N)
    got = torch.autograd.grad(out.total, (q_hidden_NH, q_head_VH))
    naive = (loss(p_hidden_NG @ p_head_VG.T, q_hidden_NH @ q_head_VH.T) * weight_N).sum()
    want = torch.autograd.grad(naive, (q_hidden_NH, q_head_VH))
    assert torch.allclose(out.total, naive, rtol=1e-4)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4)


def _there(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A frozen copy on the device: other tests use the original."""
    copy = type(model)(model.config).eval().requires_grad_(False)
    copy.load_state_dict(model.state_dict())
    return copy.to(DEVICE, dtype)
