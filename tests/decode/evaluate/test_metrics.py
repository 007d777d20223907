"""The figures of an evaluation, on counts small enough to check by hand."""

import math

import pytest

from draftsmith.command import parse
from draftsmith.decode.engine.request import Completion, Counters
from draftsmith.decode.evaluate import metrics
from draftsmith.decode.evaluate.arms import Evaluation


def counted(*rounds: tuple[int, int, int]) -> Counters:
    """Counters after rounds of (drafted, accepted, emitted)."""
    counters = Counters()
    for drafted, accepted, emitted in rounds:
        counters.record(drafted, accepted, emitted)
    return counters


def test_counts_by_hand() -> None:
    # The third round accepted 3, but only 2 tokens were kept: a stop, or the limit.
    c = [counted((3, 0, 1), (3, 3, 4)), counted((3, 3, 2), (3, 1, 2))]
    assert metrics.block_efficiency(c) == 9 / 4
    assert metrics.total(c).histogram == [1, 1, 1, 1]
    assert metrics.kept_shares(c)[0] == 6 / 12
    unconditional, conditional = metrics.acceptance_by_position(c)
    assert unconditional == [3 / 4, 2 / 4, 1 / 4]
    assert conditional == [3 / 4, 2 / 3, 1 / 2]


def test_plain_decoding_has_block_efficiency_one() -> None:
    plain = [counted((0, 0, 1), (0, 0, 1))]
    assert metrics.block_efficiency(plain) == 1
    assert metrics.kept_shares(plain) == (None, None)
    assert metrics.acceptance_by_position(plain) == ([], [])
    assert math.isnan(metrics.block_efficiency([]))


def test_rounds_that_drafted_less_are_not_rejections() -> None:
    c = [counted((2, 2, 3), (0, 0, 1), (2, 0, 1))]
    unconditional, conditional = metrics.acceptance_by_position(c)
    assert unconditional == [1 / 2, 1 / 2]
    assert conditional == [1 / 2, 1.0]


def test_conditional_acceptance_of_rounds_of_different_depths() -> None:
    shallow, rejected, whole = [(1, 1, 2)] * 10, [(2, 0, 1)] * 3, [(2, 2, 3)] * 2
    c = [counted(*shallow, *rejected), counted(*whole)]
    assert (c[0].tried, c[1].tried) == ([13, 0], [2, 2])
    unconditional, conditional = metrics.acceptance_by_position(c)
    assert unconditional == [12 / 15, 2 / 5]
    # Five rounds drafted the second position, but only two got there.
    assert conditional == [12 / 15, 1.0]


def test_trees_count_tokens_and_levels_apart() -> None:
    counters = Counters()
    counters.record(2, 2, 3, nodes=6)
    counters.record(3, 0, 1, nodes=4)
    assert metrics.kept_shares([counters]) == (2 / 5, 2 / 10)
    assert metrics.kept_shares([counted((0, 0, 1))]) == (None, None)
    assert metrics.kept_shares([counted((3, 1, 2), (3, 3, 4))]) == (4 / 6, 4 / 6)


def test_turns_are_counted_together() -> None:
    first, second = counted((3, 3, 4)), counted((1, 0, 1), (1, 1, 2))
    first.decode_seconds = 0.25
    both = metrics.total([first, second])
    assert (both.rounds, both.emitted, both.drafted, both.nodes) == (3, 7, 5, 5)
    assert both.histogram == [1, 1, 0, 1] and both.reached == [3, 1, 1]
    assert both.tried == [3, 1, 1]
    assert both.decode_seconds == 0.25
    assert metrics.total([]) == Counters() and first.rounds == 1


def test_loop_rate() -> None:
    fresh = Completion(0, [1], tokens=list(range(40)))
    loop = Completion(1, [1], tokens=[1, 2, 3, 4] * 10)
    assert metrics.loop_rate([fresh]) == 0
    assert metrics.loop_rate([loop]) == 29 / 33
    assert metrics.loop_rate([Completion(2, [1], tokens=[5])]) == 0


def test_interval_covers_and_narrows() -> None:
    few = metrics.ratio_interval([1.0, 3.0] * 5, [1.0, 1.0] * 5)
    many = metrics.ratio_interval([1.0, 3.0] * 200, [1.0, 1.0] * 200)
    assert few[0] < 2 < few[1]
    assert many[1] - many[0] < (few[1] - few[0]) / 3


def test_paired_difference_sees_what_prompts_share() -> None:
    hard = [float(i % 7) for i in range(60)]
    before, after = hard, [h + 0.1 for h in hard]
    ones = [1.0] * 60
    difference, (low, high) = metrics.paired_difference((after, ones), (before, ones))
    assert difference == pytest.approx(0.1)
    assert 0.09 < low <= high < 0.11
    spread = metrics.ratio_interval(after, ones)
    assert spread[1] - spread[0] > 0.5


def test_arguments_are_parsed_and_typos_answered() -> None:
    got = parse(Evaluation, ["target=a", "drafter=ngram", "K=3", "temperature=1", "identity=false"])
    assert (got.K, got.temperature, got.identity) == (3, 1.0, False)
    stops = {"stop=END": ("END",), 'stop=["\\n\\n", "Q:"]': ("\n\n", "Q:"), "stop=": ()}
    for argument, texts in stops.items():
        assert parse(Evaluation, ["target=a", "drafter=b", argument]).stop == texts
    assert parse(Evaluation, ["target=a", "drafter=b", "limit=none"]).limit is None
    for argv, message in (
        (["target=a", "drafter=b", "temprature=1"], "did you mean temperature"),
        (["target=a"], "missing: drafter"),
        (["target=a", "drafter=b", "K=four"], "expected int"),
        (["target=a", "drafter=b", "identity=yes"], "true or false"),
        (["target=a", "drafter=b", "stop=[1"], "expected a list such as"),
        (["target"], "expected target=..."),
    ):
        with pytest.raises(ValueError, match=message):
            parse(Evaluation, argv)
