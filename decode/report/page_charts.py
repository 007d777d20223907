"""The four charts of the HTML report: heading, caption, legend as (colour, words), and picture."""

from collections.abc import Sequence
from typing import NamedTuple

from draftsmith.decode.report.charts import LyingBar, Series, columns, inline, lanes
from draftsmith.decode.report.printed import TIMES, duration, number, share, times_as
from draftsmith.decode.report.schema import Report

PLAIN = 1.0  # the speed-up of plain decoding


class PageChart(NamedTuple):
    heading: str
    caption: str
    legend: Sequence[tuple[str, str]] = ()
    svg: str = ""


def page_charts(report: Report) -> list[PageChart]:
    return [draw(report) for draw in (by_position, histogram, speedup, one_round)]


def by_position(report: Report) -> PageChart:
    heading = "Acceptance by position"
    overall, conditional = report.acceptance_by_position, report.acceptance_conditional
    if not overall:
        return PageChart(heading, "Nothing was drafted.")
    series = [
        Series("of rounds that drafted it", "a", overall, [f"{v:.2f}" for v in overall]),
        Series("of rounds that got there", "b", conditional, [f"{v:.2f}" for v in conditional]),
    ]
    places = [str(i + 1) for i in range(len(overall))]
    words = (
        "The first column falls with each position; the second shows how good the draft is there."
    )
    x_label, y_label = "drafted position", "share accepted"
    picture = columns(heading, places, series, x_label=x_label, y_label=y_label, top=1.0)
    return PageChart(heading, words, [(one.css, one.name) for one in series], inline(picture))


def histogram(report: Report) -> PageChart:
    heading, total = "Accepted drafted tokens a round", sum(report.accepted_histogram)
    if not total:
        return PageChart(heading, "No round was decoded.")
    shares = [100 * n / total for n in report.accepted_histogram]
    labels = [f"{v:.0f}%" if v >= 1 else f"{v:.1g}%" for v in shares]
    series = Series("share of rounds", "a", shares, labels)
    places = [str(i) for i in range(len(shares))]
    words = f"{total:,} rounds; each also emits one token of the target's own, unless it was cut."
    x_label, y_label = "accepted tokens", "% of rounds"
    picture = columns(heading, places, [series], x_label=x_label, y_label=y_label)
    return PageChart(heading, words, [(series.css, series.name)], inline(picture))


def speedup(report: Report) -> PageChart:
    heading, efficiency = "Speed-up: measured against ideal", report.efficiency
    if efficiency is None:
        caption = "No ideal can be stated: a time was not measured."
    else:
        why = "what the loop around the models leaves of the ideal"
        why = "the machine was busier when the forwards were timed" if efficiency > 1 else why
        caption = f"Efficiency {share(efficiency)}: {why}."
    bars = (
        ("measured", "a", report.speedup, report.speedup_interval),
        ("measured, Spec-Bench way", "b", report.speedup_specbench, None),
        (
            "ideal = tau · t_plain / (t_verify + K · t_draft + t_extend)",
            *("c", report.ideal_speedup, None),
        ),
        ("MBSU = tau / (1 + K · c_bytes)", "d", report.mbsu, None),
    )
    rows = [
        LyingBar(name, [(css, value, "")], times_as(value), interval)
        for name, css, value, interval in bars
        if value is not None
    ]
    label = "times plain decoding"
    if report.speedup_interval:
        label += f"; whisker: 95% interval over {'prompts' if report.batch == 1 else 'batches'}"
    picture = lanes(heading, rows, x_label=label, reference=(PLAIN, "plain"))
    return PageChart(heading, caption, svg=inline(picture))


def one_round(report: Report) -> PageChart:
    heading, times = "One round, in isolated forwards", report.times
    if times.draft is None:
        return PageChart(heading, "The drafter's call was not timed.")
    drafting = report.K * times.draft + (times.extend or 0.0)
    plain, draft, check = (1e3 * s for s in (report.tau * times.plain, drafting, times.verify))
    tau, product = number(report.tau), f"{number(report.tau)} {TIMES} {duration(times.plain)}"
    parts = [("b", draft, f"draft {draft:.3g}"), ("a", check, f"verify {check:.3g}")]
    rows = [
        LyingBar(f"{tau} tokens, plain", [("d", plain, product)], f"{plain:.3g} ms"),
        LyingBar(f"{tau} tokens, one round", parts, f"{draft + check:.3g} ms"),
    ]
    legend = [
        ("d", "target, one token at a time"),
        ("b", "draft, K calls; a head's extend"),
        ("a", "target, verify"),
    ]
    caption = "The ideal speed-up is the upper bar divided by the lower."
    return PageChart(heading, caption, legend, inline(lanes(heading, rows, x_label="milliseconds")))
