"""The figures of a report in words: their names, formulas, printed values, and the verdict.

The terminal and the HTML page both read them from here, so that a number never stands without the
formula it was made by.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from draftsmith.decode.report.printed import bracket, duration, number, share, short, times_as
from draftsmith.decode.report.schema import Report, differences_of
from draftsmith.decode.verify.rules import RULES

# key: name = formula. p is the target's law, q the draft's, both after temperature, top-k, top-p.
_MADE = """\
tau: tau, block efficiency = tokens emitted / target calls, the bonus token included; 1 = plain
    decoding; prefill and its token outside
alpha: alpha, acceptance = E over target-written contexts of sum_v min(p, q), of heads at depth 1;
    at temperature 0 the share of equal argmaxes
coupled_acceptance: coupled acceptance = share of target-written contexts at which p and q pick the
    same token with the request's shared noise
task: exact match = answers whose number after ####, else whose last number, is the known one /
    prompts with a known answer
agreement: agreement with plain = tokens before an answer's first difference from the plain one /
    tokens of the longer of the two
draft_acceptance_rate: draft acceptance rate = accepted / drafted (trees: / depth); what follows a
    rejection counts as rejected
token_efficiency: token efficiency = accepted / (N - 1): of the drafted tokens verified, the share
    kept
acceptance_by_position: acceptance by position = rounds that accepted position i / rounds that
    drafted it
acceptance_conditional: acceptance, conditional = rounds that accepted position i / that drafted it
    and accepted all before it
accepted_histogram: rounds by accepted = rounds by the number of drafted tokens they kept
K: K = draft calls a round (trees: depth; policies: the mean)
N: N = tokens verified a round, the pending one included: the mean
tokens_per_s: tokens/s = sum of tokens / sum of decode seconds; prefill excluded, nothing after EOS
speedup: speed-up = tokens/s speculative / tokens/s plain; prefill excluded, nothing after EOS
speedup_specbench: speed-up, Spec-Bench way = mean over prompts of speculative tokens/s / the same
    of plain decoding; prefill included; at batch 1 only
ideal_speedup: ideal speed-up = tau * t_plain / (t_verify + K * t_draft + t_extend)
efficiency: efficiency = speed-up / ideal speed-up
c: c = t_draft / t_plain
mbsu: MBSU = tau / (1 + K * c_bytes), c_bytes = bytes of the draft / bytes of the target
t_plain: t_plain = target forward of 1 token, isolated: median of 50 at the run's batch and context
t_verify: t_verify = target forward of N tokens, isolated: median of 50
t_draft: t_draft = a round's draft forwards / their number, isolated: median of 50; without a model,
    a proposal / its K
t_extend: t_extend = a head's forward over the tokens that a round kept, isolated; draft models take
    them in by drafting
t_prefill: t_prefill = target forward of a prompt, isolated: median
loop_rate: loop rate = 8-grams of an answer that the same answer had before / all its 8-grams
rules: tau by rule = tau with each acceptance rule on the same prompts
identical: same output = answers equal, token by token, to those of plain decoding / all answers
interval: [low, high] = 95% bootstrap interval over prompts; of a speed-up over batches, where
    prompts were batched"""
_ENTRIES = dict(line.split(": ", 1) for line in _MADE.replace("\n    ", " ").splitlines())
NAMES = {key: words.partition(" = ")[0] for key, words in _ENTRIES.items()}
FORMULAS = {key: words.partition(" = ")[2] for key, words in _ENTRIES.items()}


def sequence(values: Sequence[float]) -> str:
    """Numbers in a row."""
    return "  ".join(map(number, values)) or number(None)


tenths, thousandths = partial(number, digits=1), partial(number, digits=3)
_PRINTED: tuple[tuple[Callable[[Any], str], str], ...] = (
    (number, "tau"),
    (thousandths, "alpha coupled_acceptance draft_acceptance_rate token_efficiency"),
    (sequence, "acceptance_by_position acceptance_conditional accepted_histogram"),
    (short, "K N"),
    (tenths, "tokens_per_s.plain tokens_per_s.speculative"),
    (times_as, "speedup speedup_specbench ideal_speedup"),
    (share, "efficiency"),
    (times_as, "mbsu"),
    (thousandths, "c"),
    (duration, "times.plain times.verify times.draft times.extend times.prefill"),
    (share, "loop_rate"),
)
# Where in the report, in reading order -> how it is printed.
SHOWN = {place: words for words, places in _PRINTED for place in places.split()}
CATEGORY_COLUMNS = ("category", "prompts", "tau", "speed-up", "speed-up, Spec-Bench way")
DIFFERENCE_COLUMNS = (
    *("prompt", "answer token", "dtype", "baseline", "fp32 margin", "near-tie in fp32"),
)


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
    words, (key, _, part) = SHOWN[place], place.partition(".")
    key = f"t_{part}" if key == "times" else key
    name = f"{NAMES[key]}, {part}" if key == "tokens_per_s" else NAMES[key]
    interval = getattr(report, f"{place}_interval", None)
    between = bracket(interval, 3 if words is thousandths else 2)
    return Figure(name, words(attrgetter(place)(report)), between, FORMULAS[key])


def figures(report: Report) -> list[Figure]:
    """Every figure of a report, in reading order; absent ones as an em dash."""
    tau, *others = (figure(report, place) for place in SHOWN)
    if report.rules:
        taus = " · ".join(f"{rule} {number(tau)}" for rule, tau in report.rules.items())
        others.append(Figure(NAMES["rules"], taus, "", FORMULAS["rules"]))
    return [tau, *quality(report), *others]


def quality(report: Report) -> list[Figure]:
    """What the answers are worth, where that is known or may differ from the target's own."""
    task, same = report.task, report.agreement
    found: list[tuple[str, str, str, str]] = []
    if task:
        plain = f"(plain {share(task.plain)}, n = {task.n})"
        between = bracket(task.difference_interval, 3)
        found.append(("task", f", {task.name}", share(task.speculative), plain))
        found.append(("task", ", minus plain's", f"{task.difference:+.3f}", between))
    elif not report.lossless:
        found.append(("task", "", "no known answers", ""))
    if same:
        found.append(("agreement", "", thousandths(same.share), bracket(same.interval, 3)))
    return [
        Figure(NAMES[key] + which, value, aside, FORMULAS[key])
        for key, which, value, aside in found
    ]


def left_out(report: Report) -> str:
    """A sentence about prompts and turns that were skipped; empty where none was."""
    skipped = report.skipped
    parts = [f"{skipped.prompts} of {skipped.of} prompts"] * bool(skipped.prompts)
    parts += [f"{skipped.turns} later turns of those decoded"] * bool(skipped.turns)
    if not parts:
        return ""
    return (
        f"Skipped: {' and '.join(parts)}, which with {report.max_new_tokens} new tokens exceed "
        f"the context of {skipped.context}."
    )


def verdict(report: Report) -> IdentityVerdict:
    """What the run proved about its output, in two lines."""
    level, headline, detail = _verdict(report)
    if shapes := report.identical_same_shape:
        detail += (
            f" In {shapes.dtype}, {shapes.same} of {shapes.total} answers equal those of plain "
            "decoding through the drafter's rounds, where rounding still depends on the other rows "
            "and on a tree's slots: no proof, unlike fp32."
        )
    return IdentityVerdict(level, headline, detail)


def _verdict(report: Report) -> tuple[str, str, str]:
    rule, identical = report.rule, report.identical
    if not report.lossless:
        words = "By choice, tokens are kept that the target would not have emitted."
        return "note", f"LOSSY: {report.lossy}", words
    if identical is None and (report.temperature == 0 or RULES[rule].identical):
        words = f"The rule {rule!r} promises the target's own tokens; nobody checked here."
        return "note", "Not compared", words
    if identical is None:
        words = (
            f"The rule {rule!r} keeps the target's distribution exactly, but draws a sample of its "
            "own, so there is no plain answer to compare with token by token."
        )
        return "good", "Lossless in law", words
    same, total = identical.same, identical.total
    against = f"In {identical.dtype}, {same} of {total} answers equal those of "
    against += f"{identical.baseline} plain decoding"
    if same == total:
        return "good", "Lossless: token for token", f"{against}."
    worst = f"largest margin {identical.worst_margin:.1e}"
    excused = sum(one.near_tie for one in differences_of(report, identical))
    if same + excused >= total:
        words = f"{against}; each of the other {total - same} parts at a near-tie (fp32 top-2 "
        words += f"margin below 1e-4, fp64 agrees; {worst}). Each is listed."
        return "near", "Lossless up to rounding", words
    words = f"{against}; {total - same - excused} of the others part where there is no near-tie "
    return "bad", "Not the target's output", f"{words}({worst}). That is a bug, not rounding."


def category_tables(report: Report) -> dict[str, list[tuple[str, ...]]]:
    """The tables by category that have rows, by their titles, in CATEGORY_COLUMNS."""
    tables = {
        "By category": report.categories,
        "By category, as Spec-Bench groups them": report.specbench,
    }
    found: dict[str, list[tuple[str, ...]]] = {}
    for title, table in tables.items():
        for name, row in table.items():
            speeds = map(times_as, (row.speedup, row.speedup_specbench))
            cells = (name, number(row.n_prompts), number(row.tau), *speeds)
            found.setdefault(title, []).append(cells)
    return found


def difference_rows(report: Report) -> list[tuple[str, ...]]:
    """The listed differences in words, in DIFFERENCE_COLUMNS."""
    rows: list[tuple[str, ...]] = []
    for one in report.divergences:
        place = str(one.prompt), str(one.position), one.dtype, one.baseline
        rows.append((*place, f"{one.margin:.2e}", "yes" if one.near_tie else "no"))
    return rows
