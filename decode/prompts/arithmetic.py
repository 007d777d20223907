"""`data=arithmetic`: word problems of two to four steps with small numbers, answered like GSM8K's.

    Maya has 14 shells. She finds 5 more, then she loses 8. How many shells does she have now?
    Step by step. After that she has 5 + 14 = 19 shells. So 19 - 8 = 11 shells are left for Maya.
    #### 11

Made for tasks where a different answer can be as right as the target's own. Much of an answer does
not matter to its last number: how it begins, which of several words stands where, what is added to
what. Of these each name has a habit of its own, which it follows four times in five and a chance
otherwise, so that a model can be sure of such tokens as it is of numbers, or unsure. Row n is a
function of n alone.
"""

import random
from collections.abc import Sequence
from functools import cache

from draftsmith.decode.prompts.rows import Row

ROWS = 30_000
LARGEST = 60  # no number of a problem is larger
HABIT = 0.8
NAMES = (
    *("Maya", "Tom", "Ana", "Ben", "Lena", "Omar", "Ida", "Noah", "Eva", "Liam", "Nina", "Hugo"),
    *("Rosa", "Max", "Zoe", "Paul", "Mia", "Jan", "Lily", "Sam", "Ella", "Leo", "Sara", "Finn"),
)
THINGS = (
    *("apples", "shells", "books", "coins", "stickers"),
    *("marbles", "cards", "pens", "stamps", "beads"),
)
GAINS = ("{who} finds {n} more", "{who} buys another {n}", "a friend gives {who} {n}")
LOSSES = ("{who} loses {n}", "{who} gives {n} away", "{who} sells {n}")
TIMES = {2: "that doubles", 3: "that triples"}
# What doesn't matter: each slot's choices, of which every name prefers one.
SLOTS: dict[str, Sequence[str]] = {
    "start": ("", "Step by step. ", "Let us see. ", "We count them one by one. "),
    "next": ("Then", "After that", "Now", "So"),
    "who": ("{name} has", "there are", "we get", "it makes"),
    "tail": ("", " in all", " altogether", " at this point"),
    "order": ("as told", "turned"),
    "form": ("subject first", "number first"),
    "last": ("with {name}", "the count", "what {name} has", "the result"),
}

Step = tuple[int, str, int, int]  # before, sign, by how many, after


def arithmetic_rows(first: int = 0, count: int = ROWS, habit: float = HABIT) -> list[Row]:
    """Rows `first` to `first + count - 1`, of kind `question`; habit: how often it is followed."""
    return [_row(number, habit) for number in range(first, first + count)]


@cache
def preferred(name: str, slot: str) -> str:
    """What a name prefers among a slot's choices."""
    return random.Random(f"{name} {slot}").choice(SLOTS[slot])


def _row(number: int, habit: float) -> Row:
    rng = random.Random(f"arithmetic {number}")
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    has = rng.randint(2, 30)
    told, steps = [f"{name} has {has} {thing}."], list[Step]()
    for _ in range(rng.randint(2, 4)):
        event, sign, by, after = _step(rng, has)
        told.append(f"{event.format(who=name, n=by)}.".capitalize())
        steps.append((has, sign, by, after))
        has = after
    question = " ".join(told).replace(name.lower(), name)
    question += f" How many {thing} does {name} have now?"
    answer = _answer(rng, habit, name, thing, steps)
    return Row("question", f"arithmetic:{number}", question, answer)


def _step(rng: random.Random, has: int) -> tuple[str, str, int, int]:
    """What happens to `has` things: in words, as sign and number, and what is left."""
    while True:
        sign = rng.choice("++--*")
        by = rng.choice(list(TIMES)) if sign == "*" else rng.randint(2, 20)
        after = {"+": has + by, "-": has - by, "*": has * by}[sign]
        if 0 < after <= LARGEST:
            words = {"+": GAINS, "-": LOSSES, "*": (TIMES.get(by, ""),)}[sign]
            return rng.choice(words), sign, by, after


def _answer(rng: random.Random, habit: float, name: str, thing: str, steps: Sequence[Step]) -> str:
    def word(slot: str) -> str:
        own = preferred(name, slot) if rng.random() < habit else rng.choice(SLOTS[slot])
        return own.format(name=name)

    said = word("start")
    for has, sign, by, after in steps:
        turned = sign != "-" and word("order") == "turned"
        sum_ = f"{by} {sign} {has} = {after}" if turned else f"{has} {sign} {by} = {after}"
        if word("form") == "subject first":
            said += f"{word('next')} {word('who')} {sum_} {thing}{word('tail')}. "
        else:
            said += f"{word('next')} {sum_} {thing} are {word('last')}. "
    return f"{said.strip()}\n#### {steps[-1][-1]}"
