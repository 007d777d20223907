"""The doctor: a good folder of each kind is found good, and each single fault is found."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doctor_block_traps import BLOCK_TRAPS
from doctor_traps import IDS, TRAPS, Change, Trap, drop, say, twice
from head_folders import made, on_disk, ours
from safetensors.torch import load_file, save_file
from saved_drafts import save_draft
from tiny_llama import build_llama
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.command import guarded
from draftsmith.doctor import main
from draftsmith.models.servers.doctor import examine, outlook
from draftsmith.models.servers.export import export
from draftsmith.models.servers.findings import SERVERS, Finding

Target = LlamaForCausalLM
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
        "eagle3-all": made("eagle3", target, taps=(1, 3, 5), draft_vocab=320),
        "eagle-1": made("eagle1", target),
        "medusa": made("medusa", target),
        "hydra": made("hydra", target, prefixed=True),
        "dflash": made("dflash", target, taps=(2, 3, 5), qwen=True),
        "dspark": made("dspark", target, taps=(2, 3, 5), qwen=True),
    }
    for name, head in heads.items():
        ours(root / name, head.bfloat16(), target, tiny_tokenizer)
    export(str(root / "eagle3"), path, "speculators", str(root / "eagle3-speculators"))
    export(str(root / "dflash"), path, "sglang", str(root / "dflash-official"))
    export(str(root / "dspark"), path, "vllm", str(root / "dspark-official"))
    export(str(root / "dflash"), path, "speculators", str(root / "dflash-speculators"))
    save_draft(
        root / "lm",
        build_llama(320, layers=1, hidden=32, seed=1).bfloat16(),
        target,
        tiny_tokenizer,
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
    "eagle3-norms": [("one server alone", "warning")],  # llama.cpp has neither norm
    "eagle3-two": [("one server alone", "warning")] * 2,  # the name of a norm; llama.cpp: one layer
    # SGLang and llama.cpp have no norms on queries and keys.
    "eagle3-qwen": [("one server alone", "warning")] * 2,
    "eagle3-all": [],
    "eagle-1": [("biases", "warning")] * 2,  # SGLang's bias and its name of the architecture
    "eagle3-speculators": [],
    "medusa": [("heads and file", "warning")],  # TGI's name of the file
    "hydra": [],
    "dflash": [],
    "dspark": [],
    "dflash-official": [],
    "dspark-official": [],
    "dflash-speculators": [],
    "lm": [],
}


@pytest.mark.parametrize("name", GOOD)
def test_good_folders(place: Path, name: str) -> None:
    layout, findings = examine(str(place / name), str(place / "target"))
    assert problems(findings) == GOOD[name], findings
    assert findings[-1] == Finding("opened here", "ok")
    assert outlook(layout, findings)["draftsmith"] == "reads it"


@pytest.mark.parametrize("trap", TRAPS + BLOCK_TRAPS, ids=lambda trap: trap[0])
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
        assert verdict == "warning" or "reads it" not in said[server]


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


def test_usual_ids_may_stand_alone(broken: Callable[[str, Change], Path]) -> None:
    """Servers take [2, n // 2, n - 3] where they find none: without a target, for some n."""

    def usual(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del config[IDS]
        config["eagle_config"] = {IDS: [1, 15, 28]}

    found = [f for f in examine(str(broken("eagle3", usual)))[1] if f.check == "layer ids"]
    assert [f.verdict for f in found] == ["warning"] and "a target of 32 layers" in found[0].says


def test_fields_of_another_type(
    broken: Callable[[str, Change], Path], tmp_path: Path, place: Path
) -> None:
    for name, value, expected in (
        ("hidden_size", "32x", "a whole number"),
        ("eagle_config", [1, 2], "an object"),
        (IDS, 3, "a list"),
        (IDS, ["1"], "numbers of layers"),
    ):
        folder = broken("eagle3", say(**{name: value}))
        found = [f for f in examine(str(folder))[1] if f.verdict == "fault"]
        assert [f.check for f in found] == ["config.json"] and expected in found[0].says
        shutil.rmtree(folder)


def test_what_our_loader_refuses_is_not_judged(broken: Callable[[str, Change], Path]) -> None:
    layout, findings = examine(str(broken("medusa", drop("1.0.linear.weight"))))
    assert ("opened here", "fault") in problems(findings)
    assert "not judged" in outlook(layout, findings)["TGI"]


def test_one_tensor_by_two_names(broken: Callable[[str, Change], Path]) -> None:
    (only,) = examine(str(broken("eagle3", twice)))[1]
    assert only.verdict == "fault" and "holds one tensor twice" in only.says


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
    assert guarded(main, [str(place / "eagle3"), f"target={place / 'target'}"]) == 0
    shown = capsys.readouterr().out
    assert "EAGLE-3" in shown and "layer ids" in shown and "SGLang 0.5.23" in shown
    assert guarded(main, [str(broken("eagle3", drop("d2t")))]) == 1
    assert "fault" in capsys.readouterr().out
    odd = place / "lr=3e-4[a]"
    odd.symlink_to(place / "eagle3")
    assert guarded(main, [str(odd)]) == 0 and "lr=3e-4[a]" in capsys.readouterr().out
    assert guarded(main, ["[/red]"]) == 2 and "[/red]" in capsys.readouterr().err
    assert guarded(main, ["nowhere"]) == 2 and "is no folder" in capsys.readouterr().err
