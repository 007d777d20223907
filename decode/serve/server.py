"""An OpenAI-compatible server whose drafts may learn while it serves.

    python -m draftsmith serve target=TARGET drafter=DRAFTER
    python -m draftsmith serve target=TARGET drafter=DRAFTER drafts='["code=DRAFTER_2"]' \\
        online=FOLDER        # train/online.py learns from FOLDER beside it: docs/online.md

An answer is a function of target, prompt and seed alone: which draft helps, who else is being
served and what is learned meanwhile change how fast it comes. See docs/serving.md.
"""

import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from draftsmith.command import parse

KEY_VARIABLE = "DRAFTSMITH_API_KEY"
DEFAULT = "default"  # the tag of the first lane


@dataclass
class Serving:
    """What to serve, how it decodes, and what clients may ask for."""

    target: str
    drafter: str = "none"  # a drafter folder, ngram, or none: plain decoding
    drafts: tuple[str, ...] = ()  # more of them, TAG=FOLDER, each served as NAME:TAG
    name: str = ""  # of the model; empty: the target folder's name
    host: str = "127.0.0.1"
    port: int = 8000
    rows: int = 8  # answers of a lane that are decoded at a time
    max_len: int = 2048  # tokens of prompt and answer; at most the context
    K: int | None = None  # draft calls a round; none: the drafter folder's default
    tree: str = "chain"
    policy: str = "fixed"
    device: str = "cpu"
    dtype: str = "auto"
    api_key: str = ""  # that clients must show; empty: DRAFTSMITH_API_KEY, and without it none
    max_queue: int = 64  # answers of a lane that may wait for a row
    max_tokens: int = 1024  # of one answer; a chat that doesn't say may have so many
    timeout_s: float = 300.0  # of one request
    drain_s: float = 30.0  # that requests on their way have when the server is told to end
    max_body: int = 1 << 20  # bytes of one request
    online: str = ""  # the folder that learning goes through; empty: nothing is kept
    keep_top_k: int = 64  # tokens listed at each position of what is kept
    keep_requests: int = 4096  # of a lane, that learning can draw from
    seed: int = 0  # of requests that have none
    threads: int = 0  # of the CPU; 0: as torch chooses

    def __post_init__(self) -> None:
        for field in ("rows", "max_tokens", "max_body", "keep_top_k", "timeout_s"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}: got {getattr(self, field)}, expected more than 0")
        for field in ("max_len", "keep_requests"):
            if getattr(self, field) < 2:
                raise ValueError(f"{field}: got {getattr(self, field)}, expected at least 2")
        for field in ("max_queue", "drain_s", "threads"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{field}: got {getattr(self, field)}, expected at least 0")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port: got {self.port}, expected 0 to 65535")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed: got {self.seed}, expected a signed 64-bit integer")
        self.lanes = _lanes(self.drafter, self.drafts)
        self.name = self.name or Path(self.target).resolve().name
        self.api_key = self.api_key or os.environ.get(KEY_VARIABLE, "")


def _lanes(first: str, more: Sequence[str]) -> dict[str, str]:
    """Tag -> drafter, the default one first; ValueError for tags that can't be told apart."""
    lanes = {DEFAULT: first}
    for draft in more:
        tag, _, path = draft.partition("=")
        if not re.fullmatch(r"[\w.-]+", tag) or tag in lanes or not path or tag[0] == ".":
            raise ValueError(
                f"drafts: got {draft!r}, expected TAG=FOLDER with a tag of its own of letters, "
                "digits, - and _"
            )
        lanes[tag] = path
    return lanes


def main(argv: list[str]) -> int:
    """Serve until told to end: 0 then, 1 after a failure, 2 after a user's error."""
    console = Console()
    if not argv or argv[0] in ("-h", "--help", "help"):
        console.print(f"python -m draftsmith serve KEY=VALUE ...\n\n{Serving.__doc__}\n")
        for field in fields(Serving):
            console.print(f"  {field.name}={getattr(Serving, field.name, '(required)')}")
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        settings = parse(Serving, argv)
        return _serve()(settings, console)
    except ValueError as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        return 2


def _serve() -> Callable[[Serving, Console], int]:
    """`serving_run.serve`; ValueError where the web packages are not installed."""
    try:
        from draftsmith.decode.serve.serving_run import serve
    except ModuleNotFoundError as error:
        raise ValueError(
            f"serve: got no package {error.name}, expected the extra `serve`: "
            "pip install 'draftsmith[serve]'"
        ) from error
    return serve
