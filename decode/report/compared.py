"""The page of `draftsmith compare`: one row a kind and temperature, and which kind to train."""

import math
from collections.abc import Sequence
from typing import Any

from draftsmith import printed
from draftsmith.decode.policies.foretold import kept_shares, taus
from draftsmith.decode.report import charts, figures, results
from draftsmith.decode.report.schema import pays
from draftsmith.printed import bracket, number, share, short_count, thousandths, times_as

Values = dict[str, Any]
COLOURS = ("a", "c", "b", "d")
# A column's heading, and the figure whose formula says what it is.
COLUMNS = {"T": "", "kind": "", "drafts": "", "tau": "tau", "95%": "interval", "c": "c"}
COLUMNS |= {"speed-up": "speedup", "its 95%": "interval", "ideal": "ideal_speedup"}
COLUMNS |= {"foretold": "foretold"}
COLUMNS |= {"efficiency": "efficiency", "MBSU": "mbsu", "weights": "", "trained": "", "tokens": ""}
COLUMNS |= {"same output": "identical"}
WORDS = ("kind", "drafts", "same output")


def mean_speedup(row: Values) -> float:
    """The geometric mean over temperatures: by it kinds are ordered."""
    logs = [math.log(one["speedup"]) for one in row["results"]]
    return math.exp(sum(logs) / len(logs))


def ordered(rows: Sequence[Values]) -> list[Values]:
    """Those with results, the fastest first."""
    return sorted((row for row in rows if row["results"]), key=mean_speedup, reverse=True)


def says(rows: Sequence[Values]) -> str:
    """The answer, in a sentence."""
    if not (made := ordered(rows)):
        return "no kind could be measured: " + "; ".join(row["refused"] for row in rows)
    best, *others = made
    told = ", ".join(
        f"{times_as(one['speedup'])} {bracket(one['speedup_interval'])} at temperature "
        f"{one['temperature']:g}"
        for one in best["results"]
    )
    if not any(map(seems, best["results"])):
        return f"drafting doesn't pay here: {best['kind']}, the best, gives {told}"
    verb = "train" if best["training"] else "train nothing, draft with"
    after = [row["kind"] for row in others if not apart(best, row)]
    near = f"; not told apart from {', '.join(after)}" if after else ""
    return f"{verb} {best['kind']}: {told} of plain decoding's speed{near}"


def seems(one: Values) -> bool:
    """`pays`, or what one batch alone says, which has no interval."""
    speedup, interval = one["speedup"], one["speedup_interval"]
    return speedup > 1 if interval is None else pays(speedup, interval)


def apart(best: Values, other: Values) -> bool:
    """Whether the intervals of their speed-ups don't meet, at one temperature at least."""
    pairs = zip(best["results"], other["results"], strict=True)
    ends = [(one["speedup_interval"], two["speedup_interval"]) for one, two in pairs]
    return any(one and two and one[0] > two[1] for one, two in ends)


def table(rows: Sequence[Values]) -> tuple[list[str], list[list[str]]]:
    """COLUMNS and the rows in words, each temperature's by speed; then what couldn't be made."""
    flat = [(row, one) for row in ordered(rows) for one in row["results"]]
    flat.sort(key=lambda pair: (pair[1]["temperature"], -pair[1]["speedup"]))
    return list(COLUMNS), [cells(*pair) for pair in flat]


def cells(row: Values, one: Values) -> list[str]:
    """A row by COLUMNS."""
    took, K = row["training"], one["levels"] or one["K"]
    tree = "" if one["tree"] == "chain" else f" {one['tree']}"
    policy = "" if one["policy"] == "fixed" else f" {one['policy']}"
    return [
        *(f"{one['temperature']:g}", row["kind"], f"K={K:.3g}{tree}{policy}"),
        *(number(one["tau"]), bracket(one["tau_interval"]), thousandths(one["c"])),
        *(times_as(one["speedup"]), bracket(one["speedup_interval"])),
        times_as(one["ideal_speedup"]),
        times_as(one["foretold"]) if one.get("foretold") else number(None),
        *(share(one["efficiency"]), times_as(one["mbsu"])),
        f"{row['bytes'] / 1e6:.1f} MB",
        *((f"{took['seconds']:.0f} s", short_count(took["tokens"])) if took else ("0 s", "0")),
        results.cells(one)[-1] if one["lossless"] else "LOSSY",
    ]


def by_depth(one: Values) -> list[float]:
    """tau if no more than 1, 2, ... of the drafted tokens could be kept."""
    return taus(kept_shares(one["accepted_histogram"])).tolist()


def page(found: Values) -> str:
    """The whole compare.html, of what compare.json holds."""
    best, heats = ordered(found["rows"]), found["settings"]["temperatures"].split(",")
    parts = []
    for nth, heat in enumerate(heats):
        bars = [(row["kind"], row["results"][nth]) for row in best]
        bars.sort(key=lambda bar: -bar[1]["speedup"])
        parts.append(
            {
                "heat": heat,
                "speed": charts.lanes(
                    f"Speed-up at temperature {heat}",
                    [
                        charts.LyingBar(
                            kind,
                            [("a" if seems(one) else "d", one["speedup"], "")],
                            times_as(one["speedup"]),
                            one["speedup_interval"],
                        )
                        for kind, one in bars
                    ],
                    x_label="times plain decoding; whisker: 95% interval",
                    reference=(1, "plain"),
                ),
                "depths": depth_table([(kind, by_depth(one)) for kind, one in bars]),
                "depth": charts.scatter(
                    f"tau by depth at temperature {heat}",
                    [
                        charts.Trend(kind, css, line, (), line)
                        for css, (kind, one) in zip(COLOURS, bars, strict=False)
                        for line in [list(enumerate([1.0, *by_depth(one)]))]
                    ],
                    x_label="drafted tokens that may count, of a tree levels",
                    y_label="tau",
                    log=False,
                ),
                "categories": category_table(bars),
            }
        )
    return figures.TEMPLATES.get_template("compare.html.jinja").render(
        found=found,
        parts=parts,
        head=[(name, figures.FORMULAS.get(key, "")) for name, key in COLUMNS.items()],
        body=table(found["rows"])[1],
        words=len(WORDS),
        reports={row["kind"]: row["results"][0]["report"] for row in best},
        charts=charts,
        printed=printed,
    )


def depth_table(of: Sequence[tuple[str, list[float]]]) -> tuple[list[str], list[list[str]]]:
    """tau by depth in words, for as many depths as one of them has."""
    most = max((len(taus) for _, taus in of), default=0)
    body = [[kind, *map(number, taus), *[""] * (most - len(taus))] for kind, taus in of]
    return ["kind", *(str(depth) for depth in range(1, most + 1))], body


def category_table(bars: Sequence[tuple[str, Values]]) -> tuple[list[str], list[list[str]]]:
    """tau by category, in words."""
    names = list(bars[0][1]["categories"]) if bars else []
    body = [[kind, *(number(one["categories"][n]["tau"]) for n in names)] for kind, one in bars]
    return ["kind", *names], body
