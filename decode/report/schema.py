"""What a `report.json` holds: one named tuple, whose fields' types say which values are sound.

A report is one evaluation of one drafter on one target. Keys are stable; more may be added.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, NewType, get_args, get_origin, get_type_hints

Share = NewType("Share", float)
Count = NewType("Count", int)
Interval = NewType("Interval", list[float])
ROUNDING = 1e-6  # a share is a quotient of fp32 sums


class NamedDrafter(NamedTuple):
    kind: str
    path: str | None


class SkippedPrompts(NamedTuple):
    prompts: Count
    of: Count
    context: Count
    turns: Count


class DecodeSpeeds(NamedTuple):
    plain: float
    speculative: float


class ForwardTimes(NamedTuple):
    plain: float
    verify: float
    draft: float | None
    extend: float | None
    prefill: float | None


class TaskScore(NamedTuple):
    name: str
    n: Count
    plain: Share
    speculative: Share
    difference: float
    difference_interval: Interval


class PlainAgreement(NamedTuple):
    share: Share
    interval: Interval


class EqualAnswers(NamedTuple):
    dtype: str
    baseline: str
    same: Count
    total: Count
    worst_margin: float | None


class AnswerDifference(NamedTuple):
    """The first token at which two answers to one prompt differ. margin: of the best score over the
    second best there, in fp32; near_tie: it is below 1e-4, and in fp64 between the same two tokens;
    baseline: the plain decoding it was compared with.
    """

    prompt: Count
    position: Count
    dtype: str
    margin: float
    near_tie: bool
    baseline: str


class CategoryRow(NamedTuple):
    tau: float | None
    speedup: float | None
    speedup_specbench: float | None
    n_prompts: Count


class Report(NamedTuple):
    schema: Literal[1]
    target: str
    drafter: NamedDrafter
    rule: str
    lossless: bool
    lossy: str
    device: str
    dtype: str
    threads: Count
    batch: Count
    temperature: float
    top_k: Count
    top_p: Share
    min_p: Share
    stop: list[str]
    seed: Count
    policy: Any
    tree: Any
    K: float
    N: float
    max_new_tokens: Count
    context: float
    n_prompts: Count
    skipped: SkippedPrompts
    tau: float
    tau_interval: Interval
    alpha: Share | None
    alpha_interval: Interval | None
    coupled_acceptance: Share | None
    draft_acceptance_rate: Share | None
    token_efficiency: Share | None
    acceptance_by_position: list[Share]
    acceptance_conditional: list[Share]
    accepted_histogram: list[Count]
    tokens_per_s: DecodeSpeeds
    times: ForwardTimes
    speedup: float
    speedup_interval: Interval | None  # null: fewer than two batches were timed
    speedup_specbench: float | None
    ideal_speedup: float | None
    efficiency: float | None
    c: float | None
    mbsu: float | None
    loop_rate: Share
    task: TaskScore | None
    agreement: PlainAgreement | None
    identical: EqualAnswers | None
    identical_same_shape: EqualAnswers | None
    divergences: list[AnswerDifference]
    categories: dict[str, CategoryRow]
    specbench: dict[str, CategoryRow]
    versions: dict[str, Any]
    commit: str | None
    command: str
    # Shown by the page where a report has them.
    prompts: str | None = None
    attention: str | None = None
    example: dict[str, Any] | None = None  # prompt, pieces of [text, from the draft?]
    rules: dict[str, float] | None = None
    advice: dict[str, Any] | None = None  # depths, best, foretold, measured, says
    seconds: float | None = None  # of the whole evaluation


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_interval(value: Any) -> bool:
    pair = isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
    return pair and value[0] <= value[1]


LEAVES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    Any: ("anything", lambda value: True),
    Literal[1]: ("the number 1", lambda value: value == 1),
    str: ("a text", lambda value: isinstance(value, str)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    float: ("a finite number", _is_number),
    Share: ("a number from 0 to 1", lambda v: _is_number(v) and 0 <= v <= 1 + ROUNDING),
    Count: ("a whole number from 0", lambda v: type(v) is int and v >= 0),
    Interval: ("[low, high] with low <= high", _is_interval),
}


def as_report(values: dict[str, Any]) -> Report:
    """The report that a sound dict is; keys beyond the schema are left out."""
    problems = schema_problems(values)
    assert not problems, "not a report:\n" + "\n".join(problems)
    return _read(Report, values, "", problems)


def schema_problems(values: dict[str, Any]) -> list[str]:
    """A line for each key that is missing, of a wrong type, or at odds with another; else none."""
    problems: list[str] = []
    report = _read(Report, values, "", problems)
    return problems or list(_contradictions(report))


def _read(kind: Any, value: Any, place: str, problems: list[str]) -> Any:
    """`value` as its type has it; for what isn't sound there is a line in `problems`."""
    words, inside = _words(kind), get_args(kind)
    if type(None) in inside:
        if value is None:
            return None
        kind, inside = inside[0], get_args(inside[0])
    if hasattr(kind, "_fields") and isinstance(value, dict):
        found = {}
        for name, hint in get_type_hints(kind).items():
            key = f"{place}.{name}".lstrip(".")
            if name in value:
                found[name] = _read(hint, value[name], key, problems)
            elif name not in kind._field_defaults:
                problems.append(f"{key}: missing, expected {_words(hint)}")
        return None if problems else kind(**found)
    if get_origin(kind) is dict and isinstance(value, dict):
        return {k: _read(inside[1], v, f"{place}.{k}", problems) for k, v in value.items()}
    if get_origin(kind) is list and isinstance(value, list):
        return [_read(inside[0], v, f"{place}[{i}]", problems) for i, v in enumerate(value)]
    if kind not in LEAVES or not LEAVES[kind][1](value):
        problems.append(f"{place}: got {value!r:.60}, expected {words}")
    return value


def _words(kind: Any) -> str:
    if type(None) in get_args(kind):
        return f"{_words(get_args(kind)[0])}, or null"
    other = "a list" if get_origin(kind) is list else "an object"
    return LEAVES[kind][0] if kind in LEAVES else other


def _contradictions(report: Report) -> Iterator[str]:
    levels, conditional = len(report.acceptance_by_position), len(report.acceptance_conditional)
    rounds = len(report.accepted_histogram)
    if conditional != levels or rounds not in (0, levels + 1):
        yield (
            f"acceptance_by_position, acceptance_conditional, accepted_histogram: got {levels}, "
            f"{conditional} and {rounds} values, expected D, D and D + 1"
        )
    if (report.alpha is None) != (report.alpha_interval is None):
        both = f"{report.alpha}, but alpha_interval {report.alpha_interval}"
        yield f"alpha: got {both}; expected both or neither"
    if report.lossless == bool(report.lossy):
        yield f"lossless: got {report.lossless} with lossy = {report.lossy!r}"
    if not (report.lossless or report.task or report.agreement):
        yield "a lossy run: got neither task nor agreement; expected one of them beside tau"
    counted = sum(category.n_prompts for category in report.categories.values())
    if report.categories and counted != report.n_prompts:
        yield f"categories: got {counted} prompts in them, expected n_prompts = {report.n_prompts}"
    for key in ("identical", "identical_same_shape"):
        if compared := getattr(report, key):
            differ = compared.total - compared.same
            listed = len(differences_of(report, compared))
            if differ < 0:
                yield f"{key}: got {compared.same} same of {compared.total}"
            if differ > listed:
                missing = f"{differ} answers differ in {compared.dtype}, but {listed} are listed in"
                yield f"{key}: {missing} divergences; expected each one"


def differences_of(report: Report, compared: EqualAnswers) -> list[AnswerDifference]:
    """The listed differences behind one of the report's comparisons."""
    kind = compared.dtype, compared.baseline
    return [one for one in report.divergences if (one.dtype, one.baseline) == kind]
