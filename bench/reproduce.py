"""Every table of docs/results from nothing: the commands that make it, in their order.

    make reproduce                        # what there is, and how long it takes
    make reproduce TABLE=heads            # python bench/reproduce.py table=heads
    make reproduce TABLE=heads dry=true   # its commands alone

Results go to `out`, beside nothing that is committed. A command that ended well is noted in
`notes` and isn't run again; one that was killed goes on where it was, by the same command. `more`
gives a step more arguments (`more="{target: steps=20}"`), to see the whole way in minutes: in a
folder of its own, since what a step leaves is found by the full table too. Paths are seen from
where this runs. A target made here is of the shape of the one that the committed rows were measured
with, not the same: figures will be near those, not equal.
"""

import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

from draftsmith.bench.tables import STEPS, TABLES
from draftsmith.command import parse, run_command, unknown
from draftsmith.launch import run_as_user
from draftsmith.train.run.recipe import gsm8k

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Reproduce:
    table: str = ""
    out: str = "runs/results"
    dry: bool = False  # print the commands, run none
    more: dict[str, str] = field(default_factory=dict)  # step: arguments
    notes: str = "runs/reproduce"


def main(argv: list[str]) -> int:
    settings = parse(Reproduce, argv)
    if settings.table not in TABLES:
        print("\n".join(f"{name:<16}{hours(name)}" for name in TABLES))
        raise ValueError(unknown("table", settings.table, TABLES))
    steps = TABLES[settings.table]
    if wrong := [name for name in settings.more if name not in steps]:
        raise ValueError(unknown("step", wrong[0], steps))
    for number, name in enumerate(steps, start=1):
        script, words = command_of(name, settings.out)
        words += shlex.split(settings.more.get(name, ""))
        makes, line = left_by(name, settings.out), spelled(script, words)
        note = Path(settings.notes, f"{name}.txt")
        known = note.read_text() if note.exists() else ""
        # A target that lies here, or was put here, needs no note.
        done = Path(makes).exists() and (known == line or (name == "target" and not known))
        told = line if done or settings.dry else name  # whose command is printed as it runs
        print(f"{number} of {len(steps)}: {'done' if done else 'run '}  {told}", flush=True)
        if done or settings.dry:
            continue
        if code := run_as_user(words, script)[0]:
            print(f"step {name} ended with code {code}; the same command goes on", file=sys.stderr)
            return code
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(line)
    if not settings.dry:
        print(f"{makes}, and the page beside it; committed: docs/results/{settings.table}.md")
    return 0


def filled(text: str, out: str = "") -> str:
    """A command or path with the target and data that are here."""
    return text.format(target=gsm8k("target"), data=gsm8k("data"), out=out)


def left_by(name: str, out: str = "") -> str:
    """What a step makes."""
    return filled(STEPS[name].makes or f"{{out}}/{name}.json", out)


def command_of(name: str, out: str) -> tuple[str, list[str]]:
    """A step's script, seen from here, or none of a command of draftsmith; its words."""
    program, *words = shlex.split(filled(STEPS[name].command, out))
    return "" if program == "draftsmith" else os.path.relpath(ROOT / program), words


def spelled(script: str, words: list[str]) -> str:
    """A step's command as it can be typed."""
    return shlex.join([*(("python", script) if script else ("draftsmith",)), *words])


def hours(table: str) -> str:
    """How long it takes from nothing, in words."""
    told = [STEPS[name].minutes for name in TABLES[table]]
    about = "about " if any(text.startswith("~") for text in told) else ""
    minutes = sum(float(text.lstrip("~")) for text in told)
    return f"{about}{minutes:.0f} min" if minutes < 90 else f"{about}{minutes / 60:.1f} h"


def need(name: str, place: str = "") -> None:
    """ValueError, saying what to run first, where what step `name` leaves isn't there; place: where
    the bench was told to look. A hub's name may be a target.
    """
    usual = left_by(name)
    place = place or usual
    if not Path(place).exists() and (place == usual or place.startswith(("runs/", ".", "/"))):
        first = spelled(*command_of(name, "runs/results"))
        raise ValueError(f"got no {place}; run first: {first} (or make reproduce TABLE=...)")


if __name__ == "__main__":
    run_command(main, Reproduce)
