"""The page of bench/evidence/judge.py: accuracy against tau as curves, and the gaps at equal tau.

A way's curve goes through its runs in the order of their tau and begins at the lossless one;
between two runs it is straight. At equal tau the judges are compared with each baseline on the same
questions. Intervals are 95 %: questions are drawn anew 1,000 times, and judges with them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftsmith.bench.rows import markdown, source
from draftsmith.decode.report.charts import Trend, drawing, scatter

Row = dict[str, Any]
Floats = NDArray[np.float64]

WAYS = {"judge": "a", "lenience": "b", "fuzzy": "c", "typical": "d"}
KNOBS = {"judge": "threshold", "lenience": "l", "fuzzy": "t (nats)", "typical": "eps"}
PLACES = (0.2, 0.4, 0.6, 0.8, 1.0)  # of the way from the lossless tau to one that all ways reach
DRAWS = 1000


def publish(rows: list[Row], folder: Path) -> None:
    """Write judge.json (without what single questions gave), judge.md and judge.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    compared = differences(rows)
    kept = [{name: value for name, value in row.items() if name != "each"} for row in rows]
    (folder / "judge.json").write_text(json.dumps(kept + compared, indent=1) + "\n")
    (folder / "judge.svg").write_text(picture(kept))
    (folder / "judge.md").write_text(page(kept, compared))


def curve(runs: Sequence[Row], drawn: NDArray[np.int64], taus: Sequence[float]) -> Floats:
    """Accuracy at each tau on the curve through `runs`, counted over the questions drawn."""
    points = []
    for run in runs:
        right, emitted, rounds = (run["each"][name] for name in ("right", "emitted", "rounds"))
        tau = np.asarray(emitted)[drawn].sum() / np.asarray(rounds)[drawn].sum()
        points.append((tau, (np.frombuffer(right.encode(), "u1") - ord("0"))[drawn].mean()))
    x, y = zip(*sorted(points), strict=True)
    return np.interp(taus, x, y)


def differences(rows: Sequence[Row]) -> list[Row]:
    """At taus that every way reaches: the judge's accuracy, each baseline's and the difference."""
    plain = next(row for row in rows if row["what"] == "lossless")
    runs = {
        what: {
            seed: [plain, *(r for r in rows if r["what"] == what and r["seed"] == seed)]
            for seed in {r["seed"] for r in rows if r["what"] == what}
        }
        for what in WAYS
    }
    common = min(max(r["tau"] for r in one) for seeds in runs.values() for one in seeds.values())
    taus = [plain["tau"] + place * (common - plain["tau"]) for place in PLACES]
    rng, every = np.random.default_rng(0), np.arange(plain["n_prompts"])
    draws = [every] + [rng.choice(every, len(every)) for _ in range(DRAWS)]
    found: dict[str, list[Floats]] = {what: [] for what in WAYS}
    for draw, drawn in enumerate(draws):
        for what, seeds in runs.items():
            chosen = list(seeds) if not draw else rng.choice(list(seeds), len(seeds)).tolist()
            curves = {seed: curve(seeds[seed], drawn, taus) for seed in set(chosen)}
            found[what].append(np.mean([curves[seed] for seed in chosen], axis=0))
    about = {name: plain[name] for name in ("target", "data", "temperature", "K", "n_prompts")}
    about |= {"seeds": len(runs["judge"])}
    about |= {name: plain[name] for name in ("commit", "command", "machine")}
    compared = []
    for peer in (what for what in WAYS if what != "judge"):
        ours, theirs = np.array(found["judge"]), np.array(found[peer])
        low, high = np.percentile((ours - theirs)[1:], [2.5, 97.5], axis=0)
        for i, tau in enumerate(taus):
            row = {"what": "at equal tau", "peer": peer, "tau": tau, "accuracy": ours[0, i]}
            row |= {"peer_accuracy": theirs[0, i], "difference": ours[0, i] - theirs[0, i]}
            row |= {"difference_interval": [low[i], high[i]], **about}
            compared.append(
                {k: float(v) if isinstance(v, np.float64) else v for k, v in row.items()}
            )
    return compared


def by_setting(rows: Sequence[Row], what: str) -> list[list[Row]]:
    """The runs of a way, those of one setting together, in the order of the settings."""
    settings = dict.fromkeys(row["setting"] for row in rows if row["what"] == what)
    return [[r for r in rows if (r["what"], r["setting"]) == (what, one)] for one in settings]


def picture(rows: Sequence[Row]) -> str:
    """Accuracy over tau: a line a way, of the judges their mean; the lossless point, hollow."""
    plain = next(row for row in rows if row["what"] == "lossless")
    start = (plain["tau"], 100 * plain["accuracy"])
    trends = []
    for what, css in WAYS.items():
        groups = by_setting(rows, what)
        points = [(mean(r["tau"] for r in g), 100 * mean(r["accuracy"] for r in g)) for g in groups]
        trends.append(Trend(what, css, points, [], sorted([start, *points])))
    trends.append(Trend("", "a", [], [start], [start]))
    words = {"x_label": "tau: tokens a target call", "y_label": "right answers, %"}
    title = "Right answers against tokens a target call; hollow: lossless"
    chart = scatter(title, trends, **words, log=False)
    return drawing([chart], [(css, what) for what, css in WAYS.items()])


def page(rows: Sequence[Row], compared: Sequence[Row]) -> str:
    """Markdown, from the rows alone."""
    first = rows[0]
    judges = [row for row in rows if row["what"] == "judge"]
    seeds = sorted({row["seed"] for row in judges})
    auc = [next(r["auc"] for r in judges if r["seed"] == seed) for seed in seeds]
    lines = [
        "# A judge and its baselines: accuracy against tau",
        "",
        f"{source(rows)} Target {first['target']}, drafter {first['drafter']}, chains of K = "
        f"{first['K']}, temperature 0, fp32, {first['n_prompts']} fresh problems of "
        "`data=arithmetic`. Every way but the first is LOSSY. "
        f"{len(seeds)} judges, each with its own questions to mine, weights and order; on prompts "
        f"that weren't trained on their AUC is {min(auc):.3f} to {max(auc):.3f}.",
        "",
        "![accuracy against tau](judge.svg)",
        "",
        "## At equal tau",
        "",
        "Right answers in percent, on lines through the runs. Intervals, 95 %: bootstrap over "
        "questions and judges, the same questions on both sides.",
        "",
    ]
    head = ["tau", "judge", *(f"{peer}; judge better by" for peer in WAYS if peer != "judge")]
    body = []
    for tau in dict.fromkeys(row["tau"] for row in compared):
        here = [row for row in compared if row["tau"] == tau]
        body.append([f"{tau:.2f}", f"{100 * here[0]['accuracy']:.1f}", *map(_against, here)])
    lines += [*markdown(head, body), "", "## Every run", ""]
    lines += [
        "Of a run the intervals are over questions; of the judges the mean, and the standard "
        "deviation over seeds.",
        "",
    ]
    body = [["lossless", "", *_single(first)]]
    for what in WAYS:
        for group in by_setting(rows, what):
            cells = _single(group[0]) if len(group) == 1 else _several(group)
            body.append([what, f"{KNOBS[what]} = {group[0]['setting']:g}", *cells])
    return "\n".join([*lines, *markdown(["way", "setting", "tau", "right, %"], body)]) + "\n"


def _against(row: Row) -> str:
    low, high = (100 * bound for bound in row["difference_interval"])
    better = f"{100 * row['difference']:+.1f} [{low:+.1f}, {high:+.1f}]"
    return f"{100 * row['peer_accuracy']:.1f}; {better}"


def _single(row: Row) -> list[str]:
    low, high = row["tau_interval"]
    least, most = (100 * bound for bound in row["accuracy_interval"])
    right = f"{100 * row['accuracy']:.1f} [{least:.1f}, {most:.1f}]"
    return [f"{row['tau']:.2f} [{low:.2f}, {high:.2f}]", right]


def _several(group: Sequence[Row]) -> list[str]:
    tau, right = (
        [scale * r[name] for r in group] for name, scale in (("tau", 1), ("accuracy", 100))
    )
    return [f"{mean(tau):.2f} ± {stdev(tau):.2f}", f"{mean(right):.1f} ± {stdev(right):.1f}"]
