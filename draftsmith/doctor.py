"""`python -m draftsmith doctor FOLDER [target=TARGET]`: what is wrong with a drafter folder."""

import sys
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from draftsmith.command import parse
from draftsmith.models.servers.doctor import LAYOUTS, examine, outlook
from draftsmith.models.servers.findings import Finding

COLOURS = {"ok": "green", "warning": "yellow", "fault": "bold red"}


@dataclass(frozen=True)
class Doctor:
    """Which folder, ours or a downloaded one, and, to see whether it fits, for which target."""

    folder: str
    target: str | None = None


def main(argv: list[str]) -> int:
    """Print what was found; 1 after a fault, 2 after a user's error."""
    console = Console()
    if not argv or argv[0] in ("-h", "--help", "help"):
        console.print(
            "python -m draftsmith doctor FOLDER \\[target=TARGET]\n\n" + str(Doctor.__doc__)
        )
        return 0
    try:
        named = argv[0].split("=")[0] in Doctor.__annotations__
        settings = parse(Doctor, argv if named else [f"folder={argv[0]}", *argv[1:]])
        layout, findings = examine(settings.folder, settings.target)
    except ValueError as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        return 2
    # In one piece, however long: a path that is broken over lines can't be copied.
    console.print(f"{settings.folder}: {LAYOUTS[layout]}", markup=False, soft_wrap=True)
    console.print(checks(findings))
    console.print(servers(outlook(layout, findings)))
    return 1 if any(finding.verdict == "fault" for finding in findings) else 0


def checks(findings: list[Finding]) -> Table:
    """One row a finding: what was checked, how it stands, how to mend it."""
    table = Table(box=SIMPLE_HEAD)
    for name in ("check", "verdict", "found", "how to mend it"):
        table.add_column(name, overflow="fold")
    for one in findings:
        colour = COLOURS[one.verdict]
        verdict = f"[{colour}]{one.verdict}[/{colour}]"
        table.add_row(one.check, verdict, escape(one.says), escape(one.mend))
    return table


def servers(said: dict[str, str]) -> Table:
    """What each server does with the folder as it is."""
    table = Table("server", "with this folder", box=SIMPLE_HEAD)
    for server, what in said.items():
        table.add_row(server, escape(what))
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
