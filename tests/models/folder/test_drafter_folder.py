"""The drafter folder: saved whole or not at all, refused when it isn't what it says."""

import copy
import json
import resource
import shlex
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.models.disk import store as disk
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder import drafter_folder
from draftsmith.models.folder.drafter_folder import DEFAULTS, open_drafter, save_drafter
from draftsmith.models.servers.doctor import examine
from draftsmith.models.servers.export import serve_line
from draftsmith.models.servers.findings import Finding
from draftsmith.models.target import TargetSpec, load_target
from draftsmith.models.tokenizer import load_tokenizer

Pair = tuple[LlamaForCausalLM, PreTrainedTokenizerFast]


def save(folder: Path, model: LlamaForCausalLM, tokenizer: Any, target: dict[str, Any]) -> None:
    save_drafter(
        folder,
        kind="lm",
        model=model,
        tokenizer=tokenizer,
        target_fingerprint=target,
        provenance={"recipe": "test"},
        defaults={"K": 5},
    )


@pytest.fixture
def mark(tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return fingerprint(tiny_target, tiny_tokenizer)


@pytest.fixture
def folder(
    tmp_path: Path,
    tiny_draft: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    mark: dict[str, Any],
) -> Path:
    save(tmp_path / "drafter", tiny_draft, tiny_tokenizer, mark)
    return tmp_path / "drafter"


def edit(folder: Path, **changes: Any) -> None:
    """Change keys of draftsmith.json; None removes one."""
    meta = json.loads((folder / "draftsmith.json").read_text()) | changes
    kept = {key: value for key, value in meta.items() if value is not None}
    (folder / "draftsmith.json").write_text(json.dumps(kept))


def test_round_trip(
    folder: Path,
    tiny_draft: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    mark: dict[str, Any],
) -> None:
    opened = open_drafter(folder, mark, target_tokenizer=tiny_tokenizer)
    assert opened.kind == "lm" and opened.meta["schema"] == 1
    assert opened.meta["defaults"] == DEFAULTS | {"K": 5}
    assert opened.meta["target"] == mark and opened.meta["vocabulary_map"] is None
    model = opened.model()
    assert not model.training
    for (name, one), other in zip(
        model.state_dict().items(), tiny_draft.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name
    assert load_tokenizer(opened.path).get_vocab() == tiny_tokenizer.get_vocab()
    assert opened.model("bfloat16").dtype == torch.bfloat16
    assert [path.name for path in folder.parent.iterdir()] == ["drafter"]


def test_the_current_folder_is_a_drafter(
    folder: Path, mark: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert open_drafter(".", mark).kind == "lm"
    assert examine(".")[1][-1] == Finding("opened here", "ok")


def test_one_checkpoint_has_one_fingerprint(
    tmp_path: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    tiny_target.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    marks = []
    for dtype in ("float32", "bfloat16"):
        model, tokenizer = load_target(TargetSpec(str(tmp_path), dtype), "cpu")
        marks.append(fingerprint(model, tokenizer))
    assert marks[0] == marks[1] == fingerprint(tiny_target, tiny_tokenizer)
    model.resize_token_embeddings(384)
    padded = fingerprint(model, tokenizer)
    assert not drafter_folder.differences(marks[0], padded) and padded != marks[0]
    with torch.no_grad():
        model.lm_head.weight[0] += 1
    assert len(drafter_folder.differences(marks[0], fingerprint(model, tokenizer))) == 1


def test_a_tuned_target_is_taken_with_a_warning(
    folder: Path,
    mark: dict[str, Any],
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """LM head and final norm are the same, a layer isn't: a merged adapter, say."""
    tuned = copy.deepcopy(tiny_target)
    with torch.no_grad():
        tuned.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    with pytest.warns(UserWarning, match="with other weights in its layers"):
        open_drafter(folder, fingerprint(tuned, tiny_tokenizer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_drafter(folder, mark)
        # In bf16 it is the same target.
        open_drafter(folder, fingerprint(copy.deepcopy(tiny_target).bfloat16(), tiny_tokenizer))


def test_wrong_target_names_what_differs(
    folder: Path, tiny_draft: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    other = fingerprint(tiny_draft, tiny_tokenizer)
    with pytest.raises(ValueError, match=r"layers: made for 3, given 1; head: made for") as caught:
        open_drafter(folder, other)
    assert "tokenizer:" not in str(caught.value)  # the same in both
    assert "allow_target_mismatch=true" in str(caught.value)
    assert open_drafter(folder, other, allow_target_mismatch=True).kind == "lm"
    assert open_drafter(folder, None).kind == "lm"


def test_norm_and_tokenizer_are_part_of_the_fingerprint(
    tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    mark = fingerprint(tiny_target, tiny_tokenizer)
    tiny_tokenizer.save_pretrained(tmp_path)
    grown = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    grown.add_tokens(["<|more|>"])
    endpoint = fingerprint(None, grown, name="a-large-model")
    differ = drafter_folder.differences(endpoint, mark)
    assert [line.split(":")[0] for line in differ] == ["tokens", "tokenizer"]
    assert not drafter_folder.differences(fingerprint(None, tiny_tokenizer, name="x"), mark)
    tiny_target.model.norm.weight.data[0] += 0.5
    try:
        changed = fingerprint(tiny_target, tiny_tokenizer)
    finally:
        tiny_target.model.norm.weight.data[0] -= 0.5
    assert drafter_folder.differences(mark, changed)[0].startswith("final_norm")


def test_other_tokenizer_is_refused_even_when_insisting(
    folder: Path, tiny_tokenizer: PreTrainedTokenizerFast, mark: dict[str, Any], tmp_path: Path
) -> None:
    tiny_tokenizer.save_pretrained(tmp_path / "t")
    grown = PreTrainedTokenizerFast.from_pretrained(tmp_path / "t")
    grown.add_tokens(["<|more|>"])
    with pytest.raises(ValueError, match=r"id 320: target '<\|more\|>', draft nothing"):
        open_drafter(folder, mark, allow_target_mismatch=True, target_tokenizer=grown)
    grown.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"320 rows in the draft .*tokenizer of 321"):
        open_drafter(folder, mark)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: shutil.rmtree(f), r"is no folder; expected a drafter folder; check the path"),
        (lambda f: (f / "config.json").unlink(), r"without config.json \(it holds"),
        (lambda f: (f / "model.safetensors").rename(f / "m.safetensors"), r"it holds .*m.safet"),
        (lambda f: [p.unlink() for p in f.glob("*token*")], r"without a tokenizer"),
        (lambda f: (f / "draftsmith.json").write_text('{"schema": 1,'), r"cannot be read"),
        (lambda f: (f / "draftsmith.json").write_text("[1]"), r"holding a list"),
        (lambda f: edit(f, schema=2), r"of schema 2; expected 1; use the version"),
        (lambda f: edit(f, schema=None), r"of schema None; expected 1"),
        (lambda f: edit(f, target=None, defaults=3), r"without an object target, defaults"),
        (lambda f: edit(f, kind="mamba"), r"drafter kind 'mamba' .*expected one of .*lm"),
        (lambda f: (f / "config.json").write_text("{"), r"cannot be read as a causal LM"),
    ],
)
def test_broken_folders_are_refused(
    folder: Path, mark: dict[str, Any], break_it: Any, message: str
) -> None:
    break_it(folder)
    with pytest.raises(ValueError, match=message):
        open_drafter(folder, mark)


@pytest.mark.parametrize("cut", [4, 500, -1])
def test_truncated_weights(folder: Path, mark: dict[str, Any], cut: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:cut])
    with pytest.raises(
        ValueError, match=r"model.safetensors, which cannot be read .*copy it again"
    ):
        open_drafter(folder, mark)


def test_tensors_are_compared_with_the_config(folder: Path, mark: dict[str, Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["midlayer.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError) as caught:
        open_drafter(folder, mark)
    message = str(caught.value)
    assert "1 missing: model.layers.0.mlp.up_proj.weight" in message
    assert "1 unknown: midlayer.weight" in message
    assert "1 of another shape: model.norm.weight (file [7], model [32])" in message


def test_plain_causal_lm_opens_with_a_warning(folder: Path, mark: dict[str, Any]) -> None:
    (folder / "draftsmith.json").unlink()
    with pytest.warns(UserWarning, match="not known to be made for this target"):
        opened = open_drafter(folder, mark | {"head": "another"})
    assert opened.kind == "lm" and opened.meta["defaults"]["K"] == 4
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLMEagle3"]
    (folder / "config.json").write_text(json.dumps(config))
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match=r"\['LlamaForCausalLMEagle3'\].*made for another loader"),
    ):
        open_drafter(folder, mark)


def test_tied_head_may_be_left_out(
    tmp_path: Path, tiny_draft: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    config = type(tiny_draft.config)(**tiny_draft.config.to_dict() | {"tie_word_embeddings": True})
    save(tmp_path / "d", LlamaForCausalLM(config), tiny_tokenizer, {})
    names = load_file(tmp_path / "d" / "model.safetensors")
    assert "lm_head.weight" not in names
    model = open_drafter(tmp_path / "d", None).model()
    assert torch.equal(model.lm_head.weight, names["model.embed_tokens.weight"])


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_failing_anywhere_leaves_the_old_folder(
    folder: Path,
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    mark: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = weights_of(folder)

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    for owner, name in (
        (LlamaForCausalLM, "save_pretrained"),
        (PreTrainedTokenizerFast, "save_pretrained"),
        (Path, "write_text"),
        (disk, "flush"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, full)
            with pytest.raises(OSError, match=r"No space left.*saved there before is unchanged"):
                save(folder, tiny_target, tiny_tokenizer, mark)
        assert weights_of(folder) == before and open_drafter(folder, mark)
        assert [path.name for path in folder.parent.iterdir()] == ["drafter"]
    rename = Path.rename

    def second_fails(path: Path, goal: Path) -> Path:
        return full() if path.name.endswith(".half") else rename(path, goal)  # type: ignore

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", second_fails)
        with pytest.raises(OSError, match=r"unchanged"):
            save(folder, tiny_target, tiny_tokenizer, mark)
    assert weights_of(folder) == before and open_drafter(folder, mark)
    save(folder, tiny_target, tiny_tokenizer, mark)
    assert weights_of(folder) != before and open_drafter(folder, mark)


FILL_THE_DISK = """
import resource, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
from draftsmith.models.folder.drafter_folder import save_drafter
folder, limit = sys.argv[1], int(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(folder)
model.lm_head.weight.data.zero_()
tokenizer = AutoTokenizer.from_pretrained(folder)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
save_drafter(folder, kind="lm", model=model, tokenizer=tokenizer, target_fingerprint={},
             provenance={}, defaults={})
"""


def test_a_file_that_cannot_be_written_whole(folder: Path, mark: dict[str, Any]) -> None:
    before = weights_of(folder)
    assert len(before) > 32_768  # the limit cuts the weights, not the small files
    done = run(["-c", FILL_THE_DISK, str(folder), "32768"])
    assert done.returncode != 0 and "what was saved there before is unchanged" in done.err
    assert weights_of(folder) == before and open_drafter(folder, mark)
    assert [path.name for path in folder.parent.iterdir()] == ["drafter"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 32_768


def test_killed_between_the_two_renames(
    folder: Path,
    tiny_draft: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    mark: dict[str, Any],
) -> None:
    previous = folder.parent / ".drafter.previous"
    folder.rename(previous)
    with pytest.raises(ValueError, match=r"cut between two renames: mv .*\.drafter\.previous"):
        open_drafter(folder, mark)
    save(folder, tiny_draft, tiny_tokenizer, mark)
    assert open_drafter(folder, mark) and not previous.exists()


def test_save_refuses(
    folder: Path,
    tiny_draft: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    mark: dict[str, Any],
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"exists and isn't a drafter folder.*choose another"):
        save(home, tiny_draft, tiny_tokenizer, mark)
    assert (home / "thesis.txt").read_text() == "years of work"
    before = weights_of(folder)
    broken = LlamaForCausalLM(tiny_draft.config)
    broken.model.norm.weight.data[0] = float("nan")
    with pytest.raises(ValueError, match=r"aren't finite \(model.norm.weight\)"):
        save(folder, broken, tiny_tokenizer, mark)
    assert weights_of(folder) == before
    common = {"model": tiny_draft, "tokenizer": tiny_tokenizer, "target_fingerprint": mark}
    with pytest.raises(ValueError, match=r"kind 'lmm'"):
        save_drafter(folder, kind="lmm", provenance={}, defaults={}, **common)
    with pytest.raises(ValueError, match=r"got defaults \['k'\]; expected keys of \['K'"):
        save_drafter(folder, kind="lm", provenance={}, defaults={"k": 1}, **common)


def test_lines_of_servers_that_make_answers_up(folder: Path) -> None:
    """At a measured acceptance, and as deep as it was measured, whatever the folder says."""
    vllm, sglang, llama = serve_line(folder, "t", [0.75, 0.5, 0.25]).splitlines()
    config = json.loads(shlex.split(vllm)[-1])
    assert (
        config["rejection_sample_method"] == "synthetic" and config["num_speculative_tokens"] == 3
    )
    assert config["synthetic_acceptance_rates"] == [0.75, 0.5, 0.25]
    pretended = "SGLANG_SIMULATE_ACC_METHOD=match-expected SGLANG_SIMULATE_ACC_LEN=2.500 python"
    assert sglang.startswith(pretended) and "--speculative-num-steps 3" in sglang
    assert "--spec-draft-n-max 3" in llama and llama.endswith(" --spec-synth-rates 0.75,0.5,0.25")


def test_serve_lines(folder: Path) -> None:
    text = serve_line(folder, "models/my target")
    vllm, sglang, transformers, llama, tensorrt, mlx, studio = text.splitlines()
    config = json.loads(vllm.split("--speculative-config ")[1].strip("'"))
    assert vllm.startswith("vllm serve 'models/my target' ")
    assert config == {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 5}
    assert "--speculative-algorithm STANDALONE" in sglang and "--speculative-num-steps 5" in sglang
    assert "--speculative-num-draft-tokens 6" in sglang and "assistant_model=" in transformers
    asked = f"drafter={folder} target='models/my target' to=gguf converter=convert_hf_to_gguf.py"
    assert llama.startswith(f"python -m draftsmith export {asked} out={folder}.gguf && ")
    assert f"-md {folder}.gguf --spec-type draft-simple --spec-draft-n-max 5 " in llama
    written = json.loads(shlex.split(tensorrt)[1])
    assert written["disable_overlap_scheduler"] is True
    assert written["speculative_config"]["decoding_type"] == "DraftTarget"
    made = f"{folder}-mlx"
    assert mlx.startswith(f"mlx_lm.convert --hf-path {folder} --mlx-path {made} && ")
    assert mlx.endswith(f"--draft-model {made} --num-draft-tokens 5")
    assert studio.startswith(f"lms import {folder}.gguf ")
    meta = json.loads((folder / "draftsmith.json").read_text())
    edit(folder, target=meta["target"] | {"logit_rows": 384})
    warning = serve_line(folder, "t").splitlines()[-1]
    assert "the draft has 320, the target 384" in warning
    edit(folder, kind="eagle")
    with pytest.raises(ValueError, match="kind 'eagle'"):
        serve_line(folder, "t")
