"""`draftsmith doctor DRAFTER [target=TARGET]`: what is wrong with a drafter folder."""

from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from draftsmith.command import parse
from draftsmith.models.servers.doctor import examine, outlook
from draftsmith.models.servers.export import about
from draftsmith.printed import as_table

COLOURS = {"ok": "green", "warning": "yellow", "fault": "bold red"}
CHECKS = ("check", "verdict", "found", "how to mend it")
SERVERS = ("server", "with this folder")


@dataclass(frozen=True)
class Doctor:
    """What to examine, and for which target."""

    drafter: str  # a drafter, ours or a downloaded one; the key may be left out
    target: str | None = None  # a folder or a hub's name: to see whether the drafter fits


def main(argv: list[str]) -> int:
    """Print what was found; 1 after a fault."""
    settings = parse(Doctor, argv, first="drafter")
    layout, findings = examine(settings.drafter, settings.target)
    console = Console()
    # In one piece, however long: a path that is broken over lines can't be copied.
    console.print(f"{settings.drafter}: {about(layout).title}", markup=False, soft_wrap=True)
    checks = [
        (one.check, Text(one.verdict, COLOURS[one.verdict]), one.says, one.mend) for one in findings
    ]
    console.print(as_table(CHECKS, checks, CHECKS))
    console.print(as_table(SERVERS, outlook(layout, findings).items(), SERVERS))
    return 1 if any(finding.verdict == "fault" for finding in findings) else 0
