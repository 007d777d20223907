"""The documentation: links lead somewhere, commands are what the program takes, pages are alike."""

import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from doc_commands import fault, spans
from doc_pages import anchors, commands, links, named, navigation, pages, prose, text_of
from house_rules import ROOT

from draftsmith.__main__ import COMMANDS
from draftsmith.command import kinds
from draftsmith.train.run import recipe

INDEX = ROOT / "docs/results/index.md"


def dead(page: Path, text: str) -> list[str]:
    """Links of a page that lead nowhere: no such file, or no such heading in it."""
    found = []
    for line, goal in links(text):
        path, _, anchor = goal.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.is_file():
            found.append(f"{named(page)}:{line}: no file {path}")
        elif anchor and anchor not in anchors(text if file == page else text_of(file)):
            found.append(f"{named(page)}:{line}: no heading {goal}")
        elif (ROOT / "docs") in page.parents and (ROOT / "docs") not in file.parents:
            found.append(f"{named(page)}:{line}: {path} isn't on the site")
    return found


@pytest.mark.parametrize("page", pages(), ids=named)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert dead(page, text_of(page)) == []


def test_a_dead_link_is_found() -> None:
    page = ROOT / "docs/glossary.md"
    text = "# A thing\n[a](#a-thing) [b](nowhere.md) [c](#b-thing) [d](../README.md) `[e](f)`\n"
    assert [one.partition(": ")[2] for one in dead(page, text)] == [
        "no file nowhere.md",
        "no heading #b-thing",
        "../README.md isn't on the site",
    ]


def test_every_page_that_is_named_is_there() -> None:
    """`docs/...md` in sources, recipes and pages."""
    names = ["git", "-C", str(ROOT), "grep", "-noE", r"docs/[a-z_0-9/-]+\.md", "--", "."]
    run = subprocess.run(names, capture_output=True, text=True)
    if run.returncode:
        pytest.skip("no git checkout here: an archive")
    apart = "train/heldout/head_run.py:"  # names pages of other projects
    found = [line for line in run.stdout.splitlines() if not line.startswith(apart)]
    assert found
    assert [line for line in found if not (ROOT / line.rpartition(":")[2]).is_file()] == []


# What was run or read once: its commands are of that day.
OLD = {ROOT / "docs/dev/log.md", *(ROOT / "docs/results").glob("*.md")} - {INDEX}


@pytest.mark.parametrize("page", [page for page in pages() if page not in OLD], ids=named)
def test_every_command_is_taken(page: Path) -> None:
    """Dry: by the parsers alone. RUN below is what is really run."""
    found = [fault(command.text) for command in commands(page)]
    for _, line in prose(page.read_text("utf-8")):
        found += [fault(span, cut=True) for span in spans(line)]
    assert list(filter(None, found)) == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("draftsmith evalute target=T", "unknown command evalute"),
        ("draftsmith evaluate target=T drafter=D rate=1", "unknown key 'rate'"),
        ("draftsmith evaluate target=T drafter=D tree=eagle-26", "tree: got 'eagle-26'"),
        ("draftsmith evaluate target=T drafter=D policy=never", "policy: got 'never'"),
        ("draftsmith evaluate target=T drafter=sufix:FILE", "unknown drafter sufix:FILE"),
        ("draftsmith evaluate target=T drafter=D lossy=cascade:v9,1", "v9"),
        ("draftsmith evaluate target=T", "missing: drafter"),
        ("draftsmith train eagle recipe=eagle3/qwen4", "unknown recipe"),
        ("draftsmith train eagle recipe=gsm8k/distill", "the recipe is for distill"),
        ("draftsmith train eagle ... steps=many", "steps: got 'many'"),
        ("draftsmith train eagle --config zero9 recipe=eagle3/gsm8k", "unknown config zero9"),
        ("accelerate launch train/eagel.py recipe=eagle3/gsm8k", "no train/eagel.py"),
        ("python bench/evidence/heads.py seed=1", "unknown key 'seed'"),
        ("make reproduce TABEL=heads", "reads no TABEL"),
        ("make it", "make has no it"),
        ("make setup && pip install '.[serving]'", "no extra serving"),
    ],
)
def test_a_command_that_is_none_is_found(line: str, says: str) -> None:
    assert says in fault(line)


def test_the_navigation_names_every_page_once() -> None:
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(navigation()) == sorted(there)


OVERVIEWS = ("index", "heads", "own_layers", "tuning", "draft_lm")
METHODS = [path for path in (ROOT / "docs/methods").glob("*.md") if path.stem not in OVERVIEWS]


@pytest.mark.parametrize("page", METHODS, ids=lambda path: path.stem)
def test_a_methods_page_has_the_parts_that_all_have(page: Path) -> None:
    title, *heads = [line for _, line in prose(page.read_text("utf-8")) if re.match("#+ ", line)]
    assert title.startswith("# ")
    parts = ["Equation", "Where ours differs", "Recipe", "Figures", "Price"]
    found = [head.removeprefix("## ") for head in heads]
    assert sorted(part for part in found if part in parts) == sorted(parts)


def test_pages_of_keys_are_the_programs_own() -> None:
    """Every command's every key, with its default; every recipe; every figure of the report."""
    shown, trained = (text_of(ROOT / f"docs/ref/{name}.md") for name in ("commands", "recipes"))
    for name, (place, schema, _) in COMMANDS.items():
        text = trained if name.startswith("train ") else shown
        part = text.partition(f"\n## draftsmith {name}\n")[2].partition("\n## ")[0]
        config = getattr(importlib.import_module(f"draftsmith.{place}"), schema)
        assert re.findall(r"^\| `([\w.]+)` \|", part, re.MULTILINE) == list(kinds(config))
    assert all(f"| `{name}` |" in trained for name in recipe.names())
    assert "tokens emitted / target calls" in text_of(ROOT / "docs/ref/metrics.md")


@pytest.mark.slow
def test_the_site_is_built_strictly_and_asks_nobody(tmp_path: Path) -> None:
    """`make docs`, elsewhere. A reader's browser fetches nothing but the site."""
    own = ROOT / ".venv-docs/bin/mkdocs"
    mkdocs = str(own) if own.is_file() else shutil.which("mkdocs")
    if mkdocs is None:
        pytest.skip("no mkdocs here: `make docs` installs it into .venv-docs")
    subprocess.run(["make", "-s", "links"], cwd=ROOT, check=True)
    run = subprocess.run(
        [mkdocs, "build", "-q", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / ".typing"), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stderr) == (0, "")
    for name in navigation():
        html = (tmp_path / name).with_suffix(".html").read_text("utf-8")
        assert "<!-- from:" not in html
        assert not re.findall(r'<(?:script|link|img|iframe)[^>]*="(?:https?:)?//[^"]*"', html)


ITEM = re.compile(r" {0,3}([-*]|\d+\.) ")


@pytest.mark.parametrize("page", pages(), ids=named)
def test_lists_and_tables_begin_after_an_empty_line(page: Path) -> None:
    """Else the site takes them for running text, though GitHub doesn't."""
    late, before = [], (0, "")
    for number, line in prose(page.read_text("utf-8")):
        last = before[1] if before[0] == number - 1 else ""
        begins = ITEM.match(line) and not (ITEM.match(last) or last.startswith("  "))
        begins = begins or (line.startswith("|") and not last.startswith("|"))
        late += [number] if begins and last.strip() else []
        before = number, line
    assert late == []
