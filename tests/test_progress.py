"""How far long work is, told where no terminal shows a bar: at most a line every half minute."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from draftsmith.progress import LINE_SECONDS, LongWork, seconds_left
from draftsmith.train.run.log import Log


class Clock:
    """Stands still until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def lines(capsys: pytest.CaptureFixture[str], *, terminal: bool, step: float = 7.5) -> list[str]:
    """Of twelve things, one each `step` seconds."""
    clock = Clock()
    console = Console(file=io.StringIO(), force_terminal=terminal)
    with LongWork(transient=True, console=console, get_time=clock) as progress:
        bar = progress.add_task("the same in float32", total=12, figures="5 tokens/s")
        for _ in range(12):
            clock.now += step
            progress.advance(bar)
    return capsys.readouterr().err.splitlines()


def test_a_plain_line_every_half_minute(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, terminal=False) == [
        "the same in float32: 4 of 12, 0.133/s, 60 s left, 5 tokens/s",
        "the same in float32: 8 of 12, 0.133/s, 30 s left, 5 tokens/s",
        "the same in float32: 12 of 12, 0.133/s, 5 tokens/s",
    ]
    assert len(lines(capsys, terminal=False, step=2 * LINE_SECONDS)) == 12
    assert lines(capsys, terminal=False, step=1) == []


def test_a_terminal_has_its_bar_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, terminal=True) == []


def test_time_left_is_at_the_rate_so_far() -> None:
    assert seconds_left(3, 12, 30.0) == "90 s left"
    assert seconds_left(0, 12, 30.0) == seconds_left(12, 12, 30.0) == ""


@pytest.mark.parametrize(("lap", "left"), [(0, "196 s left"), (5, "6 s left to the next eval")])
def test_a_run_without_an_end_counts_to_its_next_evaluation(
    tmp_path: Path, lap: int, left: str
) -> None:
    """Two seconds a step, waiting for its requests included."""
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    with Log(tmp_path / "m.jsonl", step=-1, steps=100, lap=lap, console=console) as log:
        log.write({"step": 2, "loss": 1.0, "tokens": 10, "seconds": 2.0})
        assert left in log._bar.tasks[0].fields["figures"]
