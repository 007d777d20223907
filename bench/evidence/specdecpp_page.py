"""The page of docs/results/specdecpp.json: stopping rules side by side, from the rows alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from draftsmith.bench.rows import interval, markdown, source

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
    seeds = sorted({r["seed"] for r in replayed})
    lines = [
        "# When to stop drafting",
        "",
        f"{source(rows)} Target {rows[0]['target']}, and one draft for all, distilled on GSM8K and "
        f"Python source; {len(seeds)} seeds of sampling noise and heads, on the same prompts: "
        "GSM8K questions, Python source and copies of source, a third each, at temperature 1. K, "
        "thresholds and settings are chosen on the tune part for each c, figures are of the report "
        "part. Modelled: emitted / (rounds + c drafted) in steps of plain decoding, replayed from "
        "a trace. Brackets: the wider of two 95% bootstrap intervals, over the seeds, and over the "
        "prompts (the mean of what each seed has); of shares of the oracle's gain over the seeds "
        "alone, which is narrow for so few.",
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


def wider(rows: Rows, name: str) -> list[float]:
    """Of a figure with an interval over prompts in each row: that one, the rows' ends averaged, or
    the one over rows (seeds).
    """
    over_seeds = interval([r[name] for r in rows])
    over_prompts = np.mean([r[f"{name}_interval"] for r in rows], axis=0).tolist()
    return max(over_seeds, over_prompts, key=lambda ends: ends[1] - ends[0])


def _percent(rows: Rows, name: str) -> str:
    low, high = (100 * (end - 1) for end in wider(rows, name))
    return f"{100 * (mean(rows, name) - 1):+.1f}% [{low:+.1f}, {high:+.1f}]"


def _share(rows: Rows) -> str:
    shares = [r["share_of_oracle"] for r in rows]
    low, high = interval(shares)
    return f"{np.mean(shares):.2f} [{low:.2f}, {high:.2f}]"
