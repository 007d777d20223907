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
from functools import partial
from typing import Any

import torch
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

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
from draftsmith.decode.evaluate.arms import Arm, Arms, Evaluation, Loaded, load, prove, time_arms
from draftsmith.decode.evaluate.teacher_forced import teacher_forced
from draftsmith.decode.prompts.prompts import Prompt, load_prompts, spread
from draftsmith.decode.report.schema import AnswerDifference, Report
from draftsmith.models.disk.provenance import command_line, git_commit, versions
from draftsmith.models.tokenizer import vocab_size

Values = dict[str, Any]  # of a report, or a part of it


def evaluate(settings: Evaluation, drafters: dict[str, str]) -> dict[str, Values]:
    """The report of each drafter, by its name in `drafters` (name -> folder or "ngram"). ValueError
    for whatever does not load or fit; see `load_target`, `open_drafter`, `load_prompts`.
    """
    started = time.perf_counter()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    pair = load(settings, drafters, settings.dtype)
    prompts, skipped = choose_prompts(settings, pair)
    with Progress(transient=True) as progress:
        groups = -(-len(prompts) // settings.batch_size)
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
            report = settings_part(settings, len(prompts))
            report["drafter"] = {"kind": pair.drafters[name].kind, "path": path}
            report |= speed.speed_part(settings, pair, name, timed)
            plain, spec = timed[None], timed[name]
            report |= speed.by_category(prompts, plain, spec, settings.batch_size)
            # Tau never stands alone where the answers may differ from the target's own.
            report["task"] = exact_match(prompts, plain.questions, spec.questions)
            same = agreement(plain.questions, spec.questions) if settings.lossy else None
            report["agreement"] = same
            report["rules"] = tau_by_rule(settings, pair, name, plain, report["tau"])
            report["skipped"] = skipped
            report["example"] = example(pair.tokenizer, timed[name].completions[0])
            report["advice"] = None
            if settings.advice:
                bar = progress.add_task("the advised depth", total=groups, visible=False)
                tick = partial(progress.update, bar, advance=1, visible=True)
                report["advice"] = advise(settings, pair, name, prompts, timed, tick)
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
            report |= acceptance_part(settings, pair, name, proofs[None])
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
    told = {key: getattr(settings, key) for key in Report._fields if hasattr(settings, key)}
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
        "versions": versions(),
        "commit": git_commit(),
        "command": command_line(),
    }


def acceptance_part(settings: Evaluation, pair: Loaded, name: str, plain: Arm) -> Values:
    """alpha and coupled acceptance, teacher-forced on the target's answers; None without a q. Of
    heads, which guess worse the further ahead, they are those of the first token drafted.
    """
    drafter = pair.drafters[name]
    if not drafter.samples:
        return dict.fromkeys(("alpha", "alpha_interval", "coupled_acceptance"))
    runner = pair.decoder(settings, None).runner
    rows = teacher_forced(runner, drafter, plain.completions, settings.params)
    by_prompt = [[0.0, 0] for _ in plain.questions]
    for answer, row in zip(plain.completions, rows, strict=True):
        by_prompt[answer.index][0] += row.alpha
        by_prompt[answer.index][1] += row.positions
    overlap, positions = zip(*by_prompt, strict=True)
    return {
        "alpha": sum(overlap) / sum(positions),
        "alpha_interval": metrics.ratio_interval(overlap, positions),
        "coupled_acceptance": sum(row.coupled for row in rows) / sum(positions),
        "alpha_by_prompt": by_prompt,
    }


def exactness_part(
    settings: Evaluation, exact: Loaded, name: str, proofs: Arms, timed: Arms
) -> Values:
    """The fp32 verdict, that of the same shapes where asked for, and where the answers in the speed
    dtype part ways with plain decoding.
    """
    report: Values = {"identical": None, "identical_same_shape": None}
    found: list[AnswerDifference] = []

    def compare(plain: Arm, spec: Arm, dtype: str, baseline: str = "native") -> Values:
        want, got = plain.completions, spec.completions
        kind = {"dtype": dtype, "baseline": baseline}
        size = vocab_size(exact.tokenizer)
        new = divergences(want, got, exact.target, settings.params, vocab_size=size, **kind)
        found.extend(new)
        return verdict(new, len(want), **kind)

    if settings.comparable and settings.identity:
        report["identical"] = compare(proofs[None], proofs[name], "float32")
    if settings.baseline == "same-shape":
        shapes = timed[f"{name}: {settings.baseline}"]
        report["identical_same_shape"] = compare(shapes, timed[name], settings.dtype, "same-shape")
    if settings.comparable and settings.dtype != "float32":
        compare(timed[None], timed[name], settings.dtype)
    return report | {"divergences": [difference._asdict() for difference in found]}


def tau_by_rule(
    settings: Evaluation, pair: Loaded, name: str, plain: Arm, tau: float
) -> dict[str, float] | None:
    """tau under coupled and under block acceptance, which differ above temperature 0: of chains."""
    unlike = settings.params.greedy or settings.lossy or settings.tree != "chain"
    if unlike or not pair.drafters[name].samples:
        return None
    taus = {settings.rule: tau}
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
