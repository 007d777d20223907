"""Draft LMs for llama.cpp: the rules for two vocabularies, the file that its converter writes."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from head_folders import made, on_disk, ours
from safetensors.torch import load_file, save_file
from saved_drafts import save_draft
from tiny_llama import build_llama
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftsmith.command import guarded
from draftsmith.export import main
from draftsmith.models.servers.doctor import examine, outlook
from draftsmith.models.servers.export import export

CONVERTER = Path(__file__).resolve().parents[2] / "tools" / "gguf_converter.py"
Json = dict[str, Any]


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Path:
    """A target, and draft LMs of two layers and of one, in bfloat16."""
    root = tmp_path_factory.mktemp("gguf")
    on_disk(root / "target", tiny_target, tiny_tokenizer)
    drafts: dict[str, PreTrainedModel] = {
        "llama": build_llama(320, layers=2, hidden=32, seed=1),
        "one-layer": build_llama(320, layers=1, hidden=32, seed=2),
    }
    for name, tied in (("qwen3", False), ("tied", True)):
        layer = json.loads((root / "target" / "config.json").read_text())
        kept = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        sizes = {key: layer[key] for key in (*kept, "num_key_value_heads", "eos_token_id")}
        config = Qwen3Config(num_hidden_layers=2, head_dim=8, bos_token_id=1, **sizes)
        config.tie_word_embeddings = tied
        drafts[name] = Qwen3ForCausalLM(config).eval()
    for name, model in drafts.items():
        save_draft(root / name, model.bfloat16(), tiny_target, tiny_tokenizer, defaults={"K": 5})
    return root


@pytest.fixture
def broken(place: Path, tmp_path: Path) -> Callable[..., str]:
    """A copy of a folder with one of its JSON files changed."""

    def change(name: str, file: str, by: Callable[[Json], Any]) -> str:
        folder = tmp_path / name
        shutil.copytree(place / name, folder, dirs_exist_ok=True)
        content = json.loads((folder / file).read_text())
        by(content)
        (folder / file).write_text(json.dumps(content))
        return str(folder)

    return change


# ---- what the doctor finds ----------------------------------------------------------------------


def other_text(tokens: Json) -> None:
    """The last token with another text; nothing is merged to it any more."""
    vocabulary = tokens["model"]["vocab"]
    name = next(text for text, token in vocabulary.items() if token == 319)
    vocabulary["<odd>"] = vocabulary.pop(name)
    tokens["model"]["merges"] = [m for m in tokens["model"]["merges"] if "".join(m) != name]


def begins(tokens: Json) -> None:
    """A tokenizer that adds its end token at both ends."""
    end = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}
    tokens["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [end, {"Sequence": {"id": "A", "type_id": 0}}, end],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}},
    }


def fallback(tokens: Json) -> None:
    tokens["model"]["byte_fallback"] = True


def say(**fields: Any) -> Callable[[Json], Any]:
    return lambda content: content.update(fields)


TOKENS, FLAGS = "tokenizer.json", "tokenizer_config.json"
VOCABULARY = {
    "one text": (TOKENS, other_text, "fault", "1 tokens of another text: id 319 is '<odd>'"),
    "kind": (TOKENS, fallback, "warning", "of kind BPE with byte fallback, the target's BPE"),
    "eos": (FLAGS, say(eos_token="<|pad|>"), "warning", "eos id 1, the target's 0"),
    "bos": (FLAGS, say(bos_token="<|end|>"), "warning", "bos id 0, the target's 1"),
    "add eos": (FLAGS, say(add_eos_token=True), "warning", "adds eos to a prompt, unlike"),
    "EAGLE-3": ("config.json", say(draft_vocab_size=320), "warning", "of one layer"),
}


@pytest.mark.parametrize("name", VOCABULARY)
def test_each_rule(place: Path, broken: Callable[..., str], name: str) -> None:
    """By the doctor, and by export, before any converter is run."""
    file, change, verdict, words = VOCABULARY[name]
    folder = broken("one-layer", file, change)
    layout, findings = examine(folder, str(place / "target"))
    found = [f for f in findings if f.check == "vocabulary" and f.verdict != "ok"]
    assert [f.verdict for f in found] == [verdict] and re.search(words, found[0].says), found
    assert found[0].mend and "vocabulary: " in outlook(layout, findings)["llama.cpp"]
    pytest.importorskip("gguf")
    with pytest.raises(ValueError, match="id 319" if verdict == "fault" else f"to=gguf.*{words}"):
        given = (folder, str(place / "target"), "gguf", str(place / "no.gguf"))
        export(*given, converter=str(CONVERTER))
    assert not (place / "no.gguf").exists()


def test_what_is_no_fault(place: Path, broken: Callable[..., str]) -> None:
    """Two layers aren't taken for EAGLE-3, and sizes may differ by 128."""
    folder = broken("llama", "config.json", say(draft_vocab_size=320))
    assert not [f for f in examine(folder, str(place / "target"))[1] if f.verdict != "ok"]


@pytest.mark.parametrize(("rows", "apart"), [(448, False), (449, True)])
def test_sizes(place: Path, tmp_path: Path, rows: int, apart: bool) -> None:
    shutil.copytree(place / "llama", tmp_path / "wide")
    build_llama(rows, layers=2, hidden=32, seed=1).bfloat16().save_pretrained(tmp_path / "wide")
    found = [f.says for f in examine(str(tmp_path / "wide"), str(place / "target"))[1]]
    assert (f"{rows} tokens, the target's 320: more than 128 apart" in found) == apart


def test_ends_added_to_a_prompt(place: Path, broken: Callable[..., str]) -> None:
    folder = broken("llama", "tokenizer.json", begins)
    found = [f.says for f in examine(folder, str(place / "target"))[1] if f.verdict != "ok"]
    says = "its tokenizer adds {} to a prompt, unlike the target's"
    assert found == [says.format("bos"), says.format("eos")]


def test_files_that_the_converter_needs(place: Path, tmp_path: Path) -> None:
    folder, target = tmp_path / "draft", tmp_path / "target"
    shutil.copytree(place / "llama", folder)
    shutil.copytree(place / "target", target)
    (target / "tokenizer.model").write_bytes(b"")
    (found,) = [f for f in examine(str(folder), str(target))[1] if f.verdict != "ok"]
    assert found.says == "no tokenizer.model, which the target has"
    (folder / "tokenizer.json").unlink()
    (found,) = [f for f in examine(str(folder))[1] if f.verdict != "ok"]
    assert found.verdict == "fault" and found.says == "no tokenizer files in the folder"
    assert "its converter fails" in found.servers["llama.cpp"]


def test_a_trimmed_head(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "llama", tmp_path / "draft")
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:160].clone()
    save_file(tensors, tmp_path / "draft" / "model.safetensors", metadata={"format": "pt"})
    (found,) = [f for f in examine(str(tmp_path / "draft"))[1] if f.verdict != "ok"]
    assert found.verdict == "fault" and found.says == "an LM head of 160 rows for 320 tokens"


# ---- export -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "one-layer", "qwen3", "tied"])
def test_the_file_is_the_folder(place: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("gguf")
    out = tmp_path / "new" / "draft.gguf"
    line = export(str(place / name), str(place / "target"), "gguf", str(out), str(CONVERTER))
    assert line.startswith(f"llama-server -m TARGET.gguf -md {out} --spec-type draft-simple ")
    assert "--spec-draft-n-max 5" in line and "convert" not in line and out.is_file()


@pytest.mark.parametrize(
    ("name", "old", "new", "wrong"),
    [
        ("llama", "rearranged(values,", "(lambda v, _: v)(values,", "self_attn.k_proj"),
        ("qwen3", 'kind == "llama"', "True", "self_attn.k_proj"),
        ("qwen3", ", values)", ", values + 1)", "embed_tokens"),
        ("llama", "  writer.add_tensor(", "  'mlp' in name or writer.add_tensor(", "mlp"),
    ],
)
def test_a_converter_that_writes_other_numbers(
    place: Path, tmp_path: Path, name: str, old: str, new: str, wrong: str
) -> None:
    """q and k left as they are, or turned where they shouldn't; all shifted; some left out."""
    pytest.importorskip("gguf")
    source = CONVERTER.read_text()
    assert source.count(old) == 1
    (tmp_path / "convert.py").write_text(source.replace(old, new))
    given = (str(place / name), str(place / "target"), "gguf", str(tmp_path / "d.gguf"))
    with pytest.raises(
        ValueError, match=r"got \d+ tensors in d.gguf that aren't the folder's"
    ) as e:
        export(*given, converter=str(tmp_path / "convert.py"))
    assert wrong in str(e.value) or wrong == "1.up"
    assert not (tmp_path / "d.gguf").exists()


def test_an_architecture_that_is_not_compared(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    source = CONVERTER.read_text().replace(
        "GGUFWriter(given.outfile, kind)", "GGUFWriter(given.outfile, 'gemma')"
    )
    (tmp_path / "convert.py").write_text(source)
    given = (str(place / "qwen3"), str(place / "target"), "gguf", str(tmp_path / "d.gguf"))
    with pytest.warns(UserWarning, match="isn't compared with the folder: of architecture gemma"):
        export(*given, converter=str(tmp_path / "convert.py"))


WRONG = {
    "no converter": ("", "converter: got '', which is no file; expected convert_hf_to_gguf.py"),
    "a failing one": ("raise KeyError('tokens')", "failed (KeyError: 'tokens'); expected "),
    "a silent one": ("", "failed (nothing said); expected "),
    "another file": ("open(sys.argv[5], 'w').write('x' * 64)", "which isn't GGUF"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_converters(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    pytest.importorskip("gguf")
    code, words = WRONG[name]
    (tmp_path / "c.py").write_text(f"import sys\n{code}\n")
    converter = "" if name == "no converter" else str(tmp_path / "c.py")
    given = [f"drafter={place / 'llama'}", f"target={place / 'target'}", "to=gguf"]
    given += [f"out={tmp_path / 'd.gguf'}", f"converter={converter}"]
    assert guarded(main, given) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: converter: ") and words in said
    assert not (tmp_path / "d.gguf").exists()


def test_other_wrong_inputs(
    place: Path,
    tmp_path: Path,
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, draft, new = str(place / "target"), str(place / "llama"), str(tmp_path / "d.gguf")
    with pytest.raises(ValueError, match=r"expected a new file whose name ends in \.gguf"):
        export(draft, target, "gguf", str(tmp_path / "out"), str(CONVERTER))
    (tmp_path / "old.gguf").write_text("x")
    with pytest.raises(ValueError, match="which holds something"):
        export(draft, target, "gguf", str(tmp_path / "old.gguf"), str(CONVERTER))
    head = ours(tmp_path / "head", made("eagle3", tiny_target), tiny_target, tiny_tokenizer)
    with pytest.raises(ValueError, match="got a drafter of kind eagle3, expected a draft LM"):
        export(str(head), target, "gguf", new, str(CONVERTER))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"needs pip install 'draftsmith\[gguf\]'"):
        export(draft, target, "gguf", new, str(CONVERTER))
