"""Plain and speculative decoding in turns, in one process: what a drafter is worth.

    python -m draftsmith evaluate target=TARGET drafter=DRAFTER prompts=prompts.jsonl temperature=1

Speed is measured in `dtype` (bf16), with plain decoding and every drafter taking turns on each
group of prompts, in an order that rotates, after a warm-up. Identity is proven in fp32 on the same
prompts. Alpha is taken where the target's own fp32 answers lead. Several drafters
(`drafter=a,b,ngram`) share the plain runs, and each writes its own folder.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from draftsmith.decode import metrics
from draftsmith.decode.drafters.lm import LMDrafter, weights_read
from draftsmith.decode.exactness import Divergence, as_rows, divergences, verdict
from draftsmith.decode.measure import (
    TeacherForced,
    forward_call,
    median_times,
    prefill_call,
    teacher_forced,
)
from draftsmith.decode.prompts import Prompt, load_prompts
from draftsmith.decode.request import Completion
from draftsmith.decode.turns import Evaluation, Loaded, Turns, load, prove, take_turns
from draftsmith.decode.verify import RULES
from draftsmith.models.provenance import git_commit, versions
from draftsmith.models.tokenizer import vocab_size


def evaluate(settings: Evaluation, drafters: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The report of each drafter, by its name in `drafters` (name -> folder or "ngram").

    ValueError for whatever does not load or fit; see `load_target`, `open_drafter`, `load_prompts`.
    """
    started = time.perf_counter()
    if settings.max_new_tokens < 2:
        raise ValueError(
            f"max_new_tokens: got {settings.max_new_tokens}, expected at least 2; the first token "
            "of an answer comes with the prefill, which is not measured"
        )
    if settings.threads:
        torch.set_num_threads(settings.threads)
    fast = load(settings, drafters, settings.dtype)
    exact = load(settings, drafters, "float32") if settings.dtype != "float32" else fast
    prompts = load_prompts(
        settings.prompts,
        fast.tokenizer,
        limit=settings.limit,
        prompt_tokens=settings.prompt_tokens,
        split=settings.split,
    )
    with Progress(transient=True) as progress:
        groups = -(-len(prompts) // settings.batch) * (1 + len(drafters))
        bar = progress.add_task(f"decoding in turns ({settings.dtype})", total=groups)
        turns = take_turns(settings, fast, prompts, lambda: progress.advance(bar))
        if not sum(turns[None].tokens):
            raise ValueError(
                "every answer ended with its first token: nothing to measure; look at the prompts, "
                "or say ignore_eos=true"
            )
        arms = 1 + (len(drafters) if settings.identity else 0)
        bar = progress.add_task("the same in float32", total=arms)
        proofs = prove(settings, exact, prompts, lambda: progress.advance(bar))
    reports = {}
    for name in drafters:
        report = settings_part(settings, name, drafters[name], fast, prompts)
        report |= speed_part(settings, fast, name, turns)
        report |= acceptance_part(settings, exact, name, proofs[None].completions)
        report |= exactness_part(settings, exact, name, proofs, turns)
        report["categories"] = categories(prompts, turns[None], turns[name], settings.batch)
        report["example"] = example(fast.tokenizer, prompts, turns[name])
        report["rules"] = tau_by_rule(settings, fast, name, prompts, report["tau"])
        report["seconds"] = time.perf_counter() - started
        reports[name] = report
    return reports


def settings_part(
    settings: Evaluation, name: str, path: str, pair: Loaded, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    drafter = pair.drafters[name]
    return {
        "schema": 1,
        "target": settings.target,
        "drafter": {"kind": drafter.kind, "path": path},
        "rule": settings.rule,
        "lossless": True,  # of every rule in RULES; lossy masks are not offered here
        "device": settings.device,
        "dtype": settings.dtype,
        "threads": torch.get_num_threads(),
        "batch": settings.batch,
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "seed": settings.seed,
        "policy": "fixed",
        "tree": "chain",
        "max_new_tokens": settings.max_new_tokens,
        "n_prompts": len(prompts),
        "prompts": f"{settings.prompts} ({settings.split})",
        "versions": versions(),
        "commit": git_commit(),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
    }


def speed_part(
    settings: Evaluation, pair: Loaded, name: str, turns: dict[str | None, Turns]
) -> dict[str, Any]:
    """Counts and clocks of the turns, and the isolated forwards that say what would be ideal."""
    plain, spec = turns[None], turns[name]
    counters = [c.counters for c in spec.completions]
    rounds = max(1, sum(c.rounds for c in counters))
    K = sum(c.drafted for c in counters) / rounds
    tau = metrics.block_efficiency(counters)
    speedups = speedup_of(plain, spec)
    context = int(sum(len(c.prompt_tokens) + len(c.tokens) / 2 for c in spec.completions))
    context //= len(spec.completions)
    times = isolated_times(settings, pair, name, context, plain.completions)
    ideal = tau * times["plain"] / (times["verify"] + K * times["draft"])
    drafter = pair.drafters[name]
    c_bytes = drafter.parameter_bytes / weights_read(pair.target)
    by_position, conditional = metrics.acceptance_by_position(counters)
    return {
        "K": K,
        "context": context,
        "tau": tau,
        "tau_interval": metrics.ratio_interval(
            [c.emitted for c in counters], [c.rounds for c in counters]
        ),
        "draft_acceptance_rate": metrics.draft_acceptance_rate(counters),
        "acceptance_by_position": by_position,
        "acceptance_conditional": conditional,
        "accepted_histogram": metrics.histogram(counters),
        "tokens_per_s": {
            "plain": sum(plain.tokens) / sum(plain.seconds),
            "speculative": sum(spec.tokens) / sum(spec.seconds),
        },
        "times": times,
        **speedups,
        "ideal_speedup": ideal,
        "efficiency": speedups["speedup"] / ideal,
        "c": times["draft"] / times["plain"],
        "mbsu": tau / (1 + K * c_bytes),
        "loop_rate": metrics.loop_rate(plain.completions),
        "per_prompt": per_prompt(plain, spec),
    }


def speedup_of(plain: Turns, spec: Turns) -> dict[str, Any]:
    """Sum of tokens over sum of time on both sides, and the Spec-Bench way beside it."""
    rows = list(zip(spec.tokens, spec.seconds, plain.tokens, plain.seconds, strict=True))

    def ratio(index: Any) -> float:
        a, b, c, d = (sum(rows[i][k] for i in index) for k in range(4))
        return (a / b) / (c / d) if b and c else float("nan")

    return {
        "speedup": ratio(range(len(rows))),
        "speedup_interval": metrics.bootstrap(ratio, len(rows)),
        "speedup_specbench": rate_specbench(spec) / rate_specbench(plain),
    }


def rate_specbench(turns: Turns) -> float:
    """The mean over questions of tokens per second, prefill and its token included."""
    each = [
        len(c.tokens) / (c.counters.prefill_seconds + c.counters.decode_seconds)
        for c in turns.completions
    ]
    return sum(each) / len(each)


def isolated_times(
    settings: Evaluation, pair: Loaded, name: str, context: int, plain: list[Completion]
) -> dict[str, float]:
    """Median seconds of the forwards a round is made of, at the run's mean context and batch."""
    runner = pair.decoder(settings, None).runner
    drafter = pair.drafters[name]
    at = {"batch": settings.batch, "context": context}
    mean_prompt = sum(len(c.prompt_tokens) for c in plain) // len(plain)
    calls = {
        "plain": forward_call(runner, length=1, **at),
        "verify": forward_call(runner, length=settings.K + 1, **at),
        "prefill": prefill_call(runner, batch=settings.batch, length=mean_prompt),
    }
    if isinstance(drafter, LMDrafter):
        calls["draft"] = forward_call(drafter.runner, length=1, **at)
        calls["extend"] = forward_call(drafter.runner, length=2, **at)
    # A drafter without a model makes no forward.
    return {"draft": 0.0, "extend": 0.0} | median_times(calls, runner.device)


def per_prompt(plain: Turns, spec: Turns) -> list[dict[str, Any]]:
    """What paired comparisons between reports are made of."""
    return [
        {"prompt": c.index, "emitted": c.counters.emitted, "rounds": c.counters.rounds}
        | {"accepted": c.counters.emitted - c.counters.rounds, "plain_tokens": len(p.tokens)}
        for p, c in zip(plain.completions, spec.completions, strict=True)
    ]


def acceptance_part(
    settings: Evaluation, pair: Loaded, name: str, plain: list[Completion]
) -> dict[str, Any]:
    """alpha and coupled acceptance, teacher-forced on the target's answers; None without a q."""
    drafter = pair.drafters[name]
    if not isinstance(drafter, LMDrafter):
        return {"alpha": None, "alpha_interval": None, "coupled_acceptance": None}
    runner = pair.decoder(settings, None).runner
    rows: list[TeacherForced] = teacher_forced(runner, drafter, plain, settings.params)
    positions = [row.positions for row in rows]
    return {
        "alpha": sum(row.alpha for row in rows) / sum(positions),
        "alpha_interval": metrics.ratio_interval([row.alpha for row in rows], positions),
        "coupled_acceptance": sum(row.coupled for row in rows) / sum(positions),
        "alpha_by_prompt": [[row.alpha, row.positions] for row in rows],
    }


def exactness_part(
    settings: Evaluation,
    exact: Loaded,
    name: str,
    proofs: dict[str | None, Turns],
    turns: dict[str | None, Turns],
) -> dict[str, Any]:
    """The fp32 verdict, and where the answers in the speed dtype part ways with plain decoding."""
    params = settings.params
    if not (RULES[settings.rule].identical or params.greedy):
        return {"identical": None, "divergences": []}
    common = {"vocab_size": vocab_size(exact.tokenizer)}
    found: list[Divergence] = []
    identical = None
    if settings.identity:
        want, got = proofs[None].completions, proofs[name].completions
        found = divergences(want, got, exact.target, params, dtype="float32", **common)
        identical = verdict(found, len(want), dtype="float32", baseline="native")
    if settings.dtype != "float32":
        found = found + divergences(
            turns[None].completions,
            turns[name].completions,
            exact.target,
            params,
            dtype=settings.dtype,
            **common,
        )
    return {"identical": identical, "divergences": as_rows(found)}


def tau_by_rule(
    settings: Evaluation, pair: Loaded, name: str, prompts: Sequence[Prompt], tau: float
) -> dict[str, float] | None:
    """tau of the same chain under every rule that fits: coupled and block differ above temperature
    0.
    """
    if settings.params.greedy or not isinstance(pair.drafters[name], LMDrafter):
        return None
    taus = {settings.rule: tau}
    for rule in sorted(set(RULES) - {settings.rule}):
        decoder = pair.decoder(settings, name, rule=rule, batch_size=max(8, settings.batch))
        done = decoder.generate([p.tokens for p in prompts], settings.params)
        taus[rule] = metrics.block_efficiency([c.counters for c in done])
    return taus


def categories(
    prompts: Sequence[Prompt], plain: Turns, spec: Turns, batch: int
) -> dict[str, dict[str, Any]]:
    """tau, speed-up and count by category; the speed-up only where prompts ran one at a time."""
    found: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        found.setdefault(prompt.category, []).append(i)
    table = {}
    for category, members in found.items():
        tau = metrics.block_efficiency([spec.completions[i].counters for i in members])
        speedup = None
        if batch == 1:
            tokens, seconds = (sum(x[i] for i in members) for x in (spec.tokens, spec.seconds))
            base, base_s = (sum(x[i] for i in members) for x in (plain.tokens, plain.seconds))
            speedup = (tokens / seconds) / (base / base_s) if tokens and base else None
        table[category] = {
            "tau": tau if tau == tau else None,  # nan: every answer ended with its first token
            "speedup": speedup,
            "n_prompts": len(members),
        }
    return table


def example(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], spec: Turns
) -> dict[str, Any]:
    """The first answer, token by token: whether each came from the draft."""
    first = spec.completions[0]
    pieces = [
        [tokenizer.decode([token]), drafted]
        for token, drafted in zip(first.tokens, first.accepted, strict=True)
    ]
    return {"prompt": tokenizer.decode(prompts[0].tokens), "pieces": pieces}
