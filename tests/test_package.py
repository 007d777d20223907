"""The sdist and the wheel: whole, and a wheel works where there is no checkout."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
from pathlib import Path
from urllib.error import URLError
from zipfile import ZipFile

import pytest
from house_rules import ROOT
from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROOMS = ("draftsmith", "models", "decode", "train", "recipes", "bench")
WITH = ("docs", "tests", ".ci", "README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "Makefile")
WITH += (
    "examples",
    "CONTRIBUTING.md",
    "constraints.txt",
    "constraints-oldest.txt",
    "mkdocs.yml",
    "pyproject.toml",
    "setup.py",
)
CACHES = shutil.ignore_patterns("__pycache__", "*.pyc", "COMMIT")
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, f"build_{sys.argv[1]}")(sys.argv[2]))
"""


def build(what: str, source: Path, goal: Path) -> Path:
    """The sdist or wheel of a source folder, by the setuptools at hand."""
    command = [sys.executable, "-c", BUILD, what, str(goal)]
    run = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return goal / run.stdout.splitlines()[-1]


def files(folder: Path, *names: str) -> set[str]:
    """All files below, by their paths."""
    tops = [folder / name for name in names]
    found = [path for top in tops for path in (top.rglob("*") if top.is_dir() else [top])]
    return {path.relative_to(folder).as_posix() for path in found if path.is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A copy of what the repository has; its sdist; the wheel that is made of that."""
    source, goal = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in (*ROOMS, *WITH, "MANIFEST.in"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=CACHES)
        else:
            shutil.copy(ROOT / name, source / name)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], cwd=source, check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "a"], cwd=source, check=True)
    sdist = build("sdist", source, goal)
    with tarfile.open(sdist) as archive:
        archive.extractall(goal, filter="data")
    unpacked = goal / sdist.name.removesuffix(".tar.gz")
    return source, unpacked, build("wheel", unpacked, goal)


def test_the_sdist_is_the_repository(built: tuple[Path, Path, Path]) -> None:
    source, unpacked, _ = built
    assert files(source, *ROOMS, *WITH) <= files(unpacked, *ROOMS, *WITH)


def test_the_wheel_has_every_file_of_the_package(built: tuple[Path, Path, Path]) -> None:
    source, unpacked, wheel = built
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        commit = archive.read("draftsmith/COMMIT").decode()
        (scripts,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "draftsmith = draftsmith.__main__:main" in archive.read(scripts).decode()
    head = ["git", "rev-parse", "HEAD"]
    assert commit == subprocess.check_output(head, cwd=source, text=True)
    assert commit == (unpacked / "draftsmith/COMMIT").read_text()
    own = {name.removeprefix("draftsmith/") for name in files(source, *ROOMS)} | {"COMMIT"}
    assert own == {name[11:] for name in names if name.startswith("draftsmith/")}
    kinds = {Path(name).suffix for name in own}
    data = {".yaml", ".jinja", ".css", ".html", ".mplstyle", ".txt", ".cpp", ".h"}
    assert kinds == {"", ".py", ".typed", *data}
    assert {name.split("/")[0].split("-")[0] for name in names} == {"draftsmith"}


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The console script of a fresh environment with the wheel, and with the libraries at hand."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    # Of a folder that a .pth names no .pth is read: no editable checkout comes along.
    libraries = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "libraries.pth").write_text("\n".join(libraries))
    pip = [sys.executable, "-m", "pip", "-q", "--python", str(home / "bin/python"), "install"]
    how = ["--no-deps", "--no-index", "--ignore-installed", "--no-compile"]
    subprocess.run([*pip, *how, str(built[2])], check=True)
    return home / "bin/draftsmith"


@pytest.mark.slow
def test_the_four_commands_run_from_the_wheel_alone(
    installed: Path,
    tmp_path: Path,
    tiny_target: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    tiny_target.save_pretrained(tmp_path / "my-model")
    tiny_tokenizer.save_pretrained(tmp_path / "my-model")
    rows = [{"prompt": f"What is {i} and {i}?"} for i in range(60)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    how: dict = {"cwd": tmp_path, "env": environment, "text": True}

    def ran(*argv: str) -> str:
        run = subprocess.run([str(installed), *argv], capture_output=True, **how)
        assert run.returncode == 0, run.stderr
        return run.stdout

    python = [
        str(installed.with_name("python")),
        "-c",
        "import draftsmith; print(draftsmith.__file__)",
    ]
    assert subprocess.check_output(python, **how).startswith(str(installed.parents[1]))
    target, small = "target=my-model", ["max_new_tokens=8", "limit=40"]
    asked = [target, "prompts=prompts.jsonl"]
    assert "40 of 40 answers" in ran("prepare", *asked, "out=answers", *small)
    brief = [
        "steps=2",
        "heldout.prompts=prompts.jsonl",
        "heldout.limit=1",
        "heldout.max_new_tokens=4",
    ]
    saved = ran("train", "eagle", target, "data=answers", *brief, "out=eagle")
    assert "saved eagle/drafter" in saved
    told = ran(
        "evaluate", target, "drafter=eagle/drafter", "prompts=prompts.jsonl", *small, "out=e"
    )
    assert "e/report.html" in told and (tmp_path / "e/report.html").stat().st_size > 10_000

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = [str(installed), "serve", target, "drafter=eagle/drafter", f"port={port}"]
    server = subprocess.Popen(serve, **how)
    try:
        body = {"model": "my-model", "prompt": "What is 1?", "max_tokens": 4}
        asked = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        answer = reached(asked, server)
    finally:
        server.terminate()
    assert answer["usage"]["completion_tokens"] == 4
    assert server.wait(timeout=30) == 0


def reached(asked: urllib.request.Request, server: subprocess.Popen) -> dict:
    """The answer, once the server listens."""
    for _ in range(600):
        assert server.poll() is None
        try:
            with urllib.request.urlopen(asked, timeout=60) as reply:
                return json.load(reply)
        except URLError:
            time.sleep(0.1)
    raise TimeoutError("no server within a minute")
