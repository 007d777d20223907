"""The bench of looked-up drafts: what its figures say of counts that are known."""

import numpy as np
import pytest

from draftsmith.bench.evidence import training_free
from draftsmith.bench.evidence.training_free import figures
from draftsmith.decode.prompts.prompts import Prompt

# Emitted tokens, rounds, seconds, whether the answer is plain decoding's; of four requests.
COUNTED = {
    "plain": [[8, 8, 8.0, 1], [8, 8, 8.0, 1], [8, 8, 8.0, 1], [8, 8, 8.0, 1]],
    "suffix": [[8, 8, 8.0, 1], [8, 2, 2.0, 1], [8, 2, 2.0, 1], [8, 8, 8.0, 1]],
    "draft": [[8, 4, 6.0, 1], [8, 4, 6.0, 1], [8, 4, 6.0, 1], [8, 4, 6.0, 1]],
    "suffix+draft": [[8, 4, 6.0, 1], [8, 2, 2.0, 1], [8, 2, 2.0, 0], [8, 4, 6.0, 1]],
}
TOLD = {name: np.array(rows, float) for name, rows in COUNTED.items()}


def test_both_are_compared_with_the_better_part() -> None:
    requests = {"a": [0], "b": [1], "c": [2], "d": [3]}
    row = figures(TOLD, "suffix+draft", ("suffix", "draft"), requests)
    assert row["tau"] == pytest.approx(32 / 12) and row["identical"] == 3 and row["requests"] == 4
    assert row["better_tau"] == pytest.approx((32 / 12) / (32 / 16))
    assert row["better_speed"] == pytest.approx((32 / 16) / (32 / 20))
    assert row["speedup"] == pytest.approx(2)
    # All copied or all drafted, both are as good as what does it; the most is of three copied.
    low, high = row["better_tau_interval"]
    assert low == pytest.approx(1) and high == pytest.approx(14 / 10)
    assert row["tau_halves"] == [pytest.approx(16 / 6)] * 2
    assert "better_tau" not in figures(TOLD, "draft", (), requests)


def test_a_prompt_that_is_asked_again_is_one_prompt() -> None:
    """So there is nothing to resample of one alone."""
    parts = "suffix", "draft"
    one = figures(TOLD, "suffix+draft", parts, {"a": [0, 1, 2, 3]})
    assert one["tau_interval"] == [pytest.approx(32 / 12)] * 2
    two = figures(TOLD, "suffix+draft", parts, {"a": [0, 3], "b": [1, 2]})
    assert two["tau"] == one["tau"] and two["tau_interval"] == [pytest.approx(2), pytest.approx(4)]


def test_the_stream_holds_every_kind_and_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """By lot; what is asked again is in no other part."""

    def prompts(source: str, *_: object, limit: int | None, **about: str) -> list[Prompt]:
        names = ["writing", "rag"] if limit is None else ["x"]
        many = range(limit or 6)
        return [Prompt([0] * (1 + i), names[i % len(names)], i, "") for i in many]

    monkeypatch.setattr(training_free, "load_prompts", prompts)
    settings = training_free.TrainingFree(prompts=3, times=2, questions=__file__)
    asked = training_free.stream(settings, None, 4)
    kinds = [kind for kind, _ in asked]
    counts = {kind: kinds.count(kind) for kind in kinds}
    assert counts == {"problems": 3, "code": 3, "conversation": 2, "rag": 2, "asked again": 2}
    assert max(len(prompt.tokens) for _, prompt in asked) == 4
    own = {kind: {p.index for k, p in asked if k == kind} for kind in counts}
    assert not own["problems"] & own["asked again"] and kinds != sorted(kinds)
