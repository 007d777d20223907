"""Plain and speculative decoding in turns, in one process: what a drafter is worth.

    draftsmith evaluate target=TARGET drafter=DRAFTER prompts=prompts.jsonl temperature=1

Speed is measured in `dtype` (bf16), with plain decoding and every drafter taking turns on each
group of prompts, in an order that rotates, after a warm-up. Identity is proven in fp32 on the same
prompts, by models that are loaded once the others are gone. Alpha is taken where the target's own
fp32 answers lead. Several drafters (`drafter=a,b,ngram`) share the plain runs, and each writes its
own folder.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from draftsmith.decode.engine.request import Completion
from draftsmith.decode.evaluate import metrics, speed
from draftsmith.decode.evaluate.arms import (
    Arm,
    Arms,
    Evaluation,
    Loaded,
    fits,
    load,
    prove,
    same_shape,
    time_arms,
)
from draftsmith.decode.evaluate.exactness import FirstDifference, divergences, verdict
from draftsmith.decode.evaluate.tasks import agreement, exact_match, known_answer
from draftsmith.decode.evaluate.teacher_forced import teacher_forced
from draftsmith.decode.prompts.prompts import Prompt, load_prompts, spread
from draftsmith.models.disk.provenance import command_line, git_commit, versions
from draftsmith.models.tokenizer import vocab_size

Report = dict[str, Any]


def evaluate(settings: Evaluation, drafters: dict[str, str]) -> dict[str, Report]:
    """The report of each drafter, by its name in `drafters` (name -> folder or "ngram"). ValueError
    for whatever does not load or fit; see `load_target`, `open_drafter`, `load_prompts`.
    """
    started = time.perf_counter()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    pair = load(settings, drafters, settings.dtype)
    prompts, skipped = choose_prompts(settings, pair)
    with Progress(transient=True) as progress:
        groups = -(-len(prompts) // settings.batch)
        bar = progress.add_task(f"decoding in turns ({settings.dtype})", total=groups)
        timed = time_arms(settings, pair, prompts, lambda: progress.advance(bar))
        if not sum(timed[None].tokens):
            raise ValueError(
                "every answer ended with its first token: nothing to measure; look at the prompts, "
                "or say ignore_eos=true"
            )
        asked = sum(max(1, len(prompt.turns)) for prompt in prompts)
        skipped["turns"] = asked - len(timed[None].completions)  # no room in the context
        reports = {}
        for name, path in drafters.items():
            report = settings_part(settings, name, path, pair, prompts)
            report |= speed.speed_part(settings, pair, name, timed)
            report |= answers_part(settings, prompts, timed[None], timed[name])
            report["rules"] = tau_by_rule(settings, pair, name, timed[None], report["tau"])
            report["skipped"] = skipped
            report["example"] = example(pair.tokenizer, prompts, timed[name])
            reports[name] = report
        if settings.dtype != "float32":
            del pair  # before its like in fp32 is loaded: an 8B target in both would be 48 GB
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            pair = load(settings, drafters, "float32")
        bar = progress.add_task("the same in float32", total=1)
        proofs = prove(settings, pair, prompts, lambda: progress.advance(bar))
        for name, report in reports.items():
            report |= acceptance_part(settings, pair, name, proofs[None].completions)
            report |= exactness_part(settings, pair, name, proofs, timed)
            report["seconds"] = time.perf_counter() - started
    return reports


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
    kept = [prompt for prompt in every if fits(prompt.tokens, settings, pair)]
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


def settings_part(
    settings: Evaluation, name: str, path: str, pair: Loaded, prompts: Sequence[Prompt]
) -> Report:
    drafter = pair.drafters[name]
    return {
        "schema": 1,
        "target": settings.target,
        "drafter": {"kind": drafter.kind, "path": path},
        "rule": settings.rule,
        "lossless": not settings.lossy,  # every rule in RULES is, without a mask
        "lossy": str(settings.decoding.acceptance or ""),
        "device": settings.device,
        "dtype": settings.dtype,
        "threads": torch.get_num_threads(),
        "batch": settings.batch,
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "min_p": settings.min_p,
        "stop": list(settings.stop),
        "seed": settings.seed,
        "policy": settings.policy,
        "tree": settings.tree,
        "attention": settings.backend,
        "max_new_tokens": settings.max_new_tokens,
        "n_prompts": len(prompts),
        "prompts": f"{settings.prompts} ({settings.split})",
        "versions": versions(),
        "commit": git_commit(),
        "command": command_line(),
    }


def answers_part(settings: Evaluation, prompts: Sequence[Prompt], plain: Arm, spec: Arm) -> Report:
    """By category, and how good the answers are where that may differ from the target's own."""
    firsts = [[turns[0] for turns in arm.questions] for arm in (plain, spec)]
    return {
        "categories": speed.by_category(prompts, plain, spec, settings.batch),
        "specbench": speed.specbench(prompts, plain, spec, settings.batch),
        "task": exact_match(prompts, *firsts),
        "agreement": agreement(plain.questions, spec.questions) if settings.lossy else None,
    }


def acceptance_part(
    settings: Evaluation, pair: Loaded, name: str, plain: list[Completion]
) -> dict[str, Any]:
    """alpha and coupled acceptance, teacher-forced on the target's answers; None without a q. Of
    heads, which guess worse the further ahead, they are those of the first token drafted.
    """
    drafter = pair.drafters[name]
    if not drafter.samples:
        return {"alpha": None, "alpha_interval": None, "coupled_acceptance": None}
    runner = pair.decoder(settings, None).runner
    rows = teacher_forced(runner, drafter, plain, settings.params)
    prompts = 1 + max(answer.index for answer in plain)
    overlap, positions = [0.0] * prompts, [0] * prompts
    for answer, row in zip(plain, rows, strict=True):
        overlap[answer.index] += row.alpha
        positions[answer.index] += row.positions
    return {
        "alpha": sum(overlap) / sum(positions),
        "alpha_interval": metrics.ratio_interval(overlap, positions),
        "coupled_acceptance": sum(row.coupled for row in rows) / sum(positions),
        "alpha_by_prompt": [list(pair) for pair in zip(overlap, positions, strict=True)],
    }


def exactness_part(
    settings: Evaluation, exact: Loaded, name: str, proofs: Arms, timed: Arms
) -> Report:
    """The fp32 verdict, that of the same shapes where asked for, and where the answers in the speed
    dtype part ways with plain decoding.
    """
    report: Report = {"identical": None, "identical_same_shape": None, "divergences": []}
    if not settings.comparable:
        return report
    found: list[FirstDifference] = []

    def compare(plain: Arm, spec: Arm, dtype: str, baseline: str) -> dict[str, Any]:
        want, got = plain.completions, spec.completions
        kind = {"dtype": dtype, "baseline": baseline}
        size = vocab_size(exact.tokenizer)
        new = divergences(want, got, exact.target, settings.params, vocab_size=size, **kind)
        found.extend(new)
        return verdict(new, len(want), **kind)

    if settings.identity:
        report["identical"] = compare(proofs[None], proofs[name], "float32", "native")
    if settings.baseline == "same-shape":
        report["identical_same_shape"] = compare(
            timed[same_shape(name)], timed[name], settings.dtype, "same-shape"
        )
    if settings.dtype != "float32":
        compare(timed[None], timed[name], settings.dtype, "native")
    return report | {"divergences": [asdict(difference) for difference in found]}


def tau_by_rule(
    settings: Evaluation, pair: Loaded, name: str, plain: Arm, tau: float
) -> dict[str, float] | None:
    """tau of the same chain under coupled and under block acceptance, which differ above
    temperature 0.
    """
    unlike = settings.params.greedy or settings.lossy or settings.tree != "chain"
    if unlike or not pair.drafters[name].samples:
        return None
    taus = {settings.rule: tau}
    for rule in sorted({"coupled", "block"} - {settings.rule}):
        decoder = pair.decoder(settings, name, rule=rule, batch_size=max(8, settings.batch))
        asked, numbers = zip(*((c.prompt_tokens, c.index) for c in plain.completions), strict=True)
        done = decoder.generate(asked, settings.params, indices=numbers)
        taus[rule] = metrics.block_efficiency([c.counters for c in done])
    return taus


def example(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], spec: Arm
) -> dict[str, Any]:
    """The first answer, token by token: whether each came from the draft."""
    first = spec.completions[0]
    drafted = zip(first.tokens, first.accepted, strict=True)
    pieces = [[tokenizer.decode([token]), from_draft] for token, from_draft in drafted]
    return {"prompt": tokenizer.decode(prompts[0].tokens), "pieces": pieces}
