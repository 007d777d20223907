"""Drafters in other stacks' layouts: what each loader reads, tensor by tensor."""

import json
import shlex
import warnings
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from head_folders import equal_heads, made, on_disk, ours
from safetensors.torch import load_file
from saved_drafts import save_draft
from tiny_llama import build_llama
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.command import guarded
from draftsmith.export import main
from draftsmith.manual import of_module
from draftsmith.models.folder.drafter_folder import open_drafter
from draftsmith.models.heads.eagle import Eagle
from draftsmith.models.heads.head import Head
from draftsmith.models.layers.layer import causal
from draftsmith.models.servers.export import LAYOUTS, export, serve_line
from draftsmith.models.taps import target_states

Target = LlamaForCausalLM


@pytest.fixture(scope="module")
def target_path(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target: Target,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> str:
    return on_disk(tmp_path_factory.mktemp("target"), tiny_target, tiny_tokenizer)


@pytest.fixture
def save(tmp_path: Path, tiny_target: Target, tiny_tokenizer: PreTrainedTokenizerFast) -> Any:
    def saved(kind: str, **about: Any) -> tuple[Path, Head]:
        head = made(kind, tiny_target, **about)
        return ours(tmp_path / "head", head, tiny_target, tiny_tokenizer), head

    return saved


def read(folder: Path, file: str = "model.safetensors") -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / file)


def reread(folder: Path, target: Target) -> Head:
    with pytest.warns(UserWarning, match="not known to be made for this target"):
        return open_drafter(folder, None, target_config=target.config).head()


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_eagle3_is_what_both_servers_read(
    save: Any, target_path: str, tmp_path: Path, tiny_target: Target, to: str
) -> None:
    folder, head = save("eagle3", norm_output=True, fc_norm=True)
    line = export(str(folder), target_path, to, str(tmp_path / "out"))
    assert ("EAGLE3" if to == "sglang" else '"method": "eagle3"') in line
    config, tensors = read(tmp_path / "out")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 50000.0
    assert config["fc_norm"] and config["norm_output"] and not config["tie_word_embeddings"]
    assert config["norm_before_residual"] is config["norm_before_fc"] is False
    assert config["draft_vocab_size"] == 160 == len(tensors["lm_head.weight"])
    assert config["max_position_embeddings"] == 512 and config["torch_dtype"] == "float32"
    assert tensors["d2t"].dtype == torch.int64 and int(tensors["t2d"].sum()) == 160
    assert not (tmp_path / "out" / "draftsmith.json").exists()
    assert set(config) >= {"vocab_size", "head_dim", "hidden_act", "rms_norm_eps", "model_type"}
    equal_heads(reread(tmp_path / "out", tiny_target), head)
    lines = serve_line(folder, "t").splitlines()
    assert [line.split()[0] for line in lines] == ["vllm", "python", "#", "#"]
    assert "not for llama.cpp: it feeds back a state that isn't normed (norm_output)" in lines[2]
    assert "not for TensorRT-LLM: its documentation doesn't speak of fc_norm" in lines[3]


def test_sglang_reads_one_norm_before_fc(save: Any, target_path: str, tmp_path: Path) -> None:
    """Since the release after 0.5.14."""
    folder, _ = save("eagle3", norm_before_fc=True)
    export(str(folder), target_path, "sglang", str(tmp_path / "out"))
    config, tensors = read(tmp_path / "out")
    assert config["norm_before_fc"] and "input_norm.weight" in tensors


def test_lines_of_eagle3_for_llama_cpp_and_tensorrt(save: Any) -> None:
    folder, _ = save("eagle3", taps=(0, 1, 2))
    _, _, llama, tensorrt = serve_line(folder, "my target").splitlines()
    convert, serve = llama.split(" && ")
    assert convert.split()[:3] == ["python", "convert_hf_to_gguf.py", str(folder)]
    assert "--target-model-dir 'my target'" in convert and f"--outfile {folder}.gguf" in convert
    assert f"-md {folder}.gguf --spec-type draft-eagle3 --spec-draft-n-max 3" in serve
    written, served = tensorrt.split(" && ")
    said = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": str(folder)}
    assert json.loads(shlex.split(written)[1]) == {"speculative_config": said}
    assert served == f"trtllm-serve 'my target' --config {folder}-trtllm.yaml"


def test_all_tokens_need_no_map(save: Any, target_path: str, tmp_path: Path) -> None:
    folder, _ = save("eagle3", draft_vocab=320)
    export(str(folder), target_path, "vllm", str(tmp_path / "out"))
    config, tensors = read(tmp_path / "out")
    assert config["draft_vocab_size"] == config["vocab_size"] == 320
    assert not {"d2t", "t2d"} & tensors.keys()


def test_further_layers_have_sglangs_names(
    save: Any, target_path: str, tmp_path: Path, tiny_target: Target
) -> None:
    folder, head = save("eagle3", layers=2)
    export(str(folder), target_path, "sglang", str(tmp_path / "out"))
    _, tensors = read(tmp_path / "out")
    assert "layers.1.hidden_norm.weight" in tensors
    assert "layers.1.input_layernorm.weight" not in tensors
    equal_heads(reread(tmp_path / "out", tiny_target), head)
    assert "names further layers' norms otherwise" in serve_line(folder, "t")


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"qwen": True}, r"norms on queries and keys \(qwen3\)"),
        ({"taps": (2,)}, "a single tap"),
        ({"taps": (0, 2)}, r"can't tap the embeddings \(0\)"),
        ({"taps": (1, 3)}, r"can't tap the last layer \(3\)"),
    ],
)
def test_sglang_would_draft_wrongly(
    save: Any, target_path: str, tmp_path: Path, about: dict[str, Any], reason: str
) -> None:
    folder, _ = save("eagle3", **about)
    with pytest.raises(ValueError, match=f"without a word: .*{reason}.*to=vllm"):
        export(str(folder), target_path, "sglang", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    export(str(folder), target_path, "vllm", str(tmp_path / "out"))
    config, _ = read(tmp_path / "out")
    # vLLM knows norms on queries and keys by this name alone.
    wanted = "Eagle3Qwen3ForCausalLM" if "qwen" in about else "LlamaForCausalLMEagle3"
    assert config["architectures"] == [wanted]


def test_eagle1_for_both_servers(
    save: Any, target_path: str, tmp_path: Path, tiny_target: Target
) -> None:
    folder, head = save("eagle1")
    export(str(folder), target_path, "vllm", str(tmp_path / "vllm"))
    config, tensors = read(tmp_path / "vllm")
    assert config["architectures"] == ["LlamaForCausalLM"] and config["bias"] is False
    assert "fc.bias" not in tensors and "layers.0.input_layernorm.weight" not in tensors
    equal_heads(reread(tmp_path / "vllm", tiny_target), head)
    export(str(folder), target_path, "sglang", str(tmp_path / "sglang"))
    config, tensors = read(tmp_path / "sglang")
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    # True would give the attention biases that nothing fills.
    assert config["bias"] is config["attention_bias"] is False
    assert torch.equal(tensors.pop("fc.bias"), torch.zeros(32))
    assert tensors.keys() == head.on_disk().keys()


def test_a_trained_bias_of_eagle1(
    save: Any, target_path: str, tmp_path: Path, tiny_target: Target
) -> None:
    folder, head = save("eagle1", fc_bias=True)
    with pytest.raises(ValueError, match=r"fc has a bias, which vLLM doesn't add.*to=sglang"):
        export(str(folder), target_path, "vllm", str(tmp_path / "vllm"))
    export(str(folder), target_path, "sglang", str(tmp_path / "sglang"))
    equal_heads(reread(tmp_path / "sglang", tiny_target), head)


@pytest.mark.parametrize("own", [True, False])
def test_medusa_for_tgi(
    save: Any, target_path: str, tmp_path: Path, tiny_target: Target, own: bool
) -> None:
    folder, head = save("medusa", own_heads=own)
    line = export(str(folder), target_path, "tgi", str(tmp_path / "tgi"))
    assert line == f"text-generation-launcher --model-id {tmp_path / 'tgi'}"
    config, tensors = read(tmp_path / "tgi", "medusa_lm_head.safetensors")
    assert config["medusa_num_heads"] == 3 and config["medusa_num_layers"] == 1
    assert config["base_model_name_or_path"] == target_path
    assert tensors["2.0.linear.weight"].shape == (32, 32) and ("2.1.weight" in tensors) == own
    assert ("version" in config) == (not own)
    equal_heads(reread(tmp_path / "tgi", tiny_target), head)


def test_drafters_that_a_stack_does_not_load(save: Any, target_path: str, tmp_path: Path) -> None:
    folder, _ = save("medusa", own_heads=False, layers=2)
    out = str(tmp_path / "out")
    with pytest.raises(ValueError, match=r"kind medusa, which vllm doesn't load; these do: tgi"):
        export(str(folder), target_path, "vllm", out)
    with pytest.raises(ValueError, match="2 layers that share the target's LM head"):
        export(str(folder), target_path, "tgi", out)
    with pytest.raises(ValueError, match="to: got 'trt', expected one of sglang, vllm"):
        export(str(folder), target_path, "trt", out)
    (tmp_path / "head").rename(tmp_path / "medusa")
    folder, _ = save("hydra")
    with pytest.raises(ValueError, match="no server does: decode with it here"):
        export(str(folder), target_path, "tgi", out)
    with pytest.raises(ValueError, match=r"out: got .*which holds something"):
        export(str(folder), target_path, "tgi", target_path)
    assert "no server loads Hydra" in serve_line(folder, "t")


def test_another_target_is_refused(
    save: Any, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    folder, _ = save("eagle3")
    other = build_llama(320, layers=3, hidden=32, seed=9)
    path = on_disk(tmp_path / "other", other, tiny_tokenizer)
    with pytest.raises(ValueError, match=r"was not made for \(head: made for"):
        export(str(folder), path, "vllm", str(tmp_path / "out"))


def test_draft_lms_go_as_they_are(
    tmp_path: Path,
    target_path: str,
    tiny_target: Target,
    tiny_draft: Target,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    save_draft(tmp_path / "lm", tiny_draft, tiny_target, tiny_tokenizer)
    line = export(str(tmp_path / "lm"), target_path, "sglang", str(tmp_path / "out"))
    assert "STANDALONE" in line and not (tmp_path / "out" / "draftsmith.json").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in tiny_draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_the_command(
    save: Any, target_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = save("eagle3")
    given = [f"drafter={folder}", f"target={target_path}", "to=vllm", f"out={tmp_path / 'o'}"]
    assert guarded(main, given) == 0 and "vllm serve" in capsys.readouterr().out
    assert guarded(main, given) == 2 and "holds something" in capsys.readouterr().err
    assert guarded(main, ["drafter=x"]) == 2 and "missing: target=" in capsys.readouterr().err
    says = {key.name: key.says for key in of_module("draftsmith.export").keys("Export")}
    assert says["to"].split(" | ") == [*LAYOUTS]


# ---- the real package -------------------------------------------------------------------------

SPECULATORS = {
    "part of the tokens": {},
    "all tokens": {"draft_vocab": 320},
    "every norm": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "one norm before fc": {"norm_before_fc": True, "taps": (0, 1, 3)},
    "qwen3, two layers": {"qwen": True, "layers": 2},
}


def theirs(folder: Path) -> Any:
    oracle.speculators()
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SpeculatorModel.from_pretrained(str(folder), config=config).eval()


def first_logits(model: Any, head: Eagle, target: Target) -> tuple[Tensor, Tensor]:
    """(theirs, ours) [1, T, D] of one text at the first step; they number positions from 1."""
    ids_BT = torch.arange(12)[None] * 29 % 320
    taps_BTU = target_states(target, head.taps, input_ids=ids_BT).taps_BTF
    hidden_BTH = head.fuse(taps_BTU[:, :-1])
    positions_BT = torch.arange(11)[None]
    output_BTH = head.step(hidden_BTH, ids_BT[:, 1:], positions_BT, causal())
    ours_BTD = head.before_head(output_BTH) @ head.head_DH.T
    kept: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda *given: kept.append(given[-1]))
    model(
        hidden_states=taps_BTU[:, :-1],
        input_ids=ids_BT[:, 1:],
        document_ids=torch.zeros(1, 11, dtype=torch.long),
        ttt_steps=1,
    )
    hook.remove()
    return kept[0], ours_BTD


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", SPECULATORS)
def test_speculators_both_ways(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, name: str, tied: bool
) -> None:
    oracle.speculators()
    config = build_llama(320, layers=3, hidden=32, seed=0).config
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    target = LlamaForCausalLM(config).eval().requires_grad_(False)
    path = on_disk(tmp_path / "target", target, tiny_tokenizer)
    head = made("eagle3", target, **SPECULATORS[name])
    assert isinstance(head, Eagle)
    folder = ours(tmp_path / "head", head, target, tiny_tokenizer)
    line = export(str(folder), path, "speculators", str(tmp_path / "out"))
    assert line == f"vllm serve {tmp_path / 'out'}"
    model = theirs(tmp_path / "out")
    wanted = {n.replace("midlayer.", "layers.0."): t for n, t in head.on_disk().items()}
    wanted["embed_tokens.weight"] = target.get_input_embeddings().weight
    loaded = {n: t for n, t in model.state_dict().items() if not n.startswith("verifier_")}
    assert loaded.keys() == wanted.keys()
    for tensor_name, tensor in wanted.items():
        assert torch.equal(loaded[tensor_name], tensor), tensor_name
    got_BTD, ours_BTD = first_logits(model, head.bind(target), target)
    assert (got_BTD - ours_BTD).abs().max() < 1e-5
    model.save_pretrained(tmp_path / "back")
    equal_heads(reread(tmp_path / "back", target), head)


def test_the_config_is_what_the_package_itself_writes(
    save: Any, target_path: str, tmp_path: Path
) -> None:
    """Nothing that it writes is missing from ours, and nothing of ours is lost there."""
    folder, _ = save("eagle3")
    export(str(folder), target_path, "speculators", str(tmp_path / "out"))
    theirs(tmp_path / "out").save_pretrained(tmp_path / "back")
    mine, back = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("out", "back"))
    own = {"transformers_version", "auto_map", "transformer_layer_config"}
    assert {k: v for k, v in back.items() if k not in own} == {
        k: v for k, v in mine.items() if k not in own
    }
    layer, kept = mine["transformer_layer_config"], back["transformer_layer_config"]
    assert {name: kept[name] for name in layer} == layer


def test_a_layer_with_a_window_is_said(save: Any, target_path: str, tmp_path: Path) -> None:
    folder, _ = save("eagle3", qwen=True)
    export(str(folder), target_path, "speculators", str(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["transformer_layer_config"] |= {
        "layer_types": ["sliding_attention"],
        "sliding_window": 64,
    }
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="trained to see 64 tokens back; here it sees all"):
        open_drafter(tmp_path / "out", None)
    config["speculators_model_type"] = "mtp"
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="type 'mtp'; expected one of eagle3, dflash"):
        open_drafter(tmp_path / "out", None)
