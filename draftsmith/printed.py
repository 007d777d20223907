"""Numbers as the terminal, the pages and the charts print them (None is an em dash), and tables for
the terminal.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

TIMES = "\u00d7"
ABSENT = "\u2014"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A number with `digits` decimals; whole ones as they are."""
    if value is None:
        return ABSENT
    return f"{value:,d}{unit}" if isinstance(value, int) else f"{value:,.{digits}f}{unit}"


tenths, thousandths = partial(number, digits=1), partial(number, digits=3)
times_as = partial(number, unit=TIMES)  # a ratio, as in 1.62 times
short: Callable[[float], str] = "{:.4g}".format  # as short as it can be: 4, 3.25


def sequence(values: Sequence[float]) -> str:
    """Numbers in a row."""
    return "  ".join(map(number, values)) or ABSENT


def short_count(count: float) -> str:
    """1.5M, 320k."""
    for size, sign in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{sign}"
    return f"{count:g}"


def share(value: float | None) -> str:
    """A share of one, as 81.5%."""
    return ABSENT if value is None else f"{100 * value:.1f}%"


def duration(seconds: float | None) -> str:
    """Seconds, in ms with three significant digits."""
    if seconds is None:
        return ABSENT
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def bracket(interval: Sequence[float] | None, digits: int = 2) -> str:
    """[low, high], or nothing."""
    return "" if interval is None else f"[{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def as_table(
    head: Iterable[str], rows: Iterable[Iterable[Any]], words: Container[str] = (), **about: Any
) -> Table:
    """A table for the terminal, of texts. words: the headings over words, which may be folded;
    under all others are numbers, which aren't. about: what rich's `Table` takes, such as `title`.
    """
    table = Table(box=SIMPLE_HEAD, **about)
    for name in head:
        number_style: dict[str, Any] = {"justify": "right", "no_wrap": True}
        table.add_column(name, **({"overflow": "fold"} if name in words else number_style))
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def print_table(
    head: Iterable[str], rows: Iterable[Iterable[Any]], words: Container[str] = (), **about: Any
) -> None:
    """Print `as_table`, at least 110 columns wide; 200 where there is no terminal."""
    console = Console()
    console.width = max(console.width, 110) if console.is_terminal else 200
    console.print(as_table(head, rows, words, **about))
