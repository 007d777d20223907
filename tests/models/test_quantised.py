"""A target whose maps torchao has rounded: it decodes as itself, is told from the exact one, and
trains heads.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from plain_decoding import plain_decode
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from draftsmith.decode.drafters.lm import LMDrafter, weights_read
from draftsmith.decode.drafters.load import load_decoded
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.sampling import SamplingParams
from draftsmith.models.fingerprint import differences, fingerprint
from draftsmith.models.target import TargetSpec, is_quantised, load_target, output_head
from draftsmith.models.tokenizer import vocab_size
from draftsmith.train import eagle
from draftsmith.train.plan.table import plan

pytest.importorskip("torchao", reason="torchao isn't installed (draftsmith[quantised])")

PROMPTS = [[5, 9, 17, 33], [101, 7], [250, 3, 3, 90, 14, 60]]


@pytest.fixture
def folder(tmp_path: Path, tiny_target, tiny_tokenizer) -> Path:
    copy.deepcopy(tiny_target).bfloat16().save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


Loaded = tuple[LlamaForCausalLM, PreTrainedTokenizerBase]


def quantised(folder: Path, dtype: str = "float32") -> Loaded:
    model, tokenizer = load_decoded(TargetSpec(str(folder), dtype=dtype, quantise="int8"), "cpu")
    assert isinstance(model, LlamaForCausalLM)
    return model, tokenizer


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", ["chain", "dynamic:3,2,6"])
def test_it_decodes_as_its_own_plain_decoding(
    temperature: float, tree: str, folder: Path, tiny_draft
) -> None:
    model, tokenizer = quantised(folder)
    size = vocab_size(tokenizer)
    drafter = LMDrafter(tiny_draft.requires_grad_(False), size)
    decoder = Decoder(model, tokenizer, drafter, K=3, tree=tree, batch_size=2)
    params = SamplingParams(temperature, max_new_tokens=12, ignore_eos=True)
    made = decoder.generate(PROMPTS, params)
    for index, (prompt, answer) in enumerate(zip(PROMPTS, made, strict=True)):
        given = {"vocab_size": size, "stop_ids": (), "index": index}
        assert answer.tokens == plain_decode(model, prompt, params, **given)
    exact = load_target(TargetSpec(str(folder), dtype="float32"), "cpu")[0]
    ids_BT = torch.arange(40)[None]
    states = [output_head(one)[0](ids_BT).last_hidden_state for one in (model, exact)]
    off = (states[0] - states[1]).norm() / states[1].norm()
    assert 1e-4 < off < 0.1, "rounded, and no more"


def test_it_is_one_target_in_either_type_and_another_than_the_exact_one(folder: Path) -> None:
    """And its bytes are those that the planner counts."""
    wide, tokenizer = quantised(folder)
    low, _ = quantised(folder, "bfloat16")
    exact, _ = load_target(TargetSpec(str(folder), dtype="float32"), "cpu")
    for one, other in zip(wide.model.layers, low.model.layers, strict=True):
        assert torch.equal(one.mlp.up_proj.weight.qdata, other.mlp.up_proj.weight.qdata)
    assert not is_quantised(low.lm_head.weight) and low.lm_head.weight.dtype == torch.bfloat16
    marks = [fingerprint(model, tokenizer) for model in (wide, exact)]
    assert marks[0]["body"] != marks[1]["body"] and not differences(*marks)
    assert weights_read(wide) < 0.6 * weights_read(exact)
    argv = ["entry=distill", "out=x", f"target.path={folder}", "target.quantise=int8", "gpu=h100"]
    planned = plan([*argv, "steps=1"]).sizes.target
    assert planned == weights_read(low) + low.get_input_embeddings().weight.nbytes


def test_a_head_is_trained_on_it(folder: Path, tmp_path: Path) -> None:
    """From kept states, with its layers away between evaluations; the exact target's states are
    refused for it.
    """
    lines = (f"row {row} " + " ".join(str(row * i) for i in range(40)) for row in range(40))
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    small = [
        f"data={text}",
        "steps=2",
        "batch_size=2",
        "text.max_length=40",
        "unroll=2",
        "eval_every=2",
    ]
    small += ["heldout={prompts: 2, prompt_tokens: 8, max_new_tokens: 8}"]
    cache = [f"cache.path={tmp_path / 'states'}", "cache.offload_target=true"]
    argv = [f"target.path={folder}", "target.quantise=int8", *small, *cache]
    AcceleratorState._reset_state(reset_partial_state=True)
    eagle.main([*argv, f"out={tmp_path / 'run'}"])
    assert (tmp_path / "run/drafter/model.safetensors").is_file()
    with pytest.raises(ValueError, match="target body"):
        exact = [text for text in argv if text != "target.quantise=int8"]
        eagle.main([*exact, f"out={tmp_path / 'other'}"])
    with pytest.raises(ValueError, match="got 'int3', expected int8"):
        load_target(TargetSpec(str(folder), quantise="int3"), "cpu")
