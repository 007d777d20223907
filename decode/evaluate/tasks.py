"""How good the answers are: exact match on worked maths, and agreement with the plain answers.

A lossy run changes the answers, so its tau is shown beside one of these, never alone.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from draftsmith.decode.engine.request import Completion
from draftsmith.decode.evaluate.exactness import first_difference
from draftsmith.decode.evaluate.metrics import paired_difference, ratio_interval
from draftsmith.decode.prompts.prompts import Prompt

TASKS = ("", "gsm8k")
MARK = "####"  # GSM8K's worked answers end in a line "#### 18"
# A sign counts where nothing stands before it that it could be subtracted from.
NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)])[-+\u2212])?[$\u20ac\u00a3]?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)"
)


def final_number(text: str) -> Decimal | None:
    """The number an answer ends in: after the first #### that has one, else the last of the text;
    None without any. Commas between thousands, currencies, and zeros after the point are nothing.
    """
    marked = [NUMBER.match(part.lstrip()) for part in text.split(MARK)[1:]]
    found = next(filter(None, [*marked, *reversed(list(NUMBER.finditer(text)))]), None)
    if found is None:
        return None
    value = Decimal(found["digits"].replace(",", ""))
    return -value if found["sign"] in ("-", "\u2212") else value


def known_answer(prompt: Prompt) -> Decimal | None:
    """What a right answer ends in, where the prompt's own has a #### line."""
    return final_number(prompt.answer) if MARK in prompt.answer else None


def exact_match(
    prompts: Sequence[Prompt], plain: Sequence[Completion], spec: Sequence[Completion]
) -> dict[str, Any] | None:
    """The report's `task` entry, over the prompts whose known answer has a #### line; None where no
    prompt has. plain, spec: the answers to each prompt's first turn.
    """
    rows = [
        [float(final_number(answer.text) == known) for answer in answers]
        for prompt, *answers in zip(prompts, plain, spec, strict=True)
        if (known := known_answer(prompt)) is not None
    ]
    if not rows:
        return None
    before, after = zip(*rows, strict=True)
    n, ones = len(rows), [1.0] * len(rows)
    difference, interval = paired_difference((after, ones), (before, ones))
    return {
        "name": "gsm8k",
        "n": n,
        "plain": sum(before) / n,
        "speculative": sum(after) / n,
        "difference": difference,
        "difference_interval": interval,
    }


def agreement(
    plain: Sequence[Sequence[Completion]], spec: Sequence[Sequence[Completion]]
) -> dict[str, Any]:
    """The report's `agreement` entry, of the answers to each prompt's turns."""
    same, longer = [], []
    for answers in zip(plain, spec, strict=True):
        pairs = [(p.tokens, s.tokens) for p, s in zip(*answers, strict=True)]
        same.append(float(sum(first_difference(*pair) for pair in pairs)))
        longer.append(float(sum(max(map(len, pair)) for pair in pairs)))
    return {"share": sum(same) / sum(longer), "interval": ratio_interval(same, longer)}
