"""Plain and speculative decoding in turns, in one process: what a drafter is worth.

    draftsmith evaluate target=TARGET drafter=DRAFTER prompts=prompts.jsonl temperature=1

Speed is measured in `dtype` (bf16), with plain decoding and every drafter taking turns on each
group of prompts, in an order that rotates, after a warm-up; the report of that is written first.
Identity is then proven in fp32 on as many of the same prompts as fit, by models that are loaded
once the others are gone. Alpha is taken where the target's own fp32 answers lead; with
`identity=false` nothing is loaded in fp32, and it is taken in `dtype`. Several drafters
(`drafter=a,b,ngram`) share the plain runs; each writes its own folder, and the last page compares.
"""

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.decode.engine.memory import size
from draftsmith.decode.engine.request import Completion
from draftsmith.decode.evaluate import metrics, speed
from draftsmith.decode.evaluate.advice import advise
from draftsmith.decode.evaluate.answers import (
    agreement,
    divergences,
    exact_match,
    known_answer,
    verdict,
)
from draftsmith.decode.evaluate.arms import (
    Arm,
    Arms,
    Evaluation,
    Loaded,
    load,
    prove,
    seconds,
    steady_arm,
    time_arms,
)
from draftsmith.decode.evaluate.teacher_forced import teacher_forced
from draftsmith.decode.forward.size import available
from draftsmith.decode.policies.choice import make_policy
from draftsmith.decode.prompts.prompts import Prompt, load_prompts, spread
from draftsmith.decode.report.schema import REPORT_KEYS, AnswerDifference
from draftsmith.models.disk.provenance import command_line, git_commit, machine, versions
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.scorers import weights_mark
from draftsmith.models.target import is_quantised
from draftsmith.models.tokenizer import vocab_size
from draftsmith.printed import bracket
from draftsmith.progress import LongWork

Values = dict[str, Any]  # of a report, or a part of it
NO_ALPHA = dict.fromkeys(("alpha", "alpha_interval", "coupled_acceptance"))
UNPROVEN: Values = {**NO_ALPHA, "identical": None, "identical_same_shape": None, "divergences": []}


def evaluate(
    settings: Evaluation,
    drafters: dict[str, str],
    early: Callable[[dict[str, Values]], object] | None = None,
) -> dict[str, Values]:
    """The report of each drafter, by its name in `drafters` (name -> folder or "ngram"). early: is
    given the reports of the speed phase, before anything is loaded in fp32. ValueError for whatever
    does not load or fit; see `load_target`, `open_drafter`, `load_prompts`.
    """
    started = time.perf_counter()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    pair = load(settings, drafters, settings.dtype)
    prompts, skipped = choose_prompts(settings, pair)
    turns = sum(max(1, len(prompt.turns)) for prompt in prompts)
    with LongWork(transient=True) as progress:
        arms = settings.repeats * (1 + len(drafters) + len(seconds(settings, pair)))
        bar = progress.add_task(f"decoding in turns ({settings.dtype})", total=arms * turns)
        timed = time_arms(settings, pair, prompts, lambda: progress.advance(bar))
        if not sum(timed[None].tokens):
            raise ValueError(
                "every answer ended with its first token: nothing to measure; look at the prompts, "
                "or say ignore_eos=true"
            )
        skipped["turns"] = turns - len(timed[None].completions)  # no room in the context
        reports = {}
        for name in drafters:
            report = speed_report(settings, pair, name, prompts, timed)
            report |= {"skipped": skipped, "advice": None, **UNPROVEN}
            if settings.advice:
                bar = progress.add_task("the advice", total=None, visible=False)
                tick = partial(progress.update, bar, advance=1, visible=True)
                report["advice"] = advise(settings, pair, name, prompts, timed, tick)
            report["seconds"] = time.perf_counter() - started
            reports[name] = report
            warn_of_few(name, report)
        if early is not None:
            early(reports)
        proofs, exact = timed, settings.identity and fits_in_float32(pair)
        if exact and settings.dtype != "float32":
            del pair  # before its like in fp32 is loaded: an 8B target in both would be 48 GB
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            pair = load(settings, drafters, "float32")
        if exact:
            arms = 1 + len(drafters) * settings.comparable
            bar = progress.add_task("the same in float32", total=arms * turns)
            proofs = prove(settings, pair, prompts, lambda: progress.advance(bar))
        for name, report in reports.items():
            report |= acceptance_part(settings, pair, name, proofs[None])
            report |= exactness_part(settings, pair, name, proofs if exact else {}, timed)
            report["seconds"] = time.perf_counter() - started
    return reports


def speed_report(
    settings: Evaluation, pair: Loaded, name: str, prompts: Sequence[Prompt], timed: Arms
) -> Values:
    """What the timed runs say of a drafter, beside the others of the same runs."""
    plain, spec, how = timed[None], timed[name], pair.decoding[name]
    report = settings_part(settings, len(prompts)) | {"tree": how.tree, "policy": how.policy}
    path = pair.folders[name]
    mark = weights_mark(path) if Path(path, "model.safetensors").is_file() else None
    report["drafter"] = {"kind": pair.drafters[name].kind, "path": path, "mark": mark}
    report["target_mark"] = fingerprint(pair.target, pair.tokenizer)
    report |= speed.speed_part(settings, pair, name, timed)
    report |= speed.by_category(prompts, plain, spec, settings.batch_size)
    # Tau never stands alone where the answers may differ from the target's own.
    report["task"] = exact_match(prompts, plain.questions, spec.questions)
    report["agreement"] = agreement(plain.questions, spec.questions) if settings.lossy else None
    fixed = steady_arm(pair, timed, name)
    report["rules"] = fixed and tau_by_rule(settings, pair.steady, name, plain, fixed)
    report["drafting"] = None
    if fixed is not None and fixed is not spec:
        levels = pair.steady.decoding[name].plan.levels
        report["drafting"] = speed.in_every_round(plain, fixed, levels, settings.batch_size)
    report["example"] = example(pair.tokenizer, spec.completions[0])
    # Of drafters that rest there is nothing to compare.
    alike = {one: steady_arm(pair, timed, one) or timed[one] for one in pair.drafters}
    own = alike.pop(name)
    report["over"] = {other: speed.paired(plain, own, arm) for other, arm in alike.items()}
    return report


def warn_of_few(name: str, report: Values) -> None:
    """A warning, with the interval that so few prompts give."""
    if report["n_prompts"] < metrics.FEW:
        between = bracket(report["speedup_interval"]) or "none at all"
        warnings.warn(
            f"{name}: {report['n_prompts']} prompts are few: the speed-up's 95% interval is "
            f"{between}; {metrics.FEW} or more narrow it",
            stacklevel=3,
        )


def fits_in_float32(pair: Loaded) -> bool:
    """Whether there is room for the pair's weights in fp32 in place of these; a warning if not."""
    weights = [weight for weight in pair.target.parameters() if not is_quantised(weight)]
    more, free = sum(4 * w.numel() - w.nbytes for w in weights), available(weights[0].device)
    if free is None or more <= free:
        return True
    warnings.warn(
        f"identity: not proven: the target's weights in float32 take {size(more)} more, and "
        f"{size(free)} are free; prove it on a larger machine",
        stacklevel=3,
    )
    return False


def choose_prompts(settings: Evaluation, pair: Loaded) -> tuple[list[Prompt], dict[str, int]]:
    """The prompts that every arm has room for, and the report's `skipped`; ValueError without any,
    or without a known answer where the task needs them.
    """
    every = load_prompts(
        settings.prompts,
        pair.tokenizer,
        limit=None,
        prompt_tokens=settings.prompt_tokens,
        split=settings.split,
        turns=settings.turns,
    )
    kept = [prompt for prompt in every if pair.fits(prompt.tokens, settings)]
    if not kept:
        shortest = min(len(prompt.tokens) for prompt in every)
        raise ValueError(
            f"prompts: the shortest of {len(every)} has {shortest} tokens, which with "
            f"max_new_tokens={settings.max_new_tokens} exceeds the context of {pair.context}; "
            "expected less: lower max_new_tokens, or give shorter prompts"
        )
    prompts = spread(kept, settings.limit)
    if settings.task and not any(known_answer(prompt) is not None for prompt in prompts):
        raise ValueError(
            f"task: got {settings.task}, but no prompt of {settings.prompts!r} has a known answer "
            "(a line #### 18 in it); expected GSM8K, or task= to score none"
        )
    return prompts, {"prompts": len(every) - len(kept), "of": len(every), "context": pair.context}


def settings_part(settings: Evaluation, prompts: int) -> Values:
    told = {key: getattr(settings, key) for key in REPORT_KEYS if hasattr(settings, key)}
    return told | {
        "schema": 1,
        "batch": settings.batch_size,
        "lossless": not settings.lossy,  # every rule in RULES is, without a mask
        "lossy": str(settings.decoding.acceptance or ""),
        "threads": torch.get_num_threads(),
        "stop": list(settings.stop),
        "attention": settings.backend,
        "n_prompts": prompts,
        "prompts": f"{settings.prompts} ({settings.split})",
        "machine": machine(settings.device.partition(":")[0]),
        "versions": versions(),
        "commit": git_commit(),
        "command": command_line(),
    }


def acceptance_part(settings: Evaluation, pair: Loaded, name: str, plain: Arm) -> Values:
    """alpha and coupled acceptance, teacher-forced on the target's answers; None without a q, or
    with one that depends on earlier answers. Of heads, which guess worse the further ahead, they
    are those of the first token drafted.
    """
    drafter = pair.drafters[name]
    if drafter.remembers or not drafter.samples:
        return dict(NO_ALPHA)
    runner = pair.decoder(settings, None).runner
    rows = teacher_forced(runner, drafter, plain.completions, settings.params)
    by_prompt = [[0.0, 0] for _ in plain.questions]
    for answer, row in zip(plain.completions, rows, strict=True):
        by_prompt[answer.index][0] += row.alpha
        by_prompt[answer.index][1] += row.positions
    overlap, positions = zip(*by_prompt, strict=True)
    return {
        "alpha": sum(overlap) / sum(positions),
        # Sums of shares may round to more than all.
        "alpha_interval": [min(1.0, end) for end in metrics.ratio_interval(overlap, positions)],
        "coupled_acceptance": sum(row.coupled for row in rows) / sum(positions),
        "alpha_by_prompt": by_prompt,
    }


def exactness_part(
    settings: Evaluation, exact: Loaded, name: str, proofs: Arms, timed: Arms
) -> Values:
    """The fp32 verdict, and where the answers in the speed dtype part ways with plain decoding,
    both only with `proofs`; the verdict of the same shapes where asked for. exact: the pair in
    fp32, without proofs in the speed dtype.
    """
    report: Values = {"identical": None, "identical_same_shape": None}
    found: list[AnswerDifference] = []

    def compare(plain: Arm, spec: Arm, dtype: str, baseline: str = "native") -> Values:
        want, got = plain.completions, spec.completions
        kind = {"dtype": dtype, "baseline": baseline}
        vocab = vocab_size(exact.tokenizer)
        new = divergences(want, got, exact.target, settings.params, vocab_size=vocab, **kind)
        found.extend(new)
        return verdict(new, len(want), **kind)

    if settings.comparable and proofs:
        report["identical"] = compare(proofs[None], proofs[name], "float32")
    if settings.baseline == "same-shape":
        shapes = timed[f"{name}: {settings.baseline}"]
        report["identical_same_shape"] = compare(shapes, timed[name], settings.dtype, "same-shape")
    if settings.comparable and proofs and settings.dtype != "float32":
        compare(timed[None], timed[name], settings.dtype)
    return report | {"divergences": [difference.model_dump() for difference in found]}


def tau_by_rule(
    settings: Evaluation, pair: Loaded, name: str, plain: Arm, spec: Arm
) -> dict[str, float] | None:
    """tau under coupled and under block acceptance, which differ above temperature 0: of chains of
    a fixed depth, or of a policy whose choices no other rule allows.
    """
    drafter, how = pair.drafters[name], pair.decoding[name]
    coupled = make_policy(how.policy, how.plan).reads_drawn
    unlike = settings.params.greedy or settings.lossy or not how.plan.is_chain or coupled
    if unlike or drafter.remembers or not drafter.samples:
        return None
    taus = {settings.rule: metrics.block_efficiency(spec.counters)}
    for rule in sorted({"coupled", "block"} - {settings.rule}):
        decoder = pair.decoder(settings, name, rule=rule, batch_size=max(8, settings.batch_size))
        asked, numbers = zip(*((c.prompt_tokens, c.index) for c in plain.completions), strict=True)
        done = decoder.generate(asked, settings.params, indices=numbers)
        taus[rule] = metrics.block_efficiency([c.counters for c in done])
    return taus


def example(tokenizer: PreTrainedTokenizerBase, first: Completion) -> Values:
    """An answer, token by token: whether each came from the draft."""
    drafted = zip(first.tokens, first.accepted, strict=True)
    pieces = [[tokenizer.decode([token]), from_draft] for token, from_draft in drafted]
    return {"prompt": tokenizer.decode(first.prompt_tokens), "pieces": pieces}
