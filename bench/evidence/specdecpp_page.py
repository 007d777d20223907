"""The page of docs/results/specdecpp.json: stopping rules side by side, from the rows alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from draftsmith.bench.rows import markdown
from draftsmith.decode.evaluate.metrics import bootstrap

Rows = Sequence[dict[str, Any]]

WHAT = {
    "fixed-k": "the same K every round",
    "confidence": "q of the newest token below a threshold",
    "product": "product of q along the draft below a threshold",
    "entropy": "AdaEDL's bound on acceptance, adaptive or at a fixed limit",
    "head-paper": "acceptance head in the paper's form",
    "head": "acceptance head, `recipe=specdecpp/gsm8k`",
    "head-costs": "the same at h = 1 - c, not tuned",
    "oracle-after": "stops when a token that will be rejected has been drafted",
    "oracle": "drafts what will be kept, and nothing else",
}


def page(rows: Rows) -> str:
    """Markdown."""
    replayed = [r for r in rows if "c" in r]
    commits = ", ".join(sorted({str(r["commit"])[:12] for r in rows}))
    seeds = sorted({r["seed"] for r in replayed})
    lines = [
        "# When to stop drafting",
        "",
        f"`python bench/evidence/specdecpp.py` at commit {commits} on {rows[0]['machine']}. Target "
        f"{rows[0]['target']}; {len(seeds)} seeds, each with a draft distilled on GSM8K, sampling "
        "noise and heads of its own; answers at temperature 1 to GSM8K questions, Python source "
        "and copies of source, a third each. K, thresholds and settings are chosen on the tune "
        "part for each c, figures are of the report part. Modelled: emitted / (rounds + c drafted) "
        "in steps of plain decoding, replayed from a trace. Brackets: 95% bootstrap interval over "
        "the seeds, which is a little narrow for so few.",
    ]
    for c in sorted({r["c"] for r in replayed}):
        lines += ["", *_at_cost([r for r in replayed if r["c"] == c], c)]
    lines += ["", *_kinds(replayed)]
    timed = [r for r in rows if "tokens_per_s" in r]
    if timed:
        lines += ["", *_timed(timed)]
    costs = [r for r in rows if r["what"] == "head-cost"]
    if costs:
        lines += ["", *_costs(costs)]
    return "\n".join(lines) + "\n"


def _at_cost(rows: Rows, c: float) -> list[str]:
    head = ("rule", "what", "speed-up", "over fixed K", "over entropy", "of the oracle's gain")
    head = (*head, "tau", "drafted a round", "discarded", "settings")
    body = []
    for arm in [arm for arm in WHAT if any(r["what"] == arm for r in rows)]:
        own = [r for r in rows if r["what"] == arm]
        body.append(
            [
                arm,
                WHAT[arm],
                f"{mean(own, 'speedup'):.3f}",
                _percent(own, "over_fixed"),
                _percent(own, "over_entropy"),
                _share(own),
                f"{mean(own, 'tau'):.2f}",
                f"{mean(own, 'K'):.2f}",
                f"{mean(own, 'discard_rate'):.2f}",
                ", ".join(sorted({r["setting"] for r in own})),
            ]
        )
    return [f"## A draft call at c = {c:g}", "", *markdown(head, body)]


def _kinds(rows: Rows) -> list[str]:
    """Modelled speed-up by kind of text."""
    kinds = list(rows[0]["kinds"])
    body = []
    for c in sorted({r["c"] for r in rows}):
        for arm in WHAT:
            own = [r["kinds"] for r in rows if r["c"] == c and r["what"] == arm]
            if own:
                cells = [f"{np.mean([r[k]['speedup'] for r in own]):.3f}" for k in kinds]
                body.append([f"{c:g}", arm, *cells])
    return ["## By kind of text", "", *markdown(("c", "rule", *kinds), body)]


def _timed(rows: Rows) -> list[str]:
    head = ("rule", "tokens/s", "over plain", "over fixed K", "over entropy", "drafted a round")
    head = (*head, "settings", "answers equal to plain decoding's (fp32)")
    body = []
    for arm in dict.fromkeys(r["what"] for r in rows):
        own = [r for r in rows if r["what"] == arm]
        gains = [
            "" if arm == "plain" else _percent(own, f"over_{other}")
            for other in ("plain", "fixed-k", "entropy")
        ]
        same, compared = (sum(r.get(n, 0) for r in own) for n in ("identical", "compared"))
        settings = ", ".join(sorted({r["setting"] for r in own}))
        speed = f"{mean(own, 'tokens_per_s'):.0f}"
        equal = f"{same} of {compared}" if compared else ""
        body.append([arm, speed, *gains, f"{mean(own, 'K'):.2f}", settings, equal])
    c, v = mean(rows, "measured_c"), mean(rows, "measured_v")
    return [
        "## Measured",
        "",
        f"bf16, one row, one thread, rules in turn; c = {c:.2f} and t_verify = {v:.2f} t_plain "
        "measured, thresholds chosen by replay at these. What asking a rule costs is in the "
        "measurement and not in the choice. The oracles can't be decoded with.",
        "",
        *markdown(head, body),
    ]


def _costs(rows: Rows) -> list[str]:
    body = [
        [
            *(r["draft"], r["form"], f"{1e3 * r['t_draft']:.3f}", f"{1e6 * r['t_head']:.0f}"),
            *(f"{r['share']:.1%}", str(r["seed"])),
        ]
        for r in rows
    ]
    head = ("draft", "head", "draft call, ms", "asking the head, us", "share", "seed")
    words = "One row, bf16, one thread; asking includes its numbers, and reading the decision."
    return ["## What the head costs", "", words, "", *markdown(head, body)]


def mean(rows: Rows, name: str) -> float:
    return float(np.mean([r[name] for r in rows]))


def interval(values: Sequence[float]) -> list[float]:
    """95%, bootstrap of the mean over seeds."""
    found = np.array(values)
    return bootstrap(lambda i: float(found[i].mean()), len(found), draws=10_000)


def _percent(rows: Rows, name: str) -> str:
    gains = [100 * (r[name] - 1) for r in rows]
    low, high = interval(gains)
    return f"{np.mean(gains):+.1f}% [{low:+.1f}, {high:+.1f}]"


def _share(rows: Rows) -> str:
    shares = [r["share_of_oracle"] for r in rows]
    low, high = interval(shares)
    return f"{np.mean(shares):.2f} [{low:.2f}, {high:.2f}]"
