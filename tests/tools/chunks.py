"""How many rows a sweep over the vocabulary takes at a time."""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from draftsmith.train.losses.chunked import CHUNK_LOGITS


def chunks_of(rows: int | None, width: int) -> AbstractContextManager[Any]:
    """While it lasts, so many rows of so many logits each; None: as by default."""
    return patch.dict(CHUNK_LOGITS, {} if rows is None else {"cpu": rows * width})
