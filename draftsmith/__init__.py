"""Draftsmith: train the draft model of speculative decoding, and prove what it is worth.

Where the rooms are:
    draftsmith.models   what is trained or run: targets, draft LMs, the drafter folder
    draftsmith.decode   lossless speculative decoding and its measurement
    draftsmith.train    one entry a paradigm, and the machinery that all entries share
    draftsmith.recipes  YAML; `recipe=quickstart/distill` names recipes/quickstart/distill.yaml
and, beside the package, bench/: speed, each figure against a peer in the same run
"""

__version__ = "0.1.0"
