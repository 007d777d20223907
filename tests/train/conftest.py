"""What all tests of training share."""

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def fresh_accelerate() -> None:
    """accelerate keeps one precision for a whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
