"""A target whose maps torchao has rounded: it decodes as itself, is told from the exact one, trains
heads, and answers for them.
"""

import builtins
import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from evaluated import arguments
from plain_decoding import plain_decode
from tiny_llama import build_llama
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from draftsmith.decode import __main__ as evaluation
from draftsmith.decode.draft_lms.lm import LMDrafter, weights_read
from draftsmith.decode.drafters.load import load_decoded
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.forward import compiled
from draftsmith.decode.forward.lean import LeanBody
from draftsmith.decode.forward.runner import Runner
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.fingerprint import differences, fingerprint
from draftsmith.models.target import (
    GROUP,
    TargetSpec,
    bytes_read,
    is_quantised,
    load_target,
    output_head,
    quantise,
    quantised_maps,
)
from draftsmith.models.tokenizer import vocab_size
from draftsmith.train import eagle, heads, prepare
from draftsmith.train.plan.table import plan
from draftsmith.train.text.prepared import read_answers

torchao = pytest.importorskip(
    "torchao.quantization", reason="torchao isn't installed (draftsmith[quantised])"
)

PROMPTS = [[5, 9, 17, 33], [101, 7], [250, 3, 3, 90, 14, 60]]
# How far the states may be from the exact target's: its weights are wide, and it is random.
FURTHEST = {"int8": 0.1, "int4": 0.5}
kinds = pytest.mark.parametrize("kind", FURTHEST)
Loaded = tuple[LlamaForCausalLM, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_target, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("quantised")
    copy.deepcopy(tiny_target).bfloat16().save_pretrained(folder / "target")
    tiny_tokenizer.save_pretrained(folder / "target")
    lines = [f"row {row} " + " ".join(str(row * i) for i in range(40)) for row in range(40)]
    for field, end in (("text", 200), ("prompt", 9)):
        rows = [json.dumps({field: line[:end]}) for line in lines]
        (folder / f"{field}s.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def quantised(folder: Path, kind: str, dtype: str = "float32") -> Loaded:
    spec = TargetSpec(str(folder / "target"), dtype=dtype, quantise=kind)
    model, tokenizer = load_decoded(spec, "cpu")
    assert isinstance(model, LlamaForCausalLM)
    return model, tokenizer


def states(model: LlamaForCausalLM) -> torch.Tensor:
    return output_head(model)[0](torch.arange(40)[None]).last_hidden_state


def check_decoding(model: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer, **how) -> None:
    """Speculative and plain decoding give the same tokens."""
    size = vocab_size(tokenizer)
    drafter = LMDrafter(copy.deepcopy(draft).requires_grad_(False), size)
    decoder = Decoder(model, tokenizer, drafter, K=3, tree=how["tree"], batch_size=2)
    params = SamplingParams(how["temperature"], max_new_tokens=12, ignore_eos=True)
    made = decoder.generate(PROMPTS, params)
    for index, (prompt, answer) in enumerate(zip(PROMPTS, made, strict=True)):
        given = {"vocab_size": size, "stop_ids": (), "index": index}
        assert answer.tokens == plain_decode(model, prompt, params, **given)


@kinds
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", ["chain", "dynamic:3,2,6"])
def test_it_decodes_as_its_own_plain_decoding(
    kind: str, temperature: float, tree: str, folder: Path, tiny_draft
) -> None:
    model, tokenizer = quantised(folder, kind)
    check_decoding(model, tiny_draft, tokenizer, temperature=temperature, tree=tree)
    exact = load_target(TargetSpec(str(folder / "target"), dtype="float32"), "cpu")[0]
    off = (states(model) - states(exact)).norm() / states(exact).norm()
    assert 1e-4 < off < FURTHEST[kind], "rounded, and no more"


@kinds
def test_on_two_threads_too(kind: str, folder: Path, tiny_draft, two_threads: None) -> None:
    model, tokenizer = quantised(folder, kind)
    check_decoding(model, tiny_draft, tokenizer, temperature=0.7, tree="chain")


@kinds
def test_it_is_one_target_in_either_type_and_another_than_the_exact_one(
    kind: str, folder: Path
) -> None:
    """And its bytes are those that the planner counts."""
    wide, tokenizer = quantised(folder, kind)
    low, _ = quantised(folder, kind, "bfloat16")
    exact, _ = load_target(TargetSpec(str(folder / "target"), dtype="float32"), "cpu")
    for one, other in zip(quantised_maps(wide), quantised_maps(low), strict=True):
        a: torch.Tensor = one.weight
        b: torch.Tensor = other.weight
        assert is_quantised(a) and torch.equal(a.dequantize(), b.dequantize())
    assert not is_quantised(low.lm_head.weight) and low.lm_head.weight.dtype == torch.bfloat16
    marks = [fingerprint(model, tokenizer) for model in (wide, exact)]
    assert marks[0]["body"] != marks[1]["body"] and not differences(*marks)
    assert weights_read(wide) < 0.6 * weights_read(exact)
    argv = ["entry=distill", "out=x", f"target.path={folder / 'target'}", "gpu=h100", "steps=1"]
    planned = plan([*argv, f"target.quantise={kind}"]).sizes.target
    assert planned == weights_read(low) + low.get_input_embeddings().weight.nbytes


def test_four_bits_are_torchaos_numbers_at_half_their_size() -> None:
    """Bit by bit, of weights with constant and empty groups; a product is that of these weights."""
    torch.manual_seed(0)
    model = build_llama(96, layers=1, hidden=64, seed=0).bfloat16().requires_grad_(False)
    up = model.model.layers[0].mlp.up_proj
    up.weight[0, :GROUP], up.weight[1, GROUP:], up.weight[2] = 0.0, 0.25, -up.weight[2].abs()
    theirs = nn.Linear(64, 128, bias=False)
    theirs.weight = nn.Parameter(up.weight.float().clone())
    grouped = torchao.PerGroup(GROUP), torchao.MappingType.ASYMMETRIC, torch.bfloat16
    torchao.quantize_(theirs, torchao.IntxWeightOnlyConfig(torch.int4, *grouped))
    quantise(model, "int4")
    plain = up.weight.dequantize()
    assert torch.equal(plain, theirs.weight.dequantize().float())
    # Half a byte a weight; two bytes of a scale and one of a zero a group.
    assert bytes_read(up.weight) == 128 * (64 // 2 + 64 // GROUP * 3)
    for dtype in (torch.float32, torch.bfloat16):
        x_NI, bias_O = torch.randn(5, 64, dtype=dtype), torch.randn(128, dtype=dtype)
        for moved in (up.weight, copy.deepcopy(up).to("cpu", dtype).weight):
            made = nn.functional.linear(x_NI, moved, bias_O)
            assert torch.equal(made, nn.functional.linear(x_NI, plain.to(dtype), bias_O))


@kinds
def test_layers_in_cpp_leave_it_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read weights as they lie, in bf16."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    model = build_llama(96, layers=2, hidden=128, seed=0).bfloat16().requires_grad_(False)
    exact = Runner(model, 96).call
    quantise(model, kind)
    rounded = Runner(model, 96).call
    assert isinstance(exact, LeanBody) and isinstance(rounded, LeanBody)
    assert rounded.native is None
    assert exact.native is not None or compiled.library() is None


@kinds
def test_its_layers_compile_as_a_gpu_has_them(kind: str, folder: Path) -> None:
    """In one graph each; what makes kernels of it is left out, which takes half a minute."""
    model, tokenizer = quantised(folder, kind)
    params = SamplingParams(0.0, max_new_tokens=8, ignore_eos=True)
    decoders = [Decoder(model, tokenizer) for _ in range(2)]
    decoders[1].runner.compile(backend="aot_eager", fullgraph=True)
    made = [[a.tokens for a in one.generate(PROMPTS, params)] for one in decoders]
    assert made[0] == made[1]


@kinds
@pytest.mark.parametrize("entry", [eagle, heads])
def test_a_head_is_trained_on_it(kind: str, entry, folder: Path, tmp_path: Path) -> None:
    """From kept states, with its layers away between evaluations; the exact target's states are
    refused for it. What is trained decodes losslessly with it.
    """
    small = [f"data={folder / 'texts.jsonl'}", "steps=2", "batch_size=2", "text.max_length=40"]
    small += ["heldout={limit: 2, prompt_tokens: 8, max_new_tokens: 8}", "eval_every=2"]
    small += ["unroll=2"] if entry is eagle else ["head.kind=medusa", "head.heads=2", "K=2"]
    cache = [f"cache.path={tmp_path / 'states'}", "cache.offload_target=true"]
    argv = [f"target.path={folder / 'target'}", f"target.quantise={kind}", *small, *cache]
    AcceleratorState._reset_state(reset_partial_state=True)
    entry.main([*argv, f"out={tmp_path / 'run'}"])
    with pytest.raises(ValueError, match="target body"):
        exact = [text for text in argv if not text.startswith("target.quantise")]
        entry.main([*exact, f"out={tmp_path / 'other'}"])
    asked = ("limit=2", "identity=true", "dtype=float32", f"quantise={kind}", "K=2")
    drafter = f"drafter={tmp_path / 'run/drafter'}"
    evaluation.main(arguments(folder, tmp_path / "report", drafter, *asked))
    report = json.loads((tmp_path / "report/report.json").read_text())
    assert report["lossless"] and report["identical"]["same"] == 2


@kinds
def test_it_answers_for_its_drafts(kind: str, folder: Path, tmp_path: Path) -> None:
    argv = [f"target.path={folder / 'target'}", f"prompts={folder / 'prompts.jsonl'}", "split=all"]
    argv += [f"out={tmp_path}", "max_new_tokens=8", "limit=3", "temperature=0", "device=cpu"]
    AcceleratorState._reset_state(reset_partial_state=True)
    prepare.main([*argv, f"target.quantise={kind}", "target.dtype=float32"])
    model, tokenizer = quantised(folder, kind)
    params = SamplingParams(0.0, max_new_tokens=8)
    answers = list(read_answers(tmp_path))
    alone = Decoder(model, tokenizer).generate([a["prompt_ids"] for a in answers], params)
    assert [a["token_ids"] for a in answers] == [a.tokens for a in alone] and len(answers) == 3


def test_what_cannot_be_rounded_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="got 'int3', expected int8 or int4"):
        TargetSpec("x", quantise="int3")
    narrow = build_llama(96, layers=1, hidden=48, seed=0)
    with pytest.raises(ValueError, match="got int4, 48 inputs, expected a multiple of 32"):
        quantise(narrow, "int4")
    quantise(narrow, "int8")
    with monkeypatch.context() as old:  # a torchao that has no such rounding
        old.delattr(torchao, "IntxWeightOnlyConfig")
        with pytest.raises(ValueError, match=r"got int4, no torchao >= 0\.18; install it"):
            quantised(folder, "int4")
    find = builtins.__import__

    def without(name: str, *given, **named):
        if name.startswith("torchao"):
            raise ImportError(name)
        return find(name, *given, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    for kind in FURTHEST:
        with pytest.raises(ValueError, match=rf"got {kind}, no torchao >= 0\.18; install it"):
            quantised(folder, kind)
