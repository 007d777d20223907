"""Parts of pages that are read from the source, so that they can't drift from it.

A page says `<!-- from: NAME -->` on a line of its own, and perhaps in italics below what a reader
of the bare file is to do instead; mkdocs (`hooks` of mkdocs.yml) puts what PARTS makes of that name
in their place. Nothing of draftsmith is imported but its manual.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from draftsmith.__main__ import COMMANDS
from draftsmith.manual import COMMON, Key, file_of, of_module

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"^<!-- from: (\w+) -->$(?:\n\*.+\*$)?", re.MULTILINE)
LONG = 60  # of a default that is shown


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs' hook."""
    return fill(markdown)


def fill(markdown: str) -> str:
    """The page with its parts."""
    return MARK.sub(lambda mark: PARTS[mark[1]](), markdown)


def cell(text: str) -> str:
    """Text in a table, as it stands."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def keys_table(keys: Iterable[Key]) -> str:
    lines = ["| key | default | |", "|---|---|---|"]
    for key in keys:
        shown = key.default
        if shown is None:
            shown = "must be given"
        elif len(shown) > LONG:
            shown = f"`{shown[:LONG]} ...`"
        else:
            shown = f"`{shown}`" if shown else ""
        lines.append(f"| `{key.name}` | {shown} | {cell(key.says or COMMON.get(key.name, ''))} |")
    return "\n".join(lines)


def section(name: str) -> str:
    """A command: what it does, its module's own words, its keys."""
    place, schema, what = COMMANDS[name]
    source = of_module(f"draftsmith.{place}")
    said = source.tree.body[0].value.value.strip()  # type: ignore[attr-defined]
    parts = [f"## draftsmith {name}", f"{what[0].upper()}{what[1:]}.", f"```text\n{said}\n```"]
    return "\n\n".join([*parts, keys_table(source.keys(schema))])


def commands() -> str:
    """All but the training entries."""
    return "\n\n".join(section(name) for name in COMMANDS if not name.startswith("train "))


def entries() -> str:
    """The training entries, after the keys of how they are launched."""
    launch = keys_table(of_module("draftsmith.launch").keys("Launch"))
    named = [section(name) for name in COMMANDS if name.startswith("train ")]
    return "\n\n".join(["## How entries are launched", launch, *named])


def recipes() -> str:
    """Every recipe, its entry and the first sentence of its header."""
    folder = ROOT / "recipes"
    lines = ["| recipe | entry | what it is |", "|---|---|---|"]
    for path in sorted(folder.rglob("*.yaml")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        text = path.read_text(encoding="utf-8")
        if not name.startswith("accelerate/"):
            header = text.splitlines()[0].removeprefix("# ")
            lines.append(f"| `{name}` | {yaml.safe_load(text)['entry']} | {cell(header)} |")
    return "\n".join(lines)


def metrics() -> str:
    """The figures of the report, as it prints them itself."""
    folder = file_of("draftsmith.decode.report.page").parent
    lines = ["| in report.json | name | formula |", "|---|---|---|"]
    for line in (folder / "figures.txt").read_text(encoding="utf-8").splitlines():
        key, _, name, formula = line.split(" | ")
        lines.append(f"| `{key}` | {cell(name)} | {cell(formula)} |")
    return "\n".join(lines)


def beside(name: str) -> str:
    """A page that lies beside docs/, without its title; links into docs/ are seen from dev/."""
    text = (ROOT / f"{name}.md").read_text(encoding="utf-8").split("\n", 1)[1]
    return re.sub(r"\]\(docs/", "](../", text)


PARTS = {
    "commands": commands,
    "entries": entries,
    "recipes": recipes,
    "metrics": metrics,
    "contributing": lambda: beside("CONTRIBUTING"),
    "changelog": lambda: beside("CHANGELOG"),
}
