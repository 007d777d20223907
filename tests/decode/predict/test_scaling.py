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
    assert page.count("\n| alpha |") == page.count("\n| tau |") == 9
    drawn = ET.fromstring((out / "scaling.svg").read_text())
    dots = drawn.findall(".//{http://www.w3.org/2000/svg}use")
    assert len(dots) == 4 * 20 and sum("fill: var(--card)" in d.attrib["style"] for d in dots) == 18
    _, _, width, height = map(float, drawn.attrib["viewBox"].split())
    for dot in dots:
        assert 40 <= float(dot.attrib["x"]) <= width and 20 <= float(dot.attrib["y"]) <= height - 40


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
