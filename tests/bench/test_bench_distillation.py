"""The evidence page: paired differences, their intervals and verdicts, from rows."""

from pathlib import Path

import numpy as np
import pytest

from draftsmith.bench.evidence import distillation
from draftsmith.bench.evidence.distillation_page import (
    CLAIMS,
    WHAT,
    difference,
    interval,
    page,
    verdict,
)

GAINS = {"fkl": 0.0, "ce": -0.02, "tv": 0.03, "adaspec": -0.001}


def rows() -> list[dict]:
    """Four arms on five seeds: seeds differ much, arms little, and adaspec by noise alone."""
    noise = (
        np.array([[1, -1, 1, 1], [-1, 1, 1, -1], [1, 1, -1, -1], [-1, 1, 1, 1], [1, -1, -1, 1]])
        * 0.004
    )
    about = {"pair": "gsm8k", "target": "t", "K": 4, "steps": 100, "seconds": 7.0, "commit": "abc"}
    about |= {"command": "python bench/x.py", "data": "d"}
    return [
        about
        | {"what": arm, "seed": seed, "lr": 0.01, "machine": "m"}
        | {"alpha": 0.5 + 0.1 * seed + gain + noise[seed, i], "tau": 2.0 + gain}
        for seed in range(5)
        for i, (arm, gain) in enumerate(GAINS.items())
    ]


def test_differences_are_paired_over_seeds() -> None:
    """Seeds differ by 0.1 each; the paired difference doesn't see that."""
    shuffled = rows()[::-1]
    values = difference(shuffled, "tv", "fkl", "alpha")
    assert len(values) == 5 and values.mean() == pytest.approx(0.03, abs=0.01)
    assert np.ptp(values) < 0.05
    without = [r for r in shuffled if (r["what"], r["seed"]) != ("tv", 3)]
    assert len(difference(without, "tv", "fkl", "alpha")) == 4


def test_verdicts() -> None:
    found = {arm: verdict(difference(rows(), arm, "fkl", "alpha")) for arm in GAINS if arm != "fkl"}
    assert found == {"ce": "the contrary holds", "tv": "holds", "adaspec": "undecided"}
    low, high = interval(np.array([1.0, 2.0, 3.0]))
    assert 1.0 <= low < 2.0 < high <= 3.0


def test_page_says_what_the_rows_say() -> None:
    made = page(rows())
    assert "5 seeds, 100 steps" in made and "at commit abc on m" in made
    claims = {line.split(" | ")[0][2:]: line for line in made.splitlines() if " - fkl) |" in line}
    line = claims["total variation beats forward KL (tv - fkl)"]
    assert line.endswith("| holds | holds |") and "+0.030 [+0.030, +0.030], 5 of 5" in line
    assert "AdaSPEC beats DistillSpec at equal steps (adaspec - fkl)" in claims
    assert "Recommended: tv (total variation), the highest alpha at 100 steps; ahead of fkl" in made
    assert "rkl" not in made  # an arm that wasn't run makes no claim


def test_every_claim_is_about_arms_that_are_explained() -> None:
    assert set(distillation.ARMS) == set(WHAT) >= {arm for _, *pair in CLAIMS for arm in pair}


def test_the_runs_begin_from_what_is_made_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers, then a draft for each seed and for the tuning one, where a run looks for it."""
    made: dict[Path, tuple[str, ...]] = {}
    monkeypatch.setattr(distillation, "train", lambda entry, to, *a: made.update({to: (entry, *a)}))
    settings = distillation.Evidence(seeds=2, trained=str(tmp_path))
    distillation.prepare(settings)
    answers, *drafts = made
    assert made[answers] == ("prepare", "recipe=gsm8k/prepare")
    assert drafts == [tmp_path / f"gsm8k/draft-{seed}/drafter" for seed in (0, 1, 5)]
    assert made[drafts[1]] == ("pretrain", "recipe=gsm8k/draft", "seed=1")
