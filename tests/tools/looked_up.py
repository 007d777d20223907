"""Rows of a drafter that looks up, led by hand; and what answers came to."""

import torch

from draftsmith.decode.drafting.base import Admitted, Drafter, Kept
from draftsmith.decode.engine.request import Completion


def texts(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def tau(completions: list[Completion]) -> float:
    counted = [c.counters for c in completions]
    return sum(c.emitted for c in counted) / sum(c.rounds for c in counted)


def told(drafter: Drafter, row: int, tokens: list[int], rows: int) -> None:
    """Emit tokens in one row, the others rest."""
    tokens_BL = torch.zeros(rows, len(tokens), dtype=torch.int64)
    tokens_BL[row] = torch.tensor(tokens)
    n_new_B = torch.zeros(rows, dtype=torch.int64)
    n_new_B[row] = len(tokens)
    drafter.extend(Kept(tokens_BL, n_new_B, None, torch.zeros(rows, dtype=torch.int64)))


def begun(drafter: Drafter, row: int, tokens: list[int]) -> None:
    """A prompt, its last token the first one of the answer."""
    prompt_RN = torch.tensor([tokens[:-1]])
    lens_R = torch.tensor([len(tokens) - 1])
    drafter.prefill(Admitted(torch.tensor([row]), prompt_RN, lens_R, torch.tensor(tokens[-1:])))
