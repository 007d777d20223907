"""Prompts that choices are made on while training: never those of final figures."""

from transformers import PreTrainedTokenizerBase

from draftsmith.decode.prompts.splits import load_rows, part_of
from draftsmith.train.answers.asks import from_rows
from draftsmith.train.text.prepared import is_prepared


def prompts_for_development(
    data: str, tokenizer: PreTrainedTokenizerBase, *, count: int, length: int
) -> list[list[int]]:
    """At most `count` prompts, of the held-out part to tune on: the other is for final figures.

    length: in tokens, of a prompt that is the window of a document. ValueError: prepared answers,
    which have no held-out side; no rows; too few windows.
    """
    if is_prepared(data):
        raise ValueError(
            f"{data} holds answers to training prompts only: say heldout.data=<what the prompts "
            "came from>"
        )
    rows = part_of(load_rows(data, "heldout"), "tune")
    asks = from_rows(rows, tokenizer, limit=count, window=length, samples=1, seed=0)
    return [ask.ids for ask in asks]
