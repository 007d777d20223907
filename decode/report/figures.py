"""The figures of a report in words: their names, formulas, printed values, and the verdict.

The terminal and the HTML page both read them from here, so that a number never stands without the
formula it was made by.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from draftsmith.decode.report.printed import (
    bracket,
    duration,
    number,
    sequence,
    share,
    short,
    times_as,
)
from draftsmith.decode.report.schema import CategoryRow, ForwardTimes, Report, differences_of
from draftsmith.decode.verify.rules import RULES

# One line each; p is the target's law, q the draft's, both after temperature, top-k and top-p.
FORMULAS: dict[str, str] = {
    "tau": "tokens emitted / target calls, the bonus token included; 1 = plain decoding; "
    "prefill and its token outside",
    "alpha": "E over target-written contexts of sum_v min(p, q), of heads at depth 1; "
    "at temperature 0 the share of equal argmaxes",
    "coupled_acceptance": "share of target-written contexts at which p and q pick the same token "
    "with the request's shared noise",
    "task": "answers whose number after ####, else whose last number, is the known one / prompts "
    "with a known answer",
    "agreement": "tokens before an answer's first difference from the plain one / tokens of the "
    "longer of the two",
    "draft_acceptance_rate": "accepted / drafted (trees: / depth); what follows a rejection counts "
    "as rejected",
    "token_efficiency": "accepted / (N - 1): of the drafted tokens verified, the share kept",
    "acceptance_by_position": "rounds that accepted position i / rounds that drafted it",
    "acceptance_conditional": "rounds that accepted position i / that drafted it and accepted all "
    "before it",
    "accepted_histogram": "rounds by the number of drafted tokens they kept",
    "K": "draft calls a round (trees: depth; policies: the mean)",
    "N": "tokens verified a round, the pending one included: the mean",
    "tokens_per_s": "sum of tokens / sum of decode seconds; prefill excluded, nothing after EOS",
    "speedup": "tokens/s speculative / tokens/s plain; prefill excluded, nothing after EOS",
    "speedup_specbench": "mean over prompts of speculative tokens/s / the same of plain decoding; "
    "prefill included; at batch 1 only",
    "ideal_speedup": "tau * t_plain / (t_verify + K * t_draft + t_extend)",
    "efficiency": "speed-up / ideal speed-up",
    "c": "t_draft / t_plain",
    "mbsu": "tau / (1 + K * c_bytes), c_bytes = bytes of the draft / bytes of the target",
    "t_plain": "target forward of 1 token, isolated: median of 50 at the run's batch and context",
    "t_verify": "target forward of N tokens, isolated: median of 50",
    "t_draft": "a round's draft forwards / their number, isolated: median of 50; without a model, "
    "a proposal / its K",
    "t_extend": "a head's forward over the tokens that a round kept, isolated; draft models take "
    "them in by drafting",
    "t_prefill": "target forward of a prompt, isolated: median",
    "loop_rate": "8-grams of an answer that the same answer had before / all its 8-grams",
    "rules": "tau with each acceptance rule on the same prompts",
    "identical": "answers equal, token by token, to those of plain decoding / all answers",
    "interval": "95% bootstrap interval over prompts; of a speed-up over batches, where prompts "
    "were batched",
}
tenths, thousandths = partial(number, digits=1), partial(number, digits=3)
# Where in the report: its name, and how it is printed.
SHOWN: dict[str, tuple[str, Callable[[Any], str]]] = {
    "tau": ("tau, block efficiency", number),
    "alpha": ("alpha, acceptance", thousandths),
    "coupled_acceptance": ("coupled acceptance", thousandths),
    "draft_acceptance_rate": ("draft acceptance rate", thousandths),
    "token_efficiency": ("token efficiency", thousandths),
    "acceptance_by_position": ("acceptance by position", sequence),
    "acceptance_conditional": ("acceptance, conditional", sequence),
    "accepted_histogram": ("rounds by accepted", sequence),
    "K": ("K", short),
    "N": ("N", short),
    "tokens_per_s.plain": ("tokens/s, plain", tenths),
    "tokens_per_s.speculative": ("tokens/s, speculative", tenths),
    "speedup": ("speed-up", times_as),
    "speedup_specbench": ("speed-up, Spec-Bench way", times_as),
    "ideal_speedup": ("ideal speed-up", times_as),
    "efficiency": ("efficiency", share),
    "mbsu": ("MBSU", times_as),
    "c": ("c", thousandths),
    **{f"times.{name}": (f"t_{name}", duration) for name in ForwardTimes.__annotations__},
    "loop_rate": ("loop rate", share),
}
NEAR_TIE_WORDS = "fp32 top-2 margin below 1e-4, fp64 agrees"


class Figure(NamedTuple):
    """One printed number: its name, its value with the interval if it has one, its formula."""

    name: str
    value: str
    interval: str
    formula: str


class IdentityVerdict(NamedTuple):
    """Is the output the target's? level: `good`, `near` (but for near-ties), `bad`, `note`."""

    level: str
    headline: str
    detail: str


def figure(report: Report, place: str) -> Figure:
    """The figure at a key of SHOWN."""
    name, words = SHOWN[place]
    interval = getattr(report, f"{place}_interval", None)
    between = bracket(interval, 3 if words is thousandths else 2)
    formula = FORMULAS[place.replace("times.", "t_").split(".")[0]]
    return Figure(name, words(attrgetter(place)(report)), between, formula)


def figures(report: Report) -> list[Figure]:
    """Every figure of a report, in reading order; absent ones as an em dash."""
    tau, *others = (figure(report, place) for place in SHOWN)
    rules = []
    if report.rules:
        taus = " · ".join(f"{rule} {number(tau)}" for rule, tau in report.rules.items())
        rules.append(Figure("tau by rule", taus, "", FORMULAS["rules"]))
    return [tau, *quality(report), *others, *rules]


def quality(report: Report) -> list[Figure]:
    """What the answers are worth, where that is known or may differ from the target's own."""
    task, same, rows = report.task, report.agreement, []
    if task:
        aside = f"(plain {share(task.plain)}, n = {task.n})"
        name, gain = "exact match, minus plain's", f"{task.difference:+.3f}"
        between = bracket(task.difference_interval, 3)
        rows.append(
            Figure(f"exact match, {task.name}", share(task.speculative), aside, FORMULAS["task"])
        )
        rows.append(Figure(name, gain, between, FORMULAS["task"]))
    elif not report.lossless:
        rows.append(Figure("exact match", "no known answers", "", FORMULAS["task"]))
    if same:
        between, formula = bracket(same.interval, 3), FORMULAS["agreement"]
        rows.append(Figure("agreement with plain", thousandths(same.share), between, formula))
    return rows


def left_out(report: Report) -> str:
    """A sentence about prompts and turns that were skipped; empty where none was."""
    skipped, parts = report.skipped, []
    if skipped.prompts:
        parts.append(f"{skipped.prompts} of {skipped.of} prompts")
    if skipped.turns:
        parts.append(f"{skipped.turns} later turns of those decoded")
    if not parts:
        return ""
    return (
        f"Skipped: {' and '.join(parts)}, which with {report.max_new_tokens} new tokens exceed "
        f"the context of {skipped.context}."
    )


# What the comparison shows, and what it can't.
SAME_SHAPE = (
    "plain decoding through the drafter's rounds, where rounding still depends on the other rows "
    "and on a tree's slots: no proof, unlike fp32"
)


def verdict(report: Report) -> IdentityVerdict:
    """What the run proved about its output, in two lines."""
    found, shapes = _verdict(report), report.identical_same_shape
    if shapes is None:
        return found
    equal = f"In {shapes.dtype}, {shapes.same} of {shapes.total} answers equal those of"
    return found._replace(detail=f"{found.detail} {equal} {SAME_SHAPE}.")


def _verdict(report: Report) -> IdentityVerdict:
    rule, identical = report.rule, report.identical
    if not report.lossless:
        words = "By choice, tokens are kept that the target would not have emitted."
        return IdentityVerdict("note", f"LOSSY: {report.lossy}", words)
    if identical is None and (report.temperature == 0 or RULES[rule].identical):
        words = f"The rule {rule!r} promises the target's own tokens; nobody checked here."
        return IdentityVerdict("note", "Not compared", words)
    if identical is None:
        words = (
            f"The rule {rule!r} keeps the target's distribution exactly, but draws a sample of its "
            "own, so there is no plain answer to compare with token by token."
        )
        return IdentityVerdict("good", "Lossless in law", words)
    same, total, plain = identical.same, identical.total, f"{identical.baseline} plain decoding"
    against = f"In {identical.dtype}, {same} of {total} answers equal those of {plain}"
    if same == total:
        return IdentityVerdict("good", "Lossless: token for token", f"{against}.")
    worst = f"largest margin {identical.worst_margin:.1e}"
    excused = sum(one.near_tie for one in differences_of(report, identical))
    if same + excused >= total:
        words = (
            f"{against}; each of the other {total - same} parts at a near-tie ({NEAR_TIE_WORDS}; "
            f"{worst}). Each is listed."
        )
        return IdentityVerdict("near", "Lossless up to rounding", words)
    words = (
        f"{against}; {total - same - excused} of the others part where there is no near-tie "
        f"({worst}). That is a bug, not rounding."
    )
    return IdentityVerdict("bad", "Not the target's output", words)


CATEGORY_COLUMNS = ("category", "prompts", "tau", "speed-up", "speed-up, Spec-Bench way")
DIFFERENCE_COLUMNS = (
    *("prompt", "answer token", "dtype", "baseline", "fp32 margin", "near-tie in fp32"),
)


def category_tables(report: Report) -> dict[str, list[tuple[str, ...]]]:
    """The tables by category that have rows, by their titles, in CATEGORY_COLUMNS."""

    def cells(name: str, row: CategoryRow) -> tuple[str, ...]:
        speeds = map(times_as, (row.speedup, row.speedup_specbench))
        return name, number(row.n_prompts), number(row.tau), *speeds

    tables = {
        "By category": report.categories,
        "By category, as Spec-Bench groups them": report.specbench,
    }
    return {title: [cells(*row) for row in t.items()] for title, t in tables.items() if t}


def difference_rows(report: Report) -> list[tuple[str, ...]]:
    """The listed differences in words, in DIFFERENCE_COLUMNS."""
    rows: list[tuple[str, ...]] = []
    for one in report.divergences:
        place = str(one.prompt), str(one.position), one.dtype, one.baseline
        rows.append((*place, f"{one.margin:.2e}", "yes" if one.near_tie else "no"))
    return rows
