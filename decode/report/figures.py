"""The figures of a report in words: their names, formulas, printed values, and the verdict.

The terminal and the HTML page both read them from here, so that a number never stands without the
formula it was made by.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

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

TIMED = ("plain", "verify", "draft", "extend", "prefill")
TIMES = "\u00d7"
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


def figures(report: dict[str, Any]) -> list[Figure]:
    """Every figure of a report, in reading order; absent ones as an em dash."""
    speeds, times = report["tokens_per_s"], report["times"]
    rows = [
        _figure("tau, block efficiency", "tau", number(report["tau"]), report["tau_interval"]),
        *quality(report),
        _figure("alpha, acceptance", "alpha", number(report["alpha"], 3), report["alpha_interval"]),
        _figure(
            "coupled acceptance", "coupled_acceptance", number(report["coupled_acceptance"], 3)
        ),
        _figure(
            "draft acceptance rate",
            "draft_acceptance_rate",
            number(report["draft_acceptance_rate"], 3),
        ),
        _figure("token efficiency", "token_efficiency", number(report["token_efficiency"], 3)),
        _figure(
            "acceptance by position",
            "acceptance_by_position",
            sequence(report["acceptance_by_position"]),
        ),
        _figure(
            "acceptance, conditional",
            "acceptance_conditional",
            sequence(report["acceptance_conditional"]),
        ),
        _figure("rounds by accepted", "accepted_histogram", sequence(report["accepted_histogram"])),
        _figure("K", "K", short(report["K"])),
        _figure("N", "N", short(report["N"])),
        _figure("tokens/s, plain", "tokens_per_s", number(speeds["plain"], 1)),
        _figure("tokens/s, speculative", "tokens_per_s", number(speeds["speculative"], 1)),
        _figure("speed-up", "speedup", times_as(report["speedup"]), report["speedup_interval"]),
        _figure(
            "speed-up, Spec-Bench way", "speedup_specbench", times_as(report["speedup_specbench"])
        ),
        _figure("ideal speed-up", "ideal_speedup", times_as(report["ideal_speedup"])),
        _figure("efficiency", "efficiency", share(report["efficiency"])),
        _figure("MBSU", "mbsu", times_as(report["mbsu"])),
        _figure("c", "c", number(report["c"], 3)),
        *(_figure(f"t_{name}", f"t_{name}", duration(times[name])) for name in TIMED),
        _figure("loop rate", "loop_rate", share(report["loop_rate"])),
    ]
    if report.get("rules"):
        taus = " · ".join(f"{rule} {number(tau)}" for rule, tau in report["rules"].items())
        rows.append(_figure("tau by rule", "rules", taus))
    return rows


def quality(report: dict[str, Any]) -> list[Figure]:
    """What the answers are worth, where that is known or may differ from the target's own."""
    task, same = report["task"], report["agreement"]
    rows = []
    if task:
        aside = f"(plain {share(task['plain'])}, n = {task['n']})"
        score = _figure(f"exact match, {task['name']}", "task", share(task["speculative"]))
        value, interval = f"{task['difference']:+.3f}", task["difference_interval"]
        rows.append(score._replace(interval=aside))
        rows.append(_figure("exact match, minus plain's", "task", value, interval))
    elif not report["lossless"]:
        rows.append(_figure("exact match", "task", "no known answers"))
    if same:
        rows.append(
            _figure("agreement with plain", "agreement", number(same["share"], 3), same["interval"])
        )
    return rows


def left_out(report: dict[str, Any]) -> str:
    """A sentence about prompts and turns that were skipped; empty where none was."""
    skipped = report["skipped"]
    parts = []
    if skipped["prompts"]:
        parts.append(f"{skipped['prompts']} of {skipped['of']} prompts")
    if skipped["turns"]:
        parts.append(f"{skipped['turns']} later turns of those decoded")
    if not parts:
        return ""
    return (
        f"Skipped: {' and '.join(parts)}, which with {report['max_new_tokens']} new tokens exceed "
        f"the context of {skipped['context']}."
    )


# What the comparison shows, and what it can't.
SAME_SHAPE = (
    "plain decoding through the drafter's rounds, where rounding still depends on the other rows "
    "and on a tree's slots: no proof, unlike fp32"
)


def verdict(report: dict[str, Any]) -> IdentityVerdict:
    """What the run proved about its output, in two lines."""
    found = _verdict(report)
    shapes = report["identical_same_shape"]
    if shapes is None:
        return found
    equal = f"In {shapes['dtype']}, {shapes['same']} of {shapes['total']} answers equal those of"
    return found._replace(detail=f"{found.detail} {equal} {SAME_SHAPE}.")


def _verdict(report: dict[str, Any]) -> IdentityVerdict:
    if not report["lossless"]:
        return IdentityVerdict(
            "note",
            f"LOSSY: {report['lossy']}",
            "By choice, tokens are kept that the target would not have emitted.",
        )
    identical = report["identical"]
    if identical is None and (report["temperature"] == 0 or RULES[report["rule"]].identical):
        return IdentityVerdict(
            "note",
            "Not compared",
            f"The rule {report['rule']!r} promises the target's own tokens; nobody checked here.",
        )
    if identical is None:
        return IdentityVerdict(
            "good",
            "Lossless in law",
            f"The rule {report['rule']!r} keeps the target's distribution exactly, but draws a "
            "sample of its own, so there is no plain answer to compare with token by token.",
        )
    same, total = identical["same"], identical["total"]
    against = f"{same} of {total} answers equal those of {identical['baseline']} plain decoding"
    excused = sum(d["near_tie"] for d in divergences_of(report, identical))
    if same == total:
        return IdentityVerdict(
            "good", "Lossless: token for token", f"In {identical['dtype']}, {against}."
        )
    worst = f"largest margin {identical['worst_margin']:.1e}"
    if same + excused >= total:
        return IdentityVerdict(
            "near",
            "Lossless up to rounding",
            f"In {identical['dtype']}, {against}; each of the other {total - same} parts at a "
            f"near-tie ({NEAR_TIE_WORDS}; {worst}). Each is listed.",
        )
    return IdentityVerdict(
        "bad",
        "Not the target's output",
        f"In {identical['dtype']}, {against}; {total - same - excused} of the others part where "
        f"there is no near-tie ({worst}). That is a bug, not rounding.",
    )


def tables_of(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The tables by category that have rows, by their titles."""
    tables = {
        "By category": report["categories"],
        "By category, as Spec-Bench groups them": report["specbench"],
    }
    return {title: rows for title, rows in tables.items() if rows}


CATEGORY_COLUMNS = ("prompts", "tau", "speed-up", "speed-up, Spec-Bench way")


def category_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A category's row in words, in the order of CATEGORY_COLUMNS."""
    speeds = (times_as(row[key]) for key in ("speedup", "speedup_specbench"))
    return number(row["n_prompts"]), number(row["tau"]), *speeds


DIVERGENCE_COLUMNS = (
    *("prompt", "answer token", "dtype", "baseline", "fp32 margin", "near-tie in fp32"),
)


def divergence_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A divergence in words, in the order of DIVERGENCE_COLUMNS."""
    place = str(row["prompt"]), str(row["position"]), row["dtype"], row["baseline"]
    return *place, f"{row['margin']:.2e}", "yes" if row["near_tie"] else "no"


def divergences_of(report: dict[str, Any], compared: dict[str, Any]) -> list[dict[str, Any]]:
    """The listed differences behind one of the report's comparisons."""
    return [
        d for d in report["divergences"] if all(d[k] == compared[k] for k in ("dtype", "baseline"))
    ]


def number(value: float | None, digits: int = 2) -> str:
    """A number with `digits` decimals; whole ones as they are; None as an em dash."""
    if value is None:
        return "—"
    return f"{value:,d}" if isinstance(value, int) else f"{value:,.{digits}f}"


def short(value: float) -> str:
    """A number as short as it can be: 4, 3.25."""
    return f"{value:.4g}"


def times_as(value: float | None) -> str:
    """A ratio, as in 1.62 times."""
    return "—" if value is None else f"{value:.2f}{TIMES}"


def share(value: float | None) -> str:
    """A share of one, as 81.5%."""
    return "—" if value is None else f"{100 * value:.1f}%"


def duration(seconds: float | None) -> str:
    """Seconds, in ms with three significant digits."""
    if seconds is None:
        return "—"
    ms = 1e3 * seconds
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def bracket(interval: Sequence[float] | None, digits: int = 2) -> str:
    """[low, high], or nothing."""
    return "" if interval is None else f"[{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def sequence(values: Sequence[float]) -> str:
    """Numbers in a row."""
    return "  ".join(number(value) for value in values) or "—"


def _figure(name: str, key: str, value: str, interval: Sequence[float] | None = None) -> Figure:
    digits = 3 if key in ("alpha", "task", "agreement") else 2
    return Figure(name, value, bracket(interval, digits), FORMULAS[key])
