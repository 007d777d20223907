"""The page and the picture of docs/results/online.json, from the rows alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from draftsmith.bench.rows import markdown, source
from draftsmith.decode.evaluate.metrics import bootstrap
from draftsmith.decode.report.charts import Trend, drawing, scatter

Rows = Sequence[dict[str, Any]]
ARMS = {"frozen": "d", "online": "a", "ceiling": "c"}  # with their colours
PER_REQUEST = ("number", "topic", "version", "alpha", "rounds", "drafted", "emitted")
AVERAGED = 50  # requests of a point of the picture
LAST = 200  # requests of a part that its figures are of: the learner has had the others


def folded(rows: Rows) -> Rows:
    """Rows of requests as one row an arm, whose columns are lists."""
    arms = dict.fromkeys(row["what"] for row in rows)
    columns = {arm: [row for row in rows if row["what"] == arm] for arm in arms}
    return [
        {"what": arm, **{name: [row[name] for row in own] for name in own[0] if name != "what"}}
        for arm, own in columns.items()
    ]


def unfolded(rows: Rows) -> Rows:
    """The rows of requests again, and the others as they are."""
    found = []
    for row in rows:
        lists = {name: column for name, column in row.items() if name in PER_REQUEST}
        if not isinstance(lists.get("number"), list):
            found.append(row)
            continue
        for values in zip(*lists.values(), strict=True):
            found.append(row | dict(zip(lists, values, strict=True)))
    return found


def page(rows: Rows) -> str:
    """Markdown."""
    rows = unfolded(rows)
    seeds = sorted({r["seed"] for r in rows})
    parts = {topic: len(_numbers(rows, topic)) for topic in _topics(rows)}
    stream = ", then ".join(f"{count} of {topic}" for topic, count in parts.items())
    lines = [
        "# A draft that learns while it serves",
        "",
        f"{source(rows)} Target "
        f"{rows[0]['target']}, fp32, temperature 1; {len(seeds)} seeds, each with drafts, a "
        f"stream, arrivals and noise of its own. Requests: {stream}. They come over HTTP as a "
        "Poisson process at 60% of the measured capacity; the server has one thread, the learner "
        "what is left of two cores. frozen: distilled on answers to GSM8K; online: the versions "
        "as they served; ceiling: the frozen draft, distilled offline on 2,000 answers to Python "
        "source. The learner's settings were chosen on this same change of topic: another one may "
        "gain less. Brackets: 95% bootstrap intervals, over requests of one seed, or over seeds "
        "and then requests where they are of all.",
        "",
        "![alpha over the requests](online.svg)",
        "",
        *_recovered(rows),
        "",
        *_cost(rows),
        "",
        *_latency(rows),
    ]
    return "\n".join(lines) + "\n"


def picture(rows: Rows) -> str:
    """SVG: the moving mean of alpha over the seeds, and where the topic changes."""
    rows = unfolded(rows)
    trends = []
    for arm, css in ARMS.items():
        by_number: dict[int, list[float]] = {}
        for row in _arm(rows, arm):
            by_number.setdefault(row["number"], []).append(row["alpha"])
        numbers = sorted(by_number)
        means = [float(np.mean(by_number[n])) for n in numbers]
        points = [
            (float(n), float(np.mean(means[max(0, i + 1 - AVERAGED) : i + 1])))
            for i, n in enumerate(numbers)
        ]
        trends.append(Trend(arm, css, (), (), points))
    marks = [(float(min(_numbers(rows, topic))), topic) for topic in _topics(rows)]
    title = f"alpha, mean of the last {AVERAGED} requests"
    chart = scatter(title, trends, x_label="requests", y_label="alpha", log=False, marks=marks)
    return drawing([chart], [(css, arm) for arm, css in ARMS.items()])


def _recovered(rows: Rows) -> list[str]:
    """What the three drafts accept on the last requests of each part."""
    body = []
    for topic in _topics(rows):
        for seed in [*sorted({r["seed"] for r in rows}), None]:
            own = [r for r in rows if seed is None or r["seed"] == seed]
            tables = _tables(own, topic)
            found = {arm: np.concatenate([t[arm] for t in tables]).mean() for arm in ARMS}
            gap = over_seeds(tables, lambda a: a["ceiling"] - a["frozen"])
            gain = over_seeds(tables, lambda a: a["online"] - a["frozen"])
            share = ""
            if gap[0] > 0:  # where nothing is surely there to recover a share is noise
                low, high = over_seeds(
                    tables, lambda a: (a["online"] - a["frozen"]) / (a["ceiling"] - a["frozen"])
                )
                middle = (found["online"] - found["frozen"]) / (found["ceiling"] - found["frozen"])
                share = f"{middle:.0%} [{low:.0%}, {high:.0%}]"
            body.append(
                [
                    *(topic, "all" if seed is None else str(seed)),
                    *(f"{found[arm]:.3f}" for arm in ARMS),
                    *(f"[{low:+.3f}, {high:+.3f}]" for low, high in (gap, gain)),
                    share,
                ]
            )
    head = ("part", "seed", *ARMS, "ceiling - frozen", "online - frozen", "share of the gap")
    words = f"alpha on the last {LAST} requests of each part, or all where it has fewer."
    return ["## What it wins", "", words, "", *markdown(head, body)]


def _cost(rows: Rows) -> list[str]:
    kept = (
        "The first requests of the stream, without the learner and with it, in the same arrivals "
        "(the later ones are of the new topic), a fresh server each; seed 1 began with the loop. "
        "Times are from request to whole answer; intervals over runs of 25 requests. With the "
        "loop on, the server also keeps what the target knew of each answer. A better draft "
        "shortens answers: this is the net cost."
    )
    gross = (
        "The same once more with a learner that publishes nothing (`margin=1`): what keeping and "
        "learning cost by themselves."
    )
    lines = ["## What it costs", "", kept, "", *_compared(rows, "loop")]
    if any(r["what"] == "unpublished-on" for r in rows):
        lines += ["", gross, "", *_compared(rows, "unpublished")]
    return lines


def _compared(rows: Rows, what: str) -> list[str]:
    """A seed a row: latency without the loop and with it."""
    body = []
    for seed in sorted({r["seed"] for r in rows}):
        own = {r["what"]: r for r in rows if r["seed"] == seed}
        off, on = own[f"{what}-off"], own[f"{what}-on"]
        low, high = on["p50_ratio_interval"]
        body.append(
            [
                *(str(seed), f"{on['rate']:.2f}"),
                *(f"{1e3 * one[p]:.0f}" for p in ("p50", "p99") for one in (off, on)),
                f"{on['p50_ratio'] - 1:+.1%} [{low - 1:+.1%}, {high - 1:+.1%}]",
                f"{off['tokens_per_s']:.0f}, {on['tokens_per_s']:.0f}",
                f"{on['identical']} of {on['compared']}",
            ]
        )
    times = ("p50 off, ms", "p50 on", "p99 off", "p99 on", "p50")
    return markdown(("seed", "requests/s", *times, "tokens/s off, on", "equal answers"), body)


def _latency(rows: Rows) -> list[str]:
    body = []
    for clients in sorted({r["clients"] for r in rows if "clients" in r}):
        own = [r for r in rows if r.get("clients") == clients]
        means = {n: np.mean([r[n] for r in own]) for n in ("p50", "p99", "tokens_per_s")}
        times = [f"{1e3 * means[p]:.0f}" for p in ("p50", "p99")]
        body.append([str(clients), *times, f"{means['tokens_per_s']:.0f}"])
    head = ("clients", "p50, ms", "p99, ms", "tokens/s")
    words = "Clients that each send the next request when they have their answer, without the loop."
    return ["## Under load", "", words, "", *markdown(head, body)]


def _topics(rows: Rows) -> list[str]:
    return list(dict.fromkeys(r["topic"] for r in rows if "topic" in r))


def _arm(rows: Rows, arm: str) -> Rows:
    return [r for r in rows if r["what"] == arm]


def _numbers(rows: Rows, topic: str) -> list[int]:
    return sorted({r["number"] for r in rows if r.get("topic") == topic})


Table = dict[str, np.ndarray]  # arm -> alpha of the same requests, of one seed


def _tables(rows: Rows, topic: str) -> list[Table]:
    last = set(_numbers(rows, topic)[-LAST:])
    tables = []
    for seed in sorted({r["seed"] for r in rows}):
        of = {
            arm: {r["number"]: r["alpha"] for r in _arm(rows, arm) if r["seed"] == seed}
            for arm in ARMS
        }
        numbers = sorted(last & of["online"].keys())
        tables.append({arm: np.array([found[n] for n in numbers]) for arm, found in of.items()})
    return tables


def over_seeds(tables: Sequence[Table], of: Any) -> list[float]:
    """The 95% interval of `of` means by arm: seeds are drawn, and of each its requests, the same
    for all arms.
    """
    rng = np.random.default_rng(0)

    def statistic(drawn: np.ndarray) -> float:
        means: dict[str, list[float]] = {arm: [] for arm in tables[0]}
        for table in (tables[i] for i in drawn):
            count = len(next(iter(table.values())))
            some = rng.integers(0, count, count)
            for arm, values in table.items():
                means[arm].append(float(values[some].mean()))
        return float(of({arm: np.mean(values) for arm, values in means.items()}))

    return bootstrap(statistic, len(tables))
