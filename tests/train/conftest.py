"""What all tests of training share."""

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
