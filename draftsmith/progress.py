"""Progress of long work: rich's bar on a terminal, elsewhere a plain line now and then."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress, TaskID

LINE_SECONDS = 30.0  # between two plain lines
Thing = TypeVar("Thing")


class LongWork(Progress):
    """rich's `Progress`, which says on stderr how far it is where its console is no terminal."""

    def __init__(self, *columns: Any, **about: Any) -> None:
        super().__init__(*columns, **about)
        self._last_line = self.get_time()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        self.update(task_id, advance=advance)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """As rich's; the field `figures` of a task, if it has one, ends its line."""
        super().update(task_id, **changes)
        task, now = self._tasks[task_id], self.get_time()
        silent = self.disable or self.console.is_terminal or self.console.quiet
        if silent or not task.completed or now - self._last_line < LINE_SECONDS:
            return
        self._last_line, figures = now, task.fields.get("figures")
        done, total, seconds = task.completed, task.total or 0, task.elapsed or 0
        line = f"{task.description}: {done:,.0f}" + (f" of {total:,.0f}" if total else "")
        rate = f"{done / seconds:.3g}/s" if seconds else ""
        parts = filter(None, (line, rate, seconds_left(done, total, seconds), figures))
        Console(stderr=True).print(", ".join(parts), highlight=False, markup=False, soft_wrap=True)


def watched(
    things: Iterable[Thing], words: str, total: int, *, shown: bool = True
) -> Iterator[Thing]:
    """`things`, with a bar that is gone at the end; shown: by this process."""
    with LongWork(transient=True, disable=not shown) as progress:
        bar = progress.add_task(words, total=total)
        for thing in things:
            yield thing
            progress.advance(bar)


def seconds_left(done: float, total: float, elapsed: float) -> str:
    """In words, at the rate so far; empty before the first, and where nothing is left."""
    return f"{(total - done) * elapsed / done:,.0f} s left" if 0 < done < total else ""
