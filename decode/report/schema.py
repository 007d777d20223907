"""What a `report.json` holds: a model whose fields' types say which values are sound.

A report is one evaluation of one drafter on one target. Keys are stable; more may be added.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

PAYING = 0.98  # of the lower end of the interval of a speed-up that is advised
ROUNDING = 1e-6  # a share is a quotient of fp32 sums
Share = Annotated[float, Field(ge=0, le=1 + ROUNDING)]
Count = Annotated[int, Field(ge=0)]


def _in_order(interval: list[float]) -> list[float]:
    if interval != sorted(interval):
        raise ValueError("expected [low, high] with low <= high")
    return interval


Interval = Annotated[list[float], Field(min_length=2, max_length=2), AfterValidator(_in_order)]


def pays(speedup: float, interval: list[float] | None) -> bool:
    """Whether drafting is measured to be no slower than plain decoding: by the lower end of its
    interval, which one prompt or batch alone doesn't have.
    """
    return speedup > 1 and interval is not None and interval[0] >= PAYING


class ReportPart(BaseModel):
    """What all parts share: numbers are finite, nothing is converted, other keys are left out."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)


class NamedDrafter(ReportPart):
    kind: str
    path: str | None
    mark: str | None = None  # of its weights, where they are in a folder here


class SkippedPrompts(ReportPart):
    prompts: Count
    of: Count
    context: Count
    turns: Count


class DecodeSpeeds(ReportPart):
    plain: float
    speculative: float


class ForwardTimes(ReportPart):
    plain: float
    verify: float
    draft: float | None
    extend: float | None
    prefill: float | None


class TaskScore(ReportPart):
    name: str
    n: Count
    plain: Share
    speculative: Share
    difference: float
    difference_interval: Interval


class PlainAgreement(ReportPart):
    share: Share
    interval: Interval


class EqualAnswers(ReportPart):
    dtype: str
    baseline: str
    same: Count
    total: Count
    worst_margin: float | None


class AnswerDifference(ReportPart):
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


class CategoryRow(ReportPart):
    tau: float | None
    speedup: float | None
    speedup_specbench: float | None
    n_prompts: Count


class Report(ReportPart):
    version: Literal[1] = Field(alias="schema")
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
    # Shown where a report has them.
    machine: str | None = None
    target_mark: dict[str, Any] | None = None  # its fingerprint
    prompts: str | None = None
    attention: str | None = None
    repeats: int | None = None  # of which the fastest counts
    example: dict[str, Any] | None = None  # prompt, pieces of [text, from the draft?]
    rules: dict[str, float] | None = None
    drafting: dict[str, Any] | None = None  # beside a policy that rests: K in every round
    advice: dict[str, Any] | None = None  # depths, best, foretold, measured, pays, says
    seconds: float | None = None  # of the whole evaluation


REPORT_KEYS = [field.alias or name for name, field in Report.model_fields.items()]


def as_report(values: dict[str, Any]) -> Report:
    """The report that a sound dict is; keys beyond the schema are left out."""
    problems = schema_problems(values)
    assert not problems, "not a report:\n" + "\n".join(problems)
    return Report.model_validate(values)


def schema_problems(values: dict[str, Any]) -> list[str]:
    """A line for each key that is missing, of a wrong type, or at odds with another; else none."""
    try:
        return list(_contradictions(Report.model_validate(values)))
    except ValidationError as unsound:
        found = [(".".join(map(str, e["loc"])), e["input"], e["msg"]) for e in unsound.errors()]
        return [f"{place}: got {value!r:.60}: {message}" for place, value, message in found]


def _contradictions(report: Report) -> Iterator[str]:
    keys = ("acceptance_by_position", "acceptance_conditional", "accepted_histogram")
    levels, conditional, rounds = (len(getattr(report, key)) for key in keys)
    if conditional != levels or rounds not in (0, levels + 1):
        got = f"{levels}, {conditional} and {rounds} values"
        yield f"{', '.join(keys)}: got {got}, expected D, D and D + 1"
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
