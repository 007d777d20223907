"""The pages of the documentation as text: their links, their anchors, the commands on them."""

import importlib.util
import re
import shlex
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import yaml
from house_rules import ROOT

DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^()\s]+(?:\([^()]*\))?)\)")
FENCE = re.compile(r"^( *)(```+|~~~+)(.*)$")
PROGRAMS = ("draftsmith", "python", "make", "accelerate", "pip")


class Command(NamedTuple):
    """A command line and where it stands; cut: it holds `...` or words in the place of values."""

    page: str
    line: int
    text: str

    def words(self) -> list[str]:
        """As a shell splits them, a comment left out."""
        return shlex.split(self.text, comments=True)


def pages() -> list[Path]:
    """Everything that is read as a page: of the site, and beside it."""
    return [*sorted(DOCS.rglob("*.md")), *(ROOT / f"{n}.md" for n in ("README", "CONTRIBUTING"))]


def site_pages() -> ModuleType:
    """docs/site_pages.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("site_pages", DOCS / "site_pages.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_of(path: Path) -> str:
    """A page with the parts that are read from the source."""
    text = path.read_text("utf-8")
    return SITE_PAGES.fill(text) if DOCS in path.parents else text


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines outside of fences."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        if mark := FENCE.match(line):
            if not fence:
                fence = mark[2]
            elif line.strip() == fence:
                fence = ""
        elif not fence:
            yield number, line


def links(text: str) -> Iterator[tuple[int, str]]:
    """(line, goal) of every link that isn't an address of the web; code is no link."""
    for number, line in prose(text):
        for goal in LINK.findall(re.sub(r"`[^`]*`", "", line)):
            if not re.match(r"[a-z]+:", goal):
                yield number, goal


def anchors(text: str) -> set[str]:
    """What headings are called by python-markdown, which makes the site."""
    found: set[str] = set()
    for _, line in prose(text):
        if heading := re.match(r"#{1,6} (.*?)(?: \{#([\w-]+)\})?$", line):
            slug = heading[2] or slug_of(heading[1])
            found.add(slug if slug not in found else f"{slug}_1")
    return found


def slug_of(heading: str) -> str:
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    plain = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def commands(path: Path) -> Iterator[Command]:
    """Lines of code blocks, fenced or indented, that begin with one of PROGRAMS; a line that ends
    in a backslash goes on, and so does one whose quote is open.
    """
    fence, held, first = "", "", 0
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if mark := FENCE.match(line):
            if not fence:
                fence = mark[2]
            elif line.strip() == fence:
                fence, held = "", ""
            continue
        if not fence and not line.startswith("    "):
            held = ""
            continue
        begun = re.sub(r"^(\$ |# +\d+\. )", "", line.strip())
        begun = re.sub(r"^(\w+=\S+ )+(?=python |accelerate )", "", begun)
        held, first = (held + " " + begun, first) if held else (begun, number)
        if not held.startswith(tuple(f"{program} " for program in PROGRAMS)):
            held = ""
        elif held.endswith("\\"):
            held = held.removesuffix("\\").rstrip()
        else:
            try:
                shlex.split(held, comments=True)
            except ValueError:  # an open quote
                continue
            yield Command(named(path), first, held)
            held = ""


def navigation() -> list[str]:
    """The pages that mkdocs.yml names, in order."""

    def walk(items: list) -> Iterator[str]:
        for item in items:
            for goal in item.values() if isinstance(item, dict) else [item]:
                if isinstance(goal, str):
                    yield goal
                else:
                    yield from walk(goal)

    return list(walk(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))


SITE_PAGES = site_pages()
