"""What all tests of training share."""

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from draftsmith.train.plan import memory
from draftsmith.train.plan.fake_step import Step


@pytest.fixture(autouse=True)
def fresh_accelerate() -> None:
    """accelerate keeps one precision for a whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Sixty rows of numbers."""
    path = tmp_path / "text.jsonl"
    lines = [
        {"text": f"row {row} " + " ".join(str(row * i) for i in range(40))} for row in range(60)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def unrehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans count what lasts alone: a rehearsal, which is what takes time, gives an empty step."""
    monkeypatch.setattr(memory, "rehearsed", lambda cast, **how: Step())


@pytest.fixture
def rehearsed_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans rehearse no gradient checkpointing unless the recipe has it: such a step is empty."""
    rehearsed = memory.rehearsed

    def asked(cast: Any, *, checkpointing: bool, low: bool) -> Step:
        if checkpointing and not cast.config.gradient_checkpointing:
            return Step()
        return rehearsed(cast, checkpointing=checkpointing, low=low)

    monkeypatch.setattr(memory, "rehearsed", asked)
