"""`python -m draftsmith export drafter=FOLDER target=TARGET to=STACK out=FOLDER`"""

import sys
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from draftsmith.command import parse
from draftsmith.models.servers.export import LAYOUTS, export


@dataclass(frozen=True)
class Export:
    """Which drafter, for which target, in whose layout, into which new folder."""

    drafter: str
    target: str
    to: str
    out: str


def main(argv: list[str]) -> int:
    """Write the folder, print the command that serves it; 2 after a user's error."""
    console = Console(soft_wrap=True)
    if not argv or argv[0] in ("-h", "--help", "help"):
        console.print(
            "python -m draftsmith export drafter=FOLDER target=TARGET to=STACK out=FOLDER\n\n"
            f"{Export.__doc__}\nSTACK: {', '.join(LAYOUTS)}",
            markup=False,
        )
        return 0
    try:
        settings = parse(Export, argv)
        line = export(settings.drafter, settings.target, settings.to, settings.out)
    except ValueError as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        return 2
    console.print(f"written: {settings.out}\n{line}", markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
