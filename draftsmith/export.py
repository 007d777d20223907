"""`draftsmith export drafter=FOLDER target=TARGET to=STACK out=FOLDER`"""

from dataclasses import dataclass

from rich.console import Console

from draftsmith.command import parse
from draftsmith.models.servers.export import export


@dataclass(frozen=True)
class Export:
    """What to write in whose layout."""

    drafter: str  # its folder
    target: str  # that it is for
    to: str  # sglang | vllm | speculators | tgi
    out: str  # a new folder


def main(argv: list[str]) -> None:
    """Write the folder, print the command that serves it."""
    settings = parse(Export, argv)
    line = export(settings.drafter, settings.target, settings.to, settings.out)
    Console(soft_wrap=True).print(f"written: {settings.out}\n{line}", markup=False, highlight=False)
