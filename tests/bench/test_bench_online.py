"""The pages of the online drafts' measurements, made from rows whose answers are known."""

import numpy as np
import pytest

from draftsmith.bench.evidence import online_choices as choices
from draftsmith.bench.evidence import online_page as page

ABOUT = {"commit": "c", "command": "python bench/evidence/online.py", "machine": "m", "target": "t"}


def test_choices_are_compared_by_request() -> None:
    """Requests differ by far more than arms do: only pairs can tell them apart."""
    rows = []
    for seed in (0, 1):
        for arm, more in (("base", 0.2), ("rejected", 0.1), ("tv", 0.2)):
            hard = [0.1 + 0.005 * (index % 97) for index in range(400)]
            alpha = {name: hard for name in ("frozen", "ceiling", "online")}
            alpha["ceiling"] = [value + 0.4 for value in hard]
            # Only the last hundred requests of an arm differ from the frozen draft's.
            learned = [more * (index >= 300) for index in range(400)]
            alpha["online"] = [a + b for a, b in zip(hard, learned, strict=True)]
            # Requests end in another order where another draft serves.
            order = sorted(range(400), key=lambda i: (i // 8, (i * (3 if more == 0.2 else 5)) % 8))
            row = {"what": arm, "seed": seed, "index": order, **ABOUT}
            rows.append(row | {"alpha": {n: [v[i] for i in order] for n, v in alpha.items()}})
    lines = choices.table(rows)
    cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in lines[2:]}
    assert list(cells) == ["base", "rejected", "tv"]
    assert cells["base"][-2:] == ["", "50%"]
    assert cells["rejected"][-2:] == ["-0.1000 [-0.1000, -0.1000], 2 of 2", "25%"]
    assert cells["tv"][-2].startswith("+0.0000 [+0.0000, +0.0000]")
    assert cells["base"][2:4] == cells["rejected"][2:4], "before the last hundred"
    text = choices.page(rows)
    assert "2 seeds" in text and "eagle3" not in text
    alpha = {"frozen": [0.1] * 400, "online": [0.1] * 300 + [0.3] * 100}
    head = {"what": "eagle3", "seed": 7, "alpha": alpha, **ABOUT}
    text = choices.page([*rows, head])
    assert "2 seeds" in text and "eagle3, online" in text
    assert "+0.2000 [+0.2000, +0.2000]" in text


def test_rows_of_requests_are_folded_into_columns() -> None:
    rows = [
        {"what": what, "number": n, "topic": "maths", "version": n // 2, "alpha": 0.1 * n}
        | ({"rounds": n} if what == "online" else {})
        for n in range(5)
        for what in ("frozen", "online")
    ]
    folded = page.folded(rows)
    assert [row["what"] for row in folded] == ["frozen", "online"]
    assert folded[1]["rounds"] == folded[0]["number"] == [0, 1, 2, 3, 4]
    latency = {"what": "latency", "clients": 1, "p50": 0.5}
    about = {"seed": 3, "commit": "c"}
    again = page.unfolded([row | about for row in [*folded, latency]])
    assert again[-1] == latency | about
    by_place = sorted(again[:-1], key=lambda row: (row["number"], row["what"]))
    assert by_place == [row | about for row in rows]


def test_the_intervals_of_several_seeds_hold_what_they_say() -> None:
    rng = np.random.default_rng(1)
    tables = []
    for _ in range(3):
        base = rng.uniform(0.1, 0.6, 200)
        tables.append({"a": base + rng.normal(0.03, 0.02, 200), "b": base})
    low, high = page.over_seeds(tables, lambda means: means["a"] - means["b"])
    found = np.mean([(table["a"] - table["b"]).mean() for table in tables])
    # Unpaired, the spread of the requests alone (0.14) would be an interval of 0.03.
    assert low < found < high and 0.002 < high - low < 0.008
    low, high = page.over_seeds(tables, lambda means: means["b"] - means["b"])
    assert low == high == 0


@pytest.mark.parametrize("unpublished", [False, True])
def test_cost_is_told_with_and_without_publishing(unpublished: bool) -> None:
    rows = []
    for what in ("loop", *(["unpublished"] if unpublished else [])):
        about = ABOUT | {"seed": 0, "rate": 2.0, "p99": 3.0, "tokens_per_s": 9.0}
        rows.append(about | {"what": f"{what}-off", "p50": 1.0})
        more = {"p50": 1.05, "p50_ratio": 1.05, "p50_ratio_interval": [1.0, 1.1]}
        rows.append(about | more | {"what": f"{what}-on", "identical": 7, "compared": 7})
    text = "\n".join(page._cost(rows))
    assert text.count("+5.0% [+0.0%, +10.0%]") == text.count("7 of 7") == 1 + unpublished
    assert ("margin=1" in text) == unpublished
