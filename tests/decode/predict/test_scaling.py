"""Fits of acceptance against size and text: a known slope comes back, and what was held out."""

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftsmith.command import guarded
from draftsmith.decode.predict import scaling_laws as scaling
from draftsmith.decode.predict.joint_law import joint_law, joint_laws, spending
from draftsmith.decode.predict.scaling_laws import all_fits, fit_line, read_rows

SIZES, COUNTS = (1e5, 2e5, 5e5, 1e6, 4e6), (1e5, 2e5, 4e5, 1.6e6)


def rows(seeds: int = 3, noise: float = 0.0, bend: float = 0.0) -> list[dict[str, Any]]:
    """alpha = .05 log10 N + .08 log10 D - .3, with noise by seed; bend: lost at the last place."""
    lots = np.random.default_rng(0)
    found = []
    for seed in range(seeds):
        for size in SIZES:
            for tokens in COUNTS:
                alpha = 0.05 * math.log10(size) + 0.08 * math.log10(tokens) - 0.3
                alpha += noise * lots.normal() - bend * (tokens == COUNTS[-1])
                row = {"what": "fkl", "parameters": size, "tokens": tokens, "seed": seed}
                found.append(row | {"alpha": alpha, "tau": 1 + 2 * alpha})
    return found


def test_known_slopes_are_recovered() -> None:
    fits = all_fits(rows())
    assert len(fits) == 2 * (len(SIZES) + len(COUNTS))
    for fit in fits:
        slope = {"tokens": 0.08, "parameters": 0.05}[fit.axis] * (2 if fit.value == "tau" else 1)
        assert fit.slope == pytest.approx(slope, abs=1e-9) and fit.r2 == pytest.approx(1)
        assert fit.error == pytest.approx(0, abs=1e-9)
        assert fit.interval == pytest.approx([slope, slope], abs=1e-9)
        assert len(fit.points) == (3 if fit.axis == "tokens" else 4)
        assert fit.held_out[0] == (COUNTS if fit.axis == "tokens" else SIZES)[-1]


def test_the_line_is_that_of_least_squares() -> None:
    noisy = [row for row in rows(noise=0.01) if row["parameters"] == 1e6]
    fit = fit_line(noisy, "alpha", "tokens", "fkl", 1e6)
    fitted = [row for row in noisy if row["tokens"] < COUNTS[-1]]
    x, y = (np.array([row[name] for row in fitted]) for name in ("tokens", "alpha"))
    slope, intercept = np.polyfit(np.log10(x), y, 1)
    assert (fit.slope, fit.intercept) == pytest.approx((slope, intercept))
    assert fit.r2 == pytest.approx(np.corrcoef(np.log10(x), y)[0, 1] ** 2)
    assert fit.interval is not None and fit.interval[0] < fit.slope < fit.interval[1]
    # The interval of one seed alone isn't one.
    alone = [row for row in noisy if row["seed"] == 0]
    assert fit_line(alone, "alpha", "tokens", "fkl", 1e6).interval is None


def test_what_was_held_out_is_not_fitted() -> None:
    """Saturation in the last place alone: the line doesn't see it, its error is just that."""
    for fit in all_fits(rows(bend=0.02)):
        if fit.axis == "tokens":
            loss = 0.02 * (2 if fit.value == "tau" else 1)
            assert fit.r2 == pytest.approx(1) and fit.error == pytest.approx(loss)


def test_the_command_publishes_what_it_can_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "rows.json", tmp_path / "out"
    file.write_text(json.dumps(rows(noise=0.003)))
    scaling.main([f"results={file}", f"out={out}"])
    assert "0.0" in capsys.readouterr().out
    published = json.loads((out / "scaling.json").read_text())
    assert len(published) == 60 + 18 and read_rows(str(out / "scaling.json")) == published[:60]
    page = (out / "scaling.md").read_text()
    assert "5 sizes of 100k to 4M parameters" in page and "3 seed(s)" in page
    assert page.count("\n| alpha |") == page.count("\n| tau |") == 9 + 1  # and the law of both
    drawn = ET.fromstring((out / "scaling.svg").read_text())
    dots = drawn.findall(".//{http://www.w3.org/2000/svg}use")
    assert len(dots) == 4 * 20 and sum("fill: var(--card)" in d.attrib["style"] for d in dots) == 18
    _, _, width, height = map(float, drawn.attrib["viewBox"].split())
    for dot in dots:
        assert 40 <= float(dot.attrib["x"]) <= width and 20 <= float(dot.attrib["y"]) <= height - 40


def test_one_law_of_text_and_size_and_a_run_that_is_off_it() -> None:
    alpha, tau = joint_laws(rows())
    assert (alpha.u, alpha.v, alpha.w) == pytest.approx((-0.3, 0.08, 0.05))
    assert (tau.v, tau.w) == pytest.approx((0.16, 0.1)) and tau.r2 == pytest.approx(1)
    assert alpha.error < 1e-9 and not alpha.off
    noisy = rows(noise=0.002)
    assert not joint_law(noisy, "alpha").off
    place = COUNTS[1], SIZES[3]
    for row in noisy:
        if (row["tokens"], row["parameters"]) == place:
            row["alpha"] -= 0.05
    found = joint_law(noisy, "alpha")
    assert found.off == [place] and found.errors[place] == pytest.approx(0.05, abs=0.005)
    # Two sizes are a comparison, no law.
    assert joint_laws([row for row in rows() if row["parameters"] in SIZES[:2]]) == []


def test_what_a_budget_gives_most_with() -> None:
    """The optimum on a fine grid of sizes, of the same law and the same straight costs."""
    measured = rows()
    for row in measured:
        size, tokens = row["parameters"], row["tokens"]
        row |= {"K": 4, "seconds": tokens * (1e-4 + 1e-10 * size)}
        row["costs"] = {"1": 1 + 1e-7 * size, "16": 2 + 1e-6 * size}
    law = joint_law(measured, "tau")
    spent = spending(measured, law)
    assert [found.batch for found in spent] == [1, 1, 1, 16, 16, 16]
    most = max(row["seconds"] for row in measured)
    sizes = np.geomspace(SIZES[0], 2 * SIZES[-1], 4001)
    for found in spent:
        tokens = found.seconds / (1e-4 + 1e-10 * sizes)
        cost = 1 + 1e-7 * sizes if found.batch == 1 else 2 + 1e-6 * sizes
        speedup = law.at(tokens, sizes) / cost
        assert found.speedup == pytest.approx(speedup.max(), rel=1e-3)
        assert found.speedup <= speedup.max() + 1e-9
        assert found.parameters == pytest.approx(sizes[speedup.argmax()], rel=0.1)
        assert found.tokens == pytest.approx(found.seconds / (1e-4 + 1e-10 * found.parameters))
    assert [found.seconds / most for found in spent[:3]] == pytest.approx([1, 2, 4])
    # The last size's time gives the best one, a small one, more text than was tried.
    assert all(found.beyond and found.tokens > 2 * COUNTS[-1] for found in spent)
    # Nothing is said of what wasn't timed; speed-ups by batch are lines of their own.
    assert spending(rows(), law) == []
    assert {fit.axis for fit in all_fits(measured)} == {"tokens", "parameters"}
    for row in measured:
        row["costs"] = {str(2**n): row["tau"] / (2 - 0.1 * n) for n in range(4)}
    batches = [fit for fit in all_fits(measured) if fit.axis == "batch"]
    assert len(batches) == len(SIZES) and batches[0].slope == pytest.approx(-0.1 / math.log10(2))


def test_bad_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    good = rows(seeds=1)
    few = [r for r in good if r["tokens"] < COUNTS[-1] and r["parameters"] < SIZES[3]]
    bad: list[tuple[Any, str]] = [
        (few, "at most 3 token counts of one size and 3 sizes .* one more to hold out"),
        ([*good, {"what": "fkl"}], "row 21 .* without parameters, tokens, seed, alpha, tau"),
        ([good[0] | {"tokens": 0}], "row 1 .* tokens=0 .* numbers above 0"),
        ({"rows": good}, "without a list of rows"),
        ([], "got at most 0 token counts"),
    ]
    for content, words in bad:
        file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=words):
            all_fits(read_rows(str(file)))
    file.write_text("[{")
    with pytest.raises(ValueError, match=r"results: got .*, expected a JSON list of rows"):
        read_rows(str(file))
    assert guarded(scaling.main, [f"results={file}"]) == 2 and "error" in capsys.readouterr().err
