"""Every committed table can be made from nothing, and a bench that lacks something says what."""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from oracle import given_folder

from draftsmith.__main__ import COMMANDS
from draftsmith.bench import joined, reproduce
from draftsmith.command import given, guarded
from draftsmith.decode.report import results
from draftsmith.train.run import recipe

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
BENCHES = {
    path.relative_to(ROOT).as_posix(): found[1]
    for path in sorted((ROOT / "bench").rglob("*.py"))
    if (found := re.search(r"^    run_command\(main, (\w+)\)", path.read_text(), re.MULTILINE))
}
SELF_SUFFICIENT = {"bench/speed/losses.py", "bench/speed/ranks.py"}
# Of random targets.
SELF_SUFFICIENT |= {"bench/evidence/long_context.py", "bench/speed/preview.py"}


def module_of(path: str) -> Any:
    return importlib.import_module(f"draftsmith.{path.removesuffix('.py').replace('/', '.')}")


def test_every_committed_table_has_its_steps_and_every_step_a_table() -> None:
    assert {file.stem for file in RESULTS.glob("*.json")} == reproduce.TABLES.keys()
    assert {name for steps in reproduce.TABLES.values() for name in steps} == reproduce.STEPS.keys()


@pytest.mark.parametrize("name", reproduce.STEPS)
def test_every_command_of_a_step_can_be_given(name: str) -> None:
    """The script or command is there, the recipe composes, its keys are known."""
    script, words = reproduce.command_of(name, "runs/results")
    if script:
        script = (Path.cwd() / script).resolve().relative_to(ROOT).as_posix()
        given(getattr(module_of(script), BENCHES[script]), words)
        return
    command = next(c for c in COMMANDS if words[: c.count(" ") + 1] == c.split())
    place, schema, _ = COMMANDS[command]
    read = recipe.load if command.startswith(("train ", "prepare")) else given
    module = importlib.import_module(f"draftsmith.{place}")
    read(getattr(module, schema), words[command.count(" ") + 1 :])


@pytest.mark.parametrize("path", [path for path in BENCHES if path not in SELF_SUFFICIENT])
def test_a_bench_says_in_one_line_what_to_run_first(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # What another test may have put there.
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(given_folder())])
    monkeypatch.delitem(sys.modules, "speculators", raising=False)
    monkeypatch.delenv("DRAFTSMITH_TRL", raising=False)
    monkeypatch.delenv("DRAFTSMITH_SPECULATORS", raising=False)
    assert guarded(module_of(path).main, []) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and not re.search(r"\(\S+:\d+\)$", line)
    if path.startswith("bench/evidence/"):
        assert "run first: " in line


def test_there_are_benches_to_ask() -> None:
    assert BENCHES.keys() > SELF_SUFFICIENT and len(BENCHES) > 15
    for path, schema in BENCHES.items():
        tree = ast.parse((ROOT / path).read_text())
        called = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        ends = [n for n in called if getattr(n.func, "id", "") == "SystemExit"]
        assert not ends or path == "bench/evidence/online.py", f"{path}: {schema}"


def test_steps_run_in_order_and_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that fails is run again, one that ended well isn't, unless it is asked otherwise."""
    monkeypatch.chdir(tmp_path)
    ran: list[str] = []
    codes = {"heads": 3}

    def run(words: list[str], script: str) -> tuple[int, str]:
        name = next(n for n, key in KEYS.items() if key in " ".join([script, *words]))
        ran.append(name)
        code = codes.pop(name, 0)
        if not code:
            made = Path(reproduce.left_by(name, "out"))
            made.mkdir(parents=True, exist_ok=True)
        return code, ""

    KEYS = {"target": "gsm8k/target", "answers": "gsm8k/prepare", "heads": "heads.py"}
    monkeypatch.setattr(reproduce, "run_as_user", run)
    assert reproduce.main(["table=heads", "out=out", "dry=true"]) == 0 and ran == []
    assert capsys.readouterr().out.count("run ") == 3
    assert reproduce.main(["table=heads", "out=out"]) == 3
    assert "step heads ended with code 3; the same command goes on" in capsys.readouterr().err
    assert ran == ["target", "answers", "heads"]
    assert reproduce.main(["table=heads", "out=out"]) == 0 and ran[3:] == ["heads"]
    assert reproduce.main(["table=heads", "out=out"]) == 0 and ran[4:] == []
    more = "more={answers: limit=5}"
    assert reproduce.main(["table=heads", "out=out", more]) == 0 and ran[4:] == ["answers"]
    with pytest.raises(ValueError, match="unknown step 'answer': did you mean answers"):
        reproduce.main(["table=heads", "more={answer: limit=5}"])
    with pytest.raises(ValueError, match="unknown table 'head': did you mean heads"):
        reproduce.main(["table=head"])
    assert "heads           about 3.2 h" in capsys.readouterr().out


def test_a_target_that_lies_here_is_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    places = {what: recipe.gsm8k(what) for what in recipe.GSM8K}
    assert places == {"target": "runs/gsm8k/target/model", "data": "gsm8k"}
    own = tmp_path / "here/runs/gsm8k/train.jsonl"
    own.parent.mkdir(parents=True)
    own.touch()
    assert recipe.gsm8k("data") == "runs/gsm8k/train.jsonl"
    lying = tmp_path / "shared/models/target-15m"
    lying.mkdir(parents=True)
    assert recipe.gsm8k("target") == "../shared/models/target-15m"
    assert reproduce.main(["table=specdecpp", "dry=true"]) == 0
    assert "1 of 2: done" in capsys.readouterr().out


def test_joined_evaluations_are_one_table(tmp_path: Path) -> None:
    rows = json.loads((RESULTS / "gsm8k.json").read_text())
    for T in (0, 1):
        of_T = [r | {"what": f"{r['what']}-drafter"} for r in rows if r["temperature"] == T]
        (tmp_path / str(T)).mkdir()
        (tmp_path / str(T) / "results.json").write_text(json.dumps(of_T))
    where = f"reports=[{tmp_path / '0'},{tmp_path / '1'}]"
    argv = ["name=gsm8k", "title=GSM8K, a 15M target", where, f"out={tmp_path / 'out'}"]
    joined.main([*argv, "names=[before,after,ngram]"])
    assert json.loads((tmp_path / "out/gsm8k.json").read_text()) == rows
    assert (tmp_path / "out/gsm8k.md").read_text() == (RESULTS / "gsm8k.md").read_text()
    joined.main(argv)
    assert json.loads((tmp_path / "out/gsm8k.json").read_text())[0]["what"] == "before-drafter"
    with pytest.raises(ValueError, match=r"got no nowhere/results\.json"):
        joined.main(["name=x", "title=x", "reports=nowhere"])


@pytest.mark.slow
def test_a_small_table_is_made_from_nothing(tmp_path: Path) -> None:
    """The quickstart's, with little of everything; a second time nothing is left to do."""
    more = "more={quickstart-runs: steps=3 limit=2 max_new_tokens=8}"
    command = [sys.executable, str(ROOT / "bench/reproduce.py"), "table=quickstart", more]
    for first in (True, False):
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
        assert ("1 of 2: run " in run.stdout, "2 of 2: done" in run.stdout) == (first, not first)
    rows = json.loads((tmp_path / "runs/results/quickstart.json").read_text())
    assert [row["what"] for row in rows] == ["before", "after", "ngram"] * 2
    page = (tmp_path / "runs/results/quickstart.md").read_text()
    assert page == results.page("Quickstart", rows)
