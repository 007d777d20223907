"""Draftsmith: train the draft model of speculative decoding, and prove what it is worth.

    from draftsmith import Decoder, SamplingParams, load_drafter

Where the rooms are:
    draftsmith.models   what is trained or run: targets, draft LMs, the drafter folder
    draftsmith.decode   lossless speculative decoding and its measurement
    draftsmith.train    one entry a paradigm, and the machinery that all entries share
    draftsmith.recipes  YAML; `recipe=quickstart/distill` names recipes/quickstart/distill.yaml
and, beside the package, bench/: speed, each figure against a peer in the same run
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.decode.drafters.load import load_drafter
    from draftsmith.decode.engine.decoder import Decoder
    from draftsmith.decode.sampling import SamplingParams

__all__ = ["Decoder", "SamplingParams", "load_drafter"]
__version__ = "0.2.0"

HOMES = {
    "Decoder": "draftsmith.decode.engine.decoder",
    "SamplingParams": "draftsmith.decode.sampling",
    "load_drafter": "draftsmith.decode.drafters.load",
}


def __getattr__(name: str) -> Any:
    """What is imported from here, on its first use: `import draftsmith` alone takes no time."""
    if name not in HOMES:
        raise AttributeError(f"module 'draftsmith' has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES[name]), name)
