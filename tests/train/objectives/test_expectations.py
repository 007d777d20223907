"""A run far below what its kind is known to reach is told so, and no other."""

import pytest

from draftsmith.train.heldout.head_run import KNOWN, acceptance, compare


@pytest.mark.parametrize("a", [0.0, 0.3, 0.8, 1.0])
def test_acceptance_undoes_tau(a: float) -> None:
    assert acceptance(sum(a**k for k in range(6)), K=5) == pytest.approx(a, abs=1e-9)


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: f"{known.kind}-{known.samples}")
def test_who_reaches_the_known_figure_is_not_warned(known) -> None:
    tau, first = known.tau or 2.0, known.first or 0.5
    assert compare(known.kind, known.samples, tau=tau, K=known.K, first=first) is None


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: f"{known.kind}-{known.samples}")
def test_who_reaches_half_of_it_is(known) -> None:
    half = acceptance(known.tau or 2.0, known.K) / 2
    tau, first = sum(half**k for k in range(5)), known.first / 2
    told = compare(known.kind, known.samples, tau=tau, K=4, first=first)
    assert told is not None and KNOWN[known] in told and "counting of layers" in told


def test_another_K_is_made_up_for() -> None:
    """By one drafted token tau can't pass 2: that is no reason to warn."""
    assert compare("eagle1", 70_000, tau=1.7, K=1, first=0.7) is None
    assert compare("eagle1", 70_000, tau=1.7, K=5, first=0.7) is not None


def test_it_is_held_against_runs_on_as_few_samples() -> None:
    poor = {"tau": 1.3, "K": 3, "first": 0.3}
    assert compare("eagle3", 4_000, **poor) is None
    assert compare("eagle3", 6_000, **poor) is None
    told = compare("eagle3", 60_000, **poor)
    assert told is not None and "issue 128" in told


def test_a_kind_without_known_figures_is_left_alone() -> None:
    assert compare("hydra", 10**6, tau=1.0, K=4, first=0.0) is None


def test_poor_coverage_is_named_first() -> None:
    poor = {"tau": 1.1, "K": 3, "first": 0.1}
    told = compare("eagle3", 6_000, **poor, coverage=0.8)
    assert told is not None and "causes: a draft vocabulary that covers only 80.0%" in told
    assert "vocabulary" not in str(compare("eagle3", 6_000, **poor))
