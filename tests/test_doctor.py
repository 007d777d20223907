"""The doctor: a good folder of each kind is found good, and each single fault is found."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_llama
from head_folders import made, on_disk, ours
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.decode.doctor import main
from draftsmith.models.doctor import examine, outlook
from draftsmith.models.drafter_folder import save_drafter
from draftsmith.models.export import export
from draftsmith.models.findings import SERVERS, Finding
from draftsmith.models.fingerprint import fingerprint

Target = LlamaForCausalLM
Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]
IDS = "eagle_aux_hidden_state_layer_ids"
LAYERS = 6


@pytest.fixture(scope="module")
def target() -> Target:
    """Six layers, so that three of them can be tapped as servers can."""
    return build_llama(320, layers=LAYERS, hidden=32, seed=0).requires_grad_(False)


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory,
    target: Target,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Path:
    """The target, and a good folder of each kind, in bfloat16, under names that vLLM guesses by."""
    root = tmp_path_factory.mktemp("doctor")
    path = on_disk(root / "target", target, tiny_tokenizer)
    heads = {
        "eagle3": made("eagle3", target, taps=(1, 3, 5)),
        "eagle3-norms": made("eagle3", target, taps=(1, 3, 5), fc_norm=True, norm_output=True),
        "eagle3-two": made("eagle3", target, taps=(1, 3, 5), layers=2),
        "eagle3-qwen": made("eagle3", target, taps=(1, 3, 5), qwen=True),
        "eagle-1": made("eagle1", target),
        "medusa": made("medusa", target),
        "hydra": made("hydra", target, prefixed=True),
    }
    for name, head in heads.items():
        ours(root / name, head.bfloat16(), target, tiny_tokenizer)
    export(str(root / "eagle3"), path, "speculators", str(root / "eagle3-speculators"))
    save_drafter(
        root / "lm",
        kind="lm",
        model=build_llama(320, layers=1, hidden=32, seed=1).bfloat16(),
        tokenizer=tiny_tokenizer,
        target_fingerprint=fingerprint(target, tiny_tokenizer),
        provenance={},
        defaults={},
    )
    return root


@pytest.fixture
def broken(place: Path, tmp_path: Path) -> Callable[[str, Change], Path]:
    def change(name: str, by: Change) -> Path:
        folder = tmp_path / name
        shutil.copytree(place / name, folder)
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        by(config, tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return change


def problems(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(f.check, f.verdict) for f in findings if f.verdict != "ok"]


GOOD: dict[str, list[tuple[str, str]]] = {
    "eagle3": [],
    "eagle3-norms": [],
    "eagle3-two": [("one server alone", "warning")],  # the name of a norm
    "eagle3-qwen": [("one server alone", "warning")],  # SGLang has no norms on queries and keys
    "eagle-1": [("biases", "warning")] * 2,  # SGLang's bias and its name of the architecture
    "eagle3-speculators": [],
    "medusa": [("heads and file", "warning")],  # TGI's name of the file
    "hydra": [],
    "lm": [],
}


@pytest.mark.parametrize("name", GOOD)
def test_good_folders(place: Path, name: str) -> None:
    layout, findings = examine(str(place / name), str(place / "target"))
    assert problems(findings) == GOOD[name], findings
    assert findings[-1] == Finding("opened here", "ok")
    assert outlook(layout, findings)["draftsmith"] == "reads it"


def nan(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"][3] = float("nan")


def rename(old: str, new: str) -> Change:
    def by(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return by


def say(**fields: Any) -> Change:
    return lambda config, tensors: config.update(fields)


def drop(name: str) -> Change:
    return lambda config, tensors: (config.pop(name, None), tensors.pop(name, None))


def as_ids(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def shift(name: str, by: int, at: slice) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name][at] += by

    return change


def nested(ids: list[int]) -> Change:
    return say(eagle_config={IDS: ids})


def top(ids: list[int]) -> Change:
    return lambda config, tensors: config.update(
        {IDS: ids, "eagle_config": {IDS: [i - 1 for i in ids]}}
    )


def float32(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors |= {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
    config["torch_dtype"] = "float32"


def input_norm(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["input_norm.weight"] = torch.ones(96, dtype=torch.bfloat16)


def other_t2d(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["t2d"] = tensors["t2d"].roll(1)


def trained_bias(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["fc.bias"], config["bias"] = torch.ones(32).bfloat16(), True


# (what, folder, one change, check, verdict, words, server -> its words)
Trap = tuple[str, str, Change, str, str, str, dict[str, str]]
# fmt: off
TRAPS: list[Trap] = [
    ("unknown name", "eagle3", rename("midlayer.mlp.up", "midlayer.mlp.upper"),
     "tensors", "fault", "without a place: layers.0.mlp.upper",
     {"SGLang 0.5.14": "skips them", "vLLM 0.33": "refuses"}),
    ("missing tensor", "eagle3", drop("midlayer.self_attn.o_proj.weight"),
     "tensors", "fault", "1 missing: layers.0.self_attn.o_proj",
     {"SGLang 0.5.14": "random, without a word"}),
    ("wrong sizes", "eagle3", say(intermediate_size=64),
     "tensors", "fault", r"is \[48, 32\], its config makes it \[64, 32\]|is \[32, 48\]",
     {"vLLM 0.33": "refuses"}),
    ("midlayer in speculators", "eagle3-speculators", rename("layers.0.", "midlayer."),
     "tensors", "fault", "whose name is layers.0",
     {"speculators 0.9": "random"}),
    ("not a number", "eagle3", nan,
     "finite numbers", "fault", "norm.weight",
     {"vLLM 0.33": "accepts nothing"}),
    ("nested ids only", "eagle3", drop(IDS),
     "layer ids", "fault", r"only the nested ids, \[0, 2, 4\]",
     {"vLLM 0.33": "next to nothing"}),
    ("top ids only", "eagle3", drop("eagle_config"),
     "layer ids", "fault", r"only the top-level ids, \[1, 3, 5\]",
     {"SGLang 0.5.14": "next to nothing"}),
    ("ids that differ", "eagle3", nested([1, 3, 5]),
     "layer ids", "fault", r"nested \[1, 3, 5\]: the second",
     {"SGLang 0.5.14": "taps [2, 4, 6]"}),
    ("ids that descend", "eagle3", top([5, 3, 1]),
     "layer ids", "fault", "don't ascend",
     {"SGLang 0.5.14": "order of the layers"}),
    ("ids of another target", "eagle3", top([1, 3, 15]),
     "layer ids", "fault", r"ids \[15\] of a target of 6",
     {"vLLM 0.33": "fewer taps"}),
    ("too few ids", "eagle3", top([1, 3]),
     "fc", "fault", "reads 96 numbers, 2 taps of 32 are 64",
     {"vLLM 0.33": "refuses"}),
    ("no draft_vocab_size", "eagle3", drop("draft_vocab_size"),
     "draft vocabulary", "fault", "no draft_vocab_size",
     {"SGLang 0.5.14": "fails"}),
    ("another draft_vocab_size", "eagle3", say(draft_vocab_size=320),
     "draft vocabulary", "fault", "is 320, lm_head.weight has 160 rows",
     {"vLLM 0.33": "refuses"}),
    ("no d2t", "eagle3", drop("d2t"),
     "draft vocabulary", "fault", "no d2t, though it drafts 160 of 320",
     {"SGLang 0.5.14": "takes draft ids"}),
    ("d2t of ids", "eagle3", as_ids,
     "draft vocabulary", "fault", "holds ids, not offsets",
     {"vLLM 0.33": "other tokens"}),
    ("d2t outside", "eagle3", shift("d2t", 1000, slice(3, 4)),
     "draft vocabulary", "fault", "leads 1 times outside the 320",
     {"draftsmith": "refuses"}),
    ("t2d of other tokens", "eagle3", other_t2d,
     "draft vocabulary", "fault", "name different tokens",
     {"speculators 0.9": "wrong rows"}),
    ("no t2d", "eagle3", drop("t2d"),
     "draft vocabulary", "warning", "no t2d",
     {"speculators 0.9": "needs it"}),
    ("norms without a flag", "eagle3-norms", say(fc_norm=False),
     "norm flags", "fault", r"fc_norm.\* in the file",
     {"SGLang 0.5.14": "skips the norm"}),
    ("a flag without norms", "eagle3", say(fc_norm=True),
     "norm flags", "fault", r"there is no fc_norm.\*",
     {"vLLM 0.33": "as they are born"}),
    ("another norm without a flag", "eagle3", input_norm,
     "norm flags", "fault", r"input_norm.\* in the file",
     {"vLLM 0.33": "refuses"}),
    ("flag unwritten", "eagle3-speculators", drop("norm_before_residual"),
     "norm flags", "fault", "isn't written",
     {"vLLM 0.33": "takes it for true"}),
    ("a flag SGLang ignores", "eagle3", say(norm_before_residual=True),
     "one server alone", "warning", "norm_before_residual",
     {"SGLang 0.5.14": "drafts wrongly"}),
    ("qwen layers by Llama's name", "eagle3-qwen", say(architectures=["LlamaForCausalLMEagle3"]),
     "one server alone", "fault", "norms on queries and keys, under the name",
     {"vLLM 0.33": "refuses"}),
    ("SGLang's name of a norm", "eagle3-two", rename("1.input_layernorm", "1.hidden_norm"),
     "one server alone", "warning", "SGLang's name",
     {"vLLM 0.33": "as it is born"}),
    ("tied", "eagle3", say(tie_word_embeddings=True),
     "own LM head", "fault", "is true",
     {"SGLang 0.5.14": "takes the embeddings"}),
    ("few positions", "eagle3", say(max_position_embeddings=64),
     "positions", "warning", "64, the target's 512",
     {"draftsmith": "ends decoding at 64"}),
    ("new rotary fields alone", "eagle3", drop("rope_theta"),
     "rotary fields", "warning", "only rope_parameters",
     {"vLLM 0.33": "turns by 10,000"}),
    ("old rotary fields alone", "eagle3", drop("rope_parameters"),
     "rotary fields", "warning", "only the rotary fields of before",
     {}),
    ("rotary fields that differ", "eagle3", say(rope_theta=7.0),
     "rotary fields", "fault", "rope_theta 7.0 .* beside",
     {"SGLang 0.5.14": "reads rope_parameters"}),
    ("bias of the attention", "eagle3", say(bias=True),
     "biases", "fault", "bias is true",
     {"vLLM 0.33": "nothing fills"}),
    ("a trained bias", "eagle-1", trained_bias,
     "biases", "warning", "fc.bias isn't zero",
     {"vLLM 0.33": "doesn't add it"}),
    ("float32", "eagle3", float32,
     "dtype", "warning", "weights in float32",
     {}),
    ("another dtype said", "eagle3", say(torch_dtype="float16"),
     "dtype", "warning", "torch_dtype float16, weights in bfloat16",
     {}),
    ("hidden size", "eagle3", say(hidden_size=16, target_hidden_size=16),
     "target", "fault", "hidden size 16, the target's 32",
     {"draftsmith": "refuses"}),
    ("vocabulary", "eagle3", say(vocab_size=384),
     "target", "fault", "vocab_size 384, the target's 320",
     {"draftsmith": "refuses"}),
]
# fmt: on


@pytest.mark.parametrize("trap", TRAPS, ids=[trap[0] for trap in TRAPS])
def test_each_trap_is_found(place: Path, broken: Callable[[str, Change], Path], trap: Trap) -> None:
    _, name, change, check, verdict, words, servers = trap
    layout, findings = examine(str(broken(name, change)), str(place / "target"))
    found = [f for f in findings if f.check == check and re.search(words, f.says)]
    assert len(found) == 1 and found[0].verdict == verdict, findings
    assert found[0].mend
    said = outlook(layout, findings)
    assert set(said) == set(SERVERS)
    for server, what in servers.items():
        assert what in found[0].servers[server] and f"{check}: " in said[server]


def test_files_that_cannot_be_read(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "eagle3"
    shutil.copytree(place / "eagle3", folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    _, (only,) = examine(str(folder))
    assert only.verdict == "fault" and "cannot be read" in only.says
    (folder / "model.safetensors").unlink()
    assert "has no weights" in examine(str(folder))[1][0].says
    (folder / "config.json").write_text("{")
    assert "cannot be read" in examine(str(folder))[1][0].says
    with pytest.raises(ValueError, match="is no folder"):
        examine(str(tmp_path / "nowhere"))


def test_a_path_that_vllm_does_not_guess_by(place: Path, tmp_path: Path) -> None:
    folder = tmp_path.with_name("plain")
    shutil.copytree(place / "eagle3", folder)
    found = [f for f in examine(str(folder))[1] if f.check == "path name"]
    assert found[0].verdict == "warning" and '"method": "eagle3"' in found[0].mend


def test_another_target(
    place: Path, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """The same shapes, other weights; and another tokenizer."""
    other = build_llama(320, layers=LAYERS, hidden=32, seed=5)
    path = on_disk(tmp_path / "other", other, tiny_tokenizer)
    (found,) = [f for f in examine(str(place / "eagle3"), path)[1] if f.check == "target"]
    assert found.verdict == "fault" and "head: made for" in found.says
    found = [f for f in examine(str(place / "eagle3-speculators"), path)[1] if f.check == "target"][
        -1
    ]
    assert found.verdict == "warning" and "embeddings of its own" in found.says
    tokens = PreTrainedTokenizerFast.from_pretrained(path)
    tokens.add_tokens(["<|more|>"])
    tokens.save_pretrained(path)
    (found,) = [f for f in examine(str(place / "medusa"), path)[1] if f.check == "target"]
    assert "tokenizers that differ at 1 of 321 ids" in found.says


def test_the_command(
    place: Path, broken: Callable[[str, Change], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(place / "eagle3"), f"target={place / 'target'}"]) == 0
    shown = capsys.readouterr().out
    assert "EAGLE-3" in shown and "layer ids" in shown and "SGLang 0.5.14" in shown
    assert main([str(broken("eagle3", drop("d2t")))]) == 1
    assert "fault" in capsys.readouterr().out
    assert main(["nowhere"]) == 2 and "is no folder" in capsys.readouterr().out
    assert main([]) == 0
