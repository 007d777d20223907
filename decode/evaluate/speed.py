"""Speed, of all prompts and by category: the sum of tokens over the sum of time, and beside it the
Spec-Bench way (Xia et al., arXiv 2401.07851): the mean over questions of tokens a second, prefill
included, with MT-bench's eight categories as one.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from draftsmith.decode.draft_lms.lm import weights_read
from draftsmith.decode.evaluate import metrics
from draftsmith.decode.evaluate.arms import Arm, Arms, Evaluation, Loaded
from draftsmith.decode.policies.timing import isolated_times
from draftsmith.decode.prompts.prompts import Prompt

MT_BENCH = (
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
)
SPEC_BENCH = (*MT_BENCH, "translation", "summarization", "qa", "math_reasoning", "rag")


def speed_part(settings: Evaluation, pair: Loaded, name: str, timed: Arms) -> dict[str, Any]:
    """Counts and clocks of the arms, and the isolated forwards that say what would be ideal."""
    plain, spec = timed[None], timed[name]
    counters = spec.counters
    one = metrics.total(counters)
    K, nodes = (count / max(1, one.rounds) for count in (one.drafted, one.nodes))
    found = taus(spec)
    tau = found["tau"]
    speeds = speedups(plain, spec, settings.batch_size)
    answers = spec.completions
    asked = sum(len(c.prompt_tokens) for c in answers)
    context = int((asked + sum(len(c.tokens) for c in answers) / 2) / len(answers))
    drafter = pair.drafters[name]
    times = isolated_times(
        pair.decoder(settings, None).runner,
        drafter,
        pair.decoding[name].plan,
        batch=settings.batch_size,
        context=context,
        prompt=asked // len(answers),
        nodes=1 + round(nodes),
    )
    # A round that drafts nothing takes nothing in.
    drafted = one.reached[0] / max(1, one.rounds) if one.reached else 0.0
    drafting = K * times["draft"] + drafted * (times["extend"] or 0.0)
    ideal = tau * times["plain"] / (times["verify"] + drafting)
    c_bytes = drafter.parameter_bytes / weights_read(pair.target)
    by_position, conditional = metrics.acceptance_by_position(counters)
    acceptance_rate, efficiency = metrics.kept_shares(counters)
    return {
        "K": K,
        "N": 1 + nodes,
        "context": context,
        **found,
        "draft_acceptance_rate": acceptance_rate,
        "token_efficiency": efficiency,
        "acceptance_by_position": by_position,
        "acceptance_conditional": conditional,
        "accepted_histogram": one.histogram,
        "tokens_per_s": {
            "plain": sum(plain.tokens) / sum(plain.seconds),
            "speculative": sum(spec.tokens) / sum(spec.seconds),
        },
        "times": times,
        **speeds,
        "ideal_speedup": ideal,
        "efficiency": speeds["speedup"] / ideal,
        "c": times["draft"] / times["plain"],
        "mbsu": tau / (1 + K * c_bytes),
        "loop_rate": metrics.loop_rate(plain.completions),
        "per_prompt": per_prompt(plain, spec),
    }


def in_every_round(plain: Arm, fixed: Arm, K: int, batch: int) -> dict[str, Any]:
    """What a drafter gives that drafts so deep in every round, beside one whose policy rests."""
    both, rate = speedups(plain, fixed, batch), sum(fixed.tokens) / sum(fixed.seconds)
    found = {"K": K, **taus(fixed), "tokens_per_s": rate}
    return found | {name: both[name] for name in ("speedup", "speedup_interval")}


def taus(arm: Arm) -> dict[str, Any]:
    """tau of an arm, and its interval over prompts."""
    emitted, rounds = ([getattr(c, name) for c in arm.counters] for name in ("emitted", "rounds"))
    interval = metrics.ratio_interval(emitted, rounds)
    return {"tau": metrics.block_efficiency(arm.counters), "tau_interval": interval}


def per_prompt(plain: Arm, spec: Arm) -> list[dict[str, Any]]:
    """What paired comparisons between reports are made of, over all turns of a prompt."""
    answers = zip(plain.questions, spec.counters, strict=True)
    return [
        {"prompt": i, "emitted": c.emitted, "rounds": c.rounds}
        | {"accepted": c.emitted - c.rounds, "plain_tokens": sum(len(p.tokens) for p in turns)}
        for i, (turns, c) in enumerate(answers)
    ]


def speedups(plain: Arm, spec: Arm, batch: int) -> dict[str, Any]:
    """The report's `speedup`; its interval over prompts, or over batches of them, None where fewer
    than two were timed; and `speedup_specbench`, None where prompts shared a batch.
    """
    every, interval = np.arange(len(spec.tokens)), None
    if sum(seconds > 0 for seconds in spec.seconds) > 1:
        interval = metrics.bootstrap(lambda i: speedup(plain, spec, i), len(every))
    return {
        "speedup": speedup(plain, spec, every),
        "speedup_interval": interval,
        "speedup_specbench": rates_ratio(plain, spec, every) if batch == 1 else None,
    }


def speedup(plain: Arm, spec: Arm, groups: np.ndarray) -> float:
    """Of some of the groups that shared a batch; nan where one side emitted nothing."""
    columns = (spec.tokens, spec.seconds, plain.tokens, plain.seconds)
    a, b, c, d = (np.asarray(x)[groups].sum() for x in columns)
    return float((a / b) / (c / d)) if b and c else float("nan")


def paired(plain: Arm, spec: Arm, other: Arm) -> dict[str, Any]:
    """How much more tau and speed-up one drafter has than another on the same prompts, or batches
    of them, with the intervals of these differences.
    """
    counted = [
        ([c.emitted for c in arm.counters], [c.rounds for c in arm.counters])
        for arm in (spec, other)
    ]
    tau, tau_interval = metrics.paired_difference(*counted)
    every, interval = np.arange(len(spec.tokens)), None

    def difference(i: np.ndarray) -> float:
        return speedup(plain, spec, i) - speedup(plain, other, i)

    if len(every) > 1:
        interval = metrics.bootstrap(difference, len(every))
    found = {"tau": tau, "tau_interval": tau_interval, "speedup": difference(every)}
    return found | {"speedup_interval": interval}


def rates_ratio(plain: Arm, spec: Arm, questions: np.ndarray) -> float:
    """The ratio of the two mean rates over some questions."""
    return float(rates(spec)[questions].mean() / rates(plain)[questions].mean())


def rates(arm: Arm) -> np.ndarray:
    """Tokens a second of each question over its turns, prefill and its token included."""
    each = []
    for turns in arm.questions:
        seconds = sum(c.counters.prefill_seconds + c.counters.decode_seconds for c in turns)
        each.append(sum(len(c.tokens) for c in turns) / seconds)
    return np.array(each)


def by_category(
    prompts: Sequence[Prompt], plain: Arm, spec: Arm, batch: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """The report's `categories`, in the order in which they come, and `specbench`, the rows of
    Spec-Bench's own table; empty for prompts of anything else. Speed only where prompts ran one at
    a time, null where every answer ended with its first token.
    """

    def row(names: Collection[str]) -> dict[str, Any]:
        members = np.array([i for i, one in enumerate(prompts) if one.category in names], int)
        tau = metrics.block_efficiency([counters[i] for i in members])
        ratio = speedup(plain, spec, members) if batch == 1 else math.nan
        return {
            "tau": None if math.isnan(tau) else tau,
            "speedup": None if math.isnan(ratio) else ratio,
            "speedup_specbench": None if math.isnan(ratio) else rates_ratio(plain, spec, members),
            "n_prompts": len(members),
        }

    counters, names = spec.counters, dict.fromkeys(prompt.category for prompt in prompts)
    groups: dict[str, Collection[str]] = {}
    if names.keys() <= set(SPEC_BENCH):
        groups = {"mt_bench": MT_BENCH} if names.keys() & set(MT_BENCH) else {}
        groups |= {name: (name,) for name in names if name not in MT_BENCH}
        groups["overall"] = SPEC_BENCH
    return {
        "categories": {name: row((name,)) for name in names},
        "specbench": {name: row(one) for name, one in groups.items()},
    }
