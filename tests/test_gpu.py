"""What only a CUDA device can show. Run by `make gpu`."""

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafters.lm import LMDrafter
from draftsmith.decode.drafters.ngram import NgramDrafter
from draftsmith.decode.engine import Decoder
from draftsmith.decode.exactness import divergences
from draftsmith.decode.sampling import SamplingParams, log_race, position_keys
from draftsmith.train.chunked import chunked_divergence
from draftsmith.train.losses import divergence

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


def test_noise_is_the_same_on_both_devices() -> None:
    keys = position_keys(torch.tensor([3, -5]), torch.arange(64).expand(2, -1))
    on_cpu, on_gpu = log_race(keys, 5_000), log_race(keys.cuda(), 5_000).cpu()
    # The bits are equal; log1p and log may differ in the last place.
    assert torch.allclose(on_cpu, on_gpu, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_fp32_identity(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    temperature: float,
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    vocab = len(tiny_tokenizer)
    params = SamplingParams(temperature=temperature, max_new_tokens=64, ignore_eos=True)
    target, draft = _on_gpu(tiny_target), _on_gpu(tiny_draft)
    plain = Decoder(target, tiny_tokenizer).generate(PROMPTS, params)
    for drafter in (LMDrafter(draft, vocab), LMDrafter(target, vocab), NgramDrafter(device="cuda")):
        decoder = Decoder(target, tiny_tokenizer, drafter, K=4, batch_size=5)
        got = decoder.generate(PROMPTS, params)
        found = divergences(plain, got, target, params, vocab_size=vocab, dtype="float32")
        assert all(d.near_tie for d in found), found


def test_bf16_same_shape_identity(
    tiny_target: PreTrainedModel,
    tiny_draft: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """In bf16 the baseline that decodes through the same shapes gives the same tokens."""
    vocab = len(tiny_tokenizer)
    params = SamplingParams(max_new_tokens=64, ignore_eos=True)
    target, draft = _on_gpu(tiny_target).bfloat16(), _on_gpu(tiny_draft).bfloat16()
    spec = Decoder(target, tiny_tokenizer, LMDrafter(draft, vocab), K=4)
    same = Decoder(target, tiny_tokenizer, LMDrafter(draft, vocab), K=4, same_shape=True)
    got, want = (d.generate(PROMPTS[:4], params) for d in (spec, same))
    assert [c.tokens for c in got] == [c.tokens for c in want]


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


def _on_gpu(model: PreTrainedModel) -> PreTrainedModel:
    """A copy on the device: other tests use the original."""
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    return copy.cuda()
