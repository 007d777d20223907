"""Drafters by their hub names, from a cache as the hub's own client leaves it."""

import json
import shutil
from pathlib import Path

import pytest
from head_folders import made
from huggingface_hub import constants
from live_server import live
from official_eagle import official_eagle3
from saved_drafts import save_draft
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.command import guarded
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.evaluate.arms import unsaid
from draftsmith.decode.traces import judge_labels
from draftsmith.decode.traces import record as tracing
from draftsmith.decode.traces.store import read_traces
from draftsmith.models.disk import hub
from draftsmith.models.disk.hub import local_folder
from draftsmith.models.folder.drafter_folder import META, save_defaults
from draftsmith.models.scorers import FOLDER, load_acceptance, weights_mark
from draftsmith.train import scorers


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    hub._fetched.cache_clear()
    return tmp_path


def snapshot(cache: Path, name: str) -> Path:
    """Where the client keeps a repository's only revision."""
    repo, commit = cache / f"models--{name.replace('/', '--')}", "a" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text(commit)
    return repo / "snapshots" / commit


def test_a_drafter_folder_of_the_hub(
    cache: Path,
    tiny_target: LlamaForCausalLM,
    tiny_draft: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    folder = save_draft(snapshot(cache, "an/draft"), tiny_draft, tiny_target, tiny_tokenizer)
    save_defaults(folder, K=2)
    assert (folder / META).is_file()
    drafter = load_drafter("an/draft", tiny_target, tiny_tokenizer)
    assert drafter is not None and drafter.kind == "lm"
    assert unsaid("an/draft", None, "", "fixed")["K"] == 2
    with live(tiny_target, tiny_tokenizer, drafter="an/draft") as server:
        # That folder's K is 2, but auto finds its own.
        assert server.lane.decoder.settings.K == 8 and server.lane.draft["kind"] == "lm"


def test_traces_and_scorers_of_a_drafter_of_the_hub(
    cache: Path,
    tmp_path: Path,
    tiny_target: LlamaForCausalLM,
    tiny_draft: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """From a trace to an acceptance head, which is read by the name too."""
    folder = save_draft(snapshot(cache, "an/draft"), tiny_draft, tiny_target, tiny_tokenizer)
    for part in (tiny_target, tiny_tokenizer):
        part.save_pretrained(tmp_path / "target")
    rows = [{"prompt": f"def f{i}(", "completion": f"x\n#### {i}"} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pair, trace = [f"target={tmp_path}/target", "drafter=an/draft"], f"{tmp_path}/trace"
    few = ["max_new_tokens=8", f"prompts={tmp_path}/rows.jsonl", "split=all"]
    tracing.main([*pair, *few, "K=2", f"out={trace}"])
    assert read_traces(trace).about["drafter"]["mark"] == weights_mark(folder)
    read = ["reading.kind=acceptance", "reading.drafter=an/draft", f"reading.traces=[{trace}]"]
    scorers.main([pair[0], *read, f"out={tmp_path}/run", "steps=2", "width=4"])
    shutil.copytree(tmp_path / "run/drafter" / FOLDER, folder / FOLDER)
    assert load_acceptance("an/draft", hidden=32) is not None
    labels = [*pair, f"data={tmp_path}/rows.jsonl", "max_new_tokens=4", "limit=2"]
    with pytest.raises(ValueError, match="a trace without rows"):  # no answer of it is right
        judge_labels.main([*labels, f"out={tmp_path}/labels"])


def test_another_toolkits_head_of_the_hub(
    cache: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    official_eagle3(snapshot(cache, "an/eagle"), made("eagle3", tiny_target), tiny_target)
    with pytest.warns(UserWarning, match="in the layout of EAGLE-3"):
        drafter = load_drafter("an/eagle", tiny_target, tiny_tokenizer)
    assert drafter is not None and drafter.kind == "eagle3"


def test_an_absent_one_is_one_line(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(lambda _: print(local_folder("no/such-draft")), []) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "no/such-draft, which is no folder here and no drafter that the hub gave" in line
    nowhere = tmp_path / "no" / "where"  # a path, which the hub isn't asked for
    assert local_folder(nowhere) == nowhere


def test_only_what_a_drafter_is_made_of_is_fetched(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **how: asked.update(how) or name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert local_folder("an/other") == Path("an/other") and not asked["local_files_only"]
    files = ["config.json", "medusa_lm_head.pt", "draft.gguf", "checkpoint-9/model.safetensors"]
    from huggingface_hub.utils import filter_repo_objects

    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(files, **patterns)) == files[:2]
