"""`draftsmith push`: the card of a drafter, and what a hub on loopback gets of it."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_hub
import pytest
import torch
import yaml
from evaluated import MADE, arguments, save_pair
from fake_hub import TOKEN, Hub
from head_folders import made, ours
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from sample_reports import a_lossy_report, a_report
from saved_drafts import save_draft
from tiny_llama import build_llama
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith import push
from draftsmith.command import guarded
from draftsmith.decode.__main__ import main as evaluate
from draftsmith.decode.report import figures
from draftsmith.decode.report.card import MARK, of_hub
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.folder.drafter_folder import META, open_drafter, save_defaults
from draftsmith.models.scorers import weights_mark

Push = Callable[..., str]
NAMES = {"README.md", META, "config.json", "generation_config.json", "model.safetensors"}
NAMES |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub that this process believes to be the hub; files go by LFS, which a test can follow."""
    with fake_hub.running() as server:
        for name, value in {
            "ENDPOINT": server.url,
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_TOKEN_PATH": str(tmp_path / "no token"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        close_session()
        yield server
    close_session()


@pytest.fixture
def told(capfd: pytest.CaptureFixture[str]) -> Push:
    """Runs the command: what it printed, or with a code of 2 its one line."""

    def run(*argv: str, code: int = 0) -> str:
        capfd.readouterr()
        assert guarded(lambda words: push.main(words), list(argv)) == code
        out, said = capfd.readouterr()
        if not code:
            return out
        lines = re.findall("error: .*", said)  # a bar may stand before it
        assert len(lines) == 1 and "Traceback" not in said, said
        return lines[0]

    return run


@pytest.fixture
def folder(
    tmp_path: Path,
    tiny_target: LlamaForCausalLM,
    tiny_draft: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Path:
    """A draft LM as a run leaves it, with what a drafter isn't made of beside it."""
    folder = tmp_path / "run" / "drafter"
    save_draft(folder, tiny_draft, tiny_target, tiny_tokenizer, provenance=MADE)
    for name in ("optimizer.pt", "report.json", "checkpoints/step-1/model.safetensors", "log.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"of the run")
    return folder


def report_of(folder: Path, target: LlamaForCausalLM, tokenizer: Any, **changes: Any) -> Path:
    named = {"kind": "lm", "path": "runs/elsewhere", "mark": weights_mark(folder)}
    made = {"drafter": named, "target_mark": fingerprint(target, tokenizer)} | changes
    report = (a_lossy_report if made.get("agreement") else a_report)(**made)
    path = folder.parent.parent / "made.json"
    path.write_text(json.dumps(report))
    return path


def header(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


# -------------------------------------------------------------------------------------- uploading


def test_what_arrives_is_the_drafter_and_nothing_else(
    hub: Hub, told: Push, folder: Path, tiny_draft: LlamaForCausalLM
) -> None:
    out = told(f"drafter={folder}", "repo=me/draft", "private=true")
    assert f"uploaded: {hub.url}/me/draft\n" in out
    repo = hub.repositories["me/draft"]
    assert repo.private and repo.files.keys() == NAMES | {".gitattributes"}
    for name in NAMES:
        assert repo.files[name] == (folder / name).read_bytes(), name
    assert len(repo.commits) == 1 and {*repo.commits[0]["added"]} == NAMES
    got = folder.parent / "got"
    got.mkdir()
    for name in NAMES:
        (got / name).write_bytes(repo.files[name])
    weights = open_drafter(got, None).model().state_dict()
    assert all(torch.equal(weights[name], one) for name, one in tiny_draft.state_dict().items())


def test_the_same_again_is_no_commit(hub: Hub, told: Push, folder: Path) -> None:
    told(f"drafter={folder}", "repo=me/draft")
    puts = [asked for asked in hub.asked if asked.startswith("PUT")]
    assert len(puts) == 1 and not hub.repositories["me/draft"].private
    assert f"uploaded: {hub.url}/me/draft" in told(f"drafter={folder}", "repo=me/draft")
    assert len(hub.repositories["me/draft"].commits) == 1
    assert [asked for asked in hub.asked if asked.startswith("PUT")] == puts


def test_what_the_folder_has_no_more_goes_and_what_others_put_there_stays(
    hub: Hub, told: Push, folder: Path
) -> None:
    (folder / "acceptance").mkdir()
    (folder / "acceptance/scorer.json").write_text("{}")
    (folder / "tree.txt").write_text("[[0]]")
    save_defaults(folder, tree="tree.txt")
    told(f"drafter={folder}", "repo=me/draft")
    repo = hub.repositories["me/draft"]
    assert {"acceptance/scorer.json", "tree.txt"} < repo.files.keys()
    theirs = {"LICENSE": b"mine", "notes.md": b"mine", "old/config.json": b"mine"}
    repo.files |= theirs
    shutil.rmtree(folder / "acceptance")
    told(f"drafter={folder}", "repo=me/draft")
    assert repo.commits[1]["deleted"] == ["acceptance/scorer.json"]
    assert theirs.items() < repo.files.items()


def test_private_is_not_put_where_all_can_see_it(hub: Hub, told: Push, folder: Path) -> None:
    told(f"drafter={folder}", "repo=me/draft", "license=mit")
    before = hub.repositories["me/draft"].files.copy()
    (folder / "README.md").write_text("changed")
    line = told(f"drafter={folder}", "repo=me/draft", "private=true", code=2)
    assert "private: got true, but me/draft is public; expected another name" in line
    assert hub.repositories["me/draft"].files == before


@pytest.mark.parametrize(
    ("refuse", "repo", "says"),
    [
        ({}, "you/draft", "403 Forbidden"),  # another's
        ({"create": 401}, "me/draft", "401 Unauthorized"),
        ({"commit": 403}, "me/draft", "403 Forbidden"),
        ({"me": 404}, "me/draft", "404 Not Found"),
        ({"PUT": 403}, "me/draft", "403 Forbidden"),
        ({"create": 500}, "me/draft", "500 Internal Server Error"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    hub: Hub, told: Push, folder: Path, refuse: dict[str, int], repo: str, says: str
) -> None:
    hub.refuse = refuse
    line = told(f"drafter={folder}", f"repo={repo}", code=2)
    assert f"repo: got {repo}, which the hub refused (" in line and says in line
    assert ("You don't have the rights" if repo[:3] == "you" else "not for you") in line
    assert "expected a token that may write there (hf auth login, or HF_TOKEN)" in line
    assert not any(one.commits for one in hub.repositories.values())
    assert "the card is written" in line and (folder / "README.md").is_file()


def test_no_hub_no_token(
    hub: Hub, told: Push, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (f"drafter={folder}", "repo=me/draft")
    monkeypatch.setenv("HF_TOKEN", "hf_of_someone_else")
    assert "401" in told(*asked, code=2)
    monkeypatch.delenv("HF_TOKEN")
    hub.asked.clear()
    line = told(*asked, code=2)
    assert "got me/draft without a token; expected a token that may write there" in line
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "offline mode is enabled" in told(*asked, code=2) and hub.asked == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "refused ([Errno 111] Connection refused" in told(*asked, code=2)


# --------------------------------------------------------------------------------------- the card


def test_a_real_evaluation_becomes_a_card(
    tmp_path: Path,
    told: Push,
    tiny_target: LlamaForCausalLM,
    tiny_draft: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Its report is known again by its marks, wherever the folder is moved."""
    save_pair(tmp_path, tiny_target, tiny_draft, tiny_tokenizer)
    evaluate(arguments(tmp_path, tmp_path / "e", f"drafter={tmp_path / 'draft'}", "dtype=float32"))
    moved = (tmp_path / "draft").rename(tmp_path / "moved")
    asked = (f"report={tmp_path / 'e/report.json'}", "card_only=true")
    assert f"written: {moved / 'README.md'}" in told(f"drafter={moved}", *asked)
    card = (moved / "README.md").read_text()
    report = json.loads((tmp_path / "e/report.json").read_text())
    (index,) = header(card)["model-index"][0]["results"]
    values = {one["type"]: one["value"] for one in index["metrics"]}
    assert values == {name: report[name] for name in ("tau", "alpha", "speedup")}
    assert f"| on | {report['machine']} |" in card and f"| commit | `{report['commit']}` |" in card
    assert "6 of 6 answers equal" in card
    line = told(f"drafter={tmp_path / 'itself'}", *asked, code=2)
    assert "which isn't of" in line and "run draftsmith evaluate" in line


def test_every_figure_has_its_formula_and_interval(
    told: Push, folder: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    path = report_of(folder, tiny_target, tiny_tokenizer)
    told(f"drafter={folder}", f"report={path}", "target=org/model", "card_only=true")
    card = (folder / "README.md").read_text()
    for one in figures.figures(push.read_report(str(path), open_drafter(folder, None))):
        shown = f"| {one.name} | {one.value} | {one.interval} | `{one.formula}` |"
        assert (shown in card) == (one.value != "\u2014"), one.name
    assert "| tau, block efficiency | 2.25 | [2.10, 2.40] | `tokens emitted / target calls" in card
    assert "| code | 3 | 2.31 |" in card and "**1.63" in card
    assert card.endswith(f"{MARK}\n") and "Not evaluated" not in card


def test_a_lossy_report_says_so_twice(
    told: Push, folder: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    agreement = {"share": 0.8125, "interval": [0.7, 0.9]}
    path = report_of(folder, tiny_target, tiny_tokenizer, agreement=agreement)
    told(f"drafter={folder}", f"report={path}", "card_only=true")
    card = (folder / "README.md").read_text()
    assert "LOSSY (typical:0.09,0.3)" in card.partition("| figure |")[0]
    assert "figures are of LOSSY decoding" in card and "agreement with plain | 0.812" in card


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_head_without_a_report(
    hub: Hub,
    told: Push,
    tmp_path: Path,
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    kind: str,
) -> None:
    """Nothing is claimed; what serves it names the repository, or a copy of it, not this folder."""
    folder = ours(tmp_path / "head", made(kind, tiny_target), tiny_target, tiny_tokenizer)
    told(f"drafter={folder}", "repo=me/a-head", "target=org/model", "license=apache-2.0")
    card = hub.repositories["me/a-head"].files["README.md"].decode()
    wanted = {"base_model": "org/model", "base_model_relation": "adapter", "license": "apache-2.0"}
    assert wanted.items() < header(card).items() and "model-index" not in header(card)
    assert {"speculative-decoding", kind} < {*header(card)["tags"]}
    assert "**Not evaluated**" in card and "speed-up |" not in card
    assert str(tmp_path) not in card and "drafter=me/a-head" in card
    lines = {"eagle3": "vllm serve org/model", "medusa": "to=tgi out=a-head-tgi &&"}
    assert "hf download me/a-head --local-dir a-head\n" in card and lines[kind] in card


def test_how_it_was_made(
    told: Push,
    tmp_path: Path,
    tiny_target: LlamaForCausalLM,
    tiny_draft: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Recipe, commit and seed; of answers the prompts; the header has names of the hub alone."""
    answers = tmp_path / "answers"
    answers.mkdir()
    about = {"recipe": "prompts: gsm8k\nlimit: 7\n"}
    (answers / "prepare.json").write_text(json.dumps({"about": about}))
    recipe = f"entry: distill\ndata: {answers}\ndraft: {{path: org/small}}\n"
    provenance = MADE | {"recipe": "gsm8k/distill", "commit": "abc123", "acceptance": 0.51234}
    provenance |= {"argv": ["recipe=gsm8k/distill", "steps=9"]}
    how: dict[str, Any] = {"provenance": provenance, "defaults": {"K": 6}}
    folder = tmp_path / "run/drafter"
    save_draft(folder, tiny_draft, tiny_target, tiny_tokenizer, **how)
    (tmp_path / "run/recipe.yaml").write_text(recipe)
    told(f"drafter={folder}", "card_only=true", "target=org/model")
    card = (folder / "README.md").read_text()
    assert header(card)["datasets"] == ["openai/gsm8k"]
    assert header(card)["base_model"] == "org/small" and header(card)["library_name"] == (
        "transformers"
    )
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]*) \|$", card, re.MULTILINE))
    assert (rows["recipe"], rows["commit"]) == ("`gsm8k/distill`", "`abc123`")
    assert (rows["data"], rows["the answers in it are to"]) == (f"`{answers}`", "`gsm8k`")
    assert rows["held-out acceptance"] == "0.512" and "K = 6" in rows["drafts"]
    assert f"```yaml\n{recipe.rstrip()}\n```" in card and "\nsteps=9\n" in card


def test_an_edited_card_is_kept(hub: Hub, told: Push, folder: Path) -> None:
    card = folder / "README.md"
    told(f"drafter={folder}", "card_only=true")
    card.write_text(card.read_text() + "More below the line.\n")
    told(f"drafter={folder}", "card_only=true", "license=mit")
    assert header(card.read_text())["license"] == "mit"
    mine = card.read_text().replace(MARK, "Mine.")
    card.write_text(mine)
    assert "kept: " in told(f"drafter={folder}", "repo=me/draft", "license=bsd")
    assert hub.repositories["me/draft"].files["README.md"].decode() == mine == card.read_text()


def test_names_of_the_hub_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert of_hub("org/Model-3.1-8B") == "org/Model-3.1-8B"
    assert of_hub("org/data:main@train[:9]") == "org/data" and of_hub("gsm8k") == "openai/gsm8k"
    paths = ("runs/model", "../x", "/a/b", "model", "a/b/c", "stdlib", "data/x.jsonl", "")
    assert not any(map(of_hub, paths))


# ------------------------------------------------------------------------------------ wrong input


def test_a_report_of_something_else(
    told: Push, folder: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    other = build_llama(len(tiny_tokenizer), layers=3, hidden=32, seed=9)
    elsewhere = {"kind": "lm", "path": "runs/b", "mark": "0" * 32}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"drafter": elsewhere}, "its drafter is runs/b"),
        ({"drafter": {"kind": "ngram", "path": None}}, "its drafter is ngram"),
        ({"target_mark": fingerprint(other, tiny_tokenizer)}, "head: made for "),
        ({"target_mark": None}, "run draftsmith evaluate"),
        ({"tau": "much"}, "(tau: got 'much'"),
    ]
    for changes, says in wrong:
        path = report_of(folder, tiny_target, tiny_tokenizer, **changes)
        assert says in told(f"drafter={folder}", f"report={path}", "card_only=true", code=2)
        assert not (folder / "README.md").exists()
