"""What answers are worth: the number a worked answer ends in, and agreement with plain answers."""

from decimal import Decimal

import pytest

from draftsmith.decode.engine.request import Completion
from draftsmith.decode.evaluate.answers import agreement, exact_match, final_number, known_answer
from draftsmith.decode.prompts.prompts import Prompt


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She sells 9 eggs.\n#### 18", "18"),
        ("#### 1,234.50 dollars", "1234.5"),
        ("#### -5", "-5"),
        ("#### \u22125", "-5"),
        ("#### +7", "7"),
        ("#### $1,000", "1000"),
        ("it is -$7", "-7"),
        ("####18.00", "18"),
        # The first marked number counts, not what a loop adds, nor what stood before.
        ("12 eggs\n#### 5\n#### 6", "5"),
        ("12 eggs #### none #### 6", "6"),
        ("#### no number, but 7", "7"),
        # Without a mark, the last number.
        ("<<2*2=4>>4 of 16-4", "4"),
        ("5 - 3", "3"),
        ("16-4", "4"),
        ("(3)-4", "4"),
        ("so x = -4.", "-4"),
        ("a half is .5", "0.5"),
        ("3.", "3"),
        ("1,2,3", "3"),
        ("10,000", "10000"),
        ("20%", "20"),
        ("no idea", None),
        ("", None),
    ],
)
def test_the_number_an_answer_ends_in(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


def prompt(answer: str) -> Prompt:
    return Prompt([1], "maths", 0, "", answer=answer)


def said(*texts: str) -> list[list[Completion]]:
    return [[Completion(i, [1], text=text)] for i, text in enumerate(texts)]


def test_exact_match_by_hand() -> None:
    prompts = [prompt("#### 4"), prompt("#### 1,000"), prompt("a poem"), prompt("#### none")]
    plain = said("#### 4.0", "it is 1000", "#### 3", "nothing")
    spec = said("4", "1001", "#### 3", "nothing")
    score = exact_match(prompts, plain, spec)
    assert score is not None
    # Prompts without a known number count neither way.
    assert (score["n"], score["plain"], score["speculative"]) == (2, 1.0, 0.5)
    assert score["difference"] == -0.5
    assert score["difference_interval"] == [-1.0, 0.0]
    assert exact_match(prompts[2:], plain[2:], spec[2:]) is None
    assert known_answer(prompts[2]) is None and known_answer(prompts[1]) == 1000


def test_agreement_by_hand() -> None:
    def answers(*tokens: list[int]) -> list[Completion]:
        return [Completion(0, [1], tokens=one) for one in tokens]

    plain = [answers([1, 2, 3, 4], [5]), answers([1, 2])]
    # 2 of 4 before the first difference (what follows is by chance), all of 1; 2 of the longer 3.
    found = agreement(plain, [answers([1, 2, 9, 4], [5]), answers([1, 2, 3])])
    assert found["share"] == 5 / 8
    assert found["interval"][0] <= 5 / 8 <= found["interval"][1]
    assert agreement(plain, plain) == {"share": 1.0, "interval": [1.0, 1.0]}
