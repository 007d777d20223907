"""The four charts of the HTML report, from its figures."""

from collections.abc import Sequence
from html import escape
from typing import Any

from draftsmith.decode.report.figures import TIMES, duration, number, share, times_as
from draftsmith.decode.report.svg import LyingBar, Series, columns, lanes

PLAIN = 1.0  # the speed-up of plain decoding


def charts(report: dict[str, Any]) -> str:
    """Acceptance by position, accepted lengths, speed-up against ideal, the parts of a round."""
    return "".join(draw(report) for draw in (by_position, histogram, speedup, one_round))


def by_position(report: dict[str, Any]) -> str:
    heading = "Acceptance by position"
    overall, conditional = report["acceptance_by_position"], report["acceptance_conditional"]
    if not overall:
        return _empty(heading, "Nothing was drafted.")
    series = [
        Series("of rounds that drafted it", "a", overall, [f"{v:.2f}" for v in overall]),
        Series("of rounds that got there", "b", conditional, [f"{v:.2f}" for v in conditional]),
    ]
    places = [str(i + 1) for i in range(len(overall))]
    picture = columns(
        heading, places, series, x_label="drafted position", y_label="share accepted", top=1.0
    )
    words = (
        "The first column falls with each position; the second shows how good the draft is there."
    )
    return _chart(heading, words, [(one.css, one.name) for one in series], picture)


def histogram(report: dict[str, Any]) -> str:
    heading = "Accepted drafted tokens a round"
    rounds = report["accepted_histogram"]
    total = sum(rounds)
    if not total:
        return _empty(heading, "No round was decoded.")
    shares = [100 * n / total for n in rounds]
    series = [
        Series(
            "share of rounds", "a", shares, [f"{v:.0f}%" if v >= 1 else f"{v:.1g}%" for v in shares]
        )
    ]
    places = [str(i) for i in range(len(rounds))]
    picture = columns(heading, places, series, x_label="accepted tokens", y_label="% of rounds")
    words = f"{total:,} rounds; each also emits one token of the target's own, unless it was cut."
    return _chart(heading, words, [("a", "share of rounds")], picture)


def speedup(report: dict[str, Any]) -> str:
    heading = "Speed-up: measured against ideal"
    efficiency = report["efficiency"]
    if efficiency is None:
        caption = "No ideal can be stated: a time was not measured."
    elif efficiency > 1:
        caption = (
            f"Efficiency {share(efficiency)}: the machine was busier when the forwards were timed."
        )
    else:
        caption = (
            f"Efficiency {share(efficiency)}: what the loop around the models leaves of the ideal."
        )
    measured = report["speedup"]
    rows = [
        LyingBar("measured", [("a", measured, "")], times_as(measured), report["speedup_interval"])
    ]
    for name, key, css in (
        ("measured, Spec-Bench way", "speedup_specbench", "b"),
        ("ideal = tau · t_plain / (t_verify + K · t_draft + t_extend)", "ideal_speedup", "c"),
        ("MBSU = tau / (1 + K · c_bytes)", "mbsu", "d"),
    ):
        if report[key] is not None:
            rows.append(LyingBar(name, [(css, report[key], "")], times_as(report[key])))
    label = "times plain decoding"
    if report["speedup_interval"]:
        label += f"; whisker: 95% interval over {'prompts' if report['batch'] == 1 else 'batches'}"
    picture = lanes(heading, rows, x_label=label, reference=(PLAIN, "plain"))
    return _chart(heading, caption, [], picture)


def one_round(report: dict[str, Any]) -> str:
    heading = "One round, in isolated forwards"
    times, tau, K = report["times"], report["tau"], report["K"]
    if times["draft"] is None:
        return _empty(heading, "The drafter's call was not timed.")
    drafting = K * times["draft"] + (times["extend"] or 0.0)
    plain, draft, check = (1e3 * s for s in (tau * times["plain"], drafting, times["verify"]))
    rows = [
        LyingBar(
            f"{number(tau)} tokens, plain",
            [("d", plain, f"{number(tau)} {TIMES} {duration(times['plain'])}")],
            f"{plain:.3g} ms",
        ),
        LyingBar(
            f"{number(tau)} tokens, one round",
            [("b", draft, f"draft {draft:.3g}"), ("a", check, f"verify {check:.3g}")],
            f"{draft + check:.3g} ms",
        ),
    ]
    legend = [
        ("d", "target, one token at a time"),
        ("b", "draft, K calls; a head's extend"),
        ("a", "target, verify"),
    ]
    caption = "The ideal speed-up is the upper bar divided by the lower."
    return _chart(heading, caption, legend, lanes(heading, rows, x_label="milliseconds"))


def _chart(heading: str, caption: str, legend: Sequence[tuple[str, str]], picture: str) -> str:
    keys = "".join(f'<span><i class="{css}"></i>{escape(name)}</span>' for css, name in legend)
    return (
        f"<figure><figcaption><h2>{escape(heading)}</h2><p>{escape(caption)}</p>"
        f'<div class="legend">{keys}</div></figcaption>{picture}</figure>'
    )


def _empty(heading: str, why: str) -> str:
    return f"<figure><figcaption><h2>{heading}</h2><p>{why}</p></figcaption></figure>"
