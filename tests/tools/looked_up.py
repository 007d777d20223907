"""Rows of a drafter that looks up, led by hand; and what answers came to."""

import torch

from draftsmith.decode.drafting.base import Admitted, Drafter, Kept, Round
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.sampling import SamplingParams, log_race, position_keys
from draftsmith.decode.token_tree import COUPLED
from draftsmith.decode.tree_shapes import parse_tree
from draftsmith.decode.untrained.texts import LookupDrafter


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


def chain_round(
    drafter: LookupDrafter, K: int, temperature: float, *, step: int, rest: bool
) -> Round:
    """A round of two rows that asks for chains, by noise of the step's own; rest: of the second."""
    keys_BD = position_keys(torch.tensor([step, 5]), torch.arange(2 * K).view(2, K))
    return Round(
        parse_tree("chain", K),
        drafter.lens_B - 1,
        drafter.tail(1)[:, 0],
        torch.tensor([True, not rest]),
        top=drafter.text_BS.shape[1],
        params=SamplingParams(temperature),
        law=COUPLED,
        race_BDV=log_race(keys_BD, drafter.vocab_size) if temperature else None,
    )
