"""Commands that would be launched as a user does, run in this process."""

import sys
from types import ModuleType

import pytest
from accelerate.state import AcceleratorState

import draftsmith.__main__ as front


def launched_here(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[list[str]]:
    """From now on what this module launches; the list of commands, empty as yet."""
    found: list[list[str]] = []

    def run(words: list[str]) -> tuple[int, str]:
        found.append(words)
        AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setattr(sys, "argv", ["draftsmith", *words])
        return front.main(), ""

    monkeypatch.setattr(module, "run_as_user", run)
    return found
