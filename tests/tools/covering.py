"""Which cells of several axes `make test` runs, where all would take too long."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def covering(*axes: Sequence[Any]) -> list[Any]:
    """All cells. Those run always whose places add up to a multiple of the shortest axis' length:
    of it one choice beside each combination of the others.
    """
    least = min(map(len, axes))
    cells = []
    for places in product(*(range(len(axis)) for axis in axes)):
        marks = () if sum(places) % least == 0 else (pytest.mark.slow,)
        own = [axis[place] for axis, place in zip(axes, places, strict=True)]
        cells.append(pytest.param(*own, marks=marks))
    return cells
