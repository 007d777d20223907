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
    to: str  # sglang | vllm | speculators | tgi | gguf
    out: str  # a new folder; of gguf a new file
    converter: str = ""  # of gguf: PATH/convert_hf_to_gguf.py of llama.cpp


def main(argv: list[str]) -> None:
    """Write the folder, print the command that serves it."""
    settings = parse(Export, argv)
    line = export(**vars(settings))
    Console(soft_wrap=True).print(f"written: {settings.out}\n{line}", markup=False, highlight=False)
