"""MTP modules in the checkpoints of their models and apart: read whole, and what they compute."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from head_folders import equal_heads, made, on_disk, ours
from official_mtp import FAMILIES, Module, official, rename
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from truths import PROMPTS, SETTINGS, truths

from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.models.disk.read_lm import load_lm
from draftsmith.models.folder.drafter_folder import DrafterFolder, open_drafter
from draftsmith.models.folder.imports import recognise
from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.layers.layer import causal
from draftsmith.models.servers.doctor import examine
from draftsmith.models.servers.export import serve_line

Target = LlamaForCausalLM
TEXT_BT = torch.arange(24).view(2, 12) * 7 % 320


def opened(folder: Path, target: Target) -> DrafterFolder:
    with pytest.warns(UserWarning, match="not known to be made for this target"):
        return open_drafter(folder, None, target_config=target.config)


def eagle_in(folder: Path, target: Target) -> Eagle:
    head = opened(folder, target).head("float32")
    assert isinstance(head, Eagle) and head.kind == "mtp"
    head.bind(target)
    return head


@torch.no_grad()
def depths(head: Eagle, target: Target, *, raw: bool = False) -> list[Tensor]:
    """What the LM head multiplies at two depths: the second reads the first's output, causally."""
    state_BTH = target.model(TEXT_BT).last_hidden_state
    at_BT, found = torch.arange(12).expand(2, -1), []
    for depth in (1, 2):
        tokens_BT = TEXT_BT.roll(-depth, 1)
        output_BTH = head.step(head.fuse(state_BTH), tokens_BT, at_BT, causal())
        found.append(head.before_head(output_BTH))
        state_BTH = output_BTH if raw else head.fed_back(output_BTH)
    return found


@torch.no_grad()
def obvious(theirs: Module, target: Target) -> list[Tensor]:
    state_BTH, found = target.model(TEXT_BT).last_hidden_state, []
    for depth in (1, 2):
        embedded_BTH = target.get_input_embeddings()(TEXT_BT.roll(-depth, 1))
        state_BTH = theirs(embedded_BTH, state_BTH)
        found.append(state_BTH)
    return found


def apart(one: list[Tensor], other: list[Tensor]) -> list[float]:
    return [float((a - b).abs().max()) for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_module_computes_what_its_own_code_does(
    tmp_path: Path, tiny_target: Target, family: str
) -> None:
    theirs = official(family, tmp_path / "theirs", tiny_target)
    head = eagle_in(tmp_path / "theirs", tiny_target)
    wanted = obvious(theirs, tiny_target)
    assert max(apart(depths(head, tiny_target), wanted)) < 1e-5
    # Twins: the other order before the projection, and feeding back without the norm.
    assert apart(depths(head, tiny_target, raw=True), wanted)[1] > 0.05
    head.fc.weight.data = torch.cat(head.fc.weight.data.chunk(2, 1)[::-1], 1)
    assert min(apart(depths(head, tiny_target), wanted)) > 0.05


def test_every_tensor_is_theirs_bit_for_bit(tmp_path: Path, tiny_target: Target) -> None:
    """Of MiMo's the halves change places, and the output's map has a bias of zeros."""
    theirs = official("mimo", tmp_path / "theirs", tiny_target).state_dict()
    got = eagle_in(tmp_path / "theirs", tiny_target).state_dict()
    state_HH, token_HH = theirs.pop("eh_proj.weight").chunk(2, 1)
    assert torch.equal(got.pop("fc.weight"), torch.cat([token_HH, state_HH], 1))
    assert not got.pop("layers.0.self_attn.o_proj.bias").any()
    for name, tensor in theirs.items():
        name = name.replace("enorm", "pre_fc_norm_embedding").replace("hnorm", "pre_fc_norm_hidden")
        assert torch.equal(got.pop(name.replace("block.", "layers.0.")), tensor), name
    assert not got


def test_transformers_own_module_agrees(tiny_target: Target, tmp_path: Path) -> None:
    """Its `MtpModel`, which `generate(use_mtp=True)` drafts with."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("transformers of this version has no MtpModel")
    theirs = official("deepseek", tmp_path / "theirs", tiny_target)
    main = LlamaForCausalLM.from_pretrained(tmp_path / "theirs")
    main.config.num_mtp_layers = 1
    model = layers.MtpModel(main, 1).eval()
    names = {"block.": "mtp_block.", "norm.": "post_norm."}
    state = {}
    for name, tensor in theirs.state_dict().items():
        first = name.partition(".")[0] + "."
        state[f"layers.0.{names.get(first, first)}{name.partition('.')[2]}"] = tensor
    missing = model.load_state_dict(state, strict=False).missing_keys
    assert not [name for name in missing if name.startswith("layers.")], missing
    state_BTH = tiny_target.model(TEXT_BT).last_hidden_state
    tokens_BT, at_BT = TEXT_BT.roll(-1, 1), torch.arange(12).expand(2, -1)
    got = model.forward_layer(0, state_BTH, at_BT, None, input_ids=tokens_BT)
    ours = depths(eagle_in(tmp_path / "theirs", tiny_target), tiny_target)[0]
    assert torch.allclose(got, ours, atol=1e-5)


@pytest.mark.parametrize("family", ["deepseek", "nextn"])
def test_a_target_drafts_for_itself(
    tmp_path: Path, tiny_target: Target, tiny_tokenizer: PreTrainedTokenizerFast, family: str
) -> None:
    official(family, tmp_path / "target", tiny_target)
    with pytest.warns(UserWarning, match="in the layout of an MTP module"):
        drafter = load_drafter(str(tmp_path / "target"), tiny_target, tiny_tokenizer)
    assert drafter is not None and drafter.kind == "mtp"
    decoder = Decoder(tiny_target, tiny_tokenizer, drafter, K=3)
    done = decoder.generate(PROMPTS[:2], SETTINGS[1])
    assert [c.tokens for c in done] == truths(tiny_target, tiny_tokenizer, SETTINGS[1])[:2]


def test_a_mimo_folder_from_end_to_end(
    tmp_path: Path, tiny_target: Target, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Its layers are Qwen2's, and by that name transformers reads it; the module in it is spare."""
    sizes = tiny_target.config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "eos_token_id")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    torch.manual_seed(2)
    made = Qwen2ForCausalLM(Qwen2Config(**{name: sizes[name] for name in names}, **heads))
    official("mimo", tmp_path / "target", made, model_type="qwen2")
    target = load_lm(tmp_path / "target", dtype="auto", allow_unknown=True)
    target.eval().requires_grad_(False)
    with pytest.warns(UserWarning, match="in the layout of an MTP module"):
        drafter = load_drafter(str(tmp_path / "target"), target, tiny_tokenizer)
    assert drafter is not None and drafter.kind == "mtp"
    done = Decoder(target, tiny_tokenizer, drafter, K=2).generate(PROMPTS[:2], SETTINGS[0])
    plain = Decoder(target, tiny_tokenizer).generate(PROMPTS[:2], SETTINGS[0])
    assert [c.tokens for c in done] == [c.tokens for c in plain]


def test_another_models_folder_is_a_draft_lm(tmp_path: Path, tiny_target: Target) -> None:
    """With an MTP module in it a whole model is none, but for the target that it is."""
    official("deepseek", tmp_path / "theirs", tiny_target)
    other = type(tiny_target.config)(**tiny_target.config.to_dict() | {"num_hidden_layers": 9})
    assert recognise(tmp_path / "theirs", other) is None
    assert recognise(tmp_path / "theirs") is None
    assert recognise(tmp_path / "theirs", tiny_target.config) is not None
    assert examine(str(tmp_path / "theirs"))[0] == "lm"
    official("speculators", tmp_path / "apart", tiny_target)
    layout, findings = examine(str(tmp_path / "apart"))
    assert layout == "mtp" and not [f for f in findings if f.verdict == "fault"], findings


def test_of_several_modules_the_first_is_read(tmp_path: Path, tiny_target: Target) -> None:
    theirs = official("deepseek", tmp_path / "theirs", tiny_target)
    two = tmp_path / "two"
    shutil.copytree(tmp_path / "theirs", two)
    rename(two, {r"layers\.3\.": "layers.4."})
    merge(two, tmp_path / "theirs")
    with pytest.warns(UserWarning, match="of its 2 modules the first is read"):
        head = open_drafter(two, None, target_config=tiny_target.config).head("float32")
    assert isinstance(head, Eagle)
    head.bind(tiny_target)
    assert max(apart(depths(head, tiny_target), obvious(theirs, tiny_target))) < 1e-5


def merge(folder: Path, other: Path) -> None:
    """Give a folder the second file of another too, as its third."""
    shutil.copy(other / "model-2.safetensors", folder / "model-3.safetensors")
    index = [json.loads((f / "model.safetensors.index.json").read_text()) for f in (folder, other)]
    own, theirs = (made["weight_map"] for made in index)
    own |= {n: "model-3.safetensors" for n, f in theirs.items() if f == "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index[0]))


WRONG: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "gated attention": (
        {"model_type": "qwen3_next"},
        {},
        "an MTP layer of model_type 'qwen3_next'; expected one of llama, mimo.*no latent or gated",
    ),
    "experts": (
        {},
        {r"mlp\.(\w+)_proj": r"mlp.experts.0.\1_proj"},
        "3 missing.*3 unknown|mlp.experts.0",
    ),
    "no norm": ({}, {r".*\.enorm\.weight": ""}, "pre_fc_norm_embedding"),
    "other sizes": ({"intermediate_size": 40}, {}, "mlp.down_proj"),
    "no sizes": ({"num_attention_heads": None}, {}, "got no num_attention_heads"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_such_a_module_is_refused(
    tmp_path: Path, tiny_target: Target, name: str
) -> None:
    config, change, says = WRONG[name]
    official("deepseek", tmp_path / "theirs", tiny_target, **config)
    rename(tmp_path / "theirs", change)
    with pytest.raises(ValueError, match=says):
        open_drafter(tmp_path / "theirs", None, target_config=tiny_target.config)


def test_our_own_folder(
    tmp_path: Path, tiny_target: Target, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Saved, loaded, examined, and read again without its draftsmith.json; no server takes it."""
    for qwen in (False, True):
        head = made("mtp", tiny_target, qwen=qwen)
        folder = ours(tmp_path / f"drafter-{qwen}", head, tiny_target, tiny_tokenizer)
        with warnings.catch_warnings(action="error"):
            equal_heads(open_drafter(folder, None).head(), head)
        target = on_disk(tmp_path / f"target-{qwen}", tiny_target, tiny_tokenizer)
        layout, findings = examine(str(folder), target)
        assert layout == "mtp" and not [f for f in findings if f.verdict == "fault"], findings
        assert "no server loads an MTP module" in serve_line(folder, target)
        (folder / "draftsmith.json").unlink()
        equal_heads(opened(folder, tiny_target).head(), head)
