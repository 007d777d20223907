"""The documentation: its links lead somewhere, and its commands are what the program takes."""

import subprocess
from pathlib import Path

import pytest
from doc_pages import anchors, links, named, pages, text_of
from house_rules import ROOT


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
