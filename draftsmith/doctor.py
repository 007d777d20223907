"""`draftsmith doctor FOLDER [target=TARGET]`: what is wrong with a drafter folder."""

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from draftsmith.command import parse
from draftsmith.models.servers.doctor import examine, outlook
from draftsmith.models.servers.export import about

COLOURS = {"ok": "green", "warning": "yellow", "fault": "bold red"}


@dataclass(frozen=True)
class Doctor:
    """What to examine, and for which target."""

    folder: str  # a drafter, ours or a downloaded one; the key may be left out
    target: str | None = None  # a folder or a hub's name: to see whether the drafter fits


def main(argv: list[str]) -> int:
    """Print what was found; 1 after a fault."""
    settings = parse(Doctor, argv, first="folder")
    layout, findings = examine(settings.folder, settings.target)
    console = Console()
    # In one piece, however long: a path that is broken over lines can't be copied.
    console.print(f"{settings.folder}: {about(layout).title}", markup=False, soft_wrap=True)
    checks = Table(box=SIMPLE_HEAD)
    for name in ("check", "verdict", "found", "how to mend it"):
        checks.add_column(name, overflow="fold")
    for one in findings:
        verdict = Text(one.verdict, COLOURS[one.verdict])
        checks.add_row(one.check, verdict, escape(one.says), escape(one.mend))
    servers = Table("server", "with this folder", box=SIMPLE_HEAD)
    for server, what in outlook(layout, findings).items():
        servers.add_row(server, escape(what))
    console.print(checks)
    console.print(servers)
    return 1 if any(finding.verdict == "fault" for finding in findings) else 0
